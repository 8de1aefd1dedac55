"""Nodes are bought and exchanged by their price per goodput, in virtual time: A100 beside T4."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from scaling_world import MODEL, World, job, waiting

from adaptdl_elastic.autoscaler.policy.policy_types import GoodputModel, JobInfo
from adaptdl_elastic.autoscaler.providers.base import Capacity, Pool
from adaptdl_elastic.autoscaler.scaling.economics import ScalingSettings
from adaptdl_elastic.autoscaler.scaling.node_market import learn_types
from adaptdl_elastic.autoscaler.scaling.scaling_types import Memory, NodeUse, Observation
from adaptdl_elastic.goodput import PerfParams

A100 = Pool("a100", desired=0, maximum=10, hourly_price=3.0, instance_type="p4d.24xlarge")
T4 = Pool("t4", desired=0, maximum=10, hourly_price=1.0, instance_type="g4dn.xlarge")
NODE_TYPES = {"a100": "NVIDIA A100", "t4": "Tesla T4"}
BOTH = frozenset(NODE_TYPES.values())
ONLY_A100 = frozenset({"NVIDIA A100"})
ONLY_T4 = frozenset({"Tesla T4"})
HOUR = 3600


def slower(factor: float) -> GoodputModel:
    """Return the model of nodes on which every step takes this multiple of the time."""
    *times, gamma = MODEL.perf_params
    return replace(MODEL, perf_params=PerfParams(*(seconds * factor for seconds in times), gamma))


def typed(factor: float, measured: frozenset[str] = BOTH, **more: object) -> JobInfo:
    """Return a job of four replicas that is slower on T4 by this factor."""
    models = {"NVIDIA A100": MODEL, "Tesla T4": slower(factor if measured == BOTH else 1.0)}
    facts = {"requested_replicas": 4, "max_replicas": 4, "remaining": 1e9, **more}
    return job(models=models, measured=measured, **facts)


class TypedWorld(World):
    """Agents report their node's type. The first job runs on `preferred` nodes, as many as it may."""

    preferred = "a100"
    spread = True  # its replicas are on nodes of all types

    def nodes_in_use(self) -> dict[str, NodeUse]:
        found = {}
        for name, use in super().nodes_in_use().items():
            pool = name.partition("-")[0]
            idle = not self.spread and pool != self.preferred
            found[name] = replace(
                use, node_type=NODE_TYPES.get(pool, pool), replicas={} if idle else use.replicas
            )
        return found

    def bought(self) -> dict[str, int]:
        return {p: sum(name.startswith(p) for name in self.running) for p in self.desired}


def world(*, on_a100: int = 0, on_t4: int = 0, **more: float) -> TypedWorld:
    """Return a world in which so many A100s and nodes of both types have been seen."""
    pools = replace(A100, desired=on_a100), replace(T4, desired=on_t4)
    found = TypedWorld(*pools, settings=ScalingSettings(**more))  # type: ignore[arg-type]
    found.memory = Memory(node_types={"p4d": "NVIDIA A100", "g4dn": "Tesla T4"})
    return found


class Apart(TypedWorld):
    """Each job runs only on nodes of `accepts`, one replica on each."""

    accepts: Mapping[str, Collection[str]] = MappingProxyType({})

    def nodes_in_use(self) -> dict[str, NodeUse]:
        found = {name: replace(use, replicas={}) for name, use in super().nodes_in_use().items()}
        free = sorted(name for name, use in found.items() if not use.draining)
        for one in self.jobs:
            size = one.requested_replicas or self.memory.wanted.get(one.name, 1)
            for name in [n for n in free if n.partition("-")[0] in self.accepts[one.name]][:size]:
                found[name] = replace(found[name], replicas={one.name: 1})
                free.remove(name)
        return found


def two_jobs(on_a100: int, on_t4: int, *jobs: JobInfo, **more: object) -> Apart:
    """Return a world in which `jobs` run: train on A100 only, small on T4 only."""
    found = Apart(
        replace(A100, desired=on_a100),
        replace(T4, desired=on_t4),
        settings=ScalingSettings(**more),  # type: ignore[arg-type]
    )
    found.memory = Memory(node_types={"p4d": "NVIDIA A100", "g4dn": "Tesla T4"})
    found.accepts = {"train": {"a100"}, "small": {"t4"}}
    found.jobs = jobs
    found.run(200)
    return found


def small(replicas: int, measured: frozenset[str] = ONLY_T4) -> JobInfo:
    """Return a job that is as fast on T4 as on A100, where both are measured."""
    return replace(typed(1, measured, requested_replicas=replicas, max_replicas=replicas), name="small")


