"""Decide what an agent does, as a pure function: (state, event, now) → (new state, actions).

The state holds what the agent knows (the plan, who is registered, which generations have ended) and what it
runs (`held`: the replicas of one generation, or None). An event first changes what is known. Then
`_reconcile` compares that with what runs, and returns the actions that bring the two closer. Nothing here
reads a clock, the store or a process. Whatever takes time is requested by an action and reported by an event.
`deadline(state)` says when the next `Tick` is due.

The generation held on a node::

 none ──plan names this node, `leaving` are gone──► rank 0 here: OpenMaster ─► MasterSeen ─► StartReplicas
 ▲                                                                                     │
 │                                          Training, Joining, Changing or Recovering ◄┘
 │   newer plan (restart), drain, timer      newer plan (abort), a failure │ │
 │        ┌─────── Stopping ◄──────────────────────────────────────────────┘ │
 │        │ all exited, or checkpoint_timeout ──► Killing ◄──────────────────┘
 └────────┴──────────── all exited: Ended ◄────────┘

`course` says what its replicas do, and stays known while they are ended, because it says which generations
have ended then. `inplace_change` and `peer_loss` make the steps from one course to another::

 Training ──plan (in place): TellPlan──► Changing ──all here switched: Adopt──► Training
    ▲  ▲                                   │ given up before a replica has switched: Withdraw
    │  └───────────────────────────────────┘
 Joining (newcomers only)      Training ──a death, plan (recover): TellPlan──► Recovering ──Adopt──► Training
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from adaptdl_elastic.agent.core import (
    generation_end,
    hang_detection,
    held_record,
    inplace_change,
    peer_loss,
)
from adaptdl_elastic.agent.core.states import (
    Absence,
    AskToStop,
    Changing,
    Departure,
    Event,
    Exit,
    FromReplica,
    Joining,
    Kill,
    Killing,
    Leave,
    LeaveNow,
    LeftSeen,
    LocalEnd,
    LocalGeneration,
    MasterSeen,
    NodesSeen,
    OpenMaster,
    PlanSeen,
    Recovering,
    Replica,
    ReplicaExited,
    SpecSeen,
    StartReplicas,
    State,
    StatusSeen,
    Step,
    Stopping,
    StoreAway,
    StoreBack,
    Tick,
    Training,
    Unfit,
    WriteDraining,
    failure_of,
)
from adaptdl_elastic.protocol import messages
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
    Switched,
)
from adaptdl_elastic.rendezvous.schema.held import GenerationEnd, Left
from adaptdl_elastic.rendezvous.schema.records import JobStatus, Leaving, Outcome, Plan, Transition

OWN_STOP_AFTER = 5.0  # seconds that a draining agent waits for the coordinator's plan
PATIENCE = 60.0  # seconds that an agent without replicas waits for a store that is away or refuses it
KILL_AGAIN_AFTER = 5.0  # seconds between two SIGKILLs to processes that do not end


def decide(state: State, event: Event, now: float) -> Step:
    """Return the new state and the actions for an event.

    Args:
        state: what the agent knows and runs.
        event: what has happened; wall-clock times are part of events.
        now: monotonic seconds.
    """
    if state.exiting:
        return state, []
    state, actions = held_record.report(*_learn(state, event, now))
    before = None
    while state is not before and not state.exiting:
        before = state
        state, more = _reconcile(state, now)
        if state is not before:
            state, more = held_record.report(state, more)
        actions += more
    return state, actions


def deadline(state: State) -> float | None:
    """Return when the next `Tick` is due at the latest; None: no time limit is running."""
    times, held = [], state.held
    if held is None:
        if state.last is not None and state.away is not None:
            times.append(_give_up_at(state.last, state.away))
        if state.last is not None and state.departure is not None:
            times.append(state.last.at + OWN_STOP_AFTER)
        return min(times, default=None)
    match held.end or held.course:
        case Joining(until) | Stopping(until) | Killing(again=until):
            times.append(until)
        case Changing(until=until, switched=switched) if not switched:
            times.append(until)
    if held.end is None:
        if state.departure is not None and not _is_followed(held, _newest(state)):
            times.append(_own_stop_at(state.departure, held))
        times += hang_detection.due(state, held)
    return min((when for when in times if when < math.inf), default=None)


def _learn(state: State, event: Event, now: float) -> Step:
    """Change what is known by an event."""
    match event:
        case Tick():
            return hang_detection.watch(state, now)
        case PlanSeen(plan):
            return _learn_plan(state, plan)
        case StatusSeen(status):
            return (replace(state, status=status) if status.run == state.me.spec.run else state), []
        case NodesSeen(agents, holder):
            if agents.get(state.me.node, state.me.agent) == state.me.agent:
                return replace(state, agents=agents), []
            why = f"the node name {state.me.node!r} was taken by {holder} while this agent could not be heard"
            return _exit(state, 1, f"{why}: it has our place now")
        case LeftSeen(left):
            return replace(state, left={**state.left, left.node: left}), []
        case MasterSeen(master):
            known = state.master is None or master.generation >= state.master.generation
            return (replace(state, master=master) if known else state), []
        case Leave(reason, when):
            if state.departure is not None:
                return state, []
            state = replace(state, departure=Departure(reason, now, when))
            return state, [WriteDraining(reason, when)]
        case LeaveNow(reason):
            return _exit(state, STOPPED, reason)
        case Unfit(reason):
            return _exit(state, 1, reason)
        case StoreAway(refused):
            since = now if state.away is None else state.away.since
            return replace(state, away=Absence(since, refused)), []
        case StoreBack():
            return replace(state, away=None), []
        case SpecSeen(run):
            if run == state.me.spec.run:
                return state, []
            why = f"job {state.me.spec.job!r} was started again as run {run}: this agent is of an older run"
            return _exit(state, 1, why)
        case FromReplica() if state.held is not None:
            return _learn_message(state, state.held, event, now)
        case ReplicaExited() if state.held is not None:
            return _learn_exit(state, state.held, event, now)
    return state, []


def _learn_plan(state: State, plan: Plan) -> Step:
    if plan.run != state.me.spec.run or plan.claim:
        return state, []
    before = state.plan
    if before is not None and plan.generation <= before.generation:
        return state, []
    # a generation that counted on this agent and was replaced before it began here will never start
    me = (state.me.node, state.me.agent)
    counted_on = state.held is not None or any((one.node, one.agent) == me for one in plan.leaving)
    if counted_on or (before is not None and _names_us(state, before)):
        state = replace(state, acted=max(state.acted, plan.generation - 1))
    return replace(state, plan=plan), []


def _end_before_start(state: State, end: GenerationEnd) -> Step:
    """Record the end of a generation that does not start here."""
    last = state.last
    if end.outcome is Outcome.DONE:
        last = replace(last or LocalEnd(end.outcome), outcome=end.outcome)
    return replace(state, last=last).add_ends(end), []


def _learn_message(state: State, held: LocalGeneration, event: FromReplica, now: float) -> Step:
    local_rank, present = event.local_rank, event.generation == held.generation
    match event.message:
        case Ready() | Switched():
            held = inplace_change.learn(held, event, now)
        case Resilient() as said:
            held = held.update(local_rank, resilient=said)
        case EpochsFinished(finished):
            held = held.update(local_rank, epochs_finished=finished)
        case Finished():
            held = held.update(local_rank, finished=True)
        case messages.Stopping(unsaved):
            held = held.update(local_rank, stopping=True, unsaved=unsaved)
        case PeerLost():
            return peer_loss.handle_report(state, held, event, now)
        # a newcomer is ready only after `ready`, and runs nothing before it has joined
        case Hello() if present and not isinstance(held.course, Joining):
            held = held.update(local_rank, library=True)
        case StepFinished(step, when) if present:
            held = held.update(local_rank, step=step, stepped=now, heard=now, pinged=None)
            if held.first_step is None:
                held = replace(held, first_step=when)
        case Pong() if present:
            held = held.update(local_rank, heard=now, pinged=None)
        case Hanging(reason) if present:
            return hang_detection.kill_reported(state, held, local_rank, reason)
    return replace(state, held=held), []


def _learn_exit(state: State, held: LocalGeneration, event: ReplicaExited, now: float) -> Step:
    replica = next((r for r in held.replicas if r.local_rank == event.local_rank), None)
    if replica is not None and replica.hanging:
        event = replace(event, message=replica.hanging)
    step = peer_loss.handle_death(state, held, event, now)
    if step is not None:
        return step
    # other replicas died in the new generation before this one had joined (`peer_loss`)
    if event.generation != held.generation or replica is None:
        return replace(state, held=inplace_change.learn_end(held, event)), []
    if replica.exit is not None:
        return state, []
    stopped = _was_stopped(replica, event)
    held = held.update(event.local_rank, exit=event, stopped=stopped)
    # `inplace_change` handles the end of a newcomer
    if not stopped and not isinstance(held.course, Joining) and not isinstance(held.end, Killing):
        if event.exit_code != 0:
            held = held.fail(failure_of(replica.rank, event))
        elif held.lost_in >= held.generation:
            held = peer_loss.fail_if_left_early(held)
    return replace(state, held=held), []


def _was_stopped(replica: Replica, event: ReplicaExited) -> bool:
    """Return whether a replica ended because it was asked to, not because its script was at its end.

    A script may answer SIGTERM with any exit code, 0 included, so after a signal the code proves nothing. The
    script ended by itself only if the signal could not reach it any more.
    """
    if event.exit_code == STOPPED or replica.stopping:
        return True
    return replica.signalled and event.signal_arrived and not replica.finished


def _reconcile(state: State, now: float) -> Step:
    """Make one step from what runs towards what is wanted; the same state: nothing is to be done now."""
    if state.held is not None:
        return _reconcile_held(state, state.held, now)
    status, last, plan = state.status, state.last, _newest(state)
    if status is not None and status.state.ended:
        return _exit(state, status.process_exit_code, _reason_of(status))
    if state.away is not None and last is not None and now >= _give_up_at(last, state.away):
        code = {Outcome.DONE: 0, Outcome.STOPPED: STOPPED}.get(last.outcome, 1)
        what = "has refused us" if state.away.refused else "has been away"
        why = f"the store {what} for {PATIENCE:g} s: nobody says what became of the job"
        return _exit(state, code, f"{last.outcome.value} here; {why}")
    if state.departure is not None:
        return _depart(state, state.departure, plan, now)
    if state.me.on_demand and state.plan is not None and not _names_us(state, state.plan):
        return _exit(state, 0, f"generation {state.plan.generation} has no replica on this node")
    if plan is None or state.lapsed or not _names_us(state, plan):
        return state, []
    # this node's survivors, which the plan counts on, have ended meanwhile
    if plan.transition is Transition.RECOVER:
        return _answer_for_the_ended(state, plan)
    # Survivors of a change in place never leave. If all have ended, the plan is started from scratch. A
    # registration that is missing is no end: after an interruption of the store an agent registers again.
    ends = [_end_at(state, leaver) for leaver in plan.leaving]
    ended = all(left and outcome is not Outcome.LOST for left, outcome in ends)
    join = plan.transition is Transition.INPLACE and not ended
    if not join and not _all_gone(state, plan):
        return state, []
    if not join and _was_done(state, plan):
        return _end_before_start(state, GenerationEnd(plan.generation, Outcome.DONE))
    if state.master is None or state.master.generation != plan.generation:
        return _open_master(state, plan)
    named = plan.rank_by_slot(state.me.node)
    replicas = tuple(Replica(slot, rank) for slot, rank in named.items())
    course = Joining(now + state.me.spec.rescale_timeout) if join else Training()
    held = LocalGeneration(plan.generation, replicas, course, since=now)
    start = StartReplicas(plan, state.master, tuple(named), join)
    return replace(state, held=held, acted=plan.generation), [start]


def _newest(state: State) -> Plan | None:
    """Return the newest plan if it was neither started nor given up here yet."""
    return state.plan if state.plan is not None and state.plan.generation > state.acted else None


def _answer_for_the_ended(state: State, plan: Plan) -> Step:
    """Report that this node's survivors came to the end of their script, or that they have died."""
    if state.ends and state.ends[-1].outcome is Outcome.DONE:
        return _end_before_start(state, GenerationEnd(plan.generation, Outcome.DONE))
    dead = plan.slots(state.me.node)
    return _end_before_start(state, GenerationEnd(plan.generation, Outcome.ABORTED, STOPPED, lost=dead))


