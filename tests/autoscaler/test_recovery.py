"""Deaths that others survive: when they go on in their processes, and what it costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from coordinator_pump import Pump, share_policy

from adaptdl_elastic.autoscaler.policy.policy_types import Decision, JobInfo, NodeInfo
from adaptdl_elastic.rendezvous.schema.records import (
    Cause,
    EndedRecord,
    Failure,
    JobState,
    Outcome,
    PeerLossRecord,
    Plan,
    Rescale,
    RunningRecord,
    Transition,
    encode,
)


def keep_policy(
    jobs: Sequence[JobInfo],
    nodes: Sequence[NodeInfo],
    current: Mapping[str, Mapping[str, int]],
    now: float,
    settings: Any,
) -> Decision:
    """Leaves what runs alone, unless a person has asked for another size."""
    decision = share_policy(jobs, nodes, current, now, settings)
    kept = {
        job.name: dict(current[job.name])
        for job in jobs
        if current.get(job.name) and job.requested_replicas in (None, sum(current[job.name].values()))
    }
    return replace(decision, allocations={**decision.allocations, **kept})


@pytest.fixture
def pump() -> Pump:
    return Pump(policy=keep_policy)


SETTLED = 20.0  # seconds after which a break of the store is not blamed any more


def resilient(pump: Pump, nodes: int = 2, slots: int = 2, **changes: object) -> Plan:
    """A job `a` on all slots of `nodes`, whose replicas would survive the death of others."""
    spec: dict[str, object] = {"max_replicas": nodes * slots, "max_nodes": nodes, "autoscale": False}
    pump.job("a", **{**spec, **changes})
    for index in range(nodes):
        pump.node(f"n{index}", "a", slots, resilient=True)
    pump.ask("a", replicas=nodes * slots)
    pump.settle()
    pump.ask("a", replicas=None)
    pump.settle()
    pump.clock.now += SETTLED
    assert pump.plan("a").replicas == nodes * slots
    return pump.plan("a")


def slots(plan: Plan) -> dict[str, tuple[int, ...]]:
    return {placement.node: plan.slots(placement.node) for placement in plan.placements}


def test_survivors_go_on_at_once_and_for_nothing(pump: Pump) -> None:
    was = resilient(pump, max_restarts=0)
    pump.agents[0].lose(0)
    pump.decide()
    plan = pump.plan("a")
    assert (plan.transition, plan.cause, plan.restarts) == (Transition.RECOVER, Cause.REPLICA_LOST, 0)
    assert slots(plan) == {"n0": (1,), "n1": (0, 1)}
    assert plan.generation == was.generation + 1
    assert plan.reason == "lost rank 0 (SIGKILL); 3 go on"
    pump.settle()
    assert pump.status("a").state is JobState.RUNNING
    assert [agent.running for agent in pump.agents] == [plan.generation] * 2
    assert pump.plan("a").generation == plan.generation


def test_replicas_that_a_restart_has_just_started_do_not_survive_what_those_before_them_would(
    pump: Pump,
) -> None:
    was = resilient(pump, nodes=3, slots=1)
    for agent in pump.agents:
        agent.resilient = False  # the next ones have not said it yet
    pump.ask("a", replicas=2)
    pump.settle()
    assert (pump.plan("a").generation, pump.plan("a").transition) == (was.generation + 1, Transition.RESTART)
    next(agent for agent in pump.agents if agent.running is not None).vanish()
    pump.clock.now += SETTLED
    pump.decide()
    plan = pump.plan("a")
    assert (plan.transition, plan.cause, plan.restarts) == (Transition.ABORT, Cause.NODE_LOST, 0)


def test_two_deaths_at_once_are_one_recovery(pump: Pump) -> None:
    resilient(pump)
    pump.agents[0].lose(0)
    pump.agents[1].lose(1)
    pump.decide()
    assert slots(pump.plan("a")) == {"n0": (1,), "n1": (0,)}


def test_a_node_without_survivors_is_left_out(pump: Pump) -> None:
    was = resilient(pump)
    pump.agents[0].lose(0, 1)
    pump.decide()
    plan = pump.plan("a")
    assert (plan.transition, slots(plan)) == (Transition.RECOVER, {"n1": (0, 1)})
    assert pump.settle().plan("a").generation == was.generation + 1
    assert pump.agents[1].running == plan.generation


def test_the_last_death_is_a_failure_that_counts(pump: Pump) -> None:
    resilient(pump, nodes=1, max_restarts=1)
    pump.agents[0].lose(0, 1)
    pump.decide()
    plan = pump.plan("a")
    assert (plan.transition, plan.cause, plan.restarts) == (Transition.ABORT, Cause.FAILURE, 1)
    pump.settle()
    pump.agents[0].lose(0, 1)
    pump.settle()
    assert pump.status("a").state is JobState.FAILED
    assert pump.status("a").exit_code == 128 + 9


def test_an_exception_is_a_failure_that_counts(pump: Pump) -> None:
    resilient(pump)
    pump.agents[0].lose(0)
    pump.agents[1].fail("boom")
    pump.decide()
    plan = pump.plan("a")
    assert (plan.transition, plan.cause, plan.restarts) == (Transition.ABORT, Cause.FAILURE, 1)


@pytest.mark.parametrize("changes", [{"min_replicas": 4}, {"min_nodes": 2}, {"rescale": Rescale.RESTART}])
def test_too_few_or_unwilling_survivors_begin_anew(pump: Pump, changes: dict[str, object]) -> None:
    resilient(pump, **changes)
    pump.agents[0].lose(0, 1)
    pump.decide()
    plan = pump.plan("a")
    assert (plan.transition, plan.cause, plan.restarts) == (Transition.ABORT, Cause.FAILURE, 1)
    assert "rank 0 failed: SIGKILL" in plan.reason


def test_survivors_that_have_not_said_that_they_can_begin_anew(pump: Pump) -> None:
    was = resilient(pump)
    record = RunningRecord("n1", was.generation, library=True, resilient=False)
    pump.store.put(pump.keys.generation("a", was.generation, "running", "n1"), encode(record))
    pump.agents[0].lose(0)
    pump.decide()
    assert pump.plan("a").transition is Transition.ABORT


def test_a_lost_node_is_known_as_soon_as_its_registration_is_gone(pump: Pump) -> None:
    was = resilient(pump)
    pump.agents[1].notice()
    pump.decide()
    assert pump.plan("a").generation == was.generation  # nobody is known to be dead
    pump.steady_since = pump.clock()  # even if the store has only just come back
    pump.agents[0].vanish()
    pump.decide()
    plan = pump.plan("a")
    assert (plan.transition, plan.cause, plan.restarts) == (Transition.RECOVER, Cause.NODE_LOST, 0)
    assert slots(plan) == {"n1": (0, 1)}
    assert plan.reason == "lost n0; 2 go on"


def test_a_lost_node_needs_no_word_of_the_others(pump: Pump) -> None:
    resilient(pump)
    pump.agents[0].vanish()
    pump.decide()
    assert pump.plan("a").transition is Transition.RECOVER


def test_while_nobody_is_known_to_be_dead_nothing_else_is_begun(pump: Pump) -> None:
    was = resilient(pump)
    pump.agents[1].notice()
    pump.ask("a", replicas=2)
    for _ in range(3):
        pump.decide()
    assert pump.plan("a").generation == was.generation


def test_when_all_have_lost_each_other_all_go_on(pump: Pump) -> None:
    was = resilient(pump)
    pump.agents[0].notice()
    pump.agents[1].notice()
    pump.decide()
    plan = pump.plan("a")
    assert (plan.transition, slots(plan)) == (Transition.RECOVER, slots(was))
    assert plan.reason == "replicas have lost each other; 4 go on"


def test_a_node_that_says_nothing_is_given_up_before_its_lease_runs_out(pump: Pump) -> None:
    was = resilient(pump)
    pump.agents[0].notice()
    pump.decide()
    pump.later(pump.settings.silence - 0.1)
    assert pump.plan("a").generation == was.generation
    pump.later(0.2)
    plan = pump.plan("a")
    assert (plan.transition, plan.cause) == (Transition.RECOVER, Cause.NODE_LOST)
    assert [placement.node for placement in plan.placements] == ["n0"]
    assert plan.reason.startswith("lost n1")


def test_a_node_that_was_given_up_is_not_counted_on_until_it_is_heard_of(pump: Pump) -> None:
    resilient(pump, nodes=3)
    silent = pump.agents.pop()
    for agent in pump.agents:
        agent.notice()
    pump.decide()
    pump.later(pump.settings.silence + 0.1)
    recovered = pump.plan("a")
    assert [placement.node for placement in recovered.placements] == ["n0", "n1"]
    pump.ask("a", replicas=6)
    pump.later(1.0)
    assert pump.plan("a").generation == recovered.generation
    pump.agents.append(silent)  # it was only slow: it hears that it was left out, and says so
    pump.settle()
    assert pump.placed("a") == {"n0": 2, "n1": 2, "n2": 2}


def test_who_has_not_come_to_a_recovery_yet_is_not_taken_for_dead(pump: Pump) -> None:
    """It is busy outside of all loops, and nothing tells it that the others are not all there either."""
    resilient(pump, nodes=3, slots=2)
    pump.agents[0].lose(0)
    pump.decide()
    recovery = pump.plan("a")
    pump.agents.clear()  # nobody carries it out yet
    record = PeerLossRecord("n1", recovery.generation)
    pump.store.put(pump.keys.generation("a", recovery.generation, "broken", "n1"), encode(record))
    pump.decide()
    pump.later(pump.settings.silence + 0.1)
    assert pump.plan("a").generation == recovery.generation
    record = PeerLossRecord("n1", recovery.generation, (1,))
    pump.store.put(pump.keys.generation("a", recovery.generation, "broken", "n1"), encode(record))
    pump.decide()
    plan = pump.plan("a")  # as soon as it is known who is dead all the others go on
    assert (plan.transition, slots(plan)) == (Transition.RECOVER, {"n0": (1,), "n1": (0,), "n2": (0, 1)})


def test_a_silent_node_that_the_job_needs_is_given_the_time_of_its_lease(pump: Pump) -> None:
    was = resilient(pump, min_nodes=2)
    pump.agents[0].notice()
    pump.decide()
    pump.later(pump.settings.node_ttl)
    assert pump.plan("a").generation == was.generation
    pump.later(pump.settings.grace + 0.1)
    plan = pump.plan("a")
    assert (plan.transition, plan.nodes) == (Transition.RECOVER, 2)


def test_replicas_that_lose_each_other_again_and_again_begin_anew(pump: Pump) -> None:
    was = resilient(pump)
    for agent in pump.agents:
        agent.notice()
    pump.decide()
    generation = pump.plan("a").generation
    assert generation == was.generation + 1
    for node in ("n0", "n1"):
        record = PeerLossRecord(node, generation)
        pump.store.put(pump.keys.generation("a", generation, "broken", node), encode(record))
    pump.decide()
    plan = pump.plan("a")
    assert (plan.transition, plan.restarts) == (Transition.ABORT, 1)


def test_a_death_during_the_recovery_is_recovered_from(pump: Pump) -> None:
    resilient(pump)
    pump.agents[0].lose(0)
    pump.decide()
    recovery = pump.plan("a").generation
    pump.agents[1].lose(1)  # before it has heard of the plan
    pump.settle()
    plan = pump.plan("a")
    assert plan.generation == recovery + 1
    assert (plan.transition, slots(plan)) == (Transition.RECOVER, {"n0": (1,), "n1": (0,)})
    assert [agent.running for agent in pump.agents] == [plan.generation] * 2


def test_a_node_lost_during_the_recovery_is_recovered_from(pump: Pump) -> None:
    resilient(pump, nodes=3, slots=1)
    pump.agents[0].lose(0)
    pump.decide()
    pump.agents[1].vanish()
    pump.settle()
    plan = pump.plan("a")
    assert (plan.transition, slots(plan)) == (Transition.RECOVER, {"n2": (0,)})
    assert pump.agents[2].running == plan.generation


def test_a_recovery_that_does_not_come_about_begins_anew(pump: Pump) -> None:
    resilient(pump, rescale_timeout=20)
    pump.agents[0].lose(0)
    pump.decide()
    generation = pump.plan("a").generation
    pump.decide()
    pump.clock.now += 19
    pump.decide()
    assert pump.plan("a").generation == generation
    pump.clock.now += 1.001
    pump.decide()
    plan = pump.plan("a")
    assert (plan.generation, plan.transition, plan.restarts) == (generation + 1, Transition.ABORT, 0)
    assert "did not go on within 20 s" in plan.reason


def test_a_stop_waits_for_the_recovery_and_then_saves(pump: Pump) -> None:
    resilient(pump)
    pump.agents[0].lose(0)
    pump.ask("a", stop=True)
    pump.decide()
    assert pump.plan("a").transition is Transition.RECOVER
    pump.decide()
    assert pump.plan("a").transition is Transition.RECOVER  # nobody could save anything yet
    pump.settle()
    assert (pump.plan("a").transition, pump.plan("a").cause) == (Transition.RESTART, Cause.STOP)
    assert pump.status("a").state is JobState.STOPPED


def test_a_new_leader_carries_on(pump: Pump) -> None:
    resilient(pump)
    pump.agents[0].lose(0)
    pump.take_over().settle()
    assert slots(pump.plan("a")) == {"n0": (1,), "n1": (0, 1)}
    assert pump.plan("a").transition is Transition.RECOVER


def let_join(pump: Pump, order: tuple[int, int] = (1, 0)) -> float:
    """Until a second replica has joined; how many seconds that took."""
    begun = pump.clock()
    pump.settle()
    while pump.plan("a").transition is Transition.RECOVER:
        pump.clock.now += 0.1
        pump.settle()
    assert slots(pump.plan("a")) == {"n0": order}
    return round(pump.clock() - begun)


def left_with_one(pump: Pump) -> None:
    """A job of two, of which one has died; it changes in place, and is to have two again."""
    resilient(pump, nodes=1, slots=2)
    pump.agents[0].inplace = True
    pump.agents[0].lose(0)
    pump.settle()
    pump.agents[0].report(pump.plan("a"), inplace=True)
    pump.ask("a", replicas=2)


def test_newcomers_that_die_as_they_join_are_brought_back_with_pauses(pump: Pump) -> None:
    """As where there is no memory for one more: it would die each time, at once and for ever."""
    left_with_one(pump)
    waited = []
    for _ in range(5):
        waited.append(let_join(pump))
        pump.agents[0].lose(0)
        pump.decide()
        assert (pump.plan("a").transition, pump.plan("a").restarts) == (Transition.RECOVER, 0)
    assert waited == [0, 0, 1, 2, 4]
    pump.settle()
    reason = pump.status("a").reason
    assert "keeps its 1 replica" in reason
    assert "have died at once, 5 times in a row" in reason


def test_a_newcomer_that_dies_on_a_node_of_its_own_is_brought_back_with_pauses(pump: Pump) -> None:
    resilient(pump, nodes=2, slots=1)
    for agent in pump.agents:
        agent.inplace = True
    pump.ask("a", replicas=2)
    waited = []
    for _ in range(4):
        pump.agents[1].lose(0)
        pump.decide()
        assert pump.plan("a").transition is Transition.RECOVER
        pump.agents[0].report(pump.plan("a"), inplace=True)
        begun = pump.clock()
        pump.settle()
        while pump.plan("a").transition is Transition.RECOVER:
            pump.clock.now += 0.1
            pump.settle()
        assert slots(pump.plan("a")) == {"n0": (0,), "n1": (0,)}
        waited.append(round(pump.clock() - begun))
    assert waited == [0, 0, 1, 2]


@pytest.mark.parametrize("newcomer", [True, False], ids=["a newcomer", "one that was there before"])
def test_other_deaths_are_replaced_at_once(pump: Pump, newcomer: bool) -> None:
    """Of newcomers that had joined some time ago, and of those that newcomers joined."""
    left_with_one(pump)
    slot = 0 if newcomer else 1
    for _ in range(4):
        assert let_join(pump, (1, 0) if newcomer else (slot, 1 - slot)) == 0
        if newcomer:
            pump.later(pump.settings.joined + 0.1)
        pump.agents[0].lose(slot)
        pump.decide()
        assert pump.plan("a").transition is Transition.RECOVER
        if not newcomer:
            slot = 1 - slot  # the one that is left was there before the next


# -- with planned changes


def grow_in_place(pump: Pump) -> Plan:
    """Two replicas on n0 that are about to be three by one on n1; nothing has happened yet."""
    pump.job("a", max_replicas=3, rescale_timeout=20)
    pump.node("n0", "a", 2, resilient=True)
    pump.ask("a", replicas=2)
    pump.settle()
    pump.agents[0].report(pump.plan("a"), inplace=True)
    pump.settle()
    pump.node("n1", "a", 1, resilient=True)
    pump.clock.now += SETTLED
    pump.ask("a", replicas=3)
    pump.decide()
    plan = pump.plan("a")
    assert (plan.transition, plan.replicas) == (Transition.INPLACE, 3)
    assert plan.base == plan.generation - 1
    return plan


def test_a_death_before_a_planned_change_has_begun_is_one_of_the_generation_before(pump: Pump) -> None:
    change = grow_in_place(pump)
    pump.agents[0].lose(0)
    pump.decide()
    plan = pump.plan("a")
    assert (plan.transition, slots(plan)) == (Transition.RECOVER, {"n0": (1,)})
    assert plan.generation == change.generation + 1


def test_a_node_lost_before_a_planned_change_has_begun(pump: Pump) -> None:
    change = grow_in_place(pump)
    pump.agents[1].vanish()  # it had only newcomers: training goes on as it was
    pump.decide()
    plan = pump.plan("a")
    assert plan.generation == change.generation + 1
    assert (plan.transition, slots(plan)) == (Transition.RECOVER, {"n0": (0, 1)})


def test_a_death_in_the_middle_of_the_switch_is_one_of_the_new_generation(pump: Pump) -> None:
    change = grow_in_place(pump)
    g = change.generation
    ended = EndedRecord("n0", g - 1, Outcome.STOPPED)
    pump.store.put(pump.keys.generation("a", g - 1, "ended", "n0"), encode(ended))
    broken = PeerLossRecord("n0", g, (0,))
    pump.store.put(pump.keys.generation("a", g, "broken", "n0"), encode(broken))
    pump.decide()
    plan = pump.plan("a")
    assert (plan.transition, slots(plan)) == (Transition.RECOVER, {"n0": (1,)})  # n1 had not come yet


def test_a_replacement_takes_the_free_slot_after_the_survivors(pump: Pump) -> None:
    resilient(pump, nodes=1, slots=3)
    pump.agents[0].lose(0)
    pump.settle()
    pump.agents[0].report(pump.plan("a"), inplace=True)
    pump.ask("a", replicas=3)
    pump.decide()
    plan = pump.plan("a")
    assert (plan.transition, slots(plan)) == (Transition.INPLACE, {"n0": (1, 2, 0)})


def test_fewer_are_the_first_of_the_survivors(pump: Pump) -> None:
    resilient(pump, nodes=1, slots=3)
    pump.agents[0].lose(0)
    pump.settle()
    pump.agents[0].report(pump.plan("a"), inplace=True)
    pump.ask("a", replicas=1)
    pump.decide()
    plan = pump.plan("a")
    assert (plan.transition, slots(plan)) == (Transition.INPLACE, {"n0": (1,)})


def test_a_restart_uses_the_lowest_slots_again(pump: Pump) -> None:
    resilient(pump, nodes=1, slots=3)
    pump.agents[0].lose(0)
    pump.settle()
    pump.agents[0].fail()
    pump.decide()
    plan = pump.plan("a")
    assert plan.transition is Transition.ABORT
    assert all(placement.slots == () for placement in plan.placements)


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.ABORTED, Outcome.DONE])
def test_a_job_whose_survivors_end_before_they_take_over_from_the_dead_is_not_done(
    pump: Pump, outcome: Outcome
) -> None:
    """Rank 0 died behind the last epoch: what it had still to do nobody else does."""
    was = resilient(pump, slots=1)
    pump.agents[0].lose(0)
    pump.decide()
    recovery = pump.plan("a")
    assert (recovery.transition, slots(recovery)) == (Transition.RECOVER, {"n1": (0,)})
    failure = Failure(0, -9, "SIGKILL") if outcome is Outcome.FAILED else None
    for record in (
        EndedRecord("n0", was.generation, outcome, -9, failure),
        EndedRecord("n1", was.generation, Outcome.STOPPED),
        EndedRecord("n1", recovery.generation, Outcome.DONE),
    ):
        key = pump.keys.generation("a", record.generation, "ended", record.node)
        pump.store.put(key, encode(record))
    pump.decide()
    if outcome is Outcome.DONE:
        assert pump.status("a").state is JobState.DONE
        return
    assert pump.status("a").state is JobState.RUNNING
    plan = pump.plan("a")
    assert (plan.transition, plan.cause, plan.restarts) == (Transition.ABORT, Cause.FAILURE, 1)
    assert plan.reason == "rank 0 failed: SIGKILL (restart 1 of 3)"


def test_an_error_of_survivors_on_their_way_does_not_count_as_one_before_the_first_step(pump: Pump) -> None:
    resilient(pump, slots=1, max_restarts=3)
    pump.agents[0].lose(0)
    pump.decide()
    recovery = pump.plan("a")
    failure = Failure(0, 1, "oh no", kind="ValueError at train.py:7")
    record = EndedRecord("n1", recovery.generation, Outcome.FAILED, 1, failure, last_step=5.0)
    pump.store.put(pump.keys.generation("a", recovery.generation, "ended", "n1"), encode(record))
    pump.decide()
    assert (pump.plan("a").restarts, pump.plan("a").failed_as) == (1, "")
