"""Which replica hangs: no processes, no clock."""

from __future__ import annotations

import pytest
from decided import HELLO, PONG, Agent, kinds, master, plan, said

from adaptdl_elastic.agent.core import states as d
from adaptdl_elastic.agent.core.decisions import deadline
from adaptdl_elastic.agent.core.hang_detection import MOMENT, SILENCE
from adaptdl_elastic.protocol.messages import (
    EpochsFinished,
    PeerLost,
    Ready,
    Resilient,
    StepFinished,
    Switched,
)
from adaptdl_elastic.rendezvous.schema.records import Failure, Leaving, Transition

WHY = "does not answer for 30 s: it hangs, or is stopped (--hang-timeout)"


def resilient(hang_timeout: float | None) -> Agent:
    agent = Agent(hang_timeout=hang_timeout).running()
    for slot in range(2):
        agent(said(slot, Resilient(0)))
    steps(agent)
    return agent


def failure(agent: Agent) -> Failure | None:
    """The failure because of which the replicas are killed."""
    end = None if agent.state.held is None else agent.state.held.end
    return end.failure if isinstance(end, d.Killing) else None


def answers(agent: Agent, *slots: int) -> None:
    for slot in slots:
        agent(said(slot, PONG, 0))


def steps(agent: Agent) -> None:
    for slot in range(2):
        agent(said(slot, StepFinished(7, 0.0), 0))


def test_who_is_silent_is_asked_and_only_who_does_not_answer_is_killed() -> None:
    agent = resilient(30.0)
    assert deadline(agent.state) == 15.0
    assert agent.later(15) == [d.Ping((0, 1))]
    answers(agent, 0)
    assert deadline(agent.state) == 30.0
    assert agent.later(15) == [d.Say(f"replica 1 {WHY}"), d.Kill((1,), WHY), d.Ping((0,))]
    actions = agent(d.ReplicaExited(0, 1, -9, 5.0, "SIGKILL: killed from outside"))
    assert kinds(actions) == ["Lost", "WritePeerLoss"]  # and the other goes on
    assert actions[0] == d.Lost(0, Failure(1, -9, WHY, 5.0))


def test_without_resilience_it_is_a_failure_with_its_reason() -> None:
    agent = Agent(hang_timeout=30.0).running()
    agent.later(1000)  # loading data, compiling: no step was taken yet
    steps(agent)
    agent.later(15)
    answers(agent, 0)
    agent.later(15)
    assert kinds(agent(d.ReplicaExited(0, 1, -9, 5.0, "SIGKILL"))) == ["Kill"]
    assert failure(agent) == Failure(1, -9, WHY, 5.0)


def test_steps_are_signs_of_life() -> None:
    agent = resilient(30.0)
    for _ in range(5):
        assert agent.later(14) == []
        steps(agent)


def test_an_agent_that_was_stopped_itself_asks_first() -> None:
    assert resilient(30.0).later(10_000) == [d.Ping((0, 1))]


@pytest.mark.parametrize(("given", "seconds"), [(None, SILENCE / 2), (10.0, 5.0), (0.0, None)])
def test_how_long_it_may_be_silent(given: float | None, seconds: float | None) -> None:
    assert deadline(resilient(given).state) == seconds


def test_nobody_is_asked_when_it_is_switched_off() -> None:
    assert resilient(0.0).later(10_000) == []


def test_a_script_without_the_library_is_not_asked() -> None:
    assert Agent(hang_timeout=None).running(library=False).later(10_000) == []


def test_when_all_answer_but_take_no_step_all_are_killed_after_a_moment() -> None:
    agent = resilient(30.0)
    for _ in range(2):
        assert agent.later(15) == [d.Ping((0, 1))]
        answers(agent, 0, 1)
    assert kinds(agent.later(MOMENT)) == ["Say", "Kill"]
    assert "no step for 35 s after step 7" in str(failure(agent))


def test_who_waits_for_a_plan_takes_no_step_and_does_not_hang() -> None:
    agent = resilient(30.0)
    agent(said(0, PeerLost(0, "")))
    for _ in range(10):
        assert agent.later(15) == [d.Ping((0, 1))]
        answers(agent, 0, 1)


def test_a_change_that_is_under_way_hides_nobody() -> None:
    agent = resilient(30.0)
    agent(d.PlanSeen(plan(1, ("here", 1), ("there", 1), transition=Transition.INPLACE)))
    agent(master(1))
    assert agent.later(15) == [d.Ping((0, 1))]
    answers(agent, 0)
    assert kinds(agent.later(15)) == ["Say", "Kill", "Ping"]


def test_steps_of_others_do_not_count() -> None:
    agent = resilient(30.0)
    for _ in range(2):
        agent.later(15)
        agent(said(0, StepFinished(8, 0.0), 0))
    assert agent.state.held is not None
    assert [bool(r.hanging) for r in agent.state.held.replicas] == [False, True]


def grown(hang_timeout: float | None, joined_after: float = 0.0) -> Agent:
    """With a third replica that has joined the two, and has taken no step yet."""
    agent = resilient(hang_timeout)
    grow = plan(1, ("here", 3), transition=Transition.INPLACE)
    agent(d.PlanSeen(grow))
    agent(master(1))
    agent(said(2, HELLO, 1))
    agent(said(2, Ready(1)))
    agent.later(joined_after)
    for slot in range(3):
        actions = agent(said(slot, Switched(1, None)))
    assert actions[0] == d.Adopt(grow)
    return agent


def test_a_newcomer_is_asked_from_when_it_has_joined() -> None:
    agent = grown(None)
    assert agent.later(SILENCE / 2) == [d.Ping((0, 1, 2))]  # two of them wait for the gradients of the third
    for slot in (0, 1):
        agent(said(slot, PONG, 1))
    actions = agent.later(SILENCE / 2)
    assert [a.local_ranks for a in actions if isinstance(a, d.Kill)] == [(2,)]
    assert "Lost" in kinds(agent(d.ReplicaExited(1, 2, -9, 5.0, "SIGKILL")))  # and the others go on


def test_who_waits_for_a_newcomer_is_not_killed_before_it() -> None:
    agent = grown(30.0, joined_after=14.0)
    killed: list[tuple[int, ...]] = []
    while not killed:
        for action in agent.later(1.0):
            if isinstance(action, d.Kill):
                killed.append(action.local_ranks)
            elif isinstance(action, d.Ping):
                for slot in set(action.local_ranks) - {2}:
                    agent(said(slot, PONG, 1))
    assert killed == [(2,)]


def test_a_newcomer_to_replicas_of_other_nodes_is_asked_too() -> None:
    agent = Agent(hang_timeout=30.0)
    there = Leaving("there", 1, "agent-there", 0)
    grow = plan(1, ("there", 1), ("here", 1), leaving=[there], transition=Transition.INPLACE)
    agent(d.PlanSeen(grow))
    agent(master(1))
    assert agent.state.held is not None
    assert isinstance(agent.state.held.course, d.Joining)
    agent(said(0, HELLO, 1))
    agent(said(0, Ready(1)))
    assert agent.later(1000) == []  # while it warms up nobody waits for it
    agent(said(0, Switched(1, None)))
    assert agent.later(15) == [d.Ping((0,))]


def test_behind_the_last_epoch_nobody_is_to_take_a_step() -> None:
    agent = resilient(30.0)
    for slot in range(2):
        agent(said(slot, EpochsFinished(True)))
    for _ in range(10):
        assert agent.later(15) == [d.Ping((0, 1))]
        answers(agent, 0, 1)
