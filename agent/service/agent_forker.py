"""Fork agents from one process that has imported torch.

An agent that is started as a program imports torch, which takes seconds, and so does its fork server. Both
are forks here, so that the agents of a node and their servers share one copy of torch in memory.
"""

from __future__ import annotations

import itertools
import os
import select
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from adaptdl_elastic.agent.runtime.fork_server import PRELOAD, Exited, ForkServer, Spawned
from adaptdl_elastic.agent.runtime.forked_child import Command

_MODULES = (
    *(*PRELOAD, "adaptdl_elastic.torch.parallel", "adaptdl_elastic.agent.cli"),
    *("adaptdl_elastic.agent.launch", "adaptdl_elastic.agent.runtime.agent"),
)
_READ_EARLY = (
    *("LD_", "PYTHON", "OMP_", "MKL_", "KMP_", "TORCH_", "PYTORCH_", "MALLOC", "GLIBC", "CUDA"),
    *("TZ", "LC_", "LANG"),
)
"""Beginnings of the names of variables that Python, torch or the C library read when they are loaded."""


def can_fork(given: Mapping[str, str]) -> bool:
    """Return whether an agent with these variables of its job can be a fork."""
    return not any(name.startswith(_READ_EARLY) for name in given)


class ForkedAgent:
    """An agent that was forked; as `subprocess.Popen`."""

    def __init__(self) -> None:
        self.pid = 0
        self.returncode: int | None = None
        self.begun, self.ended = threading.Event(), threading.Event()

    def poll(self) -> int | None:
        """Return its exit code; None while it runs."""
        return self.returncode

    def wait(self, seconds: float) -> None:
        """Wait for its end; TimeoutExpired if it has not ended in time."""
        if not self.ended.wait(seconds):
            raise subprocess.TimeoutExpired("agent", seconds)

    def end(self, code: int) -> None:
        """Record that it has ended, or that it cannot be started."""
        self.returncode = code
        self.begun.set()
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
        with self._lock, log.open("ab") as output:
            server, number = self._running(), next(self._numbers)
            self._agents[number] = agent
            server.spawn(number, command, output.fileno(), output.fileno())
        agent.begun.wait()
        if not agent.pid:
            raise OSError("the process that forks agents has died")
        return agent

    def _running(self) -> ForkServer:
        if self._server is None:
            self._server = ForkServer.start(self._environment, _MODULES, lasting=True)
            threading.Thread(target=self._follow, args=(self._server,), name="forker", daemon=True).start()
        return self._server

    def _follow(self, server: ForkServer) -> None:
        while (news := server.receive()) is not None:
            for one in news:
                if isinstance(one, Spawned):
                    self._agents[one.id].pid = one.pid
                    self._agents[one.id].begun.set()
                elif isinstance(one, Exited):
                    self._agents.pop(one.id).end(one.exit_code)
                    self._changed()
        with self._lock:
            self._server, orphans = None, self._agents
            self._agents = {}
        server.close()
        for agent in orphans.values():
            threading.Thread(target=self._outlive, args=(agent,), daemon=True).start()

    def _outlive(self, agent: ForkedAgent) -> None:
        """Wait for the end of an agent whose exit code nobody is told."""
        try:
            descriptor = os.pidfd_open(agent.pid) if agent.pid else None
        except ProcessLookupError:
            descriptor = None
        if descriptor is not None:
            select.select([descriptor], [], [])
            os.close(descriptor)
        agent.end(1)
        self._changed()
