"""Use process groups of gloo."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from typing_extensions import override

from adaptdl_elastic._session import Session
from adaptdl_elastic.reducer import PeerLostError
from adaptdl_elastic.torch._process_group.backends.base import ARRIVES, GRACE, STALL, Group

dist: Any = torch.distributed  # its stub does not export all of it

# time limit of each of the five attempts of gloo to connect to a peer, which may be dead
_CONNECT = timedelta(seconds=3)

# time limit of the members of a further group to connect
_MEET = timedelta(seconds=60)

_PART = 1 << 20
"""Bytes of the parts in which tensors are sent, to tell a slow link from a stopped replica."""

# checks for the end of a collective without a pause; then seconds between two checks
_SPIN, _PAUSE = 50, 0.0002


class Gloo(Group):
    """Use a group of gloo, and keep its sockets, because gloo has no abort.

    Shutting the sockets down is the only way to end a collective whose peer is a replica that itself waits in
    vain.
    """

    def __init__(self, backend: str, session: Session | None = None) -> None:
        super().__init__(backend, session)
        self._before: set[tuple[int, str]] = set()
        self._sockets: set[tuple[int, str]] = set()

    @classmethod
    @override
    def why_not(cls, session: Session) -> str | None:
        return None

    @property
    @override
    def limits(self) -> dict[str, Any]:
        return {"timeout": _CONNECT}

    @override
    def forming(self) -> None:
        self._before = _sockets()

    @override
    def formed(self, patience: timedelta | None) -> None:
        if patience is not None:
            _set_timeout(patience)
        self._sockets = _sockets() - self._before

    @override
    def further(self, ranks: list[int], limit: timedelta | None = _MEET) -> Any:
        before = _sockets()
        made = super().further(ranks, limit)
        self._sockets |= _sockets() - before
        if made is not dist.GroupMember.NON_GROUP_MEMBER:
            torch.distributed.distributed_c10d._set_pg_timeout(dist.default_pg_timeout, made)
        return made

    @override
    def restore_timeouts(self) -> None:
        _set_timeout(dist.default_pg_timeout)

    @override
    def wait(self, works: Sequence[Any], limit: timedelta) -> None:
        """Wait until the results of all `works` are complete.

        When a connection ends, gloo may forget a tensor that it was receiving: its work never ends.

        Raises:
            RuntimeError: one failed or took too long, or a replica is lost.
        """
        began, lost_at, looks = time.monotonic(), math.inf, 0
        for work in works:
            while not work.is_completed():
                now, looks = time.monotonic(), looks + 1
                if self.session is not None and self.session.consensus.lost is not None:
                    lost_at = min(lost_at, now)
                    if now - lost_at > GRACE:
                        self.session.transfer_stuck = True
                        raise PeerLostError(self.session.consensus.lost or "a replica is gone")
                if now - began > limit.total_seconds():
                    raise RuntimeError(f"a collective of gloo took more than {limit}")
                time.sleep(0.0 if looks < _SPIN else _PAUSE)
            work.wait()  # it has ended: this raises its error

    @override
    def send(self, flat: torch.Tensor, peer: int, turn: timedelta = ARRIVES) -> None:
        _exchange(dist.isend, flat, peer, turn)

    @override
    def receive(self, flat: torch.Tensor, peer: int, turn: timedelta = ARRIVES) -> None:
        _exchange(dist.irecv, flat, peer, turn)

    @override
    def abort(self) -> None:
        ours, self._sockets = self._sockets, set()
        for descriptor, inode in ours & _sockets():
            try:
                with socket.socket(fileno=os.dup(descriptor)) as one:
                    if _inode(one.fileno()) == inode and one.getpeername():
                        one.shutdown(socket.SHUT_RDWR)
            except OSError:  # closed a moment ago; or listening, which gloo would not survive
                continue


def _exchange(
    operation: Callable[[torch.Tensor, int], Any], flat: torch.Tensor, peer: int, turn: timedelta
) -> None:
    """Send or receive a tensor in parts, each with a time limit of its own.

    Otherwise the limit of the whole tensor would be `_CONNECT`: gloo keeps the limit with which it connected.
    """
    works = [operation(part, peer) for part in torch.split(flat, _PART // flat.element_size())]
    for index, work in enumerate(works):
        work.wait(STALL if index else turn)


def _set_timeout(timeout: timedelta) -> None:
    torch.distributed.distributed_c10d._set_pg_timeout(timeout, None)


def _sockets() -> set[tuple[int, str]]:
    """Return (descriptor, inode) of every socket of this process."""
    descriptors = Path("/proc/self/fd")
    names: Iterable[int] = (
        [int(entry.name) for entry in descriptors.iterdir()] if descriptors.is_dir() else []
    )
    found = {(name, _inode(name)) for name in names}
    return {(name, inode) for name, inode in found if inode.startswith("socket:")}


def _inode(descriptor: int) -> str:
    try:
        return str(Path(f"/proc/self/fd/{descriptor}").readlink())
    except OSError:
        return ""
