"""Decide what one node does about a death that others survive: pure functions, called by `decisions`.

A replica killed by a signal while the others are *resilient* (they reported it) is no failure. Nor is an
error that a newcomer of the last planned change in place raises. No replica is killed; `loss` tells the
coordinator which slots are dead. The coordinator answers with a plan with transition RECOVER that names the
survivors::

 a replica dies, or the living report a lost peer ─► a loss in g    they wait in their processes
 plan G (recover) ─► TellPlan to the living: the new rank of each, or to leave
     ─► all of G here switched: Adopt
 another death before that ─► a loss in G, and the next plan follows

Such a plan cannot be withdrawn: another one follows it, or an abort.

Replicas that have finished all epochs reach no point any more at which they could form another generation.
They go on to the end of the script, and the node reports a failure then: what the dead one had to do there
is not done.

If a planned change is under way and no replica has switched, it is withdrawn first. If one has switched, the
death belongs to the new generation, and so do all its living members.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from adaptdl_elastic.agent.core import inplace_change
from adaptdl_elastic.agent.core.states import (
    Action,
    Changing,
    Evidence,
    FromReplica,
    Joining,
    Kill,
    LocalGeneration,
    Lost,
    Recovering,
    Replica,
    ReplicaExited,
    State,
    Step,
    TellPlan,
    Training,
    failure_of,
)
from adaptdl_elastic.protocol.messages import Resilient
from adaptdl_elastic.rendezvous.schema.held import PeerLoss
from adaptdl_elastic.rendezvous.schema.records import Failure, MasterRecord, Plan


def handle_death(state: State, held: LocalGeneration, event: ReplicaExited, now: float) -> Step | None:
    """Record an exit that the other replicas survive, and report it to the coordinator if necessary.

    Return None if the exit is no such death.
    """
    if not _survived(held, event):
        return None
    actions: list[Action] = []
    if isinstance(held.course, Changing) and held.course.switched:
        state, held, actions = _adopt_after_peer_loss(state, held, held.course, now)
    slot = event.local_rank
    orphans = (replace(r, exit=event) if r.local_rank == slot else r for r in held.orphans)
    held = replace(held, orphans=tuple(orphans))
    dead = next((r for r in (*held.replicas, *held.lost) if r.local_rank == slot), None)
    if dead is None:  # a replica that was about to leave
        return replace(state, held=held), actions
    dead = replace(dead, exit=event if event.exit_code > 0 else replace(event, evidence=Evidence()))
    left = tuple(r for r in held.replicas if r.local_rank != slot)
    held = replace(held, replicas=left, lost=(*(r for r in held.lost if r.local_rank != slot), dead))
    if any(r.exit is None for r in left) or (state.plan is not None and state.plan.nodes > 1):
        actions.append(Lost(_loss_generation(held), _failure(dead)))
    return replace(state, held=_lose(held, state.me.node, again=True)), actions


def _survived(held: LocalGeneration, event: ReplicaExited) -> bool:
    """Return whether an exit is a death that the other replicas, if there are any, survive."""
    course, generations, members = held.course, {held.generation}, held.replicas
    if held.end is not None or isinstance(course, Joining):
        return False
    if isinstance(course, Changing | Recovering):
        generations.add(course.plan.generation)
    if isinstance(course, Changing) and course.switched:
        members += course.newcomers
    if event.generation not in generations:
        return False  # a replica that is on its way out
    replica = next((r for r in members if r.local_rank == event.local_rank), None)
    if replica is None or replica.signalled or replica.stopping or replica.exit is not None:
        return False
    others = [r for r in held.replicas if r.exit is None and r is not replica]
    if not all(held.goes_on(r) for r in others or [replica]):
        # the others could not form the new generation, and this replica had not joined it yet
        return held.lost_in >= held.generation and not held.goes_on(replica) and event.exit_code != 0
    raised = event.evidence.raised is not None and not event.evidence.lost_peer
    joins = replica.newcomer or replica not in held.replicas
    return event.exit_code < 0 or (raised and joins)


def handle_report(state: State, held: LocalGeneration, event: FromReplica, now: float) -> Step:
    """Handle a replica's report that others are gone."""
    course, actions = held.course, list[Action]()
    if held.end is not None or isinstance(course, Joining):
        return state, []
    if isinstance(course, Changing) and (course.switched or event.generation == course.plan.generation):
        # the replica had reached the new generation
        state, held, actions = _adopt_after_peer_loss(state, held, course, now)
    elif event.generation < _loss_generation(held):
        return state, []
    if (failed := fail_if_left_early(held)) is not held:
        return replace(state, held=failed), actions
    # it waits for another plan, also where a script survives deaths only while replicas switch
    if not any(r.resilient for r in held.replicas if r.local_rank == event.local_rank):
        held = held.update(event.local_rank, resilient=Resilient(held.generation))
    return replace(state, held=_lose(held, state.me.node)), actions


