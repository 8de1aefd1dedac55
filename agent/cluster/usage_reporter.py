"""Write the load of this node to the store every few seconds, for metrics and pages.

Nothing depends on it: a report that cannot be written is left out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import NodeUsage, encode
from adaptdl_elastic.rendezvous.store.base import Lease, Store, StoreError

INTERVAL_SECONDS = 10.0
"""Seconds between two reports; the first one comes after that time."""

_LAST_SECONDS = 0.5  # that `close` waits for a report under way


class UsageReporter:
    """A thread that reports until `close`.

    Args:
        store: The store.
        keys: Keys of the cluster.
        node: Name of this node.
        read: Returns the load since the last call.
        lease: Returns the lease with which the report vanishes; None: there is none now.
        interval: Seconds between two reports.
    """

    def __init__(
        self,
        store: Store,
        keys: Keys,
        node: str,
        read: Callable[[], NodeUsage],
        lease: Callable[[], Lease | None],
        interval: float = INTERVAL_SECONDS,
    ) -> None:
        self._store, self._key, self._read, self._lease = store, keys.usage_of(node), read, lease
        self._interval = interval
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="usage", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing.wait(self._interval):
            lease = self._lease()
            if lease is not None:
                with suppress(StoreError):
                    self._store.put(self._key, encode(self._read()), lease)

    def close(self) -> None:
        """End the thread; a report under way to a store that is away is not waited for."""
        self._closing.set()
        self._thread.join(_LAST_SECONDS)
