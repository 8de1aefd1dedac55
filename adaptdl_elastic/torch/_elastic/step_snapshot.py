"""Restore everything besides the parameters that a failed step has changed.

Copies are made before the first batch of every training window, if there are other replicas, which may die.
Copied are buffers (running means), torch's and Python's random states, hyperparameters of the optimizer, the
learning-rate scheduler, the loss scale, the sums of accumulators, and small States of the script. All of
these are small. The copies of buffers use the same memory each time. NumPy's global random state is not
copied: reading it takes longer than all other copies, and a repeated step may use different random
augmentations.

The script's own States are e.g. a step counter, a running loss, an average:

- A State that is small, or that can be copied in a small part of a step's time, is copied before every
  training window.
- Of a large TensorState only marks are recorded (`state_marks`). It is copied when a step fails.
- Of any other State a digest is recorded when a data loop begins. These are large States that are pickled,
  and States with their own `sync`, whose `save` may not include the part that only this replica holds. If the
  digest has changed when a replica dies, the value before the failed step is unknown, and training restarts
  from the checkpoint.

A loop's body usually changes a large TensorState, e.g. an average of all parameters, after
`optimizer.step()`. If the gradients of a step did not arrive, `optimizer.step()` is called all the same but
does nothing. At that call the State is still as it was when the window began, so it is copied there. A step
that succeeds needs no copy. A script may instead change the State before `optimizer.step()`. This is detected
at the first step that does so, and from the next window on the State is copied when a window begins. If that
first step fails, training restarts from the checkpoint.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Hashable
from typing import Any, TypeGuard

import torch

from adaptdl_elastic import checkpoint
from adaptdl_elastic._interfaces import ModelSnapshot, SavedState
from adaptdl_elastic._session import Session
from adaptdl_elastic.checkpoint.state_copy import copies_beside, copy_to_host, fill
from adaptdl_elastic.torch._data.accumulator_state import AccumulatorState, Sums
from adaptdl_elastic.torch._elastic.state_marks import StateMarks, digest, synchronised
from adaptdl_elastic.torch._runtime.position import script_position

SMALL_BYTES = 4096
"""Largest size in bytes of a State that is copied before every step; the copy takes microseconds."""

COPY_SHARE = 0.01
"""Largest part of a window's time that the copy of a larger State may take."""

_TIMED_WINDOWS = 8
"""Number of windows of a loop after which their average time is used."""

_CHECKED_WINDOWS = 3
"""First windows in which elements of a large State are compared at the step, which waits for the device."""


class StepSnapshot:
    """Copy the state of this replica at the start of a window.

    Args:
        session: This replica's session.
        index: Samples handed out before the window, over all replicas.
        last: Snapshot of the previous window, whose memory is used again.
    """

    # the loop may be in `torch.inference_mode`, whose tensors are of no use to training
    @torch.inference_mode(False)
    def __init__(self, session: Session, index: int, last: StepSnapshot | None) -> None:
        self.index = index
        lasts = () if last is None else last._models
        self._models: list[ModelSnapshot] = [
            model.snapshot_step(lasts[place] if place < len(lasts) else None)
            for place, model in enumerate(session.models)
        ]
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        self._python = random.getstate()
        self._sums = sums_of(session)
        self.states: UserStates = UserStates() if last is None else last.states
        self.states.begin_window(session)

    def why_irreparable(self, session: Session) -> str | None:
        """Return why the changes of the window cannot be undone; None if they can."""
        found = next((why for model in self._models if (why := model.why_irreparable())), None)
        return found or self.states.why_irreparable(session)

    def put_back(self, session: Session) -> None:
        """Restore everything to the start of the window. May be called more than once."""
        for model in self._models:
            model.put_back()
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)
        random.setstate(self._python)
        put_sums(session, self._sums)
        self.states.put_back(session)


def sums_of(session: Session) -> Sums:
    """Return the sums of every Accumulator as shallow copies: sums are replaced, never changed in place."""
    return {
        name: (dict(state.results), state.own_sums(), state.syncs)
        for name, state in session.states.items()
        if isinstance(state, AccumulatorState)
    }


def put_sums(session: Session, sums: Sums) -> None:
    """Replace the sums of the accumulators by `sums`."""
    for name, (results, updates, syncs) in sums.items():
        state: Any = session.states.get(name)
        if state is not None:
            state.show(results)
            state.updates, state.syncs = dict(updates), syncs


class PutBackError(Exception):
    """Raised if a State of the script fails to load its own snapshot."""


