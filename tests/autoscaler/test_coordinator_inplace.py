"""Changes in place: when they are chosen, and what becomes of those that go wrong."""

from __future__ import annotations

import pytest
from coordinator_pump import Pump

from adaptdl_elastic.autoscaler.coordinator.decide import SELF_TEST_WAIT
from adaptdl_elastic.autoscaler.coordinator.decision_types import CoordinatorSettings
from adaptdl_elastic.autoscaler.policy.policy_types import Decision
from adaptdl_elastic.protocol.self_test import NOT_ENDED
from adaptdl_elastic.rendezvous.schema.records import (
    Cause,
    EndedRecord,
    Failure,
    JobState,
    Outcome,
    Rescale,
    RunningRecord,
    Transition,
    encode,
)

# -- changes in place


def in_place(pump: Pump, **changes: object) -> None:
    """A job `a` on n0 and n1 that reports that it could change in place, and n2 is free."""
    pump.job("a", max_replicas=3, rescale_timeout=20, **changes)
    pump.node("n0", "a")
    pump.node("n1", "a")
    pump.settle()
    pump.agents[0].report(pump.plan("a"), inplace=True, max_profiled_replicas=1)
    pump.settle()
    assert set(pump.placed("a")) == {"n0", "n1"}


def grow_in_place(pump: Pump, **changes: object) -> None:
    """A plan is out that n2 joins in place, and nothing has happened yet."""
    in_place(pump, **changes)
    pump.node("n2", "a")
    pump.agents[0].report(pump.plan("a"), inplace=True, max_profiled_replicas=2)
    pump.decide()
    assert set(pump.placed("a")) == {"n0", "n1", "n2"}


def test_a_change_is_made_in_place_where_script_and_user_allow(pump: Pump) -> None:
    grow_in_place(pump)
    assert pump.plan("a").transition is Transition.INPLACE


def test_not_in_place_while_replicas_of_a_node_have_not_said_hello(pump: Pump) -> None:
    in_place(pump)
    other = pump.agents[1]
    running = RunningRecord(other.node, pump.plan("a").generation, agent=other.agent)
    pump.store.put(pump.keys.generation("a", running.generation, "running", other.node), encode(running))
    pump.agents[0].register(draining=True)
    pump.decide()
    assert pump.plan("a").transition is Transition.RESTART, "the agent of n1 could only stop them"


def test_not_in_place_when_the_user_says_restart(pump: Pump) -> None:
    grow_in_place(pump, rescale=Rescale.RESTART)
    assert pump.plan("a").transition is Transition.RESTART


def test_rank_0s_node_may_leave_as_long_as_anybody_stays(pump: Pump) -> None:
    in_place(pump)
    pump.agents[0].register(draining=True)
    pump.decide()
    assert pump.placed("a") == {"n1": 1}
    assert pump.plan("a").transition is Transition.INPLACE


def test_rank_0_of_the_new_generation_is_one_who_was_there(pump: Pump) -> None:
    in_place(pump)
    pump.node("n2", "a")
    pump.agents[0].register(draining=True)
    pump.decide()
    plan = pump.plan("a")
    assert plan.transition is Transition.INPLACE
    assert plan.placements[0].node == "n1"


def test_a_move_to_other_nodes_is_made_in_two_steps(pump: Pump) -> None:
    in_place(pump)
    for agent in (*pump.agents, pump.node("n2", "a")):
        agent.inplace = True
    pump.agents[0].register(draining=True)
    pump.agents[1].register(draining=True)
    pump.decide()
    first = pump.plan("a")
    assert (first.transition, pump.placed("a")) == (Transition.INPLACE, {"n0": 1, "n1": 1, "n2": 1})
    pump.decide()
    assert pump.plan("a").generation == first.generation  # until those who take over have joined
    pump.settle()
    second = pump.plan("a")
    assert (second.generation, second.transition) == (first.generation + 1, Transition.INPLACE)
    assert pump.placed("a") == {"n2": 1}


