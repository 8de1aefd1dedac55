"""A store in a dictionary of this process, for standalone jobs (`local.store_server`) and for tests.

`MemoryStore()` makes a new store. `store.client()` makes another client of the same store with leases and
watches of its own, as a second process would be. The clock is injected. A lease expires only after it was
abandoned (as if its process had died), or after a first `renew` was not repeated in time.
"""

from __future__ import annotations

import bisect
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from adaptdl_elastic.rendezvous.store.base import (
    Change,
    CompactedError,
    KeyValue,
    Lease,
    LeaseLostError,
    Snapshot,
    Store,
    Watch,
)

Clock = Callable[[], float]


@dataclass
class _Shared:
    """The data that all clients share; `changed` guards all other fields."""

    clock: Clock
    changed: threading.Condition = field(default_factory=threading.Condition)
    revision: int = 1
    compacted: int = 0  # revision up to which changes are forgotten
    most_changes: int | None = None  # least number of changes kept for watches; None: all
    items: dict[str, KeyValue] = field(default_factory=dict)
    owner: dict[str, MemoryLease] = field(default_factory=dict)
    history: list[Change] = field(default_factory=list)
    leases: list[MemoryLease] = field(default_factory=list)

    def put(self, key: str, value: str, lease: MemoryLease | None) -> int:
        self.revision += 1
        before = self.items.get(key)
        created = before.create_revision if before else self.revision
        self.items[key] = KeyValue(key, value, created, self.revision)
        self.owner.pop(key, None)
        if lease is not None:
            self.owner[key] = lease
        self._note(Change("put", key, value, self.revision))
        self.changed.notify_all()
        return self.revision

    def delete(self, keys: list[str]) -> int:
        """Delete keys at one revision, as etcd does."""
        if keys:
            self.revision += 1
            for key in sorted(keys):
                del self.items[key]
                self.owner.pop(key, None)
                self._note(Change("delete", key, None, self.revision))
            self.changed.notify_all()
        return len(keys)

    def _note(self, change: Change) -> None:
        self.history.append(change)
        if self.most_changes is not None and len(self.history) >= 2 * self.most_changes:
            surplus = len(self.history) - self.most_changes
            self.compacted = self.history[surplus - 1].revision
            del self.history[:surplus]

    def drop(self, lease: MemoryLease) -> None:
        self.leases.remove(lease)
        self.delete([key for key, owner in self.owner.items() if owner is lease])
        lease.lost.set()

    def expire(self) -> float | None:
        """Drop expired leases; return the seconds until the next one expires, or None."""
        now = self.clock()
        for lease in [one for one in self.leases if one.deadline is not None and one.deadline <= now]:
            self.drop(lease)
        pending = [one.deadline for one in self.leases if one.deadline is not None]
        return min(pending) - now if pending else None


class MemoryLease(Lease):
    """A lease that lasts until it is revoked, or for its time to live after `abandon` or the last `renew`."""

    def __init__(self, shared: _Shared, ttl: float) -> None:
        self.ttl = ttl
        self.lost = threading.Event()
        self.deadline: float | None = None
        self.shared = shared

    def revoke(self) -> None:
        """End the lease and delete its keys; do nothing if it is lost already."""
        with self.shared.changed:
            if self in self.shared.leases:
                self.shared.drop(self)

    def abandon(self) -> None:
        """Let the lease expire after its time to live, as if this process had died."""
        with self.shared.changed:
            if self.deadline is None:
                self.deadline = self.shared.clock() + self.ttl
                self.shared.changed.notify_all()

    def renew(self) -> bool:
        """Let the lease expire after its time to live from now; return False if it is lost already."""
        with self.shared.changed:
            self.shared.expire()
            if self not in self.shared.leases:
                return False
            self.deadline = self.shared.clock() + self.ttl
            self.shared.changed.notify_all()
            return True

    def remaining(self) -> float:
        """Return the seconds for which the lease is certain to last."""
        if self.lost.is_set():
            return 0.0
        return self.ttl if self.deadline is None else max(0.0, self.deadline - self.shared.clock())


