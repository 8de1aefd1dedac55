"""Sum values over all samples of a loop, on any number of replicas and across restarts.

::

    stats = adl.Accumulator()
    for inputs, targets in validation_loader:
        ...
        stats["loss"] += loss.item() * len(targets)
        stats["total"] += len(targets)
    with stats.synchronized():
        print(stats["loss"] / stats["total"])

An `Accumulator` is in one of two modes. In *accumulation mode* every replica adds to its own sums, which it
cannot read: `+=` and `-=` on a key or on the whole accumulator, `update`, `subtract`. Inside `with
synchronized()` the accumulator is an ordinary dict of the sums over all replicas, the same on each. A change
made there must be the same on every replica, and remains after the block.

The sums are part of every checkpoint. Code outside of data loops may run again after a restart. A
`synchronized()` block that was passed before the restart then shows the same sums as before, and an
addition that was made before is not made twice. An addition is recognised by the script's statements that
lead to it, its key, and the number of such additions so far. So an addition that the script makes only after
a restart is made, and one that it made only before the restart remains. If the same addition is made again
with another value, the first value remains: the script may have measured it with other weights. Where the
script had already come to the next data loop or `synchronized()` block, a statement that is run more often
than before the restart adds no more to a key: it may divide the same work among fewer replicas, or into
smaller batches. A replica that joins later adds nothing before the data loop in which it meets the others.
A data loop outside of epochs runs again from its start: what it added before the restart remains if it had
ended, and is dropped if it had not.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from adaptdl_elastic import _frames, checkpoint
from adaptdl_elastic.torch._bootstrap import current_session
from adaptdl_elastic.torch._data.accumulator_state import AccumulatorState, Totals, add_to, own_copy
from adaptdl_elastic.torch._data.registry import current_dataloader
from adaptdl_elastic.torch._runtime.position import script_position

__all__ = ["Accumulator"]

_ALLOWED = "a number, a tensor, a numpy array of numbers, or a list, tuple or string that grows"
_SUMMABLE = (torch.Tensor, np.generic, np.ndarray, list, tuple, int, float, complex, str)
LINGER = 2
"""Number of past epochs whose synchronized() blocks are kept: a newcomer may be that many epochs behind."""


class Accumulator(MutableMapping[Any, Any]):
    """Sum values over all samples and replicas, and across restarts.

    The arguments are those of `dict`: initial sums over all replicas. Accumulators must be created outside of
    data loops and in the same order on every replica, because a checkpoint identifies them by epoch and
    order.

    Raises:
        RuntimeError: the accumulator is created inside a data loop.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if _in_data_loop():
            raise RuntimeError(
                "an Accumulator cannot be made inside a data loop, which does not run again from its start "
                "after a restart: make it before the loop"
            )
        initial = dict(*args, **kwargs)
        self._state = AccumulatorState({key: _value(value, key) for key, value in initial.items()})
        self._view: Totals | None = None  # in synchronized mode: the sums over all replicas
        self._blocks: Counter[int | None] = Counter()  # epoch → synchronized() blocks entered so far
        checkpoint.load_state(self._state)

    # ------------------------------------------------------------------------------ accumulation mode

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Add to several sums at once. The arguments are those of `dict.update`."""
        self._add(dict(*args, **kwargs), 1)

    def subtract(self, *args: Any, **kwargs: Any) -> None:
        """Subtract from several sums at once."""
        self._add(dict(*args, **kwargs), -1)

    def __iadd__(self, other: Mapping[Any, Any] | Iterable[tuple[Any, Any]]) -> Accumulator:
        self.update(other)
        return self

    def __isub__(self, other: Mapping[Any, Any] | Iterable[tuple[Any, Any]]) -> Accumulator:
        self.subtract(other)
        return self

    def _add(self, items: Totals, sign: int) -> None:
        for key, change in {key: _value(value, key, sign) for key, value in items.items()}.items():
            if self._view is not None:
                add_to(self._view, key, change)
            elif _in_data_loop():
                if not _repeats_samples():
                    self._state.add_in_loop(key, change)
            else:
                self._add_outside(key, change, sign)

    def _add_outside(self, key: Any, change: Any, sign: int) -> None:
        """Add `change` unless this addition was made before a restart."""
        position, epoch = script_position(), current_session().epoch
        part = position.epoch_loops if epoch is None else position.entered
        loop = position.loops_outside if epoch is None else position.entered
        block = self._blocks[epoch]
        name = f"{part} {block} {_frames.running_statements(position.body)} {'-+'[sign > 0]}{key!r}"
        self._state.add_outside((epoch, loop, block), name, {key: change})

    # ------------------------------------------------------------------------------ synchronized mode

    @contextmanager
    def synchronized(self) -> Iterator[Accumulator]:
        """Sum over all replicas, and let the block read and change the sums like a dict.

        Every replica must enter the block at the same place of the script. A block inside a block has no
        effect.
        """
        if self._view is not None:
            yield self
            return
        self._view = self._enter()
        try:
            yield self
        finally:
            self._view = None

    def _enter(self) -> Totals:
        state, epoch = self._state, current_session().epoch
        if _in_data_loop():
            if current_session().dry:
                state.add_total(state.updates)
            else:
                state.take_loop()
                state.sync()
            return state.results
        if epoch is not None:  # a finished epoch does not run again
            state.forget_epochs_before(epoch - LINGER)
        shown = state.history.setdefault(epoch, [])
        number = self._blocks[epoch]
        self._blocks[epoch] += 1
        if number < len(shown):
            return copy.deepcopy(shown[number])
        current_session().recovery.retry_on_peer_loss(partial(state.sync, state.syncs))
        shown.append(copy.deepcopy(state.results))
        return state.results

    # --------------------------------------------------------------------------------- a dict's methods

    def __getitem__(self, key: Hashable) -> Any:
        return _Sum(self, key) if self._view is None else self._view[key]

    def __setitem__(self, key: Hashable, value: Any) -> None:
        if self._view is not None:
            self._view[key] = _value(value, key)
            return
        if not isinstance(value, _Sum) or value.accumulator is not self or value.key != key:
            raise TypeError(
                f"outside of synchronized() a sum can only be added to or subtracted from: "
                f"accumulator[{key!r}] += x or -= x. To begin again from zero, call clear() inside of "
                f"`with accumulator.synchronized():`"
            )
        for sign, amount in value.changes:
            self._add({key: amount}, sign)

    def __delitem__(self, key: Hashable) -> None:
        del self._readable("delete a key")[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._readable("iterate over an Accumulator"))

    def __len__(self) -> int:
        return len(self._readable("take the length of an Accumulator"))

    def __contains__(self, key: object) -> bool:
        return key in self._readable("look a key up")

    def __eq__(self, other: object) -> bool:
        return self is other if self._view is None else self._view == other

    def __repr__(self) -> str:
        return f"Accumulator({'not synchronized' if self._view is None else self._view})"

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the sum under `key`, or `default` if there is none. Only inside synchronized()."""
        return self._readable("read a sum").get(key, default)

    def _readable(self, what: str) -> Totals:
        if self._view is None:
            raise RuntimeError(
                f"cannot {what} while replicas hold different parts of it: do it inside `with "
                f"accumulator.synchronized():`"
            )
        return self._view


