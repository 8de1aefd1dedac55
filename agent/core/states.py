"""The state, the events and the actions of an agent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from adaptdl_elastic.protocol.messages import Groups, ReplicaMessage, Resilient
from adaptdl_elastic.rendezvous.schema.held import MOST_ENDS, GenerationEnd, Held, Left, PeerLoss
from adaptdl_elastic.rendezvous.schema.records import (
    Failure,
    JobSpec,
    JobStatus,
    MasterRecord,
    Outcome,
    Plan,
)


@dataclass(frozen=True)
class AgentIdentity:
    """The names of this agent, its job, and the time limit of its own, in seconds."""

    node: str
    agent: str
    spec: JobSpec  # of the run
    hang_timeout: float | None = None  # without a step or an answer; None: 60 s, answers only; 0: no limit
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


class Event:
    """What has happened."""


@dataclass(frozen=True)
class ReplicaExited(Event):
    """A process has ended. `message` says what is known about the reason."""

    generation: int
    local_rank: int
    exit_code: int
    time: float  # wall clock
    message: str = ""
    signal_arrived: bool = True  # False: it had ended before the agent's signal was delivered
    evidence: Evidence = Evidence()


@dataclass(frozen=True)
class Replica:
    """One process of a generation."""

    local_rank: int  # its slot: never changes, while the rank may
    rank: int
    library: bool = False  # it has said hello (a newcomer of `Joining`: it is ready): a message can stop it
    resilient: Resilient | None = None  # the newest word that it survives the death of others
    epochs_finished: bool = False  # it has finished all epochs and runs to the script's end
    signalled: bool = False  # it was sent SIGTERM
    finished: bool = False  # its script had ended before any SIGTERM could reach it
    stopping: bool = False  # it has carried out a stop and leaves the script with SystemExit(143)
    unsaved: str = ""  # why it could not save then
    exit: ReplicaExited | None = None
    stopped: bool = False  # it has exited because it was asked to, with any exit code
    step: int | None = None
    stepped: float | None = None  # monotonic time of its newest step
    # monotonic time of its newest sign of life since its first step, or since it joined
    heard: float | None = None
    pinged: float | None = None  # monotonic time of a ping that it has not answered
    newcomer: bool = False  # it has joined by the last planned change in place
    hanging: str = ""  # why it is killed: it did not answer a ping, or the others wait for it

    def survives(self, generation: int) -> Groups | None:
        """Return of which groups one replica has to live for this one to go on; None: it survives no death.

        Groups of another generation say nothing, since ranks change.
        """
        said = self.resilient
        return None if said is None or (said.groups and said.generation != generation) else said.groups


# What the replicas of a generation do


@dataclass(frozen=True)
class Training:
    """The replicas start or train."""


@dataclass(frozen=True)
class Joining:
    """The replicas are newcomers, which get ready to join replicas of other nodes."""

    until: float  # monotonic time by which they must be ready; infinite: they are
    switched: frozenset[int] = frozenset()  # local ranks of those that have joined


@dataclass(frozen=True)
class Changing:
    """The replicas change to another generation in place, as planned."""

    plan: Plan
    newcomers: tuple[Replica, ...]  # processes of the new generation on this node
    # monotonic time by which they must be ready; infinite: they are, or there are none
    until: float
    ready: frozenset[int] = frozenset()  # local ranks of newcomers that are ready
    switched: frozenset[int] = frozenset()  # local ranks that are already in the new generation


@dataclass(frozen=True)
class Recovering:
    """The survivors change to a generation without the dead."""

    plan: Plan
    switched: frozenset[int] = frozenset()  # local ranks that are already in the new generation


# How the replicas of a generation are ended


@dataclass(frozen=True)
class Stopping:
    """The replicas were asked to save and exit."""

    until: float  # monotonic time when they are killed


@dataclass(frozen=True)
class Killing:
    """The replicas are killed."""

    why: str
    asked: bool = False  # they had been asked to save and exit before
    failure: Failure | None = None  # the first failure, because of which the others are killed
    again: float = -math.inf  # monotonic time of the next SIGKILL


@dataclass(frozen=True)
class LocalGeneration:
    """The replicas of a generation on this node: what they do (`course`), and how they are ended (`end`)."""

    generation: int
    replicas: tuple[Replica, ...]
    course: Training | Joining | Changing | Recovering = Training()
    end: Stopping | Killing | None = None  # None: nothing ends them
    since: float = 0.0  # monotonic time when it became the held generation
    orphans: tuple[Replica, ...] = ()  # processes outside of any generation that are on their way out
    lost: tuple[Replica, ...] = ()  # replicas that died while the others live on
    loss: PeerLoss | None = None  # the newest loss of replicas
    first_step: float | None = None  # wall clock at the end of the first step in the generation

    @property
    def library(self) -> bool:
        """Whether all replicas have said hello, so that the node can change them in place."""
        members = (*self.replicas, *self.lost)
        return bool(members) and all(r.library for r in members)

    @property
    def survives(self) -> Groups | None:
        """What the living replicas, or the last ones, survive, as the first one says (`Held.survives`)."""
        members = sorted(self.replicas or self.lost, key=lambda r: r.local_rank)
        said = [r.survives(self.generation) for r in members]
        return None if None in said or not said else said[0]

    def goes_on(self, replica: Replica) -> bool:
        """Return whether a replica survives deaths in this generation, or in one that it changes to."""
        said = replica.resilient
        return said is not None and (not said.groups or said.generation >= self.generation)

    def end_as(
        self, outcome: Outcome, exit_code: int = 0, failure: Failure | None = None, unsaved: str = ""
    ) -> GenerationEnd:
        """Return the end of the generation, whose replicas had started or joined."""
        return GenerationEnd(
            self.generation,
            outcome,
            exit_code,
            failure,
            unsaved,
            ran=True,
            library=self.library,
            survives=self.survives,
            lost=self.dead_in(self.generation),
            first_step=self.first_step,
        )

    def dead_in(self, generation: int) -> tuple[int, ...]:
        """Return the slots of the replicas whose death in a generation the others survived."""
        return self.loss.lost if self.loss is not None and self.loss.generation == generation else ()

    @property
    def lost_in(self) -> int:
        """The newest generation that has lost replicas; -1: none has."""
        return -1 if self.loss is None else self.loss.generation

    def update(self, local_rank: int, **fields: Any) -> LocalGeneration:
        """Return the generation with changed fields of a replica, which may be a newcomer."""

        def updated(replicas: tuple[Replica, ...]) -> tuple[Replica, ...]:
            return tuple(replace(r, **fields) if r.local_rank == local_rank else r for r in replicas)

        course = self.course
        if isinstance(course, Changing):
            course = replace(course, newcomers=updated(course.newcomers))
        return replace(self, replicas=updated(self.replicas), course=course)

    def fail(self, failure: Failure) -> LocalGeneration:
        """Return the generation with its first failure, because of which the others are to be killed."""
        why = f"replica {failure.rank} failed"
        return replace(self, end=Killing(why, asked=self.end is not None, failure=failure))


def failure_of(rank: int, end: ReplicaExited) -> Failure:
    """Return the end of a replica as a failure."""
    evidence = end.evidence
    when = end.time if evidence.raised is None else evidence.raised
    known = (evidence.kind, evidence.lost_peer, evidence.final, evidence.step, evidence.worked_batch)
    return Failure(rank, end.exit_code, end.message, when, *known)


@dataclass(frozen=True)
class Departure:
    """Why and since when this node leaves the job."""

    reason: str
    since: float  # monotonic time
    deadline: float | None = None  # wall clock when the node will be gone


@dataclass(frozen=True)
class Absence:
    """Since when the store is away, or refuses the agent although it answers."""

    since: float  # monotonic time
    refused: bool


@dataclass(frozen=True)
class LocalEnd:
    """How the last generation on this node ended."""

    outcome: Outcome
    at: float = 0.0  # monotonic time
    unsaved: str = ""  # why the state at its end is not saved


@dataclass(frozen=True)
class State:
    """What an agent knows and runs."""

    me: AgentIdentity
    plan: Plan | None = None
    acted: int = -1  # every generation up to this one was started here, or never will be
    held: LocalGeneration | None = None
    agents: Mapping[str, str] | None = None  # node → agent registered for this job; None: not read yet
    # node → what it has left; of this node, what an earlier agent has said
    left: Mapping[str, Left] = field(default_factory=dict)
    ends: tuple[GenerationEnd, ...] = ()  # of generations on this node, newest last
    told: Held | None = None  # what was written last of what this node holds
    master: MasterRecord | None = None
    opening: int = -1  # generation whose store was requested from this agent
    status: JobStatus | None = None
    departure: Departure | None = None
    last: LocalEnd | None = None
    away: Absence | None = None
    lapsed: bool = False  # the registration may have run out, and other jobs may have this node's slots
    exiting: bool = False

    def add_ends(self, *ends: GenerationEnd) -> State:
        """Return the state with generations that have ended on this node."""
        acted = max(self.acted, *(end.generation for end in ends))
        return replace(self, ends=(*self.ends, *ends)[-MOST_ENDS:], acted=acted)


# Events


@dataclass(frozen=True)
class Tick(Event):
    """Time has passed."""


@dataclass(frozen=True)
class PlanSeen(Event):
    """The plan in the store."""

    plan: Plan


@dataclass(frozen=True)
class StatusSeen(Event):
    """The coordinator's status of the job."""

    status: JobStatus


