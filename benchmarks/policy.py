"""Solve allocation problems with the policy, as the coordinator asks it, and say how long each took.

    python benchmarks/policy.py INSTANCE.json... [--bounds bounds.json] [--types 3] [--json]
    python benchmarks/policy.py --generate 1024 1024 8 > INSTANCE.json

Every job is registered on every node. The coordinator makes its question of that; the goodput models are
the instance's. The objective is the plain sum of speedups, without a price of change. An instance holds
`name`, `num_nodes`, `gpus_per_node` and `jobs`, each with `name`, `perf_params` (α_c β_c α_n β_n α_r β_r
γ), `grad` (|G|², tr Σ), `init_batch_size`, `max_batch_size`, `min_local_bsz`, `max_local_bsz`,
`min_replicas` and `max_replicas`. Batch sizes may be accumulated.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from adaptdl_elastic.autoscaler.cluster_view import JobView, Observed, View
from adaptdl_elastic.autoscaler.coordinator.decision_types import CoordinatorSettings, Memory, PolicyQuestion
from adaptdl_elastic.autoscaler.coordinator.job_phase import Condition, Phase
from adaptdl_elastic.autoscaler.coordinator.policy_adapter import ask
from adaptdl_elastic.autoscaler.coordinator.rounds import ask_policy
from adaptdl_elastic.autoscaler.coordinator.slots import Ledger
from adaptdl_elastic.autoscaler.policy import (
    GoodputModel,
    JobInfo,
    NodeInfo,
    Objective,
    PolicySettings,
    allocate,
)
from adaptdl_elastic.autoscaler.policy.solver.tables import build, rooms_of
from adaptdl_elastic.autoscaler.policy.solver.typed_knapsack import choose
from adaptdl_elastic.goodput import GradParams, PerfParams
from adaptdl_elastic.rendezvous.schema.records import Cause, JobSpec, NodeRecord, Plan, Transition

CONFIG = ConfigDict(extra="ignore", allow_inf_nan=False, strict=True)
Count = Annotated[int, Field(ge=1, le=10**9)]
Amount = Annotated[float, Field(ge=0, le=1e30, strict=False)]
Seconds = Annotated[float, Field(ge=0, le=1e9, strict=False)]
Theta = tuple[
    Seconds, Seconds, Seconds, Seconds, Seconds, Seconds, Annotated[float, Field(ge=1, le=1e3, strict=False)]
]


@dataclass(frozen=True, config=CONFIG)
class InstanceJob:
    """A job of an instance; ValueError for bounds that contradict each other."""

    name: Annotated[str, Field(min_length=1)]
    perf_params: Theta
    grad: tuple[Amount, Amount]
    init_batch_size: Count
    max_batch_size: Count
    min_local_bsz: Count
    max_local_bsz: Count
    min_replicas: Annotated[int, Field(ge=0, le=10**6)]
    max_replicas: Annotated[int, Field(ge=1, le=10**6)]

    def __post_init__(self) -> None:
        for low, high in (
            ("min_replicas", "max_replicas"),
            ("min_local_bsz", "max_local_bsz"),
            ("init_batch_size", "max_batch_size"),
        ):
            least, most = getattr(self, low), getattr(self, high)
            if least > most:
                raise ValueError(f"{self.name}: {low} {least} is more than {high} {most}")
        if sum(self.perf_params[:2]) < 1e-12:
            raise ValueError(f"{self.name}: perf_params: steps that take no time at all")
        if sum(self.grad) <= 0:
            raise ValueError(f"{self.name}: grad: neither a gradient nor noise")


@dataclass(frozen=True, config=CONFIG)
class Instance:
    """An allocation problem."""

    name: Annotated[str, Field(min_length=1)]
    num_nodes: Annotated[int, Field(ge=1, le=100_000)]
    gpus_per_node: Annotated[int, Field(ge=1, le=1024)]
    jobs: tuple[InstanceJob, ...]

    def __post_init__(self) -> None:
        names = [job.name for job in self.jobs]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"jobs: {', '.join(twice[:3])} occur more than once")


INSTANCE: TypeAdapter[Instance] = TypeAdapter(Instance)
Bounds = dict[str, Annotated[float, Field(gt=0, le=1e30, strict=False, allow_inf_nan=False)]]
BOUNDS: TypeAdapter[Bounds] = TypeAdapter(Bounds)


class InstanceError(ValueError):
    """What is wrong with a file, in a line."""


def read(path: Path) -> Instance:
    """The instance in `path`; InstanceError says what is wrong with it."""
    try:
        return INSTANCE.validate_json(path.read_bytes())
    except OSError as error:
        raise InstanceError(f"{path}: cannot be read: {error.strerror}") from None
    except ValidationError as error:
        raise InstanceError(f"{path}: not an instance: {first_problem(error)}") from None


def read_bounds(path: Path) -> Bounds:
    """Return upper bounds by the name of the instance.

    The file holds one JSON object: names and numbers, or an object whose `bounds` are that.

    Raises:
        InstanceError: The file cannot be read, or holds something else.
    """
    try:
        found = json.loads(path.read_bytes())
        inner = found.get("bounds", found) if isinstance(found, dict) else found
        return BOUNDS.validate_python(inner)
    except OSError as error:
        raise InstanceError(f"{path}: cannot be read: {error.strerror}") from None
    except ValidationError as error:
        raise InstanceError(f"{path}: {NO_BOUNDS}: {first_problem(error)}") from None
    except ValueError as error:  # neither UTF-8 nor JSON
        raise InstanceError(f"{path}: {NO_BOUNDS}: {error}") from None


NO_BOUNDS = 'not bounds, which are a JSON object such as {"small-0": 7.82}'


def first_problem(error: ValidationError) -> str:
    """Return where the first thing that does not fit is, and what it should be."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where + ': ' if where else ''}{first['msg'].removeprefix('Value error, ')}"


