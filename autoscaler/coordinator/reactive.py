"""Handle what cannot wait for the policy, job by job: stops, failures, lost nodes, drains, late nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from adaptdl_elastic.autoscaler.cluster_view import JobView
from adaptdl_elastic.autoscaler.coordinator import failure_owner, survivors
from adaptdl_elastic.autoscaler.coordinator import job_phase as jobs
from adaptdl_elastic.autoscaler.coordinator.decision_builder import DecisionBuilder
from adaptdl_elastic.autoscaler.coordinator.job_phase import Condition, JobChange, Phase
from adaptdl_elastic.autoscaler.coordinator.slots import in_plan, nearest, rooms
from adaptdl_elastic.autoscaler.coordinator.status import (
    exhausted,
    impossible,
    loss_known_at,
    restarts_after_failure,
)
from adaptdl_elastic.autoscaler.coordinator.survivors import Losses
from adaptdl_elastic.protocol.channel import CAN_NOT_JOIN
from adaptdl_elastic.rendezvous.schema.records import (
    CHANGED_CODE,
    Cause,
    Failure,
    Plan,
    SizeLimit,
    Transition,
)
from adaptdl_elastic.rendezvous.text import pluralize

SWITCH_WAIT = 10.0
"""Seconds that other plans wait for replicas that may be switching in place."""


def see_to(draft: DecisionBuilder, job: JobView, condition: Condition) -> None:
    """Write a plan if something about this job cannot wait for the policy."""
    if condition.phase in (Phase.UNKNOWN, Phase.OVER, Phase.FINISHED, Phase.LEFT, Phase.EMPTY):
        return
    assert condition.plan is not None
    if condition.health.recovers is not None:
        _recover(draft, job, condition, condition.plan, condition.health.recovers)
    elif (
        condition.plan.transition is Transition.RECOVER
        and condition.phase is Phase.CHANGING
        and condition.health.starting
    ):
        # all other changes wait for the recovery, since no replica could save now
        draft.wake(condition.health.settled_at)
        _late_recovery(draft, job, condition.plan)
    elif condition.health.broken and not (condition.health.failed or condition.health.lost):
        # who lives is not known yet: until the survivors have another generation they cannot save
        draft.wake(condition.health.settled_at)
    elif _is_switching(draft, job, condition, condition.plan):
        return
    elif jobs.stop_requested(job):
        save = _can_save(draft, job, condition, condition.plan)
        how = Transition.RESTART if save else Transition.ABORT
        draft.publish(job, JobChange({}, Cause.STOP, how, "a person asked for it"))
    elif condition.phase is Phase.BROKEN:
        _mend(draft, job, condition, condition.plan)
    else:
        draft.wake(condition.health.settled_at)
        if _all_left(draft, job, condition, condition.plan):
            return
        if _left_before_it_began(draft, job, condition, condition.plan):
            return
        if _drain(draft, job, condition, condition.plan):
            return
        if condition.phase is Phase.STEADY:
            _by_hand(draft, job, condition.plan)
        else:
            _late(draft, job, condition, condition.plan)


def _is_switching(draft: DecisionBuilder, job: JobView, condition: Condition, plan: Plan) -> bool:
    """Return whether replicas may be about to switch in place, so that other plans wait for a moment.

    At another plan agents withdraw the change until they have heard that a replica has switched. Replicas in
    the middle of the switch would lose each other, and could not save.
    """
    starting, inplace = set(condition.health.starting), plan.transition is Transition.INPLACE
    if condition.phase is not Phase.CHANGING or not inplace or not starting or condition.health.stopped:
        return False
    assert job.plan is not None
    # newcomers that have joined were ready
    ready = [seen.seen for (g, _), seen in job.ready.items() if g == plan.generation]
    ready += [seen.seen for (g, _), seen in job.running.items() if g == plan.generation]
    due = max(job.plan.seen, *ready, 0.0) + SWITCH_WAIT
    if _awaited(job, plan, starting) or draft.view.now >= due:
        return False
    draft.wake(min(due, condition.health.settled_at))
    return True


def _can_save(draft: DecisionBuilder, job: JobView, condition: Condition, plan: Plan) -> bool:
    """Return whether the replicas that train, or leave, can save: no node of theirs has failed or is lost."""
    lost = condition.health.lost
    if condition.health.failed or not lost:
        return not condition.health.failed
    return _still_saves(draft, job, plan) and not any(one.node in lost for one in plan.leaving)


def _mend(draft: DecisionBuilder, job: JobView, condition: Condition, plan: Plan) -> None:
    """Write a plan after replicas failed or nodes vanished."""
    lost, beyond = condition.health.lost, survivors.describe_beyond(condition.health.beyond)
    if lost:
        restarts = jobs.restarts_counted(draft.view, job, plan)
        why = f"lost {', '.join(lost)}{beyond}"
        step = plan.failed_step
        if _can_save(draft, job, condition, plan):
            draft.replan(job, plan, plan.cause, Transition.RESTART, why)  # the lost had begun nothing
            return
        draft.replan(job, plan, Cause.NODE_LOST, Transition.ABORT, why, restarts, failed_step=step)
        return
    if not condition.health.failed:
        _withdraw(draft, job, condition, plan)
        return
    if exhausted(draft.view, job, condition, draft.settings):
        return  # the job's status ends the job: it needs no plan
    generation = jobs.failed_generation(job, plan)
    heard_by = jobs.failed_at(job, generation) + draft.settings.silence
    if draft.view.now < heard_by and loss_known_at(job, plan, draft.settings):
        # other replicas are about to report why these lost a peer
        draft.wake(heard_by)
        draft.notes[job.job].waits_for = "replicas lost a peer; waits to know why"
        return
    lived = draft.settings.refill_after
    kind = failure_owner.kind_to_remember(job, generation, lived)
    owner = failure_owner.owner_of(draft.view, job, plan, lived)
    if owner is not None:
        what = jobs.failures(job, generation)[0].message
        draft.leave_out(job, owner.nodes, what)
        names = f"without {', '.join(owner.nodes)}" if owner.nodes else "tries this size again"
        why = owner.limit.reason if owner.limit else f"{names}: {what}"
        limit = draft.limit(job, owner.limit)
        draft.replan(job, plan, Cause.REPLICA_LOST, Transition.ABORT, why, failed_as=kind, limit=limit)
        return
    restarts = restarts_after_failure(draft.view, job, plan, draft.settings)
    assert job.spec is not None
    most = job.spec.record.max_restarts
    if restarts > most:
        draft.wake(loss_known_at(job, plan, draft.settings))
        draft.notes[job.job].waits_for = "replicas lost a peer; waits to know whether a node is lost"
        return
    not_before = jobs.failed_at(job, generation) + jobs.pause_before_restart(restarts, draft.settings)
    found = jobs.failures(job, generation)
    what = (
        f"rank {found[0].rank} failed: {found[0].message or found[0].exit_code}"
        if found
        else "a replica was killed"
    )
    what += beyond
    if draft.view.now < not_before:
        draft.wake(not_before)
        draft.notes[job.job].waits_for = f"{what}; restart {restarts} follows after a pause"
        return
    step = job.checkpoint.record.step if job.checkpoint else 0
    if jobs.killed_after_progress(job, plan):
        draft.replan(job, plan, Cause.REPLICA_LOST, Transition.ABORT, what, restarts, failed_step=step)
        return
    why = f"{what} (restart {restarts} of {most})"
    draft.replan(job, plan, Cause.FAILURE, Transition.ABORT, why, restarts, generation, step, kind)


def _recover(draft: DecisionBuilder, job: JobView, condition: Condition, plan: Plan, losses: Losses) -> None:
    """Let the survivors go on in their processes without the dead."""
    lost = condition.health.lost
    joining = draft.view.now - condition.health.started_at <= draft.settings.joined
    limit = _blame(draft, job, plan, {} if lost else survivors.newcomers(job, plan, losses), joining)
    cause = Cause.NODE_LOST if lost else Cause.REPLICA_LOST
    why = survivors.describe(job, losses, lost)
    found = {one.node: one.replicas for one in losses.survivors}
    restarts = jobs.restarts_counted(draft.view, job, plan)
    change = JobChange(found, cause, Transition.RECOVER, why, restarts, placements=losses.survivors)
    draft.publish(job, replace(change, limit=limit, groups=losses.groups))


def _late_recovery(draft: DecisionBuilder, job: JobView, plan: Plan) -> None:
    """Restart from the last checkpoint if the survivors have not gone on in time."""
    assert job.plan is not None
    assert job.spec is not None
    timeout = job.spec.record.rescale_timeout
    due = job.plan.seen + timeout
    if draft.view.now < due:
        draft.wake(due)
        return
    why = f"the survivors did not go on within {timeout:g} s"
    draft.replan(job, plan, plan.cause, Transition.ABORT, why)


def _withdraw(draft: DecisionBuilder, job: JobView, condition: Condition, plan: Plan) -> None:
    """Take back a change whose newcomers failed: it is their nodes' failure, on other nodes that of the size.

    Newcomers that say that they cannot join in place make later changes of this run restarts.
    """
    ended = {node: job.ended[plan.generation, node].record for node in condition.health.undone}
    found = {node: one.failure for node, one in ended.items() if one.failure and one.failure.message}
    said = next((one.message for one in found.values()), "a newcomer ended")
    if any(one.exit_code == CAN_NOT_JOIN for one in found.values()):
        draft.restart_only |= {plan.run}
        found = {}
    failed = {node: one for node, one in found.items() if one.exit_code or one.kind}
    limit = _blame(draft, job, plan, failed, joining=True)
    _take_back(draft, job, plan, f"a change in place was taken back: {said}", limit)


def _blame(
    draft: DecisionBuilder, job: JobView, plan: Plan, failed: Mapping[str, Failure], joining: bool
) -> SizeLimit | None:
    """Leave out nodes whose newcomers failed; return the limit of the size if older replicas run there.

    Changed code is no failure: no plan puts replicas on a node while its registration says so.

    Args:
        draft: the decision.
        job: the job.
        plan: its plan, a change in place.
        failed: the failures of newcomers by node.
        joining: they had joined a moment ago. Later accidents have nothing to do with joining.
    """
    failed = {node: one for node, one in failed.items() if one.kind != CHANGED_CODE}
    sure = {node for node, one in failed.items() if not jobs.accidental(one)}
    blamed, before = sure or set(failed if joining else ()), survivors.replicas_before(plan)
    if not blamed:
        return None
    what, fresh = failed[min(blamed)].message, blamed - set(before)
    draft.leave_out(job, fresh, what, bool(sure))
    limit = failure_owner.limited_to(job, sum(before.values()), what)
    return None if fresh else draft.limit(job, limit, bool(sure))


def _take_back(
    draft: DecisionBuilder, job: JobView, plan: Plan, why: str, limit: SizeLimit | None = None
) -> None:
    """Continue the generation that a change in place has not left yet, under a new number."""
    was = survivors.replicas_before(plan)
    if was and set(was) <= set(draft.view.agents(job.job)) and was != in_plan(plan):
        draft.publish(job, JobChange(was, plan.cause, Transition.INPLACE, why, limit=limit))
    else:
        draft.replan(job, plan, plan.cause, Transition.RESTART, why, limit=limit)


def _all_left(draft: DecisionBuilder, job: JobView, condition: Condition, plan: Plan) -> bool:
    """Plan again after all replicas have stopped because nodes were drained; return whether they have.

    Where no node was drained, or none stays that could run it, the job was stopped (`Phase.LEFT`), as soon as
    the replicas of the generation before have saved.
    """
    left = (*condition.health.stopped, *condition.health.done)
    all_left = bool(condition.health.stopped) and len(left) == len(plan.placements)
    if condition.phase is not Phase.CHANGING or not all_left:
        return False
    if jobs.others_take_over(draft.view, job, plan):
        draft.replan(job, plan, Cause.DRAIN, Transition.RESTART, f"{', '.join(left)} left")
    return True


def _left_before_it_began(draft: DecisionBuilder, job: JobView, condition: Condition, plan: Plan) -> bool:
    """Plan without nodes that left a generation before starting its processes; return whether one did.

    The replicas of the other nodes would wait for the missing ones without a limit. That generation has not
    trained anything. Replicas of an earlier generation that are still saving are not killed.
    """
    health, starts = condition.health, plan.transition in (Transition.RESTART, Transition.ABORT)
    if not starts or not (health.running or health.starting):
        return False
    gone = [node for node in health.stopped if (plan.generation, node) not in job.running]
    if not gone:
        return False
    how = Transition.RESTART if _still_saves(draft, job, plan) else Transition.ABORT
    why = f"{', '.join(gone)} left before it had started"
    return draft.replan(job, plan, Cause.DRAIN, how, why)


def _still_saves(draft: DecisionBuilder, job: JobView, plan: Plan) -> bool:
    """Return whether replicas of an earlier generation may still save, so that no plan may kill them."""
    return plan.transition is Transition.RESTART and jobs.still_saves(draft.view, job, plan)


def _drain(draft: DecisionBuilder, job: JobView, condition: Condition, plan: Plan) -> bool:
    """Move away from draining nodes; return whether there is one."""
    agents, health = draft.view.agents(job.job), condition.health
    leaving = [
        node
        for node in (*health.running, *health.starting)
        if node in agents and draft.view.draining(agents[node].record)
    ]
    if not leaving:
        return False
    if plan.cause is Cause.DRAIN and plan.transition is Transition.INPLACE and health.starting:
        fresh = set(in_plan(plan)) - set(survivors.replicas_before(plan))
        if fresh and not fresh & {*leaving, *health.stopped}:
            return False  # the newcomers are about to take over from the replicas that leave
    draft.replan(job, plan, Cause.DRAIN, None, f"drains {', '.join(leaving)}")
    return True


def _by_hand(draft: DecisionBuilder, job: JobView, plan: Plan) -> None:
    """Give a job the size that a user asked for if there is room; otherwise the policy is asked."""
    wanted = jobs.requested_replicas(job)
    if wanted is None or wanted == plan.replicas or job.spec is None or impossible(job.spec.record):
        return
    spec, now = job.spec.record, in_plan(plan)
    late = jobs.late_nodes(draft.view, job)
    found = nearest(spec, wanted, rooms(draft.view, job, draft.ledger, late), now)
    if found is not None and sum(found.values()) == wanted:
        why = f"adaptdl scale: {pluralize(wanted, 'replica')}"
        how, step = draft.route(job, found)
        if not draft.insists(job, how):
            draft.publish(job, JobChange(step, Cause.MANUAL, how, why, midway=step != found))


def _late(draft: DecisionBuilder, job: JobView, condition: Condition, plan: Plan) -> None:
    """Plan without nodes that have not started in time, if the others are enough."""
    starting = set(condition.health.starting)
    if not starting or job.plan is None or job.spec is None:
        return
    timeout = job.spec.record.rescale_timeout
    if plan.transition is Transition.INPLACE and not condition.health.running:
        _late_in_place(draft, job, plan, starting, job.plan.seen + timeout, timeout)
        return
    if jobs.still_saves(draft.view, job, plan):
        return  # no node can start yet, and the time limit of the leaving nodes is running
    gone = [s.seen for s in job.ended.values() if s.record.generation < plan.generation]
    due = max([job.plan.seen, *gone]) + timeout
    if draft.view.now < due:
        draft.wake(due)
        return
    if starting == set(in_plan(plan)):
        return  # no node has started: no other plan is better than waiting
    kept = draft.left_out
    draft.leave_out(job, starting, f"it did not start within {timeout:g} s")
    why = f"{', '.join(sorted(starting))} did not start within {timeout:g} s"
    if not draft.replan(job, plan, Cause.NODE_LOST, Transition.ABORT, why, feasible_only=True):
        draft.left_out = kept
        draft.notes[job.job].waits_for = f"{why}, and there is no other node"


def _late_in_place(
    draft: DecisionBuilder, job: JobView, plan: Plan, starting: set[str], due: float, timeout: float
) -> None:
    """Take back a change in place whose newcomers are late, or that does not happen.

    No replica has left the previous generation, so it continues under a new number.
    """
    was, late = survivors.replicas_before(plan), _awaited(job, plan, starting)
    if not late:
        due += timeout  # the newcomers are ready: now the running replicas need time to agree on a step
    if draft.view.now < due:
        draft.wake(due)
        return
    names = f"newcomers on {', '.join(sorted(late))} were not ready" if late else "it did not happen"
    what, limit = f"{names} within {timeout:g} s", None
    draft.leave_out(job, late - set(was), what)
    if not late:
        draft.restart_only |= {plan.run}
    elif late <= set(was):
        limit = draft.limit(job, failure_owner.limited_to(job, sum(was.values()), what))
    _take_back(draft, job, plan, f"a change in place was taken back: {what}", limit)


def _awaited(job: JobView, plan: Plan, starting: set[str]) -> set[str]:
    """Return the nodes whose newcomers are not ready for a change in place."""
    was, ready = survivors.replicas_before(plan), {node for (g, node) in job.ready if g == plan.generation}
    return {n for n, count in in_plan(plan).items() if n in starting and count > was.get(n, 0)} - ready
