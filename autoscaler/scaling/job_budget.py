"""Decide which jobs are stopped because of what they have cost (`--max-job-cost`). Pure.

A job is stopped before it has cost its limit: while it saves its state, its nodes go on to cost.
"""

from __future__ import annotations

from adaptdl_elastic.autoscaler.scaling.economics import HOUR, ScalingSettings
from adaptdl_elastic.autoscaler.scaling.observed_history import lacking, shares
from adaptdl_elastic.autoscaler.scaling.scaling_types import Memory, Observation, StopJob


def limit_of(settings: ScalingSettings, job: str) -> float | None:
    """Return what a run of a job may cost, or None."""
    return settings.max_job_costs.get(job, settings.max_job_costs.get("*"))


def hourly_costs(seen: Observation, memory: Memory) -> dict[str, float]:
    """Return for every job what its share of the nodes costs per hour, idle ones included."""
    short = lacking(seen, memory)
    hourly = {job.name: 0.0 for job in seen.jobs}
    for instance in seen.capacity.instances:
        for job, share in shares(seen.nodes.get(instance.id), short).items():
            hourly[job] = hourly.get(job, 0.0) + share * instance.hourly_price
    return hourly


def jobs_to_stop(seen: Observation, memory: Memory, settings: ScalingSettings) -> list[StopJob]:
    """Return the jobs that have cost their limit, or will have once their state is saved.

    Args:
        seen: jobs that were already asked to stop are not among its jobs.
        memory: its bills include the time until `seen`.
        settings: `max_job_costs` and `stop_reserve` are used.
    """
    hourly, found = hourly_costs(seen, memory), []
    for job in seen.jobs:
        limit, run = limit_of(settings, job.name), seen.runs.get(job.name)
        if limit is None or run is None:
            continue
        cost, saving = memory.job_costs.get(job.name, 0.0), hourly[job.name] * settings.stop_reserve / HOUR
        if cost + saving >= limit:
            reason = (
                f"{job.name} has cost {cost:.2f}, and up to {saving:.2f} more until its state is saved: it "
                f"stops because of --max-job-cost {limit:g}"
            )
            found.append(StopJob(job.name, run, reason))
    return found


def unknown_jobs(seen: Observation, settings: ScalingSettings) -> list[str]:
    """Return warnings about limits for jobs that do not exist."""
    there = {*seen.runs, *(job.name for job in seen.jobs)}
    known = ", ".join(sorted(there)) or "none"
    return [
        f"--max-job-cost {name}: there is no such job; there are: {known}"
        for name in sorted(set(settings.max_job_costs) - {"*", *there})
    ]
