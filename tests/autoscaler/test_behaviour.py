"""A job changes its behaviour while it runs: what it has follows what it reports now."""

from __future__ import annotations

import math
from typing import Any

import pytest
from coordinator_pump import Pump
from fake_agents import GOOD_PERF, FakeAgent

from adaptdl_elastic.autoscaler.policy import allocate
from adaptdl_elastic.goodput import GoodputFunction, GradParams, PerfParams
from adaptdl_elastic.sched_hints import ProfileEntry

CONGESTED = (0.1, 0.001, 4.0, 1.0, 4.0, 1.0, 1.5)
"""The same computation; synchronising takes twenty times as long and more."""

REPORTS = 3


def measured(theta: tuple[float, ...], replicas: int, count: int, slower: float = 1.0) -> ProfileEntry:
    """What a job with this θ measures on one node."""
    function = GoodputFunction(PerfParams(*theta), GradParams(1.0, 1.0), 128)
    step = slower * replicas * 128 / function.throughput(1, replicas, 128, 0)
    return ProfileEntry(1, replicas, 128, slower * (theta[0] + theta[1] * 128), float(step), count, count)


def report(pump: Pump, job: str, theta: tuple[float, ...], count: int = 20, **changes: Any) -> None:
    """What the job would say of itself now: times of all sizes up to its largest, told as of now."""
    plan = pump.plan(job)
    reached = max(replicas for _, replicas in _agent(pump, job).history)
    sizes = [size for size in (1, 2, 4, 8) if size <= reached]
    goodput = 128 * plan.replicas / measured(theta, plan.replicas, 1).optim_step_time
    profile = tuple(measured(theta, size, count) for size in sizes)
    fields = {"goodput": goodput, "predicted_goodput": goodput, "max_profiled_replicas": reached}
    _agent(pump, job).report(plan, **{"perf_params": theta, "profile": profile, **fields, **changes})


def _agent(pump: Pump, job: str) -> FakeAgent:
    return next(agent for agent in pump.agents if agent.job == job)


def running(pump: Pump, *jobs: str, **changes: object) -> None:
    pump.policy = allocate
    for job in jobs:
        pump.job(job, max_replicas=8, **changes)
        pump.node("n0", job, 8, reports=False)
    pump.settle()


def grow(pump: Pump, *jobs: str) -> None:
    """All of them report that they scale well until nothing changes any more."""
    for _ in range(4):
        for job in jobs:
            report(pump, job, GOOD_PERF)
        pump.settle().later(61)


def asked_with(pump: Pump, job: str) -> tuple[GoodputFunction, tuple[tuple[int, float], ...]]:
    """Return the function of the model with which the policy is asked, and its corrections by size."""
    (model,) = (info.model for info in pump.question().jobs if info.name == job)
    assert model is not None
    assert model.corrections is not None
    return GoodputFunction(model.perf_params, GradParams(1.0, 1.0), 128), tuple(model.corrections.one)


@pytest.mark.parametrize("kind", ["", "k"])
def test_the_allocation_follows_a_job_that_changes_its_behaviour(pump: Pump, kind: str) -> None:
    running(pump, "steady", "fickle", profile_key=kind)
    grow(pump, "steady", "fickle")
    assert (pump.placed("steady"), pump.placed("fickle")) == ({"n0": 4}, {"n0": 4})
    for _ in range(REPORTS):  # an event: nobody waits for the interval
        report(pump, "fickle", CONGESTED)
        pump.settle()
    assert pump.placed("fickle") == {"n0": 1}
    grow(pump, "steady")
    assert pump.plan("steady").replicas == 7
    for _ in range(REPORTS):  # alone it is as fast as before, so that is found out at the interval
        report(pump, "fickle", GOOD_PERF)
        report(pump, "steady", GOOD_PERF)
        pump.settle().later(61)
    assert pump.placed("fickle") == {"n0": 4}


@pytest.mark.parametrize("ended", [True, False])
def test_a_jobs_own_measurements_outweigh_those_of_others_however_many_those_are(
    pump: Pump, ended: bool
) -> None:
    running(pump, "old", profile_key="k")
    for _ in range(3):
        report(pump, "old", GOOD_PERF, count=100_000)
        pump.settle().later(61)
    assert pump.placed("old") == {"n0": 8}
    if ended:
        _agent(pump, "old").finish()
        pump.settle()
    running(pump, "young", profile_key="k")
    for _ in range(REPORTS):
        report(pump, "young", CONGESTED, count=5)
        report(pump, "old", GOOD_PERF, count=100_000)
        pump.settle().later(61)
    assert pump.placed("young") == {"n0": 1}


def test_measurements_of_other_jobs_are_scaled_to_the_jobs_own_speed(pump: Pump) -> None:
    running(pump, "old", "young", profile_key="k")
    for _ in range(3):
        report(pump, "old", GOOD_PERF, count=1000)
        pump.settle().later(61)
    assert pump.plan("old").replicas >= 4
    # on a machine half as fast it is as good an idea to take four
    plan = pump.plan("young")
    sizes = [size for size in (1, 2) if size <= max(plan.replicas, 2)]
    slow = tuple(2 * x for x in GOOD_PERF[:6]) + GOOD_PERF[6:]
    report(pump, "young", slow, profile=tuple(measured(GOOD_PERF, s, 9, slower=2.0) for s in sizes))
    function, corrections = asked_with(pump, "young")
    predicted = {
        count: count * 128 / function.throughput(1, count, 128, 0) / math.exp(off)
        for count, off in corrections
    }
    expected = {count: measured(GOOD_PERF, count, 9, slower=2.0).optim_step_time for count in (1, 2, 4)}
    assert predicted == pytest.approx(expected, rel=1e-9)


def test_among_others_the_latest_report_counts(pump: Pump) -> None:
    running(pump, "first", "second", profile_key="k")
    for job in ("first", "second"):
        report(pump, job, GOOD_PERF)
    pump.settle().later(61)
    report(pump, "first", CONGESTED, profile=(measured(CONGESTED, 4, 10_000),))
    pump.settle().later(5)
    report(pump, "second", GOOD_PERF, profile=(measured(GOOD_PERF, 4, 10),))
    pump.settle()
    running(pump, "young", profile_key="k")
    report(pump, "young", GOOD_PERF)
    function, (own, found) = asked_with(pump, "young")
    step = measured(GOOD_PERF, 4, 10)
    predicted = 4 * 128 / function.throughput(1, 4, 128, 0) / step.optim_step_time
    assert (own[0], found[0]) == (1, 4)
    assert float(predicted) == pytest.approx(math.exp(found[1]))
