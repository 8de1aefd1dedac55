"""The port of a node service: archives, output and state, over TLS, for nodes and people of the cluster."""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from adaptdl_elastic.agent.service import job_files
from adaptdl_elastic.agent.service.access import Caller, DeniedError, Turns, identify
from adaptdl_elastic.agent.service.blobs import MOST_BLOB_BYTES, BlobError, Blobs
from adaptdl_elastic.agent.service.checkpoint_copies import files_of
from adaptdl_elastic.rendezvous.schema.keys import check_name
from adaptdl_elastic.rendezvous.services import signatures
from adaptdl_elastic.rendezvous.services.connections import BoundedServer
from adaptdl_elastic.rendezvous.services.service_client import REFUSAL_HEADER
from adaptdl_elastic.rendezvous.services.service_config import ServiceConfig, ServiceDirectory
from adaptdl_elastic.rendezvous.services.signatures import People, SignatureError

logger = logging.getLogger(__name__)

Query = Mapping[str, str]

_IDLE_SECONDS = 60.0  # after which a connection that sends nothing is closed
UNKNOWN_SECONDS = 10.0  # the same, before its peer has proved who it is
_LONGEST_WAIT_SECONDS = 20.0  # of a request for output that is not there yet
_LOOK_SECONDS = 0.1  # between two looks at a file for new output
_MOST_OUTPUT_BYTES = 1 << 20  # in one answer
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Served:
    """What the port serves.

    Attributes:
        config: Of the service.
        directory: Of the service.
        blobs: The archives of this node.
        owner: Returns who owns a job; None: no valid submission of it is known.
        folder: Returns the name of a job's working directory; None likewise.
        running: Returns the jobs that have an agent here.
        state: Returns what `adaptdl cluster status` shows of this node.
    """

    config: ServiceConfig
    directory: ServiceDirectory
    blobs: Blobs
    owner: Callable[[str], str | None]
    folder: Callable[[str], str | None]
    running: Callable[[], list[str]]
    state: Callable[[], dict[str, Any]]

    def people(self) -> People:
        """Return who may use the cluster now."""
        try:
            return signatures.decode_people(self.directory.people.read_text())
        except (OSError, SignatureError) as error:
            raise DeniedError(f"the list of people cannot be read: {error}", 500) from None


