"""Recognise values in a torch store that were written without knowledge of the secret.

torch's TCPStore does not authenticate its clients: every process that reaches its port can read and write
every key. So every value is written with a signature (HMAC-SHA256 with a key that only the replicas of this
generation have) over the name of the key and the value. A value that was changed, moved from another key, or
kept from another generation causes an error. A stranger can still delete keys, increase counters (`add` has
no room for a signature), and overwrite values. Then a group is not formed, and its members end with that
error or after their time limit.
"""

from __future__ import annotations

import hashlib
import hmac
from datetime import timedelta
from typing import Any

import torch.distributed

dist: Any = torch.distributed  # its stub does not export the stores

_SIGNATURE_BYTES = 32


class ForgedValueError(RuntimeError):
    """Raised if a value in a store was not written by a replica that knows the secret."""


class ForwardingStore(dist.Store):  # type: ignore[misc]
    """Define a store that hands every request on that a subclass does not answer itself.

    torch calls these methods from C++, so keep a reference as long as a group uses the store.
    """

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store = store

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))

    def delete_key(self, key: str) -> bool:
        return bool(self._store.delete_key(key))

    def num_keys(self) -> int:
        return int(self._store.num_keys())

    deleteKey, getNumKeys = delete_key, num_keys

    def has_extended_api(self) -> bool:
        return False


class SignedStore(ForwardingStore):
    """Define a store whose values only holders of `key` can write.

    Args:
        store: keeps the values.
        key: for one generation and one purpose.
    """

    def __init__(self, store: Any, key: bytes) -> None:
        super().__init__(store)
        self._key = key
        self._clones: list[Any] = []  # torch does not keep a reference to the Python objects

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, self._sign(key, value))

    def get(self, key: str) -> bytes:
        return self._verify(key, self._store.get(key))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        known = self._sign(key, expected) if expected else ""
        found = self._store.compare_set(key, known, self._sign(key, desired))
        return self._verify(key, found) if found else b""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if timeout is None:
            self._store.wait(keys)
        else:
            self._store.wait(keys, timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)

    def clone(self) -> SignedStore:
        copy = SignedStore(self._store.clone(), self._key)
        self._clones.append(copy)
        return copy

    def _sign(self, key: str, value: Any) -> bytes:
        data = value.encode() if isinstance(value, str) else bytes(value)
        return self._signature(key, data) + data

    def _verify(self, key: str, signed: bytes) -> bytes:
        signature, data = signed[:_SIGNATURE_BYTES], signed[_SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, self._signature(key, data)):
            raise ForgedValueError(
                f"{key!r} in the store where the replicas meet was not written by one of them: a stranger "
                f"reaches its port, or the nodes do not have the same ADAPTDL_SECRET (openssl rand -hex 24)"
            )
        return data

    def _signature(self, key: str, data: bytes) -> bytes:
        name = key.encode()
        return hmac.new(self._key, len(name).to_bytes(4, "big") + name + data, hashlib.sha256).digest()


def signed(store: Any, key: bytes | None) -> Any:
    """Return `store` with signed values, or itself if there is no key."""
    return store if key is None else SignedStore(store, key)
