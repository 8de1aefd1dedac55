"""Rebuild nested state dicts: copy them to the host, take tensors out or put them in, write and read them.

All of it is one walk, `rebuild`. torch's pytree cannot replace it: it drops the `_metadata` of a module's
state dict, takes a Counter for a single value, and keeps namedtuples and defaultdicts of any factory, which
`torch.load(weights_only=True)` refuses.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

P = TypeVar("P")

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)
_METADATA = "_metadata"
"""Attribute that torch attaches to a module's state dict: the versions of its parts."""
_DEFAULT = "_adaptdl_default"
"""Attribute of an OrderedDict in a file that stands for a defaultdict."""
_crc32_lock = threading.Lock()
"""Held while torch writes: its option of checksums applies to the whole process."""
_DEFAULTS: dict[str, Any] = {kind.__name__: kind for kind in (bool, int, float, str, list, tuple, dict, set)}


def rebuild(
    value: Any,
    change: Callable[[Any, str], Any],
    make: Callable[[Any, list[tuple[Any, Any]], str], Any] | None = None,
    where: str = "",
) -> Any:
    """Return `value` with each part replaced that is no dict, list or tuple.

    Args:
        value: The state dict. A torch.Size counts as a part.
        change: Function that returns what replaces a part; its second argument is where the part is.
        make: Function that returns what replaces a dict, from the dict, its new items and where it is; None:
            `like`.
        where: Name of `value`, for messages. If it is empty, `change` and `make` get empty ones.
    """
    if isinstance(value, dict):
        items = [
            (key, rebuild(part, change, make, where and f"{where}.{key}")) for key, part in value.items()
        ]
        return like(value, items) if make is None else make(value, items, where)
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        parts = [
            rebuild(part, change, make, where and f"{where}[{index}]") for index, part in enumerate(value)
        ]
        return parts if isinstance(value, list) else tuple(parts)
    return change(value, where)


def parts_of(value: Any, kind: type[P]) -> Iterator[P]:
    """Yield the parts of a class, in the order of `rebuild`."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from parts_of(part, kind)


def like(value: dict[Any, Any], items: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """Return `items` in a dict of the same kind as `value`, with its `_metadata`.

    Counters, OrderedDicts, and defaultdicts of a built-in type keep their type; others become plain dicts.
    """
    made: dict[Any, Any]
    if isinstance(value, Counter):
        made = Counter()
        dict.update(made, items)
    elif isinstance(value, OrderedDict):
        made = OrderedDict(items)
        if hasattr(value, _METADATA):
            setattr(made, _METADATA, getattr(value, _METADATA))
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


@dataclass(slots=True)
class Slot:
    """Stand for a tensor in the description of a state."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    # type of the device, e.g. "cuda"; each replica uses its own device of this type
    device: str

    def fresh(self) -> torch.Tensor:
        """Return a new tensor of this shape and dtype, on this replica's device."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


def strip(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return `value` with every tensor replaced by a Slot, and append the tensors to `tensors`."""

    def change(part: Any, _: str) -> Any:
        if isinstance(part, torch.Tensor):
            tensors.append(part)
            return Slot(tuple(part.shape), part.dtype, part.device.type)
        return type(part)(part) if isinstance(part, (set, bytearray)) else part

    return rebuild(value, change)


def fill(value: Any, supply: Iterator[Any]) -> Any:
    """Return `value` with every Slot replaced by the next of `supply`: the inverse of `strip`."""
    return rebuild(value, lambda part, _: next(supply) if isinstance(part, Slot) else part)


def write(value: Any, file: Any) -> None:
    """Write a copied state dict so that `read` can read it, without zip's slow checksums.

    OrderedDicts stand for defaultdicts, which torch refuses to load.
    """

    def make(old: Any, items: list[tuple[Any, Any]], _: str) -> Any:
        if (default := _default(old)) is None:
            return like(old, items)
        made = OrderedDict(items)
        setattr(made, _DEFAULT, default)
        return made

    with _crc32_lock:
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            torch.save(rebuild(value, _same, make), file)
        finally:
            torch.serialization.set_crc32_options(before)


