"""Linear regression whose gradient noise is known in closed form, and replicas that train it.

y = xᵀθ* + ε with x ~ N(0, Λ) and ε ~ N(0, σ²), loss ½(xᵀθ − y)². With δ = θ − θ*, one sample's gradient
g = x(xᵀδ − ε) has the mean G = Λδ, and because E[xxᵀ(xᵀδ)²] = 2Λδδᵀ Λ + (δᵀΛδ)Λ for Gaussian x::

    tr Σ = E|g|² − |G|² = |G|² + (δᵀΛδ + σ²)·tr Λ
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from adaptdl_elastic.torch._noise import Measurement, Schedule
from adaptdl_elastic.torch.parallel import AdaptiveDataParallel

SCALE = 8.0
"""Scale at which gains are compared."""


@dataclass(frozen=True)
class Problem:
    """The regression. δ₀ is where training starts, relative to θ*."""

    features: int = 512
    noise: float = 1.0
    start: float = 0.5  # every component of δ₀
    condition: float = 4.0  # largest over smallest eigenvalue of Λ

    @property
    def spectrum(self) -> torch.Tensor:
        """Eigenvalues of Λ (it is diagonal), shape [features], with mean 1."""
        values = torch.logspace(0, 1, self.features) ** math.log10(self.condition)
        return values / values.mean()

    def batch(self, samples: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """(x, ε), shapes [samples, features] and [samples, 1]; y = ε because θ* is 0."""
        x = torch.randn(samples, self.features, generator=generator) * self.spectrum.sqrt()
        return x, self.noise * torch.randn(samples, 1, generator=generator)

    def truth(self, delta: torch.Tensor, part: slice = slice(None)) -> tuple[float, float]:
        """|G|² and tr Σ of one sample, of the parameters `part`, at θ* + δ."""
        spectrum = self.spectrum.double()
        delta = delta.detach().flatten().double()
        sqr = float(((spectrum * delta)[part] ** 2).sum())
        residual = float((spectrum * delta**2).sum()) + self.noise**2
        return sqr, sqr + residual * float(spectrum[part].sum())


def train(
    lr: float,
    seed: int,
    *,
    steps: int = 500,
    local: int = 64,
    every_step: bool = True,
    problem: Problem = Problem(),
) -> dict[str, Any]:
    """Train by plain SGD at a constant batch; means over all steps of what is estimated and of the truth.

    `sqr` and `var` are of single steps, `smoothed_…` what `sqr_avg()` and `var_avg()` said after each, `gain`
    the gain at `SCALE` that follows from those. The defaults are such that five seeds of 500 steps have a
    standard error of about 2 %.
    """
    rank, replicas = dist.get_rank(), dist.get_world_size()
    model = torch.nn.Linear(problem.features, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(problem.start)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    adp = AdaptiveDataParallel(model, optimizer, name=f"seed {seed}")
    adp._sampler._generator.manual_seed(seed)
    if every_step:
        adp.gns.cheap_schedule = adp.gns.costly_schedule = Schedule(longest=1)
    batch = local * replicas
    measured: list[tuple[float, ...]] = []  # |G|², tr Σ / batch; the same smoothed; gain
    gns, record = adp.gns, adp.gns.record

    def keep(measurement: Measurement, step: int) -> bool:
        counted = record(measurement, step)
        raw = float(measurement.sqr.sum()), float(measurement.var.sum())
        measured.append((*raw, gns.sqr_avg(), gns.var_avg(), gns.gain(SCALE)))
        return counted

    adp.gns.record = keep  # type: ignore[method-assign]
    truth: list[tuple[float, float]] = []
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    for _ in range(steps):
        x, y = problem.batch(local, generator)
        optimizer.zero_grad()
        (0.5 * (adp(x) - y) ** 2).mean().backward()
        if adp.gns.due():
            truth.append(problem.truth(model.weight))
        optimizer.step()
    adp._sampler.collect()
    assert len(measured) == len(truth)
    sqr, var, smoothed_sqr, smoothed_var, gain = (sum(x) / len(x) for x in zip(*measured, strict=True))
    gains = [(v / batch + s) / (v / batch / SCALE + s) for s, v in truth]
    return {
        "sqr": sqr,
        "var": var * batch,
        "smoothed_sqr": smoothed_sqr,
        "smoothed_var": smoothed_var * batch,
        "gain": gain,
        "true_sqr": sum(s for s, _ in truth) / len(truth),
        "true_var": sum(v for _, v in truth) / len(truth),
        "true_gain": sum(gains) / len(gains),
    }


def train_seeds(lr: float, seeds: int, every_step: bool = True) -> dict[str, float]:
    """Means over seeds of what `train` tells, relative to the mean truth: 1 is exact."""
    runs = [train(lr, seed, every_step=every_step) for seed in range(seeds)]
    total = {key: sum(run[key] for run in runs) for key in runs[0]}
    return {
        key: total[key] / total[f"true_{key.removeprefix('smoothed_')}"]
        for key in ("sqr", "var", "smoothed_sqr", "smoothed_var", "gain")
    }
