"""Run the model once more on half of a batch, to measure the variance of its gradient on one replica.

The gradient g₁ of h of the m samples, drawn at random, is one part of the step's mean gradient ḡ. With the
variance σ² of one sample's gradient, E|g₁ − ḡ|² = σ²·(1/h − 1/m), so that::

    V = |g₁ − ḡ|² · h/(m − h)        has the mean σ²/m

If the model draws random numbers (dropout), g₁ and ḡ have different ones, and the difference has too much
variance. Their norms have the right means all the same: V = (|g₁|² − |ḡ|²) · h/(m − h), with a larger error.
Nothing is asked of the graph, nor of the output's shape: the loss may be computed in the forward pass, the
model may be compiled, and its activations may be recomputed. The inputs need a dimension of m samples. The
cost is half of a forward and a backward pass, and memory for one more gradient, on sampled steps only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from adaptdl_elastic.torch._gradient.accumulation import tensors_with_gradients
from adaptdl_elastic.torch._gradient.chunked_forward import divides_by_items
from adaptdl_elastic.torch._gradient.comm_hook import Norms
from adaptdl_elastic.torch._gradient.out_of_memory import unguarded

_SAME = 1e-3  # relative difference of squared norms that rounding may cause

Pairs = Iterable[tuple[torch.Tensor, torch.Tensor]]


@dataclass
class ForwardPass:
    """Hold what is needed to run a forward pass again.

    Attributes:
        module: The module, without DDP.
        inputs: Positional and named arguments of the pass.
        samples: Number of samples in the batch; None: as the first input's first dimension says.
        dimension: Dimension of the inputs that counts the samples, if known.
        gradients: Gradients of the outputs that need one, in their order, summed over backward passes.
    """

    module: torch.nn.Module
    inputs: tuple[tuple[Any, ...], dict[str, Any]]
    samples: int | None
    dimension: int | None
    gradients: list[torch.Tensor | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        device = next(iter(self.module.parameters())).device.type
        self._autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))

    @property
    def count(self) -> int:
        """Number of samples in the batch; 0: unknown."""
        count = self.samples
        if count is None:
            shapes = [
                leaf.shape for leaf in pytree.tree_leaves(self.inputs) if isinstance(leaf, torch.Tensor)
            ]
            count = next((shape[0] for shape in shapes if shape), 0)
        return int(count)

    def backward_of_half(self, generator: torch.Generator) -> None:
        """Add the gradient of half of the samples to `.grad` of the parameters.

        Raises:
            ValueError: The inputs or outputs do not tell the samples apart, or there is one sample.
        """
        count = self.count
        if count < 2:
            raise ValueError(f"a batch of {count} cannot be split in two halves")
        half = torch.randperm(count, generator=generator)[: count // 2]
        found = 0

        def part(leaf: Any) -> Any:
            nonlocal found
            along = self._along(leaf, count) if isinstance(leaf, torch.Tensor) else None
            if along is None:
                return leaf
            found += 1
            return leaf.detach().index_select(along, half.to(leaf.device))

        inputs, named = pytree.tree_map(part, self.inputs)
        if not found:
            raise ValueError(f"no input has a dimension of {count} samples")
        device, kind, enabled = self._autocast
        with torch.enable_grad(), torch.autocast(device, kind, enabled=enabled):
            outputs = tensors_with_gradients(self.module(*inputs, **named))
        reached = [(o, g) for o, g in zip(outputs, self.gradients, strict=True) if g is not None]
        signals = []
        for output, gradient in reached:
            if output.shape == gradient.shape:  # a mean over samples, or a sum over those of the whole batch
                gradient = gradient * (count / len(half)) if divides_by_items(named) else gradient
            else:
                along = self._along(gradient, count)
                if along is not None:
                    gradient = gradient.index_select(along, half.to(gradient.device)) * (count / len(half))
                if along is None or output.shape != gradient.shape:
                    raise ValueError(
                        f"an output of shape {list(gradient.shape)} depends on other samples: let the model "
                        f"return what each sample has, and compute a loss over pairs of adl.gather(output)"
                    )
            signals.append(gradient)
        with unguarded():
            torch.autograd.backward([output for output, _ in reached], signals)

    def _along(self, tensor: torch.Tensor, count: int) -> int | None:
        dims = [dim for dim, size in enumerate(tensor.shape) if size == count]
        return self.dimension if self.dimension in dims else dims[0] if dims else None


def variance(
    passes: Sequence[ForwardPass],
    mean: Pairs,
    mean_sqr: torch.Tensor,
    norms: Norms,
    generator: torch.Generator,
) -> torch.Tensor:
    """Return V of a step by running its forward passes on half of their samples. Nothing else is changed.

    Args:
        passes: The step's forward passes.
        mean: (parameter, gradient) pairs of ḡ, perhaps multiplied by one number since (clipped, unscaled).
        mean_sqr: |ḡ|² by group, shape [groups].
        norms: Computes squared norms.
        generator: Draws the halves.

    Raises:
        ValueError, RuntimeError: The passes cannot be made on half of the samples.
    """
    gradients = dict(mean)
    modules = list(dict.fromkeys(one.module for one in passes))
    with _untouched(modules) as drew:
        for one in passes:
            one.backward_of_half(generator)
        pairs = [(p, p.grad) for m in modules for p in m.parameters() if p.grad is not None]
    count = min(one.count for one in passes)
    factor = (count // 2) / (count - count // 2)
    apart = None if drew() else difference(pairs, gradients.items(), mean_sqr, norms)
    return factor * (norms.squares(pairs) - mean_sqr if apart is None else apart)


def difference(part: Pairs, mean: Pairs, mean_sqr: torch.Tensor, norms: Norms) -> torch.Tensor | None:
    """Return |g₁ − ḡ|² by group, shape [groups]; None if it cannot be told.

    Args:
        part: (parameter, gradient) pairs of g₁. Its tensors are overwritten.
        mean: The same of ḡ, perhaps multiplied by one number since it was measured (clipped, unscaled).
        mean_sqr: |ḡ|² by group as it was measured.
        norms: Computes squared norms.
    """
    later = dict(mean)
    now = norms.squares(later.items())
    factor = now.sum() / mean_sqr.sum()  # of |ḡ|², by what was done to it
    if not torch.isfinite(factor) or factor <= 0 or not torch.allclose(now, factor * mean_sqr, rtol=_SAME):
        return None
    scale = float(factor.rsqrt())
    pairs = list(part)
    if {id(param) for param, _ in pairs} != {id(param) for param in later}:
        return None
    with torch.no_grad():
        return norms.squares((param, grad.sub_(later[param], alpha=scale)) for param, grad in pairs)


@contextmanager
def _untouched(modules: list[torch.nn.Module]) -> Iterator[Callable[[], bool]]:
    """Leave gradients, buffers and random numbers as they are; yield whether any of these were drawn."""
    parameters = [p for module in modules for p in module.parameters()]
    buffers = [b for module in modules for b in module.buffers()]
    gradients, before = [p.grad for p in parameters], [b.clone() for b in buffers]
    devices = sorted({p.device.index for p in parameters if p.is_cuda})
    for parameter in parameters:
        parameter.grad = None
    drawn = False
    with torch.random.fork_rng(devices):
        states = _random_states(devices)
        try:
            yield lambda: drawn
        finally:
            later = _random_states(devices)
            drawn = not all(torch.equal(a, b) for a, b in zip(states, later, strict=True))
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            with torch.no_grad():
                for buffer, value in zip(buffers, before, strict=True):
                    buffer.copy_(value)


def _random_states(devices: list[int]) -> list[torch.Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]
