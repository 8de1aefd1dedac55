"""The records in the store: frozen dataclasses, kept as versioned JSON and validated when they are read.

Times are seconds since the epoch by the writer's clock. They are only shown to users: no decision compares
the clocks of two machines.
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

from adaptdl_elastic.protocol.messages import Groups
from adaptdl_elastic.rendezvous.text import clock

VERSION = 2
"""Version of the records. It grows when an old reader would misread them, and one release back is read."""

HELD_VERSION = 2
"""Version from which on an agent says what its node holds."""

RECORD_CONFIG = ConfigDict(extra="ignore", strict=False, allow_inf_nan=False)
"""How pydantic reads every record: fields of newer versions are ignored."""

MOST_SLOTS = 1024
"""Most slots of one node. A record with more is an error, and would slow down every round of the policy."""

MOST_REPLICAS = 10**9
"""Most nodes and replicas in the bounds of a job."""

# bounds of numbers in records, so that a defective writer cannot cause huge loops or ranges
_Replicas = Annotated[int, Field(ge=1, le=MOST_SLOTS)]
Slot = Annotated[int, Field(ge=0, lt=4 * MOST_SLOTS)]
_Slots = Annotated[tuple[Slot, ...], Field(max_length=MOST_SLOTS)]
_Bound = Annotated[int, Field(ge=1, le=MOST_REPLICAS)]

R = TypeVar("R")

MOST_NAMED = 64
"""Most nodes that a status names."""

_LEADING_VERSION = re.compile(r'\s*\{\s*"v"\s*:\s*(\d{1,9})\b')


class MalformedRecordError(ValueError):
    """A value in the store is not a valid record of the type that belongs to its key."""


class NewerRecordError(MalformedRecordError):
    """A version of adaptdl-elastic wrote a record that this version cannot interpret."""


class Cause(str, Enum):
    """Why a generation began."""

    START = "start"  # the first generation of the job
    POLICY = "policy"  # the goodput model predicts that this allocation is worth the change
    MANUAL = "manual"  # adaptdl scale
    JOIN = "join"  # a node came, and the job does not report measurements to the policy
    DRAIN = "drain"  # a node leaves in an orderly way
    NODE_LOST = "node_lost"  # a node vanished
    REPLICA_LOST = "replica_lost"  # a replica died; does not count against max_restarts
    FAILURE = "failure"  # a replica failed; counts against max_restarts
    STOP = "stop"  # adaptdl stop: a plan without replicas


class Transition(str, Enum):
    """How the replicas of the previous generation leave it."""

    RESTART = "restart"  # checkpoint at a common step, exit with 143; the new processes load it
    INPLACE = "inplace"  # the processes that stay go on, with new ranks
    ABORT = "abort"  # the replicas cannot agree on a step any more: they are killed
    # some replicas have died: the others go on in their processes, with the state in memory
    RECOVER = "recover"


class JobState(str, Enum):
    """The state of a job."""

    PENDING = "pending"  # waits for nodes; JobStatus.reason says for which
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"  # can be resumed; exit code 143
    DONE = "done"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        """Whether the job has ended."""
        return self in (JobState.STOPPED, JobState.DONE, JobState.FAILED)


HEAVIEST = 1e6
"""Largest allowed weight of a job."""

# The description completes the line that refuses an option of the field's name ("--weight=0 ...").
_Weight = Annotated[
    float,
    Field(gt=0, le=HEAVIEST, description=f"must be above 0 and at most {HEAVIEST:g}; the default is 1"),
]
POSITIVE = Field(gt=0, description="must be a finite, positive number of seconds")

INPLACE_REQUIRED = "--rescale=inplace"
"""Text in the reason of a job that keeps its size because a change in place is impossible."""

PART_OF_MODEL = "of a part of the model"
"""Text in the reason of a restart after deaths if no survivor has what the dead have held."""


class Rescale(str, Enum):
    """How a job's size may be changed (`--rescale`)."""

    AUTO = "auto"
    INPLACE = "inplace"
    RESTART = "restart"


