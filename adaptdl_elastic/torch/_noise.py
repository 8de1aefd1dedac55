"""The gradient noise scale: pure arithmetic on squared norms, no tensors and no communication.

A training step computes ḡ, the mean gradient of m = S·m₀ samples, where m₀ is the initial batch size
and S the *scale*. With G the true gradient and Σ the covariance of one sample's gradient::

    E|ḡ|² = |G|² + tr Σ / m

so an unbiased estimate V of the variance of the mean, E V = tr Σ / m, gives both moments without
bias::

    |G|²  ≈  |ḡ|² − V                    `sqr`
    tr Σ / m₀  ≈  S·V                    `var`: the variance of a gradient at the initial batch size

(McCandlish, Kaplan, Amodei et al., *An Empirical Model of Large-Batch Training*, 2018, appendix A.1;
it writes the same with B_small and B_big.) Three ways to V, by what a step computes anyway:

* **Parts** (`variance_from_parts`). ḡ is the mean of n part-gradients of equal size, whose mean
  squared norm is Q = mean |gᵢ|²: V = (Q − |ḡ|²)/(n − 1). The parts are the replicas'
  gradients; with one replica and accumulation, the first micro-batch's stands for all.
* **Signs** (`balanced_signs`). One replica, no accumulation: give half of the samples the sign +1 and
  half −1, at random. g± = (1/m) Σ sᵢ gᵢ has mean zero because the signs sum to zero, and
  V = |g±|² because E|g±|² = tr Σ / m. It is the split of a batch in two halves, (g₁ − g₂)/2, with
  one squared norm instead of two, and it costs one more backward pass through the graph that is
  there, on sampled steps only. The weights do not move between the halves.
* **Successive gradients**, V = |g₁ − g₂|²/2. Where the graph can not be walked twice: the
  gradients of two successive steps are taken for parts of one batch of twice the size, as in AdaptDL's
  differenced estimator. Biased when weights move: the step −η·g₁ shifts G by −η·H·g₁, which makes
  g₁·g₂ too small by η·tr(HΣ)/m and |G|² with it. A last resort, and said in the log.

`gain` and AdaScale's learning-rate factor are the same quotient: Johnson, Agrawal, Gu, Guestrin,
*AdaScale SGD: A User-Friendly Algorithm for Distributed Training*, ICML 2020, section 3; Pollux
(Qiao et al., OSDI 2021, section 3.1) divides it by the scale to have the statistical efficiency.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[np.float64]

SMOOTHING = 0.999
"""Weight that the past keeps per step of the initial batch size, as in AdaptDL."""


def variance_from_parts(part_sqr: Array, mean_sqr: Array, count: int) -> Array:
    """Variance of the mean of `count` part-gradients.

    part_sqr: mean |gᵢ|²; mean_sqr: |ḡ|²; both shaped [groups]. Unbiased, so it can be negative.
    """
    if count < 2:
        raise ValueError(f"a variance needs at least two parts, got count={count}")
    return (part_sqr - mean_sqr) / (count - 1)


def balanced_signs(count: int, generator: torch.Generator) -> torch.Tensor:
    """`count` numbers ±1 in random order that sum to zero, shape [count].

    An odd count leaves one sample out and gives the others √(count/(count − 1)), so that
    E|(1/m) Σ sᵢ gᵢ|² = tr Σ / m in both cases. Needs at least two samples.
    """
    if count < 2:
        raise ValueError(f"a batch of {count} can not be split in two halves")
    half = count // 2
    signs = torch.zeros(count)
    order = torch.randperm(count, generator=generator)
    magnitude = (count / (2 * half)) ** 0.5
    signs[order[:half]] = magnitude
    signs[order[half : 2 * half]] = -magnitude
    return signs


def lr_gain(sqr: Array, var: Array, scale: float) -> Array:
    """(var + sqr)/(var/scale + sqr), AdaScale's r_t; 1 where nothing is known. Same shape as `sqr`.

    At scale 1 it is exactly 1. Where the gradient is all noise (sqr ≤ 0) it is `scale`, where there
    is none (var ≤ 0) it is 1.
    """
    sqr, var = np.maximum(sqr, 0.0), np.maximum(var, 0.0)
    total = sqr + var
    below = sqr + var / scale
    return np.divide(total, below, out=np.ones_like(total), where=below > 0.0)


@dataclass(frozen=True)
class Measurement:
    """What one step says. Shapes [groups]."""

    mean_sqr: Array  # |ḡ|²
    variance: Array  # V, of the mean
    scale: float  # S

    @property
    def sqr(self) -> Array:
        """Estimate of |G|²."""
        return self.mean_sqr - self.variance

    @property
    def var(self) -> Array:
        """Estimate of tr Σ / m₀."""
        return self.scale * self.variance

    @property
    def finite(self) -> bool:
        """False after an overflow in mixed precision, or a loss that was inf or nan."""
        return bool(np.isfinite(self.mean_sqr).all() and np.isfinite(self.variance).all())


@dataclass
class Moments:
    """Exponentially smoothed moments, without the bias towards their initial zero (as Adam's)."""

    groups: int
    smoothing: float = SMOOTHING
    sqr_sum: Array = field(init=False)
    var_sum: Array = field(init=False)
    weight: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.sqr_sum = np.zeros(self.groups)
        self.var_sum = np.zeros(self.groups)

    def add(self, measurement: Measurement, steps: float = 1.0) -> None:
        """Take in a measurement that stands for `steps` training steps.

        A step at scale S counts as S steps of the initial batch size: it is as much more precise.
        """
        keep = self.smoothing ** (steps * measurement.scale)
        self.sqr_sum = keep * self.sqr_sum + (1.0 - keep) * measurement.sqr
        self.var_sum = keep * self.var_sum + (1.0 - keep) * measurement.var
        self.weight = keep * self.weight + (1.0 - keep)

    @property
    def sqr(self) -> Array:
        """Mean estimate of |G|², shape [groups]; not clipped. Zero before the first measurement."""
        return self.sqr_sum / self.weight if self.weight else self.sqr_sum

    @property
    def var(self) -> Array:
        """Mean estimate of tr Σ / m₀, shape [groups]; not clipped."""
        return self.var_sum / self.weight if self.weight else self.var_sum

    def state_dict(self) -> dict[str, Any]:
        """Plain lists and numbers."""
        return {"sqr": self.sqr_sum.tolist(), "var": self.var_sum.tolist(), "weight": self.weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned; ValueError when the number of groups is another."""
        if len(state["sqr"]) != self.groups:
            raise ValueError(
                f"the saved gradient statistics are of {len(state['sqr'])} parameter groups, the "
                f"optimizer has {self.groups}: build it as it was when the checkpoint was written"
            )
        self.sqr_sum = np.asarray(state["sqr"], dtype=np.float64)
        self.var_sum = np.asarray(state["var"], dtype=np.float64)
        self.weight = float(state["weight"])


@dataclass(frozen=True)
class Schedule:
    """Which steps are measured: every one at first, then ever fewer until every `longest`-th.

    The gap is a fixed fraction of the steps already taken, so that the number of measurements goes on
    growing (logarithmically) until the gap is `longest`, and what is known of the early, fast
    changing gradients is recent. A function of the step alone: all replicas agree.
    """

    longest: int
    patience: int = 16  # a gap of g after patience·g steps

    def gap(self, step: int) -> int:
        """Steps from a measurement at `step` to the next."""
        return max(1, min(self.longest, step // self.patience))


def as_array(values: Sequence[float]) -> Array:
    """float64, shape [len(values)]."""
    return np.asarray(values, dtype=np.float64)
