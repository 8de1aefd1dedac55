"""The policy takes its time: what happens meanwhile is seen to at once, and its answer may come too late."""

from __future__ import annotations

import pytest
from coordinator_pump import Pump, elastic
from coordinator_script import play

from adaptdl_elastic.autoscaler.coordinator.decision_types import CoordinatorSettings, PolicyAnswer
from adaptdl_elastic.autoscaler.coordinator.status import WAITED_STEP, steps_waited
from adaptdl_elastic.autoscaler.policy.policy_types import Decision
from adaptdl_elastic.rendezvous.schema.records import Cause, JobState


@pytest.fixture
def pump() -> Pump:
    """Jobs `a` on n0 … n2, `b` on n3, `c` on n4; a round is under way that would have a shrink and b grow."""
    pump = Pump()
    elastic(pump)
    play(
        pump,
        """
        job b max_replicas=2; node n3 b 2 reports=False; job c max_replicas=2
        node n4 c reports=False; settle""",
    )
    assert (pump.placed("a"), pump.placed("b")) == ({"n0": 1, "n1": 1, "n2": 1}, {"n3": 1})
    wishes = {"a": {"n0": 1, "n1": 1}, "b": {"n3": 2}, "c": {"n4": 1}}
    pump.policy = lambda jobs, *_: Decision({job.name: wishes[job.name] for job in jobs}, {})
    pump.slow = True
    pump.later(pump.settings.interval + 1)
    assert [asked.number for asked in pump.asked] == [pump.memory.rounds]
    return pump


def test_its_answer_is_carried_out_when_it_comes(pump: Pump) -> None:
    pump.answer()
    pump.settle()
    assert (pump.placed("a"), pump.placed("b")) == ({"n0": 1, "n1": 1}, {"n3": 2})


def test_a_dead_node_is_planned_without_before_the_answer_and_stays_so_after_it(pump: Pump) -> None:
    next(agent for agent in pump.agents if agent.node == "n1").vanish()
    pump.settle()
    assert (pump.placed("a"), pump.plan("a").cause) == ({"n0": 1, "n2": 1}, Cause.NODE_LOST)
    pump.answer()
    pump.settle()
    assert pump.placed("a") == {"n0": 1, "n2": 1}  # what was said about three nodes is no answer for two
    assert pump.placed("b") == {"n3": 2}  # for the other job it is


def test_a_person_is_served_meanwhile_and_the_answer_does_not_undo_it(pump: Pump) -> None:
    play(pump, "ask a replicas=1; settle -> n0=1")
    pump.answer()
    play(pump, "settle -> n0=1")


def test_what_a_person_asked_for_and_could_not_be_had_at_once_waits_for_no_interval(pump: Pump) -> None:
    pump.ask("a", replicas=4)  # no room: the policy has to say
    pump.settle()
    pump.answer()  # of the round that knew nothing of it
    pump.settle()
    assert len(pump.asked) == 1
    asked_about = {info.name: info for info in pump.asked[0].question.jobs}
    assert asked_about["a"].requested_replicas == 3  # as many as there can be


def test_a_node_that_begins_to_drain_gets_nothing(pump: Pump) -> None:
    next(agent for agent in pump.agents if agent.node == "n3").register(draining=True)
    play(pump, "settle -> b/pending")
    pump.answer()
    play(pump, "settle -> b/nowhere")


def test_slots_that_went_to_another_job_meanwhile_are_not_given_twice(pump: Pump) -> None:
    play(pump, "node n3 c 2; ask c replicas=2; settle -> c/n4=1 c/n3=1")
    pump.answer()  # b is to have both slots of n3
    play(pump, "settle -> b/n3=1")


def test_a_job_that_was_submitted_again_meanwhile_is_another(pump: Pump) -> None:
    next(agent for agent in pump.agents if agent.node == "n3").finish()
    play(pump, "settle; job b run=b-2 max_replicas=2; node n3 b 2 reports=False; settle")
    pump.answer()
    play(pump, "settle -> b/pending")
    assert len(pump.asked) == 1  # it need not wait for the interval
    pump.answer()
    play(pump, "settle -> b/n3=2")


def test_one_round_at_a_time(pump: Pump) -> None:
    pump.later(10 * pump.settings.interval)
    assert len(pump.asked) == 1


