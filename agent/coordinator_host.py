"""One agent of the cluster keeps a coordinator running as its child; this is that agent's part.

Agents create `coordinator/host`, leased: whoever does starts `python -m adaptdl_elastic.autoscaler
coordinator`, and starts it again when it dies. Where something already leads (a coordinator that runs
as a service of the cluster), nobody tries. The child ends when the pipe it was given closes, whatever
way its agent went.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)

FIRST_DELAY, LAST_DELAY = 0.2, 10.0  # seconds between a coordinator's death and the next start
CLAIM_AGAIN_AFTER = 1.0  # seconds: a claim that waits for the store is not made twice
HEALTHY_AFTER = 30.0  # seconds after which a death is not one of a series


class CoordinatorChild:
    """Keeps one coordinator process running until it is told to stop."""

    def __init__(self, arguments: Sequence[str], log: Path, died: Callable[[str], None]) -> None:
        self._arguments, self._log, self._died = list(arguments), log, died
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: int | None = None
        self._thread = threading.Thread(target=self._keep, name="coordinator", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """Of the process that runs now."""
        process = self._process
        return None if process is None else process.pid

    def _keep(self) -> None:
        delay = FIRST_DELAY
        while not self._closing.is_set():
            started = time.monotonic()
            process = self._start()
            if process is None:
                return
            code = process.wait()
            if self._closing.is_set():
                return
            delay = FIRST_DELAY if time.monotonic() - started > HEALTHY_AFTER else min(2 * delay, LAST_DELAY)
            self._died(f"the coordinator ended with code {code}{_last_words(self._log)}; starting it again")
            self._closing.wait(delay)

    def _start(self) -> subprocess.Popen[bytes] | None:
        with self._lock:
            if self._closing.is_set():
                return None
            self._hang_up()
            read, self._pipe = os.pipe()
            command = [sys.executable, "-m", "adaptdl_elastic.autoscaler", "coordinator"]
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    [*command, *self._arguments, "--parent-fd", str(read)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(read,),
                    start_new_session=True,
                )
            os.close(read)
            return self._process

    def _hang_up(self) -> None:
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None

    def close(self, timeout: float = 5.0) -> None:
        """Let it end in an orderly way; it gives its leadership back."""
        with self._lock:
            self._closing.set()
            self._hang_up()
            process = self._process
        if process is not None:
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._thread.join(timeout)


class CoordinatorHost:
    """Keeps a coordinator while this agent holds `coordinator/host`, and claims it when nobody does."""

    def __init__(
        self,
        agent: str,
        arguments: Sequence[str],
        log: Path,
        say: Callable[[str], None],
        claim: Callable[[], None],
    ) -> None:
        self._agent, self._arguments, self._log, self._say, self._claim = agent, arguments, log, say, claim
        self._child: CoordinatorChild | None = None
        self._asked = 0.0

    def mind(self, host: str | None, leader: str | None) -> None:
        """Act on who holds `coordinator/host` and who leads, as last heard; None: nobody."""
        if host == self._agent and self._child is None:
            self._child = CoordinatorChild(self._arguments, self._log, self._say)
        elif host not in (None, self._agent) and self._child is not None:
            child, self._child = self._child, None
            threading.Thread(target=child.close, daemon=True).start()  # it may take its time
        if host is None and leader is None and time.monotonic() - self._asked > CLAIM_AGAIN_AFTER:
            self._asked = time.monotonic()
            self._claim()

    def close(self) -> None:
        """End the coordinator, if it is ours."""
        child, self._child = self._child, None
        if child is not None:
            child.close()


def _last_words(log: Path) -> str:
    with suppress(OSError):
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        if lines:
            return f" ({lines[-1].strip()[:200]}; all of it in {log})"
    return ""
