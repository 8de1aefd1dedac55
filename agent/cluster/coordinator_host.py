"""Run a coordinator as a child process of this agent if this is one of the two agents that do.

The agent that creates the leased key `coordinator/host` starts `python -m adaptdl_elastic.autoscaler
coordinator`, and starts it again when it dies. One that always ends in the same way is `broken`: the agent
then ends a job without a plan. If a coordinator already leads (one that runs as a service of
the cluster), no agent creates the key. Later an agent of another node creates `coordinator/second` and does
the same; its coordinator stands by and leads as soon as the first one does not. The child process ends when
its pipe from the agent closes, however the agent ended.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from adaptdl_elastic import _own_python
from adaptdl_elastic.rendezvous.decision_record import FILE as DECISIONS
from adaptdl_elastic.rendezvous.schema.keys import Keys

logger = logging.getLogger(__name__)

FIRST_DELAY, LAST_DELAY = 0.2, 10.0  # seconds between a coordinator's death and the next start
CLAIM_AGAIN_AFTER = 1.0  # seconds between two requests for a key, while the store does not answer
SETTLED_AFTER = 10.0  # seconds after an agent's start before it may run a coordinator that stands by
# seconds for which an agent of a node service leaves a free key to services; less than `REST`, after which a
# service takes it again whose coordinator has failed
SERVICE_STARTS_WITHIN = 25.0
HEALTHY_AFTER = 30.0  # seconds after which a death does not count as one of a series
SERIES = 8  # deaths and failed starts in a row after which this agent gives up its key
REST = 30.0  # seconds for which this agent then runs no coordinator
ALIKE = 3  # ends in the same way, one after the other, that make a coordinator broken
_FROM_OUTSIDE = (0, -signal.SIGTERM, -signal.SIGKILL)  # exit codes of one that was stopped or killed
_REFUSED = "(adaptdl: "  # begins the last line of one that says what prevents it: it cannot use the store


@dataclass(frozen=True)
class CoordinatorCommand:
    """How to start `adaptdl coordinator`: arguments, and the environment, which holds the credentials."""

    arguments: tuple[str, ...]
    environ: Mapping[str, str] = field(repr=False)


class CoordinatorChild:
    """A coordinator process that is started again whenever it dies, until `close`."""

    def __init__(self, command: CoordinatorCommand, log: Path, died: Callable[[str], None]) -> None:
        self._command, self._log, self._died = command, log, died
        self.closing = threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: int | None = None
        self._log_lost = False
        self.failed = False  # it has died too often and is not started again
        # the way in which it has ended `ALIKE` times, until it is started again
        self.broken: str | None = None
        self._thread = threading.Thread(target=self._keep, name="coordinator", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """The process id of the running coordinator, or None."""
        process = self._process
        return None if process is None else process.pid

    def _keep(self) -> None:
        delay, series, told = FIRST_DELAY, 0, ""
        ends: list[str] = []  # the last ones
        while not self.closing.is_set():
            started, self.broken = time.monotonic(), None
            try:
                process = self._start()
                if process is None:
                    return
                code = process.wait()
                told, what = "", f"the coordinator ended with code {code}{_last_words(self._log)}"
                outside = code in _FROM_OUTSIDE or _REFUSED in what
                ends = [] if outside else [*ends, what][-ALIKE:]
            except (OSError, subprocess.SubprocessError) as error:  # no descriptor, memory or process left
                what = f"no coordinator can be started here: {error}"
            if self.closing.is_set():
                return
            if time.monotonic() - started > HEALTHY_AFTER:
                delay, series, ends = FIRST_DELAY, 0, []
            if ends == [what] * ALIKE:
                self.broken = f"{what}, {ALIKE} times before it had planned anything"
            delay, series = min(2 * delay, LAST_DELAY), series + 1
            if series >= SERIES:
                self.failed = True
                self._died(f"{what}; this node leaves it to others for {REST:g} s")
                return
            if what != told:
                self._died(f"{what}; starting it again")
            told = what
            self.closing.wait(delay)

    def _start(self) -> subprocess.Popen[bytes] | None:
        with self._lock:
            if self.closing.is_set():
                return None
            self._hang_up()
            read, self._pipe = os.pipe()
            command = _own_python.module("adaptdl_elastic.autoscaler", "coordinator")
            command += ["--decisions", str(self._log.with_name(DECISIONS.format("coordinator")))]
            try:
                with self._open_log() as log:
                    self._process = subprocess.Popen(
                        [*command, *self._command.arguments, "--parent-fd", str(read)],
                        env=dict(self._command.environ),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        pass_fds=(read,),
                        start_new_session=True,
                    )
            finally:
                os.close(read)
            return self._process

    def _open_log(self) -> BinaryIO:
        """Open the log, or /dev/null if that fails: a job cannot change without a coordinator."""
        try:
            return self._log.open("ab")
        except OSError as error:
            if not self._log_lost:
                self._log_lost = True
                self._died(f"the coordinator's log is lost: {error}")
            return Path(os.devnull).open("ab")

    def _hang_up(self) -> None:
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None

    def close(self, timeout: float = 5.0) -> None:
        """End the process in order, so that it gives up its leadership."""
        with self._lock:
            self.closing.set()
            self._hang_up()
            process = self._process
        if process is not None:
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout)
        self._thread.join(timeout)


@dataclass(frozen=True)
class Holder:
    """The agent that holds a key of a coordinator, as written in the store."""

    node: str
    agent: str

    def __str__(self) -> str:
        return f"{self.node}/{self.agent}"

    @classmethod
    def parse(cls, text: str | None) -> Holder | None:
        """Parse the value of a key; None if the key does not exist. An invalid value is still a holder."""
        if text is None:
            return None
        node, _, agent = text.rpartition("/")
        return cls(node, agent)


class CoordinatorHost:
    """Runs a coordinator while this agent holds one of the two keys, and claims a key that is free.

    Args:
        me: this agent.
        keys: keys of the cluster.
        child: starts a coordinator.
        claim: `claim(key, other)` creates `key` for this agent, unless an agent of the same node holds
            `other`.
        release: `release(key)` gives the key up, because no coordinator can be run here, or because both keys
            are held on one node.
        settled: when, by `clock`, this agent may run a coordinator that stands by; a starting job is busy
            enough.
        clock: monotonic seconds.
        of_service: a service of this node runs coordinators, too. It may just be starting again, at an
            upgrade with another version, so this agent waits for `SERVICE_STARTS_WITHIN` with its claim.
    """

    def __init__(
        self,
        me: Holder,
        keys: Keys,
        child: Callable[[], CoordinatorChild],
        claim: Callable[[str, str], None],
        release: Callable[[str], None],
        settled: float,
        clock: Callable[[], float] = time.monotonic,
        of_service: bool = False,
    ) -> None:
        self._patience, self._free_since = of_service * SERVICE_STARTS_WITHIN, float("inf")
        self._me, self._new_child, self._clock = me, child, clock
        self._claim, self._release = claim, release
        self._first, self._second = keys.coordinator_host, keys.coordinator_second
        self._settled = settled
        self._child: CoordinatorChild | None = None
        self._asked = float("-inf")
        self._rests_until = float("-inf")
        self.due: float | None = settled  # when to call `update` again even if nothing has changed

    def update(self, first: str | None, second: str | None, leader: str | None) -> None:
        """Start, stop or claim according to the holders of the two keys and the leader, None if absent."""
        holders = Holder.parse(first), Holder.parse(second)
        if holders[1] == self._me and holders[0] is not None and holders[0].node == self._me.node:
            # both were claimed at the same moment; one node must not have both, since it may fail
            self._release(self._second)
            holders = holders[0], None
        now, wanted, self.due = self._clock(), self._wanted(*holders, leader), None
        if self._child is not None and self._child.failed:
            self._child.close()
            self._child, self._rests_until = None, now + REST
            for key, holder in zip((self._first, self._second), holders, strict=True):
                if holder == self._me:
                    self._release(key)
        if now < self._rests_until:
            self.due = self._rests_until
            return
        if self._me in holders:
            if self._child is None:
                self._child = self._new_child()
        elif self._child is not None and wanted is None and any(holders):
            child, self._child = self._child, None
            threading.Thread(target=child.close, daemon=True).start()  # closing may take seconds
        self._free_since = float("inf") if wanted is None else min(now, self._free_since)
        if wanted is None:
            return
        other = self._first if wanted == self._second else self._second
        at = max(self._asked + CLAIM_AGAIN_AFTER, self._free_since + self._patience)
        if wanted == self._second or leader is not None:
            at = max(at, self._settled)
        if now < at:
            self.due = at
            return
        self._asked = now
        self._claim(wanted, other)

    def _wanted(self, first: Holder | None, second: Holder | None, leader: str | None) -> str | None:
        """Return the free key that this agent should hold, or None."""
        if self._me in (first, second):
            return None
        if first is None and second is None:
            return self._first if leader is None or self._child is not None else None
        if first is not None and second is not None:
            return None
        holder = first or second
        assert holder is not None
        if holder.node == self._me.node:
            return None  # one node must not have both
        return self._first if first is None else self._second

    @property
    def broken(self) -> str | None:
        """The way in which this agent's coordinator ends whenever it is started, or None."""
        return None if self._child is None else self._child.broken

    def close(self) -> None:
        """End this agent's coordinator, if there is one."""
        child, self._child = self._child, None
        if child is not None:
            child.close()


def _last_words(log: Path) -> str:
    with suppress(OSError):
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        if lines:
            return f" ({lines[-1].strip()[:200]}; all of it in {log})"
    return ""
