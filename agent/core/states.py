"""What an agent knows, hears and does: the vocabulary of its decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from adaptdl_elastic.rendezvous.schema.records import (
    EndedRecord,
    Failure,
    JobStatus,
    MasterRecord,
    Outcome,
    PeerLossRecord,
    Plan,
    Transition,
)


@dataclass(frozen=True)
class AgentIdentity:
    """Who this agent is, and the limits it keeps to; constant."""

    node: str
    agent: str
    job: str
    run: str
    checkpoint_timeout: float = 120.0
    hang_timeout: float | None = None  # seconds without a step or an answer; None, 0: see `hangs`
    rescale_timeout: float = 60.0


@dataclass(frozen=True)
class Evidence:
    """What is known of an exit beside its code: whether it is the cause of others, and whether it recurs."""

    kind: str = ""  # the same for failures of the same kind; "": nothing can be concluded from two of them
    raised: float | None = None  # wall clock at which the script raised an error that nobody caught
    lost_peer: bool = False  # the error tells only that another replica is gone


@dataclass(frozen=True)
class Replica:
    """One process of a generation."""

    local_rank: int  # its slot: stays the same while its rank changes
    rank: int
    pid: int | None = None
    library: bool = False  # it said hello: stop it by message
    resilient: bool = False  # the death of others does not end it
    over: bool = False  # it has all epochs behind it, and is on its way to the script's end
    signalled: bool = False  # it was sent SIGTERM
    finished: bool = False  # its script had come to its end before any SIGTERM could reach it
    stopping: bool = False  # it has saved on request, and leaves the script by SystemExit(143)
    stopped: bool = False  # it has exited because it was asked to, whatever its exit code
    switched: bool = False  # a newcomer that has joined what it was to join
    exit_code: int | None = None
    exited: float = 0.0  # wall clock
    message: str = ""  # what is known of why it exited
    evidence: Evidence = Evidence()
    unsignalled: bool = False  # it has exited before any signal of its agent's reached it
    step: int | None = None
    stepped: float | None = None  # `now` of its newest step
    heard: float | None = None  # `now` of its newest sign of life, since its first step or since it joined
    pinged: float | None = None  # `now` when it was asked for one that has not come
    hanging: bool = False  # it gave none, and is killed


class Phase(str, Enum):
    """What becomes of the held generation."""

    RUNNING = "running"
    STOPPING = "stopping"  # asked to save and leave
    KILLING = "killing"


@dataclass(frozen=True)
class StateChange:
    """A change in place that is under way here: planned, beside the training of the held generation, or the
    survivors' way into the generation after a death."""

    plan: Plan
    newcomers: tuple[Replica, ...]  # of the new generation, on this node
    until: float  # `now` by which they must be ready
    ready: frozenset[int] = frozenset()  # local ranks of newcomers
    switched: frozenset[int] = frozenset()  # local ranks that are in the new generation already
    announced: bool = False  # that all newcomers are ready


@dataclass(frozen=True)
class LocalGeneration:
    """The replicas of one generation on this node."""

    generation: int
    replicas: tuple[Replica, ...]
    phase: Phase = Phase.RUNNING
    until: float | None = None  # stopping: kill then; killing: kill again then
    failure: Failure | None = None  # the first one, which made us kill the others
    plain: bool = True  # nobody said hello
    change: StateChange | None = None
    withdrawn: int = -1  # generation of a change in place that was given up
    stray: tuple[Replica, ...] = ()  # newcomers of a change that was given up, on their way out
    joining: bool = False  # newcomers only: they warm up to join replicas of other nodes
    join_by: float | None = None
    since: float = 0.0  # `now` when it became what is held
    lost: tuple[Replica, ...] = ()  # who died while the others live on
    broken: int = -1  # the newest generation of which we said that it can not go on as it is

    @property
    def recovering(self) -> bool:
        """Whether the survivors are on their way into a generation without the dead."""
        return self.change is not None and self.change.plan.transition is Transition.RECOVER

    @property
    def alive(self) -> tuple[Replica, ...]:
        """Those that have not exited, newcomers and strays included."""
        newcomers = self.change.newcomers if self.change is not None else ()
        return tuple(r for r in (*self.replicas, *newcomers, *self.stray) if r.exit_code is None)


@dataclass(frozen=True)
class Departure:
    """Why and since when this node leaves the job."""

    reason: str
    since: float  # `now`
    deadline: float | None = None  # wall clock: when the node will be gone


@dataclass(frozen=True)
class State:
    """What an agent knows and has."""

    me: AgentIdentity
    plan: Plan | None = None
    acted: int = -1  # highest generation that was started here, or given up before it was
    held: LocalGeneration | None = None
    agents: Mapping[str, str] | None = None  # node → agent registered for this job; None: not heard yet
    ended: Mapping[tuple[int, str], Outcome] = field(default_factory=dict)
    master: MasterRecord | None = None
    opening: int = -1  # generation whose master we were asked to open
    status: JobStatus | None = None
    departure: Departure | None = None
    outcome: Outcome | None = None  # of the last generation held here
    outcome_at: float = 0.0
    away: float | None = None  # `now` since which the store can not be reached, or refuses us
    refused: bool = False  # while it is away: it answers, and refuses us
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
class Unfit:
    """This node can not run a replica, and why."""

    reason: str


