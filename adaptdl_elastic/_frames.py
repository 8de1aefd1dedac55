"""Find the script's frames on the interpreter's stack; only this module reads the stack.

Frames of the library are left out. The result is the same under a decorator, in a compiled model and in a
debugger, as long as these call the library through frames of their own.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from adaptdl_elastic.protocol.uncaught_error import is_installed

PACKAGE = f"{Path(__file__).parent}{os.sep}"
"""Prefix of the file names of the library's code."""

_INSTALLED = f"{os.sep}site-packages{os.sep}"
_TORCH = f"{_INSTALLED}torch{os.sep}"

_FRAMES = 30
"""Most frames of a stack that are shown."""

_INNERMOST = 6
"""Frames that tell whether a thread waits in a collective."""


def is_library(code: CodeType) -> bool:
    """Return whether `code` belongs to this library."""
    return code.co_filename.startswith(PACKAGE)


def callers() -> Iterator[FrameType]:
    """Yield the calling frame, its caller, and so on outwards."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def script_frame() -> FrameType:
    """Return the innermost frame outside of this library and of torch, or the outermost one of all."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (is_library(frame.f_code) or _TORCH in frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def script_line() -> str:
    """Return the line of the script that calls the library, as "train.py:12"."""
    return _line(script_frame())


def script_lines(outermost: CodeType | None) -> str:
    """Return the lines of the calls that led here, innermost first: "model.py:3 of train.py:12".

    Args:
        outermost: Code of the outermost frame to include. The search ends at a module's code in any case.
    """
    lines = []
    for frame in up_to(outermost):
        if not is_library(frame.f_code):
            lines.append(_line(frame))
    return " of ".join(lines)


@functools.cache
def lines_of(file: str) -> list[str]:
    """Return the lines of a file of the script as they were at the first call."""
    return linecache.getlines(file)


def running_statements(outermost: CodeType | None) -> str:
    """Return a digest of the script's lines that are being executed: their text, not their number.

    It is the same in every run of a script, and after edits of other lines. Lines of the same text are told
    apart by their order.

    Args:
        outermost: Code of the outermost frame to include. The search ends at a module's code in any case.
    """
    digest = hashlib.blake2b(digest_size=12)
    for frame in up_to(outermost):
        code = frame.f_code
        if not is_library(code):
            lines = lines_of(code.co_filename)[: frame.f_lineno] or [""]
            what = (Path(code.co_filename).name, code.co_name, lines[-1], lines.count(lines[-1]))
            digest.update(repr(what).encode())
    return digest.hexdigest()


def up_to(outermost: CodeType | None) -> Iterator[FrameType]:
    """Yield the frames from the caller outwards, up to the frame of `outermost` or of a module."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        if frame.f_code is outermost or frame.f_code.co_name == "<module>":
            return
        frame = frame.f_back


def script_variables() -> list[tuple[str, Any]]:
    """Return the variables of the script's frames that led here, by stable names, outermost frame first.

    They are the globals of the frames' modules ("ema"), locals ("main.ema") and attributes of `self`
    ("Trainer.ema"). The search ends at a frame of an installed package. A loop that such a package runs has
    no variables of the script.
    """
    up = takewhile(
        lambda frame: is_library(frame.f_code) or _INSTALLED not in frame.f_code.co_filename, up_to(None)
    )
    frames = [frame for frame in up if not is_library(frame.f_code)][::-1]
    found = [item for frame in frames for item in frame.f_globals.items()]
    for frame in frames:
        if frame.f_code.co_name != "<module>":
            owner = frame.f_locals.get("self")
            attributes = getattr(owner, "__dict__", {})
            scopes = (frame.f_code.co_name, frame.f_locals), (type(owner).__name__, attributes)
            found += [(f"{scope}.{name}", one) for scope, own in scopes for name, one in own.items()]
    return found


def main_thread_stack() -> tuple[str, list[str]]:
    """Return the main thread's stack, and the file names of its innermost frames. Callable in any thread.

    Returns:
        The stack as in a traceback, the innermost call last, without calls outside of the script; and the
        names of the files of the innermost frames.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = traceback.extract_stack(frame)
    first = max((i for i, one in enumerate(frames) if one.name == "<module>"), default=0)
    text = "".join(traceback.format_list(frames[first:][-_FRAMES:]))
    return text, [one.filename for one in frames[-_INNERMOST:]]


def innermost(stack: str) -> str:
    """Return the script's last place in a stack that `main_thread_stack` returned, on one line.

    If there is none of the script, return the last one of all.
    """
    lines = [line.strip() for line in stack.splitlines() if line.startswith('  File "')]
    own = [line for line in lines if not is_installed(line.split('"')[1])] or lines
    return own[-1] if own else "with an empty stack"


def _line(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
