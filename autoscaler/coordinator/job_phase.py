"""Find the phase of one job, and what must happen to it before the policy is asked.

Pure functions of the view. `decide`, which also knows the other jobs, carries out the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from adaptdl_elastic.autoscaler.cluster_view import JobView, View
from adaptdl_elastic.autoscaler.coordinator import survivors
from adaptdl_elastic.autoscaler.coordinator.decision_types import Allocation, CoordinatorSettings
from adaptdl_elastic.autoscaler.coordinator.job_health import (
    Health,
    failed_before,
    health_of,
    is_gone,
    sort_absent,
)
from adaptdl_elastic.autoscaler.coordinator.slots import released
from adaptdl_elastic.protocol.messages import Groups
from adaptdl_elastic.rendezvous.schema.records import (
    Cause,
    Failure,
    LeftOut,
    Outcome,
    Placement,
    Plan,
    Rescale,
    SizeLimit,
    Transition,
)

_FROM_OUTSIDE = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP")  # signals that users and the kernel send


class Phase(str, Enum):
    """The phase of a job.

    UNKNOWN   no specification yet, or the store has lost the newest plan: nothing can be done
    OVER      it has ended, and its status says so
    EMPTY     it has no replicas and may get some
    CHANGING  a plan is published and not all of its nodes have started their replicas
    STEADY    every node of the plan runs its replicas
    BROKEN    replicas failed or vanished: it needs another plan
    FINISHED  every replica ended well
    LEFT      every replica was stopped, but not by the coordinator, and no node was drained or none stays
    """

    UNKNOWN = "unknown"
    OVER = "over"
    EMPTY = "empty"
    CHANGING = "changing"
    STEADY = "steady"
    BROKEN = "broken"
    FINISHED = "finished"
    LEFT = "left"


@dataclass(frozen=True)
class Condition:
    """The result of `condition_of`."""

    phase: Phase
    health: Health = field(default_factory=Health)
    plan: Plan | None = None  # of this run; None: there is none, only a claim, or only another run's plan


@dataclass(frozen=True)
class JobChange:
    """A plan to be written next."""

    allocation: Allocation
    cause: Cause
    transition: Transition
    reason: str
    restarts: int | None = None  # None: as before
    failed: int | None = None
    failed_step: int | None = None
    failed_as: str | None = None
    predicted_goodput: float | None = None
    placements: tuple[Placement, ...] = ()  # (): computed from the allocation
    groups: Groups = ()  # `Plan.groups`
    limit: SizeLimit | None = None  # None: as before
    midway: bool = False  # a step on the way to a target, which remains valid


def this_run(job: JobView) -> Plan | None:
    """Return the plan of the job's present run; None if there is only a claim or another run's plan."""
    if job.plan is None or job.spec is None:
        return None
    plan = job.plan.record
    return plan if plan.run == job.spec.record.run and not plan.claim else None


def size_of(plan: Plan) -> int:
    """Return the replicas that a plan leaves its job with; more than that may run during a drain.

    A move away from draining nodes first runs on old and new nodes together, and does not enlarge the job.
    """
    if plan.cause is not Cause.DRAIN or plan.transition is not Transition.INPLACE:
        return plan.replicas
    before = sum(survivors.replicas_before(plan).values())
    return min(plan.replicas, before) if before else plan.replicas


def stop_requested(job: JobView) -> bool:
    """Return whether a user asked the present run to stop."""
    request = job.request.record if job.request else None
    return bool(request and request.stop and job.spec and request.run in ("", job.spec.record.run))


def resume_requested(job: JobView) -> bool:
    """Return whether a user asked that another run follows the present one, which has ended."""
    request = job.request.record if job.request else None
    return bool(job.over and request and request.resume and job.spec and request.run == job.spec.record.run)


def requested_replicas(job: JobView) -> int | None:
    """Return the number of replicas that a user asked for; None: the policy chooses."""
    request = job.request.record if job.request else None
    if request is None or job.spec is None or request.run not in ("", job.spec.record.run):
        return None
    return request.replicas


def uses_library(job: JobView) -> bool:
    """Return whether the script has said hello in any generation of this run."""
    first = job.plan.record.first if job.plan else 0
    if any(seen.record.library for (g, _), seen in job.running.items() if g >= first):
        return True
    return job.hints is not None and job.hints.record.generation >= first


def condition_of(view: View, job: JobView, settings: CoordinatorSettings) -> Condition:
    """Return the phase of a job, and the reasons for it."""
    if job.spec is None or _lost_its_plan(view, job):
        return Condition(Phase.UNKNOWN)
    plan = this_run(job)
    if job.over:
        return Condition(Phase.OVER, plan=plan)
    if plan is not None and _ended_before(job, plan):
        return Condition(Phase.FINISHED, plan=plan)
    if plan is None or not plan.placements:
        return Condition(Phase.EMPTY, plan=plan)
    health = health_of(view, job, plan, settings)
    phase = _phase(plan, health)
    if phase is Phase.LEFT and (others_take_over(view, job, plan) or still_saves(view, job, plan)):
        phase = Phase.CHANGING
    if phase is Phase.FINISHED and not _leavers_ended(view, job, plan):
        phase = Phase.CHANGING
    if phase is Phase.FINISHED and (unheard := survivors.unheard(job, plan)):
        phase, health = _without_word(view, job, unheard, health, settings)
    if phase is Phase.FINISHED and (failed := survivors.failed_before(job, plan)):
        phase, health = Phase.BROKEN, replace(health, failed=tuple(failed))
    return Condition(phase, health, plan)


def _lost_its_plan(view: View, job: JobView) -> bool:
    """Return whether an agent has dealt with a later plan than the store's, whose data are older ones.

    The agent knows that plan and writes it back, but perhaps after the record of what it holds.
    """
    agents = view.agents(job.job)
    dealt_with = (
        seen.record.acted
        for node, seen in job.held.items()
        if node in agents and agents[node].record.agent == seen.record.agent
    )
    return job.plan is not None and max(dealt_with, default=-1) > job.plan.record.generation


def _leavers_ended(view: View, job: JobView, plan: Plan) -> bool:
    """Return True unless replicas still run that a change in place was to leave out.

    A change that comes when the script ends leaves no replica out: all replicas go on to that end.
    """
    base, inplace = survivors.before(plan), plan.transition is Transition.INPLACE
    those = (one for one in plan.leaving if one.generation == base)
    return not inplace or all(released(view, job, one.node, one.agent, one.generation) for one in those)


def _without_word(
    view: View, job: JobView, unheard: Sequence[Placement], health: Health, settings: CoordinatorSettings
) -> tuple[Phase, Health]:
    """Return the phase of a job that has ended on all nodes, except that `unheard` have not reported an end.

    A lost node will not report its end. Its replicas may not have finished their work after the last epoch,
    such as saving the model, so the job continues from its checkpoint.
    """
    agents = view.agents(job.job)
    absent = [one for one in unheard if is_gone(agents.get(one.node), one)]
    lost, missing, settled_at = sort_absent(view, job, absent, False, settings)
    if len(lost) < len(unheard):
        return Phase.CHANGING, replace(health, missing=missing, settled_at=settled_at)
    return Phase.BROKEN, replace(health, lost=lost)


def others_take_over(view: View, job: JobView, plan: Plan) -> bool:
    """Return True if a node of the plan was drained, and another agent, which stays, can run the job.

    The replicas of a node that leaves save and stop, and all others of their generation with them.
    """
    agents = view.agents(job.job)
    drained = any(
        is_gone(agents.get(one.node), one) or view.draining(agents[one.node].record)
        for one in plan.placements
    )
    return drained and any(not view.draining(seen.record) for seen in agents.values())


def still_saves(view: View, job: JobView, plan: Plan) -> bool:
    """Return whether replicas that are to leave before this plan's may still be there, as while they save."""
    return not all(released(view, job, one.node, one.agent, one.generation) for one in plan.leaving)


