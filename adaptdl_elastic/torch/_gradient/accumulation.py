"""Accumulation windows: the weight of a batch, and where its gradient is kept.

A *window* is the micro-batches between two optimizer steps, A of them on each of R replicas. With n_ra
samples in micro-batch a of replica r, and a loss that is the mean over its samples, the window's gradient
is::

    ḡ = Σ_r Σ_a n_ra · g_ra / Σ_r Σ_a n_ra  =  1/(R·A) · Σ_r Σ_a w_ra · g_ra,
    w_ra = n_ra · R·A / Σ_r Σ_a n_ra

The data loader knows w_ra, which is exactly 1 except at the uneven end of an epoch. The model's outputs are
not changed, so scripts get the usual derivatives of them. Instead, the sum in `.grad` is kept in units of the
present weight: before the pass of micro-batch k + 1 it is multiplied by w_k/w_{k+1}. The communication hook,
which only sees the pass of the last micro-batch, multiplies by w_last/(R·A) before it sums over the replicas.
A micro-batch of weight 0, which fills a gap, adds nothing.

Between the backward passes of a window the gradients are hidden (`.grad` is None), so that calls that a
user's loop makes once per batch (clipping, GradScaler.unscale_, zero_grad, gradient norms) do not change
them.

In the middle of a window, `step` only marks a position, and `zero_grad` drops what was added since then. Such
gradients come from another loss: in a GAN the generator's loss, which goes through the discriminator after
the discriminator's own step, or before its own losses. They are kept apart from the window's sum (`_Sum`,
`Window.step_left_out`).

At its end a window leaves in `.grad`, in units of 1, either ḡ or, if the script accumulates by hand in
`no_sync`, this replica's 1/A · Σ_a w_ra · g_ra, whose mean over the replicas is ḡ. A further window on top of
it may have another A and other weights.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from adaptdl_elastic._interfaces import ElasticLoader
from adaptdl_elastic.torch._gradient.comm_hook import GradientSubstitute

Gradients = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True)
class Batch:
    """Describe the batch that the data loader has returned last, on one replica."""

    replicas: int = 1
    micro_batches: int = 1  # number of the window's micro-batches, on each replica
    place: int = 0  # index of this micro-batch in the window
    accumulating: bool = False  # further micro-batches follow before the optimizer steps
    # the last micro-batch, not synchronised: the script itself accumulates several windows
    by_hand: bool = False
    weight: float = 1.0  # w in the module's docstring
    measurable: bool = True  # the window is not tiny, and its gradient has several parts or can be split
    parts: float = 1.0  # number of equal parts to which the gradient's parts are equivalent
    local: int | None = None  # samples on this replica; None: unknown
    dimension: int | None = None  # dimension of the batch's tensors that counts the samples; None: unknown
    size: float = 1.0  # S: samples of the window relative to the initial batch size
    scale: float = 1.0  # scale of the learning rate: S, but 1 for the short end of an epoch

    @classmethod
    def of(cls, loader: ElasticLoader, replicas: int, by_hand: bool = False) -> Batch:
        """Return the description of a loader's current batch.

        Args:
            loader: The data loader that models are trained with.
            replicas: Number of replicas.
            by_hand: Whether the script itself accumulates several windows, without synchronisation.
        """
        initial, window = loader.batch_size, loader.window_samples
        micro_batches, parts = loader.accumulation_steps + 1, loader.parts
        # no optimizer step follows this batch
        accumulating = loader.micro_batch < micro_batches - 1
        return cls(
            replicas=replicas,
            micro_batches=micro_batches,
            place=loader.micro_batch,
            accumulating=accumulating,
            by_hand=by_hand and not accumulating,
            weight=loader.gradient_weight,
            # Gradients of at least half a batch enter the statistics. An epoch's last batch may be a single
            # sample, which is too few.
            measurable=2 * window >= loader.current_batch_size
            and (parts > 1 or replicas * micro_batches == 1),
            parts=parts,
            local=loader.local_samples,
            dimension=loader.sample_dimension,
            size=window / initial,
            # A short last batch of an epoch keeps the learning rate of the initial batch size.
            scale=max(window / initial, 1.0),
        )

    @property
    def share(self) -> float:
        """Return 1/(R·A)."""
        return 1.0 / (self.replicas * self.micro_batches)


@dataclass(frozen=True)
class _Sum:
    """Hold a hidden sum of gradients, and the attributes of `Window` that describe it."""

    gradients: list[torch.Tensor | None]
    unit: float
    ended: bool
    synced: bool
    place: int  # index of the micro-batch in which it was hidden


class Window:
    """Keep the gradients of the current window, for the parameters of one module."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        self._hidden: list[torch.Tensor | None] | None = None
        self._unit = 1.0  # the hidden sum is Σ w·g divided by this, the weight of the last pass that counts
        self._ended = False  # the hidden sum is what earlier windows left, and its unit is 1, not `_unit`
        self._synced = False  # the hidden sum of ended windows is averaged over the replicas
        self.by_hand = False  # the script accumulates in `no_sync`: the sum belongs to this replica alone
        self._accumulated = False
        self._place = -1  # index of the last micro-batch with a pass
        self._first = -1  # index of the first micro-batch with a pass
        self._micro_batches = 1  # number of micro-batches of the last pass's window
        self._passed = False  # there was a pass since the last `step` or `zero_grad`
        # index of the last `step` in mid-window; None: there was a pass since
        self._left_out: int | None = None
        self._stepped: int | None = None  # the same, regardless of passes
        self._leads = False  # the script's `zero_grad` drops passes that come before those that count
        self._outside_first = False  # gradients from outside the module come before a batch's passes
        self._below: _Sum | None = None  # the sum from which the passes since `step` are kept apart
        # set aside at a `zero_grad`: dropped if a `step` follows before the next batch, else added again
        self._doubtful: _Sum | None = None

    def reset(self) -> None:
        """Begin a new window after a step, or after the window was dropped."""
        self._hidden = self._below = self._doubtful = self._left_out = self._stepped = None
        self._unit, self._place, self._first = 1.0, -1, -1
        self.by_hand = False
        self._ended = self._synced = self._accumulated = self._passed = False

    @property
    def under_way(self) -> bool:
        """Whether gradients have been accumulated that are not synchronised yet."""
        return self._accumulated or self._below is not None or self._doubtful is not None

    @property
    def apart(self) -> bool:
        """Whether the passes since the last `step` are kept apart, since `zero_grad` will drop them."""
        return self._below is not None

    @torch.no_grad()
    def step_left_out(self) -> None:
        """Handle `step` in the middle of the window: the gradients so far belong to the window."""
        if not self.under_way:
            return
        if self._doubtful is not None and self._accumulated:
            self._doubtful, self._leads = None, True
        if self._below is not None:
            self._join(self._below)
            self._below = None
        self._left_out = self._stepped = self._place
        self._passed = False

    @torch.no_grad()
    def drop_since_step(self, place: int) -> bool:
        """Handle `zero_grad` in micro-batch `place` of the window; return whether gradients were dropped."""
        below, self._below = self._below, None
        passed, self._passed = self._passed, False
        if self._left_out != place:  # not right after `step`: the next passes begin a new part
            self._left_out = None
        if below is not None:
            if place == self._stepped:
                self._left_out = place  # unchanged
            self._drop()
            self._hidden, self._unit = below.gradients, below.unit
            self._ended, self._synced, self._accumulated = below.ended, below.synced, True
            return True
        if passed and self._first == self._place and self._stepped is None:
            # All gradients came with this batch: either from another model's loss, or the loop steps only at
            # the ends of windows.
            if self._doubtful is not None:
                self._join(self._doubtful)
            self._doubtful = self._put_away(self._place)
        return False

    def _put_away(self, place: int) -> _Sum:
        """Hide and return the present sum, and begin a new one."""
        self._hide()
        assert self._hidden is not None
        put_away = _Sum(self._hidden, self._unit, self._ended, self._synced, place)
        self._hidden, self._unit = None, 1.0
        self._ended = self._synced = self._accumulated = False
        return put_away

    def _join(self, other: _Sum) -> None:
        """Add the gradients of `other`, a sum that was hidden earlier, to the gradients of this window."""
        if not self._accumulated:
            self._drop()
            self._hidden, self._unit = other.gradients, other.unit
            self._ended, self._synced, self._accumulated = other.ended, other.synced, True
            return
        self._hide()
        assert self._hidden is not None
        factor = (self._micro_batches if other.ended else other.unit) / self._unit
        self._hidden = [
            late if early is None else early.mul_(factor) if late is None else late.add_(early, alpha=factor)
            for early, late in zip(other.gradients, self._hidden, strict=True)
        ]

    def _sort(self, batch: Batch) -> None:
        """Decide before a pass of `batch` to which sum its gradient is added."""
        doubtful, below = self._doubtful, self._below
        if doubtful is not None and batch.place != doubtful.place:
            self._doubtful = None  # there was no step, so `zero_grad` had no meaning
            self._join(doubtful)
        if below is not None:
            if batch.place != below.place and not self._leads:  # no `zero_grad` has come, and none will
                self._below = None
                self._join(below)
        elif self._left_out is not None and (batch.place == self._left_out or self._leads):
            self._below = self._put_away(batch.place)
        self._left_out, self._passed, self._micro_batches = None, True, batch.micro_batches
        if self._first < 0:
            self._first = batch.place

    @torch.no_grad()
    def before_backward(self, batch: Batch) -> GradientSubstitute | None:
        """Restore the hidden sum in units of `batch.weight`, so that the next gradient is added to it.

        Returns:
            Gradients that the hook sums over replicas instead of its argument; None: it sums its argument.
        """
        self._sort(batch)
        if batch.weight == 0.0:
            return self._set_aside(batch)
        outside = self._take_outside()
        self._show()
        factor = self._unit / batch.weight
        if self._ended:
            # A second synchronised pass (D(real), then D(fake)), or accumulation by hand: each of R replicas
            # adds 1/R of the sum, which the hook will multiply by w/(R·A).
            factor = batch.micro_batches / batch.weight
        self._unit = batch.weight
        grads = [p.grad for p in self._parameters if p.grad is not None] if factor != 1.0 else []
        if grads:
            torch._foreach_mul_(grads, factor)
        for param, grad in outside:
            param.grad = grad if param.grad is None else param.grad.add_(grad)
        return None

    def _take_outside(self) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Remove and return gradients that came since the last pass from outside the module.

        They belong to the coming batch, unless those of the window's first batch came after its pass. They
        are complete, not the share of a batch, and either apply to the whole window (a penalty on the
        weights) or will be dropped by `zero_grad` (the generator's loss through the discriminator's inner
        module).
        """
        if self._ended or self.by_hand or (self._hidden is None and self._accumulated):
            return []
        outside = [(p, p.grad) for p in self._parameters if p.grad is not None]
        for param, _ in outside:
            param.grad = None
        if self._hidden is None:
            self._outside_first = bool(outside)
        return outside if self._outside_first else []

    @torch.no_grad()
    def after_backward(self, batch: Batch, reduced: bool) -> bool:
        """Hide the sum unless it is synchronised; return whether this was the micro-batch's first pass.

        Args:
            batch: the batch of the pass.
            reduced: whether the communication hook was called.
        """
        first, self._place = batch.place != self._place, batch.place
        if batch.accumulating:
            self._accumulated = True
            if batch.weight == 0.0:
                self._drop()
            else:
                self._hide()
                self._ended = self._synced = False
        elif batch.by_hand:
            self._finish_by_hand(batch)
            self._ended, self._synced, self._accumulated = True, False, False
        elif reduced:
            self._hidden = None
            self._ended, self._synced, self._accumulated = True, True, False
        elif self._synced:
            self._finish_alone(batch)
        return first

    def gradients(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (parameter, accumulated gradient) for every gradient, hidden or not."""
        hidden = self._hidden or [None] * len(self._parameters)
        for param, out_of_sight in zip(self._parameters, hidden, strict=True):
            grad = param.grad if out_of_sight is None else out_of_sight
            if grad is not None:
                yield param, grad

    def _set_aside(self, batch: Batch) -> GradientSubstitute:
        """Set aside the gradients accumulated so far.

        The coming micro-batch is padding and contributes nothing.
        """
        factor = 1.0 / batch.replicas if self._ended else self._unit * batch.share
        if batch.accumulating or batch.by_hand:
            if self._ended or batch.by_hand:
                self._hide()
            return GradientSubstitute({}, factor)  # no hook will be called
        # copies, since with gradient_as_bucket_view the gradients may be in DDP's buffers
        kept = {id(param): grad.clone() for param, grad in self.gradients()}
        self._drop()
        return GradientSubstitute(kept, factor)

    def _finish_alone(self, batch: Batch) -> None:
        """Weigh the gradient of a second pass through one forward pass, which DDP does not synchronise."""
        if batch.replicas > 1:
            raise RuntimeError(
                "a second backward pass through one forward pass is not synchronised between replicas, nor "
                "by DistributedDataParallel: add the losses up and call backward once, or call the model "
                "again"
            )
        grads = [p.grad for p in self._parameters if p.grad is not None]
        if batch.weight and grads:
            torch._foreach_mul_(grads, batch.weight * batch.share)

    def _finish_by_hand(self, batch: Batch) -> None:
        """End a window that the script accumulates by hand: leave its sum in `.grad`, in units of 1.

        The sum is not synchronised. The next window may have another A and other weights.
        """
        if batch.weight == 0.0:
            self._drop()
            self._show()
            factor = 1.0 if self._ended else self._unit / batch.micro_batches
        else:
            factor = batch.weight / batch.micro_batches
        grads = [p.grad for p in self._parameters if p.grad is not None] if factor != 1.0 else []
        if grads:
            torch._foreach_mul_(grads, factor)

    def _drop(self) -> None:
        for param in self._parameters:
            param.grad = None

    def _hide(self) -> None:
        self._show()
        self._hidden = [p.grad for p in self._parameters]
        self._drop()

    def _show(self) -> None:
        if self._hidden is None:
            return
        for param, grad in zip(self._parameters, self._hidden, strict=True):
            if grad is None:
                continue
            if param.grad is not None:  # from a loss that does not use the module
                grad.add_(param.grad)
            param.grad = grad
        self._hidden = None


