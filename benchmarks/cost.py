"""What goodput-aware autoscaling costs, against a fixed cluster and against utilisation thresholds.

    python benchmarks/cost.py --traces ../shared/traces --workload 6 [--workers 2]
    python benchmarks/cost.py --only spot sudden --market my-market.csv --pause 30

Replays the workloads of the Pollux artifact on nodes that are bought in a simulated market. Everybody
runs the same allocation policy, pays the same price per node hour from an instance's launch to its end,
and waits the same time for an instance to boot; only the number of nodes is decided differently.

fixed       16 nodes from the first second to the last completion
threshold   more nodes above one utilisation, fewer below another; a grid of both, all points reported
goodput     `adaptdl autoscale`'s own decision, at several worths of time
spot        the same on spot at 30 % of the price, taken back every 4 h on average, on-demand beside it;
            --market: prices and interruptions from a CSV of seconds,price,interruptions_per_hour instead
sudden      spot without the notice: what was done since the last checkpoint is done again
bound       what no autoscaler can beat (market_bound.py)
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from figures import here
from market_bound import Frontier, cost_at, frontier
from market_run import Bill, Setup, run_fixed, run_goodput, run_threshold
from simulated_market import NOTICE, SimulatedMarket, fixed, generate, read_market
from simulator.application import read_application
from simulator.engine import SimulationOptions
from simulator.workload import read_workload

from adaptdl_elastic.autoscaler.policy.allocate import allocate
from adaptdl_elastic.autoscaler.policy.policy_types import PolicySettings
from adaptdl_elastic.autoscaler.providers.base import Pool
from adaptdl_elastic.autoscaler.scaling.economics import ScalingSettings

NODES, SLOTS, PRICE = 16, 4, 1.0
SPOT_PRICE, HOURS_BETWEEN_INTERRUPTIONS = 0.3, 4.0
GOODPUT = (2.0, 3.0, 4.0, 5.0, 7.0, 10.0)  # worth of a job's hour, in slot hours at the on-demand price
SPOT = (5.0, 10.0)  # the same, at spot's price: time is worth relatively more
SUDDEN = (10.0,)
BOUND_SIZES = {"any": range(1, 65), "whole nodes": (1, 2, *range(SLOTS, 65, SLOTS))}
THRESHOLDS = ((0.5, 0.7), (0.6, 0.8), (0.7, 0.85), (0.75, 0.9), (0.8, 0.95), (0.85, 0.97), (0.9, 0.98))
QUICK_THRESHOLDS = THRESHOLDS[1::2]
KINDS = ("fixed", "threshold", "goodput", "spot", "sudden", "bound")

Task = tuple[str, int, tuple[float, ...]]


def setup(traces: Path, workload: int, pause: float) -> Setup:
    apps = {folder.name: read_application(folder) for folder in sorted((traces / "apps").iterdir())}
    jobs = read_workload(traces / "workloads" / f"workload-{workload}.csv")
    # CPU seconds, not a busy machine's, must never decide what is allocated
    settings = PolicySettings(time_limit=60.0)
    return Setup(
        jobs, apps, allocate, settings, SimulationOptions(pause=pause, interval=60.0, events=True), SLOTS
    )


def run(
    task: Task, traces: Path, pause: float, most: int, market: SimulatedMarket | None = None
) -> dict[str, Any]:
    """One simulation, in a process of its own."""
    kind, workload, numbers = task
    began = time.process_time()
    made = setup(traces, workload, pause)
    pool = Pool("on-demand", desired=0, maximum=most, slots=SLOTS, hourly_price=PRICE)
    markets = {"on-demand": fixed(PRICE)}
    settings = ScalingSettings(max_nodes=most, low=0.9, shrink_after=60.0)
    bill: Bill
    if kind == "bound":
        bounds = {name: frontier(made.workload, made.apps, SLOTS, s) for name, s in BOUND_SIZES.items()}
        found = {name: asdict(bound) for name, bound in bounds.items()}
        return {"kind": kind, "workload": workload, "bounds": found, "cpu_s": time.process_time() - began}
    if kind == "fixed":
        bill = run_fixed(made, NODES, PRICE)
    elif kind == "threshold":
        bill = run_threshold(made, [pool], markets, settings, *numbers)
    elif kind == "goodput":
        value = ScalingSettings(**{**asdict(settings), "slots_value": numbers[0]})
        bill = run_goodput(made, [pool], markets, value, f"goodput v={numbers[0]:g}")
    else:
        spot = Pool("spot", desired=0, maximum=most, slots=SLOTS, hourly_price=SPOT_PRICE, preemptible=True)
        made_up = generate(1, SPOT_PRICE, 1 / HOURS_BETWEEN_INTERRUPTIONS, cap=PRICE)
        markets["spot"] = made_up if market is None else market
        money = numbers[0] * SPOT_PRICE / SLOTS
        value = ScalingSettings(**{**asdict(settings), "hour_value": money})
        made = replace(made, notice=NOTICE if kind == "spot" else 0.0)
        bill = run_goodput(made, [spot, pool], markets, value, f"{kind} v={numbers[0]:g}")
    return {"kind": kind, "workload": workload, **asdict(bill), "cpu_s": time.process_time() - began}


def tasks(workloads: list[int], quick: bool, only: list[str] | None = None) -> list[Task]:
    found: list[Task] = []
    for workload in workloads:
        found += [("bound", workload, ()), ("fixed", workload, ())]
        found += [("goodput", workload, (v,)) for v in (GOODPUT[1::2] if quick else GOODPUT)]
        found += [("spot", workload, (v,)) for v in SPOT]
        found += [("sudden", workload, (v,)) for v in SUDDEN]
        found += [("threshold", workload, pair) for pair in (QUICK_THRESHOLDS if quick else THRESHOLDS)]
    return [task for task in found if not only or task[0] in (*only, "fixed")]


def summary(rows: list[dict[str, Any]], workload: int) -> dict[str, Any]:
    """The comparisons that are asked for, at the best point that keeps to the completion time."""

    def of(kind: str) -> list[dict[str, Any]]:
        return [row for row in rows if row["kind"] == kind and row["workload"] == workload]

    (base,) = of("fixed")
    found: dict[str, Any] = {"workload": workload, "fixed_cost": base["cost"], "fixed_jct": base["jct"]}
    found["spot"] = [
        {
            "name": row["name"],
            "cheaper": base["cost"] / row["cost"],
            "jct_ratio": row["jct"] / base["jct"],
            "interruptions": row["interruptions"],
        }
        for row in of("spot") + of("sudden")
    ]
    if not (of("bound") and of("goodput") and of("threshold")):
        return found
    bounds = {name: Frontier(**bound) for name, bound in of("bound")[0]["bounds"].items()}
    goodput = [(row["cost"], row["jct"]) for row in of("goodput")]
    threshold = [(row["cost"], row["jct"]) for row in of("threshold")]
    found["fixed_over_goodput_at_jct_1.1"] = base["cost"] / cost_at(goodput, base["jct"] * 1.1)
    found["saving_at_jct_1.1"] = 1 - cost_at(goodput, base["jct"] * 1.1) / base["cost"]
    found["nobody_saves_more_at_jct_1.1"] = {
        name: 1 - bound.least(base["jct"] * 1.1) / base["cost"] for name, bound in bounds.items()
    }
    found["threshold_points"] = [
        {
            "cost": c,
            "jct": t,
            "goodput_cost_at_that_jct": cost_at(goodput, t),
            "least_cost_at_that_jct": bounds["any"].least(t),
        }
        for c, t in threshold
    ]
    comparable = [
        1 - cost_at(goodput, t) / c for c, t in threshold if cost_at(goodput, t) == cost_at(goodput, t)
    ]
    found["saving_against_best_threshold"] = min(comparable, default=float("nan"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", type=Path, default=Path(__file__).parents[2] / "shared" / "traces")
    parser.add_argument("--workload", type=int, action="append", help="repeatable; default: 1 2 3 4 6")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds that a change costs a job")
    parser.add_argument("--max-nodes", type=int, default=64)
    parser.add_argument("--only", nargs="+", choices=KINDS, help="these beside the fixed cluster")
    parser.add_argument("--market", type=Path, help="CSV of the spot market")
    parser.add_argument("--quick", action="store_true", help="fewer points of each grid")
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    workloads = options.workload or [1, 2, 3, 4, 6]
    market = None if options.market is None else read_market(options.market)
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(options.workers) as pool:
        waiting = [
            pool.submit(run, task, options.traces, options.pause, options.max_nodes, market)
            for task in tasks(workloads, options.quick, options.only)
        ]
        for done in as_completed(waiting):
            row = done.result()
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
    found = [summary(rows, workload) for workload in workloads]
    print(json.dumps({**here(), "pause": options.pause, "rows": rows, "summary": found}, indent=1))


if __name__ == "__main__":
    main()
