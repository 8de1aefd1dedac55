"""Decide what an agent does, as a pure function: (state, event, now) → (new state, actions).

The state holds what the agent knows (the plan, who is registered, which generations have ended) and what it
runs (`held`: the replicas of one generation, or None). An event first changes what is known. Then
`_reconcile` compares that with what runs, and returns the actions that bring the two closer. Nothing here
reads a clock, the store or a process. Whatever takes time is requested by an action and reported by an event.
`deadline(state)` says when the next `Tick` is due.

A generation on a node::

 none ──plan names this node, `leaving` are gone──► rank 0 here: OpenMaster ─► MasterSeen ─► StartReplicas
 ▲                                                                                     │
 │                                                                            running ◄┘
 │   newer plan (restart), drain, timer      newer plan (abort), a failure │ │
 │        ┌─────── stopping ◄──────────────────────────────────────────────┘ │
 │        │ all exited, or checkpoint_timeout ──► killing ◄──────────────────┘
 └────────┴──────────── all exited: WriteEnded ◄────┘
"""

from __future__ import annotations

from dataclasses import replace

from adaptdl_elastic.agent.core import generation_end, hang_detection, inplace_change, peer_loss
from adaptdl_elastic.agent.core.states import (
    Action,
    AskToStop,
    Departure,
    EndedSeen,
    Event,
    Exit,
    FromReplica,
    Kill,
    Leave,
    LeaveNow,
    LocalGeneration,
    MasterSeen,
    NodesSeen,
    OpenMaster,
    Phase,
    PlanSeen,
    Replica,
    ReplicaExited,
    ReplicaStarted,
    SpecSeen,
    StartReplicas,
    State,
    StatusSeen,
    StoreAway,
    StoreBack,
    Unfit,
    WriteDraining,
    WriteEnded,
    WritePeerLoss,
    WriteRunning,
    failure_of,
)
from adaptdl_elastic.protocol.channel import STOPPED
from adaptdl_elastic.protocol.messages import (
    EpochsFinished,
    Finished,
    Hanging,
    Hello,
    PeerLost,
    Pong,
    Ready,
    Resilient,
    StepFinished,
    Stopping,
    Switched,
)
from adaptdl_elastic.rendezvous.schema.records import (
    EndedRecord,
    JobStatus,
    Outcome,
    PeerLossRecord,
    Plan,
    Transition,
)

OWN_STOP_AFTER = 5.0  # seconds that a draining agent waits for the coordinator's plan
PATIENCE = 60.0  # seconds that an agent without replicas waits for a store that is away or refuses it
KILL_AGAIN_AFTER = 5.0  # seconds between two SIGKILLs to processes that do not end


def decide(state: State, event: Event, now: float) -> tuple[State, list[Action]]:
    """Return the new state and the actions for an event.

    Args:
        state: what the agent knows and runs.
        event: what has happened; wall-clock times are part of events.
        now: monotonic seconds.
    """
    if state.exiting:
        return state, []
    state, actions = _learn(state, event, now)
    while True:
        state, more = _reconcile(state, now)
        actions += more
        if not more or state.exiting:
            return state, actions


def deadline(state: State) -> float | None:
    """Return when the next `Tick` is due at the latest; None: no time limit is running."""
    times = []
    held = state.held
    if held is None and state.away is not None and state.outcome is not None:
        times.append(_give_up_at(state, state.away))
    if held is None and state.departure is not None:
        times.append(state.outcome_at + OWN_STOP_AFTER)
    if held is not None and held.until is not None:
        times.append(held.until)
    if held is not None and held.phase is Phase.RUNNING:
        if held.change is not None and not held.change.announced and not held.change.switched:
            times.append(held.change.until)
        if held.join_by is not None:
            times.append(held.join_by)
        if state.departure is not None and not _follows_newer_plan(state, held):
            times.append(max(state.departure.since, held.since) + OWN_STOP_AFTER)
        times += hang_detection.due(state, held)
    return min(times, default=None)


