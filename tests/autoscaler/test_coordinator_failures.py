"""What the coordinator makes of replicas that fail and of nodes that vanish, drain or do not start."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from coordinator_pump import Pump, elastic, start
from coordinator_script import play

from adaptdl_elastic.rendezvous.schema.records import Cause, Leaving, Transition, encode

KIND = "NameError at train.py:3 in <module>"
WHAT = "IndexError: index 10 is out of range"


def never_steps(pump: Pump, **changes: object) -> None:
    """A job on two nodes whose replicas fail before their first step."""
    pump.job("a", min_nodes=2, min_replicas=2, max_replicas=2, **changes)
    for index in range(2):
        pump.node(f"n{index}", "a", steps=False)
    pump.settle()


def fail_again(pump: Pump, *nodes: str, kind: str = KIND) -> None:
    """Let agents fail, in this order, and the job be restarted if it is to be."""
    for node in nodes:
        agent = next(agent for agent in pump.agents if agent.node == node)
        agent.fail(f"name {pump.plan('a').generation} is not defined", kind=kind)
    pump.later(3)


def errs(pump: Pump, message: str = WHAT, kind: str = KIND, step: int | None = 100) -> None:
    """Let rank 0 fail after a step, and the job be restarted if it is to be."""
    pump.agents[0].fail(message, kind=kind, step=step)
    pump.later(3)


def fails_on_two(pump: Pump, **failure: Any) -> None:
    """A job that works on one replica gets two from the policy, and fails before a step."""
    play(pump, "job a max_replicas=2 max_nodes=2 max_restarts=0; node n0 a; settle")
    pump.agents[0].report(pump.plan("a"), max_profiled_replicas=1)
    pump.node("n1", "a", steps=False)
    pump.agents[0].steps = False
    pump.later(61)
    assert set(pump.placed("a")) == {"n0", "n1"}
    pump.agents[0].steps = True
    pump.agents[0].fail(**{"message": "RuntimeError: shape", "kind": KIND, **failure})
    pump.settle()


def stutter(pump: Pump, seconds: float) -> None:
    """Let the store be slow to answer every few seconds."""
    end = pump.clock() + seconds
    while pump.clock() < end:
        pump.steady_since = pump.clock()
        pump.later(pump.settings.node_ttl - 1)


def end_patience(pump: Pump) -> None:
    """Let a missing agent be given up where the store stutters all the time, and not before."""
    placed = pump.placed("a")
    stutter(pump, pump.settings.steady - 1)
    assert pump.placed("a") == placed
    stutter(pump, pump.settings.node_ttl + 4)


def lose_lease(pump: Pump, node: str) -> None:
    """Let the lease of an agent run out in a break of the store; it may come back."""
    pump.steady_since = pump.clock()
    away = next(agent for agent in pump.agents if agent.node == node)
    assert away.lease is not None
    away.lease.revoke()
    away.lease = None


def put_plan(pump: Pump, number: str) -> None:
    """Write one of the plans that were made so far into the store, as if it had the data of a backup."""
    pump.store.put(pump.keys.job("a", "plan"), encode(pump.plans[int(number)]))


def failing_twice(second: str) -> str:
    return f"""
        start max_restarts=3
        errs; n0 fail {second}; settle; later 10 -> running restarts=2"""


KILLED = 'fail "SIGKILL: killed from outside" exit_code=-9'
TWICE = f'failed exit_code=1 restarts_used=1 "failed twice in the same way after step 100: rank 0: {WHAT}"'

FAILURES = {
    "a failure restarts at once and counts": """
        start
        n0 fail "CUDA out of memory"; settle -> +1 failure abort restarts=1 restarts_used=1
        -> "...CUDA out of memory..." first_failure="CUDA out of memory\"""",
    "a failure that comes again before the first step ends the job": f"""
        never_steps
        fail_again n0 -> restarts=1 failed_as="{KIND}"
        fail_again n1 -> failed exit_code=1 restarts_used=1 exits=1,1
        -> "failed twice in the same way before its first step: rank 0: name 1 is not defined\"""",
    "an error that comes with two replicas limits the job to one": """
        fails_on_two -> n0=1
        take_over; n0 report max_profiled_replicas=1; later 61; n0 report max_profiled_replicas=1; later 61
        n0 report max_profiled_replicas=1; later 61 -> n0=1 restarts=0 running
        -> "...stays at or below 1 replica (adaptdl scale a --replicas N lifts this limit): above..."
        -> "...above it the script failed: RuntimeError: shape..."
        ask a replicas=2; n0 steps=False; settle -> n0=1 n1=1 limit=None
        n0 steps=True; errs "RuntimeError: shape" step=None; later 58 -> n0=1""",
    "an error that comes at the smaller size and on the other node, too, ends the job": """
        fails_on_two
        errs "RuntimeError: shape" step=None; settle -> n1=1 running
        n1 fail "RuntimeError: shape" kind="NameError at train.py:3 in <module>"; settle
        -> failed exit_code=1""",
    "a failure without a kind is not one of two replicas": """
        fails_on_two kind="" -> failed limit=None""",
    "a final failure that comes with two replicas limits the job to one at once": """
        fails_on_two final=True -> running n0=1 restarts=0 "...stays at or below 1 replica..."
        later late_pardon 61; n0 report max_profiled_replicas=1; later 61 -> n0=1 n1=1
        n0 fail "RuntimeError: shape" final=True; settle -> n0=1
        later late_pardon 61; n0 report max_profiled_replicas=1; later 61 -> n0=1""",
    "what a lost node leaves is no size that worked": """
        job a min_nodes=2 min_replicas=3 max_replicas=3 max_nodes=2; node n0 a 2; node n1 a 1; settle
        n0 vanish; wait 20; decide -> abort node_lost nowhere
        node n0 a 2; decide; decide; decide; settle -> n0=2 n1=1 sizes=(3,)
        n0 fail "RuntimeError: shape" final=True; settle -> sizes=(3,)""",
    # the smaller one is tried only if the larger one fails as well
    "an error that comes with a batch size limits the job to smaller ones": f"""
        start max_restarts=0
        n0 fail "RuntimeError: shape" kind="{KIND}" worked_batch=48 step=48; settle -> limited_to=48 n0=1 n1=1
        n0 fail "RuntimeError: shape" kind="{KIND}" worked_batch=32 step=32; settle -> limited_to=32 n0=1 n1=1
        -> "...at or below batch size 32 ..."
        n0 fail "RuntimeError: shape" kind="{KIND}" step=40; settle -> failed""",
    "the same error after the same step ends the job": f"""
        start max_restarts=3
        errs; errs -> {TWICE}""",
    "numbers and addresses in the message do not make another error": """
        start max_restarts=3
        errs "ValueError: <Row at 0x7f9f93a826b0> of worker 7"
        errs "ValueError: <Row at 0x5e0aa1> of worker 12" -> failed restarts_used=1""",
    "an error after another step is restarted": failing_twice(f'"{WHAT}" kind="{KIND}" step=101'),
    "an error with another message is restarted": failing_twice(
        f'"IndexError: index 10 is negative" kind="{KIND}" step=100'
    ),
    "an error on another line is restarted": failing_twice(
        f'"{WHAT}" kind="IndexError at train.py:4" step=100'
    ),
    "an error of no kind is restarted": failing_twice(f'"{WHAT}" step=100'),
    "an error after no known step is restarted": failing_twice(f'"{WHAT}" kind="{KIND}"'),
    "a change between two errors after the same step does not hide them": """
        job a max_replicas=2 max_nodes=2; node n0 a; settle
        errs; node n1 a; ask a replicas=2; later 30 -> manual
        errs -> n1=1 running "...n0 is left out: IndexError..."
        n1 fail "IndexError: index 10 is out of range" step=100 kind="NameError at train.py:3 in <module>"
        settle
        -> failed""",
    # `steps=False`: the checkpoint that the next generation begins with is of step 100
    "a restart that begins with the step of the error ends the job": f"""
        start max_restarts=3
        all steps=False; errs; errs -> {TWICE}""",
    "a failure that no restart cures ends the job at once": """
        start max_restarts=3
        n0 fail "not even one sample fits" final=True; later 3 -> failed exit_code=1 restarts_used=0
        -> "failed, and a restart would not help: rank 0: not even one sample fits\"""",
    "a successor remembers the failure before": """
        never_steps
        fail_again n0; take_over; settle; fail_again n0 -> failed""",
    "failures of which two prove nothing are restarted as often as is allowed": """
        never_steps max_restarts=5
        fail_again n0; later 20; fail_again n0 kind=""; later 20; fail_again n0; later 20
        fail_again n0 kind="OSError at train.py:3"; later 20; fail_again n0 kind=""; later 20
        -> running restarts=5""",
    # `steps` are of the next generation
    "a step makes the failure before forgotten": f"""
        never_steps max_restarts=9
        all steps=True; fail_again n0; later 20 -> failed_as="{KIND}"
        fail_again n0; later 20 -> failed_as="after step ?: {KIND}: name # is not defined"
        all steps=False; fail_again n0; later 20 -> failed_as="after step ?: {KIND}: name # is not defined"
        fail_again n0; later 20 -> failed_as="{KIND}" restarts=4
        fail_again n0 -> failed""",
    "errors that tell of a lost peer do not hide the cause": """
        never_steps
        n1 fail "Connection closed by peer" lost_peer=True; fail_again n0
        n1 fail "Connection closed by peer" lost_peer=True; fail_again n0 -> failed
        -> "...before its first step: rank 0: name 1 is not defined\"""",
    "a lost peer is no failure as long as the others may be about to say why": """
        never_steps
        n1 fail "Connection closed by peer" lost_peer=True; decide -> +0 restarts=0
        fail_again n0 -> +1 "rank 0 failed: name 0 is not defined (restart 1 of 3)\"""",
    "a lost peer that no other replica explains is a failure": """
        never_steps
        n1 fail "Connection closed by peer" lost_peer=True; decide; later silence -> +1 restarts=1""",
    "another plan between the failures does not make them forgotten": f"""
        job a max_replicas=2 max_nodes=2; node n0 a steps=False; settle
        fail_again n0; node n1 a steps=False; ask a replicas=2; later 30 -> manual failed_as="{KIND}"
        fail_again n0 -> n1=1
        fail_again n1 -> failed""",
    "a script that reports no steps has minutes for its first": """
        job a; node n0 a steps=False library=False; settle
        later 10; fail_again n0; later 10; fail_again n0 -> failed""",
    "a script that reports no steps is restarted after these minutes": """
        job a; node n0 a steps=False library=False; settle
        later 1000; fail_again n0; later 1000; fail_again n0 -> running""",
    "a job that may not restart fails with the signal as the shell says it": """
        start max_restarts=0
        n1 fail killed exit_code=-9; settle -> failed exit_code=137""",
    "progress pays restarts back": """
        start max_restarts=1
        n0 fail; settle -> restarts=1
        checkpoint a 100; later refill_after 1; n0 fail; later 5 -> running restarts=1 failed_step=100""",
    "time without a newer checkpoint pays nothing back": """
        job a max_restarts=1; node n0 a; settle
        checkpoint a 100; n0 fail; settle; later refill_after 1; n0 fail; later 5 -> failed""",
    "a kill from outside counts only without a newer checkpoint": f"""
        start max_restarts=0
        checkpoint a 5; n1 {KILLED}; settle -> abort replica_lost restarts=0 failed_step=5 running
        checkpoint a 6; n1 {KILLED}; settle -> abort replica_lost restarts=0 failed_step=6 running
        n1 {KILLED}; settle -> failed""",
    "replicas that hang count in spite of a checkpoint": """
        start max_restarts=0
        checkpoint a 5; n1 fail "does not answer" -9; settle -> failed""",
    "a crash counts in spite of a checkpoint": """
        start max_restarts=0
        checkpoint a 5; n1 fail "SIGSEGV: crashed in native code" -11; settle -> failed""",
    "an exception counts in spite of a checkpoint": """
        start max_restarts=0
        checkpoint a 5; n1 fail "SIGKILL of a child" 1; settle -> failed""",
    "a checkpoint of an earlier run is no progress": f"""
        start max_restarts=0
        checkpoint a 5 generation=-1; n1 {KILLED}; settle -> failed""",
    "a kill that does not count keeps the restarts that were counted": """
        start max_restarts=1
        n1 fail; settle -> failed=0
        checkpoint a 5; n1 fail SIGTERM exit_code=-15; settle -> replica_lost restarts=1 failed=0""",
}

