"""What the coordinator makes of replicas that fail and of nodes that vanish, drain or do not start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from coordinator_pump import Pump, elastic, start
from fake_agents import FakeAgent

from adaptdl_elastic.rendezvous.schema.records import (
    Cause,
    DrainRequest,
    EndedRecord,
    JobState,
    Leaving,
    Outcome,
    Transition,
    encode,
)

# -- failures


@pytest.mark.parametrize("saved", [True, False])
def test_a_node_that_leaves_before_it_has_started_is_planned_without(pump: Pump, saved: bool) -> None:
    elastic(pump)
    was = pump.plan("a")
    pump.ask("a", replicas=2)
    pump.decide()
    plan = pump.plan("a")
    assert plan.generation == was.generation + 1
    leaver, stayer = (next(a for a in pump.agents if a.node == p.node) for p in plan.placements)
    leaver.step()  # its replicas of the generation before are gone
    if saved:
        for agent in pump.agents:
            agent.step()
        leaver.running = None
    leaver.waiting = None  # it is on its way out, and answers for the one that it does not start
    answer = EndedRecord(leaver.node, plan.generation, Outcome.STOPPED, 143)
    key = pump.keys.generation("a", plan.generation, "ended", leaver.node)
    pump.store.put(key, encode(answer))
    leaver.leave()
    pump.settle()
    after = next(one for one in pump.plans if one.generation == plan.generation + 1)
    # replicas of the generation before that still save are not killed
    expected = Transition.ABORT if saved else Transition.RESTART
    assert (after.cause, after.transition) == (Cause.DRAIN, expected)
    assert leaver.node not in {placement.node for placement in after.placements}
    assert stayer.running == pump.plan("a").generation


@pytest.mark.parametrize("started", [False, True])
def test_a_job_goes_on_elsewhere_when_the_only_node_of_its_plan_is_drained(pump: Pump, started: bool) -> None:
    elastic(pump)
    pump.ask("a", replicas=1)
    pump.decide()
    plan = pump.plan("a")
    (place,) = plan.placements
    leaver = next(agent for agent in pump.agents if agent.node == place.node)
    leaver.step()  # its replicas of the generation before are gone
    if started:
        pump.settle()
        assert leaver.running == plan.generation
        leaver.running = None
    leaver.waiting = None  # it is on its way out, and says that nothing of the generation runs
    answer = EndedRecord(leaver.node, plan.generation, Outcome.STOPPED, 143)
    pump.store.put(pump.keys.generation("a", plan.generation, "ended", leaver.node), encode(answer))
    leaver.leave()
    pump.settle()
    assert pump.status("a").state is JobState.RUNNING
    after = pump.plan("a")
    assert leaver.node not in pump.placed("a")
    assert [agent.node for agent in pump.agents if agent.running == after.generation] == [*pump.placed("a")]
    assert (after.replicas, after.restarts) == (1, 0)


def test_a_job_goes_on_when_one_of_its_nodes_was_drained_while_no_coordinator_was_there(pump: Pump) -> None:
    elastic(pump, 2)
    plan, (leaver, stayer) = pump.plan("a"), pump.agents
    for agent in (leaver, stayer):  # the replicas of both save and stop together
        agent.running = None
        answer = EndedRecord(agent.node, plan.generation, Outcome.STOPPED, 143)
        pump.store.put(pump.keys.generation("a", plan.generation, "ended", agent.node), encode(answer))
    leaver.leave()
    pump.take_over().settle()
    assert pump.status("a").state is JobState.RUNNING
    assert pump.placed("a") == {stayer.node: 1}
    assert stayer.running == pump.plan("a").generation
    assert pump.plan("a").restarts == 0


def test_a_job_that_all_nodes_leave_is_stopped_when_its_replicas_have_saved(pump: Pump) -> None:
    pump.job("a", max_replicas=1)
    first, second = pump.node("n0", "a"), pump.node("n1", "a")
    pump.settle()
    (place,) = pump.plan("a").placements
    saves, other = (first, second) if place.node == "n0" else (second, first)
    before = pump.plan("a").generation
    saves.register(draining=True)
    pump.decide()
    plan = pump.plan("a")
    assert [one.node for one in plan.placements] == [other.node]
    other.waiting = None  # it is drained, too, before the replica of the other node has saved
    answer = EndedRecord(other.node, plan.generation, Outcome.STOPPED, 143)
    pump.store.put(pump.keys.generation("a", plan.generation, "ended", other.node), encode(answer))
    other.leave()
    pump.decide()
    assert pump.status("a").state is JobState.RUNNING
    assert saves.running == before
    saves.running = None
    answer = EndedRecord(saves.node, before, Outcome.STOPPED, 143)
    pump.store.put(pump.keys.generation("a", before, "ended", saves.node), encode(answer))
    pump.decide()
    assert pump.status("a").state is JobState.STOPPED


def test_a_job_whose_replicas_were_stopped_from_outside_is_stopped(pump: Pump) -> None:
    elastic(pump, 2)
    plan = pump.plan("a")
    for agent in pump.agents:
        agent.running = None
        answer = EndedRecord(agent.node, plan.generation, Outcome.STOPPED, 143)
        pump.store.put(pump.keys.generation("a", plan.generation, "ended", agent.node), encode(answer))
    pump.settle()
    assert pump.status("a").state is JobState.STOPPED


def test_the_end_of_an_old_generation_is_kept_while_the_newest_plan_waits_for_it(pump: Pump) -> None:
    elastic(pump)
    plan, leaver = pump.plan("a"), pump.agents[0]
    old = Leaving(leaver.node, 1, leaver.agent, plan.generation + 1)
    plan = replace(plan, generation=plan.generation + 6, leaving=(old,))
    pump.store.put(pump.keys.job("a", "plan"), encode(plan))
    pump.settle()
    ended = pump.keys.generation("a", old.generation, "ended", leaver.node)
    assert pump.store.get(ended) is not None, "an agent that comes now has nothing else to go by"
    pump.ask("a", replicas=2)
    pump.settle()
    after = pump.plan("a")
    assert after.generation > plan.generation
    assert old.generation not in {one.generation for one in after.leaving}, "it has ended"
    assert pump.store.get(ended) is None


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

    def end(node: str, generation: int, outcome: Outcome) -> None:
        key = pump.keys.generation("a", generation, "ended", node)
        pump.store.put(key, encode(EndedRecord(node, generation, outcome, 0)))

    for one in plan.placements:  # the script came to its end before the change
        end(one.node, was.generation, Outcome.DONE)
        end(one.node, plan.generation, Outcome.DONE)
    pump.decide()
    assert pump.status("a").state is JobState.RUNNING
    assert pump.plan("a").generation == plan.generation
    end(was.placements[2].node, was.generation, Outcome.STOPPED)
    pump.decide()
    assert pump.status("a").state is JobState.DONE


def test_a_failure_restarts_at_once_and_counts(pump: Pump) -> None:
    start(pump)
    pump.agents[0].fail("CUDA out of memory")
    pump.settle()
    plan = pump.plan("a")
    assert (plan.generation, plan.cause, plan.transition, plan.restarts) == (
        1,
        Cause.FAILURE,
        Transition.ABORT,
        1,
    )
    assert "CUDA out of memory" in plan.reason
    assert pump.status("a").restarts_used == 1
    assert pump.status("a").failures[0].message == "CUDA out of memory"


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
    pump.agents[0].fail("boom", exit_code=7)
    pump.settle()
    status = pump.status("a")
    assert (status.state, status.exit_code) == (JobState.FAILED, 7)
    assert status.reason == "failed after 3 of 3 restarts: rank 0: boom"
    assert {agent.exit_code for agent in pump.agents} == {7}


KIND = "NameError at train.py:3 in <module>"


def fail_again(pump: Pump, *failing: FakeAgent, kind: str = KIND) -> None:
    """Let agents fail, in this order, and the job be restarted if it is to be."""
    for agent in failing:
        agent.fail(f"name {pump.plan('a').generation} is not defined", kind=kind)
    pump.later(3)


def never_steps(pump: Pump, **changes: object) -> None:
    """A job on two nodes whose replicas fail before their first step."""
    pump.job("a", min_nodes=2, min_replicas=2, max_replicas=2, **changes)
    for index in range(2):
        pump.node(f"n{index}", "a", steps=False)
    pump.settle()


def test_a_failure_that_comes_again_before_the_first_step_ends_the_job(pump: Pump) -> None:
    never_steps(pump)
    fail_again(pump, pump.agents[0])
    assert (pump.plan("a").restarts, pump.plan("a").failed_as) == (1, KIND)
    fail_again(pump, pump.agents[1])
    status = pump.status("a")
    assert (status.state, status.exit_code, status.restarts_used) == (JobState.FAILED, 1, 1)
    what = "failed twice in the same way before its first step: rank 0: name 1 is not defined"
    assert status.reason == what
    assert {agent.exit_code for agent in pump.agents} == {1}


def fails_on_two(pump: Pump, **failure: Any) -> None:
    """A job that works on one replica gets two from the policy, and fails before a step."""
    pump.job("a", max_replicas=2, max_nodes=2, max_restarts=0)
    pump.node("n0", "a")
    pump.settle()
    pump.agents[0].report(pump.plan("a"), max_profiled_replicas=1)
    pump.node("n1", "a", steps=False)
    pump.agents[0].steps = False
    pump.later(61)
    assert set(pump.placed("a")) == {"n0", "n1"}
    pump.agents[0].steps = True
    pump.agents[0].fail(**{"message": "RuntimeError: shape", "kind": KIND, **failure})
    pump.settle()


def test_an_error_that_two_replicas_bring_is_of_that_size(pump: Pump) -> None:
    fails_on_two(pump)
    assert pump.placed("a") == {"n0": 1}
    pump.take_over()
    for _ in range(3):
        pump.agents[0].report(pump.plan("a"), max_profiled_replicas=1)
        pump.later(61)
    assert (pump.placed("a"), pump.plan("a").restarts) == ({"n0": 1}, 0)
    status = pump.status("a")
    assert status.state is JobState.RUNNING
    why = "stays at or below 1 replica (adaptdl scale a --replicas N lifts this limit): above it the script "
    assert f"{why}failed: RuntimeError: shape" in status.reason
    pump.ask("a", replicas=2)
    pump.agents[0].steps = False
    pump.settle()
    assert (set(pump.placed("a")), pump.plan("a").limit) == ({"n0", "n1"}, None)
    pump.agents[0].steps = True
    pump.agents[0].fail("RuntimeError: shape", kind=KIND)
    pump.later(61)
    assert pump.placed("a") == {"n0": 1}, "the same request is not tried a second time"


def test_an_error_that_comes_at_the_smaller_size_too_ends_the_job(pump: Pump) -> None:
    fails_on_two(pump)
    pump.agents[0].fail("RuntimeError: shape", kind=KIND)
    pump.settle()
    assert (pump.status("a").state, pump.status("a").exit_code) == (JobState.FAILED, 1)


@pytest.mark.parametrize("failure", [{"kind": ""}, {"final": True}], ids=["of no kind, as a kill", "final"])
def test_another_failure_on_two_replicas_is_not_of_that_size(pump: Pump, failure: dict[str, Any]) -> None:
    fails_on_two(pump, **failure)
    assert pump.plan("a").limit is None
    assert pump.status("a").state is JobState.FAILED


def test_an_error_that_a_batch_size_brings_is_of_that_size(pump: Pump) -> None:
    start(pump, max_restarts=0)
    for worked in (48, 32):  # the smaller one is tried only if the larger one fails as well
        pump.agents[0].fail("RuntimeError: shape", kind=KIND, worked_batch=worked, step=worked)
        pump.settle()
        limit = pump.plan("a").limit
        assert limit is not None
        assert (limit.batch_size, limit.replicas) == (worked, None)
        assert set(pump.placed("a")) == {"n0", "n1"}
    assert "at or below batch size 32 " in pump.status("a").reason
    pump.agents[0].fail("RuntimeError: shape", kind=KIND, step=40)
    pump.settle()
    assert pump.status("a").state is JobState.FAILED


WHAT = "IndexError: index 10 is out of range"


def test_the_same_error_after_the_same_step_ends_the_job(pump: Pump) -> None:
    start(pump, max_restarts=3)
    for _ in range(2):
        pump.agents[0].fail(WHAT, kind=KIND, step=100)
        pump.later(3)
    status = pump.status("a")
    assert (status.state, status.exit_code, status.restarts_used) == (JobState.FAILED, 1, 1)
    assert status.reason == f"failed twice in the same way after step 100: rank 0: {WHAT}"


def test_numbers_and_addresses_in_the_message_do_not_make_another_error(pump: Pump) -> None:
    start(pump, max_restarts=3)
    for pid, address in ((7, "0x7f9f93a826b0"), (12, "0x5e0aa1")):
        pump.agents[0].fail(f"ValueError: <Row at {address}> of worker {pid}", kind=KIND, step=100)
        pump.later(3)
    assert (pump.status("a").state, pump.status("a").restarts_used) == (JobState.FAILED, 1)


@pytest.mark.parametrize(
    "second",
    [
        {"message": WHAT, "kind": KIND, "step": 101},
        {"message": "IndexError: index 10 is negative", "kind": KIND, "step": 100},
        {"message": WHAT, "kind": "IndexError at train.py:4 in <module>", "step": 100},
        {"message": WHAT, "kind": "", "step": 100},
        {"message": WHAT, "kind": KIND, "step": None},
    ],
)
def test_an_error_that_differs_in_anything_is_restarted(pump: Pump, second: Mapping[str, object]) -> None:
    start(pump, max_restarts=3)
    pump.agents[0].fail(WHAT, kind=KIND, step=100)
    pump.later(3)
    pump.agents[0].fail(**second)  # type: ignore[arg-type]
    pump.settle()
    pump.later(10)
    assert (pump.status("a").state, pump.plan("a").restarts) == (JobState.RUNNING, 2)


def test_a_change_between_two_errors_after_the_same_step_does_not_hide_that(pump: Pump) -> None:
    pump.job("a", max_replicas=2, max_nodes=2)
    pump.node("n0", "a")
    pump.settle()
    pump.agents[0].fail(WHAT, kind=KIND, step=100)
    pump.later(3)
    pump.node("n1", "a")
    pump.ask("a", replicas=2)
    pump.later(30)
    assert pump.plan("a").cause is Cause.MANUAL
    pump.agents[0].fail(WHAT, kind=KIND, step=100)
    pump.later(3)
    assert pump.status("a").state is JobState.FAILED


def test_a_restart_that_begins_with_the_step_of_the_error_ends_the_job(pump: Pump) -> None:
    start(pump, max_restarts=3)
    for agent in pump.agents:
        agent.steps = False  # the checkpoint that the next generation begins with is of step 100
    pump.agents[0].fail(WHAT, kind=KIND, step=100)
    pump.later(3)
    pump.agents[0].fail(WHAT, kind=KIND, step=100)
    pump.later(3)
    assert pump.status("a").reason == f"failed twice in the same way after step 100: rank 0: {WHAT}"


def test_a_failure_that_no_restart_cures_ends_the_job_at_once(pump: Pump) -> None:
    start(pump, max_restarts=3)
    pump.agents[0].fail("not even one sample fits", final=True)
    pump.later(3)
    status = pump.status("a")
    assert (status.state, status.exit_code, status.restarts_used) == (JobState.FAILED, 1, 0)
    assert status.reason == "failed, and a restart would not help: rank 0: not even one sample fits"


def test_a_successor_remembers_the_failure_before(pump: Pump) -> None:
    never_steps(pump)
    fail_again(pump, pump.agents[0])
    pump.take_over().settle()
    fail_again(pump, pump.agents[0])
    assert pump.status("a").state is JobState.FAILED


def test_failures_of_which_two_prove_nothing_are_restarted_as_often_as_is_allowed(pump: Pump) -> None:
    never_steps(pump, max_restarts=5)
    for kind in (KIND, "", KIND, "OSError at train.py:3 in <module>", ""):
        fail_again(pump, pump.agents[0], kind=kind)
        pump.later(20)
    assert pump.status("a").state is JobState.RUNNING
    assert pump.plan("a").restarts == 5


def test_a_step_makes_the_failure_before_forgotten(pump: Pump) -> None:
    never_steps(pump, max_restarts=9)
    remembered = []
    for steps in (True, True, False, False):
        for agent in pump.agents:
            agent.steps = steps  # from the next generation on
        fail_again(pump, pump.agents[0])
        pump.later(20)
        remembered.append(pump.plan("a").failed_as)
    assert remembered == [KIND, "", "", KIND]
    assert pump.plan("a").restarts == 4
    fail_again(pump, pump.agents[0])
    assert pump.status("a").state is JobState.FAILED


def test_the_last_restart_waits_until_it_is_known_that_a_node_was_lost(pump: Pump) -> None:
    start(pump, 2, max_restarts=0)
    lost, other = pump.agents
    pump.node("n2", "a")
    other.fail("Connection closed by peer", lost_peer=True)
    lost.holds_start = True  # its agent is dead, and its lease has not run out
    pump.agents.remove(lost)
    pump.settle()
    assert pump.status("a").state is JobState.RUNNING
    assert "waits to know" in pump.status("a").reason
    pump.clock.now += pump.settings.node_ttl - 1.0
    lost.vanish()
    pump.settle()
    assert pump.status("a").state is JobState.RUNNING
    assert (pump.plan("a").cause, pump.plan("a").restarts) == (Cause.NODE_LOST, 0)
    assert pump.placed("a") == {"n1": 1, "n2": 1}


def test_a_job_without_restarts_that_lost_a_peer_fails_when_no_node_is_lost(pump: Pump) -> None:
    start(pump, 2, max_restarts=0)
    silent, other = pump.agents
    other.fail("Connection closed by peer", lost_peer=True)
    pump.agents.remove(silent)
    pump.settle()
    assert pump.status("a").state is JobState.RUNNING
    pump.later(pump.settings.node_ttl + pump.settings.grace + 1.0)
    assert pump.status("a").state is JobState.FAILED


def test_errors_that_tell_of_a_lost_peer_do_not_hide_the_cause(pump: Pump) -> None:
    never_steps(pump)
    for _ in range(2):
        pump.agents[1].fail("Connection closed by peer", lost_peer=True)
        fail_again(pump, pump.agents[0])
    status = pump.status("a")
    assert status.state is JobState.FAILED
    assert status.reason.endswith("before its first step: rank 0: name 1 is not defined")


def test_another_plan_between_the_failures_does_not_make_them_forgotten(pump: Pump) -> None:
    pump.job("a", max_replicas=2, max_nodes=2)
    pump.node("n0", "a", steps=False)
    pump.settle()
    fail_again(pump, pump.agents[0])
    pump.node("n1", "a", steps=False)
    pump.ask("a", replicas=2)
    pump.later(30)
    assert (pump.plan("a").cause, pump.plan("a").failed_as) == (Cause.MANUAL, KIND)
    fail_again(pump, pump.agents[0])
    assert pump.status("a").state is JobState.FAILED


@pytest.mark.parametrize("lived", [10.0, 1000.0])
def test_a_script_that_reports_no_steps_has_minutes_for_its_first(pump: Pump, lived: float) -> None:
    pump.job("a")
    agent = pump.node("n0", "a", steps=False, library=False)
    pump.settle()
    for _ in range(2):
        pump.later(lived)
        fail_again(pump, agent)
    assert pump.status("a").state is (JobState.FAILED if lived < 300 else JobState.RUNNING)


def test_a_job_that_may_not_restart_fails_with_the_signal_as_the_shell_says_it(pump: Pump) -> None:
    start(pump, max_restarts=0)
    pump.agents[1].fail("killed", exit_code=-9)
    pump.settle()
    assert (pump.status("a").state, pump.status("a").exit_code) == (JobState.FAILED, 137)


def test_progress_pays_restarts_back(pump: Pump) -> None:
    start(pump, max_restarts=1)
    pump.agents[0].fail()
    pump.settle()
    assert pump.plan("a").restarts == 1
    pump.checkpoint("a", step=100)
    pump.later(pump.settings.refill_after + 1)
    pump.agents[0].fail()
    pump.later(5)
    assert pump.status("a").state is JobState.RUNNING
    assert (pump.plan("a").restarts, pump.plan("a").failed_step) == (1, 100)


def test_a_kill_from_outside_counts_only_without_a_newer_checkpoint(pump: Pump) -> None:
    start(pump, max_restarts=0)
    for step in (5, 6):
        pump.checkpoint("a", step=step)
        pump.agents[1].fail("SIGKILL: killed from outside", exit_code=-9)
        pump.settle()
        plan = pump.plan("a")
        assert (plan.transition, plan.cause, plan.restarts) == (Transition.ABORT, Cause.REPLICA_LOST, 0)
        assert plan.failed_step == step
        assert pump.status("a").state is JobState.RUNNING
    pump.agents[1].fail("SIGKILL: killed from outside", exit_code=-9)
    pump.settle()
    assert pump.status("a").state is JobState.FAILED


@pytest.mark.parametrize(
    ("message", "exit_code"),
    [("does not answer", -9), ("SIGSEGV: crashed in native code", -11), ("SIGKILL of a child", 1)],
    ids=["hangs", "crashes", "raises"],
)
def test_a_failure_that_is_no_kill_from_outside_counts_after_a_checkpoint(
    pump: Pump, message: str, exit_code: int
) -> None:
    start(pump, max_restarts=0)
    pump.checkpoint("a", step=5)
    pump.agents[1].fail(message, exit_code)
    pump.settle()
    assert pump.status("a").state is JobState.FAILED


def test_a_checkpoint_of_an_earlier_run_is_no_progress(pump: Pump) -> None:
    start(pump, max_restarts=0)
    pump.checkpoint("a", step=5, generation=pump.plan("a").first - 1)
    pump.agents[1].fail("SIGKILL: killed from outside", exit_code=-9)
    pump.settle()
    assert pump.status("a").state is JobState.FAILED


def test_a_kill_that_does_not_count_keeps_the_restarts_that_were_counted(pump: Pump) -> None:
    start(pump, max_restarts=1)
    pump.agents[1].fail()
    pump.settle()
    failed = pump.plan("a").failed
    pump.checkpoint("a", step=5)
    pump.agents[1].fail("SIGTERM", exit_code=-15)
    pump.settle()
    plan = pump.plan("a")
    assert (plan.cause, plan.restarts, plan.failed) == (Cause.REPLICA_LOST, 1, failed)


def test_time_without_a_newer_checkpoint_pays_nothing_back(pump: Pump) -> None:
    pump.job("a", max_restarts=1)
    agent = pump.node("n0", "a")
    pump.settle()
    pump.checkpoint("a", step=100)
    agent.fail()
    pump.settle()
    pump.later(pump.settings.refill_after + 1)
    agent.fail()
    pump.later(5)
    assert pump.status("a").state is JobState.FAILED


# -- nodes


def test_a_lost_node_is_planned_without_and_costs_no_restart(pump: Pump) -> None:
    elastic(pump)
    pump.agents[0].vanish()
    pump.settle()
    plan = pump.plan("a")
    assert set(pump.placed("a")) == {"n1", "n2"}
    assert (plan.cause, plan.transition, plan.restarts) == (Cause.NODE_LOST, Transition.ABORT, 0)
    assert "lost n0" in plan.reason


def test_a_failure_that_was_a_lost_node_is_given_back(pump: Pump) -> None:
    elastic(pump, max_restarts=1)
    dead = pump.agents.pop(2)  # does nothing any more, and its lease has not run out
    pump.agents[0].fail("Connection reset by peer")
    pump.settle()
    assert pump.plan("a").restarts == 1
    dead.vanish()
    pump.settle()
    plan = pump.plan("a")
    assert (plan.cause, plan.restarts) == (Cause.NODE_LOST, 0)
    assert set(pump.placed("a")) == {"n0", "n1"}
    assert all(agent.running == plan.generation for agent in pump.agents)


def test_a_failure_that_was_the_loss_of_a_node_that_is_not_planned_again_is_given_back(pump: Pump) -> None:
    elastic(pump, max_restarts=1)
    dead = pump.agents.pop(2)  # does nothing any more, and its lease has not run out
    asked_for = DrainRequest("n2", "the autoscaler wants it back")
    pump.store.put(pump.keys.drain("n2"), encode(asked_for))
    pump.agents[0].fail("Connection reset by peer")
    pump.settle()
    assert (set(pump.placed("a")), pump.plan("a").restarts) == ({"n0", "n1"}, 1)
    dead.vanish()
    pump.settle()
    assert (set(pump.placed("a")), pump.plan("a").restarts) == ({"n0", "n1"}, 1), "there is no other plan yet"
    pump.agents[0].fail()
    pump.settle()
    assert pump.status("a").state is JobState.RUNNING, "the only restart is left"
    assert pump.plan("a").restarts == 1


def is_missed(pump: Pump) -> FakeAgent:
    """The lease of n2's agent has run out in a break of the store; it may come back."""
    pump.steady_since = pump.clock()
    away = pump.agents[2]
    assert away.lease is not None
    away.lease.revoke()
    return away


