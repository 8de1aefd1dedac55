from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scaling_world import World, job, waiting

from adaptdl_elastic.autoscaler.providers.base import Pool, ProviderError
from adaptdl_elastic.autoscaler.scaling.economics import ScalingSettings
from adaptdl_elastic.autoscaler.scaling.scaling_types import Drain, Hold, LetGo, NodeUse, Release, Request

DEMAND = Pool("demand", desired=0, maximum=10, hourly_price=1.0, instance_type="g5.xlarge")
SPOT = Pool("spot", desired=0, maximum=10, hourly_price=0.3, preemptible=True, instance_type="g5.xlarge")


def test_from_zero_for_a_job_and_back_to_zero() -> None:
    world = World(DEMAND)
    world.run(60)
    assert world.provider.launched == 0
    world.grown(3)
    world.run(600)
    assert world.desired == {"demand": 3}
    world.want(0).until(lambda: not world.running)
    world.run(600)
    assert (world.desired, world.provider.launched) == ({"demand": 0}, 3)


def test_a_node_is_drained_before_it_is_released() -> None:
    world = World(DEMAND).grown(2)
    world.stuck = set(world.running)
    world.want(1).until(lambda: bool(world.of(Drain)))
    (leaving,) = {drain.instance for drain in world.of(Drain) if isinstance(drain, Drain)}
    world.run(300)
    assert (world.of(Release), set(world.running)) == ([], world.stuck)
    world.run(400)
    assert any("asked to drain" in warning for warning in world.tick().warnings)
    world.stuck = set()
    world.until(lambda: leaving not in world.running)
    assert world.desired == {"demand": 1}


def test_spot_first_and_on_demand_where_there_is_no_spot() -> None:
    world = World(DEMAND, SPOT).want(2).run(30)
    assert world.desired == {"demand": 0, "spot": 2}
    world.provider.outage["spot"] = "no Spot capacity available"
    world.want(5).run(300)
    assert (world.desired, len(world.running)) == ({"demand": 3, "spot": 2}, 5)
    world.run(1200)
    assert world.provider.launched == 5


def test_a_pool_with_nothing_to_give_is_asked_less_and_less() -> None:
    world = World(SPOT)
    world.provider.outage["spot"] = "VcpuLimitExceeded"
    world.want(2).run(3600)
    asked = [a for a in world.of(Request) if isinstance(a, Request) and a.desired == 2]
    assert 3 <= len(asked) <= 9
    assert any("VcpuLimitExceeded" in warning for warning in world.tick().warnings)
    world.provider.outage.clear()
    world.until_running(2)


def test_instances_that_never_become_nodes_are_replaced_a_few_times_and_never_again() -> None:
    world = World(DEMAND)
    world.broken = True
    world.want(2).run(24 * 3600, every=60)
    most = 2 + ScalingSettings().max_replacements + 1
    assert world.provider.launched <= most
    assert (world.running, world.desired) == ([], {"demand": 0})
    assert any("start-up script" in warning for warning in world.tick().warnings)
    before = world.provider.launched
    world.run(24 * 3600, every=60)
    assert world.provider.launched == before


def test_a_group_that_keeps_relaunching_what_dies_is_stopped() -> None:
    world = World(DEMAND, boot=30)
    world.provider.dead_on_arrival = {"demand"}
    world.want(1).run(24 * 3600, every=30)
    # the group relaunches by itself before anybody looks, so one more than are counted
    assert world.provider.launched <= 1 + ScalingSettings().max_replacements + 2
    assert world.desired == {"demand": 0}


def eight_hours_of_lives(world: World, seconds: float) -> set[str]:
    """Let each node vanish after so many seconds of work; return all warnings."""
    worked: dict[str, float] = {}
    warnings = set[str]()
    for _ in range(8 * 360):
        warnings.update(world.tick(10).warnings)
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
        world.run(1800)
        world.provider.vanish(world.running[0])
        world.until(lambda: len(world.running) == 2, seconds=200)
    assert world.memory.pools["demand"].wasted == 0


def test_a_pool_whose_nodes_live_for_half_an_hour_is_asked_less_and_is_not_closed() -> None:
    world = World(DEMAND, boot=60).want(2)
    warnings = eight_hours_of_lives(world, 1800)
    waits = [int(w.split("asked again in ")[1].split(" ")[0]) for w in warnings if "lost too soon" in w]
    assert max(waits) > 400
    assert world.memory.pools["demand"].closed == ""


def test_the_budget_holds_at_the_dearest_type_that_may_come() -> None:
    world = World(replace(DEMAND, highest_price=1.5), settings=ScalingSettings(max_hourly_cost=2.9)).want(4)
    world.provider.true_price["demand"] = 1.5
    world.run(3600)
    assert (len(world.running), world.provider.launched) == (1, 1)