def _give_up_at(last: LocalEnd, away: Absence) -> float:
    return max(away.since, last.at) + PATIENCE


def _own_stop_at(departure: Departure, held: LocalGeneration) -> float:
    return max(departure.since, held.since) + OWN_STOP_AFTER


def _open_master(state: State, plan: Plan) -> Step:
    """Open the store of a generation if this node has rank 0; at most once."""
    first = plan.placements and plan.placements[0].node == state.me.node
    if not first or state.opening == plan.generation:
        return state, []
    return replace(state, opening=plan.generation), [OpenMaster(plan.generation)]


def _reconcile_held(state: State, held: LocalGeneration, now: float) -> Step:
    """Make one step for the held generation."""
    step = None
    match held.end or held.course:
        case Joining() as joining:
            step = inplace_change.reconcile_joining(state, held, joining, now)
        case Changing() as change:
            step = inplace_change.reconcile(state, held, change, now)
        case Recovering() as recovery:
            step = peer_loss.reconcile(state, held, recovery, now)
    if step is not None:
        return step
    if not alive(held):
        return generation_end.report_end(state, held, now)
    end = held.end
    if not isinstance(end, Killing) and (why := _why_kill(state, held, now)) is not None:
        end = Killing(why, asked=end is not None)
    match end:
        case None:
            return _reconcile_running(state, held, now)
        case Killing(why, again=again) if now >= again:
            held = replace(held, end=replace(end, again=now + KILL_AGAIN_AFTER))
            why = why if again == -math.inf else "it does not go"
            return replace(state, held=held), [Kill(_slots(alive(held)), why)]
    return state, []


