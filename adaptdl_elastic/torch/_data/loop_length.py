"""Tell how much of a data loop is done, and how many batches are left. Pure functions.

With autoscaling, a data loop ends when training has made the statistical progress of one pass at the initial
batch size, rounded to whole steps, but not before the end of the first pass.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Progress(NamedTuple):
    """Hold the statistical progress of a data loop, in steps at the initial batch size."""

    made: float
    wanted: float  # progress at which the loop ends


def part_done(index: int, length: int, progress: Progress | None = None) -> float:
    """Return the part of a data loop that is done, from 0 to 1.

    Args:
        index: Samples that have been used.
        length: Samples of a pass that are handed out.
        progress: Statistical progress; None without autoscaling.
    """
    part = min(index / length, 1.0) if length > 0 else 0.0
    if progress is None or (part == 1.0 and progress.made + 0.5 >= progress.wanted):
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
