"""The tables of a decision: a row per job, a column per number of replicas on nodes of one type."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaptdl_elastic.autoscaler.policy import objective
from adaptdl_elastic.autoscaler.policy.curves import goodputs
from adaptdl_elastic.autoscaler.policy.policy_types import (
    Allocation,
    GoodputModel,
    JobInfo,
    NodeInfo,
    Objective,
    PolicySettings,
)
from adaptdl_elastic.autoscaler.policy.solver.placement import bounds_of, limit
from adaptdl_elastic.autoscaler.policy.solver.sizes import (
    SMALL,
    Sizes,
    build_sizes,
    is_small,
    spread,
    types_of,
)

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Tables:
    """All values of the jobs that can be changed, of shape (jobs, sizes) unless noted."""

    jobs: Sequence[JobInfo]
    sizes: Sizes
    goodput: Array
    speedup: Array
    allowed: NDArray[np.bool_]  # sizes that the job may change to now
    possible: NDArray[np.bool_]  # sizes that the job may change to once they are explored
    changed: Array  # value of changing to this size, where possible
    kept: NDArray[Any]  # (jobs,): column of the present size if the job may keep it, else -1
    kept_value: Array  # (jobs,): value of keeping the present size
    # (jobs,): part of `changed` by which a job that has waited too long comes before all others; else 0
    rank: Array


@dataclass(frozen=True)
class Room:
    """The replicas that the nodes could hold of one job if it had them alone."""

    nodes: int
    one: int  # largest number of replicas on one node
    fewest: int  # smallest number of replicas on a node
    total: int
    least: int  # smallest total that respects the limits of the nodes and of the job


def rooms_of(jobs: Sequence[JobInfo], nodes: Sequence[NodeInfo]) -> list[Room]:
    """Return the room of each job without other jobs. Jobs share the work if they share their limits."""
    # by limits: the sums of the lower and upper bounds of 0, 1, 2, ... nodes, first those with low minima,
    # then those with most room
    orders: dict[int, list[list[list[int]]]] = {}
    found = []
    for job in jobs:
        if id(job.limits) not in orders:
            bounds = [(low, high) for low, high in bounds_of(job.limits, nodes) if low <= high]
            orders[id(job.limits)] = [
                [list(accumulate(ends)) for ends in zip((0, 0), *order, strict=True)]
                for order in (sorted(bounds), sorted(bounds, key=lambda bound: (-bound[1], bound[0])))
            ]
        (lows, _), (_, highs) = known = orders[id(job.limits)]
        count = len(highs) - 1
        total = highs[min(job.max_nodes or count, count)]
        found.append(Room(count, highs[min(count, 1)], lows[1] if count else 1, total, _least(job, known)))
    return found


def _least(job: JobInfo, orders: Sequence[Sequence[list[int]]]) -> int:
    """Return the smallest size that fits when nodes are taken in one of the orders."""
    wanted = max(job.min_replicas, job.min_nodes)
    found = []
    for lows, highs in orders:
        nodes = max(bisect_left(highs, wanted), job.min_nodes)
        if nodes <= min(job.max_nodes or nodes, len(highs) - 1):
            found.append(max(wanted, lows[nodes]))
    return min(found, default=wanted)


def build(
    jobs: Sequence[JobInfo],
    nodes: Sequence[NodeInfo],
    rooms: Mapping[str, Room],
    before: Mapping[str, Allocation],
    intact: set[str],
    now: float,
    settings: PolicySettings,
) -> Tables:
    """Compute the value of every size for every job; `intact` jobs could stay as they are."""
    had = [before[job.name] if job.name in intact else {} for job in jobs]
    by_type = {
        name: rooms_of(jobs, [node for node in nodes if node.node_type == name]) for name in types_of(nodes)
    }
    least_of = {
        name: {room.least for job, room in zip(jobs, here, strict=True) if job.model is None}
        for name, here in by_type.items()
    }
    alone, room = _alone(jobs, by_type)
    sizes = build_sizes(jobs, nodes, had, least_of, _across(jobs, nodes, rooms, alone, room))
    shape = len(jobs), len(sizes.replicas)
    goodput, speedup, one = _curves(jobs, nodes, sizes)
    possible, allowed = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool)
    for kind in range(int(sizes.kinds.max(initial=0)) + 1):
        here = np.flatnonzero(sizes.kinds == kind)
        theirs = [rooms[job.name] for job in jobs] if kind == sizes.mixed else by_type[sizes.types[kind]]
        bounds = [_bounds(*known, settings) for known in zip(jobs, had, theirs, strict=True)]
        fits = [_fits(job, sizes, here, room) for job, room in zip(jobs, theirs, strict=True)]
        least, explored, most = np.array(bounds, dtype=int).reshape(-1, 3).T[:, :, np.newaxis]
        counts = sizes.replicas[here]
        fitting = np.array(fits, dtype=bool).reshape(len(jobs), len(here)) & (speedup[:, here] > 0)
        if kind == sizes.mixed:  # only what the job cannot have on one type, and where its nodes have room
            fitting &= counts > alone[:, np.newaxis]
            fitting &= (sizes.uses[here] <= room[:, np.newaxis, :]).all(axis=2)
        possible[:, here] = fitting & (counts >= least) & (counts <= most)
        allowed[:, here] = possible[:, here] & (counts <= explored)
    remaining = objective.remaining_seconds(jobs, one)
    weight = objective.weights(remaining, settings, jobs)[:, np.newaxis]
    paid = objective.after_pause(speedup, remaining, _pauses(jobs, had, sizes, settings), settings)
    running = (
        objective.FIRST_REPLICA_VALUE
        * float(weight.max(initial=0.0))
        * (settings.objective is Objective.COMPLETION)
    )
    requested = np.array([job.requested_replicas is not None for job in jobs])
    extra = (running + objective.RUNNING_VALUE * requested)[:, np.newaxis]
    changed = np.where(possible, weight * objective.utility(paid, settings) + extra, 0.0)
    kept = np.array([_kept(job, found, sizes) for job, found in zip(jobs, had, strict=True)], dtype=int)
    rows = np.arange(len(jobs))
    # a running job can keep its size even where new measurements no longer allow it
    keeping = np.where(kept >= 0, speedup[rows, kept] * (1 + settings.hysteresis), 0.0)
    kept_value = np.where(
        kept >= 0, (weight * objective.utility(keeping[:, np.newaxis], settings) + extra)[:, 0], 0
    )
    largest = max(float(changed.max(initial=0.0)), float(kept_value.max(initial=0.0)))
    rank = np.array([objective.rank(job, now, settings, len(jobs) * largest) for job in jobs])
    changed = np.where(possible, changed + rank[:, np.newaxis], 0.0)
    return Tables(jobs, sizes, goodput, speedup, allowed, possible, changed, kept, kept_value, rank)


def _alone(
    jobs: Sequence[JobInfo], by_type: Mapping[str, Sequence[Room]]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return how many replicas of each job the nodes of a type could hold.

    Returns:
        The largest number on one type alone, shape (jobs,); 0 if the job can run on no type alone.
        The number on each type, shape (jobs, types); it may be too small for the job to run on that type
        alone.
    """
    room = np.array([[here.total for here in by_type[name]] for name in sorted(by_type)], dtype=int)
    runs = np.array(
        [
            [
                here.nodes >= job.min_nodes and here.least <= min(job.max_replicas, here.total)
                for job, here in zip(jobs, by_type[name], strict=True)
            ]
            for name in sorted(by_type)
        ],
        dtype=bool,
    )
    return np.where(runs, room, 0).max(axis=0, initial=0), room.T


