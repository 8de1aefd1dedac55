"""Deaths that others survive: when they go on in their processes, and what it costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from coordinator_pump import Pump, share_policy
from coordinator_script import play

from adaptdl_elastic.autoscaler.policy.policy_types import Decision, JobInfo, NodeInfo
from adaptdl_elastic.rendezvous.schema.records import Rescale, Transition


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


def resilient(pump: Pump, nodes: int = 2, slots: int = 2, **changes: object) -> None:
    """A job `a` on all slots of `nodes`, whose replicas would survive the death of others."""
    spec: dict[str, object] = {"max_replicas": nodes * slots, "max_nodes": nodes, "autoscale": False}
    pump.job("a", **{**spec, **changes})
    for index in range(nodes):
        pump.node(f"n{index}", "a", slots, resilient=True)
    pump.ask("a", replicas=nodes * slots)
    play(pump, "settle; ask a replicas=None; settle")
    pump.clock.now += SETTLED
    assert pump.plan("a").replicas == nodes * slots


def left_with_one(pump: Pump) -> None:
    """A job of two, of which one has died; it changes in place, and is to have two again."""
    resilient(pump, nodes=1, slots=2)
    pump.agents[0].inplace = True
    pump.agents[0].lose(0)
    pump.settle()
    pump.agents[0].report(pump.plan("a"), inplace=True)
    pump.ask("a", replicas=2)


def grow_in_place(pump: Pump) -> None:
    """Two replicas on n0 that are about to be three by one on n1; nothing has happened yet."""
    play(
        pump,
        """
        job a max_replicas=3 rescale_timeout=20; node n0 a 2 resilient=True
        ask a replicas=2; settle""",
    )
    pump.agents[0].report(pump.plan("a"), inplace=True)
    play(pump, "settle; node n1 a 1 resilient=True")
    pump.clock.now += SETTLED
    play(pump, "ask a replicas=3; decide")
    plan = pump.plan("a")
    assert (plan.transition, plan.replicas) == (Transition.INPLACE, 3)
    assert plan.base == plan.generation - 1


ANEW = 'abort failure restarts=1 "rank 0 failed: SIGKILL..."'

TRANSITIONS = {
    "survivors go on at once and for nothing": """
        resilient max_restarts=0
        n0 lose 0; decide -> +1 recover replica_lost restarts=0 n0:1 n1:0,1 "lost rank 0 (SIGKILL); 3 go on"
        settle -> +0 running on:n0,n1""",
    "replicas of a restart do not survive what those before them would": """
        resilient nodes=3 slots=1
        all resilient=False; ask a replicas=2; settle -> +1 restart n0=1 n1=1 on:n0,n1
        n0 vanish; wait 20; decide -> abort node_lost restarts=0""",
    "two deaths at once are one recovery": """
        resilient
        n0 lose 0; n1 lose 1; decide -> n0:1 n1:0""",
    "a node without survivors is left out": """
        resilient
        n0 lose 0 1; decide -> +1 recover n1:0,1
        settle -> +0 on:n1""",
    "the last death is a failure that counts": """
        resilient nodes=1 max_restarts=1
        n0 lose 0 1; decide -> abort failure restarts=1
        settle; n0 lose 0 1; settle -> failed exit_code=137""",
    "an exception is a failure that counts": """
        resilient
        n0 lose 0; n1 fail boom; decide -> abort failure restarts=1""",
    "too few replicas are left": f"""
        resilient min_replicas=4
        n0 lose 0 1; decide -> {ANEW}""",
    "too few nodes are left": f"""
        resilient min_nodes=2
        n0 lose 0 1; decide -> {ANEW}""",
    "the owner wants restarts": f"""
        unwilling
        n0 lose 0 1; decide -> {ANEW}""",
    "survivors that have not said that they can do it restart": """
        resilient
        n1 running library=True; n0 lose 0; decide -> abort""",
    "a node is known to be lost as soon as its registration is gone, even after a break of the store": """
        resilient
        n1 notice; decide -> +0
        reconnect; n0 vanish; decide -> recover node_lost restarts=0 n1:0,1 "lost n0; 2 go on\"""",
    "a lost node needs no word of the others": """
        resilient
        n0 vanish; decide -> recover""",
    "nothing else is begun while it is not known which replicas are dead": """
        resilient
        n1 notice; ask a replicas=2; decide; decide; decide -> +0""",
    "peers that lose each other long after a recovery are waited for again": """
        resilient nodes=3; n0 lose 0; settle -> recover
        later 200; n1 notice; decide -> +0""",
    "neither a drain nor a stop is begun while it is not known which replicas are dead": """
        resilient
        n1 notice; n0 register draining=True; decide -> +0
        ask a stop=True; decide -> +0
        n0 notice; decide -> +1 recover""",
    "all go on when all have lost each other": """
        resilient
        n0 notice; n1 notice; decide -> recover n0:0,1 n1:0,1 "replicas have lost each other; 4 go on\"""",
    "a silent node is given up before its lease runs out": """
        resilient
        n0 notice; decide; later silence -0.1 -> +0
        later 0.2 -> recover node_lost n0=2 "lost n1...\"""",
    "a node that was given up is not counted on until it is heard of": """
        resilient nodes=3
        n2 silence; all notice; decide; later silence 0.1 -> n0=2 n1=2
        ask a replicas=6; later 1 -> +0
        awake n2; settle -> n0=2 n1=2 n2=2""",
    # it is busy outside of all loops, and nothing tells it that the others are not all there either
    "a node that has not come to a recovery yet is not taken for dead": """
        resilient nodes=3
        n0 lose 0; decide; n0 silence; n1 silence; n2 silence
        broken n1 0; decide; later silence 0.1 -> +0
        broken n1 0 1; decide -> recover n0:1 n1:0 n2:0,1""",
    "a silent node that the job needs is given the time of its lease": """
        resilient min_nodes=2
        n0 notice; decide; later node_ttl -> +0
        later grace 0.1 -> recover nodes=2""",
    "replicas that lose each other again and again restart": """
        resilient
        all notice; decide -> +1
        n0 broken 0; n1 broken 0; decide -> abort restarts=1""",
    "a death during the recovery is recovered from": """
        resilient
        n0 lose 0; decide
        n1 lose 1; settle -> +1 recover n0:1 n1:0 on:n0,n1""",
    "a node lost during the recovery is recovered from": """
        resilient nodes=3 slots=1
        n0 lose 0; decide; n1 vanish; settle -> recover n2:0 on:n2""",
    "the others go on at once without a node that was drained before it could go on": """
        resilient nodes=3 slots=1
        n0 lose 0; decide -> recover n1:0 n2:0
        n1 running=None; ended n1 0 stopped 143; n1 leave; decide -> +1 recover n2:0 "lost n1; 1 goes on"
        settle -> on:n2 restarts=0""",
    "nothing is decided about a drained node if all others have gone on": """
        resilient nodes=4 slots=1
        n0 lose 0; decide -> recover
        running n2; running n3
        n1 running=None; ended n1 0 stopped 143; n1 leave; decide -> +0""",
    "all are drained one after another before they could go on": """
        resilient nodes=3 slots=1
        n0 lose 0; decide -> recover n1:0 n2:0
        n1 running=None; ended n1 0 stopped 143; n1 leave; decide -> +1 recover n2:0
        n2 running=None; ended n2 0 stopped 143; n2 leave; decide -> +1 restart drain n0=1 restarts=0""",
    "a stop comes while a node is drained before it could go on": """
        resilient nodes=3 slots=1
        n0 lose 0; decide; ask a stop=True
        n1 running=None; ended n1 0 stopped 143; n1 leave; decide -> recover n2:0
        settle -> restart stop stopped nowhere""",
    "too few go on without a node that was drained": """
        resilient nodes=3 slots=1 min_nodes=2 rescale_timeout=20
        n0 lose 0; decide -> recover n1:0 n2:0
        n1 running=None; ended n1 0 stopped 143; n1 leave; decide -> +0
        wait 20.1; decide -> +1 abort n0=1 n2=1 restarts=0""",
    "a recovery that does not come about becomes a restart": """
        resilient rescale_timeout=20
        n0 lose 0; decide
        decide; wait 19; decide -> +0
        wait 1.001; decide -> +1 abort restarts=0 "...did not go on within 20 s...\"""",
    "a stop waits for the recovery and then saves": """
        resilient
        n0 lose 0; ask a stop=True; decide -> recover
        decide -> recover
        settle -> restart stop stopped""",
    "one of each group is enough": """
        ring
        n1 lose 0; decide -> +1 recover replica_lost n0:0 n2:0 groups=((0,),(1,),(1,0))
        settle -> running on:n0,n2""",
    "two deaths take both copies": """
        ring
        n2 lose 0; n1 lose 0; decide -> failure restarts=1 "...; both copies...(ranks 1 and 2) (restart..."
        """,
    "two lost nodes take both copies": """
        ring; n0 vanish; n1 vanish
        decide -> abort node_lost restarts=0 "lost n0, n1; both copies...lost (ranks 0 and 1): 1 replica..."
        """,
    "a death during the recovery takes the last copy": """
        ring; n1 lose 0; decide -> recover
        n2 lose 0; settle -> +1 abort "...; the last copy of a part of the model is lost (rank 1)..."
        """,
    "a death during the recovery leaves one of each group": """
        resilient nodes=4 slots=1; all groups=((0,1),(2,3)); all say
        n1 lose 0; decide -> recover groups=((0,),(1,2))
        n2 lose 0; settle -> +1 recover n0:0 n3:0 on:n0,n3 groups=((0,),(1,))""",
    "groups of the new generation count beside those before": """
        resilient nodes=4 slots=1; all groups=((0,1),(2,3)); all say; n1 lose 0; settle -> recover
        n3 groups=((0,2),); n3 say; n0 lose 0; decide -> abort "...the last copy...(rank 0)..."
        """,
    "ranks follow the slots of a recovery": """
        resilient; n0 lose 0; settle -> n0:1 n1:0,1
        all groups=((0,2),(1,)); all say; n1 lose 1; decide -> recover n0:1 n1:0 groups=((0,),(1,))
        n1 lose 0; settle -> abort""",
    "the last of a group is on a node that is silent": """
        ring; n0 lose 0; n1 silence; decide -> recover n1:0 n2:0
        n2 broken 0; later 100 -> abort""",
    "the last of a group has left with its node": """
        ring; n1 notice; n2 notice; n0 silence; decide; later silence 0.1 -> recover n1:0 n2:0
        n1 register draining=True; n1 vanish; decide -> abort "...the last copy...(rank 0)..."
        """,
    "a part without a copy is lost": """
        ring; all groups=((0,),(0,1,2)); all say; n0 lose 0; decide -> abort "...the last copy...(rank 0)..."
        """,
    "before a change has begun the groups of the generation before count": """
        grow_in_place; n0 groups=((0,1),); n0 say
        n0 lose 0; decide -> recover n0:1""",
    "after a change has begun the groups of the generation before do not count": """
        grow_in_place; n0 groups=((0,1),); n0 say
        n0 broken 0 0; n0 ended -1 stopped; decide -> abort""",
    "a new leader carries on": """
        resilient
        n0 lose 0; take_over; settle -> recover n0:1 n1:0,1""",
    "a death before a planned change has begun is one of the generation before": """
        grow_in_place
        n0 lose 0; decide -> +1 recover n0:1""",
    "training goes on as it was when a node with newcomers alone is lost": """
        grow_in_place
        n1 vanish; decide -> +1 recover n0:0,1""",
    "a death in the middle of the switch is one of the new generation": """
        grow_in_place
        n0 broken 0 0; n0 ended -1 stopped; decide -> recover n0:1""",
    "a replacement takes the free slot after the survivors": """
        resilient nodes=1 slots=3
        n0 lose 0; settle; n0 report inplace=True; ask a replicas=3; decide -> inplace n0:1,2,0""",
    "the first of the survivors stay where fewer are wanted": """
        resilient nodes=1 slots=3
        n0 lose 0; settle; n0 report inplace=True; ask a replicas=1; decide -> inplace n0:1""",
    "a restart uses the lowest slots again": """
        resilient nodes=1 slots=3
        n0 lose 0; settle; n0 fail; decide -> abort n0:0,1""",
    # rank 0 died behind the last epoch: what it had still to do nobody else does
    "a job whose survivors end after one failed is not done": f"""
        resilient slots=1
        n0 lose 0; decide -> recover n1:0
        ended n0 -1 failed -9 SIGKILL rank=0; ended n1 -1 stopped; ended n1 0 done
        decide -> running {ANEW} "rank 0 failed: SIGKILL (restart 1 of 3)\"""",
    "a job whose survivors end after one was aborted is not done": f"""
        resilient slots=1
        n0 lose 0; decide
        ended n0 -1 aborted -9; ended n1 -1 stopped; ended n1 0 done
        decide -> running {ANEW} "rank 0 failed: SIGKILL (restart 1 of 3)\"""",
    "a job whose survivors end after one failed on its way to them is not done": """
        resilient nodes=3 slots=1
        n2 lose 0; decide -> recover n0:0 n1:0
        n1 step; n0 lose 0; n0 step; decide -> recover n1:0
        ended n1 -1 stopped; ended n1 0 done; decide -> running restarts=1""",
    "a job whose dead node had ended is done": """
        resilient slots=1
        n0 lose 0; decide
        ended n0 -1 done -9; ended n1 -1 stopped; ended n1 0 done
        decide -> done""",
    "an error of survivors on their way is none before the first step": """
        resilient slots=1 max_restarts=3
        n0 lose 0; decide
        ended n1 0 failed 1 "oh no" rank=0 kind="ValueError at train.py:7" last_step=5.0
        decide -> restarts=1 failed_as=''""",
}