@dataclass(frozen=True)
class Unfit(Event):
    """This node cannot run a replica, for this reason."""

    reason: str


@dataclass(frozen=True)
class NodesSeen(Event):
    """The agents registered for this job, by node."""

    agents: Mapping[str, str]
    holder: str = ""  # description of the agent that has this node's name


@dataclass(frozen=True)
class LeftSeen(Event):
    """What a node has left of the job."""

    left: Left


@dataclass(frozen=True)
class MasterSeen(Event):
    """The address of a generation's store is known."""

    master: MasterRecord


@dataclass(frozen=True)
class FromReplica(Event):
    """A message of a replica.

    `generation`: the one that the message names, else the one in which the agent has started or adopted it.
    """

    generation: int
    local_rank: int
    message: ReplicaMessage


@dataclass(frozen=True)
class Leave(Event):
    """This node is to leave in order, after a signal, a notice or a drain request."""

    reason: str
    deadline: float | None = None


@dataclass(frozen=True)
class LeaveNow(Event):
    """This agent is to end at once, after a second signal."""

    reason: str


@dataclass(frozen=True)
class StoreAway(Event):
    """The store is away, or it refuses the agent."""

    refused: bool = False


@dataclass(frozen=True)
class StoreBack(Event):
    """The store can be used again."""


