"""Find keys that are not needed any more, and make events for the log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from adaptdl_elastic.autoscaler.cluster_view import JobView, View
from adaptdl_elastic.autoscaler.coordinator.decision_types import (
    CompareAndSwap,
    CoordinatorSettings,
    DeletePrefix,
)
from adaptdl_elastic.autoscaler.coordinator.job_phase import Condition, Phase
from adaptdl_elastic.autoscaler.coordinator.slots import holding, in_plan
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import Plan


def collect(
    view: View, job: JobView, condition: Condition, keys: Keys
) -> list[CompareAndSwap | DeletePrefix]:
    """Return what deletes a job's keys that are not needed any more: of generations, and of nodes that left.

    What a node held is kept as long as the newest plan waits for it: a later leader, and an agent that has
    just come, have only this record to tell that its replicas are gone.
    """
    if job.plan is None:
        return []
    plan, agents = job.plan.record, view.agents(job.job)
    needed = {leaver.generation for leaver in holding(view, job)}
    oldest = plan.generation - 2
    if condition.phase is Phase.OVER and not agents:
        oldest = plan.generation + 1
    else:
        needed |= {leaver.generation for leaver in plan.leaving}
    stays = {*agents, *(one.node for one in plan.leaving), *(one.node for one in plan.placements)}
    return [
        *(
            DeletePrefix(keys.generation(job.job, generation))
            for generation in sorted(job.generations)
            if generation < oldest and generation not in needed
        ),
        *(
            CompareAndSwap(key(job.job, node), None, revision)
            for node, seen in job.held.items()
            if node not in stays
            and max(seen.record.generations) < max(oldest, 0)
            and not seen.record.generations & needed
            for key, revision in ((keys.held, seen.revision), (keys.left, job.left.get(node)))
            if revision
        ),
    ]


def forget_ended(
    view: View, conditions: Mapping[str, Condition], keys: Keys, settings: CoordinatorSettings
) -> list[CompareAndSwap | DeletePrefix]:
    """Return what deletes the records of jobs that have ended, except for the last `keep_ended`.

    A submission outlives the other records of its job. How the job ended is written before they are deleted,
    so that the submission does not look like one that has not begun.
    """
    over = [
        (job.status.revision, name)
        for name, condition in conditions.items()
        if condition.phase is Phase.OVER
        and (job := view.jobs[name]).status is not None
        and not view.agents(name)
    ]
    actions: list[CompareAndSwap | DeletePrefix] = []
    for _, name in sorted(over)[: max(0, len(over) - settings.keep_ended)]:
        status = view.jobs[name].status_now
        actions.append(DeletePrefix(keys.outcome(name)))  # of an earlier run
        if status is not None and name in view.submitted:
            outcome = replace(status, failures=())
            actions.append(CompareAndSwap(keys.outcome(name, "status"), outcome, 0))
        actions += [DeletePrefix(keys.job(name)), DeletePrefix(keys.reports(name))]
    return actions


def plan_event(plan: Plan) -> dict[str, Any]:
    """Return the event about a plan."""
    return {
        "job": plan.job,
        "generation": plan.generation,
        "replicas": plan.replicas,
        "nodes": plan.nodes,
        "placements": in_plan(plan),
        "cause": plan.cause.value,
        "transition": plan.transition.value,
        "reason": plan.reason,
        "restarts": plan.restarts,
        "predicted_goodput": plan.predicted_goodput,
    }


def prediction_event(job: JobView, error: float) -> dict[str, Any]:
    """Return the event about the predicted and the measured goodput of a job."""
    hints = job.hints.record if job.hints else None
    plan = job.plan.record if job.plan else None
    return {
        "job": job.job,
        "generation": plan.generation if plan else None,
        "predicted": (plan.predicted_goodput if plan else None) or (hints and hints.predicted_goodput),
        "measured": hints.goodput if hints else None,
        "error": error,
    }
