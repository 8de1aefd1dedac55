"""Decide who asks a node service, by certificate or signature, and what that caller may do."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from adaptdl_elastic.rendezvous.services import signatures
from adaptdl_elastic.rendezvous.services.service_client import PERSON_HEADER, SIGNATURE_HEADER, TIME_HEADER
from adaptdl_elastic.rendezvous.services.service_config import NODE_SUBJECT
from adaptdl_elastic.rendezvous.services.signatures import People, SignatureError, UncheckedError

VALID_SECONDS = 900.0
"""Seconds for which the signature of a request is valid, before and after the time in it."""

_MOMENT = re.compile(r"[0-9]{1,12}")


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
    most_weight: float = 1.0

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


class Turns:
    """Let signatures of callers that have proved nothing be checked one at a time.

    Each check starts a process. Many at a time would delay the requests of known callers.
    """

    def __init__(self) -> None:
        self._one = threading.Lock()
        # names and addresses of people of the cluster whose last signature was valid
        self._known: set[tuple[str, str]] = set()

    @contextmanager
    def of(self, name: str, address: str) -> Iterator[None]:
        """Check a signature in this block, which raises if it is not valid."""
        caller = (name, address)
        known = caller in self._known
        self._known.discard(caller)
        with nullcontext() if known else self._one:
            yield
        self._known.add(caller)


def identify(
    certificate: Mapping[str, Any] | None,
    headers: Mapping[str, str],
    people: People,
    request: tuple[str, str, str, str, str],
    now: float,
    turn: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
) -> Caller:
    """Return who asks.

    Args:
        certificate: The client's certificate, whose authority has been checked; None: there is none.
        headers: The headers of the request.
        people: Who may use the cluster.
        request: Cluster id, this node, method, target, and SHA-256 of the body, as they are signed.
        now: The time of this node's clock.
        turn: Entered with the name of a person while that person's signature is checked.

    Raises:
        DeniedError: neither a node nor a known person asks.
    """
    for part in (certificate or {}).get("subject", ()):
        for name, value in part:
            if name == "organizationName" and str(value).startswith(NODE_SUBJECT):
                return Caller(node=str(value)[len(NODE_SUBJECT) :])
    name, signature = headers.get(PERSON_HEADER), headers.get(SIGNATURE_HEADER)
    moment = headers.get(TIME_HEADER, "")
    if not name or not signature or not _MOMENT.fullmatch(moment):
        raise DeniedError("the request is not signed: use the command adaptdl", 401)
    try:
        with turn(name):
            person = signatures.verify(people, name, signatures.request_text(*request, moment), signature)
    except UncheckedError as error:
        raise DeniedError(str(error), 503) from None
    except SignatureError:
        # one answer for an unknown name and for a wrong key: a stranger does not learn who has an account
        raise DeniedError(
            f"the request is not signed by a key with which {name!r} may use this cluster: "
            f"an administrator runs adaptdl cluster grant {name} KEY.pub",
            401,
        ) from None
    if abs(now - int(moment)) > VALID_SECONDS:
        raise DeniedError(
            f"the request was signed {now - int(moment):.0f} s ago by the clock of node {request[1]}, and "
            f"{VALID_SECONDS:.0f} s are allowed: set the clocks of that node and of your machine (NTP)",
            401,
        )
    return Caller(person=person.name, admin=person.admin, most_weight=person.weight_limit)