NODES = {
    # it answers for the generation that it does not start; replicas that still save are not killed
    "a node that leaves before it has started is planned without while others save": """
        elastic
        ask a replicas=2; decide -> +1
        n0 step; n0 waiting=None; ended n0 0 stopped 143; n0 leave; decide -> +1 drain restart n1=1 n2=1
        settle -> on:n1,n2""",
    "a node that leaves before it has started is planned without when all have saved": """
        elastic
        ask a replicas=2; decide -> +1
        all step; n0 running=None waiting=None; ended n0 0 stopped 143; n0 leave; decide
        -> +1 drain abort n1=1 n2=1
        settle -> on:n1,n2""",
    "a node that is lost before it has started is planned without while others save": """
        job a max_replicas=1; node n0 a; node n1 a; node n2 a; settle -> n0=1
        n0 register draining=True; decide -> n1=1
        n1 vanish; decide -> +1 drain restart n2=1
        settle -> on:n2""",
    "nothing can be saved any more when a node is lost whose replicas were about to save": """
        elastic
        ask a replicas=2; decide -> +1 restart
        n0 vanish; decide -> +1 node_lost abort n1=1 n2=1""",
    "a job goes on elsewhere when the only node of its plan is drained before it has started": """
        elastic
        ask a replicas=1; decide -> n0=1
        n0 step; n0 waiting=None; ended n0 0 stopped 143; n0 leave; settle
        -> running restarts=0 n1=1 on:n1""",
    "a job goes on elsewhere when the only node of its plan is drained": """
        elastic
        ask a replicas=1; settle -> n0=1 on:n0
        n0 running=None; ended n0 0 stopped 143; n0 leave; settle
        -> running restarts=0 n1=1 on:n1""",
    # the replicas of both save and stop together
    "a job goes on when one of its nodes was drained while no coordinator was there": """
        elastic 2
        all running=None; all ended 0 stopped 143; n0 leave; take_over; settle
        -> running restarts=0 n1=1 on:n1""",
    "a job that all nodes leave is stopped when its replicas have saved": """
        job a max_replicas=1; node n0 a; node n1 a; settle -> n0=1
        n0 register draining=True; decide -> n1=1
        n1 waiting=None; ended n1 0 stopped 143; n1 leave; decide -> running
        ended n0 -1 stopped 143; decide -> stopped""",
    "a job whose replicas were stopped from outside is stopped": """
        elastic 2
        all running=None; all ended 0 stopped 143; settle -> stopped""",
    # the agents have dealt with the later plan, and will write it back
    "nothing is decided about a job whose store has lost its plan": """
        elastic 2
        ask a replicas=1; settle; put_plan -2; settle -> running +0
        put_plan -1; ask a replicas=2; settle -> running n0=1 n1=1 restarts=0""",
    "the last restart waits until it is known that a node was lost": """
        start max_restarts=0
        node n2 a; n1 fail "Connection closed by peer" lost_peer=True; n0 silence; settle
        -> running "...waits to know..."
        later node_ttl -1; expire n0; settle -> running node_lost restarts=0 n1=1 n2=1""",
    "a job without restarts that lost a peer fails when no node is lost": """
        start max_restarts=0
        n1 fail "Connection closed by peer" lost_peer=True; n0 silence; settle -> running
        later node_ttl; later grace 1 -> failed""",
    "a lost node is planned without and costs no restart": """
        elastic
        n0 vanish; settle -> n1=1 n2=1 node_lost abort restarts=0 "...lost n0...\"""",
    # the lease of a silent agent has not run out
    "a failure that was a lost node is given back": """
        elastic max_restarts=1
        n2 silence; n0 fail "Connection reset by peer"; settle -> restarts=1
        expire n2; settle -> node_lost restarts=0 n0=1 n1=1 on:n0,n1""",
    "a failure that was the loss of a node that is not planned again is given back": """
        elastic max_restarts=1
        n2 silence; drain n2; n0 fail "Connection reset by peer"; settle -> n0=1 n1=1 restarts=1
        expire n2; settle -> +0 n0=1 n1=1 restarts=1
        n0 fail; settle -> running restarts=1""",
    "a missing agent has a lease time to come back after a break of the store": """
        elastic
        lose_lease n2; settle -> +0 "...has not heard from n2..."
        n2 register; later 30 -> +0""",
    # it vanished just before
    "no agent is given up while the store does not answer at all": """
        elastic
        lose_lease n2; settle; no_answer 100 -> +0
        n2 register; later 30 -> +0""",
    "patience ends after a break of the store": """
        elastic
        reconnect; n2 vanish; settle; later node_ttl -1 -> n0=1 n1=1 n2=1
        later 2 -> n0=1 n1=1""",
    "patience ends where the store stutters all the time": """
        elastic
        reconnect; n2 vanish; job b; node m0 b; settle -> n0=1 n1=1 n2=1 b/nowhere
        end_patience -> n0=1 n1=1 b/m0=1""",
    "patience of a leader that has never seen the agent ends as well": """
        elastic
        n2 vanish; take_over; settle -> n0=1 n1=1 n2=1
        end_patience -> n0=1 n1=1""",
    # it registers before the lease of the old one has run out
    "a new agent under an old name is not the old one": """
        elastic
        n1 silence; node n1 a; settle -> node_lost on:n0,n1,n2 agents=n0-a-0,n1-a-3,n2-a-2""",
    "losing the minimum waits for a node and then resumes": """
        start
        n0 vanish; settle -> nowhere pending exits=-9,None
        -> "...needs at least 2 replicas on 2 nodes, registered: 1 node with 1 slot..."
        node n2 a; settle -> n1=1 n2=1 node_lost""",
    "a draining node is left in an orderly way": """
        elastic
        n0 register draining=True; settle -> n1=1 n2=1 drain restart
        n1 register draining=True; settle -> n2=1 "...drains n1: 1 replica is left of 2\"""",
    "a request drains a node that does not say so itself": """
        elastic
        drain n1; settle -> n0=1 n2=1
        undrain n1; settle -> n0=1 n1=1 n2=1""",
    "a job waits for another node when every node drains": """
        job a; node n0 a; settle
        n0 register draining=True; settle -> nowhere pending
        n0 leave; node n1 a; settle -> n1=1""",
    "a node that does not start is planned without": """
        job a max_replicas=2 min_replicas=1 rescale_timeout=20; node n0 a; node n1 a holds_start=True
        settle; later 19 -> n0=1 n1=1
        later 2 -> n0=1 "...n1 did not start within 20 s..."
        n1 holds_start=False; later late_pardon 61 -> n0=1 n1=1""",
    "a late node is waited for where there is no other": """
        start
        n1 holds_start=True; n0 fail; settle
        later 60 -> +0 "...n1 did not start within 20 s, and there is no other node...\"""",
}