def test_after_a_break_of_the_store_a_missing_agent_has_a_lease_time_to_come_back(pump: Pump) -> None:
    elastic(pump)
    generation = pump.plan("a").generation
    away = is_missed(pump)
    pump.settle()
    assert pump.plan("a").generation == generation
    assert "has not heard from n2" in pump.status("a").reason
    away.lease = None
    away.register()
    pump.later(30)
    assert pump.plan("a").generation == generation


def test_while_an_agent_is_missing_nobody_is_asked_who_shall_have_what(pump: Pump) -> None:
    """Its job would not fit where it is, and its neighbours would make room for it."""
    elastic(pump)
    pump.ask("a", replicas=3)
    pump.settle()
    generation = pump.plan("a").generation
    pump.slow = True
    away = is_missed(pump)
    pump.node("n4", "a")  # something to be decided
    pump.settle().later(pump.settings.min_gap + 1)
    assert not pump.asked
    away.lease = None
    away.register()
    pump.settle().later(pump.settings.min_gap + 1)
    assert len(pump.asked) == 1
    assert {node.name for node in pump.asked[0].question.nodes} == {"n0", "n1", "n2", "n4"}
    pump.answer()
    pump.settle()
    assert pump.plan("a").generation == generation


def test_after_a_break_of_the_store_patience_ends(pump: Pump) -> None:
    elastic(pump)
    pump.steady_since = pump.clock()
    pump.agents[2].vanish()
    pump.settle().later(pump.settings.node_ttl - 1)
    assert "n2" in pump.placed("a")
    pump.later(2)
    assert "n2" not in pump.placed("a")