def _learn(state: State, event: Event, now: float) -> tuple[State, list[Action]]:
    """Change what is known by an event."""
    match event:
        case PlanSeen(plan):
            return _learn_plan(state, plan)
        case StatusSeen(status):
            return (replace(state, status=status) if status.run == state.me.spec.run else state), []
        case NodesSeen(agents, holder):
            if agents.get(state.me.node, state.me.agent) == state.me.agent:
                return replace(state, agents=agents), []
            why = f"the node name {state.me.node!r} was taken by {holder} while this agent could not be heard"
            return _exit_now(state, 1, f"{why}: it has our place now")
        case EndedSeen(generation, node, outcome):
            return replace(state, ended={**state.ended, (generation, node): outcome}), []
        case MasterSeen(master):
            known = state.master is None or master.generation >= state.master.generation
            return (replace(state, master=master) if known else state), []
        case Leave(reason, when):
            if state.departure is not None:
                return state, []
            state = replace(state, departure=Departure(reason, now, when))
            return state, [WriteDraining(reason, when)]
        case LeaveNow(reason):
            return _exit_now(state, STOPPED, reason)
        case Unfit(reason):
            return _exit_now(state, 1, reason)
        case StoreAway(refused):
            return replace(state, away=now if state.away is None else state.away, refused=refused), []
        case StoreBack():
            return replace(state, away=None), []
        case SpecSeen(run):
            if run == state.me.spec.run:
                return state, []
            return _exit_now(
                state,
                1,
                f"job {state.me.spec.job!r} was started again as run {run}: this agent is of an older run",
            )
        case _:
            return _learn_replica(state, event, now)


def _learn_plan(state: State, plan: Plan) -> tuple[State, list[Action]]:
    if plan.run != state.me.spec.run or plan.claim:
        return state, []
    before = state.plan
    if before is not None and plan.generation <= before.generation:
        return state, []
    state = replace(state, plan=plan)
    actions: list[Action] = []
    # Generations that were replaced before they began here, or that this agent never saw, must be answered,
    # too: the next generation starts only when every node has reported that none of them runs.
    counted_on = {gone.generation for gone in plan.leaving if (gone.node, gone.agent) == _name(state)}
    if before is not None and before.generation > state.acted and _names_us(state, before):
        counted_on.add(before.generation)
    for generation in sorted(counted_on):
        if generation not in _under_way(state) and (generation, state.me.node) not in state.ended:
            state, answer = _answer(state, generation, Outcome.STOPPED)
            actions.append(answer)
    return state, actions


def _under_way(state: State) -> set[int]:
    """Return the generations that run here or are about to."""
    held = state.held
    if held is None:
        return set()
    return {held.generation, held.change.plan.generation if held.change is not None else held.generation}


def _name(state: State) -> tuple[str, str]:
    return state.me.node, state.me.agent


def _answer(state: State, generation: int, outcome: Outcome) -> tuple[State, Action]:
    """Report the end of a generation that does not run here."""
    me = state.me
    record = EndedRecord(me.node, generation, outcome, 0 if outcome is Outcome.DONE else STOPPED)
    ended = {**state.ended, (generation, me.node): outcome}
    return replace(state, ended=ended, acted=max(state.acted, generation)), WriteEnded(record)


def _learn_replica(state: State, event: Event, now: float) -> tuple[State, list[Action]]:
    held = state.held
    if held is None:
        return state, []
    match event:
        case FromReplica():
            return _learn_message(state, held, event, now)
        case ReplicaStarted(generation, local_rank, pid) if generation == held.generation:
            held = _change(held, local_rank, pid=pid)
        case ReplicaExited(generation, local_rank):
            for replica in held.replicas:
                if replica.hanging and replica.local_rank == local_rank:
                    why = replica.hang_reason or hang_detection.hang_message(state)
                    event = replace(event, message=why)
            if peer_loss.survived(held, event):
                return peer_loss.record_death(state, held, event, now)
            mine = generation == held.generation
            held = _learn_exit(held, event) if mine else inplace_change.learn_end(held, event)
    return replace(state, held=held), []


def _learn_message(
    state: State, held: LocalGeneration, event: FromReplica, now: float
) -> tuple[State, list[Action]]:
    local_rank, present = event.local_rank, event.generation == held.generation
    match event.message:
        case Ready() | Switched():
            held = inplace_change.learn(held, event, now)
        case Resilient():
            return peer_loss.record_resilient(state, held, local_rank)
        case EpochsFinished(finished):
            held = peer_loss.record_report(held, local_rank, epochs_finished=finished)
        case Finished():
            held = peer_loss.record_report(held, local_rank, finished=True)
        case Stopping(unsaved):
            held = peer_loss.record_report(held, local_rank, stopping=True, unsaved=unsaved)
        case PeerLost():
            return peer_loss.handle_report(state, held, event, now)
        # a newcomer is ready only after `ready`, and runs nothing before it has joined
        case Hello() if present and not held.joining:
            held = replace(_change(held, local_rank, library=True), plain=False)
            if all(r.library for r in held.replicas):  # the node can change its replicas in place from now on
                return replace(state, held=held), [WriteRunning(held.generation, library=True)]
        case StepFinished(step) if present:
            held = _change(held, local_rank, step=step, stepped=now, heard=now, pinged=None)
        case Pong() if present:
            held = _change(held, local_rank, heard=now, pinged=None)
        case Hanging(reason) if present:
            held, actions = hang_detection.kill_reported(state, held, local_rank, reason)
            return replace(state, held=held), actions
    return replace(state, held=held), []


