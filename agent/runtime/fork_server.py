"""A process that has imported what every replica needs, and forks replicas within milliseconds.

`import torch` takes seconds, and so do the imports of the first DistributedDataParallel. A fork of a process
that has made both takes 30 ms. The server is a process (`ForkServer.start`) with a single thread in which
nothing is initialised: no process group, no CUDA context, no random numbers drawn.

The agent uses a `ForkServer`: `spawn`, `signal` and `receive`. They exchange lines of JSON over a socket
pair; the descriptors of a replica are sent as ancillary data with its line. The server is the parent process
of the replicas. When the agent's end of the socket closes, however the agent ended, the server kills every
replica's process group and ends. When the server dies, the kernel kills the replicas.

A node service has a server as well, which forks the servers of the agents (`lasting`): they outlive it.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from adaptdl_elastic import _own_python
from adaptdl_elastic.agent.runtime.forked_child import SERVER, Command, become, remember_modules, run
from adaptdl_elastic.protocol import environment

PRELOAD = (
    *("numpy", "torch", "torch.distributed", "torch._dynamo"),
    # what a replica needs up to its first step; `adaptdl_elastic.torch` imports names at their first use
    *(f"adaptdl_elastic.torch.{name}" for name in ("_startup", "data", "epoch", "parallel")),
    *("adaptdl_elastic.torch._elastic.join", "adaptdl_elastic.torch._process_group.script_collectives"),
    "adaptdl_elastic.torch._runtime.worker_processes",
)
_PR_SET_CHILD_SUBREAPER = 36
_BOOT = (
    f"{_own_python.WITHOUT_DIRECTORY}"
    "from adaptdl_elastic.agent.runtime import fork_server; fork_server.main({}, {}, {})"
)
_CHUNK = 1 << 16
_STREAMS = ("stdout", "stderr", "channel")
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # signals that the server ignores
_GRACE = 2.0  # seconds between SIGTERM and SIGKILL for processes that replicas have left behind
_LAST_WAIT = 2.0  # most seconds to wait, at the server's end, for killed processes


@dataclass(frozen=True)
class Spawned:
    """A replica has started."""

    id: int
    pid: int


@dataclass(frozen=True)
class Exited:
    """A replica has ended; the code is negative if a signal ended it."""

    id: int
    exit_code: int
    signalled: bool = False  # a signal from the agent was delivered to it before it ended
    time: float = 0.0  # wall clock


class ForkServer:
    """The agent's side of the fork server."""

    def __init__(self, process: subprocess.Popen[bytes] | None, sock: socket.socket) -> None:
        self.process = process  # None: another process has started it
        self._socket = sock
        self._buffer = b""
        self._used = False

    @classmethod
    def start(
        cls, environ: dict[str, str] | None = None, modules: Sequence[str] = PRELOAD, lasting: bool = False
    ) -> ForkServer:
        """Start a server that imports these modules in the background; requests wait until it has.

        Args:
            environ: Its environment; None: that of this process.
            modules: What it imports.
            lasting: Whether its children outlive it.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-u", "-c", _BOOT.format(theirs.fileno(), list(modules), lasting)],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL if lasting else None,
                start_new_session=True,
                env=environ,
            )
        return cls(process, ours)

    @classmethod
    def forked(cls, sock: socket.socket, environ: dict[str, str]) -> ForkServer:
        """Give its environment to a server that was forked for this process, and return it."""
        # a server that is gone is noticed where its news are received
        with suppress(OSError):
            sock.sendall(_line(**environ))
        return cls(None, sock)

    def fileno(self) -> int:
        """Return the descriptor, for selectors: it is readable when `receive` returns something."""
        return self._socket.fileno()

    def spawn(
        self,
        number: int,
        command: Command,
        stdout: int | None = None,
        stderr: int | None = None,
        channel: int | None = None,
    ) -> None:
        """Ask for a replica; OSError if the server is gone. Without descriptors it uses the agent's."""
        self._used = True
        streams = dict(zip(_STREAMS, (stdout, stderr, channel), strict=True))
        given = [(name, value) for name, value in streams.items() if value is not None]
        line = _line(op="spawn", id=number, streams=[name for name, _ in given], command=asdict(command))
        if given:
            sent = socket.send_fds(self._socket, [line], [value for _, value in given])
            line = line[sent:]
        self._socket.sendall(line)

    def signal(self, number: int, what: int) -> None:
        """Send a signal to a replica's whole process group; do nothing if it has ended."""
        with suppress(OSError):
            self._socket.sendall(_line(op="signal", id=number, signal=int(what)))

    def receive(self) -> list[Spawned | Exited] | None:
        """Return what has happened since the last call; None if the server is gone. Blocks if nothing has."""
        try:
            data = self._socket.recv(_CHUNK)
        except OSError:
            data = b""
        if not data:
            return None
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [_news(json.loads(line)) for line in lines]

    def close(self, timeout: float = 4 * (_GRACE + _LAST_WAIT)) -> None:
        """Kill what still runs and wait for the server's end."""
        with suppress(OSError), self._socket:
            self._socket.shutdown(socket.SHUT_WR)
            self._socket.settimeout(timeout)
            while self.process is None and self._socket.recv(_CHUNK):
                continue
        if self.process is None:
            return
        if not self._used:
            self.process.kill()  # it may be in the middle of its imports
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            # the kernel may keep a process whose disk or device does not answer
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout)


