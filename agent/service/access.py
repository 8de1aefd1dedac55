"""Decide who asks a node service, by certificate or signature, and what that caller may do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from adaptdl_elastic.rendezvous.services import signatures
from adaptdl_elastic.rendezvous.services.service_client import PERSON_HEADER, SIGNATURE_HEADER
from adaptdl_elastic.rendezvous.services.service_config import NODE_SUBJECT
from adaptdl_elastic.rendezvous.services.signatures import People, SignatureError, UncheckedError


class DeniedError(Exception):
    """The caller may not do this; the message says why."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Caller:
    """Who asks: a node of the cluster, or a person."""

    node: str = ""
    person: str = ""
    admin: bool = False

    def require_node(self) -> None:
        """Raise DeniedError unless a node asks."""
        if not self.node:
            raise DeniedError("only nodes of the cluster may fetch this", 403)

    def require_owner(self, job: str, owner: str | None) -> None:
        """Raise DeniedError unless the owner of a job asks, or an administrator."""
        if owner is None:
            raise DeniedError(f"no valid submission of a job {job!r} is known here", 404)
        if not (self.admin or self.person == owner):
            raise DeniedError(f"job {job} belongs to {owner}: {owner} or an administrator may do this", 403)


def identify(
    certificate: Mapping[str, Any] | None,
    headers: Mapping[str, str],
    people: People,
    request: tuple[str, str, str, str, str],
) -> Caller:
    """Return who asks.

    Args:
        certificate: The client's certificate, whose authority has been checked; None: there is none.
        headers: The headers of the request.
        people: Who may use the cluster.
        request: Cluster id, this node, method, target, and SHA-256 of the body, as they are signed.

    Raises:
        DeniedError: neither a node nor a known person asks.
    """
    for part in (certificate or {}).get("subject", ()):
        for name, value in part:
            if name == "organizationName" and str(value).startswith(NODE_SUBJECT):
                return Caller(node=str(value)[len(NODE_SUBJECT) :])
    name, signature = headers.get(PERSON_HEADER), headers.get(SIGNATURE_HEADER)
    if not name or not signature:
        raise DeniedError("the request is not signed: use the command adaptdl", 401)
    try:
        person = signatures.verify(people, name, signatures.request_text(*request), signature)
    except UncheckedError as error:
        raise DeniedError(str(error), 503) from None
    except SignatureError as error:
        raise DeniedError(str(error), 401) from None
    return Caller(person=person.name, admin=person.admin)