def no_answer(pump: Pump, seconds: int) -> None:
    for _ in range(seconds):
        pump.clock.now += 1
        pump.steady_since = pump.clock()
        pump.settle()


@pytest.mark.parametrize("script", FAILURES.values(), ids=FAILURES)
def test_failures_are_restarted_unless_that_is_known_to_be_in_vain(pump: Pump, script: str) -> None:
    play(pump, script, start, never_steps, fail_again, errs, fails_on_two)


@pytest.mark.parametrize("script", NODES.values(), ids=NODES)
def test_jobs_go_on_without_nodes_that_are_gone_or_go(pump: Pump, script: str) -> None:
    play(pump, script, start, elastic, lose_lease, put_plan, no_answer, end_patience)


def test_restarts_are_spaced_and_run_out(pump: Pump) -> None:
    start(pump, max_restarts=3)
    waits = []
    for _ in range(3):
        generation, failed = pump.plan("a").generation, pump.clock()
        pump.agents[0].fail("boom")
        pump.settle()
        while pump.plan("a").generation == generation:
            pump.later(max(0.0, pump.wake_at - pump.clock()) + 1e-3)
        waits.append(round(pump.clock() - failed, 1))
    assert waits == [0.0, 1.0, 2.0]
    why = '"failed after 3 of 3 restarts: rank 0: boom"'
    play(pump, f"n0 fail boom exit_code=7; settle -> failed exit_code=7 exits=7,7 {why}")


