"""Choose a size for every job by an exact program, place the jobs, and retry where they do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaptdl_elastic.autoscaler.policy import objective
from adaptdl_elastic.autoscaler.policy.solver.eviction import make_room, value, want_of
from adaptdl_elastic.autoscaler.policy.solver.integer_program import (
    LARGE_PROGRAM,
    SMALL_PROGRAM,
    solve_exactly,
)
from adaptdl_elastic.autoscaler.policy.solver.placement import Board, Want, place
from adaptdl_elastic.autoscaler.policy.solver.tables import Tables
from adaptdl_elastic.autoscaler.policy.solver.typed_knapsack import Choice
from adaptdl_elastic.autoscaler.policy.solver.typed_knapsack import choose as choose_columns

Array = NDArray[np.float64]

_ROUNDS = 6  # largest number of attempts; after each, sizes that found no room are excluded
_ENOUGH = 0.002  # relative gap to the upper bound below which a large program is not worth its time


@dataclass(frozen=True)
class Solution:
    """The placement of all jobs, and the sizes that it aims at."""

    placed: dict[str, dict[str, int]]
    targets: list[int | None]  # by row, the column that the job would have if all sizes were explored


def solve(tables: Tables, board: Board, capacity: NDArray[Any], seconds: float) -> Solution:
    """Give the jobs of `tables` the capacity that the jobs on `board` leave.

    Growth is limited to twice the explored size, and measured speedups are not concave: eight replicas on two
    nodes can be worse than four on one, and sixteen better than both. So sizes are chosen as if there were no
    limit. A job whose target is beyond its limit takes the largest allowed step; meanwhile the other jobs
    keep their size or go straight to their target.

    Args:
        tables: The values of all sizes for all jobs.
        board: The jobs that stay in any case.
        capacity: Number of free slots of each node type, in the order of `tables.sizes.types`.
        seconds: Time limit of an exact program, which is used if the chosen sizes do not fit.
    """
    targets = _program(tables, _worths(tables, tables.possible), capacity).columns
    placed, failed = _choose(tables, board, capacity, seconds, targets)
    without = [row for row in sorted(failed) if tables.jobs[row].name not in placed]
    return Solution(make_room(tables, board, placed, without) if without else placed, targets)


def _choose(
    tables: Tables, board: Board, capacity: NDArray[Any], seconds: float, targets: Sequence[int | None]
) -> tuple[dict[str, dict[str, int]], set[int]]:
    """Return the placement, and the rows of jobs for which a chosen size found no room."""
    worths = _steps(tables, targets)
    plain = _worths(tables, tables.allowed)
    best = _standing(tables, board)
    unplaced: set[int] = set()
    for attempt in range(_ROUNDS):
        trial = board.copy()
        chosen = _program(tables, worths, capacity).columns
        failed = _place(tables, chosen, targets, trial)
        if not failed and attempt == 0:
            return trial.placed, unplaced
        unplaced |= {row for row, _ in failed}
        worth = _realised(tables, trial)
        if worth > best[0] + 1e-9:
            best = worth, trial.placed
        if not failed:
            break
        for row, column in failed:
            same = tables.sizes.kinds == tables.sizes.kinds[column]
            plain[row, same & (tables.sizes.replicas >= tables.sizes.replicas[column])] = 0.0
        _keep(tables, plain)
        worths = plain
    plain = _worths(tables, tables.allowed)
    ideal = _program(tables, plain, capacity)
    if best[0] < ideal.bound - 1e-9:
        # large programs are solved only if the value can still improve considerably, ranks left out
        ranked = tables.rank[[column is not None for column in ideal.columns]].sum()
        near = ideal.bound - best[0] < _ENOUGH * (ideal.bound - ranked)
        exact = solve_exactly(tables, plain, board, SMALL_PROGRAM if near else LARGE_PROGRAM, seconds)
        found = board.copy()
        for name, allocation in (exact or {}).items():
            if name not in found.placed:
                found.put(name, allocation)
        if _realised(tables, found) > best[0] + 1e-9:
            return found.placed, unplaced
    return best[1], unplaced


def _program(tables: Tables, worths: Array, capacity: NDArray[Any]) -> Choice:
    return choose_columns(tables.sizes, worths, capacity)


def _worths(tables: Tables, allowed: NDArray[np.bool_]) -> Array:
    """Return the value of each size, shape (jobs, sizes), 0 where it is not allowed."""
    worths = np.where(allowed, tables.changed, 0.0)
    _keep(tables, worths)
    return worths


def _keep(tables: Tables, worths: Array) -> None:
    """Make sure that every job can choose its present size."""
    rows = np.flatnonzero(tables.kept >= 0)
    columns = tables.kept[rows]
    worths[rows, columns] = np.maximum(worths[rows, columns], tables.kept_value[rows])


def _steps(tables: Tables, targets: Sequence[int | None]) -> Array:
    """Return values with which every job moves towards its target as far as allowed."""
    worths = _worths(tables, tables.allowed)
    beyond = [
        row
        for row, target in enumerate(targets)
        if target is not None and not tables.allowed[row, target] and target != tables.kept[row]
    ]
    if not beyond:
        return worths
    # not more than the rank of an overdue job
    certain = objective.STEP_BONUS * float((worths - tables.rank[:, np.newaxis]).max())
    sizes = tables.sizes.replicas
    for row, target in enumerate(targets):
        open_to_it = np.zeros(len(sizes), dtype=bool)
        if tables.kept[row] >= 0:
            open_to_it[tables.kept[row]] = True
        if target is not None:
            open_to_it[target] = True
        if row in beyond:
            allowed = worths[row] > 0
            if not allowed.any():
                continue
            step = _step(tables, allowed, target or 0)
            open_to_it[:] = False
            open_to_it[step] = True
            worths[row, step] += certain
        worths[row, ~open_to_it] = 0.0
    return worths


def _step(tables: Tables, allowed: NDArray[np.bool_], target: int) -> int:
    """Return the largest allowed column up to the target's size, on nodes of its type if there is one."""
    sizes = tables.sizes
    smaller = allowed & (sizes.replicas <= sizes.replicas[target])
    same = smaller & (sizes.kinds == sizes.kinds[target])
    return int(np.argmax(np.where(same if same.any() else smaller, sizes.replicas, -1)))


