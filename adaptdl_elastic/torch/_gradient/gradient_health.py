"""Find out whether gradients are finite, and vary: training on inf or nan runs but learns nothing."""

from __future__ import annotations

from collections.abc import Callable

LEAST_STEPS = 20
"""Optimizer steps without a finite gradient after which that is reported."""

_LEAST_MEASUREMENTS = 3
"""Measurements among these steps; later in a run not every step is measured."""

SOON = LEAST_STEPS // _LEAST_MEASUREMENTS + 1
"""Steps after which a gradient of inf or nan is followed by another measurement."""

_NO_VARIANCE = 1e-6
"""Variance of the gradient, relative to its square, that is none: rounding leaves as much of zero."""


class GradientHealth:
    """Whether the gradients of one model are finite and vary, from measurements that are made anyway.

    A GradScaler skips steps while it searches its scale. Such steps count only once the scale is down to 1,
    where scaling causes no overflow.
    """

    def __init__(self) -> None:
        self.problem: str | None = None
        """Description of the problem and its remedy; None: no problem."""
        self._first_bad_step: int | None = None
        self._bad_measurements = 0
        self._skipped_in_a_row = 0
        self.equal: str | None = None
        """Description of the problem that gradients do not vary, and its remedy; None: no problem."""
        self._first_equal_step: int | None = None
        self._equal_measurements = 0

    def measured(self, step: int, finite: bool) -> None:
        """Record whether the gradient of optimizer step `step` was finite."""
        if finite:
            self._first_bad_step, self._bad_measurements, self.problem = None, 0, None
            return
        if self._first_bad_step is None:
            self._first_bad_step = step
        self._bad_measurements += 1
        steps = step - self._first_bad_step + 1
        if steps >= LEAST_STEPS and self._bad_measurements >= _LEAST_MEASUREMENTS:
            self.problem = self.problem or (
                f"gradients are inf or nan in every step since step {self._first_bad_step}: nothing is "
                f"learnt. "
                f"Stop the job, lower the learning rate (with ADAPTDL_OPTIONS_FROM=script), clip gradients "
                f"or look for nan in the data, and go on from a checkpoint of an earlier step"
            )

    def varied(self, step: int, square: float, variance: float) -> None:
        """Record |G|² and the variance of the gradient that optimizer step `step` took."""
        if variance > _NO_VARIANCE * square or square == 0.0:
            self._first_equal_step, self._equal_measurements, self.equal = None, 0, None
            return
        if self._first_equal_step is None:
            self._first_equal_step = step
        self._equal_measurements += 1
        if (
            step - self._first_equal_step + 1 >= LEAST_STEPS
            and self._equal_measurements >= _LEAST_MEASUREMENTS
        ):
            self.equal = self.equal or (
                f"the gradient has had no variance since step {self._first_equal_step}: all replicas, or all "
                f"samples, give the same one, and the batch size cannot be chosen by it. Look for replicas "
                f"that read the same samples, for noise that is drawn with one seed, or for a loss that does "
                f"not depend on the samples"
            )

    def skipped(self, step: int, loss_scale: Callable[[], float]) -> None:
        """Record that a GradScaler has skipped the step after `step`.

        Args:
            step: the last optimizer step.
            loss_scale: returns the present scale. It may wait for the GPU, so it is called only after many
                such steps.
        """
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row < LEAST_STEPS or self.problem is not None:
            return
        scale = loss_scale()
        if scale <= 1.0:
            self.problem = (
                f"gradients are inf or nan in every step since step {step}, though GradScaler has left out "
                f"{self._skipped_in_a_row} steps and come down to a scale of {scale:g}: nothing is learnt. "
                f"Look for nan in the data and the loss, lower the learning rate, or use bfloat16"
            )

    def stepped(self) -> None:
        """Record that the optimizer has stepped."""
        if self._skipped_in_a_row >= LEAST_STEPS:
            self.problem = None
        self._skipped_in_a_row = 0