@dataclass(frozen=True, config=RECORD_CONFIG)
class Link:
    """The link from another node to the one that has measured it."""

    node: str  # the other one
    latency: Annotated[float, Field(ge=0, le=1e3)]  # seconds of one way
    bandwidth: Annotated[float, Field(gt=0, le=1e15)]  # bytes per second of one connection


@dataclass(frozen=True, config=RECORD_CONFIG)
class NodeRecord:
    """The registration of one agent: a node, for one job."""

    node: str
    job: str
    run: str  # JobSpec.run that this agent joined
    agent: str  # id of the agent process; a new agent under the same node name has another one
    host: str  # address by which other nodes reach this one
    slots: int  # how many replicas fit (MAX of --nproc-per-node)
    min_slots: int = 1  # a plan uses either none of this node's slots, or between min_slots and slots of them
    version: str = ""  # of adaptdl-elastic; a job's agents have the same one, coordinators may have another
    pid: int = 0
    gpus: int = 0
    # names of the GPUs (and parts of GPUs) that this agent may use, in the order of their numbers; (): none,
    # and a slot is a share of the cores
    devices: Annotated[tuple[str, ...], Field(max_length=MOST_SLOTS)] = ()
    # those of `devices` that cannot be used now, each with the reason after a colon
    unusable: Annotated[tuple[str, ...], Field(max_length=MOST_SLOTS)] = ()
    node_type: str = ""  # nodes of one type are equally fast: the GPU model, or --node-type; "": not known
    instance: str | None = None  # id of its instance, if the agent knows one
    instance_type: str | None = None
    zone: str | None = None
    preemptible: bool = False
    draining: bool = False
    deadline: float | None = None  # when a draining node will be gone, in seconds since the epoch
    at_risk: bool = False  # the cloud recommends leaving this node: plans put no new replicas here
    joined: float = 0.0
    # where other agents of the job measure the link from this node; 0: they cannot
    link_port: Annotated[int, Field(ge=0, le=65535)] = 0
    links: Annotated[tuple[Link, ...], Field(max_length=MOST_SLOTS)] = ()  # as last measured
    links_at: int = -1  # newest generation when they were measured again; -1: as measured when it joined
    # the same when the fastest of them was found to have changed; steps over it that were measured in earlier
    # generations say nothing any more
    links_since: int = -1
    # a file of the job's code that differs from the one that runs; the node takes no further replicas then
    changed: str = ""
    # the same for agents that reach each other at loopback addresses (`addresses.network`); "": not known
    network: str = ""
    decisions: str = ""  # the file with the last decisions of the agent that a person has asked for
    records: int = VERSION  # version in which the agent has registered


_Bytes = Annotated[int, Field(ge=0, le=1 << 60)]


@dataclass(frozen=True, config=RECORD_CONFIG)
class GpuUsage:
    """The load of one GPU."""

    utilization: Annotated[float, Field(ge=0, le=1)]  # fraction of the time in which a kernel ran
    memory_used: _Bytes
    memory: _Bytes


@dataclass(frozen=True, config=RECORD_CONFIG)
class NodeUsage:
    """The load of a node, by all of its processes. It is shown to users; no decision reads it."""

    node: str
    cpu: Annotated[float, Field(ge=0, le=1)]  # fraction of all cores that was busy since the last report
    memory_used: _Bytes
    memory: _Bytes
    gpus: Annotated[tuple[GpuUsage, ...], Field(max_length=MOST_SLOTS)] = ()
    time: float = 0.0


