"""What AdaptiveDataParallel adds to a training step: plain DDP and it take turns in one run.

    python benchmarks/step_overhead.py --model mlp|small|cnn|transformer --nproc 1|2 [--loop STEPS]

Both train a copy of one model on the same data with the same local batch. Rounds of three blocks of steps,
in random order, so that all see the same machine: DDP, AdaptiveDataParallel on steps that are not
sampled, and on steps that all are. Only one step in `gap` is sampled (with one replica it walks the graph a
second time), too few to be measured as they come: `cpu` is

    (1 − 1/gap) · plain + 1/gap · sampled

of the medians over rounds of each block's CPU time (of the process, all its threads) over DDP's; `wall` the
same of wall time. `gap` is the one that the library chooses for this cost after --age steps. `low` and
`high` hold 95 % of `cpu` with rounds drawn again (bootstrap). One torch thread per process.

With --loop each round is a fresh run of so many steps of both from their data loaders, sampled as they come,
and the costs of the library's data loop count. --age 0 takes the first steps of a job.
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
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from figures import here
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from adaptdl_elastic import _session
from adaptdl_elastic.torch._elastic.step_snapshot import StepSnapshot
from adaptdl_elastic.torch._gradient.out_of_memory import unguarded
from adaptdl_elastic.torch._gradient.pace import gap as gap_of
from adaptdl_elastic.torch.data import AdaptiveDataLoader
from adaptdl_elastic.torch.epoch import remaining_epochs_until
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
        scores: torch.Tensor = self.head(self.encoder(self.embedding(tokens)))
        return scores.transpose(1, 2)


def mlp() -> nn.Module:
    """1.0 M parameters."""
    return nn.Sequential(nn.Linear(784, 768), nn.ReLU(), nn.Linear(768, 512), nn.ReLU(), nn.Linear(512, 10))


def small() -> nn.Module:
    """0.3 M parameters."""
    return nn.Sequential(nn.Linear(784, 320), nn.ReLU(), nn.Linear(320, 160), nn.ReLU(), nn.Linear(160, 10))


def cnn() -> nn.Module:
    """2.7 M parameters with batch normalisation, on 32 × 32 × 3, which the first convolution halves."""

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
        nn.Linear(2048, 560),
        nn.ReLU(),
        nn.Linear(560, 10),
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
    "small": Case(small, 16, images(784), sgd, 64),
    "cnn": Case(cnn, 64, images(3, 32, 32), sgd, 1),
    "transformer": Case(Transformer, 8, tokens, adamw, 1),
}
RULES: dict[str, Callable[[], ScalingRuleBase]] = {"adascale": AdaScale, "adamscale": AdamScale}


@dataclass(frozen=True)
class Options:
    """What was asked for on the command line."""

    model: str
    nproc: int
    rule: str
    rounds: int
    seconds: float
    age: int
    device: str = "cpu"
    precision: str = "fp32"
    loop: int = 0


@dataclass(frozen=True)
class Ratios:
    """AdaptiveDataParallel over DDP; and the medians of DDP's own step, seconds."""

    cpu: float
    low: float
    high: float
    wall: float
    cpu_plain: float | None  # on a step that is not sampled
    cpu_sampled: float  # on a step that is
    gap: int  # one step in so many is sampled
    cpu_s: float
    wall_s: float
    rounds_done: int
    parameters: int


Times = tuple[float, float]  # CPU, wall: seconds of one step


