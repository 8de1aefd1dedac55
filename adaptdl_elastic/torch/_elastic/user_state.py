"""Restore the script's own States after a failed step, e.g. a step counter, a running loss, an average.

- A State that is small, or that can be copied in a small part of a step's time, is copied before every
  training window.
- Of a large TensorState only marks are recorded (`large_state`). It is copied when a step fails.
- Of any other State a digest is recorded when a data loop begins. These are large States that are pickled,
  and States with their own `sync`, whose `save` may not include the part that only this replica holds. If the
  digest has changed when a replica dies, the value before the failed step is unknown, and training restarts
  from the checkpoint.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import itertools
import pickle
import pickletools
import time
import zlib
from collections.abc import Callable, Hashable
from typing import Any, TypeGuard

import torch

from adaptdl_elastic import checkpoint
from adaptdl_elastic._interfaces import SavedState
from adaptdl_elastic._session import Session
from adaptdl_elastic.checkpoint.state_copy import copy_to_host
from adaptdl_elastic.torch._elastic.large_state import LargeState
from adaptdl_elastic.torch._elastic.state_transfer import fill, strip
from adaptdl_elastic.torch._runtime.position import script_position

SMALL_BYTES = 4096
"""Largest size in bytes of a State that is copied before every step; the copy takes microseconds."""

_MOST_MARKED = 16 * SMALL_BYTES  # bytes of a State that is compared between replicas
_PLACES = ("FRAME", "GET", "BINGET", "LONG_BINGET", "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE")
"""Codes of a pickle that depend on which equal values are one object."""

COPY_SHARE = 0.01
"""Largest part of a window's time that the copy of a larger State may take."""

_TIMED_WINDOWS = 8  # number of windows of a loop after which their average time is used
_LIBRARY = "adaptdl_elastic."
BLOCK = 1 << 18  # elements of a block of `block_sums`
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class PutBackError(Exception):
    """Raised if a State of the script fails to load its own snapshot."""


class UserStates:
    """Keep copies, marks and digests of the script's States in this process."""

    def __init__(self) -> None:
        self._copies: dict[str, Any] = {}  # State's name → snapshot from the start of the window
        self._large: dict[str, LargeState] = {}  # large TensorStates by their names
        self._digests: dict[str, Hashable] = {}  # other States: name → digest from the start of the data loop
        self._loop: Hashable = None  # (generation, epoch, data loop) of the running data loop
        self._windows = 0  # windows of that loop so far
        self._loop_began = 0.0  # seconds, monotonic
        self._stepped = False  # whether `optimizer.step()` was called in the current window

    def begin_window(self, session: Session) -> None:
        """Copy or mark the States before a training window begins."""
        position = script_position(session)
        loop = session.generation, position.finished, position.entered
        if loop != self._loop:
            self._loop, self._windows, self._loop_began = loop, 0, time.monotonic()
            self._large = {}  # a State may have another size by now
        if self._windows in (0, _TIMED_WINDOWS):  # choose again: a copy may be allowed now
            self._digests = {}
        window_time = self._window_time()
        self._copies, self._stepped = {}, False
        for name, state in list(session.states.items()):
            if not _of_script(state) or name in self._digests:
                continue
            try:
                self._note(name, state, window_time)
            except Exception as error:  # from the script's `save` or `state_dict`
                self._large.pop(name, None)
                self._digests[name] = f"cannot be copied: {error!r}"
        self._windows += 1

    def _window_time(self) -> float:
        """Return the average time of a window of this loop in seconds; 0 while it is not known."""
        if self._windows < _TIMED_WINDOWS:
            return 0.0
        return (time.monotonic() - self._loop_began) / self._windows

    def _note(self, name: str, state: SavedState, window_time: float) -> None:
        large = self._large.get(name)
        if large is None and not _synchronised(state):
            began = time.monotonic()
            copy = _small_copy(state, lambda: time.monotonic() - began <= COPY_SHARE * window_time)
            if copy is not None:
                self._copies[name] = copy
                return
            if _is_plain_tensor_state(state):
                with contextlib.suppress(RuntimeError, ValueError):  # its changes cannot be recognised
                    large = self._large[name] = LargeState(state)
        if large is not None:
            large.begin_window()
        else:
            self._digests[name] = digest(state)

    def before_step(self, left_out: bool) -> None:
        """Check or copy large States at a call of `optimizer.step()`.

        Args:
            left_out: Whether the optimizer does not step, because gradients did not arrive.
        """
        if left_out:
            for large in self._large.values():
                large.step_left_out()
        elif not self._stepped:
            self._stepped = True
            for large in self._large.values():
                large.before_step()

    def why_irreparable(self, session: Session) -> str | None:
        """Return which State cannot be restored, and why; None if all can."""
        found = "this data loop has changed the State {!r}, which cannot be put back because {}"
        for name, large in self._large.items():
            if not large.can_be_put_back():
                return found.format(name, "the step that failed has changed it before `optimizer.step()`")
        for name, before in self._digests.items():
            state = session.states.get(name)
            try:
                same = state is None or digest(state) == before
            except Exception:
                same = False
            if not same:
                own = state is not None and _synchronised(state)
                why = "it has a `sync` of its own" if own else _too_large(state)
                return found.format(name, why)
        return None

    def put_back(self, session: Session) -> None:
        """Restore the States to their values at the start of the window. May be called more than once.

        Raises:
            PutBackError: the script's `load` or `load_state_dict` has failed.
        """
        for name in [*self._copies, *self._large]:
            state = session.states.get(name)
            if state is None:
                continue
            try:
                if name in self._large:
                    self._large[name].put_back()
                else:
                    state.restore(self._copies[name])
            except Exception as error:
                raise PutBackError(f"the State {name!r} could not be put back: {error!r}") from error