def _learn_exit(held: LocalGeneration, event: ReplicaExited) -> LocalGeneration:
    local_rank, code = event.local_rank, event.exit_code
    replica = next((r for r in held.replicas if r.local_rank == local_rank), None)
    # other replicas died in the new generation before this one had joined (`adopt_after_peer_loss`)
    if replica is None:
        return peer_loss.orphan_ended(held, local_rank, code)
    if replica.exit_code is not None:
        return held
    stopped = _was_stopped(replica, event)
    held = _change(
        held,
        local_rank,
        exit_code=code,
        exited=event.time,
        message=event.message,
        evidence=event.evidence,
        unsignalled=not event.signal_arrived,
        stopped=stopped,
    )
    if held.joining:
        return held  # `inplace_change` handles it
    if stopped or held.phase is Phase.KILLING or held.failure is not None:
        return held
    if code == 0:
        return peer_loss.fail_if_left_early(held) if held.loss_reported >= held.generation else held
    return replace(held, failure=failure_of(replica.rank, code, event.message, event.time, event.evidence))


def _was_stopped(replica: Replica, event: ReplicaExited) -> bool:
    """Return whether a replica ended because it was asked to, not because its script was at its end.

    A script may answer SIGTERM with any exit code, 0 included, so after a signal the code proves nothing. The
    script ended by itself only if the signal could not reach it any more.
    """
    if event.exit_code == STOPPED or replica.stopping:
        return True
    return replica.signalled and event.signal_arrived and not replica.finished


def _change(held: LocalGeneration, local_rank: int, **fields: object) -> LocalGeneration:
    return replace(
        held,
        replicas=tuple(
            replace(r, **fields) if r.local_rank == local_rank else r  # type: ignore[arg-type]
            for r in held.replicas
        ),
    )


def _reconcile(state: State, now: float) -> tuple[State, list[Action]]:
    """Make one step from what runs towards what is wanted; no actions: nothing is to be done now."""
    if state.held is not None:
        return _reconcile_held(state, state.held, now)
    plan, status = state.plan, state.status
    if status is not None and status.state.ended:
        return _exit(state, status.process_exit_code, _reason_of(status))
    if state.away is not None and state.outcome is not None and now >= _give_up_at(state, state.away):
        code = {Outcome.DONE: 0, Outcome.STOPPED: STOPPED}.get(state.outcome, 1)
        what = "has refused us" if state.refused else "has been away"
        why = f"the store {what} for {PATIENCE:g} s: nobody says what became of the job"
        return _exit(state, code, f"{state.outcome.value} here; {why}")
    newest = plan is not None and plan.generation > state.acted
    if state.departure is not None:
        return _depart(state, newest, now)
    if state.me.on_demand and plan is not None and not _names_us(state, plan):
        return _exit(state, 0, f"generation {plan.generation} has no replica on this node")
    if plan is None or not newest or state.lapsed or not _names_us(state, plan):
        return state, []
    # this node's survivors, which the plan counts on, have ended meanwhile
    if plan.transition is Transition.RECOVER:
        return _answer_for_the_ended(state, plan)
    # Survivors of a change in place never leave. If all have ended, the plan is started from scratch. A
    # registration that is missing is no end: after an interruption of the store an agent registers again.
    ended = all((leaver.generation, leaver.node) in state.ended for leaver in plan.leaving)
    join = plan.transition is Transition.INPLACE and not ended
    if not join and not _all_gone(state, plan):
        return state, []
    if not join and _was_done(state, plan):
        state, answer = _answer(replace(state, outcome=Outcome.DONE), plan.generation, Outcome.DONE)
        return state, [answer]
    if state.master is None or state.master.generation != plan.generation:
        return _open_master(state, plan)
    named = plan.rank_by_slot(state.me.node)
    held = LocalGeneration(
        plan.generation, tuple(Replica(slot, rank) for slot, rank in named.items()), since=now
    )
    actions: list[Action] = [StartReplicas(plan, state.master, tuple(named), join)]
    if join:
        held = replace(held, joining=True, join_by=now + state.me.spec.rescale_timeout)
    else:
        actions.append(WriteRunning(plan.generation))
    return replace(state, held=held, acted=plan.generation), actions