class ServicePort(BoundedServer):
    """The listening socket and its threads.

    Args:
        listening: A socket that listens already.
        served: What it serves.
    """

    def __init__(self, listening: socket.socket, served: Served) -> None:
        address = listening.getsockname()[:2]
        super().__init__(address, _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.served = served
        self.closing = threading.Event()
        self.turns = Turns()
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.minimum_version = ssl.TLSVersion.TLSv1_2
        self._tls.load_cert_chain(str(served.directory.cert), str(served.directory.key))
        self._tls.load_verify_locations(str(served.directory.ca))
        self._tls.verify_mode = ssl.CERT_OPTIONAL

    def start(self) -> None:
        """Serve in a thread."""
        threading.Thread(target=self.serve_forever, name="port", daemon=True).start()

    def close(self) -> None:
        """End the requests that wait, and stop to listen."""
        self.closing.set()
        self.shutdown()
        self.server_close()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection; the handshake is left to its own thread."""
        accepted, address = super().get_request()
        accepted.settimeout(UNKNOWN_SECONDS)
        return self._tls.wrap_socket(accepted, server_side=True, do_handshake_on_connect=False), address

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Shake hands in the connection's own thread, so that a slow client delays nobody else."""
        try:
            request.do_handshake()
            _Handler(request, client_address, self)
        except (OSError, ValueError) as error:  # ValueError: it was closed meanwhile
            logger.info("no connection from %s, or it broke: %s", client_address, error)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ServicePort

    def version_string(self) -> str:
        return "adaptdl"

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_PUT = do_GET

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        # names of files need not be UTF-8
        given = parse_qs(parts.query, errors="surrogateescape")
        query = {name: values[-1] for name, values in given.items()}
        found = [unquote(part, errors="surrogateescape") for part in parts.path.strip("/").split("/")]
        self.close_connection |= self.command == "PUT"  # the body may not be read to its end
        try:
            route = next((one for one in ROUTES if one.fits(self.command, found)), None)
            if route is None:
                raise DeniedError("this version of adaptdl-elastic does not serve that", 404)
            named = route.names(found)
            # the digest that is signed is that of the body
            caller = self._caller(named[0] if self.command == "PUT" else "")
            if route.who is Who.NODES:
                caller.require_node()
            if route.who is Who.OWNER or (route.who is Who.OWNER_AND_NODES and not caller.node):
                job = check_name("job", named[0])
                caller.require_owner(job, self.server.served.owner(job))
            route.answer(self, caller, named, query)
        except DeniedError as error:
            self._answer(error.status, str(error).encode())
        except (BlobError, ValueError) as error:
            self._answer(400, str(error).encode())

    def _caller(self, body_digest: str = "") -> Caller:
        served = self.server.served
        assert isinstance(self.connection, ssl.SSLSocket)
        digest = body_digest or signatures.digest(b"")
        request = (served.config.cluster_id, served.config.node, self.command, self.path, digest)
        caller = identify(
            self.connection.getpeercert(),
            self.headers,  # type: ignore[arg-type]
            served.people(),
            request,
            time.time(),
            lambda name: self.server.turns.of(name, self.client_address[0]),
        )
        if not self.server.connections.prove(self.connection):
            raise DeniedError(f"node {served.config.node} serves too many connections: try again later", 503)
        self.connection.settimeout(_IDLE_SECONDS)
        return caller

    def _status(self, caller: Caller, named: list[str], query: Query) -> None:
        may = {"admin": caller.admin, "most_weight": caller.most_weight}
        self._json({**self.server.served.state(), **may})

    def _metrics(self, caller: Caller, named: list[str], query: Query) -> None:
        served = self.server.served
        name = f'adaptdl_unfinished_jobs{{adaptdl_cluster="{served.config.cluster}"}}'
        number = served.state()["unfinished"]
        self._answer(200, f"# TYPE adaptdl_unfinished_jobs gauge\n{name} {number}\n".encode())

    def _blob(self, caller: Caller, named: list[str], query: Query) -> None:
        path = self.server.served.blobs.path(named[0])
        self._send(path.parent, path.name)

    def _has_blob(self, caller: Caller, named: list[str], query: Query) -> None:
        self._answer(200 if self.server.served.blobs.has(named[0]) else 404, b"")

    def _take_blob(self, caller: Caller, named: list[str], query: Query) -> None:
        size = int(self.headers.get("Content-Length") or -1)
        if not 0 <= size <= MOST_BLOB_BYTES:
            raise BlobError(f"an archive of {size} bytes is not accepted")
        self.server.served.blobs.receive(named[0], size, self.rfile.read)
        self._answer(201, b"")

    def _checkpoint(self, caller: Caller, named: list[str], query: Query) -> None:
        job, checkpoint_id, *names = named
        root = self.server.served.directory.checkpoints(check_name("job", job))
        files = files_of(root, checkpoint_id)
        if not files or not set(names) <= set(files):
            raise DeniedError("the checkpoint is not on this node", 404)
        for name in names:
            self._send(root / checkpoint_id, name)
        if not names:
            self._json({"files": files})

    def _log(self, caller: Caller, named: list[str], query: Query) -> None:
        job = check_name("job", named[0])
        after = int(query.get("after", 0)) or self._near_the_end(job, int(query.get("tail", 0)))
        self._json(self._output(job, after, float(query.get("wait", 0))))

    def _job_file(self, caller: Caller, named: list[str], query: Query) -> None:
        served, (job, kind, *path) = self.server.served, named
        folder = job_files.folder_of(served.directory, kind, job, served.folder(job) or job)
        if path:
            numbers = {name: int(query[name]) for name in ("after", "size", "changed") if name in query}
            self._send(folder, path[0], **numbers)
        else:
            self._json(job_files.listing(folder, query.get("path", "")))

    def _near_the_end(self, job: str, size: int) -> int:
        """Return where the line begins that is about `size` bytes before the output's end; 0: show all."""
        path = self.server.served.directory.log(job)
        return line_before_end(path, size) if size > 0 else 0

    def _output(self, job: str, after: int, wait: float) -> dict[str, Any]:
        """Return whole lines of a job's output from an offset on; wait for some if there are none."""
        if math.isnan(wait):  # it would be waited for without end
            raise ValueError(f"wait={wait} is no number of seconds")
        path = self.server.served.directory.log(job)
        deadline = time.monotonic() + min(wait, _LONGEST_WAIT_SECONDS)
        while True:
            running = (
                job in self.server.served.running()
            )  # before the file: what it has written is there then
            data = read_lines(path, after)
            if data or time.monotonic() >= deadline or self.server.closing.wait(_LOOK_SECONDS):
                text = data.decode(errors="replace")
                return {"offset": after + len(data), "text": text, "running": running}

    def _send(
        self, folder: Path, path: str, after: int = 0, size: int = 1 << 62, changed: int | None = None
    ) -> None:
        """Send a file of a folder from an offset on, up to an offset and to its present end.

        Break off before the end if it has another time of change than `changed`.
        """
        with job_files.opened(folder, path) as (file, found):
            left = min(size, found.st_size) - after
            if changed not in (None, found.st_mtime_ns):
                raise DeniedError(f"{path} has changed", 409)
            if after < 0 or left < 0:
                raise ValueError(f"{path} has {found.st_size} bytes, and those from {after} on are asked for")
            self.send_response(200)
            self.send_header("Content-Length", str(left))
            self.end_headers()
            file.seek(after)
            while left and (piece := file.read(min(left, _CHUNK))):
                if changed not in (None, os.fstat(file.fileno()).st_mtime_ns):
                    break
                self.wfile.write(piece)
                left -= len(piece)
            self.close_connection |= left > 0

    def _json(self, value: Any) -> None:
        self._answer(200, json.dumps(value).encode(), "application/json")

    def _answer(self, status: int, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if status >= 400:  # the answer to HEAD has no body
            self.send_header(REFUSAL_HEADER, quote(body))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class Who(Enum):
    """Who may use a route."""

    ANYBODY = "nodes and people of the cluster"
    NODES = "nodes of the cluster"
    OWNER = "the job's owner, and administrators"
    OWNER_AND_NODES = "the job's owner, administrators, and nodes of the cluster"


@dataclass(frozen=True)
class Route:
    """What the port answers.

    Attributes:
        method: GET, HEAD or PUT.
        path: Its parts, parted by slashes; * stands for any. The first one of a route for owners is a job.
        who: Who may use it.
        answer: The method of the handler.
    """

    method: str
    path: str
    who: Who
    answer: Callable[[_Handler, Caller, list[str], Query], None]

    def fits(self, method: str, path: list[str]) -> bool:
        """Return whether a request is for this route."""
        own = self.path.split("/")
        same = len(own) == len(path) and all(
            mine in ("*", part) for mine, part in zip(own, path, strict=True)
        )
        return same and method == self.method

    def names(self, path: list[str]) -> list[str]:
        """Return the parts of a path that stand where this one has a *."""
        return [part for own, part in zip(self.path.split("/"), path, strict=True) if own == "*"]


ROUTES = (
    Route("GET", "v1/status", Who.ANYBODY, _Handler._status),
    # for Prometheus, with a node's certificate
    Route("GET", "metrics", Who.ANYBODY, _Handler._metrics),
    Route("HEAD", "v1/blobs/*", Who.ANYBODY, _Handler._has_blob),
    Route("PUT", "v1/blobs/*", Who.ANYBODY, _Handler._take_blob),
    Route("GET", "v1/blobs/*", Who.NODES, _Handler._blob),
    Route("GET", "v1/checkpoints/*/*", Who.NODES, _Handler._checkpoint),
    Route("GET", "v1/checkpoints/*/*/*", Who.NODES, _Handler._checkpoint),
    Route("GET", "v1/logs/*", Who.OWNER_AND_NODES, _Handler._log),
    Route("GET", "v1/files/*/*", Who.OWNER, _Handler._job_file),
    Route("GET", "v1/files/*/*/*", Who.OWNER, _Handler._job_file),
)
"""All that the port serves, and to whom."""


def read_lines(path: Path, after: int) -> bytes:
    """Return whole lines of a file from an offset on, at most `_MOST_OUTPUT_BYTES`; b"" if there are none.

    A line longer than that is returned in pieces.
    """
    if not 0 <= after < 1 << 63:
        raise ValueError(f"offset {after} is negative or too large")
    try:
        with path.open("rb") as file:
            file.seek(after)
            data = file.read(_MOST_OUTPUT_BYTES)
    except FileNotFoundError:
        return b""
    end = data.rfind(b"\n") + 1
    return data[:end] if end or len(data) < _MOST_OUTPUT_BYTES else data


def line_before_end(path: Path, size: int) -> int:
    """Return the offset of the first line within the last `size` bytes of a file; 0 if there is no file."""
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - size)
            if start == 0:
                return 0
            file.seek(start - 1)  # a line may begin right there
            file.readline()
            return file.tell()
    except FileNotFoundError:
        return 0