def test_what_a_node_held_is_kept_while_the_newest_plan_waits_for_it(pump: Pump) -> None:
    elastic(pump)
    plan, leaver = pump.plan("a"), pump.agents[0]
    held = pump.keys.held("a", leaver.node)
    old = Leaving(leaver.node, 1, leaver.agent, plan.generation)
    plan = replace(plan, generation=plan.generation + 6, placements=plan.placements[1:], leaving=(old,))
    pump.store.put(pump.keys.job("a", "plan"), encode(plan))
    leaver.vanish()
    pump.settle()
    assert pump.store.get(held) is not None, "an agent that comes now has nothing else to go by"
    play(pump, "ask a replicas=1; settle")
    after = pump.plan("a")
    assert after.generation > plan.generation
    assert after.leaving, "another node leaves, and of the same generation"
    play(pump, "ask a replicas=2; settle; ask a replicas=1; settle")
    assert pump.store.get(held) is None


def test_a_job_is_done_when_those_that_a_change_was_to_leave_out_have_ended_too(pump: Pump) -> None:
    elastic(pump)
    was = pump.plan("a")
    old = tuple(Leaving(one.node, 1, one.agent, was.generation) for one in was.placements)
    plan = replace(
        was,
        generation=was.generation + 1,
        placements=was.placements[:2],
        transition=Transition.INPLACE,
        leaving=old,
        base=was.generation,
    )
    pump.store.put(pump.keys.job("a", "plan"), encode(plan))
    # the script came to its end before the change
    ends = "; ".join(f"ended {one.node} {back} done" for one in plan.placements for back in (-1, 0))
    play(pump, f"{ends}; decide -> running generation={plan.generation}")
    play(pump, f"ended {was.placements[2].node} -1 stopped; decide -> done")