@dataclass(frozen=True, config=RECORD_CONFIG)
class DrainRequest:
    """A request from outside a node to move its replicas elsewhere."""

    node: str
    reason: str
    deadline: float | None = None  # when the node will be gone, seconds since the epoch
    instance: str | None = None  # valid only while this instance has the node's name; None: any instance
    created: float = 0.0
    person: str = ""  # who asks; "": an autoscaler, or a person without a name on the cluster

    def concerns(self, instance: str | None) -> bool:
        """Return whether it asks the node's present instance; None: the node knows none."""
        return self.instance is None or instance is None or instance == self.instance

    @property
    def text(self) -> str:
        """By whom, since when and why the node is drained, for users."""
        by = f" by {self.person}" if self.person else ""
        return f"drained{by} since {clock(self.created)} ({self.reason})"


@dataclass(frozen=True, config=RECORD_CONFIG)
class JobSpec:
    """What the user asked for on the command line."""

    job: str
    run: str  # unique per submission: submitting a finished job's name again makes a new run
    command: tuple[str, ...] = ()
    min_nodes: _Bound = 1
    max_nodes: _Bound = 1
    min_replicas: _Bound = 1
    max_replicas: _Bound = 1
    gpus_per_replica: Annotated[
        int, Field(ge=1, le=MOST_SLOTS, description=f"must be between 1 and {MOST_SLOTS}")
    ] = 1
    min_slots: int = 1  # fewest replicas on a node, as its first agent says; used by providers that add nodes
    max_restarts: Annotated[int, Field(ge=0, description="must not be negative; 0 means none")] = 3
    rescale: Rescale = Rescale.AUTO
    rescale_timeout: Annotated[float, POSITIVE] = 60.0
    checkpoint_path: str = ""
    checkpoint_timeout: Annotated[float, POSITIVE] = 120.0
    preemptible: bool = True  # False: a running job keeps its replicas
    avoid_preemptible_nodes: bool = False
    autoscale: bool = True  # False: only `adaptdl scale` changes the size
    weight: _Weight = 1.0
    most_weight: _Weight = 1.0  # largest weight that counts in a cluster with submissions
    profile_key: str = ""  # jobs with the same key share profiles (digest of the script)
    code: str = ""  # URL of the archive with the script and the command, of which its name has the digest
    # a digest by which agents check that they know the run's secret; it does not reveal the secret
    secret_mark: str = ""
    created: float = 0.0
    number: Annotated[int, Field(ge=0)] = 0  # a later run of the job has a greater one, whatever clocks say


@dataclass(frozen=True, config=RECORD_CONFIG)
class JobRequest:
    """What a user asked of a running job. The coordinator carries it out and deletes nothing."""

    replicas: int | None = None  # adaptdl scale JOB --replicas N; None: --auto
    stop: bool = False
    checkpoint: int = 0  # a counter: the agent with rank 0 saves a checkpoint when it grows
    decisions: int = 0  # a counter: agents and coordinator write their last decisions when it grows
    run: str = ""  # JobSpec.run that the request is for; other runs ignore it
    resume: bool = False  # the run that has ended is to be followed by another one


def _check_slots(replicas: int, slots: tuple[int, ...], devices: tuple[int, ...]) -> None:
    if slots and not len(set(slots)) == len(slots) == replicas:
        raise ValueError(f"slots {slots[:8]} of {replicas} replicas cannot be: each has one of its own")
    if len(set(devices)) != len(devices) or len(devices) % replicas:
        raise ValueError(f"devices {devices[:8]} of {replicas} replicas cannot be: each has its own")


@dataclass(frozen=True, config=RECORD_CONFIG)
class Placement:
    """The replicas of a generation on one node."""

    node: str
    replicas: _Replicas
    agent: str = ""  # NodeRecord.agent that the plan was made for
    slots: _Slots = ()  # LOCAL_RANKs in the order of the ranks; (): 0 to replicas - 1
    # numbers of the devices in `NodeRecord.devices`, equally many for each replica, in the order of the
    # ranks; (): one for each, with the number of its LOCAL_RANK
    devices: _Slots = ()

    def __post_init__(self) -> None:
        # most have neither, and a plan may have thousands
        if self.slots or self.devices:
            _check_slots(self.replicas, self.slots, self.devices)


