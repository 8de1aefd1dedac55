"""What an agent does when replicas die and the others live on: no processes, no store, no clock."""

from __future__ import annotations

import pytest
from decided import HELLO, Agent, kinds, master, plan, said

from adaptdl_elastic.agent.core import states as d
from adaptdl_elastic.agent.core.decisions import OWN_STOP_AFTER
from adaptdl_elastic.agent.core.inplace_change import renumber
from adaptdl_elastic.protocol.messages import EpochsFinished, PeerLost, Ready, Resilient, Switched
from adaptdl_elastic.rendezvous.schema.records import (
    EndedRecord,
    Failure,
    Outcome,
    PeerLossRecord,
    Placement,
    Plan,
    Transition,
)

RECOVER, INPLACE = Transition.RECOVER, Transition.INPLACE


def with_slots(made: Plan, **slots: tuple[int, ...]) -> Plan:
    """The same plan with these LOCAL_RANKs."""
    placements = tuple(
        Placement(p.node, p.replicas, p.agent, slots.get(p.node, p.slots)) for p in made.placements
    )
    return Plan(
        made.job, made.run, made.generation, placements, made.cause, made.transition, made.reason,
        leaving=made.leaving,
    )  # fmt: skip


def resilient(count: int = 2) -> Agent:
    agent = Agent().running(count=count)
    for slot in range(count):
        agent(said(slot, Resilient(0)))
    return agent


def dies(agent: Agent, slot: int, generation: int = 0, code: int = -9) -> list[d.Action]:
    return agent(d.ReplicaExited(generation, slot, code, 5.0, "SIGKILL"))


def slots_written(actions: list[d.Action]) -> list[tuple[int, tuple[int, ...]]]:
    """(generation, dead slots) of every `broken` among the actions."""
    return [(a.record.generation, a.record.lost) for a in actions if isinstance(a, d.WritePeerLoss)]


def recover(generation: int, *slots: int) -> Plan:
    return with_slots(plan(generation, ("here", len(slots)), transition=RECOVER), here=slots)


def test_the_coordinator_hears_once_that_all_replicas_are_resilient() -> None:
    agent = Agent().running()
    assert agent(said(1, Resilient(0))) == []
    assert agent(said(0, Resilient(0))) == [d.WriteRunning(0, library=True, resilient=True)]
    assert agent(said(0, Resilient(0))) == []


def test_a_death_kills_nobody_else() -> None:
    agent = resilient()
    failure = Failure(0, -9, "SIGKILL", 5.0)
    assert dies(agent, 0) == [d.Lost(0, failure), d.WritePeerLoss(PeerLossRecord("here", 0, (0,), failure))]


@pytest.mark.parametrize("told", [(), (1,), (0,)], ids=["none", "the living alone", "the dead alone"])
def test_without_resilience_a_death_is_a_failure_as_ever(told: tuple[int, ...]) -> None:
    agent = Agent().running(count=3)
    for slot in told:
        agent(said(slot, Resilient(0)))
    assert kinds(dies(agent, 0)) == ["Kill"]


def test_an_exception_is_a_failure_as_ever() -> None:
    assert kinds(dies(resilient(), 0, code=1)) == ["Kill"]


def test_who_was_asked_to_stop_may_die_of_it() -> None:
    agent = resilient()
    agent(d.PlanSeen(plan(1, ("here", 1))))
    assert slots_written(dies(agent, 0)) == []


def test_survivors_go_on_under_their_new_ranks() -> None:
    agent = resilient(3)
    dies(agent, 0)
    again = recover(1, 1, 2)
    assert agent(d.PlanSeen(again)) == [d.OpenMaster(1)]
    assert agent(master(1)) == [d.TellPlan(again, master(1).master)]
    assert agent(said(2, Switched(1, None))) == []
    assert agent(said(1, Switched(1, None))) == [
        d.Adopt(again),
        d.WriteEnded(EndedRecord("here", 0, Outcome.STOPPED, 0)),
        d.WriteRunning(1, library=True, resilient=True),
    ]
    assert agent.state.held is not None
    assert [(r.local_rank, r.rank) for r in agent.state.held.replicas] == [(1, 0), (2, 1)]


