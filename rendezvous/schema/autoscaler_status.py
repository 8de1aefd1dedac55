"""The record that an autoscaler writes: its nodes, and what they cost."""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from adaptdl_elastic.rendezvous.schema.records import RECORD_CONFIG


@dataclass(frozen=True, config=RECORD_CONFIG)
class JobCost:
    """What a job's nodes have cost and will cost, in the currency of the price table."""

    job: str
    so_far: float
    hourly: float  # at its present share of the nodes
    # cost until the job's declared end, past cost included; None: no end is declared
    forecast: float | None = None
    seconds_left: float | None = None


@dataclass(frozen=True, config=RECORD_CONFIG)
class IdleNode:
    """A node without a replica, as the autoscaler knows it."""

    instance: str
    since: float
    hourly_price: float
    leaves: bool = False  # it is given back, or was: a node that is still there ends itself


@dataclass(frozen=True, config=RECORD_CONFIG)
class AutoscalerStatus:
    """The nodes that the autoscaler holds and wants, and what they cost."""

    provider: str
    nodes: int
    target: int
    hourly_cost: float
    cost_so_far: float
    reason: str = ""  # the numbers behind the target
    jobs: tuple[JobCost, ...] = ()
    bought: tuple[tuple[str, int, float, float], ...] = ()  # pool, instances so far, node hours, cost
    warnings: tuple[str, ...] = ()  # problems, and what to do about them
    idle: tuple[IdleNode, ...] = ()
    memory: str = ""  # state that the autoscaler needs after a restart, as JSON of its own
    updated: float = 0.0
