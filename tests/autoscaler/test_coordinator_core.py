"""What the coordinator decides while nothing goes wrong: from start to end, by hand, several jobs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from coordinator_pump import Pump, share_policy

from adaptdl_elastic.autoscaler.policy.policy_types import Decision
from adaptdl_elastic.rendezvous.schema.records import (
    Cause,
    DrainRequest,
    JobState,
    Transition,
    encode,
)


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


@pytest.mark.parametrize("step", [35, None])
def test_a_stop_that_could_not_save_says_which_step_is_saved_and_why(pump: Pump, step: int | None) -> None:
    pump.job("a")
    pump.node("n0", "a", 2).unsaved = "disk full"
    pump.settle()
    if step is not None:
        pump.checkpoint("a", step)
    pump.ask("a", stop=True)
    pump.settle()
    status = pump.status("a")
    saved = "no checkpoint is saved" if step is None else "step 35 is saved, and no later one"
    assert (status.state, status.unsaved) == (JobState.STOPPED, "disk full")
    assert status.reason == f"stopped as asked; {saved}: disk full"


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


def test_a_job_that_ends_while_the_plan_for_its_change_is_replaced_is_done(pump: Pump) -> None:
    pump.job("a", max_replicas=1)
    agent = pump.node("n0", "a")
    pump.settle()
    other = pump.node("n1", "a")
    for draining in (agent, other):
        draining.register(draining=True)
        pump.decide()
    assert [one.generation for one in pump.plan("a").leaving] == [0, 1]
    agent.finish()
    pump.settle()
    assert (pump.status("a").state, agent.exit_code) == (JobState.DONE, 0)


def test_a_job_is_not_done_without_the_word_of_a_node_that_was_lost_on_the_way(pump: Pump) -> None:
    pump.job("a", max_replicas=2, max_nodes=2)
    first, second = pump.node("n0", "a"), pump.node("n1", "a")
    pump.settle()
    runs, third = pump.plan("a").generation, pump.node("n2", "a")
    for draining in (first, second):
        draining.register(draining=True)
        pump.decide()
    second.vanish()
    third.register(draining=True)
    pump.decide()
    assert [one.node for one in pump.plan("a").leaving if one.generation == runs] == ["n0"]
    first.finish()
    pump.settle()
    assert pump.status("a").state is not JobState.DONE


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
    nodes = pump.question().nodes
    assert not nodes[0].draining
    pump.agents[0].register(draining=True)
    pump.settle()
    nodes = pump.question().nodes
    assert not nodes[0].draining
    assert pump.placed("a") == {}
    assert pump.placed("b")["n0"] >= 1
    pump.store.put(pump.keys.drain("n0"), encode(DrainRequest("n0", "maintenance")))
    assert pump.question().nodes[0].draining


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
    assert "waits for 1 slot on n0 that another job still has" in pump.status("b").reason
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
