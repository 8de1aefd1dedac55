"""Measure how far training has come in the running data loop, from what the models count."""

from __future__ import annotations

import logging
from itertools import zip_longest

from adaptdl_elastic import _session
from adaptdl_elastic.torch._data.loader_batch_size import LoaderBatchSize
from adaptdl_elastic.torch._data.loop_length import Progress
from adaptdl_elastic.torch._runtime.position import ScriptPosition

logger = logging.getLogger(__name__)

_IDLE_PASSES = 10  # passes without progress, every step skipped (inf, nan), that end an autoscaled epoch


class LoopProgress:
    """Measure the progress of one run of a data loop. Made when the loop begins.

    Args:
        loader: The loop's loader.
        state: Position of the script.
    """

    def __init__(self, loader: LoaderBatchSize, state: ScriptPosition) -> None:
        self._loader, self._state = loader, state
        # progress, attempted steps and index when progress was last made
        self._mark = (*self._effort(), state.index)
        # at loop start: session step, attempts of each model
        self._entered = _session.current().step, _each_attempts()

    @property
    def _end_index(self) -> int:
        return self._state.end_indices.get(self._loader.key, 0)

    def statistical(self) -> Progress:
        """Return the statistical progress of the data loop."""
        return Progress(self._effort()[0] - self._state.start_progress, self._steps_of_pass())

    def samples_of_pass(self) -> float:
        """Return the samples of this pass so far; with autoscaling, progress × initial batch size."""
        state, loader = self._state, self._loader
        if not loader.adaptive:
            return float(min(state.index, self._end_index))
        progress = (self._effort()[0] - state.start_progress) * self._windows_per_step() * loader.batch_size
        return min(max(progress, 0.0), float(self._end_index))

    def _windows_per_step(self) -> int:
        """Return the number of windows per optimizer step: more than 1 if the script accumulates by hand."""
        windows, before_each = _session.current().step - self._entered[0], self._entered[1]
        counts = zip_longest(_each_attempts(), before_each, fillvalue=0)
        own = max((now - then for now, then in counts), default=0)
        return max(1, round(windows / own)) if own else 1

    def pass_made(self) -> bool:
        """Return whether the progress of one pass at the initial batch size has been made on this replica.

        Also True if a pass took no optimizer step, or if `_IDLE_PASSES` passes made no progress.
        """
        session, state = _session.current(), self._state
        progress, tried = self._effort()
        done = progress - state.start_progress + 0.5 >= self._steps_of_pass()
        before, tried_before, index = self._mark
        if progress > before:
            self._mark = progress, tried, state.index
        elif state.index - index >= self._end_index * (1 if tried == tried_before else _IDLE_PASSES):
            if session.rank == 0 and not done:
                logger.warning(
                    "no optimizer step was taken while all samples came by: the loop ends here, as it would "
                    "without autoscaling"
                )
            done = True
        return done

    def _steps_of_pass(self) -> float:
        """Return the optimizer steps of one pass at the initial batch size."""
        return self._end_index / self._loader.batch_size / self._windows_per_step()

    def _effort(self) -> tuple[float, int]:
        """Return the progress of the models (0 without autoscaling) and their number of attempted steps."""
        adaptive = self._loader.adaptive
        return _session.current().metrics.get_progress() if adaptive else 0.0, attempted_steps()


def attempted_steps() -> int:
    """Return how many optimizer steps the session's models have attempted, in total."""
    return sum(_each_attempts())


def _each_attempts() -> list[int]:
    return [model.attempted_steps for model in _session.current().models]
