"""The script's own States in a step that is abandoned: a step counter, the sums of a running loss.

Those that fit into LIMIT bytes are copied before every training window, and put back. To copy a large one
(an average of all parameters) would cost every step dearly. Of those only a digest is kept, made when a
data loop begins: who differs from it when a replica has died was changed by the loop's body, maybe in the
step that did not commit, and nobody knows what it was before. The same goes for a State with a `sync` of
its own, whose `save` may not tell what this replica alone holds.
"""

from __future__ import annotations

import functools
import hashlib
import pickle
import zlib
from collections.abc import Hashable
from typing import Any

import torch

from adaptdl_elastic import checkpoint
from adaptdl_elastic._interfaces import SavedState
from adaptdl_elastic._session import Session
from adaptdl_elastic.torch._elastic.state_transfer import strip
from adaptdl_elastic.torch._runtime.position import script_position

LIMIT = 4096
"""Bytes of a State that are copied at every step: microseconds."""

_LIBRARY = "adaptdl_elastic."
_BLOCK = 1 << 18  # numbers that are weighted and summed up at a time, on a device
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class PutBackError(Exception):
    """A State of the script does not take back what it gave."""


class UserStates:
    """Copies and digests of one process's States, kept from window to window."""

    def __init__(self) -> None:
        self._copies: dict[str, Any] = {}  # as the window under way began
        self._digests: dict[str, Hashable] = {}  # of those that are not copied, as the data loop began
        self._began: Hashable = None  # that data loop, and in which generation

    def begin_window(self, session: Session) -> None:
        """A training window is about to begin."""
        place = session.generation, script_position().finished, script_position().entered
        if place != self._began:  # a large one may be small by now
            self._began, self._digests = place, {}
        self._copies = {}
        for name, state in list(session.states.items()):
            if _of_script(state) and name not in self._digests:
                self._note(name, state)

    def _note(self, name: str, state: SavedState) -> None:
        try:
            copy = None if _synchronised(state) else _small_copy(state)
            if copy is None:
                self._digests[name] = _digest(state)
            else:
                self._copies[name] = copy
        except Exception as error:  # the same would be a warning when a checkpoint is saved
            self._digests[name] = f"can not be copied: {error!r}"

    def why_irreparable(self, session: Session) -> str | None:
        """Which State can not be put back, and why; None: all can."""
        for name, before in self._digests.items():
            state = session.states.get(name)
            try:
                same = state is None or _digest(state) == before
            except Exception:
                same = False
            if not same:
                why = (
                    "it has a `sync` of its own"
                    if state is not None and _synchronised(state)
                    else f"it has more than {LIMIT} bytes"
                )
                return (
                    f"this data loop has changed the State {name!r}, which can not be put back because {why}"
                )
        return None

    def put_back(self, session: Session) -> None:
        """Let them be as they were when the window began. May be done again.

        Raises:
            PutBackError: the script's `load` has failed.
        """
        for name, copy in self._copies.items():
            state = session.states.get(name)
            if state is None:
                continue
            try:
                state.restore(copy)
            except Exception as error:
                raise PutBackError(f"the State {name!r} could not be put back: {error!r}") from error


def tensors_of_script(session: Session) -> set[str]:
    """States that the same step makes the same on all replicas: a laggard gets them with the model."""
    return {
        name
        for name, state in session.states.items()
        if _of_script(state) and isinstance(state, checkpoint.TensorState) and not _synchronised(state)
    }


def _of_script(state: SavedState) -> bool:
    return not type(state).__module__.startswith(_LIBRARY)


def _synchronised(state: SavedState) -> bool:
    return type(state).sync is not checkpoint.State.sync


def _small_copy(state: SavedState) -> Any:
    """A snapshot, or None where it would be large."""
    if isinstance(state, checkpoint.TensorState) and type(state).snapshot is checkpoint.TensorState.snapshot:
        tensors: list[torch.Tensor] = []
        rest = strip(state.state_dict(), tensors)
        if sum(tensor.numel() * tensor.element_size() for tensor in tensors) + _bytes(rest) > LIMIT:
            return None
        return state.snapshot()
    copy = state.snapshot()
    return copy if not isinstance(copy, bytes) or len(copy) <= LIMIT else None


def _bytes(value: Any) -> int:
    """About how many bytes there are, tensors apart; what is too many need not be counted to its end."""
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple | set):
        total = 8 * len(value)
        for part in value:
            if total > LIMIT:
                break
            total += _bytes(part)
        return total
    if isinstance(value, str | bytes):
        return len(value)
    return int(getattr(value, "nbytes", 8))


def _digest(state: SavedState) -> Hashable:
    """What differs when the State does."""
    if isinstance(state, checkpoint.TensorState):
        tensors: list[torch.Tensor] = []
        rest = pickle.dumps(strip(state.state_dict(), tensors))
        prints = [_fingerprint(tensor) for tensor in tensors]  # started on a device before any is waited for
        return hashlib.blake2b(rest).digest(), tuple(
            one if isinstance(one, int) else tuple(one.tolist()) for one in prints
        )
    copy = state.snapshot()
    return hashlib.blake2b(copy).digest() if isinstance(copy, bytes) else repr(copy)


def _fingerprint(tensor: torch.Tensor) -> torch.Tensor | int:
    """What differs when its bits do, or their places, made where it is."""
    if tensor.device.type != "cpu":
        return _block_sums(tensor)
    flat = _flat(tensor)
    return zlib.crc32(flat.view(torch.uint8).numpy().data) if flat.numel() else 0


def _block_sums(tensor: torch.Tensor) -> torch.Tensor:
    """Of each block, the sum of its bits as whole numbers, each times a weight of its place, modulo 2^64.

    Weights are odd, so that no change of a single number is lost, and random, so that several of them do
    not make up for each other: a count moved to another bin, numbers in another order.
    """
    flat = _flat(tensor)
    flat = flat.view(_WHOLE.get(flat.element_size(), torch.uint8))
    weights = _weights(_BLOCK, flat.device)
    sums = [(block * weights[: len(block)]).sum(dtype=torch.int64) for block in torch.split(flat, _BLOCK)]
    return torch.stack(sums)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)


@functools.cache
def _weights(count: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    odd = torch.randint(-(2**62), 2**62, (count,), generator=generator) | 1
    return odd.to(device)
