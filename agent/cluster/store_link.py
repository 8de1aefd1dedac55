"""The agent's connection to the store: watches, writes, and one lease for its keys.

The agent's main thread never waits for the store. Watches run in threads and post what changed. One thread
makes all writes in order and repeats each until the store takes it. While the store is away, training goes on
and nothing here gives up: a registration whose lease expired is made again, unless another agent has taken
the name. If the store refuses the agent, requests are repeated, too, since an administrator may correct that
while training goes on. Only a write that the store would always refuse is dropped, and reported.
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
    Lease,
    LeaseLostError,
    Snapshot,
    Store,
    StoreAuthError,
    StoreError,
    StoreFullError,
    StoreRefusedError,
)
from adaptdl_elastic.rendezvous.store.follow import Follow

logger = logging.getLogger(__name__)

LEASE_SECONDS = 5.0
CHECK_SECONDS = 5.0  # seconds between two checks whether the store answers, while nothing is written
_FIRST_RETRY, _LAST_RETRY = 0.05, 1.0  # seconds between two attempts
Post = Callable[[object], None]


@dataclass(frozen=True)
class Connection:
    """Whether the store can be used.

    Attributes:
        up: it answers and accepts the agent.
        why: the problem.
        refused: if not `up`: it answers, but refuses the agent; if `up`: it refused the agent before.
        full: it answers, but has no room for writes.
    """

    up: bool
    why: str = ""
    refused: bool = False
    full: bool = False

    @classmethod
    def lost(cls, error: StoreError) -> Connection:
        """Return the state of the store that a failed operation shows."""
        return cls(False, str(error), isinstance(error, StoreAuthError), isinstance(error, StoreFullError))

    def __str__(self) -> str:
        """Return the line for the user."""
        if self.up:
            return "the store lets us in again" if self.refused else "the store is back"
        problem = "refuses us" if self.refused else "takes no writes" if self.full else "is away"
        return f"the store {problem}, training goes on: {self.why}"


class ConnectionMonitor:
    """Posts a Connection whenever the store goes away, refuses the agent, or is back. Thread-safe.

    Each source of reports has a name, so that the success of one source does not hide the failure of another.
    """

    def __init__(self, post: Post) -> None:
        self._post = post
        self._lock = threading.Lock()
        self._news: dict[str, Connection] = {}
        self._said = Connection(True)

    def note(self, source: str, now: Connection) -> None:
        """Record the result of a source's last operation."""
        with self._lock:
            self._news[source] = now
            worst, said = next((one for one in self._news.values() if not one.up), now), self._said
            if worst.up == said.up and (worst.up or worst.refused == said.refused):
                return
            self._said = replace(worst, refused=said.refused) if worst.up else worst
            self._post(self._said)


@dataclass(frozen=True)
class UserLine:
    """A line for the user."""

    text: str


class NameTakenError(Exception):
    """A live agent has registered this node for this job; `by` describes the agent."""

    def __init__(self, node: str, by: str = "another agent") -> None:
        super().__init__(f"the node name {node!r} is taken by {by}")
        self.by = by


class Watcher(threading.Thread):
    """A thread that posts a Snapshot, then every Change under a prefix; again a Snapshot after a gap."""

    def __init__(self, store: Store, prefix: str, post: Post) -> None:
        super().__init__(name=f"watch {prefix}", daemon=True)
        self._post = post
        self._news = Follow(store, prefix, lambda error: logger.debug("watch of %s: %s", prefix, error))

    def run(self) -> None:
        """Read and watch the prefix until `close`."""
        for news in self._news:
            self._post(news)

    def close(self) -> None:
        """Make the thread end soon."""
        self._news.close()


class Writer(threading.Thread):
    """A thread that makes writes in order and repeats each until the store has taken it."""

    def __init__(self, post: Post, monitor: ConnectionMonitor) -> None:
        super().__init__(name="store writer", daemon=True)
        self._post, self._monitor = post, monitor
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._latest: dict[str, Callable[[], None]] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()

    def submit(self, work: Callable[[], None]) -> None:
        """Make this write after all writes submitted before."""
        self._queue.put(work)

    def submit_latest(self, key: str, work: Callable[[], None]) -> None:
        """Submit a write that replaces a waiting one with the same key."""
        with self._lock:
            waiting = key in self._latest
            self._latest[key] = work
        if not waiting:
            self._queue.put(lambda: self._do_latest(key))

    def _do_latest(self, key: str) -> None:
        with self._lock:
            work = self._latest.pop(key, None)
        if work is None:
            return
        try:
            work()
        except StoreRefusedError:
            raise
        except StoreError:
            # it is repeated, unless another one has taken its place meanwhile
            with self._lock:
                self._latest.setdefault(key, work)
            raise

    def run(self) -> None:
        """Make the writes until `close`."""
        while (work := self._queue.get()) is not None:
            self._repeat_until_taken(work)

    def _repeat_until_taken(self, work: Callable[[], None]) -> None:
        delay = _FIRST_RETRY
        while True:
            try:
                work()
            except StoreRefusedError as error:
                logger.warning("a write to the store was given up: %s", error)
                self._post(UserLine(f"something cannot be written to the store and is left out: {error}"))
                return
            except NameTakenError as error:
                logger.warning("%s", error)  # the watch of the nodes tells the agent about it
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
        """Make the submitted writes within `timeout` seconds, then end."""
        self._queue.put(None)
        self.join(timeout)
        self._closing.set()


