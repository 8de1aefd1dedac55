"""Stand-ins for `threading`, `queue`, `time` and `secrets` that run on the kernel's tasks and clock.

They have what the product uses of those modules, with the same meaning. A test holds the list of the
product's modules in which they take the place of the real ones (`patching`) against what those import.
"""

from __future__ import annotations

import queue
import threading
import time as real_time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from faultsim.kernel import EPOCH, Kernel, Task

T = TypeVar("T")

_kernels: list[Kernel] = []


def use(kernel: Kernel) -> None:
    """Make this the kernel that the stand-ins run on."""
    _kernels[:] = [kernel]


def kernel() -> Kernel:
    """The kernel in use."""
    return _kernels[0]


class Event:
    """As `threading.Event`."""

    def __init__(self) -> None:
        self._flag = False
        self._waiting: list[Task] = []

    def is_set(self) -> bool:
        return self._flag

    def set(self) -> None:
        self._flag = True
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            kernel().wake(task)

    def clear(self) -> None:
        self._flag = False

    def wait(self, timeout: float | None = None) -> bool:
        until = None if timeout is None else kernel().now + timeout
        while not self._flag:
            left = None if until is None else until - kernel().now
            if left is not None and left <= 0:
                kernel().comes_round()
                return False
            task = kernel().running()
            self._waiting.append(task)
            kernel().wait(left)
            if task in self._waiting:
                self._waiting.remove(task)
        return True


class RLock:
    """As `threading.RLock`; a plain lock, too: nobody here counts on a second `acquire` to hang."""

    def __init__(self) -> None:
        self._owner: Task | None = None
        self._depth = 0
        self._waiting: deque[Task] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        task = kernel().current
        while self._owner is not None and self._owner is not task and self._owner.process.alive:
            if not blocking:
                return False
            waiting = kernel().running()
            self._waiting.append(waiting)
            kernel().wait(None)
        self._owner, self._depth = task, self._depth + 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
            if self._waiting:
                kernel().wake(self._waiting.popleft())

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()

    def give_up(self) -> int:
        """Release it altogether; how often it was held."""
        depth, self._depth = self._depth, 1
        self.release()
        return depth

    def take_back(self, depth: int) -> None:
        """Hold it as before `give_up`."""
        self.acquire()
        self._depth = depth


class Condition:
    """As `threading.Condition`."""

    def __init__(self, lock: RLock | None = None) -> None:
        self._lock = lock or RLock()
        self._waiting: deque[Task] = deque()
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        task = kernel().running()
        self._waiting.append(task)
        depth = self._lock.give_up()
        woken = kernel().wait(timeout)
        if task in self._waiting:
            self._waiting.remove(task)
        self._lock.take_back(depth)
        return woken

    def wait_for(self, predicate: Callable[[], T], timeout: float | None = None) -> T:
        until = None if timeout is None else kernel().now + timeout
        while not (found := predicate()):
            left = None if until is None else until - kernel().now
            if left is not None and left <= 0:
                break
            self.wait(left)
        return found

    def notify(self, n: int = 1) -> None:
        for _ in range(min(n, len(self._waiting))):
            kernel().wake(self._waiting.popleft())

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class Thread:
    """As `threading.Thread`, for use and for subclasses whose `run` is the product's."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self._call, self._args, self._kwargs = target, tuple(args), dict(kwargs or {})
        self.name, self.daemon = name or "thread", daemon
        self._task: Task | None = None

    def run(self) -> None:
        if self._call is not None:
            self._call(*self._args, **self._kwargs)

    def start(self) -> None:
        process = kernel().running().process
        self._task = process.spawn(self.run, self.name)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.done

    def join(self, timeout: float | None = None) -> None:
        task = self._task
        assert task is not None
        until = None if timeout is None else kernel().now + timeout
        while not task.done:
            left = None if until is None else until - kernel().now
            if left is not None and left <= 0:
                return
            task.waiters.append(kernel().running())
            kernel().wait(left)


class Timer(Thread):
    """As `threading.Timer`."""

    def __init__(self, interval: float, function: Callable[[], object]) -> None:
        super().__init__(name="timer", daemon=True)
        self._interval, self._function, self._cancelled = interval, function, Event()

    def cancel(self) -> None:
        self._cancelled.set()

    def run(self) -> None:
        if not self._cancelled.wait(self._interval):
            self._function()


class OnTasks:
    """Put before a class that is derived from the real `threading.Thread`: its `run` becomes a task."""

    _task: Task | None = None
    if not TYPE_CHECKING:
        start, is_alive, join = Thread.start, Thread.is_alive, Thread.join


class SimpleQueue(Generic[T]):
    """As `queue.SimpleQueue`."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._waiting: deque[Task] = deque()

    def put(self, item: T) -> None:
        self._items.append(item)
        if self._waiting:
            kernel().wake(self._waiting.popleft())

    def get(self, block: bool = True, timeout: float | None = None) -> T:
        until = None if timeout is None else kernel().now + timeout
        while not self._items:
            left = None if until is None else until - kernel().now
            if not block or (left is not None and left <= 0):
                kernel().comes_round()
                raise queue.Empty
            task = kernel().running()
            self._waiting.append(task)
            kernel().wait(left)
            if task in self._waiting:
                self._waiting.remove(task)
        return self._items.popleft()

    def get_nowait(self) -> T:
        return self.get(block=False)

    def empty(self) -> bool:
        return not self._items

    def any(self, predicate: Callable[[T], bool]) -> bool:
        """Whether something like that waits to be taken."""
        return any(predicate(item) for item in self._items)


class Threading:
    """Takes the place of the module `threading`."""

    Event, Lock, RLock, Condition, Thread, Timer = Event, RLock, RLock, Condition, Thread, Timer
    ExceptHookArgs = threading.ExceptHookArgs


class Queue:
    """Takes the place of the module `queue`."""

    SimpleQueue, Empty = SimpleQueue, queue.Empty


class Time:
    """Takes the place of the module `time`: the clocks are those of the machine of the running process."""

    @staticmethod
    def monotonic() -> float:
        task = kernel().current
        return kernel().now + (task.process.clock_offset if task is not None else 0.0)

    @staticmethod
    def time() -> float:
        task = kernel().current
        return EPOCH + kernel().now + (task.process.wall_offset if task is not None else 0.0)

    @staticmethod
    def sleep(seconds: float) -> None:
        kernel().sleep(seconds)

    perf_counter = monotonic
    strftime, localtime = staticmethod(real_time.strftime), staticmethod(real_time.gmtime)


class Secrets:
    """Takes the place of the module `secrets`: what is drawn is the seed's."""

    @staticmethod
    def token_hex(size: int = 16) -> str:
        return kernel().random.randbytes(size).hex()


class Os:
    """Takes the place of the module `os` where it says which process this is, and in which environment."""

    environ: Mapping[str, str] = {}

    @staticmethod
    def getpid() -> int:
        return 1


class Socket:
    """Takes the place of the module `socket` where it says which machine this is."""

    @staticmethod
    def gethostname() -> str:
        return kernel().running().process.name.partition(":")[0]
