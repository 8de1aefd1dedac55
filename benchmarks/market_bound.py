"""A lower bound of the cost of nodes for a given average completion time, for any autoscaler.

The bound assumes that every job has, alone and in every epoch, as many slots as it likes on as few nodes as
hold them. It knows its true speed and gradient statistics at every size and batch size in advance, pays only
for slots that it uses, and never pauses, boots or waits.

Whatever an autoscaler does, each piece of work is done at some size r. It then takes seconds(r) of its job's
completion time and r · seconds(r) of slots. So for any value v of time (slot hours per hour)

    slot seconds + v · (sum of completion times)  >=  sum over pieces of min over r of (v + r) · seconds(r).

Given the average completion time, the slot seconds are at least the right side less v times the sum. This
holds for every v, hence also for the v that gives the largest bound (Lagrange's dual). The bound does not
depend on a policy or on the order of jobs. It covers measured sizes and batch sizes only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from simulator.application import Application
from simulator.workload import Submission

Array = NDArray[np.float64]
_LOCAL_SIZES = 40  # number of batch sizes per replica that are tried, geometrically between the bounds
_MOST_ACCUMULATION = 15
VALUES = (0.0, *np.geomspace(0.05, 100.0, 100).tolist())


@dataclass(frozen=True)
class Frontier:
    """Cost and average completion time of the bound, for every value of time."""

    values: tuple[float, ...]  # values of time in slot hours per hour, ascending
    # (node hours, average completion time in seconds), from the cheapest to the fastest
    points: tuple[tuple[float, float], ...]
    jobs: int
    slots: int

    def least(self, jct: float) -> float:
        """Return the least node hours for an average completion time of `jct` seconds."""
        weight = self.jobs / 3600 / self.slots
        bounds = [
            cost + value * weight * (time - jct)
            for value, (cost, time) in zip(self.values, self.points, strict=True)
        ]
        return max(bounds)


def epoch_seconds(app: Application, sizes: Sequence[int], slots: int) -> Array:
    """Return the shortest time of each epoch on each number of replicas.

    The shape is (sizes, epochs). Sizes that are impossible have infinite times.
    """
    found = np.full((len(sizes), app.epochs), np.inf)
    starts = np.concatenate([[0.0], app.ends[:-1]])
    work = app.ends - starts  # in steps of the initial batch
    low, high = app.min_local_bsz, app.max_local_bsz
    for i, replicas in enumerate(sizes):
        if replicas > app.max_replicas:
            continue
        whole, rest = divmod(replicas, slots)
        parts = (slots,) * whole + ((rest,) if rest else ())
        for local in np.unique(np.geomspace(low, high, _LOCAL_SIZES).astype(int)):
            step_time, sync_time = app.throughput(parts, int(local))
            for accumulation in range(_MOST_ACCUMULATION + 1):
                batch = replicas * int(local) * (accumulation + 1)
                if not app.init_batch_size <= batch <= app.max_batch_size:
                    continue
                stats = np.array([app.grad_stats(batch, epoch) for epoch in range(app.epochs)])
                square, variance = stats[:, 0], stats[:, 1]
                gain = (variance + square) / (variance / (batch / app.init_batch_size) + square)
                seconds = work * (step_time + (step_time - sync_time) * accumulation) / gain
                found[i] = np.minimum(found[i], seconds)
    return found


def frontier(
    workload: Sequence[Submission], apps: Mapping[str, Application], slots: int, sizes: Sequence[int]
) -> Frontier:
    """Compute the bound's choices among the given numbers of replicas."""
    tables = {name: epoch_seconds(apps[name], sizes, slots) for name in {j.application for j in workload}}
    replicas = np.array(sizes)[:, np.newaxis]
    points = []
    for value in VALUES:
        slot_seconds, total = 0.0, 0.0
        for job in workload:
            table = tables[job.application]
            best = np.argmin((value + replicas) * table, axis=0)
            seconds = table[best, np.arange(table.shape[1])]
            slot_seconds += float((replicas[best, 0] * seconds).sum())
            total += float(seconds.sum())
        points.append((slot_seconds / 3600 / slots, total / len(workload)))
    return Frontier(VALUES, tuple(points), len(workload), slots)


def cost_at(points: Sequence[tuple[float, float]], jct: float) -> float:
    """Interpolate the cost at a completion time between reached (cost, time) points; NaN outside them."""
    frontier_points = pareto(points)
    times = np.array([t for _, t in frontier_points])
    costs = np.array([c for c, _ in frontier_points])
    if not len(times) or not times.min() <= jct <= times.max():
        return float("nan")
    order = np.argsort(times)
    return float(np.interp(jct, times[order], costs[order]))


def pareto(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the (cost, time) points that no other point beats in both."""
    kept: list[tuple[float, float]] = []
    for cost, time in sorted(points):
        if not kept or time < kept[-1][1]:
            kept.append((cost, time))
    return kept
