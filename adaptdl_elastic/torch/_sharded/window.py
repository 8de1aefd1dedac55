"""Keep the gradients of an accumulation window of a sharded model.

Each backward pass adds up its gradients over the replicas, multiplied by this replica's share of the samples
of the window. So after the window's last pass `.grad` holds the mean over its samples.

Between the passes of a window the gradients are hidden (`.grad` is None), as in `_gradient.accumulation`: a
loop is written as if every batch ended with a step, and what it does to gradients of a part of the window
(clipping) must not change them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from adaptdl_elastic.torch._gradient.accumulation import Batch


class ShardedWindow:
    """Keep the gradients of the current window.

    Args:
        parameters: Returns the sharded parameters.
    """

    def __init__(self, parameters: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._parameters = parameters
        self._hidden: list[torch.Tensor | None] | None = None
        # the end of the present backward pass will be handled
        self._queued = False

    @property
    def under_way(self) -> bool:
        """Whether there are gradients of a window whose last pass is still to come."""
        return self._hidden is not None

    def reducing(self, batch: Batch, ended: Callable[[], None]) -> None:
        """Show the hidden gradients, since a backward pass is about to add to them.

        Args:
            batch: The current batch.
            ended: Function that is called when the gradients of the pass are complete.
        """
        if self._queued:
            return
        self._queued = True
        if self._hidden is not None:
            for param, gradient in zip(self._parameters(), self._hidden, strict=True):
                param.grad = gradient
            self._hidden = None

        def end() -> None:
            self._queued = False
            ended()
            if batch.accumulating:
                self._hidden = [param.grad for param in self._parameters()]
                for param in self._parameters():
                    param.grad = None

        # torch's own callback, which waits for the gradients, was queued before the first of them came
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def reset(self) -> None:
        """Begin a new window after a step, or after the window was dropped."""
        self._hidden, self._queued = None, False
