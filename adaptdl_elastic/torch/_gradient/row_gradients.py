"""Take the gradient of some samples out of a backward pass that is under way.

In a backward pass every operation below the samples receives the gradient δ of its output, whose rows belong
to samples. The gradient of a layer's weight is a sum over these rows, Σ δᵢ aᵢᵀ for a linear layer. So with
signs sᵢ on some rows (0 on the others) one smaller product per layer gives Σ sᵢ gᵢ, while δ itself is computed
once. The training pass runs as it would without: nothing of it is replaced, and its gradients are the same.

Signs on h of the m samples, half +1 and half −1 at random, times √(m/h), have the sum 0 and Σ sᵢ² = m. So
V = |Σ sᵢ gᵢ|² has the mean tr Σ/m, as with signs on all samples (see `estimator`). A smaller h costs less. It
does not change the error of V if gradients are nearly normal; if a few samples have most of the gradient, it
does (docs/decisions.md).

This holds if no operation mixes samples, and if the rows are found. Neither can be seen from outside. So the
sum is compared with that of a walk through the whole graph by signs, the first time that a graph has these
operations; only a graph for which both were equal is measured so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

_PART = 2  # one of so many samples gets a sign
_ACCUMULATE = "torch::autograd::AccumulateGrad"
# positions of the parameters among the operations' inputs; the other inputs hold rows
_PARAMETERS = {
    "AddmmBackward0": (0, 2),
    "ConvolutionBackward0": (1, 2),
    "EmbeddingBackward0": (0,),
    "LinearBackward0": (1, 2),
    "MmBackward0": (1,),
    "NativeLayerNormBackward0": (1, 2),
}
_SAVED: dict[str, list[str]] = {}  # names of the saved tensors, by operation


class UnknownRowsError(ValueError):
    """The rows of the samples are not known."""


class SomeSigns:
    """Draw ±√(count/h) for h random samples, half of each sign; the other samples have 0.

    h is half of `count`, even, and at least 2.

    Attributes:
        chosen: The h samples.
        values: Their signs, shape [h].
        count: Number of samples.
    """

    def __init__(self, count: int, generator: torch.Generator) -> None:
        half = max(count // _PART // 2, 1)
        magnitude = (count / (2 * half)) ** 0.5
        self.count = count
        self.chosen = torch.randperm(count, generator=generator)[: 2 * half]
        self.values = torch.tensor([magnitude] * half + [-magnitude] * half)

    @property
    def each(self) -> torch.Tensor:
        """Sign of each sample, shape [count]."""
        return torch.zeros(self.count).index_copy_(0, self.chosen, self.values)


@dataclass(frozen=True)
class _Place:
    """Say where the samples of a tensor are: its dimension `along` has outer · count · inner elements."""

    along: int
    outer: int = 1
    inner: int = 1


def _in_view(place: _Place, shape: Sequence[int], other: Sequence[int], count: int) -> _Place | None:
    """Return the place of the samples in a view of another shape, with the elements in the same order."""
    outer = math.prod(shape[: place.along]) * place.outer
    before = 1
    for along, size in enumerate(other):
        if before * size > outer:
            rest, odd = divmod(outer, before)
            inner, uneven = divmod(size, rest * count)
            return None if odd or uneven else _Place(along, rest, inner)
        before *= size
    return None


def _elsewhere(place: _Place, shape: Sequence[int], other: Sequence[int], count: int) -> _Place | None:
    """Return the place of the samples in a tensor of another size, by the sizes of its dimensions."""
    size, from_end = shape[place.along], place.along - len(shape)
    for along in (len(other) + from_end, place.along):
        if 0 <= along < len(other) and other[along] == size:
            return _Place(along, place.outer, place.inner)
    alone = [along for along, size in enumerate(other) if size == count]
    return _Place(alone[0]) if alone else None


class _Signs:
    """Multiply rows on one device by the signs of their samples."""

    def __init__(self, signs: SomeSigns, device: torch.device) -> None:
        self._all, self._count = signs, signs.count
        self._chosen, self._values = signs.chosen.to(device), signs.values.to(device)
        self._repeated: dict[Hashable, torch.Tensor] = {}

    def rows(self, tensor: torch.Tensor, place: _Place) -> torch.Tensor:
        """Return the rows of the chosen samples."""
        along = place.along
        if place.outer == place.inner == 1:
            return tensor.index_select(along, self._chosen)
        shape = tensor.shape
        apart = tensor.reshape(*shape[:along], place.outer, self._count, place.inner, *shape[along + 1 :])
        return apart.index_select(along + 1, self._chosen).flatten(along, along + 2)

    def signed(self, tensor: torch.Tensor, place: _Place) -> torch.Tensor:
        """Return the rows of the chosen samples times their signs."""
        return self._times(self.rows(tensor, place), place, chosen=True)

    def all_signed(self, tensor: torch.Tensor, place: _Place) -> torch.Tensor:
        """Return all rows times their signs."""
        return self._times(tensor, place, chosen=False)

    def _times(self, tensor: torch.Tensor, place: _Place, *, chosen: bool) -> torch.Tensor:
        after = tensor.ndim - place.along - 1
        key = (tensor.dtype, place.inner, place.outer, after, chosen)
        each = self._repeated.get(key)
        if each is None:
            signs = self._values if chosen else self._all.each.to(self._values.device)
            each = signs.to(tensor.dtype).repeat_interleave(place.inner).repeat(place.outer)
            each = self._repeated[key] = each.view(-1, *[1] * after)
        return tensor * each


class RowGradients:
    """Find the operations that use parameters below `edges`, and take the gradient of some samples there.

    Args:
        edges: Where the backward pass continues.
        gradients: Gradients of these edges, and the dimension of the samples in each.
        signs: The samples and their signs.

    Attributes:
        key: The operations and how they are treated; equal for graphs of the same form.
        sums: Σ sᵢ gᵢ of each parameter, after the backward pass.
        rough: Whether a gradient on the way has 16 bits.
        error: What went wrong in the backward pass, which goes on.

    Raises:
        UnknownRowsError: The rows are not known, or are not kept by the graph (checkpointing).
    """

    def __init__(
        self, edges: Sequence[Any], gradients: Sequence[tuple[torch.Tensor, int]], signs: SomeSigns
    ) -> None:
        self.sums: dict[torch.Tensor, torch.Tensor] = {}
        self.error: Exception | None = None
        self._count = signs.count
        self._signs = _Signs(signs, gradients[0][0].device)
        self._places: dict[tuple[Any, int], _Place] = {}
        for edge, (_, dimension) in zip(edges, gradients, strict=True):
            self._places[edge.node, edge.output_nr] = _Place(dimension)
        self.rough = False
        self._names: list[Hashable] = []
        self._uses = list(self._found([edge.node for edge in edges]))
        self.key: Hashable = tuple(self._names)

    def _found(self, todo: list[Any]) -> Iterator[tuple[Any, tuple[int, ...]]]:
        """Yield operations on rows that use parameters, and the positions of these among their inputs."""
        seen = set(todo)
        while todo:
            node = todo.pop()
            name, apart = node.name(), []
            number = next(n for n in range(len(node._input_metadata)) if (node, n) in self._places)
            meta, place = node._input_metadata[number], self._places[node, number]
            shape = torch.Size(meta.shape)
            self.rough |= meta.dtype.itemsize < 4
            for position, (below, output) in enumerate(node.next_functions):
                if below is None:
                    continue
                own = torch.Size(below._input_metadata[output].shape)
                if below.name() == _ACCUMULATE or position in _PARAMETERS.get(name, ()):
                    moved = None
                else:
                    moved = self._moved(node, place, shape, own)
                if moved is None:
                    apart.append(position)
                    continue
                self._places.setdefault((below, output), moved)
                if below not in seen:
                    seen.add(below)
                    todo.append(below)
            alone = place.outer == place.inner == 1
            self._names.append((name, number, place.along, alone, *apart))
            if apart:
                if _packed(node):
                    raise UnknownRowsError(f"the tensors of {name} are not kept")
                yield node, tuple(apart)

    def _moved(self, node: Any, place: _Place, shape: torch.Size, own: torch.Size) -> _Place | None:
        """Return the place of the samples in an operation's input; None: it depends on parameters only."""
        name = node.name()
        if name == "TransposeBackward0":
            dims = [_dim(dim, shape) for dim in (node._saved_dim0, node._saved_dim1)]
            return replace(place, along={dims[0]: dims[1], dims[1]: dims[0]}.get(place.along, place.along))
        if name == "PermuteBackward0":
            return replace(place, along=_dim(node._saved_dims[place.along], shape))
        if name == "SelectBackward0":
            return replace(place, along=place.along + (place.along >= _dim(node._saved_dim, own)))
        if name == "TBackward0":
            return replace(place, along=1 - place.along)
        if own.numel() == shape.numel():
            return _in_view(place, shape, own, self._count)
        missing = len(shape) - len(own)
        if missing >= 0 and all(a in (1, b) for a, b in zip(own, shape[missing:], strict=True)):
            along = place.along - missing
            return None if along < 0 or own[along] == 1 else replace(place, along=along)
        return _elsewhere(place, shape, own, self._count)

    def listen(self) -> Callable[[], None]:
        """Take the gradients in the backward pass that is under way; return a function that ends it."""
        handles = [node.register_prehook(self._listener(node, at)) for node, at in self._uses]

        def end() -> None:
            for handle in handles:
                handle.remove()

        return end

    def _listener(self, node: Any, positions: tuple[int, ...]) -> Callable[[Any], None]:
        def arrived(gradients: tuple[torch.Tensor | None, ...]) -> None:
            if self.error is not None or all(one is None for one in gradients):
                return
            try:
                with torch.no_grad():
                    found = self._gradients(node, positions, gradients)
                    for position, gradient in zip(positions, found, strict=True):
                        if gradient is not None:
                            below, number = node.next_functions[position]
                            self._add(below, number, gradient)
            except Exception as error:  # the training pass goes on without the measurement
                self.error = error

        return arrived

    def agree(self, other: dict[torch.Tensor, torch.Tensor]) -> bool:
        """Return whether `sums` are those of a walk through the whole graph with the same signs.

        The host waits for the device.
        """
        if other.keys() - self.sums.keys():
            return False
        pairs = [(self.sums[param], signed) for param, signed in other.items()]
        apart = torch.stack([(ours - theirs).norm().double() for ours, theirs in pairs])
        norms = torch.stack([theirs.norm().double() for _, theirs in pairs])
        relative, floor = (0.1, 1e-2) if self.rough else (1e-2, 1e-5)
        return bool((apart <= relative * norms + floor * norms.norm()).all())

    def _gradients(
        self, node: Any, positions: tuple[int, ...], gradients: tuple[torch.Tensor | None, ...]
    ) -> list[torch.Tensor | None]:
        """Return Σ sᵢ gᵢ of the inputs of an operation at these positions."""
        special = _SPECIAL.get(node.name())
        if special is not None and gradients[0] is not None:
            return special(self._signs, self._places[node, 0], node, positions, gradients[0])
        # any operation: once more, with 0 for the other samples
        signed = [
            None if one is None else self._signs.all_signed(one, self._places[node, number])
            for number, one in enumerate(gradients)
        ]
        found = _called(node, signed)
        return [found[position] for position in positions]

    def _add(self, node: Any, number: int, gradient: torch.Tensor) -> None:
        """Add a gradient that has reached a parameter, or let it go through the operations on the way."""
        # autograd does the same between two operations
        meta = node._input_metadata[number]
        gradient = gradient.sum_to_size(meta.shape).to(meta.dtype)
        if node.name() == _ACCUMULATE:
            before = self.sums.get(node.variable)
            self.sums[node.variable] = gradient if before is None else before + gradient
            return
        arguments: list[torch.Tensor | None] = [None] * len(node._input_metadata)
        arguments[number] = gradient
        found = _called(node, arguments)
        for (below, position), one in zip(node.next_functions, found, strict=True):
            if below is not None and one is not None:
                self._add(below, position, one)


