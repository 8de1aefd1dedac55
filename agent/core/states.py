"""The state, the events and the actions of an agent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from adaptdl_elastic.protocol.messages import ReplicaMessage
from adaptdl_elastic.rendezvous.schema.records import (
    EndedRecord,
    Failure,
    JobSpec,
    JobStatus,
    MasterRecord,
    Outcome,
    PeerLossRecord,
    Plan,
    Transition,
)


@dataclass(frozen=True)
class AgentIdentity:
    """The names of this agent, its job, and the time limit of its own, in seconds."""

    node: str
    agent: str
    spec: JobSpec  # of the run
    hang_timeout: float | None = None  # seconds without a step or an answer; None and 0: see `hang_detection`
    on_demand: bool = False  # the agent leaves when a plan has no replicas here: another is started later


@dataclass(frozen=True)
class Evidence:
    """What is known about an exit beside its code, to find the cause of several failures."""

    kind: str = ""  # equal for failures of the same kind; "": unknown
    raised: float | None = None  # wall clock when the script raised an error that was not caught
    lost_peer: bool = False  # the error only reports that another replica is gone
    final: bool = False  # the job is to fail without restarts
    step: int | None = None  # the replica's last step before the error; None: unknown
    worked_batch: int | None = None  # as in `Failure`
    exit_code: int = 1  # of the error, if the replica was killed before it could end


@dataclass(frozen=True)
class Replica:
    """One process of a generation."""

    local_rank: int  # its slot: never changes, while the rank may
    rank: int
    pid: int | None = None
    library: bool = False  # it has said hello, so it is stopped by a message
    resilient: bool = False  # it survives the death of others
    epochs_finished: bool = False  # it has finished all epochs and runs to the script's end
    signalled: bool = False  # it was sent SIGTERM
    finished: bool = False  # its script had ended before any SIGTERM could reach it
    stopping: bool = False  # it has carried out a stop and leaves the script with SystemExit(143)
    unsaved: str = ""  # why it could not save then
    stopped: bool = False  # it has exited because it was asked to, with any exit code
    switched: bool = False  # a newcomer that has joined
    exit_code: int | None = None
    exited: float = 0.0  # wall clock
    message: str = ""  # what is known about the reason of the exit
    evidence: Evidence = Evidence()
    unsignalled: bool = False  # it exited before any signal from its agent reached it
    step: int | None = None
    stepped: float | None = None  # monotonic time of its newest step
    # monotonic time of its newest sign of life since its first step, or since it joined
    heard: float | None = None
    pinged: float | None = None  # monotonic time of a ping that it has not answered
    hanging: bool = False  # it did not answer a ping, or the others wait for it, and it is killed
    hang_reason: str = ""  # why, if it has said so itself


class Phase(str, Enum):
    """What the held generation is doing."""

    RUNNING = "running"
    STOPPING = "stopping"  # asked to save and exit
    KILLING = "killing"


@dataclass(frozen=True)
class StateChange:
    """A change in place that is under way here: a planned one, or the survivors' change after a death."""

    plan: Plan
    newcomers: tuple[Replica, ...]  # processes of the new generation on this node
    until: float  # monotonic time by which they must be ready
    ready: frozenset[int] = frozenset()  # local ranks of newcomers that are ready
    switched: frozenset[int] = frozenset()  # local ranks that are already in the new generation
    announced: bool = False  # WriteReady was sent


@dataclass(frozen=True)
class LocalGeneration:
    """The replicas of one generation on this node."""

    generation: int
    replicas: tuple[Replica, ...]
    phase: Phase = Phase.RUNNING
    until: float | None = None  # monotonic time: if stopping, when to kill; if killing, when to kill again
    failure: Failure | None = None  # the first failure, because of which the others are killed
    plain: bool = True  # no replica has said hello
    change: StateChange | None = None
    withdrawn: int = -1  # generation of a change in place that was given up
    orphans: tuple[Replica, ...] = ()  # processes outside of any generation that are on their way out
    joining: bool = False  # newcomers only: they get ready to join replicas of other nodes
    join_by: float | None = None
    since: float = 0.0  # monotonic time when it became the held generation
    lost: tuple[Replica, ...] = ()  # replicas that died while the others live on
    loss_reported: int = -1  # newest generation whose loss of replicas was reported
    killed: str = ""  # why its replicas are killed although they were asked to stop

    @property
    def recovering(self) -> bool:
        """Whether the survivors are changing to a generation without the dead."""
        return self.change is not None and self.change.plan.transition is Transition.RECOVER

    @property
    def alive(self) -> tuple[Replica, ...]:
        """The replicas that have not exited, newcomers and orphans included."""
        newcomers = self.change.newcomers if self.change is not None else ()
        return tuple(r for r in (*self.replicas, *newcomers, *self.orphans) if r.exit_code is None)


@dataclass(frozen=True)
class Departure:
    """Why and since when this node leaves the job."""

    reason: str
    since: float  # monotonic time
    deadline: float | None = None  # wall clock when the node will be gone


