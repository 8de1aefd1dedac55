"""What is kept in the store: frozen records, as versioned JSON that is validated on the way in.

Times are seconds of the writer's wall clock since the epoch and are shown to people only: nothing is
decided by comparing the clocks of two machines.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable
from dataclasses import field
from enum import Enum
from functools import cache
from typing import Annotated, Any, TypeVar, cast

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

VERSION = 1
_CONFIG = ConfigDict(extra="ignore", strict=False, allow_inf_nan=False)

MOST_SLOTS = 1024
"""Of one node: what says it has more is a mistake, and would cost every round of the policy its time."""

# Who writes other numbers has a defect; no loop and no range may ever be as long as they say.
_Replicas = Annotated[int, Field(ge=1, le=MOST_SLOTS)]
_Slot = Annotated[int, Field(ge=0, lt=4 * MOST_SLOTS)]
_Slots = Annotated[tuple[_Slot, ...], Field(max_length=MOST_SLOTS)]

R = TypeVar("R")

_LEADING_VERSION = re.compile(r'\s*\{\s*"v"\s*:\s*(\d{1,9})\b')


class MalformedRecordError(ValueError):
    """A value in the store is not what its key promises."""


class NewerRecordError(MalformedRecordError):
    """A later version of adaptdl-elastic wrote this; what it means is not for us to guess."""


class Cause(str, Enum):
    """Why a generation began."""

    START = "start"  # the job's first
    POLICY = "policy"  # the goodput model says this size pays
    MANUAL = "manual"  # adaptdl scale
    JOIN = "join"  # a node came, and the job does not report what it could tell the policy
    DRAIN = "drain"  # a node leaves in an orderly way
    NODE_LOST = "node_lost"  # a node vanished
    REPLICA_LOST = "replica_lost"  # a replica was killed, and the others go on without it
    FAILURE = "failure"  # a replica failed; counts against max_restarts
    STOP = "stop"  # adaptdl stop: a plan without replicas


class Transition(str, Enum):
    """How the replicas of the generation before are to leave it."""

    RESTART = "restart"  # checkpoint at a common step, exit 143; the new ones load
    INPLACE = "inplace"  # survivors go on in their processes
    ABORT = "abort"  # no common step can be had any more: kill
    RECOVER = "recover"  # some have died: the others go on in their processes, from memory


class JobState(str, Enum):
    """What has become of a job."""

    PENDING = "pending"  # waits for nodes; status.reason says which
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"  # resumable: exit code 143
    DONE = "done"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen to it."""
        return self in (JobState.STOPPED, JobState.DONE, JobState.FAILED)


HEAVIEST = 1e6
"""The largest weight a job may have."""

INSISTS = "--rescale=inplace"
"""In the reason of a job that keeps its size because a change could not be made in place."""


class Rescale(str, Enum):
    """`--rescale`."""

    AUTO = "auto"
    INPLACE = "inplace"
    RESTART = "restart"


@dataclass(frozen=True, config=_CONFIG)
class NodeRecord:
    """One agent: a node, as far as one job is concerned."""

    node: str
    job: str
    run: str  # JobSpec.run that this agent joined
    agent: str  # unique per agent process: a new one under an old name is not the old one
    host: str  # address by which other nodes reach this one
    slots: int  # replicas that fit (MAX of --nproc-per-node)
    min_slots: int = 1  # a plan uses none of this node, or between min_slots and slots of it
    version: str = ""  # of adaptdl-elastic; different ones refuse each other
    pid: int = 0
    gpus: int = 0
    instance: str | None = None  # EC2 instance id
    instance_type: str | None = None
    zone: str | None = None
    preemptible: bool = False
    draining: bool = False
    deadline: float | None = None  # when a draining node will be gone
    at_risk: bool = False  # the cloud recommends to leave it; nothing new should be put here
    joined: float = 0.0


@dataclass(frozen=True, config=_CONFIG)
class DrainRequest:
    """Somebody other than the node itself wants the node's replicas elsewhere."""

    node: str
    reason: str
    deadline: float | None = None  # when the node will be gone, seconds since the epoch
    instance: str | None = None  # only while this instance has the node's name; None: whichever has
    created: float = 0.0


