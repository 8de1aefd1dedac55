"""Hold what is under a prefix of the store: each key's value, and the record that was read from it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from adaptdl_elastic.rendezvous.store.base import Change, KeyValue, Snapshot
from adaptdl_elastic.rendezvous.text import pluralize

logger = logging.getLogger(__name__)
T = TypeVar("T")
_QUIET_SECONDS = 60.0  # between two lines about values that cannot be read


@dataclass(frozen=True)
class Entry(Generic[T]):
    """What is held of one key.

    Attributes:
        item: the key and its newest value.
        record: the record in the newest value that could be read; None if there is no such value, or no
            record belongs to the key.
        readable: whether the newest value could be read.
    """

    item: KeyValue
    record: T | None
    readable: bool = True


Difference = tuple[str, Entry[T] | None, Entry[T] | None]
"""A key, what was held of it before, and what is held now; None: nothing."""


class PrefixCache(Generic[T]):
    """The keys under one prefix, or several that do not overlap, kept current with what `Follow` yields.

    * It is `whole` from the first snapshot on. Before, it holds what changes have told.
    * A snapshot is the truth, even if it is older than what is held: the store may have lost its data. Keys
      that are not in it are dropped. A key of the same revision (0: unknown) and value is left as it is. An
      equal value at another revision counts as different.
    * A change that is not newer than what is held of its key, or than the last snapshot, changes nothing. So
      it may arrive twice, and a process may apply its own writes before the watch reports them.
    * A value that cannot be read (garbage, or a record of a newer version) is reported to `refuse`. The last
      record that could be read stays, until a later value can be read, or the key is deleted or made again.

    Not thread-safe, except that any thread may call `get` and see whether it is `whole`.

    Args:
        read: Returns the record that a value holds, or None to hold none. ValueError: it cannot be read.
        refuse: Is told the key and the error of each value that cannot be read. By default one line a minute
            is logged, with their number.
        holds: Whether a key is held at all; by default all are.
        clock: Returns seconds, for that minute; None: `time.monotonic`.
    """

    def __init__(
        self,
        read: Callable[[KeyValue], T | None],
        refuse: Callable[[str, ValueError], None] | None = None,
        holds: Callable[[str], bool] = lambda key: True,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._read, self._holds = read, holds
        self._refuse = refuse or (lambda _, error: self._refused.append(error))
        # what has not been logged yet: the first of them, and their number
        self._refused: list[ValueError] = []
        self._clock, self._quiet_until = clock or time.monotonic, -math.inf
        self._entries: dict[str, Entry[T]] = {}
        self._since: dict[str, int] = {}  # prefix → revision of its last snapshot
        self.whole = False
        self.revision = 0
        """The newest revision that `take` was given."""

    def record(self, key: str) -> T | None:
        """Return the last record of a key that could be read."""
        entry = self._entries.get(key)
        return None if entry is None else entry.record

    def get(self, key: str) -> Entry[T] | None:
        """Return what is held of a key; None: nothing."""
        return self._entries.get(key)

    def take(self, news: Snapshot | Change) -> list[Difference[T]]:
        """Apply what `Follow` has yielded; return what is different now, deletions first."""
        differences = self._take(news)
        if self._refused and self._clock() >= self._quiet_until:
            self._quiet_until = self._clock() + _QUIET_SECONDS
            number = pluralize(len(self._refused), "value")
            logger.warning("ignored %s in the store: %s", number, self._refused[0])
            self._refused.clear()
        return differences

    def _take(self, news: Snapshot | Change) -> list[Difference[T]]:
        self.revision = max(self.revision, news.revision)
        if isinstance(news, Change):
            since = (since for prefix, since in self._since.items() if news.key.startswith(prefix))
            return [] if news.revision <= max(since, default=0) else self.note(news)
        self._since[news.prefix] = news.revision
        gone = self.forget(news.prefix, {item.key for item in news.items})
        fresh = [difference for item in news.items for difference in self._put(item)]
        self.whole = True
        return gone + fresh

    def note(self, change: Change) -> list[Difference[T]]:
        """Apply a change that this process has made, before the watch reports it; return what is different.

        `revision` stays as it is, since earlier changes by others may not have been applied yet.
        """
        held = self._entries.get(change.key)
        if held is not None and held.item.mod_revision >= change.revision:
            return []
        if change.value is None:
            return [] if held is None else [(change.key, self._entries.pop(change.key), None)]
        created = change.revision if held is None else held.item.create_revision
        return self._put(KeyValue(change.key, change.value, created, change.revision))

    def forget(self, prefix: str, but: Container[str] = ()) -> list[Difference[T]]:
        """Drop the keys under a prefix, except some; return what is different now."""
        keys = [key for key in self._entries if key.startswith(prefix) and key not in but]
        return [(key, self._entries.pop(key), None) for key in keys]

    def _put(self, item: KeyValue) -> list[Difference[T]]:
        if not self._holds(item.key):
            return []
        before, unknown = self._entries.get(item.key), 0
        same = before is not None and before.item.value == item.value
        if before is not None and same and item.mod_revision in (before.item.mod_revision, unknown):
            # the revision is taken over: those of a store that has lost its data begin again
            self._entries[item.key] = replace(before, item=item)
            return []
        try:
            after = Entry(item, self._read(item))
        except ValueError as error:
            self._refuse(item.key, error)
            made = {item.create_revision, unknown if before is None else before.item.create_revision}
            stays = len(made) == 1 or unknown in made
            after = Entry(item, before.record if before is not None and stays else None, readable=False)
        self._entries[item.key] = after
        return [(item.key, before, after)]
