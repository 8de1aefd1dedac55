"""Several endpoints of one store, tried in turn within a time-out."""

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

logger = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5  # seconds between two rounds over the endpoints


class TryAgainError(Exception):
    """This endpoint gave no answer; another one, or the same one later, may.

    sent: the request may have been carried out all the same. refused: which certificate is not accepted,
    the server's or ours, so that to ask again changes nothing; "" for other problems.
    """

    def __init__(self, problem: str, *, sent: bool = True, refused: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.sent = sent
        self.refused = refused

    @classmethod
    def from_error(cls, error: BaseException) -> TryAgainError:
        """What a failed request of urllib3 means."""
        if isinstance(error, urllib3.exceptions.SSLError | ssl.SSLError):
            refused = ""
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                refused = "the server's certificate is not trusted here"
            elif "alert" in str(error):
                refused = "the client certificate is not accepted"
            return cls(f"TLS: {error}", refused=refused)
        if isinstance(error, urllib3.exceptions.NewConnectionError):
            closed = "refused" in str(error)
            return cls("connection refused" if closed else str(error).rpartition(": ")[2], sent=False)
        if isinstance(error, urllib3.exceptions.ConnectTimeoutError):
            return cls("no connection in time", sent=False)
        if isinstance(error, urllib3.exceptions.TimeoutError | TimeoutError):
            return cls("no answer in time")
        return cls(f"{type(error).__name__}: {error}")


class Endpoints:
    """Which endpoint to use now. Safe to use from several threads."""

    def __init__(self, urls: tuple[str, ...]) -> None:
        self.urls = urls
        self._current = 0
        self._lock = threading.Lock()
        self._on_switch: list[Callable[[str], None]] = []

    @property
    def current(self) -> str:
        """The endpoint that answered last."""
        return self.urls[self._current]

    def switch_from(self, endpoint: str) -> None:
        """`endpoint` did not answer: go on with the next one, and tell those who wait on it."""
        with self._lock:
            if len(self.urls) == 1 or self.urls[self._current] != endpoint:
                return
            self._current = (self._current + 1) % len(self.urls)
            listeners = list(self._on_switch)
        logger.warning("etcd endpoint %s does not answer, trying %s", endpoint, self.current)
        for listener in listeners:
            listener(endpoint)

    def on_switch(self, listener: Callable[[str], None], add: bool = True) -> None:
        """Call `listener(endpoint)` whenever an endpoint was given up; or no longer."""
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
        """`attempt(endpoint, seconds)` until one does not raise TryAgainError.

        Raises StoreAuthError as soon as TLS is refused at every endpoint, and StoreUnavailableError after
        `timeout` seconds.
        on_ambiguous: called before a retry when a request may have been carried out unheard.
        """
        deadline = time.monotonic() + timeout
        pause = _FIRST_PAUSE
        problems: dict[str, TryAgainError] = {}
        while True:
            for left in range(len(self.urls), 0, -1):
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    break
                endpoint = self.current
                try:
                    return attempt(endpoint, remaining / left)
                except TryAgainError as error:
                    problems[endpoint] = error
                    if on_ambiguous and error.sent:
                        on_ambiguous()
                self.switch_from(endpoint)
            if len(problems) == len(self.urls) and all(one.refused for one in problems.values()):
                raise StoreAuthError(
                    f"TLS with etcd is refused ({self._said(problems)}): check the files of ADAPTDL_ETCD_CA, "
                    f"ADAPTDL_ETCD_CERT and ADAPTDL_ETCD_KEY"
                )
            if time.monotonic() + pause >= deadline:
                raise StoreUnavailableError(
                    f"etcd can not be reached ({self._said(problems)}): is it running, and is --etcd right?"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _said(self, problems: dict[str, TryAgainError]) -> str:
        def of(url: str) -> str:
            if url not in problems:
                return "not tried in time"
            return ": ".join(filter(None, (problems[url].refused, problems[url].problem)))

        return "; ".join(f"{url}: {of(url)}" for url in self.urls)


def detect_dead_peer(sock: socket.socket) -> None:
    """For a connection on which silence is normal.

    A host that vanished without a word is found out by the kernel in 2 + 3 x 1 s; a server that merely
    hangs still has a kernel that answers.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # not on every system
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def interrupt(sock: socket.socket) -> None:
    """Make a read that waits in another thread return. The reader closes the socket."""
    with contextlib.suppress(OSError):
        # not SSLSocket.shutdown, which would take the TLS object away under the reader
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
        """End what waits; `for_good`: also what will be asked from now on."""
        self._closed = self._closed or for_good
        for sock in list(self._sockets):
            interrupt(sock)