def _news(message: dict[str, Any]) -> Spawned | Exited:
    if message["op"] == "spawned":
        return Spawned(message["id"], message["pid"])
    return Exited(message["id"], message["exit_code"], message["signalled"], message["time"])


def _line(**message: object) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def main(number: int, modules: Sequence[str], lasting: bool = False) -> None:
    """Run the server; in a forked replica, return into the user's script."""
    with suppress(OSError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # the agent handles interrupts, and closes the socket when the server is to end
    for name in _IGNORED:
        signal.signal(name, signal.SIG_IGN)
    preload((*modules, *filter(None, os.environ.get(environment.PRELOAD, "").split(","))))
    command = _Server(socket.socket(fileno=number), lasting).serve()
    if command is not None and command.mode == SERVER:
        serve_forked(int(os.environ[environment.AGENT_FD]))
    if command is not None:
        run(command)


def serve_forked(number: int) -> NoReturn:
    """Run the server of another process in this one, which was forked for that, until it ends."""
    try:
        sock, line = socket.socket(fileno=number), b""
        # one byte at a time: requests follow
        while not line.endswith(b"\n"):
            if not (byte := sock.recv(1)):
                os._exit(0)
            line += byte
        os.environ.clear()
        os.environ.update(json.loads(line))
        main(sock.detach(), ())
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def preload(modules: Sequence[str]) -> None:
    """Import the modules that exist; a replica reports what it misses by itself."""
    for name in modules:
        with suppress(ImportError):
            importlib.import_module(name)
    remember_modules()
    gc.collect()
    gc.freeze()  # so that a garbage collection in a replica does not copy every page


def _has_members(group: int) -> bool:
    """Return whether a process group has members that are children of the server.

    Processes that a replica leaves behind become such children.
    """
    try:
        os.waitid(os.P_PGID, group, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _children() -> list[int]:
    """Return the server's children that have not been reaped."""
    mine, found = str(os.getpid()), []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError):
            if path.read_text(errors="replace").rpartition(")")[2].split()[1] == mine:
                found.append(int(path.parent.name))
    return found


class _Server:
    """The server: one thread and one selector for requests of the agent and exits of replicas."""

    def __init__(self, sock: socket.socket, lasting: bool) -> None:
        self._socket, self._lasting = sock, lasting
        self._pids: dict[int, int] = {}  # replica's id → pid
        self._signalled: set[int] = set()  # ids of replicas to which the agent has sent a signal
        self._graces: dict[int, float] = {}  # process group → monotonic time when it is killed
        self._buffer = b""
        self._descriptors: list[int] = []
        self._wake, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._wake.setblocking(False)

    def serve(self) -> Command | None:
        """Serve until the agent is gone and return None; in a forked replica, return what it is to run."""
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            while True:
                due = min(self._graces.values(), default=None)
                wait = None if due is None else max(0.0, due - time.monotonic())
                ready = {key.fileobj for key, _ in selector.select(wait)}
                self._end_graces()
                if self._wake in ready:
                    with suppress(BlockingIOError):
                        self._wake.recv(_CHUNK)
                    self._reap()
                if self._socket in ready:
                    lines = self._read()
                    if lines is None:
                        # the socket pair is closed before the last children have ended
                        signal.set_wakeup_fd(-1)
                        if not self._lasting:
                            self._kill_all()
                        return None
                    for line in lines:
                        command = self._handle(json.loads(line))
                        if command is not None:
                            return command

    def _read(self) -> list[bytes] | None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._socket, _CHUNK, 64)
        except OSError:
            return None
        self._descriptors += descriptors
        if not data:
            return None
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return lines

    def _handle(self, message: dict[str, Any]) -> Command | None:
        if message["op"] == "signal":
            self._reap()  # a replica that has ended already was not ended by this signal
            if message["id"] in self._pids:
                self._signalled.add(message["id"])
                self._signal_group(self._pids[message["id"]], message["signal"])
            return None
        if self._lasting and self._is_alone():
            return None  # nobody would know of the process
        count = len(message["streams"])
        mine, self._descriptors = self._descriptors[:count], self._descriptors[count:]
        # block the signals that the server ignores until the replica has its own handlers
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._leave()
            fields = dict(message["command"], argv=tuple(message["command"]["argv"]))
            command = Command(**fields)
            streams: dict[str, int] = dict(zip(message["streams"], mine, strict=True))
            become(command, server, *(streams.get(name) for name in _STREAMS))
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            return command
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number in mine:
            os.close(number)
        self._pids[message["id"]] = pid
        self._send(op="spawned", id=message["id"], pid=pid)
        return None

    def _is_alone(self) -> bool:
        """Return whether the process that sends requests has ended."""
        with suppress(BlockingIOError):
            return not self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        return False

    def _leave(self) -> None:
        """Close the server's descriptors in a replica."""
        signal.set_wakeup_fd(-1)
        for sock in (self._socket, self._wake, self._waker):
            sock.close()
        for number in self._descriptors:  # descriptors of replicas that were requested at the same time
            os.close(number)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for number, known in list(self._pids.items()):
                if known == pid:
                    del self._pids[number]
                    # signal processes that it has started and left behind, mostly of data loaders
                    self._signal_group(pid, signal.SIGTERM if status == 0 else signal.SIGKILL)
                    if status == 0:
                        self._graces[pid] = time.monotonic() + _GRACE
                    code, signalled = os.waitstatus_to_exitcode(status), number in self._signalled
                    self._signalled.discard(number)
                    self._send(op="exited", id=number, exit_code=code, signalled=signalled, time=time.time())

    def _signal_group(self, pid: int | None, number: int) -> None:
        if pid is None:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, number)
            return
        with suppress(ProcessLookupError):  # it has not called setsid yet
            if pid in self._pids.values():
                os.kill(pid, number)

    def _end_graces(self) -> None:
        """Kill process groups whose grace period is over, and forget empty ones."""
        for group, due in list(self._graces.items()):
            if not _has_members(group):
                del self._graces[group]
            elif time.monotonic() >= due:
                del self._graces[group]
                self._signal_group(group, signal.SIGKILL)

    def _kill_all(self) -> None:
        """Kill replicas with their groups at once; end orphans in sessions of their own within `_GRACE`."""
        for pid in self._pids.values():
            self._signal_group(pid, signal.SIGKILL)
        self._pids.clear()
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGCHLD,))
        asked, kill_at = set[int](), time.monotonic() + _GRACE
        end = kill_at + _LAST_WAIT
        while ((children := _children()) or self._graces) and (now := time.monotonic()) < end:
            for pid in children:  # the children of a killed process become children of the server
                with suppress(ProcessLookupError, PermissionError):
                    if now >= kill_at:
                        os.kill(pid, signal.SIGKILL)
                    elif pid not in asked and os.getpgid(pid) not in self._graces:
                        os.kill(pid, signal.SIGTERM)
                        asked.add(pid)
            # an adopted child sends no SIGCHLD for the adoption, so check at intervals
            signal.sigtimedwait((signal.SIGCHLD,), min(0.1, (end if now >= kill_at else kill_at) - now))
            self._reap()
            self._end_graces()

    def _send(self, **message: object) -> None:
        with suppress(OSError):
            self._socket.sendall(_line(**message))
