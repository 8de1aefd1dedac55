"""What AdaptiveDataParallel adds to a training step: plain DDP and it take turns in one run.

    python benchmarks/step_overhead.py --model mlp|cnn|transformer --nproc 1|2 [--json]

Both train a copy of one model on the same data with the same local batch. Blocks of steps alternate, in
random order, so that both see the same machine. `cpu` and `wall` are the medians over pairs of blocks of
the ratio of CPU time of the process (all its threads) and of wall time; `cpu_mean` is the ratio of the
totals, which counts the sampled steps however rare they are (with one replica they walk the graph a
second time, one step in 40). Measured as after --age steps, when sampling has settled. One torch thread
per process.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from adaptdl_elastic.torch.parallel import AdaptiveDataParallel
from adaptdl_elastic.torch.scaling_rules import AdamScale, AdaScale, ScalingRuleBase


class Transformer(nn.Module):
    """About 10 M parameters: 3 layers of width 512 over 64 tokens of a vocabulary of 1,000."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 512)
        layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(512, 1000)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(tokens))).transpose(1, 2)


def mlp() -> nn.Module:
    """1.0 M parameters."""
    return nn.Sequential(nn.Linear(784, 768), nn.ReLU(), nn.Linear(768, 512), nn.ReLU(), nn.Linear(512, 10))