def moves(pump: Pump) -> None:
    """A job `a` of one replica, whose size is its owner's, is on its way from n0 to n1, in place."""
    pump.job("a", max_replicas=64, max_nodes=8, autoscale=False, rescale_timeout=20)
    pump.node("n0", "a")
    pump.settle()
    pump.agents[0].report(pump.plan("a"), inplace=True, max_profiled_replicas=1)
    pump.node("n1", "a", 4)
    for agent in pump.agents:
        agent.inplace = True
    pump.settle()
    assert pump.placed("a") == {"n0": 1}
    pump.agents[0].register(draining=True)
    pump.decide()
    assert (pump.plan("a").transition, pump.placed("a")) == (Transition.INPLACE, {"n0": 1, "n1": 1})


def test_a_move_ends_with_as_many_as_it_began_with(pump: Pump) -> None:
    moves(pump)
    pump.settle()
    assert (pump.plan("a").transition, pump.placed("a")) == (Transition.INPLACE, {"n1": 1})
    assert pump.plan("a").reason == "drains n0"
    pump.later(2 * pump.settings.interval)
    assert pump.placed("a") == {"n1": 1}


def test_a_failure_on_the_way_does_not_make_a_job_larger(pump: Pump) -> None:
    moves(pump)
    while pump.agents[0].running != pump.plan("a").generation:
        for agent in pump.agents:
            agent.step()
    pump.agents[0].fail("boom")
    pump.settle()
    assert pump.plan("a").restarts == 1
    assert pump.placed("a") == {"n1": 1}


def test_a_move_that_is_no_longer_asked_for_leaves_nothing_over(pump: Pump) -> None:
    moves(pump)
    pump.agents[0].register(draining=False)
    pump.settle()
    pump.later(2 * pump.settings.interval)
    assert pump.plan("a").replicas == 1


def test_a_move_keeps_to_the_bounds_on_its_way(pump: Pump) -> None:
    in_place(pump, max_nodes=2)
    for agent in (*pump.agents, pump.node("n2", "a")):
        agent.inplace = True
    pump.agents[0].register(draining=True)
    pump.agents[1].register(draining=True)
    pump.decide()
    assert pump.placed("a") == {"n0": 1, "n2": 1}
    pump.settle()
    assert (pump.plan("a").transition, pump.placed("a")) == (Transition.INPLACE, {"n2": 1})


def test_a_move_for_which_there_is_no_room_is_by_restart(pump: Pump) -> None:
    pump.job("a", max_nodes=1, max_replicas=2)
    pump.node("n0", "a").resilient = True
    pump.settle()
    pump.agents[0].report(pump.plan("a"), inplace=True, max_profiled_replicas=1)
    pump.node("n1", "a")
    pump.agents[0].register(draining=True)
    pump.decide()
    assert (pump.plan("a").transition, pump.placed("a")) == (Transition.RESTART, {"n1": 1})


def test_a_move_that_the_policy_wants_is_made_in_two_steps_too(pump: Pump) -> None:
    in_place(pump)
    for agent in (*pump.agents, pump.node("n2", "a")):
        agent.inplace = True

    def mover(*question: object) -> Decision:
        return Decision(allocations={"a": {"n2": 1}}, reasons={})

    pump.policy = mover  # type: ignore[assignment]
    pump.decide()
    assert (pump.plan("a").transition, pump.placed("a")) == (
        Transition.INPLACE,
        {"n0": 1, "n1": 1, "n2": 1},
    )
    pump.settle()
    assert (pump.plan("a").transition, pump.placed("a")) == (Transition.INPLACE, {"n2": 1})


def test_who_insists_keeps_the_size_and_is_told_why(pump: Pump) -> None:
    in_place(pump, rescale=Rescale.INPLACE)
    generation = pump.plan("a").generation
    pump.agents[0].report(pump.plan("a"), inplace=False, inplace_reason="the backend is nccl")
    for size in (1, 2, 3):
        pump.ask("a", replicas=size)
        pump.settle()
        assert pump.plan("a").generation == generation
    pump.node("n2", "a")
    pump.settle()
    assert pump.plan("a").generation == generation
    status = pump.status("a")
    assert status.state is JobState.RUNNING
    assert status.reason == "keeps its 2 replicas: --rescale=inplace, and the backend is nccl"