class _Sum:
    """Collect the additions of `accumulator[key] += x` in accumulation mode; cannot be read."""

    def __init__(
        self, accumulator: Accumulator, key: Hashable, changes: tuple[tuple[int, Any], ...] = ()
    ) -> None:
        self.accumulator, self.key, self.changes = accumulator, key, changes

    def __add__(self, value: Any) -> _Sum:
        return _Sum(self.accumulator, self.key, (*self.changes, (1, value)))

    def __sub__(self, value: Any) -> _Sum:
        return _Sum(self.accumulator, self.key, (*self.changes, (-1, value)))

    def __repr__(self) -> str:
        return f"<sum {self.key!r} of an Accumulator, to be read inside synchronized()>"


def _repeats_samples() -> bool:
    """Return whether the samples of the batch are those of other replicas, repeated at weight 0."""
    loader = current_dataloader()
    own = loader is None or loader.local_samples > 0 or current_session().dry
    # an inner loop has samples of its own
    return not own and script_position().inner.innermost() is None


def _in_data_loop() -> bool:
    return current_dataloader() is not None


def _value(value: Any, key: Any, sign: int = 1) -> Any:
    """Return a copy of `value`, or of its negative, for a sum.

    It is in main memory, has no autograd graph, and shares no buffer with the caller.

    Raises:
        TypeError: `value` cannot be summed, or a checkpoint cannot hold it, a part of it, or its key.
    """
    if not isinstance(value, _SUMMABLE) or isinstance(value, bytes):
        raise TypeError(f"cannot add a {type(value).__name__} to {key!r}: a sum can be {_ALLOWED}")
    if (type(value) is int or type(value) is float) and type(key) is str:
        return sign * value
    try:
        own = value.detach().cpu() if isinstance(value, torch.Tensor) else value
        copied = own_copy({key: own})[key]
        return copied if sign > 0 else -copied
    except TypeError as error:
        change = f"add a {type(value).__name__} to" if sign > 0 else f"subtract a {type(value).__name__} from"
        raise TypeError(f"cannot {change} {key!r}: {error}") from None
