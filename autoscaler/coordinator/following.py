"""What a coordinator knows of its cluster, kept up to date by a watch: while it leads, and before.

One that waits to lead follows the store as the leader does. What it has seen vanish, and whether the store
was well then, it need not find out when it comes to power.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from adaptdl_elastic.autoscaler.cluster_view import ClusterCache
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.store.base import (
    Change,
    CompactedError,
    Lease,
    Store,
    StoreAuthError,
    StoreError,
    Watch,
)

logger = logging.getLogger(__name__)

_LAZY = ("hints", "checkpoint")  # changes of these may wait for others to come along


@dataclass(frozen=True)
class _Reload:
    """The watch has lost its place."""


@dataclass(frozen=True)
class _Broken:
    error: BaseException


@dataclass(frozen=True)
class Wake:
    """Somebody wants whoever waits to look around."""


_Item = Change | _Reload | _Broken | Wake


@dataclass(frozen=True)
class Update:
    """Whether what has come calls for a decision: at once, or after others have come along."""

    eager: bool = False
    lazy: bool = False


class Follower:
    """Feed of a `ClusterCache`. Not thread-safe, but for `wake` and `close`.

    `steady_since` is since when, by `clock`, the store has answered without a break: what expired in a
    break proves nothing.
    """

    def __init__(self, store: Store, keys: Keys, clock: Callable[[], float]) -> None:
        self._store, self._keys, self._clock = store, keys, clock
        self.keeper = ClusterCache(keys)
        self.steady_since = clock()
        self._queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._watch: Watch | None = None

    def load(self) -> None:
        """Read everything, and watch from there."""
        self.close()
        self._queue = queue.SimpleQueue()  # what the old watch may still bring is old
        snapshot = self._store.range(self._keys.root)
        self.keeper.load(snapshot, self._clock())
        watch = self._watch = self._store.watch(self._keys.root, snapshot.revision + 1)
        threading.Thread(
            target=_pump, args=(watch, self._queue), name="coordinator-watch", daemon=True
        ).start()

    def close(self) -> None:
        """Let go of the watch."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    def wake(self) -> None:
        """End a `take` that waits."""
        self._queue.put(Wake())

    @property
    def loaded(self) -> bool:
        """Whether it follows the store."""
        return self._watch is not None

    @property
    def pending(self) -> bool:
        """Whether `take` would find something."""
        return not self._queue.empty()

    def take(self, timeout: float) -> Update:
        """Wait for changes, `timeout` seconds at most, and take in all there are.

        StoreError when the watch has ended.
        """
        try:
            item = self._queue.get(timeout=timeout) if timeout > 0 else self._queue.get_nowait()
        except queue.Empty:
            return Update()
        eager = lazy = False
        while True:
            heard = self._digest(item)
            eager, lazy = eager or heard.eager, lazy or heard.lazy
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return Update(eager, lazy)

    def _digest(self, item: _Item) -> Update:
        match item:
            case Change():
                if not self.keeper.apply(item, self._clock()):
                    return Update()  # what we wrote ourselves comes back
                if item.key.startswith(self._keys.events):
                    return Update()
                lazy = item.key.rsplit("/", 1)[-1] in _LAZY
                return Update(eager=not lazy, lazy=lazy)
            case _Reload():
                logger.info("the store has forgotten what the watch asked for: reading everything again")
                self.load()
                return Update(eager=True)
            case _Broken(error):
                if isinstance(error, StoreAuthError):
                    raise error
                raise StoreError(f"the watch ended: {error}") from error
            case _:
                return Update()

    def check(self, lease: Lease) -> None:
        """Note a break of the store, as our own lease tells of it."""
        if lease.remaining() < lease.ttl / 3:
            self.shaken()

    def shaken(self) -> None:
        """The store has not answered just now."""
        self.steady_since = self._clock()


def _pump(watch: Watch, into: queue.SimpleQueue[_Item]) -> None:
    """Carry a watch's changes into the queue, from a thread of its own."""
    try:
        for change in watch:
            into.put(change)
    except CompactedError:
        into.put(_Reload())
    except BaseException as error:
        into.put(_Broken(error))
