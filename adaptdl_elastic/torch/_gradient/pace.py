"""Decide how often gradients are measured, by the time that it takes.

A measured step and the step after it take longer than two plain ones: on a GPU the host often notices the
work only one step later. The difference, in plain steps of the same stretch of training, is the cost of a
measurement. With a cost of c plain steps and a measurement in each g steps, measuring takes c/(g + c) of the
time. The gap is the smallest g for which that is at most `SHARE`, or `EARLY_SHARE` in the first steps.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

SHARE, EARLY_SHARE = 0.01, 0.05
EARLY = 100  # steps that count as the first ones
LONGEST = 256  # the longest gap
_KEPT = 64  # costs that are averaged
_RECENT = 16  # plain steps that are averaged; one gap in so many has enough of them
_FEWEST = 4  # costs before their mean counts
_PLAIN = 3  # fewest plain steps that a measured one is compared with


class Pace:
    """Estimate the cost of a measurement, for each way to measure.

    Args:
        expected: Cost of a way that has not been seen yet, by its name.
    """

    def __init__(self, expected: dict[str, float]) -> None:
        self._expected = expected
        self._costs: dict[str, deque[float]] = {}
        self._plain: deque[float] = deque(maxlen=_RECENT)  # times of plain steps since the last measured one
        self._measured: tuple[str, float] | None = None  # the way and the time of the step before this one
        self._gaps = 0

    def stepped(self, seconds: float, way: str | None) -> None:
        """Count a step that took so many seconds; `way` is how it was measured, None if it was not."""
        before, self._measured = self._measured, None
        if way is not None:
            self._measured = (way, seconds) if before is None else None
            return
        if before is None:
            self._plain.append(seconds)
            return
        if len(self._plain) >= _PLAIN:
            plain = _middle(self._plain)[0]
            cost = (before[1] + seconds) / plain - 2.0 if plain > 0 else 0.0
            self._costs.setdefault(before[0], deque(maxlen=_KEPT)).append(cost)
        self._plain.clear()

    def cost(self, way: str) -> float:
        """Return the cost in plain steps, and two standard errors more."""
        costs = self._costs.get(way, ())
        if len(costs) < _FEWEST:
            return self._expected[way]
        mean, error = _middle(costs)
        return max(mean + 2.0 * error, 0.0)

    def gap(self, cost: float, step: int) -> int:
        """Return `gap_of`, and every so often enough for plain steps to compare with."""
        self._gaps += 1
        return max(gap_of(cost, step), 1 if self._gaps % _RECENT else _PLAIN + 2)


def gap_of(cost: float, step: int) -> int:
    """Return the steps from a measurement at `step` to the next one, if one costs `cost` plain steps."""
    share = EARLY_SHARE if step < EARLY else SHARE
    return min(max(math.ceil(cost * (1.0 - share) / share), 1), LONGEST)


def _middle(values: Sequence[float] | deque[float]) -> tuple[float, float]:
    """Return the mean of the middle half of some values, and its standard error.

    The spread of the middle half is 0.38 of that of normal values. The error is 1.1 of that of their mean.
    """
    ordered = sorted(values)
    middle = ordered[len(ordered) // 4 : len(ordered) - len(ordered) // 4]
    spread = statistics.pstdev(middle) / 0.38
    return statistics.fmean(middle), 1.1 * spread / math.sqrt(len(values))
