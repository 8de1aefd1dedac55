"""A data loop without data: what AdaptiveDataParallel asks of the loader whose batch it is fed with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from adaptdl_elastic import _session
from adaptdl_elastic._values import BatchSize, Limits
from adaptdl_elastic.torch._tuning.reporter import Metrics


@dataclass
class FakeLoader:
    """window: samples of each micro-batch by replica, [micro-batches][replicas]; chunk: which one it is."""

    window: Sequence[Sequence[int]]
    batch_size: int
    current_local_bsz: int
    chunk: int = 0
    training: bool = False
    training_loader_undecided: bool = False
    sample_dimension: int | None = None
    key: str = "0"
    limits: Limits = field(default_factory=lambda: Limits(1, None, None, False))
    max_batch_size: int | None = None
    local_bsz_bounds: tuple[int, int] | None = None

    def train(self) -> None:
        self.training = True

    @property
    def accumulation_steps(self) -> int:
        return len(self.window) - 1

    @property
    def window_samples(self) -> int:
        return sum(map(sum, self.window))

    @property
    def current_batch_size(self) -> int:
        return self.current_local_bsz * _session.current().replicas * len(self.window)

    @property
    def parts(self) -> float:
        if _session.current().replicas == 1:
            return self.window_samples / self.window[0][0]
        return self.window_samples**2 / sum(sum(of) ** 2 for of in zip(*self.window, strict=True))

    @property
    def local_samples(self) -> int:
        return self.window[self.chunk][_session.current().rank]

    @property
    def gradient_weight(self) -> float:
        parts = len(self.window) * _session.current().replicas
        return self.local_samples * parts / self.window_samples

    @property
    def micro_batch(self) -> int:
        return self.chunk

    def is_accum_step(self) -> bool:
        return self.chunk < self.accumulation_steps

    def is_optim_step(self) -> bool:
        return not self.is_accum_step()

    def __enter__(self) -> FakeLoader:
        session: Any = _session.current()
        session.loader = self
        return self

    def __exit__(self, *error: object) -> None:
        _session.current().loader = None


@dataclass
class FakeTrainingLoader:
    """The training loader as `Metrics` reads it."""

    limits: Limits
    size: BatchSize

    @property
    def adaptive(self) -> bool:
        return self.limits.maximum is not None

    @property
    def batch_size(self) -> int:
        return self.limits.init if self.size.atomic_bsz else 0

    @property
    def current_batch_size(self) -> int:
        total = _session.current().replicas * self.size.atomic_bsz * (self.size.accumulation_steps + 1)
        return self.batch_size if self.limits.exact else total


def limit(
    init: int,
    maximum: int | None = None,
    bounds: tuple[int, int] | None = None,
    gradient_accumulation: bool = False,
) -> None:
    """Train with a loader of these limits."""
    session: Any = _session.current()
    known = session.training_loader
    size = BatchSize(0, 0) if known is None else known.size
    session.training_loader = FakeTrainingLoader(Limits(init, maximum, bounds, gradient_accumulation), size)


def use(metrics: Metrics, atomic: int, accumulation: int = 0) -> None:
    """Train with this batch size."""
    session: Any = _session.current()
    session.training_loader.size = BatchSize(atomic, accumulation)
    metrics.batch_size_changed()
