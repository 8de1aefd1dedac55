"""A node that is registered for a job without an agent, and the agent that takes the registration over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from submitted_jobs import submission_by

from adaptdl_elastic.agent.service.agents import agent_options, write_spec
from adaptdl_elastic.agent.service.stand_in import Membership, StandIn, StandInError, record_failure
from adaptdl_elastic.agent.taking_part import Found, StoreAccess, take_part
from adaptdl_elastic.agent.terminal.run_options import parse
from adaptdl_elastic.protocol.environment import SECRET, STAND_IN
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import (
    Cause,
    JobSpec,
    NodeRecord,
    Placement,
    Plan,
    Transition,
    decode,
    encode,
)
from adaptdl_elastic.rendezvous.schema.records import JobState as State
from adaptdl_elastic.rendezvous.schema.submissions import Signed, Submission
from adaptdl_elastic.rendezvous.services.admission import JobState, Request
from adaptdl_elastic.rendezvous.services.service_config import ServiceConfig
from adaptdl_elastic.rendezvous.services.submitted import SubmissionReader
from adaptdl_elastic.rendezvous.store.base import KeyValue, Store, StoreUnavailableError
from adaptdl_elastic.rendezvous.store.memory import MemoryStore

CONFIG = ServiceConfig("lab", "id", "n1", "127.0.0.1", "https://127.0.0.1:1")
KEYS = Keys("lab")
SUBMISSION = submission_by("alice", command=("train.py", "--x"), min_replicas=1, max_replicas=4)
KEY = KEYS.node("n1", "job")


@pytest.fixture
def store() -> Iterator[Store]:
    with MemoryStore() as made:
        yield made


def make(store: Store, folder: Path, submission: Submission = SUBMISSION) -> StandIn:
    work = folder / "work"
    work.mkdir(exist_ok=True)
    (work / "train.py").write_text("pass")
    write_spec(Request(submission, None, JobState()), str(folder / "saved"), folder / "job.spec")
    options = agent_options(CONFIG, 2, folder / "job.spec")
    membership = Membership(store, store.lease(60.0))
    return StandIn(submission, work, {}, options, {SECRET: "secret"}, membership).register()


def take_over(store: Store, folder: Path, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> Found:
    """Do what the agent does that the service starts."""
    monkeypatch.chdir(folder / "work")
    options = parse(stand_in.options, stand_in.environment)
    access = StoreAccess("", store, True, stand_in.environment)
    return take_part(options, "127.0.0.1", access, KEYS, print)


def record(store: Store) -> NodeRecord | None:
    found = store.get(KEY)
    return None if found is None else decode(NodeRecord, found.value, KEY)


def plan(run: str, agent: str, node: str = "n1") -> Plan:
    return Plan("job", run, 0, (Placement(node, 1, agent),), Cause.START, Transition.RESTART, "why")


def test_the_agent_takes_over_the_registration_and_the_run(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = make(store, tmp_path)
    before = record(store)
    assert before is not None
    assert before.slots == 2
    spec = store.get(KEYS.job("job", "spec"))
    assert spec is not None
    assert decode(JobSpec, spec.value).command == ("train.py", "--x")
    found = take_over(store, tmp_path, stand_in, monkeypatch)
    after = record(store)
    assert after is not None
    assert (after.agent, after.run) == (before.agent, before.run)
    assert store.get(KEYS.job("job", "spec")) == spec
    stand_in.membership.lease.revoke()
    assert record(store) is not None  # it vanishes with the agent, not with the service
    assert stand_in.withdraw()
    assert record(store) == after
    found.registration.close()
    assert record(store) is None


def test_only_a_plan_of_this_run_that_names_this_registration_starts_an_agent(
    store: Store, tmp_path: Path
) -> None:
    stand_in = make(store, tmp_path)
    assert stand_in.registration is not None
    me = stand_in.registration.record
    assert stand_in.is_named(plan(me.run, me.agent))
    assert not stand_in.is_named(plan(me.run, "an earlier one"))
    assert not stand_in.is_named(plan("another run", me.agent))
    assert not stand_in.is_named(plan(me.run, me.agent, node="n2"))


def test_an_agent_whose_registration_is_gone_registers_by_itself(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = make(store, tmp_path)
    stand_in.withdraw()
    found = take_over(store, tmp_path, stand_in, monkeypatch)
    there = record(store)
    assert there is not None
    assert there.agent == stand_in.environment[STAND_IN]
    found.registration.close()


def test_why_a_node_cannot_take_part(store: Store, tmp_path: Path) -> None:
    (tmp_path / "saved").write_text("is no folder")
    with pytest.raises(StandInError, match="checkpoints cannot be written"):
        make(store, tmp_path)
    assert record(store) is None


class Deaf(MemoryStore):
    """A store that does not answer while it is away."""

    away = False

    def get(self, key: str) -> KeyValue | None:
        if self.away:
            raise StoreUnavailableError("no answer")
        return super().get(key)


def test_a_registration_that_could_not_be_deleted_is_in_nobodys_way(tmp_path: Path) -> None:
    with Deaf() as store:
        stand_in = make(store, tmp_path)
        store.away = True
        assert not stand_in.withdraw()
        store.away = False
        before = record(store)
        again = make(store, tmp_path)
        after = record(store)
        assert before is not None
        assert after is not None
        assert after.agent not in ("", before.agent)
        assert not stand_in.is_named(plan(after.run, after.agent))
        assert again.withdraw()
        assert stand_in.withdraw()
        assert record(store) is None


@pytest.mark.parametrize("of_another_version", [False, True])
@pytest.mark.parametrize(
    "submission",
    [SUBMISSION, replace(SUBMISSION, command=("x" * 300, ""))],
    ids=["", "long name"],
)
def test_a_job_that_no_node_can_start_is_failed_for_each_of_its_runs(
    store: Store, tmp_path: Path, of_another_version: bool, submission: Submission
) -> None:
    stand_in = make(store, tmp_path)
    stand_in.withdraw()
    store.delete(KEYS.job("job", "spec"))
    if of_another_version:  # which this one cannot read
        store.put(KEYS.job("job", "spec"), '{"v":1,"job":"job"}')
        with pytest.raises(StandInError, match="jobs/job/spec"):
            make(store, tmp_path)

    def state() -> JobState:
        (request,) = SubmissionReader(store, KEYS, "id").read(None).requests
        return request.run

    def sign(follows: str) -> None:
        signed = Signed(encode(replace(submission, follows=follows)), "alice", "")
        store.put(KEYS.submission("job"), encode(signed))

    def fail(reason: str, ended: str) -> None:
        record_failure(store, KEYS, submission, reason, ended)

    sign("")
    fail("n1: disk full", "")
    first = state()
    assert (first.state, first.reason, first.forgotten) == (State.FAILED, "n1: disk full", False)
    fail("n1: late", "")
    assert state() == first, "it has failed already"
    sign(first.run)
    assert state().resumed
    fail("n1: still full", first.run)
    again = state()
    assert (again.state, again.reason) == (State.FAILED, "n1: still full")
    assert again.run != first.run
