"""What a replica does between `fork` and the user's first line, and after the last one.

The script must not notice that it was forked from a warm server: it is `__main__`, its directory is
`sys.path[0]`, its arguments are `sys.argv`, its output comes by the line, its random
numbers are its own, and its tracebacks hold no frame of ours. The interpreter ends as it does for
`python script.py`: other threads are waited for, atexit functions run, streams are flushed.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import importlib.machinery
import io
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from adaptdl_elastic.channel import FD_VARIABLE

_PR_SET_PDEATHSIG = 1
ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
CANNOT_EXEC = 127  # as a shell says it


@dataclass(frozen=True)
class Command:
    """What a replica runs. `mode`: "script", "module" (python -m) or "exec" (any program)."""

    mode: str
    argv: tuple[str, ...]
    cwd: str
    env: dict[str, str] = field(default_factory=dict)  # on top of the server's own
    threads: int | None = None  # of torch; None: torch's choice


def become(
    command: Command, parent: int, stdout: int | None, stderr: int | None, channel: int | None
) -> None:
    """Turn the freshly forked process into one that looks freshly started; `parent` has forked it."""
    os.setsid()  # a terminal's Ctrl-C is for the agent, which asks the replicas to stop
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
        os.set_inheritable(channel, True)  # for a program that starts Python itself
        os.environ[FD_VARIABLE] = str(channel)


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent is gone."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it went before we asked
        os._exit(1)


def run(command: Command) -> None:
    """Run the command; returns when Python shall end normally, and exits or execs otherwise."""
    if command.mode == "exec":
        _exec(command)
    _fresh_interpreter(command)
    try:
        if command.mode == "module":
            runpy._run_module_as_main(command.argv[0], alter_argv=True)  # type: ignore[attr-defined]
        else:
            _run_script(command.argv[0])
    except SystemExit as error:
        if error.code not in (0, None, 143):
            _record(error)
        raise
    except BaseException as error:
        _record(error)
        _die_of(error)


def _exec(command: Command) -> NoReturn:
    try:
        os.execvp(command.argv[0], list(command.argv))
    except OSError as error:
        print(f"adaptdl-run: can not run {command.argv[0]!r}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(CANNOT_EXEC)


def _fresh_interpreter(command: Command) -> None:
    sys.argv = list(command.argv)
    # by the line, as on a terminal: replicas that write to the same file do not cut each other's lines
    for name, number in (("stdout", 1), ("stderr", 2)):
        raw = open(number, "wb", closefd=False)  # noqa: SIM115 - lives as long as the process
        errors = "backslashreplace" if name == "stderr" else None
        stream = io.TextIOWrapper(raw, errors=errors, line_buffering=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    first = command.cwd if command.mode == "module" else str(Path(command.argv[0]).resolve().parent)
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, first)
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    # every process would draw the server's numbers
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
    main = sys.modules["__main__"]
    loader = importlib.machinery.SourceFileLoader("__main__", script)
    main.__dict__.update(__file__=script, __loader__=loader, __spec__=None, __cached__=None)
    with io.open_code(str(Path(script).resolve())) as file:
        code = compile(file.read(), script, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def _die_of(error: BaseException) -> NoReturn:
    """What the interpreter does with an error that nobody caught, without our frames in it."""
    trace = _users(error.__traceback__)
    error = error.with_traceback(trace)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    sys.excepthook(type(error), error, trace)
    if not isinstance(error, KeyboardInterrupt):
        sys.exit(1)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
    sys.exit(130)


def _users(trace: types.TracebackType | None) -> types.TracebackType | None:
    """The part of a traceback that begins in the user's code."""
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace


def _record(error: BaseException) -> None:
    """Write the error file of torch.distributed.elastic.multiprocessing.errors, unless the script did."""
    path = os.environ.get(ERROR_FILE_VARIABLE)
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
    except OSError:  # the log directory is gone: the traceback on stderr has to do
        return
