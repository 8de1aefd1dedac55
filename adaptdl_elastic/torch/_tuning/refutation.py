"""Notice within two steps that a change of replicas was a mistake.

The first steps after a change are not measured, because they allocate and compile. Where steps take seconds,
as over a slow link, it would take half a minute until the prediction for the new number of replicas is
replaced by measurements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from adaptdl_elastic.goodput import GoodputFunction, GradParams, PerfParams
from adaptdl_elastic.protocol.hints import ProfileEntry
from adaptdl_elastic.torch._tuning.step_times import ENOUGH, Key, StepTimes

WRONG = 5.0
"""Factor by which a step exceeds a prediction that it refutes."""

INTERVAL = 0.5
"""Seconds between two checks while the step after a slow one is under way."""

LEAST = 2.0
"""Least seconds that two such steps take. Shorter steps are soon measured as usual."""


class Refutation:
    """Watch the steps of the warm-up, and count a slow one as measured once a later one is slow, too.

    The later one may still be under way. The first step alone may be slow for another reason, such as the
    compilation of the model.
    """

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self._slow: tuple[Key, float, float] | None = None  # a slow step, its seconds, and when it ended
        # the model, and the configurations to which it was fitted
        self.model: tuple[PerfParams | None, Sequence[ProfileEntry]] = None, ()

    def step_ended(self, key: Key, seconds: float, now: float, warm_up: bool) -> bool:
        """Take note of a step with synchronisation; return whether it may refute the prediction."""
        slow = warm_up and self._exceeds(key, seconds)
        self._slow = (key, seconds, now) if slow else None
        return slow

    @property
    def interval(self) -> float:
        """Seconds after which `check` is to be called again."""
        return math.inf if self._slow is None else INTERVAL

    def check(self, begun: float | None, now: float) -> None:
        """Record the slow step if the step that has `begun` is slow already. From any thread."""
        slow = self._slow
        if slow is None or begun is None or now - slow[2] + slow[1] < LEAST:
            return
        if self._exceeds(slow[0], now - begun):
            self._slow = None
            for _ in range(ENOUGH):
                self._times.add(*slow, accumulation=False)

    def _exceeds(self, key: Key, seconds: float) -> bool:
        """Return whether a step refutes the prediction for a number of replicas that was not measured yet."""
        perf, known = self.model
        if perf is None or any((entry.nodes, entry.replicas) == key[:2] for entry in known):
            return False
        rate = float(GoodputFunction(perf, GradParams(1.0, 1.0), 1).throughput(*key, 0))
        return seconds * rate > WRONG * key.replicas * key.atomic_bsz
