"""The event `started`: it names all replicas of a generation, whatever has become of them meanwhile."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

from adaptdl_elastic.agent.runtime.agent import ElasticAgent
from adaptdl_elastic.agent.runtime.replica_handle import ReplicaHandle
from adaptdl_elastic.rendezvous.schema.records import Cause, Placement, Plan, Transition


def test_a_replica_that_died_at_once_is_named(monkeypatch: Any) -> None:
    """The last one has started after the first has ended."""
    monkeypatch.setattr(ElasticAgent, "__init__", lambda self: None)
    agent: Any = ElasticAgent()  # type: ignore[call-arg]
    for name in ("_loop", "_recorder", "_view", "_config", "_decide"):
        setattr(agent, name, MagicMock())
    handles = [ReplicaHandle(number, 0, number, number, "") for number in (0, 1)]
    plan = agent._plan = Plan("job", "run", 0, (Placement("a", 2),), Cause.START, Transition.RESTART, "")
    agent._replicas, agent._last_exits = dict(enumerate(handles)), []
    agent._spawned(handles[0], 100)
    agent._exited(handles[0], 0)
    agent._spawned(handles[1], 101)
    handles[1].close()
    (begun, pids, _), _ = agent._recorder.started.call_args
    assert (begun, pids) == (plan, {0: 100, 1: 101})
