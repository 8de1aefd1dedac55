"""The policy: pure functions from what is known about jobs and nodes to who gets which replicas."""

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