@dataclass(frozen=True)
class NodesSeen:
    """Who is registered for this job now: node → agent."""

    agents: Mapping[str, str]
    holder: str = ""  # who has this node's name, for a person


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
class ReplicaReady:
    """A newcomer is warm and waits to join. `generation` is the one it joins."""

    generation: int
    local_rank: int


@dataclass(frozen=True)
class ReplicaSwitched:
    """A survivor or a newcomer is in the new generation."""

    generation: int
    local_rank: int


@dataclass(frozen=True)
class ReplicaResilient:
    """From now on the death of others does not end this replica."""

    generation: int
    local_rank: int


@dataclass(frozen=True)
class ReplicaOver:
    """A replica has all epochs behind it, as have all others; or it begins more of them."""

    local_rank: int
    over: bool


@dataclass(frozen=True)
class ReplicaFinished:
    """A script came to its end by itself, with exit code 0, and no SIGTERM can interrupt it any more."""

    local_rank: int


@dataclass(frozen=True)
class ReplicaStopping:
    """A replica has carried out a stop: what follows is the end of its process, with whatever exit code."""

    local_rank: int


@dataclass(frozen=True)
class ReplicaBroken:
    """A replica has found that others of that generation are gone, and waits for another plan."""

    generation: int
    local_rank: int


@dataclass(frozen=True)
class ReplicaPong:
    """A replica has answered."""

    generation: int
    local_rank: int


@dataclass(frozen=True)
class ReplicaExited:
    """A process is gone. `message` is what is known of why."""

    generation: int
    local_rank: int
    exit_code: int
    time: float  # wall clock
    message: str = ""
    signal_arrived: bool = True  # False: it had ended before a signal of ours was delivered
    evidence: Evidence = Evidence()


def failure_of(rank: int, exited: ReplicaExited) -> Failure:
    """Return the failure that a replica's exit is."""
    evidence = exited.evidence
    when = exited.time if evidence.raised is None else evidence.raised
    return Failure(rank, exited.exit_code, exited.message, when, evidence.kind, evidence.lost_peer)


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
class StoreAway:
    """The store can not be reached any more, or it answers and refuses us."""

    refused: bool = False


@dataclass(frozen=True)
class StoreBack:
    """The store can be reached again."""


@dataclass(frozen=True)
class SpecSeen:
    """Which run the job's specification in the store belongs to."""

    run: str


Event = (
    Tick
    | PlanSeen
    | StatusSeen
    | NodesSeen
    | Unfit
    | EndedSeen
    | MasterSeen
    | ReplicaStarted
    | ReplicaHello
    | ReplicaStep
    | ReplicaReady
    | ReplicaSwitched
    | ReplicaResilient
    | ReplicaOver
    | ReplicaFinished
    | ReplicaStopping
    | ReplicaBroken
    | ReplicaPong
    | ReplicaExited
    | Leave
    | LeaveNow
    | SpecSeen
    | StoreAway
    | StoreBack
)


# Actions ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OpenMaster:
    """Keep a TCPStore for this generation and publish where."""

    generation: int


@dataclass(frozen=True)
class StartReplicas:
    """Start this node's part of a plan: all of it, or the newcomers that join what runs."""

    plan: Plan
    master: MasterRecord
    local_ranks: tuple[int, ...]
    join: bool = False


@dataclass(frozen=True)
class TellPlan:
    """Tell the replicas of the held generation how they change in place."""

    plan: Plan
    master: MasterRecord


@dataclass(frozen=True)
class Withdraw:
    """Tell the replicas of the held generation that a change is off."""

    plan: Plan
    reason: str


@dataclass(frozen=True)
class Adopt:
    """The held generation is now this plan's: survivors have new ranks, newcomers belong to it."""

    plan: Plan


@dataclass(frozen=True)
class WriteReady:
    """Tell the others that this node's newcomers are warm."""

    generation: int


@dataclass(frozen=True)
class AskToStop:
    """Ask replicas to save and leave: those with the library by message, plain ones by SIGTERM."""

    local_ranks: tuple[int, ...]
    plain: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Ping:
    """Ask replicas for a sign of life."""

    local_ranks: tuple[int, ...]


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
    resilient: bool = False


@dataclass(frozen=True)
class WriteBroken:
    """Tell the others who has died here, and that those who live wait to go on without the dead."""

    record: PeerLossRecord


@dataclass(frozen=True)
class Lost:
    """A replica has died, and the others live on: tell the person at the terminal, and the event log."""

    generation: int
    failure: Failure


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
    OpenMaster
    | StartReplicas
    | TellPlan
    | Withdraw
    | Adopt
    | AskToStop
    | Ping
    | Kill
    | WriteReady
    | WriteRunning
    | WriteBroken
    | Lost
    | WriteEnded
    | WriteDraining
    | Say
    | Exit
)