def test_a_later_generation_knows_nothing_of_those_dead() -> None:
    agent = resilient(3)
    dies(agent, 0)
    agent(d.PlanSeen(recover(1, 1, 2)))
    agent(master(1))
    agent(said(1, Switched(1, None)))
    agent(said(2, Switched(1, None)))
    assert slots_written(dies(agent, 2, generation=1)) == [(1, (2,))]


def test_a_second_death_is_added_to_the_first() -> None:
    agent = resilient(3)
    dies(agent, 1)
    assert slots_written(dies(agent, 0)) == [(0, (0, 1))]


def test_a_word_of_the_living_is_passed_on_once() -> None:
    agent = resilient()
    assert agent(said(1, PeerLost(0, ""))) == [d.WritePeerLoss(PeerLossRecord("here", 0))]
    assert agent(said(0, PeerLost(0, ""))) == []
    assert slots_written(dies(agent, 0)) == [(0, (0,))]


def test_the_plan_may_come_before_anybody_here_noticed() -> None:
    agent = resilient()
    both = plan(1, ("here", 2), ("there", 1), transition=RECOVER)
    agent(d.PlanSeen(both))
    assert kinds(agent(master(1))) == ["TellPlan"]
    assert agent(said(0, PeerLost(0, ""))) == []  # of the generation that it is about to leave


def test_a_death_during_the_recovery_is_one_of_the_new_generation() -> None:
    agent = resilient(3)
    dies(agent, 0)
    agent(d.PlanSeen(recover(1, 1, 2)))
    agent(master(1))
    assert slots_written(dies(agent, 1)) == [(1, (1,))]
    agent(d.PlanSeen(recover(2, 2)))
    actions = agent(master(2))
    assert kinds(actions) == ["TellPlan", "WriteEnded"]
    assert actions[1] == d.WriteEnded(EndedRecord("here", 1, Outcome.STOPPED))
    assert kinds(agent(said(2, Switched(2, None)))) == ["Adopt", "WriteEnded", "WriteRunning"]


def test_a_plan_that_counts_on_somebody_dead_is_answered() -> None:
    agent = resilient(3)
    dies(agent, 0)
    dies(agent, 1)
    agent(d.PlanSeen(recover(1, 1, 2)))
    assert slots_written(agent(master(1))) == [(1, (1,))]


def test_a_plan_that_counts_on_a_node_whose_replicas_are_all_dead_is_answered() -> None:
    agent = resilient(1)
    actions = dies(agent, 0)
    assert kinds(actions) == ["WritePeerLoss", "WriteEnded"]
    actions = agent(d.PlanSeen(plan(1, ("here", 1), ("there", 1), transition=RECOVER)))
    assert slots_written(actions) == [(1, (0,))]
    assert d.WriteEnded(EndedRecord("here", 1, Outcome.ABORTED, 143)) in actions


def test_a_plan_that_counts_on_a_node_whose_script_has_ended_is_answered_with_that() -> None:
    """The plan was made while the store was away from this node."""
    agent = resilient(1)
    assert outcomes(agent(d.ReplicaExited(0, 0, 0, 6.0, ""))) == [(0, Outcome.DONE)]
    actions = agent(d.PlanSeen(plan(1, ("here", 1), transition=RECOVER)))
    assert actions == [d.WriteEnded(EndedRecord("here", 1, Outcome.DONE, 0))]


def test_the_last_death_is_a_failure() -> None:
    agent = resilient()
    dies(agent, 0)
    actions = dies(agent, 1)
    first = Failure(0, -9, "SIGKILL", 5.0)
    assert kinds(actions) == ["WritePeerLoss", "WriteEnded"]  # nobody goes on: nothing to say of that
    assert actions[1] == d.WriteEnded(EndedRecord("here", 0, Outcome.FAILED, -9, first))


def test_who_is_not_named_is_told_and_leaves() -> None:
    agent = resilient()
    agent(d.PlanSeen(plan(1, ("there", 1), transition=RECOVER)))
    assert kinds(agent(master(1))) == ["TellPlan"]
    assert agent.exits(0, 0) == [d.WriteEnded(EndedRecord("here", 0, Outcome.STOPPED, 0))]


