from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scaling_script import play
from scaling_world import World, job, waiting

from adaptdl_elastic.autoscaler.providers.base import Pool, ProviderError
from adaptdl_elastic.autoscaler.scaling.economics import ScalingSettings
from adaptdl_elastic.autoscaler.scaling.scaling_types import Drain, Hold, LetGo, Release, Request

DEMAND = Pool("demand", desired=0, maximum=10, hourly_price=1.0, instance_type="g5.xlarge")
SPOT = Pool("spot", desired=0, maximum=10, hourly_price=0.3, preemptible=True, instance_type="g5.xlarge")
POOLS = {
    "demand": DEMAND,
    "spot": SPOT,
    "may_be_dear": replace(DEMAND, name="may_be_dear", highest_price=1.5),
    "early": replace(SPOT, name="early", replaces_at_risk=True),
}
FAILURES = ScalingSettings().max_replacements + 1
BROKE = 3600 / ScalingSettings().broke_for

SCRIPTS = {
    "from zero for a job and back to zero": """
        demand
        run 60 -> launched=0
        grown 3; run 600 -> demand=3
        want 0; until_running 0; run 600 -> demand=0 launched=3""",
    "a node is drained before it is released": """
        demand
        grown 2; stuck demand-1 demand-2; want 1; until_acted drain -> drained=demand-1
        run 300 -> released= running=demand-1,demand-2
        run 410 -> "asked to drain"
        stuck; until_gone demand-1 -> demand=1""",
    "spot first, and on demand where there is no spot": """
        demand spot
        want 2; run 30 -> demand=0 spot=2
        outage spot "no Spot capacity available"; want 5; run 300 -> demand=3 spot=2 running=5
        run 1200 -> launched=5""",
    "instances that never become nodes are replaced a few times and never again": f"""
        demand
        broken=True; want 2; run 43260 60 -> launched<={2 + FAILURES} running= demand=0 "start-up script"
        run 43200 120 -> launched<={2 + FAILURES} running=""",
    # the group relaunches by itself before anybody looks, so one more than are counted
    "a group that keeps relaunching what dies is stopped": f"""
        demand boot=30
        dead demand; want 1; run 43200 30 -> launched<={2 + FAILURES} demand=0""",
    "the budget holds at the dearest type that may come": """
        may_be_dear max_hourly_cost=2.9
        want 4; true_price may_be_dear 1.5; run 3600 -> running=1 launched=1""",
    "a price that was higher than known is remembered": """
        demand max_hourly_cost=1.35
        want 2; true_price demand 2.0; run 10800 30 -> running= launched=1""",
    "where one pool is broken the other serves": """
        demand spot
        dead spot; grown 2 -> demand=2""",
    "a notice drains, and its instance is replaced": """
        spot
        grown 2; interrupt spot-1 120; tick 1 -> drained=spot-1 deadline=119
        until_gone spot-1; until_running 2 -> spot=2 interrupted=1""",
    "a node that knows of its end is treated the same": """
        spot
        grown 1; knows spot-1 120; until_gone spot-1; until_running 1""",
    "a notice about a node that is not worth replacing": """
        spot
        grown 2; want 1; stuck spot-1 spot-2; run 200; stuck; until_running 1 -> launched=2""",
    "one more is not fought, and ends when it is a node": """
        early
        grown 2; recommend early-1; run 50 -> there=3 drained=
        until_gone early-1 -> drained=early-1
        run 3600 -> running=early-2,early-3 early=2 launched=3""",
    "the node at risk goes first": """
        spot
        grown 3; at_risk spot-2; grown 2 -> running=spot-1,spot-3""",
    # released by somebody else
    "a hook is held while replicas leave, and let go after": """
        demand hooks=True
        grown 2; stuck demand-1; release demand-1 True; run 120 -> held>=3 held<=5 let_go=
        stuck; until_acted let_go; until_running 2""",
    "the budget holds and is said": """
        demand spot max_hourly_cost=2.5
        outage spot none; want 8; run 2000 -> cost<=2.5 running=2 "--max-hourly-cost\"""",
    "a price that rises beyond the budget sends nodes away at once": """
        spot max_hourly_cost=2.0
        grown 4; reprice spot 0.9; run 30 -> running=2
        dearest=0.0; run 600 -> cost<=2.0 launched=4
        reprice spot 0.3; until_running 4""",
    "nodes that cost more than announced are not bought in a circle": f"""
        spot max_hourly_cost=2.0
        true_price spot 1.5; want 2; run 3600 -> running=1 launched<={2 + BROKE}""",
    "the number of nodes holds": """
        spot max_nodes=3 min_nodes=1
        run 120 -> running=1
        want 8; run 600 -> running=3""",
    "a job of a given size keeps its nodes while it changes": """
        demand
        grown 6; want 2; unsettled train; run 1200 -> running=6
        unsettled; run 60 -> running=6
        run 120 -> running=2""",
    "nodes of other jobs go while a job changes": """
        demand
        jobs a:6; until_running 6; jobs a:2 c:1; unsettled c; run 100 -> running=6
        run 60 -> running=3
        run 1200 -> running=3""",
    "a lower limit holds for nodes of changing jobs, too": """
        demand
        grown 4; unsettled train; set max_nodes 2; run 120 -> running=2""",
    "after its deadline nobody waits for the registration of a draining node": """
        spot
        grown 1; stuck spot-1; interrupt spot-1 12; tick 5; hidden spot-1; tick 5 -> released=
        tick 5 -> released=1""",
    # its agent leaves for good: kept, the instance would be paid for nothing
    "a node that was asked to leave is made good at once when it is wanted again": """
        demand
        grown 2; want 1; until_acted drain -> drained=demand-1
        hidden demand-1; want 2; run 60 -> launched=3 released=demand-1
        run 60 -> running=demand-2,demand-3""",
    "a node that has a notice is made good": """
        spot
        grown 2; stuck spot-1 spot-2; want 1; until_acted drain -> drained=spot-1
        interrupt spot-1 600; tick; want 2; run 60 -> launched=3 leaving=spot-1""",
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_nodes_come_and_go_as_jobs_prices_and_notices_do(script: str) -> None:
    play(POOLS, script)


def test_a_pool_with_nothing_to_give_is_asked_less_and_less() -> None:
    world = World(SPOT)
    world.provider.outage["spot"] = "VcpuLimitExceeded"
    world.want(2).run(3600)
    asked = [a for a in world.of(Request) if a.desired == 2]
    assert 3 <= len(asked) <= 9
    assert any("VcpuLimitExceeded" in warning for warning in world.tick().warnings)
    world.provider.outage.clear()
    world.until_running(2)


def eight_hours_of_lives(world: World, seconds: float) -> set[str]:
    """Let each node vanish after so many seconds of work; return all warnings."""
    worked: dict[str, float] = {}
    warnings = set[str]()
    for _ in range(8 * 180):
        warnings.update(world.tick(20).warnings)
        for name in world.running:
            if world.now - worked.setdefault(name, world.now) >= seconds:
                world.provider.vanish(name)
    return warnings


@pytest.mark.parametrize("minutes", [1, 11])
def test_a_pool_whose_nodes_are_lost_soon_is_asked_less_and_at_last_never_again(minutes: int) -> None:
    """Work resets the count of failures, so such nodes were bought for ever: 320, or 74, in eight hours."""
    world = World(DEMAND, boot=60).want(2)
    warnings = eight_hours_of_lives(world, minutes * 60)
    # for each purchase of two nodes the group launches two more by itself, before anybody looks
    assert world.provider.launched <= 4 * ScalingSettings().max_wasted
    assert world.desired == {"demand": 0}
    assert any("2 purchases in a row less than two thirds; asked again in" in text for text in warnings)
    assert any("start the autoscaler again" in text for text in world.tick().warnings)


def test_nodes_that_are_lost_after_they_have_worked_for_long_are_replaced_at_once() -> None:
    world = World(DEMAND, boot=60).want(2)
    for _ in range(12):
        world.until_running(2)
        world.run(1800, 60)
        world.provider.vanish(world.running[0])
        world.until(lambda: len(world.running) == 2, seconds=200)
    assert world.memory.pools["demand"].wasted == 0


def test_a_pool_whose_nodes_live_for_half_an_hour_is_asked_less_and_is_not_closed() -> None:
    world = World(DEMAND, boot=60).want(2)
    warnings = eight_hours_of_lives(world, 1800)
    waits = [int(w.split("asked again in ")[1].split(" ")[0]) for w in warnings if "lost too soon" in w]
    assert max(waits) > 400
    assert world.memory.pools["demand"].closed == ""


@pytest.mark.parametrize(("timeout", "most"), [(30.0, 10.0), (60.0, 20.0), (3600.0, 30.0)])
def test_a_hook_hears_of_us_well_before_it_gives_up_waiting(timeout: float, most: float) -> None:
    world = World(replace(DEMAND, hook_timeout=timeout), hooks=True).grown(2)
    victim = world.running[0]
    world.stuck = {victim}
    world.provider.release(victim)  # by somebody else
    beats = []
    for _ in range(60):
        before = len(world.of(Hold))
        world.tick(5.0)
        beats += [world.now] * (len(world.of(Hold)) - before)
    gaps = {later - earlier for earlier, later in itertools.pairwise(beats)}
    assert gaps == {most}


def test_a_wavering_demand_buys_and_sells_nothing() -> None:
    world = World(DEMAND).grown(10)
    for k in range(200):
        world.jobs = (waiting(replicas=9 + k % 2),)
        world.tick()
    assert (world.provider.launched, world.of(Release)) == (10, [])


def test_costs_add_up() -> None:
    world = World(DEMAND, boot=0.0)
    world.jobs = (waiting("a", 2),)
    world.until_running(2)
    before, at = world.memory.cost, world.now
    world.run(3600)
    assert world.memory.cost - before == pytest.approx(2.0 * (world.now - at) / 3600)
    assert world.memory.job_costs["a"] == pytest.approx(world.memory.cost, rel=0.05)
    pool = world.memory.pools["demand"]
    assert pool.cost == pytest.approx(world.memory.cost)
    assert pool.hours == pytest.approx(world.memory.cost)
    assert world.last is not None
    assert world.last.hourly_cost == 2.0


def test_goodput_decides_the_size_and_the_forecast() -> None:
    small, large = (World(DEMAND, settings=ScalingSettings(hour_value=v)) for v in (0.0, 100.0))
    for world in (small, large):
        world.of_jobs(job()).run(300)
    assert len(small.running) == 1
    assert len(large.running) > 2
    assert large.last is not None
    told = large.last.forecasts["train"]
    assert told.hourly == pytest.approx(len(large.running))
    assert told.seconds_left is not None
    assert told.seconds_left > 0


def test_a_failed_request_is_tried_again() -> None:
    world = World(DEMAND).want(1)
    world.provider.errors["request"] = [ProviderError("throttled")]
    with pytest.raises(ProviderError):
        world.tick()
    world.until_running(1)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 8),
            st.sampled_from(["", "outage", "interrupt", "vanish", "dead", "well", "broken"]),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_bounds_hold_in_any_story_and_all_is_well_in_the_end(story: list[tuple[int, str]]) -> None:
    world = World(DEMAND, SPOT, settings=ScalingSettings(max_nodes=6, max_hourly_cost=5.0))
    for replicas, event in story:
        world.jobs = (waiting(replicas=replicas),) if replicas else ()
        if event == "outage":
            world.provider.outage["spot"] = "none"
        elif event == "dead":
            world.provider.dead_on_arrival = {"spot"}
        elif event == "well":
            world.provider.outage.clear()
            world.provider.dead_on_arrival = set()
        elif event == "broken":
            world.broken = not world.broken
        elif event in ("interrupt", "vanish") and world.running:
            getattr(world.provider, event)(world.running[0])
        for _ in range(20):
            world.tick(30)
            assert sum(world.desired.values()) <= 6
    world.jobs = ()
    world.broken = False
    world.run(3600, every=30)
    assert (world.running, set(world.desired.values())) == ([], {0})


