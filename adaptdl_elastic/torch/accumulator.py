"""Sums over all samples of a loop, whatever replicas they were seen on and however often the job moved.

::

    stats = adl.Accumulator()
    for inputs, targets in validation_loader:
        ...
        stats["loss"] += loss.item() * len(targets)
        stats["total"] += len(targets)
    with stats.synchronized():
        print(stats["loss"] / stats["total"])

An `Accumulator` is in one of two modes. In *accumulation mode* every replica adds to sums of its own
and can not read them: `+=` and `-=` on a key or on the whole, `update`, `subtract`. Inside `with
synchronized()` it is an ordinary dict of the sums over all replicas, the same on each; what is changed
there must be changed in the same way on every replica, and stays changed.

The sums are part of every checkpoint. Code outside of data loops may run again after a restart: a
`synchronized()` block that was passed before then shows what it showed before, and additions that were
made before are not made twice. An addition is recognised by the statements of the script that lead to it,
its key, and the number of such additions so far. So an addition that the script makes only after a restart
counts, and one that it made only before the restart stays.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from adaptdl_elastic import _session, checkpoint, collective
from adaptdl_elastic.torch._loops import loops
from adaptdl_elastic.torch._recovery import recovery
from adaptdl_elastic.torch._registry import current_dataloader
from adaptdl_elastic.torch._statements import running_statements

__all__ = ["Accumulator"]

Sums = dict[Any, Any]
Additions = dict[int | None, dict[str, int]]
Reached = tuple[int, int | None, int]
"""Epoch loops of the script, the epoch, and data loops of the epoch that a run has begun."""

_ALLOWED = "a number, a tensor, a numpy array of numbers, or a list, tuple or string that grows"
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
LINGER = 2
"""Epochs for which blocks are remembered after their own: a replica that joins may be that far behind."""

_NDARRAY = "__ndarray__"  # marks a numpy array in a file that may hold tensors only
_SCRATCH = "accumulators"
LATEST = "latest accumulator"  # in the session's scratch: the one that was synchronised last


class Accumulator(MutableMapping[Any, Any]):
    """See the module's docstring. The arguments are those of `dict`: initial sums, counted once.

    Construct it outside of data loops, in the same order on every replica (its state in the checkpoint
    goes by epoch and order): RuntimeError inside one.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if _in_data_loop():
            raise RuntimeError(
                "an Accumulator can not be made inside a data loop, which does not run again from its start "
                "after a restart: make it before the loop"
            )
        initial = dict(*args, **kwargs)
        self._state = AccumulatorState({key: _value(value, key) for key, value in initial.items()})
        self._view: Sums | None = None  # in synchronized mode: what is read and changed
        self._blocks: Counter[int | None] = Counter()  # synchronized() entered so far, by epoch
        self._additions: Counter[tuple[int | None, str]] = Counter()  # outside of data loops, of this process
        checkpoint.load_state(self._state)

    # ------------------------------------------------------------------------------ accumulation mode

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Add to several sums at once. The arguments are those of `dict.update`, which overwrites."""
        self._add(_items(args, kwargs), 1)

    def subtract(self, *args: Any, **kwargs: Any) -> None:
        """Subtract from several sums at once."""
        self._add(_items(args, kwargs), -1)

    def __iadd__(self, other: Mapping[Any, Any] | Iterable[tuple[Any, Any]]) -> Accumulator:
        self.update(other)
        return self

    def __isub__(self, other: Mapping[Any, Any] | Iterable[tuple[Any, Any]]) -> Accumulator:
        self.subtract(other)
        return self

    def _add(self, items: Sums, sign: int) -> None:
        values = {key: _value(value, key) for key, value in items.items()}
        for key, value in values.items():
            change = value if sign > 0 else _negative(value, key)
            if self._view is not None:
                _add_to(self._view, key, change)
            elif _in_data_loop():
                _add_to(self._state.updates, key, change)
            else:
                self._add_outside(key, change, sign)

    def _add_outside(self, key: Any, change: Any, sign: int) -> None:
        """Add `change` unless this addition was made before a restart."""
        position, epoch = loops(), _session.current().epoch
        loop = position.epoch_loops if epoch is None else position.entered
        block = self._blocks[epoch]
        name = f"{loop} {block} {running_statements(position.body)} {'-+'[sign > 0]}{key!r}"
        self._additions[epoch, name] += 1
        self._state.add_outside(
            Addition(epoch, loop, block, name, self._additions[epoch, name]), {key: change}
        )

    # ------------------------------------------------------------------------------ synchronized mode

    @contextmanager
    def synchronized(self) -> Iterator[Accumulator]:
        """Sum over all replicas; inside the block the sums can be read and changed like a dict's.

        Every replica must enter it at the same place. A block inside a block changes nothing.
        """
        if self._view is not None:
            yield self
            return
        self._view = self._enter()
        try:
            yield self
        finally:
            self._view = None

    def _enter(self) -> Sums:
        state, epoch = self._state, _session.current().epoch
        if _in_data_loop():
            state.sync()
            return state.results
        if epoch is not None:  # a finished epoch does not run again
            state.forget_epochs_before(epoch - LINGER)
        shown = state.history.setdefault(epoch, [])
        number = self._blocks[epoch]
        self._blocks[epoch] += 1
        if number < len(shown):
            return copy.deepcopy(shown[number])
        recovery(_session.current()).guarded(state.syncing())
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
                f"accumulator[{key!r}] += x or -= x"
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

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Accumulator({'not synchronized' if self._view is None else self._view})"

    def get(self, key: Any, default: Any = None) -> Any:
        """The sum, or `default`. Only inside synchronized()."""
        return self._readable("read a sum").get(key, default)

    def clear(self) -> None:
        """Start all sums anew. Only inside synchronized(), and on every replica."""
        self._readable("clear an Accumulator").clear()

    def _readable(self, what: str) -> Sums:
        if self._view is None:
            raise RuntimeError(
                f"can not {what} while replicas hold different parts of it: do it inside `with "
                f"accumulator.synchronized():`"
            )
        return self._view


class _Sum:
    """What `accumulator[key]` is in accumulation mode: something to add to and not to read."""

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


class Addition(NamedTuple):
    """An addition outside of data loops."""

    epoch: int | None
    loop: int
    """Data loops of the epoch that were begun before it; outside of epochs, epoch loops of the script."""
    block: int
    """synchronized() blocks of the epoch that were entered before it."""
    name: str
    """What a later run of the script calls it, too."""
    number: int
    """Additions of that name that this process has come to, this one included."""


class AccumulatorState(checkpoint.TensorState):
    """The sums in the checkpoint, for as long as their epoch lasts."""

    required = False  # one that was not reached before the checkpoint is not in it

    def __init__(self, initial: Sums) -> None:
        session = _session.current()
        epoch = self.expires = session.epoch
        counts: Counter[int | None] = session.scratch.setdefault(_SCRATCH, Counter())
        super().__init__(f"adaptdl-accumulator-epoch{epoch}-{counts[epoch]}")
        counts[epoch] += 1
        self.results: Sums = initial  # over all replicas, up to the last sync
        self.summed: Sums = {}  # what that sync gave, whatever a synchronized() block has made of it since
        self.updates: Sums = {}  # of this replica, since then
        self.history: dict[int | None, list[Sums]] = {}  # what each synchronized() block showed, by epoch
        self.syncs = 0  # how often the sums of all replicas were added up
        self.additions: Additions = {}  # how often each was made outside of data loops, by epoch
        self._loaded: Additions = {}  # what that was in the run that goes on here
        self._reached: Reached = (0, None, 0)  # where that run was
        self._own: list[tuple[Addition, Sums]] = []  # which a newcomer has made and that run has not

    def add_outside(self, addition: Addition, change: Sums) -> None:
        """Take an addition outside of data loops, unless it was made before."""
        if self._was_made(addition):
            return
        made = self.additions.setdefault(addition.epoch, {})
        made[addition.name] = max(addition.number, made.get(addition.name, 0))
        self.updates = merge(self.updates, change)
        if _session.current().joining:
            self._own.append((addition, change))

    def _was_made(self, addition: Addition) -> bool:
        """Return whether the run that goes on here has made this addition.

        Where that run had gone on to a later loop or block it has made all additions of a name. How many
        those are differs where another number of replicas shares the samples of a loop of the script's own.
        """
        epoch, loop, block, name, number = addition
        times = self._loaded.get(epoch, {}).get(name, 0)
        if number <= times:
            return True
        epoch_loops, reached_epoch, reached_loop = self._reached
        if epoch is None:
            past = loop < epoch_loops
        else:
            past = reached_epoch is not None and (epoch, loop) < (reached_epoch, reached_loop)
        return times > 0 and (past or block < len(self.history.get(epoch, ())))

    def forget_epochs_before(self, epoch: int) -> None:
        """Drop what is remembered of code that does not run again."""
        for kept in (self.history, self.additions):
            for over in [e for e in kept if e is not None and e < epoch]:
                del kept[over]

    def sync(self) -> None:
        """Sum over the replicas."""
        mine = self.updates, self.additions
        total, self.additions = collective.allreduce(mine, _merge_with_additions, tag=self.name)
        self.add_total(total)

    def syncing(self) -> Callable[[], None]:
        """A `sync` that can be called again after a death: survivors give each other sums that have come."""
        before = self.syncs

        def sync() -> None:
            if self.syncs == before:
                self.sync()

        return sync

    def add_total(self, total: Sums) -> None:
        """All replicas' updates, this one's included, have been added up to `total`."""
        self.take_total(merge(self.results, total), self.syncs + 1)

    def take_total(self, results: Sums, syncs: int) -> None:
        """The `syncs`-th synchronisation has given `results`."""
        self.updates, self.syncs = {}, syncs
        self.show(results)
        self.summed = copy.deepcopy(self.results)
        _session.current().scratch[LATEST] = self

    def show(self, results: Sums) -> None:
        """Have these sums over all replicas, in a synchronized() block that is under way, too."""
        results = dict(results)
        self.results.clear()
        self.results.update(results)

    def state_dict(self) -> dict[str, Any]:
        position = loops()
        return {
            "results": _encode(self.results),
            "updates": _encode(self.updates),
            "history": {epoch: [_encode(sums) for sums in shown] for epoch, shown in self.history.items()},
            "additions": {epoch: dict(made) for epoch, made in self.additions.items()},
            "reached": (position.epoch_loops, _session.current().epoch, position.entered),
            "syncs": self.syncs,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = copy.deepcopy(state_dict)
        self.results, self.updates = _decode(saved["results"]), _decode(saved["updates"])
        self.history = {epoch: [_decode(s) for s in shown] for epoch, shown in saved["history"].items()}
        if "reached" not in saved:
            raise ValueError("it was saved by an older version, which recognised additions in another way")
        self._loaded, self._reached = saved["additions"], tuple(saved["reached"])
        self.additions = copy.deepcopy(self._loaded)
        self.syncs = saved.get("syncs", 0)
        own, self._own = self._own, []
        if _session.current().joining:
            for addition, change in own:
                self.add_outside(addition, change)


def _in_data_loop() -> bool:
    return current_dataloader() is not None


def _items(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sums:
    if len(args) > 1:
        raise TypeError(f"expected at most one positional argument, got {len(args)}")
    return dict(*args, **kwargs)


def _value(value: Any, key: Any) -> Any:
    """A copy that holds on to no graph, no GPU and no caller's buffer.

    TypeError for what can not add up, and for what a checkpoint can not hold, be it deep in a list or a key.
    """
    _check_key(key, key)
    summable = isinstance(value, (torch.Tensor, np.generic, np.ndarray, list, tuple, *_PLAIN))
    if summable and value is not None and not isinstance(value, bytes):
        return _copied(value, key)
    raise TypeError(f"can not add a {type(value).__name__} to {key!r}: a sum can be {_ALLOWED}")


def _copied(value: Any, key: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, str):  # numpy's, too; and str() of an enum's member is its name
        return str.__str__(value)
    if isinstance(value, np.bytes_):
        return bytes(value)
    if isinstance(value, np.generic | np.ndarray):
        if value.dtype.kind not in "biufc" or value.dtype.itemsize > 8 * (1 + (value.dtype.kind == "c")):
            raise TypeError(
                f"can not add {value.dtype} of numpy's to {key!r}: a checkpoint holds arrays of numbers of "
                f"up to 64 bits; make a list of it"
            )
        if isinstance(value, np.generic):
            return value.item()
        return value.astype(value.dtype.newbyteorder("="), order="C", copy=True)
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, list | tuple | set):
        parts = [_copied(part, key) for part in value]
        return parts if isinstance(value, list) else tuple(parts) if isinstance(value, tuple) else set(parts)
    if isinstance(value, dict):
        for inner in value:
            _check_key(inner, key)
        return {inner: _copied(item, key) for inner, item in value.items()}
    raise TypeError(
        f"can not add a {type(value).__name__} in a list, tuple or dict to {key!r}: a checkpoint can hold "
        f"numbers, strings, tensors and numpy arrays"
    )


def _check_key(part: Any, key: Any) -> None:
    if isinstance(part, tuple):
        for each in part:
            _check_key(each, key)
    elif not isinstance(part, _PLAIN) and not (isinstance(part, np.generic) and part.dtype.kind in "biufc"):
        raise TypeError(
            f"can not keep a sum under {key!r}, a {type(part).__name__}: a checkpoint can hold keys that are "
            f"strings, numbers, None, or tuples of these"
        )


def _negative(value: Any, key: Any) -> Any:
    try:
        return -value
    except TypeError:
        raise TypeError(f"can not subtract a {type(value).__name__} from {key!r}") from None


def _add_to(sums: Sums, key: Any, value: Any) -> None:
    sums[key] = sums[key] + value if key in sums else value


def _merge_with_additions(a: tuple[Sums, Additions], b: tuple[Sums, Additions]) -> tuple[Sums, Additions]:
    """Return the sums of both, and each addition as often as the replica made it that made it most often."""
    additions = {epoch: dict(made) for epoch, made in a[1].items()}
    for epoch, made in b[1].items():
        known = additions.setdefault(epoch, {})
        for name, number in made.items():
            known[name] = max(number, known.get(name, 0))
    return merge(a[0], b[0]), additions


def merge(a: Sums, b: Sums) -> Sums:
    """The sums of both: key by key, in the order in which the keys were first seen."""
    merged = dict(a)
    for key, value in b.items():
        _add_to(merged, key, value)
    return merged


def _encode(value: Any) -> Any:
    """`value` with a marked tensor in place of every numpy array, at any depth."""
    if isinstance(value, np.ndarray):
        return {_NDARRAY: torch.from_numpy(value)}
    if isinstance(value, dict):
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        parts = [_encode(part) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value


def _decode(value: Any) -> Any:
    """The inverse of `_encode`."""
    if isinstance(value, dict):
        if value.keys() == {_NDARRAY}:
            return value[_NDARRAY].numpy()
        return {key: _decode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        parts = [_decode(part) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value