def test_who_can_not_go_on_fails_the_new_generation() -> None:
    agent = resilient()
    dies(agent, 0)
    agent(d.PlanSeen(recover(1, 1)))
    agent(master(1))
    failure = Failure(1, 1, "LBFGS", 6.0)
    assert agent(d.ReplicaExited(0, 1, 1, 6.0, "LBFGS")) == [
        d.WriteEnded(EndedRecord("here", 0, Outcome.STOPPED, 0)),
        d.WriteEnded(EndedRecord("here", 1, Outcome.FAILED, 1, failure)),
    ]


def test_replicas_that_can_not_are_killed_and_their_slots_reported() -> None:
    agent = Agent().running()
    assert kinds(agent(d.PlanSeen(plan(1, ("here", 2), ("there", 1), transition=RECOVER)))) == ["Kill"]
    actions = agent.exits(-9, -9)
    assert slots_written(actions) == [(1, (0, 1))]


def test_an_abort_ends_the_waiting() -> None:
    agent = resilient()
    dies(agent, 0)
    assert agent(d.PlanSeen(plan(1, ("here", 2), transition=Transition.ABORT))) == [
        d.Kill((1,), "generation 1 begins anew: why")
    ]


# -- during a planned change


def growing(switched: bool = False) -> tuple[Agent, list[d.Action]]:
    """Two replicas about to be three."""
    agent = resilient()
    agent(d.PlanSeen(plan(1, ("here", 3), transition=INPLACE)))
    actions = agent(master(1))
    agent(said(2, Ready(1)))
    if switched:
        agent(said(1, Switched(1, None)))
    return agent, actions


def test_before_anybody_has_switched_a_death_withdraws_the_change() -> None:
    agent, _ = growing()
    actions = dies(agent, 0)
    assert kinds(actions) == ["Lost", "WritePeerLoss", "Withdraw", "Kill", "WriteEnded"]
    assert slots_written(actions) == [(0, (0,))]
    assert d.Kill((2,), "a replica was lost") in actions
    agent(d.PlanSeen(recover(2, 1)))
    assert kinds(agent(master(2))) == ["TellPlan"]  # it does not wait for the newcomer's end
    agent(d.ReplicaExited(1, 2, -9, 6.0))
    assert kinds(agent(said(1, Switched(2, None)))) == ["Adopt", "WriteEnded", "WriteRunning"]


def test_a_leaver_that_dies_when_another_has_left_is_lost_to_the_generation_that_they_leave() -> None:
    agent = resilient()
    agent(d.PlanSeen(plan(1, ("there", 2), transition=INPLACE)))
    agent(master(1))
    agent(said(0, Switched(1, None)))
    actions = dies(agent, 1)
    assert "Adopt" not in kinds(actions)
    assert slots_written(actions) == [(0, (1,))]
    assert [a.record.generation for a in agent.exits(0) if isinstance(a, d.WriteEnded)] == [0]


def test_a_death_elsewhere_withdraws_it_too() -> None:
    agent, _ = growing()
    assert kinds(agent(said(0, PeerLost(0, "")))) == ["WritePeerLoss", "Withdraw", "Kill", "WriteEnded"]


def test_a_recovery_overtakes_a_change_that_nobody_has_gone_over_to() -> None:
    agent, _ = growing()
    agent(d.PlanSeen(plan(2, ("here", 2), ("there", 1), transition=RECOVER)))
    actions = agent(master(2))
    assert kinds(actions) == ["TellPlan"]
    assert agent.state.acted == 1


def test_after_somebody_has_switched_a_death_is_one_of_the_new_generation() -> None:
    agent, _ = growing(switched=True)
    actions = dies(agent, 0)
    assert kinds(actions) == ["Adopt", "WriteEnded", "WriteRunning", "Kill", "Lost", "WritePeerLoss"]
    assert slots_written(actions) == [(1, (0, 2))]  # the newcomer was not in it yet
    agent(d.ReplicaExited(1, 2, -9, 6.0))
    agent(d.PlanSeen(recover(2, 1)))
    assert kinds(agent(master(2))) == ["TellPlan"]


