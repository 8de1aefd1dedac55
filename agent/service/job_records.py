"""Follow what the store holds of all jobs, so that a node service need not ask for each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from adaptdl_elastic.agent.cluster.store_link import Keyspace, Watcher
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import CheckpointRecord, JobSpec, JobStatus, Plan
from adaptdl_elastic.rendezvous.store.base import Change, KeyValue, Store, read_record

R = TypeVar("R", CheckpointRecord, JobSpec, JobStatus, Plan)

_KEPT = ("spec", "status", "plan", "checkpoint")


class JobRecords:
    """The newest specification, status, plan and checkpoint of each job.

    Args:
        store: The store of the cluster.
        keys: Its keys.
        wake: Called when a plan has changed, or a job has ended.
    """

    def __init__(self, store: Store, keys: Keys, wake: Callable[[], None]) -> None:
        self._keys, self._wake = keys, wake
        self._items: dict[str, KeyValue] = {}
        self.ready = False
        """Whether everything has been read once."""
        self._watcher = Watcher(store, keys.jobs, self._take)
        self._watcher.start()

    def close(self) -> None:
        """Follow the store no longer."""
        self._watcher.close()

    def get(self, key: str) -> KeyValue | None:
        """Return a record as `Store.get` does, without its revisions."""
        return self._items.get(key)

    def read(self, kind: type[R], job: str, name: str) -> R | None:
        """Return a job's record; None if there is none that can be read."""
        return read_record(kind, self.get(self._keys.job(job, name)))

    def run(self, job: str) -> str | None:
        """Return the present run of a job; None if there is none."""
        spec = self.read(JobSpec, job, "spec")
        return None if spec is None else spec.run

    def _take(self, news: object) -> None:
        if isinstance(news, Keyspace):
            kept = {key: value for key, value in news.items.items() if self._name(key)}
            self._items = {key: KeyValue(key, value, 0, 0) for key, value in kept.items()}
            self.ready = True
            self._wake()
        elif isinstance(news, Change) and (name := self._name(news.key)):
            if news.value is None:
                self._items.pop(news.key, None)
            else:
                self._items[news.key] = KeyValue(news.key, news.value, 0, 0)
            status = read_record(JobStatus, self.get(news.key)) if name == "status" else None
            if name == "plan" or (status is not None and status.state.ended):
                self._wake()

    def _name(self, key: str) -> str | None:
        """Return the name of a record that is kept; None for every other key."""
        match self._keys.parse(key):
            case ("jobs", _, name) if name in _KEPT:
                return name
        return None
