"""What the autoscaler sees, remembers and does: frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from adaptdl_elastic.autoscaler.policy.policy_types import JobInfo
from adaptdl_elastic.autoscaler.providers.base import Capacity, Signal


@dataclass(frozen=True)
class NodeUse:
    """An instance that has become a node, as the store has it."""

    node: str
    replicas: Mapping[str, int] = field(default_factory=dict)  # by job; what is not yet ended counts
    draining: bool = False
    deadline: float | None = None
    at_risk: bool = False
    slots: int = 0  # by its agent's word; 0: not known
    first: bool = False  # has rank 0 of a job, which can not leave without a restart
    planned: frozenset[str] = frozenset()  # jobs whose plan has it, though they may have nothing on it yet
    announced: bool = True  # by itself or about its instance, not by a person who wants its work elsewhere

    @property
    def busy(self) -> bool:
        """Whether anything runs on it."""
        return any(self.replicas.values())


@dataclass(frozen=True)
class Observation:
    """Everything that one decision is made of. `now` in seconds since the epoch."""

    now: float
    capacity: Capacity
    nodes: Mapping[str, NodeUse]  # by instance
    jobs: tuple[JobInfo, ...]
    signals: tuple[Signal, ...] = ()
    other_slots: int = 0  # of nodes that are none of the provider's
    other_nodes: int = 0
    runs: Mapping[str, str] = field(default_factory=dict)  # of every job in the store; empty: not known
    unsettled: frozenset[str] = frozenset()  # jobs of which a change is under way: their size says nothing
    warnings: tuple[str, ...] = ()  # about jobs that nothing can be decided about


@dataclass(frozen=True)
class Known:
    """What is remembered of an instance."""

    pool: str
    preemptible: bool
    first_seen: float
    hourly_price: float = 0.0
    registered: float | None = None  # last seen as a node
    absent: float | None = None  # since when it is no node, having been one
    leaving: str = ""  # why we drain or have released it
    leaving_since: float = 0.0
    deadline: float | None = None
    replace: bool = False
    at_risk: bool = False
    held: float = 0.0  # last heartbeat
    worked: bool = False  # has had replicas
    released: float | None = None  # when it was last given back: it may be shown as before for a while


@dataclass(frozen=True)
class PoolMemory:
    """What is remembered of a pool. Hours and costs are of all its instances so far."""

    failures: int = 0  # instances in a row that never became a node
    closed: str = ""  # why nothing is asked of it any more
    troubles: int = 0  # times in a row that it had nothing to give
    trouble: str = ""
    trouble_seen: float = 0.0
    until: float = 0.0  # not asked before
    interruptions: int = 0
    spot_hours: float = 0.0
    recent_interruptions: float = 0.0  # these two are forgotten in time
    recent_hours: float = 0.0
    instances: int = 0
    hours: float = 0.0
    cost: float = 0.0
    boot: float | None = None  # seconds that its instances have taken of late to become nodes


@dataclass(frozen=True)
class Memory:
    """What the autoscaler has to know from one decision to the next."""

    known: Mapping[str, Known] = field(default_factory=dict)
    pools: Mapping[str, PoolMemory] = field(default_factory=dict)
    job_costs: Mapping[str, float] = field(default_factory=dict)
    job_runs: Mapping[str, tuple[str, float]] = field(default_factory=dict)  # whose they are, last wanted
    cost: float = 0.0
    updated: float | None = None
    changed: float = 0.0
    low_since: float | None = None  # since when use is low; time in which a job changes does not count
    low_began: float | None = None  # the same, where it does
    broke_until: float = 0.0  # the budget was exceeded: nothing is bought before
    wanted: Mapping[str, int] = field(default_factory=dict)  # by job, at the last look


@dataclass(frozen=True)
class Request:
    """Let a pool have so many."""

    pool: str
    desired: int
    reason: str


@dataclass(frozen=True)
class Drain:
    """Ask the coordinator to move a node's replicas elsewhere."""

    instance: str
    node: str
    reason: str
    deadline: float | None = None


@dataclass(frozen=True)
class Release:
    """Give an instance back."""

    instance: str
    replace: bool
    reason: str


@dataclass(frozen=True)
class Protect:
    """Keep the provider from choosing these when it shrinks by itself."""

    instances: tuple[str, ...]


@dataclass(frozen=True)
class Hold:
    """A leaving instance still drains."""

    instance: str


@dataclass(frozen=True)
class LetGo:
    """A leaving instance has drained."""

    instance: str


Action = Request | Drain | Release | Protect | Hold | LetGo


@dataclass(frozen=True)
class Forecast:
    """What a job costs an hour now, and from now to its declared end."""

    hourly: float
    seconds_left: float | None = None  # at the size that it is to have; None: no end is known
    cost_left: float | None = None


@dataclass(frozen=True)
class Step:
    """One decision."""

    memory: Memory
    actions: tuple[Action, ...]
    target: int
    reason: str
    warnings: tuple[str, ...]
    forecasts: Mapping[str, Forecast] = field(default_factory=dict)  # by job
    hourly_cost: float = 0.0
