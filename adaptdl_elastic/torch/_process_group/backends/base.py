"""What this library knows of torch's default process group, whatever its backend."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from adaptdl_elastic._session import Session
from adaptdl_elastic.reducer import PeerLostError

dist: Any = torch.distributed  # its stub does not export all of it
log = logging.getLogger(__name__)

ARRIVES = timedelta(minutes=10)
"""How long a gradient may be on its way: torch's time limit of NCCL's collectives."""

_LOOK, _GRACE = 0.05, 0.2  # seconds between looks for a death; that a transfer has to end by itself then


class Group:
    """Torch's default group of one generation of this process; as such, of a backend that nobody knows.

    Args:
        backend: As `torch.distributed.init_process_group` was given it.
        session: Whose; None: of nobody who could lose a peer (the self-test).
    """

    completion_is_unreliable = False
    """Whether futures of collectives are done before their results are there."""

    tested = False
    """Whether changes in place must wait for the self-test."""

    def __init__(self, backend: str, session: Session | None = None) -> None:
        self.backend, self.session = backend, session

    @classmethod
    def place(cls) -> None:
        """Have this process use the device of its slot, unless the script has chosen one."""

    @classmethod
    def training_device(cls) -> torch.device:
        """Where a script with this backend most likely trains."""
        return torch.device("cpu")

    @classmethod
    def prepare(cls) -> None:
        """Set what the first group of a process must find that may change in place."""

    @classmethod
    def why_not(cls, session: Session) -> str | None:
        """Why such groups can not be made anew within a process of this script; None: they can."""
        known = "only groups of gloo and of NCCL are known to be re-made safely"
        return f"the backend is {session.backend}: {known}"

    @property
    def limits(self) -> dict[str, Any]:
        """Arguments for `init_process_group` where the others may be gone already."""
        return {}

    @property
    def device(self) -> torch.device:
        """Where what is sent must be, and where what is received arrives."""
        return torch.device("cpu")

    def forming(self) -> None:
        """Torch's group is about to be made."""

    def formed(self, patience: timedelta | None) -> None:
        """It has been made; `patience` is set where the others may be gone already.

        Raises RuntimeError when they are.
        """

    def restore_timeouts(self) -> None:
        """All are there and have what they need: torch's own time limits from now on."""

    def abort(self) -> None:
        """Make every operation of the group end, here and at its other ends. From any thread."""

    @property
    def is_aborted(self) -> bool:
        """Whether `abort` has begun: what ends from then on has not arrived, whatever it says."""
        return False

    def unblock(self) -> None:
        """Let a transfer go on that waits for somebody who is gone."""

    def abort_and_drain(self) -> None:
        """Hang up, and return when nothing of the group writes into anybody's memory any more."""
        self.abort()

    def synchronize(self) -> None:
        """Wait for what this replica has queued. All do it, then meet, then `destroy`."""

    def destroy(self) -> None:
        """Have no default group any more, whatever state it is in."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def wait(self, works: Sequence[Any], limit: timedelta) -> None:
        """Until the results of all `works` are there.

        Raises RuntimeError: one failed or took too long, or somebody has hung up.
        """
        for work in works:
            work.wait(limit)

    def queue(self, collective: Callable[[], Any]) -> Any:
        """`collective()`, which must not fall into the middle of hanging up."""
        return collective()

    def send(self, flat: torch.Tensor, peer: int) -> None:
        """Send a tensor on `device`; returns when it has been sent. RuntimeError: as `wait`."""
        dist.send(flat, peer)

    def receive(self, flat: torch.Tensor, peer: int) -> None:
        """Receive into a tensor on `device`, and have it there. RuntimeError: as `wait`."""
        dist.recv(flat, peer)

    def here(self) -> contextlib.AbstractContextManager[Any]:
        """For a thread that transfers: as the training thread has it."""
        return contextlib.nullcontext()


def present(session: Session) -> Group | None:
    """This process's group of the present generation; None: torch's was made by the script."""
    found = session.group
    assert found is None or isinstance(found, Group)
    return found


def keep() -> None:
    """Never free the present default group: its destructor would wait, maybe for ever."""
    if dist.is_initialized():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.group.WORLD))


def patiently(
    session: Session | None,
    group: Group | None,
    transfer: Callable[[], None],
    limit: timedelta | None = None,
) -> None:
    """Run `transfer`, unless somebody dies meanwhile, or it takes longer than `limit`.

    In a thread, because gloo does not notice when the other end dies in the middle of a tensor: then the
    thread is left to torch's time limit, and its group must never be freed. RuntimeError: what `transfer`
    raises, the loss of a replica, or the limit.
    """
    failed: list[BaseException] = []
    if group is not None:
        group.synchronize()  # the thread has a stream of its own

    def run() -> None:
        try:
            with group.here() if group is not None else contextlib.nullcontext():
                transfer()
        except BaseException as error:
            failed.append(error)

    if session is None:
        run()
    else:
        _watch(session, group, threading.Thread(target=run, name="adaptdl-transfer", daemon=True), limit)
    if failed:
        raise failed[0]


def _watch(session: Session, group: Group | None, thread: threading.Thread, limit: timedelta | None) -> None:
    began = time.monotonic()
    thread.start()
    while thread.is_alive():
        thread.join(_LOOK)
        why = session.consensus.lost
        if why is None and limit is not None and time.monotonic() - began > limit.total_seconds():
            why = f"the replicas did not meet within {limit}"
        if why is not None and thread.is_alive():
            if group is not None:
                group.unblock()
            thread.join(_GRACE)
            if thread.is_alive():
                session.transfer_stuck = True
                raise PeerLostError(why)


def broadcast(tensors: list[torch.Tensor], torch_group: Any, group: Group | None, limit: timedelta) -> None:
    """Give every replica the tensors of the group's rank 0. A collective.

    Args:
        tensors: Overwritten once all have arrived.
        torch_group: The process group.
        group: What the library knows of it; None: nothing.
        limit: How long to wait for the others.
    """
    copies = [tensor.clone() for tensor in tensors]  # a broadcast that breaks leaves half of each

    def start() -> list[Any]:
        return [dist.broadcast(one, group=torch_group, group_src=0, async_op=True) for one in copies]

    works = start() if group is None else group.queue(start)
    if group is not None:
        group.wait(works, limit)
    else:
        for work in works:
            work.wait(limit)
    with torch.no_grad():
        for tensor, copied in zip(tensors, copies, strict=True):
            tensor.copy_(copied)
