"""Is the adaptive run as good as the best fixed batch size, found without a search?

    python benchmarks/time_to_accuracy.py [--data DIR] [--seeds 3] [--replicas 1 2]

Trains a small network to a fixed held-out accuracy in two evaluations in a row: once with the batch
size chosen while it trains, and with fixed batch sizes over the whole range, under each scaling rule.
Every run has the same learning rate for the initial batch size and the same progress to make (passes
at the initial batch size, as AdaScale counts them). All runs of a seed follow each other, so that each
sees every mood of the machine. Times are of training, without evaluation and without starting:

time     every step counted as what such a step takes: the lower quartile, over all runs, of rank 0's CPU
         time in steps at its batch size (between two sizes interpolated). It is what a quiet machine would
         take, as the runs would have gone there: what other programs do to single runs is not in it. Nor
         is what deciding costs, which is in
cpu      CPU time of rank 0, all its threads,
seconds  and wall time, as they were.

Samples are all that were processed. The network is an MLP: on one CPU core a sample of a convolutional
one (--net cnn, that of examples/image_classification.py) costs nearly the same at every batch size, and
there is little to choose.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import multiprocessing
import os
import queue
import signal
import socket
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SIZES = (16, 32, 64, 128, 256, 512)
RULES = ("AdaScale", "LinearScale", "SqrtScale", "LEGWScale")
WARM_UP = 0.1  # LEGWScale's, in epochs at the initial batch size


@dataclass(frozen=True)
class Job:
    """One training run. batch_size None: adaptive."""

    batch_size: int | None
    rule: str = "AdaScale"
    seed: int = 0
    replicas: int = 1
    data: str | None = None
    epochs: int = 6
    target: float = 0.88
    initial: int = SIZES[0]
    largest: int = SIZES[-1]
    net: str = "mlp"
    lr: float = 0.02

    @property
    def name(self) -> str:
        return "adaptive" if self.batch_size is None else f"{self.rule} {self.batch_size}"


@dataclass(frozen=True)
class Block:
    """Steps at one batch size in one pass, a tenth of a second of them or more."""

    batch: int
    epoch: int
    steps: int
    cpu: float
    wall: float


@dataclass
class Outcome:
    """What rank 0 saw. The first four are None when the target was never reached."""

    seconds: float | None = None
    cpu: float | None = None
    samples: int | None = None
    time: float | None = None  # needs the other runs
    epoch: int | None = None  # in which it was reached
    accuracy: float = 0.0  # mean of the last three evaluations
    curve: list[tuple[float, float, int, int]] = field(default_factory=list)  # CPU, accuracy, samples, batch
    blocks: list[Block] = field(default_factory=list)

    def steps(self) -> dict[int, int]:
        """By batch size, until the target was reached."""
        found: dict[int, int] = {}
        for block in self.blocks:
            if self.epoch is not None and block.epoch <= self.epoch:
                found[block.batch] = found.get(block.batch, 0) + block.steps
        return found


class Meter:
    """Cuts training into blocks."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self.seconds = self.cpu = 0.0

    def begin(self, epoch: int) -> None:
        """A pass begins, or a block."""
        self._epoch, self._steps = epoch, 0
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def step(self, batch: int) -> None:
        """A step has been taken."""
        if self._steps and batch != self._batch:
            self.end()
            self.begin(self._epoch)
        self._batch = batch
        self._steps += 1
        if time.perf_counter() - self._wall >= 0.1:
            self.end()
            self.begin(self._epoch)

    def end(self) -> None:
        """A pass ends, or a block."""
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        self.seconds += wall
        self.cpu += cpu
        if self._steps:
            self._outcome.blocks.append(Block(self._batch, self._epoch, self._steps, cpu, wall))


def mlp() -> nn.Module:
    """0.2 M parameters."""
    hidden = [nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(128, 10))


def scaling_rule(name: str, samples: int) -> Any:
    """The rule of this name, for a data set of so many samples."""
    from adaptdl_elastic.torch import scaling_rules

    if name == "LEGWScale":
        return scaling_rules.LEGWScale(WARM_UP, samples)
    return getattr(scaling_rules, name)()


