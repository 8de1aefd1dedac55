"""How well the gradient noise scale is measured: estimates against the truth, while small models train.

    python benchmarks/noise.py [--only PATTERN …] [--seeds N]

Each case trains a model at a fixed batch size of 64 samples, and measures as often as the library would if a
measurement cost --cost of a plain step. At every 10th step
from the 20th on, what the library says is compared with the true |G|² and tr Σ at the present parameters, in
Adam's metric for AdamW. The truth is a closed form for linear regression (`Regression`), the moments of all
samples' own gradients for models of a finite data set (batches are drawn from it with replacement), and the
moments of 48 batches where a sample has no gradient of its own (batch normalisation). Reported are, over the
run:

- `bias4`, `bias16`: mean of the estimated gain over the mean of the true one, less 1;
- `rms4`, `rms16`: root mean square of the relative error of the gain at 4 and 16 times the batch size;
- `goodput`: that at the batch size which the estimate chooses, over that at the best one; `worst` is that of
  the worst seed. A step of m samples costs as much as m + 4·64 samples; sizes are 1 to 32 times 64.

One replica is the library as it is, in this process. Two and more replicas are simulated: their gradients are
computed one after the other, and the library's arithmetic, means and schedule are given their norms. That the
communication hook measures those norms is what tests/training/test_gradient_noise_scale.py shows.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from adaptdl_elastic import _session
from adaptdl_elastic.torch._gradient.comm_hook import Norms
from adaptdl_elastic.torch._gradient.estimator import Measurement
from adaptdl_elastic.torch._gradient.noise_scale import AdamGradientNoiseScale, GradientNoiseScale
from adaptdl_elastic.torch._gradient.pace import gap as gap_of
from adaptdl_elastic.torch.parallel import AdaptiveDataParallel

BATCH = 64
OVERHEAD = 4 * BATCH  # samples whose time a step costs besides its own
SIZES = np.geomspace(1.0, 32.0, 26)  # candidates for the batch size, relative to BATCH
EVERY, FIRST = 10, 20  # steps between comparisons, and before the first one

Tensors = tuple[torch.Tensor, torch.Tensor]
Divide = Callable[[nn.Module], list[torch.Tensor] | None]  # a model → what its gradients are divided by


class Task(nn.Module):
    """A model with its data and loss. `forward(x, y)` is the loss, `forward(x)` the output."""

    def loss(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of a batch."""
        return functional.cross_entropy(output.flatten(0, -2), y.flatten())

    def output(self, x: torch.Tensor) -> torch.Tensor:
        """Return the model's output."""
        raise NotImplementedError

    def batch(self, count: int, generator: torch.Generator) -> Tensors:
        """Return `count` samples, drawn from the data with replacement."""
        index = torch.randint(len(self.x), (count,), generator=generator)
        return self.x[index], self.y[index]

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        output = self.output(x)
        return output if y is None else self.loss(output, y)

    def truth(self, divisors: list[torch.Tensor] | None) -> tuple[float, float]:
        """Return |G|² and tr Σ of one sample at the present parameters."""
        parameters = {name: value.detach() for name, value in self.named_parameters()}

        def one(values: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = functional_call(self, values, (x[None], y[None]))
            return loss

        gradients = vmap(grad(one), in_dims=(None, 0, 0))(parameters, self.x, self.y)
        flat = torch.cat([gradients[name].flatten(1) for name in parameters], 1).double()
        if divisors is not None:
            flat = flat / torch.cat(divisors).double()
        sqr = float(flat.mean(0).square().sum())
        return sqr, float(flat.square().sum(1).mean()) - sqr


class Regression(Task):
    """Linear regression on Gaussian features, with the closed form of tests/support/regression.py.

    y = xᵀθ* + ε with x ~ N(0, Λ), ε ~ N(0, 1), θ* = 0, loss ½(xᵀθ − y)²: G = Λθ, and
    tr Σ = |G|² + (θᵀΛθ + 1)·tr Λ.
    """

    def __init__(self) -> None:
        super().__init__()
        spectrum = torch.logspace(0, 1, 512) ** np.log10(4.0)
        self.spectrum = spectrum / spectrum.mean()
        self.weight = nn.Parameter(torch.full((512, 1), 0.5))

    def output(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight

    def loss(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (0.5 * (output - y) ** 2).mean()

    def batch(self, count: int, generator: torch.Generator) -> Tensors:
        x = torch.randn(count, 512, generator=generator) * self.spectrum.sqrt()
        return x, torch.randn(count, 1, generator=generator)

    def truth(self, divisors: list[torch.Tensor] | None) -> tuple[float, float]:
        assert divisors is None
        spectrum, theta = self.spectrum.double(), self.weight.detach().flatten().double()
        sqr = float((spectrum * theta).square().sum())
        return sqr, sqr + (float((spectrum * theta**2).sum()) + 1.0) * float(spectrum.sum())


class Mlp(Task):
    """Ten overlapping clusters in 32 dimensions, a tenth of the labels wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.y = clusters((32,))
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))

    def output(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.net(x)
        return result


class Cnn(Mlp):
    """The same kind of data as images, and batch normalisation: a sample has no gradient of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.y = clusters((1, 8, 8))
        self.net = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AvgPool2d(2)),
            *(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten()),
            nn.Linear(256, 10),
        )

    def truth(self, divisors: list[torch.Tensor] | None) -> tuple[float, float]:
        generator, state = torch.Generator().manual_seed(12345), [b.clone() for b in self.buffers()]
        rows = []
        for _ in range(48):
            gradients = torch.autograd.grad(self(*self.batch(BATCH, generator)), list(self.parameters()))
            rows.append(torch.cat([g.flatten() for g in gradients]).double())
        for buffer, before in zip(self.buffers(), state, strict=True):
            buffer.copy_(before)
        flat = torch.stack(rows)
        if divisors is not None:
            flat = flat / torch.cat(divisors).double()
        variance = float(flat.var(0).sum())
        return float(flat.mean(0).square().sum()) - variance / len(rows), BATCH * variance


class Gpt(Task):
    """One block of a causal transformer over 16 tokens of a random Markov chain."""

    dropout = 0.0

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        chain = (2.0 * torch.randn(32, 32, generator=generator)).softmax(1)
        tokens = [torch.randint(32, (512,), generator=generator)]
        for _ in range(16):
            tokens.append(torch.multinomial(chain[tokens[-1]], 1, generator=generator)[:, 0])
        data = torch.stack(tokens, 1)
        self.x, self.y = data[:, :-1], data[:, 1:]
        self.token, self.place = nn.Embedding(32, 32), nn.Parameter(0.02 * torch.randn(16, 32))
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(3))
        self.attention, self.project = nn.Linear(32, 96), nn.Linear(32, 32)
        self.mlp = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
        self.head = nn.Linear(32, 32, bias=False)
        self.head.weight = self.token.weight
        nn.init.normal_(self.token.weight, std=0.05)

    def output(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.block(self.token(x) + self.place)
        result: torch.Tensor = self.head(self.norms[2](hidden))
        return result

    def block(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return attention and MLP of the hidden states, added to them."""
        q, k, v = self.attention(self.norms[0](hidden)).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) / 32**0.5
        later = torch.ones(16, 16, dtype=torch.bool).triu(1)
        hidden = hidden + self.drop(self.project(scores.masked_fill(later, -torch.inf).softmax(-1) @ v))
        return hidden + self.drop(self.mlp(self.norms[1](hidden)))

    def drop(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply dropout."""
        return functional.dropout(hidden, self.dropout) if self.dropout else hidden


class CheckpointedGpt(Gpt):
    """Reentrant checkpointing: the graph cannot be walked twice."""

    def output(self, x: torch.Tensor) -> torch.Tensor:
        if torch._C._functorch.maybe_current_level() is not None:  # in `truth`
            return super().output(x)
        hidden = checkpoint(self.block, self.token(x) + self.place, use_reentrant=True)
        result: torch.Tensor = self.head(self.norms[2](hidden))
        return result


def clusters(shape: tuple[int, ...]) -> Tensors:
    """Return 1,024 samples of ten clusters with their labels, of which a tenth are random."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(10, (1024,), generator=generator)
    centres = torch.randn(10, *shape, generator=generator)
    x = 0.6 * centres[y] + torch.randn(1024, *shape, generator=generator)
    wrong = torch.rand(1024, generator=generator) < 0.1
    return x, torch.where(wrong, torch.randint(10, (1024,), generator=generator), y)


@dataclass(frozen=True)
class Case:
    """A configuration."""

    task: type[Task]
    lr: float
    steps: int
    adam: bool = False
    replicas: int = 1
    micro_batches: int = 1
    inside: bool = False  # the loss is computed in forward
    compiled: bool = False

    @property
    def parts(self) -> int:
        """Number of gradients of which a step's one is the mean."""
        return self.replicas * self.micro_batches


def _cases() -> dict[str, Case]:
    regression, adam = Case(Regression, 0.1, 1500), Case(Mlp, 1e-3, 1000, adam=True)
    gpt = Case(Gpt, 1e-3, 800, adam=True)
    cases = {
        "regression R=1": regression,
        "regression R=1 A=2": Case(Regression, 0.1, 1500, micro_batches=2),
        "regression R=1 A=4": Case(Regression, 0.1, 1500, micro_batches=4),
        "regression R=1 inside": Case(Regression, 0.1, 1500, inside=True),
        "regression R=2": Case(Regression, 0.1, 1500, replicas=2),
        "regression R=4": Case(Regression, 0.1, 1500, replicas=4),
        "mlp SGD R=1": Case(Mlp, 0.1, 1000),
        "mlp SGD R=2": Case(Mlp, 0.1, 1000, replicas=2),
        "mlp AdamW 0.001 R=1": adam,
        "mlp AdamW 0.001 R=1 inside": Case(Mlp, 1e-3, 1000, adam=True, inside=True),
        "mlp AdamW 0.001 R=2": Case(Mlp, 1e-3, 1000, adam=True, replicas=2),
        "mlp AdamW 0.0001 R=2": Case(Mlp, 1e-4, 1000, adam=True, replicas=2),
        "mlp AdamW 0.01 R=2": Case(Mlp, 1e-2, 1000, adam=True, replicas=2),
        "gpt R=1": gpt,
        "gpt R=1 inside": Case(Gpt, 1e-3, 800, adam=True, inside=True),
        "gpt R=1 inside compiled": Case(Gpt, 1e-3, 800, adam=True, inside=True, compiled=True),
        "gpt R=1 checkpointed inside": Case(CheckpointedGpt, 1e-3, 800, adam=True, inside=True),
        "gpt R=1 checkpointed": Case(CheckpointedGpt, 1e-3, 800, adam=True),
        "gpt R=2": Case(Gpt, 1e-3, 800, adam=True, replicas=2),
        "cnn SGD R=1": Case(Cnn, 0.05, 600),
        "cnn SGD R=2": Case(Cnn, 0.05, 600, replicas=2),
    }
    return cases


CASES = _cases()


@dataclass
class Loader:
    """What AdaptiveDataParallel asks of the loader of a batch."""

    micro_batches: int
    batch_size = BATCH
    window_samples = current_batch_size = BATCH
    training = True
    training_loader_undecided = False
    sample_dimension = 0
    key = "0"
    may_accumulate = False
    local_bsz_bounds = (1, BATCH)
    gradient_weight = 1.0
    micro_batch = 0

    def train(self) -> None:
        """Do nothing: this is a training loop."""

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches before the one after which the optimizer steps."""
        return self.micro_batches - 1

    @property
    def parts(self) -> float:
        """Number of gradients of equal batches of which the window's one is the mean."""
        return float(self.micro_batches)

    @property
    def local_samples(self) -> int:
        """Samples of a micro-batch."""
        return BATCH // self.micro_batches

    current_local_bsz = local_samples

    def is_accum_step(self) -> bool:
        """Return whether further micro-batches follow."""
        return self.micro_batch < self.accumulation_steps

    def is_optim_step(self) -> bool:
        """Return whether the optimizer steps after this one."""
        return not self.is_accum_step()


class Alone:
    """One replica: AdaptiveDataParallel."""

    def __init__(self, case: Case, task: Task, seed: int) -> None:
        self.case, self.optimizer = case, _optimizer(case, task)
        torch._dynamo.reset()
        module = torch.compile(task, backend="aot_eager") if case.compiled else task
        self.adp = AdaptiveDataParallel(module, self.optimizer, name=f"seed {seed}")
        self.adp._sampler._generator.manual_seed(seed)
        self.gns = self.adp.gns
        self.task = task

    def step(self, parts: list[Tensors]) -> None:
        """Train with one batch."""
        loader = Loader(len(parts))
        _session.current().loader = loader  # type: ignore[assignment]
        for loader.micro_batch, (x, y) in enumerate(parts):
            self.optimizer.zero_grad()
            loss = self.adp(x, y) if self.case.inside else self.task.loss(self.adp(x), y)
            loss.backward()
            self.optimizer.step()
        _session.current().loader = None


class Together:
    """Several replicas, one after the other."""

    def __init__(self, case: Case, task: Task, seed: int) -> None:
        self.case, self.task, self.optimizer = case, task, _optimizer(case, task)
        kind = AdamGradientNoiseScale if case.adam else GradientNoiseScale
        self.gns = kind(None, self.optimizer)
        self.norms = Norms(lambda: self.optimizer.param_groups, self.gns.preconditioner)

    def step(self, parts: list[Tensors]) -> None:
        """Train with one batch, whose parts are replicas' micro-batches."""
        parameters = list(self.task.parameters())
        rows = []
        for x, y in parts:
            loss = self.task.loss(self.task(x), y)
            rows.append(torch.autograd.grad(loss, parameters))
        each = [self._mean(rows[r :: self.case.replicas]) for r in range(self.case.replicas)]
        mean = self._mean(each)
        if self.gns.due():
            own = np.mean([self._norm(zip(parameters, g, strict=True)) for g in each], axis=0)
            total = self._norm(zip(parameters, mean, strict=True))
            variance = (own - total) / (self.case.replicas - 1)
            self.gns.record(Measurement(total, variance, 1.0), self.gns.steps)
            self.gns.measured(1)
        for parameter, gradient in zip(parameters, mean, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        self.gns.advance(1.0)

    def _norm(self, pairs: Iterable[Tensors]) -> Any:
        return self.norms.squares(pairs).numpy()

    def _mean(self, rows: list[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
        return tuple(torch.stack(same).mean(0) for same in zip(*rows, strict=True))


def _optimizer(case: Case, task: Task) -> torch.optim.Optimizer:
    if case.adam:
        return torch.optim.AdamW(task.parameters(), lr=case.lr)
    return torch.optim.SGD(task.parameters(), lr=case.lr)


def gain(sqr: float, var: float, scale: Any) -> Any:
    """Return AdaScale's gain; `var` at the initial batch size."""
    sqr, var = max(sqr, 0.0), max(var, 0.0)
    return (var + sqr) / (var / scale + sqr) if var + sqr else np.ones_like(scale)


def goodput(sqr: float, var: float) -> Any:
    """Return the goodput at each of SIZES, for the step times of the module's docstring."""
    return SIZES * BATCH / (OVERHEAD + SIZES * BATCH) * gain(sqr, var, SIZES) / SIZES


def train(case: Case, seed: int, cost: float) -> dict[str, float]:
    """Train once; return the figures that the module's docstring names."""
    torch.manual_seed(seed)
    task = case.task()
    trainee = Alone(case, task, seed) if case.replicas == 1 else Together(case, task, seed)
    gns = trainee.gns
    generator = torch.Generator().manual_seed(1000 + seed)
    told, true, ratios, began = [], [], [], time.process_time()
    training = 0.0
    for step in range(case.steps):
        if step >= FIRST and step % EVERY == 0 and gns.known:
            training += time.process_time() - began
            sqr, var = task.truth(_divisors(gns, trainee.optimizer, task))
            var /= BATCH
            told.append((gns.sqr_avg(), gns.var_avg()))
            true.append((sqr, var))
            ours, best = goodput(*told[-1]), goodput(sqr, var)
            ratios.append(best[ours.argmax()] / best.max())
            began = time.process_time()
        x, y = task.batch(BATCH, generator)
        gns.gap = gap_of(cost, step, gns.settled)
        trainee.step(list(zip(x.chunk(case.parts), y.chunk(case.parts), strict=True)))
    training += time.process_time() - began
    figures = {"goodput": float(np.mean(ratios)), "seconds": training}
    for scale in (4, 16):
        ours, best = (np.array([gain(*pair, scale) for pair in pairs]) for pairs in (told, true))
        figures[f"bias{scale}"] = float(ours.mean() / best.mean() - 1)
        figures[f"rms{scale}"] = float(np.sqrt(np.mean((ours / best - 1) ** 2)))
    figures["scale"] = float(np.median([var / max(sqr, 1e-30) for sqr, var in true])) * BATCH
    return figures


def _divisors(gns: GradientNoiseScale, optimizer: Any, task: Task) -> list[torch.Tensor] | None:
    if gns.preconditioner is None:
        return None
    divisors = [gns.preconditioner(p, optimizer.param_groups[0]) for p in task.parameters()]
    return [divisor(slice(None)) for divisor in divisors if divisor is not None]


def measure(case: Case, seeds: int, cost: float) -> dict[str, float]:
    """Return the means over seeds; of `rms…` the root of the mean square."""
    runs = [train(case, seed, cost) for seed in range(seeds)]
    figures = {name: float(np.mean([run[name] for run in runs])) for name in runs[0]}
    for name in ("rms4", "rms16"):
        figures[name] = float(np.sqrt(np.mean([run[name] ** 2 for run in runs])))
    figures["worst goodput"] = min(run["goodput"] for run in runs)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="PATTERN", help="cases by name, as mlp*")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--cost", type=float, default=0.2, help="a transformer on one replica of a CPU")
    arguments = parser.parse_args()
    names = [n for n in CASES if not arguments.only or any(fnmatch(n, one) for one in arguments.only)]
    if not names:
        parser.error(f"--only {' '.join(arguments.only)}: no case is named so; there are: {', '.join(CASES)}")
    torch.set_num_threads(1)
    logging.getLogger("adaptdl_elastic").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ADAPTDL_EVENT_LOG"] = f"{folder}/events"
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        rows = []
        for name in names:
            _session.reset()
            found = measure(CASES[name], arguments.seeds, arguments.cost)
            rows.append({"case": name, **asdict(CASES[name], dict_factory=_plain), **found})
            print(rows[-1], file=sys.stderr, flush=True)
        print(json.dumps(rows))
        dist.destroy_process_group()


def _plain(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value.__name__.lower() if isinstance(value, type) else value for name, value in items}


if __name__ == "__main__":
    main()
