"""Torch's default process group of a generation: making, relaxing, breaking and leaving it."""

from __future__ import annotations

import secrets
import socket
import sys
from datetime import timedelta
from typing import Any

import torch.distributed

from adaptdl_elastic import _secrets, env
from adaptdl_elastic._session import Session
from adaptdl_elastic.torch._process_group import backends, interfaces
from adaptdl_elastic.torch._process_group.signed_store import signed
from adaptdl_elastic.torch._process_group.store import CancellableStore

dist: Any = torch.distributed  # its stub does not export the stores

_LOOPBACK = "127.0.0.1"  # where a replica that is alone listens: gloo does in any case


def connect_torch(session: Session, backend: str, store: Any, timeout: timedelta | None = None) -> None:
    """Torch's default group of this generation, which meets in `store`.

    All have connected to rank 0's collectives when it is made: torch does not wait in vain.

    Args:
        session: Whose collectives are connected.
        backend: Of the group.
        store: Where torch's keys go, signed by a key that is another one for every group.
        timeout: Of everything until `relax_torch`; None: torch's, in the first generation of a process.
            gloo's `recv` does not end when its sender dies in the middle of a message.

    Raises:
        RuntimeError: not all of the others are there.
    """
    assert session.reducer is not None
    fresh = session.reducer.broadcast(secrets.token_hex(8), tag="met" if timeout is None else "formed")
    key = _secrets.generation_key(env.secret(), _secrets.TORCH, session.job, session.generation)
    store = session.group_store = signed(store, None if key is None else _secrets.derive(key, fresh))
    if timeout is not None:  # the others were there a moment ago, and may be gone already
        store = session.group_store = CancellableStore(store, lambda: session.consensus.lost, timeout)
    store = dist.PrefixStore("torch", store)
    make_group(session, backend, timeout, store=store, rank=session.rank, world_size=session.replicas)


def make_group(session: Session, backend: str, patience: timedelta | None, **arguments: Any) -> None:
    """Torch's default group, and what this library knows of it."""
    group = session.group = backends.kind(backend)(backend, session)
    hook = sys.excepthook
    # Part of the keys in the store, and counted up by attempts that failed, which were more here than there.
    torch.distributed.distributed_c10d._world.group_count = 0
    interfaces.listen_on(_LOOPBACK if session.reducer is None else session.reducer.local_address)
    group.forming()
    dist.init_process_group(backend, **arguments, **({} if patience is None else group.limits))
    sys.excepthook = hook  # every process group wraps it once more
    group.formed(patience)


def relax_torch(session: Session) -> None:
    """All are there and have what they need: torch's own time limit from now on."""
    group = backends.present(session)
    if group is not None:
        group.restore_timeouts()


def disconnect_torch(session: Session) -> None:
    """Make every collective of the present group fail here and at its other ends. From any thread."""
    group = backends.present(session)
    if group is not None:
        group.abort()


def leave_torch(session: Session) -> None:
    """Have no default group any more, whatever state it is in."""
    group = backends.present(session)
    if group is not None:
        group.destroy()
    elif dist.is_initialized():
        dist.destroy_process_group()


def reducer_key(session: Session) -> bytes | None:
    """Return the key that the library's collectives of this generation authenticate with."""
    return _secrets.generation_key(env.secret(), _secrets.REDUCER, session.job, session.generation)


def listening_host() -> str:
    """Where rank 0 listens: its address as the launcher gave it, when it is one of this machine's."""
    host = env.master_addr()
    try:
        with socket.create_server((host, 0)):
            return host
    except OSError:  # a name of the launcher's that leads elsewhere, e.g. through address translation
        return socket.gethostbyname(socket.gethostname())
