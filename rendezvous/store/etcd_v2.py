r"""etcd through its v2 API, with python-etcd: servers up to 3.5 that run with `--enable-v2`.

How the guarantees of a store are built on v2:

* **Prefixes.** Keys are files in directories. A prefix is a directory, which is listed and filtered. The
  server hides names that begin with `_`, and a key cannot be the directory of another one.
* **Leases.** A key has a time to live, which its owner refreshes. A refresh is no event, but it changes the
  key's index, which compare-and-swap compares. So a leased value begins with a header `\x01LEASE
  REVISION\n`. It is first written with revision 0 (meaning: the index of that write), then at once with the
  revision as a number. Readers take the revision from the header; watches skip the second write.
* **Watches.** One request per event, from an index on. The server remembers the last 1,000 events of all keys
  together. A watch that falls behind them gets CompactedError, and so may one without events; the caller
  reads the range again.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote

import etcd
import urllib3

from adaptdl_elastic.rendezvous.store.base import (
    Change,
    CompactedError,
    KeyValue,
    Lease,
    LeaseLostError,
    Snapshot,
    Store,
    StoreAuthError,
    StoreUnavailableError,
    Watch,
)
from adaptdl_elastic.rendezvous.store.connection_error import TryAgainError
from adaptdl_elastic.rendezvous.store.endpoints import Endpoints, InterruptiblePool
from adaptdl_elastic.rendezvous.store.etcd_v2_client import Client, Clients
from adaptdl_elastic.rendezvous.store.keepalive import KeepAlive, KeptLease
from adaptdl_elastic.rendezvous.store.store_options import StoreOptions

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MARK = "\x01"
_POLL = 30.0  # seconds that one watch request waits, and so until a dead connection is noticed
_CLOSED = "this store has been closed"
_LONGEST_PAUSE = 1.0  # seconds between two attempts of a watch to reconnect


@dataclass(frozen=True)
class Node:
    """A file of v2, its head taken off: `index` is the server's, `revision` ours."""

    key: str
    value: str
    index: int
    revision: int
    created: int
    lease: str  # id; "" for none

    @classmethod
    def of(cls, result: Any) -> Node:
        """Convert python-etcd's EtcdResult."""
        value, lease, revision = open_value(result.value or "")
        index = int(result.modifiedIndex)
        return cls(result.key, value, index, revision or index, int(result.createdIndex), lease)

    @property
    def key_value(self) -> KeyValue:
        """The key as callers of the store see it."""
        return KeyValue(self.key, self.value, self.created, self.revision)


def close_value(value: str, lease: str = "", revision: int = 0) -> str:
    """Return the value with a header if it needs one."""
    if not lease and not value.startswith(_MARK):
        return value
    return f"{_MARK}{lease or '-'} {revision}\n{value}"


def open_value(text: str) -> tuple[str, str, int]:
    """Return (value, lease, revision) of the content of a file, which may be any text."""
    head, newline, value = text.partition("\n")
    words = head[1:].split(" ")
    if not (text.startswith(_MARK) and newline and len(words) == 2 and words[1].isdecimal()):
        return text, "", 0
    return value, "" if words[0] == "-" else words[0], int(words[1])


def directory(prefix: str) -> str:
    """Return the directory that holds every key that begins with `prefix`."""
    return prefix.rpartition("/")[0] or "/"


def _path(key: str) -> str:
    return quote(key, safe="/")