def _phase(plan: Plan, health: Health) -> Phase:
    if len(health.done) == len(plan.placements):
        return Phase.FINISHED
    if health.failed or health.lost or health.undone or health.recovers is not None:
        return Phase.BROKEN
    if len(health.done) + len(health.stopped) == len(plan.placements):
        return Phase.LEFT
    if health.starting or health.missing or health.broken:
        return Phase.CHANGING
    return Phase.STEADY


def _ended_before(job: JobView, plan: Plan) -> bool:
    """Return whether the job ended while this plan was made: the last generation that ran was done.

    That generation is the plan's predecessor. It is an earlier one if the plans between were replaced before
    their generations began. A node that was lost on the way has not reported that its replicas were at their
    end, so the job goes on from its checkpoint.
    """
    if plan.cause in (Cause.FAILURE, Cause.NODE_LOST, Cause.REPLICA_LOST):
        return False
    ran = {g for g, _ in job.running}
    for generation in sorted({leaver.generation for leaver in plan.leaving}, reverse=True):
        if any(g > generation for g in ran):
            return False
        before = {n: seen.record.outcome for (g, n), seen in job.ended.items() if g == generation}
        asked = {leaver.node for leaver in plan.leaving if leaver.generation == generation}
        asked |= {node for g, node in job.running if g == generation}  # a lost node is no leaver any more
        if asked <= set(before) and set(before.values()) == {Outcome.DONE}:
            return not survivors.failed_until(job, plan, generation)
    return False


