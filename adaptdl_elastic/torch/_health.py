"""Training that runs and learns nothing: gradients that are never finite, a batch beyond the data set.

A problem is logged once, written as an event, and part of what the job reports of itself (`adaptdl status`),
each time with what to do about it. When it is over, an event says so and the report drops it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Lock

from adaptdl_elastic._session import Session

logger = logging.getLogger(__name__)

LEAST_STEPS = 20
"""Optimizer steps over which no gradient was finite before that is a problem."""

_LEAST_MEASUREMENTS = 3
"""Measurements in these steps: later in a run not every step is measured."""


class GradientHealth:
    """Whether the gradients of one model are finite, by measurements that are made anyway.

    A GradScaler leaves out steps while it searches its scale. Such steps count only once the scale is down to
    1, where nothing is scaled up and so nothing overflows because of it.
    """

    def __init__(self) -> None:
        self.problem: str | None = None
        """What is wrong and what to do, or None."""
        self._first_bad_step: int | None = None
        self._bad_measurements = 0
        self._skipped_in_a_row = 0

    def measured(self, step: int, finite: bool) -> None:
        """Take note of whether the gradient that optimizer step `step` took was finite."""
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
        """Take note that a GradScaler has left out the step after `step`.

        loss_scale: Returns the present scale. It may wait for the GPU: it is called after many such steps.
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
        """Take note that the optimizer has stepped."""
        if self._skipped_in_a_row >= LEAST_STEPS:
            self.problem = None
        self._skipped_in_a_row = 0


def data_problem(samples: int, batch_size: int, initial: int, equal_parts: int) -> str | None:
    """Return what is wrong where a batch is larger than the data set, else None.

    Args:
        samples: In the data set; 0 where that is not known.
        batch_size: In use: a whole number of samples for each of `equal_parts`, so perhaps rounded up.
        initial: As the data loader was given it.
        equal_parts: Batches of one optimizer step, over all replicas.
    """
    if not samples:
        return None
    every = "every step takes all of them and an epoch is one step"
    if initial > samples:
        return (
            f"batch_size={initial} is more than the {samples} samples of the data set: {every}. "
            f"Give a batch_size of {samples} at most, or more data"
        )
    if batch_size - equal_parts >= samples:
        return (
            f"the batch has grown to {batch_size} samples, and the data set has {samples}: {every}. "
            f"Call autoscale_batch_size with a max_batch_size of {samples} at most"
        )
    return None


class TrainingWarnings:
    """The problems that there are now. `report` may be called from any thread; without news it is cheap."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._logged: set[str] = set()
        self._problems: dict[str, str] = {}
        self._lock = Lock()

    def report(self, what: str, problem: str | None) -> bool:
        """Take note of a problem with `what`, or that there is none. Return whether that is news."""
        if (what in self._problems) == (problem is not None):
            return False
        with self._lock:
            if problem is None:
                self._problems.pop(what, None)
            else:
                self._problems[what] = problem
        session = self._session
        if session.rank == 0:
            if problem is None:
                session.emit("warning_over", about=what, step=session.step)
            else:
                session.emit("warning", about=what, message=problem, step=session.step)
                if what not in self._logged:
                    self._logged.add(what)
                    logger.warning("%s", problem)
        return True

    @property
    def messages(self) -> tuple[str, ...]:
        """The problems, oldest first."""
        with self._lock:
            return tuple(self._problems.values())
