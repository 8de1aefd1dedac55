"""Summarise a simulation: completion times, fairness and cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simulator.engine import Outcome, Sample
from simulator.simulated_job import SimJob


@dataclass(frozen=True)
class Report:
    """Summary of a simulation. Times are in seconds; JCT is the time from submission to completion."""

    jobs: int
    average_jct: float
    median_jct: float
    p99_jct: float
    makespan: float
    longest_wait: float  # longest time that a job had no replica
    restarts_per_job: float  # changes of allocation, without the first start
    gpu_hours: float
    utilisation: float  # used part of the slots, over the whole simulation
    finish_time_fairness: dict[str, float]  # median, p90 and worst ρ, and the part of jobs with ρ > 1
    policy_seconds: float  # CPU time of all decisions
    decisions: int


def summarize(outcome: Outcome, fairness: bool = True) -> Report:
    """Compute the summary of a finished simulation.

    Args:
        outcome: The finished simulation.
        fairness: Whether to compute finish-time fairness, which replays every job alone.
    """
    jobs = outcome.jobs
    times = np.array([_jct(job) for job in jobs])
    busy = _integral([sum(s.replicas.values()) for s in outcome.samples], outcome.samples)
    room = _integral([s.slots for s in outcome.samples], outcome.samples)
    return Report(
        jobs=len(jobs),
        average_jct=math.fsum(times) / len(times),
        median_jct=float(np.median(times)),
        p99_jct=float(np.percentile(times, 99)),
        makespan=max(job.completed or math.inf for job in jobs),
        longest_wait=max(job.longest_wait for job in jobs),
        restarts_per_job=sum(max(job.starts - 1, 0) for job in jobs) / len(jobs),
        gpu_hours=sum(job.gpu_seconds for job in jobs) / 3600,
        utilisation=busy / room if room else 0.0,
        finish_time_fairness=_fairness(outcome) if fairness else {},
        policy_seconds=outcome.policy_seconds,
        decisions=outcome.decisions,
    )


def _jct(job: SimJob) -> float:
    return (math.inf if job.completed is None else job.completed) - job.submission.time


def _integral(values: Sequence[float], samples: Sequence[Sample]) -> float:
    times = [sample.time for sample in samples]
    return math.fsum(v * (b - a) for v, a, b in zip(values, times, times[1:], strict=False))


def _fairness(outcome: Outcome) -> dict[str, float]:
    """Compute finish-time fairness ρ (Mahajan et al., *Themis*, NSDI 2020).

    ρ is a job's completion time divided by the time it would take alone on its share of the slots. The share
    is the number of slots divided by the mean number of jobs during its life. With ρ ≤ 1, sharing cost the
    job nothing.
    """
    samples = outcome.samples
    times = np.array([s.time for s in samples])
    present = np.array([len(s.replicas) + s.waiting for s in samples], dtype=float)
    slots = np.array([s.slots for s in samples], dtype=float)
    ratios = []
    for job in outcome.jobs:
        during = (times >= job.submission.time) & (times <= (job.completed or math.inf))
        rivals = max(float(present[during].mean()), 1.0) if during.any() else 1.0
        there = int(slots[during].mean()) if during.any() else int(slots[0])
        share = max(1, min(int(there / rivals), job.app.max_replicas))
        ratios.append(_jct(job) / alone(job, share))
    found = np.array(ratios)
    return {
        "median": float(np.median(found)),
        "p90": float(np.percentile(found, 90)),
        "worst": float(found.max()),
        "above_one": float((found > 1).mean()),
    }


def alone(job: SimJob, replicas: int, slots: int = 4) -> float:
    """Return the seconds that a job would take alone on `replicas` replicas, with `slots` per node."""
    whole, rest = divmod(replicas, slots)
    sizes = [slots] * whole + ([rest] if rest else [])
    copy = SimJob(job.submission, job.app, job.fixed_batch_size)
    names = {f"node-{i}": size for i, size in enumerate(sizes)}
    copy.allocate(names, 0.0)
    while copy.completed is None:
        copy.step(3600.0)
        if copy.now > 1e8:
            return math.inf
    return copy.completed
