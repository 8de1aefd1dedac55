"""The interface of the shared store, and the guarantees that every driver gives.

tests/rendezvous/test_store_conformance.py tests every driver for them:

* **Revisions.** Every change in the store has a revision, an integer that never decreases.
* **Compare-and-swap.** `compare_and_swap` changes one key if its `mod_revision` is the expected one (0: the
  key does not exist), and otherwise changes nothing.
* **Leases.** Keys put under a lease are deleted when it has not been renewed for its time to live. A `Lease`
  renews itself in the background. `Lease.lost` is set when the server has dropped it. Putting a key under a
  lost lease raises `LeaseLostError`; the caller takes a new lease.
* **Watches.** `watch(prefix, start_revision)` yields every change from that revision on, in order, across
  reconnects and server restarts, without polling. Changes made together (by a lease that expired) may share a
  revision. If the server has compacted changes that the watch still needs, or has lost its data, the watch
  raises `CompactedError` once and ends; the caller reads the range again and watches from there.
* **Errors.** If no endpoint can be reached, an operation raises `StoreUnavailableError` after its time-out.
  If the server refuses the client (wrong password, no permission), or one side refuses the other's
  certificate, it raises `StoreAuthError` at once, after passwords and certificates have been read from their
  files again. A watch that was accepted once goes on through both. A request that the server would refuse
  every time (a value that is too large) raises `StoreRefusedError`.

All methods are safe to call from several threads.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import ClassVar, Literal, TypeVar

from typing_extensions import Self

from adaptdl_elastic.rendezvous.schema.records import MalformedRecordError, decode

R = TypeVar("R")


class StoreError(Exception):
    """Base class of the errors of the store and of the connection to it."""


class StoreUnavailableError(StoreError):
    """No endpoint answered in time."""


class StoreAuthError(StoreError):
    """The store refused the client's credentials, or a certificate was refused by either side."""


class StoreRefusedError(StoreError):
    """The store refuses this operation, and would refuse it again."""


class StoreFullError(StoreError):
    """The store has no room for what is written; it can still be read."""


class LeaseLostError(StoreError):
    """A key was put under a lease that the store no longer knows; nothing was written."""

    def __init__(self, message: str = "its registration has run out; it registers again") -> None:
        super().__init__(message)


class CompactedError(StoreError):
    """Changes that a watch needs are no longer in the store's history; read the range again."""


@dataclass(frozen=True)
class KeyValue:
    """A key and its value as of `mod_revision`."""

    key: str
    value: str
    create_revision: int
    mod_revision: int


@dataclass(frozen=True)
class Change:
    """A change of one key. For a deletion or an expiry `value` is None."""

    kind: Literal["put", "delete"]
    key: str
    value: str | None
    revision: int


def read_record(kind: type[R], item: KeyValue | None) -> R | None:
    """Return the record of type `kind` that a key holds; None if there is no such key or no such record."""
    return None if item is None else read_text(kind, item.value)


def read_text(kind: type[R], text: str | None) -> R | None:
    """Return the record of type `kind` that a value is; None if there is none, or it is no such record."""
    try:
        return None if text is None else decode(kind, text, "")
    except MalformedRecordError:
        return None


@dataclass(frozen=True)
class Snapshot:
    """The keys under a prefix as of `revision`; a watch from `revision + 1` continues without a gap.

    `prefix` is the one that `range` was given.
    """

    items: tuple[KeyValue, ...]
    revision: int
    prefix: str


class Lease(ABC):
    """A lease, renewed in the background until it is revoked or lost; its keys live as long."""

    ttl: float
    lost: threading.Event

    @abstractmethod
    def revoke(self) -> None:
        """End the lease and delete its keys; do nothing if it is lost already."""

    @abstractmethod
    def abandon(self) -> None:
        """Stop renewing the lease without telling the server, as if this process had died."""

    @abstractmethod
    def remaining(self) -> float:
        """Return the seconds for which the lease is certain to last.

        They are counted from the moment at which the last request was sent that the server answered.
        0 if it is lost. It may last longer: while the server is away, `lost` is not set.
        """


class Closable(ABC):
    """Something to close, which a `with` statement does."""

    @abstractmethod
    def close(self) -> None:
        """Release everything that it holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Watch(Closable):
    """A stream of changes. One thread iterates over it; any thread may `close` it."""

    @abstractmethod
    def __iter__(self) -> Iterator[Change]: ...

    @abstractmethod
    def close(self) -> None:
        """End the iteration, even while another thread waits in it."""


class Store(Closable):
    """A store; the module's docstring lists the guarantees of its methods."""

    has_users: ClassVar[bool] = False
    """Whether only users with a password can read the store, if it has users."""

    @abstractmethod
    def get(self, key: str) -> KeyValue | None:
        """Return the key, or None if it does not exist. Linearizable."""

    @abstractmethod
    def range(self, prefix: str) -> Snapshot:
        """Return every key that begins with `prefix`, sorted, as of one revision."""

    @abstractmethod
    def put(self, key: str, value: str, lease: Lease | None = None) -> int:
        """Write the key whatever it held before; return the new `mod_revision`."""

    @abstractmethod
    def compare_and_swap(
        self, key: str, value: str | None, expected_revision: int, lease: Lease | None = None
    ) -> int | None:
        """Write the key (None: delete it) if its mod_revision is the expected one.

        Args:
            key: the key.
            value: the new value; None deletes the key.
            expected_revision: the mod_revision to compare with; 0: the key does not exist.
            lease: the lease that the key is put under.

        Returns:
            The new revision, or None if the comparison failed.
        """

    @abstractmethod
    def delete(self, key: str) -> bool:
        """Delete one key; return whether it existed."""

    @abstractmethod
    def delete_prefix(self, prefix: str) -> int:
        """Delete every key that begins with `prefix`; return how many there were."""

    @abstractmethod
    def lease(self, ttl: float) -> Lease:
        """Return a new lease of `ttl` seconds, renewed in the background."""

    @abstractmethod
    def watch(self, prefix: str, start_revision: int = 0) -> Watch:
        """Return the changes under `prefix` from `start_revision` on (0: from now on)."""

    @abstractmethod
    def close(self) -> None:
        """Revoke the client's leases, end its watches, and close its connections."""
