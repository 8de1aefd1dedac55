"""The server of the page: files, documents, a stream of changes, and requests of the person who uses it."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from adaptdl_elastic.autoscaler.commands.job_requests import RequestError
from adaptdl_elastic.autoscaler.web.access import HEADERS, Guard
from adaptdl_elastic.autoscaler.web.actions import Actions
from adaptdl_elastic.autoscaler.web.feed import Feed
from adaptdl_elastic.autoscaler.web.overview import Document, difference
from adaptdl_elastic.rendezvous.services.connections import BoundedServer
from adaptdl_elastic.rendezvous.services.signatures import SignatureError
from adaptdl_elastic.rendezvous.store.base import StoreError

logger = logging.getLogger(__name__)

_IDLE_SECONDS = 30.0  # after which a connection that sends nothing is closed
_HEARTBEAT_SECONDS = 10.0  # after which an idle stream sends a comment, to notice that the browser has left
_MOST_BODY_BYTES = 10_000
_EVENTS = 100  # most events of the cluster that the first screen shows

_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_STATIC = {
    file.name: (f"{_KINDS[file.name.rpartition('.')[2]]}; charset=utf-8", file.read_bytes())
    for file in files(__package__).joinpath("static").iterdir()
    if file.name.rpartition(".")[2] in _KINDS
}
_NOT_LET_IN = (
    b"<!doctype html><html lang=en><meta charset=utf-8><title>adaptdl</title>"
    b"<p>Open the address that <code>adaptdl web</code> has printed: it lets this browser in."
)


class _Refusal(Exception):
    """The request is answered by an error; the message says why."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Served:
    """What the server serves.

    Attributes:
        title: Name of the cluster or job.
        feed: The documents.
        actions: The requests of the person.
        explain: Returns the lines of `adaptdl explain` about a job.
        tensorboard: Returns where TensorBoard serves; "" if it does not.
    """

    title: str
    feed: Feed
    actions: Actions
    explain: Callable[[str], list[str]]
    tensorboard: Callable[[], str] = str


