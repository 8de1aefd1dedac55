"""Find the state of the replicas of one job's plan, node by node.

Pure functions of the view. `job_phase` makes the phase of the job from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from adaptdl_elastic.autoscaler.cluster_view import JobView, View
from adaptdl_elastic.autoscaler.coordinator import survivors
from adaptdl_elastic.autoscaler.coordinator.decision_types import CoordinatorSettings
from adaptdl_elastic.autoscaler.coordinator.slots import fewest
from adaptdl_elastic.autoscaler.held_facts import Observed
from adaptdl_elastic.rendezvous.schema.records import NodeRecord, Outcome, Placement, Plan, Transition

FOREVER = float("inf")


@dataclass(frozen=True)
class Health:
    """The nodes of the current plan by the state of their replicas."""

    running: tuple[str, ...] = ()
    starting: tuple[str, ...] = ()
    done: tuple[str, ...] = ()
    stopped: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()  # failed or aborted without having been asked to stop
    lost: tuple[str, ...] = ()  # registration vanished, and the node is given up
    missing: tuple[str, ...] = ()  # registration vanished, and the node may still come back
    undone: tuple[str, ...] = ()  # newcomers that failed before any replica left the previous generation
    broken: bool = False  # replicas have lost others and wait for another plan
    recovers: survivors.Losses | None = None  # set if replicas have died and the others are to go on
    beyond: tuple[int, ...] = ()  # `Losses.beyond` where they are not
    settled_at: float = FOREVER  # when missing nodes are given up, or dead replicas are known
    started_at: float = 0.0  # when the last of the running nodes was seen to run


@dataclass(frozen=True)
class _Sorted:
    """The nodes of a plan by what their agents have written, before deaths are considered."""

    generation: int  # generation that runs while the plan is in force
    running: tuple[str, ...]
    starting: tuple[str, ...]
    done: tuple[str, ...]
    stopped: tuple[str, ...]
    failed: tuple[str, ...]
    absent: tuple[Placement, ...]  # registration vanished
    died: bool  # all replicas of a node were killed
    broken: bool  # an agent has reported a lost peer
    started_at: float
    undone: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Verdict:
    """A decision about deaths: which nodes are replaced, and whether the other nodes go on."""

    losses: survivors.Losses
    failed: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    recovers: bool = False
    waits_until: float = FOREVER


def health_of(view: View, job: JobView, plan: Plan, settings: CoordinatorSettings) -> Health:
    """Return the state of each node of the current plan."""
    found = _before_the_switch(view, job, plan, _sort(view, job, plan))
    evidence = bool(found.failed) or found.broken
    lost, missing, settled_at = sort_absent(view, job, found.absent, evidence, settings)
    verdict = _who_lives(view, job, plan, found, lost, missing, settings)
    return Health(
        running=found.running,
        starting=found.starting,
        done=found.done,
        stopped=found.stopped,
        failed=verdict.failed,
        undone=found.undone,
        lost=verdict.lost,
        missing=missing,
        settled_at=min(settled_at, verdict.waits_until),
        started_at=found.started_at,
        broken=bool(verdict.losses.said),
        recovers=verdict.losses if verdict.recovers else None,
        beyond=() if found.failed else verdict.losses.beyond,
    )


def _sort(view: View, job: JobView, plan: Plan) -> _Sorted:
    agents, (generation, _) = view.agents(job.job), survivors.present(job, plan)
    nodes: dict[str, list[str]] = {name: [] for name in ("running", "starting", "done", "stopped", "failed")}
    absent: list[Placement] = []
    died, started_at = False, 0.0
    for placement in plan.placements:
        node = placement.node
        ended = job.ended.get((plan.generation, node))
        running = job.running.get((plan.generation, node))
        if ended is not None:
            if generation == plan.generation and survivors.died(job, plan, generation, placement):
                died = True
            else:
                nodes[_ENDED_AS[ended.record.outcome]].append(node)
        elif is_gone(agents.get(node), placement):
            absent.append(placement)
        elif running is not None:
            nodes["running"].append(node)
            started_at = max(started_at, running.seen)
        else:
            nodes["starting"].append(node)
    return _Sorted(
        generation=generation,
        **{name: tuple(found) for name, found in nodes.items()},
        absent=tuple(absent),
        died=died,
        broken=any(g == generation for g, _ in job.broken),
        started_at=started_at,
    )


def _before_the_switch(view: View, job: JobView, plan: Plan, found: _Sorted) -> _Sorted:
    """Return the state while no replica has switched to a change in place: the previous generation runs.

    A failed newcomer only undoes the change. Nodes that are to leave are still needed.
    """
    generation, members = survivors.present(job, plan)
    if generation == plan.generation:
        return found
    agents, here = view.agents(job.job), {placement.node for placement in plan.placements}
    leaving = (
        member
        for member in members
        if member.node not in here
        and (generation, member.node) not in job.ended
        and is_gone(agents.get(member.node), member)
    )
    return replace(
        found, undone=found.failed, failed=tuple(failed_before(job, plan)), absent=(*found.absent, *leaving)
    )


def _who_lives(
    view: View,
    job: JobView,
    plan: Plan,
    found: _Sorted,
    lost: tuple[str, ...],
    missing: tuple[str, ...],
    settings: CoordinatorSettings,
) -> _Verdict:
    losses = survivors.Losses(found.generation)
    left = _left_before_going_on(job, plan, found)
    if found.broken or found.died or found.absent or left:
        losses = survivors.inquire(job, plan, (*lost, *missing), fewest(view, job))
    if found.failed:  # all replicas are started again, whatever else is gone
        return _Verdict(losses, found.failed, lost)
    if lost or losses.dead:
        if losses.able:
            return _Verdict(losses, lost=lost, recovers=True)
        # replicas that are not resilient: the death counts as a failure
        return _Verdict(losses, tuple(node for node in losses.dead if node not in lost), lost)
    if left and losses.able:
        return _Verdict(losses, lost=left, recovers=True)
    if losses.said:
        return _who_is_silent(view, job, plan, losses, missing, settings)
    return _Verdict(losses)


def _who_is_silent(
    view: View,
    job: JobView,
    plan: Plan,
    losses: survivors.Losses,
    missing: tuple[str, ...],
    settings: CoordinatorSettings,
) -> _Verdict:
    """Decide about a generation that reports a lost peer although no dead replica is known."""
    silent = {one.node for one in losses.survivors} - losses.said
    # A busy replica cannot know yet that others have left a recovery. So silence proves a death only in a
    # generation in which all replicas have run.
    again = plan.transition is Transition.RECOVER and not _all_running(job, plan)
    heard_by = FOREVER if again else losses.since + settings.silence
    patience = losses.since + settings.node_ttl + settings.grace
    if silent and view.now >= heard_by:
        without = survivors.inquire(job, plan, (*missing, *silent), fewest(view, job))
        if without.able:  # the silent nodes have leases, but cannot be reached
            return _Verdict(without, lost=tuple(sorted(silent)), recovers=True)
    # no replica has died: only connections were lost, and going on is tried once
    if not silent or view.now >= patience:
        if losses.able and not again:
            return _Verdict(losses, recovers=True)
        return _Verdict(losses, failed=tuple(sorted(losses.said)))
    return _Verdict(losses, waits_until=patience if view.now >= heard_by else min(patience, heard_by))


def _left_before_going_on(job: JobView, plan: Plan, found: _Sorted) -> tuple[str, ...]:
    """Return the nodes that were drained before they went on after a death, while others wait for them."""
    if plan.transition is not Transition.RECOVER or not found.starting:
        return ()
    return tuple(node for node in found.stopped if (plan.generation, node) not in job.running)


def _all_running(job: JobView, plan: Plan) -> bool:
    return all((plan.generation, placement.node) in job.running for placement in plan.placements)


def failed_before(job: JobView, plan: Plan) -> list[str]:
    """Return the nodes whose replicas failed in the generation that a change in place has not left yet.

    Only the generation that runs counts; processes that a withdrawn change had started may end in any way.
    """
    return [
        leaver.node
        for leaver in plan.leaving
        if (at := (leaver.generation, leaver.node)) in job.running
        and (seen := job.ended.get(at)) is not None
        and _ENDED_AS[seen.record.outcome] == "failed"
        and not survivors.died(
            job, plan, leaver.generation, Placement(leaver.node, leaver.replicas, slots=leaver.slots)
        )
    ]


_ENDED_AS = {
    Outcome.DONE: "done",
    Outcome.STOPPED: "stopped",
    Outcome.FAILED: "failed",
    Outcome.ABORTED: "failed",
}


def is_gone(registration: Observed[NodeRecord] | None, placement: Placement) -> bool:
    """Return whether the agent that a plan counts on is not registered any more."""
    return registration is None or (placement.agent != "" and registration.record.agent != placement.agent)


def sort_absent(
    view: View, job: JobView, absent: Sequence[Placement], evidence: bool, settings: CoordinatorSettings
) -> tuple[tuple[str, ...], tuple[str, ...], float]:
    """Return the absent nodes that are lost, those that are missing, and when that changes.

    A lease that expired while the store was away proves nothing: the agent and its replicas may be well. So
    after a break (or this process's own start) an agent has one lease time to come back, unless another agent
    has taken its place, or replicas of other nodes have failed because of it. Breaks long after its loss do
    not extend that time; otherwise an unstable store would keep a dead node in its job. While the store is
    away, no agent can come back.
    """
    lost, missing, settled_at = [], [], FOREVER
    assert job.plan is not None
    for placement in absent:
        replaced = placement.node in view.agents(job.job)
        gone = view.gone.get((job.job, placement.node))
        since = gone.seen if gone is not None else view.steady_since
        shaken = gone is None or since - view.steady_since < settings.steady
        patience = since
        if shaken:
            # this leader, or its predecessor, has written the plan
            missed_at = gone.seen if gone is not None else job.plan.seen
            answers = min(max(since, view.steady_since), missed_at + settings.steady)
            patience = max(answers + settings.node_ttl, view.steady_since + settings.grace)
        if replaced or evidence or view.now >= patience:
            lost.append(placement.node)
        else:
            missing.append(placement.node)
            settled_at = min(settled_at, patience)
    return tuple(lost), tuple(missing), settled_at