def _across(
    jobs: Sequence[JobInfo],
    nodes: Sequence[NodeInfo],
    rooms: Mapping[str, Room],
    alone: NDArray[Any],
    room: NDArray[Any],
) -> set[tuple[int, ...]]:
    """Return sizes on nodes of several types, for numbers of replicas that no type alone could hold.

    In a small cluster these are all such numbers that a job may have. In a large cluster, or if a number was
    requested for the job, they are only the numbers that it needs: its minimum, the smallest number that
    fits, and the requested number.
    """
    found: set[tuple[int, ...]] = set()
    if room.shape[1] < 2:
        return found
    small = is_small(nodes)
    for row, job in enumerate(jobs):
        own = rooms[job.name]
        most = min(job.max_replicas, own.total)
        needed = {own.least, job.min_replicas, job.requested_replicas or 0}
        counts = range(1, most + 1) if small and job.requested_replicas is None else sorted(needed)
        beyond = [count for count in counts if alone[row] < count <= most]
        if beyond:
            found |= spread(job, nodes, beyond, room[row].tolist())
    return found


def _pauses(
    jobs: Sequence[JobInfo], had: Sequence[Allocation], sizes: Sizes, settings: PolicySettings
) -> Array:
    """Return the seconds that a change to each size costs, shape (jobs, sizes)."""
    pause = np.array([settings.pause(job.pause) for job in jobs])
    link = np.array([job.link_pause for job in jobs])
    away = [pause[i] if job.move_pause is None else job.move_pause for i, job in enumerate(jobs)]
    # (jobs, types): whether the job has replicas on nodes of the type; these replicas may stay
    there = np.array(
        [[name in {sizes.type_of.get(node) for node in found} for name in sizes.types] for found in had],
        dtype=bool,
    ).reshape(len(jobs), len(sizes.types))
    stays = (there[:, np.newaxis, :] & (sizes.uses > 0)).any(axis=2)
    moves = np.any(there, axis=1, keepdims=True) & ~stays
    there_or_back = np.where(moves, np.array(away)[:, np.newaxis], pause[:, np.newaxis])
    return np.maximum(there_or_back, np.where(sizes.several, link[:, np.newaxis], 0.0))


