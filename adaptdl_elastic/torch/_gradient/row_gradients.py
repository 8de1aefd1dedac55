"""Take the gradient of half of the samples out of a backward pass that is under way.

In a backward pass every operation below the samples receives the gradient δ of its output, whose rows belong
to samples. The gradient of a layer's weight is a sum over these rows, Σ δᵢ aᵢᵀ for a linear layer. So one
smaller product per layer gives the sum over h of the m samples, drawn at random, while δ is computed once.
The training pass runs as it would without: nothing of it is replaced, and its gradients are the same.

It computes the sum over all samples itself. That over the others is the difference, so every sample counts at
the price of half of them: with weights wᵢ = 1 − h/m on the chosen samples and −h/m on the others,
Σ wᵢ gᵢ = (sum over the chosen) − h/m · (sum over all). The weights have the sum 0 and Σ wᵢ² = h(m − h)/m. So
V = |Σ wᵢ gᵢ|² · m²/(h(m − h)) of the mean gradient has the mean tr Σ/m, as with signs on all samples. The
squares of single samples' gradients are nearly the same in V and in |ḡ|²: their difference |G|² does not
depend on which samples were drawn, even if a few of them have most of the gradient.

This holds if no operation mixes samples, and if the rows are found. Neither can be seen from outside. So the
sum is compared with that of a walk through the whole graph, at first and later on (`KnownForms`).
Only a graph of a form for which both were equal is measured so.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from adaptdl_elastic._torch_versions import is_kept
from adaptdl_elastic.torch._gradient.pace import Stopwatch

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
_MOST_FORMS = 256
_LARGEST = 32  # most operations between a parameter and its use
_SAVED: dict[str, list[str]] = {}  # names of the saved tensors, by operation


Digests = dict[torch.Tensor, torch.Tensor]
Gradients = tuple[torch.Tensor | None, ...]


class UnknownRowsError(ValueError):
    """The rows of the samples are not known."""


class KnownForms:
    """Remember for which forms of a graph rows give what a walk gives.

    What a form computes may change, so it is compared again: in its 1st, 2nd, 4th, 8th measurement and so on,
    and in every 32nd.
    """

    def __init__(self) -> None:
        self._seen: dict[Hashable, int | None] = {}  # measurements; None: rows are wrong

    def refused(self, form: Hashable) -> bool:
        """Return whether rows were wrong."""
        return self._seen.get(form, 0) is None

    def count(self, form: Hashable) -> bool:
        """Count a measurement that is to be made; return whether it must be compared with a walk."""
        count = (self._seen.pop(form, 0) or 0) + 1
        self._keep(form, count)
        return count & (count - 1) == 0 or count % 32 == 0

    def decide(self, form: Hashable, equal: bool | None) -> None:
        """Keep the result of a comparison; None: it has told nothing, and the next one is the first."""
        self._keep(form, None if equal is False else 0 if equal is None else self._seen.get(form, 1))

    def _keep(self, form: Hashable, value: int | None) -> None:
        self._seen[form] = value
        if len(self._seen) > _MOST_FORMS:
            del self._seen[next(iter(self._seen))]


class HalfOfSamples:
    """Draw h of the samples at random, half of them or one less than half.

    Attributes:
        chosen: These samples, shape [h].
        count: Number of samples, m.
        part: h/m.
        factor: What makes |Σ wᵢ gᵢ|² the variance of the mean gradient.
    """

    def __init__(self, count: int, generator: torch.Generator) -> None:
        self.count = count
        self.chosen = torch.randperm(count, generator=generator)[: count // 2]
        self.part = len(self.chosen) / count
        self.factor = 1.0 / (self.part * (1.0 - self.part))

    @property
    def each(self) -> torch.Tensor:
        """Weight of each sample, shape [count]."""
        return self.mask - self.part

    @property
    def mask(self) -> torch.Tensor:
        """1 for the chosen samples and 0 for the others, shape [count]."""
        return torch.zeros(self.count).index_fill_(0, self.chosen, 1.0)


@dataclass(frozen=True)
class _Place:
    """Say where the samples of a tensor are: its dimension `along` has outer · count · inner elements."""

    along: int
    outer: int = 1
    inner: int = 1


def _place_in_view(place: _Place, shape: Sequence[int], other: Sequence[int], count: int) -> _Place | None:
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


def _place_by_size(place: _Place, shape: Sequence[int], other: Sequence[int], count: int) -> _Place | None:
    """Return the place of the samples in a tensor of another size, by the sizes of its dimensions."""
    size, from_end = shape[place.along], place.along - len(shape)
    for along in (len(other) + from_end, place.along):
        if 0 <= along < len(other) and other[along] == size:
            return _Place(along, place.outer, place.inner)
    alone = [along for along, size in enumerate(other) if size == count]
    return _Place(alone[0]) if alone else None


class _Chosen:
    """Take the rows of the chosen samples from tensors on one device."""

    def __init__(self, half: HalfOfSamples, device: torch.device) -> None:
        self._half, self._rows = half, half.chosen.to(device)
        self._masks: dict[Hashable, torch.Tensor] = {}

    def rows(self, tensor: torch.Tensor, place: _Place) -> torch.Tensor:
        """Return the rows of the chosen samples."""
        along = place.along
        if place.outer == place.inner == 1:
            return tensor.index_select(along, self._rows)
        shape, count = tensor.shape, self._half.count
        apart = tensor.reshape(*shape[:along], place.outer, count, place.inner, *shape[along + 1 :])
        return apart.index_select(along + 1, self._rows).flatten(along, along + 2)

    def masked(self, tensor: torch.Tensor, place: _Place) -> torch.Tensor:
        """Return all rows, with 0 in those of the other samples."""
        after = tensor.ndim - place.along - 1
        key = (tensor.dtype, place.inner, place.outer, after)
        mask = self._masks.get(key)
        if mask is None:
            each = self._half.mask.to(tensor.device, tensor.dtype)
            each = each.repeat_interleave(place.inner).repeat(place.outer)
            mask = self._masks[key] = each.view(-1, *[1] * after)
        return tensor * mask


class RowGradients:
    """Find the operations that use parameters below `edges`, and take the gradient of some samples there.

    Args:
        edges: Where the backward pass continues.
        gradients: Gradients of these edges, and the dimension of the samples in each.
        half: The samples.

    Attributes:
        key: The operations and how they are treated; equal for graphs of the same form.
        sums: Σ wᵢ gᵢ of each parameter, after the backward pass.
        rough: Whether a gradient on the way has 16 bits.
        error: What went wrong in the backward pass, which goes on.

    Raises:
        UnknownRowsError: The rows are not known, or are not kept by the graph (checkpointing).
    """

    def __init__(
        self, edges: Sequence[Any], gradients: Sequence[tuple[torch.Tensor, int]], half: HalfOfSamples
    ) -> None:
        self.sums: dict[torch.Tensor, torch.Tensor] = {}
        self.error: Exception | None = None
        self._count = half.count
        self.device = gradients[0][0].device
        self.half, self._chosen = half, _Chosen(half, self.device)
        self._places: dict[tuple[Any, int], _Place] = {}
        for edge, (_, dimension) in zip(edges, gradients, strict=True):
            self._places[edge.node, edge.output_nr] = _Place(dimension)
        self.rough = False
        self._names: list[Hashable] = []
        self._uses = list(self._uses_below([edge.node for edge in edges]))
        self.key: Hashable = tuple(self._names)

    def _uses_below(self, todo: list[Any]) -> Iterator[tuple[Any, tuple[int, ...]]]:
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
                    moved = self._place_below(node, place, shape, own)
                if moved is None:
                    apart.append(position)
                    continue
                self._places.setdefault((below, output), moved)
                if below not in seen:
                    seen.add(below)
                    todo.append(below)
            alone = place.outer == place.inner == 1
            mode = (getattr(node, "_saved_training", None), getattr(node, "_saved_dim", None))
            self._names.append((name, number, place.along, alone, mode, *apart))
            if apart:
                if _packed(node) or getattr(node, "_saved_sparse", False):
                    raise UnknownRowsError(f"the tensors of {name} are not kept, or its gradient is sparse")
                for position in apart:
                    self._check_parameters(node.next_functions[position][0])
                yield node, tuple(apart)

    def _check_parameters(self, top: Any) -> None:
        """Raise an error unless an operation's input is made of parameters in a few steps."""
        todo, seen = [top], {top}
        while todo:
            node = todo.pop()
            if len(seen) > _LARGEST or any(
                (node, n) in self._places for n in range(len(node._input_metadata))
            ):
                raise UnknownRowsError(f"{node.name()} does not depend on parameters only")
            if node.name() == _ACCUMULATE:
                continue
            below = [other for other, _ in node.next_functions if other is not None]
            if (
                not below
                or _packed(node)
                or not seen.isdisjoint(other for other in below if other.name() != _ACCUMULATE)
            ):
                raise UnknownRowsError(f"the gradients of {node.name()} do not lead to parameters")
            seen.update(below)
            todo += below

    def _place_below(self, node: Any, place: _Place, shape: torch.Size, own: torch.Size) -> _Place | None:
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
            return _place_in_view(place, shape, own, self._count)
        missing = len(shape) - len(own)
        if missing >= 0 and all(a in (1, b) for a, b in zip(own, shape[missing:], strict=True)):
            along = place.along - missing
            return None if along < 0 or own[along] == 1 else replace(place, along=along)
        return _place_by_size(place, shape, own, self._count)

    def listen(self, stopwatch: Stopwatch) -> Callable[[], None]:
        """Take the gradients in the backward pass that is under way; return a function that ends it.

        If nobody refers to this object any more, because the pass has failed, nothing is taken. The graph
        refers to it weakly, because Python's garbage collector does not see the nodes' hooks.
        """
        handles = [
            node.register_hook(partial(_done, weakref.ref(self), index, stopwatch))
            for index, (node, _) in enumerate(self._uses)
        ]

        def end() -> None:
            for handle in handles:
                handle.remove()

        return end

    def take(self, use: int, whole: Gradients, gradients: Gradients) -> None:
        """Add the weighted gradients of the samples at the `use`-th operation that uses parameters.

        Args:
            use: Number of the operation.
            whole: Gradients of its inputs, of all samples.
            gradients: Gradients of its outputs.
        """
        if self.error is not None or all(one is None for one in gradients):
            return
        node, positions = self._uses[use]
        try:
            with torch.no_grad():
                found = self._gradients(node, positions, gradients)
                for position, gradient in zip(positions, found, strict=True):
                    every = whole[position]
                    if gradient is not None and every is not None:
                        below, number = node.next_functions[position]
                        shape = below._input_metadata[number].shape
                        some, every = gradient.sum_to_size(shape), every.sum_to_size(shape)
                        # a new tensor as large as the weight costs more time than the difference itself
                        subtract = some.sub_ if node.name() in _SPECIAL else some.sub
                        self._add(below, number, subtract(every, alpha=self.half.part))
        except Exception as error:  # the training pass goes on without the measurement
            self.error = error

    def agrees(self, walked: Digests) -> bool | None:
        """Return whether `sums` are those of a walk through the whole graph with the same weights.

        The host waits for the device. None: zeros or overflows tell nothing.
        """
        if self.error is not None or walked.keys() - self.sums.keys():
            return False
        own = digests({param: self.sums[param] for param in walked})
        ours, theirs = torch.stack([*own.values()]).cpu(), torch.stack([*walked.values()]).cpu()
        norms = theirs[:, 0]
        if not bool((norms > 0).all() & theirs.isfinite().all()):
            return None
        # convolutions and products of GPUs have 10 bits
        relative, floor = (0.1, 3e-3) if self.device.type == "cuda" else (1e-2, 1e-5)
        if self.rough:  # half and whole are rounded to 16 bits each before they are subtracted
            relative, floor = 0.1, 3e-2
        limits = relative * norms + floor * norms.norm()
        return bool(((ours - theirs).abs() <= limits[:, None]).all())

    def _gradients(
        self, node: Any, positions: tuple[int, ...], gradients: Gradients
    ) -> list[torch.Tensor | None]:
        """Return the chosen samples' gradients of the inputs of an operation at these positions."""
        special = _SPECIAL.get(node.name())
        if special is not None and gradients[0] is not None:
            return special(self._chosen, self._places[node, 0], node, positions, gradients[0])
        # any operation: once more, with 0 for the other samples
        masked = [
            None if one is None else self._chosen.masked(one, self._places[node, number])
            for number, one in enumerate(gradients)
        ]
        found = _called(node, masked)
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