SETTINGS = PolicySettings(objective=Objective.SPEEDUP, default_pause=0.0, hysteresis=0.0)


def problem(instance: Instance, types: int = 1) -> tuple[list[JobInfo], list[NodeInfo]]:
    """Return jobs and nodes; on each of several types a job is 1.2 to 3 times slower than on the last."""
    jobs, rng = [], np.random.default_rng(0)
    names = [f"type-{i}" for i in range(types)]
    for job in instance.jobs:
        model = GoodputModel(
            PerfParams(*job.perf_params),
            GradParams(*job.grad),
            job.init_batch_size,
            job.max_batch_size,
            (job.min_local_bsz, job.max_local_bsz),
            True,
        )
        most, slowness, models = job.max_replicas, 1.0, {}
        for name in names if types > 1 else ():
            *times, gamma = model.perf_params
            models[name] = replace(model, perf_params=PerfParams(*(slowness * x for x in times), gamma))
            slowness *= float(rng.uniform(1.2, 3))
        least = max(job.min_replicas, 1)
        jobs.append(JobInfo(job.name, least, most, model=model, models=models, max_profiled_replicas=most))
    nodes = [
        NodeInfo(f"{i:05d}", instance.gpus_per_node, node_type=names[i % types] if types > 1 else "")
        for i in range(instance.num_nodes)
    ]
    return jobs, nodes


def question_of(jobs: list[JobInfo], nodes: list[NodeInfo]) -> PolicyQuestion:
    """Return the coordinator's question about jobs without replicas that are registered on every node."""
    places = {
        node.name: Observed(
            NodeRecord(node.name, "", "", "", "", node.slots, node_type=node.node_type), 0, 0.0
        )
        for node in nodes
    }
    views = {}
    for job in jobs:
        bounds = {"min_replicas": job.min_replicas, "max_replicas": job.max_replicas, "max_nodes": len(nodes)}
        plan = Plan(job.name, "", -1, (), Cause.START, Transition.RESTART, "")
        spec = JobSpec(job.name, "", **bounds)
        views[job.name] = JobView(job.name, Observed(spec, 0, 0.0), plan=Observed(plan, 0, 0.0))
    view = View(0.0, 0.0, nodes=dict.fromkeys(views, places), jobs=views)
    conditions = {name: Condition(Phase.EMPTY) for name in views}
    asked = ask(view, conditions, Memory(), Ledger(view), CoordinatorSettings())
    given = {job.name: job for job in jobs}
    infos = []
    for info in asked.jobs:
        job = given[info.name]
        most = job.max_profiled_replicas
        infos.append(replace(info, model=job.model, models=job.models, max_profiled_replicas=most))
    return replace(asked, jobs=tuple(infos))


def bound_of(jobs: list[JobInfo], nodes: list[NodeInfo]) -> float:
    """Return an upper bound of the sum of speedups: that of the choice of sizes, regardless of places."""
    rooms = {job.name: room for job, room in zip(jobs, rooms_of(jobs, nodes), strict=True)}
    nothing = {job.name: {} for job in jobs}
    tables = build(jobs, nodes, rooms, nothing, set(), 0.0, SETTINGS)
    capacity = [sum(n.slots for n in nodes if n.node_type == name) for name in tables.sizes.types]
    speedups = np.where(tables.allowed, tables.speedup, 0.0)
    return choose(tables.sizes, speedups, np.array(capacity)).bound


