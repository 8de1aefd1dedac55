"""Define what a data loader is to the other parts of the training library."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol


class BatchSize(NamedTuple):
    """Hold a batch size: samples per pass of one replica, and passes without a step before each step."""

    atomic_bsz: int
    accumulation_steps: int


@dataclass(frozen=True)
class Limits:
    """Hold the limits of the batch size that the script gave the training loader."""

    init: int
    maximum: int | None  # None: the batch size does not change
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


class ElasticLoader(Protocol):
    """Define a data loader as models and the recovery use it."""

    key: str
    batch_size: int
    size: BatchSize
    """Batch of one replica and accumulation steps of a full window."""
    sample_dimension: int | None
    micro_batch: int
    """Number of the current batch within its window, counted from 0."""

    @property
    def training(self) -> bool:
        """Whether models are trained with this loader."""

    @property
    def index_trained(self) -> int:
        """Samples that the running data loop has taken, without a rest that was left out at its end."""

    @property
    def training_loader_undecided(self) -> bool:
        """Whether no loader has been used for training yet."""

    @property
    def adaptive(self) -> bool:
        """Whether the batch size is chosen during training."""

    @property
    def max_batch_size(self) -> int | None:
        """Largest batch size that autoscaling may choose; None without autoscaling."""

    @property
    def local_bsz_bounds(self) -> tuple[int, int] | None:
        """Smallest and largest batch of one replica, as the script gave them."""

    @property
    def limits(self) -> Limits:
        """Limits of the batch size, with that of the memory if this loader trains."""

    @property
    def current_batch_size(self) -> int:
        """Samples of a full optimizer step, over all replicas."""

    @property
    def accumulation_steps(self) -> int:
        """Batches without an optimizer step in the current window."""

    @property
    def window_samples(self) -> int:
        """Samples of the current optimizer step, over all replicas and all batches of its window."""

    @property
    def local_samples(self) -> int:
        """Samples of the current batch that count for training."""

    @property
    def gradient_weight(self) -> float:
        """Factor by which to multiply the mean gradient of the current batch."""

    @property
    def parts(self) -> float:
        """Number of equal parts to which the parts of the window's gradient are equivalent."""

    def is_accum_step(self) -> bool:
        """Return whether more batches follow the current one before the optimizer steps."""

    def is_optim_step(self) -> bool:
        """Return whether the optimizer steps after the current batch."""

    @property
    def drives(self) -> bool:
        """Whether this loop counts as the training of its epoch."""

    def part_done(self) -> float:
        """Return the part of the running data loop that is done, from 0 to 1; 0 if that is not known."""

    def expected_batches(self) -> int | None:
        """Return how many batches this process gets in the whole running data loop; None: not known."""

    def fit_memory(self) -> None:
        """Choose batches that fit into the new, smaller memory limit; the iterator is made again."""

    def train(self) -> None:
        """Make this the loader that models are trained with."""


class LearntLimit(Protocol):
    """Hold the largest local batch that fits into memory; see `torch._tuning.memory_limit`."""

    largest: int | None
    """Samples of one replica; None while that is not known."""