def ring(pump: Pump) -> None:
    """Three nodes with a replica each, of whose parts the next one has a copy."""
    resilient(pump, nodes=3, slots=1)
    play(pump, "all groups=((0,1),(1,2),(2,0)); all say")


def unwilling(pump: Pump) -> None:
    resilient(pump, rescale=Rescale.RESTART)


@pytest.mark.parametrize("script", TRANSITIONS.values(), ids=TRANSITIONS)
def test_survivors_of_a_death_go_on_where_they_can(pump: Pump, script: str) -> None:
    play(pump, script, resilient, ring, unwilling, grow_in_place)


def joined(pump: Pump) -> int:
    """Return the seconds until the planned replica has joined."""
    begun = pump.clock()
    pump.settle()
    while pump.plan("a").transition is Transition.RECOVER:
        pump.clock.now += 0.1
        pump.settle()
    return round(pump.clock() - begun)


def test_a_second_newcomer_that_dies_as_it_joins_limits_the_job_for_longer_each_time(pump: Pump) -> None:
    """As where there is no memory for one more: it would die each time, at once and for ever."""
    left_with_one(pump)
    for minutes in (0, 10, 20, 40, 80, 160, 160):
        assert joined(pump) == 0
        assert pump.plan("a").slots("n0") == (1, 0)
        pump.agents[0].lose(0)
        play(pump, "decide -> recover restarts=0")
        pump.agents[0].report(pump.plan("a"), inplace=True)
        if minutes:
            play(pump, f'later {60 * minutes - 60} -> n0:1 "...stays at or below 1 replica...SIGKILL..."')
            play(pump, "later 61")


