"""The policy takes its time: what happens meanwhile is seen to at once, and its answer may come too late."""

from __future__ import annotations

import pytest
from coordinator_pump import Pump, elastic
from coordinator_script import play

from adaptdl_elastic.autoscaler.coordinator.decision_types import CoordinatorSettings, PolicyAnswer
from adaptdl_elastic.autoscaler.coordinator.status import WAITED_STEP, steps_waited
from adaptdl_elastic.autoscaler.policy.policy_types import Decision
from adaptdl_elastic.rendezvous.schema.records import JobState


@pytest.fixture
def pump() -> Pump:
    """Jobs `a` on n0 … n2, `b` on n3, `c` on n4; a round is under way that would have a shrink and b grow."""
    pump = Pump()
    elastic(pump)
    play(pump, "job b max_replicas=2; node n3 b 2 reports=False; job c max_replicas=2")
    play(pump, "node n4 c reports=False; settle -> n0=1 n1=1 n2=1 b/n3=1")
    wishes = {"a": {"n0": 1, "n1": 1}, "b": {"n3": 2}, "c": {"n4": 1}}
    pump.policy = lambda jobs, *_: Decision({job.name: wishes[job.name] for job in jobs}, {})
    pump.slow = True
    pump.later(pump.settings.interval + 1)
    assert [asked.number for asked in pump.asked] == [pump.memory.rounds]
    return pump


ANSWERS = {
    "an answer is carried out when it comes": """
        answer; settle -> n0=1 n1=1 b/n3=2""",
    # what was said about three nodes is no answer for two; for the other job it is
    "a dead node is planned without before the answer and stays so after it": """
        n1 vanish; settle -> n0=1 n2=1 node_lost
        answer; settle -> n0=1 n2=1 b/n3=2""",
    "a person is served meanwhile and the answer does not undo it": """
        ask a replicas=1; settle -> n0=1
        answer; settle -> n0=1""",
    "a node that begins to drain gets nothing": """
        n3 register draining=True; settle -> b/pending
        answer; settle -> b/nowhere""",
    # b is to have both slots of n3
    "slots that went to another job meanwhile are not given twice": """
        node n3 c 2; ask c replicas=2; settle -> c/n4=1 c/n3=1
        answer; settle -> b/n3=1""",
    # it need not wait for the interval
    "a job that was submitted again meanwhile is another": """
        n3 finish; settle; job b run=b-2 max_replicas=2; node n3 b 2 reports=False; settle
        answer; settle; asked_once -> b/pending
        answer; settle -> b/n3=2""",
    "one round at a time": """
        later 600; asked_once""",
    "an answer that is not waited for any more is ignored": """
        answer_of 0; settle; round_waits -> n0=1 n1=1 n2=1 b/n3=1""",
    "an answer of a round that never was is ignored": """
        answer_of 99; settle; round_waits -> n0=1 n1=1 n2=1 b/n3=1""",
}


def asked_once(pump: Pump) -> None:
    assert len(pump.asked) == 1


def answer_of(pump: Pump, number: int) -> None:
    pump.answer(PolicyAnswer(number, Decision({"a": {}, "b": {}}, {}), 0.0))


def round_waits(pump: Pump) -> None:
    assert pump.memory.round is not None


@pytest.mark.parametrize("script", ANSWERS.values(), ids=ANSWERS)
def test_the_answer_of_a_round_holds_for_what_has_not_changed_meanwhile(pump: Pump, script: str) -> None:
    play(pump, script, asked_once, answer_of, round_waits)


def test_a_request_without_room_is_put_to_the_policy_without_an_interval(pump: Pump) -> None:
    # no room: the policy has to say; the answer is of the round that knew nothing of it
    play(pump, "ask a replicas=4; settle; answer; settle")
    assert len(pump.asked) == 1
    asked_about = {info.name: info for info in pump.asked[0].question.jobs}
    assert asked_about["a"].requested_replicas == 3  # as many as there can be


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
    play(pump, f"job a max_replicas=4; node n0 a 1; settle; n0 report outside_epochs={outside}")
    play(pump, f"node n1 a 3; settle; later 600 -> replicas={1 if outside else 4}")


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
