"""Define the messages between an agent and its replicas: typed, versioned, and validated when received.

A message is one JSON object per line: the version `v`, its `type`, and the fields of its class. A receiver
ignores unknown fields. It refuses messages of a later version, unknown types and invalid values, so that a
defective sender cannot end the receiver.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import field, fields
from typing import Annotated, Any, ClassVar, TypeVar, cast, get_args

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

VERSION = 1
"""Version of the format. A receiver of version n reads all messages of versions up to n."""

MOST_FILES = 1000
"""Most files of a script's modules that count."""

_CONFIG = ConfigDict(extra="ignore", allow_inf_nan=False)

_Rank = Annotated[int, Field(ge=0, le=10**6)]
_Count = Annotated[int, Field(ge=1, le=10**6)]
_Number = Annotated[int, Field(ge=0, le=10**15)]
_Generation = Annotated[int, Field(ge=0, le=10**9)]
_Port = Annotated[int, Field(ge=0, le=65535)]
_Seconds = Annotated[float, Field(ge=0, le=1e12)]  # wall clock

MOST_GROUPS = 4096
"""Most groups of ranks, and most ranks in one: as many as a node could have slots."""

_Group = Annotated[tuple[_Rank, ...], Field(min_length=1, max_length=MOST_GROUPS)]
Groups = Annotated[tuple[_Group, ...], Field(max_length=MOST_GROUPS)]
"""Groups of ranks of a generation, of each of which one has to live for the others to go on.

(): each replica has the whole state, so that any of them survives all others.
"""

M = TypeVar("M")


class MalformedMessageError(ValueError):
    """Raised if a line is no message of this version, or a message for the other end of the channel."""


# From an agent to a replica


@dataclass(frozen=True, config=_CONFIG)
class Stop:
    """Order all replicas to save a checkpoint after the same step, then to exit with code 143.

    A replica that has not sent `Hello` gets SIGTERM after this message.
    """

    kind: ClassVar[str] = "stop"
    reason: str
    interrupted: bool = False
    """Whether Ctrl-C is the reason: this replica's script then gets KeyboardInterrupt, not SystemExit."""


@dataclass(frozen=True, config=_CONFIG)
class SaveCheckpoint:
    """Order all replicas to save a checkpoint after the same step, and to continue training."""

    kind: ClassVar[str] = "checkpoint"
    request: _Number


@dataclass(frozen=True, config=_CONFIG)
class ChangePlan:
    """Announce a change in place to generation g + 1; sent to the replicas of generation g."""

    kind: ClassVar[str] = "change"
    generation: _Generation
    replicas: _Count
    nodes: _Count
    ranks: tuple[_Rank | None, ...]
    """New rank of each replica, by its old rank; None: that replica leaves."""
    newcomers: tuple[_Rank, ...]
    """New ranks of newcomers."""
    master_addr: str
    """Host of the TCPStore at which the generation meets."""
    master_port: _Port
    environ: dict[str, str] = field(default_factory=dict, repr=False)
    """Environment variables of this replica from then on."""


@dataclass(frozen=True, config=_CONFIG)
class WithdrawPlan:
    """Withdraw the planned change to a generation; training continues."""

    kind: ClassVar[str] = "withdraw"
    generation: _Generation
    reason: str


@dataclass(frozen=True, config=_CONFIG)
class RecoveryPlan:
    """Order a replica to continue without the dead replicas, from memory. The newest such plan applies."""

    kind: ClassVar[str] = "recover"
    generation: _Generation
    rank: _Rank | None
    """New rank of this replica; None: it leaves."""
    replicas: _Count
    nodes: _Count
    master_addr: str
    master_port: _Port
    environ: dict[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, config=_CONFIG)
class Ping:
    """Ask a replica to answer with a `Pong`, which shows that its process does not hang."""

    kind: ClassVar[str] = "ping"
    id: _Number


