"""What an allocation is worth: speedups, weighed by how much is left, less the price of a change.

COMPLETION, the default, makes the average completion time short. heSRPT (Berg, Vesilo,
Harchol-Balter, *heSRPT: Parallel scheduling to minimize mean slowdown*, 2020) is optimal for jobs
that all speed up as s(k) = k^p: ordered by remaining work, longest first, job i gets a share that
grows with its rank i, and no job gets everything. The same shares maximise Σ w_i·s(k_i) with
w_i = (i^c − (i−1)^c)^(1−p), c = 1/(1−p), which grows about as i^p; and such a sum can be maximised for
any curve, real ones included. Replays of traces are flat around the optimum (within 1 % for exponents
of the rank from 0.8 to 1.5 and of the speedup from 0.35 to 0.75); here w_i = i and √speedup. The first
replica of a job counts more than any further one of others, so jobs wait only when there are more of
them than slots.

SPEEDUP is Pollux's objective (OSDI'21, section 4.2): the power mean of the speedups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaptdl_elastic.autoscaler.policy.policy_types import JobInfo, Objective, PolicySettings

Array = NDArray[np.float64]

RANK = 1.0  # exponent of the rank by remaining work, the longest job's being 1
BLUR = 0.15  # relative difference of remaining work at which one job is taken to be the longer one
BEND = 0.5  # exponent of the speedup
FIRST = 10.0  # what running at all is worth, in units of the largest weight
RUNS = 1e3  # any replicas at all, where the power mean of nothing would be minus infinity
OVERDUE = 1e6  # a job that has waited too long comes before everything else
PAUSES = 15.0  # about as many fit into the time that long jobs keep an allocation (13 to 26 in replays)
OUTLIVED_FACTOR = 4.0  # of the work so far that a job beyond its declared end is taken to need again
_LEAST = 0.01  # a change never loses all its worth: it may be the only way to run


def remaining_seconds(jobs: Sequence[JobInfo], goodput_of_one: Array) -> Array:
    """Predicted seconds that each job would still take on one replica, shape (jobs,).

    A job that has not been profiled is taken for a typical one.
    """
    work = [remaining_work(job) for job in jobs]
    known = goodput_of_one > 0
    seconds = np.where(known, np.array(work) / np.where(known, goodput_of_one, 1.0), np.nan)
    typical = float(np.median(seconds[known])) if known.any() else 1.0
    return np.maximum(np.where(known, seconds, typical), 1.0)


def remaining_work(job: JobInfo) -> float:
    """Return the samples at the initial batch size that a job is expected to have still to do.

    A declared end is believed until the job has outlived it, but no less is expected than what others of the
    same command line came to, or declare, that are longer than it is now: so a job gains nothing by declaring
    less than others. Without a declared end the mean of those is expected (the mean residual life of what was
    seen). Where there are none, it is as much again as the job has done, which is what heavy-tailed lengths
    do (Harchol-Balter and Downey, 1997), or `OUTLIVED_FACTOR` times that for a job that has outlived its
    declaration: what it has gained by that it loses again.
    """
    longer = [total - job.attained for total in job.kind_totals if total > job.attained]
    if longer:
        return max(sum(longer) / len(longer), job.declared or 0.0)
    if job.declared is not None:
        return job.declared
    return job.attained * (OUTLIVED_FACTOR if job.outlived else 1.0)


def overdue(job: JobInfo, now: float, settings: PolicySettings) -> bool:
    """Whether it has waited too long."""
    return job.waiting_since is not None and now - job.waiting_since >= settings.max_wait


def weights(remaining: Array, settings: PolicySettings, jobs: Sequence[JobInfo]) -> Array:
    """How much each job's speedup counts, shape (jobs,)."""
    given = np.array([job.weight for job in jobs])
    if settings.objective is Objective.SPEEDUP:
        return given
    return np.asarray(given * _rank(remaining) ** RANK)


def _rank(remaining: Array) -> Array:
    """Place by remaining work, the longest first, as a smooth function of it.

    A job is counted as half before another of the same length, so that equal jobs weigh the same and
    noise in what is left makes no two of them change places.
    """
    length = np.log(remaining)
    longer = (length[np.newaxis, :] - length[:, np.newaxis]) / BLUR
    return np.asarray(0.5 + (1 / (1 + np.exp(np.clip(-longer, -50, 50)))).sum(axis=1))


def utility(speedup: Array, settings: PolicySettings) -> Array:
    """What a speedup is worth, increasing, above zero wherever the speedup is."""
    positive = np.maximum(speedup, 1e-9)
    if settings.objective is Objective.COMPLETION:
        return np.asarray(np.where(speedup > 0, positive**BEND, 0.0))
    p = settings.fairness
    if p == 1:
        return np.asarray(np.maximum(speedup, 0.0))
    if p >= 0:
        worth = np.log(positive) if p == 0 else positive**p
    else:  # however little comes of it, to run is worth more than not to, and more is worth more
        least = (RUNS / 2) ** (1 / p)
        worth = -(np.maximum(positive, least) ** p) - np.maximum(0.0, least - positive)
    return np.asarray(np.where(speedup > 0, RUNS + worth, 0.0))


def after_pause(speedup: Array, remaining: Array, pause: Array, settings: PolicySettings) -> Array:
    """Speedups of changed allocations, less what the pause costs; shape (jobs, sizes).

    The pause is paid back within a horizon, or by the end of the job when that comes first.
    """
    left = remaining[:, np.newaxis] / np.maximum(speedup, 1e-9)
    cost = pause[:, np.newaxis]
    window = np.minimum(horizon(pause, settings)[:, np.newaxis], left + cost)
    return np.asarray(speedup * np.maximum(1 - cost / np.maximum(window, 1e-9), _LEAST))


def horizon(pause: NDArray[Any], settings: PolicySettings) -> Array:
    """Seconds within which a change must pay: `PAUSES` pauses, but at least a minute."""
    if settings.horizon is not None:
        return np.full(np.shape(pause), settings.horizon)
    return np.maximum(60.0, PAUSES * np.asarray(pause, dtype=float))