def alive(held: LocalGeneration) -> tuple[Replica, ...]:
    """Return the replicas that have not exited, newcomers and orphans included."""
    newcomers = held.course.newcomers if isinstance(held.course, Changing) else ()
    return tuple(r for r in (*held.replicas, *newcomers, *held.orphans) if r.exit is None)


def _slots(replicas: Iterable[Replica]) -> tuple[int, ...]:
    return tuple(r.local_rank for r in replicas)


def _why_kill(state: State, held: LocalGeneration, now: float) -> str | None:
    """Return why the held replicas are to be killed, or None."""
    plan, status = _newest(state), state.status
    if plan is not None and plan.transition is Transition.ABORT:
        return f"generation {plan.generation} begins anew: {plan.reason}"
    resilient = all(held.goes_on(r) for r in held.replicas if r.exit is None)
    if plan is not None and plan.transition is Transition.RECOVER and held.end is None and not resilient:
        return f"generation {plan.generation} goes on without the dead, which these replicas cannot"
    if status is not None and status.state.ended:
        return f"the job has {status.state.value}: {status.reason}"
    if isinstance(held.end, Stopping) and now >= held.end.until:
        return f"no checkpoint within {state.me.spec.checkpoint_timeout:g} s"
    return None


def _reconcile_running(state: State, held: LocalGeneration, now: float) -> Step:
    """Follow a newer plan, or ask the replicas to save and exit."""
    plan, departure = _newest(state), state.departure
    if plan is not None and _is_followed(held, plan):
        return _follow_plan(state, held, plan, now)
    if plan is not None and not isinstance(held.course, Joining):
        why = plan.reason or plan.cause.value
    elif departure is not None and now >= _own_stop_at(departure, held):
        why = departure.reason
    # one replica was stopped from outside: the others have agreed to stop with it, or will fail without it
    elif any(r.stopped for r in held.replicas):
        why = "another replica stopped"
    else:
        return state, []
    asked = _slots(r for r in alive(held) if r.library)
    plain = _slots(r for r in alive(held) if not r.library)
    for slot in plain:
        held = held.update(slot, signalled=True)
    held = replace(held, end=Stopping(now + state.me.spec.checkpoint_timeout))
    return replace(state, held=held), [AskToStop(asked, plain, why)]


