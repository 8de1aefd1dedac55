"""Fork agents from one process that has imported torch.

An agent that is started as a program imports torch, which takes seconds, and so does its fork server. Both
are forks here, so that the agents of a node and their servers share one copy of torch in memory.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from adaptdl_elastic.agent.runtime.fork_server import PRELOAD, Exited, ForkServer, Spawned
from adaptdl_elastic.agent.runtime.forked_child import Command

_MODULES = (
    *(*PRELOAD, "adaptdl_elastic.torch.parallel", "adaptdl_elastic.agent.cli"),
    *("adaptdl_elastic.agent.launch", "adaptdl_elastic.agent.runtime.agent"),
)
_READ_EARLY = (
    *("LD_", "PYTHON", "OMP_", "GOMP_", "MKL_", "KMP_", "OPENBLAS", "BLIS", "NUMEXPR", "NPY_", "NUMPY"),
    *("TORCH", "PYTORCH_", "DNNL_", "ONEDNN_", "KINETO", "NVIDIA_", "CUDA", "MALLOC", "GLIBC"),
    *("TZ", "LC_", "LANG", "TMPDIR", "TEMP", "TMP"),
)
"""Beginnings of the names of variables that Python, torch or the C library read when they are loaded."""


_LOOK_SECONDS = 0.1  # between two looks whether an orphan has ended
_LONGEST_WAIT = 120.0  # seconds until an agent has begun: torch may have to be imported first


def can_fork(given: Mapping[str, str]) -> bool:
    """Return whether an agent with these variables of its job can be a fork."""
    return not any(name.startswith(_READ_EARLY) for name in given)


class ForkedAgent:
    """An agent that was forked; as `subprocess.Popen`."""

    def __init__(self) -> None:
        self.pid = 0
        self.returncode: int | None = None
        self.orphaned = False  # what has forked it has died, so that nobody is told its exit code
        self.begun, self.ended = threading.Event(), threading.Event()

    def poll(self) -> int | None:
        """Return its exit code; None while it runs. The end of an orphan counts as no failure."""
        if self.orphaned and not self.ended.is_set() and not psutil.pid_exists(self.pid):
            self.end(0)
        return self.returncode

    def wait(self, seconds: float) -> None:
        """Wait for its end; TimeoutExpired if it has not ended in time."""
        deadline = time.monotonic() + seconds
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("agent", seconds)
            self.ended.wait(min(seconds, _LOOK_SECONDS))

    def end(self, code: int) -> None:
        """Record that it has ended."""
        self.returncode = code
        self.ended.set()


class AgentForker:
    """The process that forks the agents of a node, which outlive it. It is started again if it dies.

    Args:
        environment: Of that process.
        changed: Called when an agent has ended.
    """

    def __init__(self, environment: Mapping[str, str], changed: Callable[[], None]) -> None:
        self._environment, self._changed = {"OMP_NUM_THREADS": "1", **environment}, changed
        self._lock = threading.Lock()
        self._server: ForkServer | None = None
        self._agents: dict[int, ForkedAgent] = {}
        self._numbers = itertools.count()

    def prepare(self) -> None:
        """Start the process, which then imports torch."""
        with self._lock:
            self._running()

    def close(self) -> None:
        """End the process; its agents go on."""
        if (server := self._server) is not None:
            server.close()

    def start(
        self, arguments: Sequence[str], cwd: Path, log: Path, environment: Mapping[str, str]
    ) -> ForkedAgent:
        """Fork an agent with these arguments; its output is appended to `log`.

        Raises:
            OSError: it cannot be forked.
        """
        command = Command(
            "module", ("adaptdl_elastic.agent", *arguments), str(cwd), dict(environment), independent=True
        )
        agent = ForkedAgent()
        log.parent.mkdir(parents=True, exist_ok=True)
        with self._lock, log.open("ab") as output:
            server, number = self._running(), next(self._numbers)
            self._agents[number] = agent
            server.spawn(number, command, output.fileno(), output.fileno())
        answered = agent.begun.wait(_LONGEST_WAIT)
        if not agent.pid:
            self._agents.pop(number, None)
            why = "has died" if answered else f"has not answered for {_LONGEST_WAIT:g} s"
            raise OSError(f"the process that forks agents {why}")
        return agent

    def _running(self) -> ForkServer:
        process = None if self._server is None else self._server.process
        # it may have died a moment ago, before its thread has seen that
        if self._server is None or (isinstance(process, subprocess.Popen) and process.poll() is not None):
            self._server, self._agents = ForkServer.start(self._environment, _MODULES, lasting=True), {}
            given = (self._server, self._agents)
            threading.Thread(target=self._follow, args=given, name="forker", daemon=True).start()
        return self._server

    def _follow(self, server: ForkServer, agents: dict[int, ForkedAgent]) -> None:
        while (news := server.receive()) is not None:
            for one in news:
                agent = agents.get(one.id)
                if agent is None and isinstance(one, Spawned):
                    with suppress(ProcessLookupError):
                        os.kill(one.pid, signal.SIGKILL)  # it was given up
                elif agent is not None and isinstance(one, Spawned):
                    agent.pid = one.pid
                    agent.begun.set()
                elif agent is not None and isinstance(one, Exited):
                    del agents[one.id]
                    agent.end(one.exit_code)
                    self._changed()
        with self._lock:
            self._server = None if self._server is server else self._server
        server.close()
        for agent in agents.values():
            agent.orphaned = True
            agent.begun.set()
