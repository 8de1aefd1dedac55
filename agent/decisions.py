"""What an agent does, as a pure function: (state, event, now) → (new state, actions).

The state holds what the agent has been told (the plan, who is registered, what has ended) and what it
has (`held`: the replicas of one generation, or nothing). Every event first changes what is known; then
`_reconcile` compares that with what is held and answers with the actions that bring it closer. Nothing
here reads a clock, the store or a process; everything that takes time is asked for as an action and
comes back as an event. `deadline(state)` says when to send a `Tick` at the latest.

A generation on a node::

    none ──plan names us, `leaving` are gone──► rank 0 here: OpenMaster ─► MasterSeen ─► StartReplicas
      ▲                                                                                     │
      │                                                                            running ◄┘
      │   newer plan (restart), drain, timer      newer plan (abort), a failure │ │
      │        ┌─────── stopping ◄──────────────────────────────────────────────┘ │
      │        │ all exited, or checkpoint_timeout ──► killing ◄──────────────────┘
      └────────┴──────────── all exited: WriteEnded ◄────┘
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from adaptdl_elastic.rendezvous.records import (
    EndedRecord,
    Failure,
    JobState,
    JobStatus,
    MasterRecord,
    Outcome,
    Plan,
    Transition,
)

STOPPED = 143  # exit code of what can be resumed
OWN_STOP_AFTER = 5.0  # seconds that a draining agent waits for the coordinator's plan
KILL_AGAIN_AFTER = 5.0  # seconds between two SIGKILLs at what will not go


@dataclass(frozen=True)
class Identity:
    """Who this agent is, and the limits it keeps to; constant."""

    node: str
    agent: str
    job: str
    run: str
    checkpoint_timeout: float = 120.0
    hang_timeout: float | None = None  # seconds without a step, after a first one; None: never


@dataclass(frozen=True)
class Replica:
    """One process of a generation."""

    local_rank: int
    rank: int
    pid: int | None = None
    library: bool = False  # it said hello: stop it by message
    signalled: bool = False  # it was sent SIGTERM: whatever it answers is what we asked for
    exit_code: int | None = None
    exited: float = 0.0  # wall clock
    step: int | None = None
    stepped: float | None = None  # `now` of its newest step


class Phase(str, Enum):
    """What becomes of the held generation."""

    RUNNING = "running"
    STOPPING = "stopping"  # asked to save and leave
    KILLING = "killing"


@dataclass(frozen=True)
class Held:
    """The replicas of one generation on this node."""

    generation: int
    replicas: tuple[Replica, ...]
    phase: Phase = Phase.RUNNING
    until: float | None = None  # stopping: kill then; killing: kill again then
    failure: Failure | None = None  # the first one, which made us kill the others
    plain: bool = True  # nobody said hello

    @property
    def alive(self) -> tuple[Replica, ...]:
        """Those that have not exited."""
        return tuple(r for r in self.replicas if r.exit_code is None)


@dataclass(frozen=True)
class Departure:
    """Why and since when this node leaves the job."""

    reason: str
    since: float  # `now`
    deadline: float | None = None  # wall clock: when the node will be gone


@dataclass(frozen=True)
class State:
    """What an agent knows and has."""

    me: Identity
    plan: Plan | None = None
    acted: int = -1  # highest generation that was started here, or given up before it was
    held: Held | None = None
    agents: Mapping[str, str] = field(default_factory=dict)  # node → agent registered for this job
    ended: Mapping[tuple[int, str], Outcome] = field(default_factory=dict)
    master: MasterRecord | None = None
    opening: int = -1  # generation whose master we were asked to open
    status: JobStatus | None = None
    departure: Departure | None = None
    outcome: Outcome | None = None  # of the last generation held here
    outcome_at: float = 0.0
    exiting: bool = False


# Events -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True)
class PlanSeen:
    """The plan in the store."""

    plan: Plan


@dataclass(frozen=True)
class StatusSeen:
    """The coordinator's word about the job."""

    status: JobStatus


@dataclass(frozen=True)
class NodesSeen:
    """Who is registered for this job now: node → agent."""

    agents: Mapping[str, str]


@dataclass(frozen=True)
class EndedSeen:
    """A node's replicas are gone from a generation."""

    generation: int
    node: str
    outcome: Outcome


@dataclass(frozen=True)
class MasterSeen:
    """Where a generation meets."""

    master: MasterRecord


@dataclass(frozen=True)
class ReplicaStarted:
    """A process is there."""

    generation: int
    local_rank: int
    pid: int


@dataclass(frozen=True)
class ReplicaHello:
    """The script uses the library."""

    generation: int
    local_rank: int


@dataclass(frozen=True)
class ReplicaStep:
    """A replica finished an optimizer step."""

    generation: int
    local_rank: int
    step: int


