"""Decide one node's part of a change of size in place: pure functions, called by `decisions`.

The replicas carry out the change themselves. The agents start newcomers, pass the plan on, and record the
progress. A process keeps its slot (LOCAL_RANK) for life: slots that both plans name survive, slots that only
the new plan names are newcomers, and a slot never has two processes at once::

 plan g+1 ─► TellPlan to replicas of g, StartReplicas(newcomers, join)     training goes on in g
   ─► every newcomer ready: WriteReady
   ─► every survivor and newcomer switched, leavers gone: Adopt, WriteEnded(g), WriteRunning(g+1)

Until the first replica has switched, a newcomer that ends or is late does no harm: the change is withdrawn,
`ended` reports that for g+1, training goes on in g, and the coordinator makes another plan. After that, the
end of a process is an end in g+1. `peer_loss` handles deaths.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from adaptdl_elastic.agent.core import peer_loss
from adaptdl_elastic.agent.core.states import (
    Action,
    FromReplica,
    Kill,
    LocalGeneration,
    Phase,
    Replica,
    ReplicaExited,
    StartReplicas,
    State,
    StateChange,
    TellPlan,
    Withdraw,
    WriteEnded,
    WriteReady,
    WriteRunning,
    failure_of,
)
from adaptdl_elastic.protocol.messages import ChangePlan, Ready, RecoveryPlan, Switched
from adaptdl_elastic.rendezvous.schema.records import (
    EndedRecord,
    Failure,
    MasterRecord,
    Outcome,
    Plan,
    Transition,
)

Step = tuple[State, list[Action]]


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


def plan_message(plan: Plan, master: MasterRecord, numbers: Renumbering) -> ChangePlan:
    """Return the message to a replica of the previous generation, without its `environ`."""
    return ChangePlan(
        plan.generation, plan.replicas, plan.nodes, numbers.ranks, numbers.newcomers, master.host, master.port
    )


def recovery_message(plan: Plan, master: MasterRecord, rank: int | None) -> RecoveryPlan:
    """Return the message to a survivor of deaths, without its `environ`.

    Args:
        plan: the plan without the dead.
        master: the store of the new generation.
        rank: the replica's new rank; None: it leaves.
    """
    return RecoveryPlan(plan.generation, rank, plan.replicas, plan.nodes, master.host, master.port)


def possible(held: LocalGeneration, plan: Plan) -> bool:
    """Return whether the held replicas can follow this plan in place."""
    return (
        plan.transition is Transition.INPLACE
        and bool(plan.placements)
        and held.phase is Phase.RUNNING
        and not held.joining
        and all(r.library for r in held.replicas if r.exit_code is None)
    )


def waits(held: LocalGeneration, plan: Plan) -> bool:
    """Return whether this plan applies once the newcomers here have joined, which is about to happen."""
    return held.joining and plan.transition is Transition.INPLACE and plan.base == held.generation


def begin(state: State, held: LocalGeneration, plan: Plan, master: MasterRecord, now: float) -> Step:
    """Send the plan to the replicas, and start those that join them."""
    here = {r.local_rank for r in held.replicas}
    named = plan.rank_by_slot(state.me.node)
    fresh = tuple(Replica(slot, rank) for slot, rank in named.items() if slot not in here)
    change = StateChange(plan, fresh, now + state.me.spec.rescale_timeout, announced=not fresh)
    actions: list[Action] = [TellPlan(plan, master)]
    if fresh:
        actions.append(StartReplicas(plan, master, tuple(r.local_rank for r in fresh), join=True))
    return replace(state, held=replace(held, change=change)), actions


def learn(held: LocalGeneration, event: FromReplica, now: float) -> LocalGeneration:
    """Record that a replica is ready for the change, or has made it."""
    change = held.change
    if held.joining and event.generation == held.generation:
        return _learn_joining(held, event, now)
    if change is None or event.generation != change.plan.generation:
        return held
    if isinstance(event.message, Ready):
        change = replace(change, ready=change.ready | {event.local_rank})
    else:
        change = replace(
            change,
            switched=change.switched | {event.local_rank},
            newcomers=_heard(change.newcomers, event.local_rank, now),
        )
    return replace(held, change=change)


def _heard(replicas: tuple[Replica, ...], local_rank: int, now: float) -> tuple[Replica, ...]:
    """Record a newcomer's first sign of life: from now on it is watched for hangs (`hang_detection`)."""
    return tuple(replace(r, heard=now) if r.local_rank == local_rank else r for r in replicas)


def _learn_joining(held: LocalGeneration, event: FromReplica, now: float) -> LocalGeneration:
    joined = tuple(replace(r, library=True) if r.local_rank == event.local_rank else r for r in held.replicas)
    if isinstance(event.message, Switched):
        joined = tuple(
            replace(r, switched=True) if r.local_rank == event.local_rank else r
            for r in _heard(joined, event.local_rank, now)
        )
    return replace(held, replicas=joined)


def learn_end(held: LocalGeneration, event: ReplicaExited) -> LocalGeneration:
    """Record the end of a newcomer, or of a replica that is on its way out."""

    def ended(replicas: tuple[Replica, ...]) -> tuple[Replica, ...]:
        return tuple(
            replace(r, exit_code=event.exit_code, message=event.message)
            if r.local_rank == event.local_rank
            else r
            for r in replicas
        )

    change = held.change
    if change is None or event.generation != change.plan.generation:
        return replace(held, orphans=ended(held.orphans))
    held = replace(held, change=replace(change, newcomers=ended(change.newcomers)))
    if change.switched and event.exit_code != 0 and held.failure is None and held.phase is Phase.RUNNING:
        rank = next((r.rank for r in change.newcomers if r.local_rank == event.local_rank), -1)
        failure = failure_of(rank, event.exit_code, event.message, event.time, event.evidence)
        return replace(held, failure=failure)
    return held


