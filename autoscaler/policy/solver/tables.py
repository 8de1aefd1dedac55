"""The tables of a decision: a row per job, a column per number of replicas."""

from __future__ import annotations

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
    JobInfo,
    NodeInfo,
    Objective,
    PolicySettings,
)
from adaptdl_elastic.autoscaler.policy.solver.placement import limit, rooms_of

Array = NDArray[np.float64]

SMALL = 32
"""Number of slots up to which all numbers of replicas are considered, instead of some of them."""


@dataclass(frozen=True)
class Sizes:
    """The numbers of replicas that are considered: the columns of every table."""

    replicas: NDArray[Any]  # (K,)
    several: NDArray[np.bool_]  # (K,): whether on several nodes

    def find(self, replicas: int, several: bool) -> int | None:
        """Return the column of a size; None if the size is not considered."""
        found = np.flatnonzero((self.replicas == replicas) & (self.several == several))
        return int(found[0]) if found.size else None


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


@dataclass(frozen=True)
class Room:
    """The replicas that the nodes could hold of one job if it had them alone."""

    nodes: int
    one: int  # largest number of replicas on one node
    fewest: int  # smallest number of replicas on a node
    total: int
    least: int  # smallest total that respects the limits of the nodes and of the job


def room_of(job: JobInfo, nodes: Sequence[NodeInfo]) -> Room:
    """Compute the room of a job without other jobs."""
    rooms = rooms_of(job, nodes)
    largest = sorted((high for _, high in rooms), reverse=True)
    fewest = min((low for low, _ in rooms), default=1)
    total = sum(largest[: job.max_nodes])
    return Room(len(rooms), max(largest, default=0), fewest, total, _least(job, rooms))


def _least(job: JobInfo, rooms: Sequence[tuple[int, int]]) -> int:
    """Return the smallest size that fits; tries nodes with low minima first, then those with most room."""
    wanted = max(job.min_replicas, job.min_nodes)
    found = []
    for order in (sorted(rooms), sorted(rooms, key=lambda room: (-room[1], room[0]))):
        bounds = zip(accumulate(r[0] for r in order), accumulate(r[1] for r in order), strict=True)
        for nodes, (low, high) in enumerate(bounds, 1):
            if job.min_nodes <= nodes <= (job.max_nodes or nodes) and max(wanted, low) <= high:
                found.append(max(wanted, low))
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
    sizes = _sizes(jobs, nodes, had, {rooms[job.name].least for job in jobs if job.model is None})
    shape = len(jobs), len(sizes.replicas)
    goodput, speedup, one = _curves(jobs, sizes)
    bounds = [_bounds(job, found, rooms[job.name], settings) for job, found in zip(jobs, had, strict=True)]
    fits = [_fits(job, sizes, rooms[job.name]) for job in jobs]
    possible = np.array(fits, dtype=bool).reshape(shape) & (speedup > 0)
    least, explored, most = np.array(bounds, dtype=int).reshape(-1, 3).T[:, :, np.newaxis]
    possible &= (sizes.replicas >= least) & (sizes.replicas <= most)
    allowed = possible & (sizes.replicas <= explored)
    remaining = objective.remaining_seconds(jobs, one)
    weight = objective.weights(remaining, settings, jobs)[:, np.newaxis]
    pause = np.array([settings.default_pause if job.pause is None else job.pause for job in jobs])
    paid = objective.after_pause(speedup, remaining, pause, settings)
    running = (
        objective.FIRST_REPLICA_VALUE
        * float(weight.max(initial=0.0))
        * (settings.objective is Objective.COMPLETION)
    )
    extra = np.array([running + _urgency(job, now, settings) for job in jobs])[:, np.newaxis]
    changed = np.where(possible, weight * objective.utility(paid, settings) + extra, 0.0)
    kept = np.array([_kept(job, found, sizes) for job, found in zip(jobs, had, strict=True)], dtype=int)
    rows = np.arange(len(jobs))
    # a running job can keep its size even where new measurements no longer allow it
    keeping = np.where(kept >= 0, speedup[rows, kept] * (1 + settings.hysteresis), 0.0)
    kept_value = np.where(
        kept >= 0, (weight * objective.utility(keeping[:, np.newaxis], settings) + extra)[:, 0], 0
    )
    return Tables(jobs, sizes, goodput, speedup, allowed, possible, changed, kept, kept_value)


