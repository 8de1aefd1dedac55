"""Keep running estimates of a model's gradient noise scale, and compute the gain from them."""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np
import torch

from adaptdl_elastic.torch._gradient.comm_hook import Divisor, Preconditioner
from adaptdl_elastic.torch._gradient.estimator import (
    SMOOTHING,
    Array,
    Measurement,
    Moments,
    lr_gain,
)
from adaptdl_elastic.torch._gradient.gradient_health import SOON, GradientHealth

__all__ = ["AdamGradientNoiseScale", "GradientNoiseScale"]

logger = logging.getLogger(__name__)

# 1 − β₂ of Adam, whose v̂ after a step is at least that part of the squared gradient
_RARE = 1e-3
# relative error of a gain
_PRECISE = 0.12
# Adam with amsgrad, Adam, RMSprop
_SECOND_MOMENTS = ("max_exp_avg_sq", "exp_avg_sq", "square_avg")


class GradientNoiseScale:
    """Estimates the gradient noise scale and the resulting gain.

    Symbols: m₀ is the initial batch size (the argument of AdaptiveDataLoader), the scale S of a step is its
    batch size divided by m₀, |G|² is the squared norm of the true gradient (`sqr`), tr Σ / m₀ the variance of
    a gradient at m₀ (`var`); both in units of the loss squared per parameter squared.

    The attribute `steps` is the number of optimizer steps so far.

    Args:
        adp: its AdaptiveDataParallel, or None.
        optimizer: estimates are kept by its parameter groups.
        mp_scaler: the torch.amp.GradScaler in use.
        num_replicas: as in AdaptDL: with `accum_scale` the scale of a step without an AdaptiveDataLoader.
        accum_scale: as in AdaptDL: the other factor of that scale.
        smoothing: the means are over at most 1/(1 − smoothing) steps of the initial batch size, fewer if
            gradients have changed; in (0, 1).

    Source: McCandlish et al., *An Empirical Model of Large-Batch Training*, 2018; Johnson et al., *AdaScale
    SGD*, ICML 2020; Qiao et al., *Pollux*, OSDI 2021.
    """

    #: Steps from a measurement to the next one; None: as its cost allows.
    gap: int | None = None
    #: Steps before the first measurement.
    settles_after = 0
    #: Optimizer steps so far.
    steps = 0

    def __init__(
        self,
        adp: Any,
        optimizer: torch.optim.Optimizer,
        mp_scaler: Any = None,
        num_replicas: int | None = None,
        accum_scale: float | None = None,
        *,
        smoothing: float = SMOOTHING,
    ) -> None:
        if not 0.0 < smoothing < 1.0:
            raise ValueError(f"smoothing must lie between 0 and 1, got {smoothing!r}")
        self.optimizer = optimizer
        self.mp_scaler = mp_scaler
        self._moments = Moments(len(optimizer.param_groups), smoothing)
        self._accum_scale = 1.0 if accum_scale is None else float(accum_scale)
        self._accum_count = 0
        self._progress = 0.0
        # what the newest step has added to it
        self.last_gain = 0.0
        # samples so far, in initial batch sizes
        self._samples = 0.0
        # next step to be measured
        self._next = 0
        # (scale, gain, gain by group) at present
        self._factors: tuple[float, float, Array] | None = None
        self.skipped = 0
        self.health = GradientHealth()

    # Measurements

    @property
    def raw_sqr_avg(self) -> Array:
        """Mean estimate of |G|² by parameter group, shape [groups]. Unbiased, so it can be negative."""
        return self._moments.sqr

    @property
    def raw_var_avg(self) -> Array:
        """Mean estimate of tr Σ / m₀ by parameter group, shape [groups]. Unbiased; can be negative."""
        return self._moments.var

    def sqr_avg(self) -> float:
        """Return |G|² of the whole model, ≥ 0."""
        return float(np.maximum(self.raw_sqr_avg, 0.0).sum())

    def var_avg(self) -> float:
        """Return tr Σ / m₀ of the whole model, ≥ 0."""
        return float(np.maximum(self.raw_var_avg, 0.0).sum())

    def sqr_error(self) -> float:
        """Return the standard error of |G|² relative to an exact tr Σ: that of every gain. inf: unknown."""
        return self._moments.sqr_error()

    @property
    def settled(self) -> bool:
        """Whether the error of the gain at scale 16 is small, as far as it comes from |G|²."""
        sqr, var = self.sqr_avg(), self.var_avg()
        if not self.known or sqr + var / 16.0 <= 0.0:
            return False
        return self.sqr_error() * (1.0 / (sqr + var / 16.0) - 1.0 / (sqr + var)) < _PRECISE

    @property
    def groups(self) -> int:
        """Number of the optimizer's parameter groups."""
        return self._moments.groups

    @property
    def known(self) -> bool:
        """Whether anything has been measured yet. Until then every gain is 1."""
        return self._moments.known

    def gain(self, scale: float) -> float:
        """Return how many steps of the initial batch size one step at `scale` is worth, in [1, scale].

        It is (var + sqr)/(var/scale + sqr), AdaScale's gain.

        Args:
            scale: batch size over initial batch size, > 0.
        """
        _check_scale(scale)
        return self._at(scale)[1]

    def lr_gain(self, scale: float) -> Array:
        """Return the same by parameter group, shape [groups]: AdaScale's learning-rate factors."""
        _check_scale(scale)
        return self._at(scale)[2]

    def _at(self, scale: float) -> tuple[float, float, Array]:
        if self._factors is None or self._factors[0] != scale:
            if self.known:
                total = lr_gain(np.array([self.sqr_avg()]), np.array([self.var_avg()]), scale)
                self._factors = (scale, float(total[0]), lr_gain(self.raw_sqr_avg, self.raw_var_avg, scale))
            else:
                self._factors = (scale, 1.0, np.ones(self._moments.groups))
        return self._factors

    # Progress of the training

    def get_progress(self) -> float:
        """Return the sum of every step's gain: the training so far in steps of the initial batch size."""
        return self._progress

    def set_progress(self, progress: float) -> None:
        """Continue counting from `progress` ≥ 0."""
        if not (math.isfinite(progress) and progress >= 0.0):
            raise ValueError(f"progress must be a number of steps, 0 or more; got {progress!r}")
        self._progress = float(progress)

    @property
    def batches_seen(self) -> float:
        """Samples seen so far, in initial batch sizes."""
        return self._samples

    @property
    def accum_scale(self) -> float:
        """Batch size of one micro-batch on all replicas, relative to the initial batch size."""
        return self._accum_scale

    def set_accum_scale(self, accum_scale: float) -> None:
        """Set `accum_scale` > 0; a change in mid-window drops what was accumulated."""
        _check_scale(accum_scale)
        if accum_scale != self._accum_scale:
            self._accum_scale = float(accum_scale)
            self.reset_accumulation()

    @property
    def accum_count(self) -> int:
        """Micro-batches whose gradients have been accumulated since the last optimizer step."""
        return self._accum_count

    @property
    def should_zero_grad(self) -> bool:
        """Whether `zero_grad` drops gradients now: not in the middle of an accumulation window."""
        return self._accum_count == 0

    def reset_accumulation(self) -> None:
        """Begin a new window."""
        self._accum_count = 0

    # Called by AdaptiveDataParallel

    def count_micro_batch(self) -> None:
        """Count a micro-batch that has been accumulated."""
        self._accum_count += 1

    def due(self) -> bool:
        """Return whether this step is to be measured. The same on every replica."""
        return self.steps >= self._next and self.steps >= self.settles_after

    def measured(self, gap: int) -> None:
        """Record that the present step is being measured, and after how many steps the next one is due."""
        self._next = self.steps + (gap if self.gap is None else self.gap)

    def record(self, measurement: Measurement, step: int) -> bool:
        """Add the measurement of `step`; return whether the means have changed.

        They do not if it was inf or nan, and until its group of measurements is complete.
        """
        self.health.measured(step, measurement.finite)
        if not measurement.finite:
            logger.info("the gradient of step %d is inf or nan: not counted in its statistics", step)
            # so that training on such gradients is reported, and its end, within LEAST_STEPS or so
            self._next = min(self._next, self.steps + SOON)
            return False
        self.health.varied(step, float(measurement.mean_sqr.sum()), float(measurement.variance.sum()))
        if not self._moments.add(measurement):
            return False
        self._factors = None
        return True

    def advance(self, scale: float, size: float | None = None) -> None:
        """Record a step of the optimizer.

        Args:
            scale: scale of its learning rate.
            size: its samples in initial batch sizes; None: `scale`. It is less than 1 for the last batch of
                an epoch that is shorter than the initial batch. Such a step has the learning rate of the
                initial batch size, as without this library, and counts as one iteration: AdaScale's gain, 1
                at scale 1, belongs to the learning rate of the step.
        """
        self.last_gain = self.gain(scale)
        self._progress += self.last_gain
        self._samples += scale if size is None else size
        self.steps += 1
        self._accum_count = 0

    def change_units(self, factor: float) -> None:
        """Convert to an initial batch size that is `factor` times the former; drop the moments.

        A step of the new size is worth the gain of `factor` steps of the former one.
        """
        self._progress /= self.gain(factor) if self.known else factor
        self._samples /= factor
        self._moments = Moments(self._moments.groups, self._moments.smoothing)
        self._next, self._factors = self.steps, None

    @property
    def preconditioner(self) -> Preconditioner | None:
        """Function that returns the divisors of gradients before their norms are taken; None: no divisors."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {
            "moments": self._moments.state_dict(),
            "progress": self._progress,
            "steps": self.steps,
            "samples": self._samples,
            "next": self._next,
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint; ValueError if the optimizer has other parameter groups."""
        self._moments.load_state_dict(state["moments"])
        self.set_progress(state["progress"])
        self.steps, self._samples = int(state["steps"]), float(state["samples"])
        self._next = int(state["next"])
        self.skipped = int(state["skipped"])
        self._factors = None
        self.reset_accumulation()


