"""Define the inputs and outputs of the coordinator's decisions, and of its rounds of the policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from adaptdl_elastic.autoscaler.policy.policy_types import Decision, JobInfo, NodeInfo, PolicySettings
from adaptdl_elastic.rendezvous.schema.records import Cause

Allocation = Mapping[str, int]
"""node -> replicas, in the order of ranks."""


@dataclass(frozen=True)
class CoordinatorSettings:
    """The coordinator's knobs. Times are in seconds."""

    interval: float = 60.0  # between rounds of the policy: 60 on a cluster, a few on one machine
    min_gap: float = 1.0  # between rounds that events ask for
    node_ttl: float = 5.0  # lease time of a node's registration: patience with one that is missing
    steady: float = 15.0  # a break of the store this recent is blamed for a missing registration
    silence: float = 1.0  # after the first has heard of a death: a node that has said nothing by then is dead
    grace: float = 1.0  # beyond a lease, until it is taken for true that nobody has died
    hello_grace: float = 30.0  # a script that has not said hello for so long does not use the library
    backoff: float = 1.0  # before the second restart in a row; doubles
    max_backoff: float = 60.0
    joined: float = 10.0  # a replica that dies so soon after it has joined may have died of that
    refill_after: float = 300.0  # a generation that lives so long and saves pays the restarts back
    late_pardon: float = 600.0  # a node that did not start in time is tried again after so long
    inplace_pause: float = 0.2  # of a change in place until one was measured (results/rescale_pause.md)
    drift: float = 0.15  # a report that changes the predicted goodput by so much asks for a round
    max_events: int = 1000
    policy_timeout: float = 60.0  # seconds that a round of the policy may take
    keep_ended: int = 200  # jobs that have ended, whose status stays readable
    policy: PolicySettings | None = None  # None: the policy's defaults

    def __post_init__(self) -> None:
        for name in ("interval", "min_gap", "node_ttl", "backoff", "policy_timeout"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative: {getattr(self, name)}")


@dataclass(frozen=True)
class Target:
    """What a job is to have, as soon as the slots are free."""

    run: str  # of the job: a later one is another matter
    allocation: Allocation
    cause: Cause
    reason: str
    predicted_goodput: float | None = None


@dataclass(frozen=True)
class JoinFailures:
    """Replicas of a job that have died as soon as they had joined it, one time after the other."""

    times: int
    at: float  # the last time
    generation: int  # then


@dataclass(frozen=True)
class PolicyQuestion:
    """What the policy is asked."""

    jobs: tuple[JobInfo, ...]
    nodes: tuple[NodeInfo, ...]
    current: Mapping[str, Allocation]
    causes: Mapping[str, tuple[Cause, str]]  # jobs whose size was chosen elsewhere: cause and its text
    fingerprint: Any  # a question with an equal one and equal forecasts need not be asked again
    forecasts: Mapping[str, float]  # by job: the goodput that it predicts for its present allocation
    undecidable: Mapping[str, str] = field(default_factory=dict)  # jobs that are left out, and why
    unsettled: frozenset[str] = frozenset()  # jobs whose size is changing: asked about, not decided


Standing = tuple[str, int, int | None]
"""Run, revision of the plan, and size that a person asked for: an answer holds while they are unchanged."""


@dataclass(frozen=True)
class PolicyRound:
    """One question to the policy, with everything that is needed to compute the answer in any thread."""

    number: int
    question: PolicyQuestion
    now: float
    settings: PolicySettings
    standing: Mapping[str, Standing]  # by job


@dataclass(frozen=True)
class PolicyAnswer:
    """The answer to a round. Without a decision the policy has failed."""

    number: int
    decision: Decision | None
    seconds: float  # of wall time
    error: str = ""
    unusable_reports: Mapping[str, str] = field(default_factory=dict)  # by job: why its report was left out


@dataclass(frozen=True)
class Memory:
    """What a leader knows beyond the store, or has read there. Losing it costs a round of the policy."""

    round_at: float = float("-inf")  # when the policy was last asked
    asked: PolicyQuestion | None = None  # the last question: a round is due when there is another
    by_hand: frozenset[tuple[str, int]] = (
        frozenset()
    )  # what people had asked for then: a round is due at once when there is more
    round: PolicyRound | None = None  # the round that is being computed
    rounds: int = 0  # how many were begun
    answered: int = 0  # number of the round whose answer was taken last
    targets: Mapping[str, Target] = field(default_factory=lambda: MappingProxyType({}))
    late: Mapping[tuple[str, str], tuple[str, float]] = field(  # (job, node) -> (agent, when)
        default_factory=lambda: MappingProxyType({})
    )
    restart_only: frozenset[str] = frozenset()  # runs of jobs that could not be changed in place
    stillborn: Mapping[str, JoinFailures] = field(default_factory=lambda: MappingProxyType({}))  # by run
    waiting: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))  # job -> since when
    at_end: Mapping[str, float] = field(  # job -> since when nothing is left of what it declared
        default_factory=lambda: MappingProxyType({})
    )
    pending: Mapping[str, str] = field(  # jobs that the policy could give nothing, and why
        default_factory=lambda: MappingProxyType({})
    )
    looked_at: float = float("-inf")  # when it was last looked whether a round is due
    held_up_since: float | None = None  # since when rounds are deferred because an agent is missing
    described: Mapping[str, Any] = field(  # (job, condition) whose status is as it should be
        default_factory=lambda: MappingProxyType({})
    )
    policy_seconds: float = 0.0  # wall time of the last round
    unusable_reports: Mapping[str, str] = field(  # of which jobs in the last round, and why
        default_factory=lambda: MappingProxyType({})
    )
    undecidable: Mapping[str, str] = field(  # of these and others nothing could be decided about: said
        default_factory=lambda: MappingProxyType({})
    )


@dataclass(frozen=True)
class CompareAndSwap:
    """Write `record` if the key still stands at `expected_revision` (0: does not exist)."""

    key: str
    record: Any
    expected_revision: int


@dataclass(frozen=True)
class DeletePrefix:
    """Collect what nobody needs any more."""

    prefix: str


@dataclass(frozen=True)
class Say:
    """A line of the coordinator's log in the store."""

    event: str
    fields: Mapping[str, Any]


Action = CompareAndSwap | DeletePrefix | Say


@dataclass(frozen=True)
class Decided:
    """What to do now, what to remember, and when to look again though nothing has happened.

    `ask` is a round of the policy to be computed: its answer goes into a later decision.
    """

    actions: tuple[Action, ...]
    memory: Memory
    wake_at: float
    ask: PolicyRound | None = None
