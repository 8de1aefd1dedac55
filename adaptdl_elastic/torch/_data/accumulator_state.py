"""Keep the sums of accumulators in checkpoints, and restore them in a recovery."""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from typing_extensions import override

from adaptdl_elastic import _session, checkpoint, collective
from adaptdl_elastic._session import Session
from adaptdl_elastic.torch._data.batch_comparison import digest
from adaptdl_elastic.torch._runtime.position import script_position

log = logging.getLogger(__name__)

Totals = dict[Any, Any]
"""Sums of one accumulator, by their keys."""
Series = tuple[int, int, str]
"""A replica's rank, the number of its additions of one name, and a digest of all their values in order."""
Made = tuple[int, tuple[int, ...], tuple[str, ...] | None, tuple[Series, ...]]
"""How often additions of one name were made, on how many replicas, their values (None: not compared), and
the series of each replica."""
Additions = dict[int | None, dict[str, Made]]
"""Epoch (None: outside of epochs) → name → its additions."""
Reached = tuple[int, int | None, int]
"""How far a run came: loops begun outside of epochs, current epoch, data loops begun in that epoch."""
Sums = dict[str, tuple[dict[Any, Any], dict[Any, Any], int]]
"""Accumulator's name → (sums over all replicas, this replica's sums since then, number of syncs)."""
OwnSums = dict[str, dict[Any, Any]]
"""Accumulator's name → sums since the last sync, of one replica or merged from several replicas."""

_NONE: Made = (0, (), None, ())
_VALUES = 8  # most different values of one name that are kept to be compared
_LONGEST = 24  # characters of a value that is compared
_NDARRAY = "__ndarray__"  # dict key that marks a numpy array stored as a tensor: files hold tensors only


class Addition(NamedTuple):
    """Identify an addition to an accumulator that was made outside of data loops."""

    epoch: int | None
    loop: int
    """Data loops of the epoch begun before it; outside of epochs, `ScriptPosition.loops_outside`."""
    block: int
    """synchronized() blocks of the epoch entered before this addition."""
    name: str
    """Name of the addition, the same in every run of the script."""
    number: int
    """Number of additions of this name that this process has made, including this one."""
    values: str
    """Digest of the values of these additions, in order."""


