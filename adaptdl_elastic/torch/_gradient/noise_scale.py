"""The gradient noise scale of a model: its running estimates, and the gain that follows from them."""

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
    Schedule,
    lr_gain,
)
from adaptdl_elastic.torch._gradient.gradient_health import GradientHealth

__all__ = ["AdamGradientNoiseScale", "GradientNoiseScale"]

logger = logging.getLogger(__name__)

_SECOND_MOMENTS = ("max_exp_avg_sq", "exp_avg_sq", "square_avg")  # Adam with amsgrad, Adam, RMSprop


class GradientNoiseScale:
    """Estimates the gradient noise scale and the gain that follows from it.

    Symbols: m₀ is the initial batch size (the argument of AdaptiveDataLoader), the scale S of a step
    its batch size divided by m₀, |G|² the squared norm of the true gradient (`sqr`), tr Σ / m₀ the
    variance of a gradient at m₀ (`var`), all in the units of the loss squared per parameter squared.

    Args:
        adp: The AdaptiveDataParallel that it belongs to, or None.
        optimizer: Its parameter groups are kept apart.
        mp_scaler: The torch.amp.GradScaler in use.
        num_replicas: As AdaptDL's: with `accum_scale` the scale of a step without an AdaptiveDataLoader.
        accum_scale: See `num_replicas`.
        smoothing: The means are over at most 1/(1 − smoothing) steps of the initial batch size, fewer
            where gradients have changed; in (0, 1).

    Source: McCandlish et al., *An Empirical Model of Large-Batch Training*, 2018; Johnson et al.,
    *AdaScale SGD*, ICML 2020; Qiao et al., *Pollux*, OSDI 2021.
    """

    #: Longest gap, in steps, between two measurements that cost two passes over the gradient ...
    cheap_schedule = Schedule(longest=8)
    #: ... and between two that cost another backward pass (one replica, no accumulation).
    costly_schedule = Schedule(longest=40)
    #: Steps before the first measurement.
    settles_after = 0

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
        self._steps = 0
        self._samples = 0.0  # seen, in initial batch sizes
        self._next = 0  # step to be measured next
        self._factors: tuple[float, float, Array] | None = None  # scale, gain, by group: of now
        self.skipped = 0
        self.health = GradientHealth()

    # What was measured.

    @property
    def raw_sqr_avg(self) -> Array:
        """Mean estimate of |G|² by parameter group, shape [groups]. Unbiased, so it can be negative."""
        return self._moments.sqr

    @property
    def raw_var_avg(self) -> Array:
        """Mean estimate of tr Σ / m₀ by parameter group, shape [groups]. Unbiased; can be negative."""
        return self._moments.var

    def sqr_avg(self) -> float:
        """|G|² of the whole model, ≥ 0."""
        return float(np.maximum(self.raw_sqr_avg, 0.0).sum())

    def var_avg(self) -> float:
        """tr Σ / m₀ of the whole model, ≥ 0."""
        return float(np.maximum(self.raw_var_avg, 0.0).sum())

    @property
    def groups(self) -> int:
        """Parameter groups that the optimizer had."""
        return self._moments.groups

    @property
    def known(self) -> bool:
        """Whether anything has been measured yet. Until then every gain is 1."""
        return self._moments.known

    def gain(self, scale: float) -> float:
        """How many steps of the initial batch size one step at `scale` is worth, in [1, scale].

        (var + sqr)/(var/scale + sqr), AdaScale's gain.

        Args:
            scale: Batch size over initial batch size, > 0.
        """
        _check_scale(scale)
        return self._at(scale)[1]

    def lr_gain(self, scale: float) -> Array:
        """The same by parameter group, shape [groups]: AdaScale's learning-rate factors."""
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

    # Where training stands.

    def get_progress(self) -> float:
        """Steps of the initial batch size that training so far is worth: the sum of every step's gain."""
        return self._progress

    def set_progress(self, progress: float) -> None:
        """Continue counting from `progress` ≥ 0."""
        if not (math.isfinite(progress) and progress >= 0.0):
            raise ValueError(f"progress must be a number of steps, 0 or more; got {progress!r}")
        self._progress = float(progress)

    @property
    def steps(self) -> int:
        """Optimizer steps so far."""
        return self._steps

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
        """Whether `zero_grad` now drops gradients: not in the middle of an accumulation window."""
        return self._accum_count == 0

    def reset_accumulation(self) -> None:
        """Begin a new window."""
        self._accum_count = 0

    # Fed by AdaptiveDataParallel.

    def count_micro_batch(self) -> None:
        """One more micro-batch has been accumulated."""
        self._accum_count += 1

    def due(self) -> bool:
        """Whether this step is to be measured. The same on every replica."""
        return self._steps >= self._next and self._steps >= self.settles_after

    def measured(self, schedule: Schedule) -> None:
        """The present step is being measured; the next is due as `schedule` says."""
        self._next = self._steps + schedule.gap(self._steps)

    def record(self, measurement: Measurement, step: int) -> bool:
        """Take in what was measured at `step`; False when it was inf or nan, which is skipped."""
        self.health.measured(step, measurement.finite)
        if not measurement.finite:
            self.skipped += 1
            logger.info("the gradient of step %d is inf or nan: not counted in its statistics", step)
            return False
        self.health.varied(step, float(measurement.mean_sqr.sum()), float(measurement.variance.sum()))
        self._moments.add(measurement)
        self._factors = None
        return True

    def advance(self, scale: float, size: float | None = None) -> None:
        """The optimizer has stepped at a learning rate for `scale`, with `size` initial batches of samples.

        size: `scale` unless given. It is less where the last batch of an epoch is shorter than the initial
        one. Such a step is taken at the learning rate of the initial batch size, as it would be without us,
        and is one iteration: AdaScale's gain, 1 at scale 1, goes with the learning rate of the step.
        """
        self._progress += self.gain(scale)
        self._samples += scale if size is None else size
        self._steps += 1
        self._accum_count = 0

    def change_units(self, factor: float) -> None:
        """The initial batch size is `factor` times what it was: forget the moments, convert what is counted.

        A step of the new one is worth the gain of `factor` steps of the old one.
        """
        self._progress /= self.gain(factor) if self.known else factor
        self._samples /= factor
        self._moments = Moments(self._moments.groups, self._moments.smoothing)
        self._next, self._factors = self._steps, None

    @property
    def preconditioner(self) -> Preconditioner | None:
        """What gradients are divided by before their norms are taken; None: nothing."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {
            "moments": self._moments.state_dict(),
            "progress": self._progress,
            "steps": self._steps,
            "samples": self._samples,
            "next": self._next,
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint; ValueError when the optimizer has other parameter groups."""
        self._moments.load_state_dict(state["moments"])
        self.set_progress(state["progress"])
        self._steps, self._samples = int(state["steps"]), float(state["samples"])
        self._next = int(state["next"])
        self.skipped = int(state["skipped"])
        self._factors = None
        self.reset_accumulation()


