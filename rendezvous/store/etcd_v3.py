"""etcd through its v3 API, by the JSON gateway that is built into every server from 3.4 on.

64-bit numbers are sent as strings, keys and values as base64. A request whose answer was lost is repeated. If
a compare-and-swap may have been carried out before, the key is read to find out.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator

from adaptdl_elastic._explained import see
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
    StoreFullError,
    StoreRefusedError,
    StoreUnavailableError,
    Watch,
)
from adaptdl_elastic.rendezvous.store.connection_error import TryAgainError
from adaptdl_elastic.rendezvous.store.http import Http, HttpStatusError, Json, Stream
from adaptdl_elastic.rendezvous.store.keepalive import KeepAlive, KeptLease
from adaptdl_elastic.rendezvous.store.login import Login
from adaptdl_elastic.rendezvous.store.store_options import StoreOptions

logger = logging.getLogger(__name__)

_NO_RIGHT = "the etcd user may not do this: its role needs readwrite on the prefix"
_NAMED = (
    "the client certificate has a common name (CN), and etcd's gateway refuses those while users are "
    "enabled: make one without"
)
_NO_USER = "this etcd asks for a user: set ADAPTDL_ETCD_USER and ADAPTDL_ETCD_PASSWORD_FILE"
_CLOSED = "this store has been closed"
_LONGEST_PAUSE = 1.0  # seconds between two attempts of a watch to reconnect
# gRPC status codes (google.golang.org/grpc/codes)
_RESOURCE_EXHAUSTED, _OUT_OF_RANGE, _UNAVAILABLE, _UNAUTHENTICATED = 8, 11, 14, 16
_PASSING = (408, 429)  # HTTP statuses 4xx that may change when the request is repeated


def _b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _text(data: str) -> str:
    # other programs may have stored bytes that are not UTF-8
    return base64.b64decode(data).decode(errors="replace")


def range_end(prefix: str) -> bytes:
    """Return the first key after all that begin with `prefix`; a zero byte if there is none."""
    data = bytearray(prefix.encode())
    while data and data[-1] == 0xFF:
        data.pop()
    if not data:
        return b"\0"
    data[-1] += 1
    return bytes(data)


def _span(prefix: str) -> Json:
    return {"key": _b64(prefix or "\0"), "range_end": base64.b64encode(range_end(prefix)).decode()}


def _key_value(item: Json) -> KeyValue:
    return KeyValue(
        _text(item["key"]),
        _text(item.get("value", "")),
        int(item.get("create_revision", 0)),
        int(item.get("mod_revision", 0)),
    )


def _revision(answer: Json) -> int:
    return int(answer["header"]["revision"])


def _is_retryable(error: HttpStatusError) -> bool:
    if error.code == _RESOURCE_EXHAUSTED:
        return "too many requests" in error.message
    return error.code == _UNAVAILABLE or error.status in (502, 503, 504)


def _is_stale_token(error: HttpStatusError) -> bool:
    return "invalid auth token" in error.message or "revision of auth store is old" in error.message


def _store_error(error: HttpStatusError) -> StoreError:
    """Translate the server's error; name the remedy if there is one."""
    said = error.message
    if "lease not found" in said:
        return LeaseLostError()
    if "permission denied" in said:
        return StoreAuthError(_NO_RIGHT + see(_NO_RIGHT))
    if said.startswith("CommonName of client"):
        return StoreAuthError(_NAMED + see(_NAMED))
    if error.code == _UNAUTHENTICATED or error.status == 401 or "authentication failed" in said:
        return StoreAuthError(f"etcd refused the login ({said}): check ADAPTDL_ETCD_USER and its password")
    if "user name is empty" in said or "user name not found" in said:
        return StoreAuthError(_NO_USER)
    if "too large" in said or "larger than max" in said:
        return StoreRefusedError("etcd refused a value as too large: it takes up to 1.5 MB")
    if "space exceeded" in said:
        return StoreFullError(
            "etcd is full: compact and defragment it, or raise --quota-backend-bytes, then disarm the alarm"
        )
    kind = StoreRefusedError if 400 <= error.status < 500 and error.status not in _PASSING else StoreError
    return kind(f"etcd: {said} (HTTP status {error.status})")


