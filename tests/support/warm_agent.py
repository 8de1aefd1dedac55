"""Start agents and commands of tests from a process that has imported what they import.

An agent takes 0.2 instead of 4 s of CPU time, its coordinator 0.1 instead of 0.7 s, and so does `adaptdl`.

An agent and its fork server import torch, each by itself. Here both are forked from one process of the test
run. What a fork cannot show is tested with `fresh` agents, which are started as a user starts them: command
lines, the environments that other processes can read, variables that are read before Python's first line or
while torch is imported, another order of sets on each node. `TEST_FRESH=1` starts all agents like that.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import multiprocessing.process
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import warm_coordinator

from adaptdl_elastic.agent.runtime import fork_server, forked_child
from adaptdl_elastic.agent.runtime.forked_child import Command
from adaptdl_elastic.protocol.environment import FORK_SERVER

MARK = "TEST_MARK"  # inherited by every process a run starts, so that orphans can be found
UNMARKED = "0" * 32
_TESTS = str(Path(__file__).resolve().parents[1])
_ROOT = str(Path(__file__).resolve().parents[2])

# beginnings of variables' names: what is read before a fork here, and what replicas must not be able to read
_READ_BEFORE = (
    *("LD_", "PYTHON", "OMP_", "MKL_", "KMP_", "TORCH", "MALLOC", "GLIBC", "CUDA", "TMPDIR", "TZ"),
    *("LANG", "LC_"),
)
_SECRETS = ("ADAPTDL_ETCD_", "ADAPTDL_SECRET")
# `elastic_run.environment` gives the first two to all agents, torch the third to who makes an optimizer; an
# agent reads the last one when it has started
_OURS = ("PYTHONPATH", "PYTHONUNBUFFERED", "TORCHINDUCTOR_CACHE_DIR", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        *("one_thread", *fork_server.PRELOAD),
        *("torch.utils.serialization", "torch.profiler._cupti_monitor"),
        *("adaptdl_elastic.agent.cli", "adaptdl_elastic.agent.launch", "adaptdl_elastic.agent.runtime.agent"),
        *(
            f"adaptdl_elastic.autoscaler.commands.{name}"
            for name in ("cluster", "explain", "jobs", "job_lists")
        ),
        *("adaptdl_elastic.autoscaler.coordinator.process", "adaptdl_elastic.autoscaler.policy"),
        *("adaptdl_elastic.rendezvous.services.submitted", "adaptdl_elastic.rendezvous.store.connect"),
    ]
)
os.environ.setdefault(MARK, UNMARKED)
_MAIN = multiprocessing.current_process()


def completed(
    module: str,
    arguments: Sequence[str],
    directory: Path,
    environment: Mapping[str, str],
    timeout: float | None,
) -> subprocess.CompletedProcess[str]:
    """Run a module in a forked process to its end, as `subprocess.run` with its output."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        process = WarmAgent(arguments, directory, environment, out, err, module)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        return subprocess.CompletedProcess(process.args, code, out.read_text(), err.read_text())


def _early(environment: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in environment.items() if k.startswith(_READ_BEFORE) and k not in _OURS}


_EARLY = _early(os.environ)


def suits(environment: Mapping[str, str]) -> bool:
    """Return whether an agent with this environment can be forked."""
    secret = any(name.startswith(_SECRETS) for name in environment)
    elsewhere = environment.get("PYTHONPATH", _ROOT) != _ROOT
    return not (os.environ.get("TEST_FRESH") or secret or elsewhere) and _early(environment) == _EARLY


class WarmAgent:
    """An `adaptdl-run` or another module that was forked; as `subprocess.Popen`, without pipes."""

    def __init__(
        self,
        arguments: Sequence[str],
        directory: Path,
        environment: Mapping[str, str],
        stdout: Path,
        stderr: Path,
        module: str = "adaptdl_elastic.agent",
    ) -> None:
        self.args = [module, *arguments]
        given = (self.args, str(directory), dict(environment), str(stdout), str(stderr))
        # daemon: the end of the test run does not wait for it
        self._process = CONTEXT.Process(target=_run, args=given, daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        # it may have been reaped already by the process that forked it
        with suppress(ProcessLookupError):
            if self.poll() is None:
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(arguments: list[str], directory: str, environment: dict[str, str], out: str, err: str) -> None:
    # no garbage collection walks what the server has imported, nor does what looks for objects
    gc.freeze()
    _take_mark(environment.get(MARK, UNMARKED))
    multiprocessing.set_start_method(None, force=True)
    multiprocessing.process._current_process = _MAIN  # type: ignore[attr-defined]
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    sys.path[:] = [path for path in sys.path if not path.startswith(_TESTS)]
    if "FAKE_NVML" in environment:
        sys.path.insert(0, str(Path(__file__).parent / "nvml_stand_in"))
        # torch has imported the real one
        sys.modules.pop("pynvml", None)
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    streams = [os.open(path, flags) for path in (out, err)]
    command = Command("module", tuple(arguments), directory)
    forked_child.become(command, os.getppid(), streams[0], streams[1], None)
    if arguments[0] == "adaptdl_elastic.agent":
        # before there is a descriptor that its helper must not have
        warm_coordinator.install()
        _fork_server()
    forked_child.run(command)


def _fork_server() -> None:
    """Fork the server of this agent, as a node service does."""
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        os.setsid()
        os.dup2(theirs.fileno(), 3)
        os.closerange(4, 1 << 12)
        fork_server.serve_forked(3)
    theirs.close()
    os.environ[FORK_SERVER] = str(ours.detach())


def _take_mark(mark: str) -> None:
    """Write the run's mark over the one of the test run, where other processes read it."""
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    place = libc.getenv(MARK.encode())
    assert ctypes.string_at(place).decode() == UNMARKED, "the server of the test run has no mark to replace"
    ctypes.memmove(place, mark.encode(), len(UNMARKED))
