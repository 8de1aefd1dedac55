"""The messages between an agent and its replicas: typed, versioned, and validated when received.

A message is one JSON object per line: the version `v`, its `type`, and the fields of its class. A receiver
ignores unknown fields. It refuses messages of a later version, unknown types and invalid values, so that a
defective sender cannot end the receiver.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import field, fields
from typing import Annotated, Any, ClassVar, TypeVar, cast

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

VERSION = 1
"""Version of the format. A receiver of version n reads all messages of versions up to n."""

_CONFIG = ConfigDict(extra="ignore", allow_inf_nan=False)

_Rank = Annotated[int, Field(ge=0, le=10**6)]
_Count = Annotated[int, Field(ge=1, le=10**6)]
_Number = Annotated[int, Field(ge=0, le=10**15)]
_Generation = Annotated[int, Field(ge=0, le=10**9)]
_Port = Annotated[int, Field(ge=0, le=65535)]
_Seconds = Annotated[float, Field(ge=0, le=1e12)]  # wall clock

M = TypeVar("M")


class MalformedMessageError(ValueError):
    """A line is no message of this version, or none that this end of the channel receives."""


# From an agent to a replica


@dataclass(frozen=True, config=_CONFIG)
class Stop:
    """Save a checkpoint at a common step, then exit 143.

    A replica that has not said hello gets SIGTERM after it.
    """

    kind: ClassVar[str] = "stop"
    reason: str


@dataclass(frozen=True, config=_CONFIG)
class SaveCheckpoint:
    """Save a checkpoint at a common step and go on."""

    kind: ClassVar[str] = "checkpoint"
    request: _Number


@dataclass(frozen=True, config=_CONFIG)
class ChangePlan:
    """A change in place is planned to generation g + 1; sent to replicas of g."""

    kind: ClassVar[str] = "change"
    generation: _Generation
    replicas: _Count
    nodes: _Count
    ranks: tuple[_Rank | None, ...]
    """The new rank of each old one; None: that replica leaves."""
    newcomers: tuple[_Rank, ...]
    """New ranks of newcomers."""
    master_addr: str
    """Host of the TCPStore at which the generation meets."""
    master_port: _Port
    environ: dict[str, str] = field(default_factory=dict, repr=False)
    """Environment variables of this replica from then on."""


@dataclass(frozen=True, config=_CONFIG)
class WithdrawPlan:
    """The planned change to that generation is withdrawn; training goes on."""

    kind: ClassVar[str] = "withdraw"
    generation: _Generation
    reason: str


@dataclass(frozen=True, config=_CONFIG)
class RecoveryPlan:
    """Go on without the dead, with the state in memory. The newest such plan applies."""

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
    """Answer with a `Pong`, to show that the process does not hang."""

    kind: ClassVar[str] = "ping"
    id: _Number


Plan = ChangePlan | RecoveryPlan
AgentMessage = Stop | SaveCheckpoint | ChangePlan | WithdrawPlan | RecoveryPlan | Ping


# From a replica to its agent


@dataclass(frozen=True, config=_CONFIG)
class Hello:
    """The script uses the library, so it is stopped by a message, not by a signal."""

    kind: ClassVar[str] = "hello"
    version: str
    """Version of adaptdl-elastic."""
    pid: _Number


@dataclass(frozen=True, config=_CONFIG)
class Event:
    """An entry of the job's event log: epoch, batch_size, checkpoint, metrics, first_step, failure, …."""

    kind: ClassVar[str] = "event"
    event: str
    time: _Seconds
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, config=_CONFIG)
class StepFinished:
    """An optimizer step has ended.

    The first step of a generation is sent at once, then at most one per second, and the last one before the
    exit.
    """

    kind: ClassVar[str] = "step"
    step: _Number
    time: _Seconds


@dataclass(frozen=True, config=_CONFIG)
class Ready:
    """A newcomer is ready to join the running replicas."""

    kind: ClassVar[str] = "ready"
    generation: _Generation


@dataclass(frozen=True, config=_CONFIG)
class Resilient:
    """From now on in this generation, the death of a peer does not end this replica."""

    kind: ClassVar[str] = "resilient"
    generation: _Generation


@dataclass(frozen=True, config=_CONFIG)
class EpochsFinished:
    """The script has finished all epochs; with `finished` False, it begins more epochs."""

    kind: ClassVar[str] = "epochs_finished"
    finished: bool


@dataclass(frozen=True, config=_CONFIG)
class Finished:
    """The script ended by itself with exit code 0, before it was asked to stop.

    SIGTERM has no effect from now on.
    """

    kind: ClassVar[str] = "finished"


@dataclass(frozen=True, config=_CONFIG)
class Stopping:
    """The replica has saved as requested, and raises SystemExit(143).

    It counts as stopped, even if the script turns that into another exit code.
    """

    kind: ClassVar[str] = "stopping"


@dataclass(frozen=True, config=_CONFIG)
class PeerLost:
    """A peer is gone. The replica waits for a plan without it."""

    kind: ClassVar[str] = "peer_lost"
    generation: _Generation
    reason: str


@dataclass(frozen=True, config=_CONFIG)
class Hanging:
    """The script of this replica hangs, and all others wait for it for `--hang-timeout`: kill it."""

    kind: ClassVar[str] = "hanging"
    reason: str
    """What is known about it, on one line."""


@dataclass(frozen=True, config=_CONFIG)
class Pong:
    """The answer to a `Ping`."""

    kind: ClassVar[str] = "pong"
    id: _Number
    waiting: bool
    """Whether the replica waits for a `RecoveryPlan`."""


@dataclass(frozen=True, config=_CONFIG)
class Switched:
    """The replica now belongs to that generation, or leaves for it."""

    kind: ClassVar[str] = "switched"
    generation: _Generation
    last_step: _Seconds | None
    """When its last step before the change ended."""


@dataclass(frozen=True, config=_CONFIG)
class Hints:
    """A `JobHints` as JSON; only rank 0 sends it."""

    kind: ClassVar[str] = "hints"
    hints: dict[str, Any]


@dataclass(frozen=True, config=_CONFIG)
class Saved:
    """A checkpoint is complete and durable; only rank 0 sends it."""

    kind: ClassVar[str] = "saved"
    id: str
    path: str
    step: _Number
    request: _Number | None = None
    """The newest `SaveCheckpoint` that it answers."""


ReplicaMessage = (
    Hello
    | Event
    | StepFinished
    | Ready
    | Resilient
    | EpochsFinished
    | Finished
    | Stopping
    | PeerLost
    | Hanging
    | Pong
    | Switched
    | Hints
    | Saved
)
Message = AgentMessage | ReplicaMessage

_ORDERS: dict[str, type[Any]] = {
    one.kind: one for one in (Stop, SaveCheckpoint, ChangePlan, WithdrawPlan, RecoveryPlan, Ping)
}
_REPORTS: dict[str, type[Any]] = {
    one.kind: one
    for one in (
        *(Hello, Event, StepFinished, Ready, Resilient, EpochsFinished, Finished, Stopping),
        *(PeerLost, Hanging, Pong, Switched, Hints, Saved),
    )
}


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
