"""Search for the largest batch whose forward and backward pass fit into memory.

The samples of one batch are repeated to the sizes that are tried, so inputs of other batches may need more
memory. Neither parameters nor buffers, gradients and random states of the module change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from adaptdl_elastic.torch._gradient.chunked_forward import is_out_of_memory, release_memory

MARGIN = 0.9
"""Part of the largest size that fitted which is used: losses and other batches need memory, too."""

_BISECTIONS = 3  # sizes tried between one that fits and one that does not


def largest_fitting(fits: Callable[[int], bool], first: int, goal: int) -> int | None:
    """Return about the largest size from 1 to `goal` for which `fits` is true; None if `goal` fits.

    Args:
        fits: Function that tries a size.
        first: Size to begin with; larger ones are tried only after smaller ones.
        goal: Largest size of interest.
    """
    good, size = 0, min(first, goal)
    while fits(size):
        if size == goal:
            return None
        good, size = size, min(2 * size, goal)
    bad = size
    for _ in range(_BISECTIONS):
        size = (good + bad) // 2
        if size in (good, bad):
            break
        good, bad = (size, bad) if fits(size) else (good, size)
    return good


def passes_fit(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    samples: int,
    dimension: int | None,
    size: int,
    reserve: int,
) -> bool:
    """Return whether a forward and a backward pass of `size` samples fit into memory.

    Args:
        module: Module to try.
        args: Inputs of a batch.
        kwargs: Inputs of a batch.
        samples: Samples in that batch.
        dimension: Dimension of tensors that counts samples; None: the first.
        size: Samples to try.
        reserve: Bytes that will be needed besides, by the optimizer's state.
    """
    device = next(module.parameters()).device
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    with torch.random.fork_rng(devices=[]):
        try:
            _run(module, args, kwargs, samples, dimension or 0, size, reserve)
            fits = True
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            fits = False
    if state is not None:
        torch.cuda.set_rng_state(state, device)
    release_memory()
    return fits


def _run(
    module: torch.nn.Module, args: Any, kwargs: Any, samples: int, place: int, size: int, reserve: int
) -> None:
    device = next(module.parameters()).device
    kept = torch.empty(reserve, dtype=torch.uint8, device=device)

    def repeated(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.ndim <= place or leaf.shape[place] != samples:
            return leaf
        return leaf.detach().index_select(place, torch.arange(size, device=leaf.device) % samples)

    args, kwargs = pytree.tree_map(repeated, (args, kwargs))
    apart = {
        name: param.detach().requires_grad_(param.requires_grad) for name, param in module.named_parameters()
    }
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    output = torch.func.functional_call(module, (apart, buffers), args, kwargs)
    tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    losses = [tensor.float().square().mean() for tensor in tensors if tensor.requires_grad]
    if losses:
        torch.autograd.grad(
            sum(losses[1:], losses[0]), [p for p in apart.values() if p.requires_grad], allow_unused=True
        )
    del kept
