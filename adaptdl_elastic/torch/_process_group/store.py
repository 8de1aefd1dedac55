"""Stores of torch's: where a generation meets, and one in which to wait ends when a replica is gone."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed
from typing_extensions import override

from adaptdl_elastic import _secrets, env
from adaptdl_elastic.torch._process_group.signed_store import signed

dist: Any = torch.distributed  # its stub does not export the stores

PATIENCE = 20.0
"""Seconds that those who have begun to switch wait for each other."""

FOREVER = timedelta(days=365)
"""For waiting that only a notice, or the end of the process, ends."""

LOOK = 0.005  # seconds from one look into the store to the next: what that may add to a change


def generation_store(host: str, port: int, generation: int) -> Any:
    """Return the store where generation `generation` meets. Strangers cannot write its values."""
    store = dist.TCPStore(
        host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=PATIENCE)
    )
    key = _secrets.generation_key(env.secret(), _secrets.MEETING, env.job_id() or "", generation)
    return signed(dist.PrefixStore(f"adaptdl/{generation}", store), key)


def open_store(host: str) -> Any:
    """Return a TCPStore that this process keeps, on any free port of `host` and on no other interface."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.create_server((host, 0), family=family)
    port = sock.getsockname()[1]
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=sock.detach())


class CancellableStore(dist.Store):  # type: ignore[misc]
    """`store`, for a process group that is formed while its members may die.

    A process group waits for the addresses of all others, up to its time limit: nobody tells it that one
    of them is dead. Torch calls these methods from C++, so keep a reference as long as the group lives.

    Args:
        store: Where everything is kept.
        lost: Why there is nothing to wait for any more; None: there is.
        patience: How long to wait at most, whatever time limit the group has.
    """

    def __init__(self, store: Any, lost: Callable[[], str | None], patience: timedelta) -> None:
        super().__init__()
        self._store, self._lost, self._patience = store, lost, patience.total_seconds()

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Until all `keys` are there.

        Raises:
            RuntimeError: somebody is lost, or the patience is at its end.
        """
        deadline = time.monotonic() + self._patience
        while not self._store.check(keys):  # its own `wait` would print a warning at each look up
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
    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(key, amount))

    @override
    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        value: bytes = self._store.compare_set(key, expected, desired)
        return value

    @override
    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))

    @override
    def delete_key(self, key: str) -> bool:
        return bool(self._store.delete_key(key))

    @override
    def num_keys(self) -> int:
        return int(self._store.num_keys())

    @override
    def has_extended_api(self) -> bool:
        return False
