"""Write to standard output and standard error without ever raising.

A terminal may close, the reader of a pipe may end first (Ctrl-C in `adaptdl-run … 2>&1 | tee log`), and a
disk may be full. Then a line cannot be shown, which must not end the loop that trains, saves or decides.
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from pathlib import Path

MOST_KEPT = 1 << 20
"""Most characters that are kept of what could not be shown."""

_LONGEST_LINE = 1024


class Unshown:
    """Keep what could not be shown: in memory, and in a file as soon as there is one."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._text = ""
        self.size = 0  # characters that could not be shown

    def add(self, text: str) -> None:
        """Keep a text, unless too much has been kept already."""
        if self.size < MOST_KEPT:
            self._text += text
            self._write()
        self.size += len(text)

    def keep_in(self, path: Path) -> None:
        """Append to the file `path` from now on."""
        self._path = path
        self._write()

    def _write(self) -> None:
        if self._path is None or not self._text:
            return
        # other threads add to what is left; a lock could be held for ever in a forked process
        text, self._text = self._text, ""
        try:
            with self._path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
        except BaseException as error:  # on a full disk it is the end of `with` that fails
            self._text = text + self._text
            if not isinstance(error, OSError):
                raise


class SafeStream(io.TextIOWrapper):
    """Write text to a descriptor, line by line; keep what cannot be written instead of raising."""

    def __init__(self, number: int, errors: str, unshown: Unshown) -> None:
        raw = open(number, "wb", closefd=False)  # noqa: SIM115 - lives as long as the process
        super().__init__(raw, errors=errors, line_buffering=True)
        self.unshown = unshown
        # as Python's own streams have it
        self.mode = "w"  # type: ignore[misc]
        self._line = ""

    def write(self, text: str) -> int:
        """Write a text, or keep it. Raises TypeError if it is none, as any text stream does."""
        self._line += text
        try:
            super().write(text)
        except (OSError, ValueError):
            line, self._line = self._line, ""
            self.unshown.add(line)
        else:
            # a progress bar has no end of a line
            self._line = self._line[self._line.rfind("\n") + 1 :][-_LONGEST_LINE:]
        return len(text)

    def flush(self) -> None:
        """Flush, if that is possible."""
        with suppress(OSError, ValueError):
            super().flush()


def protect() -> Unshown:
    """Let this process's standard streams never raise, and return what keeps the text that they lose.

    Descriptors that were closed (`>&-`) lead to /dev/null: the next file that is opened would get their
    numbers otherwise. Streams that something else has replaced are left as they are.
    """
    if isinstance(sys.stderr, SafeStream):
        return sys.stderr.unshown
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, number)
            if null != number:
                os.close(null)
    unshown = Unshown()
    for name, number, errors in (("stdout", 1, "strict"), ("stderr", 2, "backslashreplace")):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__"):
            if stream is not None:
                with suppress(OSError, ValueError):
                    stream.flush()
                errors = stream.errors
            setattr(sys, name, SafeStream(number, errors, unshown))
    return unshown