class AdamGradientNoiseScale(GradientNoiseScale):
    """The noise scale that matters to Adam: of the gradient after preconditioning.

    Adam moves along g / P with P = √(v̂) + ε, so the moments are taken of that: |P⁻¹G|² and
    tr(P⁻¹ΣP⁻¹)/m₀. P is the one before the step, which does not depend on the step's own gradient: the
    estimates stay unbiased given the past. Not measured are the first ten steps, and a step in which a
    parameter that has a gradient has no P yet. After t steps v̂ is like χ²_t/t, and 1/v̂, which both
    moments are proportional to, has the mean t/(t − 2): infinite at first, and single measurements of
    10⁵ times what follows would stay in the means for hundreds of steps.

    For torch.optim.Adam, AdamW and other optimizers that keep `exp_avg_sq` (`max_exp_avg_sq` with
    amsgrad), and for RMSprop's `square_avg`. Source of the preconditioner: Kingma and Ba, *Adam*, 2015;
    of taking the noise scale in its metric: Pollux (OSDI 2021), section 3.1, and its implementation.
    """

    #: Steps before the first measurement: P² is then within a fifth of what it settles to, on average.
    settles_after = 10

    @property
    def preconditioner(self) -> Preconditioner | None:
        """A function from a parameter and its group to P, slice by slice of the flattened parameter."""
        return self._divisor

    def _divisor(self, parameter: torch.Tensor, group: dict[str, Any]) -> Divisor | None:
        state: dict[str, Any] = self.optimizer.state.get(parameter, {})
        square = next((state[k] for k in _SECOND_MOMENTS if k in state), None)
        if square is None:
            return None
        correction: Any = 1.0
        if "betas" in group:
            step = state["step"]  # a tensor on the device when the optimizer is capturable
            on_device = isinstance(step, torch.Tensor) and step.is_cuda
            correction = 1.0 - float(group["betas"][1]) ** (step if on_device else float(step))
        flat = square.reshape(-1)

        def at(part: slice) -> torch.Tensor:
            root: torch.Tensor = (flat[part] / correction).sqrt_()
            return root.add_(group["eps"])

        return at


def _check_scale(scale: float) -> None:
    if not (math.isfinite(scale) and scale > 0.0):
        raise ValueError(f"a scale is a batch size over the initial one, a number above 0; got {scale!r}")