def _answer_for_the_ended(state: State, plan: Plan) -> tuple[State, list[Action]]:
    """Report that this node's survivors came to the end of their script, or that they have died."""
    me = state.me
    last = max((g for g, node in state.ended if node == me.node and g < plan.generation), default=-1)
    if state.ended.get((last, me.node)) is Outcome.DONE:
        state, answer = _answer(replace(state, outcome=Outcome.DONE), plan.generation, Outcome.DONE)
        return state, [answer]
    state, answer = _answer(state, plan.generation, Outcome.ABORTED)
    return state, [WritePeerLoss(PeerLossRecord(me.node, plan.generation, plan.slots(me.node))), answer]


def _give_up_at(state: State, away: float) -> float:
    return max(away, state.outcome_at) + PATIENCE


def _open_master(state: State, plan: Plan) -> tuple[State, list[Action]]:
    """Open the store of a generation if this node has rank 0; at most once."""
    if plan.ranks(state.me.node).start != 0 or not len(plan.ranks(state.me.node)):
        return state, []
    if state.opening == plan.generation:
        return state, []
    return replace(state, opening=plan.generation), [OpenMaster(plan.generation)]


def _reconcile_held(state: State, held: LocalGeneration, now: float) -> tuple[State, list[Action]]:
    alive = tuple(r.local_rank for r in held.alive)
    step = inplace_change.reconcile(state, held, now)
    if step is not None:
        return step
    if not alive:
        return generation_end.report_end(state, held, now)
    if held.phase is Phase.KILLING:
        if held.until is not None and now >= held.until:
            return _kill(state, held, "it does not go", now)
        return state, []
    why = _why_kill(state, held, now)
    if why is not None:
        return _kill(state, held, why, now)
    if held.phase is Phase.RUNNING:
        step = hang_detection.watch(state, held, now)
        if step is not None:
            return step
        plan = state.plan
        if plan is not None and _follows_newer_plan(state, held):
            if held.change is not None and held.change.plan is plan:
                return state, []
            recovers = plan.transition is Transition.RECOVER
            return (_recover if recovers else _begin_inplace)(state, held, plan, now)
        why = _why_stop(state, held, now)
        if why is not None:
            held = replace(held, phase=Phase.STOPPING, until=now + state.me.spec.checkpoint_timeout)
            plain = tuple(r.local_rank for r in held.alive if not r.library)
            for local_rank in plain:
                held = _change(held, local_rank, signalled=True)
            asked = tuple(local_rank for local_rank in alive if local_rank not in plain)
            return replace(state, held=held), [AskToStop(asked, plain, why)]
    return state, []


def _follows_newer_plan(state: State, held: LocalGeneration) -> bool:
    """Return whether the held replicas follow a newer plan without leaving their processes.

    Meanwhile nothing else stops them, so the time limit of a departing node does not apply.
    """
    plan = state.plan
    if plan is None or plan.generation <= max(held.generation, held.withdrawn):
        return False
    if held.change is not None and held.change.plan is plan:
        return True
    if plan.transition is Transition.RECOVER:
        return peer_loss.possible(held, plan)
    return held.change is None and inplace_change.possible(held, plan)


def _begin_inplace(state: State, held: LocalGeneration, plan: Plan, now: float) -> tuple[State, list[Action]]:
    """Begin a change in place once the address of the new generation's store is known."""
    if state.lapsed:
        return state, []
    if held.orphans and any(r.exit_code is None for r in held.orphans):
        return state, []  # orphans still use their slots
    if state.master is None or state.master.generation != plan.generation:
        return _open_master(state, plan)
    return inplace_change.begin(state, held, plan, state.master, now)


def _recover(state: State, held: LocalGeneration, plan: Plan, now: float) -> tuple[State, list[Action]]:
    """Begin to go on without the dead once the address of the new generation's store is known."""
    master = state.master
    if master is None or master.generation != plan.generation:
        return _open_master(state, plan)
    # some replicas have already switched to the planned change
    if held.change is not None and not held.recovering:
        state, held, actions = peer_loss.adopt_after_peer_loss(state, held, held.change, now)
        return state, actions
    return peer_loss.begin(state, held, plan, master)


