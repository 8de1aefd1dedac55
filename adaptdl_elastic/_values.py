"""Define the values and exceptions that the parts of the training library pass on to each other."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

Position = tuple[int, int, int]
"""(epoch, number of the data loop within it, global samples handed out in it)."""

Place = tuple[int, int]
"""(epoch, number of the data loop within it)."""

Command = dict[str, Any]
"""An action at a boundary: the key `kind`, and arguments of that kind. Plain data, sent between replicas."""


class RetryDataLoop(Exception):
    """Raised after a recovery from a death: the data loop must be continued from its new position."""


class StepOutOfMemory(RuntimeError):
    """Raised if the gradients of a step are lost because a replica ran out of memory; on all replicas.

    Args:
        message: What has happened, for users.
        largest: Largest local batch to try from now on in the outermost data loop; None: any.
        inner: The same for data loops inside of it, by the keys of their loaders.
    """

    def __init__(self, message: str, largest: int | None, inner: dict[str, int] | None = None) -> None:
        super().__init__(message)
        self.largest = largest
        self.inner = inner or {}


class BatchSize(NamedTuple):
    """Hold a batch size: samples per pass of one replica, and passes without a step before each step."""

    atomic_bsz: int
    accumulation_steps: int


@dataclass(frozen=True)
class Limits:
    """Hold the limits of the batch size that the script gave the training loader."""

    init: int
    # None: the batch size does not change
    maximum: int | None
    bounds: tuple[int, int] | None
    accumulation: bool

    @cached_property
    def exact(self) -> bool:
        """Whether a step has exactly `init` samples, as autoscaling has no other choice."""
        return self.maximum is None or (self.maximum == self.init and self.accumulation)


@dataclass(frozen=True)
class ReportedPosition:
    """Hold the position of the job after its last training step, as it is reported.

    Attributes:
        step: Number of steps.
        epoch: Present epoch.
        epochs: Declared number of epochs; None: no end is declared.
        samples_done: Samples so far, at the initial batch size.
        samples_total: Samples of the whole job, at the initial batch size.
    """

    step: int = 0
    epoch: int = 0
    epochs: int | None = None
    samples_done: float | None = None
    samples_total: float | None = None
