"""Derive a job's status from the view alone, so that every leader reports the same."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import replace

from adaptdl_elastic.autoscaler.cluster_view import JobView, View
from adaptdl_elastic.autoscaler.coordinator import failure_owner
from adaptdl_elastic.autoscaler.coordinator import job_phase as jobs
from adaptdl_elastic.autoscaler.coordinator.decision_types import CoordinatorSettings
from adaptdl_elastic.autoscaler.coordinator.job_phase import Condition, Phase
from adaptdl_elastic.autoscaler.coordinator.slots import Ledger, Room, holding, smallest
from adaptdl_elastic.rendezvous.schema.records import (
    MOST_NAMED,
    Cause,
    JobSpec,
    JobState,
    JobStatus,
    Plan,
)
from adaptdl_elastic.rendezvous.text import pluralize

MAX_PAUSES = 5
WAITED_STEP = 60.0
"""Seconds of waiting after which the status is written again, and so what a change of leader may lose."""
LONGEST = 1e7
"""Longest wait or pause, in seconds; a longer one in the store counts as this long."""
_MOST_WRONG = 1e6  # largest measured / predicted - 1; beyond it the prediction is invalid
_PLANNED = (Cause.POLICY, Cause.MANUAL, Cause.JOIN, Cause.DRAIN)


def restarts_after_failure(view: View, job: JobView, plan: Plan, settings: CoordinatorSettings) -> int:
    """Return the number of restarts if the failed generation `plan` is followed by another."""
    before = 0 if jobs.refilled(view, job, plan, settings) else jobs.restarts_counted(view, job, plan)
    return before + (not jobs.killed_after_progress(job, plan))


def exhausted(view: View, job: JobView, condition: Condition, settings: CoordinatorSettings) -> bool:
    """Return whether a failed job may not be restarted any more."""
    if condition.phase is not Phase.BROKEN or condition.health.lost or condition.plan is None:
        return False
    if not condition.health.failed:
        return False  # newcomers that failed beside the running training do not count
    assert job.spec is not None
    if failure_owner.owner_of(view, job, condition.plan, settings.refill_after) is not None:
        return False
    if failure_owner.is_final(job, condition.plan):
        return True
    if failure_owner.repetition(job, condition.plan, settings.refill_after):
        return True
    if restarts_after_failure(view, job, condition.plan, settings) <= job.spec.record.max_restarts:
        return False
    return view.now >= loss_known_at(job, condition.plan, settings)


def loss_known_at(job: JobView, plan: Plan, settings: CoordinatorSettings) -> float:
    """Return when it will be known whether a node was lost, on the view's clock; 0.0 if none can have been.

    Replicas that lose a peer fail before the lease of the peer's node runs out. The loss of a node does not
    count against the restart budget. So a job without a restart left waits until that lease has run out.
    """
    generation = jobs.failed_generation(job, plan)
    failures = jobs.failures(job, generation)
    if not failures or not all(failure.lost_peer for failure in failures):
        return 0.0
    nodes = {one.node for one in plan.leaving if one.generation == generation}
    if generation == plan.generation:
        nodes = {one.node for one in plan.placements}
    if all((generation, node) in job.ended for node in nodes):
        return 0.0
    return jobs.failed_at(job, generation) + settings.node_ttl + settings.grace


def describe(
    view: View,
    job: JobView,
    condition: Condition,
    settings: CoordinatorSettings,
    waits_for: str = "",
    waits_since: float | None = None,
) -> JobStatus | None:
    """Return the status that a job should show now; None if there is nothing to report.

    Args:
        view: the cluster.
        job: the job.
        condition: its condition.
        settings: the coordinator's settings.
        waits_for: what the job waits for, if that is known.
        waits_since: when its wait for replicas began, by the view's clock.
    """
    if job.spec is None or condition.phase is Phase.OVER:
        return None
    spec = job.spec.record
    old = job.status_now
    plan = condition.plan
    base = old or JobStatus(job=spec.job, run=spec.run, state=JobState.PENDING)
    state, reason, exit_code = _state(view, job, condition, settings, waits_for)
    waited = 0.0 if waits_since is None else steps_waited(view.now, waits_since) * WAITED_STEP
    ran_on = sorted({*base.ran_on, *(node for _, node in job.running)})[:MOST_NAMED]
    status = replace(
        base, state=state, reason=reason, exit_code=exit_code, waited=waited, ran_on=tuple(ran_on)
    )
    if plan is not None:
        status = _of_plan(job, plan, status, base)
        if exhausted(view, job, condition, settings):
            status = replace(status, restarts_used=plan.restarts)
    if status.started is None and plan is not None and plan.placements:
        status = replace(status, started=view.wall)
    if state.ended:
        status = replace(status, ended=view.wall)
    if state is JobState.STOPPED:
        unsaved = _unsaved(job, plan)
        if unsaved or jobs.uses_library(job):
            reason = f"{reason}; {_what_is_saved(job, unsaved)}"
        status = replace(status, unsaved=unsaved, reason=reason)
    return replace(status, updated=view.wall)


def _unsaved(job: JobView, plan: Plan | None) -> str:
    """Return why the generations that a stop has ended could not save; "" if they could."""
    ended = {plan.generation, *(one.generation for one in plan.leaving)} if plan else set()
    return next((s.record.unsaved for (g, _), s in job.ended.items() if g in ended and s.record.unsaved), "")


def _what_is_saved(job: JobView, unsaved: str) -> str:
    """Return text for users: the step that is saved, and why no later one is."""
    newest = job.checkpoint.record if job.checkpoint else None
    what = "no checkpoint is saved" if newest is None else f"step {newest.step} is saved"
    return f"{what}{', and no later one' if newest and unsaved else ''}{f': {unsaved}' if unsaved else ''}"


def left_alone(view: View, job: JobView, why: str) -> JobStatus | None:
    """Return the status of a job that could not be decided; None if it has that status, or has ended."""
    if job.spec is None:
        return None
    spec = job.spec.record
    old = job.status_now
    if old is not None and old.state.ended:
        return None
    plan = jobs.this_run(job)
    state = JobState.RUNNING if plan is not None and plan.placements else JobState.PENDING
    base = old or JobStatus(job=spec.job, run=spec.run, state=state)
    reason = f"keeps what it has, because nothing can be decided about it: {why}"
    return (
        None if old is not None and old.reason == reason else replace(base, reason=reason, updated=view.wall)
    )


def waited(job: JobView) -> float:
    """Return the seconds that the present run is known to have been without replicas."""
    status = job.status_now
    if status is None:
        return 0.0
    return min(max(0.0, status.waited), LONGEST) if status.state is JobState.PENDING else 0.0


def steps_waited(now: float, since: float) -> int:
    """Return how many steps of `WAITED_STEP` have passed between `since` and `now`.

    A rounded quotient may be too small by one. This is corrected, so the next step always ends after `now`.
    """
    steps = int((now - since) // WAITED_STEP)
    return steps + (since + (steps + 1) * WAITED_STEP <= now)


def waiting_since(
    view: View, conditions: Mapping[str, Condition], known: Mapping[str, float]
) -> dict[str, float]:
    """Return, for each job without replicas, when its wait began, by the view's clock.

    Use the time in `known` if the job is there. Otherwise subtract the wait in the job's status from now.
    """
    return {
        name: known[name] if name in known else view.now - waited(view.jobs[name])
        for name, condition in conditions.items()
        if condition.phase is Phase.EMPTY
    }


def differs(status: JobStatus, old: JobStatus | None) -> bool:
    """Return whether the new status differs in more than its time."""
    return old is None or replace(status, updated=old.updated) != old


def _state(
    view: View, job: JobView, condition: Condition, settings: CoordinatorSettings, waits_for: str
) -> tuple[JobState, str, int | None]:
    plan, phase, health = condition.plan, condition.phase, condition.health
    if phase is Phase.FINISHED:
        return JobState.DONE, "every replica ended well", 0
    if phase is Phase.LEFT:
        return JobState.STOPPED, "its replicas were stopped from outside", 143
    if exhausted(view, job, condition, settings):
        assert plan is not None
        return _given_up(job, plan, settings)
    if jobs.stop_requested(job):
        if phase is Phase.EMPTY and not holding(view, job):
            return JobState.STOPPED, "stopped as asked", 143
        return JobState.STOPPING, "a person asked for it", None
    if phase is Phase.EMPTY:
        return JobState.PENDING, waits_for or "waits for a decision", None
    assert plan is not None
    if waits_for:
        return JobState.RUNNING, waits_for, None
    if phase is Phase.CHANGING and health.missing:
        return JobState.RUNNING, f"has not heard from {', '.join(health.missing)} for a moment", None
    more = [why for why in failure_owner.avoided(view, job) if why not in plan.reason]
    return JobState.RUNNING, "; ".join([plan.reason, *more]), None


def _given_up(job: JobView, plan: Plan, settings: CoordinatorSettings) -> tuple[JobState, str, int]:
    assert job.spec is not None
    generation = jobs.failed_generation(job, plan)
    found = jobs.failures(job, generation)
    what = f": rank {found[0].rank}: {found[0].message or found[0].exit_code}" if found else ""
    allowed = job.spec.record.max_restarts
    text = f"failed after {plan.restarts} of {allowed} restarts{what}"
    if when := failure_owner.repetition(job, plan, settings.refill_after):
        text = f"failed twice in the same way {when}{what}"
    if failure_owner.is_final(job, plan):
        text = f"failed, and a restart would not help{what}"
    return JobState.FAILED, text, jobs.root_exit_code(job, generation)


def _of_plan(job: JobView, plan: Plan, status: JobStatus, old: JobStatus) -> JobStatus:
    """Return the status with the fields that belong to the current generation."""
    new = old.generation != plan.generation
    last_pause, pauses = (None if new else old.last_pause), old.pauses
    if last_pause is None and plan.placements and plan.generation > plan.first:
        last_pause = jobs.pause(job, plan)
        if last_pause is not None and plan.cause in _PLANNED:
            pauses = (*pauses, last_pause)[-MAX_PAUSES:]
    # Search the plan's generation and the two before it. As long as a change in place has not been made,
    # failures are reported for an earlier generation than the plan's.
    recent = (
        jobs.failures(job, generation) for generation in range(plan.generation, plan.generation - 3, -1)
    )
    found = next((failures for failures in recent if failures), ())
    return replace(
        status,
        generation=plan.generation,
        restarts_used=plan.restarts,
        failures=found or old.failures,
        last_pause=last_pause,
        pauses=pauses,
        predicted_goodput=plan.predicted_goodput,
        prediction_error=_error(job, plan, None if new else old.prediction_error),
    )


def _error(job: JobView, plan: Plan, old: float | None) -> float | None:
    """Return measured / predicted - 1 of this generation; small changes keep the old value."""
    hints = job.hints.record if job.hints else None
    if hints is None or hints.generation != plan.generation or not hints.goodput:
        return old
    predicted = plan.predicted_goodput or hints.predicted_goodput
    if not predicted or predicted <= 0:
        return old
    ratio = hints.goodput / predicted
    error = round(min(ratio, _MOST_WRONG) - 1, 3) if math.isfinite(ratio) else _MOST_WRONG
    return error if old is None or abs(error - old) >= 0.05 else old


def typical_pause(job: JobView) -> float | None:
    """Return the median seconds of the job's last planned changes; None before the first."""
    status = job.status_now
    if status is None or not status.pauses:
        return None
    return min(max(0.0, float(statistics.median(status.pauses))), LONGEST)


