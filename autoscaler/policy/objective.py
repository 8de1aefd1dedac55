"""The value of an allocation: speedups weighted by remaining work, less the cost of a change.

COMPLETION, the default, minimises the average completion time. heSRPT (Berg, Vesilo, Harchol-Balter, *heSRPT:
Parallel scheduling to minimize mean slowdown*, 2020) is optimal for jobs that all speed up as s(k) = k^p:
ordered by remaining work, longest first, job i gets a share that grows with its rank i, and no job gets
everything. The same shares maximise Σ w_i·s(k_i) with w_i = (i^c − (i−1)^c)^(1−p), c = 1/(1−p), which grows
about as i^p. Such a sum can be maximised for any speedup curve, measured ones included. Replays of traces are
flat around the optimum (within 1 % for rank exponents from 0.8 to 1.5 and speedup exponents from 0.35 to
0.75); this module uses w_i = i and √speedup. The first replica of a job counts more than any further replica
of other jobs, so jobs wait only when there are more jobs than slots.

SPEEDUP is Pollux's objective (OSDI'21, section 4.2): the power mean of the speedups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaptdl_elastic.autoscaler.policy.policy_types import JobInfo, Objective, PolicySettings

Array = NDArray[np.float64]

RANK_EXPONENT = 1.0  # exponent of the rank by remaining work; the longest job has rank 1
LENGTH_TOLERANCE = 0.15  # relative difference of remaining work above which one job counts as longer
SPEEDUP_EXPONENT = 0.5  # exponent of the speedup
FIRST_REPLICA_VALUE = 10.0  # value of running at all, in units of the largest weight
RUNNING_VALUE = 1e3  # value of having any replicas; makes the power mean finite and positive
STEP_BONUS = 10.0  # bonus of a step towards an unexplored size, in units of the largest value of a job
PAUSES_PER_HORIZON = 15.0  # long jobs keep an allocation for 13 to 26 pauses in replays
OUTLIVED_FACTOR = 4.0  # of the work so far that a job beyond its declared end is expected to need again
_RANKED_TOGETHER = 64  # number of jobs that are compared with all others in one array operation
_LEAST_VALUE_KEPT = 0.01  # least part of its value that a changed allocation keeps


def remaining_seconds(jobs: Sequence[JobInfo], goodput_of_one: Array) -> Array:
    """Return the predicted seconds that each job would still take on one replica, shape (jobs,).

    A job that has not been profiled counts as a typical one.
    """
    work = [remaining_work(job) for job in jobs]
    known = goodput_of_one > 0
    seconds = np.where(known, np.array(work) / np.where(known, goodput_of_one, 1.0), np.nan)
    typical = float(np.median(seconds[known])) if known.any() else 1.0
    return np.maximum(np.where(known, seconds, typical), 1.0)


def remaining_work(job: JobInfo) -> float:
    """Return how much work a job is expected to have left, in samples at the initial batch size.

    The first rule that applies counts:

    1. Some jobs with the same command line are longer than this job is now (`kind_totals` has their final or
       declared lengths). They predict, on average, the part of their length that is beyond this job's
       present work: its mean residual life. If the job itself declares a later end, that end counts. So a
       job gains nothing by declaring less than others.
    2. The job declares an end that it has not reached yet: that end counts.
    3. The job has gone on beyond its declared end: `OUTLIVED_FACTOR` times the work that it has done. So it
       loses what it has gained by its declaration.
    4. Otherwise: as much work as the job has done, as for heavy-tailed lengths (Harchol-Balter and Downey,
       1997).
    """
    longer = [total - job.attained for total in job.kind_totals if total > job.attained]
    if longer:
        return max(sum(longer) / len(longer), job.declared or 0.0)
    if job.declared is not None:
        return job.declared
    return job.attained * (OUTLIVED_FACTOR if job.outlived else 1.0)


def overdue(job: JobInfo, now: float, settings: PolicySettings) -> bool:
    """Return whether the job has waited for longer than `max_wait`."""
    return job.waiting_since is not None and now - job.waiting_since >= settings.max_wait


def rank(job: JobInfo, now: float, settings: PolicySettings, others: float) -> float:
    """Return the value by which an overdue job comes before all jobs that are not; 0 for those.

    `others` is at least the value of all jobs together, without ranks. The rank exceeds that, with the bonus
    of a step for each job. So no weight changes which jobs come first: those that are overdue, and of them
    those that have waited longer.
    """
    if job.waiting_since is None or not overdue(job, now, settings):
        return 0.0
    return (1 + STEP_BONUS) * others * (1 + (now - job.waiting_since) / max(settings.max_wait, 1.0))


def weights(remaining: Array, settings: PolicySettings, jobs: Sequence[JobInfo]) -> Array:
    """Return the weight of each job's speedup, shape (jobs,)."""
    given = np.array([job.weight for job in jobs])
    if settings.objective is Objective.SPEEDUP:
        return given
    return np.asarray(given * _rank(remaining) ** RANK_EXPONENT)


