"""Record the error that ended a replica's script: the replica writes it, its agent reads it.

The replica's log directory gets two files: `uncaught.json` for the agent, and `traceback.log` for users. If
many replicas fail together, the agent must choose the one to show, and it must recognise a failure that
happens again. So the record says when the error was raised, of which kind it is, and whether it only reports
that another replica is gone. The kind is the type of the exception and the innermost line of the user's own
code. The message is not part of it, because it may contain addresses, ranks and numbers that differ each
time.
"""

from __future__ import annotations

import json
import re
import sysconfig
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

RECORD = "uncaught.json"
TRACEBACK = "traceback.log"
_PACKAGE = str(Path(__file__).parents[1])  # not resolved: in a checkout the parts of the package are links
_LOST_PEER_TYPES = {"PeerLostError", "DistBackendError", "DistNetworkError", "DistStoreError"}
_LOST_PEER_TEXT = re.compile(r"[Gg]loo|NCCL|TCPStore|Connection (closed|reset) by peer|Broken pipe")


@dataclass(frozen=True)
class UncaughtError:
    """Hold what an agent needs to know about an error."""

    kind: str  # equal for errors of the same type at the same line of the user's code
    message: str  # one line, with the type
    raised: float  # wall clock
    lost_peer: bool  # the error only reports that another replica, or the connection to it, is gone
    final: bool = False  # the job is to fail without restarts, because they would not help


def describe(error: BaseException, trace: TracebackType | None) -> UncaughtError:
    """Return what an agent needs to know about an error.

    `trace`: its traceback, starting in the user's code.
    """
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    text = " ".join(str(error).splitlines()[:1])
    return UncaughtError(
        kind=f"{name} at {_where(error, trace)}",
        message=f"{kind.__name__}: {text}" if text else kind.__name__,
        raised=time.time(),
        lost_peer=_is_lost_peer(error),
        final=getattr(error, "ends_job", False) is True,
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
        return UncaughtError(**json.loads((directory / RECORD).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _where(error: BaseException, trace: TracebackType | None) -> str:
    """Return the innermost line of the user's code; if there is none, of any code."""
    if isinstance(error, SyntaxError):  # it is raised before the file has a frame
        return f"{Path(error.filename or '?').name}:{error.lineno}"
    frames = traceback.extract_tb(trace)
    own = [frame for frame in frames if not _is_installed(frame.filename)] or frames
    return f"{Path(own[-1].filename).name}:{own[-1].lineno} in {own[-1].name}" if own else "no line"


def _is_installed(file: str) -> bool:
    """Return whether a file belongs to Python, to an installed package or to adaptdl-elastic."""
    paths = sysconfig.get_paths()
    installed = (paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    return file.startswith((*installed, _PACKAGE, "<frozen"))


def _is_lost_peer(error: BaseException) -> bool:
    """Return whether an error, or its cause, reports that a peer or the connection to it is gone."""
    cause: BaseException | None = error
    while cause is not None:
        names = {base.__name__ for base in type(cause).__mro__}
        if names & _LOST_PEER_TYPES:
            return True
        if type(cause) is RuntimeError and _LOST_PEER_TEXT.search(str(cause)):
            return True
        cause = cause.__cause__
    return False