@pytest.mark.parametrize("number", [0, 99])
def test_an_answer_that_nobody_waits_for_is_ignored(pump: Pump, number: int) -> None:
    before = pump.placed("a"), pump.placed("b")
    pump.answer(PolicyAnswer(number, Decision({"a": {}, "b": {}}, {}), 0.0))
    pump.settle()
    assert (pump.placed("a"), pump.placed("b")) == before
    assert pump.memory.round is not None


def test_a_takeover_waits_for_no_answer_of_before(pump: Pump) -> None:
    old = pump.asked.pop()
    pump.take_over().settle()
    assert [asked.number for asked in pump.asked] == [1]
    assert old.number != 1
    pump.answer()
    play(pump, "settle -> b/n3=2")


def test_a_policy_that_fails_late_is_said_and_asked_again(pump: Pump) -> None:
    asked = pump.asked.pop()
    pump.answer(PolicyAnswer(asked.number, None, 1.0, "KeyError: 'oops'"))
    assert ("policy_failed", {"message": "KeyError: 'oops'"}) in pump.said
    pump.later(pump.settings.interval + 1)
    assert len(pump.asked) == 1


def test_rounds_take_at_most_a_tenth_of_the_time() -> None:
    pump = Pump(slow=True, settings=CoordinatorSettings(interval=60.0, min_gap=1.0))
    pump.job("a", max_replicas=4)
    agent = pump.node("n0", "a", 4)
    pump.settle()
    asked = pump.asked.pop()
    pump.answer(PolicyAnswer(asked.number, Decision({"a": {"n0": 1}}, {}), 2.0))
    pump.settle()
    for replicas in (2, 3):
        agent.report(pump.plan("a"), max_profiled_replicas=replicas)
        pump.settle()
    pump.later(19)
    assert not pump.asked
    pump.later(2)
    assert len(pump.asked) == 1


@pytest.mark.parametrize(("change", "asks"), [(1.05, False), (1.6, True), (0.5, True)])
def test_a_report_that_changes_what_is_best_waits_for_no_interval(change: float, asks: bool) -> None:
    pump = Pump(settings=CoordinatorSettings(interval=1e6, min_gap=1.0))
    pump.job("a", max_replicas=2)
    agent = pump.node("n0", "a", 2)
    pump.settle().later(10)
    pump.slow = True
    agent.report(pump.plan("a"), predicted_goodput=2000.0 * change, max_profiled_replicas=2)
    pump.settle().later(10)
    assert bool(pump.asked) is asks


@pytest.mark.parametrize("outside", [True, False])
def test_a_job_that_trains_outside_of_epochs_keeps_its_size(outside: bool) -> None:
    pump = Pump()
    pump.job("a", max_replicas=4)
    agent = pump.node("n0", "a", 1)
    pump.settle()
    agent.report(pump.plan("a"), outside_epochs=outside)
    play(pump, "node n1 a 3; settle; later 600")
    assert pump.plan("a").replicas == (1 if outside else 4)


def test_the_policys_reason_for_giving_nothing_is_shown_until_it_says_something_else() -> None:
    pump = Pump()
    pump.policy = lambda jobs, *_: Decision({"a": {}}, {}, pending={"a": "not today"})
    play(pump, "job a; node n0 a 4; settle")
    assert pump.status("a").reason == "not today"
    written = pump.store.range(pump.keys.job("a", "status")).items[0].mod_revision
    pump.later(10 * pump.settings.interval)
    assert pump.status("a").reason == "not today"
    # it is written again for how long it has waited, once a minute, and for nothing else
    assert pump.store.range(pump.keys.job("a", "status")).items[0].mod_revision == written + 10
    pump.policy = lambda jobs, *_: Decision({"a": {"n0": 1}}, {})
    pump.later(pump.settings.interval + 1)
    assert pump.status("a").state is JobState.RUNNING


def test_a_step_of_waiting_that_is_over_but_for_rounding_counts() -> None:
    since = 148.63052612758227
    now = since + 2 * WAITED_STEP
    assert (now - since) // WAITED_STEP == 1, "two steps are over, and the difference rounds to less"
    assert steps_waited(now, since) == 2
    assert steps_waited(now - 0.001, since) == 1
