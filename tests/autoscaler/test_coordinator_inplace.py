"""Changes in place: when they are chosen, and what becomes of those that go wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
from coordinator_pump import Pump
from coordinator_script import play

from adaptdl_elastic.autoscaler.coordinator.decide import SELF_TEST_WAIT
from adaptdl_elastic.autoscaler.coordinator.decision_types import CoordinatorSettings
from adaptdl_elastic.autoscaler.policy.policy_types import Decision
from adaptdl_elastic.protocol.self_test import NOT_ENDED
from adaptdl_elastic.rendezvous.schema.held import Held
from adaptdl_elastic.rendezvous.schema.records import Rescale, decode, encode


def in_place(pump: Pump, rescale: str = "auto", **changes: object) -> None:
    """A job `a` on n0 and n1 that reports that it could change in place."""
    pump.job("a", max_replicas=3, rescale_timeout=20, rescale=Rescale(rescale), **changes)
    play(pump, "node n0 a; node n1 a; settle")
    pump.agents[0].report(pump.plan("a"), inplace=True, max_profiled_replicas=1)
    pump.settle()
    assert set(pump.placed("a")) == {"n0", "n1"}


def three_in_place(pump: Pump, **changes: object) -> None:
    """The same, and all agents report that replicas could change in place; n2 is free."""
    in_place(pump, **changes)
    pump.node("n2", "a")
    for agent in pump.agents:
        agent.inplace = True


def grow_in_place(pump: Pump, **changes: object) -> None:
    """A plan is out that n2 joins in place, and nothing has happened yet."""
    in_place(pump, **changes)
    pump.node("n2", "a")
    pump.agents[0].report(pump.plan("a"), inplace=True, max_profiled_replicas=2)
    pump.decide()
    assert set(pump.placed("a")) == {"n0", "n1", "n2"}


def moves(pump: Pump) -> None:
    """A job `a` of one replica, whose size is its owner's, is on its way from n0 to n1, in place."""
    play(pump, "job a max_replicas=64 max_nodes=8 autoscale=False rescale_timeout=20; node n0 a")
    play(pump, "settle; n0 report inplace=True max_profiled_replicas=1; node n1 a 4; all inplace=True")
    play(pump, "settle -> n0=1")
    play(pump, "n0 register draining=True; decide -> inplace n0=1 n1=1")


def wants_n2(pump: Pump) -> None:
    pump.policy = lambda *_: Decision(allocations={"a": {"n2": 1}}, reasons={})


def take_up(pump: Pump) -> None:
    """Let the replicas of n0 run in the newest generation."""
    while pump.agents[0].running != pump.plan("a").generation:
        for agent in pump.agents:
            agent.step()


def forget_running(pump: Pump) -> None:
    """Let n0 have said nothing yet of the newest generation."""
    key = pump.keys.held("a", "n0")
    found = pump.store.get(key)
    assert found is not None
    held = decode(Held, found.value)
    pump.store.put(key, encode(replace(held, generation=-1, acted=held.generation - 1)))


def one_grows(pump: Pump) -> None:
    """A job on n0 has grown in place from one replica to two."""
    play(pump, "job a autoscale=False; node n0 a 2")
    play(pump, "settle; n0 report inplace=True; ask a replicas=2; decide -> n0=2 inplace")
    take_up(pump)


GAVE_UP = '"a change in place was taken back: calls a collective before its loop"'

