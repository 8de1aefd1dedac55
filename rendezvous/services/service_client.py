"""Reach a node service: HTTPS, with requests signed by a person or sent with a node's certificate."""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote, urlencode

import urllib3

from adaptdl_elastic.rendezvous.schema.submissions import ServiceRecord
from adaptdl_elastic.rendezvous.services import signatures
from adaptdl_elastic.rendezvous.text import in_url

PERSON_HEADER, SIGNATURE_HEADER = "X-Adaptdl-Person", "X-Adaptdl-Signature"
TIME_HEADER, REFUSAL_HEADER = "X-Adaptdl-Time", "X-Adaptdl-Refusal"

CONNECT_SECONDS = 5.0
_READ_SECONDS = 60.0
_CHUNK = 1 << 20


class ServiceError(Exception):
    """A node service cannot be reached, or refuses; the message says which and why."""


class ServiceRefusedError(ServiceError):
    """A node service has answered with an error."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Signer:
    """The person who asks, and the key that signs."""

    cluster_id: str
    person: str
    key: Path

    def headers(self, node: str, method: str, target: str, body_digest: str) -> dict[str, str]:
        """Return the headers that prove who asks."""
        moment = str(int(time.time()))
        text = signatures.request_text(self.cluster_id, node, method, target, body_digest, moment)
        signature = signatures.sign(self.key, text)
        return {PERSON_HEADER: self.person, TIME_HEADER: moment, SIGNATURE_HEADER: signature}


class ServiceClient:
    """Ask node services.

    Args:
        context: Trusts the CA of the cluster; of a node service also with the node's certificate.
        signer: The person who asks; None: a node service asks, by its certificate.
    """

    def __init__(self, context: ssl.SSLContext, signer: Signer | None = None) -> None:
        self._signer = signer
        self._pool = urllib3.PoolManager(ssl_context=context, retries=False, maxsize=4)

    def close(self) -> None:
        """Close the connections."""
        self._pool.clear()

    def get_json(self, service: ServiceRecord, path: str, **query: Any) -> Any:
        """Return the decoded answer of a GET request."""
        target = path + (f"?{urlencode(query)}" if query else "")
        with self._request(service, "GET", target, signatures.digest(b"")) as answer:
            try:
                return json.loads(answer.read())
            except ValueError:
                raise ServiceError(f"{service.node} answers with something else than JSON") from None

    def has_blob(self, service: ServiceRecord, digest: str) -> bool:
        """Return whether a node has a blob."""
        try:
            with self._request(service, "HEAD", f"/v1/blobs/{digest}", signatures.digest(b"")):
                return True
        except ServiceRefusedError as error:
            if error.status == 404:
                return False
            raise

    def put_blob(self, service: ServiceRecord, digest: str, file: IO[bytes], size: int) -> None:
        """Send a blob, whose SHA-256 is the digest."""
        target = f"/v1/blobs/{digest}"
        with self._request(service, "PUT", target, digest, file, {"Content-Length": str(size)}):
            pass

    def download(self, service: ServiceRecord, target: str, write: Callable[[bytes], Any]) -> None:
        """Write the answer of a GET request in pieces."""
        with self._request(service, "GET", target, signatures.digest(b"")) as answer:
            try:
                for piece in answer.stream(_CHUNK):
                    write(piece)
            except urllib3.exceptions.HTTPError as error:
                raise ServiceError(f"{service.node} broke off: {_reason(error)}") from None

    @contextmanager
    def _request(
        self,
        service: ServiceRecord,
        method: str,
        target: str,
        body_digest: str,
        body: IO[bytes] | None = None,
        headers: dict[str, str] | None = None,
    ) -> Iterator[urllib3.BaseHTTPResponse]:
        headers = dict(headers or {})
        if self._signer is not None:
            headers |= self._signer.headers(service.node, method, target, body_digest)
        timeout = urllib3.Timeout(connect=CONNECT_SECONDS, read=_READ_SECONDS)
        try:
            answer = self._pool.request(
                method,
                f"https://{in_url(service.host)}:{service.port}{target}",
                body=body,
                headers=headers,
                timeout=timeout,
                preload_content=False,
            )
        except urllib3.exceptions.HTTPError as error:
            raise ServiceError(
                f"the service of {service.node} at {service.host}:{service.port} does not answer: "
                f"{_reason(error)}"
            ) from None
        try:
            if answer.status >= 400:
                said = answer.read().decode(errors="replace").strip()
                said = said or unquote(answer.headers.get(REFUSAL_HEADER, ""))
                raise ServiceRefusedError(
                    f"{service.node} refuses: {said or f'HTTP {answer.status}'}", answer.status
                )
            yield answer
        finally:
            answer.close()
            answer.release_conn()


def _reason(error: Exception) -> str:
    text = str(getattr(error, "reason", None) or error)
    return text.rpartition(">: ")[2] or text


def person_context(ca: Path) -> ssl.SSLContext:
    """Return the TLS context of a person's commands: only the cluster's CA counts."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_verify_locations(str(ca))
    return context


def node_context(ca: Path, cert: Path, key: Path) -> ssl.SSLContext:
    """Return the TLS context by which a node service asks others."""
    context = person_context(ca)
    context.load_cert_chain(str(cert), str(key))
    return context
