"""The store's side of a torchrun round: this node's entry, and a current view of all entries.

One thread follows the store, and one keeps this node's entry in it. Both go on until the store is back if it
is away or refuses them. The thread that waits for a round never waits for the store itself, only for what
these two threads report, and so never longer than its deadline.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import MasterRecord, decode, encode
from adaptdl_elastic.rendezvous.store.base import (
    Change,
    KeyValue,
    Lease,
    LeaseLostError,
    Snapshot,
    Store,
    StoreError,
    StoreUnavailableError,
    read_record,
)
from adaptdl_elastic.rendezvous.store.follow import Follow
from adaptdl_elastic.rendezvous.store.prefix_cache import Entry, PrefixCache
from adaptdl_elastic.rendezvous.torchrun import membership as m

logger = logging.getLogger(__name__)

_CLOSED_SECONDS = 60.0  # how long the end of a run is kept after the agent that wrote it has left
_RETRY_SECONDS = 0.2
_LOOK_SECONDS = 0.5  # interval of checking conditions, since some become true by the clock alone
# first part of a key of a run → its record
_KINDS: dict[str, type[Any]] = {
    "nodes": m.Member,
    "round": m.MembershipRound,
    "closed": m.Closed,
    "rounds": MasterRecord,
}


class Roster:
    """This node's entry in the store, and the view of all entries."""

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
        self._keys = keys
        self._ttl = ttl
        self._settings = settings
        self._nodes = keys.torchrun(run_id, "nodes", "")
        self._round_key = keys.torchrun(run_id, "round")
        self._closed_key = keys.torchrun(run_id, "closed")
        self._masters = keys.torchrun(run_id, "rounds", "")
        self._member = member
        self._key = self._nodes + member.id
        self._wanted: m.Member | None = None  # what the entry should say; None: no entry yet
        self._written: m.Member | None = None
        self.lease: Lease | None = None
        self._closed_lease: Lease | None = None
        self._closed_revision = 0  # revision at which this node wrote the end of the run
        self._changed = threading.Condition()
        self._writing = threading.Lock()
        self._wake = threading.Event()
        self._view = m.View()
        self._cache = PrefixCache[Any](self._decode)
        self._found: dict[int, MasterRecord] = {}
        self._closing = threading.Event()
        self._news = Follow(store, keys.torchrun(run_id), self._note)
        self._trouble: StoreError | None = None  # present problem of the store

    def start(self) -> None:
        """Read the store, and follow it from now on. StoreError if it cannot be read."""
        news = iter(self._news)
        self._learn(next(news))
        threading.Thread(target=self._follow, args=(news,), name="roster-watch", daemon=True).start()
        threading.Thread(target=self._keep, name="roster-entry", daemon=True).start()

    def view(self) -> m.View:
        """Return the last known content of the store."""
        with self._changed:
            return self._view

    @property
    def trouble(self) -> StoreError | None:
        """Why the store cannot be read or written now; None: it can."""
        with self._changed:
            return self._trouble

    def notify(self) -> None:
        """Wake the waiting threads to check their conditions again."""
        with self._changed:
            self._changed.notify_all()

    def wait_until(self, condition: Callable[[], bool], until: float) -> bool:
        """Wait until a condition holds, at most until `until` (monotonic); return whether it holds.

        The condition is checked after every change, and twice a second.
        """
        with self._changed:
            while not condition():
                left = until - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(min(left, _LOOK_SECONDS))
            return True

    def wait_for_change(self, seen: m.View, until: float) -> None:
        """Wait until the view differs from `seen`, at most until `until` (monotonic)."""
        self.wait_until(lambda: self._view is not seen, until)

    def await_end_of_last_run(self, until: float) -> m.Closed | None:
        """Wait until all agents of an ended run of the same id have left, so that the id can be used again.

        Returns:
            The end of that run if some of its agents are still there at `until`; else None.
        """
        if self._wanted is not None or self.view().closed is None:
            return None  # either this node is part of the run, or there is no ended run
        logger.info("the last run of this id is over; waiting for its nodes to leave")
        self.wait_until(lambda: self._view.closed is None or not self._is_held(), until)
        with self._changed:
            closed, revision = self._view.closed, self._revision(self._closed_key)
        if closed is None or self._is_held():
            return closed
        self._store.compare_and_swap(self._closed_key, None, revision)
        self.wait_until(lambda: self._view.closed is None, until)
        return self._view.closed

    def _is_held(self) -> bool:
        view = self._view
        there = any(not member.leaving for member in view.members.values())
        return there or (view.closed is not None and view.closed.held)

    def register(self, after: int, until: float) -> bool:
        """Announce that this node waits for a round after `after`.

        Returns whether the store shows the announcement in time.
        """
        with self._changed:
            wanted = replace(self._member, after=max(after, self._view.number))
            self._wanted = wanted
        self._wake.set()
        return self.wait_until(lambda: self._view.members.get(wanted.id) == wanted, until)

    def withdraw(self) -> None:
        """Stop waiting for a round, so that the others need not wait for this node."""
        with self._changed:
            if self._wanted is not None:
                self._wanted = replace(self._wanted, leaving=True)
        self._wake.set()

    def propose(self, round_: m.MembershipRound) -> None:
        """Write the next round, unless another node has; wait until the view shows it.

        Raises:
            StoreError: it is unknown whether the round was or will be written.
        """
        with self._changed:
            seen, revision = self._view, self._revision(self._round_key)
        if seen.number + 1 != round_.number:
            return
        if self._store.compare_and_swap(self._round_key, encode(round_), revision) is not None:
            logger.info("round %d has %d nodes", round_.number, len(round_.members))
        self.wait_until(lambda: self._view.number > seen.number, time.monotonic() + 1.0)

    def publish_master(self, master: MasterRecord) -> None:
        """Publish where the members of a round meet; StoreError if it cannot be written now."""
        self._store.put(f"{self._masters}{master.generation}/master", encode(master), self.lease)

    def master_of(self, round_: m.MembershipRound) -> MasterRecord | None:
        """Return where the members of a round meet, or None if that is unknown."""
        return self._found.get(round_.number)

    def close_run(self, ok: bool, until: float, *, leaving: bool) -> None:
        """End the run for every node. A failure overrides a success.

        Args:
            ok: whether it ended well.
            until: when to give up if the store is away (monotonic).
            leaving: whether this node leaves at once, so that the id can be used again without waiting for
                it.

        Raises:
            StoreError: the end could not be written.
        """
        while True:
            try:
                self._write_closed(m.Closed(self._member.id, ok, held=not leaving))
                return
            except (StoreUnavailableError, LeaseLostError):
                if time.monotonic() + _RETRY_SECONDS >= until:
                    raise
                self._closing.wait(_RETRY_SECONDS)

    def leave(self) -> None:
        """Mark this node's entry as leaving and delete it, so that the others need not wait for it."""
        self._closing.set()
        self._wake.set()
        with self._changed:
            self._view = replace(self._view)  # replaced by a copy, so that waiting threads check again
            self._changed.notify_all()
        try:
            with self._writing:
                if self.lease is not None and not self.lease.lost.is_set():
                    self._store.put(self._key, encode(replace(self._member, leaving=True)), self.lease)
                    self.lease.revoke()
            closed, ours = self._view.closed, self._closed_revision
            if ours and closed is not None and closed.held:
                text = encode(replace(closed, held=False))
                self._store.compare_and_swap(self._closed_key, text, ours, self._closed_lease)
        except StoreError as error:
            logger.debug("left without a word: %s", error)
        if self._closed_lease is not None:
            self._closed_lease.abandon()
        self._news.close()

    # Threads that keep the entry and the view

    def _write_closed(self, closed: m.Closed) -> None:
        found = self._store.get(self._closed_key)
        known = read_record(m.Closed, found)
        if known is None or (known.ok and not closed.ok):
            if self._closed_lease is None or self._closed_lease.lost.is_set():
                self._closed_lease = self._store.lease(_CLOSED_SECONDS)
            before = found.mod_revision if found else 0
            revision = self._store.compare_and_swap(
                self._closed_key, encode(closed), before, self._closed_lease
            )
            if revision is None:
                raise StoreUnavailableError("the end of the run was written by several nodes at once")
            self._closed_revision = revision
            known = closed
        with self._changed:
            self._view = replace(self._view, closed=known)
            self._changed.notify_all()

    def _keep(self) -> None:
        while not self._closing.is_set():
            with self._changed:
                wanted = self._wanted
            lapsed = self.lease is not None and self.lease.lost.is_set()
            if wanted is None or (wanted == self._written and not lapsed):
                self._wake.wait(_RETRY_SECONDS)
                self._wake.clear()
                continue
            try:
                self._write(wanted)
                self._note(None)
                if lapsed:
                    logger.info("registered again: the store had not heard of this node in time")
            except LeaseLostError:
                continue
            except StoreError as error:
                self._note(error)
                self._closing.wait(_RETRY_SECONDS)

    def _write(self, wanted: m.Member) -> None:
        with self._writing:
            if self._closing.is_set():
                return
            if self.lease is None or self.lease.lost.is_set():
                self.lease = self._store.lease(self._ttl)
            self._store.put(self._key, encode(wanted), self.lease)
            self._written = wanted

    def _follow(self, following: Iterator[Snapshot | Change]) -> None:
        for news in following:
            self._learn(news)
            self._note(None)

    def _note(self, trouble: StoreError | None) -> None:
        """Record the store's present problem, and log it once; raise one that prevents the first reading."""
        if trouble is not None and not self._cache.whole:
            raise trouble
        with self._changed:
            known, self._trouble = self._trouble, trouble
        if trouble is not None and known is None and not self._closing.is_set():
            logger.warning("the store does not answer as it should, asking again: %s", trouble)

    def _revision(self, key: str) -> int:
        """Return the revision of a key that the next write of it replaces, also if its value is invalid."""
        entry = self._cache.get(key)
        return 0 if entry is None else entry.item.mod_revision

    def _decode(self, item: KeyValue) -> Any:
        kind = _KINDS.get(self._keys.parse(item.key)[2])
        return None if kind is None else decode(kind, item.value, item.key)

    def _learn(self, news: Snapshot | Change) -> None:
        with self._changed:
            for key, _, entry in self._cache.take(news):
                if entry is None or entry.readable:
                    self._take(key, entry)
            view, now = self._view, time.monotonic()
            due = min(view.due_since, now) if m.is_due(view, self._settings) else math.inf
            enough = min(view.enough_since, now) if m.is_enough(view, self._settings) else math.inf
            if (due, enough) != (view.due_since, view.enough_since):
                self._view = replace(view, due_since=due, enough_since=enough)
            self._changed.notify_all()

    def _take(self, key: str, entry: Entry[Any] | None) -> None:
        record = None if entry is None else entry.record
        match self._keys.parse(key)[2:], record:
            case ("nodes", name), _:
                self._take_member(name, entry)
            case ("round",), m.MembershipRound():
                self._view = replace(self._view, round=record, due_since=math.inf)
                self._found = {number: one for number, one in self._found.items() if number >= record.number}
            case ("rounds", *_), MasterRecord():
                self._found[record.generation] = record
            # a run that this node has been part of or has closed stays closed
            case ("closed",), _ if record or (self._wanted is None and not self._closed_revision):
                self._view = replace(self._view, closed=record)

    def _take_member(self, name: str, entry: Entry[m.Member] | None) -> None:
        view = self._view
        members, order, missing = dict(view.members), dict(view.order), dict(view.missing_since)
        if entry is None or entry.record is None:
            left = members.pop(name, None)
            order.pop(name, None)
            if left is not None:
                missing[name] = -math.inf if left.leaving else time.monotonic()
        else:
            members[name] = entry.record
            missing.pop(name, None)
            order.setdefault(name, entry.item.create_revision)
        self._view = replace(view, members=members, order=order, missing_since=missing)