def _is_followed(held: LocalGeneration, plan: Plan | None) -> bool:
    """Return whether the held replicas follow a newer plan without leaving their processes.

    Meanwhile nothing else stops them, so the time limit of a departing node does not apply.
    """
    match held.course:
        case Changing(under_way) | Recovering(under_way) if under_way == plan:
            return True
        case Training() if plan is not None and plan.transition is Transition.INPLACE:
            return bool(plan.placements) and all(r.library for r in held.replicas if r.exit is None)
    return plan is not None and plan.transition is Transition.RECOVER


def _follow_plan(state: State, held: LocalGeneration, plan: Plan, now: float) -> Step:
    """Begin to follow a plan once the address of the new generation's store is known."""
    course, master, recovers = held.course, state.master, plan.transition is Transition.RECOVER
    if isinstance(course, Changing | Recovering) and course.plan == plan:
        return state, []
    # orphans still use their slots
    if not recovers and (state.lapsed or any(r.exit is None for r in held.orphans)):
        return state, []
    if master is None or master.generation != plan.generation:
        return _open_master(state, plan)
    begin = peer_loss.begin if recovers else inplace_change.begin
    return begin(state, held, plan, master, now)


def _names_us(state: State, plan: Plan) -> bool:
    mine = [p for p in plan.placements if p.node == state.me.node]
    return bool(mine) and mine[0].agent in ("", state.me.agent)


