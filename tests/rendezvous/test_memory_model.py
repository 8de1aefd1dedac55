"""The memory store against a model of what a store is, step by step."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from compacted import compact
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from adaptdl_elastic.rendezvous.store.base import CompactedError, LeaseLostError
from adaptdl_elastic.rendezvous.store.memory import MemoryLease, MemoryStore, MemoryWatch

KEYS = st.sampled_from(["a", "a/1", "a/2", "a/10", "b/1", "é/1"])
PREFIXES = st.sampled_from(["", "a", "a/", "a/1", "b/", "c"])
VALUES = st.text(max_size=3)


@dataclass
class ModelLease:
    real: MemoryLease
    deadline: float | None = None
    lost: bool = False


@dataclass
class Entry:
    value: str
    created: int
    modified: int
    lease: ModelLease | None = None


@dataclass
class ModelWatch:
    real: MemoryWatch
    prefix: str
    start: int
    seen: list[tuple[str, str | None]] = field(default_factory=list)


class StoreMachine(RuleBasedStateMachine):
    leases = Bundle("leases")
    watches = Bundle("watches")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.store = MemoryStore(clock=lambda: self.now)
        self.other = self.store.client()
        self.entries: dict[str, Entry] = {}
        self.changes: list[tuple[int, str, str | None]] = []
        self.all_leases: list[ModelLease] = []
        self.revision = self.store.range("").revision
        self.compacted = 0

    def expect_put(self, key: str, value: str, lease: ModelLease | None, revision: int | None) -> None:
        self.revision += 1
        assert revision == self.revision
        before = self.entries.get(key)
        self.entries[key] = Entry(value, before.created if before else revision, revision, lease)
        self.changes.append((revision, key, value))

    def expect_delete(self, keys: list[str]) -> None:
        if keys:
            self.revision += 1
            for key in sorted(keys):
                del self.entries[key]
                self.changes.append((self.revision, key, None))

    def expect_drop(self, lease: ModelLease) -> None:
        lease.lost = True
        self.expect_delete([key for key, entry in self.entries.items() if entry.lease is lease])

    @rule(key=KEYS, value=VALUES)
    def put(self, key, value):
        self.expect_put(key, value, None, self.store.put(key, value))

    @rule(key=KEYS, value=VALUES, lease=leases)
    def put_leased(self, key, value, lease):
        if lease.lost:
            with pytest.raises(LeaseLostError):
                self.store.put(key, value, lease.real)
        else:
            self.expect_put(key, value, lease, self.store.put(key, value, lease.real))

    @rule(key=KEYS, value=st.none() | VALUES, off=st.sampled_from([0, 0, 0, 1, -1]))
    def compare_and_swap(self, key, value, off):
        entry = self.entries.get(key)
        current = entry.modified if entry else 0
        expected = max(0, current + off)
        result = self.other.compare_and_swap(key, value, expected)
        if expected != current:
            assert result is None
        elif value is not None:
            self.expect_put(key, value, None, result)
        else:
            self.expect_delete([key] if entry else [])
            assert result == self.revision

    @rule(key=KEYS)
    def delete(self, key):
        assert self.store.delete(key) == (key in self.entries)
        self.expect_delete([key] if key in self.entries else [])

    @rule(prefix=PREFIXES)
    def delete_prefix(self, prefix):
        keys = [key for key in self.entries if key.startswith(prefix)]
        assert self.other.delete_prefix(prefix) == len(keys)
        self.expect_delete(keys)

    @rule(target=leases, ttl=st.sampled_from([1.0, 5.0]))
    def lease(self, ttl):
        made = ModelLease(self.store.lease(ttl))
        self.all_leases.append(made)
        return made

    @rule(lease=leases)
    def abandon(self, lease):
        lease.real.abandon()
        if lease.deadline is None:
            lease.deadline = self.now + lease.real.ttl

    @rule(lease=leases)
    def renew(self, lease):
        assert lease.real.renew() == (not lease.lost)
        if not lease.lost:
            lease.deadline = self.now + lease.real.ttl

    @rule(lease=leases)
    def revoke(self, lease):
        lease.real.revoke()
        if not lease.lost:
            self.expect_drop(lease)

    @rule(seconds=st.sampled_from([0.5, 1.0, 4.0]))
    def time_passes(self, seconds):
        self.now += seconds
        self.store.expire()
        for lease in self.all_leases:
            if not lease.lost and lease.deadline is not None and lease.deadline <= self.now:
                self.expect_drop(lease)

    @rule(target=watches, prefix=PREFIXES, back=st.integers(0, 5))
    def watch(self, prefix, back):
        start = max(1, self.revision + 1 - back)
        return ModelWatch(self.other.watch(prefix, start), prefix, start)

    @rule(watch=consumes(watches))
    def read_watch(self, watch):
        wanted = [
            change
            for change in self.changes
            if change[0] >= watch.start and change[1].startswith(watch.prefix)
        ]
        if watch.start <= self.compacted:
            with pytest.raises(CompactedError):
                next(iter(watch.real))
            return
        found = iter(watch.real)
        got = [next(found) for _ in wanted]
        assert [(one.revision, one.key, one.value) for one in got] == wanted
        assert all((one.kind == "delete") == (one.value is None) for one in got)
        watch.real.close()
        assert list(found) == []

    @rule()
    def compact(self):
        compact(self.store)
        self.compacted = self.revision

    @invariant()
    def the_same_is_there(self):
        snapshot = self.other.range("")
        assert snapshot.revision == self.revision
        assert {
            item.key: (item.value, item.create_revision, item.mod_revision) for item in snapshot.items
        } == {key: (entry.value, entry.created, entry.modified) for key, entry in self.entries.items()}
        assert [item.key for item in snapshot.items] == sorted(self.entries)
        assert all(lease.real.lost.is_set() == lease.lost for lease in self.all_leases)


TestMemoryStore = StoreMachine.TestCase
TestMemoryStore.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
