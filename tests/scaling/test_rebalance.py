"""Early replacements of CapacityRebalance, in virtual time: what a group may have at most, in all faults."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scaling_world import World

from adaptdl_elastic.autoscaler.providers.base import Pool
from adaptdl_elastic.autoscaler.scaling.economics import ScalingSettings
from adaptdl_elastic.autoscaler.scaling.scaling_types import Memory, Request

SPOT = Pool("spot", desired=0, maximum=10, hourly_price=0.3, preemptible=True, replaces_at_risk=True)
NODES = 4
# Seconds from the group's replacement to the sight of the recommendation; None: it is never seen.
DELAYS = [0.0, 30.0, 90.0, None]


def world_at_its_limit(boot: float = 60.0) -> World:
    world = World(SPOT, settings=ScalingSettings(max_nodes=NODES), boot=boot)
    world.want(8).until_running(NODES)
    return world


def rebalance(world: World, victims: list[str]) -> None:
    """Let the group launch replacements without a word to the autoscaler."""
    for victim in victims:
        world.provider.recommend(victim, told=False)


def watch(world: World, seconds: float, most: int) -> None:
    """Run, and hold the bounds at every decision.

    Args:
        world: What runs.
        seconds: For so long.
        most: Instances that there may be.
    """
    for _ in range(round(seconds / 10)):
        world.tick()
        assert len(world.provider.capacity().instances) <= most
        assert world.desired["spot"] <= NODES
    assert all(a.desired <= NODES for a in world.of(Request))


@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("leaving", [1, NODES])
def test_replacements_come_before_the_recommendation_is_seen(leaving: int, delay: float | None) -> None:
    """Without it they were taken for nodes at work: 8 were asked for with --max-nodes 4."""
    world = world_at_its_limit()
    victims = world.running[:leaving]
    rebalance(world, victims)
    watch(world, 0.0 if delay is None else delay, NODES + leaving)
    world.at_risk = set() if delay is None else set(victims)
    watch(world, 1500, NODES + leaving)
    assert (len(world.running), world.desired) == (NODES, {"spot": NODES})
    assert world.provider.launched == NODES + leaving
    if delay is not None and delay < 60:
        assert not set(victims) & set(world.running)


@pytest.mark.parametrize("told", [True, False])
def test_nodes_at_risk_are_interrupted_while_their_replacements_boot(told: bool) -> None:
    world = world_at_its_limit(boot=300)
    victims = list(world.running)
    rebalance(world, victims)
    world.at_risk = set(victims) if told else set()
    watch(world, 60, 2 * NODES)
    for victim in victims:
        world.provider.interrupt(victim, 120)
    watch(world, 110, 2 * NODES)
    for victim in set(victims) & set(world.provider.instances):
        world.provider.vanish(victim)
    watch(world, 1500, 2 * NODES)
    assert (len(world.running), world.provider.launched) == (NODES, 2 * NODES)


def test_a_pool_that_is_closed_while_replacements_boot_keeps_the_nodes_at_work() -> None:
    world = world_at_its_limit()
    before = set(world.running)
    world.want(4)
    pools = world.memory.pools
    world.memory = replace(world.memory, pools={"spot": replace(pools["spot"], closed="tried too often")})
    rebalance(world, sorted(before))
    watch(world, 600, 2 * NODES)
    assert (set(world.running), world.desired) == (before, {"spot": NODES})


def test_replacements_that_never_become_nodes_are_given_back_and_the_capacity_stays() -> None:
    world = world_at_its_limit()
    before = set(world.running)
    rebalance(world, sorted(before))
    world.hidden = set(world.provider.instances) - before
    watch(world, 1500, 2 * NODES)
    assert (set(world.running), world.desired) == (before, {"spot": NODES})


def test_an_autoscaler_that_starts_while_replacements_boot_takes_none_for_a_node_at_work() -> None:
    world = world_at_its_limit()
    rebalance(world, list(world.running))
    world.memory = Memory()
    watch(world, 1500, 2 * NODES)
    assert len(world.running) == NODES


def test_demand_that_falls_while_replacements_boot_ends_at_the_smaller_size() -> None:
    world = world_at_its_limit()
    rebalance(world, list(world.running))
    world.want(2)
    watch(world, 1500, 2 * NODES)
    assert (len(world.running), world.desired, world.provider.launched) == (2, {"spot": 2}, 2 * NODES)


def test_a_person_who_lowers_the_group_is_no_rebalance() -> None:
    world = world_at_its_limit()
    before = set(world.running)
    world.provider.set_desired("spot", 2)
    watch(world, 600, NODES)
    assert (set(world.running), world.desired) == (before, {"spot": NODES})
