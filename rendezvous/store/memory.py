"""The store as a dictionary of this process: for a standalone job (`local.store_server`), and for tests.

`MemoryStore()` is a store of its own; `store.client()` is another client of the same one, with its own
leases and watches, as a second process would be. Time is injected: a lease only runs out against
`clock`, and only once it has been abandoned, as if its process had died, or when it was `renewed` and then
was not again.
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
    """What all clients see. Everything but `changed` is guarded by it."""

    clock: Clock
    changed: threading.Condition = field(default_factory=threading.Condition)
    revision: int = 1
    compacted: int = 0  # changes up to here are forgotten
    most_changes: int | None = None  # how many changes are kept for watches, at least; None: all
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
        """All of them at one revision, as etcd does."""
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
        """Drop what has run out; seconds until the next one does."""
        now = self.clock()
        for lease in [one for one in self.leases if one.deadline is not None and one.deadline <= now]:
            self.drop(lease)
        pending = [one.deadline for one in self.leases if one.deadline is not None]
        return min(pending) - now if pending else None


class MemoryLease(Lease):
    """Lives until it is revoked, or for its time to live after it was abandoned or last renewed."""

    def __init__(self, shared: _Shared, ttl: float) -> None:
        self.ttl = ttl
        self.lost = threading.Event()
        self.deadline: float | None = None
        self._shared = shared

    def revoke(self) -> None:
        """Let go: its keys vanish now. Harmless when already lost."""
        with self._shared.changed:
            if self in self._shared.leases:
                self._shared.drop(self)

    def abandon(self) -> None:
        """Keep it alive no longer, as if this process had died."""
        with self._shared.changed:
            if self.deadline is None:
                self.deadline = self._shared.clock() + self.ttl
                self._shared.changed.notify_all()

    def renew(self) -> bool:
        """Hold it for its time to live from now on and no longer; False when it is lost already."""
        with self._shared.changed:
            self._shared.expire()
            if self not in self._shared.leases:
                return False
            self.deadline = self._shared.clock() + self.ttl
            self._shared.changed.notify_all()
            return True

    def remaining(self) -> float:
        """Seconds for which it is certain to be held."""
        if self.lost.is_set():
            return 0.0
        return self.ttl if self.deadline is None else max(0.0, self.deadline - self._shared.clock())


class MemoryWatch(Watch):
    """Reads the history from where it has come to."""

    def __init__(self, shared: _Shared, prefix: str, start: int) -> None:
        self._shared = shared
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
        shared = self._shared
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
        """End the iteration once it has yielded every change that there was until now."""
        with self._shared.changed:
            self._finishing = True
            self._shared.changed.notify_all()

    def close(self) -> None:
        """End the iteration, also one that waits in another thread."""
        with self._shared.changed:
            self._closed = True
            self._shared.changed.notify_all()


class MemoryStore(Store):
    """See the module's docstring; `store.Store` for what every method promises.

    most_changes: how many changes are kept for watches that come late, at least; None: all.
    """

    def __init__(
        self,
        clock: Clock = time.monotonic,
        *,
        most_changes: int | None = None,
        _shared: _Shared | None = None,
    ) -> None:
        self._shared = _shared or _Shared(clock, most_changes=most_changes)
        self._leases: list[MemoryLease] = []
        self._watches: list[MemoryWatch] = []

    def client(self) -> MemoryStore:
        """Another client of the same store."""
        return MemoryStore(_shared=self._shared)

    def get(self, key: str) -> KeyValue | None:
        """The key, or None when it does not exist."""
        with self._shared.changed:
            self._shared.expire()
            return self._shared.items.get(key)

    def range(self, prefix: str) -> Snapshot:
        """Every key that begins with `prefix`, sorted, as of one revision."""
        with self._shared.changed:
            self._shared.expire()
            found = [item for key, item in sorted(self._shared.items.items()) if key.startswith(prefix)]
            return Snapshot(tuple(found), self._shared.revision)

    def put(self, key: str, value: str, lease: Lease | None = None) -> int:
        """Write whatever was there before; the new revision."""
        with self._shared.changed:
            self._shared.expire()
            return self._shared.put(key, value, self._held(lease))

    def compare_and_swap(
        self, key: str, value: str | None, expected_revision: int, lease: Lease | None = None
    ) -> int | None:
        """Write (None: delete) if the key's mod_revision is the expected one; the new revision or None."""
        with self._shared.changed:
            self._shared.expire()
            held = self._held(lease)
            before = self._shared.items.get(key)
            if (before.mod_revision if before else 0) != expected_revision:
                return None
            if value is not None:
                return self._shared.put(key, value, held)
            if before:
                self._shared.delete([key])
            return self._shared.revision

    def delete(self, key: str) -> bool:
        """Delete one key; whether it existed."""
        with self._shared.changed:
            self._shared.expire()
            return self._shared.delete([key] if key in self._shared.items else []) > 0

    def delete_prefix(self, prefix: str) -> int:
        """Delete every key that begins with `prefix`; how many there were."""
        with self._shared.changed:
            self._shared.expire()
            return self._shared.delete([key for key in self._shared.items if key.startswith(prefix)])

    def lease(self, ttl: float) -> MemoryLease:
        """A new lease of `ttl` seconds, alive until it is revoked or abandoned."""
        lease = MemoryLease(self._shared, ttl)
        with self._shared.changed:
            self._shared.leases.append(lease)
        self._leases.append(lease)
        return lease

    def watch(self, prefix: str, start_revision: int = 0) -> MemoryWatch:
        """Changes under `prefix` from `start_revision` on (0: from now on)."""
        with self._shared.changed:
            watch = MemoryWatch(self._shared, prefix, start_revision or self._shared.revision + 1)
        self._watches.append(watch)
        return watch

    def close(self) -> None:
        """Revoke its leases and end its watches."""
        for watch in self._watches:
            watch.close()
        for lease in self._leases:
            if lease.deadline is None:  # an abandoned one runs out by itself
                lease.revoke()

    def compact(self) -> None:
        """Forget the history: a watch that has not come to the present raises CompactedError."""
        with self._shared.changed:
            self._shared.compacted = self._shared.revision
            self._shared.history.clear()

    def expire(self) -> None:
        """Look at the clock now: what has run out goes (every operation does this too)."""
        with self._shared.changed:
            self._shared.expire()

    def _held(self, lease: Lease | None) -> MemoryLease | None:
        if lease is None:
            return None
        if not isinstance(lease, MemoryLease) or lease not in self._shared.leases:
            raise LeaseLostError("the lease is lost: take a new one and put the key again")
        return lease