def accumulates(parameters: Iterable[torch.Tensor]) -> bool:
    """Return during a backward pass whether it adds to `.grad` of these parameters.

    torch.autograd.grad does not.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    if engine.is_checkpoint_valid():  # a plain backward(), which goes through the whole graph
        return True
    return any(map(_reached, parameters))


def _reached(parameter: torch.Tensor) -> bool:
    if not parameter.requires_grad:
        return False
    try:
        edge = torch.autograd.graph.get_gradient_edge(parameter)
        return bool(torch._C._will_engine_execute_node(edge.node))
    except RuntimeError:  # torch.autograd.grad of this parameter itself
        return False


def on_backward(output: Any, callback: Callable[[], None]) -> Any:
    """Call `callback` whenever a backward pass reaches a tensor in `output`.

    The call comes before the pass enters the module, and perhaps several times per pass. Nothing is copied.

    Returns:
        `output`, with views in place of leaf tensors; None if no tensor needs a gradient.
    """
    tensors = tensors_with_gradients(output)
    if not tensors:
        return None
    if any(tensor.is_leaf for tensor in tensors):  # leaves outlast the pass, and so would a hook on them
        tensors = [tensor.view_as(tensor) if tensor.is_leaf else tensor for tensor in tensors]
        output = _replaced(output, iter(tensors))

    def arrived(_: Gradients) -> None:
        callback()

    for node in dict.fromkeys(tensor.grad_fn for tensor in tensors):
        assert node is not None
        node.register_prehook(arrived)
    return output


class _Watch(torch.autograd.Function):
    """Return the outputs unchanged, and pass their gradients to `callback` in the backward pass."""

    @staticmethod
    def forward(ctx: Any, callback: Callable[[Gradients], None], *outputs: Any) -> Any:
        ctx.callback = callback
        ctx.set_materialize_grads(False)
        # copies, not views: a custom function's view must not be changed in place, while an output may
        return tuple(output.clone() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        ctx.callback(grads)
        return (None, *grads)


_apply: Any = _Watch.apply  # untyped in torch


def watch(output: Any, callback: Callable[[list[torch.autograd.graph.GradientEdge], Gradients], None]) -> Any:
    """Replace every tensor in `output` that needs a gradient by an equal one that is watched.

    `callback(edges, gradients)` is called once per backward pass through them, before it enters the module:
    `edges` are where it continues, `gradients` are those of the outputs (None: not part of the loss). Returns
    None if there is no tensor to watch.
    """
    tensors = tensors_with_gradients(output)
    if not tensors:
        return None
    edges = [torch.autograd.graph.get_gradient_edge(tensor) for tensor in tensors]

    def arrived(gradients: Gradients) -> None:
        callback(edges, gradients)

    return _replaced(output, iter(_apply(arrived, *tensors)))


def _parts(leaf: Any) -> dict[Any, Any]:
    """Return the parts of a leaf of torch's pytree that is a dataclass, or a subclass of dict."""
    if isinstance(leaf, dict):
        return dict(leaf)
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        return {field.name: getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)}
    return {}


def tensors_with_gradients(output: Any) -> list[torch.Tensor]:
    """Return the tensors in `output` that need a gradient, in the order of torch's pytree."""
    found = []
    for leaf in pytree.tree_leaves(output):
        if not isinstance(leaf, torch.Tensor):
            found += [tensor for part in _parts(leaf).values() for tensor in tensors_with_gradients(part)]
        elif leaf.requires_grad:
            found.append(leaf)
    return found


def _replaced(output: Any, others: Iterator[torch.Tensor]) -> Any:
    """Return `output` with `tensors_with_gradients(output)` replaced by others, in the same order."""
    leaves, structure = pytree.tree_flatten(output)
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            leaves[place] = next(others) if leaf.requires_grad else leaf
        elif tensors_with_gradients(list(_parts(leaf).values())):
            leaves[place] = copy.copy(leaf)
            for name, part in _parts(leaf).items():
                if isinstance(leaf, dict):
                    leaves[place][name] = _replaced(part, others)
                else:
                    object.__setattr__(leaves[place], name, _replaced(part, others))  # it may be frozen
    return pytree.tree_unflatten(leaves, structure)
