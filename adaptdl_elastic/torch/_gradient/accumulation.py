"""Accumulation windows: what a batch weighs, and where its gradient waits.

A *window* is the micro-batches between two optimizer steps, A of them on each of R replicas. With
n_ra samples in micro-batch a of replica r and a loss that is the mean over its samples, the window's
gradient is::

    ḡ = Σ_r Σ_a n_ra · g_ra / Σ_r Σ_a n_ra  =  1/(R·A) · Σ_r Σ_a w_ra · g_ra,
    w_ra = n_ra · R·A / Σ_r Σ_a n_ra

The data loader knows w_ra; it is exactly 1 but for the uneven end of an epoch. The model's outputs are
left alone: what scripts differentiate them to is what it would be without us. It is the sum in `.grad` that
is kept in units of the weight at hand: before the pass of micro-batch k + 1 it is multiplied with
w_k/w_{k+1}, and the communication hook, which only sees the last micro-batch's pass, multiplies with
w_last/(R·A) before it sums over the replicas. A micro-batch of weight 0, which fills a gap, adds nothing.

Between the backward passes of a window the gradients are out of sight (`.grad` is None): clipping,
GradScaler.unscale_, zero_grad and gradient norms in a user's loop, which all come once per batch,
then have nothing to spoil.

What `zero_grad` is to drop in the middle of a window is what has come since `step`, which does nothing there
but mark that: the generator's loss in a GAN, which goes through the judge after the judge's own step, or
before the judge's own losses. It is kept apart from the window's sum (`_Sum`, `Window.step_left_out`).

A window that has ended leaves in `.grad` what it counts, in units of 1: ḡ, or, where the script accumulates
by hand in `no_sync`, this replica's 1/A · Σ_a w_ra · g_ra, of which the replicas' mean is ḡ. What is
accumulated on top of either may have another A and other weights.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from adaptdl_elastic.torch._gradient.comm_hook import GradientSubstitute

Gradients = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True)
class Batch:
    """The batch that the data loader has just handed out, as one replica sees it."""

    replicas: int = 1
    micro_batches: int = 1  # of its window, on each replica
    place: int = 0  # of this micro-batch among them
    accumulating: bool = False  # more of them follow before the optimizer steps
    by_hand: bool = False  # the last of them, not synchronised: the script accumulates whole windows itself
    weight: float = 1.0  # w of the module's docstring
    even: bool = True  # every micro-batch of the window, on every replica, is of one size, and not tiny
    local: int | None = None  # samples here; None: not known
    dimension: int | None = None  # of the batch's tensors, along which they lie; None: not known
    size: float = 1.0  # S: samples of the window relative to the initial batch size
    scale: float = 1.0  # what learning rates are scaled for: S, but 1 for the short end of an epoch

    @property
    def share(self) -> float:
        """1/(R·A)."""
        return 1.0 / (self.replicas * self.micro_batches)


@dataclass(frozen=True)
class _Sum:
    """A sum of gradients that waits out of sight, and what `Window` knows of it."""

    gradients: list[torch.Tensor | None]
    unit: float
    ended: bool
    synced: bool
    place: int  # of the micro-batch in which it was put there


class Window:
    """The gradients of the window under way, of one module's parameters."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        self._hidden: list[torch.Tensor | None] | None = None
        self._unit = 1.0  # what waits is Σ w·g divided by this, the weight of the last pass that counts
        self._ended = False  # what waits is instead what windows that have ended left, in units of 1
        self._synced = False  # and it is an average over the replicas
        self.by_hand = False  # the script accumulates in `no_sync`: what waits is this replica's own
        self._accumulated = False
        self._place = -1  # of the last micro-batch that had a pass
        self._first = -1  # of the first one
        self._micro_batches = 1  # of the window that the last pass was of
        self._passed = False  # a pass came since the last `step` or `zero_grad`
        self._left_out: int | None = None  # place of the last `step` in mid-window; None: a pass came since
        self._stepped: int | None = None  # the same, passes or not
        self._leads = False  # this script has passes that its `zero_grad` drops before those that count
        self._outside_first = False  # gradients that come without the module come before a batch's passes
        self._below: _Sum | None = None  # what the passes since `step` are kept apart from
        self._doubtful: _Sum | None = None  # dropped by `zero_grad`, unless this script has no `step` here

    def reset(self) -> None:
        """The window has ended: stepped, or dropped."""
        self._hidden = self._below = self._doubtful = self._left_out = self._stepped = None
        self._unit, self._place, self._first = 1.0, -1, -1
        self.by_hand = False
        self._ended = self._synced = self._accumulated = self._passed = False

    @property
    def under_way(self) -> bool:
        """Something has been accumulated that is not synchronised yet."""
        return self._accumulated or self._below is not None or self._doubtful is not None

    @property
    def apart(self) -> bool:
        """The passes since the last `step` are kept apart: `zero_grad` is to come before the next one."""
        return self._below is not None

    @torch.no_grad()
    def step_left_out(self) -> None:
        """`step` in the middle of the window: what has come by now is part of it."""
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
        """`zero_grad` in mid-window, in its micro-batch `place`. Whether something has been dropped."""
        below, self._below = self._below, None
        passed, self._passed = self._passed, False
        if self._left_out != place:  # not at once after `step`: what comes now begins the next one
            self._left_out = None
        if below is not None:
            if place == self._stepped:
                self._left_out = place  # still
            self._drop()
            self._hidden, self._unit = below.gradients, below.unit
            self._ended, self._synced, self._accumulated = below.ended, below.synced, True
            return True
        if passed and self._first == self._place and self._stepped is None:
            # All of it came with the batch at hand: a loss that is not this model's, or the body of a loop
            # that steps at windows' ends only.
            if self._doubtful is not None:
                self._join(self._doubtful)
            self._doubtful = self._put_away(self._place)
        return False

    def _put_away(self, place: int) -> _Sum:
        """Begin anew; what was there until now."""
        self._hide()
        assert self._hidden is not None
        put_away = _Sum(self._hidden, self._unit, self._ended, self._synced, place)
        self._hidden, self._unit = None, 1.0
        self._ended = self._synced = self._accumulated = False
        return put_away

    def _join(self, other: _Sum) -> None:
        """Add what was put away to what has come since."""
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
        """Before a pass of `batch`: what it is to be added to, and what not."""
        doubtful, below = self._doubtful, self._below
        if doubtful is not None and batch.place != doubtful.place:
            self._doubtful = None  # there was no step: `zero_grad` meant nothing
            self._join(doubtful)
        if below is not None:
            if batch.place != below.place and not self._leads:  # no `zero_grad` has come, nor will
                self._below = None
                self._join(below)
        elif self._left_out is not None and (batch.place == self._left_out or self._leads):
            self._below = self._put_away(batch.place)
        self._left_out, self._passed, self._micro_batches = None, True, batch.micro_batches
        if self._first < 0:
            self._first = batch.place

    @torch.no_grad()
    def before_backward(self, batch: Batch) -> GradientSubstitute | None:
        """Bring back what waits, for the next gradient to be added to it, in units of `batch.weight`.

        Returns what the hook is to sum over replicas instead of what it gets, None where that is right.
        """
        self._sort(batch)
        if batch.weight == 0.0:
            return self._set_aside(batch)
        outside = self._take_outside()
        self._show()
        factor = self._unit / batch.weight
        if self._ended:
            # A second synchronised pass (D(real), then D(fake)), or accumulation by hand: each of R replicas
            # is to add 1/R of what is there, which the hook will multiply with w/(R·A).
            factor = batch.micro_batches / batch.weight
        self._unit = batch.weight
        grads = [p.grad for p in self._parameters if p.grad is not None] if factor != 1.0 else []
        if grads:
            torch._foreach_mul_(grads, factor)
        for param, grad in outside:
            param.grad = grad if param.grad is None else param.grad.add_(grad)
        return None

    def _take_outside(self) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Gradients that came since the last pass, without the module: they are of the batch to come.

        Unless those of the window's first batch came behind its pass, as those of its last one will then.
        They are whole, not the share of a batch, and stand for all of the window (a penalty on the weights),
        or wait for `zero_grad` (the generator's loss through the judge's bare module).
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
        """Put the sum out of sight, unless it is synchronised. Whether it was a micro-batch's first pass.

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
        """(parameter, its accumulated gradient) where there is one, hidden or not."""
        hidden = self._hidden or [None] * len(self._parameters)
        for param, out_of_sight in zip(self._parameters, hidden, strict=True):
            grad = param.grad if out_of_sight is None else out_of_sight
            if grad is not None:
                yield param, grad

    def _set_aside(self, batch: Batch) -> GradientSubstitute:
        """What is there already, which is all that counts when the pass to come does not."""
        factor = 1.0 / batch.replicas if self._ended else self._unit * batch.share
        if batch.accumulating or batch.by_hand:
            if self._ended or batch.by_hand:
                self._hide()
            return GradientSubstitute({}, factor)  # no hook will ask
        # Copies: with gradient_as_bucket_view gradients may lie where DDP puts the next.
        kept = {id(param): grad.clone() for param, grad in self.gradients()}
        self._drop()
        return GradientSubstitute(kept, factor)

    def _finish_alone(self, batch: Batch) -> None:
        """After a second pass through one forward pass, that DDP does not synchronise: as the hook would."""
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
        """The window has ended, and stays this replica's: the next may have another A and other weights."""
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
            if param.grad is not None:  # of a loss that does not go through the module
                grad.add_(param.grad)
            param.grad = grad
        self._hidden = None


