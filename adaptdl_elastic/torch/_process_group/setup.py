"""Make torch's default process group of a generation, set its time-outs, abort it and leave it."""

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

_LOOPBACK = "127.0.0.1"  # where a single replica listens; gloo listens in any case


def connect_torch(session: Session, backend: str, store: Any, timeout: timedelta | None = None) -> None:
    """Make torch's default group of this generation, which meets in `store`.

    All replicas are connected to rank 0's collectives by then, so torch does not wait in vain.

    Args:
        session: its collectives are connected.
        backend: backend of the group.
        store: for torch's keys, which are signed with a new key for every group.
        timeout: time limit of everything until `relax_torch`; None: torch's, in the first generation of a
            process. Needed because gloo's `recv` does not end when its sender dies in the middle of a
            message.

    Raises:
        RuntimeError: not all other replicas have come.
    """
    assert session.reducer is not None
    fresh = session.reducer.broadcast(secrets.token_hex(8), tag="met" if timeout is None else "formed")
    key = _secrets.generation_key(env.secret(), _secrets.TORCH, session.job, session.generation)
    store = session.group_store = signed(store, None if key is None else _secrets.derive(key, fresh))
    if timeout is not None:  # the others were there a moment ago, but may have died
        store = session.group_store = CancellableStore(store, lambda: session.consensus.lost, timeout)
    # a store that outlives a round of torchrun's rendezvous still has the keys of an earlier group
    store = dist.PrefixStore(f"torch/{fresh}", store)
    make_group(session, backend, timeout, store=store, rank=session.rank, world_size=session.replicas)


def make_group(session: Session, backend: str, patience: timedelta | None, **arguments: Any) -> None:
    """Make torch's default group and this library's object for it."""
    group = session.group = backends.kind(backend)(backend, session)
    hook = sys.excepthook
    # This count is part of the keys in the store. Failed attempts increase it, on some replicas more than on
    # others.
    torch.distributed.distributed_c10d._world.group_count = 0
    interfaces.listen_on(_LOOPBACK if session.reducer is None else session.reducer.local_address)
    group.forming()
    dist.init_process_group(backend, **arguments, **({} if patience is None else group.limits))
    sys.excepthook = hook  # every new process group wraps the hook once more
    group.formed(patience)


def relax_torch(session: Session) -> None:
    """Restore torch's own time-outs, since all replicas have come and have what they need."""
    group = backends.present(session)
    if group is not None:
        group.restore_timeouts()


def disconnect_torch(session: Session) -> None:
    """Make every collective of the present group fail, here and on its peers. From any thread."""
    group = backends.present(session)
    if group is not None:
        group.abort()


def leave_torch(session: Session) -> None:
    """Remove the default group, in whatever state it is."""
    group = backends.present(session)
    if group is not None:
        group.destroy()
    elif dist.is_initialized():
        dist.destroy_process_group()


def listening_host() -> str:
    """Return where rank 0 listens: the launcher's address if it belongs to this machine."""
    host = env.master_addr()
    try:
        with socket.create_server((host, 0)):
            return host
    except OSError:  # a name that leads elsewhere, e.g. through address translation
        return socket.gethostbyname(socket.gethostname())
