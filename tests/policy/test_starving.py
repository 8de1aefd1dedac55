"""Nobody starves: a job that has waited too long gets its replicas, however those of others lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adaptdl_elastic.autoscaler.policy import (
    Allocation,
    GoodputModel,
    JobInfo,
    NodeInfo,
    PolicySettings,
    allocate,
)
from adaptdl_elastic.autoscaler.policy.policy_types import NodeLimit
from adaptdl_elastic.goodput import GradParams, PerfParams
from adaptdl_elastic.rendezvous.schema.records import HEAVIEST

MODEL = GoodputModel(
    PerfParams(0.1, 0.001, 0.1, 0.01, 0.05, 0.01, 2.0), GradParams(1.0, 10.0), 32, 1024, (8, 128)
)
NODES = [NodeInfo(f"n{i}", 4) for i in range(16)]


def rigid(name: str, **changes: object) -> JobInfo:
    """Exactly four replicas."""
    base = JobInfo(name, 4, 4, model=MODEL, max_profiled_replicas=4, remaining=1e7)
    return replace(base, **changes)  # type: ignore[arg-type]


def wide_jobs(nodes: Sequence[NodeInfo] = NODES) -> tuple[list[JobInfo], Mapping[str, Allocation]]:
    """Return jobs on two nodes each. They leave half of the slots, and nowhere four together."""
    jobs = [rigid(f"wide{i}", min_nodes=2, max_nodes=2) for i in range(len(nodes) // 2)]
    current = allocate(jobs, nodes, {}, 0.0).allocations
    assert all(current.values())
    return jobs, current


def test_jobs_that_must_span_nodes_take_turns_with_one_that_finds_no_room_beside_them() -> None:
    jobs, current = wide_jobs(NODES[:8])
    jobs.append(rigid("whole"))
    waiting, longest, turns = dict[str, float]({"whole": 0.0}), 0.0, set[str]()
    for now in map(float, range(60, 3060, 60)):
        asked = [replace(j, waiting_since=waiting.get(j.name)) for j in jobs]
        current = allocate(asked, NODES[:8], current, now).allocations
        waiting = {j.name: waiting.get(j.name, now) for j in jobs if not current[j.name]}
        assert len(waiting) <= 1
        turns |= waiting.keys()
        longest = max([longest, *(now - since for since in waiting.values())])
    assert len(turns) >= 3
    assert longest <= 960.0


def time_slices(slots: int, jobs: list[JobInfo], rounds: int = 400) -> tuple[int, float, float]:
    """Starts on one node in so many minutes, and the longest time without and shortest with replicas."""
    current: Mapping[str, Allocation] = {job.name: {} for job in jobs}
    waiting: dict[str, float | None] = {job.name: 0.0 for job in jobs}
    changed: dict[str, float | None] = dict.fromkeys(waiting)
    starts, longest, shortest = 0, 0.0, float("inf")
    for step in range(rounds):
        now = 60.0 * step
        asked = [replace(j, waiting_since=waiting[j.name], last_change=changed[j.name]) for j in jobs]
        found = allocate(asked, [NodeInfo("n", slots)], current, now).allocations
        for job in jobs:
            name, had, has = job.name, current[job.name], found[job.name]
            if dict(had) == dict(has):
                continue
            since, was = waiting[name], changed[name]
            if not had and since is not None:
                starts, longest = starts + 1, max(longest, now - since)
            elif not has and was is not None:
                shortest = min(shortest, now - was)
            waiting[name], changed[name] = (None if has else now), now
        current = found
    return starts, longest, shortest


@pytest.mark.parametrize(("declared", "pause"), [(False, 0.2), (True, 60.0)])
def test_a_crowd_for_one_slot_takes_turns_of_fifteen_pauses(pause: float, declared: bool) -> None:
    left = 1e7 if declared else None
    jobs = [
        JobInfo(f"j{i}", model=MODEL, max_profiled_replicas=1, pause=pause, remaining=left) for i in range(20)
    ]
    starts, longest, shortest = time_slices(1, jobs)
    assert shortest >= 15 * pause
    assert starts * pause <= 400 * 60 / 15 + pause
    assert longest <= 900.0 + 20 * (15 * pause + 60.0)
    assert starts >= 20  # everybody has had a turn


def test_a_job_that_was_just_changed_is_not_made_smaller_for_an_overdue_one() -> None:
    grown = JobInfo(
        "grown", max_replicas=4, model=MODEL, max_profiled_replicas=4, pause=30.0, last_change=900.0
    )
    late = rigid("late", min_replicas=2, max_replicas=2, waiting_since=0.0)
    current = {"grown": {"n": 4}}
    found = allocate([grown, late], [NodeInfo("n", 4)], current, 1000.0)
    assert found.changed == ()
    assert found.reasons["grown"].text == (
        "keeps its 4 replicas: it was changed 100 s ago, and others wait: it is left in peace for 450 s"
    )
    found = allocate([grown, late], [NodeInfo("n", 4)], current, 1351.0)
    assert sum(found.allocations["late"].values()) == 2
    # who is not overdue waits neither for that nor for anybody
    fresh = replace(late, waiting_since=999.0)
    assert allocate([grown, fresh], [NodeInfo("n", 4)], current, 1000.0).allocations["late"]


def test_no_job_is_left_unchanged_for_longer_than_others_have_to_wait() -> None:
    slow = JobInfo("slow", model=MODEL, max_profiled_replicas=1, pause=1e7, last_change=900.0)
    late = JobInfo("late", model=MODEL, max_profiled_replicas=1, waiting_since=0.0)
    current = {"slow": {"n": 1}}
    found = allocate([slow, late], [NodeInfo("n", 1)], current, 1799.0)
    assert found.changed == ()
    assert found.reasons["slow"].text.endswith("it is left in peace for 900 s")
    assert allocate([slow, late], [NodeInfo("n", 1)], current, 1800.0).allocations["late"]


@pytest.mark.parametrize("others", [0, 3])
def test_a_job_that_changes_again_and_again_is_not_left_in_peace_for_ever(others: int) -> None:
    # it recovers every minute; one that can never run is nobody to wait for
    late = [JobInfo(f"late{i}", model=MODEL, waiting_since=float(i)) for i in range(1 + others)]
    late.append(JobInfo("never", 9, 9, model=MODEL, waiting_since=0.0))
    current, bound = {"ill": {"n": 1}}, 900.0 * (1 + 2 * (1 + others))
    for now, changed in ((bound - 60, False), (bound + others, True)):
        ill = JobInfo("ill", model=MODEL, max_profiled_replicas=1, pause=60.0, last_change=now - 10)
        found = allocate([ill, *late], [NodeInfo("n", 1)], current, now)
        assert bool(found.changed) == changed


def test_a_job_spread_over_two_nodes_without_need_is_put_on_one_for_a_waiting_job() -> None:
    # for itself none of them would: the pause is a tenth of the horizon, and one node is 9 % faster
    jobs = [rigid(f"wide{i}", max_nodes=2, pause=1e4) for i in range(8)]
    current = {f"wide{i}": {f"n{2 * i}": 2, f"n{2 * i + 1}": 2} for i in range(8)}
    patient = PolicySettings(horizon=1e5)
    assert allocate(jobs, NODES, current, 60.0, patient).changed == ()
    found = allocate([*jobs, rigid("whole", waiting_since=0.0)], NODES, current, 60.0, patient)
    assert all(found.allocations.values())
    assert len(found.changed) == 2  # the new one, and one that moves


def test_a_job_with_few_nodes_of_its_own_gets_them() -> None:
    jobs = [rigid(f"wide{i}", min_nodes=2) for i in range(8)]
    current = allocate(jobs, NODES, {}, 0.0).allocations
    mine = rigid("mine", limits={"n3": NodeLimit(1, 4), "n4": NodeLimit(1, 4)}, waiting_since=0.0)
    found = allocate([*jobs, mine], NODES, current, 1000.0)
    assert sum(found.allocations["mine"].values()) == 4


def test_a_job_whose_only_node_is_taken_by_one_that_stays_waits() -> None:
    nodes = [NodeInfo("n0", 4), NodeInfo("n1", 3)]
    stays = rigid("stays", min_replicas=2, max_replicas=2, preemptible=False)
    mine = rigid("mine", min_replicas=3, limits={"n0": NodeLimit(1, 4)}, waiting_since=0.0)
    found = allocate([stays, mine], nodes, {"stays": {"n0": 2}}, 1000.0)
    assert found.allocations == {"stays": {"n0": 2}, "mine": {}}


def test_a_job_that_may_not_be_preempted_is_not_ended_for_another() -> None:
    jobs = [rigid(f"wide{i}", min_nodes=2, max_nodes=2, preemptible=i == 5) for i in range(8)]
    current = allocate(jobs, NODES, {}, 0.0).allocations
    found = allocate([*jobs, rigid("whole", waiting_since=0.0)], NODES, current, 1000.0)
    assert found.allocations["whole"]
    assert [name for name, a in found.allocations.items() if not a] == ["wide5"]


def test_a_large_cluster_full_of_such_jobs_is_decided_in_time() -> None:
    nodes = [NodeInfo(f"n{i}", 8) for i in range(512)]
    jobs = [rigid(f"wide{i}", min_nodes=2, max_nodes=2) for i in range(256)]
    current = allocate(jobs, nodes, {}, 0.0).allocations
    late = [
        rigid(f"whole{i}", min_replicas=8, max_replicas=8, max_profiled_replicas=8, waiting_since=float(i))
        for i in range(3)
    ]
    found = allocate([*jobs, *late], nodes, current, 1000.0)
    assert all(found.allocations[j.name] for j in late)
    assert sum(not a for a in found.allocations.values()) <= 3
    assert found.seconds < 20  # of CPU: 0.5 s on a quiet machine


@st.composite
def crowded(draw: st.DrawFn) -> tuple[list[JobInfo], list[NodeInfo], JobInfo]:
    irregular = st.lists(st.integers(1, 8), min_size=1, max_size=12)
    slots = draw(st.one_of(irregular, st.integers(9, 16).map(lambda count: [4] * count)))
    nodes = [NodeInfo(f"n{i}", count) for i, count in enumerate(slots)]
    jobs = []
    for i in range(draw(st.integers(1, 12))):
        least, few = draw(st.integers(1, 6)), draw(st.integers(1, 3))
        jobs.append(
            JobInfo(
                f"j{i}",
                max(least, few),
                max(least, few) + draw(st.sampled_from([0, 0, 3, 20])),
                min_nodes=few,
                max_nodes=few + draw(st.integers(0, 2)),
                model=draw(st.sampled_from([MODEL, None])),
                max_profiled_replicas=draw(st.integers(0, 16)),
                pause=draw(st.sampled_from([0.1, 30.0])),
                weight=draw(st.sampled_from([1.0, 1.0, 1e-6, HEAVIEST])),
            )
        )
    late = replace(jobs.pop(), name="late", waiting_since=0.0)
    if draw(st.booleans()):
        names = draw(st.sets(st.sampled_from([n.name for n in nodes]), min_size=1))
        late = replace(late, limits={n: NodeLimit(draw(st.integers(1, 3)), 8) for n in sorted(names)})
    return jobs, nodes, late


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(crowded())
def test_an_overdue_job_runs_if_it_could_run_alone(
    problem: tuple[list[JobInfo], list[NodeInfo], JobInfo],
) -> None:
    jobs, nodes, late = problem
    current: Mapping[str, Allocation] = {}
    for now in (0.0, 60.0, 120.0):
        current = allocate(jobs, nodes, current, now).allocations
    alone = allocate([late], nodes, {}, 1000.0).allocations["late"]
    found = allocate([*jobs, late], nodes, current, 1000.0)
    assert bool(found.allocations["late"]) == bool(alone), (alone, found.pending)


@pytest.mark.parametrize("max_profiled_replicas", [1, 4])
def test_an_overdue_job_comes_before_a_job_of_the_largest_weight(max_profiled_replicas: int) -> None:
    heavy = rigid(
        "heavy", min_replicas=1, weight=HEAVIEST, max_profiled_replicas=max_profiled_replicas, last_change=0.0
    )
    late = rigid("late", waiting_since=0.0)
    found = allocate([heavy, late], [NodeInfo("n", 4)], {"heavy": {"n": 4}}, 10_000.0).allocations
    assert found == {"heavy": {}, "late": {"n": 4}}


def test_an_overdue_job_does_not_make_the_other_jobs_worse_off() -> None:
    # sizes that fit only if they are placed exactly, in a large program
    sizes = [3, 4, 3, 3, 4, 4]
    jobs = [
        rigid(f"j{i}", min_replicas=n, max_replicas=n, max_nodes=1, max_profiled_replicas=6)
        for i, n in enumerate(sizes)
    ]
    nodes = [NodeInfo(f"n{i}", slots) for i, slots in enumerate((6, 6, 4, 3))]
    late = rigid("late", min_replicas=1, max_replicas=1, max_profiled_replicas=1)
    new, overdue = (
        allocate([*jobs, replace(late, waiting_since=since)], nodes, {}, 10_000.0) for since in (None, 0.0)
    )
    assert overdue.allocations["late"]
    assert overdue.objective == pytest.approx(new.objective)


weights = st.floats(1e-6, HEAVIEST)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(weights, st.sampled_from([None, 900.0, 960.0, 5000.0])), min_size=1, max_size=6),
    st.integers(1, 6),
)
def test_overdue_jobs_start_in_the_order_of_their_waits_whatever_weights_there_are(
    jobs: list[tuple[float, float | None]], slots: int
) -> None:
    now = 10_000.0
    infos = [
        JobInfo(
            f"j{i}",
            model=MODEL,
            max_profiled_replicas=1,
            weight=weight,
            waiting_since=now - 10 if waited is None else now - waited,
        )
        for i, (weight, waited) in enumerate(jobs)
    ]
    found = allocate(infos, [NodeInfo("n", slots)], {}, now).allocations
    started = sorted((waited or 0.0 for (_, waited), job in zip(jobs, infos, strict=True) if found[job.name]))
    assert started == sorted(waited or 0.0 for _, waited in jobs)[-slots:]


def test_a_longer_job_does_not_push_out_another_before_its_time() -> None:
    jobs, current = wide_jobs()
    found = allocate([*jobs, rigid("whole", remaining=1e9, waiting_since=0.0)], NODES, current, 800.0)
    assert found.changed == ()
    assert found.reasons["whole"].text.endswith("(waiting for 800 s)")


def test_the_decision_does_not_depend_on_the_order_of_the_jobs() -> None:
    jobs, current = wide_jobs()
    everybody = [*jobs, rigid("whole", waiting_since=0.0)]
    straight = allocate(everybody, NODES, current, 1000.0).allocations
    everybody.reverse()
    assert allocate(everybody, NODES, current, 1000.0).allocations == straight
