"""When a node is registered for a job, when its agent starts, and when neither is to be."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from polling import until
from submitted_jobs import submission_by

from adaptdl_elastic.agent.machine.kept_process import KeptProcess
from adaptdl_elastic.agent.service.agents import Agents
from adaptdl_elastic.agent.service.blobs import Blobs
from adaptdl_elastic.agent.service.decisions import MOST_FAILURES, AgentState
from adaptdl_elastic.agent.service.server_forker import ServerForker
from adaptdl_elastic.agent.service.stand_in import Membership
from adaptdl_elastic.protocol.environment import FORK_SERVER, SECRET, STAND_IN
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import (
    Cause,
    JobSpec,
    JobStatus,
    NodeRecord,
    Placement,
    Plan,
    Transition,
    decode,
    encode,
)
from adaptdl_elastic.rendezvous.schema.records import JobState as State
from adaptdl_elastic.rendezvous.services.admission import JobState, Request
from adaptdl_elastic.rendezvous.services.service_client import ServiceClient
from adaptdl_elastic.rendezvous.services.service_config import ServiceConfig, ServiceDirectory
from adaptdl_elastic.rendezvous.store.base import Store, read_record
from adaptdl_elastic.rendezvous.store.memory import MemoryStore

KEYS = Keys("lab")
REQUEST = Request(
    submission_by("alice", created=1.0),
    None,
    JobState(),
)


class Node:
    """The agents of a node whose files are there already, and its store."""

    def __init__(self, folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        config = ServiceConfig("lab", "id", "n1", "127.0.0.1", "https://127.0.0.1:1")
        client = ServiceClient(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        directory = ServiceDirectory(folder)
        self.store, self.changed, self.fetched = store, threading.Event(), threading.Event()
        self.given: dict[str, str] = {}
        self.children: list[subprocess.Popen[bytes]] = []
        self.environments: list[dict[str, str]] = []
        work = directory.work(REQUEST.submission.folder)
        work.mkdir(parents=True)
        (work / "train.py").touch()

        def prepare(*_: object) -> tuple[dict[str, str], dict[str, str]]:
            self.fetched.wait(60)
            return self.given, {SECRET: "secret", **self.given}

        begin = KeptProcess.start

        def start(_: object, *where: Any, **how: object) -> KeptProcess:
            self.environments.append(dict(where[-1]))
            process = begin(["sleep", "600"], *where)
            assert process.child is not None
            self.children.append(process.child)
            return process

        monkeypatch.setattr(Agents, "fetch", prepare)
        monkeypatch.setattr(KeptProcess, "start", start)
        monkeypatch.setattr(ServerForker, "fork", lambda *what: socket.socket())
        self.agents = Agents(config, directory, 2, Blobs(folder / "blobs"), client, self.changed.set)
        self.membership = Membership(store, store.lease(60.0))
        self.fetched.set()

    @property
    def record(self) -> NodeRecord | None:
        return read_record(NodeRecord, self.store.get(KEYS.node("n1", "job")))

    @property
    def state(self) -> AgentState:
        return self.agents.states()["job"]

    def review(self, request: Request = REQUEST, number: int = 0) -> None:
        self.agents.review([request], lambda _: number)

    def stands(self) -> NodeRecord:
        """Register the node for the job, and return the registration."""
        self.review()
        self.agents.start(REQUEST, [], self.membership)
        until("it never became so", lambda: self.state.standing)
        found = self.record
        assert found is not None
        return found

    def plan(self, record: NodeRecord) -> None:
        """Let a plan have a replica here."""
        placed = (Placement("n1", 1, record.agent),)
        plan = Plan("job", record.run, 0, placed, Cause.START, Transition.RESTART, "why")
        self.agents.follow(lambda _: plan)

    def gone(self) -> None:
        """Wait until the node is not registered for the job, and no agent runs."""
        until("it never became so", lambda: self.record is None)
        assert not self.state.alive


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    with MemoryStore() as store:
        made = Node(tmp_path, store, monkeypatch)
        yield made
        for child in made.children:
            with suppress(ProcessLookupError):
                child.kill()
            child.wait()


@pytest.mark.processes
def test_a_plan_starts_the_agent_under_the_id_of_the_registration(node: Node) -> None:
    record = node.stands()
    assert node.children == []
    node.plan(replace(record, agent="another"))
    assert node.children == []
    node.plan(record)
    until("it never became so", lambda: node.children)
    assert node.environments[0][STAND_IN] == record.agent
    until("it never became so", lambda: node.agents.running == ["job"])
    assert not node.state.standing
    # it ends before it has taken the registration over
    node.children[0].kill()
    node.children[0].wait()
    until("it never became so", lambda: not node.state.alive)
    node.gone()


def test_a_registration_for_files_that_were_replaced_is_withdrawn(node: Node) -> None:
    record = node.stands()
    mended = replace(REQUEST, submission=replace(REQUEST.submission, bundle="1" * 64, created=2.0))
    node.review(mended)
    node.gone()
    node.plan(record)
    assert node.children == []


@pytest.mark.parametrize("follows", ["as a person has asked", "already"])
def test_a_registration_for_a_run_that_another_follows_is_withdrawn(node: Node, follows: str) -> None:
    record = node.stands()
    spec = decode(JobSpec, node.store.get(KEYS.job("job", "spec")).value)  # type: ignore[union-attr]
    for number in (spec.number, spec.number - 1):
        node.review(number=number)
        assert node.state.standing
    if follows == "already":
        node.review(number=spec.number + 1)
    else:
        node.review(replace(REQUEST, run=JobState(run=record.run, resumed=True)))
    node.gone()


def test_a_node_registers_anew_when_its_devices_change(node: Node) -> None:
    record = node.stands()
    node.agents.renew()
    node.gone()
    assert node.stands().agent != record.agent


@pytest.mark.parametrize("over", [{"cancelled_by": "alice"}, {"run": JobState(state=State.DONE)}])
def test_a_job_that_ends_while_its_files_are_fetched_is_not_registered(
    node: Node, over: dict[str, object]
) -> None:
    node.fetched.clear()
    node.review()
    node.agents.start(REQUEST, [], node.membership)
    node.review(replace(REQUEST, **over))  # type: ignore[arg-type]
    node.fetched.set()
    until("it never became so", lambda: not node.state.alive)
    node.gone()


@pytest.mark.processes
def test_a_job_whose_variables_are_read_early_gets_an_agent_that_registers_itself(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def popen(*given: object, **options: object) -> None:
        raise OSError("enough seen")

    node.given = {"OMP_NUM_THREADS": "2"}
    monkeypatch.setattr(subprocess, "Popen", popen)
    node.review()
    node.agents.start(REQUEST, [], node.membership)
    until("it never became so", lambda: "job" in node.agents.problems)
    assert (node.record, node.children) == (None, [])
    (started,) = node.environments
    assert not {STAND_IN, FORK_SERVER} & started.keys()
    assert started["OMP_NUM_THREADS"] == "2"


def test_only_the_run_that_a_person_has_named_is_followed(node: Node) -> None:
    record = node.stands()
    spec = JobSpec("job", record.run)
    node.agents.withdraw(lambda _: True)
    node.store.delete(KEYS.node("n1", "job"))
    node.store.put(KEYS.job("job", "spec"), encode(spec))
    # the store says that this run has ended, and the request is for an earlier one
    node.store.put(KEYS.job("job", "status"), encode(JobStatus("job", record.run, State.FAILED)))
    late = replace(REQUEST, run=JobState(run="an earlier run", resumed=True))
    node.review(late)
    node.agents.start(late, [], node.membership)
    until("it never became so", lambda: "job" in node.agents.problems)
    assert "has failed" in node.agents.problems["job"]
    assert node.record is None
    assert node.store.get(KEYS.job("job", "spec")).value == encode(spec)  # type: ignore[union-attr]


def test_a_job_that_a_node_has_given_up_is_tried_again_when_it_is_resumed(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # its files are fetched
    shutil.rmtree(ServiceDirectory(tmp_path).work(REQUEST.submission.folder))
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / REQUEST.submission.bundle).write_bytes(b"nonsense")
    for failures in range(1, MOST_FAILURES + 1):
        node.changed.clear()
        node.agents.start(REQUEST, [], node.membership)
        assert node.changed.wait(100)
        assert node.state.failures == failures
        assert node.agents.given_up == (("job",) if failures == MOST_FAILURES else ())
    assert "Not a gzipped file" in node.agents.problems["job"]
    node.agents.forget("job")  # it is stopped
    assert (node.agents.states(), node.agents.problems) == ({}, {})


def test_a_node_that_a_job_is_not_for_is_registered_once_it_is(node: Node, tmp_path: Path) -> None:
    data = tmp_path / "data"
    for changes, why in (
        ({"nodes": ("n2", "n3")}, "--node n2, n3"),
        ({"has": ("/tmp", str(data))}, f"there is no {data} (--has)"),
    ):
        request = replace(REQUEST, submission=replace(REQUEST.submission, **changes))
        node.review(request)
        node.changed.clear()
        node.agents.start(request, [], node.membership)
        assert node.changed.wait(60)
        assert node.agents.unsuited == {"job": why}
        assert node.agents.problems == {}
        assert not node.state.alive
        assert (node.state.failures, node.record) == (0, None)
    data.mkdir()
    node.agents.start(request, [], node.membership)
    until("it never became so", lambda: node.state.standing)
    assert node.agents.unsuited == {}
