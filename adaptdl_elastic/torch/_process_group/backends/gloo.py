"""Groups of gloo."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from typing_extensions import override

from adaptdl_elastic._session import Session
from adaptdl_elastic.torch._process_group.backends.base import Group

dist: Any = torch.distributed  # its stub does not export all of it

_CONNECT = timedelta(seconds=3)  # each of the five times that gloo tries to reach one that may be dead


class Gloo(Group):
    """gloo: its sockets are remembered, because it can not be told to give up.

    Shutting them down is the only way to end a collective whose peer is another replica that waits in
    vain itself.
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
    def restore_timeouts(self) -> None:
        _set_timeout(dist.default_pg_timeout)

    @override
    def abort(self) -> None:
        ours, self._sockets = self._sockets, set()
        for descriptor, inode in ours & _sockets():
            try:
                with socket.socket(fileno=os.dup(descriptor)) as one:
                    if _inode(one.fileno()) == inode and one.getpeername():
                        one.shutdown(socket.SHUT_RDWR)
            except OSError:  # closed a moment ago, or a listening one: gloo does not survive its end
                continue


def _set_timeout(timeout: timedelta) -> None:
    torch.distributed.distributed_c10d._set_pg_timeout(timeout, None)


def _sockets() -> set[tuple[int, str]]:
    """(descriptor, inode) of every socket of this process."""
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
