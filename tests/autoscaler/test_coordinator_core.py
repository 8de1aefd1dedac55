from __future__ import annotations

from dataclasses import replace

import pytest
from coordinator_pump import Pump, share_policy
from fake_agents import hints_of

from adaptdl_elastic.autoscaler.coordinator.core import decide
from adaptdl_elastic.autoscaler.coordinator.policy import model, policy_inputs
from adaptdl_elastic.autoscaler.coordinator.types import CompareAndSwap, Memory, Settings
from adaptdl_elastic.autoscaler.policy.types import Decision
from adaptdl_elastic.autoscaler.state import Seen
from adaptdl_elastic.rendezvous.records import (
    Cause,
    DrainRequest,
    EndedRecord,
    Failure,
    JobRequest,
    JobState,
    Leaving,
    Outcome,
    Plan,
    Rescale,
    RunningRecord,
    Transition,
    encode,
)
from adaptdl_elastic.sched_hints import ProfileEntry


@pytest.fixture
def pump() -> Pump:
    return Pump()


def test_a_job_starts_with_the_least_and_grows_when_it_reports(pump: Pump) -> None:
    pump.job("a")
    pump.node("n0", "a", 4)
    pump.settle()
    assert [(p.generation, p.replicas, p.cause) for p in pump.plans if p.placements] == [
        (0, 1, Cause.START),
        (1, 2, Cause.POLICY),
        (2, 4, Cause.POLICY),
    ]
    status = pump.status("a")
    assert status.state is JobState.RUNNING
    assert status.generation == 2


def test_it_ends_when_every_node_is_done(pump: Pump) -> None:
    pump.job("a", min_nodes=2, min_replicas=2, max_replicas=2)
    first, second = pump.node("n0", "a"), pump.node("n1", "a")
    pump.settle()
    first.finish()
    pump.settle()
    assert pump.status("a").state is JobState.RUNNING
    second.finish()
    pump.settle()
    assert (pump.status("a").state, pump.status("a").exit_code) == (JobState.DONE, 0)
    assert [agent.exit_code for agent in pump.agents] == [0, 0]


def test_min_nodes_not_met_is_pending_and_says_so(pump: Pump) -> None:
    pump.job("a", min_nodes=2, min_replicas=2)
    pump.node("n0", "a", 4)
    pump.settle()
    status = pump.status("a")
    assert status.state is JobState.PENDING
    assert "needs at least 2 replicas on 2 nodes, registered: 1 node with 4 slots" in status.reason
    pump.node("n1", "a", 4)
    pump.settle()
    assert pump.status("a").state is JobState.RUNNING


def test_manual_scale_and_back(pump: Pump) -> None:
    pump.job("a")
    pump.node("n0", "a", 4)
    pump.settle()
    pump.ask("a", replicas=3)
    pump.settle()
    assert pump.placed("a") == {"n0": 3}
    assert pump.plan("a").cause is Cause.MANUAL
    pump.later(300)
    assert pump.placed("a") == {"n0": 3}
    pump.ask("a", replicas=None)
    pump.settle()
    assert pump.placed("a") == {"n0": 4}


def test_what_a_person_asks_for_needs_no_policy_where_there_is_room(pump: Pump) -> None:
    pump.job("a")
    pump.node("n0", "a", 4)
    pump.settle()

    def takes_everything(*question: object) -> Decision:
        return Decision(allocations={"a": {}}, reasons={})

    pump.policy = takes_everything
    pump.ask("a", replicas=2)
    pump.settle()
    assert pump.placed("a") == {"n0": 2}
    pump.ask("a", replicas=9)  # more than there is
    pump.settle().later(200)
    assert pump.placed("a") == {"n0": 2}


def test_stop_saves_and_ends_resumable(pump: Pump) -> None:
    pump.job("a")
    agent = pump.node("n0", "a", 2)
    pump.settle()
    pump.ask("a", stop=True)
    pump.decide()
    assert pump.plan("a").cause is Cause.STOP
    assert pump.plan("a").transition is Transition.RESTART
    pump.decide()
    assert pump.status("a").state is JobState.STOPPING
    pump.settle()
    assert (pump.status("a").state, agent.exit_code) == (JobState.STOPPED, 143)