# Why a job waits

ITS_TURN = "waits for its turn"


def impossible(spec: JobSpec) -> str | None:
    """Return what is wrong with bounds that no cluster can meet, or None."""
    if spec.min_replicas > spec.max_replicas:
        return f"min_replicas {spec.min_replicas} is more than max_replicas {spec.max_replicas}"
    if spec.min_nodes > spec.max_nodes:
        return f"min_nodes {spec.min_nodes} is more than max_nodes {spec.max_nodes}"
    if spec.min_nodes > spec.max_replicas:
        return f"min_nodes {spec.min_nodes} is more than max_replicas {spec.max_replicas}"
    return None


def why_pending(spec: JobSpec, places: Mapping[str, Room], free: Mapping[str, Room], ledger: Ledger) -> str:
    """Return why a job has no replicas, with the numbers that show what would help."""
    wrong = impossible(spec)
    if wrong is not None:
        return f"can never run: {wrong}; submit it with other bounds"
    need = f"{pluralize(spec.min_replicas, 'replica')} on {pluralize(spec.min_nodes, 'node')}"
    if not places:
        drained = f"drained: {', '.join(ledger.drained)}" if ledger.drained else ""
        return f"waits for nodes: needs at least {need}, {drained or 'none is registered for this job'}"
    least = smallest(spec, places)
    if least is None:
        room = sum(place.most for place in places.values())
        return (
            f"waits for nodes: needs at least {need}, registered: "
            f"{pluralize(len(places), 'node')} with {pluralize(room, 'slot')}"
        )
    if smallest(spec, free) is None:
        room = sum(place.most for place in free.values())
        others = sum(ledger.capacity.get(n, 0) - ledger.free_for(spec.job, n) for n in places)
        need = f"{pluralize(sum(least.values()), 'replica')} on {pluralize(len(least), 'node')}"
        return f"waits for slots: needs {need}, {room} free, other jobs have {others}"
    return ITS_TURN
