"""Recognise failures that are repeated, which restarts cannot cure.

A restart helps if a failure was caused by a temporary problem of a machine, a network or a disk. A script has
a defect if it fails twice at the same line without a step between, or twice with the same error after the
same step. So a job fails at the second of two such failures, whatever is left of its restart budget.

An error may also say itself that no restart will help (`Failure.final`), as when one sample does not fit into
memory. Then the job fails at once.

Agents report the kind of a failure (`Failure.kind`). Deaths by SIGKILL, errors that only report the loss of a
peer, and errors that may be temporary have none, since two of them may have different causes.

If a larger size has brought the error, the job goes back to the smaller one that works, and stays there
(`limit_of`).

A plan has in `failed_as` how the generation before it failed. That is the kind if it had made no step, else
the number of the last step, the kind and the message, whose numbers and addresses do not count.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from adaptdl_elastic.autoscaler.cluster_view import JobView
from adaptdl_elastic.autoscaler.coordinator.job_phase import failed_generation, failures
from adaptdl_elastic.rendezvous.schema.records import Cause, Failure, Plan, SizeLimit
from adaptdl_elastic.rendezvous.text import pluralize

_AFTER = "after step "
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")


def kind_to_remember(job: JobView, generation: int, lived: float) -> str:
    """Return how a generation failed, as `failed_as` has it; "" if it may not fail so again.

    Args:
        job: the job.
        generation: the generation that failed.
        lived: seconds after which a generation that reports no steps counts as having made one.
    """
    ways = _ways(failures(job, generation), _before_the_first_step(job, generation, lived))
    return next(iter(ways), "")


def kind_to_keep(job: JobView, plan: Plan) -> str:
    """Return `failed_as` of the plan that follows `plan`, when `plan` is replaced without having failed.

    A failure before the first step is forgotten when a step has been made in the generation of `plan`.
    """
    kept = plan.failed_as.startswith(_AFTER) or not _has_stepped(job, plan.generation)
    return plan.failed_as if kept else ""


def is_final(job: JobView, plan: Plan) -> bool:
    """Return whether the generation of `plan` failed with an error that says that restarts do not help."""
    return any(failure.final for failure in failures(job, failed_generation(job, plan)))


def repetition(job: JobView, plan: Plan, lived: float) -> str:
    """Return at which point the generation of `plan` failed like the one before; "" if it did not.

    Reports of several nodes may arrive in another order each time, so all failures of a generation count.
    """
    before = [plan.failed_as]
    if plan.cause is Cause.FAILURE and plan.failed_as:
        before += _ways(failures(job, plan.generation - 1), not plan.failed_as.startswith(_AFTER))
    generation = failed_generation(job, plan)
    now = _ways(failures(job, generation), _before_the_first_step(job, generation, lived))
    again = next((way for way in now if way in before), "")
    return again.partition(":")[0] if again.startswith(_AFTER) else again and "before its first step"


def last_that_stepped(job: JobView, plan: Plan) -> int:
    """Return the replicas of the last generation of a run, up to that of `plan`, that has made a step."""
    return plan.replicas if _has_stepped(job, plan.generation) else plan.stepped


def limit_of(job: JobView, plan: Plan) -> SizeLimit | None:
    """Return the limit to go back to if a larger size has brought the failure of `plan`; else None.

    An error of the script that is raised in the first step with a larger batch size or with more replicas
    belongs to that size, if the script has made steps with a smaller one. The batch size is tried first. If
    the script fails at the smaller size, too, the error is the script's.
    """
    found = next(iter(failures(job, failed_generation(job, plan))), None)
    if found is None or not found.kind or found.final:
        return None
    known = job.limit or SizeLimit()
    asked = 0 if job.request is None else job.request.revision
    again = f"(adaptdl scale {job.job} --replicas N lifts this limit): above it the script failed"
    if found.worked_batch is not None and (known.batch_size is None or found.worked_batch < known.batch_size):
        why = f"stays at or below batch size {found.worked_batch} {again}: {found.message}"
        return replace(known, batch_size=found.worked_batch, reason=why, request=asked)
    first = plan.generation == failed_generation(job, plan) and not _has_stepped(job, plan.generation)
    if not (first and 0 < plan.stepped < plan.replicas):
        return None
    why = f"stays at or below {pluralize(plan.stepped, 'replica')} {again}: {found.message}"
    return replace(known, replicas=plan.stepped, reason=why, request=asked)


def _ways(found: Iterable[Failure], early: bool) -> list[str]:
    """Return how a generation failed, in all words that `failed_as` may have for it.

    early: the generation failed before its first step.
    """
    known = [one for one in found if one.kind]
    stepped = [one for one in known if one.step is not None]
    return [one.kind for one in known if early] + [
        f"{_AFTER}{one.step}: {one.kind}: {_NUMBER.sub('#', one.message)}" for one in stepped
    ]


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