def _end_at(state: State, one: Leaving) -> tuple[bool, Outcome | None]:
    """Return whether a node has left the generation in which it counted, and how that ended if it had begun.

    Nothing runs on this node now.
    """
    said = [state.left.get(one.node, Left(one.node))]
    if one.node == state.me.node:
        said.insert(0, Left(one.node, state.me.agent, state.acted, tuple(end.short for end in state.ends)))
    outcomes = [end.outcome for left in said if (end := left.end_of(one.generation)) is not None]
    left = any(left.has_left(one.generation, one.agent) for left in said)
    return left, next(iter(outcomes), None)


def _all_gone(state: State, plan: Plan) -> bool:
    """Return whether no replica of the generations before can be running any more."""
    return all(
        _end_at(state, one)[0] or (state.agents is not None and state.agents.get(one.node) != one.agent)
        for one in plan.leaving
    )


def _was_done(state: State, plan: Plan) -> bool:
    """Return whether the script ended while this plan was made, so that nothing is left to run.

    Plans between that generation and this one may have been replaced before their generations began.
    """
    known = {outcome for one in plan.leaving if (outcome := _end_at(state, one)[1]) is not None}
    return plan.transition is not Transition.ABORT and known - {Outcome.LOST} == {Outcome.DONE}


def _depart(state: State, departure: Departure, newest: Plan | None, now: float) -> Step:
    """Exit because this node leaves and runs nothing; first answer a newer plan that counts on it."""
    last = state.last
    if newest is not None and _names_us(state, newest):
        return _end_before_start(state, GenerationEnd(newest.generation, Outcome.STOPPED, STOPPED))
    if last is not None and last.outcome is Outcome.DONE and now < last.at + OWN_STOP_AFTER:
        # this may have been the last node, so the coordinator may be about to report the job as done
        return state, []
    others = any(agent != state.me.agent for agent in (state.agents or {}).values())
    if others:
        return _exit(state, 0, f"drained: {departure.reason}")
    saved = f"; its state is not saved: {last.unsaved}" if last is not None and last.unsaved else ""
    return _exit(state, STOPPED, f"stopped: {departure.reason}{saved}")


def _exit(state: State, code: int, reason: str) -> Step:
    """End the agent, and at once what runs here."""
    living = () if state.held is None else alive(state.held)
    kill = [Kill(_slots(living), reason)] if living else []
    return replace(state, exiting=True), [*kill, Exit(code, reason)]


def _reason_of(status: JobStatus) -> str:
    state, reason = status.state.value, status.reason
    if reason.startswith(state):
        return reason
    return f"{state}: {reason}" if reason else state