def fail_if_left_early(held: LocalGeneration) -> LocalGeneration:
    """Record a failure if a replica has ended well, but not its script, and the others wait for it."""
    if not isinstance(held.course, Training):
        return held
    for r in held.replicas:
        well = r.exit is not None and r.exit.exit_code == 0 and r.library
        if well and not (r.stopped or r.finished or r.epochs_finished):
            why = "exit code 0 in the middle of training (os._exit or sys.exit), while the others train"
            return held.fail(replace(_failure(r), message=why, kind="exit code 0", step=r.step))
    return held


def _lose(held: LocalGeneration, node: str, again: bool = False) -> LocalGeneration:
    """Record once that the generation has lost replicas; with `again`, record further deaths."""
    generation = _loss_generation(held)
    if held.lost_in >= generation and not again:
        return held
    slots = {r.local_rank for r in held.lost}
    if isinstance(held.course, Recovering):  # every slot of the plan that is not alive
        slots = set(held.course.plan.slots(node)) - {r.local_rank for r in held.replicas if r.exit is None}
    first = next((_failure(r) for r in held.lost if r.local_rank in slots), None)
    return replace(held, loss=PeerLoss(generation, tuple(sorted(slots)), first))


def begin(state: State, held: LocalGeneration, plan: Plan, master: MasterRecord, now: float) -> Step:
    """Tell the living replicas their new ranks, and report which of the plan's replicas have died."""
    node = state.me.node
    actions: list[Action] = [TellPlan(plan, master)]
    if isinstance(held.course, Changing):  # some replicas have already switched
        state, held, actions = _adopt_after_peer_loss(state, held, held.course, now)
        return state, actions
    held = replace(held, course=Recovering(plan))
    if not set(plan.slots(node)) <= {r.local_rank for r in held.replicas if r.exit is None}:
        held = _lose(held, node)
    return replace(state, held=held), actions


def reconcile(state: State, held: LocalGeneration, recovery: Recovering, now: float) -> Step | None:
    """Adopt the generation without the dead once all of its replicas here have switched; None: not yet."""
    ranks = recovery.plan.rank_by_slot(state.me.node)
    leavers = any(r.exit is None for r in held.replicas if r.local_rank not in ranks)
    if not ranks or leavers or not ranks.keys() <= recovery.switched | _never_switching(held, ranks):
        return None
    return inplace_change.adopt(state, held, recovery.plan, ranks, now)


def _never_switching(held: LocalGeneration, ranks: Mapping[int, int]) -> set[int]:
    """Return the slots that may end with the script instead of switching; `ranks`: the new ones by slot."""
    if held.lost_in >= held.generation:
        return set()  # a replica here waits for the others to form the new generation
    first = next((r for r in held.replicas if ranks.get(r.local_rank) == 0), None)
    if first is not None and first.rank != 0:
        return set()
    return {r.local_rank for r in held.replicas if r.epochs_finished and r.exit is None}


def _adopt_after_peer_loss(
    state: State, held: LocalGeneration, change: Changing, now: float
) -> tuple[State, LocalGeneration, list[Action]]:
    """Adopt the new generation after a death during the change; newcomers that had not joined are dropped.

    A node that the change leaves out has nothing to adopt.
    """
    ranks = change.plan.rank_by_slot(state.me.node)
    if not ranks:
        return state, held, []
    state, actions = inplace_change.adopt(state, held, change.plan, ranks, now)
    assert state.held is not None
    held = state.held
    slots = {new.local_rank for new in change.newcomers} - change.switched
    late = tuple(r for r in held.replicas if r.local_rank in slots)
    if not late:
        return state, held, actions
    living = tuple(r for r in late if r.exit is None)
    held = replace(
        held,
        replicas=tuple(r for r in held.replicas if r.local_rank not in slots),
        lost=(*held.lost, *(_not_joined(r, held.generation) for r in late)),
        orphans=(*held.orphans, *living),
    )
    if living:
        actions.append(Kill(tuple(r.local_rank for r in living), "somebody died while they joined"))
    return replace(state, held=held), held, actions


def _not_joined(late: Replica, generation: int) -> Replica:
    gone = ReplicaExited(generation, late.local_rank, -9, 0.0, "was not in it yet")
    return replace(late, exit=late.exit or gone)


def _loss_generation(held: LocalGeneration) -> int:
    """Return the generation to which a death belongs."""
    return held.course.plan.generation if isinstance(held.course, Recovering) else held.generation


def _failure(dead: Replica) -> Failure:
    assert dead.exit is not None
    return failure_of(dead.rank, dead.exit)
