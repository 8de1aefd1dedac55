"""Failures that come again before a script has made a step: restarting would only repeat them.

A restart helps where a failure came of something that passes: a machine, a network, a disk. A script that
fails at the same line as the time before, and has made no step in between, has a defect. So a job fails at
the second of two such failures, whatever is left of its restart budget.

Agents tell of which kind a failure is (`Failure.kind`). Deaths by SIGKILL and errors that tell only of the
loss of a peer have none: two of them prove nothing.
"""

from __future__ import annotations

from adaptdl_elastic.autoscaler.cluster_view import JobView
from adaptdl_elastic.autoscaler.coordinator.job_phase import failed_generation, failures
from adaptdl_elastic.rendezvous.schema.records import Cause, Plan


def kind_to_remember(job: JobView, generation: int, lived: float) -> str:
    """Return the kind of a generation's failure, or "" if it has made a step.

    Args:
        job: The job.
        generation: The generation that has failed.
        lived: Seconds for which a generation that reports no steps counts as one that has made none.
    """
    if not _before_the_first_step(job, generation, lived):
        return ""
    return next((failure.kind for failure in failures(job, generation) if failure.kind), "")


def kind_to_keep(job: JobView, plan: Plan) -> str:
    """Return what the plan after `plan` has to remember of the failures before, if it follows no failure."""
    return "" if _has_stepped(job, plan.generation) else plan.failed_as


def is_repeated(job: JobView, plan: Plan, lived: float) -> bool:
    """Whether the generation of `plan` has failed as the one before did, both before their first step.

    Agents of several nodes may be heard of in another order each time, so all that failed count.
    """
    before = {plan.failed_as}
    if plan.cause is Cause.FAILURE and plan.failed_as:
        before |= {failure.kind for failure in failures(job, plan.generation - 1)}
    generation = failed_generation(job, plan)
    now = {failure.kind for failure in failures(job, generation)} - {""}
    return bool(now & before) and _before_the_first_step(job, generation, lived)


def _has_stepped(job: JobView, generation: int) -> bool:
    return any(seen.record.first_step is not None for (g, _), seen in job.running.items() if g == generation)


def _before_the_first_step(job: JobView, generation: int, lived: float) -> bool:
    """Whether a generation has failed before its first step, as far as is known.

    A script without the library says nothing of its steps. Both ends of its life on a node are read from the
    clock of that node.
    """
    if _has_stepped(job, generation):
        return False
    running = {node: seen.record for (g, node), seen in job.running.items() if g == generation}
    if any(record.library for record in running.values()):
        return True
    return all(
        seen.record.time - running[node].time < lived
        for (g, node), seen in job.ended.items()
        if g == generation and node in running
    )
