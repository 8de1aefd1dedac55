"""Define what the autoscaler observes, remembers and does: frozen values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from adaptdl_elastic.autoscaler.policy.policy_types import JobInfo
from adaptdl_elastic.autoscaler.providers.base import Capacity, Signal

CHEAPER = "a cheaper node takes its place"
"""Why an exchanged node leaves."""

Moment = float
"""Seconds since the epoch by the autoscaler's clock. It moves if that clock is set."""


@dataclass(frozen=True)
class NodeUse:
    """An instance that is registered as a node, by the store's records."""

    node: str
    replicas: Mapping[str, int] = field(
        default_factory=dict
    )  # by job; replicas that have not ended yet count
    draining: bool = False
    deadline: float | None = None
    at_risk: bool = False
    slots: int = 0  # as its agent reports; 0: not known
    first: bool = False  # has rank 0 of a job: the job restarts when this node leaves
    planned: frozenset[str] = frozenset()  # jobs whose plan names it, with or without replicas on it yet
    announced: bool = True  # the node or its provider announced the drain; False: a person asked for it
    node_type: str = ""  # as its agent reports

    @property
    def busy(self) -> bool:
        """Return whether a replica runs on it."""
        return any(self.replicas.values())


@dataclass(frozen=True)
class Observation:
    """The input of one decision. `now` in seconds since the epoch."""

    now: float
    capacity: Capacity
    nodes: Mapping[str, NodeUse]  # by instance id
    jobs: tuple[JobInfo, ...]
    signals: tuple[Signal, ...] = ()
    other_slots: int = 0  # of nodes that do not belong to the provider
    other_nodes: int = 0
    runs: Mapping[str, str] = field(default_factory=dict)  # run id by job in the store; empty: not known
    unsettled: frozenset[str] = frozenset()  # jobs whose size is changing: their present size says nothing
    warnings: tuple[str, ...] = ()  # about jobs whose records cannot be used


@dataclass(frozen=True)
class Known:
    """What is remembered about one instance."""

    pool: str
    preemptible: bool
    first_seen: Moment
    hourly_price: float = 0.0
    registered: Moment | None = None  # last seen as a node
    became: Moment | None = None  # first seen as a node
    absent: Moment | None = None  # since when its registration is missing
    leaving: str = ""  # why it is drained or released; empty: it stays
    leaving_since: Moment = 0.0
    deadline: float | None = None
    replace: bool = False
    at_risk: bool = False
    early: bool = False  # its group launched it beyond the desired size, to replace a node at risk
    exchange: str = ""  # the pool from which a cheaper node is ordered in its place; empty: none is
    exchange_since: Moment = 0.0
    held: Moment = 0.0  # last heartbeat
    worked: bool = False  # has had replicas
    work: float = 0.0  # seconds in which it had replicas
    idle_since: Moment | None = None  # since when it has had no replica; None: it has, or is no node yet
    bought_at: float = 0.0  # price per hour when it was first seen
    released: Moment | None = None  # when it was last released; the provider may list it for a while


@dataclass(frozen=True)
class Billed:
    """What of one instance is on the bill. Times in seconds since the epoch."""

    until: Moment
    final: Moment  # until when all price changes were known
    estimate: float = 0.0  # cost from `final` to `until`


@dataclass(frozen=True)
class PoolMemory:
    """What is remembered about a pool. Hours and costs are sums over all its instances so far."""

    failures: int = 0  # instances in a row that never became a node
    closed: str = ""  # why no instance is requested from it; empty: it is open
    spent: float = 0.0  # what recent purchases have cost; decays with each, as the next field does
    gained: float = 0.0  # the part of it that bought useful work
    wasted: int = 0  # purchases in a row after which too little of it was useful
    judged: Moment = 0.0  # when a purchase was last judged
    turns: float = 0.0  # how often nodes were given up because their price rose; decays with time
    turned: Moment = 0.0  # when the first node of the last such turn was given up
    highest_price: float = 0.0  # that one of its instances has cost per hour within a day
    highest_seen: Moment = 0.0
    troubles: int = 0  # requests in a row that it could not meet
    trouble: str = ""
    trouble_seen: float = 0.0
    until: Moment = 0.0  # no request before this time
    interruptions: int = 0
    recent_interruptions: float = 0.0  # decays with time, as the next field does
    recent_hours: float = 0.0
    instances: int = 0
    hours: float = 0.0
    cost: float = 0.0
    boot: float | None = None  # seconds that recent instances took to become nodes


@dataclass(frozen=True)
class InVain:
    """How often in a row nodes were bought for a job that put no replica on them."""

    times: int = 0
    until: Moment = -math.inf  # nothing more is bought for it before this time
    running: int = 0  # its replicas at that time
    run: str = ""  # empty: the job was not in the store yet


@dataclass(frozen=True)
class Memory:
    """What is carried from one decision to the next."""

    known: Mapping[str, Known] = field(default_factory=dict)
    pools: Mapping[str, PoolMemory] = field(default_factory=dict)
    job_costs: Mapping[str, float] = field(default_factory=dict)
    # (run, when it last wanted nodes)
    job_runs: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    cost: float = 0.0
    billed: Mapping[str, Billed] = field(default_factory=dict)  # by instance; ended ones stay for a day
    updated: Moment | None = None
    changed: Moment = 0.0
    exchanged: Moment = 0.0  # when the last exchange of a node for a cheaper one began
    low_since: Moment | None = None  # since when utilisation is below the band
    broke_until: Moment = 0.0  # the budget was exceeded: no purchase before this time
    wanted: Mapping[str, int] = field(default_factory=dict)  # replicas by job, at the last decision
    vain: Mapping[str, InVain] = field(default_factory=dict)  # by job
    # the type that agents reported last, by family of instance types ("g5" of g5.xlarge)
    node_types: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """Set the desired size of a pool."""

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
    """Give an instance back to the provider."""

    instance: str
    replace: bool
    reason: str


@dataclass(frozen=True)
class Protect:
    """Protect instances from the provider's own scale-in."""

    instances: tuple[str, ...]


@dataclass(frozen=True)
class Hold:
    """Tell the provider that a leaving instance still drains."""

    instance: str


@dataclass(frozen=True)
class LetGo:
    """Tell the provider that a leaving instance has drained."""

    instance: str


@dataclass(frozen=True)
class StopJob:
    """Ask the coordinator to save the state of a job's run and to end it, as `adaptdl stop` does."""

    job: str
    run: str
    reason: str


Action = Request | Drain | Release | Protect | Hold | LetGo | StopJob


@dataclass(frozen=True)
class Forecast:
    """What a job costs per hour now, and from now to its declared end."""

    hourly: float
    seconds_left: float | None = None  # at the size that it will have; None: no end is known
    cost_left: float | None = None


@dataclass(frozen=True)
class Step:
    """One decision: the new memory, the actions, and why."""

    memory: Memory
    actions: tuple[Action, ...]
    target: int
    reason: str
    warnings: tuple[str, ...]
    forecasts: Mapping[str, Forecast] = field(default_factory=dict)  # by job
    hourly_cost: float = 0.0