def _rank(remaining: Array) -> Array:
    """Return each job's rank by remaining work, longest first, as a smooth function of that work.

    A job counts as half before another one of the same length. So equal jobs have equal weights, and noise in
    the remaining work does not make two jobs change places.
    """
    length = np.log(remaining)
    # a few jobs at a time, so that the memory grows with the jobs and not with their square
    parts = np.array_split(length, 1 + length.size // _RANKED_TOGETHER)
    shorter = ((part[:, np.newaxis] - length) / LENGTH_TOLERANCE for part in parts)
    return 0.5 + np.concatenate([(1 / (1 + np.exp(np.clip(by, -50, 50)))).sum(axis=1) for by in shorter])


def utility(speedup: Array, settings: PolicySettings) -> Array:
    """Return the value of a speedup: an increasing function, positive wherever the speedup is."""
    positive = np.maximum(speedup, 1e-9)
    if settings.objective is Objective.COMPLETION:
        return np.asarray(np.where(speedup > 0, positive**SPEEDUP_EXPONENT, 0.0))
    p = settings.fairness
    if p == 1:
        return np.asarray(np.maximum(speedup, 0.0))
    if p >= 0:
        worth = np.log(positive) if p == 0 else positive**p
    else:  # running is worth more than not running, and more speedup is worth more, however small it is
        least = (RUNNING_VALUE / 2) ** (1 / p)
        worth = -(np.maximum(positive, least) ** p) - np.maximum(0.0, least - positive)
    return np.asarray(np.where(speedup > 0, RUNNING_VALUE + worth, 0.0))


def after_pause(speedup: Array, remaining: Array, pause: Array, settings: PolicySettings) -> Array:
    """Return the speedups of changed allocations less the cost of the pause, shape (jobs, sizes).

    The pause must pay off within a horizon, or by the end of the job if that comes first.

    Args:
        speedup: The speedup of every size, shape (jobs, sizes).
        remaining: Seconds that each job would still take at speedup 1, shape (jobs,).
        pause: Seconds of a change, shape (jobs,) or (jobs, sizes).
        settings: The policy's settings.
    """
    left = remaining[:, np.newaxis] / np.maximum(speedup, 1e-9)
    cost = pause if pause.ndim > 1 else pause[:, np.newaxis]
    window = np.minimum(horizon(cost, settings), left + cost)
    return np.asarray(speedup * np.maximum(1 - cost / np.maximum(window, 1e-9), _LEAST_VALUE_KEPT))


def horizon(pause: NDArray[Any], settings: PolicySettings) -> Array:
    """Return the seconds within which a change must pay: `PAUSES_PER_HORIZON` pauses, at least a minute."""
    if settings.horizon is not None:
        return np.full(np.shape(pause), settings.horizon)
    return np.maximum(60.0, PAUSES_PER_HORIZON * np.asarray(pause, dtype=float))
