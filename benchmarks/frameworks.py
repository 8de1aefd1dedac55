"""Does an adaptive batch size make Trainer and Lightning faster, at the same quality?

    python benchmarks/frameworks.py [--seeds 3] [--only lightning] [--out frameworks.json] [--table]

Needs transformers and lightning (`make install-integrations`). Each seed trains twice in a process of its
own, on one core: with the batch size that the script writes, and with `max_batch_size`. Lightning trains a
convolutional network on scikit-learn's digits, Trainer a small GPT on the characters of Python's help. Both
make the same progress, in steps of the written batch, and evaluate twenty times. The target is the largest
loss at the end of a fixed run; a run reaches it at the first evaluation that is as good. `CPU s` is the CPU
time of training until then, without evaluation; the ratio of seconds is by the clock. A run that is in the
file is not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import pydoc_data.topics
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EVALUATIONS = 20
WAYS = ("fixed", "adaptive")


class Meter:
    """Times of training, without evaluation, and what evaluations found."""

    def __init__(self) -> None:
        self.evaluations: list[tuple[float, float, float]] = []  # CPU, seconds, loss
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def pause(self) -> None:
        """An evaluation begins."""
        self._trained = time.process_time() - self._cpu, time.perf_counter() - self._wall

    def go_on(self, loss: float) -> None:
        """An evaluation has ended."""
        cpu, wall = self._trained
        self.evaluations.append((cpu, wall, loss))
        self._cpu, self._wall = time.process_time() - cpu, time.perf_counter() - wall


def with_lightning(seed: int, adaptive: bool) -> Meter:
    """Train the digits."""
    import lightning
    from sklearn.datasets import load_digits

    from adaptdl_elastic.torch.frameworks.lightning import ElasticStrategy

    images, labels = load_digits(return_X_y=True)
    data = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
    kept = [TensorDataset(data[part], torch.tensor(labels)[part]) for part in (order[:1400], order[1400:])]
    meter = Meter()

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            convolutions = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)]
            self.layers = nn.Sequential(*convolutions, nn.ReLU(), nn.Flatten(), nn.Linear(1024, 10))

        def training_step(self, batch: Any, index: int) -> Any:
            return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

        def on_validation_epoch_start(self) -> None:
            meter.pause()

        def validation_step(self, batch: Any, index: int) -> None:
            self.found = float(nn.functional.cross_entropy(self.layers(batch[0]), batch[1]))

        def on_validation_epoch_end(self) -> None:
            meter.go_on(self.found)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.005, momentum=0.9)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EVALUATIONS)
            return [optimizer], [schedule]

    sizes: dict[str, Any] = {"max_batch_size": 256, "local_bsz_bounds": (8, 256)} if adaptive else {}
    trainer = lightning.Trainer(
        max_epochs=EVALUATIONS, strategy=ElasticStrategy(**sizes), enable_progress_bar=False, logger=False,
        enable_checkpointing=False, enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(Net(), DataLoader(kept[0], batch_size=8, shuffle=True), DataLoader(kept[1], batch_size=400))
    return meter


def with_trainer(seed: int, adaptive: bool) -> Meter:
    """Train the GPT."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from adaptdl_elastic.torch.frameworks.huggingface import Trainer, TrainingArguments

    text = "".join(pydoc_data.topics.topics.values())
    letters = {letter: number for number, letter in enumerate(sorted(set(text)))}
    codes = torch.tensor([letters[letter] for letter in text])
    rows = codes[: len(codes) // 33 * 33].reshape(-1, 33)
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    meter, steps = Meter(), 2000

    class Rows(torch.utils.data.Dataset[dict[str, Any]]):
        def __init__(self, rows: Any) -> None:
            self.rows = rows

        def __len__(self) -> int:
            return len(self.rows)

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"input_ids": self.rows[index], "labels": self.rows[index]}

    class Timed(Trainer):
        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            meter.pause()
            found = super().evaluate(*args, **kwargs)
            meter.go_on(found["eval_loss"])
            return found

    sizes: dict[str, Any] = {"max_batch_size": 128, "local_bsz_bounds": (4, 128)} if adaptive else {}
    args = TrainingArguments(
        output_dir=os.environ["ADAPTDL_CHECKPOINT_PATH"], per_device_train_batch_size=4, max_steps=steps,
        learning_rate=1e-3, warmup_steps=100, eval_strategy="steps", eval_steps=steps // EVALUATIONS,
        per_device_eval_batch_size=200, save_strategy="no", logging_strategy="no", report_to=[], seed=seed,
        disable_tqdm=True, **sizes,
    )  # fmt: skip
    config = GPT2Config(vocab_size=len(letters), n_positions=33, n_embd=64, n_layer=2, n_head=4)
    trainer = Timed(
        GPT2LMHeadModel(config), args, train_dataset=Rows(rows[400:]), eval_dataset=Rows(rows[:400])
    )
    trainer.train()
    return meter


