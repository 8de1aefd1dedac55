"""What the page shows, as pure functions of a view and of what happened."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
from page_world import HOSTILE, PageWorld, small_world
from submitted_jobs import submission_by

from adaptdl_elastic.autoscaler.cluster_view import View, view_of
from adaptdl_elastic.autoscaler.web.history import MOST_EVENTS, MOST_POINTS, Curve, History
from adaptdl_elastic.autoscaler.web.job_document import job_document
from adaptdl_elastic.autoscaler.web.overview import difference, overview
from adaptdl_elastic.rendezvous.schema.records import DrainRequest, JobState, encode
from adaptdl_elastic.rendezvous.schema.submissions import ServiceRecord
from adaptdl_elastic.rendezvous.services.admission import JobState as RunState
from adaptdl_elastic.rendezvous.services.admission import Request
from adaptdl_elastic.rendezvous.services.submitted import Submitted
from adaptdl_elastic.rendezvous.text import clock


def view_now(world: PageWorld) -> View:
    return view_of(world.keys, world.store.range(world.keys.root), time.monotonic(), time.time())


def test_the_overview_has_jobs_nodes_and_totals() -> None:
    shown = overview(view_now(small_world()), None)
    assert shown["summary"] == {
        "problem": "",
        "leader": "node0",
        "slots": 48,
        "used": 15,
        "running": 3,
        "waiting": 1,
        "hourly_cost": None,
    }
    speech = shown["jobs"]["speech"]
    assert (speech["replicas"], speech["nodes"], speech["loss"]) == (12, 2, 0.83)
    assert shown["jobs"]["llm-finetune"]["reason"].startswith("waits for slots: needs at least 32")
    assert shown["nodes"]["node1"]["jobs"] == {"speech": 4, "resnet50-lr-sweep": 2}
    assert (shown["nodes"]["node0"]["gpu"], shown["nodes"]["node5"]["gpu"]) == (0.9, None)
    assert HOSTILE in shown["jobs"]
    json.dumps(shown, allow_nan=False)


def test_a_submission_that_waits_is_a_job_with_its_reason_and_its_owner() -> None:
    asked = submission_by("alice", "big", min_replicas=9, created=5.0)
    services = {"n0": ServiceRecord("n0", "10.0.0.1", 1, slots=8, gpu_model="H100")}
    submitted = Submitted(services, (Request(asked, None, RunState()),), {})
    shown = overview(view_now(PageWorld()), submitted)
    row = shown["jobs"]["big"]
    assert (row["state"], row["owner"], row["created"]) == ("queued", "alice", 5.0)
    assert row["reason"] == "needs 9 slots, the cluster has 8"
    assert shown["nodes"]["n0"] == {**shown["nodes"]["n0"], "slots": 8, "jobs": {}, "kind": "H100"}
    assert shown["summary"]["waiting"] == 1
    document = job_document(view_now(PageWorld()), History(), row, submitted)
    assert document["can"] == {"scale": False, "stop": False, "cancel": True, "resume": False, "logs": True}


def test_a_job_that_waits_says_which_nodes_cannot_run_it() -> None:
    asked = submission_by("alice", "big")
    service = ServiceRecord("n0", "10.0.0.1", 1, slots=8, problems={"big": "the disk is full"})
    run = RunState(agents=1, state=JobState.PENDING)
    shown = overview(view_now(PageWorld()), Submitted({"n0": service}, (Request(asked, None, run),), {}))
    reason = shown["jobs"]["big"]["reason"]
    assert reason == "the coordinator has not seen it yet; not on n0: the disk is full"


def test_drained_nodes_are_shown_also_when_their_agents_have_left() -> None:
    world, since = small_world(), time.time()
    for node in ("node0", "away"):
        drain = DrainRequest(node, "new disk", created=since, person="bob")
        world.store.put(world.keys.drain(node), encode(drain))
    said = f"drained by bob since {clock(since)} (new disk)"
    services = {"away": ServiceRecord("away", "10.0.0.9", 1, slots=8)}
    shown = overview(view_now(world), Submitted(services, (), {}))
    assert [shown["nodes"][node]["state"] for node in ("node0", "away", "node1")] == [said, said, "ok"]
    assert shown["nodes"]["away"]["slots"] == 8
    reason = shown["jobs"]["llm-finetune"]["reason"]
    assert reason.endswith(f"; away is {said}; node0 is {said}"), "it waits for slots"


def test_a_page_is_sent_only_the_rows_that_have_changed() -> None:
    world = small_world()
    before = overview(view_now(world), None)
    assert difference(before, overview(view_now(world), None)) is None
    world.job("llm-finetune", JobState.RUNNING, "runs", placements={"node3": 8})
    world.store.delete(world.keys.node("node5", "speech"))
    world.store.delete(world.keys.node("node5", "resnet50-lr-sweep"))
    world.store.delete(f"{world.keys.nodes}node5/{HOSTILE}")
    patch = difference(before, overview(view_now(world), None))
    assert patch is not None
    assert set(patch["jobs"]) == {"llm-finetune"}
    assert patch["nodes"] == {"node5": None}
    assert (patch["summary"]["running"], patch["summary"]["slots"]) == (4, 40)


def test_noise_below_the_fourth_digit_makes_no_update() -> None:
    world = small_world()
    world.report("speech", goodput=1234.52, time=1.0)
    before = overview(view_now(world), None)
    world.report("speech", goodput=1234.6, time=2.0)
    assert difference(before, overview(view_now(world), None)) is None


def test_a_job_s_page_has_its_allocations_and_curves() -> None:
    world, history = small_world(), History()
    for at in (1000.0, 1002.0, 1004.0):
        world.report("speech", time=at, goodput=at, reported={"loss": 0.5})
        history.observe(view_now(world))
    history.observe(view_now(world))  # the same report again
    history.add_events((item.key, item.value) for item in world.store.range(world.keys.events).items)
    view = view_now(world)
    shown = job_document(view, history, overview(view, None)["jobs"]["speech"], None)
    assert [plan["replicas"] for plan in shown["allocations"]] == [1, 2, 4, 8, 12]
    assert shown["curves"]["goodput"] == [(1000.0, 1000.0), (1002.0, 1002.0), (1004.0, 1004.0)]
    assert shown["curves"]["noise"][0][1] == pytest.approx(32 * 0.9 / 0.02)
    assert shown["curves"]["reported loss"][0] == (1000.0, 0.5)
    assert shown["pauses"] == [0.42, 0.38]
    assert shown["can"] == {"scale": True, "stop": True, "cancel": False, "resume": False, "logs": False}
    json.dumps(shown, allow_nan=False)


def test_a_job_that_has_ended_can_be_asked_for_nothing() -> None:
    view = view_now(small_world())
    shown = job_document(view, History(), overview(view, None)["jobs"]["done-yesterday"], None)
    assert not any(shown["can"].values())


@pytest.mark.parametrize(
    ("run", "cancelled_by", "goes_on"),
    [
        (RunState(state=JobState.STOPPED), None, True),
        (RunState(state=JobState.STOPPED, resumed=True), None, False),
        (RunState(state=JobState.STOPPED, forgotten=True), None, False),
        (RunState(state=JobState.STOPPED), "alice", False),
        (RunState(state=JobState.FAILED), None, True),
        (RunState(state=JobState.DONE), None, False),
        (RunState(), None, False),
    ],
)
def test_a_submitted_job_that_was_stopped_can_go_on(
    run: RunState, cancelled_by: str | None, goes_on: bool
) -> None:
    asked = submission_by("alice", "big")
    submitted = Submitted({}, (Request(asked, cancelled_by, run),), {})
    view = view_now(PageWorld())
    row = overview(view, submitted)["jobs"]["big"]
    assert job_document(view, History(), row, submitted)["can"]["resume"] is goes_on


def test_a_curve_keeps_its_ends_in_bounded_memory() -> None:
    curve = Curve()
    for second in range(100_000):
        curve.add(float(second), float(second % 7))
    assert len(curve.points) <= MOST_POINTS
    assert curve.points[0][0] == 0.0
    assert curve.points[-1] == (99_999.0, 99_999 % 7)
    gaps = [b[0] - a[0] for a, b in zip(curve.points[1:-1], curve.points[2:-1], strict=False)]
    assert max(gaps) <= 5 * 100_000 / MOST_POINTS


def test_events_are_bounded_and_what_is_no_event_is_left_out() -> None:
    history = History()
    history.add_events([("k0", "no JSON"), ("k1", "[]"), ("k2", '{"event": "plan"}')])
    assert history.events() == []
    text = json.dumps({"time": 1.0, "event": "state", "job": "a"})
    history.add_events((f"key{index:06d}", text) for index in range(MOST_EVENTS + 5))
    assert len(history.events()) == MOST_EVENTS
    assert len(history.events("b")) == 0


def test_the_curves_of_a_job_are_forgotten_with_the_job() -> None:
    world, history = small_world(), History()
    view = view_now(world)
    history.observe(view)
    assert history.curves("speech")
    history.observe(replace(view, jobs={}))
    assert history.curves("speech") == {}