@pytest.mark.parametrize("request_", [{"stop": True}, {"replicas": 1}])
def test_a_job_that_ends_while_it_is_to_change_is_done(pump: Pump, request_: dict[str, int]) -> None:
    pump.job("a")
    agent = pump.node("n0", "a", 2)
    pump.settle()
    pump.ask("a", **request_)
    pump.decide()
    agent.finish()
    agent.holds_start = True
    pump.settle()
    assert (pump.status("a").state, agent.exit_code) == (JobState.DONE, 0)


# -- failures


def start(pump: Pump, nodes: int = 2, slots: int = 1, **changes: object) -> None:
    """A job `a` that runs on every one of `nodes`."""
    size = nodes * slots
    pump.job("a", min_nodes=nodes, min_replicas=size, max_replicas=size, **changes)
    for index in range(nodes):
        pump.node(f"n{index}", "a", slots)
    pump.settle()
    assert pump.plan("a").replicas == size


def elastic(pump: Pump, nodes: int = 3, **changes: object) -> None:
    """A job `a` that runs on `nodes` single-slot nodes and could run on one."""
    pump.job("a", max_replicas=nodes, max_nodes=nodes, **changes)
    for index in range(nodes):
        pump.node(f"n{index}", "a")
    pump.settle()
    assert pump.plan("a").replicas == nodes


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


def test_after_a_break_of_the_store_a_missing_agent_has_a_lease_time_to_come_back(pump: Pump) -> None:
    elastic(pump)
    generation = pump.plan("a").generation
    pump.steady_since = pump.clock()
    away = pump.agents[2]
    assert away.lease is not None
    away.lease.revoke()
    pump.settle()
    assert pump.plan("a").generation == generation
    assert "has not heard from n2" in pump.status("a").reason
    away.lease = None
    away.register()
    pump.later(30)
    assert pump.plan("a").generation == generation


def test_after_a_break_of_the_store_patience_ends(pump: Pump) -> None:
    elastic(pump)
    pump.steady_since = pump.clock()
    pump.agents[2].vanish()
    pump.settle().later(pump.settings.node_ttl - 1)
    assert "n2" in pump.placed("a")
    pump.later(2)
    assert "n2" not in pump.placed("a")


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


def test_not_in_place_when_the_user_says_restart(pump: Pump) -> None:
    grow_in_place(pump, rescale=Rescale.RESTART)
    assert pump.plan("a").transition is Transition.RESTART


def test_not_in_place_when_rank_0_would_be_a_newcomer(pump: Pump) -> None:
    in_place(pump)
    pump.node("n2", "a")
    pump.agents[0].register(draining=True)
    pump.agents[1].register(draining=True)
    pump.decide()
    assert pump.placed("a") == {"n2": 1}
    assert pump.plan("a").transition is Transition.RESTART


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
    pump = Pump(settings=Settings(interval=60.0, min_gap=10.0))
    pump.job("a", autoscale=False)
    agent = pump.node("n0", "a", 2, holds_start=True)
    pump.settle()
    pump.clock.now += 11
    pump.settle()  # the policy is asked while the job changes: it keeps what it has
    assert pump.memory.targets["a"].allocation == {"n0": 1}
    pump.ask("a", replicas=2)
    agent.holds_start = False
    pump.settle()
    assert pump.placed("a") == {"n0": 2}
    assert [plan.replicas for plan in pump.plans if not plan.claim] == [1, 2]


# -- bounds and garbage


@pytest.mark.parametrize(
    ("bounds", "complaint"),
    [
        ({"min_replicas": 4, "max_replicas": 2}, "min_replicas 4 is more than max_replicas 2"),
        ({"min_nodes": 3, "max_nodes": 1}, "min_nodes 3 is more than max_nodes 1"),
        ({"max_replicas": 0, "min_replicas": 0}, "must be at least 1"),
        ({"min_nodes": 3, "max_nodes": 3, "max_replicas": 2}, "min_nodes 3 is more than max_replicas 2"),
        ({"min_replicas": 9}, "needs at least 9 replicas on 1 node, registered: 1 node with 4 slots"),
    ],
)
def test_impossible_bounds_are_pending_with_the_reason(
    pump: Pump, bounds: dict[str, int], complaint: str
) -> None:
    pump.job("bad", **bounds)
    pump.job("good")
    pump.node("n0", "bad", 4)
    pump.node("n0", "good", 4)
    pump.settle()
    assert pump.status("bad").state is JobState.PENDING
    assert complaint in pump.status("bad").reason
    assert pump.status("good").state is JobState.RUNNING


