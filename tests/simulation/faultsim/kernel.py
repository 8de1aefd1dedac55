"""The event heap, the simulated clock, and processes whose threads are greenlets.

Everything runs in one thread of the real process. A `Task` is one simulated thread: a greenlet that runs
until it waits for something, and then hands control back to the `Kernel`, which takes the next event from
a heap that is ordered by simulated time. So the product's own blocking code runs unchanged, and nothing
ever runs at the same time as anything else. All chance comes from one generator that is seeded once, so a
seed repeats a run exactly; `Kernel.digest` is a hash over every event of it.

A `Process` is what can die (`Kernel.kill`), be stopped as by SIGSTOP (`Process.stop`), and go on. A task of
a process that has died never runs again: whatever it would do while its stack unwinds has no effect.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import random
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

import greenlet

JITTER_SECONDS = 0.0004  # until a task that can go on does, at most
MOST_ROUNDS = 500  # of a loop that polls, at one moment
RARE_DELAY = 0.004  # probability that a task waits for the processor for longer
RARE_DELAY_SECONDS = 0.08
SHORTEST_SECONDS = 1e-6  # of a wait: times are sums, and a rounded one must not stand still
EPOCH = 1_700_000_000.0  # seconds: the wall clock at simulated time 0
TRACE_LINES = 4000  # lines that are kept to be shown

Dead = greenlet.GreenletExit
"""Raised in a task whose process has died."""


class Defect(AssertionError):
    """The simulated product or the simulator did what must not be."""


class Process:
    """One simulated operating system process."""

    def __init__(
        self, kernel: Kernel, name: str, clock_offset: float = 0.0, wall_offset: float = 0.0
    ) -> None:
        self.kernel, self.name = kernel, name
        self.clock_offset, self.wall_offset = clock_offset, wall_offset  # seconds
        self.alive, self.stopped = True, False
        self.exit_code: int | None = None
        self.tasks: list[Task] = []
        self.at_end: list[Callable[[], None]] = []  # called by the kernel when it has ended
        self._held: list[tuple[Task, int]] = []  # tasks that may go on when the process does

    def spawn(self, target: Callable[[], object], name: str) -> Task:
        """Start another task of this process."""
        task = Task(self, target, f"{self.name}/{name}")
        if self.alive:
            self.tasks.append(task)
            self.kernel.resume_soon(task, task.token)
        return task

    def stop(self) -> None:
        """As SIGSTOP: no task of it runs until `go_on`; time passes."""
        self.stopped = True

    def go_on(self) -> None:
        """As SIGCONT."""
        self.stopped = False
        held, self._held = self._held, []
        for task, token in held:
            self.kernel.resume_soon(task, token)

    def hold(self, task: Task, token: int) -> None:
        """Keep a task that could go on until the process does."""
        self._held.append((task, token))


class Task:
    """One simulated thread."""

    def __init__(self, process: Process, target: Callable[[], object], name: str) -> None:
        self.process, self.name, self.target = process, name, target
        self.number = next(process.kernel.task_numbers)
        self.token = 0  # of the wait under way: what wakes an earlier one is ignored
        self.woken = False
        self.done = False
        self.rounds, self.polled_at = 0, -1.0  # how often it has polled at that time
        self.waiters: list[Task] = []  # who waits for its end
        self.greenlet = greenlet.greenlet(self._run, parent=process.kernel.hub)

    def _run(self) -> None:
        try:
            self.target()
        except Dead:
            pass
        except BaseException as error:
            self.process.kernel.failed(self, error)
        finally:
            self.done = True
            for waiter in self.waiters:
                self.process.kernel.wake(waiter)


class Kernel:
    """Runs events in the order of their simulated times."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now = 0.0
        self.events = 0  # how many have run
        self.task_numbers = itertools.count()
        self.numbers = itertools.count(1)  # for whatever needs a unique one
        self.hub = greenlet.getcurrent()
        self.current: Task | None = None
        self.defects: list[str] = []
        self.lines: deque[str] = deque(maxlen=TRACE_LINES)
        self.echo: Callable[[str], None] | None = None
        self._heap: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self._hash = hashlib.blake2b(digest_size=16)

    # -- events

    def at(self, when: float, call: Callable[..., object], *arguments: Any) -> None:
        """Have `call` run at a simulated time."""
        heapq.heappush(self._heap, (max(when, self.now), next(self._order), call, arguments))

    def after(self, seconds: float, call: Callable[..., object], *arguments: Any) -> None:
        """Have `call` run in so many simulated seconds."""
        self.at(self.now + seconds, call, *arguments)

    def run(self, until: float, enough: Callable[[], bool] = lambda: False) -> None:
        """Run events up to a simulated time, or until `enough()`, which is asked now and then."""
        heap, count = self._heap, 0
        while heap and heap[0][0] <= until:
            when, order, call, arguments = heapq.heappop(heap)
            self.now = when
            self._hash.update(b"%r %d;" % (when, order))
            call(*arguments)
            count += 1
            if count % 64 == 0 and enough():
                self.events += count
                return
        self.events += count
        self.now = max(self.now, until)

    def note(self, text: str) -> None:
        """Put a line into the trace, and into the digest of this run."""
        line = f"{self.now:10.4f} {text}"
        self._hash.update(line.encode())
        self.lines.append(line)
        if self.echo is not None:
            self.echo(line)

    @property
    def digest(self) -> str:
        """The same for two runs in which the same has happened at the same times."""
        return self._hash.hexdigest()

    def defect(self, text: str) -> None:
        """Note something that must not be."""
        self.note(f"DEFECT {text}")
        self.defects.append(f"{self.now:.3f} s: {text}")

    def failed(self, task: Task, error: BaseException) -> None:
        """Note that a task has ended with an error that nobody caught."""
        if not task.process.alive:
            return
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({where.name}, line {where.lineno})"
        self.defect(f"the thread {task.name} died of {text}")

    # -- tasks

    def wait(self, timeout: float | None = None) -> bool:
        """Let the current task wait until it is woken; False: `timeout` seconds have passed instead."""
        task = self.running()
        task.token += 1
        task.woken = False
        if timeout is not None:
            self.at(self.now + max(SHORTEST_SECONDS, timeout), self._resume, task, task.token)
        self.hub.switch()
        return task.woken

    def sleep(self, seconds: float) -> None:
        """Let simulated time pass for the current task."""
        self.wait(seconds)

    def comes_round(self) -> None:
        """Count that a loop polls without waiting; too often at one moment is a defect."""
        task = self.running()
        task.rounds = task.rounds + 1 if self.now == task.polled_at else 0
        task.polled_at = self.now
        if task.rounds > MOST_ROUNDS:
            self.defect(f"{task.name} spins: it waits for a time that has passed")
            self.exit(-9)

    def wake(self, task: Task) -> None:
        """Let a task that waits go on."""
        if not task.woken:
            task.woken = True
            self.resume_soon(task, task.token)

    def running(self) -> Task:
        """The current task, if its process lives.

        Raises:
            Dead: its process has died; nothing that it does has an effect any more.
        """
        task = self.current
        if task is None:
            raise RuntimeError("no simulated thread is running")
        if not task.process.alive:
            raise Dead
        return task

    def resume_soon(self, task: Task, token: int) -> None:
        """Let a task go on after a moment: another one may come first."""
        delay = JITTER_SECONDS * self.random.random()
        if self.random.random() < RARE_DELAY:
            delay += RARE_DELAY_SECONDS * self.random.random()
        self.at(self.now + delay, self._resume, task, token)

    def _resume(self, task: Task, token: int) -> None:
        process = task.process
        if task.token != token or task.done or not process.alive:
            return
        if process.stopped:
            process.hold(task, token)
            return
        task.token += 1
        self._hash.update(b"%d," % task.number)
        self._switch_to(task)
        if process.exit_code is not None:  # it has died meanwhile
            self._bury(process)

    def _switch_to(self, task: Task) -> None:
        self.current = task
        try:
            task.greenlet.switch()
        finally:
            self.current = None
        if task.done:
            task.process.tasks.remove(task)

    # -- deaths

    def kill(self, process: Process, exit_code: int, why: str = "") -> None:
        """End a process at once, whatever it does.

        A task that kills its own process must raise `Dead` afterwards (`exit` does both).
        """
        if not process.alive:
            return
        process.alive, process.exit_code = False, exit_code
        self.note(f"{process.name} ends with {exit_code} {why}".rstrip())
        if self.current is None:
            self._bury(process)
        else:  # a task's stack is unwound by the kernel alone
            self.after(0.0, self._bury, process)

    def exit(self, exit_code: int, why: str = "") -> NoReturn:
        """End the process of the current task."""
        self.kill(self.running().process, exit_code, why)
        raise Dead

    def _bury(self, process: Process) -> None:
        """Unwind the tasks of a process that has died, and tell who waits for its end."""
        outer = self.current
        for task in list(process.tasks):
            if not task.done:
                self.current = task
                if task.greenlet:  # it has begun and not ended
                    task.greenlet.throw(Dead)
                task.done = True
        self.current = outer
        process.tasks.clear()
        at_end, process.at_end = process.at_end, []
        for call in at_end:
            self.after(0.0, call)
