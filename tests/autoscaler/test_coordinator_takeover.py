"""Takeovers, reruns, and what is left behind."""

from __future__ import annotations

from dataclasses import replace

import pytest
from coordinator_pump import Pump, elastic, start
from coordinator_script import play
from submitted_jobs import put_submission, submission_by

from adaptdl_elastic.autoscaler.cluster_view import Observed, view_of
from adaptdl_elastic.autoscaler.coordinator.decide import decide
from adaptdl_elastic.autoscaler.coordinator.decision_types import CompareAndSwap, CoordinatorSettings, Memory
from adaptdl_elastic.autoscaler.policy import allocate
from adaptdl_elastic.autoscaler.web.overview import overview
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import (
    JobRequest,
    JobSpec,
    JobState,
    JobStatus,
    LeaderRecord,
    MasterRecord,
    Plan,
    encode,
)
from adaptdl_elastic.rendezvous.services.submitted import SubmissionReader, state_of
from adaptdl_elastic.rendezvous.store.base import KeyValue, Snapshot

# -- takeover, reruns, and what is left behind


def elected_before(pump: Pump) -> None:
    """Another leader has been elected after this one."""
    fence = pump.store.put(pump.keys.coordinator_leader, encode(LeaderRecord("newer", "host", 1)))
    # fences are revisions
    pump.fence = fence - 1


def elected_last(pump: Pump) -> None:
    pump.fence += 1


def cut_off(pump: Pump) -> None:
    """Its lease was lost meanwhile; its successor has written a plan and ended."""
    fence = pump.fence
    pump.take_over().settle()
    pump.store.delete(pump.keys.coordinator_leader)
    pump.fence = fence


TRANSITIONS = {
    # not even its own fence is written
    "a leader that sees another one elected after it decides nothing": """
        elastic; elected_before; ask a replicas=1; later 120 -> n0=1 n1=1 n2=1 fenced=False
        elected_last; later 120 -> n0=1""",
    "a leader whose key is gone writes nothing over a successor that has ended": """
        elastic; cut_off
        ask a replicas=1; later 120 -> +0 n0=1 n1=1 n2=1 fenced=False""",
    "the restart budget survives a takeover": """
        start max_restarts=1
        n0 fail; settle; take_over; n1 fail; settle; later 5 -> failed""",
    "a node that did not start in time is not tried by the next leader": """
        job a max_replicas=2 autoscale=False; node n0 a 2; node n1 a 2 holds_start=True; settle
        ask a replicas=3; settle; job a max_replicas=3 autoscale=False; settle -> placed_on=n0,n1
        later 21 -> placed_on=n0 "...n1 did not start within 20 s..."
        take_over; settle; later 300 -> placed_on=n0 on:n0
        n1 holds_start=False; later late_pardon 60 -> placed_on=n0,n1""",
    "a job that could not be changed in place is not by the next leader": """
        job a autoscale=False; node n0 a 3; settle; n0 report inplace=True; n0 inplace=True
        ask a replicas=2; decide -> inplace
        n0 ended 0 failed 76 "a newcomer ended" rank=1; decide -> restart_only=True
        take_over; settle -> n0=2 restart restart_only=True""",
    "a rerun begins again and generations go on growing": """
        elastic; all finish; settle -> generation=2 done
        forget_agents; job a run=a-2; node n0 a; settle -> generation=3 run=a-2 first=3 restarts=0 running""",
    "a stop of an earlier run is not obeyed by the next": """
        job a; node n0 a; settle; ask a stop=True run=a-1; settle -> stopped
        forget_agents; job a run=a-2; node n0 a; settle -> running""",
}


def forget_agents(pump: Pump) -> None:
    pump.agents.clear()


@pytest.mark.parametrize("script", TRANSITIONS.values(), ids=TRANSITIONS)
def test_the_next_leader_and_the_next_run_go_on_from_the_records(pump: Pump, script: str) -> None:
    play(pump, script, start, elastic, elected_before, elected_last, cut_off, forget_agents)


