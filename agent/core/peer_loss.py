"""Decide what one node does about a death that others survive: pure functions, called by `decisions`.

A replica killed by a signal while the others are *resilient* (they reported it) is no failure. No replica is
killed; `broken` tells the coordinator which slots are dead. The coordinator answers with a plan with
transition RECOVER that names the survivors::

 a replica dies, or the living report a lost peer ─► WritePeerLoss(g)    they wait in their processes
 plan G (recover) ─► TellPlan to the living: the new rank of each, or to leave
     ─► all of G here switched: Adopt, WriteEnded(g), WriteRunning(G)
 another death before that ─► WritePeerLoss(G), and the next plan follows

Such a plan cannot be withdrawn: another one follows it, or an abort.

Replicas that have finished all epochs reach no point any more at which they could form another generation.
They go on to the end of the script, and the node reports a failure then: what the dead one had to do there
is not done.

If a planned change is under way and no replica has switched, it is withdrawn first. If one has switched, the
death belongs to the new generation, and so do all its living members.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from adaptdl_elastic.agent.core.states import (
    Action,
    Adopt,
    FromReplica,
    Kill,
    LocalGeneration,
    Lost,
    Phase,
    Replica,
    ReplicaExited,
    State,
    StateChange,
    TellPlan,
    WriteEnded,
    WritePeerLoss,
    WriteRunning,
)
from adaptdl_elastic.rendezvous.schema.records import (
    EndedRecord,
    Failure,
    MasterRecord,
    Outcome,
    PeerLossRecord,
    Plan,
    Transition,
)

Step = tuple[State, list[Action]]


def record_resilient(state: State, held: LocalGeneration, local_rank: int) -> Step:
    """Record that a replica survives the death of others, from now on."""
    known = all(r.resilient for r in held.replicas)
    held = record_report(held, local_rank, resilient=True)
    state = replace(state, held=held)
    if known or held.joining or not all(r.resilient for r in held.replicas):
        return state, []
    return state, [WriteRunning(held.generation, library=True, resilient=True)]


def record_report(held: LocalGeneration, local_rank: int, **fields: Any) -> LocalGeneration:
    """Record fields that a replica reported about itself; it may be a newcomer that has not joined yet."""

    def heard(replicas: tuple[Replica, ...]) -> tuple[Replica, ...]:
        return tuple(replace(r, **fields) if r.local_rank == local_rank else r for r in replicas)

    change = held.change
    if change is not None:
        change = replace(change, newcomers=heard(change.newcomers))
    return replace(held, replicas=heard(held.replicas), change=change)


def survived(held: LocalGeneration, event: ReplicaExited) -> bool:
    """Return whether an exit is a death that the other replicas, if there are any, survive."""
    if held.phase is not Phase.RUNNING or held.failure is not None or held.joining:
        return False
    change = held.change
    if event.generation not in (held.generation, -1 if change is None else change.plan.generation):
        return False  # a replica that is on its way out
    replica = _find(held, event.local_rank)
    if change is not None and change.switched and replica is None:
        replica = next((r for r in change.newcomers if r.local_rank == event.local_rank), None)
    if replica is None or replica.signalled or replica.stopping or replica.exit_code is not None:
        return False
    others = [r for r in held.replicas if r.exit_code is None and r is not replica]
    if not all(r.resilient for r in others or [replica]):
        # the others could not form the new generation, and this replica had not joined it yet
        return held.loss_reported >= held.generation and not replica.resilient and event.exit_code != 0
    return event.exit_code < 0


def record_death(state: State, held: LocalGeneration, event: ReplicaExited, now: float) -> Step:
    """Record such a death, and report it to the coordinator if necessary."""
    actions: list[Action] = []
    if _has_switched(held) and held.change is not None:
        state, held, actions = adopt_after_peer_loss(state, held, held.change, now)
    slot, held = event.local_rank, orphan_ended(held, event.local_rank, event.exit_code)
    members = (*held.replicas, *held.lost)
    dead = next((r for r in members if r.local_rank == slot), None)
    if dead is None:  # a replica that was about to leave
        return replace(state, held=held), actions
    dead = replace(dead, exit_code=event.exit_code, message=event.message, exited=event.time)
    left = tuple(r for r in held.replicas if r.local_rank != slot)
    held = replace(held, replicas=left, lost=(*(r for r in held.lost if r.local_rank != slot), dead))
    state = replace(state, held=held)
    generation = _loss_generation(held)
    if any(r.exit_code is None for r in left) or (state.plan is not None and state.plan.nodes > 1):
        actions.append(Lost(generation, _failure(dead)))
    state, more = report_peer_loss(state, held, again=True)
    return state, [*actions, *more]


def orphan_ended(held: LocalGeneration, local_rank: int, exit_code: int) -> LocalGeneration:
    """Record the end of an orphan, which frees its slot."""
    return replace(
        held,
        orphans=tuple(
            replace(r, exit_code=exit_code) if r.local_rank == local_rank else r for r in held.orphans
        ),
    )


def handle_report(state: State, held: LocalGeneration, event: FromReplica, now: float) -> Step:
    """Handle a replica's report that others are gone."""
    change, actions = held.change, list[Action]()
    if held.phase is not Phase.RUNNING or held.failure is not None or held.joining:
        return state, []
    over = change is not None and (change.switched or event.generation == change.plan.generation)
    if change is not None and over and not held.recovering:  # the replica had reached the new generation
        state, held, actions = adopt_after_peer_loss(state, held, change, now)
    elif event.generation < _loss_generation(held):
        return state, []
    if (failed := fail_if_left_early(held)) is not held:
        return replace(state, held=failed), actions
    # it waits for another plan, also where a script survives deaths only while replicas switch
    held = record_report(held, event.local_rank, resilient=True)
    state, more = report_peer_loss(replace(state, held=held), held)
    return state, [*actions, *more]


