"""Decide one node's part of a change of size in place: pure functions, called by `decisions`.

The replicas carry out the change themselves. The agents start newcomers, pass the plan on, and record the
progress. A process keeps its slot (LOCAL_RANK) for life: slots that both plans name survive, slots that only
the new plan names are newcomers, and a slot never has two processes at once::

 plan g+1 ─► TellPlan to replicas of g, StartReplicas(newcomers, join)     training goes on in g
   ─► every newcomer ready
   ─► every survivor and newcomer switched, leavers gone: Adopt

Until the first replica has switched, a newcomer that ends or is late does no harm: the change is withdrawn,
an end reports that for g+1, training goes on in g, and the coordinator makes another plan. After that, the
end of a process is an end in g+1. `peer_loss` handles deaths, and errors of newcomers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from adaptdl_elastic.agent.core.states import (
    Action,
    Adopt,
    Changing,
    Ended,
    FromReplica,
    Joining,
    Kill,
    Killing,
    LocalGeneration,
    Recovering,
    Replica,
    ReplicaExited,
    StartReplicas,
    State,
    Step,
    TellPlan,
    Training,
    Withdraw,
    failure_of,
)
from adaptdl_elastic.protocol.messages import Ready, Resilient
from adaptdl_elastic.rendezvous.schema.held import GenerationEnd
from adaptdl_elastic.rendezvous.schema.records import (
    Failure,
    MasterRecord,
    Outcome,
    Plan,
    Transition,
)

LATE = "not ready in time"


@dataclass(frozen=True)
class Renumbering:
    """The new ranks: `ranks[old rank]`, None for replicas that leave."""

    ranks: tuple[int | None, ...]
    newcomers: tuple[int, ...]  # ranks of newcomers in the new generation


def renumber(old: Plan, new: Plan) -> Renumbering:
    """Return the new ranks; on each node the slots that both plans name survive."""
    ranks: list[int | None] = []
    survivors: set[int] = set()
    for placement in old.placements:
        node = placement.node
        after = new.rank_by_slot(node)
        kept = [after.get(slot) for slot in old.slots(node)]
        ranks += kept
        survivors.update(rank for rank in kept if rank is not None)
    return Renumbering(tuple(ranks), tuple(r for r in range(new.replicas) if r not in survivors))


def begin(state: State, held: LocalGeneration, plan: Plan, master: MasterRecord, now: float) -> Step:
    """Send the plan to the replicas, and start those that join them."""
    here = {r.local_rank for r in held.replicas}
    named = plan.rank_by_slot(state.me.node)
    fresh = tuple(Replica(slot, rank) for slot, rank in named.items() if slot not in here)
    change = Changing(plan, fresh, now + state.me.spec.rescale_timeout if fresh else math.inf)
    actions: list[Action] = [TellPlan(plan, master)]
    if fresh:
        actions.append(StartReplicas(plan, master, tuple(r.local_rank for r in fresh), join=True))
    return replace(state, held=replace(held, course=change)), actions


def learn(held: LocalGeneration, event: FromReplica, now: float) -> LocalGeneration:
    """Record that a replica is ready for the change, or has made it."""
    course, slot, ready = held.course, event.local_rank, isinstance(event.message, Ready)
    match course:
        case Joining() if event.generation == held.generation:
            if ready:
                return held.update(slot, library=True)
            # from now on it is watched for hangs (`hang_detection`)
            held = held.update(slot, library=True, heard=now)
            return replace(held, course=replace(course, switched=course.switched | {slot}))
        case Changing(plan) if ready and event.generation == plan.generation:
            return replace(held, course=replace(course, ready=course.ready | {slot}))
        case Changing(plan) | Recovering(plan) if not ready and event.generation == plan.generation:
            return replace(held, course=replace(course, switched=course.switched | {slot}))
    return held


def learn_end(held: LocalGeneration, event: ReplicaExited) -> LocalGeneration:
    """Record the end of a newcomer, or of an orphan, which frees its slot."""
    change = held.course
    if not isinstance(change, Changing) or event.generation != change.plan.generation:
        orphans = (replace(r, exit=event) if r.local_rank == event.local_rank else r for r in held.orphans)
        return replace(held, orphans=tuple(orphans))
    held = held.update(event.local_rank, exit=event)
    if change.switched and event.exit_code != 0 and held.end is None:
        rank = next((r.rank for r in change.newcomers if r.local_rank == event.local_rank), -1)
        return held.fail(failure_of(rank, event))
    return held


def reconcile(state: State, held: LocalGeneration, change: Changing, now: float) -> Step | None:
    """Make one step of a change that is under way; None: nothing to do now."""
    ready = change.ready >= {r.local_rank for r in change.newcomers}
    ended = [r for r in change.newcomers if r.exit is not None]
    if held.lost_in >= held.generation and not change.switched:
        return _withdraw(state, held, change, "a replica was lost")
    if all(r.exit is not None for r in held.replicas) and len(ended) < len(change.newcomers):
        return _withdraw(state, held, change, "the script came to its end")
    if not change.switched:
        if ended:
            failure = _failure(ended[0])
            return _withdraw(state, held, change, failure.message, failure)
        if state.plan is not None and state.plan != change.plan:
            return _withdraw(state, held, change, state.plan.reason)
        if now >= change.until and not ready:
            why = f"newcomers not ready within {state.me.spec.rescale_timeout:g} s"
            return _withdraw(state, held, change, why, Failure(-1, 0, why, kind=LATE))
    if ready and change.until < math.inf:
        held = replace(held, course=replace(change, until=math.inf))
        return replace(state, held=held), []
    if not change.switched:
        return None
    ranks = change.plan.rank_by_slot(state.me.node)
    leavers = any(r.exit is None for r in held.replicas if r.local_rank not in ranks)
    if not ranks or leavers or not ranks.keys() <= change.switched:
        return None
    return adopt(state, held, change.plan, ranks, now)


def _failure(newcomer: Replica) -> Failure:
    """Return why a newcomer that has ended does not join."""
    assert newcomer.exit is not None
    found = failure_of(-1, newcomer.exit)
    why = f"newcomer {newcomer.rank}: {found.message or f'exit code {found.exit_code}'}"
    return replace(found, message=why, time=0.0)


def adopt(state: State, held: LocalGeneration, plan: Plan, ranks: Mapping[int, int], now: float) -> Step:
    """Make the new generation the held one; replicas that are not in it become orphans.

    Args:
        state: the agent's state.
        held: the generation held here.
        plan: the plan of the new generation.
        ranks: the plan's ranks by slot on this node.
        now: monotonic seconds.
    """
    # what names groups of ranks of this generation says nothing of newcomers
    ready = Resilient(held.generation) if held.survives == () else None
    have = {r.local_rank: r for r in held.replicas}
    if isinstance(held.course, Changing):
        for r in held.course.newcomers:  # from now on they are watched for hangs (`hang_detection`)
            have[r.local_rank] = replace(r, resilient=r.resilient or ready, heard=now, newcomer=True)
    if plan.transition is not Transition.RECOVER:
        have.update((r.local_rank, replace(r, newcomer=False)) for r in held.replicas)
    members = tuple(  # no replica could take a step meanwhile
        replace(have[slot], rank=rank, library=True, stepped=None if have[slot].stepped is None else now)
        for slot, rank in ranks.items()
        if slot in have
    )
    leavers = (r for r in held.replicas if r.local_rank not in ranks)
    orphans = tuple(r for r in (*held.orphans, *leavers) if r.exit is None)
    end = held.end_as(Outcome.STOPPED, failure=None if held.loss is None else held.loss.failure)
    # those that have died since belong to the new generation, where their loss is not known any more
    end = replace(end, lost=tuple(sorted(r.local_rank for r in held.lost)))
    after = LocalGeneration(plan.generation, members, since=now, orphans=orphans)
    state = replace(state, held=after, acted=max(state.acted, plan.generation)).add_ends(end)
    return state, [Adopt(plan), Ended(end)]


def _withdraw(
    state: State, held: LocalGeneration, change: Changing, why: str, failure: Failure | None = None
) -> Step:
    """Give the change up and go on in the held generation.

    Args:
        state: the agent's state.
        held: the generation held here.
        change: the change under way.
        why: the reason, for users.
        failure: that of the newcomer because of which this happens, if there is one.
    """
    plan, node = change.plan, state.me.node
    ends = [r.exit is not None and r.exit.exit_code == 0 and not r.stopped for r in held.replicas]
    finished = not held.lost and all(ends)
    outcome = Outcome.DONE if finished else Outcome.ABORTED
    failure = None if finished else failure or Failure(-1, 0, why)
    alive = tuple(r.local_rank for r in change.newcomers if r.exit is None)
    state = replace(state, held=replace(held, course=Training(), orphans=change.newcomers))
    state = replace(state, acted=max(state.acted, plan.generation))
    actions: list[Action] = [Withdraw(plan, why)]
    if alive:
        actions.append(Kill(alive, why))
    if len(plan.ranks(node)):
        end = GenerationEnd(plan.generation, outcome, failure=failure)
        state = state.add_ends(end)
        actions.append(Ended(end))
    return state, actions


def reconcile_joining(state: State, held: LocalGeneration, joining: Joining, now: float) -> Step | None:
    """Make one step on a node that has newcomers only; None: nothing to do now."""
    if joining.switched >= {r.local_rank for r in held.replicas}:
        replicas = tuple(replace(r, newcomer=True) for r in held.replicas)
        return replace(state, held=replace(held, replicas=replicas, course=Training(), since=now)), []
    ready = all(r.library for r in held.replicas)
    ended = next((r for r in held.replicas if r.exit is not None), None)
    late = now >= joining.until and not ready
    plan = state.plan
    newer = plan is not None and plan.generation > held.generation
    # a change in place of the generation that is about to begin here waits for it
    if plan is not None and plan.transition is Transition.INPLACE and plan.base == held.generation:
        newer = False
    if ended is not None or late or newer:
        why, kind = (LATE, LATE) if late else ("another plan", "")
        failure = _failure(ended) if ended else Failure(-1, 0, why, kind=kind)
        return replace(state, held=replace(held, end=Killing(failure.message, failure=failure))), []
    if ready and joining.until < math.inf:
        held = replace(held, course=replace(joining, until=math.inf))
        return replace(state, held=held), []
    return None
