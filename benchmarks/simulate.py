"""Replay workloads and compare average completion times with Pollux's published ones.

    python benchmarks/simulate.py [--traces ../shared/traces] [--rescale-cost 30] [--declared-sigma 0.5]
                                  [--undeclared] [--policy goodput] [--json]

16 nodes of 4 slots, decisions every 60 s; below 10 s of pause also when jobs come, end and measure.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from adaptdl_elastic.autoscaler.policy import PolicySettings
from adaptdl_elastic.autoscaler.simulator.application import read_application
from adaptdl_elastic.autoscaler.simulator.baselines import POLICIES, make_policy
from adaptdl_elastic.autoscaler.simulator.engine import FixedCluster, Simulation, SimulationOptions
from adaptdl_elastic.autoscaler.simulator.outcome_report import summarize
from adaptdl_elastic.autoscaler.simulator.simulate_command import EVENTS_PAY_BELOW
from adaptdl_elastic.autoscaler.simulator.workload import read_workload

TRACES = Path(__file__).resolve().parent.parent.parent / "shared" / "traces"


def replay(traces: Path, number: int, options: argparse.Namespace) -> dict[str, Any]:
    workload = read_workload(traces / "workloads" / f"workload-{number}.csv")
    apps = {name: read_application(traces / "apps" / name) for name in {job.application for job in workload}}
    policy, tuned = make_policy(options.policy)
    rng = np.random.default_rng(number + 1000 * options.seed)
    factors = np.exp(rng.normal(0.0, options.declared_sigma, len(workload)))
    how = SimulationOptions(
        pause=options.rescale_cost,
        events=options.rescale_cost < EVENTS_PAY_BELOW,
        tuned=tuned,
        declared={job.name: float(x) for job, x in zip(workload, factors, strict=True)},
        undeclared=options.undeclared,
    )
    wall, cpu = time.perf_counter(), time.process_time()
    outcome = Simulation(workload, apps, FixedCluster(16, 4), policy, PolicySettings(), how).run()
    report = summarize(outcome, fairness=False)
    published = json.loads((traces / "baselines.json").read_text(encoding="utf-8"))["policies"]
    return {
        "workload": f"workload-{number}",
        "average_jct": report.average_jct,
        "ratio": report.average_jct / published["pollux"][f"workload-{number}"],
        "p99_jct": report.p99_jct,
        "makespan": report.makespan,
        "longest_wait": report.longest_wait,
        "restarts_per_job": report.restarts_per_job,
        "policy_seconds": report.policy_seconds,
        "wall_seconds": time.perf_counter() - wall,
        "cpu_seconds": time.process_time() - cpu,
    }


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
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not options.traces.is_dir():
        print(f"no traces in {options.traces}: give --traces FOLDER", file=sys.stderr)
        return 2
    found = []
    for number in options.workloads:
        result = replay(options.traces, number, options)
        found.append(result)
        if not options.json:
            print(
                "  ".join(f"{k} {v:.3f}" if isinstance(v, float) else v for k, v in result.items()),
                flush=True,
            )
    means = {key: float(np.mean([r[key] for r in found])) for key in found[0] if key != "workload"}
    means["longest_wait"] = max(r["longest_wait"] for r in found)
    if options.json:
        print(
            json.dumps(
                {"options": {k: str(v) for k, v in vars(options).items()}, "runs": found, "mean": means}
            )
        )
    else:
        print("mean  " + "  ".join(f"{key} {value:.3f}" for key, value in means.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
