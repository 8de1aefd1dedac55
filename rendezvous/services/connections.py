"""Bound the connections of a port, so that strangers cannot keep people and nodes out.

Who asks is known only after the handshake and the first request. Up to then a connection gives way to newer
ones once there are many: silent connections, however many, keep nobody out.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from http.server import ThreadingHTTPServer
from typing import Any

MOST_UNKNOWN = 64
"""Connections whose peer has not proved who it is; a further one ends the oldest of them."""

MOST_KNOWN = 256
"""Connections of people and nodes that have proved who they are; a request on a further one is refused."""


class Connections:
    """The open connections of one port."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unknown: dict[socket.socket, None] = {}  # the oldest first
        self._known: set[socket.socket] = set()

    def enter(self, connection: socket.socket) -> None:
        """Count a connection that was just accepted, and end the oldest unknown one if there are too many."""
        with self._lock:
            self._unknown[connection] = None
            if len(self._unknown) > MOST_UNKNOWN:
                oldest = next(iter(self._unknown))
                del self._unknown[oldest]
                with contextlib.suppress(OSError):
                    # of the socket below TLS: its thread may be in a handshake
                    socket.socket.shutdown(oldest, socket.SHUT_RDWR)

    def prove(self, connection: socket.socket) -> bool:
        """Note that the peer has proved who it is; return False if there are too many such connections."""
        with self._lock:
            if connection not in self._known:
                if connection not in self._unknown or len(self._known) >= MOST_KNOWN:
                    return False
                del self._unknown[connection]
                self._known.add(connection)
            return True

    def leave(self, connection: socket.socket) -> None:
        """Forget a connection that is closed."""
        with self._lock:
            self._unknown.pop(connection, None)
            self._known.discard(connection)


class BoundedServer(ThreadingHTTPServer):
    """An HTTP server with a thread for each connection, of which there are never more than is allowed here.

    A handler calls `connections.prove` once a request shows who asks.
    """

    daemon_threads = True
    request_queue_size = MOST_UNKNOWN

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.connections = Connections()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread."""
        self.connections.enter(request)
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no further thread can be started
            self.connections.leave(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection to its end."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.connections.leave(request)