def stutters(pump: Pump, seconds: float) -> None:
    """The store is slow to answer every few seconds."""
    end = pump.clock() + seconds
    while pump.clock() < end:
        pump.steady_since = pump.clock()
        pump.later(pump.settings.node_ttl - 1)


def test_patience_ends_where_the_store_stutters_all_the_time(pump: Pump) -> None:
    elastic(pump)
    pump.steady_since = pump.clock()
    pump.agents[2].vanish()
    pump.job("b")
    pump.node("m0", "b")
    pump.settle()
    assert set(pump.placed("a")) == {"n0", "n1", "n2"}
    assert pump.placed("b") == {}
    stutters(pump, pump.settings.steady - 1)
    assert set(pump.placed("a")) == {"n0", "n1", "n2"}
    stutters(pump, pump.settings.node_ttl + 4)
    assert set(pump.placed("a")) == {"n0", "n1"}
    assert pump.placed("b") == {"m0": 1}


def test_patience_of_a_leader_that_has_never_seen_the_agent_ends_as_well(pump: Pump) -> None:
    elastic(pump)
    pump.agents[2].vanish()
    pump.take_over()
    pump.settle()
    assert set(pump.placed("a")) == {"n0", "n1", "n2"}
    stutters(pump, pump.settings.steady - 1)
    assert set(pump.placed("a")) == {"n0", "n1", "n2"}
    stutters(pump, pump.settings.node_ttl + 4)
    assert set(pump.placed("a")) == {"n0", "n1"}


