"""Tell how far training has come in a data loop, and how many batches are left.

With autoscaling, a data loop ends when training has made the statistical progress of one pass at the initial
batch size, rounded to whole steps, but not before the end of the first pass.
"""

from __future__ import annotations

import logging
import math
from itertools import zip_longest
from typing import NamedTuple

from adaptdl_elastic.torch._data.registry import LoaderBatchSize
from adaptdl_elastic.torch._runtime.position import ScriptPosition

logger = logging.getLogger(__name__)

_IDLE_PASSES = 10
"""Passes without progress, every step skipped (inf, nan), that end an autoscaled epoch."""

_ROUNDING = 1e-6
"""Part of a step that may be missing from the sum of gains of a whole one."""


class Progress(NamedTuple):
    """Hold the statistical progress of a data loop, in steps at the initial batch size."""

    made: float
    wanted: float
    """Progress at which the loop ends."""


def part_done(index: int, length: int, progress: Progress | None = None) -> float:
    """Return the part of a data loop that is done, from 0 to 1.

    Args:
        index: Samples that have been used.
        length: Samples of a pass that are handed out.
        progress: Statistical progress; None without autoscaling.
    """
    part = min(index / length, 1.0) if length > 0 else 0.0
    if progress is None or not progress.wanted or (part == 1.0 and progress.made + 0.5 >= progress.wanted):
        return part
    return min(max(progress.made / progress.wanted, 0.0), 1.0)


def windows_needed(progress: Progress, gain: float, stepped: bool) -> int:
    """Return how many windows must follow the current one until the progress is made.

    Args:
        progress: Statistical progress.
        gain: Progress of one step.
        stepped: Whether `progress` includes the step of the current window.
    """
    steps = math.ceil((progress.wanted - progress.made - 0.5) / gain)
    return max(steps if stepped else steps - 1, 0)


class LoopProgress:
    """Measure the progress of one run of a data loop. Made when the loop begins.

    Args:
        loader: The loop's loader.
        state: Position of the script.
    """

    def __init__(self, loader: LoaderBatchSize, state: ScriptPosition) -> None:
        self._loader, self._state, self._session = loader, state, loader.session
        # progress, attempted steps and index when progress was last made
        self._mark = self._made(), sum(self._attempts()), state.index
        # at loop start: steps of the job, attempts of each model
        self._entered = state.step, self._attempts()

    @property
    def _end_index(self) -> int:
        return self._state.end_indices.get(self._loader.key, 0)

    def statistical(self) -> Progress:
        """Return the statistical progress of the data loop."""
        return Progress(self._made() - self._state.start_progress, self._steps_of_pass())

    def whole_steps(self, over: bool) -> int:
        """Return how many whole steps at the initial batch size the step of a window has completed.

        Args:
            over: Whether the window is the loop's last one.
        """
        if not self._loader.adaptive:
            return 1
        size = self._end_index / self._loader.batch_size
        steps = math.floor(size) if self._loader.drop_last else math.ceil(size)
        start, most = self._state.start_progress - _ROUNDING, steps or math.inf
        began = max(model.progress - model.last_gain for model in self._session.models)
        before = min(math.floor(began - start), most)
        now = min(math.floor(self._made() - start), most)
        return int((steps if over and steps else now) - before)

    def samples_of_pass(self) -> float:
        """Return the samples of this pass so far; with autoscaling, progress × initial batch size."""
        state, loader = self._state, self._loader
        if not loader.adaptive:
            return float(min(state.index, self._end_index))
        progress = (self._made() - state.start_progress) * self._windows_per_step() * loader.batch_size
        return min(max(progress, 0.0), float(self._end_index))

    def tell_shorter(self, others: list[str], left: int) -> None:
        """Report a problem if this loop ends at index `left` because loaders beside it have no batch left.

        Args:
            others: Keys of these loaders.
            left: Samples of this loader that were used.
        """
        if not others or self._session.dry:
            return
        key = self._loader.key
        used = f"{left} of {self._end_index} samples" if self._end_index else f"{left} samples"
        self._session.metrics.report_problem(
            f"the loaders read beside loader {key}",
            f"the loop over loader {key} ended after {used}, because loader {' and '.join(others)}, "
            f"which is read beside it (as by zip), had no batch left: the rest is left out. Let the shorter "
            f"loader begin again, or give it first",
        )

    def _windows_per_step(self) -> int:
        """Return the number of windows per optimizer step: more than 1 if the script accumulates by hand."""
        windows = self._state.step - self._entered[0]
        counts = zip_longest(self._attempts(), self._entered[1], fillvalue=0)
        own = max((now - then for now, then in counts), default=0)
        return max(1, round(windows / own)) if own else 1

    def pass_made(self) -> bool:
        """Return whether the progress of one pass at the initial batch size has been made on this replica.

        Also True if a pass took no optimizer step, or if `_IDLE_PASSES` passes made no progress.
        """
        state, progress, tried = self._state, self._made(), sum(self._attempts())
        done = progress - state.start_progress + 0.5 >= self._steps_of_pass()
        before, tried_before, index = self._mark
        if progress > before:
            self._mark = progress, tried, state.index
        elif state.index - index >= self._end_index * (1 if tried == tried_before else _IDLE_PASSES):
            if self._session.rank == 0 and not done:
                logger.warning(
                    "no optimizer step was taken while all samples came by: the loop ends here, as it would "
                    "without autoscaling"
                )
            done = True
        return done

    def _steps_of_pass(self) -> float:
        """Return the optimizer steps of one pass at the initial batch size."""
        steps = self._end_index / self._loader.batch_size
        if self._loader.drop_last and steps > 1:
            steps = math.floor(steps)
        return steps / self._windows_per_step()

    def _made(self) -> float:
        """Return the progress of the models, in steps; 0 without autoscaling."""
        return self._session.progress if self._loader.adaptive else 0.0

    def _attempts(self) -> list[int]:
        """Return how many optimizer steps each model has attempted."""
        return [model.attempted_steps for model in self._session.models]