class EtcdV3Store(Store):
    """A store on etcd's v3 API; `store.base` lists the guarantees of its methods."""

    has_users = True

    def __init__(self, endpoints: tuple[str, ...], options: StoreOptions | None = None) -> None:
        self.options = options or StoreOptions()
        self._http = Http(endpoints, self.options, _is_retryable)
        self._login = Login(self.options, self._authenticate)
        self._keepalive = KeepAlive("etcd-v3-leases")
        self._watches: set[EtcdV3Watch] = set()
        self._closed = False

    def get(self, key: str) -> KeyValue | None:
        """Return the key, or None if it does not exist. Linearizable."""
        items = self._call("/v3/kv/range", {"key": _b64(key)}).get("kvs", [])
        return _key_value(items[0]) if items else None

    def range(self, prefix: str) -> Snapshot:
        """Return every key that begins with `prefix`, sorted, as of one revision."""
        answer = self._call("/v3/kv/range", _span(prefix))
        items = tuple(_key_value(item) for item in answer.get("kvs", []))
        return Snapshot(items, _revision(answer), prefix)

    def put(self, key: str, value: str, lease: Lease | None = None) -> int:
        """Write the key whatever it held before; return the new `mod_revision`."""
        body = self._put_body(key, value, lease)
        return _revision(self._call("/v3/kv/put", body, lease=lease))

    def compare_and_swap(
        self, key: str, value: str | None, expected_revision: int, lease: Lease | None = None
    ) -> int | None:
        """Write the key (None: delete it) if its mod_revision is the expected one.

        Returns the new revision, or None if the comparison failed.
        """
        if value is None:
            change: Json = {"request_delete_range": {"key": _b64(key)}}
        else:
            change = {"request_put": self._put_body(key, value, lease)}
        body = {
            "compare": [
                {"key": _b64(key), "target": "MOD", "result": "EQUAL", "mod_revision": str(expected_revision)}
            ],
            "success": [change],
            "failure": [{"request_range": {"key": _b64(key)}}],
        }
        unheard: list[bool] = []
        answer = self._call("/v3/kv/txn", body, lease=lease, on_ambiguous=lambda: unheard.append(True))
        if answer.get("succeeded"):
            return _revision(answer)
        if not unheard:
            return None
        # The key may have been changed by an earlier attempt whose answer was lost.
        found = answer["responses"][0]["response_range"].get("kvs", [])
        if value is None:
            return None if found else _revision(answer)
        wanted = {**self._put_body(key, value, lease)}
        ours = (
            found
            and found[0].get("value", "") == wanted["value"]
            and str(found[0].get("lease", "0")) == str(wanted.get("lease", "0"))
        )
        return int(found[0]["mod_revision"]) if ours else None

    def delete(self, key: str) -> bool:
        """Delete one key; return whether it existed."""
        return int(self._call("/v3/kv/deleterange", {"key": _b64(key)}).get("deleted", 0)) > 0

    def delete_prefix(self, prefix: str) -> int:
        """Delete every key that begins with `prefix`; return how many there were."""
        return int(self._call("/v3/kv/deleterange", _span(prefix)).get("deleted", 0))

    def lease(self, ttl: float) -> EtcdV3Lease:
        """Return a new lease, renewed in the background. etcd counts whole seconds: `ttl` is rounded up."""
        asked = time.monotonic()
        answer = self._call("/v3/lease/grant", {"TTL": str(math.ceil(ttl))})
        lease = EtcdV3Lease(self, str(answer["ID"]), float(answer["TTL"]), asked)
        self._keepalive.add(lease)
        return lease

    def watch(self, prefix: str, start_revision: int = 0) -> EtcdV3Watch:
        """Return the changes under `prefix` from `start_revision` on (0: from now on)."""
        if self._closed:
            raise StoreUnavailableError(_CLOSED)
        start = start_revision or self.revision(prefix) + 1
        watch = EtcdV3Watch(self, prefix, start)
        self._watches.add(watch)
        return watch

    def revision(self, prefix: str) -> int:
        """Return the store's newest revision; the user must be allowed to read `prefix`."""
        return _revision(self._call("/v3/kv/range", {**_span(prefix), "count_only": True}))

    def close(self) -> None:
        """Revoke the client's leases, end its watches, and close its connections."""
        self._closed = True
        for watch in list(self._watches):
            watch.close()
        self._keepalive.close(timeout=1.0)
        self._http.close()

    def check(self) -> None:
        """Make one read, so that wrong credentials are noticed at once."""
        try:
            self._call("/v3/kv/range", {"key": _b64("/adaptdl/v1/"), "count_only": True})
        except StoreAuthError as error:
            # a role for another prefix is accepted; a missing user is not
            if self.options.user is None:
                raise StoreAuthError(_NO_USER) from error
            if "may not do this" not in str(error):
                raise

    def _put_body(self, key: str, value: str, lease: Lease | None) -> Json:
        body = {"key": _b64(key), "value": _b64(value)}
        if lease is not None:
            if not isinstance(lease, EtcdV3Lease) or lease.lost.is_set():
                raise LeaseLostError()
            body["lease"] = lease.id
        return body

    def _call(
        self,
        path: str,
        body: Json,
        *,
        lease: Lease | None = None,
        timeout: float | None = None,
        first_line: bool = False,
        on_ambiguous: Callable[[], None] | None = None,
        login: bool = True,
    ) -> Json:
        """Make a request.

        Args:
            path: path of the API.
            body: the request.
            lease: marked as lost if the server does not know it.
            timeout: seconds; None: those of the options.
            first_line: the answer is a stream of which only the first line is read.
            on_ambiguous: called before a retry if the failed request may have been carried out.
            login: False: log in only if the server asks for it.

        Raises:
            StoreError: the request failed.
        """

        def once(headers: dict[str, str]) -> Json:
            return self._http.call(
                path,
                body,
                headers=headers,
                timeout=timeout,
                first_line=first_line,
                on_ambiguous=on_ambiguous,
            )

        if self._closed and path != "/v3/lease/revoke":
            raise StoreUnavailableError(_CLOSED)
        try:
            headers = self._login.headers() if login else self._login.cached_headers()
            try:
                return once(headers)
            except HttpStatusError as error:
                if not (_is_stale_token(error) or (not headers and "user name is empty" in error.message)):
                    raise
                self._login.forget(headers)  # tokens expire after five minutes; log in again once
                return once(self._login.headers())
        except HttpStatusError as error:
            problem = _store_error(error)
            if isinstance(problem, LeaseLostError) and isinstance(lease, EtcdV3Lease):
                lease.lost.set()
            raise problem from None

    def _authenticate(self, user: str, password: str) -> str:
        """Return a new token."""
        answer = self._http.call("/v3/auth/authenticate", {"name": user, "password": password})
        return str(answer["token"])