def test_no_round_is_asked_for_while_an_agent_is_missing(pump: Pump) -> None:
    """Its job would not fit where it is, and its neighbours would make room for it."""
    elastic(pump)
    play(pump, "ask a replicas=3; settle")
    generation = pump.plan("a").generation
    pump.slow = True
    lose_lease(pump, "n2")
    # something to be decided
    pump.node("n4", "a")
    pump.settle().later(pump.settings.min_gap + 1)
    assert not pump.asked
    pump.agents[2].register()
    pump.settle().later(pump.settings.min_gap + 1)
    assert len(pump.asked) == 1
    assert {node.name for node in pump.asked[0].question.nodes} == {"n0", "n1", "n2", "n4"}
    pump.answer()
    pump.settle()
    assert pump.plan("a").generation == generation


def test_rounds_do_not_wait_for_ever_where_one_agent_or_another_is_always_missing(pump: Pump) -> None:
    elastic(pump, nodes=2)
    here, away = pump.agents
    since, pump.slow = pump.clock(), True
    play(pump, "job b; node m0 b")
    longest = pump.settings.steady + pump.settings.node_ttl + pump.settings.interval
    while not pump.asked and pump.clock() <= since + longest + pump.settings.node_ttl:
        lose_lease(pump, here.node)
        if away.lease is None:
            away.register()
        pump.settle().later(pump.settings.node_ttl - 1)
        here, away = away, here
    assert pump.clock() >= since + longest
    assert {info.name for info in pump.asked[0].question.jobs} == {"a", "b"}
    assert pump.plan("a").replicas == 2


def test_an_agents_removal_of_a_dead_node_is_ratified(pump: Pump) -> None:
    elastic(pump)
    dead = pump.agents.pop(2)
    item = pump.store.get(pump.keys.job("a", "plan"))
    assert item is not None
    before = pump.plan("a")
    removal = replace(
        before,
        generation=before.generation + 1,
        placements=before.placements[:2],
        cause=Cause.NODE_LOST,
        transition=Transition.ABORT,
        leaving=(
            Leaving("n0", 1, "n0-a-0", before.generation),
            Leaving("n1", 1, "n1-a-0", before.generation),
        ),
        fence=0,
    )
    assert pump.store.compare_and_swap(pump.keys.job("a", "plan"), encode(removal), item.mod_revision)
    dead.vanish()
    pump.settle()
    plan = pump.plan("a")
    assert (plan.generation, plan.fence) == (removal.generation, pump.fence)
    assert all(agent.running == plan.generation for agent in pump.agents)
