"""Replay Sia's heterogeneous cluster and its Philly traces, and compare with what Sia's artifact came to.

    python benchmarks/sia.py [--traces ../shared/traces/hetero] [--workloads 1 2 3 4] [--policy goodput]
                             [--undeclared] [--clairvoyant]

6 nodes of 4 T4, 3 nodes of 8 RTX 2080Ti and 2 nodes of 8 A100, decisions every 60 s (Jayaram Subramanya et
al., *Sia: Heterogeneity-aware, goodput-optimized ML-cluster scheduling*, SOSP 2023). Every change pauses a
job for as long as its application takes to restart. The rules are those of the artifact's simulator, as
described with the traces. `--policy fifo` and `--policy las` run all jobs with a fixed number of GPUs and
batch size: with them a replay must give the artifact's figures exactly.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from simulator.application import Application, read_application
from simulator.baselines import decision, place_most_free
from simulator.engine import GivenCluster, Simulation, SimulationOptions
from simulator.outcome_report import summarize
from simulator.simulated_job import SimJob
from simulator.workload import read_workload

from adaptdl_elastic.autoscaler.policy import (
    Allocation,
    Decision,
    JobInfo,
    NodeInfo,
    PolicySettings,
    allocate,
)

TRACES = Path(__file__).resolve().parent.parent.parent / "shared" / "traces" / "hetero"
TYPES = {"aws": (6, 4), "rtx": (3, 8), "dgx-ext": (2, 8)}  # nodes, and GPUs of each
PREFERRED = ("dgx-ext", "rtx", "aws")  # order in which FIFO and LAS try the types
PAUSES = {"bert": 120.0, "cifar10": 50.0, "deepspeech2": 25.0, "imagenet": 250.0, "yolov3": 80.0}  # seconds
SLOWDOWNS = {"cifar10": 1.8}  # of the measured step times; other applications: SLOWDOWN
SLOWDOWN = 1.2
MAX_LOCAL_BSZ = {("deepspeech2", "rtx"): 57}  # set by the artifact below the measured maximum
SERVICE_SECONDS = 3600.0  # GPU seconds after which LAS puts a job behind those with less


def nodes() -> list[NodeInfo]:
    """Return the cluster's nodes."""
    return [
        NodeInfo(f"{name}-{i}", slots, node_type=name)
        for name, (count, slots) in TYPES.items()
        for i in range(count)
    ]


def read_typed(folder: Path) -> Application:
    """Read an application with the step times of every type."""
    found = {name: read_application(folder, name) for name in TYPES}
    for name, app in found.items():
        largest = MAX_LOCAL_BSZ.get((folder.name, name))
        measured = max(float(sizes[-1]) for sizes, _, _ in app.placements.values())
        found[name] = replace(app, max_local_bsz=largest or int(measured), types={})
    first = found[PREFERRED[0]]
    return replace(first, types=found)