class EtcdV3Lease(KeptLease):
    """A lease of the server."""

    def __init__(self, store: EtcdV3Store, id_: str, ttl: float, asked: float) -> None:
        super().__init__(store._keepalive, ttl, asked)
        self.id = id_
        self._store = store

    def renew(self, timeout: float) -> bool:
        """Ask the server to renew the lease; return whether it still had it."""
        try:
            # etcd up to 3.5 renews a lease without a login, so keys stay while the password is refused
            answer = self._store._call(
                "/v3/lease/keepalive", {"ID": self.id}, timeout=timeout, first_line=True, login=False
            )
        except LeaseLostError:
            return False
        if "result" not in answer:
            raise StoreUnavailableError("etcd broke off its answer to a keep-alive")
        return int(answer["result"].get("TTL", 0)) > 0  # etcd leaves zeros out of its answers

    def let_go(self, timeout: float) -> None:
        """Revoke the lease on the server."""
        self._store._call("/v3/lease/revoke", {"ID": self.id}, timeout=timeout)


_DENIALS_DOUBTED = 3
"""Number of refusals in a row that a watch takes for a stale token, not for a missing permission."""


class EtcdV3Watch(Watch):
    """A watch that opens a new stream after a break, from the revision after the last change."""

    def __init__(self, store: EtcdV3Store, prefix: str, start: int) -> None:
        self._store = store
        self._prefix = prefix
        self._next = start
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._stream: Stream | None = None
        self._headers: dict[str, str] = {}  # headers that the present stream was opened with
        self._denials = 0  # answers "permission denied" since the last good answer
        self._admitted = False  # the server has accepted this watch once
        self._told = False  # a refusal was logged since the last good answer
        store._http.endpoints.on_switch(self._leave)

    def __iter__(self) -> Iterator[Change]:
        pause = 0.0
        try:
            while not self._closed.wait(pause):
                pause = min(2 * pause, _LONGEST_PAUSE) or 0.02
                stream = self._open()
                if stream is None:
                    continue
                try:
                    for answer in stream:
                        pause = 0.0
                        yield from self._changes(answer.get("result", answer))
                finally:
                    self._drop(stream)
        finally:
            self._forget()

    def _open(self) -> Stream | None:
        http_ = self._store._http
        request = {"create_request": {**_span(self._prefix), "start_revision": str(self._next)}}
        endpoint = http_.endpoints.current
        try:
            self._headers = self._store._login.headers()
            stream = Stream(http_, "/v3/watch", request, self._headers)
        except HttpStatusError as error:
            if _is_retryable(error):
                http_.endpoints.switch_from(endpoint)
                return None
            self._refused(error)
            return None
        except StoreAuthError as error:
            self._raise_unless_admitted(error)
            return None
        except (TryAgainError, StoreUnavailableError, ValueError) as error:
            logger.debug("watch of %s: %s: %s", self._prefix, endpoint, error)
            http_.endpoints.switch_from(endpoint)
            return None
        with self._lock:
            self._stream = stream
            if self._closed.is_set():
                stream.close()
        return stream

    def _changes(self, answer: Json) -> Iterator[Change]:
        if answer.get("canceled"):
            self._cancelled(answer)
            return
        if "error" in answer:
            fault = answer["error"]
            self._refused(HttpStatusError(500, str(fault.get("message", fault)), fault.get("grpc_code")))
            return
        self._denials, self._told = 0, False
        self._admitted = True
        if answer.get("created") and _revision(answer) < self._next - 1:
            self._check_history()
        changes = [self._change(event) for event in answer.get("events", [])]
        yield from changes
        if changes:
            self._next = changes[-1].revision + 1

    @staticmethod
    def _change(event: Json) -> Change:
        item = _key_value(event["kv"])
        if event.get("type") == "DELETE":
            return Change("delete", item.key, None, item.mod_revision)
        return Change("put", item.key, item.value, item.mod_revision)

    def _check_history(self) -> None:
        # This member may only lag behind; a linearizable read tells whether the seen revisions are lost.
        newest = self._store.revision(self._prefix)
        if newest < self._next - 1:
            raise CompactedError(
                f"etcd is at revision {newest} and we have seen {self._next - 1}: its data was replaced"
            )

    def _cancelled(self, answer: Json) -> None:
        oldest = int(answer.get("compact_revision", 0))
        if oldest:
            raise CompactedError(
                f"changes of {self._prefix!r} from revision {self._next} on were asked for, "
                f"but etcd has forgotten those before {oldest}"
            )
        self._refused(HttpStatusError(500, str(answer.get("cancel_reason", "watch cancelled"))))

    def _refused(self, error: HttpStatusError) -> None:
        """Raise the server's refusal, or return to try again."""
        # etcd 3.5 forgets its tokens at a restart and then reports an old token as a missing permission
        denied = "permission denied" in error.message
        stale = _is_stale_token(error) or (denied and self._denials < _DENIALS_DOUBTED)
        if stale and self._store.options.user is not None:
            self._denials += denied
            self._store._login.forget(self._headers)
            self._end_stream()
            return
        if error.code == _OUT_OF_RANGE:
            raise CompactedError(f"changes of {self._prefix!r}: {error.message}")
        self._raise_unless_admitted(_store_error(error))
        self._end_stream()

    def _raise_unless_admitted(self, problem: StoreError) -> None:
        """Raise the refusal of a watch that was never accepted; else log it, and the caller tries again."""
        if isinstance(problem, StoreAuthError) and not self._admitted:
            raise problem
        level = logging.DEBUG if self._told else logging.WARNING
        self._told = True
        logger.log(level, "watch of %s: %s; trying again", self._prefix, problem)

    def _leave(self, endpoint: str) -> None:
        with self._lock:
            if self._stream is not None and self._stream.endpoint == endpoint:
                self._stream.close()

    def _end_stream(self) -> None:
        with self._lock:
            if self._stream is not None:
                self._stream.close()

    def _drop(self, stream: Stream) -> None:
        with self._lock:
            self._stream = None
            with contextlib.suppress(OSError):
                stream.release()

    def _forget(self) -> None:
        self._store._http.endpoints.on_switch(self._leave, add=False)
        self._store._watches.discard(self)

    def close(self) -> None:
        """End the iteration, even while another thread waits in it."""
        self._closed.set()
        self._end_stream()
        self._forget()