class UserStates:
    """Keep copies, marks and digests of the script's States in this process."""

    def __init__(self) -> None:
        # State's name → snapshot from the start of the window
        self._copies: dict[str, Any] = {}
        # large TensorStates by their names
        self._large: dict[str, LargeState] = {}
        # other States: name → digest from the start of the data loop
        self._digests: dict[str, Hashable] = {}
        # (generation, epoch, data loop) of the running data loop; None: no State is part of a step
        self._loop: Hashable = None
        # windows of that loop so far, and when it began in seconds of the monotonic clock
        self._windows, self._loop_began = 0, 0.0
        # whether `optimizer.step()` was called in the current window
        self._stepped = False

    def begin_window(self, session: Session) -> None:
        """Copy or mark the States before a training window begins."""
        states = [(name, state) for name, state in session.states.items() if state.part_of_step]
        self._copies, self._stepped = {}, False
        if not states:
            self._large, self._digests, self._loop = {}, {}, None
            return
        position = script_position(session)
        loop = session.generation, position.finished, position.entered
        if loop != self._loop:
            self._loop, self._windows, self._loop_began = loop, 0, time.monotonic()
            # a State may have another size by now
            self._large = {}
        # choose again: a copy may be allowed now
        if self._windows in (0, _TIMED_WINDOWS):
            self._digests = {}
        # average time of a window of this loop in seconds; 0 while it is not known
        known = self._windows >= _TIMED_WINDOWS
        window_time = (time.monotonic() - self._loop_began) / self._windows if known else 0.0
        for name, state in states:
            if name in self._digests:
                continue
            try:
                self._note(name, state, COPY_SHARE * window_time)
            except Exception as error:
                # from the script's `save` or `state_dict`
                self._large.pop(name, None)
                self._digests[name] = f"cannot be copied: {error!r}"
        self._windows += 1

    def _note(self, name: str, state: SavedState, allowed: float) -> None:
        """Copy or mark a State. The copy of one that is not small may take `allowed` seconds."""
        if synchronised(state):
            self._digests[name] = digest(state)
            return
        if name not in self._large:
            copy = _small_copy(state, allowed)
            if copy is not None:
                self._copies[name] = copy
                return
            if _is_plain_tensor_state(state):
                # its changes cannot be recognised
                with contextlib.suppress(RuntimeError, ValueError):
                    self._large[name] = LargeState(state)
        if name in self._large:
            self._large[name].begin_window()
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
            if (state := session.states.get(name)) is None:
                continue
            with contextlib.suppress(Exception):
                if digest(state) == before:
                    continue
            return found.format(name, _why_not_copied(state))
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
        if state.part_of_step and isinstance(state, checkpoint.TensorState) and not synchronised(state)
    }


def copies_of_script(session: Session) -> dict[str, Any]:
    """Return snapshots of all the script's States, of any size, by their names."""
    return checkpoint.snapshot_states(name for name, state in session.states.items() if state.part_of_step)


def _is_plain_tensor_state(state: SavedState) -> TypeGuard[checkpoint.TensorState]:
    return (
        isinstance(state, checkpoint.TensorState) and type(state).snapshot is checkpoint.TensorState.snapshot
    )


def _small_copy(state: SavedState, allowed: float) -> Any:
    """Return a snapshot of a State that is small or was copied in `allowed` seconds; else None."""
    if _is_plain_tensor_state(state):
        state_dict = state.state_dict()
        return copy_to_host(state_dict, state.name) if _bytes(state_dict) <= SMALL_BYTES else None
    began = time.monotonic()
    copy = state.snapshot()
    small = not isinstance(copy, bytes) or len(copy) <= SMALL_BYTES
    return copy if small or time.monotonic() - began <= allowed else None


def _why_not_copied(state: SavedState) -> str:
    if synchronised(state):
        return "it has a `sync` of its own"
    if isinstance(state, checkpoint.TensorState):
        return "its `state_dict` does not return the tensors themselves"
    return "to copy it before every step would take too long: let it be a TensorState"


def _bytes(value: Any) -> int:
    """Return the approximate size of `value` in bytes; counting stops at SMALL_BYTES."""
    if isinstance(value, torch.Tensor):
        return 8 + value.numel() * value.element_size()
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


class LargeState:
    """Restore one large TensorState of the script.

    Raises:
        RuntimeError: changes of this State cannot be recognised: a tensor is sparse or quantised, or has no
            version counter.
        ValueError: its `state_dict` returns copies.
    """

    def __init__(self, state: checkpoint.TensorState) -> None:
        self._state = state
        self._began = StateMarks(state)
        if not self._began.same_as(StateMarks(state)):
            raise ValueError("its state_dict() returns other tensors at each call")
        # tensors as they were when the window began
        self._copy: list[torch.Tensor] | None = None
        # memory of the last copy, used again
        self._spare: list[torch.Tensor] | None = None
        self._changed_before_step = False
        self._windows = 0

    def begin_window(self) -> None:
        """Record marks of the State; copy it if the script is known to change it before the step."""
        self._began = StateMarks(self._state)
        self._copy = None
        self._windows += 1
        if self._changed_before_step:
            self._make_copy(self._began)

    def before_step(self) -> None:
        """Check whether the script has changed the State before `optimizer.step()`, which will step now."""
        if self._changed_before_step:
            return
        if self._windows <= _CHECKED_WINDOWS:
            self._changed_before_step = not self._began.same_as(StateMarks(self._state))
        else:
            self._changed_before_step = self._began.written()

    def step_left_out(self) -> None:
        """Copy the State at an `optimizer.step()` that does nothing, if it has not changed in this window."""
        if self._copy is None:
            now = StateMarks(self._state)
            if self._began.same_as(now):
                self._make_copy(now)

    def _make_copy(self, marks: StateMarks) -> None:
        self._copy = self._spare = copies_beside(marks.tensors, self._spare)

    def can_be_put_back(self) -> bool:
        """Return whether the State has a copy, or has not changed."""
        return self._copy is not None or self._began.same_as(StateMarks(self._state))

    def put_back(self) -> None:
        """Restore the State to its value at the start of the window. May be called more than once."""
        if self._copy is not None:
            self._state.restore(fill(self._began.plain, iter(self._copy)))