@pytest.mark.parametrize("measured", [BOTH, ONLY_A100])
def test_a_job_grows_on_its_type_beside_one_that_runs_on_another(measured: frozenset[str]) -> None:
    """T4s were bought for it, stayed idle and were released, again and again."""
    cluster = two_jobs(2, 1, typed(10, measured, requested_replicas=2), small(1))
    cluster.of_jobs(typed(10, measured), small(1)).run(2 * HOUR, 30)
    assert (cluster.bought(), cluster.provider.launched) == ({"a100": 4, "t4": 1}, 5)


@pytest.mark.parametrize(("before", "after"), [(1, 3), (0, 1)])
def test_two_jobs_that_lack_nodes_get_each_its_type(before: int, after: int) -> None:
    """The second job grows as well, or starts to wait."""
    running = (small(before, BOTH),) if before else ()
    cluster = two_jobs(2, before, typed(10, requested_replicas=2), *running)
    cluster.of_jobs(typed(10), small(after, BOTH)).run(2 * HOUR, 30)
    assert (cluster.bought(), cluster.provider.launched) == ({"a100": 4, "t4": after}, 4 + after)


def test_a_new_job_that_measured_nothing_waits_beside_one_that_grows() -> None:
    """It gets what is left: no type is reserved for it."""
    cluster = two_jobs(2, 0, typed(10, requested_replicas=2))
    cluster.accepts = {"train": {"a100"}, "new": {"a100", "t4"}}
    cluster.of_jobs(typed(10, ONLY_A100), waiting("new", 3)).run(2 * HOUR, 30)
    assert (cluster.bought(), cluster.provider.launched) == ({"a100": 6, "t4": 1}, 7)


def test_a_job_gets_its_type_while_the_type_of_another_cannot_be_had() -> None:
    cluster = two_jobs(2, 1, typed(10, requested_replicas=2), small(1))
    cluster.provider.outage["a100"] = "no capacity"
    cluster.of_jobs(typed(10), small(2)).run(2 * HOUR, 30)
    assert (cluster.bought(), cluster.provider.launched) == ({"a100": 2, "t4": 2}, 4)


def test_a_job_with_a_deadline_grows_on_its_type() -> None:
    facts = {"requested_replicas": None, "max_replicas": 8, "min_replicas": 1, "remaining": 3e7}
    free = typed(10, **facts)
    cluster = two_jobs(1, 1, typed(10, requested_replicas=1), small(1), deadlines={"train": 30_000.0})
    cluster.jobs = (free, small(1))
    cluster.run(HOUR, 30)
    assert cluster.bought() == {"a100": cluster.memory.wanted["train"], "t4": 1}
    assert cluster.provider.launched == 1 + cluster.bought()["a100"]
    assert cluster.bought()["a100"] > 1


@pytest.mark.parametrize("other", [0.0, 1.0])
def test_free_nodes_are_not_exchanged_for_free_ones(other: float) -> None:
    """They were, every five minutes."""
    cluster = TypedWorld(replace(A100, hourly_price=0.0), replace(T4, hourly_price=other))
    cluster.memory = Memory(node_types={"p4d": "NVIDIA A100", "g4dn": "Tesla T4"})
    cluster.of_jobs(typed(1)).run(2 * HOUR, 30)
    assert cluster.provider.launched == 4


def test_no_node_is_exchanged_for_a_slower_one_while_the_job_has_a_third_type() -> None:
    """The slower node stayed idle and was released, and the faster one was bought again."""
    third = Pool("l4", desired=1, maximum=1, hourly_price=1.5, instance_type="g6.xlarge")
    cluster = TypedWorld(replace(A100, desired=2), replace(T4, hourly_price=0.9), third)
    cluster.memory = Memory(node_types={"p4d": "NVIDIA A100", "g4dn": "Tesla T4", "g6": "l4"})
    models = {"NVIDIA A100": MODEL, "Tesla T4": slower(2), "l4": MODEL}
    cluster.jobs = (
        job(models=models, measured=frozenset(models), requested_replicas=3, max_replicas=3, remaining=1e9),
    )
    cluster.run(2 * HOUR, 30)
    assert cluster.bought() == {"a100": 2, "t4": 0, "l4": 1}


