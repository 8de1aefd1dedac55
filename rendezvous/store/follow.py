"""Follow what is under a prefix: a snapshot, then every change; after a gap, a snapshot again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from adaptdl_elastic.rendezvous.store.base import (
    Change,
    Closable,
    CompactedError,
    Snapshot,
    Store,
    StoreError,
    Watch,
)

_FIRST_RETRY, _LAST_RETRY = 0.05, 1.0  # seconds between two attempts


class Follow(Closable):
    """What is under a prefix, as an iterable. One thread iterates over it; any thread may `close` it.

    Args:
        store: The store.
        prefix: The prefix to watch.
        failed: Called with each error of the store, after which everything is read again, later each time.
            None: errors are raised.
    """

    def __init__(self, store: Store, prefix: str, failed: Callable[[StoreError], None] | None = None) -> None:
        self._store, self._prefix, self._failed = store, prefix, failed
        self._closing = threading.Event()
        self._watch: Watch | None = None
        self._timer: threading.Timer | None = None

    def __iter__(self) -> Iterator[Snapshot | Change]:
        """Yield a snapshot, then each change until `close`; yield another snapshot if changes were lost."""
        delay = _FIRST_RETRY
        while not self._closing.is_set():
            try:
                snapshot = self._store.range(self._prefix)
                yield snapshot
                with self._store.watch(self._prefix, snapshot.revision + 1) as self._watch:
                    for change in self._watch if not self._closing.is_set() else ():
                        delay = _FIRST_RETRY
                        yield change
            except CompactedError:
                pass
            except StoreError as error:
                if self._failed is None:
                    raise
                self._failed(error)
            self._closing.wait(delay)
            delay = min(2 * delay, _LAST_RETRY)

    def close_in(self, seconds: float) -> None:
        """End the iteration after so many seconds. A further call changes nothing."""
        if self._timer is None:
            self._timer = threading.Timer(seconds, self.close)
            self._timer.daemon = True
            self._timer.start()

    def close(self) -> None:
        """End the iteration soon, even while another thread waits in it."""
        self._closing.set()
        if self._timer is not None:
            self._timer.cancel()
        if self._watch is not None:
            self._watch.close()