class AdamGradientNoiseScale(GradientNoiseScale):
    """Keep the noise scale for Adam: that of the gradient after preconditioning.

    Adam moves along g / P with P = √(v̂) + ε, so the moments are those of g / P: |P⁻¹G|² and tr(P⁻¹ΣP⁻¹)/m₀.
    P is taken before the step. So it does not depend on the step's own gradient, and the estimates stay
    unbiased given the past. The first ten steps are not measured, nor a step in which a parameter with a
    gradient has no P yet. After t steps v̂ is distributed like χ²_t/t, and 1/v̂, to which both moments are
    proportional, has the mean t/(t − 2): infinite at first, and single measurements of 10⁵ times the later
    values would stay in the means for hundreds of steps.

    Elements that seldom have a gradient, as an embedding's rows of rare tokens, have a v̂ near 0 before the
    step in which one comes, and would be all of the noise. The optimizer divides by √(1 − β₂)·|g| at least,
    which depends on the step's own gradient. So v̂ counts as `_RARE` of its parameter's mean at least.

    For torch.optim.Adam, AdamW and other optimizers that keep `exp_avg_sq` (`max_exp_avg_sq` with amsgrad),
    and for RMSprop's `square_avg`. Source of the preconditioner: Kingma and Ba, *Adam*, 2015; of the noise
    scale in its metric: Pollux (OSDI 2021), section 3.1, and its implementation.
    """

    #: Steps before the first measurement: P² is then within a fifth of its later value, on average.
    settles_after = 10

    @property
    def preconditioner(self) -> Preconditioner | None:
        """Return the function that computes P for a parameter and its group.

        It computes P for one slice of the flattened parameter at a time.
        """
        return self._divisor

    def _divisor(self, parameter: torch.Tensor, group: dict[str, Any]) -> Divisor | None:
        state: dict[str, Any] = self.optimizer.state.get(parameter, {})
        square = next((state[k] for k in _SECOND_MOMENTS if k in state), None)
        if square is None:
            return None
        # of a sharded parameter: its part on this replica
        if hasattr(square, "to_local"):
            square = square.to_local()
        correction: Any = 1.0
        # Package schedulefree counts the steps in `k` of the group, apex in `step` of the group. Without a
        # count P is too small at first, by one factor for all parameters.
        step = state.get("step", group.get("k", group.get("step")))
        if "betas" in group and step is not None:
            # `step` may be a tensor on the device, for whose value the host must not wait
            correction = 1.0 - float(group["betas"][1]) ** step
        flat = square.reshape(-1)
        least = flat.mean() * _RARE

        def at(part: slice) -> torch.Tensor:
            root: torch.Tensor = torch.clamp(flat[part], min=least).div_(correction).sqrt_()
            return root.add_(group["eps"])

        return at


def _check_scale(scale: float) -> None:
    if not (math.isfinite(scale) and scale > 0.0):
        raise ValueError(f"a scale is a batch size over the initial one, a number above 0; got {scale!r}")
