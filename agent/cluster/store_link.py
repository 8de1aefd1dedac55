"""The agent's line to the store: watches in, writes out, and one lease that keeps its keys alive.

The agent's own thread never waits for the store. Watches run in threads and post what changed; writes
go through one thread, in order, and are repeated until the store takes them. While the store is away
training goes on, and nothing here gives up: a registration that was lost meanwhile is made again, unless
another agent has taken the name. A store that refuses us is asked again, too: somebody may put that right
while training goes on. Only what it would refuse for ever is given up, and said.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import MalformedRecordError, NodeRecord, decode, encode
from adaptdl_elastic.rendezvous.store.base import (
    CompactedError,
    Lease,
    LeaseLostError,
    Store,
    StoreAuthError,
    StoreError,
    StoreRefusedError,
    Watch,
)

logger = logging.getLogger(__name__)

LEASE_SECONDS = 5.0
LOOK_SECONDS = 5.0  # between two looks whether the store answers an agent that has nothing to write
_FIRST_RETRY, _LAST_RETRY = 0.05, 1.0  # seconds between attempts
Post = Callable[[object], None]


@dataclass(frozen=True)
class Keyspace:
    """Everything under a watched prefix now."""

    prefix: str
    items: dict[str, str]


@dataclass(frozen=True)
class KeyChanged:
    """One key under a watched prefix changed; None: it is gone."""

    prefix: str
    key: str
    value: str | None


@dataclass(frozen=True)
class Connection:
    """The store can, or can not, be reached, or it refuses us; refused and `up`: it has refused us before."""

    up: bool
    why: str = ""
    refused: bool = False

    @classmethod
    def lost(cls, error: StoreError) -> Connection:
        """Return what an operation that failed says of the store."""
        return cls(False, str(error), isinstance(error, StoreAuthError))

    def __str__(self) -> str:
        """For the person at the terminal."""
        if self.up:
            return "the store lets us in again" if self.refused else "the store is back"
        return f"the store {'refuses us' if self.refused else 'is away'}, training goes on: {self.why}"


class ConnectionMonitor:
    """Posts a Connection whenever the store goes away, refuses us, or is back. For several threads.

    Each source of news has its own name: what one of them can do does not hide what another one cannot.
    """

    def __init__(self, post: Post) -> None:
        self._post = post
        self._lock = threading.Lock()
        self._news: dict[str, Connection] = {}
        self._said = Connection(True)

    def note(self, source: str, now: Connection) -> None:
        """Take note of how the last operation of a source went."""
        with self._lock:
            self._news[source] = now
            worst, said = next((one for one in self._news.values() if not one.up), now), self._said
            if worst.up == said.up and (worst.up or worst.refused == said.refused):
                return
            self._said = replace(worst, refused=said.refused) if worst.up else worst
            self._post(self._said)


@dataclass(frozen=True)
class Said:
    """A line for the person at the terminal."""

    text: str


class NameTakenError(Exception):
    """A live agent has registered this node for this job: `by`, as far as is known."""

    def __init__(self, node: str, by: str = "another agent") -> None:
        super().__init__(f"the node name {node!r} is taken by {by}")
        self.by = by


class Watcher(threading.Thread):
    """Posts a Keyspace first, then every KeyChanged under a prefix, for as long as it lives."""

    def __init__(self, store: Store, prefix: str, post: Post) -> None:
        super().__init__(name=f"watch {prefix}", daemon=True)
        self._store, self._prefix, self._post = store, prefix, post
        self._closing = threading.Event()
        self._watch: Watch | None = None

    def run(self) -> None:
        """The thread."""
        delay = _FIRST_RETRY
        while not self._closing.is_set():
            try:
                snapshot = self._store.range(self._prefix)
                items = {item.key: item.value for item in snapshot.items}
                self._post(Keyspace(self._prefix, items))
                delay = _FIRST_RETRY
                self._follow(snapshot.revision + 1)
            except CompactedError:
                continue
            except StoreError as error:
                logger.debug("watch of %s: %s", self._prefix, error)
                self._closing.wait(delay)
                delay = min(2 * delay, _LAST_RETRY)

    def _follow(self, revision: int) -> None:
        with self._store.watch(self._prefix, revision) as watch:
            self._watch = watch
            if self._closing.is_set():
                return
            for change in watch:
                value = change.value if change.kind == "put" else None
                self._post(KeyChanged(self._prefix, change.key, value))

    def close(self) -> None:
        """End the thread soon."""
        self._closing.set()
        if self._watch is not None:
            self._watch.close()


class Writer(threading.Thread):
    """Does writes in order, each again and again until the store has taken it."""

    def __init__(self, post: Post, monitor: ConnectionMonitor) -> None:
        super().__init__(name="store writer", daemon=True)
        self._post, self._monitor = post, monitor
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._latest: dict[str, Callable[[], None]] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()

    def submit(self, work: Callable[[], None]) -> None:
        """Do this after everything that was submitted before."""
        self._queue.put(work)

    def submit_latest(self, key: str, work: Callable[[], None]) -> None:
        """As `submit`, but takes the place of what waits under the same key."""
        with self._lock:
            waiting = key in self._latest
            self._latest[key] = work
        if not waiting:
            self._queue.put(lambda: self._do_latest(key))

    def _do_latest(self, key: str) -> None:
        with self._lock:
            work = self._latest.pop(key, None)
        if work is not None:
            work()

    def run(self) -> None:
        """The thread."""
        while (work := self._queue.get()) is not None:
            self._insist(work)

    def _insist(self, work: Callable[[], None]) -> None:
        delay = _FIRST_RETRY
        while True:
            try:
                work()
            except StoreRefusedError as error:
                logger.warning("a write to the store was given up: %s", error)
                self._post(Said(f"something can not be written to the store and is left out: {error}"))
                return
            except NameTakenError as error:
                logger.warning("%s", error)  # the watch of the nodes tells the agent
                return
            except StoreError as error:
                self._monitor.note("writer", Connection.lost(error))
                if self._closing.wait(delay):
                    return
                delay = min(2 * delay, _LAST_RETRY)
            except Exception:
                logger.exception("a write to the store was given up")
                return
            else:
                self._monitor.note("writer", Connection(True))
                return

    def close(self, timeout: float) -> None:
        """Finish what was submitted, within `timeout` seconds."""
        self._queue.put(None)
        self.join(timeout)
        self._closing.set()


class Registration:
    """This agent's key under `nodes/`, and whatever else shall vanish with the agent, on one lease."""

    def __init__(self, store: Store, keys: Keys, record: NodeRecord, ttl: float = LEASE_SECONDS) -> None:
        self._store, self._keys, self._ttl = store, keys, ttl
        self.record = record
        self._lease: Lease | None = None
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="registration", daemon=True)
        self.monitor: ConnectionMonitor | None = None
        """Hears of the store also while this agent has nothing to write."""

    @property
    def key(self) -> str:
        """Where the record is."""
        return self._keys.node(self.record.node, self.record.job)

    def register(self) -> None:
        """Take the name; NameTakenError when a live agent has it."""
        lease = self._store.lease(self._ttl)
        try:
            self._write(lease)
        except BaseException:
            lease.revoke()
            raise
        self._lease = lease
        self._keeper.start()

    def update(self, **fields: object) -> None:
        """Change fields of the record. StoreError when the store does not take it: try again."""
        with self._lock:
            self.record = replace(self.record, **fields)  # type: ignore[arg-type]
        self._write(self._held())

    def _write(self, lease: Lease) -> None:
        """Put the record where nobody's is, or an earlier one of ours; NameTakenError when another's is."""
        while True:
            found = self._store.get(self.key)
            if found is not None and (other := self._other(found.value)) is not None:
                raise NameTakenError(self.record.node, f"the agent at {other.host}, process {other.pid}")
            with self._lock:
                text = encode(self.record)
            revision = found.mod_revision if found is not None else 0
            if self._store.compare_and_swap(self.key, text, revision, lease) is not None:
                return

    def _other(self, text: str) -> NodeRecord | None:
        """Another agent's record; None: ours, or what nobody can read."""
        try:
            record = decode(NodeRecord, text, self.key)
        except MalformedRecordError:
            return None
        return record if record.agent != self.record.agent else None

    def claim(self, key: str, value: str, unless: str) -> None:
        """Create a key that vanishes with this agent, if nobody has it and none of our node has `unless`.

        Values are "node/agent".
        """
        other = self._store.get(unless)
        if other is None or other.value.rpartition("/")[0] != value.rpartition("/")[0]:
            self._store.compare_and_swap(key, value, 0, self._held())

    def release(self, key: str, value: str) -> None:
        """Give up what `claim` has created."""
        found = self._store.get(key)
        if found is not None and found.value == value:
            self._store.compare_and_swap(key, None, found.mod_revision)

    def _held(self) -> Lease:
        lease = self._lease
        if lease is None or lease.lost.is_set():
            raise LeaseLostError("the registration has lapsed")
        return lease

    def _keep(self) -> None:
        """Register again whenever the lease was lost: the store was away for too long."""
        wait = LOOK_SECONDS
        while not self._closing.is_set():
            lease = self._lease
            if lease is not None and not lease.lost.wait(wait):
                wait = LOOK_SECONDS if self._look() else _LAST_RETRY
                continue
            if self._closing.is_set():
                return
            self._come_back()

    def _look(self) -> bool:
        """Find out whether the store answers us."""
        try:
            self._store.get(self.key)
        except StoreError as error:
            self._note(Connection.lost(error))
            return False
        self._note(Connection(True))
        return True

    def _note(self, now: Connection) -> None:
        if self.monitor is not None:
            self.monitor.note("registration", now)

    def _come_back(self) -> None:
        fresh: Lease | None = None
        try:
            fresh = self._store.lease(self._ttl)
            self._write(fresh)
        except (StoreError, NameTakenError) as error:
            logger.debug("registration: %s", error)
            if isinstance(error, StoreError):
                self._note(Connection.lost(error))
            if fresh is not None:
                fresh.abandon()
            self._closing.wait(_LAST_RETRY)
        else:
            self._lease = fresh
            self._note(Connection(True))
            logger.info("registered again as node %s", self.record.node)

    def close(self) -> None:
        """Vanish from the store."""
        self._closing.set()
        if self._lease is not None:
            self._lease.revoke()