@dataclass(frozen=True, config=_CONFIG)
class JobSpec:
    """What a job's owner said on the command line."""

    job: str
    run: str  # unique per submission: a rerun of a finished id is a new run
    command: tuple[str, ...] = ()
    min_nodes: int = 1
    max_nodes: int = 1
    min_replicas: int = 1
    max_replicas: int = 1
    min_slots: int = 1  # replicas on a node at least, by its first agent: for who is to bring nodes
    max_restarts: int = 3
    rescale: Rescale = Rescale.AUTO
    rescale_timeout: float = 60.0
    checkpoint_path: str = ""
    checkpoint_timeout: float = 120.0
    preemptible: bool = True  # False: once running it keeps what it has
    avoid_preemptible_nodes: bool = False
    autoscale: bool = True  # False: only a person changes the size
    weight: float = 1.0
    profile_key: str = ""  # jobs with the same key share profiles (the script's digest)
    secret_mark: str = ""  # by which agents see whether they have the run's secret; it does not tell it
    created: float = 0.0


@dataclass(frozen=True, config=_CONFIG)
class JobRequest:
    """What a person asked of a running job. The coordinator carries it out; nothing is deleted."""

    replicas: int | None = None  # adaptdl scale JOB --replicas N; None is --auto
    stop: bool = False
    checkpoint: int = 0  # counts up: agents with rank 0 save when it grows
    run: str = ""  # JobSpec.run this is meant for; not obeyed by another


def _check_slots(replicas: int, slots: tuple[int, ...]) -> None:
    if slots and not len(set(slots)) == len(slots) == replicas:
        raise ValueError(f"slots {slots[:8]} of {replicas} replicas can not be: each has one of its own")


@dataclass(frozen=True, config=_CONFIG)
class Placement:
    """So many replicas on this node."""

    node: str
    replicas: _Replicas
    agent: str = ""  # NodeRecord.agent the plan was made for
    slots: _Slots = ()  # their LOCAL_RANKs, in the order of their ranks; (): 0 to replicas - 1

    def __post_init__(self) -> None:
        _check_slots(self.replicas, self.slots)


@dataclass(frozen=True, config=_CONFIG)
class Leaving:
    """Replicas of an earlier generation that had not released their slots when a plan was written.

    They are gone when `generations/<generation>/ended/<node>` exists, or the registration of this `agent`
    does not.
    """

    node: str
    replicas: _Replicas
    agent: str
    generation: int
    slots: _Slots = ()  # as in `Placement`

    def __post_init__(self) -> None:
        _check_slots(self.replicas, self.slots)


@dataclass(frozen=True, config=_CONFIG)
class Extent:
    """What a plan says of which not all is here: `plans` keeps a large one in parts."""

    name: str  # of the parts
    parts: int  # how many there are
    nodes: int
    replicas: int
    index: int = 0  # of the first placement that is here
    rank: int = 0  # of its first replica


