"""One thread that waits for readable descriptors, posts of other threads, signals and one time."""

from __future__ import annotations

import queue
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

# seconds: `timeout` and similar programs signal a process and then its whole process group
_DOUBLE_DELIVERY = 0.3


@dataclass(frozen=True)
class Signalled:
    """A signal has arrived."""

    number: int


class StopRequests:
    """Counts requests to stop, without counting a signal twice that was delivered twice."""

    def __init__(self) -> None:
        self._times, self._last = 0, 0.0

    def count(self, now: float) -> int:
        """Return the number of this request; 0: the previous one was delivered twice. `now` is monotonic."""
        if self._times == 1 and now - self._last < _DOUBLE_DELIVERY:
            return 0
        self._times, self._last = self._times + 1, now
        return self._times


class HasFileno(Protocol):
    """An object that a selector can wait for."""

    def fileno(self) -> int:
        """Return the descriptor."""


class Loop:
    """An event loop.

    `post` is safe in any thread and in signal handlers; all else is for the loop's thread.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._posted: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._waker.setblocking(False)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._handlers: dict[int, Any] = {}

    def post(self, event: object) -> None:
        """Hand an event to the loop."""
        self._posted.put(event)
        # full: the loop is awake already; closed: the event has no receiver
        with suppress(BlockingIOError, OSError):
            self._waker.send(b"\0")

    def add(self, source: HasFileno, readable: Callable[[], object]) -> None:
        """Call `readable` whenever the source can be read."""
        self._selector.register(source, selectors.EVENT_READ, readable)

    def remove(self, source: HasFileno) -> None:
        """Remove a source; call it before the source is closed."""
        with suppress(KeyError, ValueError):
            self._selector.unregister(source)

    def on_signals(self, numbers: Iterable[int]) -> None:
        """Post `Signalled` for these signals until `close`, except for those that this process ignores.

        `nohup` depends on that, and so does a shell that starts programs in the background.
        """

        def handle(number: int, frame: FrameType | None) -> None:
            self.post(Signalled(number))

        for number in numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._handlers[number] = signal.signal(number, handle)

    def wait(self, until: float | None) -> list[object]:
        """Wait until an event happens, or until `until` (monotonic); return what was posted, in order."""
        timeout = None if until is None else max(0.0, until - time.monotonic())
        for key, _ in self._selector.select(timeout):
            if key.fileobj is self._wake:
                with suppress(BlockingIOError):
                    self._wake.recv(1 << 12)
            else:
                key.data()
        events = []
        with suppress(queue.Empty):
            while True:
                events.append(self._posted.get_nowait())
        return events

    def close(self) -> None:
        """Restore the signal handlers and close all descriptors."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()
        self._selector.close()
        self._wake.close()
        self._waker.close()