def test_garbage_is_said_once_and_changes_nothing(pump: Pump) -> None:
    elastic(pump)
    before = pump.plan("a")
    for key, value in {
        pump.keys.job("a", "hints"): '{"job": "a", "generation": NaN}',
        pump.keys.node(
            "n9", "a"
        ): '{"node": "n9", "job": "a", "run": "x", "agent": "y", "host": "h", "slots": -4}',
        pump.keys.job("b", "spec"): "not json",
        pump.keys.job("c", "plan"): "[]",
        pump.keys.generation("a", 2, "ended", "n0"): "{}",
        pump.keys.root + "jobs/a/generations/x/ended/n0": "{}",
        pump.keys.root + "whatever": "\x00",
        pump.keys.node(
            "n8", "a"
        ): '{"node": "n7", "job": "a", "run": "x", "agent": "y", "host": "h", "slots": 1}',
    }.items():
        pump.store.put(key, value)
    pump.settle().later(120)
    assert pump.plan("a") == before
    problems = [problem.key for problem in pump.keeper.problems()]
    assert len(problems) == len(set(problems)) == 6


@pytest.mark.parametrize("what", ["plan", "status"])
def test_what_is_ours_is_written_again_over_garbage(pump: Pump, what: str) -> None:
    elastic(pump)
    before = pump.plan("a"), pump.status("a").state
    pump.store.put(pump.keys.job("a", what), "garbage")
    pump.settle()
    assert (pump.plan("a"), pump.status("a").state) == before


def test_a_plan_lost_to_garbage_before_we_came_is_begun_anew(pump: Pump) -> None:
    elastic(pump)
    last = pump.plan("a").generation
    pump.store.put(pump.keys.job("a", "plan"), "garbage")
    pump.take_over().settle()
    assert pump.plan("a").generation > last
    assert pump.status("a").state is JobState.RUNNING


def test_a_job_keeps_its_last_good_hints(pump: Pump) -> None:
    pump.job("a")
    pump.node("n0", "a", 4)
    pump.settle()
    good = pump.view().jobs["a"].hints
    pump.store.put(pump.keys.job("a", "hints"), '{"perf_params": [1, 2]}')
    assert pump.view().jobs["a"].hints == good


def test_a_policy_that_breaks_does_not_stop_the_loop(pump: Pump) -> None:
    def broken(*_: object) -> Decision:
        raise ZeroDivisionError("oops")

    pump.policy = broken
    pump.job("a")
    pump.node("n0", "a", 4)
    pump.settle()
    assert pump.placed("a") == {"n0": 1}
    assert ("policy_failed", {"message": "ZeroDivisionError: oops"}) in pump.said
    pump.ask("a", replicas=3)
    pump.later(61)
    assert pump.placed("a") == {"n0": 3}


# -- what the policy is asked


def test_jobs_of_one_script_share_what_they_have_measured(pump: Pump) -> None:
    pump.job("old", curve_key="k")
    pump.node("n0", "old", 4)
    pump.settle()
    slow = ProfileEntry(1, 4, 128, 0.1, 0.5, 10, 10)
    pump.agents[0].report(pump.plan("old"), max_profiled_replicas=4, profile=(slow,))
    pump.agents[0].reports = False
    pump.settle()
    pump.job("young", curve_key="k")
    pump.job("other", curve_key="x")
    for job in ("young", "other"):
        pump.node("n0", job, 4, reports=False)
    pump.settle()
    found, _, _ = policy_inputs(pump.view(), pump.settings)
    infos = {info.name: info for info in found}
    assert infos["young"].max_profiled_replicas == 4
    assert infos["young"].model is not None
    assert infos["young"].model.corrections is not None
    assert infos["young"].remaining is None
    assert infos["other"].model is None


@pytest.mark.parametrize(
    "nonsense",
    [
        {"perf_params": (-1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0)},
        {"grad_params": (-1.0, 1.0)},
        {"init_batch_size": 0},
        {"perf_params": None},
    ],
)
def test_a_model_that_makes_no_sense_is_none(nonsense: dict[str, object]) -> None:
    assert model(hints_of("a", 0, 1)) is not None
    assert model(hints_of("a", 0, 1, **nonsense)) is None


