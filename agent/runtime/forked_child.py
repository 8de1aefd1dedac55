"""What a replica's process does between `fork` and the script's first line, and after its last one.

The script must not notice that it was forked from a warm server. It is `__main__`, its directory is
`sys.path[0]`, its arguments are `sys.argv`, its output is line-buffered, its random numbers are its own, and
its tracebacks contain no frames of this package.

It ends as `python script.py` does: other threads are waited for, atexit functions run, output is flushed and
closed, and objects of the script's own modules are finalized. Only the interpreter is not torn down, because
a thread of gloo that returns from a collective and calls Python during the tear-down would abort the process
(SIGABRT, "terminate called without an active exception"), long after the script has done its work. C's own
atexit handlers do not run either, as in a process of `multiprocessing`.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import gc
import importlib.machinery
import io
import json
import os
import runpy
import select
import signal
import socket
import sys
import sysconfig
import threading
import time
import traceback
import types
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from adaptdl_elastic.agent.machine import device_locks
from adaptdl_elastic.agent.machine.devices import Gpus
from adaptdl_elastic.protocol import environment, uncaught_error
from adaptdl_elastic.protocol.channel import STOPPED, say_finished
from adaptdl_elastic.rendezvous.local.safe_stream import SafeStream, Unshown, protect

_PR_SET_PDEATHSIG = 1
CANNOT_EXEC = 127  # as in a shell
SERVER = "server"
"""Mode of a command: a fork server that outlives the one that forks it (`fork_server.serve_forked`)."""

_NOT_FLUSHED = 120  # Python's exit code if the last output cannot be written
_STUCK = 10.0  # seconds after which a file that can be neither flushed nor closed is given up
_CONNECTION_ERRORS = (ConnectionError, EOFError)
_DYING_SECONDS = 1.0  # at most from when a process closes its descriptors until it counts as ended

_warm = set[str]()  # names of the modules that were imported before the script

_Hook = Callable[[type[BaseException], BaseException, types.TracebackType | None], Any]


@dataclass(frozen=True)
class Command:
    """What a replica runs. `mode`: "script", "module" (python -m), "exec" (any program) or SERVER."""

    mode: str
    argv: tuple[str, ...]
    cwd: str
    env: dict[str, str] = field(default_factory=dict)  # added to the server's environment
    threads: int | None = None  # number of torch's threads; None: torch's choice
    reports: str = ""  # directory for the files of `uncaught_error`; "": none are written
    quiet: bool = False  # write the traceback there, not to stderr: the agent shows one
    devices: tuple[str, ...] = ()  # names of the GPUs to hold


def become(
    command: Command, parent: int, stdout: int | None, stderr: int | None, channel: int | None
) -> None:
    """Make a freshly forked process look like a freshly started one.

    Args:
        command: what it will run.
        parent: pid of the process that forked it.
        stdout: descriptor of its standard output; None: that of the server.
        stderr: descriptor of its standard error; None: that of the server.
        channel: descriptor of its channel to the agent, if it has one.
    """
    os.setsid()  # Ctrl-C in a terminal is for the agent, which then asks the replicas to stop
    if command.mode != SERVER:
        die_with(parent)
    for number in range(1, signal.NSIG):
        if number not in (signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, getattr(signal, "SIGXFSZ", 0)):
            try:
                signal.signal(number, signal.SIG_DFL)
            except (OSError, ValueError):  # reserved by the C library
                continue
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for source, target in ((stdout, 1), (stderr, 2)):
        if source is not None:
            os.dup2(source, target)
            os.close(source)
    os.chdir(command.cwd)
    os.environ.update(command.env)
    if channel is not None:
        os.set_inheritable(channel, True)  # inheritable for a program that starts Python itself
        os.environ[environment.AGENT_FD] = str(channel)


def remember_modules() -> None:
    """Remember the modules that are imported before a script runs, unless that was done before a fork.

    To go through them in a replica would copy 5 MB of pages that it shares with its server.
    """
    if not _warm:
        _warm.update(sys.modules)


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before the request
        os._exit(1)


def run(command: Command) -> NoReturn:
    """Run the command, and end this process as it ends."""
    protect()
    _hold_devices(command)
    if command.mode == "exec":
        _exec(command)
    _fresh_interpreter(command)
    if command.quiet:
        os.register_at_fork(after_in_child=_silence_orphan)
    remember_modules()
    code, interrupted, pid = 0, False, os.getpid()
    try:
        _run(command, pid)
    except SystemExit as error:
        code = _exit_code(error)
    except KeyboardInterrupt:  # its traceback has been printed already
        interrupted = True
    threading._shutdown()  # type: ignore[attr-defined]
    # a process that the script has forked may reach this line, too
    if code == 0 and not interrupted and os.getpid() == pid:
        # a stop comes too late now; SIG_IGN would be inherited by programs started from here
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        say_finished()
    flushed = _wind_up()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code or (0 if flushed else _NOT_FLUSHED))


def _hold_devices(command: Command) -> None:
    """Wait until the devices are free; where no lock can be made, only the plan divides them."""

    def say(line: str) -> None:
        print(f"adaptdl-run: {line}", file=sys.stderr, flush=True)

    if not command.devices:
        return
    gpus = Gpus()
    for name in command.devices:
        try:
            device_locks.lock(name, say, gpus.users, across_exec=command.mode == "exec")
        except OSError as error:
            say(f"no lock for {name}: {error}")


def _run(command: Command, pid: int) -> None:
    try:
        if command.mode == "module":
            runpy._run_module_as_main(command.argv[0], alter_argv=True)  # type: ignore[attr-defined]
        else:
            _run_script(command.argv[0])
    except SystemExit as error:
        if error.code not in (0, None, STOPPED) and not uncaught_error.interrupted:
            _record(error)
            if command.reports and os.getpid() == pid:
                found = uncaught_error.describe(error, _users(error.__traceback__))
                uncaught_error.write(found, Path(command.reports))
        raise
    except BaseException as error:
        if uncaught_error.interrupted and isinstance(error, KeyboardInterrupt):
            raise SystemExit(STOPPED) from None
        if uncaught_error.explain is not None:
            uncaught_error.explain(error, error.__traceback__)
        _record(error)
        # a process that the script has forked may reach this line, too, and is not the replica
        _die_of(error, command if os.getpid() == pid else replace(command, reports=""))


def _exec(command: Command) -> NoReturn:
    try:
        os.execvp(command.argv[0], list(command.argv))
    except OSError as error:
        print(f"adaptdl-run: cannot run {command.argv[0]!r}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(CANNOT_EXEC)


def _fresh_interpreter(command: Command) -> None:
    sys.argv = list(command.argv)
    unshown = Unshown(Path(command.reports) / "unshown.log" if command.reports else None)
    # line-buffered as on a terminal: replicas that write to one file do not cut each other's lines
    for name, number, errors in (("stdout", 1, "strict"), ("stderr", 2, "backslashreplace")):
        stream = SafeStream(number, errors, unshown)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    first = command.cwd if command.mode == "module" else str(Path(command.argv[0]).resolve().parent)
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, first)
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    # otherwise every process would draw the same numbers as the server
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
        if command.threads is not None:
            sys.modules["torch"].set_num_threads(command.threads)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _run_script(script: str) -> None:
    if not script.endswith(".py") and (Path(script).is_dir() or script.endswith((".zip", ".pyz", ".pyc"))):
        runpy.run_path(script, run_name="__main__")
        return
    main, script = sys.modules["__main__"], str(Path(script).absolute())  # as Python does
    loader = importlib.machinery.SourceFileLoader("__main__", script)
    main.__dict__.update(__file__=script, __loader__=loader, __spec__=None, __cached__=None)
    with io.open_code(str(Path(script).resolve())) as file:
        code = compile(file.read(), script, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def _die_of(error: BaseException, command: Command) -> NoReturn:
    """Do what the interpreter does with an uncaught error, without frames of this package."""
    trace = _users(error.__traceback__)
    error = error.with_traceback(trace)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    if command.reports:
        uncaught_error.write(uncaught_error.describe(error, trace), Path(command.reports))
    if command.reports and command.quiet and sys.stderr is not None:
        _show_to_agent(error, trace, Path(command.reports))
    else:
        sys.excepthook(type(error), error, trace)
    if isinstance(error, KeyboardInterrupt):
        raise KeyboardInterrupt
    sys.exit(1)


def _show_to_agent(error: BaseException, trace: types.TracebackType | None, directory: Path) -> None:
    """Write the traceback of an error, by the script's excepthook, to a file; to stderr if that fails."""
    stderr, said = sys.stderr, io.StringIO()
    sys.stderr = said
    try:
        sys.excepthook(type(error), error, trace)
    finally:
        sys.stderr = stderr
    try:
        (directory / uncaught_error.TRACEBACK).write_text(said.getvalue(), errors="backslashreplace")
    except OSError:
        stderr.write(said.getvalue())


