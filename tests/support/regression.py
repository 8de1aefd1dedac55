"""Linear regression whose gradient noise is known in closed form, and replicas that train it.

y = xᵀθ* + ε with x ~ N(0, Λ) and ε ~ N(0, σ²), loss ½(xᵀθ − y)². With δ = θ − θ*, one sample's gradient
g = x(xᵀδ − ε) has the mean G = Λδ, and because E[xxᵀ(xᵀδ)²] = 2Λδδᵀ Λ + (δᵀΛδ)Λ for Gaussian x::

    tr Σ = E|g|² − |G|² = |G|² + (δᵀΛδ + σ²)·tr Λ

and, component by component, Σ_ii = G_i² + (δᵀΛδ + σ²)·Λ_ii, which gives both moments of a part of the
parameters, and in Adam's metric (g divided by P).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import insides
import numpy as np
import torch
import torch.distributed as dist
from fake_loader import FakeLoader

from adaptdl_elastic.torch._gradient.estimator import Array, Measurement
from adaptdl_elastic.torch.parallel import AdaptiveDataParallel

SCALE = 8.0
"""Scale at which gains are compared."""


@dataclass(frozen=True)
class Problem:
    """The regression. δ₀ is where training starts, relative to θ*."""

    features: int = 256
    noise: float = 1.0
    start: float = 0.5  # every component of δ₀
    condition: float = 4.0  # largest over smallest eigenvalue of Λ

    @cached_property
    def spectrum(self) -> torch.Tensor:
        """Eigenvalues of Λ (it is diagonal), shape [features], with mean 1."""
        values = torch.logspace(0, 1, self.features) ** math.log10(self.condition)
        return values / values.mean()

    def batch(self, samples: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """(x, ε), shapes [samples, features] and [samples, 1]; y = ε because θ* is 0."""
        x = torch.randn(samples, self.features, generator=generator) * self.spectrum.sqrt()
        return x, self.noise * torch.randn(samples, 1, generator=generator)

    def truth(
        self, delta: torch.Tensor, part: slice = slice(None), divisor: torch.Tensor | None = None
    ) -> tuple[float, float]:
        """|G|² and tr Σ of one sample, of the parameters `part`, at θ* + δ, of g / `divisor`."""
        spectrum = self.spectrum.double()
        delta = delta.detach().flatten().double()
        metric = torch.ones_like(spectrum) if divisor is None else divisor.double() ** -2
        sqr = float(((spectrum * delta) ** 2 * metric)[part].sum())
        residual = float((spectrum * delta**2).sum()) + self.noise**2
        return sqr, sqr + residual * float((spectrum * metric)[part].sum())


class Halves(torch.nn.Module):
    """The linear model, its parameters in two tensors."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.problem = problem
        half = problem.features // 2
        self.first, self.second = (
            torch.nn.Parameter(torch.full((1, size), problem.start))
            for size in (half, problem.features - half)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = self.first.numel()
        return x[:, :half] @ self.first.T + x[:, half:] @ self.second.T

    @property
    def delta(self) -> torch.Tensor:
        return torch.cat([self.first, self.second], dim=1)

    @property
    def parts(self) -> list[slice]:
        return [slice(None, self.first.numel()), slice(self.first.numel(), None)]


@dataclass(frozen=True)
class Run:
    """How the regression is trained. The defaults are SGD at a constant batch, every step measured.

    They are such that four seeds of 150 steps have a standard error of about 1 %. A relative error of V shows
    in |G|² multiplied by V/|G|², 3.5 on one replica at the start and 1.75 on two.
    """

    lr: float = 0.0
    steps: int = 150
    local: int = 64  # samples of a micro-batch on one replica
    micro_batches: int = 1
    settle: int = 0  # steps that are not compared: 1/P of Adam's first ones has no mean
    every_step: bool = True
    rows: bool = False  # measured from the rows of half of the samples
    adam: bool = False
    by_group: bool = False  # two parameter groups, told apart
    loss_scale: float | None = None  # a GradScaler's
    problem: Problem = Problem()


def train(run: Run, seed: int) -> dict[str, Any]:
    """Means over all measured steps of what is estimated and of the truth.

    `sqr` and `var` are of single steps, `smoothed_…` what the means said after each, `gain` the gain at
    `SCALE` that follows from those; with `by_group` each of them is of both groups.
    """
    rank, replicas = dist.get_rank(), dist.get_world_size()
    model = Halves(run.problem)
    params: Any = list(model.parameters())
    if run.by_group:
        params = [{"params": [param]} for param in params]
    optimizer = (torch.optim.Adam if run.adam else torch.optim.SGD)(params, lr=run.lr)
    scaler = torch.amp.GradScaler("cpu", init_scale=run.loss_scale or 1.0, enabled=run.loss_scale is not None)
    adp = AdaptiveDataParallel(model, optimizer, mp_scaler=scaler, name=f"seed {seed}")
    insides.seed_signs(adp, seed)
    if not run.rows:
        insides.walk_only(adp)
    adp.gns.gap = 1 if run.every_step else 4
    batch = run.local * replicas * run.micro_batches
    parts = model.parts if run.by_group else [slice(None)]
    measured: dict[int, dict[str, Array]] = {}
    gns, record = adp.gns, adp.gns.record

    def keep(measurement: Measurement, step: int) -> bool:
        counted = record(measurement, step)
        measured[step] = {
            "sqr": measurement.sqr,
            "var": measurement.var * batch,
            "smoothed_sqr": gns.raw_sqr_avg,
            "smoothed_var": gns.raw_var_avg * batch,
            "gain": gns.lr_gain(SCALE),
        }
        return counted

    adp.gns.record = keep  # type: ignore[method-assign]
    truth: dict[int, dict[str, Array]] = {}
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    window = [[run.local] * replicas] * run.micro_batches
    for step in range(run.steps):
        divisor = _divisor(adp, model)
        with FakeLoader(window, batch, run.local) as loader:
            for loader.chunk in range(run.micro_batches):
                x, y = run.problem.batch(run.local, generator)
                optimizer.zero_grad()
                scaler.scale((0.5 * (adp(x) - y) ** 2).mean()).backward()
                if loader.is_optim_step():
                    sqr, var = np.transpose([run.problem.truth(model.delta, part, divisor) for part in parts])
                    gain = (var / batch + sqr) / (var / batch / SCALE + sqr)
                    truth[step] = {"sqr": sqr, "var": var, "gain": gain}
                scaler.step(optimizer)
                scaler.update()
    insides.collect(adp)
    steps = [step for step in measured if step >= run.settle]
    told = {name: np.mean([measured[step][name] for step in steps], axis=0) for name in measured[steps[0]]}
    told |= {f"true_{name}": np.mean([truth[step][name] for step in steps], axis=0) for name in truth[0]}
    return told


def _divisor(adp: AdaptiveDataParallel, model: Halves) -> torch.Tensor | None:
    """Adam's P of all parameters; None where there is none."""
    if adp.gns.preconditioner is None:
        return None
    groups = adp.optimizer.param_groups
    divisors = [
        adp.gns.preconditioner(param, groups[index % len(groups)])
        for index, param in enumerate(model.parameters())
    ]
    if None in divisors:
        return None
    return torch.cat([divisor(slice(None)) for divisor in divisors if divisor is not None])


def train_seeds(run: Run, seeds: int) -> dict[str, list[float]]:
    """Means over seeds of what `train` tells, relative to the mean truth, by group: 1 is exact."""
    runs = [train(run, seed) for seed in range(seeds)]
    total = {key: sum(one[key] for one in runs) for key in runs[0]}
    return {
        key: (total[key] / total[f"true_{key.removeprefix('smoothed_')}"]).tolist()
        for key in ("sqr", "var", "smoothed_sqr", "smoothed_var", "gain")
    }
