"""Torch's default process group of a generation: making, relaxing, breaking and leaving it."""

from __future__ import annotations

import socket
import sys
from datetime import timedelta
from typing import Any

import torch.distributed

from adaptdl_elastic import env
from adaptdl_elastic._session import Session
from adaptdl_elastic.torch._process_group import backends
from adaptdl_elastic.torch._process_group.store import CancellableStore

dist: Any = torch.distributed  # its stub does not export the stores


def connect_torch(session: Session, backend: str, store: Any, timeout: timedelta | None = None) -> None:
    """Torch's default group of this generation, which meets in `store`.

    Args:
        timeout: Of everything until `relax_torch`; None: torch's, in the first generation of a process.
            gloo's `recv` does not end when its sender dies in the middle of a message.

    Raises:
        RuntimeError: not all of the others are there.
    """
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


def listening_host() -> str:
    """Where rank 0 listens: its address as the launcher gave it, when it is one of this machine's."""
    host = env.master_addr()
    try:
        with socket.create_server((host, 0)):
            return host
    except OSError:  # a name of the launcher's that leads elsewhere, e.g. through address translation
        return socket.gethostbyname(socket.gethostname())