def replica(job: Job) -> Outcome:
    sys.path.insert(0, str(EXAMPLES))
    from image_classification import Net, evaluate
    from image_data import load

    import adaptdl_elastic.torch as adl

    torch.set_num_threads(1)
    torch.manual_seed(job.seed)
    data = load(job.data)
    adl.init_process_group("gloo")
    loader = adl.AdaptiveDataLoader(data.train, batch_size=job.initial, shuffle=True)
    if job.batch_size is None:
        loader.autoscale_batch_size(job.largest, local_bsz_bounds=(8, job.largest))
    else:
        local = job.batch_size // job.replicas
        loader.autoscale_batch_size(job.batch_size)
        # Held at one size, with the scale counted from the initial one: not in the loader's public API.
        loader._elastic._local_bounds = (local, local)
    test = adl.AdaptiveDataLoader(data.test, batch_size=250)
    net = mlp() if job.net == "mlp" else Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=job.lr, momentum=0.9, weight_decay=5e-4)
    milestones = [int(job.epochs * 0.6), int(job.epochs * 0.85)]
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones, 0.2)
    rule = scaling_rule(job.rule, len(data.train))
    model = adl.AdaptiveDataParallel(net, optimizer, scheduler, scaling_rule=rule)
    outcome, samples, batch = Outcome(), 0, 0
    meter = Meter(outcome)
    for epoch in adl.remaining_epochs_until(job.epochs):
        model.train()
        meter.begin(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            samples += len(images) * job.replicas
            batch = loader.current_batch_size
            meter.step(batch)
        meter.end()
        _, accuracy = evaluate(model, test, "cpu")
        scheduler.step()
        outcome.curve.append((round(meter.cpu, 3), accuracy, samples, batch))
        held = len(outcome.curve) > 1 and min(a for _, a, *_ in outcome.curve[-2:]) >= job.target
        if held and outcome.seconds is None:
            outcome.seconds, outcome.cpu = meter.seconds, meter.cpu
            outcome.samples, outcome.epoch = samples, epoch
    outcome.accuracy = statistics.mean(a for _, a, *_ in outcome.curve[-3:])
    return outcome


def run(job: Job, timeout: float = 600.0) -> Outcome:
    """Start the replicas of a run by hand, as ADAPTDL_* describe it; rank 0's outcome."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {"ADAPTDL_REPORT_INTERVAL": "0.5"}
    if job.replicas > 1:
        environment.update(
            ADAPTDL_NUM_REPLICAS=str(job.replicas),
            ADAPTDL_MASTER_ADDR="127.0.0.1",
            ADAPTDL_MASTER_PORT=str(port),
        )
    context = multiprocessing.get_context("forkserver")  # imports torch once
    outcomes = context.Queue()
    started = [
        context.Process(
            target=start,
            args=(job, {**environment, "ADAPTDL_REPLICA_RANK": str(rank)}, outcomes),
            daemon=True,
        )
        for rank in range(job.replicas)
    ]
    for process in started:
        process.start()
    end, outcome = time.monotonic() + timeout, None
    try:
        while outcome is None:
            alive = all(process.exitcode in (None, 0) for process in started)
            try:
                outcome = outcomes.get(timeout=1)
            except queue.Empty:
                if not alive or time.monotonic() > end:
                    raise SystemExit(f"{job.name}: a replica failed, or took over {timeout:g} s") from None
        for process in started:
            process.join(30)
    finally:
        for process in started:
            process.kill()
    return outcome


def start(job: Job, environment: dict[str, str], outcomes: Any) -> None:
    """In a process of its own."""
    os.environ.update(environment)
    outcome = replica(job)
    if environment["ADAPTDL_REPLICA_RANK"] == "0":
        outcomes.put(outcome)


def tell_times(runs: list[tuple[Job, Outcome]], replicas: int) -> dict[int, float]:
    """Fill in `time` of the runs on so many replicas; milliseconds of a step by fixed batch size."""
    mine = [(job, outcome) for job, outcome in runs if job.replicas == replicas]
    found: dict[int, list[float]] = {}
    for job, outcome in mine:
        for block in outcome.blocks:
            if job.batch_size is not None and block.steps > 1:  # not where its size is changing
                found.setdefault(block.batch, []).append(block.cpu / block.steps)
    usual = {size: float(np.quantile(times, 0.25)) for size, times in sorted(found.items())}
    for _, outcome in mine:
        if outcome.epoch is not None and usual:
            steps = outcome.steps()
            each = np.interp(list(steps), list(usual), list(usual.values()))
            outcome.time = float(each @ list(steps.values()))
    return {size: 1e3 * seconds for size, seconds in usual.items()}


def summarise(runs: list[tuple[Job, Outcome]], replicas: int) -> dict[str, Any]:
    """Medians over seeds by configuration; adaptive against the best fixed and the initial one."""
    usual = tell_times(runs, replicas)
    table: dict[str, dict[str, float | None]] = {}
    names = dict.fromkeys(job.name for job, _ in runs if job.replicas == replicas)
    for name in names:
        outcomes = [o for job, o in runs if job.name == name and job.replicas == replicas]
        accuracies = [o.accuracy for o in outcomes]
        row: dict[str, float | None] = {
            "accuracy": statistics.mean(accuracies),
            "accuracy_sd": statistics.stdev(accuracies) if len(accuracies) > 1 else None,
        }
        for key in ("time", "cpu", "seconds", "samples"):
            values = [getattr(o, key) for o in outcomes]
            median = statistics.median(math.inf if value is None else value for value in values)
            row[key] = median if median < math.inf else None
        table[name] = row
    result: dict[str, Any] = {"replicas": replicas, "step_ms": usual, "table": table}
    fixed = {name: row for name, row in table.items() if name != "adaptive"}
    for key in ("time", "cpu", "seconds", "samples"):
        reached = {name: row[key] for name, row in fixed.items() if row[key] is not None}
        adaptive = table["adaptive"][key]
        if not reached or adaptive is None:
            continue
        best = min(reached, key=lambda name: reached[name])
        result[f"{key}_vs_best_fixed"] = {"best": best, "ratio": adaptive / reached[best]}
        initial = fixed.get(f"{runs[0][0].rule} {runs[0][0].initial}", {}).get(key)
        if initial is not None:
            result[f"{key}_vs_initial"] = adaptive / initial
    best_accuracy = max((row["accuracy"] for row in fixed.values()), default=None)
    result["accuracy"] = {"adaptive": table["adaptive"]["accuracy"], "best_fixed": best_accuracy}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", help="folder with Fashion-MNIST idx files (default: what is there)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--sizes", type=int, nargs="*", default=list(SIZES))
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--other-sizes", type=int, nargs="*", help="for the rules after the first")
    parser.add_argument("--epochs", type=int, default=Job.epochs)
    parser.add_argument("--target", type=float, default=Job.target, help="held-out accuracy")
    parser.add_argument("--initial", type=int, default=SIZES[0], help="batch size that --lr is for")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--net", choices=("mlp", "cnn"), default="mlp")
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time")
    args = parser.parse_args()
    multiprocessing.set_forkserver_preload(["adaptdl_elastic.torch", "sklearn.datasets"])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and take the replicas along
    jobs: list[Job] = []
    common = {
        "data": args.data, "epochs": args.epochs, "target": args.target, "initial": args.initial,
        "largest": max(args.sizes or SIZES), "lr": args.lr, "net": args.net,
    }  # fmt: skip
    first, *others = args.rules
    bases = {n: [Job(None, first, seed, n, **common) for seed in range(args.seeds)] for n in args.replicas}
    for replicas in args.replicas:  # what matters most comes first
        for base in bases[replicas]:
            jobs.append(base)
            jobs += [dataclasses.replace(base, batch_size=size) for size in args.sizes]
    sizes = args.sizes if args.other_sizes is None else args.other_sizes
    for base in (base for replicas in args.replicas for base in bases[replicas]):
        # At the initial batch size the rules are the same.
        above = [size for size in sizes if size > base.initial]
        jobs += [dataclasses.replace(base, batch_size=size, rule=rule) for size in above for rule in others]
    runs: list[tuple[Job, Outcome]] = []
    with ThreadPoolExecutor(args.parallel) as pool:
        pending = {pool.submit(run, job): job for job in jobs}
        for done in as_completed(pending):
            job, outcome = pending[done], done.result()
            runs.append((job, outcome))
            reached = (
                "never" if outcome.cpu is None else f"{outcome.cpu:.1f} s CPU, {outcome.samples} samples"
            )
            line = (
                f"{job.replicas} replica(s), seed {job.seed}, {job.name}: {reached}, {outcome.accuracy:.4f}"
            )
            print(line, file=sys.stderr, flush=True)
    summaries = [summarise(runs, replicas) for replicas in args.replicas]
    everything = [
        {**asdict(job), **asdict(outcome), "blocks": None, "steps": outcome.steps()} for job, outcome in runs
    ]
    print(json.dumps({"target": args.target, "summaries": summaries, "runs": everything}, indent=1))


if __name__ == "__main__":
    main()