def test_the_type_of_a_family_of_two_does_not_change_with_the_order_of_its_nodes() -> None:
    cluster = TypedWorld(*(replace(T4, name=name, desired=2, instance_type="g5.xlarge") for name in "ab"))
    for seed in range(40):
        cluster.tick()
        instances = list(cluster.look().instances)
        random.Random(seed).shuffle(instances)
        capacity = replace(cluster.look(), instances=tuple(instances))
        seen = Observation(cluster.now, capacity, cluster.nodes_in_use(), ())
        assert learn_types(cluster.memory, seen).node_types == cluster.memory.node_types


@pytest.mark.parametrize(
    ("job_now", "outage", "bought"),
    [
        # four T4 were bought: a slot of them costs a third, and the same work 3.3 times as much
        (typed(10), "", {"a100": 4, "t4": 0}),
        (typed(2), "", {"a100": 0, "t4": 4}),
        (typed(10, ONLY_A100), "", {"a100": 4, "t4": 0}),
        (typed(10, ONLY_A100), "a100", {"a100": 0, "t4": 1}),
    ],
    ids=["ten times slower", "twice slower", "not measured", "the only one for sale"],
)
def test_a_type_is_bought_by_what_was_measured_on_it(
    job_now: JobInfo, outage: str, bought: dict[str, int]
) -> None:
    cluster = world()
    cluster.provider.outage = {outage: "no capacity"}
    assert cluster.of_jobs(job_now).run(HOUR, 30).bought() == bought


def test_a_type_that_no_job_has_measured_is_tried_on_one_node() -> None:
    """A new job waits, and could use four."""
    cluster = world(on_a100=1)
    cluster.jobs = (typed(10, ONLY_A100, requested_replicas=1), waiting("new", 4))
    most = 0
    for _ in range(120):
        cluster.tick(30)
        most = max(most, cluster.desired["t4"])
    assert (most, cluster.bought()) == (1, {"a100": 4, "t4": 1})


def test_a_new_job_that_needs_several_nodes_is_tried_on_so_many() -> None:
    cluster = world(on_a100=1)
    cluster.jobs = (typed(10, ONLY_A100, requested_replicas=1), replace(waiting("new", 4), min_nodes=2))
    cluster.until(lambda: len(cluster.running) == 5)
    assert cluster.desired == {"a100": 3, "t4": 2}


@pytest.mark.parametrize(("factor", "after"), [(10, {"a100": 4, "t4": 0}), (2, {"a100": 0, "t4": 4})])
def test_the_measurement_decides_after_the_trial(factor: float, after: dict[str, int]) -> None:
    cluster = world()
    cluster.jobs = (typed(factor, frozenset(), requested_replicas=1),)
    cluster.until(lambda: cluster.bought() == {"a100": 0, "t4": 1})
    cluster.jobs = (typed(factor),)
    cluster.until(lambda: len(cluster.running) == 4)
    cluster.spread = False
    cluster.preferred = "a100" if factor == 10 else "t4"
    cluster.run(2 * HOUR, 30)
    assert cluster.bought() == after


def test_a_job_that_runs_grows_on_its_own_type_while_that_is_for_sale() -> None:
    """Replicas on nodes of two types run at the pace of the slower one."""
    for job_now in (typed(10, ONLY_A100), typed(2)):
        cluster = world(on_a100=3)
        cluster.run(120)
        cluster.of_jobs(job_now).run(HOUR, 30)
        assert cluster.desired == {"a100": 4, "t4": 0}
    cluster.provider.outage["a100"] = "no capacity"
    for factor, bought in ((2, 0), (1.2, 2)):  # six are slower than four on A100, or faster
        cluster.of_jobs(typed(factor, requested_replicas=6, max_replicas=6)).run(240, 30)
        assert cluster.bought() == {"a100": 4, "t4": bought}


@pytest.mark.parametrize(
    ("factor", "measured", "left", "exchanged"),
    [(2, ONLY_A100, 1e9, False), (2, BOTH, 1e9, True), (2, BOTH, 1e6, False)],
)
def test_given_a100_they_are_exchanged_only_for_cheaper_goodput(
    factor: float, measured: frozenset[str], left: float, exchanged: bool
) -> None:
    """All were exchanged for T4. While it lasts, all nodes of a job work at the pace of the slowest."""
    own = typed(factor, measured, remaining=left, requested_replicas=None, min_replicas=4)
    cluster = world(on_a100=4).of_jobs(own).run(6 * HOUR, every=60)
    assert cluster.bought()["a100"] == (0 if exchanged else 4)


def test_an_idle_trial_node_is_exchanged_for_the_type_at_work() -> None:
    cluster = world(on_a100=3, on_t4=1)
    cluster.spread = False
    cluster.of_jobs(typed(10, ONLY_A100)).run(2 * HOUR, 30)
    assert cluster.bought() == {"a100": 4, "t4": 0}


