"""Recognise that a State has changed, without a copy of it.

A `StateMarks` detects a change without reading the whole State. Autograd keeps a version counter of each
tensor. Some elements are compared as well, because a change through `tensor.data` does not raise the counter.
A change through `tensor.data` that spares all of these elements is not detected. A `digest` reads the whole
State. A checksum of `marks_of_script` reads its plain values, and is compared between replicas.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import itertools
import pickle
import pickletools
import zlib
from collections.abc import Hashable, Iterator
from typing import Any

import torch

from adaptdl_elastic import checkpoint
from adaptdl_elastic._interfaces import SavedState
from adaptdl_elastic._session import Session
from adaptdl_elastic.checkpoint.state_copy import copy_to_host, fill, strip

_MOST_MARKED = 1 << 16
"""Largest size in bytes of a State that is compared between replicas."""
_PLACES = ("FRAME", "GET", "BINGET", "LONG_BINGET", "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE")
"""Codes of a pickle that depend on which equal values are one object."""

_LARGEST_TENSORS = 4
"""Largest tensors of a State, of which elements are compared."""
_OTHER_TENSORS = 8
"""Other tensors of which elements are compared."""
_SAMPLED_ELEMENTS = 16
"""Compared elements of each of these tensors, spread over it."""

BLOCK = 1 << 18
"""Elements of a block of `block_sums`."""
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sampled(tensor: torch.Tensor) -> torch.Tensor:
    """Return a few elements of a tensor, spread over it, as a view of shape (n,).

    Raises:
        RuntimeError: it has no plain storage (sparse).
    """
    offset = tensor.storage_offset()
    stored = tensor.untyped_storage().nbytes() // tensor.element_size() - offset
    reachable = min(tensor.numel(), stored)
    count = min(_SAMPLED_ELEMENTS, reachable)
    return tensor.detach().as_strided((count,), (max(1, reachable // _SAMPLED_ELEMENTS),), offset)


class StateMarks:
    """Record marks of a TensorState by which a later change is detected.

    Args:
        state: The State; its `state_dict` must return the tensors themselves, not copies.

    Raises:
        RuntimeError: a tensor has no version counter (inference mode) or no plain storage (sparse), or is
            quantised.
    """

    def __init__(self, state: checkpoint.TensorState) -> None:
        # kept alive, so that no other tensor gets their addresses
        self.tensors: list[torch.Tensor] = []
        self.plain = strip(state.state_dict(), self.tensors)
        # to compare their bytes would end the process
        if any(tensor.is_quantized for tensor in self.tensors):
            raise RuntimeError("a change of a quantised tensor is not recognised by its elements")
        self._versions = [tensor._version for tensor in self.tensors]
        self._addresses = [tensor.data_ptr() for tensor in self.tensors]
        self._elements = [elements.clone() for elements in self._sampled()]

    def _sampled(self) -> Iterator[torch.Tensor]:
        """Yield a few elements of the largest tensors and of some others, as views."""
        by_size = sorted(self.tensors, key=torch.Tensor.numel)
        others, largest = by_size[:-_LARGEST_TENSORS], by_size[-_LARGEST_TENSORS:]
        yield from map(sampled, [*largest, *others[:: len(others) // _OTHER_TENSORS + 1]])

    def written(self) -> bool:
        """Return whether a version counter of these tensors has changed since. Takes microseconds."""
        return any(
            tensor._version != version for tensor, version in zip(self.tensors, self._versions, strict=True)
        )

    def same_as(self, later: StateMarks) -> bool:
        """Return whether the State has not changed between these marks and `later`.

        Waits for the tensors' device.
        """
        return (
            self._addresses == later._addresses
            and self._versions == later._versions
            and bool(self.plain == later.plain)
            and all(
                torch.equal(one.view(torch.uint8), other.view(torch.uint8))
                for one, other in zip(self._elements, later._elements, strict=True)
            )
        )


def synchronised(state: SavedState) -> bool:
    """Return whether a State has a `sync` of its own: replicas hold different parts of it."""
    return type(state).sync is not checkpoint.State.sync


def marks_of_script(session: Session) -> dict[str, int]:
    """Return checksums of the plain values of the script's small States, by their names.

    Replicas that have given a State the same values have the same checksum. States with a `sync` or a
    `collect_for_save` of their own are left out, and so are those whose values cannot be read.
    """
    found = {}
    for name, state in session.states.items():
        collects = type(state).collect_for_save is not checkpoint.State.collect_for_save
        if not state.part_of_step or synchronised(state) or collects:
            continue
        # from the script's `save` or `state_dict`
        with contextlib.suppress(Exception):
            if isinstance(state, checkpoint.TensorState):
                plain = fill(strip(state.state_dict(), []), itertools.repeat(None))
                # numbers of numpy become Python's, as they have become in a newcomer
                copy: Any = pickle.dumps(copy_to_host(plain, name))
            else:
                copy = state.snapshot()
            if isinstance(copy, bytes) and len(copy) <= _MOST_MARKED:
                found[name] = _mark(copy)
    return found


def _mark(copy: bytes) -> int:
    """Return a checksum of the values in a pickle, each once and in any order; of other bytes, of all.

    A set has any order. Two equal strings may be one object, which a pickle has once, or two.
    """
    try:
        file, parts = io.BytesIO(copy), set[str]()
        while file.tell() < len(copy):
            parts |= {f"{op.name} {arg}" for op, arg, _ in pickletools.genops(file) if op.name not in _PLACES}
    except ValueError:
        return zlib.crc32(copy)
    return zlib.crc32(repr(sorted(parts)).encode())


def digest(state: SavedState) -> Hashable:
    """Return a value that differs when the State differs."""
    if isinstance(state, checkpoint.TensorState):
        tensors: list[torch.Tensor] = []
        rest = pickle.dumps(strip(state.state_dict(), tensors))
        # start all on the device, then wait for them
        prints = [fingerprint(tensor) for tensor in tensors]
        return hashlib.blake2b(rest).digest(), tuple(
            one if isinstance(one, int) else tuple(one.tolist()) for one in prints
        )
    copy = state.snapshot()
    return hashlib.blake2b(copy).digest() if isinstance(copy, bytes) else repr(copy)


def fingerprint(tensor: torch.Tensor) -> torch.Tensor | int:
    """Return a checksum of a tensor's bits and their order, computed on the tensor's device."""
    if tensor.device.type != "cpu":
        return block_sums(tensor)
    flat = _flat(tensor)
    return zlib.crc32(flat.view(torch.uint8).numpy().data) if flat.numel() else 0


def block_sums(tensor: torch.Tensor) -> torch.Tensor:
    """Return a weighted sum of each block of elements, read as integers, modulo 2^64.

    The weights are odd, so that a change of a single element always changes the sum. They are random and
    differ by position, so that several changes do not cancel, such as two elements that change places.
    """
    flat = _flat(tensor)
    flat = flat.view(_WHOLE.get(flat.element_size(), torch.uint8))
    weights = _weights(BLOCK, flat.device)
    sums = [(block * weights[: len(block)]).sum(dtype=torch.int64) for block in torch.split(flat, BLOCK)]
    return torch.stack(sums)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)


@functools.cache
def _weights(count: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    odd = torch.randint(-(2**62), 2**62, (count,), generator=generator) | 1
    return odd.to(device)
