"""Whether groups can be made anew in the processes of a job, where that has to be tried out first.

The self-test (`selftest`) runs beside the training, once on every node, and training does not wait for
it. Who may be armed against deaths takes part in collectives that others do not, so all replicas must come
to believe in it at the same boundary: each puts its node's result into the store of the first generation
of these processes, rank 0 reads them, and has it agreed like any other change (`consensus`). Newcomers
to a job that has done so come from a node whose own self-test has passed, or not at all.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from adaptdl_elastic import env
from adaptdl_elastic._session import Session
from adaptdl_elastic.protocol import environment
from adaptdl_elastic.torch._process_group import backends
from adaptdl_elastic.torch._process_group.backends import Nccl
from adaptdl_elastic.torch._process_group.selftest import remembered, verdict
from adaptdl_elastic.torch._process_group.store import FOREVER, generation_store

log = logging.getLogger(__name__)

COMMAND = "able"


class GroupCapability:
    """What this process knows of it. One a session."""

    def __init__(self, session: Session, backend: str, kind: type[Nccl]) -> None:
        self._session, self._backend, self._label = session, backend, kind.label
        self.agreed = False
        self.why = f"{kind.label}'s self-test has not ended"  # not, while nothing is agreed
        self._own: str | None = None
        self._ended = threading.Event()
        share = env.share_path()
        self._share = None if share is None else Path(share)
        known = None if self._share is None else remembered(backend, self._share)
        if known:
            self._fail(known)

    @property
    def failed(self) -> bool:
        """Whether this node's self-test is known to have failed."""
        return self._own is not None

    def begin(self) -> None:
        """Find out, beside everything else, what this node has to say."""
        self._thread("adaptdl-selftest", self._find_out)

    def _fail(self, why: str) -> None:
        self._own, self.why = why, f"{self._label}'s self-test failed: {why}"
        log.warning("%s: every change is a restart", self.why)

    def _thread(self, name: str, target: Callable[[], None]) -> None:
        threading.Thread(target=target, name=name, daemon=True).start()

    def _find_out(self) -> None:
        if not self.failed:
            try:
                why = verdict(self._backend, self._share)
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
            if why is not None:
                self._fail(why)
        self._ended.set()

    def compare(self) -> None:
        """Let rank 0 know what all nodes have found; there, have it agreed. Beside everything else."""
        self._thread("adaptdl-able", self._compare)

    def _compare(self) -> None:
        self._ended.wait()
        try:
            found = self._found()
        except RuntimeError as error:  # the store is gone with its agent: nobody asks any more
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
        """What each replica's node has found, "" where it works; on others than rank 0 its own."""
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
        """All replicas have passed: from here on this one believes it. At an agreed boundary."""
        self.agreed = True

    def require_verified(self) -> None:
        """A newcomer's: wait for this node's result. RuntimeError: it can not join anybody."""
        self._ended.wait()
        if self.failed:
            raise RuntimeError(self.why)


def begin(session: Session, backend: str) -> None:
    """Find out whether groups of `backend` can be made anew, where that is asked at all."""
    kind: Any = backends.kind(backend)
    if kind.tested and wanted(session):
        found = session.capability = GroupCapability(session, backend, kind)
        if not found.failed:  # else the processes before found that out, and torch's own ways are better
            kind.prepare()
        found.begin()


def compare(session: Session) -> None:
    """The first generation of these processes: let all nodes' results come together."""
    known = known_capability(session)
    if known is not None:
        known.compare()


def wanted(session: Session) -> bool:
    """Whether there is somebody who would change this job in place."""
    return session.channel is not None and env.rescale() != "restart"


def known_capability(session: Session) -> GroupCapability | None:
    """This process's; None: its groups need no self-test, or nobody asks."""
    found = session.capability
    assert found is None or isinstance(found, GroupCapability)
    return found


def why_not(session: Session) -> str | None:
    """Why the groups of this process can not be made anew; None: they can."""
    kind, known = backends.kind(session.backend), known_capability(session)
    if known is not None and not known.agreed:
        return known.why
    if kind.tested and known is None:
        return "--rescale=restart" if env.rescale() == "restart" else "there is no agent"
    return kind.why_not(session)
