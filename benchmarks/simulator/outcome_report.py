"""Summarise a simulation: completion times and restarts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from simulator.engine import Outcome
from simulator.simulated_job import SimJob


@dataclass(frozen=True)
class Report:
    """Summary of a simulation. Times are in seconds; JCT is the time from submission to completion."""

    average_jct: float
    p99_jct: float
    makespan: float
    longest_wait: float  # longest time that a job had no replica
    restarts_per_job: float  # changes of allocation, without the first start
    policy_seconds: float  # CPU time of all decisions


def summarize(outcome: Outcome) -> Report:
    """Compute the summary of a finished simulation."""
    jobs = outcome.jobs
    times = np.array([_jct(job) for job in jobs])
    return Report(
        average_jct=math.fsum(times) / len(times),
        p99_jct=float(np.percentile(times, 99)),
        makespan=max(job.completed or math.inf for job in jobs),
        longest_wait=max(job.longest_wait for job in jobs),
        restarts_per_job=sum(max(job.starts - 1, 0) for job in jobs) / len(jobs),
        policy_seconds=outcome.policy_seconds,
    )


def _jct(job: SimJob) -> float:
    return (math.inf if job.completed is None else job.completed) - job.submission.time