class SiaJob(SimJob):
    """A job by the rules of Sia's simulator."""

    def allocate(self, allocation: Allocation, pause: float, node_type: str = "") -> None:
        """Change the allocation; other nodes of the same type with the same numbers of GPUs cost nothing."""
        same = tuple(allocation.values()) == self.parts and node_type == self.node_type
        if self.parts and same:
            self.allocation = dict(allocation)
        else:
            super().allocate(allocation, PAUSES[self.app.name], node_type)

    def step(self, seconds: float) -> None:
        """Simulate `seconds` of the job; the batch is chosen again at the beginning."""
        if self.parts and self.completed is None:
            self._choose_batch()
        super().step(seconds)

    def rate(self) -> float:
        """Return the true progress per second, slowed down as in the artifact."""
        return super().rate() / SLOWDOWNS.get(self.app.name, SLOWDOWN)

    def _largest_local(self) -> int:
        """Return the largest batch of a GPU that was measured for the present shape, or for larger ones."""
        app, parts = self.speed, self.parts
        shape = min(parts[i:] + parts[:i] for i in range(len(parts)))
        if shape in app.placements:
            return min(int(app.placements[shape][0][-1]), app.max_local_bsz)
        points = app.scaling_points
        larger = points[(points[:, 0] >= len(parts)) & (points[:, 1] >= sum(parts)), 2]
        return int(larger.max()) if len(larger) else app.max_local_bsz

    def _choose_batch(self) -> None:
        app, count = self.speed, self.replicas
        largest = self._largest_local()
        function = self.goodput_function() if self.fixed_batch_size is None else None
        if function is not None:
            _, self.atomic_bsz, self.accumulation_steps = function.optimize(
                len(self.parts), count, app.max_batch_size, (app.min_local_bsz, largest), accumulation=True
            )
            return
        total = self.fixed_batch_size or max(app.init_batch_size, app.min_local_bsz * count)
        local = math.ceil(total / count - 1e-8)
        accum = math.ceil(local / largest - 1e-8) - 1
        if count == 1 and total > app.init_batch_size:
            accum = max(accum, 1)
        atomic = math.ceil(local / (accum + 1) - 1e-8)
        measured = [int(sizes[-1]) for parts, (sizes, _, _) in app.placements.items() if sum(parts) == count]
        if measured:
            atomic = min(atomic, *([max(measured)] * 2))
        self.accumulation_steps = accum
        self.atomic_bsz = min(atomic, int(app.max_batch_size / (count * (accum + 1))))


