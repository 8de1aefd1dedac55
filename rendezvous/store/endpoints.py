"""Try several endpoints of one store in turn within a time-out."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection

from adaptdl_elastic.rendezvous.store.base import StoreAuthError, StoreUnavailableError
from adaptdl_elastic.rendezvous.store.connection_error import TryAgainError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5  # seconds between two passes over the endpoints


class Endpoints:
    """The endpoints of one store and the one in use. Safe to use from several threads.

    Args:
        urls: the endpoints.
        hint: what the error says if none can be reached.
    """

    def __init__(self, urls: tuple[str, ...], hint: str) -> None:
        self.urls, self._hint = urls, hint
        self._current = 0
        self._lock = threading.Lock()
        self._on_switch: list[Callable[[str], None]] = []

    @property
    def current(self) -> str:
        """The endpoint in use."""
        return self.urls[self._current]

    def switch_from(self, endpoint: str) -> None:
        """Go on with the next endpoint because `endpoint` did not answer; tell the listeners."""
        with self._lock:
            if len(self.urls) == 1 or self.urls[self._current] != endpoint:
                return
            self._current = (self._current + 1) % len(self.urls)
            listeners = list(self._on_switch)
        logger.warning("etcd endpoint %s does not answer, trying %s", endpoint, self.current)
        for listener in listeners:
            listener(endpoint)

    def on_switch(self, listener: Callable[[str], None], add: bool = True) -> None:
        """Call `listener(endpoint)` whenever an endpoint is given up; `add=False` removes the listener."""
        with self._lock:
            if add:
                self._on_switch.append(listener)
            elif listener in self._on_switch:
                self._on_switch.remove(listener)

    def run(
        self,
        attempt: Callable[[str, float], T],
        timeout: float,
        on_ambiguous: Callable[[], None] | None = None,
    ) -> T:
        """Call `attempt(endpoint, seconds)` on one endpoint after the other until it raises no TryAgainError.

        Args:
            attempt: makes the request, within so many seconds.
            timeout: seconds for all attempts together.
            on_ambiguous: called before a retry if the failed request may have been carried out.

        Raises:
            StoreAuthError: every endpoint refused the TLS connection.
            StoreUnavailableError: no endpoint answered within the time-out.
        """
        deadline = time.monotonic() + timeout
        pause = _FIRST_PAUSE
        problems: dict[str, TryAgainError] = {}
        while True:
            for left in range(len(self.urls), 0, -1):
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    break
                endpoint, seconds = self.current, remaining / left
                try:
                    return attempt(endpoint, seconds)
                except TryAgainError as error:
                    # an attempt that the deadline cuts short says less than what was found before it
                    cut_short = error.timed_out and seconds < timeout / len(self.urls) / 2
                    if not cut_short or endpoint not in problems:
                        problems[endpoint] = error
                    if on_ambiguous and error.sent:
                        on_ambiguous()
                self.switch_from(endpoint)
            if len(problems) == len(self.urls) and all(one.refused for one in problems.values()):
                remedies = dict.fromkeys(one.remedy for one in problems.values())
                raise StoreAuthError(
                    f"TLS with etcd is refused ({self._list(problems)}): {'; '.join(remedies)}"
                )
            if time.monotonic() + pause >= deadline:
                raise StoreUnavailableError(f"etcd cannot be reached ({self._list(problems)}): {self._hint}")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _list(self, problems: dict[str, TryAgainError]) -> str:
        def of(url: str) -> str:
            if url not in problems:
                return "not tried in time"
            return ": ".join(filter(None, (problems[url].refused, problems[url].problem)))

        return "; ".join(f"{url}: {of(url)}" for url in self.urls)


def detect_dead_peer(sock: socket.socket) -> None:
    """Configure TCP keep-alive on a connection that may be silent for long.

    The kernel then detects a host that vanished within 2 + 3 x 1 s. A server process that hangs is not
    detected, since its kernel still answers.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # not defined on every system
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def interrupt(sock: socket.socket) -> None:
    """Make a read that waits in another thread return. The reader closes the socket."""
    with contextlib.suppress(OSError):
        # SSLSocket.shutdown would remove the TLS object while the reader uses it
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


class InterruptiblePool(urllib3.PoolManager):
    """A PoolManager whose waiting reads can be ended from another thread."""

    def __init__(self, ssl_context: ssl.SSLContext | None) -> None:
        super().__init__(num_pools=1, maxsize=1, retries=False, ssl_context=ssl_context)
        self._sockets: list[socket.socket] = []
        self._closed = False
        pool = self

        class Plain(HTTPConnection):
            def connect(self) -> None:
                super().connect()
                pool._opened(self.sock)

        class Tls(HTTPSConnection):
            def connect(self) -> None:
                super().connect()
                pool._opened(self.sock)

        class PlainPool(urllib3.HTTPConnectionPool):
            ConnectionCls = Plain

        class TlsPool(urllib3.HTTPSConnectionPool):
            ConnectionCls = Tls

        self.pool_classes_by_scheme = {"http": PlainPool, "https": TlsPool}

    def _opened(self, sock: object) -> None:
        if isinstance(sock, socket.socket):
            detect_dead_peer(sock)
            self._sockets = [one for one in self._sockets if one.fileno() >= 0] + [sock]
            if self._closed:
                interrupt(sock)

    def interrupt(self, for_good: bool = True) -> None:
        """End the reads that wait; with `for_good`, end all later ones, too."""
        self._closed = self._closed or for_good
        for sock in list(self._sockets):
            interrupt(sock)
