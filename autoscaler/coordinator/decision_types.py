"""Define the inputs and outputs of the coordinator's decisions, and of its rounds of the policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from adaptdl_elastic.autoscaler.coordinator.job_links import declared
from adaptdl_elastic.autoscaler.coordinator.job_models import DeclaredEnd
from adaptdl_elastic.autoscaler.policy.policy_types import Decision, JobInfo, NodeInfo, PolicySettings
from adaptdl_elastic.rendezvous.schema.records import Cause

Allocation = Mapping[str, int]
"""node → replicas, in the order of ranks."""


@dataclass(frozen=True)
class CoordinatorSettings:
    """The coordinator's settings. Times are in seconds."""

    interval: float = 60.0  # between two rounds of the policy: 60 in a cluster, a few on one machine
    min_gap: float = 1.0  # between two rounds that events request
    node_ttl: float = 5.0  # lease time of a node's registration, and so the patience with a missing one
    steady: float = 15.0  # after a break of the store, a missing registration may be due to it for so long
    # after the first report of a death: a node that has reported nothing by then is dead
    silence: float = 1.0
    grace: float = 1.0  # after the end of a lease, until it is certain that no replica has died
    hello_grace: float = 30.0  # a script that has not said hello for so long does not use the library
    backoff: float = 1.0  # before the second restart in a row; doubles with each further restart
    max_backoff: float = 60.0
    joined: float = 10.0  # the death of a replica within this time after joining may be caused by joining
    refill_after: float = 300.0  # a generation that lives so long, and saves, restores the restart budget
    # a node or a size that failed is tried again after this time; doubles with each further failure
    late_pardon: float = 600.0
    max_pardon: float = 9600.0
    # expected pause of a change in place, until a job's own pause is measured (results/rescale_pause.md)
    inplace_pause: float = 0.2
    drift: float = 0.15  # relative change of a predicted goodput that requests a round
    max_events: int = 1000
    policy_timeout: float = 60.0  # longest time of a round of the policy
    keep_ended: int = 200  # how many jobs that have ended keep a readable status
    policy: PolicySettings | None = None  # None: the policy's defaults

    def __post_init__(self) -> None:
        for name in ("interval", "min_gap", "node_ttl", "backoff", "policy_timeout"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative: {getattr(self, name)}")


@dataclass(frozen=True)
class Target:
    """The allocation that a job is to get as soon as the slots are free."""

    run: str  # of the job; the target does not apply to a later run
    allocation: Allocation
    cause: Cause
    reason: str
    predicted_goodput: float | None = None


@dataclass(frozen=True)
class PolicyQuestion:
    """A question to the policy."""

    jobs: tuple[JobInfo, ...]
    nodes: tuple[NodeInfo, ...]
    current: Mapping[str, Allocation]
    causes: Mapping[str, tuple[Cause, str]]  # jobs whose size was chosen elsewhere: cause and reason
    fingerprint: Any  # questions with equal fingerprints and equal forecasts have the same answer
    forecasts: Mapping[str, float]  # job → predicted goodput for its present allocation; also on one replica
    undecidable: Mapping[str, str] = field(default_factory=dict)  # jobs that are left out, and why
    # jobs whose size is changing: asked about with their present size; the answer about them is not used
    unsettled: frozenset[str] = frozenset()
    # slots of a node that a replica takes up; jobs that are not in it: 1
    each: Mapping[str, int] = field(default_factory=dict)


Standing = tuple[str, int, int | None]
"""Run, revision of the plan, and size that a user asked for; an answer is valid while they are unchanged."""


@dataclass(frozen=True)
class PolicyRound:
    """One question to the policy, with everything needed to compute the answer in any thread."""

    number: int
    question: PolicyQuestion
    now: float
    settings: PolicySettings
    standing: Mapping[str, Standing]  # by job


@dataclass(frozen=True)
class PolicyAnswer:
    """The answer to a round. `decision` is None if the policy has failed."""

    number: int
    decision: Decision | None
    seconds: float  # of wall time
    error: str = ""
    unusable_reports: Mapping[str, str] = field(default_factory=dict)  # job → why its report was left out


@dataclass(frozen=True)
class Memory:
    """What a leader remembers beside the store. Losing it costs one round of the policy."""

    round_at: float = float("-inf")  # when the policy was last asked
    asked: PolicyQuestion | None = None  # the last question; another one makes a round due
    # sizes that users had asked for at the last question; a new one makes a round due at once
    by_hand: frozenset[tuple[str, int]] = frozenset()
    round: PolicyRound | None = None  # the round that is being computed
    rounds: int = 0  # number of rounds begun
    answered: int = 0  # number of the last round whose answer was used
    targets: Mapping[str, Target] = field(default_factory=dict)
    restart_only: frozenset[str] = frozenset()  # runs of jobs for which a change in place has failed
    # job → when its wait for replicas began
    waiting: Mapping[str, float] = field(default_factory=dict)
    ends: Mapping[str, DeclaredEnd] = field(default_factory=dict)  # by job
    # jobs to which the policy could give nothing, and why
    pending: Mapping[str, str] = field(default_factory=dict)
    looked_at: float = float("-inf")  # when it was last checked whether a round is due
    held_up_since: float | None = None  # when rounds began to be deferred because an agent is missing
    # (job, condition) for which the status is up to date
    described: Mapping[str, Any] = field(default_factory=dict)
    policy_seconds: float = 0.0  # duration of the last round
    # jobs whose reports the last round could not use, and why
    unusable_reports: Mapping[str, str] = field(default_factory=dict)
    # jobs about which nothing could be decided, and the reason that was reported
    undecidable: Mapping[str, str] = field(default_factory=dict)

    @property
    def classes(self) -> dict[str, str]:
        """The class of each node in the last question, whatever its links are."""
        return {node.name: declared(node.node_type) for node in self.asked.nodes} if self.asked else {}


@dataclass(frozen=True)
class CompareAndSwap:
    """Action: write `record` if the key is at `expected_revision` (0: it does not exist); None deletes it."""

    key: str
    record: Any
    expected_revision: int


@dataclass(frozen=True)
class DeletePrefix:
    """Action: delete keys that are not needed any more."""

    prefix: str


@dataclass(frozen=True)
class Say:
    """Action: write an event into the coordinator's log in the store."""

    event: str
    fields: Mapping[str, Any]


Action = CompareAndSwap | DeletePrefix | Say


@dataclass(frozen=True)
class Decided:
    """The result of a decision: actions, memory, and when to decide again if nothing happens.

    `ask` is a round of the policy to compute; its answer is passed to a later decision.
    """

    actions: tuple[Action, ...]
    memory: Memory
    wake_at: float
    ask: PolicyRound | None = None
