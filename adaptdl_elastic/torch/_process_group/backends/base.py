"""Define how this library uses torch's default process group, for any backend."""

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
"""Longest time of a gradient's all-reduce: torch's time limit of NCCL's collectives."""

_LOOK = 0.05  # seconds between two checks for a death

GRACE = 0.2
"""Seconds that a transfer has to end by itself after the death of a replica."""

STALL = timedelta(seconds=3)
"""Longest time in which nothing of a transfer arrives; then the other end counts as stopped."""


class Group:
    """Torch's default group of one generation of this process; this class is for unknown backends.

    Args:
        backend: as given to `torch.distributed.init_process_group`.
        session: its session; None in the self-test, where no peer is known.
    """

    completion_is_unreliable = False
    """Whether futures of collectives are done before their results are complete."""

    tested = False
    """Whether changes in place must wait for the self-test."""

    def __init__(self, backend: str, session: Session | None = None) -> None:
        self.backend, self.session = backend, session
        # groups that `further` has made, on all replicas, and those of them with this one
        self.further_made = self.further_here = 0

    @classmethod
    def place(cls) -> None:
        """Select the device of this process's slot, unless the script has chosen one."""

    @classmethod
    def training_device(cls) -> torch.device:
        """Return the device on which a script with this backend probably trains."""
        return torch.device("cpu")

    @classmethod
    def prepare(cls) -> None:
        """Set the environment variables that the first group of a process needs for changes in place."""

    @classmethod
    def why_not(cls, session: Session) -> str | None:
        """Return why such groups cannot be formed again within this process; None if they can."""
        known = "only groups of gloo and of NCCL are known to be re-made safely"
        return f"the backend is {session.backend}: {known}"

    @property
    def limits(self) -> dict[str, Any]:
        """Arguments for `init_process_group` if the other replicas may be dead already."""
        return {}

    @property
    def device(self) -> torch.device:
        """Device of tensors that are sent and received."""
        return torch.device("cpu")

    def forming(self) -> None:
        """Prepare for torch's group to be made."""

    def formed(self, patience: timedelta | None) -> None:
        """Finish after torch's group was made.

        Args:
            patience: time limit if the other replicas may be dead already; None: they are not.

        Raises:
            RuntimeError: one of them is gone.
        """

    def further(self, ranks: list[int], limit: timedelta | None = None) -> Any:
        """Make another group of some replicas, which ends with this one. All replicas call it.

        Args:
            ranks: the replicas.
            limit: time limit of its operations, and for them to meet; None: torch's.

        Returns:
            torch's group; on replicas that are not in it, its mark for that.
        """
        made = dist.new_group(ranks, limit)
        self.further_made += 1
        self.further_here += made is not dist.GroupMember.NON_GROUP_MEMBER
        return made

    def restore_timeouts(self) -> None:
        """Restore torch's own time-outs, since all replicas have come and have what they need."""

    def abort(self) -> None:
        """Make every operation of the group end, here and on its peers. From any thread."""

    @property
    def is_aborted(self) -> bool:
        """Whether `abort` has begun.

        Operations that end from then on are not complete, whatever they report.
        """
        return False

    def unblock(self) -> None:
        """Interrupt a transfer that waits for a lost replica."""

    def abort_and_drain(self) -> None:
        """Abort, and return when no operation of the group writes into memory any more."""
        self.abort()

    def synchronize(self) -> None:
        """Wait for what this replica has enqueued. All replicas call it, then meet, then `destroy`."""

    def destroy(self) -> None:
        """Remove the default group, in whatever state it is."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def wait(self, works: Sequence[Any], limit: timedelta) -> None:
        """Wait until the results of all `works` are complete.

        Raises:
            RuntimeError: one failed or took too long, or the group was aborted.
        """
        for work in works:
            work.wait(limit)

    def queue(self, collective: Callable[[], Any]) -> Any:
        """Call `collective`, but not while the group is being aborted."""
        return collective()

    def send(self, flat: torch.Tensor, peer: int, turn: timedelta = ARRIVES) -> None:
        """Send a tensor on `device`; return when it was sent. RuntimeError as in `wait`.

        Args:
            flat: the tensor, of one dimension.
            peer: rank of the receiver.
            turn: how long the receiver, which may serve others first, may take to begin.
        """
        dist.send(flat, peer)

    def receive(self, flat: torch.Tensor, peer: int, turn: timedelta = ARRIVES) -> None:
        """Receive into a tensor on `device`; return when it is complete. As `send`."""
        dist.recv(flat, peer)

    def here(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which a thread that transfers uses the same device as the training thread."""
        return contextlib.nullcontext()


def present(session: Session) -> Group | None:
    """Return this process's group of the present generation; None if the script made torch's."""
    found = session.group
    assert found is None or isinstance(found, Group)
    return found


def keep() -> None:
    """Never free the present default group: its destructor would wait, maybe without end."""
    if dist.is_initialized():
        keep_object(dist.group.WORLD)


def keep_object(one: Any) -> None:
    """Never free an object, neither here nor in a forked process, in which a thread's references end."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))


def patiently(
    session: Session | None,
    group: Group | None,
    transfer: Callable[[], None],
    limit: timedelta | None = None,
) -> None:
    """Run `transfer`, but end it if a replica dies or `limit` is exceeded.

    It runs in a thread, because gloo does not notice when the other end dies in the middle of a tensor. Then
    the thread ends by torch's time limit, and its group must never be freed.

    Args:
        session: used to notice deaths; None: `transfer` runs directly.
        group: what the library knows of the group.
        transfer: the transfer.
        limit: time limit.

    Raises:
        RuntimeError: `transfer` failed, a replica was lost, or the limit was exceeded.
    """
    failed: list[BaseException] = []
    if group is not None:
        group.synchronize()  # the thread has a CUDA stream of its own

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
            thread.join(GRACE)
            if thread.is_alive():
                session.transfer_stuck = True
                raise PeerLostError(why)


def broadcast(tensors: list[torch.Tensor], torch_group: Any, group: Group | None, limit: timedelta) -> None:
    """Give every replica the tensors of the group's rank 0. A collective.

    Args:
        tensors: overwritten when all have arrived.
        torch_group: the process group.
        group: what the library knows of it; None: nothing.
        limit: how long to wait for the others.
    """
    copies = [tensor.clone() for tensor in tensors]  # a broadcast that fails leaves partial results

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
