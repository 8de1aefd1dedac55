"""Keep the sums of accumulators in checkpoints, and restore them in a recovery."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from adaptdl_elastic import _session, checkpoint, collective
from adaptdl_elastic._session import Session
from adaptdl_elastic.checkpoint.state_copy import copy_to_host, like, rebuild
from adaptdl_elastic.torch._runtime.position import script_position

Totals = dict[Any, Any]
"""Sums of one accumulator, by their keys."""
Additions = Counter[tuple[int | None, str, int]]
"""(epoch, or None outside of epochs; name of an addition; rank) → how often that replica has made it."""
Sums = dict[str, tuple[dict[Any, Any], dict[Any, Any], int]]
"""Accumulator's name → (sums over all replicas, this replica's sums since then, number of syncs)."""
OwnSums = dict[str, dict[Any, Any]]
"""Accumulator's name → sums since the last sync, of one replica or merged from several replicas."""

# dict key that marks a numpy array stored as a tensor: files hold tensors only
_NDARRAY = "__ndarray__"


class AccumulatorState(checkpoint.TensorState):
    """Hold the sums of one accumulator in checkpoints until its epoch ends."""

    # a checkpoint lacks accumulators that the script had not created before it was saved
    required = False

    def __init__(self, initial: Totals) -> None:
        session = _session.current()
        epoch = self.expires = session.epoch
        counts = session.accumulators
        super().__init__(f"adaptdl-accumulator-epoch{epoch}-{counts[epoch]}")
        counts[epoch] += 1
        # sums over all replicas, up to the last sync
        self.results: Totals = initial
        # result of the last sync, without later changes by a synchronized() block
        self.summed: Totals = {}
        # this replica's sums since the last sync
        self.updates: Totals = {}
        # by epoch: the sums shown by each synchronized()
        self.history: dict[int | None, list[Totals]] = {}
        # number of syncs so far
        self.syncs = 0
        # additions made outside of data loops
        self.additions: Additions = Counter()
        # `additions` of the run that is being continued, as loaded
        self._loaded: Additions = Counter()
        # how far that run had come: loops begun outside of epochs, epoch, data loops begun in that epoch
        self._reached: tuple[int, int | None, int] = (0, None, 0)
        # additions that this process has come to
        self._made: Counter[tuple[int | None, str]] = Counter()
        # number of the last finished data loop outside of epochs that added here
        self._loops = 0
        # number of the running one, if it has added here; else 0
        self._loop = 0
        # sums of the running loop; not saved, because the loop runs again
        self._in_loop: Totals = {}

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
            self.take_loop()
            self._loops, self._loop = self._loop, 0

    def take_loop(self) -> None:
        """Take over what the running data loop outside of epochs has added so far, to show it."""
        self.updates, self._in_loop = merge(self.updates, self._in_loop), {}

    def own_sums(self) -> Totals:
        """Return a shallow copy of this replica's sums since the last sync."""
        self._settle()
        return dict(self.updates)

    def add_outside(self, place: tuple[int | None, int, int], name: str, change: Totals) -> None:
        """Add `change` outside of data loops, unless it was added before a restart or by the other replicas.

        The others have made all additions of a newcomer that has not joined them yet. A run that had passed
        `place` before the restart has made all its additions of this name. There may be more of them now: the
        same work is divided among fewer replicas, or into smaller batches. At other places the replica of
        this rank is known by number to have made its first ones; a rank without any is compared with the
        one that had made most.

        Args:
            place: Epoch; data loops of the epoch begun so far, or outside of epochs
                `ScriptPosition.loops_outside`; synchronized() blocks of the epoch entered so far.
            name: Name of the addition, the same in every run of the script.
            change: What to add.
        """
        session, (epoch, loop, block) = _session.current(), place
        self._made[epoch, name] += 1
        number, rank = self._made[epoch, name], session.rank
        times = {r: n for (e, known, r), n in self._loaded.items() if (e, known) == (epoch, name)}
        loops_outside, *reached = self._reached
        passed = loop < loops_outside if epoch is None else reached[0] is None or reached > [epoch, loop]
        passed = passed or block < len(self.history.get(epoch, ()))
        if session.joining or (times and (passed or number <= times.get(rank, max(times.values())))):
            return
        self.additions[epoch, name, rank] = number
        self.updates = merge(self.updates, change)

    def forget_epochs_before(self, epoch: int) -> None:
        """Drop the history and the additions of epochs before `epoch`, whose code does not run again."""
        self.history = {e: shown for e, shown in self.history.items() if e is None or e >= epoch}
        self.additions = Counter({a: n for a, n in self.additions.items() if a[0] is None or a[0] >= epoch})

    def sync(self, syncs: int | None = None) -> None:
        """Add up the sums of all replicas, unless there were more syncs than `syncs`. A collective."""
        if syncs in (None, self.syncs):
            self._settle()
            total, self.additions = collective.combine(
                (self.updates, self.additions), lambda a, b: (merge(a[0], b[0]), a[1] | b[1]), self.name
            )
            self.add_total(total)

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
            "sums": _encode((self.results, self.updates, self.history)),
            "additions": self.additions,
            "reached": (position.loops_outside, _session.current().epoch, position.entered),
            "syncs": self.syncs,
            "loops": self._loops,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = copy.deepcopy(state_dict)
        self.results, self.updates, self.history = _decode(saved["sums"])
        self._loaded, self._reached = saved["additions"], tuple(saved["reached"])
        self.additions = Counter(self._loaded)
        self.syncs, self._loops = saved.get("syncs", 0), saved.get("loops", 0)
        self._loop, self._in_loop = 0, {}


