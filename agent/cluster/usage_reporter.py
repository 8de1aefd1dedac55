"""Measure the load of this node, and write it to the store every few seconds, for metrics and pages.

Nothing depends on it: a report that cannot be written is left out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import psutil

from adaptdl_elastic.agent.machine.devices import Gpus
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
        gpus: Its GPUs.
        lease: Returns the lease with which the report vanishes; None: there is none now.
        looks: Called before each report.
        interval: Seconds between two reports.
    """

    def __init__(
        self,
        store: Store,
        keys: Keys,
        node: str,
        gpus: Gpus,
        lease: Callable[[], Lease | None],
        looks: Sequence[Callable[[], object]] = (),
        interval: float = INTERVAL_SECONDS,
    ) -> None:
        self._store, self._key, self._node, self._gpus = store, keys.usage_of(node), node, gpus
        self._lease, self._looks, self._interval = lease, looks, interval
        psutil.cpu_percent()  # the next call measures from here
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="usage", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing.wait(self._interval):
            lease = self._lease()
            if lease is not None:
                for look in self._looks:
                    look()
                with suppress(StoreError):
                    self._store.put(self._key, encode(_load(self._node, self._gpus)), lease)

    def close(self) -> None:
        """End the thread; a report under way to a store that is away is not waited for."""
        self._closing.set()
        self._thread.join(_LAST_SECONDS)


def _load(node: str, gpus: Gpus) -> NodeUsage:
    """Return the load of this machine, that of its processors since the last call."""
    memory = psutil.virtual_memory()
    cpu = min(1.0, max(0.0, psutil.cpu_percent() / 100))
    used = memory.total - memory.available
    return NodeUsage(node, cpu, used, memory.total, gpus.usage(), time.time())