CHANGES = {
    "a change is made in place where script and user allow it": """
        grow_in_place -> inplace""",
    "a node whose replicas have not said hello can only stop them": """
        in_place
        n1 running agent=n1-a-1; n0 register draining=True; decide -> restart""",
    "the user wants restarts": """
        grow_in_place rescale=restart -> restart""",
    "the node of rank 0 may leave if another one stays": """
        in_place
        n0 register draining=True; decide -> n1=1 inplace""",
    "rank 0 of the new generation is one of the old replicas": """
        in_place
        node n2 a; n0 register draining=True; decide -> inplace rank0=n1""",
    # until those that take over have joined, nothing else is decided
    "a move to other nodes is made in two steps": """
        three_in_place
        n0 register draining=True; n1 register draining=True; decide -> inplace n0=1 n1=1 n2=1
        decide -> +0
        settle -> +1 inplace n2=1""",
    "a move that the policy wants is made in two steps, too": """
        three_in_place
        wants_n2; decide -> inplace n0=1 n1=1 n2=1
        settle -> inplace n2=1""",
    "a move keeps to the bounds on its way": """
        three_in_place max_nodes=2
        n0 register draining=True; n1 register draining=True; decide -> n0=1 n2=1
        settle -> inplace n2=1""",
    "a move for which there is no room is by restart": """
        job a max_nodes=1 max_replicas=2; node n0 a; n0 resilient=True; settle
        n0 report inplace=True max_profiled_replicas=1; node n1 a; n0 register draining=True; decide
        -> restart n1=1""",
    "a move ends with as many replicas as it began with": """
        moves
        settle -> inplace n1=1 "drains n0"
        later interval; later interval -> n1=1""",
    "a failure on the way does not make a job larger": """
        moves; take_up
        n0 fail boom; settle -> restarts=1 n1=1""",
    "a move that is no longer asked for leaves no replica over": """
        moves
        n0 register draining=False; settle; later interval; later interval -> replicas=1""",
    "a job that insists on changes in place keeps its size and is told why": """
        in_place inplace
        n0 report inplace=False inplace_reason="the backend is nccl"; ask a replicas=1; settle -> +0
        ask a replicas=2; settle -> +0
        ask a replicas=3; settle -> +0
        node n2 a; settle -> +0 running
        -> "keeps its 2 replicas: --rescale=inplace, and the backend is nccl\"""",
    "a job that insists on changes in place leaves a draining node all the same": """
        in_place inplace
        n0 report inplace=False; n0 register draining=True; decide -> restart n1=1""",
    "the first growth waits until the self-test passes": f"""
        in_place; node n2 a
        n0 report inplace=False inplace_reason="NCCL's {NOT_ENDED}" max_profiled_replicas=2; decide -> +0
        n0 report inplace=True max_profiled_replicas=2; decide -> n0=1 n1=1 n2=1 inplace""",
    "the first growth does not wait for the self-test for ever": f"""
        in_place; node n2 a
        n0 report inplace=False inplace_reason="NCCL's {NOT_ENDED}" max_profiled_replicas=2; decide -> +0
        later {SELF_TEST_WAIT} -> n0=1 n1=1 n2=1 restart""",
    "replicas that have just been started are not started again before they say hello": """
        in_place; n0 running started=1000.0; node n2 a
        n0 report inplace=True max_profiled_replicas=2; decide -> +0
        n0 running started=1000.0 library=True; decide -> n0=1 n1=1 n2=1""",
    "replicas that never say hello are waited for until --rescale-timeout": """
        in_place; n0 running started=1000.0; node n2 a
        n0 report inplace=True max_profiled_replicas=2; decide -> +0
        later 21 -> n0=1 n1=1 n2=1""",
    "a newcomer that fails costs nothing": f"""
        grow_in_place max_restarts=0
        n2 ended 0 failed 76 "calls a collective before its loop"; decide
        -> +1 inplace restarts=0 n0=1 n1=1 {GAVE_UP}
        settle -> restart n0=1 n1=1 n2=1""",
    "a newcomer that is aborted costs nothing": f"""
        grow_in_place max_restarts=0
        n2 ended 0 aborted 76 "calls a collective before its loop"; decide
        -> +1 inplace restarts=0 n0=1 n1=1 {GAVE_UP}
        settle -> restart n0=1 n1=1 n2=1""",
    "the change after a newcomer was killed is in place again": """
        grow_in_place; all inplace=True
        n2 ended 0 aborted 0 "newcomer 2: SIGKILL: killed from outside" signal=-9; decide -> n0=1 n1=1
        ask a replicas=3; settle -> inplace restart_only=False n0=1 n1=1 n2=1""",
    "newcomers with other code limit no size and leave out no node": """
        job a autoscale=False max_nodes=2; node n0 a 3; node n1 a 1; ask a replicas=1; settle
        n0 report inplace=True; n0 inplace=True; n1 inplace=True; ask a replicas=3; decide -> inplace
        n0 ended 0 failed 1 t.py kind="changed code"; decide -> n0=1 limited_to=None
        settle -> inplace limited_to=None n0=3""",
    # the others answer for the plan that was taken back, and go on training
    "replicas of a withdrawn change may end in any way": """
        grow_in_place max_restarts=0
        n2 ended 0 aborted 76 died; decide -> +1
        n0 ended -1 aborted; n1 ended -1 aborted; decide; wait 10; decide -> +0 inplace restarts=0 running""",
    "a late newcomer is given up and training goes on": """
        grow_in_place
        decide; decide; decide; wait 19; decide -> +0
        wait 2; decide -> +1 inplace n0=1 n1=1 "...n2 were not ready within 20 s..."
        settle -> n0=1 n1=1 running""",
    # a replica in the middle of the switch would lose the others when its agent withdraws the change
    "a drain waits for a switch that may be under way": """
        in_place
        n1 register draining=True; decide -> inplace n0=1
        n0 register draining=True; decide; wait 9; decide -> +0
        wait 2; decide -> +1 restart nowhere""",
    "a stop waits for a switch that may be under way": """
        in_place
        n1 register draining=True; decide -> inplace n0=1
        ask a stop=True; decide -> +0
        settle -> +1 restart nowhere stopped""",
    "a drain does not wait for a newcomer that has left": """
        moves
        ended n1 0 stopped 143; n1 leave; decide -> +1 restart nowhere""",
    "a stop after a newcomer has failed lets the others save": """
        grow_in_place
        ended n2 0 failed 1 boom; ask a stop=True; decide -> +1 restart nowhere""",
    "a stop does not wait for newcomers": """
        grow_in_place
        ask a stop=True; decide -> +1 restart nowhere""",
    "replicas that have lost each other in a switch go on, although their change was withdrawn": """
        in_place
        n1 register draining=True; decide -> inplace n0=1
        n0 broken -1; n0 ended 0 aborted 0 "a replica was lost"; decide -> +0
        n1 broken -1; decide -> +1 recover n0=1 n1=1""",
    "a replica that fails while newcomers warm up is a failure": """
        grow_in_place
        n0 fail boom; decide -> failure abort restarts=1
        settle -> first_failure="boom" on:n0,n1,n2""",
    "a failure after a change in place is counted": """
        one_grows
        n0 fail boom; decide -> failure abort restarts=1 n0=2""",
    "a failure during a change in place is counted": """
        one_grows; forget_running
        n0 fail boom; decide -> failure abort restarts=1 n0=2""",
}


