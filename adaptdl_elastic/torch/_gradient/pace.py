"""Decide how often gradients are measured, by the time that it takes.

The code that measures is timed itself: differences of step times would be lost in their noise, and on a GPU
the host notices a step's work many steps later. With a cost of c plain steps and a measurement in each g
steps, measuring takes c/(g + c) of the time. The gap is the smallest g for which that is at most `SHARE`. It
may be `EARLY_SHARE` in the first steps, and for some time while the estimates are not precise yet.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

SHARE, EARLY_SHARE = 0.01, 0.05
EARLY = 100  # steps that count as the first ones
UNSETTLED = 1000  # steps in which estimates that are not precise yet count as those of the first steps
LONGEST = 256  # the longest gap
_KEPT = 16  # measurements whose cost is remembered
_FEWEST = 3  # measurements before their cost counts


class Stopwatch:
    """Add up how long measuring takes.

    Args:
        now: Returns the time in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now, self._host = now, 0.0
        self._device: list[tuple[Any, Any]] = []

    @contextmanager
    def running(self, device: torch.device) -> Iterator[None]:
        """Count the time of this block on the host, and on a GPU that of the work that it begins."""
        events = None
        if device.type == "cuda":
            make: Any = torch.cuda.Event
            events = make(enable_timing=True), make(enable_timing=True)
            events[0].record()
        begun = self._now()
        try:
            yield
        finally:
            self._host += self._now() - begun
            if events is not None:
                events[1].record()
                self._device.append(events)

    def take(self) -> float:
        """Return the longer of both times in seconds, and begin again.

        A GPU's counts as far as it has ended, for which the host does not wait.
        """
        device = sum(begun.elapsed_time(ended) for begun, ended in self._device if ended.query())
        seconds: float = max(self._host, device / 1e3)
        self._host, self._device = 0.0, []
        return seconds


class Pace:
    """Remember what measurements cost, for each way to measure.

    Args:
        expected: Cost in plain steps of a way that has not been seen yet, by its name.
        now: Returns the time in seconds.
    """

    def __init__(self, expected: dict[str, float], now: Callable[[], float] = time.monotonic) -> None:
        self._expected, self._now = expected, now
        self._costs: dict[str, deque[float]] = {}
        self._last: tuple[int, float] | None = None  # step and time of the last measurement

    def measured(self, way: str, seconds: float, step: int) -> None:
        """Record that measuring at `step` has taken so many seconds since the last measurement."""
        now, before = self._now(), self._last
        self._last = (step, now)
        if before is None or step <= before[0] or seconds <= 0.0:
            return
        plain = max(now - before[1] - seconds, seconds) / (step - before[0])
        self._costs.setdefault(way, deque(maxlen=_KEPT)).append(seconds / plain)

    def cost(self, way: str) -> float:
        """Return the cost of a measurement in plain steps."""
        costs = self._costs.get(way, ())
        return statistics.median(costs) if len(costs) >= _FEWEST else self._expected[way]


def gap(cost: float, step: int, settled: bool) -> int:
    """Return the steps from a measurement at `step` to the next one, if one costs `cost` plain steps.

    Args:
        cost: Cost of a measurement in plain steps.
        step: Number of steps so far.
        settled: Whether the estimates are precise.
    """
    early = step < EARLY or (step < UNSETTLED and not settled)
    share = EARLY_SHARE if early else SHARE
    return min(max(math.ceil(cost * (1.0 - share) / share), 1), LONGEST)
