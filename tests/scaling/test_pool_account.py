"""The account of a pool: what its money bought, and how often its price has turned."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scaling_cluster import KEYS, Cluster
from scaling_world import World, job

from adaptdl_elastic.autoscaler.providers.base import Capacity, Pool, UnknownInstanceError
from adaptdl_elastic.autoscaler.scaling.economics import ScalingSettings
from adaptdl_elastic.autoscaler.scaling.node_market import NodeMarket
from adaptdl_elastic.autoscaler.scaling.observed_history import remember
from adaptdl_elastic.autoscaler.scaling.pool_account import given_back, lost, surcharge, turns_told
from adaptdl_elastic.autoscaler.scaling.scaling_types import (
    CHEAPER,
    Known,
    Memory,
    Observation,
    PoolMemory,
    Release,
)
from adaptdl_elastic.rendezvous.store.memory import MemoryStore

DEMAND = Pool("demand", desired=0, maximum=10, hourly_price=1.0)
SPOT = Pool("spot", desired=0, maximum=10, hourly_price=0.3, preemptible=True)
MINUTE, HOUR = 60.0, 3600.0
SETTINGS = ScalingSettings()
# Bought at 10 h for 2.0 an hour, one minute of boot, half an hour of work.
NODE = Known(
    "pool",
    preemptible=True,
    first_seen=10 * HOUR,
    hourly_price=2.0,
    registered=10 * HOUR + 31 * MINUTE,
    became=10 * HOUR + MINUTE,
    worked=True,
    work=30 * MINUTE,
    bought_at=2.0,
)
END = 10 * HOUR + 31 * MINUTE


def minutes(pool: PoolMemory) -> tuple[float, float]:
    """The minutes of a node for 2.0 an hour that were paid, and that were useful."""
    return round(pool.spent * 30, 6), round(pool.gained * 30, 6)


def loss(pool: PoolMemory, entry: Known, *living: Known, now: float = END) -> PoolMemory:
    return lost(pool, entry, now, SETTINGS, living)


# What a lost node was worth


def test_without_a_notice_the_work_since_the_last_checkpoint_was_not_useful() -> None:
    assert minutes(loss(PoolMemory(), NODE)) == (31, 20)
    assert minutes(loss(PoolMemory(), replace(NODE, work=5 * MINUTE))) == (6, 0)


def test_with_a_notice_the_pause_was_not_useful() -> None:
    told = replace(NODE, leaving="spot interruption", leaving_since=END - 120, deadline=END)
    assert minutes(loss(PoolMemory(), told)) == (31, 27)
    assert minutes(loss(PoolMemory(), replace(told, work=2 * MINUTE))) == (3, 0)


@pytest.mark.parametrize(("useful", "wasted"), [(10.5, 0), (9.5, 1)])
def test_two_thirds_of_the_money_have_to_be_useful(useful: float, wasted: int) -> None:
    """Of 14 + 1 minutes 10 are the limit."""
    entry = replace(NODE, work=14 * MINUTE)
    settings = replace(SETTINGS, lost_work=(14 - useful) * MINUTE)
    assert lost(PoolMemory(wasted=0), entry, END, settings, ()).wasted == wasted


def test_earlier_purchases_count_half_with_each_verdict() -> None:
    pool = PoolMemory(spent=4.0, gained=3.0, judged=1.0)
    assert minutes(loss(pool, NODE)) == (60 + 31, 45 + 20)


def test_a_node_of_an_earlier_purchase_is_added_without_a_verdict() -> None:
    pool = PoolMemory(spent=4.0, gained=0.0, wasted=1, judged=END - 1)
    assert loss(pool, NODE).wasted == 1
    assert loss(pool, NODE).judged == pool.judged
    assert minutes(loss(pool, NODE)) == (120 + 31, 20)


def test_time_without_a_replica_is_not_counted() -> None:
    """Idle nodes of --min-nodes that lived for six hours made their pool wait."""
    later = END + 6 * HOUR
    short = replace(NODE, idle_since=later - 2 * MINUTE)
    assert minutes(loss(PoolMemory(), short, now=later)) == (31, 20)
    idle = replace(NODE, work=0.0, idle_since=NODE.became)
    assert loss(PoolMemory(), idle, now=later) == PoolMemory()
    told = replace(idle, leaving="spot interruption", leaving_since=later - 1, deadline=later)
    assert loss(PoolMemory(), told, now=later) == PoolMemory()


def test_a_node_that_drained_for_long_was_not_idle() -> None:
    told = replace(NODE, leaving="spot interruption", leaving_since=END, deadline=END, idle_since=END)
    assert minutes(loss(PoolMemory(), told, now=END + 10 * MINUTE)) == (31, 27)


def test_a_node_whose_agent_was_absent_for_long_was_not_idle() -> None:
    gone = replace(NODE, idle_since=END, absent=END)
    assert minutes(loss(PoolMemory(), gone, now=END + 10 * MINUTE)) == (31, 20)


def test_time_without_looks_is_not_counted() -> None:
    """The work of such a time is not known: only the time between two looks counts as work."""
    late = replace(NODE, became=NODE.first_seen + 5 * HOUR)
    assert minutes(loss(PoolMemory(), late, now=END + 6 * HOUR)) == (10 + 30, 20)


def test_at_most_six_hours_of_work_count() -> None:
    old = replace(NODE, work=50 * HOUR)
    assert minutes(loss(PoolMemory(), old)) == (361, 350)
    assert minutes(given_back(PoolMemory(), old)) == (360, 360)


def test_idle_nodes_that_are_lost_after_hours_are_no_waste() -> None:
    world = World(SPOT, settings=ScalingSettings(min_nodes=2))
    world.run(HOUR, 60)
    for _ in range(4):
        world.provider.vanish(world.running[0])
        world.run(6 * HOUR, 120)
    assert (world.memory.pools["spot"].wasted, len(world.running)) == (0, 2)


# Nodes that live on


def test_older_nodes_count_with_their_work_since_the_last_verdict() -> None:
    pool = PoolMemory(judged=10 * HOUR - 29 * MINUTE)
    older = replace(NODE, first_seen=HOUR, work=9 * HOUR)
    assert minutes(loss(pool, NODE, older, older)) == (31 + 120, 20 + 120)
    assert minutes(loss(pool, NODE, replace(older, work=7 * MINUTE))) == (38, 27)
    assert minutes(loss(replace(pool, judged=2 * HOUR), NODE, older)) == (31 + 360, 20 + 360)
    assert minutes(loss(pool, NODE, NODE, replace(older, pool="other"))) == (31, 20)


def test_older_nodes_that_are_lost_at_the_same_time_do_not_live_on() -> None:
    known = {"new": NODE, "old": replace(NODE, first_seen=HOUR)}
    memory = Memory(known, {"pool": PoolMemory(judged=9 * HOUR)}, updated=END - 10)
    after = remember(memory, Observation(END, Capacity((), ()), {}, ()), SETTINGS)
    # each without a notice, one of them with a boot of ten minutes at most
    assert minutes(after.pools["pool"]) == (31 + 40, 20 + 20)


@pytest.mark.parametrize(("nodes", "shut"), [(8, False), (2, True)])
def test_the_loss_of_one_replacement_after_another_is_judged_beside_the_nodes_at_work(
    nodes: int, shut: bool
) -> None:
    """Three lost replacements closed a pool with seven nodes at work for days, on 0.48 of 200 dollars."""
    # a node without an agent is idle, too: with the default it would be released before it counts as lost
    world = World(DEMAND, settings=ScalingSettings(idle_after=1200.0)).want(nodes).run(24 * HOUR, 300)
    old = set(world.running[1:])
    world.provider.vanish(world.running[0])
    for _ in range(2 * 60):
        world.tick(60)
        for instance in world.look().instances:
            if instance.id not in old and world.now - instance.launched >= 8 * MINUTE:
                world.provider.vanish(instance.id)
                world.hidden.add(instance.id)
    pool = world.memory.pools["demand"]
    assert old <= set(world.running)
    assert pool.closed == ""
    assert (pool.until > 0) == shut


# Released nodes


def test_the_work_of_a_released_node_was_useful() -> None:
    assert minutes(given_back(PoolMemory(spent=4.0, gained=1.0), NODE)) == (150, 60)


def exchanged(pool: PoolMemory, **more: float) -> PoolMemory:
    facts = {"first_seen": 200.0, "leaving_since": 300.0, "hourly_price": 3.0, **more}
    return given_back(pool, replace(NODE, leaving=CHEAPER, **facts))  # type: ignore[arg-type]


def test_a_price_that_rose_has_turned_once_for_all_nodes_bought_before() -> None:
    pool = exchanged(exchanged(PoolMemory()), leaving_since=600.0)
    assert (pool.turns, pool.turned, surcharge(pool)) == (1, 300, 3)
    assert exchanged(pool, first_seen=301.0, leaving_since=700.0).turns == 2
    (told,) = turns_told(pool)
    assert "4.0 times as dear" in told
    assert turns_told(PoolMemory(turns=0.1)) == []


@pytest.mark.parametrize("bought_at", [2.6, 0.0])
def test_a_price_that_rose_little_or_from_an_unknown_one_has_not_turned(bought_at: float) -> None:
    """Records of older versions do not say what a node cost when it was bought."""
    assert exchanged(PoolMemory(), bought_at=bought_at).turns == 0
    assert given_back(PoolMemory(), replace(NODE, leaving="", hourly_price=9.0)).turns == 0


def test_after_a_turn_another_pool_is_chosen_and_jobs_are_sized_by_real_prices() -> None:
    def sizes(maximum: int, turns: float) -> tuple[int, dict[str, int]]:
        spot, demand = replace(SPOT, maximum=40), replace(DEMAND, maximum=maximum)
        world = World(spot, demand, settings=ScalingSettings(hour_value=4.0))
        world.memory = replace(world.memory, pools={"spot": PoolMemory(turns=turns)})
        world.of_jobs(job(remaining=None)).run(300)
        return world.memory.wanted["train"], world.desired

    few = sizes(0, 0.0)[0]
    assert sizes(0, 2.0)[0] == few, "sized by what a node costs"
    world = World(SPOT)
    world.memory = Memory(pools={"spot": PoolMemory(turns=2.0)})
    assert any(text.startswith("spot: its price has risen") for text in world.tick().warnings)
    seen = Observation(world.now, world.look(), {}, ())
    assert NodeMarket(seen, world.memory, SETTINGS).usual()[1] == SPOT.hourly_price
    beside, _ = sizes(2, 0.0)
    turned, desired = sizes(2, 2.0)
    assert (turned, desired["demand"]) == (beside, 2)
    only_dear, desired = sizes(40, 2.0)
    assert desired["spot"] == 0
    assert only_dear < sizes(40, 0.0)[0], "not sized by a price for which nothing is bought"


# The loop


@pytest.mark.parametrize("closed", ["", "too soon"])
def test_a_restart_forgets_the_account_of_a_closed_pool(closed: str, store: MemoryStore) -> None:
    first = Cluster(store)
    first.submit()
    first.tick()
    first.tick()
    spoilt = PoolMemory(failures=4, closed=closed, wasted=3, spent=9.0, gained=1.0)
    pools = dict.fromkeys(first.ruler.memory.pools, spoilt)
    first.ruler.memory = replace(first.ruler.memory, pools=pools)
    first.tick()
    assert first.ruler.memory.pools["workers"].wasted == 3
    pool = Cluster(store).ruler.recall().pools["workers"]
    assert (pool.failures, pool.closed) == (0, "")
    assert (pool.wasted, pool.spent, pool.gained) == ((0, 0, 0) if closed else (3, 9, 1))


def test_an_instance_that_a_person_has_terminated_does_not_count_as_one_that_cannot_be_released(
    store: MemoryStore,
) -> None:
    cluster = Cluster(store).submit().ticks(1)
    (instance,) = cluster.instances
    cluster.plan(cluster.register(instance))
    cluster.tick()
    cluster.finish()
    store.delete(KEYS.job("train", "plan"))
    cluster.provider.errors["release"] = [UnknownInstanceError("it is gone")] * 50
    for _ in range(60):
        cluster.tick()
        if Release in {type(action) for action in cluster.ruler.acted}:
            break
    assert "it is gone" in cluster.status().warnings
    assert cluster.ruler.memory.pools["workers"].until <= cluster.now