# -- scripts without the library, and several jobs


def test_a_script_without_the_library_gets_every_node_and_restarts_when_one_joins(pump: Pump) -> None:
    pump.job("a")
    pump.node("n0", "a", 2, min_slots=2, library=False)
    pump.node("n1", "a", 2, min_slots=2, library=False)
    pump.settle()
    assert pump.placed("a") == {"n0": 2}
    pump.later(pump.settings.hello_grace + 1)
    assert pump.placed("a") == {"n0": 2, "n1": 2}
    assert pump.plan("a").cause is Cause.JOIN
    pump.later(pump.settings.hello_grace + 1)
    pump.node("n2", "a", 2, min_slots=2, library=False)
    pump.settle()
    assert pump.placed("a") == {"n0": 2, "n1": 2, "n2": 2}


def test_jobs_share_a_node_and_one_takes_over_what_another_leaves(pump: Pump) -> None:
    pump.job("a")
    pump.node("n0", "a", 4)
    pump.settle()
    assert pump.placed("a") == {"n0": 4}
    pump.job("b")
    agent = pump.node("n0", "b", 4)
    pump.settle()
    assert pump.placed("a") == {"n0": 2}
    assert pump.placed("b") == {"n0": 2}
    agent.finish()
    pump.settle()
    assert pump.placed("a") == {"n0": 4}


def test_an_agent_that_leaves_takes_no_other_job_from_its_node(pump: Pump) -> None:
    for job in ("a", "b"):
        pump.job(job)
        pump.node("n0", job, 4)
    pump.settle()
    _, nodes, _ = policy_inputs(pump.view(), pump.settings)
    assert not nodes[0].draining
    pump.agents[0].register(draining=True)
    pump.settle()
    _, nodes, _ = policy_inputs(pump.view(), pump.settings)
    assert not nodes[0].draining
    assert pump.placed("a") == {}
    assert pump.placed("b")["n0"] >= 1
    pump.store.put(pump.keys.drain("n0"), encode(DrainRequest("n0", "maintenance")))
    assert policy_inputs(pump.view(), pump.settings)[1][0].draining


def test_slots_of_another_job_are_used_only_after_release(pump: Pump) -> None:
    pump.job("a")
    slow = pump.node("n0", "a", 4)
    pump.settle()
    pump.job("b")
    pump.node("n0", "b", 4)
    pump.agents.remove(slow)
    pump.settle().later(100)
    assert pump.placed("a") == {"n0": 3}
    assert pump.placed("b") == {}
    assert pump.status("b").state is JobState.PENDING
    assert "waits for 1 slot on n0 that another job is about to leave" in pump.status("b").reason
    pump.agents.append(slow)
    pump.settle()
    assert pump.placed("b") == {"n0": 2}


def test_jobs_that_are_to_swap_places_do_not_wait_for_each_other_for_ever(pump: Pump) -> None:
    places = {"a": {"n0": 2}, "b": {"n1": 2}}
    pump.policy = lambda jobs, *_: Decision(allocations=dict(places), reasons={})
    for job in ("a", "b"):
        pump.job(job)
        for node in ("n0", "n1"):
            pump.node(node, job, 2)
    pump.settle()
    assert (pump.placed("a"), pump.placed("b")) == ({"n0": 2}, {"n1": 2})
    places.update(a={"n1": 2}, b={"n0": 2})
    pump.settle().later(61)
    assert (pump.placed("a"), pump.placed("b")) == ({"n1": 2}, {"n0": 2})


# -- takeover, reruns, and what is left behind


def test_a_takeover_fences_every_plan_and_changes_nothing_else(pump: Pump) -> None:
    elastic(pump)
    before = pump.plan("a")
    pump.job("waiting", min_replicas=9)
    pump.node("n0", "waiting")
    pump.settle().take_over().settle().later(120)
    assert pump.plan("a") == replace(before, fence=pump.fence)
    assert pump.plan("waiting").claim
    assert pump.plan("waiting").fence == pump.fence


