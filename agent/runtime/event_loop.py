"""One thread, one selector: what is to be read, what was posted from other threads, and one timer."""

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

_DOUBLE_DELIVERY = 0.3  # seconds: `timeout` and its like signal a program, and then its whole process group


@dataclass(frozen=True)
class Signalled:
    """A signal has come."""

    number: int


class Count:
    """How often somebody has asked."""

    def __init__(self) -> None:
        self._times, self._last = 0, 0.0

    def up(self, now: float) -> int:
        """Which time this is; 0: the one before came twice. `now` is a monotonic clock."""
        if self._times == 1 and now - self._last < _DOUBLE_DELIVERY:
            return 0
        self._times, self._last = self._times + 1, now
        return self._times


class HasFileno(Protocol):
    """What can be selected on."""

    def fileno(self) -> int:
        """The descriptor."""


class Loop:
    """`post` is safe from any thread and from signal handlers; everything else is the loop's own."""

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
        with suppress(BlockingIOError, OSError):  # full: it is awake anyway; closed: nobody cares
            self._waker.send(b"\0")

    def add(self, source: HasFileno, readable: Callable[[], object]) -> None:
        """Call `readable` whenever there is something to read."""
        self._selector.register(source, selectors.EVENT_READ, readable)

    def remove(self, source: HasFileno) -> None:
        """Forget a source; before it is closed."""
        with suppress(KeyError, ValueError):
            self._selector.unregister(source)

    def on_signals(self, numbers: Iterable[int]) -> None:
        """Post `Signalled` for these signals, until `close`; not for those that this process is to ignore.

        `nohup` wants that, and so does a shell with the interrupts of what it runs in the background.
        """

        def handle(number: int, frame: FrameType | None) -> None:
            self.post(Signalled(number))

        for number in numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._handlers[number] = signal.signal(number, handle)

    def wait(self, until: float | None) -> list[object]:
        """Sleep until something happens, or `until` (monotonic); what was posted, in order."""
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
        """Give signals back to who had them, and let go of all descriptors."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()
        self._selector.close()
        self._wake.close()
        self._waker.close()
