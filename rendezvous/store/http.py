"""JSON over HTTP to etcd's v3 gateway.

No settings are taken from the environment: no proxies, no CA bundles, no .netrc.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import urllib3

from adaptdl_elastic.rendezvous.store.connection_error import TryAgainError
from adaptdl_elastic.rendezvous.store.credentials import renewable_tls
from adaptdl_elastic.rendezvous.store.endpoints import Endpoints, detect_dead_peer, interrupt
from adaptdl_elastic.rendezvous.store.store_options import StoreOptions

Json = dict[str, Any]


class HttpStatusError(Exception):
    """The server answered with an error."""

    def __init__(self, status: int, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code  # gRPC status code, if the server sent one


class Http:
    """Requests to several endpoints of one etcd. Safe to use from several threads, but not after a fork."""

    def __init__(
        self, urls: tuple[str, ...], options: StoreOptions, is_retryable: Callable[[HttpStatusError], bool]
    ) -> None:
        self.endpoints = Endpoints(urls, options.hint)
        self.options = options
        self._is_retryable = is_retryable
        self.tls = renewable_tls(options, any(url.startswith("https") for url in urls))
        self._lock = threading.Lock()
        self._context = self.tls.value
        self._pool = self._new_pool()

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
        """POST a request (GET without a body) and return the answer.

        Args:
            path: path of the API.
            body: the request as JSON.
            headers: additional HTTP headers.
            timeout: seconds; None: those of the options.
            first_line: the answer is a stream of which only the first line is read.
            on_ambiguous: called before a retry if the failed request may have been carried out.

        Raises:
            HttpStatusError: the answer is an error.
        """
        data = None if body is None else json.dumps(body).encode()

        def attempt(endpoint: str, seconds: float) -> Json:
            context, pool = self._current()
            try:
                return self._once(pool, endpoint + path, data, headers or {}, seconds, first_line)
            except HttpStatusError as error:
                if not self._is_retryable(error):
                    raise
                raise TryAgainError(error.message) from None
            except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
                raise self.failed(TryAgainError.from_error(error, endpoint, self.options), context) from None

        return self.endpoints.run(attempt, timeout or self.options.timeout, on_ambiguous)

    def get_once(self, path: str) -> Json:
        """GET once from the endpoint in use; return the answer.

        For diagnostics: errors of HTTP, urllib3, TLS and JSON are raised unchanged.
        """
        response = self._current()[1].request(
            "GET", self.endpoints.current + path, timeout=self.options.timeout, redirect=False
        )
        return _answer(response.status, response.data)

    def failed(self, problem: TryAgainError, context: ssl.SSLContext | None) -> TryAgainError:
        """Read the certificates again if the connection may have been refused because of them.

        Returns the problem, which does not count as a refusal if the certificates have been replaced.
        """
        # a server may close the connection before its refusal of a certificate is read
        if problem.sent and self.tls.renew(context):
            problem.refused = ""
        return problem

    def _current(self) -> tuple[ssl.SSLContext | None, urllib3.PoolManager]:
        with self._lock:
            if self._context is not self.tls.value:
                self._context = self.tls.value
                self._pool = self._new_pool()  # requests under way keep the old pool
            return self._context, self._pool

    def _new_pool(self) -> urllib3.PoolManager:
        urls = self.endpoints.urls
        return urllib3.PoolManager(num_pools=len(urls), maxsize=8, retries=False, ssl_context=self._context)

    @staticmethod
    def _once(
        pool: urllib3.PoolManager,
        url: str,
        data: bytes | None,
        headers: dict[str, str],
        timeout: float,
        first_line: bool,
    ) -> Json:
        response = pool.request(
            "GET" if data is None else "POST",
            url,
            body=data,
            headers={"Content-Type": "application/json", **headers},
            timeout=timeout,
            redirect=False,
        )
        return _answer(response.status, response.data.partition(b"\n")[0] if first_line else response.data)

    def close(self) -> None:
        """Close the connections."""
        self._pool.clear()


class Stream:
    """A request whose answer is a stream of JSON lines; `close` from any thread ends the reading."""

    def __init__(self, owner: Http, path: str, body: Json, headers: dict[str, str]) -> None:
        self.endpoint = owner.endpoints.current
        context = owner.tls.value
        self._connection = _connection(self.endpoint, owner.options.timeout, context)
        try:
            self._connection.connect()
            self._socket: socket.socket = self._connection.sock
            detect_dead_peer(self._socket)
            self._connection.request(
                "POST", path, json.dumps(body).encode(), {"Content-Type": "application/json", **headers}
            )
            self._response = self._connection.getresponse()
            if self._response.status != 200:
                _answer(self._response.status, self._response.read())
            self._socket.settimeout(None)  # from here on the stream may be silent for long
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            problem = TryAgainError.from_error(error, self.endpoint, owner.options)
            raise owner.failed(problem, context) from None
        except BaseException:
            self._connection.close()
            raise

    def __iter__(self) -> Iterator[Json]:
        """Yield every complete line until the server, the network or `close` ends the stream."""
        while True:
            try:
                line = self._response.readline()
            except (OSError, ValueError, AttributeError, http.client.HTTPException):
                return
            if not line.endswith(b"\n"):  # cut off in the middle: the caller asks for the rest again
                return
            try:
                answer = json.loads(line) if line.strip() else None
            except ValueError:  # not from etcd but from a proxy between
                return
            if isinstance(answer, dict):
                yield answer

    def close(self) -> None:
        """End the reading, even while another thread waits in it."""
        interrupt(self._socket)

    def release(self) -> None:
        """Free the connection; called by the reader at the end."""
        self._response.close()
        self._connection.close()
        self._socket.close()


def _connection(endpoint: str, timeout: float, context: ssl.SSLContext | None) -> http.client.HTTPConnection:
    url = urlsplit(endpoint)
    host, port = str(url.hostname), url.port
    if url.scheme == "https":
        return http.client.HTTPSConnection(host, port, timeout=timeout, context=context)
    return http.client.HTTPConnection(host, port, timeout=timeout)


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
    if isinstance(fault, dict):  # an error within a stream
        raise HttpStatusError(
            int(fault.get("http_code", status)), str(fault.get("message", fault)), fault.get("grpc_code")
        )
    if status != 200 or fault:
        said = answer.get("message") or fault or data[:200].decode(errors="replace")
        raise HttpStatusError(status, str(said or f"HTTP status {status}"), answer.get("code"))
    return answer
