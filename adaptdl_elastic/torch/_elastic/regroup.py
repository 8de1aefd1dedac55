"""Becoming another generation within the process: what a planned change and a recovery have in common.

`become` leaves torch's present group, `form` connects all of the new generation, `finish` is what each of
them does last. What newcomers are told through the store is signed (`seal`).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import pickle
import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from adaptdl_elastic import env
from adaptdl_elastic._interfaces import Position
from adaptdl_elastic._session import Identity, Session
from adaptdl_elastic.protocol.messages import Plan, Switched
from adaptdl_elastic.reducer import Reducer
from adaptdl_elastic.torch._process_group.setup import (
    connect_torch,
    leave_torch,
    listening_host,
    relax_torch,
)
from adaptdl_elastic.torch._process_group.store import PATIENCE, CancellableStore

log = logging.getLogger(__name__)

TRANSFER = 60.0
"""Seconds that one tensor may take from one replica to another."""


def become(session: Session, message: Plan, generation: int, rank: int) -> None:
    """Leave torch's present group, and be `rank` of the generation that `message` describes."""
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
    """Connect all of this generation: first the library's collectives, then torch's.

    Raises RuntimeError when they have not all come within `patience`, or it can not be done, or
    `cancelled()` meanwhile.
    """
    key = f"go/{session.generation}"
    if session.rank == 0:
        host, secret = listening_host(), secrets.token_hex(16)

        def publish(port: int) -> None:
            store.set(key, json.dumps([host, port, secret]))
            store.set(f"step/{attempt + 1}", seal({"go": True}))

        reducer = _reducer(session, host, 0, secret, publish, cancelled, patience)
    else:
        why = "there is another plan"
        CancellableStore(store, lambda: why if cancelled() else None, patience).wait([key])
        host, port, secret = json.loads(store.get(key))
        reducer = _reducer(session, host, port, secret, None, cancelled)
    assert session.backend is not None
    session.reducer = reducer
    reducer.barrier(tag="formed")  # all live: torch's group will not wait in vain
    connect_torch(session, session.backend, store, timedelta(seconds=TRANSFER))


def _reducer(
    session: Session,
    host: str,
    port: int,
    secret: str,
    publish: Any,
    cancelled: Callable[[], bool],
    patience: timedelta = timedelta(seconds=PATIENCE),
) -> Reducer:
    return Reducer(
        session.rank,
        session.replicas,
        host,
        port,
        secret=secret.encode(),
        timeout=patience.total_seconds(),
        on_control=session.on_control,
        on_lost=session.on_lost,
        publish=publish,
        cancelled=cancelled,
    )


def finish(session: Session, position: Position, began: float, recovered: bool = False) -> None:
    """What everybody in a new generation does last."""
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
    """Tell the agent that generation g is behind this replica, and when its last step ended."""
    session.send(Switched(generation, session.last_step_time))


def seal(step: dict[str, Any]) -> bytes:
    """A step for the newcomers, so that whoever else writes into the store can not run code in them."""
    data = pickle.dumps(step)
    return _sign(data) + data


def open_sealed(sealed: bytes) -> dict[str, Any]:
    """Return what was sealed; RuntimeError if that was by a process that does not know the secret."""
    signature, data = sealed[:32], sealed[32:]
    if not hmac.compare_digest(signature, _sign(data)):
        raise RuntimeError("the preview was not written by a replica that knows ADAPTDL_SECRET")
    found: dict[str, Any] = pickle.loads(data)
    return found


def _sign(data: bytes) -> bytes:
    return hmac.new(env.secret() or b"", data, hashlib.sha256).digest()
