"""Keep what a coordinator knows of its cluster current by a watch, while it leads and while it stands by.

A coordinator that stands by follows the store as the leader does. So when it becomes the leader, it already
knows which registrations have vanished, and whether the store was available then.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from adaptdl_elastic.autoscaler.cluster_view import ClusterCache
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.store.base import (
    Change,
    Lease,
    Snapshot,
    Store,
    StoreAuthError,
    StoreError,
)
from adaptdl_elastic.rendezvous.store.follow import Follow

logger = logging.getLogger(__name__)

# changes of these keys may wait a moment, so that several are handled together
_LAZY = ("hints", "checkpoint")


# what is followed, the error that has ended it, or None after `wake`
_Item = Snapshot | Change | BaseException | None


@dataclass(frozen=True)
class Update:
    """Whether the changes require a decision: at once (`eager`), or a moment later with others (`lazy`)."""

    eager: bool = False
    lazy: bool = False


class Follower:
    """Feeds a `ClusterCache` from a watch. Only `wake` and `close` are thread-safe.

    `steady_since` is when, by `clock`, the store began to answer without a break: a lease that expired during
    a break does not prove a death.
    """

    def __init__(self, store: Store, keys: Keys, clock: Callable[[], float]) -> None:
        self._store, self._keys, self._clock = store, keys, clock
        self.keeper = ClusterCache(keys)
        self.steady_since = clock()
        self._queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._follow: Follow | None = None

    def load(self) -> None:
        """Read everything, and watch from there."""
        self.close()
        self._queue = queue.SimpleQueue()  # drop changes of the old watch
        follow = Follow(self._store, self._keys.root)
        news = iter(follow)
        self.keeper.take(next(news), self._clock())
        self._follow = follow
        threading.Thread(
            target=_pump, args=(news, self._queue), name="coordinator-watch", daemon=True
        ).start()

    def close(self) -> None:
        """Close the watch."""
        follow, self._follow = self._follow, None
        if follow is not None:
            follow.close()

    def wake(self) -> None:
        """End a waiting `take`."""
        self._queue.put(None)

    @property
    def loaded(self) -> bool:
        """Whether the store is being watched."""
        return self._follow is not None

    @property
    def pending(self) -> bool:
        """Whether `take` would return changes at once."""
        return not self._queue.empty()

    def take(self, timeout: float) -> Update:
        """Wait up to `timeout` seconds for changes, and apply all there are.

        Raises:
            StoreError: the watch has ended.
        """
        eager = lazy = False
        try:
            item = self._queue.get(timeout=timeout) if timeout > 0 else self._queue.get_nowait()
            while True:
                heard = self._digest(item)
                eager, lazy = eager or heard.eager, lazy or heard.lazy
                item = self._queue.get_nowait()
        except queue.Empty:
            return Update(eager, lazy)

    def _digest(self, item: _Item) -> Update:
        match item:
            case Change():
                different = self.keeper.take(item, self._clock())  # from this process's own writes
                parts = self._keys.parse(item.key)
                decides = different and parts[0] not in ("events", "usage")
                lazy = parts[-1] in _LAZY
                return Update(eager=decides and not lazy, lazy=decides and lazy)
            case Snapshot():
                logger.info("the store has forgotten what the watch asked for: everything was read again")
                self.keeper.take(item, self._clock())
                return Update(eager=True)
            case StoreAuthError():
                raise item
            case BaseException():
                raise StoreError(f"the watch ended: {item}") from item
        return Update()

    def check(self, lease: Lease) -> None:
        """Record a break of the store if this process's own lease was not renewed in time."""
        if lease.remaining() < lease.ttl / 3:
            self.shaken()

    def shaken(self) -> None:
        """Record that the store has not answered just now."""
        self.steady_since = self._clock()


def _pump(news: Iterator[Snapshot | Change], into: queue.SimpleQueue[_Item]) -> None:
    """Put what is followed into the queue, from a thread."""
    try:
        for item in news:
            into.put(item)
    except BaseException as error:
        into.put(error)
