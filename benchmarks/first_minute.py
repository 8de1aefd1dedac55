"""Compare adaptive batch sizes with fixed ones and with plain torch, on short jobs of four kinds.

    python benchmarks/first_minute.py [--out benchmarks/results/first_minute.jsonl] [--seeds 2] [--table]

Each run trains one replica on one thread until its held-out loss was at most the task's target in two
evaluations in a row. Times are seconds of training from the first step on, without evaluation. `plain` is
torch without this library at the initial batch size; `fixed N` is the library held at one size, with the
learning rate scaled by AdaScale. Finished runs are appended to the file, and a run that is in it is not
repeated. All runs of a seed follow each other, in random order.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 20.0  # seconds of a run
Data = tuple[TensorDataset, TensorDataset]


def digits() -> Data:
    """1,437 images of 8 × 8 for training and 360 held out, of scikit-learn."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    pairs = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[360:], order[:360]
    return TensorDataset(*(part[train] for part in pairs)), TensorDataset(*(part[test] for part in pairs))


def text() -> Data:
    """Blocks of 32 bytes of this project's documentation, and the bytes that follow each."""
    raw = b"".join(page.read_bytes() for page in sorted((ROOT / "docs").glob("*.md")))
    codes = torch.tensor([min(byte, 127) for byte in raw])
    starts = torch.randperm(len(codes) - 33, generator=torch.Generator().manual_seed(0))[:2304]
    blocks = torch.stack([codes[start : start + 33] for start in starts.tolist()])
    inputs, targets = blocks[:, :-1].contiguous(), blocks[:, 1:].contiguous()
    return TensorDataset(inputs[256:], targets[256:]), TensorDataset(inputs[:256], targets[:256])


class Characters(nn.Module):
    """GPT of two layers of width 64: 0.12 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.codes, self.places = nn.Embedding(128, 64), nn.Embedding(32, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 128)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(32))

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        found = self.codes(codes) + self.places.weight
        scores: torch.Tensor = self.head(self.layers(found, mask=self.mask))
        return scores.transpose(1, 2)


def mlp() -> nn.Module:
    """0.3 M parameters."""
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=5e-4)


@dataclass(frozen=True)
class Task:
    """A task; a step waits for `wait[0]` seconds and for `wait[1]` per sample."""

    data: Callable[[], Data]
    net: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    target: float  # held-out loss
    sizes: tuple[int, int, int]  # fixed ones; the first is the initial size
    wait: tuple[float, float] = (0.0, 0.0)


TASKS = {
    "digits, MLP": Task(digits, mlp, sgd, 0.12, (16, 64, 256)),
    "characters, GPT, AdamW": Task(text, Characters, adamw, 2.7, (8, 32, 128)),
    "digits, 0.5 ms a sample": Task(digits, mlp, sgd, 0.15, (16, 64, 256), (0.0, 0.0005)),
    "digits, 20 ms a step": Task(digits, mlp, sgd, 0.15, (16, 64, 256), (0.02, 0.0)),
}


def train(name: str, way: str, seed: int) -> dict[str, Any]:
    """Train to the target; the seconds that it took (None: not within the limit) and the last batch size."""
    task = TASKS[name]
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    data, held = task.data()
    inputs, targets = held.tensors
    net, initial = task.net(), task.sizes[0]
    optimizer = task.optimizer(net)
    model, loader, epochs, size = net, None, iter(range(10**6)), lambda: initial
    if way == "plain":
        loader = DataLoader(data, initial, shuffle=True)
    else:
        import adaptdl_elastic.torch as adl

        adl.init_process_group("gloo")
        loader = adl.AdaptiveDataLoader(data, batch_size=initial, shuffle=True)
        fixed = int(way.removeprefix("fixed ")) if way != "adaptive" else 0
        loader.autoscale_batch_size(fixed or 512)
        if fixed:
            # Held at one size, with the scale counted from the initial one: not in the loader's public API.
            loader._elastic._local_bounds = (fixed, fixed)
        model, epochs = adl.AdaptiveDataParallel(net, optimizer), adl.remaining_epochs_until(10**6)
        size = lambda: loader.current_batch_size  # noqa: E731
    spent, below = 0.0, 0
    for _ in epochs:
        net.train()
        began = time.perf_counter()
        for batch, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch), labels).backward()
            optimizer.step()
            if any(task.wait):
                time.sleep(task.wait[0] + task.wait[1] * len(batch))
        spent += time.perf_counter() - began
        net.eval()
        with torch.no_grad():
            below = below + 1 if nn.functional.cross_entropy(net(inputs), targets) <= task.target else 0
        if below == 2 or spent > LIMIT:
            break
    return {"seconds": spent if below == 2 else None, "batch": size()}


def run(name: str, way: str, seed: int, results: Any) -> None:
    """Train in this process, which was started for it."""
    os.environ["ADAPTDL_REPORT_INTERVAL"] = "2"
    results.put(train(name, way, seed))


def table(found: list[dict[str, Any]]) -> str:
    """Return the table of the results: medians over seeds, in seconds."""
    lines = [
        "| task | plain | fixed | adaptive | ends at | to plain | to the best fixed |",
        "|---|" + "---|" * 6,
    ]
    for name, task in TASKS.items():
        ways = {way: [r for r in found if (r["task"], r["way"]) == (name, way)] for way in ways_of(task)}
        if not all(ways.values()):
            continue
        median = {
            way: statistics.median(r["seconds"] or float("inf") for r in rows) for way, rows in ways.items()
        }
        fixed = {way.removeprefix("fixed "): s for way, s in median.items() if way.startswith("fixed")}
        ends = "/".join(str(r["batch"]) for r in ways["adaptive"])
        goal, adaptive = 1.05 + 0.3 / median["plain"], median["adaptive"]
        lines.append(
            f"| {name} | {median['plain']:.2f} | "
            + ", ".join(f"{size}: {seconds:.2f}" for size, seconds in fixed.items())
            + f" | {adaptive:.2f} | {ends} | {adaptive / median['plain']:.2f} (≤ {goal:.2f})"
            f" | {adaptive / min(fixed.values()):.2f} (≤ 1.25) |"
        )
    return "\n".join(lines)


def ways_of(task: Task) -> list[str]:
    """Return the ways to train a task that are compared."""
    return ["plain", *(f"fixed {size}" for size in task.sizes), "adaptive"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("/tmp/first_minute.jsonl"))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--table", action="store_true", help="print the table of what was measured, and end")
    arguments = parser.parse_args()
    found = []
    if arguments.out.exists():
        found = [json.loads(line) for line in arguments.out.read_text().splitlines()]
    done = {(r["task"], r["way"], r["seed"]) for r in found}
    context = multiprocessing.get_context("spawn")
    for seed in range(0 if arguments.table else arguments.seeds):
        todo = [(name, way) for name, task in TASKS.items() for way in ways_of(task)]
        random.Random(seed).shuffle(todo)
        for name, way in todo:
            if (name, way, seed) in done:
                continue
            results = context.Queue()
            process = context.Process(target=partial(run, name, way, seed, results), daemon=True)
            process.start()
            found.append({"task": name, "way": way, "seed": seed, **results.get(timeout=6 * LIMIT)})
            process.join()
            print(found[-1], "load", os.getloadavg()[0], file=sys.stderr)
            with arguments.out.open("a") as file:
                file.write(json.dumps(found[-1]) + "\n")
    print(table(found))


if __name__ == "__main__":
    main()
