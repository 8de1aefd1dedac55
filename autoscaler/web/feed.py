"""Follow the store in a thread, and keep the documents that the page shows."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing

from adaptdl_elastic.autoscaler.cluster_view import View
from adaptdl_elastic.autoscaler.coordinator.following import Follower
from adaptdl_elastic.autoscaler.web.history import History
from adaptdl_elastic.autoscaler.web.job_document import job_document
from adaptdl_elastic.autoscaler.web.overview import Document, overview
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.services.submitted import SubmissionReader, Submitted
from adaptdl_elastic.rendezvous.store.base import KeyValue, Store, StoreError

logger = logging.getLogger(__name__)

GAP_SECONDS = 0.25
"""Shortest time between two documents; changes in between are shown together."""

_LOOK_SECONDS = 1.0  # longest time between two documents: a job can be lost without a change of the store
_RETRY_SECONDS = 1.0  # until a store that failed is asked again


class Feed:
    """What the page shows, kept current.

    Args:
        connect: Opens the store.
        keys: Keys of the cluster.
        cluster_id: Identifier of a cluster that has node services; "": it has none.
    """

    def __init__(self, connect: Callable[[], Store], keys: Keys, cluster_id: str = "") -> None:
        self._connect, self._keys, self._cluster_id = connect, keys, cluster_id
        self._changed = threading.Condition()
        self._stopped = threading.Event()
        self._follower: Follower | None = None
        self._view = View(0.0, 0.0)
        self._submitted: Submitted | None = None
        self._history = History()
        self._events_seen = 0  # revision of the newest event that was read
        self._document = overview(self._view, None, "connecting")
        self._version = 0
        self._thread = threading.Thread(target=self._run, name="web-feed", daemon=True)

    def start(self) -> None:
        """Follow the store in a thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread, and every wait."""
        self._stopped.set()
        with self._changed:
            self._changed.notify_all()
        if (follower := self._follower) is not None:
            follower.wake()
        self._thread.join(2 * _LOOK_SECONDS)

    @property
    def closed(self) -> bool:
        """Whether the feed has ended."""
        return self._stopped.is_set()

    @property
    def view(self) -> View:
        """The newest view."""
        return self._view

    def current(self) -> tuple[int, Document]:
        """Return the number of the newest overview, and the overview."""
        with self._changed:
            return self._version, self._document

    def wait(self, version: int, seconds: float) -> tuple[int, Document]:
        """Return an overview newer than `version`; after some seconds the newest there is."""
        with self._changed:
            self._changed.wait_for(lambda: self._version > version or self.closed, seconds)
            return self._version, self._document

    def job(self, name: str) -> Document | None:
        """Return what the page of a job shows; None if there is no such job."""
        with self._changed:
            row = self._document["jobs"].get(name)
            return None if row is None else job_document(self._view, self._history, row, self._submitted)

    def events(self, most: int) -> list[Document]:
        """Return the newest events of the cluster, oldest first."""
        with self._changed:
            return self._history.events()[-most:]

    def submitted(self) -> Submitted | None:
        """Return the submissions and services as last read."""
        return self._submitted

    def _run(self) -> None:
        while not self.closed:
            try:
                with self._connect() as store:
                    self._follow(store)
            except (StoreError, OSError) as error:
                self._publish(str(error))
            except Exception as error:  # a defect: the page says so, and goes on
                logger.exception("the page cannot follow the store")
                self._publish(f"the page cannot follow the store: {error}")
            self._stopped.wait(_RETRY_SECONDS)

    def _follow(self, store: Store) -> None:
        reader = SubmissionReader(store, self._keys, self._cluster_id) if self._cluster_id else None
        follower = self._follower = Follower(store, self._keys, time.monotonic)
        with closing(follower):
            follower.load()
            shown = float("-inf")
            revision = -1
            while not self.closed:
                now = time.monotonic()
                changed = follower.keeper.revision != revision
                if now - shown >= (GAP_SECONDS if changed else _LOOK_SECONDS):
                    revision = follower.keeper.revision
                    submitted = reader.read(None) if reader is not None else None
                    fresh = self._new_events(follower.keeper.events)
                    with self._changed:
                        self._view = follower.keeper.view(now, time.time(), follower.steady_since)
                        self._submitted = submitted
                        self._history.observe(self._view)
                        self._history.add_events(fresh)
                    self._publish("")
                    shown = time.monotonic()
                due = shown + (GAP_SECONDS if follower.keeper.revision != revision else _LOOK_SECONDS)
                follower.take(max(0.01, due - time.monotonic()))

    def _new_events(self, known: Sequence[KeyValue]) -> list[tuple[str, str]]:
        seen, self._events_seen = self._events_seen, max((one.mod_revision for one in known), default=0)
        return [(one.key, one.value) for one in known if one.mod_revision > seen]

    def _publish(self, problem: str) -> None:
        try:
            document = overview(self._view, self._submitted, problem)
        except Exception as error:  # a record that it cannot show: the page keeps the rows, and says so
            logger.exception("the page cannot show the cluster")
            text = problem or f"the page cannot show the cluster: {error}"
            summary = {**self._document.get("summary", {}), "problem": text}
            document = {**self._document, "summary": summary}
        with self._changed:
            if document != self._document or self._version == 0:
                self._document = document
                self._version += 1
                self._changed.notify_all()