# Failures


def failures(job: JobView, generation: int) -> tuple[Failure, ...]:
    """Return the failed replicas of a generation, the likely root cause first.

    That is the failure that was reported first, except for those that only report the loss of a peer.
    """
    found = [
        (seen.seen, seen.record.failure)
        for (g, _), seen in job.ended.items()
        if g == generation and seen.record.failure is not None and seen.record.outcome is Outcome.FAILED
    ]
    known = {failure.rank for _, failure in found}
    found += [item for item in survivors.failures(job, generation) if item[1].rank not in known]
    found.sort(key=lambda item: (item[1].lost_peer, item[0], item[1].time))
    return tuple(failure for _, failure in found)


def failed_generation(job: JobView, plan: Plan) -> int:
    """Return the generation that failed: the plan's, or the one that ran last if the plan's did not run."""
    if plan.transition is Transition.RECOVER and survivors.failed_before(job, plan):
        return survivors.last_that_ran(job, plan)
    if plan.transition is Transition.INPLACE and not failures(job, plan.generation):
        failed = set(failed_before(job, plan))
        before = [
            one.generation
            for one in plan.leaving
            if (one.node in failed and (one.generation, one.node) in job.running)
            or (one.generation, one.node) in job.broken
        ]
        return max(before, default=plan.generation)
    return plan.generation


def root_exit_code(job: JobView, generation: int) -> int:
    """Return the job's exit code: that of the root cause; 128 plus the number of a signal."""
    codes = [failure.exit_code for failure in failures(job, generation)]
    codes += [s.record.exit_code for (g, _), s in job.ended.items() if g == generation]
    for code in codes:
        if code:
            return code if code > 0 else 128 - code
    return 1


def refilled(view: View, job: JobView, plan: Plan, settings: CoordinatorSettings) -> bool:
    """Return whether the job has made progress since its last restart, so that the budget is restored.

    That is so if this generation has lived for `refill_after` and has saved a checkpoint beyond the one that
    the last restart began from.
    """
    if plan.restarts == 0 or job.checkpoint is None or job.plan is None:
        return False
    lived = view.now - job.plan.seen
    return lived >= settings.refill_after and job.checkpoint.record.step > plan.failed_step


def killed_after_progress(job: JobView, plan: Plan) -> bool:
    """Return whether a failure was a signal from outside after progress, so that the restart does not count.

    Progress is a checkpoint of this run beyond the one that the last restart began from. A script that runs
    out of memory again and again is killed from outside, too. An agent that kills a replica itself gives its
    reason as the message, not the signal.
    """
    found = failures(job, failed_generation(job, plan))
    killed = bool(found) and found[0].exit_code < 0 and found[0].message.startswith(_FROM_OUTSIDE)
    saved = job.checkpoint.record if job.checkpoint is not None else None
    newer = saved is not None and saved.generation >= plan.first and saved.step > plan.failed_step
    return killed and newer


def accidental(failure: Failure) -> bool:
    """Return whether a newcomer may have failed by chance, so that the first such failure blames nothing."""
    # the last: another writer has broken the replica's channel, for which its agent kills it
    by_chance = (*_FROM_OUTSIDE, "to the agent")
    outside = failure.exit_code >= 0 or any(name in failure.message for name in by_chance)
    return failure.lost_peer or (not (failure.kind or failure.final) and outside)