class AccumulatorState(checkpoint.TensorState):
    """Hold the sums of one accumulator in checkpoints until its epoch ends."""

    required = False  # a checkpoint lacks accumulators that the script had not created before it was saved

    def __init__(self, initial: Totals) -> None:
        session = _session.current()
        epoch = self.expires = session.epoch
        counts = session.accumulators
        super().__init__(f"adaptdl-accumulator-epoch{epoch}-{counts[epoch]}")
        counts[epoch] += 1
        self.results: Totals = initial  # sums over all replicas, up to the last sync
        self.summed: Totals = {}  # result of the last sync, without later changes by a synchronized() block
        self.updates: Totals = {}  # this replica's sums since the last sync
        self.history: dict[int | None, list[Totals]] = {}  # by epoch: the sums shown by each synchronized()
        self.syncs = 0  # number of syncs so far
        self.additions: Additions = {}  # additions made outside of data loops
        self._loaded: Additions = {}  # `additions` of the run that is being continued, as loaded
        self._reached: Reached = (0, None, 0)  # how far the run that is being continued had come
        self._own: list[tuple[Addition, Totals]] = []  # additions of a newcomer that the others did not make
        self._loops = 0  # number of the last finished data loop outside of epochs that added here
        self._loop = 0  # number of the running one, if it has added here; else 0
        self._in_loop: Totals = {}  # sums of the running loop; not saved, because the loop runs again
        # (epoch, loop, block) in which additions were made again with other values than before a restart
        self._measured_again: set[tuple[int | None, int, int]] = set()
        self._told = False  # a warning was given that an addition has another value than before a restart
        self._told_more = False  # a warning was given that there are more additions than before a restart

    def add_in_loop(self, key: Any, change: Any) -> None:
        """Add `change` in a data loop, unless the continued run has finished this loop outside of epochs."""
        loop = script_position().outside_loop
        self._settle()
        if not loop:
            add_to(self.updates, key, change)
        elif loop > self._loops:
            self._loop = loop
            add_to(self._in_loop, key, change)

    def _settle(self) -> None:
        """Take over the sums of a data loop outside of epochs once it is over."""
        if self._loop and self._loop != script_position().outside_loop:
            self.updates = merge(self.updates, self._in_loop)
            self._loops, self._loop, self._in_loop = self._loop, 0, {}

    def take_loop(self) -> None:
        """Take over what the running data loop outside of epochs has added so far, to show it."""
        self._settle()
        self.updates, self._in_loop = merge(self.updates, self._in_loop), {}

    def own_sums(self) -> Totals:
        """Return a shallow copy of this replica's sums since the last sync."""
        self._settle()
        return dict(self.updates)

    def add_outside(self, addition: Addition, change: Totals) -> None:
        """Add `change` outside of data loops, unless the continued run has made this addition already."""
        self._settle()
        if self._was_made(addition):
            self._compare(addition, change)
            return
        value = _comparable(next(iter(change.values())))
        series = (rank(), addition.number, addition.values)
        new: Made = (addition.number, (replicas(),), None if value is None else (value,), (series,))
        made = self.additions.setdefault(addition.epoch, {})
        made[addition.name] = _both(new, made.get(addition.name))
        self.updates = merge(self.updates, change)
        if _session.current().joining:
            self._own.append((addition, change))

    def _was_made(self, addition: Addition) -> bool:
        """Return whether the run that is being continued has made this addition.

        A run that had reached a later loop or block has made all additions of a name before it. Further
        additions are new ones only if the script repeats the earlier ones with the same values, on the same
        number of replicas. Otherwise it may have divided the same work in another way, for example
        among other replicas, or into batches of another size.

        A replica is compared with the one that had its rank. A newcomer, and a replica whose rank has made
        none, are compared with all replicas.
        """
        epoch, loop, block, name, number, values = addition
        times, on_replicas, _, series = self._loaded.get(epoch, {}).get(name, _NONE)
        place, same = (epoch, loop, block), on_replicas == (replicas(),)
        own = [one for one in series if one[0] == rank()]
        if own and same and not _session.current().joining:
            series, times = tuple(own), own[0][1]
        if number <= times:
            if number == times and same and (number, values) not in [one[1:] for one in series]:
                self._measured_again.add(place)
            return True
        if not times or (same and place not in self._measured_again):
            return False
        loops_outside, reached_epoch, reached_loop = self._reached
        if epoch is None:
            past = loop < loops_outside
        else:
            past = reached_epoch is not None and (epoch, loop) < (reached_epoch, reached_loop)
        made = past or block < len(self.history.get(epoch, ()))
        if made and same and not self._told_more:
            self._told_more = True
            log.warning(
                "the script adds other values, and more often, than before the restart: the additions that "
                "were made then remain in the sum, and none is added. If these are others, give each a key "
                "of its own, or add in the data loop"
            )
        return made

    def _compare(self, addition: Addition, change: Totals) -> None:
        """Warn once if the addition was made with another value before the restart.

        The same addition may have another value, for example a number of correct answers that was counted
        with earlier weights. Only a script that takes another way after a restart gives a wrong sum.
        """
        made = self._loaded.get(addition.epoch, {}).get(addition.name, _NONE)
        key, found = next(iter(change.items()))
        value, same = _comparable(found), made[1] == (replicas(),)
        if self._told or not same or value is None or made[2] is None or value in made[2]:
            return
        self._told = True
        log.warning(
            "the addition of %s to %r was made before the restart with another value (%s), which remains in "
            "the sum: if these are two additions, give each a key of its own, or add in the data loop",
            value,
            key,
            ", ".join(made[2]),
        )

    def forget_epochs_before(self, epoch: int) -> None:
        """Drop the history and the additions of epochs before `epoch`, whose code does not run again."""
        for kept in (self.history, self.additions):
            for over in [e for e in kept if e is not None and e < epoch]:
                del kept[over]

    def sync(self) -> None:
        """Add up the sums of all replicas. A collective."""
        self._settle()
        mine = self.updates, self.additions
        total, self.additions = collective.combine(mine, merge_with_additions, self.name)
        self.add_total(total)

    def syncing(self) -> Callable[[], None]:
        """Return a `sync` that can be called again after a peer's death.

        The returned function does nothing once the sums of all replicas have been added.
        """
        before = self.syncs

        def sync() -> None:
            if self.syncs == before:
                self.sync()

        return sync

    def add_total(self, total: Totals) -> None:
        """Add `total`, the updates of all replicas including this one, to the results."""
        self.take_total(merge(self.results, total), self.syncs + 1)

    def take_total(self, results: Totals, syncs: int) -> None:
        """Replace the results by `results`, the outcome of sync number `syncs`."""
        self.updates, self.syncs = {}, syncs
        self.show(results)
        self.summed = copy.deepcopy(self.results)
        _session.current().last_summed = self

    def show(self, results: Totals) -> None:
        """Replace the contents of `self.results`; a running synchronized() block sees the new sums."""
        results = dict(results)
        self.results.clear()
        self.results.update(results)

    @override
    def state_dict(self) -> dict[str, Any]:
        position = script_position()
        self._settle()
        return {
            "results": _encode(self.results),
            "updates": _encode(self.updates),
            "history": {epoch: [_encode(sums) for sums in shown] for epoch, shown in self.history.items()},
            "additions": {epoch: dict(made) for epoch, made in self.additions.items()},
            "reached": (position.loops_outside, _session.current().epoch, position.entered),
            "syncs": self.syncs,
            "loops": self._loops,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = copy.deepcopy(state_dict)
        self.results, self.updates = _decode(saved["results"]), _decode(saved["updates"])
        self.history = {epoch: [_decode(s) for s in shown] for epoch, shown in saved["history"].items()}
        self._loaded, self._reached = saved["additions"], tuple(saved["reached"])
        self.additions = copy.deepcopy(self._loaded)
        self.syncs, self._loops = saved.get("syncs", 0), saved.get("loops", 0)
        self._loop, self._in_loop = 0, {}
        own, self._own = self._own, []
        if _session.current().joining:
            for addition, change in own:
                self.add_outside(addition, change)


def replicas() -> int:
    """Return the present number of replicas."""
    return _session.current().replicas


def rank() -> int:
    """Return this replica's present rank."""
    return _session.current().rank


def add_to(sums: Totals, key: Any, value: Any) -> None:
    """Add `value` to the sum of `key`."""
    sums[key] = sums[key] + value if key in sums else value


def merge_with_additions(
    a: tuple[Totals, Additions], b: tuple[Totals, Additions]
) -> tuple[Totals, Additions]:
    """Return the sums of both replicas, and for each name the larger of the two numbers of additions."""
    additions = {epoch: dict(made) for epoch, made in a[1].items()}
    for epoch, made in b[1].items():
        known = additions.setdefault(epoch, {})
        for name, one in made.items():
            known[name] = _both(one, known.get(name))
    return merge(a[0], b[0]), additions


def _both(a: Made, b: Made | None) -> Made:
    """Return what two replicas know of the additions of one name. The order and repetitions do not matter."""
    if b is None:
        return a
    values = None if a[2] is None or b[2] is None else tuple(sorted({*a[2], *b[2]}))
    replicas = tuple(sorted({*a[1], *b[1]}))
    if values is not None and len(values) > _VALUES:
        values = None
    longest = {one[0]: one for one in sorted({*a[3], *b[3]})}  # by rank
    return max(a[0], b[0]), replicas, values, tuple(longest.values())


def extended(series: str, value: Any) -> str:
    """Return the digest of the values that `series` stands for and of `value`, in this order."""
    return hashlib.blake2b(f"{series} {digest(value)}".encode(), digest_size=12).hexdigest()


def _comparable(value: Any) -> str | None:
    """Return a number or string as text; None for other values and for floats, which may be measurements."""
    return repr(value) if isinstance(value, int | str) and len(repr(value)) <= _LONGEST else None


def merge(a: Totals, b: Totals) -> Totals:
    """Return the key-wise sums of `a` and `b`, with the keys in the order of their first occurrence."""
    merged = dict(a)
    for key, value in b.items():
        add_to(merged, key, value)
    return merged


def _encode(value: Any) -> Any:
    """Return `value` with every numpy array, at any depth, replaced by a marked tensor."""
    if isinstance(value, np.ndarray):
        return {_NDARRAY: torch.from_numpy(value)}
    if isinstance(value, dict):
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        parts = [_encode(part) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value


def _decode(value: Any) -> Any:
    """Invert `_encode`."""
    if isinstance(value, dict):
        if value.keys() == {_NDARRAY}:
            return value[_NDARRAY].numpy()
        return {key: _decode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        parts = [_decode(part) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value


def sums_of(session: Session) -> Sums:
    """Return the sums of every Accumulator as shallow copies: sums are replaced, never changed in place."""
    return {
        name: (dict(state.results), state.own_sums(), state.syncs)
        for name, state in session.states.items()
        if isinstance(state, AccumulatorState)
    }


def known_sums(session: Session) -> Sums:
    """Return the results of every Accumulator's last sync, also of the last one whose epoch is over.

    Another replica may still need them if the leader of a collective died while it distributed them.
    """
    latest: Any = session.last_summed
    states = [latest] if latest is not None else []
    states += [state for state in session.states.values() if isinstance(state, AccumulatorState)]
    return {state.name: (copy.deepcopy(state.summed), {}, state.syncs) for state in states}


def put_sums(session: Session, sums: Sums) -> None:
    """Replace the sums of the accumulators by `sums`."""
    for name, (results, updates, syncs) in sums.items():
        state: Any = session.states.get(name)
        if state is not None:
            state.show(results)
            state.updates, state.syncs = dict(updates), syncs


def both_sums(a: OwnSums | None, b: OwnSums | None) -> OwnSums | None:
    """Return the merged sums of two replicas; None if one of them takes no part (None)."""
    if a is None or b is None:
        return None
    return {name: merge(a.get(name, {}), b.get(name, {})) for name in (*a, *(n for n in b if n not in a))}


def add_sums(session: Session, sums: OwnSums) -> None:
    """Add `sums`, merged from all replicas, to the accumulators, which are then synchronised."""
    for name, total in sums.items():
        state: Any = session.states.get(name)
        if state is not None:  # a script may create an accumulator on some replicas only, and never read it
            state.add_total(total)
