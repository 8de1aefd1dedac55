"""Bad input, and what the policy is asked."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from coordinator_pump import Pump, elastic
from coordinator_script import play
from fake_agents import hints_of

from adaptdl_elastic.autoscaler.commands.cluster import coordinator
from adaptdl_elastic.autoscaler.coordinator.job_models import END_GRACE, DeclaredEnd, model
from adaptdl_elastic.autoscaler.policy import allocate
from adaptdl_elastic.autoscaler.policy.curves import goodputs
from adaptdl_elastic.autoscaler.policy.objective import remaining_work
from adaptdl_elastic.autoscaler.policy.policy_types import Decision, JobInfo
from adaptdl_elastic.goodput import GoodputFunction
from adaptdl_elastic.rendezvous.schema.records import (
    DrainRequest,
    JobState,
    encode,
)
from adaptdl_elastic.sched_hints import ProfileEntry

# -- bounds and garbage


@pytest.mark.parametrize(
    ("option", "value", "complaint"),
    [
        ("--fairness", "-1000", "-1000.0 is not in the range -20<=x<=1"),
        ("--interval", "nan", "nan is not a finite number"),
        ("--fairness", "inf", "inf is not a finite number"),
        ("--default-pause", "nan", "nan is not a finite number"),
    ],
)
def test_an_option_that_is_no_number_or_out_of_its_range(option: str, value: str, complaint: str) -> None:
    result = CliRunner().invoke(coordinator, ["--etcd", "127.0.0.1:1", option, value])
    assert (result.exit_code, complaint in result.output) == (2, True)


@pytest.mark.parametrize(
    ("bounds", "complaint"),
    [
        ({"min_replicas": 4, "max_replicas": 2}, "min_replicas 4 is more than max_replicas 2"),
        ({"min_nodes": 3, "max_nodes": 1}, "min_nodes 3 is more than max_nodes 1"),
        ({"min_nodes": 3, "max_nodes": 3, "max_replicas": 2}, "min_nodes 3 is more than max_replicas 2"),
        ({"min_replicas": 9}, "needs at least 9 replicas on 1 node, registered: 1 node with 4 slots"),
    ],
)
def test_impossible_bounds_are_pending_with_the_reason(
    pump: Pump, bounds: dict[str, int], complaint: str
) -> None:
    pump.job("bad", **bounds)
    play(pump, "job good; node n0 bad 4; node n0 good 4; settle -> bad/pending")
    assert complaint in pump.status("bad").reason
    assert pump.status("good").state is JobState.RUNNING


def test_a_node_that_says_it_has_a_billion_slots_is_not_used(pump: Pump) -> None:
    pump.policy = allocate
    play(pump, "job good; node n0 good 4")
    pump.job("bad", max_replicas=10**9)
    pump.node("n1", "bad", 10**9)
    pump.settle().later(61)
    assert pump.plan("good").replicas == 4
    assert pump.status("bad").reason == (
        "waits for nodes: needs at least 1 replica on 1 node, none is registered for this job"
    )
    pump.store.put(pump.keys.drain("n1"), encode(DrainRequest("n1", "new disk", person="bob")))
    pump.settle()
    assert pump.status("bad").reason == "waits for nodes: needs at least 1 replica on 1 node, drained: n1"
    pump.store.delete(pump.keys.drain("n1"))
    (problem,) = pump.keeper.problems()
    assert "slots 1000000000 (at least 1) cannot be: 1 <= min_slots <= slots <= 1024" in problem.message
    assert problem.message.endswith("start its agent with another --nproc-per-node")
    pump.node("n1", "bad", 1024)  # as many as there may be
    pump.settle()
    assert set(pump.placed("bad")) == {"n1"}


def test_garbage_is_said_once_and_changes_nothing(pump: Pump) -> None:
    elastic(pump)
    before = pump.plan("a")
    node = '{"node": "%s", "job": "a", "run": "x", "agent": "y", "host": "h", "slots": %d}'
    for key, value in {
        pump.keys.job("a", "hints"): '{"job": "a", "generation": NaN}',
        pump.keys.node("n9", "a"): node % ("n9", -4),
        pump.keys.job("b", "spec"): "not json",
        pump.keys.job("c", "plan"): "[]",
        pump.keys.held("a", "n7"): "{}",
        pump.keys.root + "jobs/a/generations/x/master": "{}",
        pump.keys.root + "whatever": "\x00",
        pump.keys.node("n8", "a"): node % ("n7", 1),
    }.items():
        pump.store.put(key, value)
    pump.settle().later(120)
    assert pump.plan("a") == before
    problems = [problem.key for problem in pump.keeper.problems()]
    assert len(problems) == len(set(problems)) == 6


@pytest.mark.parametrize("record", ["plan", "status"])
def test_records_of_the_coordinator_are_written_again_over_garbage(pump: Pump, record: str) -> None:
    elastic(pump)
    before = pump.plan("a"), pump.status("a").state
    pump.store.put(pump.keys.job("a", record), "garbage")
    pump.settle()
    assert (pump.plan("a"), pump.status("a").state) == before


def test_a_plan_lost_to_garbage_before_we_came_is_begun_anew(pump: Pump) -> None:
    elastic(pump)
    last = pump.plan("a").generation
    pump.store.put(pump.keys.job("a", "plan"), "garbage")
    pump.take_over().settle()
    assert pump.plan("a").generation > last
    assert pump.status("a").state is JobState.RUNNING


def test_a_job_keeps_its_last_good_hints(pump: Pump) -> None:
    play(pump, "job a; node n0 a 4; settle")
    good = pump.view().jobs["a"].hints
    pump.store.put(pump.keys.job("a", "hints"), '{"perf_params": [1, 2]}')
    assert pump.view().jobs["a"].hints == good


def test_a_policy_that_breaks_does_not_stop_the_loop(pump: Pump) -> None:
    def broken(*_: object) -> Decision:
        raise ZeroDivisionError("oops")

    pump.policy = broken
    play(pump, "job a; node n0 a 4; settle -> n0=1")
    assert ("policy_failed", {"message": "ZeroDivisionError: oops"}) in pump.said
    play(pump, "ask a replicas=3; later 61 -> n0=3")


# -- what the policy is asked


def test_jobs_of_one_script_share_what_they_have_measured(pump: Pump) -> None:
    play(pump, "job old profile_key=k; node n0 old 4; settle")
    slow = ProfileEntry(1, 4, 128, 0.1, 0.5, 10, 10)
    theta = (0.3, 0.002, 0.1, 0.01, 0.05, 0.001, 1.5)
    pump.agents[0].report(pump.plan("old"), max_profiled_replicas=4, profile=(slow,), perf_params=theta)
    pump.agents[0].reports = False
    play(
        pump,
        """
        settle; job young profile_key=k; job other profile_key=x
        node n0 young 4 reports=False; node n0 other 4 reports=False; settle""",
    )

    def asked(job: str) -> JobInfo:
        return next(info for info in pump.question().jobs if info.name == job)

    # before its first measurement a job borrows nothing
    assert (asked("young").model, asked("young").max_profiled_replicas) == (None, 0)
    own = ProfileEntry(1, 1, 128, 0.1, 0.2, 10, 10)
    for agent in pump.agents[1:]:
        agent.report(pump.plan(agent.job), max_profiled_replicas=1, profile=(own,))
    for job, sizes in (("young", [1, 4]), ("other", [1])):
        model = asked(job).model
        assert model is not None
        assert model.corrections is not None
        assert [size for size, _ in model.corrections.one] == sizes
        assert (model.perf_params == theta) is (job == "young")  # of the job with the most replicas
        assert asked(job).max_profiled_replicas == 1  # what others have tried it tries itself


def test_a_job_that_says_nothing_of_its_length_is_measured_by_those_of_its_kind(pump: Pump) -> None:
    for job, done in (("short", 1000.0), ("long", 5000.0), ("other", 9e9), ("stopped", 8e9)):
        pump.job(job, profile_key="x" if job == "other" else "k")
        agent = pump.node(f"n-{job}", job, 1)
        pump.settle()
        agent.report(pump.plan(job), samples_done=done, remaining_samples=None)
        if job == "stopped":
            pump.ask(job, stop=True)
        else:
            agent.finish()
        pump.settle()
    pump.job("young", profile_key="k")
    agent = pump.node("n0", "young", 1)
    pump.settle()
    agent.report(pump.plan("young"), samples_done=2000.0, remaining_samples=None)
    found = pump.question().jobs
    (info,) = found
    assert sorted(info.kind_totals) == [1000.0, 5000.0]
    assert info.attained == 2000.0
    assert remaining_work(info) == 3000.0  # of those that were longer than it is


@pytest.mark.parametrize(
    ("remaining", "attained", "totals", "expected"),
    [
        (7.0, 100.0, (), 7.0),  # what it says itself
        (7.0, 100.0, (90.0,), 7.0),
        (150.0, 100.0, (200.0,), 150.0),
        (7.0, 100.0, (200.0,), 100.0),  # no less than others like it have needed
        (0.0, 100.0, (), 0.0),
        (None, 100.0, (), 100.0),  # as long again
        (None, 100.0, (50.0, 100.0), 100.0),
        (None, 100.0, (50.0, 150.0, 250.0), 100.0),
        (None, 0.0, (50.0, 150.0), 100.0),
    ],
)
def test_remaining_work_is_declared_or_learnt_or_as_long_again(
    remaining: float | None, attained: float, totals: tuple[float, ...], expected: float
) -> None:
    job = JobInfo("a", remaining=remaining, attained=attained, kind_totals=totals)
    assert remaining_work(job) == expected


@pytest.mark.parametrize(
    ("totals", "expected"), [((), 400.0), ((50.0, 100.0), 400.0), ((50.0, 150.0, 250.0), 100.0)]
)
def test_a_job_that_has_outlived_its_declared_end_is_expected_to_go_on(
    totals: tuple[float, ...], expected: float
) -> None:
    job = JobInfo("a", remaining=0.0, outlived=True, attained=100.0, kind_totals=totals)
    assert job.declared is None
    assert remaining_work(job) == expected


def test_a_job_at_its_declared_end_has_outlived_it_when_it_takes_long_to_end(pump: Pump) -> None:
    pump.job("a")
    agent = pump.node("n0", "a", 4, reports=False)
    pump.settle()

    def outlived(left: float | None) -> bool:
        agent.report(pump.plan("a"), samples_done=1e6, remaining_samples=left)
        pump.settle()
        (info,) = pump.question().jobs
        assert info.remaining == left
        return info.outlived

    assert not outlived(1.0)
    pump.later(2 * END_GRACE)
    assert not outlived(0.0)  # it may have to evaluate and save
    pump.later(END_GRACE)
    assert not outlived(0.0)
    pump.later(1)
    assert outlived(0.0)
    assert outlived(5.0)  # what it declares beyond an end that it has passed does not count
    assert outlived(None)


def test_a_job_that_always_declares_a_little_more_has_outlived_its_first_end() -> None:
    end = DeclaredEnd()
    for done in range(200):
        end = end.after(float(done), 100.0, now=60.0 * done)
        assert end.outlived(60.0 * done) == (done > 101)


@pytest.mark.parametrize("most", [None, "the same"])
@pytest.mark.parametrize("batch", [1, 2, 3, 8, 9, 33])
def test_a_batch_that_stays_goes_to_half_as_many_replicas_as_it_has_samples(
    batch: int, most: str | None
) -> None:
    """Its throughput is that of the batch, in the time of the largest share."""
    limits = {"init_batch_size": batch, "max_batch_size": most and batch, "local_bsz_bounds": None}
    found = model(hints_of("a", 0, 1, gradient_accumulation=True, **limits))
    assert found is not None
    sizes = np.arange(1, 41)
    predicted = goodputs([replace(found, corrections=None)], np.ones(40, int), sizes)
    largest = max(batch // 2, 1)
    assert (predicted.goodput[0] > 0).tolist() == (sizes <= largest).tolist()
    function = GoodputFunction(found.perf_params, found.grad_params, batch)
    for replicas in range(1, largest + 1):
        share = -(-batch // replicas)
        seconds = replicas * share / function.throughput(1, replicas, share, 0)
        assert predicted.goodput[0, replicas - 1] == pytest.approx(batch / seconds)


@pytest.mark.parametrize("missing", [{"init_batch_size": 0}, {"perf_params": None}, {"grad_params": None}])
def test_a_job_that_has_not_measured_enough_has_no_model(missing: dict[str, object]) -> None:
    assert model(hints_of("a", 0, 1)) is not None
    assert model(hints_of("a", 0, 1, **missing)) is None
