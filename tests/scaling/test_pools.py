"""Pools of unlike nodes, pools that people change, and pools that take back what they gave."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scaling_script import play
from scaling_world import World, job, waiting

from adaptdl_elastic.autoscaler.policy.policy_types import JobInfo, NodeLimit
from adaptdl_elastic.autoscaler.providers.base import Capacity, Instance, InstanceState, Pool
from adaptdl_elastic.autoscaler.scaling.economics import ScalingSettings, going, taken, target
from adaptdl_elastic.autoscaler.scaling.scaling_types import Memory, NodeUse, Observation, Release, Request
from adaptdl_elastic.autoscaler.scaling.step import step

DEMAND = Pool("demand", desired=0, maximum=10, hourly_price=1.0)
SPOT = Pool("spot", desired=0, maximum=10, hourly_price=0.3, preemptible=True)
SMALL = Pool("small", desired=0, maximum=16, slots=1, hourly_price=1.0)
LARGE = Pool("large", desired=0, maximum=16, slots=4, hourly_price=3.6)


POOLS = {pool.name: pool for pool in (DEMAND, SPOT, SMALL, LARGE)}

SCRIPTS = {
    "a price that falls throws no nodes away": """
        small large max_nodes=4
        want 16; run 300 -> small=0 large=4
        reprice small 0.5; run 600 -> small=0 large=4
        reprice small 1.0; run 600 -> small=0 large=4
        reprice small 0.5; run 600 -> small=0 large=4 launched=4""",
    "of unlike nodes only those go that are not needed": """
        small large
        want 8; run 300 -> small=0 large=2
        reprice small 0.5; want 9; run 300 -> small=1 large=2
        want 8; run 600 -> small=1 large=2
        want 7; run 600 -> small=0 large=2
        want 5; run 600 -> small=0 large=2
        want 4; run 600 -> small=0 large=1 launched=3""",
    # their protection keeps the group from removing them when its desired capacity is lowered by hand
    "nodes beyond what somebody asked for are counted, and go when they are not needed": """
        demand
        want 4; run 120; set_desired demand 2; run 30 -> demand=4
        want 3; set_desired demand 3; run 600 -> demand=3 running=3 launched=4""",
    "more than is worth it is taken back when a person has asked for it": """
        demand
        want 1; run 120; request demand 5; run 600 -> demand=1""",
    "where a pool is shut a notice is made good elsewhere at once": """
        demand spot
        grown 2; outage spot "no Spot capacity available"; want 3; run 60 -> demand=1 spot=2
        stuck spot-1; interrupt spot-1 120; run 30 -> demand=2 running=demand-3,spot-1,spot-2
        stuck; run 120 -> demand=2 spot=1 replaced=""",
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_pools_have_what_is_worth_it(script: str) -> None:
    play(POOLS, script)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 20), st.sampled_from(["small", "large"]), st.sampled_from([0.3, 1.0, 4.0])),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 6),
)
def test_unlike_nodes_keep_to_the_bounds_and_come_to_rest(
    story: list[tuple[int, str, float]], most: int
) -> None:
    world = World(SMALL, LARGE, settings=ScalingSettings(max_nodes=most))
    for replicas, pool, price in story:
        world.jobs = (waiting(replicas=replicas),) if replicas else ()
        world.provider.reprice(pool, price)
        for _ in range(20):
            world.tick(30)
            assert sum(world.desired.values()) <= most
        before = world.desired, world.provider.launched
        world.run(600, every=30)
        assert (world.desired, world.provider.launched) == before
        slots = world.desired["small"] + 4 * world.desired["large"]
        assert slots >= replicas or sum(world.desired.values()) == most


@given(
    st.floats(0, 400),
    st.lists(st.sampled_from([1, 2, 4, 8]), max_size=30),
    st.integers(0, 10),
    st.integers(10, 40),
)
def test_nodes_go_if_they_are_spare_or_too_many(keep: float, there: list[int], floor: int, most: int) -> None:
    gone = going(there, keep, floor, most)
    left = len(there) - len(gone)
    assert left <= most
    assert left >= min(floor, len(there))
    slots = sum(there) - sum(there[place] for place in gone)
    if len(there) <= most:
        assert slots >= min(keep - 1e-6, sum(there))
    if left > floor:
        assert all(slots - there[place] < keep for place in set(range(len(there))) - set(gone))


def test_nodes_that_cannot_go_are_counted() -> None:
    assert going([4, 4], 6, 0, 10, fixed=(1, 2)) == [0]
    goal = target(6, 4, [4, 4], ScalingSettings(), since_change=1e9, low_for=1e9, fixed=(1, 2))
    assert goal.nodes == 2
    assert target(10, 4, [4, 4], ScalingSettings(), since_change=1e9, low_for=1e9, fixed=(1, 2)).nodes == 3


# -- jobs of several nodes


@pytest.mark.parametrize("modelled", [False, True])
def test_a_job_gets_as_many_nodes_as_it_needs_however_few_slots(modelled: bool) -> None:
    world = World(LARGE)
    more = {"min_replicas": 2, "min_nodes": 2}
    world.of_jobs(
        job(max_profiled_replicas=1, **more) if modelled else JobInfo("t", max_replicas=8, **more)
    ).run(300)
    assert world.desired == {"large": 2}
    world.run(600)
    assert world.desired == {"large": 2}


@pytest.mark.parametrize("modelled", [True, False])
@pytest.mark.parametrize("registered", [True, False])
def test_jobs_that_take_nodes_whole_share_none(modelled: bool, registered: bool) -> None:
    """As with --nnodes=1:4 --nproc-per-node=4: of one replica each, both would fit on one node of four."""
    world = World(LARGE, settings=ScalingSettings(slots_value=0.1))
    facts = {"limits": {"n": NodeLimit(4, 4)}} if registered else {"min_slots": 4}
    more = {"max_nodes": 4, "max_profiled_replicas": 1 if modelled else 0, **facts}
    more |= {} if modelled else {"model": None}
    world.jobs = tuple(job(name, **more) for name in "ab")
    world.run(300)
    assert (world.desired, dict(world.memory.wanted)) == ({"large": 2}, {"a": 4, "b": 4})
    world.run(600)
    assert world.desired == {"large": 2}


@given(st.integers(0, 40), st.integers(1, 9), st.integers(1, 8), st.booleans())
def test_a_job_takes_the_next_size_that_nodes_can_hold(
    replicas: int, least: int, slots: int, registered: bool
) -> None:
    """By trying every number of nodes; one that needs more than a node has is on nodes that have it."""
    limits = {"n": NodeLimit(least)} if registered else None
    fewest, most = (least, max(least, slots)) if registered else (min(least, slots), slots)
    info = JobInfo("t", limits=limits, min_slots=1 if registered else least)
    held = {size for nodes in range(42) for size in range(nodes * fewest, nodes * most + 1)}
    assert taken(info, replicas, slots) == min(size for size in held if size >= replicas)


def test_nodes_of_others_count_for_it() -> None:
    two = JobInfo("t", max_replicas=8, min_replicas=2, min_nodes=2)
    seen = Observation(0.0, Capacity((LARGE,)), {}, (two,), other_slots=4, other_nodes=1)
    assert [a.desired for a in step(seen, Memory(), ScalingSettings()).actions if isinstance(a, Request)] == [
        1
    ]


# -- pools that take back


def test_a_few_interruptions_are_no_reason() -> None:
    world = World(DEMAND, SPOT).want(8)
    for _ in range(12):  # one node of eight every hour
        world.run(3600, every=60)
        world.provider.vanish(world.running[0])
    world.run(300)
    assert world.desired == {"demand": 0, "spot": 8}


def test_a_launch_that_failed_long_ago_is_no_reason_not_to_ask() -> None:
    old = replace(DEMAND, trouble="InsufficientInstanceCapacity", trouble_since=5.0)
    jobs, settings_ = (waiting(replicas=2),), ScalingSettings()
    first = step(Observation(1000.0, Capacity((old,)), {}, jobs), Memory(), settings_)
    assert [a.desired for a in first.actions if isinstance(a, Request)] == [2]
    asked = replace(old, desired=2)
    second = step(Observation(1005.0, Capacity((asked,)), {}, jobs), first.memory, settings_)
    assert (second.actions, second.warnings) == ((), ())
    failed = replace(asked, trouble_since=1006.0)
    third = step(Observation(1010.0, Capacity((failed,)), {}, jobs), second.memory, settings_)
    assert [a.desired for a in third.actions if isinstance(a, Request)] == [0]
    assert any("InsufficientInstanceCapacity" in text for text in third.warnings)


# -- said


def test_agents_with_other_room_than_their_instances_are_said() -> None:
    instance = Instance("i-1", "demand", InstanceState.RUNNING, slots=1, instance_type="c5.4xlarge")
    pool = replace(DEMAND, desired=1)
    for slots, said in ((4, True), (1, False), (0, False)):
        nodes = {"i-1": NodeUse("n", {"t": 1}, slots=slots)}
        seen = Observation(0.0, Capacity((pool,), (instance,)), nodes, (waiting(replicas=1),))
        warnings = step(seen, Memory(), ScalingSettings()).warnings
        assert any("c5.4xlarge" in text and "--slots 4" in text for text in warnings) is said


# -- prices


@pytest.mark.parametrize(("value", "most", "spot", "demand"), [(1.0, 4, 4, 0), (4.0, 2, 2, 6)])
def test_two_prices_begin_no_circle(value: float, most: int, spot: int, demand: int) -> None:
    """What is worth the price of spot is not bought on demand, nor let go by on-demand's price."""
    dear = Pool("demand", desired=0, maximum=10, hourly_price=1.0, slots=4)
    cheap = Pool("spot", desired=0, maximum=most, hourly_price=0.3, slots=4, preemptible=True)
    world = (
        World(dear, cheap, settings=ScalingSettings(hour_value=value))
        .of_jobs(job(remaining=1e9))
        .run(600, every=15)
    )
    assert world.desired == {"spot": spot, "demand": demand}
    world.run(7200, every=60)
    assert (world.desired, world.provider.launched) == ({"spot": spot, "demand": demand}, spot + demand)
    assert world.of(Release) == []