def reconcile(state: State, held: LocalGeneration, now: float) -> Step | None:
    """Make one step of a change that is under way; None: nothing to do now."""
    if held.joining:
        return _reconcile_joining(state, held, now)
    change = held.change
    if change is None or held.phase is not Phase.RUNNING or held.failure is not None:
        return None
    if held.recovering:
        return _adopt(state, held, change, now)
    if held.loss_reported >= held.generation and not change.switched:
        return withdraw(state, held, "a replica was lost")
    if all(r.exit_code is not None for r in held.replicas) and any(
        r.exit_code is None for r in change.newcomers
    ):
        return withdraw(state, held, "the script came to its end")
    newer = state.plan is not None and state.plan.generation > change.plan.generation
    if not change.switched:
        ended = [r for r in change.newcomers if r.exit_code is not None]
        if ended:
            return withdraw(state, held, _why(ended[0]), ended[0].exit_code)
        if newer and state.plan is not None:
            return withdraw(state, held, state.plan.reason)
        if now >= change.until and not _all_ready(change):
            return withdraw(state, held, f"newcomers not ready within {state.me.spec.rescale_timeout:g} s")
    if not change.announced and _all_ready(change):
        held = replace(held, change=replace(change, announced=True))
        return replace(state, held=held), [WriteReady(change.plan.generation)]
    return _adopt(state, held, change, now)


def _why(newcomer: Replica) -> str:
    return f"newcomer {newcomer.rank}: {newcomer.message or f'exit code {newcomer.exit_code}'}"


def _all_ready(change: StateChange) -> bool:
    return change.ready >= {r.local_rank for r in change.newcomers}


def _adopt(state: State, held: LocalGeneration, change: StateChange, now: float) -> Step | None:
    slots = set(change.plan.slots(state.me.node))
    first = next((s for s, rank in change.plan.rank_by_slot(state.me.node).items() if rank == 0), None)
    if not slots or not slots <= change.switched | _never_switching(held, change, first):
        return None
    if any(r.exit_code is None for r in held.replicas if r.local_rank not in slots):
        return None  # leavers
    state, _, actions = peer_loss.adopt(state, held, change, now)
    return state, actions


def _never_switching(held: LocalGeneration, change: StateChange, first: int | None) -> set[int]:
    """Return the slots that may end with the script instead of switching.

    Args:
        held: the generation held here.
        change: the change under way.
        first: the slot of the new rank 0 if it is on this node, else None.
    """
    if not held.recovering or held.loss_reported >= held.generation:
        return set()  # a replica here waits for the others to form the new generation
    over = {r.local_rank for r in held.replicas if r.epochs_finished and r.exit_code is None}
    new = next((r for r in held.replicas if r.local_rank == first), None)
    return over if new is None or new.rank == 0 else set()


def withdraw(state: State, held: LocalGeneration, why: str, exit_code: int | None = 0) -> Step:
    """Give the change up and go on in the held generation.

    Args:
        state: the agent's state.
        held: the generation held here.
        why: the reason, for users.
        exit_code: that of the newcomer because of which this happens, if there is one.
    """
    change = held.change
    assert change is not None
    plan, node = change.plan, state.me.node
    finished = not held.lost and all(r.exit_code == 0 and not r.stopped for r in held.replicas)
    outcome = Outcome.DONE if finished else Outcome.ABORTED
    failure = None if finished else Failure(-1, exit_code or 0, why)
    alive = tuple(r.local_rank for r in change.newcomers if r.exit_code is None)
    state = replace(
        state,
        held=replace(held, change=None, withdrawn=plan.generation, orphans=change.newcomers),
        acted=max(state.acted, plan.generation),
        ended={**state.ended, (plan.generation, node): outcome},
    )
    actions: list[Action] = [Withdraw(plan, why)]
    if alive:
        actions.append(Kill(alive, why))
    if len(plan.ranks(node)):
        actions.append(WriteEnded(EndedRecord(node, plan.generation, outcome, 0, failure)))
    return state, actions


def _reconcile_joining(state: State, held: LocalGeneration, now: float) -> Step | None:
    """Make one step on a node that has newcomers only; None: nothing to do now."""
    if held.phase is not Phase.RUNNING:
        return None
    if all(r.switched for r in held.replicas):
        state = replace(state, held=replace(held, joining=False, join_by=None, plain=False, since=now))
        resilient = all(r.resilient for r in held.replicas)
        return state, [WriteRunning(held.generation, library=True, resilient=resilient)]
    newer = state.plan is not None and state.plan.generation > held.generation and not waits(held, state.plan)
    ended = [r for r in held.replicas if r.exit_code is not None]
    late = held.join_by is not None and now >= held.join_by and not all(r.library for r in held.replicas)
    if newer or ended or late:
        why = _why(ended[0]) if ended else "not ready in time" if late else "another plan"
        failure = Failure(-1, (ended[0].exit_code or 0) if ended else 0, why)
        held = replace(held, phase=Phase.KILLING, failure=failure)
        alive = tuple(r.local_rank for r in held.alive)
        return replace(state, held=held), [Kill(alive, why)]
    if held.join_by is not None and all(r.library for r in held.replicas):
        return replace(state, held=replace(held, join_by=None)), [WriteReady(held.generation)]
    return None