def _urgency(job: JobInfo, now: float, settings: PolicySettings) -> float:
    if job.waiting_since is not None and objective.overdue(job, now, settings):
        return objective.OVERDUE_VALUE + (now - job.waiting_since)
    return objective.RUNNING_VALUE if job.requested_replicas is not None else 0.0


def _sizes(
    jobs: Sequence[JobInfo], nodes: Sequence[NodeInfo], had: Sequence[Allocation], least: set[int]
) -> Sizes:
    """Return all numbers of replicas in a small cluster, else powers of two on one node and whole nodes.

    The present, minimal and requested sizes of the jobs are always included.
    """
    slots = sorted((node.slots for node in nodes), reverse=True)
    total, largest = sum(slots), max(slots, default=0)
    most = min(total, max((job.max_replicas for job in jobs), default=0))
    if total <= SMALL:
        one, many = set(range(1, largest + 1)), set(range(2, most + 1))
    else:
        one = {1 << i for i in range(largest.bit_length())} | set(slots)
        many = {int(x) for x in np.cumsum(slots) if x <= most}
    special = {job.min_replicas for job in jobs} | {job.requested_replicas or 0 for job in jobs}
    special |= {min(job.max_replicas, total) for job in jobs} | least
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
    """Return goodput and speedup of every job at every size, and the goodput of one replica.

    The goodput of one replica is 0 for a job without a profile.
    """
    shape = len(jobs), len(sizes.replicas)
    goodput, speedup, one = np.zeros(shape), np.zeros(shape), np.zeros(len(jobs))
    rows = [i for i, job in enumerate(jobs) if job.model is not None]
    models = [job.model for job in jobs if job.model is not None]
    if models:
        where = np.concatenate([[1], np.where(sizes.several, 2, 1)])
        counts = np.concatenate([[1], sizes.replicas])
        found = goodputs(models, where, counts).goodput
        goodput[rows] = found[:, 1:]
        # where one replica cannot hold the smallest batch, the smallest number that can is the reference
        rate = np.where(found > 0, found / counts, 0.0)
        first = np.argmax(rate > 0, axis=1)
        one[rows] = rate[np.arange(len(models)), first]
        speedup[rows] = found[:, 1:] / np.maximum(one[rows], 1e-300)[:, np.newaxis]
    unknown = [i for i, job in enumerate(jobs) if job.model is None]
    speedup[unknown] = (
        sizes.replicas
    )  # without a profile: assume linear speedup; such a job gets its minimum anyway
    return goodput, speedup, one


def _bounds(job: JobInfo, had: Allocation, room: Room, settings: PolicySettings) -> tuple[int, int, int]:
    """Return the fewest replicas, the most allowed now, and the most allowed once they are explored."""
    most = min(job.max_replicas, room.total)
    if job.requested_replicas is not None:
        return job.requested_replicas, job.requested_replicas, job.requested_replicas
    if job.model is None:
        least = max(job.min_replicas, room.least)
        return least, least, least
    tried = max(int(settings.exploration * job.max_profiled_replicas), sum(had.values()), job.min_replicas)
    return job.min_replicas, min(tried, most), most


def _fits(job: JobInfo, sizes: Sizes, room: Room) -> NDArray[np.bool_]:
    """Return which sizes the nodes could hold."""
    r, several = sizes.replicas, sizes.several
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
    for node, here in found.items():
        bound = limit(job, node)
        if bound is None or not bound.min_slots <= here <= bound.max_slots:
            return -1
    column = sizes.find(replicas, len(found) > 1)
    return -1 if column is None else column