class EtcdV2Store(Store):
    """A store on etcd's v2 API; `store.base` lists the guarantees of its methods."""

    def __init__(self, endpoints: tuple[str, ...], options: StoreOptions | None = None) -> None:
        self.options = options or StoreOptions()
        self._endpoints = Endpoints(endpoints, self.options.hint)
        self._clients = Clients(endpoints, self.options)
        self._keepalive = KeepAlive("etcd-v2-leases")
        self._watches: set[EtcdV2Watch] = set()
        self._closed = False

    def get(self, key: str) -> KeyValue | None:
        """Return the key, or None if it does not exist. Linearizable."""
        node = self._read(key)
        return node.key_value if node else None

    def range(self, prefix: str) -> Snapshot:
        """Return every key that begins with `prefix`, sorted, as of one revision."""
        nodes, index = self._list(prefix)
        return Snapshot(tuple(node.key_value for node in nodes), index, prefix)

    def put(self, key: str, value: str, lease: Lease | None = None) -> int:
        """Write the key whatever it held before; return the new `mod_revision`."""
        held = self._held(lease)
        while True:  # an update keeps the index of the key's creation; a plain set would not
            for exists in (True, False):
                try:
                    return self._write(key, value, held, prevExist=exists)
                except (etcd.EtcdKeyNotFound, etcd.EtcdAlreadyExist):
                    continue

    def compare_and_swap(
        self, key: str, value: str | None, expected_revision: int, lease: Lease | None = None
    ) -> int | None:
        """Write the key (None: delete it) if its mod_revision is the expected one.

        Returns the new revision, or None if the comparison failed.
        """
        held = self._held(lease)
        unheard: list[bool] = []

        def change(**condition: Any) -> int:
            if value is None:
                return self._remove(key, lambda: unheard.append(True), **condition)
            return self._write(key, value, held, lambda: unheard.append(True), **condition)

        if expected_revision == 0 and value is None:
            node = self._read(key)
            return None if node else self.revision(key)
        condition: dict[str, Any] = (
            {"prevIndex": expected_revision} if expected_revision else {"prevExist": False}
        )
        while True:
            try:
                return change(**condition)
            except (etcd.EtcdCompareFailed, etcd.EtcdAlreadyExist, etcd.EtcdKeyNotFound):
                node = self._read(key)
            if unheard and self._is_ours(node, value, held):
                if node is None:
                    return self.revision(key)
                if held is not None:
                    self._settle(node.key, node.value, held, node.revision, node.index)
                return node.revision
            if node is None or node.revision != expected_revision:
                return None
            condition = {"prevIndex": node.index}  # only refreshed since then

    def delete(self, key: str) -> bool:
        """Delete one key; return whether it existed."""
        try:
            self._remove(key)
        except etcd.EtcdKeyNotFound:
            return False
        return True

    def delete_prefix(self, prefix: str) -> int:
        """Delete every key that begins with `prefix`; return how many there were."""
        nodes, _ = self._list(prefix)
        return sum(self.delete(node.key) for node in nodes)

    def lease(self, ttl: float) -> EtcdV2Lease:
        """Return a new lease, renewed in the background. etcd counts whole seconds: `ttl` is rounded up."""
        lease = EtcdV2Lease(self, float(math.ceil(ttl)))
        self._keepalive.add(lease)
        return lease

    def watch(self, prefix: str, start_revision: int = 0) -> EtcdV2Watch:
        """Return the changes under `prefix` from `start_revision` on (0: from now on)."""
        if self._closed:
            raise StoreUnavailableError(_CLOSED)
        watch = EtcdV2Watch(self, prefix, start_revision or self.revision(prefix) + 1)
        self._watches.add(watch)
        return watch

    def revision(self, prefix: str) -> int:
        """Return the store's newest revision; the user must be allowed to read `prefix`."""
        try:
            result = self._run(lambda client: client.read(_path(directory(prefix)), quorum=True))
        except etcd.EtcdKeyNotFound as error:
            return int(error.payload["index"])
        return int(result.etcd_index)

    def close(self) -> None:
        """Revoke the client's leases, end its watches, and close its connections."""
        for watch in list(self._watches):
            watch.close()
        self._keepalive.close(timeout=1.0)
        self._closed = True
        self._clients.close()

    def check(self) -> None:
        """Make one read, so that wrong credentials are noticed at once."""
        if self.options.user is None:
            self.revision("/adaptdl/v1/")
            return
        # v2 answers the same to a wrong password as to a user whose role covers another prefix only
        try:
            self.revision("/adaptdl/v1/")
        except StoreAuthError as error:
            logger.debug("not allowed to read /adaptdl/v1/: %s", error)

    # Requests to the server

    def _run(
        self,
        attempt: Callable[[Client], T],
        on_ambiguous: Callable[[], None] | None = None,
        timeout: float | None = None,
    ) -> T:
        """Call `attempt(client)` on one endpoint after the other, and translate python-etcd's errors.

        Errors that are answers (not found, compare failed, exists already) are raised unchanged.
        """
        if self._closed:
            raise StoreUnavailableError(_CLOSED)

        def once(endpoint: str, seconds: float) -> T:
            access = self._clients.current()
            client = access.clients[endpoint].within(seconds)
            return self._clients.ask(lambda: attempt(client), access, endpoint)

        return self._endpoints.run(once, timeout or self.options.timeout, on_ambiguous)

    def _read(self, key: str) -> Node | None:
        try:
            result = self._run(lambda client: client.read(_path(key), quorum=True))
        except etcd.EtcdKeyNotFound:
            return None
        return None if result.dir else Node.of(result)

    def _list(self, prefix: str) -> tuple[list[Node], int]:
        path = _path(directory(prefix))
        try:
            result = self._run(lambda client: client.read(path, recursive=True, quorum=True))
        except etcd.EtcdKeyNotFound as error:
            return [], int(error.payload["index"])
        nodes = [
            Node.of(leaf)
            for leaf in result.leaves
            if not leaf.dir and leaf.key is not None and leaf.key.startswith(prefix)
        ]
        return sorted(nodes, key=lambda node: node.key), int(result.etcd_index)

    def _write(
        self,
        key: str,
        value: str,
        lease: EtcdV2Lease | None,
        on_ambiguous: Callable[[], None] | None = None,
        **condition: Any,
    ) -> int:
        if lease is None:
            return self._put_text(key, close_value(value), None, on_ambiguous, **condition)
        revision = self._put_text(key, close_value(value, lease.id), lease, on_ambiguous, **condition)
        self._settle(key, value, lease, revision, revision)
        return revision

    def _settle(self, key: str, value: str, lease: EtcdV2Lease, revision: int, index: int) -> None:
        """Write a leased key again with its revision in the header, and let the lease refresh it from now on.

        Args:
            key: the key.
            value: its value without the header.
            lease: the lease that it belongs to.
            revision: the revision for the header.
            index: the server's index of the last known write. If another client has changed the key since,
                nothing is written.
        """
        while True:
            try:
                index = self._put_text(key, close_value(value, lease.id, revision), lease, prevIndex=index)
                break
            except (etcd.EtcdCompareFailed, etcd.EtcdKeyNotFound):
                node = self._read(key)
            if node is None or node.lease != lease.id or node.value != value:
                return
            index = node.index
            if node.revision == revision:  # this write was made, and its answer was lost
                break
            if node.revision != node.index:  # written by another thread that put the same value
                return
            # otherwise it was only refreshed since
        lease.attach(key, index)

    def _put_text(
        self,
        key: str,
        text: str,
        lease: EtcdV2Lease | None,
        on_ambiguous: Callable[[], None] | None = None,
        **condition: Any,
    ) -> int:
        """Write the text of a file; return its index."""
        ttl = int(lease.ttl) if lease else None
        result = self._run(lambda client: client.write(_path(key), text, ttl=ttl, **condition), on_ambiguous)
        return int(result.modifiedIndex)

    def _remove(self, key: str, on_ambiguous: Callable[[], None] | None = None, **condition: Any) -> int:
        result = self._run(lambda client: client.delete(_path(key), **condition), on_ambiguous)
        return int(result.modifiedIndex)

    @staticmethod
    def _is_ours(node: Node | None, value: str | None, lease: EtcdV2Lease | None) -> bool:
        if node is None or value is None:
            return node is None and value is None
        return node.value == value and node.lease == (lease.id if lease else "")

    def _held(self, lease: Lease | None) -> EtcdV2Lease | None:
        if lease is None:
            return None
        if not isinstance(lease, EtcdV2Lease) or lease.lost.is_set():
            raise LeaseLostError()
        return lease


