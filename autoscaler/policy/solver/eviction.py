"""Make room for jobs that were given slots but found no place: other jobs move together, or wait.

Sizes are chosen by counting free slots. These slots may be on the wrong nodes: a job may need a whole node,
or nodes that no other multi-node job uses. Choosing sizes again would not change that, and the job would wait
until other jobs end. So the jobs in its way are removed from a copy of the placement, the waiting job is
placed, and the removed jobs are put back where there is room for them. The copy is used if its value is
larger than before. So a job that can run elsewhere makes room at once. A job stops only to make room for a
job that has waited too long (`Tables.rank`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product

import numpy as np

from adaptdl_elastic.autoscaler.policy.policy_types import Allocation
from adaptdl_elastic.autoscaler.policy.solver.placement import Board, Want, limit, place
from adaptdl_elastic.autoscaler.policy.solver.tables import Tables

_MOST = 16  # number of jobs that room is made for in one decision
_TRIED = 8  # number of nodes that are tried; those with the cheapest occupants come first
_SIZES = 16  # number of sizes that are tried for an evicted job


def make_room(
    tables: Tables, board: Board, placed: dict[str, dict[str, int]], without: Sequence[int]
) -> dict[str, dict[str, int]]:
    """Return the best placement found, `placed` or one that also has jobs of the rows `without`.

    Args:
        tables: The values of all sizes for all jobs.
        board: The jobs that stay in any case.
        placed: The placement so far.
        without: Rows of the jobs that found no place.
    """
    full, fixed = board.copy(), set(board.placed)
    for name, allocation in placed.items():
        if name not in fixed:
            full.put(name, allocation)
    rows = {job.name: row for row, job in enumerate(tables.jobs)}
    order = sorted(without, key=lambda row: (-float(tables.changed[row].max(initial=0.0)), row))
    for row in order[:_MOST]:
        best, best_gain = None, 1e-9
        for trial, evicted in _trials(tables, full, rows, row):
            gain = value(tables, row, trial.placed[tables.jobs[row].name], full)
            for other in evicted:
                name = tables.jobs[other].name
                after = _put_back(tables, trial, other, full.placed[name])
                gain += value(tables, other, after, full) - value(tables, other, full.placed[name], full)
            if gain > best_gain:
                best, best_gain = trial, gain
        full = best or full
    return {name: dict(allocation) for name, allocation in full.placed.items()}


def value(tables: Tables, row: int, found: Allocation | None, board: Board) -> float:
    """Return the value of an allocation for the job in this row, less the cost of moving it."""
    if not found:
        return 0.0
    if tables.kept[row] >= 0 and found == board.current[tables.jobs[row].name]:
        return float(tables.kept_value[row])
    column = tables.sizes.find(found)
    return float(tables.changed[row, column]) if column is not None else 0.0


def want_of(tables: Tables, row: int, column: int) -> Want:
    """Return the request for the size in this column by the job in this row."""
    sizes = tables.sizes
    replicas, several, name = int(sizes.replicas[column]), bool(sizes.several[column]), sizes.name(column)
    uses = {} if name is not None else dict(zip(sizes.types, sizes.uses[column].tolist(), strict=True))
    return Want(tables.jobs[row], replicas, several, name, uses)


def _trials(tables: Tables, full: Board, rows: dict[str, int], row: int) -> Iterator[tuple[Board, list[int]]]:
    """Yield boards with the job in its smallest size, and the rows of the jobs removed for it.

    The rows come in the order of the value of their jobs, the most valuable first.
    """
    worth = {name: value(tables, other, full.placed.get(name), full) for name, other in rows.items()}
    sizes = tables.sizes
    for kind, several in product(range(len(sizes.types) + 1), (False, True)):
        open_to_it = np.flatnonzero(tables.allowed[row] & (sizes.several == several) & (sizes.kinds == kind))
        if not open_to_it.size:
            continue
        column = int(open_to_it[np.argmin(sizes.replicas[open_to_it])])
        want = want_of(tables, row, column)
        for names in _in_the_way(full, want, worth):
            trial = full.copy()
            for name in names:
                trial.take(name)
            if not place(trial, [want], {}):
                yield trial, sorted((rows[name] for name in names), key=lambda r: -worth[tables.jobs[r].name])


def _in_the_way(full: Board, want: Want, worth: dict[str, float]) -> Iterator[list[str]]:
    """Yield sets of jobs whose removal may make room for the wanted size, the cheapest set first."""
    if want.several:
        yield from _ever_more(full, worth)
        return
    sets = []
    for node in full.nodes:
        least, most = limit(want.job, node.name)
        if full.is_open(want, node.name) and least <= want.replicas <= most:
            names = _cheapest(full.here[node.name], want.replicas - full.free[node.name], worth)
            if names is not None:
                sets.append((sum(worth[name] for name in names), full.position(node.name), names))
    yield from (names for _, _, names in sorted(sets)[:_TRIED])


def _cheapest(here: dict[str, int], missing: int, worth: dict[str, float]) -> list[str] | None:
    """Return a minimal set of cheap jobs on one node that hold the missing slots; None if there is none."""
    chosen: list[str] = []
    for name in sorted((name for name in here if name in worth), key=lambda name: (worth[name], name)):
        if missing > 0:
            chosen.append(name)
            missing -= here[name]
    if missing > 0:
        return None
    for name in reversed(chosen):
        if missing + here[name] <= 0:
            chosen.remove(name)
            missing += here[name]
    return chosen


def _ever_more(full: Board, worth: dict[str, float]) -> Iterator[list[str]]:
    """Yield the cheapest job, the two cheapest, the four cheapest, and so on."""
    names = sorted((name for name in full.placed if name in worth), key=lambda name: (worth[name], name))
    count = 1
    while names and count < 2 * len(names):
        yield names[:count]
        count *= 2


def _put_back(tables: Tables, trial: Board, row: int, was: Allocation) -> Allocation | None:
    """Place an evicted job where it was if there is room, else in the best size that finds room."""
    job = tables.jobs[row]
    if _fits(trial, job.name, was):
        trial.put(job.name, was)
        return was
    for column in _best_first(tables, row):
        want = want_of(tables, row, column)
        if not place(trial, [want], {}):
            return trial.placed[job.name]
    return None


def _fits(board: Board, job: str, allocation: Allocation) -> bool:
    several = len(allocation) > 1
    return all(
        board.free[node] >= replicas and not (several and board.has_spanning(node))
        for node, replicas in allocation.items()
    )


def _best_first(tables: Tables, row: int) -> Iterable[int]:
    worth = np.where(tables.allowed[row], tables.changed[row], 0.0)
    order = [int(column) for column in np.argsort(-worth, kind="stable") if worth[column] > 0]
    # also try the smallest sizes: they are the likeliest to find room
    small = sorted(order, key=lambda column: int(tables.sizes.replicas[column]))[:2]
    return dict.fromkeys([*order[:_SIZES], *small])
