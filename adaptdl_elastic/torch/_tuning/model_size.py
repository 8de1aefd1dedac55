"""Count the bytes of models that replicas exchange: their gradients, and their whole state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from adaptdl_elastic._interfaces import ElasticModel


def exchanged_bytes(models: Sequence[ElasticModel]) -> tuple[float, float] | tuple[None, None]:
    """Return the bytes of gradients that a step averages, and of the state that a newcomer gets.

    The state is that of models and optimizers. A sharded tensor counts as a whole. From any thread.
    """
    try:
        parameters = [one for model in models for one in model.module.parameters()]
        tensors = [*parameters, *(one for model in models for one in model.module.buffers())]
        states = [one for model in models for one in list(model.optimizer.state.values())]
        tensors += [one for state in states for one in list(state.values()) if isinstance(one, torch.Tensor)]
        return _bytes(one for one in parameters if one.requires_grad), _bytes(tensors)
    except Exception:  # the script's own model or optimizer, or the script changes them now
        return None, None


def _bytes(tensors: Iterable[torch.Tensor]) -> float:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
