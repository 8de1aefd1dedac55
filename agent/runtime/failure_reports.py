"""Explain a replica's failure in one line, from its error file and exit code."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

from adaptdl_elastic.agent.core.states import Evidence
from adaptdl_elastic.protocol import uncaught_error
from adaptdl_elastic.protocol.channel import CAN_NOT_JOIN
from adaptdl_elastic.rendezvous.schema.records import Failure

_LONGEST = 400  # characters of a message; the replica's stderr and error file have all of it
_OF_A_WORKER = re.compile(r"Caught .* in DataLoader worker process \d+\.$")
_REMEDY: dict[int, str] = {
    signal.SIGKILL: "killed from outside; if nobody did, the machine ran out of memory (dmesg)",
    signal.SIGSEGV: "crashed in native code; run the script alone under `python -X faulthandler`",
    signal.SIGBUS: "crashed in native code; /dev/shm may be full",
    signal.SIGABRT: "aborted in native code; its stderr says why",
}


def examine(exit_code: int, error_file: str, argument: str = "") -> tuple[str, Evidence]:
    """Return one line about a replica's failure, and the evidence it gives about the cause."""
    line = describe(exit_code, error_file, argument)
    error = uncaught_error.read(Path(error_file).parent)
    if error is None:
        return line, Evidence(kind_of(exit_code))
    kind = "" if error.lost_peer else error.kind
    if kind == uncaught_error.NO_SHARED_MEMORY:
        line = f"{line}: {kind}"
    of_step = (error.step, error.worked_batch)
    return line, Evidence(kind, error.raised, error.lost_peer, error.final, *of_step, error.exit_code)


def describe(exit_code: int, error_file: str, argument: str = "") -> str:
    """Return the error that the replica recorded, else the meaning of its exit code, as one line."""
    recorded = read_error_file(Path(error_file))
    if recorded:
        return recorded
    if exit_code < 0:
        remedy = _REMEDY.get(-exit_code)
        return exit_name(exit_code) + (f": {remedy}" if remedy else "")
    if exit_code == CAN_NOT_JOIN:
        return "the script cannot be rescaled in place; the newcomer's stderr says why"
    if exit_code == 127:
        return f"{argument or 'the program'} cannot be executed"
    return f"exit code {exit_code}; its stderr says why"


def read_error_file(path: Path) -> str | None:
    """Return the message in an error file of torch.distributed.elastic, or None."""
    try:
        message = json.loads(path.read_text())["message"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    text = message.get("message") if isinstance(message, dict) else message
    lines = str(text or "").strip().splitlines()
    if not lines:
        return None
    line = lines[-1] if _OF_A_WORKER.search(lines[0]) else lines[0]
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"


def exit_name(exit_code: int) -> str:
    """Return the name of an exit: `exit code 1`, or `SIGKILL`."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"


_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def kind_of(exit_code: int) -> str:
    """Return the kind of a failure of which only the exit code is known.

    A signal that users and the kernel send says nothing about the script, so two of them are not of one kind:
    "".
    """
    return "" if -exit_code in _FROM_OUTSIDE else exit_name(exit_code)


def summarise(failure: Failure, *, again: bool, traceback: Path | None) -> str:
    """Return the line that a person is told of a failure.

    Args:
        failure: What is known of it.
        again: Its traceback is the one that was shown before.
        traceback: Where its traceback can be read, if it was not shown.
    """
    name, why = exit_name(failure.exit_code), failure.message
    what = f"replica {failure.rank} failed" + (" in the same way again" if again else "")
    line = f"{what}: {why}" if why.startswith(name) else f"{what} ({name}): {why}"
    return line if traceback is None else f"{line}; its traceback: {traceback}"
