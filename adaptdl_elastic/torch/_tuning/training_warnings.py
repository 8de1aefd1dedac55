"""Report training that runs but learns nothing: gradients never finite, a batch larger than the data set.

A problem is logged once, written as an event, and part of the job's report (`adaptdl status`), each time with
what to do about it. When it is over, an event says so, and it is removed from the report.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Lock

from adaptdl_elastic._session import Session

logger = logging.getLogger(__name__)


def data_problem(samples: int, batch_size: int, initial: int, equal_parts: int) -> str | None:
    """Return what is wrong if a batch is larger than the data set, else None.

    Args:
        samples: size of the data set; 0: unknown.
        batch_size: in use; rounded up to a whole number of samples for each of `equal_parts`.
        initial: as given to the data loader.
        equal_parts: passes of one optimizer step, over all replicas.
    """
    if not samples:
        return None
    every = "every step takes all of them and an epoch is one step"
    if initial > samples:
        return (
            f"batch_size={initial} is more than the {samples} samples of the data set: {every}. "
            f"Give a batch_size of {samples} at most, or more data"
        )
    if batch_size - equal_parts >= samples:
        return (
            f"the batch has grown to {batch_size} samples, and the data set has {samples}: {every}. "
            f"Call autoscale_batch_size with a max_batch_size of {samples} at most"
        )
    return None


class TrainingWarnings:
    """Keep the current problems. `report` is thread-safe, and cheap if nothing has changed.

    Args:
        session: This replica's session.
        changed: Function that is called when a problem begins or ends.
    """

    def __init__(self, session: Session, changed: Callable[[], None]) -> None:
        self._session, self._changed = session, changed
        self._logged: set[str] = set()
        self._problems: dict[str, str] = {}
        self._lock = Lock()

    def report(self, about: str, problem: str | None, every_time: bool = False) -> None:
        """Report what is wrong with a part of the training, and what to do; None: nothing any more.

        Args:
            about: The part.
            problem: The problem, or None.
            every_time: Whether to log every beginning and end of the problem, not only its first beginning.
        """
        if (about in self._problems) == (problem is not None):
            return
        with self._lock:
            if problem is None:
                self._problems.pop(about, None)
            else:
                self._problems[about] = problem
        session = self._session
        if session.rank == 0:
            if problem is None:
                session.emit("warning_over", about=about, step=session.step)
                if every_time:
                    logger.warning("%s: the problem is over", about)
            else:
                session.emit("warning", about=about, message=problem, step=session.step)
                if every_time or about not in self._logged:
                    self._logged.add(about)
                    logger.warning("%s", problem)
        self._changed()

    @property
    def messages(self) -> tuple[str, ...]:
        """Current problems, oldest first."""
        with self._lock:
            return tuple(self._problems.values())
