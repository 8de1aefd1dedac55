"""Make the torch store in which a generation meets; waiting in it ends when a replica is lost."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed
from typing_extensions import override

from adaptdl_elastic import _secrets, env
from adaptdl_elastic.torch._process_group.signed_store import ForwardingStore, signed

dist: Any = torch.distributed  # its stub does not export the stores

PATIENCE = 20.0
"""Seconds that replicas that have begun to switch wait for each other."""

FOREVER = timedelta(days=365)
"""Time-out of waits without a limit: a notice ends them, or the end of the process."""

LOOK = 0.005  # seconds between two checks of the store; a change may take that much longer


def generation_store(host: str, port: int, generation: int) -> Any:
    """Return the store where generation `generation` meets. Strangers cannot write its values."""
    store = dist.TCPStore(
        host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=PATIENCE)
    )
    key = _secrets.generation_key(env.secret(), _secrets.MEETING, env.job_id() or "", generation)
    return signed(dist.PrefixStore(f"adaptdl/{generation}", store), key)


def open_store(host: str) -> Any:
    """Return a TCPStore served by this process, on any free port of `host` and no other interface."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.create_server((host, 0), family=family)
    port = sock.getsockname()[1]
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=sock.detach())


class CancellableStore(ForwardingStore):
    """Define a store for a process group that is formed while its members may die.

    A process group waits for the addresses of all others up to its time limit; it does not learn that one of
    them is dead.

    Args:
        store: keeps the values.
        lost: returns why waiting is useless; None while it is not.
        patience: longest wait, whatever the group's time limit.
    """

    def __init__(self, store: Any, lost: Callable[[], str | None], patience: timedelta) -> None:
        super().__init__(store)
        self._lost, self._patience = lost, patience.total_seconds()

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all `keys` exist.

        Raises:
            RuntimeError: a replica is lost, or the patience has ended.
        """
        deadline = time.monotonic() + self._patience
        while not self._store.check(keys):  # the store's own `wait` would print a warning for each check
            reason = self._lost()
            if reason is not None:
                raise RuntimeError(reason)
            if time.monotonic() > deadline:
                raise RuntimeError(f"nobody wrote {', '.join(keys)} within {self._patience:.0f} s")
            time.sleep(LOOK)

    @override
    def get(self, key: str) -> bytes:
        self.wait([key])
        value: bytes = self._store.get(key)
        return value

    @override
    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    @override
    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        value: bytes = self._store.compare_set(key, expected, desired)
        return value
