"""What no autoscaler can beat: the cheapest nodes for a given average completion time.

Every job alone on as many slots as it likes, knowing its true speed and gradient statistics in every
epoch, paying only for slots that it uses, with no pause, no start-up and no waiting. In each epoch it
picks the replicas r (and the batch size) that minimise (v + r) · seconds; v, the worth of time in slot
hours per hour, runs over a grid. Both sums are minimised by the same choice, so for each v the pair
(slot hours, completion time) lies on the frontier of what is possible.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from adaptdl_elastic.autoscaler.simulator.application import Application
from adaptdl_elastic.autoscaler.simulator.workload import Submission, WorkloadError

Array = NDArray[np.float64]
_LOCAL_SIZES = 12  # batch sizes per replica that are tried, geometrically between the bounds
_MOST_ACCUMULATION = 15
VALUES = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 20.0, 40.0, 80.0)


def epoch_seconds(app: Application, sizes: Sequence[int], slots: int) -> Array:
    """Shortest time of each epoch on each number of replicas, shape (sizes, epochs); inf: impossible."""
    found = np.full((len(sizes), app.epochs), np.inf)
    starts = np.concatenate([[0.0], app.ends[:-1]])
    work = app.ends - starts  # in steps of the initial batch
    low, high = app.min_local_bsz, app.max_local_bsz
    for i, replicas in enumerate(sizes):
        if replicas > app.max_replicas:
            continue
        parts = (replicas,) if replicas <= slots else (slots,) * (replicas // slots)
        for local in np.unique(np.geomspace(low, high, _LOCAL_SIZES).astype(int)):
            try:
                step_time, sync_time = app.throughput(parts, int(local))
            except WorkloadError:
                continue
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
    workload: Sequence[Submission], apps: Mapping[str, Application], slots: int, most: int = 64
) -> list[tuple[float, float]]:
    """(node hours, average completion time in seconds), from the cheapest to the fastest."""
    sizes = [r for r in (1, 2, *range(slots, most + 1, slots)) if r <= most]
    tables = {name: epoch_seconds(apps[name], sizes, slots) for name in {j.application for j in workload}}
    points = []
    for value in VALUES:
        slot_seconds, total = 0.0, 0.0
        for job in workload:
            table = tables[job.application]
            weight = value + np.array(sizes)[:, np.newaxis]
            best = np.argmin(weight * table, axis=0)
            seconds = table[best, np.arange(table.shape[1])]
            slot_seconds += float((np.array(sizes)[best] * seconds).sum())
            total += float(seconds.sum())
        points.append((slot_seconds / 3600 / slots, total / len(workload)))
    return points


def cost_at(points: Sequence[tuple[float, float]], jct: float) -> float:
    """Cost at a completion time, between the points of a frontier; nan outside them."""
    frontier_points = pareto(points)
    times = np.array([t for _, t in frontier_points])
    costs = np.array([c for c, _ in frontier_points])
    if not len(times) or not times.min() <= jct <= times.max():
        return float("nan")
    order = np.argsort(times)
    return float(np.interp(jct, times[order], costs[order]))


def pareto(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The (cost, time) points that no other point beats in both."""
    kept: list[tuple[float, float]] = []
    for cost, time in sorted(points):
        if not kept or time < kept[-1][1]:
            kept.append((cost, time))
    return kept