def test_while_the_store_does_not_answer_at_all_nobody_is_given_up(pump: Pump) -> None:
    """Who vanished just before has a moment to come back after it, however long it was."""
    elastic(pump)
    generation = pump.plan("a").generation
    away = is_missed(pump)
    pump.settle()
    for _ in range(100):
        pump.clock.now += 1
        pump.steady_since = pump.clock()
        pump.settle()
    assert pump.plan("a").generation == generation
    away.lease = None
    away.register()
    pump.later(30)
    assert pump.plan("a").generation == generation


def test_rounds_do_not_wait_for_ever_where_somebody_or_other_is_always_missing(pump: Pump) -> None:
    elastic(pump, nodes=2)
    here, away = pump.agents
    since, pump.slow = pump.clock(), True
    pump.job("b")
    pump.node("m0", "b")
    longest = pump.settings.steady + pump.settings.node_ttl + pump.settings.interval
    while not pump.asked and pump.clock() <= since + longest + pump.settings.node_ttl:
        pump.steady_since = pump.clock()
        assert here.lease is not None
        here.lease.revoke()
        here.lease = None
        if away.lease is None:
            away.register()
        pump.settle().later(pump.settings.node_ttl - 1)
        here, away = away, here
    assert pump.clock() >= since + longest
    assert {info.name for info in pump.asked[0].question.jobs} == {"a", "b"}
    assert pump.plan("a").replicas == 2