class Trainee:
    """One of the two: trains blocks and tells how long they took."""

    def __init__(self, case: Case, options: Options, model: nn.Module, adaptive: bool) -> None:
        self.device = torch.device(options.device)
        model = model.to(self.device)
        self.optimizer = case.optimizer(model)
        self.scaler = torch.amp.GradScaler(options.device, enabled=options.precision == "fp16")
        if adaptive:
            self.model: nn.Module = AdaptiveDataParallel(
                model,
                self.optimizer,
                mp_scaler=self.scaler if self.scaler.is_enabled() else None,
                scaling_rule=RULES[options.rule](),
            )
        else:
            self.model = DistributedDataParallel(model)
        self.resilient = adaptive and options.nproc > 1  # as under adaptdl-run: it would survive a death
        self.before: StepSnapshot | None = None
        if isinstance(self.model, AdaptiveDataParallel) and self.resilient:
            self.model.absorb_failures()
        self.kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(options.precision)
        self.loss = nn.CrossEntropyLoss()

    def block(self, batches: Iterable[tuple[torch.Tensor, ...]]) -> tuple[float, float]:
        """CPU and wall seconds of one step, on average."""
        adaptive = isinstance(self.model, AdaptiveDataParallel)
        self._wait()
        cpu, wall = time.process_time(), time.perf_counter()
        with nullcontext() if adaptive else unguarded():  # DDP's passes are not those of the library
            steps = self._train(batches)
        self._wait()
        return (time.process_time() - cpu) / steps, (time.perf_counter() - wall) / steps

    def _train(self, batches: Iterable[tuple[torch.Tensor, ...]]) -> int:
        steps = 0
        for inputs, targets in batches:
            steps += 1
            if self.resilient:
                self.before = StepSnapshot(_session.current(), 0, self.before)
            self.optimizer.zero_grad()
            with torch.autocast(self.device.type, self.kind, enabled=self.kind is not None):
                loss = self.loss(self.model(inputs), targets)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return steps

    def sample(self, every_step: bool) -> None:
        """From now on measure every step, or none."""
        assert isinstance(self.model, AdaptiveDataParallel)
        gns = self.model.gns
        gns.gap = 1
        gns.load_state_dict({**gns.state_dict(), "next": 0 if every_step else sys.maxsize})

    def loop(self, data: TensorDataset, local: int, age: int) -> tuple[float, float]:
        """CPU and wall seconds of one step of an epoch, on average."""
        if not isinstance(self.model, AdaptiveDataParallel):
            return self.block(DataLoader(data, local, shuffle=True))
        gns = self.model.gns
        gns.load_state_dict({**gns.state_dict(), "steps": age, "next": age})
        loader = AdaptiveDataLoader(data, local * dist.get_world_size(), shuffle=True)
        return self.block(batch for _ in remaining_epochs_until(1) for batch in loader)

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

    def sampled(every_step: bool) -> Times:
        adaptive.sample(every_step)
        return adaptive.block(batches)

    blocks: dict[str, Callable[[], Times]] = {
        "ddp": lambda: plain.block(batches),
        "plain": lambda: sampled(False),
        "sampled": lambda: sampled(True),
    }
    if options.loop:  # fresh runs of both

        def fresh(adaptive: bool) -> Times:
            _session.reset()
            data = TensorDataset(*case.data(case.local * options.loop * (options.nproc if adaptive else 1)))
            return Trainee(case, options, copy.deepcopy(model), adaptive).loop(data, case.local, options.age)

        blocks = {"ddp": lambda: fresh(False), "sampled": lambda: fresh(True)}
    for _ in range(2):
        for block in blocks.values():
            block()
    order = random.Random(seed)  # the same on every replica
    rounds: list[dict[str, Times]] = []
    end = time.monotonic() + options.seconds
    while len(rounds) < options.rounds and (len(rounds) < 5 or _go_on(end, device)):
        names = order.sample(list(blocks), len(blocks))
        rounds.append({name: blocks[name]() for name in names})
    gap = 1
    if not options.loop:
        cost = _medians(rounds, "sampled", 0) / _medians(rounds, "plain", 0) - 1.0
        gap = gap_of(max(cost, 0.0), options.age, settled=True)
    again = sorted(_amortised(order.choices(rounds, k=len(rounds)), gap, 0) for _ in range(1000))
    return Ratios(
        cpu=_amortised(rounds, gap, 0),
        low=again[25],
        high=again[-26],
        wall=_amortised(rounds, gap, 1),
        cpu_plain=None if options.loop else _medians(rounds, "plain", 0),
        cpu_sampled=_medians(rounds, "sampled", 0),
        gap=gap,
        cpu_s=statistics.median(r["ddp"][0] for r in rounds),
        wall_s=statistics.median(r["ddp"][1] for r in rounds),
        rounds_done=len(rounds),
        parameters=sum(p.numel() for p in model.parameters()),
    )


def _go_on(end: float, device: torch.device) -> bool:
    """Whether there is time left, by rank 0's clock."""
    left = torch.tensor(end - time.monotonic(), device=device)
    dist.broadcast(left, 0)
    return bool(left > 0)


def _medians(rounds: list[dict[str, Times]], name: str, clock: int) -> float:
    return statistics.median(r[name][clock] / r["ddp"][clock] for r in rounds)


def _amortised(rounds: list[dict[str, Times]], gap: int, clock: int) -> float:
    sampled = _medians(rounds, "sampled", clock)
    return sampled if gap == 1 else (1 - 1 / gap) * _medians(rounds, "plain", clock) + sampled / gap


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
    parser.add_argument("--rounds", type=int, default=100, help="rounds of blocks, at most")
    parser.add_argument("--seconds", type=float, default=120, help="begin no further round after these")
    parser.add_argument("--age", type=int, default=2048, help="steps that have been trained before")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32")
    parser.add_argument("--loop", type=int, default=0, metavar="STEPS", help="fresh runs of so many steps")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and take the replicas along
    rule = arguments.rule or ("adamscale" if arguments.model == "transformer" else "adascale")
    options = Options(**{**vars(arguments), "rule": rule})
    found = {**asdict(options), **asdict(run(options)), "torch": torch.__version__, **here()}
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
