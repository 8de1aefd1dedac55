"""A job whose replicas come, go and die at random moments, and what is left of its arithmetic.

    python benchmarks/soak.py --minutes 15          (make soak MINUTES=15)

Under `adaptdl-run` on this machine a script trains one weight per sample. Events come at exponentially
distributed times: `adaptdl scale` to another number of replicas, or `kill -9` of a random one, also in the
middle of a change. At the end every sample must have moved its weight once per epoch, no more and no less,
and the weights of all replicas must be equal.

With `--habits` the script also has what real ones have: an exponential average of its parameters (torch's
`AveragedModel`), a scheduler that is stepped with every batch, a GradScaler, gradient accumulation on few
replicas, and two loader processes. Each of them must have seen every step once; the average must be that of
the weights' sums, which do not depend on the order of the samples.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

DECAY = 0.99  # of the average of the parameters
SIZE, BATCH, MOST = 1200, 12, 4  # up to 4 replicas divide the batch: every window is a full one

SCRIPT = f"""
import json, os, sys, time, torch
import adaptdl_elastic.torch as adl
from adaptdl_elastic.checkpoint import TensorState, load_state
from adaptdl_elastic.torch.scaling_rules import LinearScale
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

class Average(TensorState):
    def __init__(self, model):
        super().__init__("average")
        self.model = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn({DECAY}))
        load_state(self)
    def state_dict(self):
        return self.model.state_dict()
    def load_state_dict(self, state_dict):
        self.model.load_state_dict(state_dict)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros({SIZE}, dtype=torch.float64))
    def forward(self, index):
        return self.w[index]

out, habits = sys.argv[1], "habits" in sys.argv
adl.init_process_group("gloo")
loader = adl.AdaptiveDataLoader(
    range({SIZE}), batch_size={BATCH}, shuffle=True, num_workers=2 if habits else 0, persistent_workers=habits
)
if habits:  # on one replica in two parts
    loader.autoscale_batch_size({BATCH}, local_bsz_bounds=(1, {BATCH // 2}), gradient_accumulation=True)
evaluation = adl.AdaptiveDataLoader(range({SIZE}), batch_size=60)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0) if habits else None
scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=10**9, enabled=habits)
average = Average(model) if habits else None
model = adl.AdaptiveDataParallel(model, optimizer, scheduler, scaler, scaling_rule=LinearScale())
for epoch in adl.remaining_epochs_until(10**9):
    model.train()
    for batch in loader:
        optimizer.zero_grad()
        scaler.scale(model(batch).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        if habits and adl.current_dataloader().is_optim_step():
            scheduler.step()
            average.model.update_parameters(model.module)
        time.sleep(0.01)
    model.eval()
    stats = adl.Accumulator()
    for batch in evaluation:
        stats["seen"] += len(batch)
        stats["finish"] += os.path.exists(os.path.join(out, "finish"))
    with stats.synchronized():
        assert stats["seen"] == {SIZE}, stats
        if stats["finish"]:
            break
seen = None
if habits:
    average = average.model
    seen = int(average.n_averaged), average.module.w.sum().item(), scheduler.last_epoch, scaler.get_scale()
torch.save((epoch + 1, model.module.w.detach(), seen), os.path.join(out, f"weights-{{adl.rank()}}"))
"""


def soak(minutes: float, between: float, seed: int, habits: bool = False) -> dict[str, Any]:
    """Run it; AssertionError when anything is not as it must be."""
    import torch
    from elastic_run import ElasticRun

    choose, job = random.Random(seed), "soak-habits" if habits else "soak"
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        directory = Path(folder)
        script = directory / "soak_job.py"
        script.write_text(SCRIPT)
        arguments = [
            *("--standalone", "--no-autoscale", f"--nproc-per-node=1:{MOST}", "--max-restarts=1000"),
            *(f"--rdzv-id={job}", "--checkpoint-path=saved", "--checkpoint-interval=30"),
            *(str(script), folder, *(["habits"] if habits else [])),
        ]
        did: Counter[str] = Counter()
        with ElasticRun(arguments, directory) as run:
            run.wait_for_event("generation", timeout=180)
            end = time.monotonic() + 60 * minutes
            while (now := time.monotonic()) < end:
                time.sleep(min(choose.expovariate(1 / between), max(0.0, end - now)))
                did[disturb(run, job, choose)] += 1
            (directory / "finish").touch()
            code = run.wait(300)
            text = run.text()
            assert code == 0, text
            generations, lost = run.of("generation"), run.of("replica_lost")
        saved = [torch.load(path) for path in sorted(directory.glob("weights-*"))]
    epochs, weights, seen = saved[0]
    for other_epochs, other, other_seen in saved[1:]:
        assert (other_epochs, other.tolist(), other_seen) == (epochs, weights.tolist(), seen), (
            "replicas differ"
        )
    torch.testing.assert_close(-weights * BATCH / epochs, torch.ones(SIZE, dtype=torch.float64))
    steps = epochs * SIZE // BATCH
    if habits:
        averaged, average, scheduled, scale = seen
        assert (averaged, scheduled, scale) == (steps, steps, 4.0), seen
        assert abs(average - averaged_sum(steps)) < 1e-6 * steps, (average, averaged_sum(steps))
    return {
        "minutes": minutes,
        "seed": seed,
        "habits": habits,
        "events": dict(did),
        "epochs": epochs,
        "steps": steps,
        "replicas_at_the_end": len(saved),
        "replicas_lost": len(lost),
        **summary(generations),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "date": time.strftime("%Y-%m-%d"),
    }


def averaged_sum(steps: int) -> float:
    """Return the average, as AveragedModel makes it, of the weights' sum, which is -t after step t."""
    average = -1.0
    for step in range(2, steps + 1):
        average = DECAY * average - (1 - DECAY) * step
    return average


def disturb(run: Any, job: str, choose: random.Random) -> str:
    """One random event; what it was."""
    pids = run.of("started")[-1]["pids"].values()
    replicas = [pid for pid in pids if psutil.pid_exists(pid)]
    if len(replicas) > 1 and choose.random() < 0.5:
        with contextlib.suppress(ProcessLookupError):
            os.kill(choose.choice(replicas), signal.SIGKILL)
        return "kill"
    wanted = choose.choice([n for n in range(1, MOST + 1) if n != len(replicas)])
    done = run.adaptdl("scale", job, "--replicas", str(wanted))
    assert done.returncode == 0, done.stderr + run.text()[-3000:]
    return "more" if wanted > len(replicas) else "fewer"


def summary(generations: list[dict[str, Any]]) -> dict[str, Any]:
    """How many changes of which kind came about, and their pauses."""
    kinds: Counter[str] = Counter()
    pauses: dict[str, list[float]] = {}
    joins = before = 0
    for event in generations:
        kind = event["transition"]
        kinds[kind] += 1
        joins += max(0, event["replicas"] - before)
        before = event["replicas"]
        if event.get("pause_s") is not None:
            pauses.setdefault(kind, []).append(event["pause_s"])
    return {
        "generations": dict(kinds),
        "joins_completed": joins,
        "median_pause_s": {kind: round(statistics.median(values), 3) for kind, values in pauses.items()},
        "longest_pause_s": {kind: round(max(values), 3) for kind, values in pauses.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--between", type=float, default=5.0, help="mean seconds between two events")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--habits", action="store_true", help="with an average, a scheduler, a scaler ...")
    args = parser.parse_args()
    result = soak(args.minutes, args.between, args.seed, args.habits)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