def test_an_error_of_a_larger_size_that_all_replicas_raise_one_after_another_limits_the_job(
    pump: Pump,
) -> None:
    left_with_one(pump)
    assert joined(pump) == 0
    pump.agents[0].newcomer_fails(0, kind="RuntimeError at s.py:5", message="view")
    play(pump, "decide -> recover restarts=0")
    pump.agents[0].steps = False
    play(pump, "settle -> recover")
    pump.agents[0].fail("view", kind="RuntimeError at s.py:5")
    play(pump, "settle; later 3 -> restarts=0")


ERROR, NODE = 'newcomer_fails 0 kind="RuntimeError at s.py:5" final=True', "a 1 resilient=True inplace=True"
JOB = f"job a max_replicas=3 max_nodes=3 autoscale=False; node n0 {NODE}"
GROWN = f"{JOB}; ask a replicas=1; settle; node n1 {NODE}; node n2 {NODE}; ask a replicas=3; decide"
LIMITED = 'running restarts=0 "...at or below 1 replica..."'
ONE_AFTER_ANOTHER = {
    "all have begun": f"""
        {GROWN}; settle; decide -> inplace on:n0,n1,n2
        n2 {ERROR}; decide -> recover n0=1 n1=1
        n0 {ERROR}; n0 step; n1 {ERROR}; decide -> recover n1=1
        settle; later 3 -> {LIMITED}""",
    "one has not said so": f"""
        {GROWN}; decide; decide; decide; all steps=False; n1 switch; n2 switch; n2 {ERROR}; decide -> recover
        n1 step; n1 {ERROR}; decide; n0 step; n0 {ERROR}; decide; settle; later 3 -> {LIMITED}""",
    "the larger size had worked": f"""
        {JOB}; node n1 {NODE}; node n2 {NODE}; ask a replicas=3; settle; later 30 -> n0=1 n1=1 n2=1
        n2 lose 0; decide -> recover n0=1 n1=1
        n0 step; n1 steps=False; n0 {ERROR}; decide; n1 step; n1 {ERROR}; decide; decide -> limit=None""",
}