def test_a_new_agent_under_an_old_name_is_not_the_old_one(pump: Pump) -> None:
    elastic(pump)
    old = pump.agents.pop(1)
    new = pump.node("n1", "a")  # registers over it before its lease has run out
    pump.settle()
    assert pump.plan("a").cause is Cause.NODE_LOST
    assert {p.agent for p in pump.plan("a").placements} >= {new.agent}
    assert old.agent not in {p.agent for p in pump.plan("a").placements}
    assert new.running == pump.plan("a").generation


def test_losing_the_minimum_waits_for_a_node_and_then_resumes(pump: Pump) -> None:
    start(pump)
    pump.agents[0].vanish()
    pump.settle()
    assert pump.placed("a") == {}
    assert pump.status("a").state is JobState.PENDING
    assert "needs at least 2 replicas on 2 nodes, registered: 1 node with 1 slot" in pump.status("a").reason
    assert pump.agents[1].exit_code is None
    pump.node("n2", "a")
    pump.settle()
    assert pump.placed("a") == {"n1": 1, "n2": 1}
    assert pump.plan("a").cause is Cause.NODE_LOST


def test_a_draining_node_is_left_in_an_orderly_way(pump: Pump) -> None:
    elastic(pump)
    pump.agents[0].register(draining=True)
    pump.settle()
    plan = pump.plan("a")
    assert "n0" not in pump.placed("a")
    assert (plan.cause, plan.transition) == (Cause.DRAIN, Transition.RESTART)
    pump.agents[1].register(draining=True)
    pump.settle()
    assert pump.plan("a").reason.endswith("drains n1: 1 replica is left of 2")


