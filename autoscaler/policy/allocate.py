"""Who gets which replicas: the one decision of the whole system, as a pure function."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaptdl_elastic.autoscaler.policy import objective, reasons
from adaptdl_elastic.autoscaler.policy.curves import goodputs
from adaptdl_elastic.autoscaler.policy.knapsack import Options, Table
from adaptdl_elastic.autoscaler.policy.placement import Board, Want, limit, place, rooms_of
from adaptdl_elastic.autoscaler.policy.types import (
    Allocation,
    Decision,
    JobInfo,
    NodeInfo,
    Objective,
    Settings,
)

Array = NDArray[np.float64]

_SMALL = 32  # slots up to which every number of replicas is considered, not only some
_ROUNDS = 6  # times that a size which found no room is given up before jobs go without


@dataclass(frozen=True)
class Sizes:
    """The numbers of replicas considered: columns of every table."""

    replicas: NDArray[Any]  # (K,)
    several: NDArray[np.bool_]  # (K,): on several nodes

    def column(self, replicas: int, several: bool) -> int:
        """Where a size stands."""
        return int(np.flatnonzero((self.replicas == replicas) & (self.several == several))[0])


@dataclass(frozen=True)
class Tables:
    """Everything that is known about the jobs that can be changed, shape (jobs, sizes)."""

    jobs: Sequence[JobInfo]
    sizes: Sizes
    goodput: Array
    speedup: Array
    allowed: NDArray[np.bool_]
    changed: Array  # value of getting this size by a change
    kept: NDArray[Any]  # (jobs,): the column it has and may keep, -1: none
    kept_value: Array  # (jobs,)


def allocate(
    jobs: Sequence[JobInfo],
    nodes: Sequence[NodeInfo],
    current: Mapping[str, Allocation],
    now: float,
    settings: Settings = Settings(),  # noqa: B008 (frozen)
) -> Decision:
    """Replicas for every job, so that the objective of `settings` is as large as it can be.

    Never exceeds a node's slots or a job's limits, never puts two multi-node jobs on one node, gives a
    job its minimum or nothing, and puts nothing on a draining node. Deterministic; reads no clock but
    the CPU's for `Decision.seconds`.
    """
    started = time.process_time()
    usable = [node for node in nodes if not node.draining and node.slots > 0]
    before = {job.name: dict(current.get(job.name, {})) for job in jobs}
    intact = _intact(jobs, usable, before)
    pinned = [job for job in jobs if job.name in intact and _pinned(job, before[job.name])]
    common = _room(JobInfo(""), usable)
    plain = {job.name: job.limits is None and job.max_nodes is None for job in jobs}
    rooms = {job.name: common if plain[job.name] else _room(job, usable) for job in jobs}
    pending = {job.name: why for job in jobs if (why := _impossible(job, len(usable), rooms[job.name]))}
    fixed = {job.name for job in pinned}
    free = [job for job in jobs if job.name not in fixed and job.name not in pending]
    tables = _tables(free, usable, rooms, before, intact, now, settings)

    board = Board(usable, before, stable_wanted=any(job.avoid_preemptible_nodes for job in jobs))
    for job in pinned:
        board.put(job.name, before[job.name])
    capacity = sum(max(slots, 0) for slots in board.free.values())
    placed, table = _solve(tables, board, capacity)
    allocations = {job.name: placed.get(job.name, {}) for job in jobs}
    changed = tuple(name for name, found in allocations.items() if found != before[name])
    slots = max((node.slots for node in usable), default=1)
    decision = Decision(
        allocations=allocations,
        reasons={},
        changed=changed,
        objective=float(sum(_speedup(tables, i, allocations[job.name]) for i, job in enumerate(free))),
        node_loss=float(table.best[capacity] - table.best[max(capacity - slots, 0)]),
        pending=pending,
    )
    given = reasons.explain(decision, jobs, fixed, tables, before, now, settings)
    return replace(decision, reasons=given, seconds=time.process_time() - started)


def _intact(jobs: Sequence[JobInfo], nodes: Sequence[NodeInfo], before: Mapping[str, Allocation]) -> set[str]:
    """Jobs that could stay as they are: none of their nodes is gone, draining, or fuller than it can be."""
    room = {node.name: node.slots for node in nodes}
    for job in jobs:
        for node, replicas in before[job.name].items():
            if node in room:
                room[node] -= replicas
    return {
        job.name
        for job in jobs
        if before[job.name] and all(room.get(node, -1) >= 0 for node in before[job.name])
    }


def _pinned(job: JobInfo, before: Allocation) -> bool:
    """Whether a running job keeps what it has, whatever would be better."""
    if job.requested_replicas is not None:
        return sum(before.values()) == job.requested_replicas and not job.preemptible
    return not job.preemptible


@dataclass(frozen=True)
class _Room:
    """What the nodes could give one job if it had them alone."""

    nodes: int
    one: int  # replicas on one node at most
    fewest: int  # replicas on a node at least
    total: int


def _room(job: JobInfo, nodes: Sequence[NodeInfo]) -> _Room:
    rooms = rooms_of(job, nodes)
    largest = sorted((high for _, high in rooms), reverse=True)
    fewest = min((low for low, _ in rooms), default=1)
    return _Room(len(rooms), max(largest, default=0), fewest, sum(largest[: job.max_nodes]))


def _impossible(job: JobInfo, nodes: int, room: _Room) -> str:
    """Why a job can not run on these nodes even if it had them alone, empty if it can."""
    least = max(job.requested_replicas or job.min_replicas, job.min_nodes, 1)
    if room.nodes == 0:
        return f"none of the {nodes} nodes can take it" if nodes else "there are no nodes"
    if room.nodes < job.min_nodes:
        return f"needs {job.min_nodes} nodes, {room.nodes} of {nodes} can take it"
    if room.total < least:
        return f"needs {least} replicas, there is room for {room.total} on {room.nodes} nodes"
    if job.requested_replicas is not None and job.requested_replicas > job.max_replicas:
        return f"{job.requested_replicas} replicas were requested, its maximum is {job.max_replicas}"
    return ""


# --------------------------------------------------------------------------------------------- tables


def _tables(
    jobs: Sequence[JobInfo],
    nodes: Sequence[NodeInfo],
    rooms: Mapping[str, _Room],
    before: Mapping[str, Allocation],
    intact: set[str],
    now: float,
    settings: Settings,
) -> Tables:
    had = [before[job.name] if job.name in intact else {} for job in jobs]
    sizes = _sizes(jobs, nodes, had)
    shape = len(jobs), len(sizes.replicas)
    goodput, speedup, one = _curves(jobs, sizes)
    allowed = np.array(
        [
            _allowed(job, found, sizes, rooms[job.name], settings)
            for job, found in zip(jobs, had, strict=True)
        ],
        dtype=bool,
    ).reshape(shape)
    allowed &= speedup > 0
    remaining = objective.remaining_seconds(jobs, one)
    weight = objective.weights(remaining, settings, jobs)[:, np.newaxis]
    pause = np.array([settings.default_pause if job.pause is None else job.pause for job in jobs])
    paid = objective.after_pause(speedup, remaining, pause, settings)
    running = objective.FIRST * float(weight.max(initial=0.0)) * (settings.objective is Objective.COMPLETION)
    extra = np.array([running + _urgency(job, now, settings) for job in jobs])[:, np.newaxis]
    changed = np.where(allowed, weight * objective.utility(paid, settings) + extra, 0.0)
    kept = np.array([_kept(job, found, sizes) for job, found in zip(jobs, had, strict=True)], dtype=int)
    rows = np.arange(len(jobs))
    # its own size stays open to a running job even where hints have changed what is allowed
    keeping = np.where(kept >= 0, speedup[rows, kept] * (1 + settings.hysteresis), 0.0)
    kept_value = np.where(
        kept >= 0, (weight * objective.utility(keeping[:, np.newaxis], settings) + extra)[:, 0], 0
    )
    return Tables(jobs, sizes, goodput, speedup, allowed, changed, kept, kept_value)


def _urgency(job: JobInfo, now: float, settings: Settings) -> float:
    if job.waiting_since is not None and now - job.waiting_since >= settings.max_wait:
        return objective.OVERDUE + (now - job.waiting_since)
    return objective.RUNS if job.requested_replicas is not None else 0.0


def _sizes(jobs: Sequence[JobInfo], nodes: Sequence[NodeInfo], had: Sequence[Allocation]) -> Sizes:
    """All numbers of replicas in a small cluster, else powers of two on one node, and whole nodes.

    What jobs have, must have and were asked to have is always among them.
    """
    slots = sorted((node.slots for node in nodes), reverse=True)
    total, largest = sum(slots), max(slots, default=0)
    most = min(total, max((job.max_replicas for job in jobs), default=0))
    if total <= _SMALL:
        one, many = set(range(1, largest + 1)), set(range(2, most + 1))
    else:
        one = {1 << i for i in range(largest.bit_length())} | set(slots)
        many = {int(x) for x in np.cumsum(slots) if x <= most} | ({largest + 1} if largest else set())
    special = {job.min_replicas for job in jobs} | {job.requested_replicas or 0 for job in jobs}
    special |= {min(job.max_replicas, total) for job in jobs}
    one |= {x for x in special if 0 < x <= largest}
    many |= {x for x in special if 1 < x <= most and x > largest}
    for job in jobs:
        if job.min_nodes > 1:
            many |= set(range(job.min_nodes, min(job.min_nodes * largest, most) + 1))
    for found in had:
        (many if len(found) > 1 else one).add(sum(found.values()))
    singles, several = sorted(one - {0}), sorted(many - {0, 1})
    return Sizes(
        np.array(singles + several, dtype=int),
        np.array([False] * len(singles) + [True] * len(several), dtype=bool),
    )


def _curves(jobs: Sequence[JobInfo], sizes: Sizes) -> tuple[Array, Array, Array]:
    """Goodput and speedup of every job at every size, and the goodput of one replica (0: not profiled)."""
    shape = len(jobs), len(sizes.replicas)
    goodput, speedup, one = np.zeros(shape), np.zeros(shape), np.zeros(len(jobs))
    rows = [i for i, job in enumerate(jobs) if job.model is not None]
    models = [job.model for job in jobs if job.model is not None]
    if models:
        where = np.concatenate([[1], np.where(sizes.several, 2, 1)])
        counts = np.concatenate([[1], sizes.replicas])
        found = goodputs(models, where, counts).goodput
        goodput[rows] = found[:, 1:]
        # where one replica can not hold the smallest batch, the smallest number that can is the measure
        rate = np.where(found > 0, found / counts, 0.0)
        first = np.argmax(rate > 0, axis=1)
        one[rows] = rate[np.arange(len(models)), first]
        speedup[rows] = found[:, 1:] / np.maximum(one[rows], 1e-300)[:, np.newaxis]
    unknown = [i for i, job in enumerate(jobs) if job.model is None]
    speedup[unknown] = (
        sizes.replicas
    )  # what nothing is known about is taken to scale, and limited to its minimum
    return goodput, speedup, one


def _allowed(
    job: JobInfo, had: Allocation, sizes: Sizes, room: _Room, settings: Settings
) -> NDArray[np.bool_]:
    """Which sizes a job may be changed to."""
    least = job.min_replicas
    most = min(job.max_replicas, room.total)
    if job.requested_replicas is not None:
        least = most = job.requested_replicas
    elif job.model is None:
        most = min(most, least)
    else:
        tried = max(int(settings.exploration * job.max_profiled_replicas), sum(had.values()))
        most = min(most, max(tried, least))
    r, several = sizes.replicas, sizes.several
    fits = np.where(several, room.nodes > 1, (r <= room.one) & (r >= room.fewest))
    enough_nodes = np.where(several, r >= max(job.min_nodes, 2) * room.fewest, job.min_nodes <= 1)
    within = several & (job.max_nodes == 1)
    useful = ~several | (r > room.one) | (job.min_nodes > 1)  # several nodes only where one is too small
    return np.asarray((r >= least) & (r <= most) & fits & enough_nodes & ~within & useful)


def _kept(job: JobInfo, found: Allocation, sizes: Sizes) -> int:
    """The column of what a job has, if it may keep it."""
    if not found:
        return -1
    replicas = sum(found.values())
    if replicas > job.max_replicas or replicas < job.min_replicas:
        return -1
    if job.requested_replicas not in (None, replicas):
        return -1
    for node, here in found.items():
        bound = limit(job, node)
        if bound is None or not bound.min_slots <= here <= bound.max_slots:
            return -1
    return sizes.column(replicas, len(found) > 1)


def _speedup(tables: Tables, row: int, found: Allocation) -> float:
    if not found:
        return 0.0
    replicas, several = sum(found.values()), len(found) > 1
    match = (tables.sizes.replicas == replicas) & (tables.sizes.several == several)
    return float(tables.speedup[row, np.argmax(match)]) if match.any() else 0.0


# ---------------------------------------------------------------------------------------------- solve


def _solve(tables: Tables, board: Board, capacity: int) -> tuple[dict[str, dict[str, int]], Table]:
    """Choose sizes, then places. A size that finds no place is given up and the rest is chosen again."""
    allowed = tables.allowed.copy()
    start = {name: dict(found) for name, found in board.placed.items()}
    as_it_is = Board(board.nodes, board.current)
    for name, found in start.items():
        as_it_is.put(name, found)
    for row, job in enumerate(tables.jobs):
        if tables.kept[row] >= 0:
            as_it_is.put(job.name, board.current[job.name])
    best = _worth(tables, as_it_is), as_it_is.placed
    table = first = _table(tables, allowed, capacity)
    for _ in range(_ROUNDS):
        trial = Board(board.nodes, board.current, stable_wanted=board.stable_wanted)
        for name, found in start.items():
            trial.put(name, found)
        failed, moved = _place(tables, table.choose(capacity), trial, allowed)
        worth = _worth(tables, trial)
        if worth > best[0] + 1e-9:
            best = worth, trial.placed
        if not failed and not moved:
            break
        for row, column in failed + moved:
            smaller = tables.sizes.replicas < tables.sizes.replicas[column]
            allowed[row] &= smaller
        table = _table(tables, allowed, capacity)
    return best[1], first


def _table(tables: Tables, allowed: NDArray[np.bool_], capacity: int) -> Table:
    options = []
    for row in range(len(tables.jobs)):
        values = np.where(allowed[row], tables.changed[row], 0.0)
        if tables.kept[row] >= 0:
            values[tables.kept[row]] = max(values[tables.kept[row]], tables.kept_value[row])
        columns = np.flatnonzero(values > 0)
        options.append(Options(tables.sizes.replicas[columns], values[columns]))
    return Table(options, capacity)


def _place(
    tables: Tables, chosen: Sequence[int | None], board: Board, allowed: NDArray[np.bool_]
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Put the chosen sizes on the board; (job, column) of what found no room, and of what moved others."""
    wants, names = [], {job.name: row for row, job in enumerate(tables.jobs)}
    known = {job.name: job for job in tables.jobs}
    columns: dict[str, int] = {}
    for row, (job, index) in enumerate(zip(tables.jobs, chosen, strict=True)):
        if index is None:
            continue
        values = np.where(allowed[row], tables.changed[row], 0.0)
        if tables.kept[row] >= 0:
            values[tables.kept[row]] = max(values[tables.kept[row]], tables.kept_value[row])
        column = int(np.flatnonzero(values > 0)[index])
        columns[job.name] = column
        if column == tables.kept[row]:
            board.put(job.name, board.current[job.name])
            board.movable[job.name] = float(tables.kept_value[row] - tables.changed[row, column])
        else:
            wants.append(Want(job, int(tables.sizes.replicas[column]), bool(tables.sizes.several[column])))
    failed = place(board, wants, known)
    lost = [(names[want.job.name], columns[want.job.name]) for want in failed]
    movers: list[tuple[int, int]] = []
    if board.moved and wants:
        largest = max(wants, key=lambda want: (want.replicas, want.job.name))
        movers = [(names[largest.job.name], columns[largest.job.name])]
    return lost, movers


def _worth(tables: Tables, board: Board) -> float:
    """The objective of what is on the board, moves paid for."""
    total = 0.0
    for row, job in enumerate(tables.jobs):
        found = board.placed.get(job.name)
        if not found:
            continue
        if tables.kept[row] >= 0 and found == board.current[job.name]:
            total += float(tables.kept_value[row])
        else:
            match = (tables.sizes.replicas == sum(found.values())) & (
                tables.sizes.several == (len(found) > 1)
            )
            total += float(tables.changed[row, np.argmax(match)]) if match.any() else 0.0
    return total