@dataclass(frozen=True)
class ReplicaExited:
    """A process is gone. `message` is what is known of why."""

    generation: int
    local_rank: int
    exit_code: int
    time: float  # wall clock
    message: str = ""


@dataclass(frozen=True)
class Leave:
    """A signal, a notice or a drain request: this node shall go in an orderly way."""

    reason: str
    deadline: float | None = None


@dataclass(frozen=True)
class LeaveNow:
    """A second signal: do not wait for anything."""

    reason: str


@dataclass(frozen=True)
class SpecSeen:
    """Which run the job's specification in the store belongs to."""

    run: str


Event = (
    Tick
    | PlanSeen
    | StatusSeen
    | NodesSeen
    | EndedSeen
    | MasterSeen
    | ReplicaStarted
    | ReplicaHello
    | ReplicaStep
    | ReplicaExited
    | Leave
    | LeaveNow
    | SpecSeen
)

# Actions ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OpenMaster:
    """Keep a TCPStore for this generation and publish where."""

    generation: int


@dataclass(frozen=True)
class StartReplicas:
    """Start this node's part of a plan."""

    plan: Plan
    master: MasterRecord


@dataclass(frozen=True)
class AskToStop:
    """Ask replicas to save and leave: those with the library by message, plain ones by SIGTERM."""

    local_ranks: tuple[int, ...]
    plain: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Kill:
    """SIGKILL to replicas and what they started."""

    local_ranks: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class WriteRunning:
    """Tell the others that this node's replicas have started."""

    generation: int
    library: bool = False


@dataclass(frozen=True)
class WriteEnded:
    """Tell the others that this node's slots are free."""

    record: EndedRecord


@dataclass(frozen=True)
class WriteDraining:
    """Say in this node's registration that it leaves."""

    reason: str
    deadline: float | None


@dataclass(frozen=True)
class Say:
    """One line for the person at the terminal."""

    text: str


@dataclass(frozen=True)
class Exit:
    """The agent is done."""

    code: int
    reason: str


Action = (
    OpenMaster | StartReplicas | AskToStop | Kill | WriteRunning | WriteEnded | WriteDraining | Say | Exit
)


def decide(state: State, event: Event, now: float) -> tuple[State, list[Action]]:
    """What to do about an event. `now` is a monotonic clock; wall-clock times come inside events."""
    if state.exiting:
        return state, []
    state, actions = _learn(state, event, now)
    while True:
        state, more = _reconcile(state, now)
        actions += more
        if not more or state.exiting:
            return state, actions


def deadline(state: State) -> float | None:
    """When the next `Tick` is due at the latest; None: nothing is timed."""
    times = []
    held = state.held
    if held is None and state.departure is not None:
        times.append(state.outcome_at + OWN_STOP_AFTER)
    if held is not None and held.until is not None:
        times.append(held.until)
    if held is not None and held.phase is Phase.RUNNING:
        if state.departure is not None:
            times.append(state.departure.since + OWN_STOP_AFTER)
        if state.me.hang_timeout is not None:
            times += [r.stepped + state.me.hang_timeout for r in held.alive if r.stepped is not None]
    return min(times, default=None)


def _learn(state: State, event: Event, now: float) -> tuple[State, list[Action]]:
    """Take note of an event."""
    match event:
        case PlanSeen(plan):
            return _learn_plan(state, plan)
        case StatusSeen(status):
            return (replace(state, status=status) if status.run == state.me.run else state), []
        case NodesSeen(agents):
            return replace(state, agents=agents), []
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
        case SpecSeen(run):
            if run == state.me.run:
                return state, []
            return _exit_now(
                state,
                1,
                f"job {state.me.job!r} was started again as run {run}: this agent is of an older run",
            )
        case _:
            return _learn_replica(state, event, now)


def _learn_plan(state: State, plan: Plan) -> tuple[State, list[Action]]:
    if plan.run != state.me.run or plan.claim:
        return state, []
    before = state.plan
    if before is not None and plan.generation <= before.generation:
        return state, []
    state = replace(state, plan=plan)
    actions: list[Action] = []
    # What was overtaken before it began here, or was never heard of, has to be answered for as well:
    # whoever comes next waits for us to say that nothing of it runs.
    counted_on = {gone.generation for gone in plan.leaving if (gone.node, gone.agent) == _name(state)}
    if before is not None and before.generation > state.acted and _names_us(state, before):
        counted_on.add(before.generation)
    for generation in sorted(counted_on):
        held = state.held is not None and state.held.generation == generation
        if not held and (generation, state.me.node) not in state.ended:
            state, answer = _answer(state, generation, Outcome.STOPPED)
            actions.append(answer)
    return state, actions


def _name(state: State) -> tuple[str, str]:
    return state.me.node, state.me.agent