def add_to(sums: Totals, key: Any, value: Any) -> None:
    """Add `value` to the sum of `key`."""
    sums[key] = sums[key] + value if key in sums else value


def merge(a: Totals, b: Totals) -> Totals:
    """Return the key-wise sums of `a` and `b`, with the keys in the order of their first occurrence."""
    merged = dict(a)
    for key, value in b.items():
        add_to(merged, key, value)
    return merged


def own_copy(sums: Totals) -> Totals:
    """Return a copy of `sums` without autograd graph, in main memory, that shares no buffer with `sums`.

    Raises:
        TypeError: a checkpoint cannot hold a part of `sums`.
    """
    copied: Totals = _decode(copy_to_host(_encode(sums), "accumulator"))
    return copied


def _encode(value: Any) -> Any:
    """Return `value` with every numpy array, at any depth, replaced by a marked tensor."""

    def encoded(part: Any, _: str) -> Any:
        if isinstance(part, np.ndarray):
            return {_NDARRAY: torch.from_numpy(np.array(part, part.dtype.newbyteorder("="), order="C"))}
        return part

    return rebuild(value, encoded)


def _decode(value: Any) -> Any:
    """Invert `_encode`."""

    def make(old: dict[Any, Any], items: list[tuple[Any, Any]], _: str) -> Any:
        return old[_NDARRAY].numpy() if old.keys() == {_NDARRAY} else like(old, items)

    return rebuild(value, lambda part, _: part, make)


def known_sums(session: Session) -> Sums:
    """Return the results of every Accumulator's last sync, also of the last one whose epoch is over.

    Another replica may still need them if the leader of a collective died while it distributed them.
    """
    latest: Any = session.last_summed
    states = [latest] if latest is not None else []
    states += [state for state in session.states.values() if isinstance(state, AccumulatorState)]
    return {state.name: (copy.deepcopy(state.summed), {}, state.syncs) for state in states}


def both_sums(a: OwnSums | None, b: OwnSums | None) -> OwnSums | None:
    """Return the merged sums of two replicas; None if one of them takes no part (None)."""
    if a is None or b is None:
        return None
    return {name: merge(a.get(name, {}), b.get(name, {})) for name in (*a, *(n for n in b if n not in a))}


def add_sums(session: Session, sums: OwnSums) -> None:
    """Add `sums`, merged from all replicas, to the accumulators, which are then synchronised."""
    for name, total in sums.items():
        state: Any = session.states.get(name)
        # a script may create an accumulator on some replicas only, and never read it
        if state is not None:
            state.add_total(total)
