"""Choose a size and a type of node for every job: a multiple-choice knapsack with a capacity per type.

With one type, and with several small ones, dynamic programming over the slots of all types is exact. With
larger ones the slots are priced (Lagrangian relaxation; Fisher, *The Lagrangian relaxation method for
solving integer programming problems*, Management Science, 1981). At prices λ every job takes the size with
the largest value − λ · slots, and the sum of these and of λ · capacity bounds every solution from above.
Subgradient steps find the prices with the smallest bound. Then jobs take what they would pay for, in the
order of their gain, each type's jobs share its slots by the exact program, and jobs change size or type
while that gains.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaptdl_elastic.autoscaler.policy.solver.knapsack import SizeOptions, Table
from adaptdl_elastic.autoscaler.policy.solver.sizes import Sizes

Array = NDArray[np.float64]
Counts = NDArray[Any]

_EXACT_STATES = 40_000  # most combinations of free slots of all types for which the program is solved exactly
_EXACT_TYPES = 32  # most node types for which it is solved exactly; numpy's arrays have few more dimensions
_EXACT_CELLS = 60_000_000  # most combinations of those with the sizes of all jobs
_STEPS = 120  # number of steps of the search for prices
_MOVES = 200  # most changes of single jobs after the search for prices


@dataclass(frozen=True)
class Choice:
    """The chosen column of each job, and an upper bound of the value of any choice."""

    columns: list[int | None]
    bound: float


def choose(sizes: Sizes, worths: Array, capacity: Counts) -> Choice:
    """Return the columns whose values have the largest sum within the capacity of each type.

    Args:
        sizes: The columns.
        worths: Value of each column for each job, shape (jobs, sizes); 0 where it is not allowed.
        capacity: Slots of each type, shape (types,).
    """
    if len(sizes.types) == 1:
        slots = int(capacity[0])
        table = Table([SizeOptions(sizes.replicas, row) for row in worths], slots)
        return Choice(table.choose(slots), float(table.best[slots]))
    if not len(worths):
        return Choice([], 0.0)
    uses = sizes.uses.astype(float)
    worths = np.where((sizes.uses <= capacity).all(axis=1), worths, 0.0)
    states = math.prod(int(slots) + 1 for slots in capacity)
    few = len(sizes.types) <= _EXACT_TYPES and states <= _EXACT_STATES
    if few and states * np.count_nonzero(worths) <= _EXACT_CELLS:
        return _exact(sizes.uses, worths, capacity)
    prices, bound = _prices(uses, worths, capacity.astype(float))
    picked = _shared(sizes, worths, capacity, _greedy(sizes.uses, worths, capacity, prices))
    picked = _improved(sizes.uses, worths, capacity, picked)
    return Choice([None if column < 0 else int(column) for column in picked], bound)


def _exact(uses: Counts, worths: Array, capacity: Counts) -> Choice:
    """Solve the program by dynamic programming over the free slots of all types."""
    best = np.zeros(tuple(int(slots) + 1 for slots in capacity))
    choices: list[tuple[Counts, Counts]] = []
    for row in worths:
        columns = _undominated(uses, row)
        before, choice = best, np.zeros(best.shape, dtype=np.int16)
        best = best.copy()
        for index, column in enumerate(columns, start=1):
            to = tuple(slice(int(use), None) for use in uses[column])
            left = tuple(
                slice(0, size - int(use)) for size, use in zip(best.shape, uses[column], strict=True)
            )
            with_it = before[left] + row[column]
            better = with_it > best[to]
            np.copyto(best[to], with_it, where=better)
            choice[to][better] = index
        choices.append((columns, choice))
    picked: list[int | None] = []
    state = np.array(capacity, dtype=int)
    for columns, choice in reversed(choices):
        index = int(choice[tuple(state)])
        picked.append(int(columns[index - 1]) if index else None)
        if index:
            state = state - uses[columns[index - 1]]
    return Choice(picked[::-1], float(best[tuple(int(slots) for slots in capacity)]))


def _undominated(uses: Counts, row: Array) -> Counts:
    """Return the columns with a value that no column with at most the same slots of each type reaches."""
    order = [c for c in np.lexsort((-row, uses.sum(axis=1))) if row[c] > 0]
    kept: list[int] = []
    for column in order:
        if not any(row[k] >= row[column] and (uses[k] <= uses[column]).all() for k in kept):
            kept.append(int(column))
    return np.array(kept, dtype=int)


def _taken(uses: Array, worths: Array, prices: Array) -> tuple[Counts, Array]:
    """Return each job's best column at these prices (−1: none), and its value less its price."""
    net = np.where(worths > 0, worths - uses @ prices, -np.inf)
    column = np.argmax(net, axis=1)
    value = net[np.arange(len(net)), column]
    return np.where(value > 0, column, -1), np.maximum(value, 0.0)