def _exit_code(error: SystemExit) -> int:
    """Return the exit code that the interpreter would use; an object that is no number is a message."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def _wind_up() -> bool:
    """Do what the interpreter does after its threads and before its tear-down.

    Returns:
        Whether all output was written.
    """
    atexit._run_exitfuncs()
    # flush first: a garbage collection may finalize a file's inner layer before its outer one
    _each_file("flush")
    for name in ("__main__", *_users_modules()):
        sys.modules.pop(name, None)  # finalizers of objects that only the script's modules refer to run
    sys.last_type = sys.last_value = sys.last_traceback = None
    gc.collect()
    _each_file("close")
    ctypes.CDLL(None).fflush(None)
    try:
        for stream in (sys.stdout, sys.stderr):  # a script may have replaced these streams by any object
            if stream is not None and not getattr(stream, "closed", False):
                stream.flush()
    except Exception:
        return False
    return True


def _users_modules() -> list[str]:
    """Return modules that are neither installed nor part of Python, such as those beside the script."""
    paths = sysconfig.get_paths()
    installed = tuple(paths[where] for where in ("stdlib", "platstdlib", "purelib", "platlib"))
    new = {name: module for name, module in sys.modules.items() if name not in _warm}
    files = {name: getattr(module, "__file__", None) for name, module in new.items()}
    return [name for name, file in files.items() if isinstance(file, str) and not file.startswith(installed)]


def _each_file(method: str) -> None:
    """Flush or close all files in a thread, for at most `_STUCK` seconds: a file may wait for a lock."""

    def work() -> None:
        for one in _files():
            with suppress(Exception):  # ignored, as in a finalizer
                getattr(one, method)()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(_STUCK)


def _files() -> list[Any]:
    """Return the open files that the script writes to, outer layers first.

    Files that are only read are left out, since their end loses no data.
    """
    found = [one for one in gc.get_objects() if issubclass(type(one), io.IOBase)]
    streams = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    standard = (*streams, *(getattr(stream, "buffer", None) for stream in streams))
    plain = (io.BufferedWriter, io.BufferedRandom)
    text = [one for one in found if isinstance(one, io.TextIOBase)]
    bare = (io.FileIO, socket.SocketIO)  # unbuffered, so nothing is left to write
    packed = [one for one in found if not isinstance(one, (io.TextIOBase, *bare)) and type(one) not in plain]
    ordered = (*text, *packed, *(one for one in found if type(one) in plain))
    return [one for one in ordered if _writes(one) and not any(one is each for each in standard)]


def _writes(file: Any) -> bool:
    try:
        return bool(file.writable())
    except Exception:  # closed, or not fully initialised
        return False


def _users(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Return the part of a traceback that begins in the user's code."""
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace


def _record(error: BaseException) -> None:
    """Write the error file of torch.distributed.elastic.multiprocessing.errors, unless the script did."""
    path = os.environ.get(environment.ERROR_FILE)
    if not path or Path(path).exists():
        return
    lines = traceback.format_exception(type(error), error, _users(error.__traceback__))
    text = f"{type(error).__name__}: {error}"
    record: dict[str, Any] = {
        "message": {
            "message": text,
            "extraInfo": {"py_callstack": "".join(lines), "timestamp": str(int(time.time()))},
        }
    }
    try:
        Path(path).write_text(json.dumps(record))
    except OSError:  # the log directory is gone; the traceback is on stderr all the same
        return


class _ForkedHook:
    """In a process that a replica has forked, takes the place of the `sys.excepthook` that it has inherited.

    When a replica is killed its data loading processes live on for some milliseconds. A thread of
    multiprocessing's in them finds the connection to the replica broken and prints a traceback
    (`resource_sharer`, through `sys.excepthook`). It tells nothing that the end of the replica does not, and
    its reader cannot do anything about it. So such errors are not shown once the replica is gone.

    Processes that are not forked (multiprocessing's start methods `spawn` and `forkserver`) are not reached.
    """

    def __init__(self, inherited: _Hook, parent: int) -> None:
        self.inherited, self._parent = inherited, parent

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
    ) -> None:
        if not (issubclass(kind, _CONNECTION_ERRORS) and self._is_orphan()):
            self.inherited(kind, error, trace)

    def _is_orphan(self) -> bool:
        """Whether the parent has ended, or ends within a moment: its connections break a little before."""
        if os.getppid() != self._parent:
            return True
        try:
            parent = os.pidfd_open(self._parent)
        except OSError:
            return os.getppid() != self._parent
        try:
            return bool(select.select([parent], [], [], _DYING_SECONDS)[0])
        finally:
            os.close(parent)


def _silence_orphan() -> None:
    """Have this process, which was just forked, keep quiet about the loss of the one that forked it."""
    hook = sys.excepthook
    inherited = hook.inherited if isinstance(hook, _ForkedHook) else hook
    sys.excepthook = _ForkedHook(inherited, os.getppid())
