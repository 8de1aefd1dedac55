"""Copy nested state dicts to the host, independent of the original and safe to load again."""

from __future__ import annotations

import contextlib
import operator
import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_METADATA = "_metadata"  # attribute that torch attaches to a module's state dict: the versions of its parts
_DEFAULT = "_adaptdl_default"  # attribute of an OrderedDict in a file that stands for a defaultdict
_DEFAULTS: dict[str, Any] = {kind.__name__: kind for kind in (bool, int, float, str, list, tuple, dict, set)}


class HostBuffers:
    """Keep the memory of an earlier copy for the next: new memory costs a page fault per 4 KiB."""

    def __init__(self) -> None:
        self._spare: dict[tuple[Any, ...], list[torch.Tensor]] = {}
        self._copying = False  # a copy has begun

    def take(self, like: torch.Tensor) -> torch.Tensor | None:
        """Return a buffer of the same shape and type, or None."""
        self._copying = True
        spare = self._spare.get(_layout(like))
        return spare.pop() if spare else None

    def prepare(self, state: Any) -> None:
        """Allocate pinned memory for a first copy of tensors of GPUs, in a thread: 1.5 GB take a second."""
        sources = {id(t): t for t in _tensors(state) if t.is_cuda}
        if sources:
            arguments = (self._spare, list(sources.values()))
            threading.Thread(
                target=self._allocate, args=arguments, name="adaptdl-pinned", daemon=True
            ).start()

    def _allocate(
        self, spare: dict[tuple[Any, ...], list[torch.Tensor]], sources: list[torch.Tensor]
    ) -> None:
        # without memory the first copy tries again, and tells why it fails
        with contextlib.suppress(RuntimeError):
            for source in sources:
                if self._copying:
                    return
                spare.setdefault(_layout(source), []).append(pinned_like(source))

    def give(self, copied: Any) -> None:
        """Keep the tensors of a copy for reuse, and forget those kept before."""
        self._spare = {}
        for tensor in {id(t): t for t in _tensors(copied)}.values():
            self._spare.setdefault(_layout(tensor), []).append(tensor)


def pinned_like(source: torch.Tensor) -> torch.Tensor:
    """Return pinned memory of the host for a copy of a GPU's tensor."""
    return torch.empty_like(source, device="cpu", pin_memory=True)


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tensor.dtype, tensor.shape, tensor.stride())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


def copy_to_host(value: Any, where: str, buffers: HostBuffers | None = None) -> Any:
    """Return a deep copy of `value` with every tensor in host memory.

    A tensor that occurs twice is copied once and stays shared. Numbers of numpy become Python's, so that
    `torch.load(weights_only=True)` accepts the copy. `like` explains the kinds of dict.

    Args:
        value: the state dict.
        where: name of the state, for messages.
        buffers: memory to copy into.

    Raises:
        TypeError: a part is neither a tensor, nor a plain value, nor a dict, list, tuple or set of these. The
            text names it.
    """
    copies = _Copies({}, buffers or HostBuffers())
    with torch.no_grad():
        result = _copy(value, where, copies)
    if any(original.is_cuda for original, _ in copies.done.values()):
        torch.cuda.synchronize()  # the copies to pinned memory were only queued
    return result


class _Copies(NamedTuple):
    done: dict[int, tuple[torch.Tensor, torch.Tensor]]  # id of the original → (original, copy)
    buffers: HostBuffers


def _copy(value: Any, where: str, copies: _Copies) -> Any:
    if isinstance(value, torch.Tensor):
        if id(value) not in copies.done:
            copies.done[id(value)] = (value, _copy_tensor(value.detach(), copies.buffers))
        return copies.done[id(value)][1]
    if type(value) in _PLAIN:
        return value
    if isinstance(value, dict):
        items = ((_copy(k, where, copies), _copy(v, f"{where}.{k}", copies)) for k, v in value.items())
        return like(value, items, lambda attached: _copy(attached, f"{where}.{_METADATA}", copies))
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, tuple | list | set):
        parts = [_copy(v, f"{where}[{i}]", copies) for i, v in enumerate(value)]
        if isinstance(value, list):
            return parts
        return set(parts) if isinstance(value, set) else tuple(parts)
    if isinstance(value, torch.dtype | torch.device):
        return value
    # a number of numpy
    if hasattr(value, "item") and getattr(value, "shape", None) == () and type(value.item()) in _PLAIN:
        return value.item()
    if isinstance(value, str | int | float):  # an enum, or another subclass
        for kind in (str, int, float):
            if isinstance(value, kind):
                # str() of an enum's member would be its name
                return str.__str__(value) if kind is str else kind(value)
    raise TypeError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}: a state dict can hold tensors, "
        f"numbers, strings, and dicts, lists, tuples and sets of them"
    )


def like(
    value: dict[Any, Any],
    items: Iterable[tuple[Any, Any]],
    copy: Callable[[Any], Any] = lambda attached: attached,
) -> dict[Any, Any]:
    """Return `items` in a dict of the same kind as `value`, with a `copy` of its `_metadata`.

    Counters, OrderedDicts, and defaultdicts of a built-in type keep their type; others become plain dicts.
    """
    made: dict[Any, Any]
    if isinstance(value, Counter):
        made = Counter()
        dict.update(made, items)
    elif isinstance(value, OrderedDict):
        made = OrderedDict(items)
        if hasattr(value, _METADATA):
            setattr(made, _METADATA, copy(getattr(value, _METADATA)))
    elif isinstance(value, defaultdict) and _default(value) is not None:
        made = defaultdict(value.default_factory, items)
    else:
        made = dict(items)
    return made


def _default(value: Any) -> str | None:
    """Return the name of a defaultdict's built-in type, or None."""
    factory = value.default_factory if isinstance(value, defaultdict) else None
    name = getattr(factory, "__name__", "")
    return name if factory is not None and _DEFAULTS.get(name) is factory else None


def for_file(value: Any) -> Any:
    """Return a copied state dict with OrderedDicts in place of defaultdicts, which torch refuses to load."""
    if isinstance(value, dict):
        default = _default(value)
        items = [(key, for_file(item)) for key, item in value.items()]
        if default is not None:
            made = OrderedDict(items)
            setattr(made, _DEFAULT, default)
            return made
        return value if all(item is value[key] for key, item in items) else like(value, items)
    if type(value) in (list, tuple):
        parts = [for_file(part) for part in value]
        return value if all(map(operator.is_, parts, value)) else type(value)(parts)
    return value


def from_file(value: Any) -> Any:
    """Undo `for_file`, in place if possible."""
    if isinstance(value, dict):
        for key, item in value.items():
            value[key] = from_file(item)
        default = getattr(value, _DEFAULT, None)
        return defaultdict(_DEFAULTS[default], value) if default in _DEFAULTS else value
    if isinstance(value, list):
        value[:] = map(from_file, value)
    return tuple(map(from_file, value)) if type(value) is tuple else value


def _copy_tensor(source: torch.Tensor, buffers: HostBuffers) -> torch.Tensor:
    buffer = buffers.take(source)
    if buffer is not None:
        return buffer.copy_(source, non_blocking=source.is_cuda)
    if source.is_cuda:
        return pinned_like(source).copy_(source, non_blocking=True)
    if source.device.type == "cpu":
        return source.clone()
    return source.to("cpu", copy=True)
