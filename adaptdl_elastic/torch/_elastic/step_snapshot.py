"""What a step that was abandoned has changed besides the parameters, and how to put it back.

Copies are made when the first batch of every training window is handed out, while there are others who
may die: of buffers (running means), torch's and Python's random states, hyperparameters of the optimizer,
learning-rate scheduler, loss scale, the sums of accumulators, and small States of the script (for large
ones see `user_state`). All of it is small; the copies of buffers are made into the same memory each time.
NumPy's global random state is left out: to read it takes longer than all the rest, and an augmentation
drawn anew does no harm.
"""

from __future__ import annotations

import random

import torch

from adaptdl_elastic._interfaces import ModelSnapshot
from adaptdl_elastic._session import Session
from adaptdl_elastic.torch._data.accumulator_state import put_sums, sums_of
from adaptdl_elastic.torch._elastic.user_state import UserStates


class StepSnapshot:
    """Everything of this replica as it was when a window began.

    Args:
        index: Samples handed out by then, over all replicas.
        last: The window before, whose memory is used again.
    """

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
        """Why the window cannot be put back; None: it can."""
        found = next((why for model in self._models if (why := model.why_irreparable())), None)
        return found or self._own.why_irreparable(session)

    def before_step(self, left_out: bool) -> None:
        """See `UserStates.before_step`."""
        self._own.before_step(left_out)

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
