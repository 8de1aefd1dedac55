"""The interface between the autoscaler, which decides, and whoever has the machines.

A provider has *pools*. A pool gives nodes of one kind and keeps as many as are *desired* of it, as an
EC2 auto-scaling group does: what dies is replaced, what is released is not. So the autoscaler says two
things only: how many a pool should have (`request`), and which one is to go (`release`). Reading never
changes anything. Every method may raise `ProviderError`, whose text says what to do about it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from types import TracebackType


class ProviderError(Exception):
    """The provider can not do what was asked; the text says why and what to do."""


class ProviderOptionError(ProviderError):
    """An option of a provider is missing, unknown, or has no valid value."""


class UnknownPoolError(ProviderError):
    """There is no such pool."""


class UnknownInstanceError(ProviderError):
    """That is not one of this provider's instances."""


class NotOursError(ProviderError):
    """Another cluster rules it."""


class NoPermissionError(ProviderError):
    """The credentials in use do not allow it."""


class TryLaterError(ProviderError):
    """Refused at this moment (throttled, a quota, no capacity): the same call may work later."""


class InstanceState(str, Enum):
    """Where an instance is in its life."""

    PENDING = "pending"  # ordered, not up
    RUNNING = "running"
    LEAVING = "leaving"  # on its way out, whoever wanted it


@dataclass(frozen=True)
class Instance:
    """One machine. Prices are per hour, in whatever currency the price table uses."""

    id: str
    pool: str
    state: InstanceState
    slots: int = 1
    preemptible: bool = False
    instance_type: str = ""
    zone: str = ""
    hourly_price: float = 0.0
    launched: float = 0.0  # seconds since the epoch, by the provider's clock
    protected: bool = False  # from being chosen by the provider when it shrinks
    held: bool = False  # leaving, and a lifecycle hook waits for us to finish


@dataclass(frozen=True)
class Pool:
    """A source of nodes, described by the node it would give next."""

    name: str
    desired: int
    minimum: int = 0
    maximum: int = 0
    slots: int = 1
    hourly_price: float = 0.0
    preemptible: bool = False
    instance_type: str = ""
    zones: tuple[str, ...] = ()
    replaces_at_risk: bool = False  # brings a replacement before an instance at risk goes: N+1 for a while
    trouble: str = ""  # why the last request was not met; empty when all is well
    trouble_since: float = 0.0
    hook_timeout: float = math.inf  # seconds that a held instance waits for a heartbeat

    def __post_init__(self) -> None:
        if not 0 <= self.minimum <= self.maximum:
            raise ProviderError(
                f"{self.name}: Min {self.minimum} and Max {self.maximum} do not fit: correct the group "
                "to 0 <= Min <= Max"
            )


@dataclass(frozen=True)
class Capacity:
    """What there is and what could be had, at one moment."""

    pools: tuple[Pool, ...] = ()
    instances: tuple[Instance, ...] = ()
    warnings: tuple[str, ...] = ()

    def pool(self, name: str) -> Pool:
        """The pool of that name; UnknownPoolError, naming those there are, when there is none."""
        for pool in self.pools:
            if pool.name == name:
                return pool
        there = ", ".join(pool.name for pool in self.pools) or "none"
        raise UnknownPoolError(f"no pool {name!r}; there are: {there}")

    def instance(self, identifier: str) -> Instance | None:
        """The instance of that id, if it is one of ours."""
        return next((i for i in self.instances if i.id == identifier), None)


class SignalKind(str, Enum):
    """What a provider has to say about one of its instances."""

    INTERRUPTION = "interruption"  # will be taken away at `deadline`
    REBALANCE = "rebalance"  # likelier than usual to be taken away
    LIFECYCLE = "lifecycle"  # its group removes it
    GONE = "gone"  # is no more


@dataclass(frozen=True)
class Signal:
    """One announcement about one instance. `deadline` in seconds since the epoch; None: not known."""

    kind: SignalKind
    instance: str
    reason: str
    deadline: float | None = None


class Provider(ABC):
    """See the module's docstring."""

    name: str

    @abstractmethod
    def capacity(self) -> Capacity:
        """What there is and what could be had, now."""

    @abstractmethod
    def request(self, pool: str, desired: int) -> None:
        """Let `pool` have `desired` nodes, within its bounds.

        Lowering it only takes back what was asked for and has not come: instances go by `release`.
        Saying the same twice is saying it once.
        """

    @abstractmethod
    def release(self, instance: str, replace: bool = False) -> None:
        """Give this instance back; the pool then wants one less, or a new one in its place.

        An instance that is leaving already, or gone, is no error; one that never was ours is.
        """

    def protect(self, instances: Collection[str], protected: bool) -> None:  # noqa: B027 - optional
        """Keep the provider from choosing these when it shrinks by itself."""

    def signals(self) -> tuple[Signal, ...]:
        """What was announced since the last call. Does not wait."""
        return ()

    def hold(self, instance: str) -> None:  # noqa: B027 - optional
        """A drain is under way: do not take the leaving instance yet, where that can be asked."""

    def let_go(self, instance: str) -> None:  # noqa: B027 - optional
        """The drain is done: a leaving instance may go."""

    def take_over(self) -> None:  # noqa: B027 - optional
        """Begin to rule: keep the provider's own automatisms from working against us."""

    def hand_back(self) -> None:  # noqa: B027 - optional
        """Rule no more: undo `take_over`."""

    def __enter__(self) -> Provider:
        self.take_over()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.hand_back()