def accumulates(parameters: Iterable[torch.Tensor]) -> bool:
    """Inside of a backward pass: whether it adds to `.grad` of any of these. torch.autograd.grad does not."""
    engine: Any = torch.autograd.Variable._execution_engine
    if engine.is_checkpoint_valid():  # a plain backward(), which goes through all of the graph
        return True
    return any(map(_reached, parameters))


def _reached(parameter: torch.Tensor) -> bool:
    if not parameter.requires_grad:
        return False
    try:
        edge = torch.autograd.graph.get_gradient_edge(parameter)
        return bool(torch._C._will_engine_execute_node(edge.node))
    except RuntimeError:  # torch.autograd.grad of this very parameter
        return False


def on_backward(output: Any, callback: Callable[[], None]) -> Any:
    """`output`, with `callback` to be called when a backward pass comes to any tensor in it.

    Before the pass goes on into the module, and perhaps several times in one pass. Nothing is copied.
    Returns None when there is no tensor that needs a gradient.
    """
    tensors = _tensors(output)
    if not tensors:
        return None
    if any(tensor.is_leaf for tensor in tensors):  # they outlast the pass, and so would a hook on them
        tensors = [tensor.view_as(tensor) if tensor.is_leaf else tensor for tensor in tensors]
        output = _replaced(output, iter(tensors))

    def arrived(_: Gradients) -> None:
        callback()

    for node in dict.fromkeys(tensor.grad_fn for tensor in tensors):
        assert node is not None
        node.register_prehook(arrived)
    return output


class _Watch(torch.autograd.Function):
    """The identity; on the way back it tells `callback` the gradients."""

    @staticmethod
    def forward(ctx: Any, callback: Callable[[Gradients], None], *outputs: Any) -> Any:
        ctx.callback = callback
        ctx.set_materialize_grads(False)
        # Copies, not views: a custom function's view must not be changed in place, an output may.
        return tuple(output.clone() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        ctx.callback(grads)
        return (None, *grads)


_apply: Any = _Watch.apply  # untyped in torch


def watch(output: Any, callback: Callable[[list[torch.autograd.graph.GradientEdge], Gradients], None]) -> Any:
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

    return _replaced(output, iter(_apply(arrived, *tensors)))


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