def _answer(state: State, generation: int, outcome: Outcome) -> tuple[State, Action]:
    """Say of a generation that is not held here how it ended here."""
    me = state.me
    record = EndedRecord(me.node, generation, outcome, 0 if outcome is Outcome.DONE else STOPPED)
    ended = {**state.ended, (generation, me.node): outcome}
    return replace(state, ended=ended, acted=max(state.acted, generation)), WriteEnded(record)


def _learn_replica(state: State, event: Event, now: float) -> tuple[State, list[Action]]:
    held = state.held
    if held is None or isinstance(event, Tick) or getattr(event, "generation", None) != held.generation:
        return state, []
    actions: list[Action] = []
    match event:
        case ReplicaStarted(_, local_rank, pid):
            held = _change(held, local_rank, pid=pid)
        case ReplicaHello(_, local_rank):
            if held.plain:
                actions.append(WriteRunning(held.generation, library=True))
            held = replace(_change(held, local_rank, library=True), plain=False)
        case ReplicaStep(_, local_rank, step):
            held = _change(held, local_rank, step=step, stepped=now)
        case ReplicaExited(_, local_rank, code, time, message):
            held = _learn_exit(held, local_rank, code, time, message)
    return replace(state, held=held), actions


def _learn_exit(held: Held, local_rank: int, code: int, time: float, message: str) -> Held:
    replica = held.replicas[local_rank]
    if replica.exit_code is not None:
        return held
    expected = code in (0, STOPPED) or replica.signalled
    held = _change(held, local_rank, exit_code=code, exited=time)
    if expected or held.phase is Phase.KILLING or held.failure is not None:
        return held
    return replace(held, failure=Failure(replica.rank, code, message, time))


def _change(held: Held, local_rank: int, **fields: object) -> Held:
    replicas = list(held.replicas)
    replicas[local_rank] = replace(replicas[local_rank], **fields)  # type: ignore[arg-type]
    return replace(held, replicas=tuple(replicas))


def _reconcile(state: State, now: float) -> tuple[State, list[Action]]:
    """One step from what is held towards what is wanted; no actions: nothing is to be done now."""
    if state.held is not None:
        return _reconcile_held(state, state.held, now)
    plan, status = state.plan, state.status
    if status is not None and status.state.ended:
        return _exit(state, _code_of(status), _reason_of(status))
    newest = plan is not None and plan.generation > state.acted
    if state.departure is not None:
        return _depart(state, newest, now)
    if plan is None or not newest or not _names_us(state, plan):
        return state, []
    if not all(_gone(state, leaving.generation, leaving.node, leaving.agent) for leaving in plan.leaving):
        return state, []
    if _was_done(state, plan):
        state, answer = _answer(replace(state, outcome=Outcome.DONE), plan.generation, Outcome.DONE)
        return state, [answer]
    if state.master is None or state.master.generation != plan.generation:
        if plan.ranks(state.me.node).start != 0 or state.opening == plan.generation:
            return state, []
        return replace(state, opening=plan.generation), [OpenMaster(plan.generation)]
    replicas = tuple(Replica(i, rank) for i, rank in enumerate(plan.ranks(state.me.node)))
    held = Held(plan.generation, replicas)
    state = replace(state, held=held, acted=plan.generation)
    return state, [StartReplicas(plan, state.master), WriteRunning(plan.generation)]  # type: ignore[arg-type]


def _reconcile_held(state: State, held: Held, now: float) -> tuple[State, list[Action]]:
    alive = tuple(r.local_rank for r in held.alive)
    if not alive:
        record = _ended(state.me, held)
        ended = {**state.ended, (held.generation, state.me.node): record.outcome}
        state = replace(state, held=None, ended=ended, outcome=record.outcome, outcome_at=now)
        return state, [WriteEnded(record)]
    if held.phase is Phase.KILLING:
        if held.until is not None and now >= held.until:
            return _kill(state, held, "it does not go", now)
        return state, []
    why = _why_kill(state, held, now)
    if why is not None:
        return _kill(state, held, why, now)
    if held.phase is Phase.RUNNING:
        why = _why_stop(state, held, now)
        if why is not None:
            held = replace(held, phase=Phase.STOPPING, until=now + state.me.checkpoint_timeout)
            plain = tuple(r.local_rank for r in held.alive if not r.library)
            for local_rank in plain:
                held = _change(held, local_rank, signalled=True)
            asked = tuple(local_rank for local_rank in alive if local_rank not in plain)
            return replace(state, held=held), [AskToStop(asked, plain, why)]
        return _watch_for_hang(state, held, now)
    return state, []