def test_a_price_that_was_higher_than_known_is_remembered() -> None:
    world = World(DEMAND, settings=ScalingSettings(max_hourly_cost=1.35)).want(2)
    world.provider.true_price["demand"] = 2.0
    world.run(3 * 3600, every=30)
    assert (world.running, world.provider.launched) == ([], 1)


def test_where_one_pool_is_broken_the_other_serves() -> None:
    world = World(DEMAND, SPOT)
    world.provider.dead_on_arrival = {"spot"}
    world.grown(2)
    assert world.desired["demand"] == 2


def test_a_notice_drains_and_its_instance_is_replaced() -> None:
    world = World(SPOT).grown(2)
    victim = world.running[0]
    world.provider.interrupt(victim, 120)
    done = world.tick(1)
    (drain,) = (a for a in done.actions if isinstance(a, Drain))
    assert (drain.instance, drain.deadline) == (victim, world.now - 1 + 120 + 0)
    world.until(lambda: victim not in world.running and len(world.running) == 2)
    assert (world.desired, world.memory.pools["spot"].interruptions) == ({"spot": 2}, 1)


def test_a_node_that_knows_of_its_end_is_treated_the_same() -> None:
    world = World(SPOT).grown(1)
    (victim,) = world.running
    world.draining[victim] = world.now + 120
    world.until(lambda: victim not in world.running and len(world.running) == 1)


def test_a_notice_about_a_node_that_is_not_worth_replacing() -> None:
    world = World(SPOT).grown(2).want(1)
    world.stuck = set(world.running)
    world.run(200)
    world.stuck = set()
    world.until_running(1)
    assert world.provider.launched == 2


def test_one_more_is_not_fought_and_ends_when_it_is_a_node() -> None:
    pool = Pool("spot", desired=0, maximum=10, hourly_price=0.3, preemptible=True, replaces_at_risk=True)
    world = World(pool).grown(2)
    (risky, other) = world.running
    world.provider.recommend(risky)
    world.run(50)
    assert (len(world.provider.capacity().instances), world.of(Drain)) == (3, [])
    world.until(lambda: risky not in world.running)
    assert {a.instance for a in world.of(Drain) if isinstance(a, Drain)} == {risky}
    world.run(3600)
    assert len(world.running) == 2
    assert other in world.running
    assert (world.desired, world.provider.launched) == ({"spot": 2}, 3)


def test_the_one_at_risk_goes_first() -> None:
    world = World(SPOT).grown(3)
    world.at_risk = {world.running[1]}
    world.grown(2)
    assert not world.at_risk & set(world.running)


def test_a_hook_is_held_while_replicas_leave_and_let_go_after() -> None:
    world = World(DEMAND, hooks=True).grown(2)
    victim = world.running[0]
    world.stuck = {victim}
    world.provider.release(victim, replace=True)  # by somebody else
    world.run(120)
    holds = world.of(Hold)
    assert 3 <= len(holds) <= 5
    assert world.of(LetGo) == []
    world.stuck = set()
    world.until(lambda: bool(world.of(LetGo)))
    world.until_running(2)


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


def test_the_budget_holds_and_is_said() -> None:
    world = World(DEMAND, SPOT, settings=ScalingSettings(max_hourly_cost=2.5))
    world.provider.outage["spot"] = "none"
    world.want(8)
    for _ in range(200):
        assert world.tick().hourly_cost <= 2.5
    assert len(world.running) == 2
    assert any("--max-hourly-cost" in w for w in world.tick().warnings)


def test_a_price_that_rises_beyond_the_budget_sends_nodes_away_at_once() -> None:
    world = World(SPOT, settings=ScalingSettings(max_hourly_cost=2.0)).grown(4)
    world.provider.reprice("spot", 0.9)
    world.run(30)
    assert len(world.running) == 2
    assert world.tick().hourly_cost <= 2.0
    world.run(600)
    assert world.provider.launched == 4
    world.provider.reprice("spot", 0.3)
    world.until_running(4)


def test_nodes_that_cost_more_than_announced_are_not_bought_in_a_circle() -> None:
    world = World(SPOT, settings=ScalingSettings(max_hourly_cost=2.0))
    world.provider.true_price["spot"] = 1.5
    world.want(2).run(3600)
    assert len(world.running) == 1
    assert world.provider.launched <= 2 + 3600 / ScalingSettings().broke_for


def test_the_number_of_nodes_holds() -> None:
    world = World(SPOT, settings=ScalingSettings(max_nodes=3, min_nodes=1))
    world.run(120)
    assert len(world.running) == 1
    world.want(8).run(600)
    assert len(world.running) == 3


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