def test_a_request_drains_a_node_that_does_not_say_so_itself(pump: Pump) -> None:
    elastic(pump)
    pump.store.put(pump.keys.drain("n1"), encode(DrainRequest("n1", "maintenance")))
    pump.settle()
    assert set(pump.placed("a")) == {"n0", "n2"}
    pump.store.delete(pump.keys.drain("n1"))
    pump.settle()
    assert set(pump.placed("a")) == {"n0", "n1", "n2"}


def test_when_every_node_drains_the_job_waits_for_another(pump: Pump) -> None:
    pump.job("a")
    agent = pump.node("n0", "a")
    pump.settle()
    agent.register(draining=True)
    pump.settle()
    assert pump.placed("a") == {}
    assert pump.status("a").state is JobState.PENDING
    agent.leave()
    pump.node("n1", "a")
    pump.settle()
    assert pump.placed("a") == {"n1": 1}


def test_a_node_that_does_not_start_is_planned_without(pump: Pump) -> None:
    pump.job("a", max_replicas=2, min_replicas=1, rescale_timeout=20)
    pump.node("n0", "a")
    late = pump.node("n1", "a", holds_start=True)
    pump.settle()
    assert set(pump.placed("a")) == {"n0", "n1"}
    pump.later(19)
    assert set(pump.placed("a")) == {"n0", "n1"}
    pump.later(2)
    assert pump.placed("a") == {"n0": 1}
    assert "n1 did not start within 20 s" in pump.plan("a").reason
    late.holds_start = False
    pump.later(pump.settings.late_pardon + pump.settings.interval + 1)
    assert set(pump.placed("a")) == {"n0", "n1"}


def test_without_another_node_a_late_one_is_waited_for(pump: Pump) -> None:
    start(pump)
    pump.agents[1].holds_start = True
    pump.agents[0].fail()
    pump.settle()
    generation = pump.plan("a").generation
    pump.later(60)
    assert pump.plan("a").generation == generation
    assert "n1 did not start within 20 s, and there is no other node" in pump.status("a").reason


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