class EtcdV2Lease(KeptLease):
    """A set of keys whose time to live this process refreshes."""

    def __init__(self, store: EtcdV2Store, ttl: float) -> None:
        super().__init__(store._keepalive, ttl, asked=time.monotonic())  # its keys are put later
        self.id = uuid.uuid4().hex
        self._store = store
        self._lock = threading.Lock()
        self._keys: dict[str, int] = {}  # key → index of the last write or refresh

    def attach(self, key: str, index: int) -> None:
        """Refresh this key from now on."""
        with self._lock:
            self._keys[key] = index

    def renew(self, timeout: float) -> bool:
        """Refresh every key; return False if one has expired, and then delete the others."""
        with self._lock:
            keys = dict(self._keys)
        for key, index in keys.items():
            if self._refresh(key, index, timeout):
                continue
            if self._ran_out(key, timeout):
                self.let_go(timeout)
                return False
            with self._lock:  # another client deleted it, or put it without this lease
                if self._keys.get(key) == index:
                    del self._keys[key]
        return True

    def _ran_out(self, key: str, timeout: float) -> bool:
        """Return whether a key expired; read the event that followed the last refresh."""
        with self._lock:
            index = self._keys.get(key, 0) + 1
        try:
            event = self._store._run(
                lambda client: client.read(_path(key), wait=True, waitIndex=index), timeout=min(timeout, 1.0)
            )
        except (etcd.EtcdEventIndexCleared, etcd.EtcdWatchTimedOut, etcd.EtcdKeyNotFound):
            # the server has forgotten the event: it expired if there was time for it
            return self.remaining() <= 0
        return str(event.action) == "expire"

    def _refresh(self, key: str, index: int, timeout: float) -> bool:
        for _ in range(3):
            if self._refreshed(key, index, timeout):
                return True
            node = self._store._read(key)
            if node is None or node.lease != self.id:
                return False
            index = node.index  # another thread of this process has just put the key again
        return True

    def _refreshed(self, key: str, index: int, timeout: float) -> bool:
        try:
            result = self._store._run(
                lambda client: client.refresh(_path(key), int(self.ttl), prevIndex=index), timeout=timeout
            )
        except (etcd.EtcdCompareFailed, etcd.EtcdKeyNotFound):
            return False
        with self._lock:
            if self._keys.get(key, 0) <= result.modifiedIndex:
                self._keys[key] = int(result.modifiedIndex)
        return True

    def let_go(self, timeout: float) -> None:
        """Delete the lease's remaining keys."""
        with self._lock:
            keys, self._keys = self._keys, {}
        for key in keys:
            node = self._store._read(key)
            if node is not None and node.lease == self.id:
                self._store.compare_and_swap(key, None, node.revision)