TASKS = {"lightning": with_lightning, "trainer": with_trainer}


def run(task: str, seed: int, way: str) -> list[tuple[float, float, float]]:
    """Train in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        environ = {
            **os.environ,
            "ADAPTDL_CHECKPOINT_PATH": f"{folder}/saved",
            "ADAPTDL_CHECKPOINT_INTERVAL": "0",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, __file__, "--run", task, str(seed), way, f"{folder}/found"]
        subprocess.run(command, env=environ, check=True, stdout=sys.stderr)
        found: list[tuple[float, float, float]] = json.loads(Path(f"{folder}/found").read_text())
    return found


def reached(evaluations: list[tuple[float, float, float]], target: float) -> tuple[float, float]:
    """Return CPU time and seconds until the target; infinite if it was not reached."""
    return next(((cpu, wall) for cpu, wall, loss in evaluations if loss <= target), (float("inf"),) * 2)


def row(task: str, runs: dict[str, Any]) -> str:
    """Return the row of a task in the table."""
    told = {way: [runs[name] for name in sorted(runs) if name.endswith(way)] for way in WAYS}
    last = {way: [one[-1][2] for one in told[way]] for way in WAYS}
    target = max(last["fixed"])
    times = {way: [reached(one, target) for one in told[way]] for way in WAYS}
    cpu, wall = ({way: statistics.median(one[i] for one in times[way]) for way in WAYS} for i in (0, 1))
    losses = [
        f"{statistics.mean(last[way]):.4f} ({min(last[way]):.4f} to {max(last[way]):.4f})" for way in WAYS
    ]
    ratios = [f"{told['adaptive'] / told['fixed']:.2f}" for told in (cpu, wall)]
    return f"| {' | '.join([task, *losses, *(f'{cpu[way]:.1f}' for way in WAYS), *ratios])} |"


COLUMNS = "task", "loss, fixed", "adaptive", "CPU s, fixed", "adaptive", "CPU ratio", "seconds ratio"


def main() -> None:
    """Make the runs that are not in the file yet, and print the table of complete tasks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind")
    parser.add_argument("--only", choices=TASKS, help="one framework")
    parser.add_argument("--out", type=Path, default=Path("frameworks.json"), help="results")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--run", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        task, seed, way, out = args.run
        torch.manual_seed(int(seed))
        torch.set_num_threads(1)
        Path(out).write_text(json.dumps(TASKS[task](int(seed), way == "adaptive").evaluations))
        return
    found: dict[str, dict[str, Any]] = json.loads(args.out.read_text()) if args.out.exists() else {}
    for seed in range(args.seeds):
        for task in [] if args.table else [args.only] if args.only else TASKS:
            for way in WAYS:
                runs = found.setdefault(task, {})
                if f"{seed} {way}" not in runs:
                    runs[f"{seed} {way}"] = run(task, seed, way)
                    args.out.write_text(json.dumps(found))
    print(f"| {' | '.join(COLUMNS)} |\n{len(COLUMNS) * '|---'}|")
    for task, runs in found.items():
        print(row(task, runs))


if __name__ == "__main__":
    main()