def _why_kill(state: State, held: LocalGeneration, now: float) -> str | None:
    """Return why the held replicas are to be killed, or None."""
    plan, status = state.plan, state.status
    if held.failure is not None:
        return f"replica {held.failure.rank} failed"
    newer = plan is not None and plan.generation > held.generation
    if plan is not None and newer and plan.transition is Transition.ABORT:
        return f"generation {plan.generation} begins anew: {plan.reason}"
    recover = plan is not None and newer and plan.transition is Transition.RECOVER
    if plan is not None and recover and held.phase is Phase.RUNNING and not peer_loss.possible(held, plan):
        return f"generation {plan.generation} goes on without the dead, which these replicas cannot"
    if status is not None and status.state.ended:
        return f"the job has {status.state.value}: {status.reason}"
    if held.phase is Phase.STOPPING and held.until is not None and now >= held.until:
        return f"no checkpoint within {state.me.spec.checkpoint_timeout:g} s"
    return None


def _why_stop(state: State, held: LocalGeneration, now: float) -> str | None:
    """Return why the held replicas are to save and exit, or None."""
    plan = state.plan
    newer = plan is not None and plan.generation > max(held.generation, held.withdrawn)
    if plan is not None and newer and not inplace_change.waits(held, plan):
        return plan.reason or plan.cause.value
    if state.departure is not None and now >= max(state.departure.since, held.since) + OWN_STOP_AFTER:
        return state.departure.reason
    # one replica was stopped from outside: the others have agreed to stop with it, or will fail without it
    if any(r.stopped for r in held.replicas):
        return "another replica stopped"
    return None


def _kill(state: State, held: LocalGeneration, why: str, now: float) -> tuple[State, list[Action]]:
    alive = tuple(r.local_rank for r in held.alive)
    killed = why if held.phase is Phase.STOPPING else held.killed
    held = replace(held, phase=Phase.KILLING, until=now + KILL_AGAIN_AFTER, killed=killed)
    return replace(state, held=held), [Kill(alive, why)]


def _names_us(state: State, plan: Plan) -> bool:
    mine = [p for p in plan.placements if p.node == state.me.node]
    return bool(mine) and mine[0].agent in ("", state.me.agent)


def _all_gone(state: State, plan: Plan) -> bool:
    return all(_gone(state, leaving.generation, leaving.node, leaving.agent) for leaving in plan.leaving)


def _gone(state: State, generation: int, node: str, agent: str) -> bool:
    """Return whether a node's replicas of a generation can no longer be running."""
    if (generation, node) in state.ended:
        return True
    return state.agents is not None and state.agents.get(node) != agent


def _was_done(state: State, plan: Plan) -> bool:
    """Return whether the script ended while this plan was made, so that nothing is left to run.

    Plans between that generation and this one may have been replaced before their generations began. Nodes
    answer `stopped` for those.
    """
    if not plan.leaving or plan.transition is Transition.ABORT:
        return False
    for before in sorted({leaving.generation for leaving in plan.leaving}, reverse=True):
        outcomes = {outcome for (generation, _), outcome in state.ended.items() if generation == before}
        if outcomes == {Outcome.DONE}:
            return True
        if not outcomes <= {Outcome.DONE, Outcome.STOPPED}:
            return False
    return False


def _depart(state: State, newest: bool, now: float) -> tuple[State, list[Action]]:
    """Exit because this node leaves and runs nothing; first answer a newer plan that counts on it."""
    plan, departure = state.plan, state.departure
    if departure is None:
        return state, []
    if plan is not None and newest and _names_us(state, plan):
        state, answer = _answer(state, plan.generation, Outcome.STOPPED)
        return state, [answer]
    if state.outcome is Outcome.DONE and now < state.outcome_at + OWN_STOP_AFTER:
        # this may have been the last node, so the coordinator may be about to report the job as done
        return state, []
    others = any(agent != state.me.agent for agent in (state.agents or {}).values())
    if others:
        return _exit(state, 0, f"drained: {departure.reason}")
    saved = f"; its state is not saved: {state.unsaved}" if state.unsaved else ""
    return _exit(state, STOPPED, f"stopped: {departure.reason}{saved}")


def _exit(state: State, code: int, reason: str) -> tuple[State, list[Action]]:
    return replace(state, exiting=True), [Exit(code, reason)]


def _exit_now(state: State, code: int, reason: str) -> tuple[State, list[Action]]:
    actions: list[Action] = []
    if state.held is not None and state.held.alive:
        actions.append(Kill(tuple(r.local_rank for r in state.held.alive), reason))
    return replace(state, exiting=True), [*actions, Exit(code, reason)]


def _reason_of(status: JobStatus) -> str:
    state, reason = status.state.value, status.reason
    if reason.startswith(state):
        return reason
    return f"{state}: {reason}" if reason else state