def _why_kill(state: State, held: Held, now: float) -> str | None:
    """Why the held replicas are not to be waited for any more."""
    plan, status = state.plan, state.status
    if held.failure is not None:
        return f"replica {held.failure.rank} failed"
    if plan is not None and plan.generation > held.generation and plan.transition is Transition.ABORT:
        return f"generation {plan.generation} begins anew: {plan.reason}"
    if status is not None and status.state.ended:
        return f"the job has {status.state.value}: {status.reason}"
    if held.phase is Phase.STOPPING and held.until is not None and now >= held.until:
        return f"no checkpoint within {state.me.checkpoint_timeout:g} s: the one before counts"
    return None


def _why_stop(state: State, held: Held, now: float) -> str | None:
    """Why the held replicas are to save and leave."""
    plan = state.plan
    if plan is not None and plan.generation > held.generation:
        return plan.reason or plan.cause.value
    if state.departure is not None and now >= state.departure.since + OWN_STOP_AFTER:
        return state.departure.reason
    # a replica that was told by somebody else: the others have agreed with it, or are about to die of it
    if any(r.exit_code == STOPPED for r in held.replicas):
        return "another replica stopped"
    return None


def _watch_for_hang(state: State, held: Held, now: float) -> tuple[State, list[Action]]:
    limit = state.me.hang_timeout
    if limit is None:
        return state, []
    for replica in held.alive:
        if replica.stepped is not None and now >= replica.stepped + limit:
            message = f"no step for {limit:g} s after step {replica.step}: it hangs (--hang-timeout)"
            held = replace(held, failure=Failure(replica.rank, -9, message))
            return replace(state, held=held), [Say(f"replica {replica.rank}: {message}")]
    return state, []


def _kill(state: State, held: Held, why: str, now: float) -> tuple[State, list[Action]]:
    alive = tuple(r.local_rank for r in held.alive)
    held = replace(held, phase=Phase.KILLING, until=now + KILL_AGAIN_AFTER)
    return replace(state, held=held), [Kill(alive, why)]


def _ended(me: Identity, held: Held) -> EndedRecord:
    """How the held generation has ended on this node."""
    codes = [r.exit_code or 0 for r in held.replicas]
    if held.failure is not None:
        outcome, code = Outcome.FAILED, held.failure.exit_code
    elif held.phase is Phase.KILLING:
        outcome, code = Outcome.ABORTED, -9
    elif any(codes):
        outcome, code = Outcome.STOPPED, STOPPED
    else:
        outcome, code = Outcome.DONE, 0
    return EndedRecord(me.node, held.generation, outcome, code, held.failure)


def _names_us(state: State, plan: Plan) -> bool:
    mine = [p for p in plan.placements if p.node == state.me.node]
    return bool(mine) and mine[0].agent in ("", state.me.agent)


def _gone(state: State, generation: int, node: str, agent: str) -> bool:
    """Whether a node's replicas of a generation can not be running any more."""
    return (generation, node) in state.ended or state.agents.get(node) != agent


def _was_done(state: State, plan: Plan) -> bool:
    """Whether the script came to its end while the plan to change it was made: nothing is left to run."""
    if not plan.leaving or plan.transition is Transition.ABORT:
        return False
    before = max(leaving.generation for leaving in plan.leaving)
    outcomes = [outcome for (generation, _), outcome in state.ended.items() if generation == before]
    return bool(outcomes) and all(outcome is Outcome.DONE for outcome in outcomes)


def _depart(state: State, newest: bool, now: float) -> tuple[State, list[Action]]:
    """We leave and hold nothing. A plan that still counts on us is answered as if we had run it."""
    plan, departure = state.plan, state.departure
    if departure is None:
        return state, []
    if plan is not None and newest and _names_us(state, plan):
        state, answer = _answer(state, plan.generation, Outcome.STOPPED)
        return state, [answer]
    if state.outcome is Outcome.DONE and now < state.outcome_at + OWN_STOP_AFTER:
        return state, []  # we may have been the last: the coordinator is about to say that the job is done
    others = any(agent != state.me.agent for agent in state.agents.values())
    if others:
        return _exit(state, 0, f"drained: {departure.reason}")
    return _exit(state, STOPPED, f"stopped: {departure.reason}")


def _exit(state: State, code: int, reason: str) -> tuple[State, list[Action]]:
    return replace(state, exiting=True), [Exit(code, reason)]


def _exit_now(state: State, code: int, reason: str) -> tuple[State, list[Action]]:
    actions: list[Action] = []
    if state.held is not None and state.held.alive:
        actions.append(Kill(tuple(r.local_rank for r in state.held.alive), reason))
    return replace(state, exiting=True), [*actions, Exit(code, reason)]


def _code_of(status: JobStatus) -> int:
    if status.exit_code is not None:
        return status.exit_code if status.exit_code >= 0 else 128 - status.exit_code
    return {JobState.DONE: 0, JobState.STOPPED: STOPPED}.get(status.state, 1)


def _reason_of(status: JobStatus) -> str:
    return f"{status.state.value}: {status.reason}" if status.reason else status.state.value
