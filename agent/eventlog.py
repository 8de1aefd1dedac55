"""The event log: one JSON object a line, as it happens."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class EventLog:
    """Appends to a file (or a named pipe), and tells listeners; never in the way of training."""

    def __init__(self, path: Path | None = None) -> None:
        self._descriptor: int | None = None
        self.listeners: list[Callable[[Event], None]] = []
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def write(self, event: Event) -> None:
        """One event with its `time` and `event`."""
        if self._descriptor is not None:
            line = json.dumps(event, default=str).encode() + b"\n"
            try:
                os.write(self._descriptor, line)  # one call: lines of several writers do not mix
            except OSError:
                self.close()  # the disk is full, or the reader of a pipe has gone
        for listener in self.listeners:
            listener(event)

    def close(self) -> None:
        """Close the file; later events reach only the listeners."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
