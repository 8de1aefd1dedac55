"""Copies of nested state dicts: on the host, independent of the original, and safe to load again."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def copy_to_host(value: Any, where: str) -> Any:
    """A deep copy of `value` with every tensor in host memory, later changes of the original unseen.

    A tensor that occurs twice is copied once and stays shared. Numbers of numpy become Python's, so that
    `torch.load(weights_only=True)` accepts what is saved. Raises TypeError, naming the place below
    `where`, for anything but tensors, plain values, and dicts, lists, tuples and sets of them.
    """
    copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    result = _copy(value, where, copies)
    if any(original.is_cuda for original, _ in copies.values()):
        torch.cuda.synchronize()  # the copies to pinned memory were only queued
    return result


def _copy(value: Any, where: str, copies: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> Any:
    if isinstance(value, torch.Tensor):
        if id(value) not in copies:
            copies[id(value)] = (value, _copy_tensor(value))
        return copies[id(value)][1]
    if type(value) in _PLAIN:
        return value
    if isinstance(value, dict):
        items = ((_copy(k, where, copies), _copy(v, f"{where}.{k}", copies)) for k, v in value.items())
        return OrderedDict(items) if isinstance(value, OrderedDict) else dict(items)
    if isinstance(value, tuple | list | set):
        parts = [_copy(v, f"{where}[{i}]", copies) for i, v in enumerate(value)]
        if isinstance(value, list):
            return parts
        return set(parts) if isinstance(value, set) else tuple(parts)
    if isinstance(value, torch.dtype | torch.device | torch.Size):
        return value
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # a number of numpy's
        return value.item()
    if isinstance(value, str | int | float):  # an enum, or another subclass
        for kind in (str, int, float):
            if isinstance(value, kind):
                return kind(value)
    raise TypeError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}: a state dict can hold tensors, "
        f"numbers, strings, and dicts, lists, tuples and sets of them"
    )


def _copy_tensor(tensor: torch.Tensor) -> torch.Tensor:
    source = tensor.detach()
    if source.is_cuda:
        host = torch.empty_like(source, device="cpu", pin_memory=True)
        return host.copy_(source, non_blocking=True)
    if source.device.type == "cpu":
        return source.clone()
    return source.to("cpu", copy=True)