def _standing(tables: Tables, board: Board) -> tuple[float, dict[str, dict[str, int]]]:
    """Return the value and the placement of changing nothing."""
    as_it_is = board.copy()
    for row, job in enumerate(tables.jobs):
        if tables.kept[row] >= 0:
            as_it_is.put(job.name, board.current[job.name])
    return _realised(tables, as_it_is), as_it_is.placed


def _place(
    tables: Tables, chosen: Sequence[int | None], targets: Sequence[int | None], board: Board
) -> list[tuple[int, int]]:
    """Put the chosen sizes on the board; return (row, column) of those not placed.

    A size is not placed if it finds no room or if the moves for it cost more than they gain.
    """
    rows = {job.name: row for row, job in enumerate(tables.jobs)}
    wants: list[Want] = []
    for row, (job, column) in enumerate(zip(tables.jobs, chosen, strict=True)):
        if column is None:
            continue
        if column == tables.kept[row]:
            board.put(job.name, board.current[job.name])
            if tables.sizes.kinds[column] == tables.sizes.mixed and not tables.possible[row, column]:
                continue  # it may keep this size, but could not change to it
            board.let_move(job.name, float(tables.kept_value[row] - tables.changed[row, column]))
        else:
            wants.append(want_of(tables, row, column))
    failed = place(board, wants, {job.name: job for job in tables.jobs})
    if not failed and sum(board.movable[name] for name in board.moved) > _gain(tables, chosen, targets):
        # the next attempt does without the largest size, for which the moves were made
        failed = [max(wants, key=lambda want: (want.replicas, want.job.name))]
    found = []
    for want in failed:
        column = chosen[rows[want.job.name]]
        if column is not None:
            found.append((rows[want.job.name], column))
    return found


def _gain(tables: Tables, chosen: Sequence[int | None], targets: Sequence[int | None]) -> float:
    """Return the gain in value of all changes; a step towards a target counts as much as the target."""
    gain = 0.0
    for row, (column, target) in enumerate(zip(chosen, targets, strict=True)):
        if column is not None and column != tables.kept[row]:
            reached = float(tables.changed[row, column])
            if target is not None:
                reached = max(reached, float(tables.changed[row, target]))
            gain += reached - float(tables.kept_value[row])
    return gain


def _realised(tables: Tables, board: Board) -> float:
    """Return the objective of the board, less the cost of moves."""
    return sum(value(tables, row, board.placed.get(job.name), board) for row, job in enumerate(tables.jobs))