@pytest.mark.parametrize("script", ONE_AFTER_ANOTHER.values(), ids=ONE_AFTER_ANOTHER)
def test_errors_on_one_node_after_another_are_those_of_the_size_before(pump: Pump, script: str) -> None:
    play(pump, script)


NEWCOMER_FAILS = {
    "killed twice": ("lose 0", "lose 0"),
    "raises": ('newcomer_fails 0 kind="NameError at train.py:3" message="name x"',),
    "hangs": ('newcomer_fails 0 exit_code=-9 message="it hangs: no step within 300 s"',),
    "exits twice": ("newcomer_fails 0 exit_code=3", "newcomer_fails 0 exit_code=3"),
}


@pytest.mark.parametrize("events", NEWCOMER_FAILS.values(), ids=NEWCOMER_FAILS.keys())
@pytest.mark.parametrize("again", ["later 601", "n1 leave; node n1 a resilient=True inplace=True", "scale"])
def test_a_newcomer_that_fails_after_it_has_joined_is_left_out_and_tried_again(
    pump: Pump, events: tuple[str, ...], again: str
) -> None:
    resilient(pump, nodes=2, slots=1)
    for agent in pump.agents:
        agent.inplace = True
    pump.ask("a", replicas=2)
    pump.agents[1].lose(0)
    play(pump, "decide -> recover")
    for event in events:
        pump.agents[0].report(pump.plan("a"), inplace=True)
        pump.settle()
        assert (pump.placed("a"), pump.plan("a").transition) == ({"n0": 1, "n1": 1}, Transition.INPLACE)
        if "hangs" in event:
            pump.clock.now += 300
        play(pump, f"n1 {event}; decide -> recover n0=1 restarts=0")
    pump.agents[0].report(pump.plan("a"), inplace=True)
    play(pump, 'settle; later 500 -> n0=1 "...n1 is left out: ..."')
    if again == "scale":
        pump.ask("a", replicas=1)
        pump.settle()
        pump.ask("a", replicas=2)
        again = "settle"
    play(pump, f"{again}; settle; n0 report inplace=True; later 2 -> n0=1 n1=1")


@pytest.mark.parametrize("newcomer", [True, False], ids=["a newcomer", "one that was there before"])
def test_other_deaths_are_replaced_at_once(pump: Pump, newcomer: bool) -> None:
    """Of newcomers that had joined some time ago, and of those that newcomers joined."""
    left_with_one(pump)
    slot = 0 if newcomer else 1
    for _ in range(4):
        assert joined(pump) == 0
        assert pump.plan("a").slots("n0") == ((1, 0) if newcomer else (slot, 1 - slot))
        if newcomer:
            pump.later(pump.settings.joined + 0.1)
        pump.agents[0].lose(slot)
        play(pump, "decide -> recover")
        if not newcomer:
            # the one that is left was there before the next
            slot = 1 - slot