@pytest.mark.parametrize("first", ["the newcomer's end", "the recovery"])
def test_a_newcomer_that_was_killed_in_the_switch_holds_nothing_up(first: str) -> None:
    agent, _ = growing(switched=True)
    dies(agent, 0)
    if first == "the newcomer's end":
        agent(d.ReplicaExited(1, 2, -9, 6.0))
    agent(d.PlanSeen(recover(2, 1)))
    agent(master(2))
    agent(said(1, Switched(2, None)))
    if first == "the recovery":
        agent(d.ReplicaExited(1, 2, -9, 6.0))
    agent(d.PlanSeen(with_slots(plan(3, ("here", 2), transition=INPLACE), here=(1, 2))))
    assert kinds(agent(master(3))) == ["TellPlan", "StartReplicas"]


def test_a_newcomer_that_dies_in_the_middle_of_the_switch_is_one_of_the_dead() -> None:
    agent, _ = growing(switched=True)
    actions = dies(agent, 2, generation=1)
    assert slots_written(actions) == [(1, (2,))]
    assert agent.state.held is not None
    assert [r.local_rank for r in agent.state.held.replicas] == [0, 1]
    assert agent.state.held.generation == 1


def test_survivors_that_find_the_new_generation_broken_are_in_it() -> None:
    agent, _ = growing()
    actions = agent(said(0, PeerLost(1, "")))
    assert slots_written(actions) == [(1, (2,))]
    assert kinds(actions)[0] == "Adopt"


def test_replicas_that_lose_a_peer_while_they_switch_go_on_though_they_are_not_resilient() -> None:
    agent = Agent().running(count=1)
    agent(d.PlanSeen(plan(1, ("here", 1), ("there", 1), transition=INPLACE)))
    agent(master(1))
    agent(said(0, PeerLost(1, "")))
    agent(d.PlanSeen(recover(2, 0)))
    assert kinds(agent(master(2))) == ["TellPlan"]


def test_a_leaver_that_dies_on_its_way_out_is_no_loss() -> None:
    agent = resilient(3)
    agent(d.PlanSeen(plan(1, ("here", 2), transition=INPLACE)))
    agent(master(1))
    agent(said(0, Switched(1, None)))
    agent(said(1, Switched(1, None)))
    actions = dies(agent, 2)
    assert kinds(actions) == ["Adopt", "WriteEnded", "WriteRunning"]
    assert agent.later(1) == []
    assert agent.state.held is not None
    assert agent.alive == agent.state.held.replicas


# -- slots


def test_a_replacement_takes_the_free_slot_and_ranks_after_the_survivors() -> None:
    agent = resilient()
    dies(agent, 0)
    agent(d.PlanSeen(recover(1, 1)))
    agent(master(1))
    agent(said(1, Switched(1, None)))
    grown = with_slots(plan(2, ("here", 2), transition=INPLACE), here=(1, 0))
    agent(d.PlanSeen(grown))
    assert agent(master(2))[1] == d.StartReplicas(grown, master(2).master, (0,), join=True)
    agent(said(0, Ready(2)))
    agent(said(0, Switched(2, None)))
    agent(said(1, Switched(2, None)))
    assert agent.state.held is not None
    assert [(r.local_rank, r.rank) for r in agent.state.held.replicas] == [(1, 0), (0, 1)]


def test_renumbering_goes_by_slot() -> None:
    old = with_slots(plan(1, ("a", 2), ("b", 2)), a=(1, 2), b=(3, 0))
    new = with_slots(plan(2, ("b", 2), ("a", 2)), b=(0, 1), a=(2, 0))
    found = renumber(old, new)
    assert found.ranks == (None, 2, None, 0)
    assert found.newcomers == (1, 3)


def test_a_draining_node_gives_the_coordinator_time_after_each_change() -> None:
    agent = resilient()
    agent(d.Leave("notice"))
    agent(d.PlanSeen(plan(1, ("here", 2), ("there", 1), transition=INPLACE)))
    agent(master(1))
    agent.later(OWN_STOP_AFTER)
    agent(said(0, Switched(1, None)))
    assert kinds(agent(said(1, Switched(1, None)))) == ["Adopt", "WriteEnded", "WriteRunning"]
    assert agent.later(OWN_STOP_AFTER - 1) == []
    assert kinds(agent.later(1)) == ["AskToStop"]