def test_a_rerun_does_not_inherit_how_long_the_run_before_waited(pump: Pump) -> None:
    play(pump, "job a min_replicas=2 max_replicas=2; node n0 a; settle; later 300")
    assert pump.status("a").waited >= 240
    play(pump, "job a run=a-2 min_replicas=2 max_replicas=2; n0 register; settle; take_over; settle")
    assert pump.memory.waiting["a"] == pump.clock()


def test_old_generations_keys_are_collected(pump: Pump) -> None:
    play(pump, "job a; node n0 a 8; node n1 a; settle; n1 vanish")
    for size in range(1, 9):
        play(pump, f"ask a replicas={size}; settle")
        generation = pump.plan("a").generation
        master = encode(MasterRecord(generation, "h", 1))
        pump.store.put(pump.keys.generation("a", generation, "master"), master)
    pump.settle()
    job, last = pump.view().jobs["a"], pump.plan("a").generation
    assert last >= 7
    assert min(job.generations) == last - 2
    assert set(job.held) == {"n0"}, "the node that is gone is forgotten"
    play(pump, "n0 finish; settle; settle")
    assert pump.view().jobs["a"].generations == frozenset()


def test_a_takeover_fences_every_plan_and_changes_nothing_else(pump: Pump) -> None:
    elastic(pump)
    before = pump.plan("a")
    play(pump, "job waiting min_replicas=9; node n0 waiting; settle; take_over; settle; later 120")
    assert pump.plan("a") == replace(before, fence=pump.fence)
    assert pump.plan("waiting").claim
    assert pump.plan("waiting").fence == pump.fence


def test_an_old_leader_can_write_nothing_after_a_takeover(pump: Pump) -> None:
    elastic(pump)
    play(pump, "job waiting min_replicas=3; node n0 waiting; settle")
    old = pump.view()
    pump.take_over().settle()
    asked = Observed(JobRequest(replicas=1), 1, 0.0)
    jobs = {name: replace(job, request=asked) for name, job in old.jobs.items()}
    view = replace(old, jobs=jobs, now=old.now + 1000)
    stale = decide(view, Memory(), keys=pump.keys, fence=pump.fence - 1, settings=pump.settings)
    plans = [a for a in stale.actions if isinstance(a, CompareAndSwap) and isinstance(a.record, Plan)]
    assert plans
    for action in plans:
        done = pump.store.compare_and_swap(action.key, encode(action.record), action.expected_revision)
        assert done is None


def test_a_job_that_waits_goes_on_waiting_under_the_next_leader(pump: Pump) -> None:
    """A job that waits comes before the others when its time is over, whoever leads by then."""
    pump.policy = allocate
    for name in ("first", "second"):
        pump.job(name, min_replicas=4, max_replicas=4)
        pump.node("n0", name, 4, reports=False)
        pump.settle()
    assert (pump.placed("first"), pump.plan("second").placements) == ({"n0": 4}, ())
    for _ in range(8):
        pump.later(110).take_over().settle()
    assert pump.placed("first") == {"n0": 4}
    waited = pump.clock() - pump.memory.waiting["second"]
    assert 8 * 110 - 8 * 60 <= waited <= 8 * 110  # what had not been written yet is lost
    pump.later(900 - waited + pump.settings.interval)
    assert (pump.placed("second"), pump.plan("first").placements) == ({"n0": 4}, ())
    pump.later(61).take_over().settle()
    assert pump.clock() - pump.memory.waiting["first"] >= 60
    assert pump.status("second").waited == 0


def test_only_so_many_ended_jobs_are_remembered() -> None:
    pump = Pump(settings=CoordinatorSettings(min_gap=0.0, keep_ended=3))
    for index in range(6):
        pump.job(f"j{index}")
        pump.node("n0", f"j{index}")
        pump.settle()
        pump.agents[-1].finish()
        pump.settle()
    pump.settle()
    assert sorted(pump.view().jobs) == ["j3", "j4", "j5"]
    assert pump.store.range(pump.keys.outcomes).items == ()