def tensors_of_script(session: Session) -> set[str]:
    """Return the names of the script's States that replicas a step behind receive with the model.

    These are the TensorStates without their own `sync`: after the same step they are equal on all replicas.
    """
    return {
        name
        for name, state in session.states.items()
        if _of_script(state) and isinstance(state, checkpoint.TensorState) and not _synchronised(state)
    }


def marks_of_script(session: Session) -> dict[str, int]:
    """Return checksums of the plain values of the script's small States, by their names.

    Replicas that have given a State the same values have the same checksum. States with a `sync` or a
    `collect_for_save` of their own are left out, and so are those whose values cannot be read.
    """
    found = {}
    for name, state in session.states.items():
        collects = type(state).collect_for_save is not checkpoint.State.collect_for_save
        if not _of_script(state) or _synchronised(state) or collects:
            continue
        with contextlib.suppress(Exception):  # from the script's `save` or `state_dict`
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


def copies_of_script(session: Session) -> dict[str, Any]:
    """Return snapshots of all the script's States, of any size, by their names."""
    return checkpoint.snapshot_states(name for name, state in session.states.items() if _of_script(state))


def _of_script(state: SavedState) -> bool:
    return state.part_of_step or not type(state).__module__.startswith(_LIBRARY)


def _synchronised(state: SavedState) -> bool:
    return type(state).sync is not checkpoint.State.sync


def _is_plain_tensor_state(state: SavedState) -> TypeGuard[checkpoint.TensorState]:
    return (
        isinstance(state, checkpoint.TensorState) and type(state).snapshot is checkpoint.TensorState.snapshot
    )


def _small_copy(state: SavedState, quick: Callable[[], bool]) -> Any:
    """Return a snapshot of a State that is small or was copied quickly; None for other States.

    Args:
        state: The State.
        quick: Function that returns, after the copy, whether it took little enough time.
    """
    if _is_plain_tensor_state(state):
        tensors: list[torch.Tensor] = []
        rest = strip(state.state_dict(), tensors)
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors) + _bytes(rest)
        return state.snapshot() if size <= SMALL_BYTES else None
    copy = state.snapshot()
    return copy if not isinstance(copy, bytes) or len(copy) <= SMALL_BYTES or quick() else None


def _too_large(state: SavedState | None) -> str:
    if isinstance(state, checkpoint.TensorState):
        return "its `state_dict` does not return the tensors themselves"
    return "to copy it before every step would take too long: let it be a TensorState"


def _bytes(value: Any) -> int:
    """Return the approximate size of `value` in bytes, without tensors; counting stops at SMALL_BYTES."""
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple | set):
        total = 8 * len(value)
        for part in value:
            if total > SMALL_BYTES:
                break
            total += _bytes(part)
        return total
    if isinstance(value, str | bytes):
        return len(value)
    return int(getattr(value, "nbytes", 8))


def digest(state: SavedState) -> Hashable:
    """Return a value that differs when the State differs."""
    if isinstance(state, checkpoint.TensorState):
        tensors: list[torch.Tensor] = []
        rest = pickle.dumps(strip(state.state_dict(), tensors))
        prints = [fingerprint(tensor) for tensor in tensors]  # start all on the device, then wait for them
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
