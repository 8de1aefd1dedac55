"""What the coordinator decides while nothing goes wrong: from start to end, by hand, several jobs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from coordinator_pump import Pump, share_policy
from coordinator_script import play

from adaptdl_elastic.autoscaler.policy.policy_types import Decision
from adaptdl_elastic.rendezvous.schema.records import Cause, JobState


def takes_everything(pump: Pump) -> None:
    """Let the policy leave nothing to the job."""
    pump.policy = lambda *_: Decision(allocations={"a": {}}, reasons={})


def places(pump: Pump, a: str, b: str) -> None:
    """Let the policy place each of two jobs on a node."""
    pump.policy = lambda *_: Decision(allocations={"a": {a: 2}, "b": {b: 2}}, reasons={})


TRANSITIONS = {
    "a job ends when every node is done": """
        job a min_nodes=2 min_replicas=2 max_replicas=2; node n0 a; node n1 a; settle
        n0 finish; settle -> running
        n1 finish; settle -> done exit_code=0 exits=0,0""",
    "a job without enough nodes is pending and says so": """
        job a min_nodes=2 min_replicas=2; node n0 a 4; settle
        -> pending "...needs at least 2 replicas on 2 nodes, registered: 1 node with 4 slots..."
        node n1 a 4; settle -> running""",
    "a size by hand, and back": """
        job a; node n0 a 4; settle
        ask a replicas=3; settle -> n0=3 manual
        later 300 -> n0=3
        ask a replicas=None; settle -> n0=4""",
    # nine replicas are more than there is room for
    "a person's size needs no policy where there is room": """
        job a; node n0 a 4; settle; takes_everything
        ask a replicas=2; settle -> n0=2
        ask a replicas=9; settle; later 200 -> n0=2""",
    "a stop saves and ends resumable": """
        job a; node n0 a 2; settle
        ask a stop=True; decide -> stop restart
        decide -> stopping
        settle -> stopped exits=143""",
    "a stop that could not save says which step is saved and why": """
        job a; node n0 a 2 unsaved="disk full"; settle; checkpoint a 35
        ask a stop=True; settle -> stopped unsaved="disk full"
        -> "stopped as asked; step 35 is saved, and no later one: disk full\"""",
    "a stop of a job that has saved nothing says so": """
        job a; node n0 a 2 unsaved="disk full"; settle
        ask a stop=True; settle -> stopped unsaved="disk full"
        -> "stopped as asked; no checkpoint is saved: disk full\"""",
    "a job that ends while it is to stop is done": """
        job a; node n0 a 2; settle
        ask a stop=True; decide; n0 finish; n0 holds_start=True; settle -> done exits=0""",
    "a job that ends while it is to change is done": """
        job a; node n0 a 2; settle
        ask a replicas=1; decide; n0 finish; n0 holds_start=True; settle -> done exits=0""",
    "a job that ends while the plan for its change is replaced is done": """
        job a max_replicas=1; node n0 a; settle; node n1 a
        n0 register draining=True; decide; n1 register draining=True; decide -> left=n0:0,n1:1
        n0 finish; settle -> done exits=0,0""",
    "a job is not done without the word of a node that was lost on the way": """
        job a max_replicas=2 max_nodes=2; node n0 a; node n1 a; settle -> generation=1
        node n2 a; n0 register draining=True; decide; n1 register draining=True; decide
        n1 vanish; n2 register draining=True; decide -> left=n0:1,n2:2,n2:3
        n0 finish; settle -> pending""",
    "a script without the library gets every node and restarts when one joins": """
        job a; node n0 a 2 min_slots=2 library=False; node n1 a 2 min_slots=2 library=False; settle -> n0=2
        later hello_grace 1 -> n0=2 n1=2 join
        later hello_grace 1; node n2 a 2 min_slots=2 library=False; settle -> n0=2 n1=2 n2=2""",
    "jobs share a node and one takes over what another leaves": """
        job a; node n0 a 4; settle -> n0=4
        job b; node n0 b 4; settle -> n0=2 b/n0=2
        n0 finish; settle -> n0=4""",
    "slots of another job are used only after their release": """
        job a; node n0 a 4; settle; n0 silence; job b; node n0 b 4
        settle; later 100 -> n0=3 b/nowhere b/pending
        -> b/"...waits for 1 slot on n0 that another job still has..."
        awake n0; settle -> b/n0=2""",
    "jobs that are to swap places do not wait for each other for ever": """
        places n0 n1; job a; job b; node n0 a 2; node n1 a 2; node n0 b 2; node n1 b 2; settle -> n0=2 b/n1=2
        places n1 n0; settle; later 61 -> n1=2 b/n0=2""",
}


@pytest.mark.parametrize("script", TRANSITIONS.values(), ids=TRANSITIONS)
def test_jobs_from_their_start_to_their_end(pump: Pump, script: str) -> None:
    play(pump, script, takes_everything, places)


def test_a_job_starts_with_the_least_and_grows_when_it_reports(pump: Pump) -> None:
    play(pump, "job a; node n0 a 4; settle -> running generation=2")
    assert [(p.generation, p.replicas, p.cause) for p in pump.plans if p.placements] == [
        (0, 1, Cause.START),
        (1, 2, Cause.POLICY),
        (2, 4, Cause.POLICY),
    ]
    assert (pump.status("a").state, pump.status("a").generation) == (JobState.RUNNING, 2)


def test_an_agent_that_leaves_takes_no_other_job_from_its_node(pump: Pump) -> None:
    play(pump, "job a; node n0 a 4; settle; job b; node n0 b 4; settle")
    assert not pump.question().nodes[0].draining
    pump.agents[0].register(draining=True)
    pump.settle()
    assert not pump.question().nodes[0].draining
    assert pump.placed("a") == {}
    assert pump.placed("b")["n0"] >= 1
    play(pump, "drain n0")
    assert pump.question().nodes[0].draining


@pytest.mark.parametrize("ahead", [0.0, 420.0, -420.0])
def test_pauses_are_measured_on_one_clock_and_remembered(pump: Pump, ahead: float) -> None:
    """The other node's clock is wrong by minutes."""
    play(pump, "job a max_replicas=2; node n0 a 1; settle; node n1 a 1")
    pump.agents[1].clock = lambda: pump.clock() + ahead
    play(pump, "ask a replicas=2; decide; all step; wait 2.5; settle -> n0=1 n1=1")
    assert pump.status("a").last_pause == pytest.approx(2.5)
    play(pump, "n0 register draining=True; decide; all step; wait 1.5; settle -> n1=1")
    assert pump.status("a").pauses == pytest.approx((2.5, 1.5))


def test_the_prediction_error_is_in_the_status_and_said_once_a_generation(pump: Pump) -> None:
    def policy(*question: object) -> Decision:
        decision = share_policy(*question)  # type: ignore[arg-type]
        return replace(decision, reasons={n: replace(r, goodput=2500.0) for n, r in decision.reasons.items()})

    pump.policy = policy
    play(pump, "job a max_replicas=2; node n0 a 2; settle -> n0=2")
    assert pump.status("a").prediction_error == pytest.approx(2000 / 2500 - 1, abs=1e-3)
    said = [fields for event, fields in pump.said if event == "prediction" and fields["generation"] == 1]
    assert said == [{"job": "a", "generation": 1, "predicted": 2500.0, "measured": 2000.0, "error": -0.2}]