@pytest.mark.parametrize("script", CHANGES.values(), ids=CHANGES)
def test_changes_are_made_in_place_where_they_can_be(pump: Pump, script: str) -> None:
    givens = in_place, three_in_place, grow_in_place, moves, one_grows
    play(pump, script, *givens, wants_n2, take_up, forget_running)


def test_an_old_wish_of_the_policy_does_not_undo_what_a_person_has_asked_for() -> None:
    pump = Pump(settings=CoordinatorSettings(interval=60.0, min_gap=10.0))
    # the policy is asked: the job keeps what it has
    play(pump, "job a autoscale=False; node n0 a 2; settle; later 61")
    assert pump.memory.targets["a"].allocation == {"n0": 1}
    play(pump, "ask a replicas=2; settle -> n0=2")
    assert [plan.replicas for plan in pump.plans if not plan.claim] == [1, 2]


def test_the_policy_says_nothing_about_a_job_whose_change_is_under_way() -> None:
    pump = Pump(settings=CoordinatorSettings(interval=60.0, min_gap=10.0))
    play(pump, "job a autoscale=False; node n0 a 2 holds_start=True; settle; wait 11; settle")
    assert pump.memory.asked is not None
    assert [info.name for info in pump.memory.asked.jobs] == ["a"]
    assert "a" not in pump.memory.targets
    play(pump, "ask a replicas=2; n0 holds_start=False; settle -> n0=2")
    assert [plan.replicas for plan in pump.plans if not plan.claim] == [1, 2]