# -- at the end of the script


def over(count: int = 2) -> Agent:
    """All epochs are behind its replicas."""
    agent = resilient(count)
    for slot in range(count):
        assert agent(said(slot, EpochsFinished(True))) == []
    return agent


def outcomes(actions: list[d.Action]) -> list[tuple[int, Outcome]]:
    return [(a.record.generation, a.record.outcome) for a in actions if isinstance(a, d.WriteEnded)]


@pytest.mark.parametrize("rank", [0, 1])
def test_nobody_does_what_a_replica_that_dies_behind_the_last_epoch_had_still_to_do(rank: int) -> None:
    agent = over()
    assert slots_written(dies(agent, rank)) == [(0, (rank,))]
    assert outcomes(agent(d.ReplicaExited(0, 1 - rank, 0, 6.0, ""))) == [(0, Outcome.FAILED)]


def test_nor_if_it_dies_after_the_others_have_ended() -> None:
    agent = over()
    assert agent(d.ReplicaExited(0, 0, 0, 6.0, "")) == []
    assert outcomes(dies(agent, 1)) == [(0, Outcome.FAILED)]


@pytest.mark.parametrize("first", ["exit", "report"])
def test_a_replica_that_ends_well_while_the_others_train_is_a_failure_with_a_reason(first: str) -> None:
    agent = resilient(2)
    exits, misses = d.ReplicaExited(0, 1, 0, 5.0, ""), said(0, PeerLost(0, ""))
    agent(exits if first == "exit" else misses)
    assert "Kill" in kinds(agent(misses if first == "exit" else exits))
    (ended,) = (a for a in agent(d.ReplicaExited(0, 0, -9, 6.0, "")) if isinstance(a, d.WriteEnded))
    failure = ended.record.failure
    assert failure is not None
    assert (ended.record.outcome, failure.rank) == (Outcome.FAILED, 1)
    assert failure.message.startswith("exit code 0 in the middle of training")


def test_more_epochs_are_as_any_others() -> None:
    agent = over()
    agent(said(1, EpochsFinished(False)))
    assert slots_written(dies(agent, 1)) == [(0, (1,))]


def test_a_newcomer_that_dies_behind_the_last_epoch_is_reported_too() -> None:
    agent = resilient(1)
    agent(d.PlanSeen(plan(1, ("here", 2), transition=INPLACE)))
    agent(master(1))
    agent(said(1, Ready(1)))
    agent(said(1, Resilient(1)))
    agent(said(1, Switched(1, None)))
    agent(said(1, EpochsFinished(True)))
    assert "Adopt" in kinds(agent(said(0, Switched(1, None))))
    agent(said(0, EpochsFinished(True)))
    assert slots_written(dies(agent, 1, generation=1)) == [(1, (1,))]


def lost_node(first: str) -> tuple[Agent, list[d.Action]]:
    """Of replicas on two nodes that have all epochs behind them this node's are told to go on alone."""
    agent = Agent()
    other = {"here": "there", "there": "here"}[first]
    agent(d.PlanSeen(plan(0, (first, 1), (other, 1))))
    agent(master(0))
    agent(said(0, HELLO, 0))
    agent(said(0, Resilient(0)))
    agent(said(0, EpochsFinished(True)))
    agent(d.PlanSeen(plan(1, ("here", 1), transition=RECOVER)))
    return agent, agent(master(1))


def test_the_loss_of_a_node_there_disturbs_nobody() -> None:
    agent, actions = lost_node(first="here")
    assert kinds(actions) == ["TellPlan", "Adopt", "WriteEnded", "WriteRunning"]
    assert outcomes(agent(d.ReplicaExited(1, 0, 0, 6.0, ""))) == [(1, Outcome.DONE)]


def test_but_that_of_rank_0_does() -> None:
    _, actions = lost_node(first="there")
    assert kinds(actions) == ["TellPlan"]
