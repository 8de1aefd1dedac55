"""How a leader makes a job's plan its own, before it decides anything about the job.

Whatever an older leader saw of the plan is stale once this write has gone through, so its own
compare-and-swap fails. Nothing is left to write for a plan that is ours already.
"""

from __future__ import annotations

from dataclasses import replace

from adaptdl_elastic.autoscaler.cluster_view import JobView, View
from adaptdl_elastic.autoscaler.coordinator.decision_types import Action, CompareAndSwap, Say
from adaptdl_elastic.autoscaler.coordinator.slots import holding
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import Cause, JobSpec, Plan, Transition


def fence_off(view: View, job: JobView, keys: Keys, fence: int) -> list[Action]:
    """What to write so that the job's plan is that of the leader with this `fence`; nothing if it is.

    A job that has no plan gets a claim, and so does a new run of a job, over the plan of the run before.
    """
    assert job.spec is not None
    spec, key = job.spec.record, keys.job(job.job, "plan")
    garbage = job.unreadable.get("plan")
    if job.plan is None:
        last = max(job.generations, default=-1)
        claim = _claim(spec, last, fence, view.wall)
        return [CompareAndSwap(key, claim, garbage or 0)]
    plan = job.plan.record
    if garbage is not None:  # the last plan that could be read still stands
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
    """A plan that defines no generation: the run's first will be the one after `last`."""
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