def fail_if_left_early(held: LocalGeneration) -> LocalGeneration:
    """Record a failure if a replica has ended well, but not its script, and the others wait for it."""
    early = (r for r in held.replicas if r.exit_code == 0 and r.library and held.change is None)
    gone = next((r for r in early if not (r.stopped or r.finished or r.epochs_finished)), None)
    if gone is None:
        return held
    why = "exit code 0 in the middle of training (os._exit or sys.exit), while the others train"
    return replace(held, failure=replace(_failure(gone), message=why, kind="exit code 0", step=gone.step))


def report_peer_loss(state: State, held: LocalGeneration, again: bool = False) -> Step:
    """Report once that the generation has lost replicas; with `again`, report further deaths."""
    generation = _loss_generation(held)
    if held.loss_reported >= generation and not again:
        return state, []
    slots = {r.local_rank for r in held.lost}
    if held.change is not None and held.recovering:  # every slot of the plan that is not alive
        slots = set(held.change.plan.slots(state.me.node))
        slots -= {r.local_rank for r in held.replicas if r.exit_code is None}
    first = next((_failure(r) for r in held.lost if r.local_rank in slots), None)
    record = PeerLossRecord(state.me.node, generation, tuple(sorted(slots)), first)
    return replace(state, held=replace(held, loss_reported=generation)), [WritePeerLoss(record)]


def possible(held: LocalGeneration, plan: Plan) -> bool:
    """Return whether the held replicas can go on as this plan says."""
    return (
        plan.transition is Transition.RECOVER
        and held.phase is Phase.RUNNING
        and not held.joining
        and all(r.resilient for r in held.replicas if r.exit_code is None)
    )


