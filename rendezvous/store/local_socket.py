"""Client of the store in a standalone job's agent, for other processes of the machine.

The agent keeps the store in its memory and serves it on a unix socket (`local.store_server`). Only the job's
user can enter the directory of the socket, and both sides ask the kernel for the user at the other end. A
message is one line of JSON. Requests and their answers alternate on one connection; each watch has a
connection of its own. The store ends with its agent, and so with the job: a lost connection is not opened
again.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from adaptdl_elastic.rendezvous.store.base import (
    Change,
    CompactedError,
    KeyValue,
    Lease,
    LeaseLostError,
    Snapshot,
    Store,
    StoreAuthError,
    StoreError,
    StoreUnavailableError,
    Watch,
)
from adaptdl_elastic.rendezvous.store.keepalive import KeepAlive, KeptLease
from adaptdl_elastic.rendezvous.store.store_options import StoreOptionError

SCHEME = "unix:"
_MAX_PATH_BYTES = 107  # limit of a unix socket's path on Linux
_READ_BYTES = 1 << 16
_CLOSE_SECONDS = 2.0
_ERRORS: dict[str, type[StoreError]] = {
    kind.__name__: kind for kind in (CompactedError, LeaseLostError, StoreAuthError)
}


class JobEndedError(StoreUnavailableError):
    """The agent that served the store has ended, and the standalone job with it."""


def is_local(endpoint: str) -> bool:
    """Return whether an endpoint is the socket of a standalone job, not an etcd."""
    return endpoint.startswith(SCHEME)


def socket_path(endpoint: str) -> Path:
    """Return the path in `unix:/path`.

    Raises:
        StoreOptionError: the path cannot be that of a socket.
    """
    path = endpoint.removeprefix(SCHEME)
    if not path.startswith("/"):
        raise StoreOptionError(f"endpoint {endpoint!r} is not of the form unix:/path/of/a/socket")
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise StoreOptionError(
            f"the path {path!r} is too long for a socket (at most {_MAX_PATH_BYTES} bytes)"
        )
    return Path(path)


def peer_uid(connection: socket.socket) -> int:
    """Return the user at the other end of a unix socket, as recorded by the kernel."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", found)[1])


def encode_line(message: dict[str, Any]) -> bytes:
    """Return a message encoded as one line of JSON."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class _Connection:
    """One connection to the server, for requests or for one watch."""

    def __init__(self, path: Path, timeout: float) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout)
        try:
            self._socket.connect(str(path))
            owner = peer_uid(self._socket)
        except PermissionError:
            self._socket.close()
            raise StoreAuthError(f"{path}: the standalone job belongs to another user") from None
        except OSError as error:
            self._socket.close()
            raise self._unavailable(error) from None
        if owner != os.geteuid():
            self._socket.close()
            raise StoreAuthError(f"{path}: the standalone job belongs to user {owner}, not {os.geteuid()}")
        self._received = bytearray()

    def _unavailable(self, error: OSError | None = None) -> StoreUnavailableError:
        if isinstance(error, TimeoutError):
            return StoreUnavailableError(f"the agent of the standalone job at {self._path} does not answer")
        return JobEndedError(
            f"the standalone job at {self._path} has ended, and its store with it"
            + (f" ({error.strerror})" if error is not None and error.strerror else "")
        )

    def send(self, message: dict[str, Any], timeout: float | None) -> None:
        """Send one message; raise StoreUnavailableError if the server does not take it."""
        try:
            self._socket.settimeout(timeout)
            self._socket.sendall(encode_line(message))
        except OSError as error:
            raise self._unavailable(error) from None

    def receive(self) -> Any:
        """Return the result in the next message; raise the error in it, or StoreUnavailableError."""
        while (end := self._received.find(b"\n")) < 0:
            try:
                data = self._socket.recv(_READ_BYTES)
            except OSError as error:
                raise self._unavailable(error) from None
            if not data:
                raise self._unavailable()
            self._received += data
        message = json.loads(self._received[:end])
        del self._received[: end + 1]
        if "error" in message:
            raise _ERRORS.get(message["error"], StoreError)(message["message"])
        return message["result"]

    def wait_for_ever(self) -> None:
        """Let `receive` wait without a limit."""
        self._socket.settimeout(None)

    def close(self) -> None:
        """End the connection, even while another thread waits in `receive`."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class LocalLease(KeptLease):
    """A lease of the server that this process renews."""

    def __init__(self, store: LocalStore, keeper: KeepAlive, ttl: float, number: int, asked: float) -> None:
        super().__init__(keeper, ttl, asked)
        self.store, self.number = store, number

    def renew(self, timeout: float) -> bool:
        """Ask the server to renew the lease; return False if it is lost."""
        return bool(self.store.call(timeout=timeout, do="renew", lease=self.number))

    def let_go(self, timeout: float) -> None:
        """Revoke the lease on the server."""
        self.store.call(timeout=timeout, do="revoke", lease=self.number)


