"""The policy: pure functions that map the known jobs and nodes to the replicas of each job."""

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
