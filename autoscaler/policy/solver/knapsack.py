"""Solve the multiple-choice knapsack exactly by dynamic programming over the number of slots.

Each job takes one of its options or none; the options' sizes together must not exceed the capacity (Kellerer,
Pferschy, Pisinger, *Knapsack Problems*, 2004, chapter 11). One pass solves the problem for every capacity up
to the given one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class SizeOptions(NamedTuple):
    """The options of one job: sizes in slots, at least 1, and their values; 0 for one that is excluded."""

    sizes: NDArray[Any]
    values: Array


class Table:
    """The solved program: the best total by capacity, and the choice behind it."""

    def __init__(self, jobs: Sequence[SizeOptions], capacity: int) -> None:
        self._jobs = [_frontier(job, capacity) for job in jobs]
        self._kept: list[NDArray[Any]] = [kept for _, kept in self._jobs]
        self.best: Array = np.zeros(capacity + 1)
        """Best total value by capacity, shape (capacity + 1,)."""
        self._choices = [self._add(options) for options, _ in self._jobs]

    def _add(self, options: SizeOptions) -> NDArray[Any]:
        before, best = self.best, self.best.copy()
        choice = np.zeros(best.size, dtype=np.int16)  # 0: no option
        for index, (size, value) in enumerate(zip(options.sizes, options.values, strict=True), start=1):
            with_it = before[: before.size - size] + value
            target = best[size:]
            better = with_it > target
            np.copyto(target, with_it, where=better)
            choice[size:][better] = index
        self.best = best
        return choice

    def choose(self, capacity: int) -> list[int | None]:
        """Return the index of each job's option, or None, with at most `capacity` slots in use."""
        picked: list[int | None] = []
        for (options, kept), choice in zip(reversed(self._jobs), reversed(self._choices), strict=True):
            index = int(choice[capacity]) - 1
            picked.append(int(kept[index]) if index >= 0 else None)
            if index >= 0:
                capacity -= int(options.sizes[index])
        return picked[::-1]


def _frontier(options: SizeOptions, capacity: int) -> tuple[SizeOptions, NDArray[Any]]:
    """Return the options that no smaller or equal one beats, by ascending size, and their old indices."""
    order = np.lexsort((-options.values, options.sizes))
    kept, best = [], 0.0
    for index in order:
        if options.sizes[index] <= capacity and options.values[index] > best:
            best = float(options.values[index])
            kept.append(int(index))
    where = np.array(kept, dtype=int)
    return SizeOptions(options.sizes[where], options.values[where]), where
