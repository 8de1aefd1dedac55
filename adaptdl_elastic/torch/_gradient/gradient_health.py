"""Find out whether gradients are finite: training on inf or nan runs but learns nothing."""

from __future__ import annotations

from collections.abc import Callable

LEAST_STEPS = 20
"""Optimizer steps without a finite gradient after which that is reported."""

_LEAST_MEASUREMENTS = 3
"""Measurements among these steps; later in a run not every step is measured."""


class GradientHealth:
    """Whether the gradients of one model are finite, from measurements that are made anyway.

    A GradScaler skips steps while it searches its scale. Such steps count only once the scale is down to 1,
    where scaling causes no overflow.
    """

    def __init__(self) -> None:
        self.problem: str | None = None
        """What is wrong and what to do, or None."""
        self._first_bad_step: int | None = None
        self._bad_measurements = 0
        self._skipped_in_a_row = 0

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
                f"Stop the job, lower the learning rate, clip gradients or look for nan in the data, and go "
                f"on from a checkpoint of an earlier step"
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