def _curves(jobs: Sequence[JobInfo], nodes: Sequence[NodeInfo], sizes: Sizes) -> tuple[Array, Array, Array]:
    """Return goodput and speedup of every job at every size, and the goodput of one replica.

    On nodes of several types the goodput of one replica is the mean over all slots. It is 0 for a job
    without a profile.
    """
    shape = len(jobs), len(sizes.replicas)
    goodput, speedup, one = np.zeros(shape), np.zeros(shape), np.zeros(len(jobs))
    rows = np.array([i for i, job in enumerate(jobs) if job.model is not None], dtype=np.intp)
    slots = np.array(
        [sum(n.slots for n in nodes if n.node_type == name) for name in sizes.types], dtype=float
    )
    share = slots / slots.sum() if slots.sum() > 0 else np.full(len(slots), 1 / len(slots))
    if len(rows):
        mixed = np.flatnonzero(sizes.kinds == sizes.mixed)
        goodput[np.ix_(rows, mixed)] = np.inf
        for kind, name in enumerate(sizes.types):
            models = [model for job in jobs if (model := job.model_on(name)) is not None]
            columns = np.concatenate([np.flatnonzero(sizes.kinds == kind), mixed])
            of_one, at = _curves_on(models, sizes, columns)
            together = sizes.uses[columns, kind] > 0
            present = goodput[np.ix_(rows, columns)]
            slowest = np.minimum(np.where(sizes.kinds[columns] == kind, np.inf, present), at)
            goodput[np.ix_(rows, columns)] = np.where(together, slowest, present)
            one[rows] += share[kind] * of_one
        speedup[rows] = goodput[rows] / np.maximum(one[rows], 1e-300)[:, np.newaxis]
    for i, job in enumerate(jobs):
        if job.model is None:  # assume linear speedup; such a job gets its minimum anyway
            speedup[i] = sizes.replicas * _expected_speeds(job, sizes, share)
    return goodput, speedup, one


def _curves_on(models: Sequence[GoodputModel], sizes: Sizes, columns: NDArray[Any]) -> tuple[Array, Array]:
    """Return the goodput of one replica, and that at each of `columns`, on nodes of one type."""
    where = np.concatenate([[1], np.where(sizes.several[columns], 2, 1)])
    counts = np.concatenate([[1], sizes.replicas[columns]])
    found = goodputs(models, where, counts).goodput
    # where one replica cannot hold the smallest batch, the smallest number that can is the reference
    rate = np.where(found > 0, found / counts, 0.0)
    first = np.argmax(rate > 0, axis=1)
    return rate[np.arange(len(models)), first], found[:, 1:]


def _expected_speeds(job: JobInfo, sizes: Sizes, share: Array) -> Array:
    """Return the expected speed of one replica of a job without a profile at each size, shape (sizes,).

    It is relative to the mean over all slots.
    """
    by_type = np.array([job.speeds.get(name, 1.0) for name in sizes.types])
    slowest = np.where(sizes.uses > 0, by_type, np.inf).min(axis=1, initial=np.inf)
    return np.asarray(slowest / float((by_type * share).sum()))


def _bounds(job: JobInfo, had: Allocation, room: Room, settings: PolicySettings) -> tuple[int, int, int]:
    """Return the fewest replicas, the most allowed now, and the most allowed once they are explored."""
    most = min(job.max_replicas, room.total)
    if job.requested_replicas is not None:
        return job.requested_replicas, job.requested_replicas, job.requested_replicas
    if job.model is None:
        least = max(job.min_replicas, room.least)
        return least, min(least, job.max_replicas), min(least, job.max_replicas)
    tried = max(int(settings.exploration * job.max_profiled_replicas), sum(had.values()), job.min_replicas)
    return job.min_replicas, min(tried, most), most


def _fits(job: JobInfo, sizes: Sizes, columns: NDArray[Any], room: Room) -> NDArray[np.bool_]:
    """Return which of the columns the nodes of `room` could hold."""
    r, several = sizes.replicas[columns], sizes.several[columns]
    fits = np.where(several, room.nodes > 1, (r <= room.one) & (r >= room.fewest))
    enough_nodes = np.where(several, r >= max(job.min_nodes, 2) * room.fewest, job.min_nodes <= 1)
    within = several & (job.max_nodes == 1)
    # in a large cluster a job gets several nodes only where one is too small
    useful = ~several | (r > room.one) | (job.min_nodes > 1) | (room.total <= SMALL)
    return np.asarray(fits & enough_nodes & ~within & useful & (r <= room.total))


def _kept(job: JobInfo, found: Allocation, sizes: Sizes) -> int:
    """Return the column of the job's present size if it may keep it, else -1."""
    if not found:
        return -1
    replicas = sum(found.values())
    if replicas > job.max_replicas or replicas < job.min_replicas:
        return -1
    if job.requested_replicas not in (None, replicas):
        return -1
    bounds = [(limit(job, node), here) for node, here in found.items()]
    if not all(least <= here <= most for (least, most), here in bounds):
        return -1
    column = sizes.find(found)
    return -1 if column is None else column
