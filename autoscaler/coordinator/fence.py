"""Write a job's plan again with the new leader's fence, before anything is decided about the job.

After this write the compare-and-swap of an older leader fails, since its revision of the plan is outdated.
"""

from __future__ import annotations

from dataclasses import replace

from adaptdl_elastic.autoscaler.cluster_view import JobView, View
from adaptdl_elastic.autoscaler.coordinator.decision_types import Action, CompareAndSwap, Say
from adaptdl_elastic.autoscaler.coordinator.slots import holding
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import Cause, JobSpec, Plan, Transition


def fence_off(view: View, job: JobView, keys: Keys, fence: int) -> list[Action]:
    """Return the writes that give the job's plan this `fence`; none if it has it.

    A job without a plan gets a claim. A new run of a job gets a claim over the plan of the previous run.
    """
    assert job.spec is not None
    spec, key = job.spec.record, keys.job(job.job, "plan")
    garbage = job.unreadable.get("plan")
    if job.plan is None:
        last = max(job.generations, default=-1)
        claim = _claim(spec, last, fence, view.wall)
        return [CompareAndSwap(key, claim, garbage or 0)]
    plan = job.plan.record
    if garbage is not None:  # the last valid plan is still in force
        return [CompareAndSwap(key, replace(plan, fence=fence), garbage)]
    if plan.run != spec.run:
        claim = _claim(spec, plan.generation, fence, view.wall)
        claim = replace(claim, leaving=tuple(holding(view, job)))
        said = Say("rerun", {"job": job.job, "run": spec.run})
        return [CompareAndSwap(key, claim, job.plan.revision), said]
    if plan.fence != fence:
        return [CompareAndSwap(key, replace(plan, fence=fence), job.plan.revision)]
    return []


def _claim(spec: JobSpec, last: int, fence: int, wall: float) -> Plan:
    """Return a plan that defines no generation: the run's first generation will be the one after `last`."""
    return Plan(
        job=spec.job,
        run=spec.run,
        generation=last,
        placements=(),
        cause=Cause.START,
        transition=Transition.RESTART,
        reason="no plan yet",
        fence=fence,
        created=wall,
        first=last + 1,
    )
