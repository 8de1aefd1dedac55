"""Nodes are exchanged for cheaper ones when these can be had, in virtual time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scaling_world import World, job

from adaptdl_elastic.autoscaler.providers.base import Pool
from adaptdl_elastic.autoscaler.scaling.economics import ScalingSettings
from adaptdl_elastic.autoscaler.scaling.scaling_types import NodeUse

DEMAND = Pool("demand", desired=0, maximum=10, hourly_price=1.0)
SPOT = Pool("spot", desired=0, maximum=10, hourly_price=0.3, preemptible=True)
HOUR = 3600
LIMITS = {"room": {}, "nodes": {"max_nodes": 4}, "budget": {"max_hourly_cost": 4.1}}


def on_demand(world: World) -> int:
    return sum(name.startswith("demand") for name in world.running)


def without_spot(limit: str, nodes: int = 4) -> World:
    """Four nodes on demand, because spot has no capacity."""
    world = World(DEMAND, SPOT, settings=ScalingSettings(**LIMITS[limit]))  # type: ignore[arg-type]
    world.provider.outage["spot"] = "no Spot capacity available"
    world.grown(nodes)
    assert on_demand(world) == nodes
    return world


def watch(world: World, seconds: float, least: int) -> None:
    """Run, and hold the limits at every decision. `least`: nodes that work at any time."""
    for _ in range(round(seconds / 60)):
        done = world.tick(60)
        working = [n for n in world.nodes_in_use().values() if n.busy]
        assert len(working) >= least
        assert len(world.provider.capacity().instances) <= world.settings.max_nodes
        assert done.hourly_cost <= world.settings.max_hourly_cost


@pytest.mark.parametrize("limit", LIMITS)
def test_three_hours_after_spot_returned_no_node_is_on_demand(limit: str) -> None:
    """They stayed there for ever, at three times the price."""
    world = without_spot(limit)
    watch(world, HOUR, 4 if limit == "room" else 3)
    world.provider.outage.clear()
    watch(world, 3 * HOUR, 4 if limit == "room" else 3)
    assert (on_demand(world), len(world.running), world.desired) == (0, 4, {"demand": 0, "spot": 4})
    launched = world.provider.launched
    watch(world, HOUR, 4)
    assert world.provider.launched == launched


@pytest.mark.parametrize(("limit", "minutes"), [("room", 45), ("nodes", 10)])
def test_capacity_that_flaps_does_not_end_on_demand(limit: str, minutes: int) -> None:
    """Spot comes and goes, and takes a node with it each time. Half of the time there is no capacity."""
    world = without_spot(limit)
    for turn in range(4 * 60 // minutes):
        if turn % 2:
            world.provider.outage["spot"] = "no Spot capacity available"
            for victim in [name for name in world.running if name.startswith("spot")][:1]:
                world.provider.interrupt(victim, 120)
        else:
            world.provider.outage.clear()
        world.run(60 * minutes, every=60)
    world.provider.outage.clear()
    watch(world, 3 * HOUR, 3)
    assert on_demand(world) == 0


@pytest.mark.parametrize("limit", LIMITS)
def test_attempts_while_there_is_no_spot_are_few_and_cost_little(limit: str) -> None:
    world = without_spot(limit)
    bought, idle = world.provider.launched, 0.0
    for _ in range(6 * 60):
        world.tick(60)
        idle += 4 - len(world.running)
    if limit == "room":
        assert (on_demand(world), world.provider.launched, idle) == (4, bought, 0.0)
    assert world.provider.launched - bought <= 6 * HOUR / ScalingSettings().exchange_retry
    assert idle <= 0.05 * 4 * 6 * 60


@pytest.mark.parametrize(
    ("price", "left", "exchanged"), [(0.3, 1e9, True), (0.85, 1e9, False), (0.3, 20_000, False)]
)
def test_an_exchange_has_to_pay(price: float, left: float, exchanged: bool) -> None:
    """Neither for a few per cent, nor shortly before the end."""
    world = World(
        DEMAND, replace(SPOT, hourly_price=price), settings=ScalingSettings(min_nodes=1, max_nodes=2)
    )
    world.provider.outage["spot"] = "none"
    world.jobs = (job(remaining=1e9, max_replicas=1),)
    world.until_running(1)
    world.provider.outage.clear()
    world.of_jobs(job(remaining=left, max_replicas=1)).run(HOUR, every=60)
    assert (on_demand(world) == 0) is exchanged


@pytest.mark.parametrize("registered", [True, False])
def test_a_node_that_a_person_drained_is_not_exchanged_and_stops_no_exchange(registered: bool) -> None:
    """Nothing is bought in its place for --idle-minutes. Afterwards its agent ends."""
    world = without_spot("room")
    drained = world.running[0]

    def nodes(found: dict[str, NodeUse]) -> dict[str, NodeUse]:
        used = found.pop(drained, None)
        if used is not None and registered:
            found[drained] = replace(used, replicas={}, draining=True, announced=False)
        return found

    world.adjust = nodes
    world.settings = ScalingSettings(boot_timeout=10 * HOUR, idle_after=10 * HOUR)  # it is not missed so soon
    world.provider.outage.clear()
    world.run(2 * HOUR, every=60)
    assert [name for name in world.running if name.startswith("demand")] == [drained]
    assert world.desired == {"demand": 1, "spot": 3}


@pytest.mark.parametrize("least", [{"min_replicas": 4}, {"min_nodes": 4}])
def test_at_the_limit_no_job_falls_below_its_minimum(least: dict[str, int]) -> None:
    world = without_spot("nodes")
    world.jobs = (replace(world.jobs[0], **least),)  # type: ignore[arg-type]
    world.provider.outage.clear()
    watch(world, 2 * HOUR, 4)
    assert on_demand(world) == 4


def test_demand_that_ends_during_an_exchange_leaves_nothing() -> None:
    world = without_spot("room")
    world.run(HOUR, 30)
    world.provider.outage.clear()
    world.until(lambda: world.desired["spot"] > 0)
    world.want(0).run(HOUR)
    assert (world.desired, world.running) == ({"demand": 0, "spot": 0}, [])


def test_a_new_node_that_never_registers_keeps_the_old_one() -> None:
    world = without_spot("room")
    before = set(world.running)
    world.provider.dead_on_arrival = {"spot"}
    world.provider.outage.clear()
    bought = world.provider.launched
    world.run(3 * HOUR, every=60)
    assert set(world.running) == before
    # the group relaunches by itself before anybody looks, so one more than are counted
    assert world.provider.launched - bought <= 1 + ScalingSettings().max_replacements + 2
    assert world.desired == {"demand": 4, "spot": 0}
    assert any("start-up script" in warning for warning in world.tick().warnings)


def test_an_idle_node_is_not_exchanged_for_a_dearer_one_while_its_job_ends() -> None:
    """The job is no longer to be served, and its replicas are still there."""
    dearer = replace(DEMAND, name="dearer", hourly_price=1.1)
    world = World(replace(DEMAND, desired=3), dearer, settings=ScalingSettings(min_nodes=3))
    world.adjust = lambda found: {
        name: replace(use, replicas={"train": name in sorted(found)[:2]}) for name, use in found.items()
    }
    world.want(2).run(1200)
    world.want(0).run(60)
    assert world.desired == {"demand": 3, "dearer": 0}
