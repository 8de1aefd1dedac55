"""Types that the policy reads and returns: frozen values, without I/O and without a clock.

Times are seconds on the caller's clock; work is counted in samples at the initial batch size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

from adaptdl_elastic.autoscaler.policy.learning import Corrections
from adaptdl_elastic.goodput import GradParams, PerfParams

Allocation = Mapping[str, int]
"""Replicas by node name, all of them positive; empty if the job has none. The order is that of the ranks."""

NOTHING: Allocation = MappingProxyType({})


@dataclass(frozen=True)
class NetworkPrior:
    """What a measured link says about steps on several nodes before any of them was measured."""

    latency: float = 0.0  # seconds of one way
    transfer: float = 0.0  # bytes of gradients over the link's bytes per second


@dataclass(frozen=True)
class GoodputModel:
    """The parameters that predict a job's goodput: θ, gradient statistics and batch-size bounds."""

    perf_params: PerfParams
    grad_params: GradParams
    init_batch_size: int
    max_batch_size: int | None = None  # None: the batch size is fixed
    local_bsz_bounds: tuple[int, int] | None = None
    accumulation: bool = False
    corrections: Corrections | None = None  # where measured step times deviate from θ
    network: NetworkPrior = NetworkPrior()  # nothing: a measurement counts, or the link is not known


class NodeLimit(NamedTuple):
    """The smallest and largest number of replicas of one job on one node, if it has any there."""

    min_slots: int = 1
    max_slots: int = 1_000_000


@dataclass(frozen=True)
class NodeInfo:
    """A node with room for `slots` replicas of all jobs together."""

    name: str
    slots: int
    preemptible: bool = False
    draining: bool = False  # gets no new replicas; those it has are to leave
    at_risk: bool = False  # likely to be reclaimed; used last
    node_type: str = ""  # nodes of one type are equally fast: a GPU model, or a name that its owner gave


@dataclass(frozen=True)
class JobInfo:
    """A job that wants replicas."""

    name: str
    min_replicas: int = 1
    max_replicas: int = 1
    min_nodes: int = 1
    max_nodes: int | None = None
    # by name, the nodes it can use; None: every node, without limit
    limits: Mapping[str, NodeLimit] | None = None
    min_slots: int = 1  # least replicas on a node that does not exist yet (for the autoscaler)
    model: GoodputModel | None = None  # None: not profiled yet, so the job gets its minimum
    # by node type; on a type that is not in it, `model` predicts
    models: Mapping[str, GoodputModel] = field(default_factory=dict)
    # types of which `models` is measured, by the job itself or by others; also types without a node
    measured: frozenset[str] = frozenset()
    # by node type, the expected speed of one replica of a job that has not been profiled yet; 1 where unknown
    speeds: Mapping[str, float] = field(default_factory=dict)
    # largest number it was profiled on; it may get at most `exploration` times as many
    max_profiled_replicas: int = 0
    # exact number, requested by a person or because the job cannot adapt
    requested_replicas: int | None = None
    fixed_because: str = ""  # why the policy may not choose the size; empty where it may
    preemptible: bool = True  # False: keeps its replicas once it runs
    avoid_preemptible_nodes: bool = False
    weight: float = 1.0
    remaining: float | None = None  # samples at the initial batch size to the declared end, None without one
    outlived: bool = False  # it runs on although nothing is left of what it declared
    attained: float = 0.0  # samples at the initial batch size done so far
    # final or declared lengths of other jobs of its command line, in samples at the initial batch size
    kind_totals: tuple[float, ...] = ()
    pause: float | None = None  # measured seconds that a change costs; None: `default_pause`
    # seconds of a change to nodes of another type, where no replica stays; None: as any other change
    move_pause: float | None = None
    # seconds that its state takes over the link to another node, until a change to several nodes was measured
    link_pause: float = 0.0
    submitted: float = 0.0
    waiting_since: float | None = None  # time since which it has had no replica
    last_change: float | None = None  # when its allocation last changed

    @property
    def declared(self) -> float | None:
        """Samples to its declared end; None if it declares no end, or has gone on beyond it."""
        return None if self.outlived else self.remaining

    def model_on(self, node_type: str) -> GoodputModel | None:
        """Return the model that predicts the job's goodput on nodes of a type; None without a profile."""
        return None if self.model is None else self.models.get(node_type, self.model)


class Objective(str, Enum):
    """The objective that `allocate` maximises."""

    COMPLETION = "completion"  # short average completion time: weights by remaining work (heSRPT)
    SPEEDUP = "speedup"  # power mean of the speedups with exponent `fairness` (1: their plain sum)


FAIREST, LEAST_FAIR = -20.0, 1.0
"""Bounds of p. Below them only the worst speedup counts; above them sharing does not pay."""


@dataclass(frozen=True)
class PolicySettings:
    """Settings of a decision. The defaults are the best ones found by the simulator's benchmark."""

    objective: Objective = Objective.COMPLETION
    fairness: float = 1.0  # p of the power mean: 1 sum, 0 geometric, -1 harmonic (Pollux, section 4.2)
    default_pause: float = 5.0  # seconds that a change costs a job that has not been changed yet
    max_wait: float = 900.0  # seconds of waiting after which a job comes before all running ones
    exploration: float = 2.0  # factor by which a job may exceed the number of replicas it was profiled on
    # seconds within which a change must pay for its pause; None: derived from the pause
    horizon: float | None = None
    hysteresis: float = 0.005  # smallest relative gain for which a running job is changed
    time_limit: float = 2.0  # seconds the integer program may take

    def __post_init__(self) -> None:
        if not FAIREST <= self.fairness <= LEAST_FAIR:
            raise ValueError(f"fairness {self.fairness:g} must be between {FAIREST:g} and {LEAST_FAIR:g}")

    def pause(self, measured: float | None) -> float:
        """Return the seconds that a change costs a job: what was measured, else `default_pause`."""
        return self.default_pause if measured is None else measured


@dataclass(frozen=True)
class Reason:
    """The reason for a job's allocation."""

    text: str  # sentence with numbers for the user
    goodput: float | None = None  # predicted, samples per second at the initial batch size
    one_more: float | None = None  # predicted goodput with one replica more
    wanted: int | None = None  # replicas it is to have once larger sizes have been explored


@dataclass(frozen=True)
class Decision:
    """The allocation of every job that was asked about."""

    allocations: Mapping[str, Allocation]
    reasons: Mapping[str, Reason]
    changed: tuple[str, ...] = ()  # jobs whose allocation differs from the current one
    objective: float = 0.0
    seconds: float = 0.0  # CPU time of the decision
    pending: Mapping[str, str] = field(default_factory=dict)  # jobs that cannot run, with the reason