def test_what_fails_is_tried_again() -> None:
    world = World(DEMAND).want(1)
    world.provider.errors["request"] = [ProviderError("throttled")]
    with pytest.raises(ProviderError):
        world.tick()
    world.until_running(1)


@settings(max_examples=40, deadline=None)
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
def test_whatever_happens_bounds_hold_and_all_is_well_in_the_end(story: list[tuple[int, str]]) -> None:
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


def test_a_job_of_a_given_size_keeps_its_nodes_while_it_changes() -> None:
    world = World(DEMAND).grown(6)
    world.jobs, world.unsettled = (waiting(replicas=2),), frozenset({"train"})
    world.run(1200)
    assert len(world.running) == 6
    world.unsettled = frozenset()
    world.run(60)
    assert len(world.running) == 6
    world.run(120)
    assert len(world.running) == 2


def test_nodes_of_other_jobs_go_while_a_job_changes() -> None:
    world = World(DEMAND)
    world.jobs = (waiting("a", 6),)
    world.until_running(6)
    world.jobs, world.unsettled = (waiting("a", 2), waiting("c", 1)), frozenset({"c"})
    world.run(100)
    assert len(world.running) == 6
    world.run(60)
    assert len(world.running) == 3
    world.run(1200)
    assert len(world.running) == 3


def test_a_lower_limit_holds_for_nodes_of_changing_jobs_too() -> None:
    world = World(DEMAND).grown(4)
    world.unsettled = frozenset({"train"})
    world.settings = replace(world.settings, max_nodes=2)
    world.run(120)
    assert len(world.running) == 2


def test_what_a_changing_job_has_or_is_to_have_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(DEMAND, settings=ScalingSettings(idle_after=3600.0))
    world.jobs = (waiting("a", 4),)
    world.until_running(4)
    holds, waits, *_ = sorted(world.running)
    works = world.nodes_in_use

    def nodes() -> dict[str, NodeUse]:
        found = works()
        found[holds] = replace(found[holds], replicas={"c": 1})
        found[waits] = replace(found[waits], replicas={}, planned=frozenset({"c"}))
        return found

    monkeypatch.setattr(world, "nodes_in_use", nodes)
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


def test_after_its_deadline_nobody_waits_for_the_registration_of_a_draining_node() -> None:
    world = World(SPOT).grown(1)
    (victim,) = world.running
    world.stuck = {victim}
    world.provider.interrupt(victim, 12)
    world.tick(5)
    world.hidden = {victim}
    world.tick(5)
    assert world.of(Release) == []
    world.tick(5)
    assert len(world.of(Release)) == 1


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


def test_what_a_job_will_cost_is_told_before_its_nodes_are_there() -> None:
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


def test_what_a_job_will_cost_where_it_is_to_have_less() -> None:
    world = World(DEMAND).grown(4)
    world.jobs = (job(remaining=1e6, max_profiled_replicas=1),)
    world.tick()
    told = world.tick().forecasts["train"]
    assert told.hourly == pytest.approx(4.0)
    assert told.seconds_left is not None
    assert told.cost_left == pytest.approx(world.memory.wanted["train"] * told.seconds_left / 3600)


def test_what_came_while_nobody_looked_is_paid_from_its_launch() -> None:
    world = World(DEMAND, boot=0).want(1).run(60)
    before = world.memory.cost
    world.now += 10 * 3600 - 60
    world.provider.request("demand", 5)  # by a person
    world.provider.capacity()
    world.now += 59
    world.tick(1)
    assert world.memory.cost - before == pytest.approx(10 + 4 / 60, rel=1e-3)
    assert world.memory.pools["demand"].hours == pytest.approx(world.memory.cost)


def test_what_is_gone_after_nobody_looked_for_long_was_not_interrupted() -> None:
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


def test_who_was_asked_to_leave_is_made_good_at_once_when_it_is_wanted_again() -> None:
    """Its agent leaves for good: kept, the instance would be paid for nothing."""
    world = World(DEMAND).grown(2)
    world.want(1).until(lambda: bool(world.of(Drain)))
    (victim,) = world.asked
    world.hidden.add(victim)  # its agent has ended
    world.want(2).run(60)
    assert victim not in world.running
    assert world.provider.launched == 3
    world.run(60)
    assert len(world.running) == 2


def test_who_has_a_notice_is_made_good() -> None:
    world = World(SPOT).grown(2)
    world.stuck = set(world.running)
    world.want(1).until(lambda: bool(world.of(Drain)))
    (victim,) = world.asked
    world.provider.interrupt(victim, 600)
    world.tick()
    world.want(2).run(60)
    assert world.memory.known[victim].leaving
    assert world.provider.launched == 3


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