def _signed(number: int) -> int:
    """Return a number that torch gives as an unsigned one of 64 bits."""
    return (number + 2**63) % 2**64 - 2**63


def _dim(dim: int, shape: Sequence[int]) -> int:
    """Return the dimension, counted from the front."""
    return _signed(dim) % len(shape)


def _called(node: Any, gradients: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of an operation's inputs."""
    found = node(*gradients)
    return found if isinstance(found, tuple) else (found,)


def _packed(node: Any) -> bool:
    """Return whether the graph does not keep all tensors of this operation as they are.

    To read one that checkpointing computes again would keep the backward pass from reading it.
    """
    name = node.name()
    if name not in _SAVED:
        _SAVED[name] = [one for one in dir(node) if one.startswith("_raw_saved_")]
    for one in _SAVED[name]:
        saved = getattr(node, one)
        for each in saved if isinstance(saved, (list, tuple)) else [saved]:
            # torch 2.8 has no such attribute
            if each is not None and getattr(each, "unpack_hook", each) is not None:
                return True
    return False


def _addmm(signs: _Signs, place: _Place, node: Any, positions: tuple[int, ...], gradient: Any) -> list[Any]:
    signed = signs.signed(gradient, place)
    return [
        signed.sum(0) * node._saved_beta
        if position == 0
        else signs.rows(node._saved_mat1, place).t().mm(signed) * node._saved_alpha
        for position in positions
    ]


def _mm(signs: _Signs, place: _Place, node: Any, positions: tuple[int, ...], gradient: Any) -> list[Any]:
    return [signs.rows(node._saved_self, place).t().mm(signs.signed(gradient, place)) for _ in positions]


def _convolution(
    signs: _Signs, place: _Place, node: Any, positions: tuple[int, ...], gradient: Any
) -> list[Any]:
    found = torch.ops.aten.convolution_backward(
        signs.signed(gradient, place),
        signs.rows(node._saved_input, place),
        node._saved_weight,
        node._saved_bias_sym_sizes_opt,
        node._saved_stride,
        node._saved_padding,
        node._saved_dilation,
        node._saved_transposed,
        node._saved_output_padding,
        node._saved_groups,
        [False, 1 in positions, 2 in positions],
    )
    return [found[position] for position in positions]


def _embedding(
    signs: _Signs, place: _Place, node: Any, positions: tuple[int, ...], gradient: Any
) -> list[Any]:
    return [
        torch.ops.aten.embedding_dense_backward(
            signs.signed(gradient, place),
            signs.rows(node._saved_indices, place),
            node._saved_weight_sym_argsize_0,
            _signed(node._saved_padding_idx),
            node._saved_scale_grad_by_freq,
        )
    ]


def _layer_norm(
    signs: _Signs, place: _Place, node: Any, positions: tuple[int, ...], gradient: Any
) -> list[Any]:
    found = torch.ops.aten.native_layer_norm_backward(
        signs.signed(gradient, place),
        signs.rows(node._saved_input, place),
        node._saved_normalized_shape,
        signs.rows(node._saved_result1, place),
        signs.rows(node._saved_result2, place),
        node._saved_weight,
        node._saved_bias,
        [False, 1 in positions, 2 in positions],
    )
    return [found[position] for position in positions]


_SPECIAL = {
    "AddmmBackward0": _addmm,
    "ConvolutionBackward0": _convolution,
    "EmbeddingBackward0": _embedding,
    "MmBackward0": _mm,
    "NativeLayerNormBackward0": _layer_norm,
}
