"""Choose the batch size of a job: pure decisions, from a fitted model and measurements."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from adaptdl_elastic.goodput import GoodputFunction, GradParams, PerfParams
from adaptdl_elastic.torch._tuning.step_times import WINDOW, Key

THRESHOLD = 1.05
"""Predicted ratio of goodputs from which the batch size is changed (as in AdaptDL)."""

GROWTH = 2.0
"""Largest ratio of a new atomic batch size to the largest measured one; also for the global batch size."""

MISFIT = 1.2
"""Largest ratio of a measurement to the model's prediction at which the model is used unchanged."""

SETTLED = WINDOW // 2
"""Optimizer steps at one batch size before an earlier, measured one is used again."""

BLUNDER = 1.5
"""Ratio of goodputs from which an earlier batch size is used again at once."""


def local_batch(batch_size: int, replicas: int) -> int:
    """Return the samples per replica of a global batch: equal on all replicas, rounded up."""
    return -(-batch_size // replicas)


@dataclass(frozen=True)
class BatchSize:
    """Hold a batch size: samples per pass of one replica, and passes without a step before each step."""

    atomic_bsz: int
    accumulation_steps: int
    predicted_goodput: float | None = None  # in samples at the initial batch size per second


@dataclass(frozen=True)
class Limits:
    """Hold the limits of the batch size that the script gave the training loader."""

    init: int
    maximum: int | None  # None: the batch size does not change
    bounds: tuple[int, int] | None
    accumulation: bool


def initial(limits: Limits, replicas: int) -> BatchSize:
    """Return the given batch size in equal shares, rounded up, within the bounds.

    If the bounds do not fit this number of replicas (`misfit`): no pass exceeds the upper bound; accumulation
    is used only if allowed, so the total may be less than given; and the lower bound applies only as far as
    the total stays within the maximum.
    """
    local = local_batch(limits.init, replicas)
    if limits.bounds is None:
        return BatchSize(local, 0)
    low, high = limits.bounds
    maximum = limits.init if limits.maximum is None else limits.maximum
    passes = -(-local // high) if limits.accumulation else 1
    atomic = min(-(-local // passes), high)
    if atomic < low:
        if replicas * passes * low <= maximum:
            atomic = low
        elif passes > 1:
            atomic, passes = high, passes - 1
    return BatchSize(atomic, passes - 1)


def misfit(limits: Limits, replicas: int) -> str | None:
    """Return why the given batch size is impossible on so many replicas; None if it is possible."""
    if limits.bounds is None or limits.maximum is None:
        return None
    low, high = limits.bounds
    local = local_batch(limits.init, replicas)
    if local > high and not limits.accumulation:
        return (
            f"local_bsz_bounds={limits.bounds}: a batch of {limits.init} is {local} on each of {replicas} "
            f"replicas, above the largest; raise it, or give gradient_accumulation=True"
        )
    if replicas * low > limits.maximum:
        return (
            f"local_bsz_bounds={limits.bounds}: the smallest on each of {replicas} replicas is "
            f"{replicas * low}, above max_batch_size={limits.maximum}; raise that, or lower the smallest"
        )
    return None


Times = Mapping[Key, tuple[float, float]]
"""Configuration → seconds of a pass without synchronisation (0: not measured), and of one with it."""


class _Corrected(GoodputFunction):
    """Correct a model where measurements deviate from it by more than `MISFIT`.

    Between two measured atomic batch sizes the correction is interpolated; beyond them the nearest one
    applies. Correcting only the measured sizes would make every untried size look better, or worse, than its
    neighbours.
    """

    def __init__(
        self, perf: PerfParams, grads: GradParams, init: int, measured: Times, nodes: int, replicas: int
    ) -> None:
        super().__init__(perf, grads, init)
        self._accum: list[tuple[float, float]] = []  # (log size, log correction)
        self._optim: list[tuple[float, float]] = []
        for key, (accum, optim) in sorted(measured.items()):
            if key[:2] != (nodes, replicas):
                continue
            size = key.atomic_bsz
            predicted = float(replicas * size / super().throughput(*key, 0))
            grad = perf.alpha_c + perf.beta_c * size
            self._optim.append((math.log(size), _beyond(optim / predicted)))
            self._accum.append((math.log(size), _beyond(accum / grad) if accum else self._optim[-1][1]))

    def throughput(self, num_nodes: Any, num_replicas: Any, atomic_bsz: Any, accum_steps: Any) -> Any:
        """Return the throughput like GoodputFunction, at the measurements' numbers of nodes and replicas."""
        samples = np.multiply(num_replicas, atomic_bsz)
        optim = samples / super().throughput(num_nodes, num_replicas, atomic_bsz, 0)
        total = samples * np.add(accum_steps, 1)
        accum = total / super().throughput(num_nodes, num_replicas, atomic_bsz, accum_steps) - optim
        return total / (optim * _factor(self._optim, atomic_bsz) + accum * _factor(self._accum, atomic_bsz))


def _beyond(ratio: float) -> float:
    """Return the part of log(`ratio`) that exceeds log(`MISFIT`), with its sign."""
    off = math.log(ratio)
    return math.copysign(max(abs(off) - math.log(MISFIT), 0.0), off)


def _factor(points: list[tuple[float, float]], atomic_bsz: Any) -> Any:
    if not points:
        return 1.0
    sizes, corrections = np.array(points).T
    return np.exp(np.interp(np.log(atomic_bsz), sizes, corrections))


@dataclass(frozen=True)
class Chooser:
    """Everything that a choice depends on, at one moment."""

    nodes: int
    replicas: int
    limits: Limits
    perf: PerfParams
    grads: GradParams
    measured: Times
    now: BatchSize  # in use; atomic_bsz 0: nothing yet
    steps: int  # optimizer steps at that batch size
    reached: int = 0  # global batch size before a change of the number of replicas
    sqr_error: float = 0.0  # standard error of |G|² in `grads`; inf: unknown

    def optimum(self) -> BatchSize | None:
        """Return the best batch size within the limits and near what was measured; None if it is fixed."""
        return self._optimum(self._model(self.perf))

    def better(self) -> BatchSize | None:
        """Return the optimum if it is enough better than the present batch size, else None."""
        now, here = self.now, (self.nodes, self.replicas)
        if now.atomic_bsz < 1 or Key(*here, now.atomic_bsz) not in self.measured:
            return None  # measure the present one first
        model = self._model(self._hopeful())
        best = self._optimum(model)
        if best is None:
            return None
        if (best.atomic_bsz, best.accumulation_steps) == (now.atomic_bsz, now.accumulation_steps):
            return None
        worth = [float(model(*here, c.atomic_bsz, c.accumulation_steps)) for c in (best, now)]
        gained = worth[0] / max(worth[1], 1e-12)
        if Key(*here, best.atomic_bsz) in self.measured and self.steps < SETTLED and gained < BLUNDER:
            return None  # it was measured and left before
        return best if gained > THRESHOLD and self._certain(best) else None

    def _certain(self, best: BatchSize) -> bool:
        """Return whether `best` would be better even if |G|² were larger by its standard error.

        A larger |G|² makes every larger batch worth less. So a batch that is no larger than the present one
        is certain.
        """
        now, here = self.now, (self.nodes, self.replicas)
        if best.atomic_bsz * (best.accumulation_steps + 1) <= now.atomic_bsz * (now.accumulation_steps + 1):
            return True
        if not math.isfinite(self.sqr_error):
            return False
        doubtful = replace(self, grads=self.grads._replace(sqr=self.grads.sqr + self.sqr_error))
        model = doubtful._model(self._hopeful())
        worth = [float(model(*here, c.atomic_bsz, c.accumulation_steps)) for c in (best, now)]
        return worth[0] > THRESHOLD * worth[1]

    def _model(self, perf: PerfParams) -> GoodputFunction:
        return _Corrected(perf, self.grads, self.limits.init, self.measured, self.nodes, self.replicas)

    def _hopeful(self) -> PerfParams:
        """Return θ; with one measured atomic batch size, a θ that predicts its compute time for all sizes.

        With one size, it is unknown how the time depends on the batch size. So a larger batch is tried,
        unless its samples would be worth too little even if it took no longer. The trial measures the time.
        """
        sizes = {key.atomic_bsz for key in self.measured}
        if len(sizes) != 1:
            return self.perf
        return self.perf._replace(alpha_c=self.perf.alpha_c + self.perf.beta_c * sizes.pop(), beta_c=0.0)

    def _optimum(self, model: GoodputFunction) -> BatchSize | None:
        limits, now = self.limits, self.now
        if limits.maximum is None:
            return None
        low, high = limits.bounds or (1, limits.maximum)
        tried = max([key.atomic_bsz for key in self.measured] or [limits.init])
        reach = max(int(GROWTH * tried), math.ceil(limits.init / self.replicas), low)
        in_use = self.replicas * now.atomic_bsz * (now.accumulation_steps + 1)
        largest = min(limits.maximum, math.ceil(GROWTH * max(in_use, self.reached, limits.init)))
        ways = [limits.accumulation]
        if limits.accumulation and self.replicas == 1:
            # AdaptDL's single replica must accumulate to grow, because of its estimator. Here the estimator
            # splits the batch (`estimator`), so a batch that fits into one pass need not be split into two.
            ways.append(False)
        found = [
            model.optimize(
                self.nodes,
                self.replicas,
                max_batch_size=max(limits.init, largest),
                atomic_bsz_range=(low, min(high, reach)),
                accumulation=way,
            )
            for way in ways
        ]
        goodput, atomic, accum = max(found, key=lambda answer: float(answer[0]))
        return BatchSize(int(atomic), int(accum), float(goodput)) if goodput > 0 else None