def claim(store: Store, key: str, value: str, unless: str, lease: Lease) -> None:
    """Create a key that vanishes with a lease, unless it exists or this node holds `unless`.

    Args:
        store: the store.
        key: the key to create.
        value: "node/agent" of the holder.
        unless: a key that nobody of the same node may hold.
        lease: with which the key vanishes.
    """
    other = store.get(unless)
    if other is None or other.value.rpartition("/")[0] != value.rpartition("/")[0]:
        store.compare_and_swap(key, value, 0, lease)


def release(store: Store, key: str, value: str) -> None:
    """Delete a key if it has this value."""
    found = store.get(key)
    if found is not None and found.value == value:
        store.compare_and_swap(key, None, found.mod_revision)


class Registration:
    """This agent's key under `nodes/` and other keys that must vanish with the agent, all on one lease."""

    def __init__(
        self,
        store: Store,
        keys: Keys,
        record: NodeRecord,
        ttl: float = LEASE_SECONDS,
        lease: Lease | None = None,
    ) -> None:
        self._store, self._keys, self._ttl, self._shared = store, keys, ttl, lease
        self.record = record
        self.lease: Lease | None = lease
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="registration", daemon=True)
        self.monitor: ConnectionMonitor | None = None
        """Told about the store's state even while this agent has nothing to write."""

    @property
    def key(self) -> str:
        """The key of the record."""
        return self._keys.node(self.record.node, self.record.job)

    @property
    def lapsed(self) -> bool:
        """Whether the lease may have run out, by this process's clock."""
        return self.lease is None or self.lease.remaining() <= 0

    def register(self) -> None:
        """Write the record under the node's name; NameTakenError if a live agent has the name."""
        if self._shared is not None:
            return self._write(self._held())
        lease = self._store.lease(self._ttl)
        try:
            self._write(lease)
        except BaseException:
            lease.revoke()
            raise
        self.lease = lease
        self._keeper.start()

    def update(self, **fields: object) -> None:
        """Change fields of the record. StoreError if the store does not take it; the caller repeats it."""
        with self._lock:
            self.record = replace(self.record, **fields)  # type: ignore[arg-type]
        self._write(self._held())

    def _write(self, lease: Lease) -> None:
        """Write the record, unless another agent's record is there (NameTakenError)."""
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
        """Return another agent's record; None if the record is this agent's, or is invalid."""
        try:
            record = decode(NodeRecord, text, self.key)
        except MalformedRecordError:
            return None
        return record if record.agent != self.record.agent else None

    def claim(self, key: str, value: str, unless: str) -> None:
        """Create a key that vanishes with this agent, unless it exists or this node holds `unless`."""
        claim(self._store, key, value, unless, self._held())

    def release(self, key: str, value: str) -> None:
        """Delete a key that `claim` created."""
        release(self._store, key, value)

    def _held(self) -> Lease:
        lease = self.lease
        if lease is None or lease.lost.is_set():
            raise LeaseLostError("the registration has lapsed")
        return lease

    def _keep(self) -> None:
        """Register again whenever the lease was lost because the store was away for too long."""
        wait = CHECK_SECONDS
        while not self._closing.is_set():
            lease = self.lease
            if lease is not None and not lease.lost.wait(wait):
                wait = CHECK_SECONDS if self._check_store() else _LAST_RETRY
                continue
            if self._closing.is_set():
                return
            self.register_again()

    def _check_store(self) -> bool:
        """Check whether the store answers this agent."""
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

    def register_again(self) -> None:
        """Try once to register on a new lease."""
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
            self.lease = fresh
            self._note(Connection(True))
            logger.info("registered again as node %s", self.record.node)

    def close(self) -> None:
        """Delete the record and all keys of the lease; of a lease that others share only the record."""
        self._closing.set()
        if self._shared is not None:
            self.release(self.key, encode(self.record))
        elif self.lease is not None:
            self.lease.revoke()


def wait_for_removal(store: Store, key: str, seconds: float) -> None:
    """Wait until a key is deleted, at most so many seconds."""
    with Follow(store, key) as follow:
        follow.close_in(seconds)
        for news in follow:
            items = news.items if isinstance(news, Snapshot) else (news,)
            there = any(item.key == key and item.value is not None for item in items)
            if not there and (isinstance(news, Snapshot) or news.key == key):
                break
