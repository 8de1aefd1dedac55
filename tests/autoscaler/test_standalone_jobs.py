"""Commands that find the stores of standalone jobs by their notes; the jobs' records are written by hand."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from adaptdl_elastic.autoscaler.cli import Where, adaptdl
from adaptdl_elastic.protocol import hints as sched_hints
from adaptdl_elastic.protocol.hints import JobHints
from adaptdl_elastic.rendezvous.local import runtime_file
from adaptdl_elastic.rendezvous.local.runtime_file import RuntimeFile
from adaptdl_elastic.rendezvous.local.store_server import LocalServer
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import (
    CheckpointRecord,
    DrainRequest,
    JobSpec,
    JobState,
    JobStatus,
    LeaderRecord,
    NodeRecord,
    encode,
)

KEYS = Keys()


class Jobs:
    """The standalone jobs of a user."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.servers: dict[str, LocalServer] = {}

    def start(self, name: str, state: JobState = JobState.RUNNING, **more: Any) -> LocalServer:
        """A job as its agent and its coordinator have written it, with a store of its own or in `server`."""
        node, server = more.get("node", "host"), more.get("server")
        server = server or self._stack.enter_context(LocalServer())
        self.servers[name] = server
        store = server.store
        store.put(KEYS.node(node, name), encode(NodeRecord(node, name, "r", "a", "127.0.0.1", 2)))
        store.put(KEYS.job(name, "spec"), encode(JobSpec(name, "r", created=1000.0)))
        status = JobStatus(name, "r", state, reason=f"why {name}", updated=2000.0, prediction_error=-0.2)
        store.put(KEYS.job(name, "status"), encode(status))
        store.put(KEYS.coordinator_leader, encode(LeaderRecord("c")))
        event = {"time": 0, "event": "state", "job": name}
        store.put(f"{KEYS.events}{len(self.servers):013d}-abc", json.dumps(event))
        runtime_file.write(RuntimeFile(server.endpoint, KEYS.cluster, name, os.getpid()))
        return server

    def run(self, *arguments: str) -> Result:
        return CliRunner().invoke(adaptdl, arguments)

    def says(self, *arguments: str) -> str:
        result = self.run(*arguments)
        assert result.exit_code == 0, result.output
        return result.output

    def complains(self, *arguments: str) -> str:
        """The one line of a command that fails."""
        result = self.run(*arguments)
        assert result.exit_code != 0
        (line,) = result.output.splitlines()
        return line


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Jobs]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("ADAPTDL_ETCD", raising=False)
    with ExitStack() as stack:
        yield Jobs(stack)


def test_jobs_that_share_a_store_are_listed_once(jobs: Jobs) -> None:
    """As the trials of Ray Tune on one node do; each is found by its name."""
    jobs.start("trial-1", server=jobs.start("trial-0"))
    assert [row["job"] for row in json.loads(jobs.says("ls", "--json"))] == ["trial-0", "trial-1"]
    assert json.loads(jobs.says("status", "trial-1", "--json"))["reason"] == "why trial-1"


def test_all_jobs_are_listed_and_each_is_found_by_its_name(jobs: Jobs) -> None:
    jobs.start("second")
    jobs.start("first")
    assert [row["job"] for row in json.loads(jobs.says("ls", "--json"))] == ["first", "second"]
    for name in ("first", "second"):
        assert json.loads(jobs.says("status", name, "--json"))["reason"] == f"why {name}"
        assert "off by" not in jobs.says("status", name)
        hints = JobHints(name, 0, 1, 1, 8, 8, 8, goodput=80.0)
        jobs.servers[name].store.put(KEYS.job(name, "hints"), sched_hints.encode(hints))
        assert ", off by -20%); " in jobs.says("status", name)
        assert jobs.says("stop", name) == f"{name} is stopping\n"
        assert jobs.servers[name].store.get(KEYS.job(name, "request")) is not None
    assert [line.split()[-1] for line in jobs.says("events").splitlines()] == ["job=second", "job=first"]
    assert [line.split()[-1] for line in jobs.says("events", "--tail=1").splitlines()] == ["job=first"]
    assert [row["jobs"] for row in json.loads(jobs.says("nodes", "--json"))] == [{"first": 0}, {"second": 0}]
    assert "no job 'third' runs standalone on this machine; those that do: first, second" in jobs.complains(
        "status", "third"
    )


def test_a_node_of_several_jobs_is_not_drained_for_one_of_them_by_guess(jobs: Jobs) -> None:
    jobs.start("first")
    jobs.start("second")
    line = jobs.complains("drain", "host")
    assert "2 standalone jobs run on this machine: first, second; say which with --job NAME" in line
    assert jobs.says("drain", "host", "--job", "second") == "host is being drained\n"
    drained = {name: server.store.get(KEYS.drain("host")) for name, server in jobs.servers.items()}
    assert [name for name, request in drained.items() if request is not None] == ["second"]