class LocalWatch(Watch):
    """A stream of changes from the server."""

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection
        self._closed = threading.Event()

    def __iter__(self) -> Iterator[Change]:
        while not self._closed.is_set():
            try:
                found = self._connection.receive()
            except StoreUnavailableError:
                if self._closed.is_set():
                    return
                raise
            yield Change(*found)

    def close(self) -> None:
        """End the iteration, even while another thread waits in it."""
        self._closed.set()
        self._connection.close()


class LocalStore(Store):
    """A client of `local.store_server.LocalServer`; `base` lists the guarantees of its methods.

    Args:
        path: the server's socket.
        timeout: seconds that one operation may take.
    """

    def __init__(self, path: Path, timeout: float) -> None:
        self._path, self._timeout = path, timeout
        self._closed = False
        self._lock, self._keeper = threading.Lock(), KeepAlive("local-store-leases")
        self._connection: _Connection | None = None
        self._watches: list[LocalWatch] = []

    def check(self) -> None:
        """Read a key to find out whether the server answers."""
        self.get("/")

    def call(self, *, timeout: float | None = None, **request: Any) -> Any:
        """Make a request.

        Args:
            timeout: seconds to wait for the answer; None: those of this store.
            request: the operation, `do`, and its arguments.

        Raises:
            StoreUnavailableError: no answer came. A write may have been carried out all the same.
            StoreError: the server's own error.
        """
        timeout = self._timeout if timeout is None else timeout
        if not self._lock.acquire(timeout=timeout):
            raise StoreUnavailableError(f"the agent of the standalone job at {self._path} does not answer")
        try:
            if self._closed:  # a lease that is still being renewed must not open a connection again
                raise StoreUnavailableError("this store has been closed")
            if self._connection is None:
                self._connection = _Connection(self._path, timeout)
            try:
                self._connection.send(request, timeout)
                return self._connection.receive()
            # a late answer must not be taken for the answer to the next request
            except StoreUnavailableError:
                self._connection.close()
                self._connection = None
                raise
        finally:
            self._lock.release()

    def get(self, key: str) -> KeyValue | None:
        """Return the key, or None if it does not exist."""
        found = self.call(do="get", key=key)
        return None if found is None else KeyValue(*found)

    def range(self, prefix: str) -> Snapshot:
        """Return every key that begins with `prefix`, sorted, as of one revision."""
        items, revision = self.call(do="range", prefix=prefix)
        return Snapshot(tuple(KeyValue(*item) for item in items), revision, prefix)

    def put(self, key: str, value: str, lease: Lease | None = None) -> int:
        """Write the key whatever it held before; return the new revision."""
        return int(self.call(do="put", key=key, value=value, lease=self._number(lease)))

    def compare_and_swap(
        self, key: str, value: str | None, expected_revision: int, lease: Lease | None = None
    ) -> int | None:
        """Write the key (None: delete it) if its mod_revision is the expected one.

        Returns the new revision, or None if the comparison failed.
        """
        number = self._number(lease)
        found = self.call(do="swap", key=key, value=value, expected=expected_revision, lease=number)
        return None if found is None else int(found)

    def delete(self, key: str) -> bool:
        """Delete one key; return whether it existed."""
        return bool(self.call(do="delete", key=key))

    def delete_prefix(self, prefix: str) -> int:
        """Delete every key that begins with `prefix`; return how many there were."""
        return int(self.call(do="delete_prefix", prefix=prefix))

    def lease(self, ttl: float) -> LocalLease:
        """Return a new lease of `ttl` seconds, renewed in the background."""
        asked = time.monotonic()
        lease = LocalLease(self, self._keeper, ttl, int(self.call(do="lease", ttl=ttl)), asked)
        self._keeper.add(lease)
        return lease

    def watch(self, prefix: str, start_revision: int = 0) -> LocalWatch:
        """Return the changes under `prefix` from `start_revision` on (0: from now on).

        The watch raises StoreUnavailableError when the server ends, since the store ends with it.
        """
        connection = _Connection(self._path, self._timeout)
        try:
            connection.send({"do": "watch", "prefix": prefix, "start": start_revision}, self._timeout)
            connection.receive()  # the server confirms the start revision
            connection.wait_for_ever()
        except BaseException:
            connection.close()
            raise
        watch = LocalWatch(connection)
        self._watches.append(watch)
        return watch

    def close(self) -> None:
        """Revoke the client's leases, end its watches, and close its connections."""
        for watch in self._watches:
            watch.close()
        self._keeper.close(_CLOSE_SECONDS)
        with self._lock:
            self._closed = True
            if self._connection is not None:
                self._connection.close()

    def _number(self, lease: Lease | None) -> int | None:
        if lease is None:
            return None
        if not isinstance(lease, LocalLease) or lease.store is not self or lease.lost.is_set():
            raise LeaseLostError()
        return lease.number
