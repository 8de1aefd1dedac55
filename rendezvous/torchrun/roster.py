"""The store's side of a torchrun round: this node's entry, and a view of everybody's that is kept current."""

from __future__ import annotations

import logging
import math
import threading
import time
from dataclasses import replace
from typing import TypeVar

from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import MalformedRecordError, MasterRecord, decode, encode
from adaptdl_elastic.rendezvous.store.base import (
    Change,
    CompactedError,
    KeyValue,
    Lease,
    LeaseLostError,
    Store,
    StoreAuthError,
    StoreError,
    Watch,
)
from adaptdl_elastic.rendezvous.torchrun import membership as m

logger = logging.getLogger(__name__)

R = TypeVar("R")

_CLOSED_FOR = 60.0  # seconds that the end of a run is remembered
_RETRY = 0.2


class Roster:
    """Two threads follow the store: one reads what changes, one keeps this node's entry there."""

    def __init__(
        self,
        store: Store,
        keys: Keys,
        run_id: str,
        member: m.Member,
        settings: m.MembershipSettings,
        ttl: float,
    ) -> None:
        self._store = store
        self._ttl = ttl
        self._settings = settings
        self._prefix = keys.torchrun(run_id)
        self._nodes = keys.torchrun(run_id, "nodes", "")
        self._round_key = keys.torchrun(run_id, "round")
        self._closed_key = keys.torchrun(run_id, "closed")
        self._masters = keys.torchrun(run_id, "rounds", "")
        self._member = member
        self._key = self._nodes + member.id
        self._lease: Lease | None = None
        self._changed = threading.Condition()
        self._writing = threading.Lock()
        self._view = m.View()
        self._round_revision = 0
        self._found: dict[int, MasterRecord] = {}
        self._closing = threading.Event()
        self._watch: Watch | None = None
        self._error: StoreError | None = None
        self._threads = [
            threading.Thread(target=self._follow, name="roster-watch", daemon=True),
            threading.Thread(target=self._keep, name="roster-lease", daemon=True),
        ]

    def start(self) -> None:
        """Read what is there, wait for the end of an earlier run, and register."""
        revision = self._read()
        if self._view.closed is not None:
            revision = self._wait_for_the_end_of_the_last_run(revision)
        self._next = revision + 1
        self._write()
        for thread in self._threads:
            thread.start()

    def view(self) -> m.View:
        """What the store holds now; StoreError when it can no longer be followed."""
        with self._changed:
            if self._error is not None:
                raise self._error
            return self._view

    def wait_for_change(self, seen: m.View, until: float) -> bool:
        """Whether the view has become another than `seen`, by `until` (monotonic)."""
        with self._changed:
            left = None if until == math.inf else max(0.0, until - time.monotonic())
            return self._changed.wait_for(lambda: self._view is not seen or bool(self._error), left)

    def wait_for_round(self, after: int) -> None:
        """Say that this node waits for a round after that one, and see it said."""
        number = max(after, self.view().number)
        self._member = replace(self._member, after=number)
        self._write()
        with self._changed:  # until the watch has brought it: what is decided next must know
            self._changed.wait_for(
                lambda: bool(self._error) or self._mine_is_at_least(number), timeout=self._ttl
            )

    def _mine_is_at_least(self, number: int) -> bool:
        mine = self._view.members.get(self._member.id)
        return mine is not None and mine.after >= number

    def propose(self, round_: m.MembershipRound) -> None:
        """Write the next round, unless somebody else has; the view will tell."""
        seen = self.view()
        if seen.number + 1 != round_.number:
            return
        done = self._store.compare_and_swap(self._round_key, encode(round_), self._round_revision)
        if done is not None:
            logger.info("round %d has %d nodes", round_.number, len(round_.members))
        self.wait_for_change(seen, time.monotonic() + 1.0)

    def publish_master(self, master: MasterRecord) -> None:
        """Where the members of a round meet."""
        self._store.put(f"{self._masters}{master.generation}/master", encode(master), self._lease)

    def wait_for_master(self, round_: m.MembershipRound) -> MasterRecord | None:
        """Where this round meets; None when it will not."""
        while True:
            with self._changed:
                if found := self._found.get(round_.number):
                    return found
                seen = self._view
            if not self.is_whole(round_):
                return None
            self.wait_for_change(seen, time.monotonic() + 0.5)

    def is_whole(self, round_: m.MembershipRound) -> bool:
        """Whether it is still the current one, and every member is coming."""
        view, now = self.view(), time.monotonic()
        if view.number != round_.number or view.closed is not None or m.gone(view, self._settings, now):
            return False
        return not any(m.is_waiting(view, view.members[one]) for one in round_.members if one in view.members)

    def close_run(self, ok: bool) -> None:
        """The run is over; whoever waits learns of it. Failure goes before success."""
        lease = self._store.lease(_CLOSED_FOR)
        text = encode(m.Closed(self._member.id, ok))
        while True:
            found = self._store.get(self._closed_key)
            if found is not None and ok and _is_closed(found):
                break
            revision = found.mod_revision if found else 0
            if self._store.compare_and_swap(self._closed_key, text, revision, lease) is not None:
                break
        lease.abandon()

    def leave(self) -> None:
        """Say so and vanish: the others need not wait to see whether this node comes back."""
        self._closing.set()
        self._member = replace(self._member, leaving=True)
        try:
            if self._lease is not None and not self._lease.lost.is_set():
                self._store.put(self._key, encode(self._member), self._lease)
                self._lease.revoke()
        except StoreError as error:
            logger.debug("left without a word: %s", error)
        if self._watch is not None:
            self._watch.close()

    # What follows keeps the entry and the view.

    def _write(self) -> None:
        with self._writing:
            for _ in range(2):
                if self._lease is None or self._lease.lost.is_set():
                    self._lease = self._store.lease(self._ttl)
                try:
                    self._store.put(self._key, encode(self._member), self._lease)
                    return
                except LeaseLostError:
                    continue

    def _keep(self) -> None:
        while not self._closing.is_set():
            lease = self._lease
            if lease is None or not lease.lost.wait(_RETRY):
                continue
            if self._closing.is_set():
                return
            try:
                self._write()
                logger.info("registered again: the store had not heard of this node in time")
            except StoreError as error:
                logger.debug("not registered again yet: %s", error)
                self._closing.wait(_RETRY)

    def _follow(self) -> None:
        while not self._closing.is_set():
            try:
                with self._store.watch(self._prefix, self._next) as watch:
                    self._watch = watch
                    for change in watch:
                        self._next = change.revision
                        self._learn(change)
                return
            except CompactedError:
                self._catch_up()
            except StoreAuthError as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            except StoreError as error:
                logger.debug("watch: %s", error)
                self._closing.wait(_RETRY)

    def _catch_up(self) -> None:
        try:
            self._next = self._read() + 1
        except StoreError as error:
            logger.debug("range: %s", error)
            self._closing.wait(_RETRY)

    def _read(self) -> int:
        snapshot = self._store.range(self._prefix)
        there = {item.key for item in snapshot.items}
        for name in list(self._view.members):
            if self._nodes + name not in there:
                self._learn(Change("delete", self._nodes + name, None, snapshot.revision))
        if self._closed_key not in there:
            self._learn(Change("delete", self._closed_key, None, snapshot.revision))
        for item in snapshot.items:
            self._learn(Change("put", item.key, item.value, item.mod_revision), item)
        return snapshot.revision

    def _learn(self, change: Change, item: KeyValue | None = None) -> None:
        try:
            with self._changed:
                self._take(change, item.create_revision if item else change.revision)
                due = m.is_due(self._view, self._settings)
                since = min(self._view.due_since, time.monotonic()) if due else math.inf
                if since != self._view.due_since:
                    self._view = replace(self._view, due_since=since)
                self._changed.notify_all()
        except MalformedRecordError as error:
            logger.warning("ignored what is not ours: %s", error)

    def _take(self, change: Change, created: int) -> None:
        key, now = change.key, time.monotonic()
        if key.startswith(self._nodes):
            self._take_member(key.removeprefix(self._nodes), change, created, now)
        elif key == self._round_key and change.value is not None:
            self._round_revision = change.revision  # of garbage, too: the next round takes its place
            found = decode(m.MembershipRound, change.value, key)
            self._view = replace(self._view, round=found, due_since=math.inf)
            self._found = {number: one for number, one in self._found.items() if number >= found.number}
        elif key == self._closed_key:
            closed = decode(m.Closed, change.value, key) if change.value is not None else None
            self._view = replace(self._view, closed=closed)
        elif key.startswith(self._masters) and change.value is not None:
            master = decode(MasterRecord, change.value, key)
            self._found[master.generation] = master
            self._view = replace(self._view)

    def _take_member(self, name: str, change: Change, created: int, now: float) -> None:
        view = self._view
        members, order, missing = dict(view.members), dict(view.order), dict(view.missing_since)
        if change.value is None:
            left = members.pop(name, None)
            order.pop(name, None)
            if left is not None:
                missing[name] = -math.inf if left.leaving else now
            self._view = replace(view, members=members, order=order, missing_since=missing)
            return
        member = decode(m.Member, change.value, change.key)
        missing.pop(name, None)
        arrived = name not in members
        members[name] = member
        order.setdefault(name, created)
        self._view = replace(
            view,
            members=members,
            order=order,
            missing_since=missing,
            last_arrival=now if arrived else view.last_arrival,
        )

    def _wait_for_the_end_of_the_last_run(self, revision: int) -> int:
        """An id can be used again once the agents of its last run are gone."""
        logger.info("this id's last run is over; starting it anew when its nodes have left")
        timer: threading.Timer | None = None
        while self._view.members:
            with self._store.watch(self._prefix, revision + 1) as watch:
                timer = threading.Timer(2 * self._ttl, watch.close)
                timer.daemon = True
                timer.start()
                for change in watch:
                    revision = change.revision
                    self._learn(change)
                    if not self._view.members:
                        break
            timer.cancel()
            if not timer.is_alive() and self._view.members:
                break  # they are stuck: not ours to wait for
        self._store.delete(self._closed_key)
        self._view = m.View(round=self._view.round)
        return self._read()


def _is_closed(item: KeyValue) -> bool:
    try:
        decode(m.Closed, item.value, item.key)
    except MalformedRecordError:
        return False
    return True