def test_who_insists_leaves_a_draining_node_all_the_same(pump: Pump) -> None:
    in_place(pump, rescale=Rescale.INPLACE)
    pump.agents[0].report(pump.plan("a"), inplace=False)
    pump.agents[0].register(draining=True)
    pump.decide()
    assert (pump.plan("a").transition, pump.placed("a")) == (Transition.RESTART, {"n1": 1})


@pytest.mark.parametrize("passes", [True, False])
def test_the_first_growth_waits_for_the_self_test(pump: Pump, passes: bool) -> None:
    in_place(pump)
    agent, generation = pump.agents[0], pump.plan("a").generation
    why = f"NCCL's {NOT_ENDED}"
    pump.node("n2", "a")
    agent.report(pump.plan("a"), inplace=False, inplace_reason=why, max_profiled_replicas=2)
    pump.decide()
    assert pump.plan("a").generation == generation
    if passes:
        agent.report(pump.plan("a"), inplace=True, max_profiled_replicas=2)
        pump.decide()
    else:
        pump.later(SELF_TEST_WAIT)
    assert set(pump.placed("a")) == {"n0", "n1", "n2"}
    assert pump.plan("a").transition is (Transition.INPLACE if passes else Transition.RESTART)


@pytest.mark.parametrize("speaks", [True, False])
def test_what_has_only_just_been_started_is_not_started_again(pump: Pump, speaks: bool) -> None:
    in_place(pump)
    generation = pump.plan("a").generation
    key = pump.keys.generation("a", generation, "running", "n0")
    pump.store.put(key, encode(RunningRecord("n0", generation, pump.clock())))  # it has not said hello
    pump.node("n2", "a")
    pump.agents[0].report(pump.plan("a"), inplace=True, max_profiled_replicas=2)
    pump.decide()
    assert pump.plan("a").generation == generation
    if speaks:
        pump.store.put(key, encode(RunningRecord("n0", generation, pump.clock(), library=True)))
        pump.decide()
    else:
        pump.later(21)  # --rescale-timeout
    assert set(pump.placed("a")) == {"n0", "n1", "n2"}


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.ABORTED])
def test_a_newcomer_that_fails_costs_nothing(pump: Pump, outcome: Outcome) -> None:
    grow_in_place(pump, max_restarts=0)
    generation = pump.plan("a").generation
    failure = Failure(2, 76, "calls a collective before its loop")
    ended = EndedRecord("n2", generation, outcome, 76, failure)
    pump.store.put(pump.keys.generation("a", generation, "ended", "n2"), encode(ended))
    pump.decide()
    plan = pump.plan("a")
    assert (plan.generation, plan.transition, plan.restarts) == (generation + 1, Transition.INPLACE, 0)
    assert pump.placed("a") == {"n0": 1, "n1": 1}
    assert plan.reason == "a change in place was taken back: calls a collective before its loop"
    pump.settle()
    assert pump.plan("a").transition is Transition.RESTART
    assert set(pump.placed("a")) == {"n0", "n1", "n2"}


def test_the_change_after_a_newcomer_was_killed_is_in_place_again(pump: Pump) -> None:
    grow_in_place(pump)
    for agent in pump.agents:
        agent.inplace = True
    generation = pump.plan("a").generation
    killed = Failure(-1, -9, "newcomer 2: SIGKILL: killed from outside")
    ended = EndedRecord("n2", generation, Outcome.ABORTED, 0, killed)
    pump.store.put(pump.keys.generation("a", generation, "ended", "n2"), encode(ended))
    pump.decide()
    assert pump.placed("a") == {"n0": 1, "n1": 1}
    pump.ask("a", replicas=3)
    pump.settle()
    assert (pump.plan("a").transition, pump.plan("a").restart_only) == (Transition.INPLACE, False)
    assert set(pump.placed("a")) == {"n0", "n1", "n2"}


