"""The messages between an agent and its replicas: typed, versioned, and validated on the way in.

A message is one JSON object on a line of its own: the version `v`, its `type`, and the fields of its class.
A receiver ignores fields that it does not know. It refuses messages of a later version, unknown types, and
values that do not fit; the sender's defect must not end the receiver.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import field, fields
from typing import Annotated, Any, ClassVar, TypeVar, cast

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

VERSION = 1
"""Of the format. A receiver of version n reads all messages of versions up to n."""

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


# -- from an agent to a replica -------------------------------------------------------------------------


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
    """A change in place is planned: generation g + 1, for a replica of g."""

    kind: ClassVar[str] = "change"
    generation: _Generation
    replicas: _Count
    nodes: _Count
    ranks: tuple[_Rank | None, ...]
    """The new rank of each old one; None: that replica leaves."""
    newcomers: tuple[_Rank, ...]
    """New ranks that no replica of the generation before becomes."""
    master_addr: str
    """Where the store is that the generation meets in, with `master_port`."""
    master_port: _Port
    environ: dict[str, str] = field(default_factory=dict, repr=False)
    """The variables of this replica from then on."""


@dataclass(frozen=True, config=_CONFIG)
class WithdrawPlan:
    """The planned change of that generation is off; training goes on."""

    kind: ClassVar[str] = "withdraw"
    generation: _Generation
    reason: str


@dataclass(frozen=True, config=_CONFIG)
class RecoveryPlan:
    """Go on without those who died, from memory. The newest such plan counts."""

    kind: ClassVar[str] = "recover"
    generation: _Generation
    rank: _Rank | None
    """This replica's rank from then on; None: it leaves."""
    replicas: _Count
    nodes: _Count
    master_addr: str
    master_port: _Port
    environ: dict[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, config=_CONFIG)
class Ping:
    """Say that you are not hanging."""

    kind: ClassVar[str] = "ping"
    id: _Number


Plan = ChangePlan | RecoveryPlan
AgentMessage = Stop | SaveCheckpoint | ChangePlan | WithdrawPlan | RecoveryPlan | Ping


# -- from a replica to its agent ------------------------------------------------------------------------


@dataclass(frozen=True, config=_CONFIG)
class Hello:
    """The script uses the library: stop it by message, not by signal."""

    kind: ClassVar[str] = "hello"
    version: str
    """Of adaptdl-elastic."""
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

    The first of a generation is told at once, then at most one a second, and the last one before the exit.
    """

    kind: ClassVar[str] = "step"
    step: _Number
    time: _Seconds


@dataclass(frozen=True, config=_CONFIG)
class Ready:
    """A newcomer waits where the running replicas are to be joined."""

    kind: ClassVar[str] = "ready"
    generation: _Generation


@dataclass(frozen=True, config=_CONFIG)
class Resilient:
    """From now on, in this generation, the death of a peer does not end this replica."""

    kind: ClassVar[str] = "resilient"
    generation: _Generation


@dataclass(frozen=True, config=_CONFIG)
class EpochsFinished:
    """The script has all epochs behind it; with `finished` False: it begins more of them."""

    kind: ClassVar[str] = "epochs_finished"
    finished: bool


@dataclass(frozen=True, config=_CONFIG)
class Finished:
    """The script came to its end by itself, with exit code 0, before it was asked to stop.

    SIGTERM has no effect from now on.
    """

    kind: ClassVar[str] = "finished"


@dataclass(frozen=True, config=_CONFIG)
class Stopping:
    """The replica has saved as it was asked to, and raises SystemExit(143).

    It was stopped, whatever exit code the script makes of that.
    """

    kind: ClassVar[str] = "stopping"


@dataclass(frozen=True, config=_CONFIG)
class PeerLost:
    """A peer is gone. The replica waits for a plan to go on without it."""

    kind: ClassVar[str] = "peer_lost"
    generation: _Generation
    reason: str


@dataclass(frozen=True, config=_CONFIG)
class Pong:
    """The answer to a `Ping`."""

    kind: ClassVar[str] = "pong"
    id: _Number
    waiting: bool
    """Whether it waits for a `RecoveryPlan`."""


@dataclass(frozen=True, config=_CONFIG)
class Switched:
    """The replica is of that generation now, or leaves for it."""

    kind: ClassVar[str] = "switched"
    generation: _Generation
    last_step: _Seconds | None
    """When its last step before ended."""


@dataclass(frozen=True, config=_CONFIG)
class Hints:
    """What the job reports about itself, from rank 0 only: a `JobHints` as JSON."""

    kind: ClassVar[str] = "hints"
    hints: dict[str, Any]


@dataclass(frozen=True, config=_CONFIG)
class Saved:
    """A checkpoint is complete and durable. From rank 0 only."""

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
        *(PeerLost, Pong, Switched, Hints, Saved),
    )
}


_ADAPTERS: dict[type[Any], TypeAdapter[Any]] = {
    one: TypeAdapter(one) for one in (*_ORDERS.values(), *_REPORTS.values())
}


def to_dict(message: Message) -> dict[str, Any]:
    """Return a message as plain data, its `type` included."""
    values = {one.name: getattr(message, one.name) for one in fields(message)}
    return {"v": VERSION, "type": message.kind, **values}


def encode(message: Message) -> bytes:
    """Return a message as a line; ValueError for a number that JSON does not have."""
    return json.dumps(to_dict(message), separators=(",", ":"), allow_nan=False).encode() + b"\n"


def order_from_dict(values: Mapping[str, Any]) -> AgentMessage:
    """Return the agent's message that `to_dict` made `values` of.

    Raises:
        MalformedMessageError: it is none.
    """
    found: AgentMessage = _from_dict(values, _ORDERS)
    return found


def report_from_dict(values: Mapping[str, Any]) -> ReplicaMessage:
    """Return the replica's message that `to_dict` made `values` of.

    Raises:
        MalformedMessageError: it is none.
    """
    found: ReplicaMessage = _from_dict(values, _REPORTS)
    return found


def decode_order(line: bytes | str) -> AgentMessage:
    """Return the agent's message on a line.

    Raises:
        MalformedMessageError: there is none.
    """
    return order_from_dict(_parsed(line))


def decode_report(line: bytes | str) -> ReplicaMessage:
    """Return the replica's message on a line.

    Raises:
        MalformedMessageError: there is none.
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