Plan = ChangePlan | RecoveryPlan
AgentMessage = Stop | SaveCheckpoint | ChangePlan | WithdrawPlan | RecoveryPlan | Ping


# From a replica to its agent


@dataclass(frozen=True, config=_CONFIG)
class Hello:
    """Tell that the script uses the library. The agent then stops it by a message, not by a signal."""

    kind: ClassVar[str] = "hello"
    version: str
    """Version of adaptdl-elastic."""
    pid: _Number


@dataclass(frozen=True, config=_CONFIG)
class Event:
    """Hold an entry of the job's event log: epoch, batch_size, checkpoint, first_step, failure, …."""

    kind: ClassVar[str] = "event"
    event: str
    time: _Seconds
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, config=_CONFIG)
class StepFinished:
    """Tell that an optimizer step has ended.

    The first step of a generation is sent at once, then at most one per second, and the last one before the
    exit.
    """

    kind: ClassVar[str] = "step"
    step: _Number
    time: _Seconds


@dataclass(frozen=True, config=_CONFIG)
class CodeLoaded:
    """Name the files of the modules that the script has at its first step; installed ones are left out."""

    kind: ClassVar[str] = "code"
    files: Annotated[tuple[str, ...], Field(max_length=MOST_FILES)]


@dataclass(frozen=True, config=_CONFIG)
class Ready:
    """Tell that a newcomer is ready to join the running replicas."""

    kind: ClassVar[str] = "ready"
    generation: _Generation


@dataclass(frozen=True, config=_CONFIG)
class Resilient:
    """Tell that from now on, in this generation, the death of a peer does not end this replica.

    With a reason `why_not`, tell that it does.
    """

    kind: ClassVar[str] = "resilient"
    generation: _Generation
    why_not: str = ""
    groups: Groups = ()
    """Groups of ranks of this generation, of each of which one has to live on."""


@dataclass(frozen=True, config=_CONFIG)
class EpochsFinished:
    """Tell that the script has finished all epochs; with `finished` False, that it begins more."""

    kind: ClassVar[str] = "epochs_finished"
    finished: bool


@dataclass(frozen=True, config=_CONFIG)
class Finished:
    """Tell that the script ended by itself with exit code 0, before it was asked to stop.

    SIGTERM has no effect from now on.
    """

    kind: ClassVar[str] = "finished"


@dataclass(frozen=True, config=_CONFIG)
class Stopping:
    """Tell that the replica has carried out a stop, and raises SystemExit(143) or KeyboardInterrupt.

    The replica counts as stopped, even if the script ends with another exit code.
    """

    kind: ClassVar[str] = "stopping"
    unsaved: str = ""
    """Why rank 0 could not save; "" if it has saved."""


@dataclass(frozen=True, config=_CONFIG)
class PeerLost:
    """Tell that a peer is gone, and that this replica waits for a plan without that peer."""

    kind: ClassVar[str] = "peer_lost"
    generation: _Generation
    reason: str


@dataclass(frozen=True, config=_CONFIG)
class Hanging:
    """Ask the agent to kill this replica: it hangs, and all others have waited for `--hang-timeout`."""

    kind: ClassVar[str] = "hanging"
    reason: str
    """Description of the place where the script hangs, on one line."""


@dataclass(frozen=True, config=_CONFIG)
class NetworkChanged:
    """Tell that steps take another time because of the network: the agent measures its links again."""

    kind: ClassVar[str] = "network"


@dataclass(frozen=True, config=_CONFIG)
class Pong:
    """Answer a `Ping`."""

    kind: ClassVar[str] = "pong"
    id: _Number
    waiting: bool
    """Whether the replica waits for a `RecoveryPlan`."""


@dataclass(frozen=True, config=_CONFIG)
class Switched:
    """Tell that the replica now belongs to a generation, or has left because of it."""

    kind: ClassVar[str] = "switched"
    generation: _Generation
    last_step: _Seconds | None
    """Wall-clock time at which the replica's last step before the change ended; None: no step."""