@dataclass(frozen=True, config=_CONFIG)
class Plan:
    """The immutable definition of one generation. Ranks go by the order of `placements`.

    A new leader writes every plan again with its own fence and the same generation, so that an old
    leader's compare-and-swap fails; for a job without one it writes a claim (generation -1, no
    placements). Agents act on a plan only when its run is theirs and its generation is greater than
    what they have acted on.
    """

    job: str
    run: str
    generation: int
    placements: tuple[Placement, ...]  # none: no replicas for now; the status says whether the job stopped
    cause: Cause
    transition: Transition
    reason: str  # for a person: which numbers led to it
    fence: int = 0  # revision of the leader who wrote it; only grows
    created: float = 0.0
    leaving: tuple[Leaving, ...] = ()  # who must be gone before this generation starts
    base: int = -1  # of a change in place: the generation that goes on until this one begins
    first: int = 0  # the first generation of this run: ADAPTDL_NUM_RESTARTS is generation - first
    restarts: int = 0  # how much of the restart budget is used, this generation included
    failed_step: int = 0  # step of the newest checkpoint when a restart was last counted
    failed_as: str = ""  # kind of the failure that a restart followed; "" once a step has been made since
    predicted_goodput: float | None = None  # examples/s that the model promised for this allocation
    late: tuple[tuple[str, str], ...] = ()  # node, agent: did not start this run's replicas in time
    restart_only: bool = False  # a change in place could not be made in this run
    extent: Extent | None = None  # an excerpt: placements and leaving name only some of the nodes

    @property
    def claim(self) -> bool:
        """Whether this defines no generation yet and only fences off an older leader."""
        return self.generation < self.first or self.generation < 0

    @property
    def replicas(self) -> int:
        """World size."""
        return sum(p.replicas for p in self.placements) if self.extent is None else self.extent.replicas

    @property
    def nodes(self) -> int:
        """Number of nodes with at least one replica."""
        return len(self.placements) if self.extent is None else self.extent.nodes

    def index(self, node: str) -> int:
        """Which of the nodes this one is, as its GROUP_RANK says; ValueError when it has no replica here."""
        first = 0 if self.extent is None else self.extent.index
        return first + [placement.node for placement in self.placements].index(node)

    def ranks(self, node: str) -> range:
        """The global ranks on `node`, empty when it has none."""
        first = 0 if self.extent is None else self.extent.rank
        for placement in self.placements:
            if placement.node == node:
                return range(first, first + placement.replicas)
            first += placement.replicas
        return range(0)

    def slots(self, node: str) -> tuple[int, ...]:
        """The LOCAL_RANKs on `node` in the order of `ranks`; a process keeps its own as long as it lives."""
        placement = next((p for p in self.placements if p.node == node), None)
        return () if placement is None else slots_of(placement)

    def rank_by_slot(self, node: str) -> dict[int, int]:
        """LOCAL_RANK → global rank of the replicas on `node`, in the order of their ranks."""
        return dict(zip(self.slots(node), self.ranks(node), strict=True))


def slots_of(held: Placement | Leaving) -> tuple[int, ...]:
    """The LOCAL_RANKs of what a node has, in the order of their ranks."""
    return held.slots or tuple(range(held.replicas))


@dataclass(frozen=True, config=_CONFIG)
class MasterRecord:
    """Where the replicas of a generation meet: a TCPStore kept by the agent of rank 0."""

    generation: int
    host: str
    port: int
    collective_port: int = 0  # where rank 0 listens for the library's own collectives


@dataclass(frozen=True, config=_CONFIG)
class ReadyRecord:
    """A node's newcomers are warm."""

    node: str
    generation: int
    time: float = 0.0


@dataclass(frozen=True, config=_CONFIG)
class RunningRecord:
    """A node's replicas have started."""

    node: str
    generation: int
    time: float = 0.0
    first_step: float | None = None  # wall-clock end of the first step, once there was one
    library: bool = False  # a replica said hello: written again when it does
    resilient: bool = False  # the death of others would not end these replicas: written again, too
    agent: str = ""  # who says so: it may come late, when another agent has the node's name


class Outcome(str, Enum):
    """How a node's replicas left a generation."""

    DONE = "done"  # all exited 0
    STOPPED = "stopped"  # orderly, state saved (143), or gone on in place
    FAILED = "failed"  # a replica failed by itself
    ABORTED = "aborted"  # killed because others failed, or because they did not stop in time


@dataclass(frozen=True, config=_CONFIG)
class Failure:
    """The first failed replica of a node."""

    rank: int
    exit_code: int  # negative: the signal
    message: str = ""
    time: float = 0.0
    kind: str = ""  # the same for failures of the same kind; "": two of them prove nothing
    lost_peer: bool = False  # it tells only that another replica is gone


@dataclass(frozen=True, config=_CONFIG)
class PeerLossRecord:
    """A generation can not go on as it is, and this node's living replicas wait to go on without the dead."""

    node: str
    generation: int
    lost: tuple[int, ...] = ()  # LOCAL_RANKs of this node's dead; (): those of other nodes have died
    failure: Failure | None = None  # the first of them
    time: float = 0.0


@dataclass(frozen=True, config=_CONFIG)
class EndedRecord:
    """A node's replicas are gone from a generation and its slots are free."""

    node: str
    generation: int
    outcome: Outcome
    exit_code: int = 0
    failure: Failure | None = None
    last_step: float | None = None  # wall-clock end of the last finished step
    time: float = 0.0