@dataclass(frozen=True)
class SpecSeen(Event):
    """The run that the job's specification in the store belongs to."""

    run: str


# Actions


class Action:
    """What the agent is to do."""


@dataclass(frozen=True)
class OpenMaster(Action):
    """Serve a TCPStore for this generation and publish its address."""

    generation: int


@dataclass(frozen=True)
class StartReplicas(Action):
    """Start this node's replicas of a plan: all of them, or newcomers that join running ones."""

    plan: Plan
    master: MasterRecord
    local_ranks: tuple[int, ...]
    join: bool = False


@dataclass(frozen=True)
class TellPlan(Action):
    """Tell the replicas of the held generation their change in place."""

    plan: Plan
    master: MasterRecord


@dataclass(frozen=True)
class Withdraw(Action):
    """Tell the replicas of the held generation that a change was given up."""

    plan: Plan
    reason: str


@dataclass(frozen=True)
class Adopt(Action):
    """Make this plan's generation the held one: survivors get new ranks, newcomers belong to it."""

    plan: Plan


@dataclass(frozen=True)
class AskToStop(Action):
    """Ask replicas to save and exit: with the library by a message, `plain` ones by SIGTERM."""

    local_ranks: tuple[int, ...]
    plain: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Ping(Action):
    """Ask replicas for a sign of life."""

    local_ranks: tuple[int, ...]


@dataclass(frozen=True)
class Kill(Action):
    """Send SIGKILL to replicas and the processes that they started."""

    local_ranks: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class WriteHeld(Action):
    """Report what this node holds. It differs from what was reported before."""

    held: Held


@dataclass(frozen=True)
class Lost(Action):
    """Tell the user, and the event log, that a replica died and the others live on."""

    generation: int
    failure: Failure


@dataclass(frozen=True)
class Ended(Action):
    """Tell the user, and the event log, how a generation has ended here."""

    end: GenerationEnd


@dataclass(frozen=True)
class WriteDraining(Action):
    """Mark this node's registration as draining."""

    reason: str
    deadline: float | None


@dataclass(frozen=True)
class Say(Action):
    """Print one line for the user."""

    text: str


@dataclass(frozen=True)
class Exit(Action):
    """End the agent."""

    code: int
    reason: str


Step = tuple[State, list[Action]]