def test_limits_hold_real_prices() -> None:
    cluster = world(max_hourly_cost=6.5)
    cluster.jobs = (typed(10),)
    for _ in range(120):
        assert cluster.tick(30).hourly_cost <= 6.5
    assert cluster.bought() == {"a100": 2, "t4": 0}


def test_the_first_purchase_of_all_is_of_one_type() -> None:
    cluster = TypedWorld(A100, replace(T4, maximum=2))
    cluster.jobs = (typed(10, frozenset()),)
    cluster.tick()
    assert cluster.desired == {"a100": 0, "t4": 2}
    cluster.run(HOUR, 30)
    assert cluster.desired == {"a100": 2, "t4": 2}


def test_the_types_of_instance_families_are_remembered_in_the_store() -> None:
    cluster = TypedWorld(replace(A100, desired=1), T4)
    cluster.run(120)
    assert cluster.memory.node_types == {"p4d": "NVIDIA A100"}
    adapter: TypeAdapter[Memory] = TypeAdapter(Memory)
    assert adapter.validate_json(adapter.dump_json(cluster.memory)) == cluster.memory


@settings(max_examples=25, deadline=None)
@given(st.floats(0.1, 5.0), st.floats(0.1, 5.0), st.integers(1, 8), st.integers(0, 4))
def test_with_equal_speeds_nothing_differs_from_one_type(
    one: float, other: float, replicas: int, there: int
) -> None:
    """Both types are measured and equally fast, or there is only one type."""
    found = []
    for named in (True, False):
        pools = (replace(A100, hourly_price=one, desired=there), replace(T4, hourly_price=other))
        cluster = TypedWorld(*(pools if named else (replace(p, instance_type="") for p in pools)))
        cluster.memory = Memory(node_types={"p4d": "NVIDIA A100", "g4dn": "Tesla T4"} if named else {})
        cluster.of_jobs(typed(1.0, max_replicas=8, requested_replicas=replicas)).run(1200, every=30)
        found.append([repr(action) for action in cluster.log])
    assert found[0] == found[1]


class OtherType(World):
    """The group labelled g5 gives g6: its cheapest type is not the one that it can have."""

    def look(self) -> Capacity:
        for name, instance in self.provider.instances.items():
            self.provider.instances[name] = replace(instance, instance_type="g6.xlarge")
        return self.provider.capacity()

    def nodes_in_use(self) -> dict[str, NodeUse]:
        return {name: replace(use, node_type="L4") for name, use in super().nodes_in_use().items()}


def test_a_job_grows_where_a_group_gives_another_type_than_its_cheapest() -> None:
    found = OtherType(Pool("spot", desired=1, maximum=8, hourly_price=0.4, instance_type="g5.xlarge"))
    on_l4 = job(models={"L4": MODEL}, measured=frozenset({"L4"}), max_replicas=4, remaining=1e9)
    found.jobs = (replace(on_l4, requested_replicas=1),)
    found.run(200)
    found.jobs = (replace(on_l4, requested_replicas=4),)
    found.run(HOUR, 30)
    assert len(found.running) == 4


def test_a_job_that_has_measured_nothing_grows_on_its_own_type() -> None:
    train = typed(10, ONLY_A100, requested_replicas=2)
    cluster = two_jobs(2, 1, train, waiting("small", 1))
    cluster.jobs = (train, waiting("small", 3))
    cluster.run(HOUR, 30)
    assert (cluster.bought(), cluster.provider.launched) == ({"a100": 2, "t4": 3}, 5)


def test_the_least_nodes_are_bought_while_a_job_lacks_an_unavailable_type() -> None:
    cluster = world(on_a100=1)
    cluster.run(100)
    cluster.provider.outage["a100"] = "no capacity"
    cluster.settings = ScalingSettings(min_nodes=5)
    cluster.of_jobs(typed(10, ONLY_A100, requested_replicas=2)).run(HOUR, 30)
    assert cluster.bought() == {"a100": 1, "t4": 4}


def test_all_nodes_of_a_job_that_needs_several_are_bought_at_once() -> None:
    large = replace(A100, slots=8, hourly_price=24.0)
    found = TypedWorld(large, replace(T4, slots=8, hourly_price=8.0))
    found.memory = Memory(node_types={"p4d": "NVIDIA A100", "g4dn": "Tesla T4"})
    found.jobs = (typed(10, min_nodes=4, min_replicas=4),)
    found.tick()
    assert found.desired == {"a100": 4, "t4": 0}
