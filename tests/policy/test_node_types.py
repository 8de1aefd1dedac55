"""Nodes of several types: where jobs go, what types cost, and that the choice is as good as the best."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptdl_elastic.autoscaler.policy import (
    Allocation,
    GoodputModel,
    JobInfo,
    NodeInfo,
    NodeLimit,
    allocate,
)
from adaptdl_elastic.autoscaler.policy.solver.sizes import Sizes, build_sizes
from adaptdl_elastic.autoscaler.policy.solver.typed_knapsack import choose
from adaptdl_elastic.goodput import GradParams, PerfParams

MODEL = GoodputModel(
    PerfParams(0.12, 0.003, 0.40, 0.01, 0.08, 0.002, 1.6), GradParams(0.01, 200.0), 64, 4096, (16, 128), True
)


def slowed(speed: float, model: GoodputModel = MODEL) -> GoodputModel:
    *times, gamma = model.perf_params
    return replace(model, perf_params=PerfParams(*(seconds / speed for seconds in times), gamma))


def job(name: str = "job", slow: float = 0.2, **changes: object) -> JobInfo:
    models = {"fast": MODEL, "slow": slowed(slow)}
    times = {"pause": 1.0, "remaining": 1e7, "attained": 1e5}
    base = JobInfo(name, 1, 64, model=MODEL, models=models, max_profiled_replicas=64, **times)
    return replace(base, **changes)  # type: ignore[arg-type]


def cluster(fast: int, slow: int, slots: int = 4) -> list[NodeInfo]:
    return [
        NodeInfo(f"{name}-{i}", slots, node_type=name)
        for name, count in (("fast", fast), ("slow", slow))
        for i in range(count)
    ]


def types_of(allocation: Allocation) -> set[str]:
    return {node.split("-")[0] for node in allocation}


def test_a_lone_job_runs_on_the_fast_nodes_only() -> None:
    found = allocate([job()], cluster(2, 2), {}, 0.0).allocations["job"]
    assert types_of(found) == {"fast"}
    assert sum(found.values()) == 8


def test_no_job_mixes_types_and_slow_nodes_are_used_before_jobs_wait() -> None:
    jobs = [job(f"j{i}") for i in range(12)]
    found = allocate(jobs, cluster(2, 2), {}, 0.0).allocations
    assert all(len(types_of(allocation)) == 1 for allocation in found.values())
    assert any(types_of(allocation) == {"slow"} for allocation in found.values())


def test_the_job_that_gains_most_gets_the_fast_node() -> None:
    # for one job the slow node is a tenth as fast, for the other nearly as fast
    jobs = [job("picky", slow=0.1, max_replicas=4), job("content", slow=0.9, max_replicas=4)]
    found = allocate(jobs, cluster(1, 1), {}, 0.0).allocations
    assert types_of(found["picky"]) == {"fast"}
    assert types_of(found["content"]) == {"slow"}


def test_a_job_leaves_a_slow_node_only_if_that_pays_for_the_change() -> None:
    current = {"job": {"slow-0": 4}}
    nodes = cluster(1, 1)
    ending = job(slow=0.9, remaining=200.0, max_replicas=4, move_pause=60.0)
    assert allocate([ending], nodes, current, 0.0).allocations["job"] == {"slow-0": 4}
    cheap = replace(ending, remaining=1e7, move_pause=0.1)
    assert types_of(allocate([cheap], nodes, current, 0.0).allocations["job"]) == {"fast"}
    # one that lies on both, from before types were known, could not come back to that size
    both: dict[str, Allocation] = {"job": {"fast-0": 1, "slow-0": 1}}
    assert allocate([job(pause=1e5)], nodes, both, 0.0).allocations == both


def test_a_job_without_a_profile_starts_on_the_fastest_type() -> None:
    new = JobInfo("new", max_replicas=8, speeds={"fast": 1.0, "slow": 0.2})
    assert types_of(allocate([new], cluster(1, 2), {}, 0.0).allocations["new"]) == {"fast"}


def test_a_job_that_needs_more_than_any_type_has_uses_several_types() -> None:
    wide = job(min_replicas=6, max_replicas=8)
    found = allocate([wide], cluster(1, 1), {}, 0.0).allocations["job"]
    assert types_of(found) == {"fast", "slow"}
    assert allocate([wide], cluster(1, 1), {"job": found}, 60.0).allocations["job"] == found


def test_a_job_on_several_types_leaves_other_jobs_the_slots_that_were_counted_for_them() -> None:
    nodes = [NodeInfo("fast-0", 4, node_type="fast"), *(replace(n, slots=2) for n in cluster(0, 4))]
    jobs = [job("wide", min_replicas=10, max_replicas=10), job("small", min_replicas=2, max_replicas=2)]
    found = allocate(jobs, nodes, {}, 0.0).allocations
    assert found["small"] == {"fast-0": 2}
    assert sum(found["wide"].values()) == 10


def test_two_unlike_machines_are_both_used_if_together_they_are_faster() -> None:
    alike = job(slow=0.95, models={"fast": MODEL, "slow": slowed(0.95)})
    found = allocate([alike], cluster(1, 1), {}, 0.0).allocations["job"]
    assert sum(found.values()) == 8


def own(name: str, nodes: list[str], slots: int = 1, **changes: object) -> JobInfo:
    """Return a job that may only use these nodes, as every job with agents of its own."""
    limits = {node: NodeLimit(1, slots) for node in nodes}
    return job(name, slow=1.0, **{"limits": limits, "max_replicas": 64, **changes})


UNLIKE = {"fast-0": 1, "slow-0": 1}
"""Both nodes of a job whose cluster has further nodes of either type, which are not open to it."""


@pytest.mark.parametrize(
    "changes",
    [
        {"requested_replicas": 2},
        {"min_replicas": 2},
        {"min_replicas": 2, "min_nodes": 2, "max_nodes": 2},
        {"min_replicas": 2, "min_nodes": 2, "max_nodes": 2, "model": None},
        {},
    ],
)
@pytest.mark.parametrize("others", [1, 30])
def test_a_job_whose_own_nodes_are_of_several_types_uses_them_together(
    changes: dict[str, object], others: int
) -> None:
    found = allocate([own("job", list(UNLIKE), **changes)], cluster(1 + others, 1 + others, 1), {}, 0.0)
    if others == 1 or changes:  # in a large cluster only where the job needs it
        assert found.allocations["job"] == UNLIKE
    assert found.allocations["job"]


def test_a_request_that_spans_types_does_not_stop_a_running_job() -> None:
    wanted = own("job", list(UNLIKE), requested_replicas=2)
    assert allocate([wanted], cluster(2, 2, 1), {"job": {"fast-0": 1}}, 0.0).allocations["job"] == UNLIKE


def test_a_change_to_several_types_that_leaves_a_replica_where_it_is_is_no_move() -> None:
    growing = own("job", list(UNLIKE), move_pause=1e6)
    assert allocate([growing], cluster(2, 2, 1), {"job": {"fast-0": 1}}, 0.0).allocations["job"] == UNLIKE


def test_jobs_of_one_size_that_divide_types_differently_both_stay() -> None:
    nodes = [
        NodeInfo(name, slots, node_type=name[:4])
        for name, slots in (("fast-0", 3), ("fast-1", 1), ("slow-0", 1), ("slow-1", 3))
    ]
    jobs = [
        own("a", ["fast-0", "slow-0"], 8, min_replicas=4, max_replicas=4),
        own("b", ["fast-1", "slow-1"], 8, min_replicas=4, max_replicas=4),
    ]
    current = {"a": {"fast-0": 3, "slow-0": 1}, "b": {"slow-1": 3, "fast-1": 1}}
    assert allocate(jobs, nodes, current, 0.0).allocations == current
    assert allocate(jobs, nodes, {}, 0.0).allocations == current


@pytest.mark.parametrize("seed", [5, 20])
def test_allocations_over_several_types_from_before_types_were_known_are_no_error(seed: int) -> None:
    rng = np.random.default_rng(seed)
    nodes = [
        NodeInfo(f"n{i}", int(rng.choice([4, 8])), node_type="abcd"[i % int(rng.integers(3, 5))])
        for i in range(int(rng.integers(30, 60)))
    ]
    jobs = [
        job(
            f"j{i}",
            models={name: slowed(float(rng.uniform(0.1, 2))) for name in "bc"},
            max_replicas=64,
            remaining=float(10 ** rng.uniform(4, 8)),
            pause=float(rng.choice([1.0, 30.0])),
            move_pause=float(rng.choice([1.0, 60.0])),
        )
        for i in range(int(rng.integers(10, 60)))
    ]
    current: dict[str, Allocation] = {}
    names = [node.name for node in nodes]
    for i, here in enumerate(np.array_split(rng.permutation(names), len(jobs) // 2)):
        slots = {node.name: int(rng.integers(1, node.slots + 1)) for node in nodes if node.name in here[:3]}
        current[f"j{i}"] = slots
    type_of = {node.name: node.node_type for node in nodes}
    found = allocate([one for one in jobs if one.name in current], nodes, current, 0.0)
    for name, allocation in found.allocations.items():
        assert allocation, "nothing needs its slots"
        assert allocation == current[name] or len({type_of[node] for node in allocation}) == 1


def test_a_job_without_a_profile_does_not_exceed_its_maximum() -> None:
    # one of the slow nodes takes three replicas or none, so two of them take four at least
    limits = {"fast-0": NodeLimit(1, 2), "slow-0": NodeLimit(3, 3), "slow-1": NodeLimit(1, 3)}
    new = JobInfo("new", 3, 3, min_nodes=2, limits=limits)
    slow = allocate([new], cluster(0, 2, 4), {}, 0.0)
    assert slow.allocations["new"] == {}
    assert "take 4 replicas at least, its maximum is 3" in slow.reasons["new"].text
    both = allocate([new], cluster(2, 2, 4), {}, 0.0).allocations["new"]
    assert sum(both.values()) == 3


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6))
def test_types_keep_every_limit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    nodes = [
        NodeInfo(f"n{i}", int(rng.integers(1, 9)), node_type=str(rng.choice(["a", "b", "c"])))
        for i in range(int(rng.integers(1, 7)))
    ]
    type_of = {node.name: node.node_type for node in nodes}
    total = {t: sum(n.slots for n in nodes if n.node_type == t) for t in set(type_of.values())}
    jobs = [
        job(
            f"j{i}",
            model=None if rng.random() < 0.2 else MODEL,
            models={"a": MODEL, "b": slowed(float(rng.uniform(0.1, 2)))},
            max_profiled_replicas=int(rng.integers(0, 9)),
            min_replicas=int(rng.integers(1, 4)),
        )
        for i in range(int(rng.integers(1, 8)))
    ]
    current: Mapping[str, Allocation] = {}
    for now in (0.0, 60.0, 120.0):
        current = allocate(jobs, nodes, current, now).allocations
        used: dict[str, int] = {}
        for allocation in current.values():
            for node, replicas in allocation.items():
                used[node] = used.get(node, 0) + replicas
            if len({type_of[node] for node in allocation}) > 1:
                assert sum(allocation.values()) > max(total.values())
        assert all(used.get(node.name, 0) <= node.slots for node in nodes)


def best_by_trying(sizes: Sizes, worths: np.ndarray, capacity: np.ndarray) -> float:
    best = 0.0
    columns = range(-1, len(sizes.replicas))
    for picked in itertools.product(columns, repeat=len(worths)):
        chosen = [(row, column) for row, column in enumerate(picked) if column >= 0]
        if (sum((sizes.uses[c] for _, c in chosen), np.zeros(2, dtype=int)) <= capacity).all():
            best = max(best, sum(float(worths[row, column]) for row, column in chosen))
    return best


@pytest.mark.parametrize("seed", range(3))
def test_the_choice_of_sizes_and_types_is_the_best_there_is(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = build_sizes([JobInfo("a", max_replicas=3)], cluster(1, 1, 3), [{}], {})
    worths = rng.uniform(0, 1, (4, len(sizes.replicas))) * sizes.replicas**0.5
    capacity = np.array([3, 2])
    found = choose(sizes, worths, capacity)
    value = sum(worths[row, column] for row, column in enumerate(found.columns) if column is not None)
    assert value == pytest.approx(best_by_trying(sizes, worths, capacity))
    assert found.bound == pytest.approx(value)


def test_large_clusters_are_within_half_a_percent_of_the_bound() -> None:
    rng = np.random.default_rng(1)
    nodes = [NodeInfo(f"n{i}", 8, node_type="abc"[i % 3]) for i in range(90)]
    sizes = build_sizes([JobInfo("a", max_replicas=64)], nodes, [{}], {})
    speed = np.array([1.0, 0.6, 0.3, 0.2])[sizes.kinds] * rng.uniform(0.5, 1.5, (200, 4))[:, sizes.kinds]
    worths = (speed * sizes.replicas ** rng.uniform(0.5, 1.0, (200, 1))) ** 0.5 * rng.uniform(
        0, 200, (200, 1)
    )
    capacity = np.full(3, 240)
    found = choose(sizes, worths, capacity)
    chosen = [(row, column) for row, column in enumerate(found.columns) if column is not None]
    assert (sizes.uses[[column for _, column in chosen]].sum(axis=0) <= capacity).all()
    assert sum(worths[row, column] for row, column in chosen) >= 0.995 * found.bound


@pytest.mark.parametrize("count", [70, 330])
def test_every_node_may_be_of_a_type_of_its_own(count: int) -> None:
    """More types than an array has dimensions, and more combinations than a float can count."""
    nodes = [NodeInfo(f"n{i:03}", 8, node_type=f"t{i:03}") for i in range(count)]
    held = {f"old{i}": {f"n{i:03}": 8} for i in range(count - 3)}
    busy = [JobInfo(name, 8, 8, preemptible=False) for name in held]
    for running in ([], busy):
        current = held if running else {}
        found = allocate([*running, JobInfo("new", max_replicas=4)], nodes, current, now=0.0)
        assert found.allocations["new"]