def begin(state: State, held: LocalGeneration, plan: Plan, master: MasterRecord) -> Step:
    """Tell the living replicas their new ranks, and report which of the plan's replicas have died."""
    node, before = state.me.node, held.change
    actions: list[Action] = [TellPlan(plan, master)]
    if before is not None:  # an earlier plan of this kind that was not carried out
        g = before.plan.generation
        if len(before.plan.ranks(node)):
            actions.append(WriteEnded(EndedRecord(node, g, Outcome.STOPPED)))
            state = replace(state, ended={**state.ended, (g, node): Outcome.STOPPED})
    slots = plan.slots(node)
    held = replace(held, change=StateChange(plan, (), float("inf"), announced=True))
    state = replace(state, held=held, acted=max(state.acted, plan.generation))
    if not set(slots) <= {r.local_rank for r in held.replicas if r.exit_code is None}:
        state, more = report_peer_loss(state, held)
        actions += more
    return state, actions


def adopt(
    state: State, held: LocalGeneration, change: StateChange, now: float
) -> tuple[State, LocalGeneration, list[Action]]:
    """Make the new generation the held one; replicas that are not in it become orphans."""
    plan, node = change.plan, state.me.node
    ready = bool(held.replicas) and all(r.resilient for r in held.replicas)
    newcomers = (replace(r, resilient=r.resilient or ready) for r in change.newcomers)
    have = {r.local_rank: r for r in (*held.replicas, *newcomers)}
    members = tuple(  # no replica could take a step meanwhile
        replace(have[slot], rank=rank, library=True, stepped=None if have[slot].stepped is None else now)
        for slot, rank in plan.rank_by_slot(node).items()
        if slot in have
    )
    leavers = (r for r in held.replicas if r.local_rank not in plan.slots(node))
    orphans = tuple(r for r in (*held.orphans, *leavers) if r.exit_code is None)
    before = held.generation
    held = LocalGeneration(plan.generation, members, plain=False, orphans=orphans, since=now)
    state = replace(
        state,
        held=held,
        acted=max(state.acted, plan.generation),
        ended={**state.ended, (before, node): Outcome.STOPPED},
    )
    record = EndedRecord(node, before, Outcome.STOPPED, 0)
    running = WriteRunning(plan.generation, library=True, resilient=all(r.resilient for r in members))
    return state, held, [Adopt(plan), WriteEnded(record), running]


def adopt_after_peer_loss(
    state: State, held: LocalGeneration, change: StateChange, now: float
) -> tuple[State, LocalGeneration, list[Action]]:
    """Do the same after a death during the change: newcomers that had not joined are dropped.

    A node that the change leaves out has nothing to adopt.
    """
    if not change.plan.slots(state.me.node):
        return state, held, []
    state, held, actions = adopt(state, held, change, now)
    late = tuple(
        replace(r, exit_code=-9, message="was not in it yet") if r.exit_code is None else r
        for r in held.replicas
        if r.local_rank in {new.local_rank for new in change.newcomers} - change.switched
    )
    if not late:
        return state, held, actions
    slots = tuple(r.local_rank for r in late)
    living = tuple(r.local_rank for r in held.replicas if r.local_rank in slots and r.exit_code is None)
    held = replace(
        held,
        replicas=tuple(r for r in held.replicas if r.local_rank not in slots),
        lost=(*held.lost, *late),
        orphans=(*held.orphans, *(r for r in held.replicas if r.local_rank in living)),
    )
    if living:
        actions.append(Kill(living, "somebody died while they joined"))
    return replace(state, held=held), held, actions


def _has_switched(held: LocalGeneration) -> bool:
    """Return whether a replica here has switched to the generation of a planned change."""
    return held.change is not None and bool(held.change.switched) and not held.recovering


def _loss_generation(held: LocalGeneration) -> int:
    """Return the generation to which a death belongs."""
    if held.change is not None and held.recovering:
        return held.change.plan.generation
    return held.generation


def _find(held: LocalGeneration, local_rank: int) -> Replica | None:
    return next((r for r in held.replicas if r.local_rank == local_rank), None)


def _failure(dead: Replica) -> Failure:
    return Failure(dead.rank, dead.exit_code or 0, dead.message, dead.exited)