@dataclass(frozen=True, config=_CONFIG)
class CheckpointRecord:
    """The newest checkpoint: a replica that can not see it refuses to start afresh."""

    id: str
    path: str
    generation: int = 0
    step: int = 0
    time: float = 0.0


_STOPPED_EXIT_CODE = 143  # 128 + SIGTERM


@dataclass(frozen=True, config=_CONFIG)
class JobStatus:
    """What the coordinator says about a job."""

    job: str
    run: str
    state: JobState
    generation: int = 0
    reason: str = ""  # why pending, why failed, or why it has what it has
    exit_code: int | None = None
    restarts_used: int = 0
    failures: tuple[Failure, ...] = field(default_factory=tuple)  # of the last generation, root cause first
    last_pause: float | None = None  # seconds, of the last change
    predicted_goodput: float | None = None  # examples/s, for the current plan
    updated: float = 0.0
    prediction_error: float | None = None  # measured / predicted - 1 of this generation's goodput
    pauses: tuple[float, ...] = ()  # seconds, of the last planned changes, newest last
    started: float | None = None  # when its first generation began
    ended: float | None = None
    waited: float = 0.0  # seconds without replicas so far, as the leaders have counted them

    @property
    def process_exit_code(self) -> int:
        """Exit code of a process that ends as the job has ended; a signal is 128 more than its number."""
        if self.exit_code is not None:
            return self.exit_code if self.exit_code >= 0 else 128 - self.exit_code
        return {JobState.DONE: 0, JobState.STOPPED: _STOPPED_EXIT_CODE}.get(self.state, 1)


@dataclass(frozen=True, config=_CONFIG)
class JobCost:
    """What a job's nodes have cost, and will: in the currency of the price table."""

    job: str
    so_far: float
    hourly: float  # at its present share of the nodes
    forecast: float | None = None  # so far and until its declared end; None: no end is known
    seconds_left: float | None = None


@dataclass(frozen=True, config=_CONFIG)
class AutoscalerStatus:
    """What the autoscaler holds, wants and pays."""

    provider: str
    nodes: int
    target: int
    hourly_cost: float
    cost_so_far: float
    reason: str = ""  # which numbers led to the target
    jobs: tuple[JobCost, ...] = ()
    bought: tuple[tuple[str, int, float, float], ...] = ()  # pool, instances so far, node hours, cost
    warnings: tuple[str, ...] = ()  # what does not work and what to do about it
    memory: str = ""  # what the autoscaler must know again after a restart of itself (its own JSON)
    updated: float = 0.0


@dataclass(frozen=True, config=_CONFIG)
class LeaderRecord:
    """The coordinator that decides."""

    id: str
    host: str = ""
    pid: int = 0
    version: str = ""
    settings: dict[str, Any] = field(default_factory=dict)  # that it decides by, for who explains its plans


@cache
def _adapter_of(kind: Hashable) -> TypeAdapter[Any]:
    return TypeAdapter(cast(type[Any], kind))


def _adapter(kind: Any) -> TypeAdapter[Any]:
    return _adapter_of(kind)


def _version(text: str) -> int:
    found = _LEADING_VERSION.match(text)  # where `encode` puts it
    if found:
        return int(found[1])
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return VERSION  # no JSON at all: validation says what is wrong
    version = value.get("v") if isinstance(value, dict) else None
    return version if isinstance(version, int) else VERSION


def encode(record: object) -> str:
    """A record as versioned JSON."""
    body = _adapter(type(record)).dump_json(record).decode()
    return f'{{"v":{VERSION},{body[1:]}' if body != "{}" else f'{{"v":{VERSION}}}'


def decode(kind: type[R], text: str, key: str = "") -> R:
    """The record of type `kind` that `text` holds.

    MalformedRecordError, naming `key`, when it holds none; NewerRecordError when its version is not ours.
    """
    version = _version(text)
    if version > VERSION:
        raise NewerRecordError(
            f"{key or kind.__name__}: written in version {version} of the records, this program knows up to "
            f"{VERSION}: install the same adaptdl-elastic everywhere"
        )
    try:
        record: R = _adapter(kind).validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "value"
        raise MalformedRecordError(f"{key or kind.__name__}: {where}: {first['msg']}") from None
    return record