def solve(instance: Instance, repeat: int, types: int = 1) -> dict[str, Any]:
    jobs, nodes = problem(instance, types)
    started_asking = time.process_time()
    question = question_of(jobs, nodes)
    asking = time.process_time() - started_asking
    wall, cpu = [], []
    for _ in range(repeat):
        started = time.perf_counter(), time.process_time()
        decision = ask_policy(allocate, question, question.jobs, 0.0, SETTINGS)
        wall.append(time.perf_counter() - started[0])
        cpu.append(time.process_time() - started[1])
    allocation = {
        name: sorted(int(node) for node, replicas in found.items() for _ in range(replicas))
        for name, found in decision.allocations.items()
    }
    return {
        "instance": instance.name,
        "objective": decision.objective,
        "seconds": min(wall),
        "cpu_seconds": min(cpu),
        "question_cpu_seconds": asking,
        "allocation": allocation,
        **({"gap": 1 - decision.objective / bound_of(jobs, nodes)} if types > 1 else {}),
    }


def generate(num_jobs: int, num_nodes: int, slots: int, seed: int = 0) -> dict[str, Any]:
    """A made-up problem of that size: jobs of all kinds of scaling."""
    rng = np.random.default_rng(seed)
    jobs = []
    for i in range(num_jobs):
        alpha_c = float(np.exp(rng.uniform(-4, 0)))
        init = int(2 ** rng.integers(3, 9))
        largest = init * int(2 ** rng.integers(4, 7))
        local = max(1, init // 4), init * int(2 ** rng.integers(0, 3))
        alpha_r = alpha_c * float(rng.uniform(0.05, 1))
        alpha_n = alpha_r * float(rng.uniform(1.5, 6))
        slope = float(rng.uniform(0.2, 2)) * alpha_c / init
        theta = (alpha_c, slope, alpha_n, 0.01 * alpha_n, alpha_r, 0.01 * alpha_r, float(rng.uniform(1, 3)))
        jobs.append(
            {
                "name": f"job-{i}",
                "perf_params": list(theta),
                "grad": [1.0, float(np.exp(rng.uniform(0, 5)))],
                "init_batch_size": init,
                "max_batch_size": largest,
                "min_local_bsz": local[0],
                "max_local_bsz": local[1],
                "min_replicas": 0,
                "max_replicas": 64,
            }
        )
    name = f"made-up-{num_jobs}x{num_nodes}x{slots}"
    return {"name": name, "num_nodes": num_nodes, "gpus_per_node": slots, "jobs": jobs}


def at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("instances", nargs="*", type=Path, metavar="INSTANCE.json")
    parser.add_argument(
        "--bounds", type=Path, help="a file with upper bounds by name (default: beside the instance)"
    )
    parser.add_argument("--generate", nargs=3, type=at_least_one, metavar=("JOBS", "NODES", "SLOTS"))
    parser.add_argument(
        "--repeat", type=at_least_one, default=1, help="solve each so often, report the quickest"
    )
    parser.add_argument(
        "--types",
        type=at_least_one,
        default=1,
        help="deal the nodes to so many types; the gap is then that to the bound of the choice of sizes",
    )
    parser.add_argument("--json", action="store_true", help="one JSON list on standard output")
    options = parser.parse_args()
    if options.generate:
        json.dump(generate(*options.generate), sys.stdout)
        return 0
    if not options.instances:
        parser.error("give at least one INSTANCE.json, or --generate")
    found = []
    for path in options.instances:
        beside = path.parent / "bounds.json"
        try:
            instance = read(path)
            source = options.bounds or (beside if beside.exists() else None)
            bounds = read_bounds(source) if source else {}
        except InstanceError as error:
            print(error, file=sys.stderr)
            return 2
        result = solve(instance, options.repeat, options.types)
        bounds = {} if options.types > 1 else bounds  # they are for nodes of one type
        if bound := bounds.get(instance.name):
            result["gap"] = 1 - result["objective"] / bound
        found.append(result)
        if not options.json:
            gap = f"  gap {100 * result['gap']:.3f} %" if "gap" in result else ""
            print(f"{result['instance']:24s} {result['objective']:12.4f}  {result['seconds']:.3f} s{gap}")
    if options.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
