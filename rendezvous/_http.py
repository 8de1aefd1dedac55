"""JSON over HTTP to one of several endpoints, in turn, within a time-out.

Nothing here is taken from the environment: no proxies, no CA bundles, no .netrc.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import urllib3

from adaptdl_elastic.rendezvous.options import StoreOptions
from adaptdl_elastic.rendezvous.store import StoreUnavailableError

logger = logging.getLogger(__name__)

Json = dict[str, Any]

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5  # seconds between rounds over the endpoints


class HttpStatusError(Exception):
    """The server answered, with an error."""

    def __init__(self, status: int, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code  # gRPC's, where the server sent one


class RetryableError(Exception):
    """This endpoint can not answer now; another one, or the same one later, may."""


class Http:
    """Several endpoints of one etcd. Safe to use from several threads, not across a fork."""

    def __init__(
        self,
        endpoints: tuple[str, ...],
        options: StoreOptions,
        is_retryable: Callable[[HttpStatusError], bool],
    ) -> None:
        self.endpoints = endpoints
        self.options = options
        self._is_retryable = is_retryable
        self._current = 0
        self._lock = threading.Lock()
        self._on_switch: list[Callable[[str], None]] = []
        self.ssl_context = options.ssl_context() if any(e.startswith("https") for e in endpoints) else None
        self._pool = urllib3.PoolManager(
            num_pools=len(endpoints), maxsize=8, retries=False, ssl_context=self.ssl_context
        )

    @property
    def current(self) -> str:
        """The endpoint that answered last."""
        return self.endpoints[self._current]

    def switch_from(self, endpoint: str) -> None:
        """`endpoint` did not answer: go on with the next one."""
        with self._lock:
            if len(self.endpoints) == 1 or self.endpoints[self._current] != endpoint:
                return
            self._current = (self._current + 1) % len(self.endpoints)
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

    def call(
        self,
        path: str,
        body: Json | None,
        *,
        headers: dict[str, str] | None = None,
        timeout: float | None = None,
        first_line: bool = False,
        on_ambiguous: Callable[[], None] | None = None,
    ) -> Json:
        """POST (GET without a body) and return the answer; HttpStatusError for an answer that is an error.

        first_line: the answer is a stream; return its first line.
        on_ambiguous: called before a retry when a request may have been carried out unheard.
        """
        deadline = time.monotonic() + (timeout or self.options.timeout)
        pause = _FIRST_PAUSE
        problem: dict[str, str] = {}
        while True:
            for left in range(len(self.endpoints), 0, -1):
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    break
                endpoint = self.current
                try:
                    return self._once(endpoint + path, body, headers or {}, remaining / left, first_line)
                except HttpStatusError as error:
                    if not self._is_retryable(error):
                        raise
                    problem[endpoint] = error.message
                    if on_ambiguous:
                        on_ambiguous()
                except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
                    problem[endpoint] = _describe(error)
                    if on_ambiguous and not isinstance(error, urllib3.exceptions.NewConnectionError):
                        on_ambiguous()
                self.switch_from(endpoint)
            if time.monotonic() + pause >= deadline or all(map(_hopeless, problem.values())):
                raise StoreUnavailableError(_unavailable(self.endpoints, problem))
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _once(
        self, url: str, body: Json | None, headers: dict[str, str], timeout: float, first_line: bool
    ) -> Json:
        response = self._pool.request(
            "GET" if body is None else "POST",
            url,
            body=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json", **headers},
            timeout=timeout,
            redirect=False,
        )
        return _answer(response.status, response.data.partition(b"\n")[0] if first_line else response.data)

    def close(self) -> None:
        """Drop the connections."""
        self._pool.clear()


class Stream:
    """One request whose answer is a stream of JSON lines; `close` from any thread ends the reading."""

    def __init__(self, http_: Http, path: str, body: Json, headers: dict[str, str]) -> None:
        self.endpoint = http_.current
        url = urlsplit(self.endpoint)
        timeout = http_.options.timeout
        host, port = str(url.hostname), url.port
        if http_.ssl_context is not None and url.scheme == "https":
            self._connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                host, port, timeout=timeout, context=http_.ssl_context
            )
        else:
            self._connection = http.client.HTTPConnection(host, port, timeout=timeout)
        try:
            self._connection.connect()
            self._socket: socket.socket = self._connection.sock
            _detect_dead_peer(self._socket)
            self._connection.request(
                "POST", path, json.dumps(body).encode(), {"Content-Type": "application/json", **headers}
            )
            self._response = self._connection.getresponse()
            if self._response.status != 200:
                _answer(self._response.status, self._response.read())
            self._socket.settimeout(None)  # from here on silence is what is expected
        except BaseException:
            self._connection.close()
            raise

    def __iter__(self) -> Iterator[Json]:
        """Every whole line until the server, the network or `close` ends it."""
        while True:
            try:
                line = self._response.readline()
            except (OSError, ValueError, AttributeError, http.client.HTTPException):
                return
            if not line.endswith(b"\n"):  # cut off in the middle: what follows is asked for again
                return
            if line.strip():
                yield json.loads(line)

    def close(self) -> None:
        """End the reading, also one that waits in another thread."""
        with contextlib.suppress(OSError):
            # not SSLSocket.shutdown, which would take the TLS object away under the reader
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def release(self) -> None:
        """Free what it holds; for the reader, when it is done."""
        self._response.close()
        self._connection.close()
        self._socket.close()


def _detect_dead_peer(sock: socket.socket) -> None:
    # A host that vanished without a word is found out by the kernel in 2 + 3 x 1 s; a server that merely
    # hangs still has a kernel that answers.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # not on every system
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _answer(status: int, data: bytes) -> Json:
    try:
        answer = json.loads(data) if data.strip() else {}
    except ValueError:
        answer = {}
        if status == 200:
            raise ValueError(f"not JSON: {data[:100]!r}") from None
    if not isinstance(answer, dict):
        raise ValueError(f"not a JSON object: {data[:100]!r}")
    fault = answer.get("error")
    if isinstance(fault, dict):  # in a stream
        raise HttpStatusError(
            int(fault.get("http_code", status)), str(fault.get("message", fault)), fault.get("grpc_code")
        )
    if status != 200 or fault:
        text = (
            answer.get("message") or fault or data[:200].decode(errors="replace") or f"HTTP status {status}"
        )
        raise HttpStatusError(status, str(text), answer.get("code"))
    return answer


def _describe(error: BaseException) -> str:
    if isinstance(error, urllib3.exceptions.SSLError | ssl.SSLError):
        return f"TLS: {error}"
    if isinstance(error, urllib3.exceptions.TimeoutError | TimeoutError):
        return "no answer in time"
    if isinstance(error, urllib3.exceptions.NewConnectionError):
        return "connection refused" if "refused" in str(error) else str(error).rpartition(": ")[2]
    return f"{type(error).__name__}: {error}"


def _hopeless(problem: str) -> bool:
    return problem.startswith("TLS: ")


def _unavailable(endpoints: tuple[str, ...], problem: dict[str, str]) -> str:
    said = "; ".join(f"{endpoint}: {problem.get(endpoint, 'no answer in time')}" for endpoint in endpoints)
    return f"etcd can not be reached ({said}): is it running, and is --etcd right?"