def digests(gradients: dict[torch.Tensor, torch.Tensor]) -> Digests:
    """Return the norm of each gradient, and its product uᵀGv with two random vectors, shape [2].

    The vectors are the same in every call. G has a row for each element of the first dimension. The elements
    of u and v have the variance 1, so that the product of a difference D is |D| on average (root mean
    square), as with a random number for each element, which would take longer to draw than the gradient.
    """
    found = {}
    for index, (param, gradient) in enumerate(gradients.items()):
        if not gradient.numel():
            continue
        whole = torch.view_as_real(gradient) if gradient.is_complex() else gradient
        matrix = whole.reshape(len(whole) if whole.ndim else 1, -1)
        generator = torch.Generator(whole.device).manual_seed(index)
        rows, columns = (_random_vector(size, matrix, generator) for size in matrix.shape)
        found[param] = torch.stack([whole.norm(), rows @ (matrix @ columns)]).double()
    return found


def _random_vector(size: int, like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return random numbers of variance 1; a single one is 1, as it could be nearly 0."""
    vector = like.new_ones(size)
    return vector if size == 1 else vector.uniform_(-(3.0**0.5), 3.0**0.5, generator=generator)


def _done(
    owner: weakref.ref[RowGradients], use: int, stopwatch: Stopwatch, whole: Gradients, gradients: Gradients
) -> None:
    rows = owner()
    if rows is not None:
        with stopwatch.running(rows.device):
            rows.take(use, whole, gradients)


def _int64(number: int) -> int:
    """Return a number that torch gives as an unsigned one of 64 bits."""
    return (number + 2**63) % 2**64 - 2**63


def _dim(dim: int, shape: Sequence[int]) -> int:
    """Return the dimension, counted from the front."""
    return _int64(dim) % len(shape)


def _called(node: Any, gradients: Sequence[torch.Tensor | None]) -> Gradients:
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
            if each is not None and not is_kept(each):
                return True
    return False


def _product(node: Any, rows: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return rowsᵀ · gradient in the layout in which the node gives it, that of the weight."""
    if node._saved_mat2_sym_strides[0] == 1:
        return gradient.t().mm(rows).t()
    return rows.t().mm(gradient)


def _addmm(chosen: _Chosen, place: _Place, node: Any, positions: tuple[int, ...], gradient: Any) -> list[Any]:
    part = chosen.rows(gradient, place)
    return [
        part.sum(0) * node._saved_beta
        if position == 0
        else _product(node, chosen.rows(node._saved_mat1, place), part * node._saved_alpha)
        for position in positions
    ]


def _mm(chosen: _Chosen, place: _Place, node: Any, positions: tuple[int, ...], gradient: Any) -> list[Any]:
    part = chosen.rows(gradient, place)
    return [_product(node, chosen.rows(node._saved_self, place), part) for _ in positions]


def _convolution(
    chosen: _Chosen, place: _Place, node: Any, positions: tuple[int, ...], gradient: Any
) -> list[Any]:
    found = torch.ops.aten.convolution_backward(
        chosen.rows(gradient, place),
        chosen.rows(node._saved_input, place),
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
    chosen: _Chosen, place: _Place, node: Any, positions: tuple[int, ...], gradient: Any
) -> list[Any]:
    return [
        torch.ops.aten.embedding_dense_backward(
            chosen.rows(gradient, place),
            chosen.rows(node._saved_indices, place),
            node._saved_weight_sym_argsize_0,
            _int64(node._saved_padding_idx),
            node._saved_scale_grad_by_freq,
        )
    ]


def _layer_norm(
    chosen: _Chosen, place: _Place, node: Any, positions: tuple[int, ...], gradient: Any
) -> list[Any]:
    found = torch.ops.aten.native_layer_norm_backward(
        chosen.rows(gradient, place),
        chosen.rows(node._saved_input, place),
        node._saved_normalized_shape,
        chosen.rows(node._saved_result1, place),
        chosen.rows(node._saved_result2, place),
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
