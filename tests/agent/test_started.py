"""The agent's books of its replicas: who has started, and what was said before one ended."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any
from unittest.mock import MagicMock

from adaptdl_elastic.agent.core.states import FromReplica, ReplicaExited
from adaptdl_elastic.agent.runtime.agent import NodeAgent
from adaptdl_elastic.agent.runtime.replica_handle import ReplicaHandle
from adaptdl_elastic.protocol.messages import Resilient, encode
from adaptdl_elastic.rendezvous.schema.records import Cause, Placement, Plan, Transition

PLAN = Plan("job", "run", 0, (Placement("a", 2),), Cause.START, Transition.RESTART, "")


def agent_of(handles: list[ReplicaHandle], monkeypatch: Any) -> Any:
    monkeypatch.setattr(NodeAgent, "__init__", lambda self: None)
    agent: Any = NodeAgent()  # type: ignore[call-arg]
    state: dict[str, Any] = {"_plan": PLAN, "_replicas": dict(enumerate(handles)), "_last_exits": []}
    mocks = ("_loop", "_recorder", "_view", "_config", "_decide", "_failures")
    for name, value in {**{mock: MagicMock() for mock in mocks}, **state}.items():
        setattr(agent, name, value)
    return agent


def test_messages_of_survivors_are_decided_before_the_death_of_a_peer(monkeypatch: Any) -> None:
    """An unread "resilient" of a survivor made the death of its peer a restart."""
    handles = [ReplicaHandle(number, 0, number, number, "") for number in (0, 1)]
    agent = agent_of(handles, monkeypatch)
    handles[1].theirs.sendall(encode(Resilient(0, "")))
    agent._exited(handles[0], -9)
    handles[1].close()
    events = [type(call.args[0]) for call in agent._decide.call_args_list]
    assert events == [FromReplica, ReplicaExited]


def test_a_channel_that_was_read_already_does_not_block() -> None:
    """The end of one replica reads the channels of all, which the same look has found readable."""
    handle = ReplicaHandle(0, 0, 0, 0, "")
    handle.theirs.sendall(encode(Resilient(0, "")))
    assert handle.receive() == [Resilient(0, "")]
    assert handle.receive() == []
    handle.theirs.close()
    assert handle.receive() is None
    handle.close()


def test_junk_on_a_channel_is_counted_and_told_once_a_minute() -> None:
    handle = ReplicaHandle(0, 0, 0, 1, "")
    told = ""
    for second in range(100):
        handle.theirs.sendall(b"junk\n" * 50 + encode(Resilient(0, "")))
        assert handle.receive() == [Resilient(0, "")]
        told += handle.notice(100.0 + second).partition(" that ")[0] + "\n" * (second in (0, 60))
    assert told == "replica 1 has sent 50 lines\nreplica 1 has sent 3000 lines\n"
    assert handle.notice(math.inf) == (
        "replica 1 has sent 1950 lines that its agent cannot read, the last: no JSON object: b'junk'; "
        "only the library may write to its channel"
    )
    handle.close()


def test_a_channel_with_a_message_that_is_too_long_is_broken() -> None:
    handle = ReplicaHandle(0, 0, 0, 1, "")
    handle.theirs.setblocking(False)
    handle.theirs.sendall(encode(Resilient(0, "")))
    received, said = [], []
    while (messages := handle.receive()) is not None:
        received += messages
        said.append(handle.notice(0.0))
        with suppress(BlockingIOError):
            handle.theirs.send(b"x" * 60_000)
    assert received == [Resilient(0, "")]
    assert handle.broken == "a message of more than 16 MiB to the agent"
    assert [line for line in said if line] == [
        f"replica 1 has sent 1 line that its agent cannot read, the last: {handle.broken}; it is killed"
    ]
    handle.close()


def test_a_replica_that_died_at_once_is_named(monkeypatch: Any) -> None:
    """The last one has started after the first has ended."""
    handles = [ReplicaHandle(number, 0, number, number, "") for number in (0, 1)]
    agent = agent_of(handles, monkeypatch)
    agent._spawned(handles[0], 100)
    agent._exited(handles[0], 0)
    agent._spawned(handles[1], 101)
    handles[1].close()
    (begun, pids, _), _ = agent._recorder.started.call_args
    assert (begun, pids) == (PLAN, {0: 100, 1: 101})
