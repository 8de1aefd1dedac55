"""The event log: one JSON object per line, written as events happen."""

from __future__ import annotations

import errno
import json
import os
import select
import stat
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from adaptdl_elastic.rendezvous.run_record import Event

MOST = 1 << 20  # most bytes that wait for the reader of a pipe; events beyond it are lost
LAST_WAIT = 1.0  # seconds that `close` waits for that reader


class EventLog:
    """Appends events to a file or a named pipe and passes them to listeners; never blocks training.

    `say` gets one line when events begin to be lost.
    """

    def __init__(self, path: Path | None = None, say: Callable[[str], None] = lambda text: None) -> None:
        self._descriptor: int | None = None
        self._path, self.say = path, say
        self.waiting: deque[bytes] = deque()  # for the reader of a pipe
        self._size = 0
        self._lost = False
        self.listeners: list[Callable[[Event], None]] = []
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
                os.set_blocking(self._descriptor, False)

    def write(self, event: Event) -> None:
        """Write one event, which has `time` and `event`."""
        if self._descriptor is not None:
            line = json.dumps(event, default=str).encode() + b"\n"
            if self._size + len(line) > MOST:
                self._lose("its reader does not keep up: events are lost")
            else:
                self.waiting.append(line)
                self._size += len(line)
            self.carry()
        for listener in self.listeners:
            listener(event)

    def carry(self) -> None:
        """Write as much as possible without blocking."""
        while self.waiting and self._descriptor is not None:
            line = self.waiting[0]
            try:
                # one call per line, so that lines of several writers do not mix
                written = os.write(self._descriptor, line)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    self._lose("the disk is full: events are written when there is room again")
                    return
                # the reader of a pipe has gone, or the disk has failed
                self._lose(f"no event is written any more: {error.strerror}")
                self._close()
                return
            self._size -= written
            if written < len(line):
                self.waiting[0] = line[written:]
            else:
                self.waiting.popleft()

    def _lose(self, why: str) -> None:
        if not self._lost:
            self._lost = True
            self.say(f"--event-log {self._path}: {why}")

    def close(self) -> None:
        """Close the file; later events only reach the listeners."""
        end = time.monotonic() + LAST_WAIT
        while self.waiting and self._descriptor is not None:
            ready = select.select([], [self._descriptor], [], max(0.0, end - time.monotonic()))[1]
            if not ready:
                self._lose("its reader does not keep up: the last events are lost")
                break
            before = self._size
            self.carry()
            if self._size == before:
                break  # the disk is still full
        self._close()

    def _close(self) -> None:
        self.waiting.clear()
        self._size = 0
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
