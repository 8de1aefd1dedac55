"""Accumulation windows: what a batch weighs, and where its gradient waits.

A *window* is the micro-batches between two optimizer steps, A of them on each of R replicas. With
n_ra samples in micro-batch a of replica r and a loss that is the mean over its samples, the window's
gradient is::

    ḡ = Σ_r Σ_a n_ra · g_ra / Σ_r Σ_a n_ra  =  1/(R·A) · Σ_r Σ_a w_ra · g_ra,
    w_ra = n_ra · R·A / Σ_r Σ_a n_ra

The data loader knows w_ra; it is exactly 1 but for the uneven end of an epoch. The gradient that comes
back into the module's outputs is multiplied with it, and the communication hook, which only sees the
last micro-batch's backward pass, multiplies the sum with 1/(R·A).

Between the backward passes of a window the gradients are out of sight (`.grad` is None): clipping,
GradScaler.unscale_, zero_grad and gradient norms in a user's loop, which all come once per batch,
then have nothing to spoil.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

Gradients = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True)
class Batch:
    """The batch that the data loader has just handed out, as one replica sees it."""

    replicas: int = 1
    micro_batches: int = 1  # of its window, on each replica
    accumulating: bool = False  # more of them follow before the optimizer steps
    weight: float = 1.0  # w of the module's docstring
    even: bool = True  # every micro-batch of the window, on every replica, is of one size, and not tiny
    local: int | None = None  # samples here; None: not known
    size: float = 1.0  # S: samples of the window relative to the initial batch size
    scale: float = 1.0  # what learning rates are scaled for: S, but 1 for the short end of an epoch

    @property
    def share(self) -> float:
        """1/(R·A)."""
        return 1.0 / (self.replicas * self.micro_batches)


class Window:
    """The gradients of the window under way, of one module's parameters."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        self._hidden: list[torch.Tensor | None] | None = None
        self._synced = False  # `.grad` is already an average over the replicas
        self.passes = 0  # backward passes that have ended since the window began

    def reset(self) -> None:
        """The window has ended: stepped, or dropped."""
        self._hidden = None
        self._synced = False
        self.passes = 0

    @property
    def under_way(self) -> bool:
        """Something has been accumulated that is not synchronised yet."""
        return self.passes > 0 and not self._synced

    def before_backward(self, batch: Batch) -> None:
        """Bring back what is hidden, for the next gradient to be added."""
        self._show()
        if self._synced and batch.micro_batches > 1:
            # A second synchronised pass (D(real), then D(fake)): the hook will multiply the average
            # that is there with 1/(R·A) and sum it over R replicas.
            grads = [p.grad for p in self._parameters if p.grad is not None]
            if grads:
                torch._foreach_mul_(grads, float(batch.micro_batches))

    def after_backward(self, batch: Batch) -> None:
        """Put the sum out of sight, unless it has been synchronised."""
        self.passes += 1
        if batch.accumulating:
            self._hide()
        else:
            self._synced = True

    def gradients(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(parameter, its accumulated gradient) where there is one, hidden or not."""
        hidden = self._hidden or [None] * len(self._parameters)
        for param, out_of_sight in zip(self._parameters, hidden, strict=True):
            grad = param.grad if out_of_sight is None else out_of_sight
            if grad is not None:
                yield param, grad

    def _hide(self) -> None:
        self._show()
        self._hidden = [p.grad for p in self._parameters]
        for param in self._parameters:
            param.grad = None

    def _show(self) -> None:
        if self._hidden is None:
            return
        for param, grad in zip(self._parameters, self._hidden, strict=True):
            if grad is None:
                continue
            if param.grad is not None:  # a second backward pass of one micro-batch
                grad.add_(param.grad)
            param.grad = grad
        self._hidden = None


class _Watch(torch.autograd.Function):
    """The identity; on the way back it tells `callback` the gradients, then multiplies with `weight`."""

    @staticmethod
    def forward(ctx: Any, callback: Callable[[Gradients], None], weight: float, *outputs: Any) -> Any:
        ctx.callback, ctx.weight = callback, weight
        ctx.set_materialize_grads(False)
        # Copies, not views: a custom function's view must not be changed in place, an output may.
        return tuple(output.clone() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        ctx.callback(grads)
        if ctx.weight != 1.0:
            grads = tuple(None if grad is None else grad * ctx.weight for grad in grads)
        return (None, None, *grads)


_apply: Any = _Watch.apply  # untyped in torch


def watch(
    output: Any, weight: float, callback: Callable[[list[torch.autograd.graph.GradientEdge], Gradients], None]
) -> Any:
    """`output` with every tensor in it that needs a gradient replaced by an equal one that is watched.

    `callback(edges, gradients)` is called once per backward pass through them, before it goes on into
    the module: `edges` are where it will go on, `gradients` what arrived (None: not part of the loss).
    Returns None when there is no tensor to watch.
    """
    tensors = _tensors(output)
    if not tensors:
        return None
    edges = [torch.autograd.graph.get_gradient_edge(tensor) for tensor in tensors]

    def arrived(gradients: Gradients) -> None:
        callback(edges, gradients)

    return _replaced(output, iter(_apply(arrived, weight, *tensors)))


def _parts(leaf: Any) -> dict[Any, Any]:
    """What a leaf of torch's pytree holds that is a dataclass, or a dict of its own kind."""
    if isinstance(leaf, dict):
        return dict(leaf)
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        return {field.name: getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)}
    return {}


def _tensors(output: Any) -> list[torch.Tensor]:
    """Those in `output` that need a gradient."""
    found = []
    for leaf in pytree.tree_leaves(output):
        if not isinstance(leaf, torch.Tensor):
            found += [tensor for part in _parts(leaf).values() for tensor in _tensors(part)]
        elif leaf.requires_grad:
            found.append(leaf)
    return found


def _replaced(output: Any, others: Iterator[torch.Tensor]) -> Any:
    """`output` with others in place of `_tensors(output)`, in their order."""
    leaves, structure = pytree.tree_flatten(output)
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            leaves[place] = next(others) if leaf.requires_grad else leaf
        elif _tensors(list(_parts(leaf).values())):
            leaves[place] = copy.copy(leaf)
            for name, part in _parts(leaf).items():
                if isinstance(leaf, dict):
                    leaves[place][name] = _replaced(part, others)
                else:
                    object.__setattr__(leaves[place], name, _replaced(part, others))  # it may be frozen
    return pytree.tree_unflatten(leaves, structure)
