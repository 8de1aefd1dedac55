"""Recognise failures that are repeated before a script's first step, which restarts cannot cure.

A restart helps if a failure was caused by a temporary problem of a machine, a network or a disk. A script
that fails twice at the same line without a step between has a defect. So a job fails at the second of two
such failures, whatever is left of its restart budget.

An error may also say itself that no restart will help (`Failure.final`), as when one sample does not fit into
memory. Then the job fails at once.

Agents report the kind of a failure (`Failure.kind`). Deaths by SIGKILL, and errors that only report the loss
of a peer, have none, since two of them may have different causes.
"""

from __future__ import annotations

from adaptdl_elastic.autoscaler.cluster_view import JobView
from adaptdl_elastic.autoscaler.coordinator.job_phase import failed_generation, failures
from adaptdl_elastic.rendezvous.schema.records import Cause, Plan


def kind_to_remember(job: JobView, generation: int, lived: float) -> str:
    """Return the kind of a generation's failure, or "" if the generation has made a step.

    Args:
        job: the job.
        generation: the generation that failed.
        lived: seconds after which a generation that reports no steps counts as having made one.
    """
    if not _before_the_first_step(job, generation, lived):
        return ""
    return next((failure.kind for failure in failures(job, generation) if failure.kind), "")


def kind_to_keep(job: JobView, plan: Plan) -> str:
    """Return `failed_as` of the plan that follows `plan`, when `plan` is replaced without having failed.

    It stays as it is until a step has been made in the generation of `plan`, and is empty after that.
    """
    return "" if _has_stepped(job, plan.generation) else plan.failed_as


def is_final(job: JobView, plan: Plan) -> bool:
    """Return whether the generation of `plan` failed with an error that says that restarts do not help."""
    return any(failure.final for failure in failures(job, failed_generation(job, plan)))


def is_repeated(job: JobView, plan: Plan, lived: float) -> bool:
    """Return whether the generation of `plan` failed like the one before, both before their first step.

    Reports of several nodes may arrive in another order each time, so all failures of a generation count.
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
    """Return whether a generation failed before its first step, as far as is known.

    Survivors that failed before they had formed the generation have made their steps in an earlier one. A
    script without the library reports no steps. Then the generation's life on a node counts, measured by that
    node's clock.
    """
    if _has_stepped(job, generation):
        return False
    running = {node: seen.record for (g, node), seen in job.running.items() if g == generation}
    ended = {node: seen.record for (g, node), seen in job.ended.items() if g == generation}
    if any(record.last_step is not None for node, record in ended.items() if node not in running):
        return False
    if any(record.library for record in running.values()):
        return True
    return all(record.time - running[node].time < lived for node, record in ended.items() if node in running)
