"""Find out whether a job's processes can form new groups, for backends where that must be tested first.

The self-test (`selftest`) runs once on every node, and training does not wait for it. A replica that can
survive deaths takes part in collectives that others do not. So all replicas must change at the same boundary:
each puts its node's result into the store of the first generation of these processes, rank 0 reads the
results, and all agree as on any other change (`consensus`). A newcomer joins such a job only if the self-test
of its own node has passed.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

from adaptdl_elastic import env
from adaptdl_elastic._session import Session
from adaptdl_elastic.protocol import environment
from adaptdl_elastic.protocol.self_test import NOT_ENDED
from adaptdl_elastic.torch._process_group import backends
from adaptdl_elastic.torch._process_group.backends import Nccl
from adaptdl_elastic.torch._process_group.selftest import remembered, verdict
from adaptdl_elastic.torch._process_group.store import FOREVER, generation_store

log = logging.getLogger(__name__)

COMMAND = "able"


class GroupCapability:
    """Hold what this process knows about its capability to form new groups. One object per session."""

    def __init__(self, session: Session, backend: str, kind: type[Nccl]) -> None:
        self._session, self._backend, self._label = session, backend, kind.label
        self.agreed = False
        self.why = f"{kind.label}'s {NOT_ENDED}"  # not possible while nothing is agreed
        self._own: str | None = None
        self._ended = threading.Event()
        known = remembered(backend)
        if known:
            self._fail(known)

    @property
    def failed(self) -> bool:
        """Whether this node's self-test is known to have failed."""
        return self._own is not None

    def begin(self) -> None:
        """Find out this node's result in a thread."""
        threading.Thread(target=self._find_out, name="adaptdl-selftest", daemon=True).start()

    def _fail(self, why: str) -> None:
        self._own, self.why = why, f"{self._label}'s self-test failed: {why}"
        log.warning("%s: every change is a restart", self.why)

    def _find_out(self) -> None:
        if not self.failed:
            try:
                why = verdict(self._backend)
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
            if why is not None:
                self._fail(why)
        self._ended.set()

    def compare(self) -> None:
        """Publish this node's result; on rank 0 also read all results and have them agreed. In a thread."""
        threading.Thread(target=self._compare, name="adaptdl-able", daemon=True).start()

    def _compare(self) -> None:
        self._ended.wait()
        try:
            found = self._found()
        # the store is gone with its agent, and the result is not needed any more
        except RuntimeError as error:
            log.debug("the results of the self-test: %s", error)
            return
        if self._session.rank != 0:
            return
        if any(found):
            self.why = next(why for why in found if why)
            self._session.report_eligibility()
        else:
            self._session.consensus.request({"kind": COMMAND})

    def _found(self) -> list[str]:
        """Return the results of all replicas' nodes ("" for success); on other ranks only the own one."""
        session, found = self._session, [self.why if self.failed else ""]
        if session.replicas > 1:
            host, port = os.environ[environment.MASTER_ADDR], int(os.environ[environment.MASTER_PORT])
            store = generation_store(host, port, session.generation)
            store.set(f"able/{session.rank}", found[0])
            if session.rank == 0:
                keys = [f"able/{rank}" for rank in range(session.replicas)]
                store.wait(keys, FOREVER)
                found = [store.get(key).decode() for key in keys]
        return found

    def agree(self) -> None:
        """Record that all replicas have passed. Called at an agreed boundary."""
        self.agreed = True

    def require_verified(self) -> None:
        """Wait for this node's result; RuntimeError if it failed. For newcomers, which then cannot join."""
        self._ended.wait()
        if self.failed:
            raise RuntimeError(self.why)


def begin(session: Session, backend: str) -> None:
    """Start to find out whether groups of `backend` can be formed again, if that must be tested."""
    kind: Any = backends.kind(backend)
    if kind.tested and wanted(session):
        found = session.capability = GroupCapability(session, backend, kind)
        # otherwise earlier processes found out that it fails, and torch's defaults are better
        if not found.failed:
            kind.prepare()
        found.begin()


def compare(session: Session) -> None:
    """Compare the results of all nodes; called in the first generation of these processes."""
    known = known_capability(session)
    if known is not None:
        known.compare()


def wanted(session: Session) -> bool:
    """Return whether this job may be changed in place."""
    return session.channel is not None and env.rescale() != "restart"


def known_capability(session: Session) -> GroupCapability | None:
    """Return this process's capability; None if its groups need no self-test or may not change."""
    found = session.capability
    assert found is None or isinstance(found, GroupCapability)
    return found


def why_not(session: Session) -> str | None:
    """Return why the groups of this process cannot be formed again; None if they can."""
    kind, known = backends.kind(session.backend), known_capability(session)
    if known is not None and not known.agreed:
        return known.why
    if kind.tested and known is None:
        return "--rescale=restart" if env.rescale() == "restart" else "there is no agent"
    return kind.why_not(session)
