from __future__ import annotations

import pytest
from coordinator_pump import Pump

from adaptdl_elastic.rendezvous.records import Cause, JobState, Transition


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