def test_a_submitted_job_whose_status_was_deleted_is_done_and_not_queued() -> None:
    pump = Pump(settings=CoordinatorSettings(min_gap=0.0, keep_ended=1))
    for index in range(2):
        asked = submission_by("alice", f"j{index}")
        put_submission(pump.store, pump.keys, asked)
        pump.job(asked.job)
        pump.node("n0", asked.job)
        pump.settle()
        pump.agents[-1].finish()
        pump.settle()
    assert sorted(pump.view().jobs) == ["j1"]
    found = SubmissionReader(pump.store, pump.keys, "id").read(None)
    forgotten, kept = found.requests
    assert (forgotten.submission.job, forgotten.run.forgotten, kept.run.forgotten) == ("j0", True, False)
    assert forgotten.over  # also for a node that was added later: it does not begin the job again
    assert forgotten.run.run
    assert state_of(forgotten, found) == ("done", kept.run.reason)
    (spec,) = pump.store.range(pump.keys.job("j1", "spec")).items
    pump.store.put(pump.keys.job("j0", "spec"), spec.value.replace("j1", "j0"))  # read before its deletion
    assert SubmissionReader(pump.store, pump.keys, "id").read(None) == found
    pump.store.delete_prefix(pump.keys.job("j0"))
    row = overview(pump.view(), found)["jobs"]["j0"]
    assert (row["state"], row["owner"]) == ("done", "alice")


def test_another_run_of_a_forgotten_job_counts_instead_of_the_run_before() -> None:
    pump = Pump(settings=CoordinatorSettings(min_gap=0.0, keep_ended=0))
    put_submission(pump.store, pump.keys, submission_by("alice", "a"))
    reader, runs = SubmissionReader(pump.store, pump.keys, "id"), []
    for run in ("r1", "r2"):
        pump.job("a", run=run)
        play(pump, "node n0 a; settle")
        assert reader.read(None).requests[0].run.state is JobState.RUNNING
        pump.agents[-1].finish()
        pump.settle()
        (request,) = reader.read(None).requests
        assert request.run.forgotten
        runs.append(request.run.run)
    assert runs == ["r1", "r2"]


def test_jobs_that_ended_long_ago_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Submissions are not deleted, and every node reads them all every few seconds."""
    pump = Pump()
    for index in range(20):
        asked = submission_by("alice", f"j{index}")
        ended = JobStatus(asked.job, "r1", JobState.DONE)
        put_submission(pump.store, pump.keys, asked)
        pump.store.put(pump.keys.outcome(asked.job, "status"), encode(ended))
    reader = SubmissionReader(pump.store, pump.keys, "id")
    first = reader.read(None)
    assert {request.run.state for request in first.requests} == {JobState.DONE}

    def refuse(key: str) -> None:
        raise AssertionError(f"{key} is read again")

    monkeypatch.setattr(pump.store, "get", refuse)
    assert reader.read(None) == first


def test_every_leader_sees_the_jobs_in_the_order_of_their_names() -> None:
    """Not in that of a set, which differs between processes."""
    keys, names = Keys("lab"), [f"job-{number:02d}" for number in range(20)]
    specs = [(keys.job(name, "spec"), encode(JobSpec(name, "run"))) for name in names]
    items = tuple(KeyValue(key, text, revision, revision) for revision, (key, text) in enumerate(specs, 1))
    assert list(view_of(keys, Snapshot(items, len(items), ""), 0.0, 0.0).jobs) == names


def test_a_job_that_agents_of_the_release_before_carry_keeps_what_it_has(pump: Pump) -> None:
    elastic(pump)
    before = pump.plan("a")
    key = pump.keys.node("n1", "a")
    found = pump.store.get(key)
    assert found is not None
    pump.store.put(key, found.value.replace('{"v":2,', '{"v":1,', 1))
    pump.take_over()
    play(pump, "ask a replicas=1; settle; later 600")
    assert pump.plan("a") == before
    reason = pump.status("a").reason
    assert "the agents on n1 are of an older release, whose reports are not read: let the job end" in reason


def test_an_agent_of_the_release_before_gets_no_replicas(pump: Pump) -> None:
    play(pump, "job a; node n0 a; settle; n0 report inplace=True; node n1 a; decide")
    key = pump.keys.node("n2", "a")
    record = replace(pump.agents[-1].record(), node="n2", agent="old")
    pump.store.put(key, encode(record).replace('{"v":2,', '{"v":1,', 1))
    play(pump, "ask a replicas=3; settle; later 600 -> n0=1 n1=1 running")