def test_what_a_withdrawn_change_had_started_may_end_as_it_likes(pump: Pump) -> None:
    grow_in_place(pump, max_restarts=0)
    withdrawn = pump.plan("a").generation
    newcomer = EndedRecord("n2", withdrawn, Outcome.ABORTED, 76, Failure(-1, 76, "died"))
    pump.store.put(pump.keys.generation("a", withdrawn, "ended", "n2"), encode(newcomer))
    pump.decide()
    for node in ("n0", "n1"):  # they answer for the plan that was taken back, and go on training
        ended = EndedRecord(node, withdrawn, Outcome.ABORTED)
        pump.store.put(pump.keys.generation("a", withdrawn, "ended", node), encode(ended))
    pump.decide()
    pump.clock.now += 10
    pump.decide()
    plan = pump.plan("a")
    assert (plan.generation, plan.transition, plan.restarts) == (withdrawn + 1, Transition.INPLACE, 0)
    assert pump.status("a").state is JobState.RUNNING


def test_a_late_newcomer_is_given_up_and_training_goes_on(pump: Pump) -> None:
    grow_in_place(pump)
    generation, was = pump.plan("a").generation, {"n0": 1, "n1": 1}
    for _ in range(3):
        pump.decide()
    pump.clock.now += 19
    pump.decide()
    assert pump.plan("a").generation == generation
    pump.clock.now += 2
    pump.decide()
    plan = pump.plan("a")
    assert (plan.generation, plan.transition, pump.placed("a")) == (generation + 1, Transition.INPLACE, was)
    assert "n2 were not ready within 20 s" in plan.reason
    pump.settle()
    assert pump.placed("a") == was
    assert pump.status("a").state is JobState.RUNNING


def test_a_replica_that_fails_while_newcomers_warm_up_is_a_failure(pump: Pump) -> None:
    grow_in_place(pump)
    pump.agents[0].fail("boom")
    pump.decide()
    plan = pump.plan("a")
    assert (plan.cause, plan.transition, plan.restarts) == (Cause.FAILURE, Transition.ABORT, 1)
    pump.settle()
    assert pump.status("a").failures[0].message == "boom"
    assert all(agent.running == pump.plan("a").generation for agent in pump.agents)


@pytest.mark.parametrize("all_came_over", [True, False])
def test_a_failure_after_a_change_in_place_is_counted(pump: Pump, all_came_over: bool) -> None:
    pump.job("a", autoscale=False)
    agent = pump.node("n0", "a", 2)
    pump.settle()
    agent.report(pump.plan("a"), inplace=True)
    pump.ask("a", replicas=2)
    pump.decide()
    generation = pump.plan("a").generation
    assert (pump.placed("a"), pump.plan("a").transition) == ({"n0": 2}, Transition.INPLACE)
    while agent.running != generation:
        agent.step()
    if not all_came_over:
        pump.store.delete(pump.keys.generation("a", generation, "running", "n0"))
    agent.fail("boom")
    pump.decide()
    plan = pump.plan("a")
    assert (plan.cause, plan.transition, plan.restarts) == (Cause.FAILURE, Transition.ABORT, 1)
    assert pump.placed("a") == {"n0": 2}


def test_an_old_wish_of_the_policy_does_not_undo_what_a_person_has_asked_for() -> None:
    pump = Pump(settings=CoordinatorSettings(interval=60.0, min_gap=10.0))
    pump.job("a", autoscale=False)
    pump.node("n0", "a", 2)
    pump.settle()
    pump.later(61)  # the policy is asked: the job keeps what it has
    assert pump.memory.targets["a"].allocation == {"n0": 1}
    pump.ask("a", replicas=2)
    pump.settle()
    assert pump.placed("a") == {"n0": 2}
    assert [plan.replicas for plan in pump.plans if not plan.claim] == [1, 2]


def test_the_policy_says_nothing_about_a_job_whose_change_is_under_way() -> None:
    pump = Pump(settings=CoordinatorSettings(interval=60.0, min_gap=10.0))
    pump.job("a", autoscale=False)
    agent = pump.node("n0", "a", 2, holds_start=True)
    pump.settle()
    pump.clock.now += 11
    pump.settle()
    assert pump.memory.asked is not None
    assert [info.name for info in pump.memory.asked.jobs] == ["a"]
    assert "a" not in pump.memory.targets
    pump.ask("a", replicas=2)
    agent.holds_start = False
    pump.settle()
    assert pump.placed("a") == {"n0": 2}
    assert [plan.replicas for plan in pump.plans if not plan.claim] == [1, 2]
