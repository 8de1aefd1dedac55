"""Give a loader that a script defines the public attributes of the library's loaders."""

from __future__ import annotations

from typing import Any

from adaptdl_elastic.torch._data.loader import AdaptiveDataLoaderHelper


class AdaptiveDataLoaderMixin:
    """Give a loader that a script defines the public attributes of `AdaptiveDataLoaderHelper`.

    Args:
        batch_size: Initial number of samples per optimizer step, over all replicas.
    """

    def __init__(self, batch_size: int) -> None:
        self._elastic = AdaptiveDataLoaderHelper(batch_size)

    def autoscale_batch_size(
        self,
        max_batch_size: int,
        local_bsz_bounds: tuple[int | None, int | None] | None = None,
        gradient_accumulation: bool = False,
    ) -> None:
        """Let the batch size change during training: `AdaptiveDataLoaderHelper.autoscale_batch_size`."""
        self._elastic.autoscale_batch_size(max_batch_size, local_bsz_bounds, gradient_accumulation)

    @property
    def current_local_bsz(self) -> int:
        """Samples of a full batch on this replica."""
        return self._elastic.current_local_bsz

    @property
    def current_batch_size(self) -> int:
        """Samples of a full optimizer step, over all replicas."""
        return self._elastic.current_batch_size

    @property
    def accumulation_steps(self) -> int:
        """Batches without an optimizer step before each batch with one."""
        return self._elastic.accumulation_steps

    @property
    def training(self) -> bool:
        """Whether models are trained with this loader."""
        return self._elastic.training

    def to_tensorboard(self, writer: Any, global_step: int, tag_prefix: str = "") -> None:
        """Write the batch sizes to TensorBoard. Does nothing on ranks other than 0."""
        self._elastic.to_tensorboard(writer, global_step, tag_prefix)