def test_nodes_that_a_changing_job_holds_or_awaits_stay() -> None:
    world = World(DEMAND, settings=ScalingSettings(idle_after=3600.0))
    world.jobs = (waiting("a", 4),)
    world.until_running(4)
    holds, waits, *_ = sorted(world.running)
    world.adjust = lambda found: {
        **found,
        holds: replace(found[holds], replicas={"c": 1}),
        waits: replace(found[waits], replicas={}, planned=frozenset({"c"})),
    }
    world.jobs, world.unsettled = (waiting("a", 1), waiting("c", 1)), frozenset({"c"})
    world.run(1200)
    assert sorted(world.running) == [holds, waits]


@pytest.mark.parametrize("hooks", [False, True])
def test_a_draining_node_whose_registration_is_away_for_a_moment_is_not_given_back(hooks: bool) -> None:
    """After the store stood still leases are gone for about a second, and replicas work on."""
    world = World(SPOT, hooks=hooks).grown(1)
    (victim,) = world.running
    world.stuck = {victim}
    if hooks:
        world.provider.release(victim, replace=True)  # by somebody else
    else:
        world.provider.interrupt(victim, 300)
    world.run(20, every=5)
    for _ in range(10):
        world.hidden = {victim}
        world.run(14, every=7)
        world.hidden = set()
        world.run(5, every=5)
    assert world.of(Release, LetGo) == []
    world.hidden = {victim}
    world.run(10, every=5)
    assert world.of(Release, LetGo) == []
    world.run(10, every=5)
    assert world.of(Release, LetGo) != []