@dataclass(frozen=True, config=RECORD_CONFIG)
class Leaving:
    """Replicas of an earlier generation that still held their slots when a plan was written.

    They are gone once the node says that it has left the generation, or `agent` is not registered any more.
    """

    node: str
    replicas: _Replicas
    agent: str
    generation: int
    slots: _Slots = ()  # as in `Placement`
    devices: _Slots = ()  # as in `Placement`

    def __post_init__(self) -> None:
        # most have neither, and a plan may have thousands
        if self.slots or self.devices:
            _check_slots(self.replicas, self.slots, self.devices)


@dataclass(frozen=True, config=RECORD_CONFIG)
class SizeLimit:
    """Sizes above which the script of a run has failed, while it works at them."""

    replicas: Annotated[int, Field(ge=1)] | None = None
    batch_size: Annotated[int, Field(ge=1)] | None = None  # over all replicas
    reason: str = ""  # text for users
    request: int = 0  # revision of the newest request when the script failed; `adaptdl scale` after it counts
    times: int = 0  # how often the number of replicas was limited
    until: float = 0.0  # wall-clock time of the next try with more replicas


@dataclass(frozen=True, config=RECORD_CONFIG)
class LeftOut:
    """A node that a job does without, because its replicas failed there, or did not start in time."""

    node: str
    agent: str  # NodeRecord.agent; another one is tried at once
    reason: str = ""  # text for users
    times: int = 1  # in a row
    until: float = 0.0  # wall-clock time of the next try
    request: int = 0  # as in `SizeLimit`


@dataclass(frozen=True, config=RECORD_CONFIG)
class Plan:
    """The immutable definition of one generation. Ranks follow the order of `placements`.

    A new leader writes every plan again with its own fence and the same generation, so that the
    compare-and-swap of an older leader fails. For a job without a plan it writes a claim: generation -1, no
    placements. An agent acts on a plan only if the run is its own and the generation is greater than the last
    one that it acted on.
    """

    job: str
    run: str
    generation: int
    # empty: no replicas for now; the job's status says whether it has stopped
    placements: tuple[Placement, ...]
    cause: Cause
    transition: Transition
    reason: str  # text for users: the numbers behind the decision
    fence: int = 0  # revision of the leader that wrote the plan; never decreases
    created: float = 0.0
    leaving: tuple[Leaving, ...] = ()  # replicas that must be gone before this generation starts
    lost: tuple[Leaving, ...] = ()  # of a recovery: replicas that have left `base`, the dead among them
    base: int = -1  # of a change in place or a recovery: the generation that it follows
    groups: Groups = ()  # of a recovery: of each, one replica has to live until they have said their own
    first: int = 0  # first generation of this run; ADAPTDL_NUM_RESTARTS is generation - first
    restarts: int = 0  # restarts counted against the budget, including the one for this generation
    failed: int = -1  # generation whose failure was counted last and may yet prove to be a node's loss
    failed_step: int = 0  # step of the newest checkpoint when a restart was last counted
    failed_as: str = ""  # how the failure that led to a restart is recognised; "": it is not
    predicted_goodput: float | None = None  # examples/s that the goodput model predicts for this allocation
    failed_on: tuple[str, ...] = ()  # nodes of that failure
    failed_size: int = 0  # replicas of the generation that failed so
    left_out: tuple[LeftOut, ...] = ()  # also those whose time has come
    restart_only: bool = False  # a change in place has failed in this run, so changes are restarts
    # samples of one replica that fit into memory, as other jobs of the script have learnt; None: not known
    memory_limit: Annotated[int, Field(ge=1)] | None = None
    node_type: str = ""  # class of its slowest node, if measurements show that this is slower than its type
    sizes: tuple[int, ...] = ()  # replicas of earlier generations of this run that have made steps
    worked: tuple[str, ...] = ()  # nodes of these generations
    limit: SizeLimit | None = None  # what this run stays at or below
    links_since: int = -1  # the newest `NodeRecord.links_since` of its nodes

    @property
    def claim(self) -> bool:
        """Whether the plan defines no generation and only fences off an older leader."""
        return self.generation < self.first or self.generation < 0

    @property
    def replicas(self) -> int:
        """World size."""
        return sum(p.replicas for p in self.placements)

    @property
    def nodes(self) -> int:
        """Number of nodes with at least one replica."""
        return len(self.placements)

    def index(self, node: str) -> int:
        """Return the index of a node among the plan's nodes (GROUP_RANK).

        Raises:
            ValueError: the node has no replica in this plan.
        """
        return [placement.node for placement in self.placements].index(node)

    def ranks(self, node: str) -> range:
        """Return the global ranks on `node`; empty if it has none."""
        first = 0
        for placement in self.placements:
            if placement.node == node:
                return range(first, first + placement.replicas)
            first += placement.replicas
        return range(0)

    def slots(self, node: str) -> tuple[int, ...]:
        """Return the LOCAL_RANKs on `node` in the order of `ranks`.

        A process keeps its LOCAL_RANK for life.
        """
        placement = self._placement(node)
        return () if placement is None else slots_of(placement)

    def rank_by_slot(self, node: str) -> dict[int, int]:
        """Return LOCAL_RANK → global rank of the replicas on `node`, in the order of their ranks."""
        return dict(zip(self.slots(node), self.ranks(node), strict=True))

    def devices(self, node: str) -> dict[int, tuple[int, ...]]:
        """Return LOCAL_RANK → numbers of the devices of the replicas on `node`."""
        placement = self._placement(node)
        return {} if placement is None else devices_by_slot(placement)

    def _placement(self, node: str) -> Placement | None:
        return next((p for p in self.placements if p.node == node), None)


