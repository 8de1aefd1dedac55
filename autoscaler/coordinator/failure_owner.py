"""Decide whose failure it is: a node's, a size's or the script's.

An error of a kind (`Failure.kind`) is recognised when it comes again. Deaths by SIGKILL, errors that only
report the loss of a peer, and errors that may be temporary have no kind. A plan has in `failed_as` how the
last failure was recognised: the kind if its generation had made no step, else the number of the last step,
the kind and the message, whose numbers and addresses do not count. `failed_on` and `failed_size` say where.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from adaptdl_elastic.autoscaler.cluster_view import JobView, View
from adaptdl_elastic.autoscaler.coordinator import survivors
from adaptdl_elastic.autoscaler.coordinator.job_phase import (
    failed_generation,
    failures,
    late_nodes,
    requested_replicas,
)
from adaptdl_elastic.autoscaler.coordinator.slots import named, nearest, rooms
from adaptdl_elastic.rendezvous.schema.records import (
    CHANGED_CODE,
    Cause,
    Failure,
    Leaving,
    Outcome,
    Plan,
    SizeLimit,
    Transition,
)
from adaptdl_elastic.rendezvous.text import pluralize

_AFTER = "after step "
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")


@dataclass(frozen=True)
class Owner:
    """Of whom a failure is that does not count against the script."""

    nodes: tuple[str, ...] = ()  # to be left out
    limit: SizeLimit | None = None  # of the size
    again: bool = False  # the size is tried once more before it is limited


def owner_of(view: View, job: JobView, plan: Plan, lived: float) -> Owner | None:
    """Return whose failure ended the generation of `plan`; None: the script's. The first row counts.

    | failure | owner |
    |---|---|
    | first step with a larger batch size than one that worked | that batch size |
    | only nodes without which this run has made steps, others are there | these nodes |
    | nodes have other files than the run, others can take their place (else it is the script's) | nodes |
    | before the first step of the run, others can take their place, not known from another node | nodes |
    | more replicas than have made steps: final, before the first step, or of a known kind | that size |
    | there, the first of all errors | size, which is tried once more |
    | final, or the second of a kind on the same nodes, others can take their place | these nodes |
    | all others | the script |

    A node that was left out has to prove itself again. A failure of all nodes is not one of nodes. Sizes at
    which an error of the kind is known have not worked.

    Args:
        view: the cluster.
        job: the job.
        plan: its plan, whose generation has failed.
        lived: seconds after which a generation that reports no steps counts as having made one.
    """
    generation = failed_generation(job, plan)
    causes = failures(job, generation)
    found = _by_node(job, generation)
    if not causes or not found:
        return None
    if (limit := _batch_limit(job, causes[0])) is not None:
        return Owner(limit=limit)
    size = _replicas(job, plan, generation)
    early = _before_the_first_step(job, generation, lived)
    kinds = {one.kind for one in found.values() if one.kind}
    known, final = _kind(plan.failed_as) in kinds, any(one.final for one in found.values())
    sizes, nodes_before = worked(job, plan, without=generation)
    trusted = set(nodes_before) - {one.node for one in job.left_out if one.times}
    nodes = tuple(sorted(found))
    some = len(nodes) < len(size) or len(nodes) == 1
    others = _others_can(view, job, nodes)
    here = others or trusted & set(view.agents(job.job))  # else nothing could run, now and later
    if trusted and here and not trusted & {*nodes, *(plan.failed_on if known else ())}:
        return Owner(nodes)
    if CHANGED_CODE in kinds:
        return Owner(nodes) if others else None
    place = some and bool(kinds) and others and not (known and plan.failed_on != nodes)
    if not sizes and early and place:
        return Owner(nodes)
    replicas = min(sum(size.values()), plan.failed_size if known else math.inf)
    smaller = max((one for one in sizes if one < replicas), default=0)
    if smaller and (kinds or final):
        if final or early or known:
            return Owner(limit=limited_to(job, smaller, causes[0].message))
        if not plan.failed_as:
            return Owner(again=True)
    return Owner(nodes) if (known or final) and place else None


def limited_to(job: JobView, replicas: int, message: str) -> SizeLimit:
    """Return the limit of a job that has failed with more than so many replicas."""
    limit = replace(job.limit or SizeLimit(), replicas=replicas)
    return _because(job, limit, pluralize(replicas, "replica"), message)


def _batch_limit(job: JobView, found: Failure) -> SizeLimit | None:
    known, worked = job.limit or SizeLimit(), found.worked_batch
    if not found.kind or worked is None or (known.batch_size is not None and worked >= known.batch_size):
        return None
    return _because(job, replace(known, batch_size=worked), f"batch size {worked}", found.message)


def _because(job: JobView, limit: SizeLimit, most: str, message: str) -> SizeLimit:
    lifts = f"adaptdl scale {job.job} --replicas N lifts this limit"
    why = f"stays at or below {most} ({lifts}): above it the script failed: {message}"
    return replace(limit, reason=why, request=newest_request(job))


def newest_request(job: JobView) -> int:
    """Return the revision of what a user asked for last."""
    return 0 if job.request is None else job.request.revision


def _others_can(view: View, job: JobView, nodes: tuple[str, ...]) -> bool:
    assert job.spec is not None
    spec = job.spec.record
    places = rooms(view, job, None, {*late_nodes(view, job), *nodes})
    return nearest(spec, requested_replicas(job) or spec.min_replicas, places, {}) is not None


def _by_node(job: JobView, generation: int) -> dict[str, Failure]:
    """Return the failures of a generation by node, without those that only report the loss of a peer."""
    return {
        node: seen.record.failure
        for (g, node), seen in job.ended.items()
        if g == generation
        and seen.record.failure is not None
        and seen.record.outcome is Outcome.FAILED
        and not seen.record.failure.lost_peer
    }


def _replicas(job: JobView, plan: Plan, generation: int) -> dict[str, int]:
    """Return the replicas by node of the plan's generation, or of the one that its change follows.

    Survivors of a death that have made no step since then failed at the size that they had before.
    """
    if generation == plan.generation:
        if plan.transition is not Transition.RECOVER or _has_stepped(job, generation):
            return {one.node: one.replicas for one in plan.placements}
        generation = survivors.before(plan)
    if plan.transition is Transition.ABORT:  # some had ended before
        return {}
    return {one.node: one.replicas for one in (*plan.lost, *plan.leaving) if one.generation == generation}


def followed(job: JobView, plan: Plan) -> int:
    """Return the generation that a recovery follows.

    Survivors of an earlier death that have made no step since then still belong to the generation before it.

    Args:
        job: the job.
        plan: the plan before the recovery's.
    """
    still = plan.transition is Transition.RECOVER and not _has_stepped(job, plan.generation)
    return survivors.before(plan) if still else survivors.present(job, plan)[0]


def lost(plan: Plan, base: int, there: Collection[Leaving]) -> tuple[Leaving, ...]:
    """Return the replicas that have ended in the generation `base`, which a recovery follows.

    Args:
        plan: the plan before the recovery's.
        base: the generation.
        there: the replicas that are there.
    """
    return tuple(one for one in (*plan.lost, *named(plan)) if one.generation == base and one not in there)


def avoided(view: View, job: JobView) -> list[str]:
    """Return why a job does without nodes and stays below sizes now: texts for users."""
    late, limit = late_nodes(view, job), job.limit
    found = [one.reason for one in job.left_out if one.node in late]
    return [*found, limit.reason] if limit and (limit.batch_size or view.wall < limit.until) else found


def remembered(job: JobView, plan: Plan | None, way: str | None) -> tuple[str, tuple[str, ...], int]:
    """Return `failed_as`, `failed_on` and `failed_size` of the plan that follows `plan`.

    A failure before the first step is forgotten when a step has been made in the generation of `plan`.

    Args:
        job: the job.
        plan: its plan; None: there is none of this run.
        way: how the generation of `plan` failed; None: it did not.
    """
    if plan is None:
        return way or "", (), 0
    if way is None:
        kept = plan.failed_as.startswith(_AFTER) or not _has_stepped(job, plan.generation)
        return plan.failed_as if kept else "", plan.failed_on, plan.failed_size
    generation = failed_generation(job, plan)
    size = sum(_replicas(job, plan, generation).values())
    same = way and _kind(way) == _kind(plan.failed_as)
    nodes = tuple(sorted(_by_node(job, generation)))
    return way, nodes, min(size, plan.failed_size) if same else size


def worked(job: JobView, plan: Plan, without: int = -1) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the numbers of replicas and the nodes that have made steps in this run, up to `plan`.

    The generation `without` does not count.
    """
    sizes, nodes = set(plan.sizes), set(plan.worked)
    # some of a generation before one that was given up may have ended
    last = plan.generation - 1 if plan.transition is Transition.RESTART else survivors.before(plan)
    for generation in {plan.generation, last} - {without}:
        held = _replicas(job, plan, generation)
        if held and _has_stepped(job, generation):
            sizes.add(sum(held.values()))
            nodes |= set(held)
    return tuple(sorted(sizes)), tuple(sorted(nodes))


def _kind(way: str) -> str:
    return way.split(": ")[1] if way.startswith(_AFTER) else way or "unknown"


def kind_to_remember(job: JobView, generation: int, lived: float) -> str:
    """Return how a generation failed, in the words of `Plan.failed_as`; "" if it may not fail so again.

    Args:
        job: the job.
        generation: the generation that failed.
        lived: seconds after which a generation that reports no steps counts as having made one.
    """
    found = failures(job, generation)
    ways = _ways(found, _before_the_first_step(job, generation, lived))
    known = [f"{_AFTER}?: {_words(one)}" for one in found if one.kind]  # this is no repetition
    return next(iter([*ways, *known]), "")


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


def _ways(found: Iterable[Failure], early: bool) -> list[str]:
    """Return how a generation failed, in all words that `failed_as` may have for it.

    early: the generation failed before its first step.
    """
    known = [one for one in found if one.kind]
    stepped = [one for one in known if one.step is not None]
    return [one.kind for one in known if early] + [f"{_AFTER}{one.step}: {_words(one)}" for one in stepped]


def _words(found: Failure) -> str:
    return f"{found.kind}: {_NUMBER.sub('#', found.message)}"


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
