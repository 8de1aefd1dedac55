"""One interface to the shared truth, whatever keeps it.

What every driver promises (tests/rendezvous/test_store_conformance.py holds them to it):

* **Revisions.** Every change in the store has a revision, an integer that only grows.
* **Compare-and-swap.** `compare_and_swap` changes one key if its `mod_revision` is the expected one
  (0: the key does not exist) and otherwise changes nothing.
* **Leases.** Keys put under a lease vanish when it has not been kept alive for its time to live. A
  `Lease` keeps itself alive in the background; `Lease.lost` is set when the server has dropped it.
  To put a key under a lease that is lost raises `LeaseLostError`: take a new one.
* **Watches.** `watch(prefix, start_revision)` yields every change from that revision on, in order,
  across reconnects and server restarts, without polling. Changes made at once (a lease that ran out)
  may share a revision. When the server has compacted what was missed, or has lost its data, the
  watch raises `CompactedError` once and ends; the caller reads the range again and watches from there.
* **Errors.** A server that can not be reached raises `StoreUnavailableError` after the operation's
  time-out, having tried every endpoint. A server that refuses us (wrong password, no permission), or whose
  certificate or ours is refused, raises `StoreAuthError` at once, after passwords and certificates have been
  read from their files again. A watch that was accepted once outlives both. What the server
  would answer the same to if it were asked again (a value that is too large) raises `StoreRefusedError`.

All methods are safe to call from several threads.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Literal


class StoreError(Exception):
    """Something is wrong between us and the store."""


class StoreUnavailableError(StoreError):
    """No endpoint answered in time."""


class StoreAuthError(StoreError):
    """The store refused who we say we are, or we refused its certificate."""


class StoreRefusedError(StoreError):
    """The store will not do this, however often it is asked."""


class LeaseLostError(StoreError):
    """A key was to be put under a lease that the store no longer knows; nothing was written."""


class CompactedError(StoreError):
    """The history that a watch asked for is gone; read the range again."""


@dataclass(frozen=True)
class KeyValue:
    """One key as it stands at `mod_revision`."""

    key: str
    value: str
    create_revision: int
    mod_revision: int


@dataclass(frozen=True)
class Change:
    """One change of one key. A deletion (or an expiry) carries the key and no value."""

    kind: Literal["put", "delete"]
    key: str
    value: str | None
    revision: int


@dataclass(frozen=True)
class Snapshot:
    """The keys under a prefix at `revision`; watch from `revision + 1` to miss nothing."""

    items: tuple[KeyValue, ...]
    revision: int


class Lease(ABC):
    """Keeps the keys that were put under it alive until it is revoked, or lost."""

    ttl: float
    lost: threading.Event

    @abstractmethod
    def revoke(self) -> None:
        """Let go: its keys vanish now. Harmless when already lost."""

    @abstractmethod
    def abandon(self) -> None:
        """Keep it alive no longer, without a word to the server, as if this process had died."""

    @abstractmethod
    def remaining(self) -> float:
        """Seconds for which it is certain to be held: from the last answer of the server, 0 when lost.

        It may be held longer: while the server is away nobody can say, and `lost` is not set.
        """


class Watch(ABC):
    """A stream of changes; iterate it in one thread, `close` it from any."""

    @abstractmethod
    def __iter__(self) -> Iterator[Change]: ...

    @abstractmethod
    def close(self) -> None:
        """End the iteration, also one that waits in another thread."""

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Store(ABC):
    """See the module's docstring for what every method promises."""

    @abstractmethod
    def get(self, key: str) -> KeyValue | None:
        """The key, or None when it does not exist. Linearizable."""

    @abstractmethod
    def range(self, prefix: str) -> Snapshot:
        """Every key that begins with `prefix`, sorted, as of one revision."""

    @abstractmethod
    def put(self, key: str, value: str, lease: Lease | None = None) -> int:
        """Write whatever was there before; the new `mod_revision`."""

    @abstractmethod
    def compare_and_swap(
        self, key: str, value: str | None, expected_revision: int, lease: Lease | None = None
    ) -> int | None:
        """Write (None: delete) if the key's mod_revision is expected_revision (0: it does not exist).

        Returns the new revision, or None when the comparison failed.
        """

    @abstractmethod
    def delete(self, key: str) -> bool:
        """Delete one key; whether it existed."""

    @abstractmethod
    def delete_prefix(self, prefix: str) -> int:
        """Delete every key that begins with `prefix`; how many there were."""

    @abstractmethod
    def lease(self, ttl: float) -> Lease:
        """A new lease of `ttl` seconds, kept alive in the background."""

    @abstractmethod
    def watch(self, prefix: str, start_revision: int = 0) -> Watch:
        """Changes under `prefix` from `start_revision` on (0: from now on)."""

    @abstractmethod
    def close(self) -> None:
        """Revoke its leases, end its watches, and drop its connections."""

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