@dataclass(frozen=True)
class State:
    """What an agent knows and runs."""

    me: AgentIdentity
    plan: Plan | None = None
    acted: int = -1  # highest generation that was started here, or given up before
    held: LocalGeneration | None = None
    agents: Mapping[str, str] | None = None  # node → agent registered for this job; None: not read yet
    ended: Mapping[tuple[int, str], Outcome] = field(default_factory=dict)
    master: MasterRecord | None = None
    opening: int = -1  # generation whose store was requested from this agent
    status: JobStatus | None = None
    departure: Departure | None = None
    outcome: Outcome | None = None  # of the last generation held here
    outcome_at: float = 0.0
    unsaved: str = ""  # why the state at the end of that generation is not saved
    away: float | None = None  # monotonic time since which the store is away or refuses the agent
    refused: bool = False  # the store answers, but refuses the agent
    lapsed: bool = False  # the registration may have run out, and other jobs may have this node's slots
    exiting: bool = False


# Events


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True)
class PlanSeen:
    """The plan in the store."""

    plan: Plan


@dataclass(frozen=True)
class StatusSeen:
    """The coordinator's status of the job."""

    status: JobStatus


@dataclass(frozen=True)
class Unfit:
    """This node cannot run a replica, for this reason."""

    reason: str


@dataclass(frozen=True)
class NodesSeen:
    """The agents registered for this job, by node."""

    agents: Mapping[str, str]
    holder: str = ""  # description of the agent that has this node's name


@dataclass(frozen=True)
class EndedSeen:
    """A node's replicas of a generation are gone."""

    generation: int
    node: str
    outcome: Outcome


@dataclass(frozen=True)
class MasterSeen:
    """The address of a generation's store is known."""

    master: MasterRecord


@dataclass(frozen=True)
class ReplicaStarted:
    """A replica's process exists."""

    generation: int
    local_rank: int
    pid: int


@dataclass(frozen=True)
class FromReplica:
    """A message of a replica.

    `generation`: the one that the message names, else the one in which the agent has started or adopted it.
    """

    generation: int
    local_rank: int
    message: ReplicaMessage


@dataclass(frozen=True)
class ReplicaExited:
    """A process has ended. `message` says what is known about the reason."""

    generation: int
    local_rank: int
    exit_code: int
    time: float  # wall clock
    message: str = ""
    signal_arrived: bool = True  # False: it had ended before the agent's signal was delivered
    evidence: Evidence = Evidence()


def failure_of(rank: int, exit_code: int, message: str, exited: float, evidence: Evidence) -> Failure:
    """Return an exit as a failure."""
    when = exited if evidence.raised is None else evidence.raised
    known = (evidence.kind, evidence.lost_peer, evidence.final, evidence.step, evidence.worked_batch)
    return Failure(rank, exit_code, message, when, *known)


@dataclass(frozen=True)
class Leave:
    """This node is to leave in order, after a signal, a notice or a drain request."""

    reason: str
    deadline: float | None = None


@dataclass(frozen=True)
class LeaveNow:
    """This agent is to end at once, after a second signal."""

    reason: str


@dataclass(frozen=True)
class StoreAway:
    """The store is away, or it refuses the agent."""

    refused: bool = False


@dataclass(frozen=True)
class StoreBack:
    """The store can be used again."""


@dataclass(frozen=True)
class SpecSeen:
    """The run that the job's specification in the store belongs to."""

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
    | FromReplica
    | ReplicaExited
    | Leave
    | LeaveNow
    | SpecSeen
    | StoreAway
    | StoreBack
)


# Actions


@dataclass(frozen=True)
class OpenMaster:
    """Serve a TCPStore for this generation and publish its address."""

    generation: int


@dataclass(frozen=True)
class StartReplicas:
    """Start this node's replicas of a plan: all of them, or newcomers that join running ones."""

    plan: Plan
    master: MasterRecord
    local_ranks: tuple[int, ...]
    join: bool = False


@dataclass(frozen=True)
class TellPlan:
    """Tell the replicas of the held generation their change in place."""

    plan: Plan
    master: MasterRecord


@dataclass(frozen=True)
class Withdraw:
    """Tell the replicas of the held generation that a change was given up."""

    plan: Plan
    reason: str


@dataclass(frozen=True)
class Adopt:
    """Make this plan's generation the held one: survivors get new ranks, newcomers belong to it."""

    plan: Plan


@dataclass(frozen=True)
class WriteReady:
    """Report that this node's newcomers are ready."""

    generation: int


@dataclass(frozen=True)
class AskToStop:
    """Ask replicas to save and exit: with the library by a message, `plain` ones by SIGTERM."""

    local_ranks: tuple[int, ...]
    plain: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Ping:
    """Ask replicas for a sign of life."""

    local_ranks: tuple[int, ...]


@dataclass(frozen=True)
class Kill:
    """Send SIGKILL to replicas and the processes that they started."""

    local_ranks: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class WriteRunning:
    """Report that this node's replicas have started."""

    generation: int
    library: bool = False
    resilient: bool = False


@dataclass(frozen=True)
class WritePeerLoss:
    """Report the dead of this node, and that the living wait to go on without them."""

    record: PeerLossRecord


@dataclass(frozen=True)
class Lost:
    """Tell the user, and the event log, that a replica died and the others live on."""

    generation: int
    failure: Failure


@dataclass(frozen=True)
class WriteEnded:
    """Report that this node's slots are free."""

    record: EndedRecord


@dataclass(frozen=True)
class WriteDraining:
    """Mark this node's registration as draining."""

    reason: str
    deadline: float | None


@dataclass(frozen=True)
class Say:
    """Print one line for the user."""

    text: str


@dataclass(frozen=True)
class Exit:
    """End the agent."""

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
    | WritePeerLoss
    | Lost
    | WriteEnded
    | WriteDraining
    | Say
    | Exit
)
