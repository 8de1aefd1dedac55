"""Every view shows the same state of a job: `ls`, `queue`, `history`, `status`, the page and the metrics."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from page_world import PageWorld
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from submitted_jobs import put_submission, submission_by

from adaptdl_elastic.autoscaler.cli import Place, Where, adaptdl
from adaptdl_elastic.autoscaler.commands.tables import read
from adaptdl_elastic.autoscaler.diagnostics.prometheus import CoordinatorMetrics
from adaptdl_elastic.autoscaler.diagnostics.rows import ENDED_STATES, LOST, STATES, WAITING_STATES
from adaptdl_elastic.autoscaler.web.overview import overview
from adaptdl_elastic.rendezvous.schema.records import JobState, encode
from adaptdl_elastic.rendezvous.schema.submissions import Cancellation, ServiceRecord, Signed
from adaptdl_elastic.rendezvous.services.submitted import SubmissionReader

States = dict[str, str]
"""The state of each job that a view shows, by job."""


def small_world(*states: str) -> PageWorld:
    """Return a cluster with a submitted job in each of these states, whose name is that state."""
    world = PageWorld()
    store, keys = world.store, world.keys
    store.put(keys.service("n0"), encode(ServiceRecord("n0", "127.0.0.1", 1, 4)))
    for number, state in enumerate(states):
        asked = submission_by("eve", state, command=("t.py",), created=number + 1.0)
        asked = replace(asked, min_replicas=9, max_replicas=9) if state == "queued" else asked
        put_submission(store, keys, asked)
        if state in ("queued", "starting"):
            continue
        said = JobState.RUNNING if state in (LOST, "cancelled") else JobState(state)
        world.job(state, said, "why")
        if state in ("pending", "running", "stopping"):
            world.node("n0", state)
        if state == "cancelled":
            wish = Cancellation(state, "eve", submitted=asked.created)
            store.put(keys.cancellation(state), encode(Signed(encode(wish), "eve", "-")))
    return world


def views(world: PageWorld, monkeypatch: pytest.MonkeyPatch) -> dict[str, States]:
    """Return what each view of a person shows."""
    context = SimpleNamespace(cluster_id="", name="team")
    place = Place("", world.keys.cluster, context=context)  # type: ignore[arg-type]
    monkeypatch.setattr(Where, "places", lambda self, job=None: [place])
    monkeypatch.setattr(Where, "open", lambda self, place: nullcontext(world.store))

    def run(*command: str) -> object:
        done = CliRunner().invoke(adaptdl, [*command, "--json"], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return json.loads(done.output)

    def listed(*command: str) -> States:
        return {row["job"]: row["state"] for row in run(*command)}  # type: ignore[attr-defined]

    submitted = SubmissionReader(world.store, world.keys, "").read(None)
    page = overview(read(world.store, world.keys), submitted)["jobs"]
    everything = listed("ls", "--all")
    return {
        "ls --all": everything,
        "ls": listed("ls"),
        "queue": listed("queue"),
        "history": listed("history"),
        "page": {job: row["state"] for job, row in page.items()},
        "status": {job: run("status", job)["state"] for job in everything},  # type: ignore[index]
    }


def counted(world: PageWorld) -> set[str]:
    """Return the states in which the leader's metrics count a job."""
    registry, reader = CollectorRegistry(), SubmissionReader(world.store, world.keys, "")
    metrics = CoordinatorMetrics(registry)
    metrics.read_submitted = lambda: reader.read(None)
    metrics.leading(True)
    metrics.follows(read(world.store, world.keys))
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        sample.labels["state"]
        for family in families
        if family.name == "adaptdl_jobs"
        for sample in family.samples
        if sample.value
    }


def agree(shown: dict[str, States]) -> None:
    """Check that no two views show a job that both show in different states."""
    for one, other in combinations(shown, 2):
        both = shown[one].keys() & shown[other].keys()
        assert {job: shown[one][job] for job in both} == {job: shown[other][job] for job in both}, (
            one,
            other,
        )


def test_all_views_show_each_state_as_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    states = tuple(state for state in STATES if state != LOST)
    world = small_world(*states)
    shown = views(world, monkeypatch)
    agree(shown)
    for view in ("ls --all", "status", "page"):
        assert shown[view] == {state: state for state in states}, view
    assert set(shown["ls"]) == set(states) - set(ENDED_STATES)
    assert set(shown["queue"]) == set(WAITING_STATES)
    assert set(shown["history"]) == set(ENDED_STATES)
    assert counted(world) == set(states)


def test_all_views_show_a_job_without_coordinator_and_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    world = small_world(LOST, "done")
    world.store.delete(world.keys.coordinator_leader)
    shown = views(world, monkeypatch)
    agree(shown)
    assert shown["ls --all"] == shown["status"] == shown["page"] == {LOST: LOST, "done": "done"}
    assert set(shown["ls"]) == {LOST}
