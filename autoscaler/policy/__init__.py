"""The policy: pure functions that map the known jobs and nodes to the replicas of each job.

| question | module |
|---|---|
| Which job gets which replicas? | `allocate` |
| What does the policy read and return, and which settings does it have? | `policy_types` |
| What is an allocation worth? | `objective` |
| How is a job's pause weighed against its gain? | `objective` (`after_pause`), `solver.tables` |
| What is the goodput of jobs at many sizes? | `curves` |
| How do measured step times correct the model of the goodput? | `learning` |
| How are sizes and nodes chosen? | `solver` |
| Why did a job get its allocation? | `reasons` |

Weights are set in three places. A constant of `objective` weighs a term of the objective.
`PolicySettings` has the cluster's settings, such as `objective`, `fairness` and `hysteresis`.
`JobInfo.weight` is a job's own weight (`adaptdl-run --weight`). With the default objective,
`objective.weights` multiplies it with the job's rank.

The seconds of a pause come from the coordinator, as `JobInfo.pause` (`coordinator.policy_adapter`).
`PolicySettings.pause` says what counts if that is None.
"""

from adaptdl_elastic.autoscaler.policy.allocate import allocate
from adaptdl_elastic.autoscaler.policy.policy_types import (
    Allocation,
    Decision,
    GoodputModel,
    JobInfo,
    NodeInfo,
    NodeLimit,
    Objective,
    PolicySettings,
    Reason,
)

__all__ = [
    "Allocation",
    "Decision",
    "GoodputModel",
    "JobInfo",
    "NodeInfo",
    "NodeLimit",
    "Objective",
    "PolicySettings",
    "Reason",
    "allocate",
]
