"""Run a workload on bought nodes under one autoscaler and compute its cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from simulated_market import (
    NOTICE,
    MarketCluster,
    Scaler,
    SimulatedMarket,
    ThresholdScaler,
    busy_fraction,
)
from simulator.application import Application
from simulator.engine import (
    FixedCluster,
    PolicyFunction,
    Simulation,
    SimulationOptions,
)
from simulator.simulated_job import SimJob
from simulator.workload import Submission

from adaptdl_elastic.autoscaler.policy.policy_types import JobInfo, PolicySettings
from adaptdl_elastic.autoscaler.providers.base import Pool
from adaptdl_elastic.autoscaler.scaling.economics import HOUR, ScalingSettings
from adaptdl_elastic.autoscaler.scaling.step import step


@dataclass(frozen=True)
class Setup:
    """The part of a comparison that is the same for every autoscaler."""

    workload: Sequence[Submission]
    apps: Mapping[str, Application]
    policy: PolicyFunction
    settings: PolicySettings
    options: SimulationOptions
    slots: int = 4
    boot_seconds: float = 120.0
    seed: int = 0
    notice: float = NOTICE  # seconds between notice and interruption; 0: without notice
    loss: float = 25.0  # seconds of training that an interruption without notice costs, besides the pause


@dataclass(frozen=True)
class Bill:
    """Cost and completion times of a workload under one autoscaler."""

    name: str
    cost: float
    jct: float  # average job completion time, seconds
    makespan: float
    node_hours: float
    interruptions: int = 0
    most_nodes: int = 0


def run_fixed(setup: Setup, nodes: int, price: float) -> Bill:
    """Run on a fixed number of nodes from the beginning to the last completion."""
    simulation = Simulation(
        setup.workload,
        setup.apps,
        FixedCluster(nodes, setup.slots),
        setup.policy,
        setup.settings,
        setup.options,
    )
    simulation.run()
    hours = simulation.now / HOUR * nodes
    return Bill(f"fixed {nodes}", hours * price, _jct(simulation), simulation.now, hours, 0, nodes)


def run_goodput(
    setup: Setup,
    pools: Sequence[Pool],
    markets: Mapping[str, SimulatedMarket],
    settings: ScalingSettings,
    name: str,
) -> Bill:
    """Run with the autoscaler of this package."""
    return _run(setup, pools, markets, name, lambda _: lambda seen, memory: step(seen, memory, settings))


def run_threshold(
    setup: Setup,
    pools: Sequence[Pool],
    markets: Mapping[str, SimulatedMarket],
    settings: ScalingSettings,
    low: float,
    high: float,
    stride: float = 0.1,
) -> Bill:
    """Run with an autoscaler that knows utilisation but no goodput."""
    plain = replace(settings, low=1.0, high=1.0, shrink_after=0.0, grow_after=0.0)

    def scaler(simulation: Simulation) -> Scaler:
        def utilisation() -> tuple[float, int]:
            computing, waiting = 0.0, 0
            for job in simulation.jobs:
                if job.completed is not None or job.submission.time > simulation.now:
                    continue
                if not job.parts:
                    waiting += 1
                    continue
                times = job.app.throughput(job.parts, job.atomic_bsz)
                computing += job.replicas * busy_fraction(job.parts, *times, job.accumulation_steps)
            return computing, waiting

        most = min(settings.max_nodes, sum(pool.maximum for pool in pools))
        return ThresholdScaler(
            low,
            high,
            utilisation,
            lambda seen, memory: step(seen, memory, plain),
            step=stride,
            slots=setup.slots,
            most=most,
        )

    return _run(setup, pools, markets, f"threshold {low:g}:{high:g}", scaler)


def _run(
    setup: Setup, pools: Sequence[Pool], markets: Mapping[str, SimulatedMarket], name: str, make: object
) -> Bill:
    simulation: Simulation

    def jobs(now: float) -> list[tuple[JobInfo, Mapping[str, int]]]:
        return [
            (simulation.info(job), job.allocation)
            for job in simulation.jobs
            if job.completed is None and job.submission.time <= now
        ]

    def lose(instance: str) -> None:
        for job in simulation.jobs:
            if job.completed is None and instance in job.allocation:
                _set_back(job, setup.loss)

    cluster = MarketCluster(
        pools,
        markets,
        lambda seen, memory: scaler(seen, memory),
        jobs,
        boot_seconds=setup.boot_seconds,
        seed=setup.seed,
        notice=setup.notice,
        on_loss=lose,
    )
    simulation = Simulation(setup.workload, setup.apps, cluster, setup.policy, setup.settings, setup.options)
    scaler: Scaler = make(simulation)  # type: ignore[operator]
    simulation.run()
    cluster.finish(simulation.now)
    return Bill(
        name,
        cluster.cost,
        _jct(simulation),
        simulation.now,
        sum(pool.hours for pool in cluster.memory.pools.values()),
        cluster.interruptions,
        max((nodes for _, nodes, _ in cluster.history), default=0),
    )


def _set_back(job: SimJob, seconds: float) -> None:
    """Reduce a job's progress by that of `seconds`, as if it continued from an older checkpoint."""
    job.progress = max(0.0, job.progress - job.rate() * seconds)
    job.epoch = int(np.searchsorted(job.app.ends, job.progress, side="right"))


def _jct(simulation: Simulation) -> float:
    times = [job.completed - job.submission.time for job in simulation.jobs if job.completed is not None]
    return math.fsum(times) / len(times) if times else math.nan