def test_a_drain_is_cancelled_where_it_was_asked_for(jobs: Jobs) -> None:
    jobs.start("first")
    asked = jobs.start("second", node="other").store
    asked.delete(KEYS.node("other", "second"))  # its agent has left
    asked.put(KEYS.drain("other"), encode(DrainRequest("other", "why")))
    assert jobs.says("drain", "other", "--cancel", "--job", "second") == "other may be used again\n"
    assert asked.get(KEYS.drain("other")) is None


def test_a_command_for_one_store_asks_which_of_two_is_meant(jobs: Jobs) -> None:
    jobs.start("first")
    jobs.start("second")
    said = jobs.run("doctor").output
    assert "2 standalone jobs run on this machine: first, second; say which with --job NAME" in said
    assert "in the memory of a standalone job's agent" in jobs.run("doctor", "--job", "first").output
    line = jobs.complains("coordinator")
    assert "2 standalone jobs run on this machine: first, second; give --etcd HOST:PORT of an etcd" in line
    line = jobs.complains("drain", "host", "--job", "first", "--etcd", "127.0.0.1:1")
    assert "--job is for standalone jobs: leave it away where an etcd is given" in line


def test_a_job_that_ends_meanwhile_or_hangs_hides_no_other(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs.start("ended")
    jobs.start("hangs")
    jobs.start("runs")
    jobs.servers["ended"].close()  # its note is still there
    options = Where.options
    monkeypatch.setattr(
        Where, "options", lambda *of: replace(options(*of), timeout=0.3 if of[1].job == "hangs" else 100.0)
    )
    with jobs.servers["hangs"].store.shared.changed:
        result = jobs.run("ls", "--json")
    assert [row["job"] for row in json.loads(result.stdout)] == ["runs"]
    (line,) = result.stderr.splitlines()
    assert line.startswith("adaptdl: hangs: ")
    assert line.endswith("does not answer")


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.STOPPING])
def test_a_job_of_which_nothing_lives_is_lost(jobs: Jobs, state: JobState) -> None:
    store = jobs.start("mnist", state=state).store
    assert state.value in jobs.says("ls")
    store.delete(KEYS.node("host", "mnist"))
    assert state.value in jobs.says("ls")  # the coordinator says what there is to say
    store.delete(KEYS.coordinator_leader)
    last = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(2000.0))
    why = f"no agent answers (last heard of at {last}); the same command starts it again"
    row = json.loads(jobs.says("ls", "--json"))[0]
    shown = row["state"], row["replicas"], row["nodes"], row["placements"], row["reason"]
    assert shown == ("lost", 0, 0, {}, why)
    assert "size          none\n" in jobs.says("status", "mnist")
    for command in (["scale", "mnist", "--replicas=1"], ["stop", "mnist"], ["checkpoint", "mnist"]):
        assert jobs.complains(*command) == f"adaptdl: mnist cannot be asked for anything: {why}"
    assert jobs.complains("explain", "mnist") == f"adaptdl: mnist has nothing: {why}"
    store.put(KEYS.job("mnist", "checkpoint"), encode(CheckpointRecord("1", "/", time=3000.0)))
    last = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(3000.0))
    assert f"(last heard of at {last}); the same command goes on from its last checkpoint" in jobs.says("ls")


@pytest.mark.parametrize("state", [JobState.PENDING, JobState.DONE])
def test_a_job_that_waits_for_nodes_or_has_ended_is_not_lost_without_any(jobs: Jobs, state: JobState) -> None:
    store = jobs.start("mnist", state=state).store
    store.delete(KEYS.node("host", "mnist"))
    store.delete(KEYS.coordinator_leader)
    (row,) = json.loads(jobs.says("ls", "--all", "--json"))
    assert row["state"] == state.value
    assert ("the same command starts it again" in row["reason"]) is (state is JobState.PENDING)


def test_lists_of_jobs_that_wait_and_that_have_ended(jobs: Jobs) -> None:
    for name, created in (("later", 900.0), ("first", 500.0)):
        store = jobs.start(name, state=JobState.PENDING).store
        store.put(KEYS.job(name, "spec"), encode(JobSpec(name, "r", min_replicas=3, created=created)))
    store = jobs.start("over", state=JobState.DONE).store
    status = JobStatus("over", "r", JobState.DONE, reason="it is done", started=1000.0, ended=1090.0)
    store.put(KEYS.job("over", "status"), encode(status))
    jobs.start("runs")
    head, *waiting = jobs.says("queue").splitlines()
    assert head.split() == ["JOB", "STATE", "WAITS", "FOR", "NEEDS", "WHY"]
    assert [line.split()[0] for line in waiting] == ["first", "later"]
    assert "why first" in waiting[0]
    _, line = jobs.says("history").splitlines()
    assert line.startswith("over  done")
    assert "1 min 30 s" in line
    assert [row["job"] for row in json.loads(jobs.says("history", "--json"))] == ["over"]
    assert {line.split()[0] for line in jobs.says("ls").splitlines()} == {"JOB", "first", "later", "runs"}
