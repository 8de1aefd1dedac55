"""Restore everything besides the parameters that a failed step has changed.

Copies are made before the first batch of every training window, if there are other replicas, which may die.
Copied are buffers (running means), torch's and Python's random states, hyperparameters of the optimizer, the
learning-rate scheduler, the loss scale, the sums of accumulators, and small States of the script (for large
States see `user_state`). All of these are small. The copies of buffers use the same memory each time. NumPy's
global random state is not copied: reading it takes longer than all other copies, and a repeated step may use
different random augmentations.
"""

from __future__ import annotations

import random

import torch

from adaptdl_elastic._interfaces import ModelSnapshot
from adaptdl_elastic._session import Session
from adaptdl_elastic.torch._data.accumulator_state import put_sums, sums_of
from adaptdl_elastic.torch._elastic.user_state import UserStates


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
        models = session.models
        lasts: list[ModelSnapshot | None] = [None] * len(models)
        if last is not None and len(last._models) == len(models):
            lasts = [*last._models]
        self._models: list[ModelSnapshot] = [
            model.snapshot_step(one) for model, one in zip(models, lasts, strict=True)
        ]
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        self._python = random.getstate()
        self._sums = sums_of(session)
        self._own: UserStates = UserStates() if last is None else last._own
        self._own.begin_window(session)

    def why_irreparable(self, session: Session) -> str | None:
        """Return why the changes of the window cannot be undone; None if they can."""
        found = next((why for model in self._models if (why := model.why_irreparable())), None)
        return found or self._own.why_irreparable(session)

    def before_step(self, left_out: bool) -> None:
        """See `UserStates.before_step`."""
        self._own.before_step(left_out)

    def put_back(self, session: Session) -> None:
        """Restore everything to the start of the window. May be called more than once."""
        for model in self._models:
            model.put_back()
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)
        random.setstate(self._python)
        put_sums(session, self._sums)
        self._own.put_back(session)