class SiaSimulation(Simulation):
    """A replay by the rules of Sia's simulator."""

    def _job(self, submission: Any, app: Application) -> SimJob:
        return SiaJob(submission, app, submission.batch_size if self.options.tuned else None)

    def info(self, job: SimJob) -> JobInfo:
        """Return what a coordinator would know of a job, with its application's pause once it has begun."""
        known = super().info(job)
        most = min(64, job.app.max_batch_size // job.app.min_local_bsz)
        return replace(known, max_replicas=most, pause=PAUSES[job.app.name] if job.starts else None)


def _by_type(free: Mapping[str, int], name: str) -> dict[str, int]:
    return {node: slots for node, slots in free.items() if node.rsplit("-", 1)[0] == name}


def _place(wanted: int, free: dict[str, int], name: str) -> dict[str, int]:
    """Place GPUs on the nodes of a type with the most free ones, and reduce `free`."""
    here = _by_type(free, name)
    placed = place_most_free(wanted, here)
    for node, taken in placed.items():
        free[node] -= taken
    return placed


def fifo(
    jobs: Sequence[JobInfo],
    cluster: Sequence[NodeInfo],
    current: Mapping[str, Allocation],
    now: float,
    settings: PolicySettings,
) -> Decision:
    """Run jobs in the order of submission to their end; none starts before one that was submitted earlier."""
    free = {node.name: node.slots for node in cluster}
    chosen = {job.name: dict(current[job.name]) for job in jobs if current.get(job.name)}
    for allocation in chosen.values():
        for node, taken in allocation.items():
            free[node] -= taken
    for job in jobs:
        if job.name in chosen:
            continue
        wanted = job.requested_replicas or 1
        name = next((t for t in PREFERRED if sum(_by_type(free, t).values()) >= wanted), None)
        if name is None:
            break
        chosen[job.name] = _place(wanted, free, name)
    return decision(jobs, current, chosen, "in order of submission")


class LeastAttainedService:
    """Run first the jobs that have had less than `SERVICE_SECONDS`, each group in the order of submission."""

    def __init__(self) -> None:
        self._service: dict[str, float] = {}
        self._before: tuple[float, dict[str, int]] = 0.0, {}

    def __call__(
        self,
        jobs: Sequence[JobInfo],
        cluster: Sequence[NodeInfo],
        current: Mapping[str, Allocation],
        now: float,
        settings: PolicySettings,
    ) -> Decision:
        """Give each job in turn its GPUs on its present type, else on the first type that has enough left."""
        then, held = self._before
        for name, count in held.items():
            self._service[name] = self._service.get(name, 0.0) + count * (now - then)
        ordered = sorted(jobs, key=lambda job: self._service.get(job.name, 0.0) >= SERVICE_SECONDS)
        left = {name: count * slots for name, (count, slots) in TYPES.items()}
        kinds: dict[str, str] = {}
        for job in ordered:
            present = [next(iter(current[job.name])).rsplit("-", 1)[0]] if current.get(job.name) else []
            wanted = job.requested_replicas or 1
            name = next((t for t in (*present, *PREFERRED) if left[t] >= wanted), None)
            if name is not None:
                left[name] -= wanted
                kinds[job.name] = name
        chosen: dict[str, Allocation] = {}
        free = {node.name: node.slots for node in cluster}
        for name, kind in kinds.items():
            if current.get(name) and next(iter(current[name])).rsplit("-", 1)[0] == kind:
                chosen[name] = dict(current[name])
                for node, taken in current[name].items():
                    free[node] -= taken
        for job in ordered:
            if job.name in kinds and job.name not in chosen:
                chosen[job.name] = _place(job.requested_replicas or 1, free, kinds[job.name])
        self._before = now, {name: sum(allocation.values()) for name, allocation in chosen.items()}
        return decision(jobs, current, chosen, "least attained service")


def replay(traces: Path, number: int, policy: str, **options: Any) -> Simulation:
    """Replay one workload to its end.

    Args:
        traces: The folder with `apps` and `workloads`.
        number: Number of the Philly workload.
        policy: `goodput`, `fifo` or `las`.
        **options: Options of the simulation.
    """
    workload = read_workload(traces / "workloads" / f"philly-{number}.csv")
    apps = {name: read_typed(traces / "apps" / name) for name in {job.application for job in workload}}
    chosen = {"goodput": allocate, "fifo": fifo, "las": LeastAttainedService()}[policy]
    how = SimulationOptions(tuned=policy != "goodput", **options)
    simulation = SiaSimulation(workload, apps, GivenCluster(nodes()), chosen, options=how)
    simulation.run()
    return simulation


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", type=Path, default=TRACES)
    parser.add_argument("--workloads", type=int, nargs="*", default=[1, 2, 3, 4])
    parser.add_argument("--policy", choices=("goodput", "fifo", "las"), default="goodput")
    parser.add_argument("--undeclared", action="store_true")
    parser.add_argument("--clairvoyant", action="store_true", help="all step times are known from the start")
    options = parser.parse_args()
    if not options.traces.is_dir():
        print(f"no traces in {options.traces}: give --traces FOLDER", file=sys.stderr)
        return 2
    runs = json.loads((options.traces / "baselines.json").read_text("utf-8"))["runs"]
    published = {run["id"]: run for run in runs}
    found = []
    for number in options.workloads:
        cpu = time.process_time()
        simulation = replay(
            options.traces,
            number,
            options.policy,
            undeclared=options.undeclared,
            clairvoyant=options.clairvoyant,
        )
        report, sia = summarize(simulation.outcome), published[f"sia-philly-{number}"]
        result = {
            "workload": f"philly-{number}",
            "average_jct": report.average_jct,
            "over_sia": report.average_jct / sia["avg_jct_s"],
            "p99_over_sia": report.p99_jct / 3600 / sia["p99_jct_h"],
            "makespan_over_sia": report.makespan / 3600 / sia["makespan_h"],
            "restarts_per_job": report.restarts_per_job,
            "policy_seconds": report.policy_seconds,
            "cpu_seconds": time.process_time() - cpu,
        }
        found.append(result)
        print(result, file=sys.stderr, flush=True)
    means = {k: float(np.mean([r[k] for r in found])) for k in found[0] if k != "workload"}
    print(json.dumps({"runs": found, "mean": means}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