def cnn() -> nn.Module:
    """2.7 M parameters with batch normalisation, on 32 × 32 × 3."""

    def block(before: int, after: int, stride: int = 1) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, stride, padding=1), nn.BatchNorm2d(after), nn.ReLU()]

    return nn.Sequential(
        *block(3, 64, 2),
        *block(64, 128),
        nn.MaxPool2d(2),
        *block(128, 256),
        nn.MaxPool2d(2),
        *block(256, 512),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(2048, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )


def images(*shape: int) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    return lambda count: (torch.randn(count, *shape), torch.randint(0, 10, (count,)))


def tokens(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 1000, (count, 64)), torch.randint(0, 1000, (count, 64))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


@dataclass(frozen=True)
class Case:
    """A model, its local batch size, data, optimizer, and steps per block."""

    model: Callable[[], nn.Module]
    local: int
    data: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    block: int


CASES = {
    "mlp": Case(mlp, 128, images(784), sgd, 16),
    "cnn": Case(cnn, 64, images(3, 32, 32), sgd, 1),
    "transformer": Case(Transformer, 8, tokens, adamw, 4),
}
RULES: dict[str, Callable[[], ScalingRuleBase]] = {"adascale": AdaScale, "adamscale": AdamScale}


@dataclass(frozen=True)
class Options:
    """What was asked for on the command line."""

    model: str
    nproc: int
    rule: str
    pairs: int
    age: int
    device: str = "cpu"
    precision: str = "fp32"


@dataclass(frozen=True)
class Ratios:
    """AdaptiveDataParallel over DDP, medians over pairs; and the medians of DDP's own step, seconds."""

    cpu: float
    wall: float
    cpu_s: float
    wall_s: float
    cpu_mean: float  # of total times: includes the steps that are sampled, however rare
    parameters: int


class Trainee:
    """One of the two: trains blocks and tells how long they took."""

    def __init__(self, case: Case, options: Options, model: nn.Module, adaptive: bool) -> None:
        self.device = torch.device(options.device)
        model = model.to(self.device)
        self.optimizer = case.optimizer(model)
        self.scaler = torch.amp.GradScaler(options.device, enabled=options.precision == "fp16")
        if adaptive:
            self.model: nn.Module = AdaptiveDataParallel(
                model, self.optimizer, mp_scaler=self.scaler, scaling_rule=RULES[options.rule]()
            )
        else:
            self.model = DistributedDataParallel(model)
        self.kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(options.precision)
        self.loss = nn.CrossEntropyLoss()

    def block(self, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[float, float]:
        """CPU and wall seconds of one step, on average."""
        self._wait()
        cpu, wall = time.process_time(), time.perf_counter()
        for inputs, targets in batches:
            self.optimizer.zero_grad()
            with torch.autocast(self.device.type, self.kind, enabled=self.kind is not None):
                loss = self.loss(self.model(inputs), targets)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self._wait()
        steps = len(batches)
        return (time.process_time() - cpu) / steps, (time.perf_counter() - wall) / steps

    def grow_old(self, steps: int) -> None:
        """Go on as if it had trained for `steps` steps: the schedule of samples depends on that alone."""
        assert isinstance(self.model, AdaptiveDataParallel)
        state = self.model.gns.state_dict()
        self.model.gns.load_state_dict({**state, "steps": steps, "next": steps})

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def measure(options: Options, seed: int = 0) -> Ratios:
    """Within a process group: the ratios on this replica."""
    case = CASES[options.model]
    torch.manual_seed(seed)
    model = case.model()
    plain = Trainee(case, options, copy.deepcopy(model), adaptive=False)
    adaptive = Trainee(case, options, copy.deepcopy(model), adaptive=True)
    device = torch.device(options.device)
    batches = [tuple(t.to(device) for t in case.data(case.local)) for _ in range(case.block)]
    for _ in range(3):
        adaptive.block(batches)
        plain.block(batches)
    adaptive.grow_old(options.age)
    order = random.Random(seed)  # the same on every replica
    times: list[tuple[tuple[float, float], tuple[float, float]]] = []
    for _ in range(options.pairs):
        if order.random() < 0.5:
            first = plain.block(batches)
            times.append((first, adaptive.block(batches)))
        else:
            second = adaptive.block(batches)
            times.append((plain.block(batches), second))
    return Ratios(
        cpu=statistics.median(a[0] / p[0] for p, a in times),
        wall=statistics.median(a[1] / p[1] for p, a in times),
        cpu_s=statistics.median(p[0] for p, _ in times),
        wall_s=statistics.median(p[1] for p, _ in times),
        cpu_mean=sum(a[0] for _, a in times) / sum(p[0] for p, _ in times),
        parameters=sum(p.numel() for p in model.parameters()),
    )


def replica(rank: int, options: Options, folder: str, results: Any) -> None:
    torch.set_num_threads(1)
    if options.device == "cuda":
        torch.cuda.set_device(rank)
    os.environ.update(ADAPTDL_REPLICA_RANK=str(rank), ADAPTDL_NUM_REPLICAS=str(options.nproc))
    dist.init_process_group(
        "nccl" if options.device == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=options.nproc,
    )
    results.put((rank, measure(options)))
    dist.barrier()
    dist.destroy_process_group()


def run(options: Options) -> Ratios:
    """Start the replicas; rank 0's ratios."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        replicas = [
            context.Process(target=replica, args=(rank, options, folder, results), daemon=True)
            for rank in range(options.nproc)
        ]
        for process in replicas:
            process.start()
        found = dict(results.get(timeout=900) for _ in replicas)
        for process in replicas:
            process.join(30)
    ratios: Ratios = found[0]
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=sorted(CASES), default="mlp")
    parser.add_argument("--nproc", type=int, choices=(1, 2), default=1, help="replicas")
    parser.add_argument("--rule", choices=sorted(RULES), help="default: adamscale for the transformer")
    parser.add_argument("--pairs", type=int, default=64, help="pairs of blocks")
    parser.add_argument("--age", type=int, default=2048, help="steps that have been trained before")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and take the replicas along
    rule = arguments.rule or ("adamscale" if arguments.model == "transformer" else "adascale")
    options = Options(
        arguments.model,
        arguments.nproc,
        rule,
        arguments.pairs,
        arguments.age,
        arguments.device,
        arguments.precision,
    )
    ratios = run(options)
    if arguments.json:
        cpus = os.cpu_count()
        print(json.dumps({**asdict(options), **asdict(ratios), "torch": torch.__version__, "cpus": cpus}))
        return
    print(
        f"{options.model}, {ratios.parameters / 1e6:.1f} M parameters, {options.nproc} replicas, "
        f"{options.rule}: CPU ×{ratios.cpu:.3f} (mean ×{ratios.cpu_mean:.3f}), wall ×{ratios.wall:.3f} "
        f"(DDP: {1e3 * ratios.cpu_s:.1f} ms CPU, {1e3 * ratios.wall_s:.1f} ms)"
    )


if __name__ == "__main__":
    main()
