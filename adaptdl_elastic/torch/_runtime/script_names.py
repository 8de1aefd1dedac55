"""Keep the names that a script's loops assign, and say what to do where one of them is missing.

The problem. A process that continues a loop has not run the part of the loop before its position. A name that
the body assigns only now and then, e.g. under `if step % 50 == 0`, does not exist there.

What is done. The global names of the `__main__` module are a State. It holds the small plain values of names
that did not exist when the process's first loop began. A process that continues gets those that it does not
have, with rank 0's values. Names that the script assigns before its loops are never changed.

What is not done. Local variables of a function cannot be assigned from outside. If one is missing in a
process that continues, a restart does not help. The error then names the loop, and ends the job.
"""

from __future__ import annotations

import dis
import json
import re
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any, BinaryIO

import numpy as np
import torch

from adaptdl_elastic import _codec, _frames, checkpoint, collective
from adaptdl_elastic.protocol import uncaught_error
from adaptdl_elastic.reducer import PeerLostError

MOST_BYTES = 1 << 16
"""Largest size of all names and values together. A value that does not fit is left out."""

_STORES = ("STORE_NAME", "STORE_GLOBAL")
"""Instructions that assign a global name."""

_SHARED = (int, str, bytes, tuple, type(None))
"""Types of which two equal values may be one object."""


class ScriptNames(checkpoint.State):
    """Hold the names that the script's loops have assigned. One per session, made with its position."""

    required = False

    def __init__(self) -> None:
        super().__init__("adaptdl-names")
        self._names: dict[str, Any] | None = None  # global names of `__main__`; None: no loop has begun
        self._before: set[str] = set()  # those that existed when the first loop began
        self._apart: set[str] = set()  # those that differ between replicas on purpose
        self._given: dict[str, Any] = {}  # values from the checkpoint or from the other replicas
        self._continues: bool | None = None  # whether this process begins in the middle; None: not known yet
        self._lines: dict[CodeType, str] = {}  # in a process that continues: code of a loop → the loop's line

    def _found(self) -> dict[str, Any]:
        """Return the names that the loops have assigned, in the order of their first assignment."""
        found, left = dict[str, Any](), MOST_BYTES
        for name, value in (self._given if self._names is None else self._names.copy()).items():
            if name not in self._before and not name.startswith("__"):
                size = len(name) + _size(value)
                if size <= left:
                    found[name], left = value, left - size
        return found

    def sync(self) -> None:
        """Find the names that differ between replicas on purpose, such as a rank. A collective.

        Those are not saved. Numbers that are measured differ, too: rank 0's are saved.
        """
        mine = {(name, value) for name, value in self._found().items() if type(value) in (bool, int, str)}
        with suppress(PeerLostError):  # the next boundary notices the loss; at the end there is none
            same, some = collective.combine((mine, mine), lambda a, b: (a[0] & b[0], a[1] | b[1]), self.name)
            self._apart = {name for name, _ in some - same}

    def save(self, fileobj: BinaryIO) -> None:
        """Write the names that the loops have assigned."""
        found = {name: value for name, value in self._found().items() if name not in self._apart}
        fileobj.write(_codec.encode(found))

    def load(self, fileobj: BinaryIO) -> None:
        """Read what `save` wrote, and assign the names that are missing."""
        self._assign(_codec.decode(fileobj.read()))

    def _assign(self, given: dict[str, Any]) -> None:
        """Assign the names that do not exist, and those that still have the value that was assigned here."""
        if self._names is not None:
            passed = self._passed()
            for name, value in given.items():
                before = self._names.get(name, self)
                same = before is self._given.get(name, self)
                # Python has one object for equal small integers, so the script may have assigned it as well
                if before is self or (same and not (isinstance(before, _SHARED) and name in passed)):
                    self._names[name] = value
        self._given = given

    def _passed(self) -> set[str]:
        """Return the names that the module assigns before the place at which it is now, e.g. a loop's."""
        for frame in _frames.up_to(None):
            if frame.f_globals is self._names and frame.f_code.co_name == "<module>":
                code = dis.get_instructions(frame.f_code)
                return {one.argval for one in code if one.opname in _STORES and one.offset < frame.f_lasti}
        return set()

    def loop_begins(self, continues: bool) -> None:
        """Record that the script comes to a loop.

        Args:
            continues: Whether this process begins in the middle of the job. Its first loop decides.
        """
        if self._continues is None:
            self._continues = continues
            if continues:
                self._explain_errors()
        for frame in _frames.up_to(None):
            if self._continues and not _frames.is_library(frame.f_code):
                place = f"{Path(frame.f_code.co_filename).name} line {frame.f_lineno}"
                self._lines.setdefault(frame.f_code, place)
            if self._names is None and frame.f_globals.get("__name__") == "__main__":
                self._names, self._before = frame.f_globals, {*frame.f_globals}
                self._assign(self._given)

    def _explain_errors(self) -> None:
        uncaught_error.explain, hook = self.explain, sys.excepthook

        def explained(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            self.explain(error, trace)
            hook(kind, error, trace)

        sys.excepthook = explained

    def explain(self, error: BaseException, trace: TracebackType | None) -> None:
        """Add the remedy to the error of a name that a loop assigns, and let the error end the job."""
        named = re.search(r"'(\w+)'", str(error))
        if not isinstance(error, NameError) or hasattr(error, "ends_job") or named is None:
            return
        codes = [frame.f_code for frame, _ in traceback.walk_tb(trace)][::-1]
        for code in codes[:1] if isinstance(error, UnboundLocalError) else codes:
            if code in self._lines and named[1] in _assigned(code):
                remedy = f"assign `{named[1]}` before the loop, {self._lines[code]}"
                error.args = (f"{error}: {remedy}, because this process continued behind its assignment",)
                error.ends_job = True  # type: ignore[attr-defined]
                return


def _assigned(code: CodeType) -> set[str]:
    """Return the variables that `code` assigns."""
    stores = (one for one in dis.get_instructions(code) if one.opname in _STORES)
    return {*code.co_varnames, *code.co_cellvars, *(one.argval for one in stores)}


def _size(value: Any) -> int:
    """Return the size of a plain value in bytes; more than `MOST_BYTES` for any other value."""
    try:
        size = 0
        for part in json.JSONEncoder(default=_leaf).iterencode(value):  # refuses tensors and objects
            size += len(part)
            if size > 2 * MOST_BYTES:
                return size
        return len(_codec.encode(value))
    except (TypeError, ValueError, RuntimeError):
        return MOST_BYTES + 1


def _leaf(value: Any) -> int:
    """Return a number in place of a number of numpy or torch, and of bytes; TypeError for other objects."""
    if isinstance(value, np.generic | bytes) or (type(value) is torch.Tensor and value.dim() == 0):
        return 0
    raise TypeError