def test_a_cheap_pool_that_has_none_to_give_does_not_change_the_price_of_what_it_gave() -> None:
    dear = Pool("demand", desired=0, maximum=10, hourly_price=1.0, slots=4)
    cheap = Pool("spot", desired=0, maximum=10, hourly_price=0.3, slots=4, preemptible=True)
    world = World(dear, cheap, settings=ScalingSettings(hour_value=2.0)).of_jobs(job(remaining=1e9)).run(600)
    many = world.desired["spot"]
    assert world.desired == {"demand": 0, "spot": many}
    world.jobs = (job(remaining=1e9), job("second", remaining=1e9))
    world.provider.outage["spot"] = "no Spot capacity available"
    world.provider.vanish(world.running[0])
    world.run(3600, 30)
    assert world.desired["spot"] == many - 1
    world.of_jobs(job(remaining=1e9)).run(3600, 30)
    assert world.desired["spot"] == many - 1
    assert world.of(Release) == [] or {a.instance.partition("-")[0] for a in world.of(Release)} == {"demand"}


@pytest.mark.parametrize(
    ("given_settings", "jobs", "said"),
    [
        ({"max_hourly_cost": 0.5}, [waiting(replicas=1)], "0.5 is less than one node costs (1)"),
        ({"deadlines": {"*": 500.0}}, [job()], "train: its deadline was 510 s ago"),
        ({"deadlines": {"*": 5000.0}}, [job(remaining=None)], "train: declares no end"),
        (
            {"deadlines": {"nosuch": 5000.0}},
            [job()],
            "--deadline nosuch: there is no such job; there are: train",
        ),
        (
            {"deadlines": {"*": 2000.0}},
            [JobInfo("train", max_replicas=8, remaining=1e6)],
            "has reported nothing yet",
        ),
        ({"deadlines": {"train": 2000.0}}, [waiting(replicas=2)], "its size is given"),
        (
            {"min_nodes": 12, "max_nodes": 20},
            [],
            "--min-nodes 12 is more than the pools may have: their Max is 10",
        ),
        ({"deadlines": {"train": 1020.0}}, [job()], "train: its deadline cannot be met"),
        ({"deadlines": {"train": 1e9}}, [job()], ""),
    ],
)
def test_a_setting_that_cannot_be_kept_is_said(
    given_settings: dict[str, Any], jobs: list[JobInfo], said: str
) -> None:
    world = World(DEMAND, settings=ScalingSettings(**given_settings)).of_jobs(*jobs)
    warnings = world.tick().warnings
    assert any(said in text for text in warnings) if said else warnings == ()


@pytest.mark.parametrize("most", [0, 3])
def test_a_warning_says_which_slots_max_nodes_keeps_from_being_bought(most: int) -> None:
    world = World(DEMAND, settings=ScalingSettings(max_nodes=most)).want(8).run(300)
    said = f"--max-nodes {most} is the limit: 8 slots would be worth their price"
    assert any(said in text for text in world.tick().warnings)
    world.jobs = (waiting(replicas=3),) if most else ()
    assert not any("--max-nodes" in text for text in world.tick().warnings)
