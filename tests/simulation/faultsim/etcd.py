"""The store's server: revisions, compare-and-swap, leases, watches, compaction, as etcd has them.

It runs in the kernel's events, so every operation is atomic. It can be down for a while (`go_down`), as a
server that is stopped: leases go on running out meanwhile, or begin again with its return, as they do when
etcd has chosen another leader. Nothing that was written is ever lost.

Not modelled: data that are replaced by older ones, users and passwords, members that lag behind.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass, field

from adaptdl_elastic.rendezvous.store.base import Change, KeyValue, Snapshot
from faultsim.kernel import Kernel

LEASE_LOOK_SECONDS = 0.5  # between two looks of the server for leases that have run out


@dataclass
class ServerLease:
    """A lease as the server knows it."""

    number: int
    ttl: float
    deadline: float  # kernel time
    keys: set[str] = field(default_factory=set)


class Stream:
    """A watch as the server knows it: what it has sent so far."""

    def __init__(self, prefix: str, start: int, deliver: Callable[[list[Change]], None]) -> None:
        self.prefix, self.next, self.deliver = prefix, start, deliver


class LeaseGoneError(Exception):
    """The server does not know that lease."""


class Etcd:
    """One cluster's etcd."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.up = True
        self.revision = 1
        self.compacted = 0  # changes up to here are forgotten
        self.items: dict[str, KeyValue] = {}
        self.holders: dict[str, ServerLease] = {}  # key → lease
        self.leases: dict[int, ServerLease] = {}
        self.history: list[Change] = []  # all of it: checks read what watches can not any more
        self.streams: list[Stream] = []
        self.listeners: list[Callable[[Change], None]] = []
        kernel.after(LEASE_LOOK_SECONDS, self._look_at_leases)

    # -- operations

    def get(self, key: str) -> KeyValue | None:
        """One key."""
        return self.items.get(key)

    def range(self, prefix: str) -> Snapshot:
        """All keys that begin with `prefix`."""
        found = tuple(self.items[key] for key in sorted(self.items) if key.startswith(prefix))
        return Snapshot(found, self.revision, prefix)

    def put(self, key: str, value: str, lease: int | None) -> int:
        """Write; LeaseGoneError when the lease is not known."""
        holder = self._lease(lease)
        self.revision += 1
        before = self.items.get(key)
        created = before.create_revision if before else self.revision
        self.items[key] = KeyValue(key, value, created, self.revision)
        self._let_go(key)
        if holder is not None:
            self.holders[key] = holder
            holder.keys.add(key)
        self._changed([Change("put", key, value, self.revision)])
        return self.revision

    def swap(self, key: str, value: str | None, expected: int, lease: int | None) -> int | KeyValue | None:
        """Compare and swap: the new revision, else what stands there (None: nothing)."""
        self._lease(lease)
        before = self.items.get(key)
        if (before.mod_revision if before else 0) != expected:
            return before
        if value is not None:
            return self.put(key, value, lease)
        self.delete([key])
        return self.revision

    def delete(self, keys: list[str]) -> int:
        """Delete keys at one revision; how many there were."""
        found = sorted(key for key in keys if key in self.items)
        if found:
            self.revision += 1
            for key in found:
                del self.items[key]
                self._let_go(key)
            self._changed([Change("delete", key, None, self.revision) for key in found])
        return len(found)

    def delete_prefix(self, prefix: str) -> int:
        """Delete all keys that begin with `prefix`."""
        return self.delete([key for key in self.items if key.startswith(prefix)])

    def grant(self, ttl: float) -> int:
        """A new lease's number."""
        number = next(self.kernel.numbers)
        self.leases[number] = ServerLease(number, ttl, self.kernel.now + ttl)
        return number

    def keep_alive(self, number: int) -> bool:
        """Renew a lease; whether it is known."""
        lease = self.leases.get(number)
        if lease is None:
            return False
        lease.deadline = self.kernel.now + lease.ttl
        return True

    def revoke(self, number: int) -> None:
        """End a lease, and its keys with it."""
        lease = self.leases.pop(number, None)
        if lease is not None:
            self.delete(sorted(lease.keys))

    def compact(self) -> None:
        """Forget the history up to now."""
        self.compacted = self.revision

    # -- watches

    def changes(self, prefix: str, first: int) -> list[Change]:
        """What has changed under `prefix` from revision `first` on."""
        start = bisect.bisect_left(self.history, first, key=lambda change: change.revision)
        return [change for change in self.history[start:] if change.key.startswith(prefix)]

    def _changed(self, changes: list[Change]) -> None:
        self.history += changes
        for change in changes:
            self.kernel.note(f"store {change.revision} {change.kind} {change.key} {change.value or ''}")
            for listener in self.listeners:
                listener(change)
        for stream in list(self.streams):
            mine = [change for change in changes if change.key.startswith(stream.prefix)]
            if mine:
                stream.deliver(mine)

    # -- leases, and being down

    def _lease(self, number: int | None) -> ServerLease | None:
        if number is None:
            return None
        if number not in self.leases:
            raise LeaseGoneError
        return self.leases[number]

    def _let_go(self, key: str) -> None:
        holder = self.holders.pop(key, None)
        if holder is not None:
            holder.keys.discard(key)

    def _look_at_leases(self) -> None:
        if self.up:
            for lease in [one for one in self.leases.values() if one.deadline <= self.kernel.now]:
                self.kernel.note(f"lease {lease.number} runs out")
                self.revoke(lease.number)
        self.kernel.after(LEASE_LOOK_SECONDS, self._look_at_leases)

    def go_down(self) -> None:
        """Answer nobody."""
        self.up = False
        self.kernel.note("the store goes down")

    def come_back(self, renew: bool) -> None:
        """Answer again; `renew`: leases have their whole time again."""
        self.up = True
        self.kernel.note(f"the store is back, leases {'begin again' if renew else 'have gone on'}")
        if renew:
            for lease in self.leases.values():
                lease.deadline = max(lease.deadline, self.kernel.now + lease.ttl)
