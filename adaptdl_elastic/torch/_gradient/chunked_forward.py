"""Run a module on a batch that does not fit into memory, a chunk of samples at a time.

With gradients, every chunk is checkpointed: its forward pass is run again in the backward pass, so that only
one chunk's activations are in memory at any time. A module that looks at the whole batch (BatchNorm in
training mode) sees a chunk instead.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

_TEXTS = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


class NotChunkableError(ValueError):
    """Raised if inputs cannot be divided into samples, or outputs cannot be put together."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that the memory of the device is exhausted."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return type(error) is RuntimeError and any(text in str(error) for text in _TEXTS)


def release_memory() -> None:
    """Free the memory of an aborted pass. Call it after its exception has been handled, not during that."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def count_samples(inputs: Any, known: int | None, dimension: int | None) -> int | None:
    """Return the number of samples in the inputs of a module; None if that cannot be told.

    Args:
        inputs: Nested inputs.
        known: Samples of the batch by the data loader; None: not known.
        dimension: Dimension of tensors that counts samples; None: the first.
    """
    sizes = [
        leaf.shape[dimension or 0]
        for leaf in pytree.tree_leaves(inputs)
        if isinstance(leaf, torch.Tensor) and leaf.ndim > (dimension or 0)
    ]
    return known if known in sizes else next(iter(sizes), None)


def run_in_chunks(
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    samples: int,
    dimension: int | None,
    largest: int,
) -> Any:
    """Return `call(*args, **kwargs)`, computed in chunks of at most `largest` samples.

    Tensors with `samples` in `dimension` are divided; all other arguments are the same in each chunk. Tensors
    in the output are put together along the dimension of the samples; scalars are averaged, as losses are, or
    added up where the model divides them by the items of the whole batch.

    Raises:
        NotChunkableError: this is not possible.
    """
    place, sizes = dimension or 0, chunk_sizes(samples, largest)
    leaves, structure = pytree.tree_flatten((args, kwargs))
    divided = [
        torch.split(leaf, sizes, place)
        if isinstance(leaf, torch.Tensor) and leaf.ndim > place and leaf.shape[place] == samples
        else None
        for leaf in leaves
    ]
    if not any(divided):
        raise NotChunkableError("its inputs are no tensors of samples")
    outputs = []
    for index in range(len(sizes)):
        part = [leaf if of is None else of[index] for leaf, of in zip(leaves, divided, strict=True)]
        some, named = pytree.tree_unflatten(part, structure)
        if torch.is_grad_enabled():
            outputs.append(checkpoint(partial(call, *some, **named), use_reentrant=False))
        else:
            outputs.append(call(*some, **named))
    return _combined(outputs, sizes, place, divides_by_items(kwargs))


def divides_by_items(kwargs: Mapping[str, Any]) -> bool:
    """Return whether a model divides its loss by the items (tokens) of the whole batch, which it is given.

    Models of transformers do so. Then the losses of parts add up to that of the batch.
    """
    return kwargs.get("num_items_in_batch") is not None


def chunk_sizes(samples: int, largest: int) -> list[int]:
    """Return sizes of chunks of at most `largest` samples.

    They are as equal as possible, but not all equal unless they are small: the dimension of an output that
    counts samples is the one that differs between chunks.
    """
    count = -(-samples // largest)
    sizes = [samples // count + (index < samples % count) for index in range(count)]
    if sizes[0] == sizes[-1] >= 4:
        half = sizes[-1] // 2
        sizes[-1:] = [sizes[-1] - half, half]
    return sizes


def _combined(outputs: Sequence[Any], sizes: Sequence[int], place: int, adds_up: bool) -> Any:
    flat = [pytree.tree_flatten(output) for output in outputs]
    structure = flat[0][1]
    if any(other != structure for _, other in flat):
        raise NotChunkableError("its outputs are different structures for different samples")
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return pytree.tree_unflatten([_joined(column, sizes, place, adds_up) for column in columns], structure)


def _joined(parts: Sequence[Any], sizes: Sequence[int], place: int, adds_up: bool) -> Any:
    """Return the value for the whole batch, of the values for its chunks; `adds_up`: scalars do."""
    first = parts[0]
    if not isinstance(first, torch.Tensor):
        plain = isinstance(first, int | float | str | None)
        if plain and all(type(part) is type(first) and part == first for part in parts):
            return first
        raise NotChunkableError(f"it returns a {type(first).__name__}")
    if first.ndim == 0 and first.is_floating_point():
        if adds_up:
            return torch.stack(list(parts)).sum()
        total = sum(sizes)
        return torch.stack([part * (size / total) for part, size in zip(parts, sizes, strict=True)]).sum()
    counts = [
        dim
        for dim in range(first.ndim)
        if all(part.shape[dim : dim + 1] == (size,) for part, size in zip(parts, sizes, strict=True))
    ]
    if not counts:
        raise NotChunkableError(f"an output of shape {list(first.shape)} has no dimension of samples")
    return torch.cat(list(parts), place if place in counts else counts[0])