def test_a_job_that_is_nearly_done_buys_one_node_and_a_long_one_many() -> None:
    for left, many in ((2000.0, False), (1e7, True)):
        world = World(DEMAND, boot=120.0)
        world.jobs = (job(remaining=left),)
        world.tick()
        assert (world.desired["demand"] > 1) is many


def test_how_long_a_boot_takes_is_measured() -> None:
    world = World(DEMAND, boot=300.0).grown(2)
    world.run(30)
    boot = world.memory.pools["demand"].boot
    assert boot is not None
    assert 300 <= boot <= 330


def test_the_cost_of_a_job_is_forecast_before_its_nodes_are_there() -> None:
    """By the size that it is to have, not by what runs at the moment."""
    world = World(DEMAND, settings=ScalingSettings(hour_value=100.0), boot=300.0)
    world.jobs = (job(remaining=1e7),)
    told = [world.tick().forecasts["train"] for _ in range(60)]
    wanted = world.memory.wanted["train"]
    first, last = told[0], told[-1]
    assert (first.hourly, last.hourly) == (0.0, wanted)
    assert first.seconds_left is not None
    assert last.seconds_left is not None
    assert last.cost_left == pytest.approx(wanted * last.seconds_left / 3600)
    assert first.cost_left == pytest.approx(last.cost_left, rel=0.05)


