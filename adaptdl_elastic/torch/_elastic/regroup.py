"""Move a process to a new generation: the steps that a planned change and a recovery share.

`become` leaves torch's current process group. `form` connects the replicas of the new generation. `finish`
does the last steps on every replica. Messages to newcomers go through a store whose values are signed
(`store.generation_store`).
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from adaptdl_elastic import _codec, _wire, env
from adaptdl_elastic._session import Identity, Session
from adaptdl_elastic._values import Position
from adaptdl_elastic.collective import reducer_of
from adaptdl_elastic.protocol.messages import Plan, Switched
from adaptdl_elastic.torch._process_group.setup import (
    connect_torch,
    leave_torch,
    listening_host,
    relax_torch,
)
from adaptdl_elastic.torch._process_group.store import PATIENCE, CancellableStore

log = logging.getLogger(__name__)

TRANSFER = 60.0
"""Seconds that the transfer of one tensor between two replicas may take."""


def become(session: Session, message: Plan, generation: int, rank: int) -> None:
    """Leave torch's current process group, and take a rank in the generation that `message` describes.

    Args:
        session: This replica's session.
        message: Plan of the new generation.
        generation: Number of the new generation.
        rank: Rank of this replica in it.
    """
    session.consensus.abandon()
    leave_torch(session)
    os.environ.update(message.environ)
    session.identity = Identity(rank, message.replicas, message.nodes, generation, session.job)


def form(
    session: Session,
    store: Any,
    attempt: int,
    cancelled: Callable[[], bool] = lambda: False,
    patience: timedelta = timedelta(seconds=PATIENCE),
) -> None:
    """Connect the replicas of this generation: first the library's collectives, then torch's.

    Args:
        session: This replica's session.
        store: Store in which the replicas meet.
        attempt: Number of the last preview that the newcomers have seen; they wait for the next message.
        cancelled: Function that returns True once connecting should be given up.
        patience: How long to wait for all replicas.

    Raises:
        RuntimeError: a replica did not connect within `patience`, connecting failed, or it was cancelled.
    """
    key = f"go/{session.generation}"
    if session.rank == 0:
        host = listening_host()

        def publish(port: int) -> None:
            store.set(key, json.dumps([host, port]))
            store.set(f"step/{attempt + 1}", _codec.encode({"go": True}))

        timeout = patience.total_seconds()
        reducer = reducer_of(session, host, 0, publish=publish, cancelled=cancelled, timeout=timeout)
    else:
        why = "there is another plan"
        CancellableStore(store, lambda: why if cancelled() else None, patience).wait([key])
        host, port = json.loads(store.get(key))
        reducer = reducer_of(session, host, port, cancelled=cancelled, timeout=PATIENCE)
    assert session.backend is not None
    session.reducer = reducer
    connect_torch(session, session.backend, store, timedelta(seconds=TRANSFER))


def finish(session: Session, position: Position, began: float, recovered: bool = False) -> None:
    """Do the last steps of a change of generation, on every replica.

    Args:
        session: This replica's session.
        position: Position at which training continues.
        began: Time at which the change began, by `time.monotonic`, for the log.
        recovered: Whether the old generation ended with a peer's death.
    """
    for model in session.models:
        model.reinit_process_group()
    assert session.reducer is not None
    epoch, loop, index = position  # a list, if it came through a message
    session.consensus.renew((epoch, loop, index), recovered)
    session.reducer.barrier(tag="switched")
    relax_torch(session)
    session.metrics.pause()
    tell_switched(session, session.generation)
    session.recovery.arm()
    log.info(
        "generation %d: rank %d of %d after %.3f s",
        session.generation,
        session.rank,
        session.replicas,
        time.monotonic() - began,
    )


def tell_switched(session: Session, generation: int) -> None:
    """Tell the agent that this replica has switched to `generation` or left, and when its last step ended."""
    session.send(Switched(generation, session.last_step_time))


def pack_states(states: Mapping[str, Any]) -> dict[str, bytes]:
    """Encode snapshots of States for newcomers. Snapshots may hold objects of any type."""
    return {name: _pack(state) for name, state in states.items()}


def _pack(state: Any) -> bytes:
    try:
        return _wire.pack(state)
    except _codec.NotPlainError:
        return _wire.pack(state, objects=True)


def unpack_states(states: Mapping[str, bytes]) -> dict[str, Any]:
    """Decode the result of `pack_states`, which comes from a store whose values are signed."""
    trusted = env.secret() is not None
    return {name: _wire.unpack(state, objects=trusted) for name, state in states.items()}