def slots_of(held: Placement | Leaving) -> tuple[int, ...]:
    """Return the LOCAL_RANKs of a node's replicas, in the order of their ranks."""
    return held.slots or tuple(range(held.replicas))


def devices_by_slot(held: Placement | Leaving) -> dict[int, tuple[int, ...]]:
    """Return LOCAL_RANK → numbers of the replica's devices, in the order of the ranks."""
    slots, devices = slots_of(held), held.devices or slots_of(held)
    each = len(devices) // len(slots)
    return {slot: devices[each * i : each * (i + 1)] for i, slot in enumerate(slots)}


@dataclass(frozen=True, config=RECORD_CONFIG)
class MasterRecord:
    """The address of a generation's TCPStore, which the agent of rank 0 serves."""

    generation: int
    host: str
    port: int
    collective_port: int = 0  # port on which rank 0 listens for the library's own collectives
    # path below the script's directory → digest, of the code with which the run began to train; {}: not known
    code: dict[str, str] = field(default_factory=dict)


CHANGED_CODE = "changed code"
"""`Failure.kind` where a node's files are not those with which the run began to train."""


class Outcome(str, Enum):
    """How a node's replicas left a generation."""

    DONE = "done"  # all exited with 0
    STOPPED = "stopped"  # stopped in order, with state saved (143), or went on in place
    FAILED = "failed"  # a replica failed
    ABORTED = "aborted"  # killed because others failed, or because it did not stop in time
    LOST = "lost"  # its agent died, and the replicas with it


@dataclass(frozen=True, config=RECORD_CONFIG)
class Failure:
    """The first failed replica of a node."""

    rank: int
    exit_code: int  # negative: number of the signal
    message: str = ""
    time: float = 0.0
    kind: str = ""  # equal for failures of the same kind; "": the kind is unknown
    lost_peer: bool = False  # the error only reports that another replica is gone
    final: bool = False  # the job is to fail without restarts, because they would not help
    step: int | None = None  # number of the last step before the error; None: unknown
    # largest batch size that is known to work, if no step was made with the present, larger one; else None
    worked_batch: Annotated[int, Field(ge=1)] | None = None


@dataclass(frozen=True, config=RECORD_CONFIG)
class CheckpointRecord:
    """The newest checkpoint. A replica that cannot read it fails instead of starting from scratch."""

    id: str
    path: str
    generation: int = 0
    step: int = 0
    time: float = 0.0


