"""Run collectives on small Python objects, for a script's own counters and decisions.

For tensors at every step, use torch.distributed instead. Every replica must call the same functions in the
same order. Each call carries the script line that made it; if the lines differ between replicas, all get an
error instead of a wrong result. A script with one replica need not call `initialize`.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from adaptdl_elastic import _frames, _secrets, _session, env
from adaptdl_elastic._session import Session
from adaptdl_elastic.protocol.channel import CAN_NOT_JOIN
from adaptdl_elastic.reducer import Future, ReduceFn, Reducer, default_reduce_fn

__all__ = ["allreduce", "allreduce_async", "broadcast", "initialize", "teardown"]


def initialize(
    master_addr: str | None = None,
    master_port: int | None = None,
    replica_rank: int | None = None,
    num_replicas: int | None = None,
) -> None:
    """Connect to the other replicas; every one of them must call it.

    `adaptdl_elastic.torch.init_process_group` does this. Arguments that are None are read from the
    environment, by the functions of `adaptdl_elastic.env`.

    Args:
        master_addr: Host on which rank 0 listens.
        master_port: Port on which rank 0 listens.
        replica_rank: Rank of this replica.
        num_replicas: Number of replicas.

    Raises:
        RuntimeError: the replicas are connected already, or the others cannot be reached.
        ValueError: a rank, a number of replicas or a port is out of range.
        TypeError: an argument has the wrong type.
    """
    session = _session.current()
    if session.reducer is not None:
        raise RuntimeError("the collectives are initialized already; call teardown() first")
    session.reducer = reducer_of(
        session,
        env.master_addr() if master_addr is None else master_addr,
        env.master_port() if master_port is None else master_port,
        rank=session.rank if replica_rank is None else replica_rank,
        replicas=session.replicas if num_replicas is None else num_replicas,
    )


def reducer_of(session: Session, host: str, port: int, **options: Any) -> Reducer:
    """Return a reducer that connects this replica with the others, for the library.

    Args:
        session: This replica's session.
        host: Host on which rank 0 listens.
        port: Port on which rank 0 listens; 0: any free one.
        **options: Further arguments of `Reducer`.
    """
    return Reducer(
        root_host=host,
        root_port=port,
        secret=_secrets.generation_key(env.secret(), _secrets.REDUCER, session.job, session.generation),
        on_control=session.on_control,
        on_lost=session.on_lost,
        on_finished=session.on_finished,
        **{"rank": session.rank, "replicas": session.replicas, **options},
    )


def teardown() -> None:
    """Disconnect from the other replicas.

    Raises:
        RuntimeError: the replicas are not connected.
    """
    session = _session.current()
    if session.reducer is None:
        raise RuntimeError("the collectives are not initialized")
    session.reducer.close()
    session.reducer = None


def allreduce(value: Any, reduce_fn: ReduceFn = default_reduce_fn, *, tag: str | None = None) -> Any:
    """Return the values of all replicas combined in the order of ranks; the same result on every replica.

    Args:
        value: Any object that can be pickled.
        reduce_fn: Function that combines two values into one. It runs on rank 0 and may change its arguments.
        tag: Name of this call, which must be the same on all replicas; None: the calling line of the script.

    Raises:
        RuntimeError: a replica is gone (`reducer.PeerLostError`), a replica has called another collective
            (`reducer.CollectiveMismatchError`), or the replicas are not connected.
    """
    name = _tag("allreduce", tag)
    return _once(name, lambda: _reducer().allreduce(value, reduce_fn, name, objects=True))


def allreduce_async(value: Any, reduce_fn: ReduceFn = default_reduce_fn, *, tag: str | None = None) -> Future:
    """Start an `allreduce`, and return a `reducer.Future` whose `result()` waits for it."""
    return _reducer().allreduce_async(value, reduce_fn, _tag("allreduce", tag), objects=True)


def broadcast(value: Any, *, tag: str | None = None) -> Any:
    """Return rank 0's `value` on every replica; the others' values are ignored. Errors as `allreduce`."""
    name = _tag("broadcast", tag)
    return _once(name, lambda: _reducer().broadcast(value, name, objects=True))


def combine(value: Any, reduce_fn: ReduceFn, tag: str) -> Any:
    """Return the values of all replicas combined, for the library: an `allreduce` that is not kept."""
    return _reducer().allreduce(value, reduce_fn, _tag("allreduce", tag), objects=True)


def share(value: Any, tag: str) -> Any:
    """Return rank 0's `value` on every replica; for plain data of the library. Errors as `allreduce`.

    A newcomer that has not joined the others gets its own `value`.
    """
    if _session.current().joining:
        return value
    return _reducer().broadcast(value, _tag("broadcast", tag))


def _once(name: str, call: Callable[[], Any]) -> Any:
    """Return the result of a collective; in a newcomer, the one that the others have got before."""
    session = _session.current()
    past = session.past_call(name)
    known, result = session.past_result(past)
    if not known:
        result = call()
        session.keep_result(past, result)
    return result


def _reducer() -> Reducer:
    session = _session.current()
    if session.reducer is None:
        if session.joining and session.dry:
            return Reducer(0, 1)  # no peer takes part, and the batch does not count
        if session.joining:
            give_up(
                "it calls a collective before its data loop, to which the running replicas cannot answer "
                "any more"
            )
        if session.replicas > 1:
            raise RuntimeError(
                f"this is one of {session.replicas} replicas and they are not connected: call "
                f"adaptdl_elastic.torch.init_process_group (or collective.initialize) first"
            )
        session.reducer = Reducer(0, 1)
    return session.reducer


class CanNotJoin(SystemExit):
    """End a newcomer with the exit code CAN_NOT_JOIN."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.code = CAN_NOT_JOIN


def give_up(why: str) -> NoReturn:
    """Print why this newcomer cannot join, and end it. The others continue without it."""
    print(f"this script cannot be rescaled in place: {why}", file=sys.stderr, flush=True)
    if threading.current_thread() is not threading.main_thread():  # SystemExit would end only this thread
        os._exit(CAN_NOT_JOIN)
    raise CanNotJoin(why)


def _tag(kind: str, tag: str | None) -> str:
    """Return the text that the replicas compare: the call, its place in the script and the epoch."""
    if tag is None:
        tag = _frames.script_line()
    elif not isinstance(tag, str):
        raise TypeError(f"tag={tag!r}: give a string")
    epoch = _session.current().epoch
    return f"{kind} {tag}" if epoch is None else f"{kind} {tag} in epoch {epoch}"
