"""The interface between the autoscaler, which decides, and a provider, which has the machines.

A provider has *pools*. A pool gives nodes of one kind and has as many as are *desired*: instances that exist
and requests that wait. It may replace an instance that dies, as an EC2 auto-scaling group does, or want one
less from then on. So the autoscaler only says how many nodes a pool should have (`request`) and which one is
to go (`release`). Methods that read change nothing. Every method may raise `ProviderError`, whose text says
what to do.

A node counts once its agent is registered, and `instance_of` says which instance it is. Prices are per hour
in one unit, that of the limits. It need not be money: with a price of 1 costs are node hours.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from types import TracebackType


class ProviderError(Exception):
    """The provider cannot do what was asked; the text says why, and what to do."""


class ProviderOptionError(ProviderError):
    """An option of a provider is missing, unknown, or has no valid value."""


class UnknownPoolError(ProviderError):
    """There is no such pool."""


class UnknownInstanceError(ProviderError):
    """The instance does not belong to this provider."""


class NotOursError(ProviderError):
    """Another cluster controls the group."""


class NoPermissionError(ProviderError):
    """The credentials in use do not allow the call."""


class TryLaterError(ProviderError):
    """The call was refused for now (throttling, a quota, no capacity); the same call may succeed later."""


class InstanceState(str, Enum):
    """The state of an instance."""

    PENDING = "pending"  # ordered, not running yet
    RUNNING = "running"
    LEAVING = "leaving"  # on its way out, for any reason


@dataclass(frozen=True)
class Instance:
    """One machine."""

    id: str
    pool: str
    state: InstanceState
    slots: int = 1
    preemptible: bool = False
    instance_type: str = ""
    zone: str = ""
    hourly_price: float = 0.0
    launched: float = 0.0  # seconds since the epoch, by the provider's clock
    protected: bool = False  # from the provider's own scale-in
    held: bool = False  # leaving, and a lifecycle hook waits for the drain
    # (since when, price per hour), oldest first; empty: `hourly_price` all the time
    price_changes: tuple[tuple[float, float], ...] = ()
    ended: float | None = None  # until when it is paid for; 0: until an unknown time; None: it still runs
    finished: bool = False  # it has ended with its work done: no interruption

    def cost(self, begin: float, end: float) -> float:
        """Return what the time from `begin` to `end` costs; a negative amount if `end` comes first."""
        changes = self.price_changes or ((0.0, self.hourly_price),)
        steps = ((at, new - old) for (_, old), (at, new) in pairwise(changes))
        more = sum(step * (max(end, at) - max(begin, at)) for at, step in steps)
        return (changes[0][1] * (end - begin) + more) / 3600


@dataclass(frozen=True)
class Pool:
    """A source of nodes, described by the node that it would give next."""

    name: str
    desired: int
    minimum: int = 0
    maximum: int = 0
    slots: int = 1
    hourly_price: float = 0.0
    highest_price: float = 0.0  # of what it may give instead: other types and zones; 0: `hourly_price`
    preemptible: bool = False
    instance_type: str = ""
    zones: tuple[str, ...] = ()
    # the pool starts a replacement before an instance at risk ends: until then it has an extra instance
    replaces_at_risk: bool = False
    trouble: str = ""  # why the last request was not met; empty: it was
    trouble_since: float = 0.0
    hook_timeout: float = math.inf  # seconds that a leaving instance waits for a heartbeat

    def __post_init__(self) -> None:
        if not 0 <= self.minimum <= self.maximum:
            raise ProviderError(
                f"{self.name}: Min {self.minimum} and Max {self.maximum} do not fit: correct the group "
                "to 0 <= Min <= Max"
            )


@dataclass(frozen=True)
class Capacity:
    """The instances that exist or have ended lately, and the pools, at one moment."""

    pools: tuple[Pool, ...] = ()
    instances: tuple[Instance, ...] = ()
    warnings: tuple[str, ...] = ()
    ended: tuple[Instance, ...] = ()
    priced: float = math.inf  # until when all price changes are known, in seconds since the epoch
    # settings of the autoscaler that the provider has, as OPTION=VALUE, instead of the command line's
    settings: tuple[str, ...] = ()

    def pool(self, name: str) -> Pool:
        """Return the pool of that name.

        Raises:
            UnknownPoolError: there is none; the text names the existing ones.
        """
        for pool in self.pools:
            if pool.name == name:
                return pool
        there = ", ".join(pool.name for pool in self.pools) or "none"
        raise UnknownPoolError(f"no pool {name!r}; there are: {there}")

    def instance(self, identifier: str) -> Instance | None:
        """Return the instance of that id, or None if it does not belong to this provider."""
        return next((i for i in self.instances if i.id == identifier), None)


class SignalKind(str, Enum):
    """The kind of an announcement about an instance."""

    INTERRUPTION = "interruption"  # it will be taken away at `deadline`
    REBALANCE = "rebalance"  # likelier than usual to be taken away
    LIFECYCLE = "lifecycle"  # its group removes it
    GONE = "gone"  # it does not exist any more


@dataclass(frozen=True)
class Signal:
    """One announcement about one instance. `deadline` in seconds since the epoch; None: unknown."""

    kind: SignalKind
    instance: str
    reason: str
    deadline: float | None = None


def told_or_named(node: str, told: str | None) -> str:
    """Return the id of an instance that its agent was told, else the name of the node."""
    return told or node


class Provider(ABC):
    """A source of nodes; the module's docstring explains the interface."""

    name: str

    @abstractmethod
    def capacity(self) -> Capacity:
        """Return the present instances and pools."""

    @abstractmethod
    def request(self, pool: str, desired: int) -> None:
        """Set the desired number of nodes of a pool, within its bounds.

        A lower number only cancels nodes that were requested and have not come; instances go by `release`.
        Repeating a request has no effect.
        """

    @abstractmethod
    def release(self, instance: str, replace: bool = False) -> None:
        """Give this instance back; the pool then wants one node less, or with `replace` a new one instead.

        An instance that is leaving or gone is no error; one that never belonged to the provider is.
        """

    def instance_of(self, node: str, told: str | None) -> str:
        """Return the id of the instance that a node is: what its agent was told, else the name of the node.

        Args:
            node: Name of the node (`adaptdl-run --node-name`, by default the name of the host).
            told: `ADAPTDL_INSTANCE_ID` of its agent, or the instance id of EC2; None: the agent knows none.
        """
        return told_or_named(node, told)

    def protect(self, instances: Collection[str], protected: bool) -> None:  # noqa: B027 - optional
        """Protect these instances from the provider's own scale-in, or end that."""

    def signals(self) -> tuple[Signal, ...]:
        """Return the announcements since the last call, without waiting."""
        return ()

    def hold(self, instance: str) -> None:  # noqa: B027 - optional
        """Keep a leaving instance while its drain is under way, if the provider supports that."""

    def let_go(self, instance: str) -> None:  # noqa: B027 - optional
        """Let a leaving instance go because its drain is done."""

    def take_over(self) -> None:  # noqa: B027 - optional
        """Begin to control the pools: stop the provider's own automatic changes."""

    def hand_back(self) -> None:  # noqa: B027 - optional
        """End the control: undo `take_over`."""

    def __enter__(self) -> Provider:
        self.take_over()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.hand_back()
