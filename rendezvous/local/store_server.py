"""Serve a store in this process's memory to other processes of the same user.

Each connection has a thread. A connection that watches has a second thread, which sends. A client that stops
reading blocks only its own thread: the history of changes is bounded, and a watch that falls behind it ends
with CompactedError.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from adaptdl_elastic._private import RuntimeFileError, private_directory
from adaptdl_elastic.rendezvous.local.file_lock import lies_at
from adaptdl_elastic.rendezvous.local.scratch_directory import Scratch, sweep
from adaptdl_elastic.rendezvous.store.base import Closable, KeyValue, LeaseLostError, StoreError
from adaptdl_elastic.rendezvous.store.local_socket import SCHEME, encode_line, peer_uid, socket_path
from adaptdl_elastic.rendezvous.store.memory import MemoryLease, MemoryStore, MemoryWatch

logger = logging.getLogger(__name__)

MOST_CHANGES = 10_000  # changes kept for watches that begin at an earlier revision
MAX_REQUEST_BYTES = 64 << 20
_SCRATCH = "store-"
_BACKLOG = 128
LOOK_SECONDS = 2.0  # between two looks whether the socket is still there
_ACCEPT_RETRY_SECONDS = 0.2  # pause when accept fails, for example without a free descriptor
_FINISH_SECONDS = 1.0  # time for watches to send the last changes before the server ends


class LocalServer(Closable):
    """A server of one store on a unix socket: `with LocalServer() as server: connect(server.endpoint)`.

    `server.store` is the store itself.
    """

    def __init__(self) -> None:
        self.store = MemoryStore(most_changes=MOST_CHANGES)
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._watches: dict[MemoryWatch, threading.Thread] = {}
        self._leases: dict[int, MemoryLease] = {}
        self._numbers = itertools.count(1)
        self._closing = threading.Event()
        # without variables: a short path, in a place that a logout does not remove
        place = private_directory(environ={})
        sweep(_SCRATCH, place)
        self._scratch = Scratch(_SCRATCH, place)
        self.look: Callable[[str], None] = lambda endpoint: None  # called every few seconds
        self._problem = ""
        try:
            self._listen()
        except BaseException:
            self._scratch.close()
            raise
        self._acceptor = threading.Thread(target=self._accept, name="local-store", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """Send the remaining changes to every watch, then end all connections."""
        self._closing.set()
        with contextlib.suppress(OSError):
            # wakes the thread that accepts, which would try again for two seconds if it did not block
            self._listener.setblocking(True)
            self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join()
        self._listener.close()
        with self._lock:
            watches = dict(self._watches)
        for watch in watches:
            watch.finish()
        deadline = time.monotonic() + _FINISH_SECONDS
        for thread in watches.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            _hang_up(connection)
        self._scratch.close()

    def _listen(self) -> None:
        """Make the socket in the directory that `_scratch` is."""
        endpoint = f"{SCHEME}{self._scratch.path / 'socket'}"
        path, listener = socket_path(endpoint), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(path))
            listener.listen(_BACKLOG)
            listener.settimeout(LOOK_SECONDS)
            self._socket = path, path.lstat()
        except BaseException:
            listener.close()
            raise
        self.endpoint, self._listener = endpoint, listener

    def _restore(self) -> None:
        """Make the socket again if it was removed, at the same path if that is private; say once if not."""
        problem = ""
        try:
            if not lies_at(*self._socket):
                gone = self._listener
                self._scratch.restore(private_directory(environ={}))
                self._listen()
                gone.close()
            self.look(self.endpoint)
        except (OSError, RuntimeFileError, StoreError) as error:
            problem = str(error)
        if problem not in ("", self._problem):
            logger.warning("the files by which commands find this job were removed: %s", problem)
        self._problem = problem

    def _accept(self) -> None:
        while not self._closing.is_set():
            self._restore()
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if not (isinstance(error, TimeoutError) or self._closing.is_set()):
                    logger.warning("a connection to the store could not be taken: %s", error)
                    self._closing.wait(_ACCEPT_RETRY_SECONDS)
                continue
            with self._lock:
                self._connections.add(connection)
            threading.Thread(
                target=self._serve, args=(connection,), name="local-store-client", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        """Answer the requests of one connection until it ends."""
        client = self.store.client()
        try:
            user = peer_uid(connection)
            if user != os.geteuid():  # the mode of the directory should have prevented this
                logger.warning("user %d has connected to the store and is not let in", user)
                return
            with connection.makefile("rb") as lines:
                while (line := lines.readline(MAX_REQUEST_BYTES)).endswith(b"\n"):
                    self._take(connection, client, json.loads(line))
        except OSError as error:
            logger.debug("a client of the store has gone: %s", error)
        except (ValueError, RecursionError) as error:
            logger.warning("a client of the store has sent what is no request: %r", error)
        finally:
            client.close()
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _take(self, connection: socket.socket, client: MemoryStore, request: dict[str, Any]) -> None:
        """Carry out one request, or begin the watch that it asks for."""
        match request:
            case {"do": "watch", "prefix": str(prefix), "start": int(start)}:
                self._stream(connection, client.watch(prefix, start))
            case _:
                try:
                    answer = encode_line({"result": self._answer(client, request)})
                except StoreError as error:
                    answer = _failure(error)
                connection.sendall(answer)

    def _stream(self, connection: socket.socket, watch: MemoryWatch) -> None:
        """Send the changes of a watch from another thread.

        This thread goes on reading, so that it notices when the client disconnects.
        """
        thread = threading.Thread(
            target=self._send_changes, args=(connection, watch), name="local-store-watch", daemon=True
        )
        with self._lock:  # `close` joins the threads that it finds here
            self._watches[watch] = thread
            thread.start()

    def _send_changes(self, connection: socket.socket, watch: MemoryWatch) -> None:
        try:
            # confirms the watch, which `close` knows by now
            connection.sendall(encode_line({"result": None}))
            for change in watch:
                found = [change.kind, change.key, change.value, change.revision]
                connection.sendall(encode_line({"result": found}))
        except StoreError as error:
            with contextlib.suppress(OSError):
                connection.sendall(_failure(error))
        except OSError as error:
            logger.debug("a watch of the store has gone: %s", error)
        finally:
            with self._lock:
                self._watches.pop(watch, None)
            _hang_up(connection)

    def _answer(self, client: MemoryStore, request: dict[str, Any]) -> Any:
        match request:
            case {"do": "get", "key": str(key)}:
                found = client.get(key)
                return None if found is None else _item_fields(found)
            case {"do": "range", "prefix": str(prefix)}:
                snapshot = client.range(prefix)
                return [[_item_fields(item) for item in snapshot.items], snapshot.revision]
            case {"do": "put", "key": str(key), "value": str(value), "lease": lease}:
                return client.put(key, value, self._held(lease))
            case {
                "do": "swap",
                "key": str(key),
                "value": (str() | None) as value,
                "expected": int(expected),
                "lease": lease,
            }:
                return client.compare_and_swap(key, value, expected, self._held(lease))
            case {"do": "delete", "key": str(key)}:
                return client.delete(key)
            case {"do": "delete_prefix", "prefix": str(prefix)}:
                return client.delete_prefix(prefix)
            case {"do": "lease", "ttl": float(ttl) | int(ttl)}:
                return self._lease(client, float(ttl))
            case {"do": "renew", "lease": int(number)}:
                lease = self._leases.get(number)
                return lease is not None and lease.renew()
            case {"do": "revoke", "lease": int(number)}:
                return self._revoke(number)
        raise ValueError(f"{str(request)[:200]!r} is no request")

    def _lease(self, client: MemoryStore, ttl: float) -> int:
        lease = client.lease(ttl)
        lease.renew()  # from now on the lease expires unless its holder renews it
        with self._lock:
            for lost in [number for number, one in self._leases.items() if one.lost.is_set()]:
                del self._leases[lost]
            self._leases[number := next(self._numbers)] = lease
        return number

    def _revoke(self, number: int) -> None:
        with self._lock:
            lease = self._leases.pop(number, None)
        if lease is not None:
            lease.revoke()

    def _held(self, number: object) -> MemoryLease | None:
        """Return the lease that a request names, or None if it names none.

        Raises:
            LeaseLostError: the lease is unknown or lost.
        """
        if number is None:
            return None
        lease = self._leases.get(number) if isinstance(number, int) else None
        if lease is None:
            raise LeaseLostError()
        return lease


def _item_fields(item: KeyValue) -> list[str | int]:
    return [item.key, item.value, item.create_revision, item.mod_revision]


def _failure(error: StoreError) -> bytes:
    return encode_line({"error": type(error).__name__, "message": str(error)})


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
