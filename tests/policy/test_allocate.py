"""What holds for every decision, whatever the jobs and nodes; and what particular ones must be."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from adaptdl_elastic.autoscaler.policy import (
    Allocation,
    Decision,
    GoodputModel,
    JobInfo,
    NodeInfo,
    NodeLimit,
    Objective,
    PolicySettings,
    allocate,
)
from adaptdl_elastic.autoscaler.policy.curves import goodputs
from adaptdl_elastic.autoscaler.policy.objective import after_pause, horizon
from adaptdl_elastic.autoscaler.policy.policy_types import NetworkPrior
from adaptdl_elastic.autoscaler.policy.solver.placement import Board
from adaptdl_elastic.goodput import GradParams, PerfParams

MODEL = GoodputModel(
    PerfParams(0.12, 0.003, 0.40, 0.01, 0.08, 0.002, 1.6), GradParams(0.01, 200.0), 64, 4096, (16, 128), True
)
SLOW_NETWORK = replace(MODEL, perf_params=PerfParams(0.12, 0.003, 40.0, 1.0, 0.08, 0.002, 1.6))
PLAIN_SUM = PolicySettings(objective=Objective.SPEEDUP, default_pause=0.0, hysteresis=0.0)


def job(name: str = "job", **changes: object) -> JobInfo:
    base = JobInfo(name, 1, 64, model=MODEL, max_profiled_replicas=64, pause=1.0, remaining=1e7, attained=1e5)
    return replace(base, **changes)  # type: ignore[arg-type]


def cluster(*slots: int) -> list[NodeInfo]:
    return [NodeInfo(f"node-{i}", count) for i, count in enumerate(slots)]


def check(
    jobs: Sequence[JobInfo], nodes: Sequence[NodeInfo], current: Mapping[str, Allocation], found: Decision
) -> None:
    """Every promise of `allocate`."""
    by_name = {node.name: node for node in nodes}
    used = dict.fromkeys(by_name, 0)
    spanning = dict.fromkeys(by_name, 0)
    assert set(found.allocations) == {j.name for j in jobs} == set(found.reasons)
    for j in jobs:
        allocation = found.allocations[j.name]
        total = sum(allocation.values())
        assert found.reasons[j.name].text
        if not allocation:
            continue
        kept = dict(allocation) == dict(current.get(j.name, {}))
        assert j.min_replicas <= total <= j.max_replicas
        assert j.requested_replicas in (None, total)
        assert j.min_nodes <= len(allocation) <= (j.max_nodes or len(nodes)) or kept
        for node, replicas in allocation.items():
            assert replicas >= 1
            assert not by_name[node].draining
            used[node] += replicas
            spanning[node] += len(allocation) > 1
            if j.limits is not None:
                assert j.limits[node].min_slots <= replicas <= j.limits[node].max_slots
        if j.model is not None and not kept and j.requested_replicas is None:
            had = sum(current.get(j.name, {}).values())
            assert total <= max(2 * j.max_profiled_replicas, had, j.min_replicas)
    assert all(used[name] <= node.slots for name, node in by_name.items())
    assert all(count <= 1 for count in spanning.values())
    changed = {n for n, a in found.allocations.items() if dict(a) != dict(current.get(n, {}))}
    assert set(found.changed) == changed


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[JobInfo], list[NodeInfo]]:
    sizes = draw(st.lists(st.integers(1, 8), min_size=1, max_size=6))
    nodes = [
        NodeInfo(f"n{i}", slots, draw(st.booleans()), draw(st.integers(0, 9)) == 0, draw(st.booleans()))
        for i, slots in enumerate(sizes)
    ]
    jobs = []
    for i in range(draw(st.integers(1, 7))):
        least = draw(st.integers(1, 4))
        limits = None
        if draw(st.integers(0, 3)) == 0:
            names = draw(st.sets(st.sampled_from([n.name for n in nodes]), min_size=1))
            limits = {n: NodeLimit(draw(st.integers(1, 3)), draw(st.integers(3, 8))) for n in sorted(names)}
        model = draw(st.sampled_from([None, MODEL, SLOW_NETWORK]))
        jobs.append(
            JobInfo(
                f"j{i}",
                least,
                least + draw(st.integers(0, 30)),
                min_nodes=draw(st.sampled_from([1, 1, 1, 2])),
                max_nodes=draw(st.sampled_from([None, None, 1 + least, 3])),
                limits=limits,
                model=model,
                max_profiled_replicas=draw(st.integers(0, 16)),
                requested_replicas=draw(st.sampled_from([None, None, None, least])),
                preemptible=draw(st.integers(0, 4)) > 0,
                avoid_preemptible_nodes=draw(st.booleans()),
                remaining=draw(st.sampled_from([None, 0.0, 1e4, 1e8])),
                attained=draw(st.floats(0, 1e8)),
                pause=draw(st.sampled_from([None, 0.1, 3.0, 30.0])),
                waiting_since=draw(st.sampled_from([None, 0.0, 1000.0])),
            )
        )
    assume(all(j.max_nodes is None or j.max_nodes >= j.min_nodes for j in jobs))
    return jobs, nodes


OBJECTIVES = [PolicySettings(), PLAIN_SUM, PolicySettings(objective=Objective.SPEEDUP, fairness=-1.0)]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(problems(), st.sampled_from(OBJECTIVES), st.randoms(use_true_random=False))
def test_every_promise_is_kept_again_and_again(
    problem: tuple[list[JobInfo], list[NodeInfo]], how: PolicySettings, random: object
) -> None:
    jobs, nodes = problem
    current: Mapping[str, Allocation] = {}
    for now in (1000.0, 2000.0, 3000.0):
        found = allocate(jobs, nodes, current, now, how)
        check(jobs, nodes, current, found)
        again = allocate(jobs, nodes, current, now, how)
        assert again.allocations == found.allocations
        current = found.allocations
        if now == 2000.0:  # a node goes and a job comes
            nodes = [*nodes[1:], NodeInfo("late", 4)]
            jobs = [job("late"), *jobs[1:]]
            current = {name: a for name, a in current.items() if name in {j.name for j in jobs}}


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(problems(), st.sampled_from(OBJECTIVES), st.randoms(use_true_random=False))
# moving a job costs nothing, and nothing has to move; with this seed there are no limits and no types
@example(([JobInfo("a", 3, 3), JobInfo("b", 2, 2)], cluster(3, 3)), PLAIN_SUM, Random(28))
@example(
    (
        [JobInfo("a", 2, 2, min_nodes=2), JobInfo("b", 4, 4)],
        [NodeInfo("n0", 1), NodeInfo("n1", 4), NodeInfo("n2", 1, at_risk=True)],
    ),
    PLAIN_SUM,
    Random(28),
)
def test_finding_free_nodes_at_once_gives_what_trying_every_node_gives(
    problem: tuple[list[JobInfo], list[NodeInfo]], how: PolicySettings, random: Random
) -> None:
    jobs, nodes = problem
    how = replace(how, time_limit=600.0)
    jobs = [replace(j, limits=None if random.random() < 0.2 else limits_of(nodes, random)) for j in jobs]
    if random.random() < 0.5:
        nodes = [replace(node, node_type=random.choice("ab")) for node in nodes]
    current: Mapping[str, Allocation] = {}
    for now in (1000.0, 2000.0):
        found = allocate(jobs, nodes, current, now, how)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Board, "single", lambda *_: None)
            patch.setattr(Board, "several", lambda *_: {})
            tried = allocate(jobs, nodes, current, now, how)
        assert found.allocations == tried.allocations
        current = found.allocations
        # a job that runs does not wait
        jobs = [replace(j, waiting_since=None) if current[j.name] else j for j in jobs]
        nodes = [*nodes[1:], NodeInfo("late", 4)]


def limits_of(nodes: Sequence[NodeInfo], random: Random) -> dict[str, NodeLimit]:
    """Return limits on most of the nodes."""
    chosen = [node for node in nodes if random.random() < 0.8]
    return {node.name: NodeLimit(random.randint(1, 2), random.randint(2, node.slots + 2)) for node in chosen}


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(problems())
def test_limits_as_wide_as_the_nodes_change_nothing(problem: tuple[list[JobInfo], list[NodeInfo]]) -> None:
    jobs, nodes = problem
    everywhere = {node.name: NodeLimit(1, node.slots) for node in nodes}
    free, limited = ([replace(j, limits=limits) for j in jobs] for limits in (None, everywhere))
    assert allocate(free, nodes, {}, 0.0).allocations == allocate(limited, nodes, {}, 0.0).allocations


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(problems(), st.integers(0, 2**32 - 1))
def test_small_noise_makes_nothing_flap(problem: tuple[list[JobInfo], list[NodeInfo]], seed: int) -> None:
    jobs, nodes = problem
    jobs = [replace(j, pause=3.0, waiting_since=None, remaining=1e8) for j in jobs]
    rng = np.random.default_rng(seed)
    current: Mapping[str, Allocation] = {}
    for _ in range(4):  # let it settle
        current = allocate(jobs, nodes, current, 0.0).allocations
    for _ in range(3):
        noisy = [
            replace(j, model=replace(j.model, perf_params=_shaken(j.model.perf_params, rng)))
            if j.model
            else j
            for j in jobs
        ]
        assert allocate(noisy, nodes, current, 0.0).changed == ()


def _shaken(theta: PerfParams, rng: np.random.Generator) -> PerfParams:
    return PerfParams(*(x * float(np.exp(rng.normal(0, 0.002))) for x in theta[:6]), gamma=theta.gamma)


# ------------------------------------------------------------------------------------ optimality


def best_by_brute_force(jobs: Sequence[JobInfo], nodes: Sequence[NodeInfo]) -> float:
    """The largest sum of speedups of any feasible allocation of at most three jobs to two nodes."""
    per_node = [range(node.slots + 1) for node in nodes]
    options = list(itertools.product(*per_node))
    total = max(sum(o) for o in options)
    single = goodputs([j.model for j in jobs if j.model], [1] * total, np.arange(1, total + 1)).goodput
    several = goodputs([j.model for j in jobs if j.model], [2] * (total - 1), np.arange(2, total + 1)).goodput
    best = 0.0
    for choice in itertools.product(options, repeat=len(jobs)):
        if any(sum(part) > node.slots for part, node in zip(zip(*choice, strict=True), nodes, strict=True)):
            continue
        spans = [sum(1 for x in option if x) > 1 for option in choice]
        if any(sum(s for s, o in zip(spans, choice, strict=True) if o[i]) > 1 for i in range(len(nodes))):
            continue
        worth = 0.0
        for row, option in enumerate(choice):
            count = sum(option)
            if count:
                found = several[row, count - 2] if spans[row] else single[row, count - 1]
                worth += found / single[row, 0]
        best = max(best, worth)
    return best


models = st.builds(
    lambda a, b, n, r, g, v: GoodputModel(
        PerfParams(a, b, max(n, r), 0.01, r, 0.001, g), GradParams(1.0, v), 32, 1024, (8, 64), True
    ),
    st.floats(0.01, 0.5),
    st.floats(1e-4, 0.02),
    st.floats(0.01, 2),
    st.floats(0.001, 0.5),
    st.floats(1, 4),
    st.floats(0.1, 300),
)


@settings(max_examples=8, deadline=None)
@given(st.lists(models, min_size=1, max_size=3), st.sampled_from([(4, 4), (3, 2), (4, 1), (2, 2)]))
def test_the_sum_of_speedups_is_the_largest_there_is(
    found: list[GoodputModel], slots: tuple[int, int]
) -> None:
    jobs = [job(f"j{i}", model=model, max_replicas=8) for i, model in enumerate(found)]
    nodes = cluster(*slots)
    decision = allocate(jobs, nodes, {}, 0.0, PLAIN_SUM)
    assert decision.objective == pytest.approx(best_by_brute_force(jobs, nodes), rel=1e-6)


# ------------------------------------------------------------------------------------ what it says


def test_one_job_on_a_laptop_grows_and_says_why() -> None:
    started = allocate([job(model=None, max_profiled_replicas=0)], cluster(2), {}, 0.0)
    assert started.allocations["job"] == {"node-0": 1}
    assert "until its goodput has been measured" in started.reasons["job"].text
    grown = allocate([job(max_profiled_replicas=1, pause=2.1)], cluster(2), started.allocations, 60.0)
    assert grown.allocations["job"] == {"node-0": 2}
    text = grown.reasons["job"].text
    assert text.startswith("goodput ")
    assert "→" in text
    assert re.fullmatch(r".* with 2 replicas pays the 2\.1 s pause within 4\.\d s", text)
    assert grown.reasons["job"].one_more is None
    assert started.reasons["job"].one_more is None


@pytest.mark.parametrize(("nodes", "replicas"), [(2, 2), (2, 8), (4, 4)])
def test_a_size_on_several_nodes_is_predicted_from_the_link_until_it_is_measured(
    nodes: int, replicas: int
) -> None:
    unmeasured = PerfParams(0.02, 0.015, 0.0, 0.0, 0.0, 0.0, 1.0)
    model = GoodputModel(unmeasured, GradParams(1.0, 0.0), 16, network=NetworkPrior(1e-4, 40e6 / 12.5e6))
    ring = 2 * (replicas - 1) / replicas * 40e6 / 12.5e6
    seconds = 0.02 + 0.015 * 16 / replicas + ring
    assert goodputs([model], nodes, replicas).goodput[0, 0] == pytest.approx(16 / seconds, rel=0.01)


def test_the_reason_names_the_time_by_which_a_pause_is_made_up_for() -> None:
    one, four = goodputs([MODEL], [1, 1], [1, 4]).goodput[0]
    ends = 48.0  # with four replicas, which it has from second 30 on
    short = job(pause=30.0, remaining=float((ends - 30.0) * four))
    found = allocate([short], cluster(4), {"job": {"node-0": 1}}, 0.0)
    assert found.allocations["job"] == {"node-0": 4}
    seconds = float(found.reasons["job"].text.split(" pays the 30 s pause within ")[1].removesuffix(" s"))
    assert (seconds - 30.0) * four == pytest.approx(seconds * one, rel=0.01)
    assert 30.0 < seconds < ends


def test_a_change_that_never_pays_is_not_said_to_pay() -> None:
    ending = job(min_replicas=2, pause=30.0, remaining=100.0)
    text = allocate([ending], cluster(2), {"job": {"node-0": 1}}, 0.0).reasons["job"].text
    assert text.endswith("with 2 replicas")
    assert "→" in text
    # nor is a step to a size that would
    growing = job(max_profiled_replicas=1, pause=30.0, remaining=1e4)
    other = job("other", max_replicas=1, remaining=1e4)
    text = allocate([growing, other], cluster(4, 4), {"job": {"node-0": 1}}, 0.0).reasons["job"].text
    assert text.endswith("with 2 replicas: on the way to 7 replicas")


def test_a_change_that_does_not_pay_is_not_made() -> None:
    current = {"job": {"node-0": 1}}
    slow = job(pause=55.0, max_profiled_replicas=1)
    kept = allocate([slow], cluster(2), current, 0.0, PolicySettings(horizon=60.0))
    assert kept.changed == ()
    assert "no change pays" in kept.reasons["job"].text
    assert allocate([slow], cluster(2), current, 0.0, PolicySettings(horizon=600.0)).changed == ("job",)


@pytest.mark.parametrize(("pause", "seconds"), [(0.1, 60.0), (1.0, 60.0), (4.0, 60.0), (30.0, 450.0)])
def test_a_change_pays_within_the_time_an_allocation_is_kept(pause: float, seconds: float) -> None:
    assert horizon(np.array([pause]), PolicySettings()) == [seconds]
    # twice as fast is worth a pause of just under half of that time, and no longer one
    for share, pays in ((0.45, True), (0.55, False)):
        cost = np.array([share * seconds])
        worth = after_pause(np.array([[1.0, 2.0]]), np.array([1e9]), cost, PolicySettings(horizon=seconds))
        assert bool(worth[0, 1] > 1.0) is pays


def test_a_job_that_has_outlived_its_declaration_grows_again() -> None:
    """Nothing pays for a job that is about to end; one that goes on nevertheless must not stay as it is."""
    ending = job(pause=5.0, remaining=0.0)
    current = {"job": {"node-0": 1}}
    assert allocate([ending], cluster(4), current, 0.0).changed == ()
    assert allocate([replace(ending, outlived=True)], cluster(4), current, 0.0).changed == ("job",)


Rows = dict[str, tuple[list[JobInfo], list[NodeInfo], dict[str, Allocation], dict[str, Allocation]]]
DECISIONS: Rows = {
    # jobs, nodes, what the jobs have, and what they get
    "no jobs": ([], cluster(4), {}, {}),
    "no nodes": ([job()], [], {}, {"job": {}}),
    "a node with fewer than no slots": ([job()], [NodeInfo("bad", -4)], {}, {"job": {}}),
    "nodes with no slots or fewer are not there": (
        [job()], [NodeInfo("bad", -4), NodeInfo("empty", 0), NodeInfo("good", 2)], {}, {"job": {"good": 2}},
    ),
    "nothing grows beyond twice what was profiled": (
        [job(max_profiled_replicas=2)], cluster(8, 8), {"job": {"node-0": 2}}, {"job": {"node-0": 4}},
    ),
    "a draining node is left even by a job that may not be preempted": (
        [job(preemptible=False)], [NodeInfo("old", 4, draining=True), NodeInfo("new", 4)],
        {"job": {"old": 2}}, {"job": {"new": 4}},
    ),
    "preemptible nodes are the last choice of jobs that ask": (
        [job("wary", max_replicas=1, avoid_preemptible_nodes=True), job("brave", max_replicas=1)],
        [NodeInfo("spot", 4, preemptible=True), NodeInfo("solid", 4)],
        {}, {"wary": {"solid": 1}, "brave": {"spot": 1}},
    ),
    "nodes at risk are the last choice of all": (
        [job(max_replicas=4)], [NodeInfo("shaky", 4, at_risk=True), NodeInfo("sound", 4)],
        {}, {"job": {"sound": 4}},
    ),
    "survivors come first, so that rank 0 stays": (
        [job(max_profiled_replicas=4)], cluster(4, 4, 4),
        {"job": {"node-2": 4}}, {"job": {"node-2": 4, "node-0": 4}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DECISIONS)
def test_jobs_get_nodes_that_they_can_and_may_use(name: str) -> None:
    jobs, nodes, current, expected = DECISIONS[name]
    found = allocate(jobs, nodes, current, 0.0)
    assert {job: list(places.items()) for job, places in found.allocations.items()} == {
        job: list(places.items()) for job, places in expected.items()
    }
    assert all(text == "there are no nodes" for text in found.pending.values())


def test_short_remainders_come_first() -> None:
    jobs = [job("long", remaining=1e9), job("short", remaining=1e5)]
    found = allocate(jobs, cluster(4, 4, 4, 4, 4, 4, 4, 4, 4, 4), {}, 0.0)
    long, short = (sum(found.allocations[name].values()) for name in ("long", "short"))
    assert short > long >= 1


def test_no_job_waits_while_another_has_two_replicas() -> None:
    jobs = [job(f"j{i}", remaining=10.0**i) for i in range(8)]
    found = allocate(jobs, cluster(4, 4), {}, 0.0)
    assert all(sum(found.allocations[j.name].values()) == 1 for j in jobs)


def test_a_job_that_has_waited_too_long_comes_first() -> None:
    jobs = [job(f"short{i}", remaining=1e4) for i in range(4)]
    late = job("late", remaining=1e12, waiting_since=0.0)
    current = {j.name: {"node-0": 1} for j in jobs}
    patient = allocate([*jobs, late], cluster(4), current, 800.0, PolicySettings(max_wait=900.0))
    assert patient.allocations["late"] == {}
    assert "waiting for 800 s" in patient.reasons["late"].text
    due = allocate([*jobs, late], cluster(4), current, 900.0, PolicySettings(max_wait=900.0))
    assert due.allocations["late"]


def test_a_job_that_may_not_be_preempted_keeps_what_it_has() -> None:
    current = {"pinned": {"node-0": 3}}
    jobs = [job("pinned", preemptible=False), *(job(f"j{i}") for i in range(5))]
    found = allocate(jobs, cluster(4), current, 0.0)
    assert found.allocations["pinned"] == {"node-0": 3}
    assert "preempted" in found.reasons["pinned"].text


def test_scattered_replicas_are_brought_together_when_that_pays() -> None:
    scattered = {"job": {"node-0": 1, "node-1": 1}}
    slow = job(model=SLOW_NETWORK, max_replicas=2, pause=1.0)
    found = allocate([slow], cluster(2, 2), scattered, 0.0)
    assert len(found.allocations["job"]) == 1
    assert sum(found.allocations["job"].values()) == 2


@pytest.mark.parametrize("slots", [2, 3])
def test_small_jobs_move_to_make_room_for_a_large_one_and_no_more_than_must(slots: int) -> None:
    current = {f"{node}-{n}": {f"node-{node}": 1} for node in (0, 1) for n in range(slots - 1)}
    jobs = [*(job(name, max_replicas=1) for name in current), job("big", model=SLOW_NETWORK, max_replicas=2)]
    found = allocate(jobs, cluster(slots, slots), current, 0.0, replace(PLAIN_SUM, default_pause=0.1))
    assert list(found.allocations["big"].values()) == [2]
    moved = [name for name in current if dict(found.allocations[name]) != current[name]]
    assert len(moved) == 1
    assert found.allocations[moved[0]] or slots == 2


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        (job(min_replicas=9), "needs 9 replicas, there is room for 8 on 2 nodes"),
        (job(min_nodes=3), "needs 3 nodes, 2 of 2 can take it"),
        (job(max_nodes=1, min_replicas=5), "needs 5 replicas, there is room for 4"),
        (job(limits={"elsewhere": NodeLimit()}), "none of the 2 nodes can take it"),
        (job(requested_replicas=65), "needs 65 replicas"),
    ],
)
def test_a_job_that_cannot_run_says_why_and_harms_no_other(wanted: JobInfo, why: str) -> None:
    found = allocate([wanted, job("other")], cluster(4, 4), {}, 0.0)
    assert found.allocations["job"] == {}
    assert why in found.pending["job"]
    assert why in found.reasons["job"].text
    assert found.allocations["other"]


def test_a_node_that_lost_slots_is_not_overfilled() -> None:
    found = allocate([job("a"), job("b")], cluster(2), {"a": {"node-0": 2}, "b": {"node-0": 2}}, 0.0)
    assert sum(sum(a.values()) for a in found.allocations.values()) == 2


def test_fairness_moves_slots_from_a_job_that_scales_well_to_one_that_does_not() -> None:
    slow_bus = replace(MODEL, perf_params=PerfParams(0.12, 0.003, 0.40, 0.01, 0.50, 0.05, 1.6))
    jobs, nodes = [job("well"), job("badly", model=slow_bus)], cluster(8)
    shares = {}
    for p in (1.0, -1.0, -5.0):
        found = allocate(jobs, nodes, {}, 0.0, replace(PLAIN_SUM, fairness=p))
        shares[p] = {name: sum(allocation.values()) for name, allocation in found.allocations.items()}
    assert shares[1.0]["badly"] <= shares[-1.0]["badly"] <= shares[-5.0]["badly"]
    assert shares[1.0]["badly"] < shares[-5.0]["badly"]


def test_weights_count() -> None:
    nodes = cluster(4)
    light, heavy = (
        allocate([job("a", weight=weight), job("b")], nodes, {}, 0.0).allocations["a"]
        for weight in (0.1, 10.0)
    )
    assert sum(light.values()) < sum(heavy.values())


def test_reasons_say_whose_choice_a_size_is() -> None:
    mine = job(requested_replicas=2, fixed_because="adaptdl scale: 2 replicas", preemptible=False)
    found = allocate([mine], cluster(4), {"job": {"node-0": 2}}, 0.0)
    assert found.reasons["job"].text == "keeps its 2 replicas: adaptdl scale: 2 replicas"
    found = allocate([mine], cluster(4), {}, 0.0)
    assert found.reasons["job"].text == "2 replicas: adaptdl scale: 2 replicas"
    found = allocate([job(preemptible=False)], cluster(4), {"job": {"node-0": 1}}, 0.0)
    assert found.reasons["job"].text == "keeps its 1 replica: it may not be preempted"


@pytest.mark.parametrize("pause", [0.2, 30.0, 600.0])
@pytest.mark.parametrize("p", [-1.0, -3.0, -5.0, -20.0])
def test_running_is_worth_more_than_waiting_at_any_fairness(p: float, pause: float) -> None:
    settings = PolicySettings(objective=Objective.SPEEDUP, fairness=p, default_pause=pause)
    jobs = [replace(job("new"), model=None), replace(job("known"), max_replicas=8, remaining=100.0)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = allocate(jobs, cluster(2), {}, 0.0, settings)
    assert all(found.allocations.values())


@pytest.mark.parametrize("p", [-1000.0, -20.5, 1.5, float("nan")])
def test_a_fairness_that_no_numbers_can_hold_is_refused(p: float) -> None:
    with pytest.raises(ValueError, match=r"fairness .* must be between -20 and 1"):
        PolicySettings(objective=Objective.SPEEDUP, fairness=p)


def test_noise_in_what_jobs_report_moves_nothing() -> None:
    """One of two jobs has two of three slots, of which the other would make a part in a thousand more."""
    better = replace(MODEL, perf_params=MODEL.perf_params._replace(alpha_r=0.0798))
    jobs = [
        JobInfo(n, max_replicas=2, model=m, max_profiled_replicas=2)
        for n, m in (("one", MODEL), ("other", better))
    ]
    current = {"one": {"node-0": 2}, "other": {"node-0": 1}}
    assert allocate(jobs, cluster(3), current, 0.0, replace(PLAIN_SUM, hysteresis=0.005)).changed == ()
    assert allocate(jobs, cluster(3), current, 0.0, PLAIN_SUM).changed == ("one", "other")
