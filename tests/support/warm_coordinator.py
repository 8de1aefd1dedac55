"""Fork the coordinators of a warm agent from a process that has imported what they import.

A coordinator takes 0.1 instead of 0.7 s of CPU time. The helper that forks them is itself forked from the
agent before that has any thread. For each coordinator it forks a keeper, which waits for it and tells the
agent its exit code.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO, NoReturn

from adaptdl_elastic.agent.cluster import coordinator_host
from adaptdl_elastic.agent.runtime import forked_child
from adaptdl_elastic.agent.runtime.forked_child import Command

_DESCRIPTORS = 3  # of the log, of the agent's pipe for the exit code, of its pipe that ends with it


def install() -> None:
    """Let the agent that this process is about to become have its coordinators forked."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if (helper := os.fork()) == 0:
        os.dup2(theirs.fileno(), 3)
        os.closerange(4, 1 << 12)
        _serve(socket.socket(fileno=3))
    theirs.close()
    agent = os.getpid()

    def end() -> None:
        # the CPU time of what is waited for counts for the test; replicas inherit this function
        if os.getpid() == agent:
            ours.close()
            os.waitpid(helper, 0)

    atexit.register(end)
    names = {**vars(subprocess), "Popen": partial(_Coordinator, ours)}
    coordinator_host.subprocess = SimpleNamespace(**names)  # type: ignore[attr-defined]


class _Coordinator:
    """A coordinator that was forked; as `subprocess.Popen`."""

    def __init__(
        self,
        helper: socket.socket,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        stdout: BinaryIO,
        pass_fds: Sequence[int],
        **_: object,
    ) -> None:
        told, telling = os.pipe()
        # the last argument is the number of the one descriptor that is passed on
        arguments = command[command.index("coordinator") : -1]
        request = json.dumps([arguments, dict(env)]).encode()
        socket.send_fds(helper, [request], [stdout.fileno(), telling, *pass_fds])
        os.close(telling)
        self._told = os.fdopen(told)
        self.pid = int(self._told.readline())
        self.returncode: int | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        with self._told:
            # no code comes from a keeper that was killed
            self.returncode = int(self._told.readline() or -signal.SIGKILL)
        self._ended.set()

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("coordinator", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def _serve(agent: socket.socket) -> NoReturn:
    """Fork a keeper for each request, until the agent has gone."""
    # a test may send these to all processes of a run
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while True:
        request, descriptors, _, _ = socket.recv_fds(agent, 1 << 20, _DESCRIPTORS)
        if not request:
            # at the latest it ends by this signal
            signal.alarm(1)
            with suppress(ChildProcessError):
                while os.wait():
                    pass
            os._exit(0)
        if os.fork() == 0:
            agent.close()
            _keep(*json.loads(request), *descriptors)
        for each in descriptors:
            os.close(each)


def _keep(arguments: list[str], environ: dict[str, str], log: int, telling: int, parent: int) -> NoReturn:
    """Run one coordinator as a child; tell its pid and its exit code."""
    pid = os.fork()
    if pid == 0:
        os.close(telling)
        os.environ.clear()
        os.environ.update(environ)
        argv = ("adaptdl_elastic.autoscaler", *arguments, str(parent))
        command = Command("module", argv, str(Path.cwd()))
        forked_child.become(command, os.getppid(), os.dup(log), log, None)
        forked_child.run(command)
    for each in (log, parent):
        os.close(each)
    with suppress(BrokenPipeError):
        os.write(telling, f"{pid}\n".encode())
        os.write(telling, f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n".encode())
    os._exit(0)