class EtcdV2Watch(Watch):
    """A watch that makes one long request per event, from the index after the last event."""

    def __init__(self, store: EtcdV2Store, prefix: str, start: int) -> None:
        self._store = store
        self._prefix = prefix
        self._path = _path(directory(prefix))
        self._next = start
        self._closed = threading.Event()
        self._access = store._clients.current()
        self._pool = InterruptiblePool(self._access.context)
        self._endpoint = ""
        self._admitted = False  # the server has accepted this watch once
        self._told = False  # a refusal was logged since the last good answer
        store._endpoints.on_switch(self._leave)

    def __iter__(self) -> Iterator[Change]:
        pause = 0.0
        clients: dict[str, Client] = {}
        try:
            while not self._closed.wait(pause):
                pause = min(2 * pause, _LONGEST_PAUSE) or 0.02
                if self._renewed():
                    clients.clear()
                if self._closed.is_set():
                    return
                self._endpoint = self._store._endpoints.current
                client = clients.get(self._endpoint)
                if client is None:
                    client = self._store._clients.client(self._endpoint, self._pool, self._access.password)
                    clients[self._endpoint] = client
                try:
                    poll = functools.partial(self._poll, client)
                    result = self._store._clients.ask(poll, self._access, self._endpoint)
                except etcd.EtcdWatchTimedOut:
                    self._admitted, pause = True, 0.0
                    continue
                except etcd.EtcdEventIndexCleared as error:
                    raise CompactedError(
                        f"changes of {self._prefix!r} from {self._next} on: {error}"
                    ) from None
                except StoreAuthError as error:
                    self._raise_unless_admitted(error)
                    continue
                except TryAgainError as error:
                    self._broken(error)
                    continue
                self._admitted, self._told, pause = True, False, 0.0
                yield from self._changes(result)
        finally:
            self._pool.interrupt()
            self._pool.clear()
            self._forget()

    def _renewed(self) -> bool:
        """Use the present password and certificates; return whether they are new."""
        access = self._store._clients.current()
        if access is self._access:
            return False
        self._access = access
        self._pool.clear()
        self._pool = InterruptiblePool(access.context)
        return True

    def _raise_unless_admitted(self, problem: StoreAuthError) -> None:
        """Raise the refusal of a watch that was never accepted; else log it, and the caller tries again."""
        if not self._admitted:
            raise problem
        level = logging.DEBUG if self._told else logging.WARNING
        self._told = True
        logger.log(level, "watch of %s: %s; trying again", self._prefix, problem)

    def _poll(self, client: Client) -> Any:
        return client.read(
            self._path, wait=True, recursive=True, waitIndex=self._next, timeout=urllib3.Timeout(5.0, _POLL)
        )

    def _changes(self, result: Any) -> Iterator[Change]:
        if result.dir:
            # another program deleted it: this driver never deletes directories
            if result.action in ("delete", "expire"):
                raise CompactedError(f"the directory {result.key!r} was deleted with all that was in it")
        elif result.key.startswith(self._prefix):
            index = int(result.modifiedIndex)
            if result.action in ("delete", "expire", "compareAndDelete"):
                yield Change("delete", result.key, None, index)
            else:
                node = Node.of(result)
                if node.revision == index:  # otherwise only the header was written
                    yield Change("put", node.key, node.value, index)
        self._next = int(result.modifiedIndex) + 1

    def _broken(self, error: TryAgainError) -> None:
        if self._closed.is_set():
            return
        logger.debug("watch of %s: %s: %s", self._prefix, self._endpoint, error.problem)
        self._store._endpoints.switch_from(self._endpoint)
        try:
            newest = self._store.revision(self._prefix)
        except (StoreUnavailableError, StoreAuthError):
            return
        if newest < self._next - 1:
            raise CompactedError(
                f"etcd is at revision {newest} and we have seen {self._next - 1}: its data was replaced"
            )

    def _leave(self, endpoint: str) -> None:
        if self._endpoint == endpoint:
            self._pool.interrupt(for_good=False)

    def _forget(self) -> None:
        self._store._endpoints.on_switch(self._leave, add=False)
        self._store._watches.discard(self)

    def close(self) -> None:
        """End the iteration, even while another thread waits in it."""
        self._closed.set()
        self._pool.interrupt()
        self._forget()
