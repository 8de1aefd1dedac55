"""Replay workloads and compare completion times with the results of Pollux's artifact.

    python benchmarks/simulate.py [--traces ../shared/traces] [--rescale-cost 30] [--declared-sigma 0.5]
                                  [--undeclared] [--declare JOB=FACTOR] [--policy goodput]

16 nodes of 4 slots, decisions every 60 s; below 10 s of pause also when jobs come, end and measure. The
average completion time, its 99th percentile and the makespan are each divided by the artifact's for Pollux
with 30 s of pause. Pollux knew no lengths; without --undeclared jobs declare theirs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from simulator.application import read_application
from simulator.baselines import POLICIES, make_policy
from simulator.engine import FixedCluster, Simulation, SimulationOptions
from simulator.outcome_report import summarize
from simulator.workload import read_workload

from adaptdl_elastic.autoscaler.policy import PolicySettings

EVENTS_PAY_BELOW = 10.0
"""Pause in seconds below which deciding on every arrival and completion pays off."""
TRACES = Path(__file__).resolve().parent.parent.parent / "shared" / "traces"


def replay(traces: Path, number: int, options: argparse.Namespace) -> dict[str, Any]:
    workload = read_workload(traces / "workloads" / f"workload-{number}.csv")
    apps = {name: read_application(traces / "apps" / name) for name in {job.application for job in workload}}
    policy, tuned = make_policy(options.policy)
    rng = np.random.default_rng(number + 1000 * options.seed)
    factors = np.exp(rng.normal(0.0, options.declared_sigma, len(workload)))
    declared = {job.name: float(x) for job, x in zip(workload, factors, strict=True)}
    chosen = {name: factor for name, factor in options.declare if name in declared}
    how = SimulationOptions(
        pause=options.rescale_cost,
        events=options.rescale_cost < EVENTS_PAY_BELOW,
        tuned=tuned,
        declared={**declared, **chosen},
        undeclared=options.undeclared,
    )
    wall, cpu = time.perf_counter(), time.process_time()
    outcome = Simulation(workload, apps, FixedCluster(16, 4), policy, PolicySettings(), how).run()
    report = summarize(outcome)
    name, published = f"workload-{number}", json.loads((traces / "baselines.json").read_text("utf-8"))
    tails = published["tails"]["pollux"][name]
    jct = {job.name: (job.completed or np.inf) - job.submission.time for job in outcome.jobs}
    return {
        "workload": name,
        "average_jct": report.average_jct,
        "ratio": report.average_jct / published["policies"]["pollux"][name],
        "p99_jct": report.p99_jct,
        "p99_ratio": report.p99_jct / tails["p99"],
        "makespan": report.makespan,
        "makespan_ratio": report.makespan / tails["makespan"],
        **{f"jct_of_{job}": jct[job] for job in chosen},
        "longest_wait": report.longest_wait,
        "restarts_per_job": report.restarts_per_job,
        "policy_seconds": report.policy_seconds,
        "wall_seconds": time.perf_counter() - wall,
        "cpu_seconds": time.process_time() - cpu,
    }


def declaration(text: str) -> tuple[str, float]:
    """Parse JOB=FACTOR."""
    job, _, factor = text.partition("=")
    try:
        value = float(factor)
    except ValueError:
        value = -1.0
    if not job or not 0 < value < np.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not JOB=FACTOR with a factor above 0")
    return job, value


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", type=Path, default=TRACES)
    parser.add_argument("--workloads", type=int, nargs="*", default=[1, 2, 3, 4, 6])
    parser.add_argument("--policy", choices=POLICIES, default="goodput")
    parser.add_argument("--rescale-cost", type=float, default=30.0)
    parser.add_argument("--declared-sigma", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0, help="of --declared-sigma")
    parser.add_argument("--undeclared", action="store_true")
    parser.add_argument(
        "--declare",
        type=declaration,
        action="append",
        default=[],
        metavar="JOB=FACTOR",
        help="this job declares so many times its length; may be given again",
    )
    options = parser.parse_args()
    if not options.traces.is_dir():
        print(f"no traces in {options.traces}: give --traces FOLDER", file=sys.stderr)
        return 2
    files = [options.traces / "workloads" / f"workload-{number}.csv" for number in options.workloads]
    known = {job.name for file in files for job in read_workload(file)} if options.declare else set()
    unknown = [name for name, _ in options.declare if name not in known]
    if unknown:
        print(f"--declare: no job {unknown[0]} in workloads {options.workloads}", file=sys.stderr)
        return 2
    found = []
    for number in options.workloads:
        result = replay(options.traces, number, options)
        found.append(result)
        print(result, file=sys.stderr, flush=True)
    shared = [key for key in found[0] if key != "workload" and not key.startswith("jct_of_")]
    means = {key: float(np.mean([r[key] for r in found])) for key in shared}
    means["longest_wait"] = max(r["longest_wait"] for r in found)
    told = {name: str(value) for name, value in vars(options).items()}
    print(json.dumps({"options": told, "runs": found, "mean": means}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
