"""Record the error that ended a replica's script: the replica writes it, its agent reads it.

The replica's log directory gets two files: `uncaught.json` for the agent, and `traceback.log` for users. If
many replicas fail together, the agent must choose the one to show, and it must recognise a failure that
happens again. So the record says when the error was raised, of which kind it is, and whether it only reports
that another replica is gone. The kind is the type of the exception and the innermost line of the user's own
code. The message is not part of it, because it may contain addresses, ranks and numbers that differ each
time. An error that may be temporary has no kind.
"""

from __future__ import annotations

import json
import re
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Annotated

from pydantic import Field, TypeAdapter

RECORD = "uncaught.json"
TRACEBACK = "traceback.log"
_PACKAGE = str(Path(__file__).parents[1])  # not resolved: in a checkout the parts of the package are links
_LOST_PEER_TYPES = {"PeerLostError", "DistBackendError", "DistNetworkError", "DistStoreError"}
# Names of types, and messages of torch and of services whose type says nothing. A device-side assert is not
# temporary: the script's data causes it.
_TEMPORARY = re.compile(
    r"[Cc]onnect|Timeout|timed out|BrokenProcessPool|killed by signal|exited unexpectedly|No space left"
    r"|Too many open files|PytorchStreamWriter|CUDA error: (?!device-side assert)|cuDNN error"
    r"|SlowDown|Throttl|Unavailable"
)
# a loader's worker has no room in /dev/shm, whichever line of the script is interrupted by that
_SHARED_MEMORY = re.compile(r"signal: Bus error|unable to [a-z ]+(shared memory|</?torch_)")
NO_SHARED_MEMORY = "/dev/shm is too small for the loader's workers (a larger --shm-size, or num_workers=0)"
_CERTAIN = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
_LOST_PEER_TEXT = re.compile(r"[Gg]loo|NCCL|TCPStore|Connection (closed|reset) by peer|Broken pipe")


@dataclass(frozen=True)
class UncaughtError:
    """Hold what an agent needs to know about an error."""

    kind: str  # equal for errors of the same type at the same line of the user's code; "": may be temporary
    message: str  # one line, with the type
    raised: float  # wall clock
    lost_peer: bool  # the error only reports that another replica, or the connection to it, is gone
    final: bool = False  # the job is to fail without restarts, because they would not help
    step: int | None = None  # number of the last step before it; None: unknown
    # largest batch size that is known to work, if no step was made with the present, larger one; else None
    worked_batch: int | None = None
    # what the process would end with, if it were not killed before its end
    exit_code: Annotated[int, Field(ge=1, le=255)] = 1


_RECORDS = TypeAdapter(UncaughtError)


count_steps: Callable[[], int] | None = None
"""Return the number of the last finished step. The library sets this function in a replica."""

worked_batch: Callable[[], int | None] | None = None
"""Return what `UncaughtError.worked_batch` is to be. The library sets this function in a replica."""

explain: Callable[[BaseException, TracebackType | None], None] | None = None
"""Add a remedy to an error. The library sets this function in a replica that continues a job."""

interrupted = False
"""Whether Ctrl-C has stopped this replica: however its script ends now is no error. The library sets it."""


def describe(error: BaseException, trace: TracebackType | None) -> UncaughtError:
    """Return what an agent needs to know about an error.

    `trace`: its traceback, starting in the user's code.
    """
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    text = " ".join(str(error).splitlines()[:1])
    code = error.code if isinstance(error, SystemExit) else 1
    what = f"{name} at {_where(error, trace)}"
    if any(_SHARED_MEMORY.search(str(cause)) for cause in chain(error)):
        what = NO_SHARED_MEMORY
    elif _may_be_temporary(error):
        what = ""
    return UncaughtError(
        kind=what,
        message=f"{kind.__name__}: {text}" if text else kind.__name__,
        raised=time.time(),
        lost_peer=_is_lost_peer(error),
        final=getattr(error, "ends_job", False) is True or _is_of_an_import(error, trace),
        step=count_steps() if count_steps is not None else None,
        worked_batch=worked_batch() if worked_batch is not None else None,
        exit_code=(code & 0xFF) or 1 if isinstance(code, int) else 1,
    )


def write(found: UncaughtError, directory: Path) -> None:
    """Write the record for the agent.

    A failure to write it is ignored, so as not to hide the error itself.
    """
    try:
        (directory / RECORD).write_text(json.dumps(asdict(found)))
    except OSError:
        return


def read(directory: Path) -> UncaughtError | None:
    """Return the record of a replica that has ended, or None."""
    try:
        return _RECORDS.validate_json((directory / RECORD).read_text())
    except (OSError, ValueError):
        return None


def _is_of_an_import(error: BaseException, trace: TracebackType | None) -> bool:
    """Return whether the script, or a module that it imports, is no Python or needs a missing module."""
    own = [frame for frame in traceback.extract_tb(trace) if not is_installed(frame.filename)]
    kinds = (SyntaxError, ModuleNotFoundError)
    return isinstance(error, kinds) and all(frame.name == "<module>" for frame in own)


def _may_be_temporary(error: BaseException) -> bool:
    """Return whether an error, or one that led to it, is of a network, a disk or memory."""
    for cause in chain(error):
        names = " ".join(base.__name__ for base in type(cause).__mro__)
        system = isinstance(cause, (OSError, MemoryError)) and not isinstance(cause, _CERTAIN)
        if system or _TEMPORARY.search(f"{names} {cause}"):
            return True
    return False


def chain(error: BaseException, with_context: bool = True) -> list[BaseException]:
    """Return an error and those that led to it. `raise error from error` makes an error its own cause."""
    found: dict[int, BaseException] = {}
    cause: BaseException | None = error
    while cause is not None and id(cause) not in found:
        found[id(cause)] = cause
        cause = cause.__cause__ or (cause.__context__ if with_context else None)
    return list(found.values())


def _where(error: BaseException, trace: TracebackType | None) -> str:
    """Return the innermost line of the user's code; if there is none, of any code."""
    if isinstance(error, SyntaxError):  # it is raised before the file has a frame
        return f"{Path(error.filename or '?').name}:{error.lineno}"
    frames = traceback.extract_tb(trace)
    own = [frame for frame in frames if not is_installed(frame.filename)] or frames
    return f"{Path(own[-1].filename).name}:{own[-1].lineno} in {own[-1].name}" if own else "no line"


def is_installed(file: str) -> bool:
    """Return whether a file belongs to Python, to an installed package or to adaptdl-elastic."""
    return file.startswith((*_installed(), _PACKAGE, "<frozen"))


@cache
def _installed() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple(paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def loaded_files() -> tuple[str, ...]:
    """Return the source files of the modules of this process that are not installed."""
    own = (one for one in list(sys.modules.values()) if issubclass(type(one), ModuleType))
    files = {str(vars(one).get("__file__")) for one in own}
    beside = (one for one in files if not (is_installed(one) or "-packages/" in one))
    return tuple(sorted(one for one in beside if one.endswith(".py")))


def _is_lost_peer(error: BaseException) -> bool:
    """Return whether an error, or its cause, reports that a peer or the connection to it is gone.

    That a peer has ended regularly is a defect of the script.
    """
    for cause in chain(error, with_context=False):
        names = {base.__name__ for base in type(cause).__mro__}
        if names & _LOST_PEER_TYPES:
            return "PeerFinishedError" not in names
        if type(cause) is RuntimeError and _LOST_PEER_TEXT.search(str(cause)):
            return True
    return False