def read(file: Any) -> Any:
    """Return what `write` has written, in host memory.

    Raises:
        UnpicklingError: the file holds something that would run code.
    """

    def make(old: Any, items: list[tuple[Any, Any]], _: str) -> Any:
        default = getattr(old, _DEFAULT, None)
        return defaultdict(_DEFAULTS[default], items) if default in _DEFAULTS else like(old, items)

    return rebuild(torch.load(file, map_location="cpu", weights_only=True), _same, make)


def _same(part: Any, _: str) -> Any:
    return part


def copies_beside(tensors: list[torch.Tensor], last: list[torch.Tensor] | None) -> list[torch.Tensor]:
    """Return copies of tensors on their devices, in the memory of an earlier copy if it fits."""
    kinds = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
    if last is None or [(one.shape, one.dtype, one.device) for one in last] != kinds:
        last = [torch.empty_like(tensor) for tensor in tensors]
    if tensors:
        with torch.no_grad():
            torch._foreach_copy_(last, [tensor.detach() for tensor in tensors])
    return last


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
    # id of the original → (original, copy)
    done: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def change(part: Any, where: str) -> Any:
        if isinstance(part, torch.Tensor):
            if id(part) not in done:
                done[id(part)] = (part, _copy_tensor(part.detach(), buffers))
            return done[id(part)][1]
        return set(copy([*part], where)) if isinstance(part, set) else _plain(part, where)

    def make(old: Any, items: list[tuple[Any, Any]], where: str) -> Any:
        made = like(old, ((copy(key, where), part) for key, part in items))
        if hasattr(made, _METADATA):
            setattr(made, _METADATA, copy(getattr(made, _METADATA), f"{where}.{_METADATA}"))
        return made

    def copy(part: Any, where: str) -> Any:
        return rebuild(part, change, make, where)

    with torch.no_grad():
        result = copy(value, where)
    if any(original.is_cuda for original, _ in done.values()):
        # the copies to pinned memory were only queued
        torch.cuda.synchronize()
    return result


def _plain(value: Any, where: str) -> Any:
    """Return a plain value in a type that `torch.load(weights_only=True)` accepts."""
    if type(value) in _PLAIN:
        return value
    # a number of numpy
    if hasattr(value, "item") and getattr(value, "shape", None) == () and type(value.item()) in _PLAIN:
        return value.item()
    # an enum, or another subclass
    for kind in (str, int, float):
        if isinstance(value, kind):
            # str() of an enum's member would be its name
            return str.__str__(value) if kind is str else kind(value)
    raise TypeError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}: a state dict can hold tensors, "
        f"numbers, strings, and dicts, lists, tuples and sets of them"
    )


def _copy_tensor(source: torch.Tensor, buffers: HostBuffers | None) -> torch.Tensor:
    buffer = None if buffers is None else buffers.take(source)
    if buffer is not None:
        return buffer.copy_(source, non_blocking=source.is_cuda)
    if source.is_cuda:
        return pinned_like(source).copy_(source, non_blocking=True)
    if source.device.type == "cpu":
        return source.clone()
    return source.to("cpu", copy=True)


class HostBuffers:
    """Keep the memory of an earlier copy for the next: new memory costs a page fault per 4 KiB."""

    def __init__(self) -> None:
        self._spare: dict[tuple[Any, ...], list[torch.Tensor]] = {}
        # whether a copy has begun
        self._copying = False

    def take(self, like: torch.Tensor) -> torch.Tensor | None:
        """Return a buffer of the same shape and type, or None."""
        self._copying = True
        spare = self._spare.get(_layout(like))
        return spare.pop() if spare else None

    def prepare(self, state: Any) -> None:
        """Allocate pinned memory for a first copy of tensors of GPUs, in a thread: 1.5 GB take a second."""
        sources = {id(t): t for t in parts_of(state, torch.Tensor) if t.is_cuda}
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
        for tensor in {id(t): t for t in parts_of(copied, torch.Tensor)}.values():
            self._spare.setdefault(_layout(tensor), []).append(tensor)


def pinned_like(source: torch.Tensor) -> torch.Tensor:
    """Return pinned memory of the host for a copy of a GPU's tensor."""
    return torch.empty_like(source, device="cpu", pin_memory=True)


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tensor.dtype, tensor.shape, tensor.stride())