class MemoryWatch(Watch):
    """A watch that reads the shared history from its own position on."""

    def __init__(self, shared: _Shared, prefix: str, start: int) -> None:
        self.shared = shared
        self._prefix = prefix
        self._next = start
        self._closed = self._finishing = False

    def __iter__(self) -> Iterator[Change]:
        while True:
            changes = self._wait()
            if changes is None:
                return
            yield from changes

    def _wait(self) -> list[Change] | None:
        shared = self.shared
        with shared.changed:
            while not self._closed:
                due = shared.expire()
                if self._next <= shared.compacted:
                    raise CompactedError(
                        f"changes of {self._prefix!r} from revision {self._next} on were asked for, "
                        f"but the store has forgotten those up to {shared.compacted}"
                    )
                first = bisect.bisect_left(shared.history, self._next, key=lambda change: change.revision)
                self._next = max(self._next, shared.revision + 1)
                found = [one for one in shared.history[first:] if one.key.startswith(self._prefix)]
                if found:
                    return found
                if self._finishing:
                    return None
                shared.changed.wait(due)
        return None

    def finish(self) -> None:
        """End the iteration after it has yielded all changes made so far."""
        with self.shared.changed:
            self._finishing = True
            self.shared.changed.notify_all()

    def close(self) -> None:
        """End the iteration, even while another thread waits in it."""
        with self.shared.changed:
            self._closed = True
            self.shared.changed.notify_all()


class MemoryStore(Store):
    """A client of a store in memory; `base` lists the guarantees of its methods.

    Args:
        clock: monotonic seconds; leases expire by it.
        most_changes: least number of changes kept for watches that begin at an earlier revision; None: all.
    """

    def __init__(
        self,
        clock: Clock = time.monotonic,
        *,
        most_changes: int | None = None,
        shared: _Shared | None = None,
    ) -> None:
        self.shared = shared or _Shared(clock, most_changes=most_changes)
        self._leases: list[MemoryLease] = []
        self._watches: list[MemoryWatch] = []

    def client(self) -> MemoryStore:
        """Return another client of the same store."""
        return MemoryStore(shared=self.shared)

    def get(self, key: str) -> KeyValue | None:
        """Return the key, or None if it does not exist."""
        with self.shared.changed:
            self.shared.expire()
            return self.shared.items.get(key)

    def range(self, prefix: str) -> Snapshot:
        """Return every key that begins with `prefix`, sorted, as of one revision."""
        with self.shared.changed:
            self.shared.expire()
            found = [item for key, item in sorted(self.shared.items.items()) if key.startswith(prefix)]
            return Snapshot(tuple(found), self.shared.revision, prefix)

    def put(self, key: str, value: str, lease: Lease | None = None) -> int:
        """Write the key whatever it held before; return the new revision."""
        with self.shared.changed:
            self.shared.expire()
            return self.shared.put(key, value, self._held(lease))

    def compare_and_swap(
        self, key: str, value: str | None, expected_revision: int, lease: Lease | None = None
    ) -> int | None:
        """Write the key (None: delete it) if its mod_revision is the expected one.

        Returns the new revision, or None if the comparison failed.
        """
        with self.shared.changed:
            self.shared.expire()
            held = self._held(lease)
            before = self.shared.items.get(key)
            if (before.mod_revision if before else 0) != expected_revision:
                return None
            if value is not None:
                return self.shared.put(key, value, held)
            if before:
                self.shared.delete([key])
            return self.shared.revision

    def delete(self, key: str) -> bool:
        """Delete one key; return whether it existed."""
        with self.shared.changed:
            self.shared.expire()
            return self.shared.delete([key] if key in self.shared.items else []) > 0

    def delete_prefix(self, prefix: str) -> int:
        """Delete every key that begins with `prefix`; return how many there were."""
        with self.shared.changed:
            self.shared.expire()
            return self.shared.delete([key for key in self.shared.items if key.startswith(prefix)])

    def lease(self, ttl: float) -> MemoryLease:
        """Return a new lease of `ttl` seconds, which lasts until it is revoked or abandoned."""
        lease = MemoryLease(self.shared, ttl)
        with self.shared.changed:
            self.shared.leases.append(lease)
        self._leases.append(lease)
        return lease

    def watch(self, prefix: str, start_revision: int = 0) -> MemoryWatch:
        """Return the changes under `prefix` from `start_revision` on (0: from now on)."""
        with self.shared.changed:
            watch = MemoryWatch(self.shared, prefix, start_revision or self.shared.revision + 1)
        self._watches.append(watch)
        return watch

    def close(self) -> None:
        """Revoke the client's leases and end its watches."""
        for watch in self._watches:
            watch.close()
        for lease in self._leases:
            if lease.deadline is None:  # an abandoned lease expires by itself
                lease.revoke()

    def expire(self) -> None:
        """Drop leases that have expired by the clock; every operation does this, too."""
        with self.shared.changed:
            self.shared.expire()

    def _held(self, lease: Lease | None) -> MemoryLease | None:
        if lease is None:
            return None
        if not isinstance(lease, MemoryLease) or lease not in self.shared.leases:
            raise LeaseLostError()
        return lease