def test_the_cost_of_a_job_is_forecast_while_it_is_to_shrink() -> None:
    world = World(DEMAND).grown(4)
    world.jobs = (job(remaining=1e6, max_profiled_replicas=1),)
    world.tick()
    told = world.tick().forecasts["train"]
    assert told.hourly == pytest.approx(4.0)
    assert told.seconds_left is not None
    assert told.cost_left == pytest.approx(world.memory.wanted["train"] * told.seconds_left / 3600)


def test_instances_launched_between_two_looks_are_paid_from_their_launch() -> None:
    world = World(DEMAND, boot=0).want(1).run(60)
    before = world.memory.cost
    world.now += 10 * 3600 - 60
    world.provider.request("demand", 5)  # by a person
    world.provider.capacity()
    world.now += 59
    world.tick(1)
    assert world.memory.cost - before == pytest.approx(10 + 4 / 60, rel=1e-3)
    assert world.memory.pools["demand"].hours == pytest.approx(world.memory.cost)


def test_instances_that_vanish_in_a_long_time_without_looks_are_no_interruption() -> None:
    world = World(SPOT).want(8).run(1800)
    for name in list(world.running):
        world.provider.instances.pop(name)
    world.now += 3600
    world.tick()
    assert world.memory.pools["spot"].interruptions == 0
    world.run(600)
    assert world.desired == {"spot": 8}


def test_an_instance_taken_without_notice_that_is_seen_to_go_was_interrupted() -> None:
    for ours, counted in ((False, 1), (True, 0)):
        world = World(SPOT, hooks=True).want(2)
        world.until(lambda world=world: len(world.running) == 2)  # type: ignore[misc]
        if ours:
            world.want(1)
        else:
            world.provider.release(world.running[0], replace=True)  # as EC2 does: seen as terminating first
        world.until(lambda world=world: bool(world.of(LetGo)))  # type: ignore[misc]
        world.run(60)
        assert world.memory.pools["spot"].interruptions == counted


def test_nodes_on_their_way_out_count_for_the_limits() -> None:
    """A node that still drains is still there and paid."""
    for limit in ({"max_nodes": 2}, {"max_hourly_cost": 0.6}):
        world = World(SPOT, settings=ScalingSettings(**limit))  # type: ignore[arg-type]
        world.want(2)
        world.until(lambda world=world: len(world.running) == 2)  # type: ignore[misc]
        world.stuck = set(world.running)
        world.want(1)
        world.until(lambda world=world: bool(world.of(Drain)))  # type: ignore[misc]
        (victim,) = world.asked
        world.provider.interrupt(victim, 3600)
        world.tick()
        world.want(2)
        for _ in range(30):
            step = world.tick()
            assert len(world.provider.capacity().instances) == 2
        assert any("1 that still leave included" in text for text in step.warnings)
        world.stuck = set()
        world.run(200)
        assert (world.desired, len(world.running)) == ({"spot": 2}, 2)


def test_nodes_whose_agents_ended_after_work_close_no_pool() -> None:
    """As when the script of one job fails while another job waits."""
    world = World(DEMAND).grown(6)
    world.run(30)
    before = set(world.running)
    world.hidden = before
    world.run(700)
    assert world.memory.pools["demand"].closed == ""
    assert not before & set(world.running)
    world.run(300)
    assert world.desired == {"demand": 6}
