"""The sums of accumulators: their state in checkpoints, and what a recovery does with them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from typing_extensions import override

from adaptdl_elastic import _session, checkpoint, collective
from adaptdl_elastic._session import Session
from adaptdl_elastic.torch._runtime.position import script_position

Totals = dict[Any, Any]
"""The sums of one accumulator by their keys."""
Additions = dict[int | None, dict[str, int]]
Reached = tuple[int, int | None, int]
"""Epoch loops of the script, the epoch, and data loops of the epoch that a run has begun."""
Sums = dict[str, tuple[dict[Any, Any], dict[Any, Any], int]]
"""Accumulator's name → (sums over all replicas, this replica's since then, how often synchronised)."""
OwnSums = dict[str, dict[Any, Any]]
"""Accumulator's name → this replica's sums since it was last synchronised; then those of several."""

_NDARRAY = "__ndarray__"  # marks a numpy array in a file that may hold tensors only


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

    def __init__(self, initial: Totals) -> None:
        session = _session.current()
        epoch = self.expires = session.epoch
        counts = session.accumulators
        super().__init__(f"adaptdl-accumulator-epoch{epoch}-{counts[epoch]}")
        counts[epoch] += 1
        self.results: Totals = initial  # over all replicas, up to the last sync
        self.summed: Totals = {}  # what that sync gave, whatever a synchronized() block has made of it since
        self.updates: Totals = {}  # of this replica, since then
        self.history: dict[int | None, list[Totals]] = {}  # what each synchronized() block showed, by epoch
        self.syncs = 0  # how often the sums of all replicas were added up
        self.additions: Additions = {}  # how often each was made outside of data loops, by epoch
        self._loaded: Additions = {}  # what that was in the run that goes on here
        self._reached: Reached = (0, None, 0)  # where that run was
        self._own: list[tuple[Addition, Totals]] = []  # which a newcomer has made and that run has not

    def add_outside(self, addition: Addition, change: Totals) -> None:
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
        """Return a `sync` that can be called again after a death; sums that have come are not added twice."""
        before = self.syncs

        def sync() -> None:
            if self.syncs == before:
                self.sync()

        return sync

    def add_total(self, total: Totals) -> None:
        """All replicas' updates, this one's included, have been added up to `total`."""
        self.take_total(merge(self.results, total), self.syncs + 1)

    def take_total(self, results: Totals, syncs: int) -> None:
        """Take `results`, those of the `syncs`-th synchronisation."""
        self.updates, self.syncs = {}, syncs
        self.show(results)
        self.summed = copy.deepcopy(self.results)
        _session.current().last_summed = self

    def show(self, results: Totals) -> None:
        """Have these sums over all replicas, in a synchronized() block that is under way, too."""
        results = dict(results)
        self.results.clear()
        self.results.update(results)

    @override
    def state_dict(self) -> dict[str, Any]:
        position = script_position()
        return {
            "results": _encode(self.results),
            "updates": _encode(self.updates),
            "history": {epoch: [_encode(sums) for sums in shown] for epoch, shown in self.history.items()},
            "additions": {epoch: dict(made) for epoch, made in self.additions.items()},
            "reached": (position.epoch_loops, _session.current().epoch, position.entered),
            "syncs": self.syncs,
        }

    @override
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


def add_to(sums: Totals, key: Any, value: Any) -> None:
    """Add `value` to the sum of `key`."""
    sums[key] = sums[key] + value if key in sums else value


def _merge_with_additions(
    a: tuple[Totals, Additions], b: tuple[Totals, Additions]
) -> tuple[Totals, Additions]:
    """Return the sums of both, and each addition as often as the replica made it that made it most often."""
    additions = {epoch: dict(made) for epoch, made in a[1].items()}
    for epoch, made in b[1].items():
        known = additions.setdefault(epoch, {})
        for name, number in made.items():
            known[name] = max(number, known.get(name, 0))
    return merge(a[0], b[0]), additions


def merge(a: Totals, b: Totals) -> Totals:
    """Return the sums of both, key by key, in the order in which the keys were first seen."""
    merged = dict(a)
    for key, value in b.items():
        add_to(merged, key, value)
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
    """Return the sums of every Accumulator; shallow copies, since sums are replaced, never changed."""
    return {
        name: (dict(state.results), dict(state.updates), state.syncs)
        for name, state in session.states.items()
        if isinstance(state, AccumulatorState)
    }


def known_sums(session: Session) -> Sums:
    """Return the results of every Accumulator's last synchronisation, even if its epoch is over.

    Another replica may still need them if the leader dies while it distributes them.
    """
    latest: Any = session.last_summed
    states = [latest] if latest is not None else []
    states += [state for state in session.states.values() if isinstance(state, AccumulatorState)]
    return {state.name: (copy.deepcopy(state.summed), {}, state.syncs) for state in states}


def put_sums(session: Session, sums: Sums) -> None:
    """Let accumulators hold these sums."""
    for name, (results, updates, syncs) in sums.items():
        state: Any = session.states.get(name)
        if state is not None:
            state.show(results)
            state.updates, state.syncs = dict(updates), syncs


def both_sums(a: OwnSums | None, b: OwnSums | None) -> OwnSums | None:
    """Of two replicas together; None: one of them keeps its own to itself."""
    if a is None or b is None:
        return None
    return {name: merge(a.get(name, {}), b.get(name, {})) for name in (*a, *(n for n in b if n not in a))}


def add_sums(session: Session, sums: OwnSums) -> None:
    """Add what all replicas had of their own: the accumulators are synchronised."""
    for name, total in sums.items():
        state: Any = session.states.get(name)
        if state is not None:  # a script may have one on some replicas only, and never read it
            state.add_total(total)
