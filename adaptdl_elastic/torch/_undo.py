"""What a step that was abandoned has changed besides the parameters, and how to put it back.

Copies are made when the first batch of every training window is handed out, while there are others who
may die: of buffers (running means), torch's and Python's random states, hyperparameters of the optimizer,
learning-rate scheduler, loss scale, the sums of accumulators, and the script's own States where they are
small (`_own_states`). All of it is small; the copies of buffers are made into the same memory each time.
NumPy's global random state is left out: to read it takes longer than all the rest, and an augmentation
drawn anew does no harm.
"""

from __future__ import annotations

import copy
import random
from typing import TYPE_CHECKING, Any

import torch

from adaptdl_elastic.torch._own_states import OwnStates

if TYPE_CHECKING:
    from adaptdl_elastic._session import Session

Sums = dict[str, tuple[dict[Any, Any], dict[Any, Any], int]]
"""Accumulator's name → (sums over all replicas, this replica's since then, how often synchronised)."""
OwnSums = dict[str, dict[Any, Any]]
"""Accumulator's name → this replica's sums since it was last synchronised; then those of several."""


class Before:
    """Everything of this replica as it was when a window began.

    Args:
        models: The session's AdaptiveDataParallel objects.
        index: Samples handed out by then, over all replicas.
        last: The window before, whose memory is used again.
    """

    def __init__(self, session: Session, models: list[Any], index: int, last: Before | None) -> None:
        self.index = index
        olds: list[_ModelBefore | None] = [None] * len(models)
        if last is not None and len(last._models) == len(models):
            olds = [*last._models]
        self._models: list[_ModelBefore] = [_ModelBefore(m, old) for m, old in zip(models, olds, strict=True)]
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        self._python = random.getstate()
        self._sums = sums_of(session)
        self._own: OwnStates = OwnStates() if last is None else last._own
        self._own.begin_window(session)

    def why_irreparable(self, session: Session) -> str | None:
        """Why the window can not be put back; None: it can."""
        found = next((why for model in self._models if (why := model.why_irreparable())), None)
        return found or self._own.why_irreparable(session)

    def put_back(self, session: Session) -> None:
        """Let everything be as it was. May be done again."""
        for model in self._models:
            model.put_back()
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)
        random.setstate(self._python)
        put_sums(session, self._sums)
        self._own.put_back(session)


class _ModelBefore:
    """One AdaptiveDataParallel's part."""

    def __init__(self, model: Any, last: _ModelBefore | None) -> None:
        self._model = model
        self._taken = _taken(model)
        self._by_hand = model._window.by_hand
        self._hyperparameters = _hyperparameters(model._optimizer)
        scheduler, scaler = model._lr_scheduler, model._mp_scaler
        self._scheduler = None if scheduler is None else scheduler.state_dict()
        self._scaler = _scale_of(scaler)
        buffers = list(model.module.buffers())
        self._buffers: list[torch.Tensor]
        if last is not None and [_kind(a) for a in last._buffers] == [_kind(b) for b in buffers]:
            self._buffers = last._buffers
        else:
            self._buffers = [torch.empty_like(buffer) for buffer in buffers]
        if buffers:
            with torch.no_grad():
                torch._foreach_copy_(self._buffers, buffers)

    def why_irreparable(self) -> str | None:
        model = self._model
        if model.irreparable is not None:
            return str(model.irreparable)
        if self._by_hand or model._window.by_hand:
            return "what it had accumulated by hand in no_sync(), over several batches, is lost"
        if _taken(model) != self._taken:
            return "a part of the step was taken already (several models or several steps in one batch)"
        if model._lr_scheduler is None and _hyperparameters(model._optimizer) != self._hyperparameters:
            return (
                "the step has changed the learning rate, and AdaptiveDataParallel was given no lr_scheduler"
            )
        return None

    def put_back(self) -> None:
        model = self._model
        with torch.no_grad():
            for buffer, before in zip(model.module.buffers(), self._buffers, strict=True):
                buffer.copy_(before)
        for group, values in zip(model._optimizer.param_groups, self._hyperparameters, strict=True):
            group.update(values)
        if self._scheduler is not None:
            model._lr_scheduler.load_state_dict(self._scheduler)
        if self._scaler is not None:
            scaler = model._mp_scaler
            scaler._scale, scaler._growth_tracker = (None if t is None else t.clone() for t in self._scaler)
            scaler._per_optimizer_states.clear()


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def _taken(model: Any) -> int:
    """Counts the steps that were taken, or left out for gradients that are not finite."""
    return int(model.gns.steps + model.gns.skipped)


def _hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key != "params"
        }
        for group in optimizer.param_groups
    ]


def _scale_of(scaler: Any) -> list[torch.Tensor | None] | None:
    """A GradScaler's two tensors, which it makes at its first use; without waiting for the device."""
    if scaler is None or not scaler.is_enabled():
        return None
    tensors = [getattr(scaler, "_scale", None), getattr(scaler, "_growth_tracker", None)]
    return [None if tensor is None else tensor.clone() for tensor in tensors]


def sums_of(session: Session) -> Sums:
    """The sums of every Accumulator that there is. Sums are replaced, never changed: shallow copies do."""
    from adaptdl_elastic.torch.accumulator import AccumulatorState

    return {
        name: (dict(state.results), dict(state.updates), state.syncs)
        for name, state in session.states.items()
        if isinstance(state, AccumulatorState)
    }


def known_sums(session: Session) -> Sums:
    """What the last synchronisation of every Accumulator gave, also of the last one of an epoch that is over.

    Another replica may still want it: whoever leads dies while it tells us all.
    """
    from adaptdl_elastic.torch.accumulator import LATEST, AccumulatorState

    latest: Any = session.scratch.get(LATEST)
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
    from adaptdl_elastic.torch.accumulator import merge

    if a is None or b is None:
        return None
    return {name: merge(a.get(name, {}), b.get(name, {})) for name in (*a, *(n for n in b if n not in a))}


def add_sums(session: Session, sums: OwnSums) -> None:
    """Add what all replicas had of their own: the accumulators are synchronised."""
    for name, total in sums.items():
        state: Any = session.states.get(name)
        if state is not None:  # a script may have one on some replicas only, and never read it
            state.add_total(total)