@dataclass(frozen=True, config=_CONFIG)
class Hints:
    """Hold a `JobHints` as JSON; only rank 0 sends it."""

    kind: ClassVar[str] = "hints"
    hints: dict[str, Any]


@dataclass(frozen=True, config=_CONFIG)
class Saved:
    """Tell that a checkpoint is complete and durable; only rank 0 sends this."""

    kind: ClassVar[str] = "saved"
    id: str
    path: str
    step: _Number
    request: _Number | None = None
    """Number of the newest `SaveCheckpoint` that this checkpoint answers."""


ReplicaMessage = (
    Hello
    | Event
    | StepFinished
    | CodeLoaded
    | Ready
    | Resilient
    | EpochsFinished
    | Finished
    | Stopping
    | PeerLost
    | Hanging
    | NetworkChanged
    | Pong
    | Switched
    | Hints
    | Saved
)
Message = AgentMessage | ReplicaMessage

_ORDERS: dict[str, type[Any]] = {one.kind: one for one in get_args(AgentMessage)}
_REPORTS: dict[str, type[Any]] = {one.kind: one for one in get_args(ReplicaMessage)}
_ADAPTERS: dict[type[Any], TypeAdapter[Any]] = {
    one: TypeAdapter(one) for one in (*_ORDERS.values(), *_REPORTS.values())
}


def to_dict(message: Message) -> dict[str, Any]:
    """Return a message as plain data, with its `type`."""
    values = {one.name: getattr(message, one.name) for one in fields(message)}
    return {"v": VERSION, "type": message.kind, **values}


def encode(message: Message) -> bytes:
    """Return a message as a line; ValueError for a number that JSON cannot express."""
    return json.dumps(to_dict(message), separators=(",", ":"), allow_nan=False).encode() + b"\n"


def order_from_dict(values: Mapping[str, Any]) -> AgentMessage:
    """Return the agent's message in a dictionary made by `to_dict`.

    Raises:
        MalformedMessageError: the dictionary is no such message.
    """
    found: AgentMessage = _from_dict(values, _ORDERS)
    return found


def report_from_dict(values: Mapping[str, Any]) -> ReplicaMessage:
    """Return the replica's message in a dictionary made by `to_dict`.

    Raises:
        MalformedMessageError: the dictionary is no such message.
    """
    found: ReplicaMessage = _from_dict(values, _REPORTS)
    return found


def decode_order(line: bytes | str) -> AgentMessage:
    """Return the agent's message on a line.

    Raises:
        MalformedMessageError: the line is no such message.
    """
    return order_from_dict(_parsed(line))


def decode_report(line: bytes | str) -> ReplicaMessage:
    """Return the replica's message on a line.

    Raises:
        MalformedMessageError: the line is no such message.
    """
    return report_from_dict(_parsed(line))


def _parsed(line: bytes | str) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise MalformedMessageError(f"no JSON object: {line[:80]!r}")
    return values


def _from_dict(values: Mapping[str, Any], kinds: Mapping[str, type[M]]) -> M:
    version, kind = values.get("v"), values.get("type")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise MalformedMessageError(f"a message without a version: {kind!r}")
    if version > VERSION:
        raise MalformedMessageError(
            f"a message of version {version}, this one reads up to {VERSION}: use the same version of "
            f"adaptdl-elastic for agent and script"
        )
    found = kinds.get(kind) if isinstance(kind, str) else None
    if found is None:
        raise MalformedMessageError(f"a message of unknown type {kind!r}")
    try:
        return cast(M, _ADAPTERS[found].validate_python(dict(values)))
    except (ValidationError, RecursionError) as error:
        what = error.errors()[0] if isinstance(error, ValidationError) else {"loc": (), "msg": str(error)}
        place = ".".join(str(part) for part in what["loc"])
        raise MalformedMessageError(f"message {kind!r}: {place}: {what['msg']}") from None