class WebServer(BoundedServer):
    """The listening socket and its threads.

    Args:
        port: Port of the loopback interface; 0: any free one.
        served: What it serves.

    Raises:
        OSError: the port cannot be used.
    """

    def __init__(self, port: int, served: Served) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.served = served
        self.guard = Guard(self.server_port)

    @property
    def url(self) -> str:
        """The address that lets a browser in."""
        return f"http://127.0.0.1:{self.guard.port}/?token={self.guard.token}"

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Serve one connection in its thread."""
        try:
            request.settimeout(_IDLE_SECONDS)
            super().finish_request(request, client_address)
        except OSError as error:  # the browser has left
            logger.debug("the connection from %s broke: %s", client_address, error)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: WebServer

    def version_string(self) -> str:
        return "adaptdl"

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)

    def do_GET(self) -> None:
        self._serve(self._get)

    def do_POST(self) -> None:
        self._serve(self._post)

    def _serve(self, action: Callable[[list[str], Mapping[str, str]], None]) -> None:
        try:
            parts = urlsplit(self.path)
            query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
            path = [unquote(part) for part in parts.path.strip("/").split("/")]
            if self.server.guard.wrong_host(self.headers.get("Host")):
                raise _Refusal(421, "this server has another name")
            action(path, query)
        except _Refusal as error:
            self.close_connection = True  # the body may not have been read
            self._json({"error": str(error)}, error.status)
        except (RequestError, SignatureError, StoreError) as error:
            self._json({"error": str(error)}, 409)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            self.close_connection = True
            self._json({"error": f"not understood: {error}"}, 400)

    def _is_let_in(self) -> bool:
        """Return whether a request has the cookie. Its connection does not give way to strangers' then."""
        if not self.server.guard.has_session(self.headers.get("Cookie")):
            return False
        if not self.server.connections.prove(self.connection):
            raise _Refusal(503, "the page has too many connections: close some of its windows")
        return True

    def _get(self, path: list[str], query: Mapping[str, str]) -> None:
        guard = self.server.guard
        let_in = self._is_let_in()
        match path:
            case [""]:
                if guard.right_token(query.get("token", "")):
                    self._answer(303, b"", "text/plain", {"Location": "/", "Set-Cookie": guard.cookie})
                elif let_in:
                    self._file("index.html")
                else:
                    self._answer(401, _NOT_LET_IN, "text/html; charset=utf-8")
            case ["static", name]:
                self._file(name)
            case ["api", *rest]:
                if not let_in:
                    raise _Refusal(401, "open the address that adaptdl web has printed")
                self._api(rest, query)
            case _:
                raise _Refusal(404, "there is nothing here")

    def _api(self, path: list[str], query: Mapping[str, str]) -> None:
        guard, served = self.server.guard, self.server.served
        match path:
            case ["session"]:
                self._json({"title": served.title, "request": guard.csrf})
            case ["overview"]:
                self._json(served.feed.current()[1])
            case ["stream"]:
                self._stream()
            case ["events"]:
                self._json(served.feed.events(_EVENTS))
            case ["jobs", name]:
                document = served.feed.job(name)
                if document is None:
                    raise _Refusal(404, f"there is no job {name!r}")
                self._json({**document, "tensorboard": served.tensorboard()})
            case ["jobs", name, "explain"]:
                self._json(served.explain(name))
            case ["jobs", name, "output"]:
                offsets = {str(node): int(at) for node, at in json.loads(query.get("offsets", "{}")).items()}
                ranks = (int(query["rank"]),) if query.get("rank") else ()
                self._json(served.actions.output(name, served.feed.submitted(), offsets, ranks))
            case _:
                raise _Refusal(404, "there is nothing here")

    def _post(self, path: list[str], query: Mapping[str, str]) -> None:
        guard, actions = self.server.guard, self.server.served.actions
        if not self._is_let_in():
            raise _Refusal(401, "open the address that adaptdl web has printed")
        if why := guard.why_no_change(dict(self.headers.items())):
            raise _Refusal(403, f"the request is refused: {why}")
        size = int(self.headers.get("Content-Length") or 0)
        if not 0 <= size <= _MOST_BODY_BYTES:
            raise _Refusal(413, "the request is too large")
        body = json.loads(self.rfile.read(size) or b"{}")
        match path:
            case ["api", "jobs", name, "scale"]:
                replicas = body["replicas"]
                if replicas is not None and (type(replicas) is not int or replicas < 1):
                    raise ValueError("replicas is a number from 1, or null")
                self._json({"done": actions.scale(name, replicas)})
            case ["api", "jobs", name, "stop"]:
                self._json({"done": actions.stop(name)})
            case ["api", "jobs", name, "cancel"]:
                self._json({"done": actions.cancel(name)})
            case ["api", "jobs", name, "resume"]:
                self._json({"done": actions.resume(name)})
            case _:
                raise _Refusal(404, "there is nothing here")

    def _stream(self) -> None:
        """Send the overview, and then what changes in it, until the browser leaves."""
        feed = self.server.served.feed
        self.close_connection = True
        self._head(200, {"Content-Type": "text/event-stream"})
        version, shown = feed.current()
        self._event("overview", shown)
        while not feed.closed:
            version, document = feed.wait(version, _HEARTBEAT_SECONDS)
            patch = difference(shown, document)
            shown = document
            if patch is None:
                self.wfile.write(b": nothing new\n\n")
            else:
                self._event("patch", patch)

    def _event(self, name: str, document: Document) -> None:
        text = _encoded(document)
        self.wfile.write(f"event: {name}\ndata: {text}\n\n".encode())
        self.wfile.flush()

    def _file(self, name: str) -> None:
        if name not in _STATIC:
            raise _Refusal(404, "there is nothing here")
        kind, content = _STATIC[name]
        self._answer(200, content, kind)

    def _json(self, value: Any, status: int = 200) -> None:
        self._answer(status, _encoded(value).encode(), "application/json")

    def _answer(self, status: int, body: bytes, kind: str, headers: Mapping[str, str] | None = None) -> None:
        self._head(status, {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})})
        self.wfile.write(body)

    def _head(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {**HEADERS, **headers}.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()


def _encoded(value: Any) -> str:
    """Return JSON that browsers read; numbers that are not finite, which JSON does not have, are null."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), separators=(",", ":"), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, list | tuple) else value
