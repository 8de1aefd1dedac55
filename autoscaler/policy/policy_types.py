"""What the policy reads and what it answers: frozen values, no I/O, no clock of its own.

Times are seconds on whatever clock the caller uses, work is in samples at the initial batch size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

from adaptdl_elastic.autoscaler.policy.learning import Corrections
from adaptdl_elastic.goodput import GradParams, PerfParams

Allocation = Mapping[str, int]
"""Replicas by node name, none of them zero; empty: the job has nothing. The order is the order of ranks."""

NOTHING: Allocation = MappingProxyType({})


@dataclass(frozen=True)
class GoodputModel:
    """What predicts a job's goodput: θ, gradient statistics and the bounds of its batch size."""

    perf_params: PerfParams
    grad_params: GradParams
    init_batch_size: int
    max_batch_size: int | None = None  # None: the batch size is fixed
    local_bsz_bounds: tuple[int, int] | None = None
    accumulation: bool = False
    corrections: Corrections | None = None  # where step times were measured that θ does not fit


@dataclass(frozen=True)
class NodeLimit:
    """How many replicas of one job may be on one node, when there are any."""

    min_slots: int = 1
    max_slots: int = 1_000_000


@dataclass(frozen=True)
class NodeInfo:
    """A node: room for `slots` replicas, of all jobs together."""

    name: str
    slots: int
    preemptible: bool = False
    draining: bool = False  # gets nothing new, and what is there is to leave
    at_risk: bool = False  # likely to be reclaimed: used last


@dataclass(frozen=True)
class JobInfo:
    """A job that wants replicas."""

    name: str
    min_replicas: int = 1
    max_replicas: int = 1
    min_nodes: int = 1
    max_nodes: int | None = None
    limits: Mapping[str, NodeLimit] | None = None  # nodes it can use; None: every node, without limit
    min_slots: int = 1  # replicas on a node at least, where there is none yet to say so: for the autoscaler
    model: GoodputModel | None = None  # None: not profiled yet, gets its minimum
    max_profiled_replicas: int = 0  # it is tried on at most twice as many
    requested_replicas: int | None = None  # exactly so many (a person said so, or it can not adapt)
    fixed_because: str = ""  # why its size is not the policy's to choose, where it is not
    preemptible: bool = True  # False: once it runs it keeps what it has
    avoid_preemptible_nodes: bool = False
    weight: float = 1.0
    remaining: float | None = None  # samples at the initial batch size to the declared end, None without one
    outlived: bool = False  # it runs on although nothing is left of what it declared
    attained: float = 0.0  # samples at the initial batch size done so far
    kind_totals: tuple[float, ...] = ()  # what others of its command line came to, or declare, in samples
    pause: float | None = None  # measured seconds a change costs; None: Settings.default_pause
    submitted: float = 0.0
    waiting_since: float | None = None  # since when it has had no replica
    last_change: float | None = None  # when its allocation last changed

    @property
    def declared(self) -> float | None:
        """Samples to its declared end; None if it declares no end, or has gone on beyond it."""
        return None if self.outlived else self.remaining


class Objective(str, Enum):
    """What `allocate` maximises."""

    COMPLETION = "completion"  # short average completion time: weights by remaining work (heSRPT)
    SPEEDUP = "speedup"  # power mean of the speedups with exponent `fairness` (1: their plain sum)


FAIREST, LEAST_FAIR = -20.0, 1.0
"""Bounds of p: below them all but the worst speedup count for nothing, above them sharing does not pay."""


@dataclass(frozen=True)
class PolicySettings:
    """How to decide. The defaults are the ones that the simulator's benchmark found best."""

    objective: Objective = Objective.COMPLETION
    fairness: float = 1.0  # p of the power mean: 1 sum, 0 geometric, -1 harmonic (Pollux, section 4.2)
    default_pause: float = 5.0  # seconds a change costs a job that has not been changed yet
    max_wait: float = 900.0  # seconds after which a waiting job comes before all that run
    exploration: float = 2.0  # a job may get so many times the replicas it was profiled on
    horizon: float | None = None  # seconds within which a change must pay for its pause; None: by the pause
    hysteresis: float = 0.005  # a running job changes only for more than this relative gain
    time_limit: float = 2.0  # seconds the integer program may take

    def __post_init__(self) -> None:
        if not FAIREST <= self.fairness <= LEAST_FAIR:
            raise ValueError(f"fairness {self.fairness:g} must be between {FAIREST:g} and {LEAST_FAIR:g}")


@dataclass(frozen=True)
class Reason:
    """Why a job has what it has."""

    text: str  # for a person, with numbers
    speedup: float | None = None  # predicted, against one replica
    goodput: float | None = None  # predicted, samples per second at the initial batch size
    previous_goodput: float | None = None  # predicted for what it had
    atomic_bsz: int | None = None
    accumulation_steps: int | None = None
    one_more: float | None = None  # predicted goodput with one replica more
    one_fewer: float | None = None
    pause: float | None = None  # seconds the change costs, 0 when there is none
    wanted: int | None = None  # replicas it is to have once they have been explored


@dataclass(frozen=True)
class Decision:
    """An answer for every job that was asked about."""

    allocations: Mapping[str, Allocation]
    reasons: Mapping[str, Reason]
    changed: tuple[str, ...] = ()  # jobs whose allocation differs from the current one
    objective: float = 0.0
    seconds: float = 0.0  # of CPU, by the caller's clock
    pending: Mapping[str, str] = field(default_factory=dict)  # jobs that can not run, and why
