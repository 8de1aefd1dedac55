"""Files of a simulated machine, and the paths that the product opens there.

A file outlives the processes of its machine. Nothing is read from or written to the real file system.
"""

from __future__ import annotations

import io
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from faultsim import threads

if TYPE_CHECKING:
    from faultsim.node import Machine


class Path(PurePosixPath):
    """Takes the place of `pathlib.Path`: a path on the machine of the running process."""

    @property
    def _files(self) -> dict[str, bytes]:
        machine: Machine = threads.kernel().running().process.machine  # type: ignore[attr-defined]
        return machine.files

    def is_file(self) -> bool:
        """Whether it was written."""
        return str(self) in self._files

    def read_text(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Return what was written; FileNotFoundError."""
        try:
            return self._files[str(self)].decode(encoding, errors)
        except KeyError:
            raise FileNotFoundError(2, "No such file or directory", str(self)) from None

    def open(self, mode: str) -> io.BytesIO:
        """Open a log, into which no simulated process writes."""
        assert mode == "ab"
        self._files.setdefault(str(self), b"")
        return io.BytesIO()