def restarts_counted(view: View, job: JobView, plan: Plan) -> int:
    """Return the restarts that count: the last one does not if its failure proves to be the loss of a node.

    That is so if a node of the generation that failed has vanished without reporting how its replicas ended.
    """
    vanished = any(
        one.generation == plan.failed
        and (one.generation, one.node) not in job.ended
        and released(view, job, one.node, one.agent, one.generation)
        for one in plan.leaving
    )
    return max(0, plan.restarts - 1) if vanished else plan.restarts


def pause_before_restart(restarts: int, settings: CoordinatorSettings) -> float:
    """Return the seconds to wait before restart number `restarts`; none before the first."""
    if restarts <= 1:
        return 0.0
    return min(settings.max_backoff, settings.backoff * float(2 ** min(restarts - 2, 30)))


def failed_at(job: JobView, generation: int) -> float:
    """Return when this process first saw that the generation had failed."""
    heard = [s.seen for (g, _), s in job.ended.items() if g == generation]
    heard += [s.seen for (g, _), s in job.broken.items() if g == generation]
    return min(heard, default=0.0)


# Transitions


def base(job: JobView, plan: Plan) -> int:
    """Return the generation that runs while `plan` is in force."""
    return survivors.present(job, plan)[0]


def why_not_in_place(job: JobView) -> str:
    """Return why this job's replicas cannot change their number in place; "" if they can."""
    hints, plan = job.hints.record if job.hints else None, this_run(job)
    if job.spec is not None and job.spec.record.rescale is Rescale.RESTART:
        return "--rescale=restart"
    if hints is None or plan is None or hints.generation < plan.first:
        return "the script has not reported yet whether it can change in place"
    return "" if hints.inplace else hints.inplace_reason or "the script cannot change in place"


def stays(job: JobView, plan: Plan, allocation: Allocation) -> bool:
    """Return whether an allocation keeps a node that has the training state."""
    return any(member.node in allocation for member in survivors.present(job, plan)[1])


def bridge(view: View, job: JobView, plan: Plan, allocation: Allocation) -> Allocation | None:
    """Return the first of two allocations by which a job moves to other nodes: old and new nodes together.

    It keeps all old replicas if the job's bounds allow that. Otherwise it keeps as many replicas on rank 0's
    node as fit beside the new ones. Return None if there is no room.
    """
    assert job.spec is not None
    spec, members = job.spec.record, survivors.present(job, plan)[1]
    agents = view.agents(job.job)
    if not members or not allocation or any(member.node not in agents for member in members):
        return None
    old, replicas = {member.node: member.replicas for member in members}, sum(allocation.values())
    if sum(old.values()) + replicas <= spec.max_replicas and len(old) + len(allocation) <= spec.max_nodes:
        return {**old, **allocation}
    first = members[0]
    room = min(first.replicas, spec.max_replicas - replicas)
    if room < agents[first.node].record.min_slots or len(allocation) + 1 > spec.max_nodes:
        return None
    return {first.node: room, **allocation}


def pause(job: JobView, plan: Plan) -> float | None:
    """Return how many seconds passed from the last step before a plan to the first step under it.

    Return None if that is unknown, or if the plan is the first one. If nodes have both steps, their clocks
    count, and the shortest of these times; otherwise the times at which the steps were reported count.
    """
    firsts = {
        node: (seen.seen, seen.record.first_step)
        for (g, node), seen in job.running.items()
        if g == plan.generation and seen.record.first_step is not None
    }
    lasts = {
        node: (seen.seen, seen.record.last_step)
        for (g, node), seen in job.ended.items()
        if g == plan.generation - 1 and seen.record.last_step is not None
    }
    if not firsts or not lasts:
        return None
    found = [firsts[node][1] - lasts[node][1] for node in firsts if node in lasts]
    if not any(pause >= 0 for pause in found):
        found = [min(seen for seen, _ in firsts.values()) - max(seen for seen, _ in lasts.values())]
    return min((pause for pause in found if pause >= 0), default=None)


def left_out(view: View, job: JobView) -> dict[str, LeftOut]:
    """Return the nodes that have failed this job, by name. Another agent there is not its predecessor."""
    agents = view.agents(job.job)
    known = (one for one in job.left_out if one.node in agents)
    return {one.node: one for one in known if agents[one.node].record.agent == one.agent}


def late_nodes(view: View, job: JobView) -> set[str]:
    """Return the nodes that this job does without for now."""
    return {node for node, one in left_out(view, job).items() if view.wall < one.until}