def test_an_old_leader_can_write_nothing_after_a_takeover(pump: Pump) -> None:
    elastic(pump)
    pump.job("waiting", min_replicas=3)
    pump.node("n0", "waiting")
    pump.settle()
    old = pump.view()
    pump.take_over().settle()
    stale = decide(
        replace(
            old,
            jobs={
                name: replace(job, request=Seen(JobRequest(replicas=1), 1, 0.0))
                for name, job in old.jobs.items()
            },
            now=old.now + 1000,
        ),
        Memory(),
        keys=pump.keys,
        fence=pump.fence - 1,
        settings=pump.settings,
        policy=share_policy,
    )
    plans = [a for a in stale.actions if isinstance(a, CompareAndSwap) and isinstance(a.record, Plan)]
    assert plans
    for action in plans:
        done = pump.store.compare_and_swap(action.key, encode(action.record), action.expected_revision)
        assert done is None


def test_the_restart_budget_survives_a_takeover(pump: Pump) -> None:
    start(pump, max_restarts=1)
    pump.agents[0].fail()
    pump.settle().take_over()
    pump.agents[1].fail()
    pump.settle().later(5)
    assert pump.status("a").state is JobState.FAILED


def test_a_rerun_starts_anew_and_generations_go_on_growing(pump: Pump) -> None:
    elastic(pump)
    for agent in pump.agents:
        agent.finish()
    pump.settle()
    last = pump.plan("a").generation
    assert pump.status("a").state is JobState.DONE
    pump.agents.clear()
    pump.job("a", run="a-2")
    pump.node("n0", "a")
    pump.settle()
    plan = pump.plan("a")
    assert (plan.run, plan.first, plan.restarts) == ("a-2", last + 1, 0)
    assert plan.generation > last
    assert (pump.status("a").run, pump.status("a").state) == ("a-2", JobState.RUNNING)


def test_a_stop_of_an_earlier_run_is_not_obeyed_by_the_next(pump: Pump) -> None:
    pump.job("a")
    pump.node("n0", "a")
    pump.settle()
    pump.ask("a", stop=True, run="a-1")
    pump.settle()
    assert pump.status("a").state is JobState.STOPPED
    pump.agents.clear()
    pump.job("a", run="a-2")
    pump.node("n0", "a")
    pump.settle()
    assert pump.status("a").state is JobState.RUNNING


def test_old_generations_keys_are_collected(pump: Pump) -> None:
    pump.job("a")
    agent = pump.node("n0", "a", 8)
    for size in (1, 2, 3, 4, 5, 6, 7, 8):
        pump.ask("a", replicas=size)
        pump.settle()
    last = pump.plan("a").generation
    assert last >= 7
    assert min(pump.view().jobs["a"].generations) == last - 2
    agent.finish()
    pump.settle().settle()
    assert pump.view().jobs["a"].generations == frozenset()


def test_only_so_many_ended_jobs_are_remembered() -> None:
    pump = Pump(settings=Settings(min_gap=0.0, keep_ended=3))
    for index in range(6):
        pump.job(f"j{index}")
        pump.node("n0", f"j{index}")
        pump.settle()
        pump.agents[-1].finish()
        pump.settle()
    pump.settle()
    assert sorted(pump.view().jobs) == ["j3", "j4", "j5"]


# -- pauses and predictions


def test_pauses_are_measured_on_one_clock_and_remembered(pump: Pump) -> None:
    pump.job("a")
    pump.node("n0", "a", 2)
    pump.settle()
    pump.ask("a", replicas=1)
    pump.decide()
    for agent in pump.agents:
        agent.step()
    pump.clock.now += 2.5
    pump.settle()
    assert pump.status("a").last_pause == pytest.approx(2.5)
    assert pump.status("a").pauses[-1] == pytest.approx(2.5)


def test_the_prediction_error_is_in_the_status_and_said_once_a_generation(pump: Pump) -> None:
    def policy(*question: object) -> Decision:
        decision = share_policy(*question)  # type: ignore[arg-type]
        return replace(decision, reasons={n: replace(r, goodput=2500.0) for n, r in decision.reasons.items()})

    pump.policy = policy
    pump.job("a", max_replicas=2)
    pump.node("n0", "a", 2)
    pump.settle()
    assert pump.plan("a").replicas == 2
    assert pump.status("a").prediction_error == pytest.approx(2000 / 2500 - 1, abs=1e-3)
    said = [fields for event, fields in pump.said if event == "prediction" and fields["generation"] == 1]
    assert said == [{"job": "a", "generation": 1, "predicted": 2500.0, "measured": 2000.0, "error": -0.2}]