_STOPPED_EXIT_CODE = 143  # 128 + SIGTERM


@dataclass(frozen=True, config=RECORD_CONFIG)
class JobStatus:
    """The coordinator's report about a job; an agent's if no coordinator can be started."""

    job: str
    run: str
    state: JobState
    generation: int = 0
    reason: str = ""  # why the job is pending, has failed, or has the replicas that it has
    exit_code: int | None = None
    restarts_used: int = 0
    failures: tuple[Failure, ...] = field(default_factory=tuple)  # of the last generation, root cause first
    last_pause: float | None = None  # seconds that the last change took
    predicted_goodput: float | None = None  # examples/s, for the current plan
    updated: float = 0.0
    prediction_error: float | None = None  # measured / predicted - 1 of this generation's goodput
    pauses: tuple[float, ...] = ()  # seconds that the last planned changes took, newest last
    started: float | None = None  # when its first generation began
    ended: float | None = None
    waited: float = 0.0  # seconds without replicas so far, as counted by the leaders
    ran_on: tuple[str, ...] = ()  # the nodes where it has had replicas, up to `MOST_NAMED`
    unsaved: str = ""  # why its state at its stop is not saved
    failed_jobs: int = 0  # how often jobs of the cluster had failed when the state changed last

    @property
    def process_exit_code(self) -> int:
        """Exit code of a process that mirrors the job's end; for a signal 128 plus its number."""
        if self.exit_code is not None:
            return self.exit_code if self.exit_code >= 0 else 128 - self.exit_code
        return {JobState.DONE: 0, JobState.STOPPED: _STOPPED_EXIT_CODE}.get(self.state, 1)


@dataclass(frozen=True, config=RECORD_CONFIG)
class LeaderRecord:
    """A coordinator or autoscaler that leads or stands by."""

    id: str
    host: str = ""
    pid: int = 0
    version: str = ""
    # settings that it decides by, for `adaptdl explain`
    settings: dict[str, Any] = field(default_factory=dict)
    metrics: str = ""  # HOST:PORT of its metrics; "": it serves none
    decisions: str = ""  # the file that it writes its last decisions to; "": none


@cache
def _adapter_of(kind: Hashable) -> TypeAdapter[Any]:
    return TypeAdapter(cast(type[Any], kind))


def _adapter(kind: Any) -> TypeAdapter[Any]:
    return _adapter_of(kind)


def version_of(text: str) -> int:
    """Return the version in which a record was written."""
    found = _LEADING_VERSION.match(text)  # `encode` writes the version first
    if found:
        return int(found[1])
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return VERSION  # not JSON: validation reports it
    version = value.get("v") if isinstance(value, dict) else None
    return version if isinstance(version, int) else VERSION


def encode(record: object) -> str:
    """Return a record as versioned JSON."""
    body = _adapter(type(record)).dump_json(record).decode()
    return f'{{"v":{VERSION},{body[1:]}' if body != "{}" else f'{{"v":{VERSION}}}'


def decode(kind: type[R], text: str, key: str = "") -> R:
    """Return the record of type `kind` that `text` holds.

    Args:
        kind: type of the record.
        text: versioned JSON.
        key: named in errors.

    Raises:
        MalformedRecordError: the text holds no such record.
        NewerRecordError: a later version of this program wrote it, or one of more than one release before.
    """
    version = version_of(text)
    if not VERSION - 1 <= version <= VERSION:
        side = "this program is too old: upgrade it here" if version > VERSION else "upgrade its writer"
        raise NewerRecordError(
            f"{key or kind.__name__}: written in version {version} of the records, this program reads "
            f"{VERSION - 1} and {VERSION}: {side}"
        )
    try:
        record: R = _adapter(kind).validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "value"
        raise MalformedRecordError(f"{key or kind.__name__}: {where}: {first['msg']}") from None
    return record