def _prices(uses: Array, worths: Array, capacity: Array) -> tuple[Array, float]:
    """Return the prices of the types' slots with the smallest bound, and that bound."""
    prices = np.zeros(len(capacity))
    best, bound = prices, np.inf
    scale = float(worths.max(initial=0.0)) or 1.0
    step, stale = scale / max(float(uses.max(initial=1.0)), 1.0), 0
    for _ in range(_STEPS):
        column, value = _taken(uses, worths, prices)
        total = float(value.sum() + prices @ capacity)
        if total < bound - 1e-12 * scale:
            best, bound, stale = prices, total, 0
        else:
            stale += 1
        if stale > 4:
            step, stale, prices = step / 2, 0, best
            column, _ = _taken(uses, worths, prices)
        demand = uses[column[column >= 0]].sum(axis=0)
        slope = (demand - capacity) / np.maximum(capacity, 1.0)
        if not slope.any():
            break
        prices = np.maximum(prices + step * slope / max(float(np.abs(slope).max()), 1e-9), 0.0)
    return best, bound


def _greedy(uses: Counts, worths: Array, capacity: Counts, prices: Array) -> Counts:
    """Let jobs take their best column at these prices that still fits, those with the largest gain first."""
    net = np.where(worths > 0, worths - uses @ prices, -np.inf)
    free = capacity.astype(int)
    picked: Counts = np.full(len(worths), -1)
    for row in np.argsort(-net.max(axis=1), kind="stable"):
        offered = np.where((uses <= free).all(axis=1), net[row], -np.inf)
        column = int(np.argmax(offered))
        if offered[column] > -np.inf:
            picked[row] = column
            free = free - uses[column]
    return picked


def _shared(sizes: Sizes, worths: Array, capacity: Counts, picked: Counts) -> Counts:
    """Divide the slots of each type of node again, exactly, among the jobs that have slots of that type.

    A job without slots takes part at the type of its best column. Jobs on several types keep their column.
    """
    kinds = np.where(picked >= 0, sizes.kinds[picked], sizes.kinds[np.argmax(worths, axis=1)])
    mixed = picked[(picked >= 0) & (kinds == sizes.mixed)]
    left = capacity - sizes.uses[mixed].sum(axis=0)
    shared: Counts = picked.copy()
    for kind in range(len(sizes.types)):
        rows = np.flatnonzero((kinds == kind) & (worths.max(axis=1) > 0))
        here = np.flatnonzero(sizes.kinds == kind)
        slots = int(left[kind])
        options = [SizeOptions(sizes.replicas[here], worths[row, here]) for row in rows]
        for row, index in zip(rows, Table(options, slots).choose(slots), strict=True):
            shared[row] = -1 if index is None else here[index]
    return shared


def _improved(uses: Counts, worths: Array, capacity: Counts, picked: Counts) -> Counts:
    """Change single jobs, the largest gain first, for as long as there is room for a better column."""
    rows = np.arange(len(worths))
    picked = np.array(picked)
    none = np.zeros(uses.shape[1], dtype=int)
    for _ in range(_MOVES):
        held = np.where((picked >= 0)[:, np.newaxis], uses[picked], none)
        free = capacity - held.sum(axis=0)
        now = np.where(picked >= 0, worths[rows, picked], 0.0)
        fits = np.ones(worths.shape, dtype=bool)
        for kind in range(uses.shape[1]):
            fits &= uses[np.newaxis, :, kind] <= (free[kind] + held[:, kind])[:, np.newaxis]
        gain = np.where(fits & (worths > 0), worths - now[:, np.newaxis], 0.0)
        row, column = divmod(int(np.argmax(gain)), gain.shape[1])
        if gain[row, column] <= 1e-9 * max(float(worths[row].max()), 1e-300):
            break
        picked[row] = column
    return picked
