"""Follow what the store holds of all jobs, so that a node service need not ask for each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from adaptdl_elastic.agent.cluster.store_link import Watcher
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import CheckpointRecord, JobSpec, JobStatus, Plan
from adaptdl_elastic.rendezvous.store.base import Change, KeyValue, Snapshot, Store
from adaptdl_elastic.rendezvous.store.prefix_cache import PrefixCache

R = TypeVar("R", CheckpointRecord, JobSpec, JobStatus, Plan)

_KEPT = {("spec",), ("status",), ("plan",), ("checkpoint",)}  # ends of the keys


class JobRecords:
    """The newest specification, status, plan and checkpoint of each job.

    Args:
        store: The store of the cluster.
        keys: Its keys.
        wake: Called when a plan has changed, or a job has ended.
    """

    def __init__(self, store: Store, keys: Keys, wake: Callable[[], None]) -> None:
        self._keys, self._wake = keys, wake
        self._cache = PrefixCache[Any](
            lambda item: keys.decode(item.key, item.value),
            holds=lambda key: keys.parse(key)[2:] in _KEPT,
        )
        self._watcher = Watcher(store, keys.jobs, self._take)
        self._watcher.start()

    @property
    def ready(self) -> bool:
        """Whether everything has been read once."""
        return self._cache.whole

    def close(self) -> None:
        """Follow the store no longer."""
        self._watcher.close()

    def get(self, key: str) -> KeyValue | None:
        """Return a record as `Store.get` does."""
        entry = self._cache.get(key)
        return None if entry is None else entry.item

    def read(self, kind: type[R], job: str, name: str) -> R | None:
        """Return a job's record; None if there is none, or none could be read yet."""
        record = self._cache.record(self._keys.job(job, name))
        return record if isinstance(record, kind) else None

    def number(self, job: str) -> int:
        """Return `JobSpec.number` of the present run of a job; 0 if there is none."""
        spec = self.read(JobSpec, job, "spec")
        return 0 if spec is None else spec.number

    def _take(self, news: object) -> None:
        if isinstance(news, Snapshot):
            self._cache.take(news)
            self._wake()
        elif isinstance(news, Change):
            for key, _, entry in self._cache.take(news):
                record = None if entry is None else entry.record
                ended = isinstance(record, JobStatus) and record.state.ended
                if ended or key.endswith("/plan"):
                    self._wake()
