"""How long training pauses when the number of replicas changes, and where the time goes.

    python benchmarks/rescale_pause.py --mode restart --model cnn
    python benchmarks/rescale_pause.py --mode inplace --params 10M --repeats 5
    python benchmarks/rescale_pause.py --mode inplace --model fsdp --params 10M --repeats 5
    python benchmarks/rescale_pause.py --mode recover --params 10M --repeats 5

A real job runs under `adaptdl-run` on this machine and is rescaled 1 → 2 → 1 → … by hand. The pause is the
time from the last step of one size to the first of the next, minus a normal step, as rank 0 measures it.
For a restart it is broken down by what the agent and the replicas write down on the way. With `recover`
one of two replicas is killed (rank 1, rank 0, rank 1, …) and another one takes its place: the pause is the
time from the kill to the next finished step of the survivor. Memory is what rank 0 has resident while it
is alone, after the first change and after the last.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from figures import here

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

SCRIPT = """
import functools, os, sys, time, torch
from torch import nn
import adaptdl_elastic.torch as adl
from torch.utils.data import TensorDataset
marks = {"script": time.time()}
sys.path.insert(0, sys.argv[1])
device = sys.argv[5]
if device == "cuda":
    # Several ranks share a GPU if NCCL takes each for a host of its own.
    os.environ.update(NCCL_HOSTID=str(os.getpid()), NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
adl.init_process_group("nccl" if device == "cuda" else "gloo")
if device == "cuda":
    from adaptdl_elastic import _session
    from adaptdl_elastic.torch._process_group import capability
    session = _session.current()
    known = capability.known_capability(session)
    while known and not (session.joining or session.consensus.round_open or "failed" in known.why):
        time.sleep(0.01)
marks["group"] = time.time()
torch.manual_seed(0)
kind, size = sys.argv[2], int(sys.argv[3])
if kind == "cnn":
    from step_overhead import cnn
    model, shape = cnn(), (3, 32, 32)
    head = lambda out: out.float().mean()
else:
    width = max(16, int((size / 4) ** 0.5))
    model, shape = nn.Sequential(*[nn.Linear(width, width) for _ in range(4)]), (width,)
    head = lambda out: out.square().mean()
model.to(device)
if kind in ("fsdp", "copies"):
    from torch.distributed.fsdp import fully_shard
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    wrap = functools.partial(adl.AdaptiveFSDP, copies=2 if kind == "copies" else 1)
else:
    optimizer, wrap = torch.optim.SGD(model.parameters(), lr=1e-4), adl.AdaptiveDataParallel
loader = adl.AdaptiveDataLoader(TensorDataset(torch.randn(256, *shape)), batch_size=8, shuffle=True)
model = wrap(model, optimizer)
marks["model"] = time.time()
log = open(os.path.join(sys.argv[4], f"steps-{os.getpid()}"), "w", buffering=1)
first = True
for epoch in adl.remaining_epochs_until(10**6):
    for (x,) in loader:
        optimizer.zero_grad(); head(model(x.to(device))).backward(); optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        now = time.time()
        if first:
            print("marks", {**marks, "first_step": now}, file=log)
            first = False
        resident = int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE")
        if device == "cuda":
            resident = torch.cuda.memory_allocated()
        print(now, os.environ["WORLD_SIZE"], os.environ["RANK"], resident, file=log)
"""


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run the job, change its size, and gather the pauses."""
    from elastic_run import ElasticRun

    with tempfile.TemporaryDirectory(prefix="rescale-pause-") as directory:
        script = Path(directory) / "pause_job.py"
        script.write_text(SCRIPT)
        arguments = [
            *(
                "--standalone",
                "--no-autoscale",
                "--nproc-per-node=1:2",
                f"--rescale={'restart' if args.mode == 'restart' else 'auto'}",
            ),
            *("--rdzv-id=pause", "--checkpoint-path=saved", "--checkpoint-interval=1000"),
            *(str(script), str(ROOT / "benchmarks"), args.model, str(args.size), directory, "cpu"),
        ]
        with ElasticRun(arguments, Path(directory)) as run:
            run.wait_for_event("generation", timeout=180)
            changes = kill_repeatedly(run, args) if args.mode == "recover" else change_repeatedly(run, args)
            settle(run, args.settle)
            run.process.kill()
            run.process.wait()
            started = {e["generation"]: e["time"] for e in run.of("started")}
            saved = [(e["time"], e["seconds"]) for e in run.of("checkpoint")]
        result = evaluate(changes, started, saved, read_steps(Path(directory)), args)
        return {**result, "resident_mb": resident(Path(directory))}


def change_repeatedly(run: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    """1 → 2 → 1 → …, by hand."""
    replicas, changes = 1, []
    for _ in range(2 * args.repeats):
        settle(run, args.settle)
        replicas = 3 - replicas
        changes.append(scale(run, replicas))
    return changes


def scale(run: Any, replicas: int) -> dict[str, Any]:
    """`adaptdl scale`, to its end."""
    seen, asked = len(run.events), time.time()
    done = run.adaptdl("scale", "pause", "--replicas", str(replicas))
    assert done.returncode == 0, done.stderr
    event = run.wait_for_event("generation", after=seen, replicas=replicas, timeout=180)
    return {**event, "asked": asked}


def kill_repeatedly(run: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Kill one of two, wait until the other one goes on, and until there are two again."""
    changes = [scale(run, 2)]
    for number in range(args.repeats):
        settle(run, args.settle)
        pids, seen = run.of("started")[-1]["pids"], len(run.events)
        killed = time.time()
        os.kill(pids[str((number + 1) % 2)], signal.SIGKILL)
        event = run.wait_for_event("generation", after=seen, replicas=1, timeout=180)
        assert event["transition"] == "recover", event
        changes.append({**event, "asked": killed, "killed": True})
        # a newcomer that is killed again limits the size until a person asks for more
        assert run.adaptdl("scale", "pause", "--replicas", "2").returncode == 0
        changes.append({**run.wait_for_event("generation", after=seen, replicas=2), "asked": event["time"]})
    return changes


def settle(run: Any, seconds: float) -> None:
    """Let it train: until the replicas have written steps for so long."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert run.process.poll() is None, run.text()
        time.sleep(0.1)


def read_steps(directory: Path) -> tuple[list[tuple[float, int]], list[dict[str, float]]]:
    """(time, world size) of every step of rank 0, and each process's marks."""
    steps, marks = [], []
    for path in directory.glob("steps-*"):
        for line in path.read_text().splitlines():
            if line.startswith("marks"):
                marks.append({k: float(v) for k, v in re.findall(r"'(\w+)': ([\d.]+)", line)})
            else:
                parts = line.split()
                if len(parts) == 4 and parts[2] == "0":
                    steps.append((float(parts[0]), int(parts[1])))
    return sorted(steps), sorted(marks, key=lambda m: m["script"])


def resident(directory: Path) -> dict[str, float]:
    """MB of rank 0 while alone: a while after the job's first change back to one replica, and at the end."""
    alone: list[tuple[float, float]] = []
    changed = False
    for path in directory.glob("steps-*"):
        for line in path.read_text().splitlines():
            parts = line.split()
            if len(parts) != 4:
                continue
            changed = changed or parts[1] == "2"
            if changed and parts[1:3] == ["1", "0"]:
                alone.append((float(parts[0]), int(parts[3]) / 1e6))
    values = [megabytes for _, megabytes in sorted(alone)]
    few = max(1, len(values) // 20)
    if not values:
        return {}
    return {
        "first": round(statistics.median(values[:few]), 1),
        "last": round(statistics.median(values[-few:]), 1),
    }


def evaluate(
    changes: list[dict[str, Any]],
    started: dict[int, float],
    saved: list[tuple[float, float]],
    read: tuple[list[tuple[float, int]], list[dict[str, float]]],
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Medians by direction, with a breakdown."""
    steps, marks = read
    pauses: dict[str, list[float]] = {"1->2": [], "kill" if args.mode == "recover" else "2->1": []}
    parts: list[dict[str, float]] = []
    normal = statistics.median(b[0] - a[0] for a, b in itertools.pairwise(steps))
    for change in changes:
        end = first_of(steps, change)
        if end is None:
            continue
        before, after = steps[end - 1][0], steps[end][0]
        if change.get("killed"):
            pauses["kill"].append(after - change["asked"])
            continue
        pauses["1->2" if change["replicas"] == 2 else "2->1"].append(max(0.0, after - before - normal))
        if args.mode == "restart":
            parts.append(breakdown(before, after, started[change["generation"]], saved, marks))
    result: dict[str, Any] = {
        "mode": args.mode,
        "model": args.model,
        "parameters": args.size if args.model != "cnn" else 2_700_000,
        "step_s": round(normal, 4),
        **here(),
    }
    for direction, values in pauses.items():
        result[direction] = summary(values)
    if parts:
        result["breakdown_s"] = {
            name: round(statistics.median(part[name] for part in parts), 3) for name in parts[0]
        }
    return result


def first_of(steps: list[tuple[float, int]], change: dict[str, Any]) -> int | None:
    """Index of the first step of rank 0 in the generation that a change began."""
    near = [i for i, (at, size) in enumerate(steps) if at >= change["asked"] and size == change["replicas"]]
    return near[0] if near and near[0] > 0 else None


def breakdown(
    before: float,
    after: float,
    started: float,
    saved: list[tuple[float, float]],
    marks: list[dict[str, float]],
) -> dict[str, float]:
    """Where a restart's pause went, in seconds, in the order in which it happens."""
    mine = [m for m in marks if before < m["script"] <= after]
    last = max(mine, key=lambda m: m["script"]) if mine else None
    save = sum(seconds for at, seconds in saved if before <= at <= after)
    parts = {"stop_and_save": started - before - 0.0, "of_which_save": save}
    if last is not None:
        parts |= {
            "script_begins": last["script"] - started,
            "process_group": last["group"] - last["script"],
            "model_and_load": last["model"] - last["group"],
            "first_step": after - last["model"],
        }
    return parts


def summary(values: list[float]) -> dict[str, Any]:
    """Median and extremes."""
    if not values:
        return {"runs": 0}
    return {
        "median_s": round(statistics.median(values), 3),
        "min_s": round(min(values), 3),
        "max_s": round(max(values), 3),
        "runs": len(values),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mode", choices=["restart", "inplace", "recover"], default="restart")
    parser.add_argument("--model", choices=["cnn", "linear", "fsdp", "copies"], default=None)
    parser.add_argument(
        "--params",
        default="10M",
        help="size of the linear model, as 10M or 100M; fsdp: sharded, with AdamW; copies: two of each part",
    )
    parser.add_argument("--repeats", type=int, default=5, help="changes in each direction")
    parser.add_argument("--settle", type=float, default=4.0, help="seconds of training between changes")
    args = parser.parse_args()
    args.size = int(float(args.params.rstrip("MK")) * {"M": 1e6, "K": 1e3}.get(args.params[-1], 1))
    args.model = args.model or ("cnn" if args.mode == "restart" else "linear")
    return args


def main() -> int:
    print(json.dumps(measure(parse()), indent=2))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.TimeoutExpired as error:
        sys.exit(f"rescale_pause: {error}")
