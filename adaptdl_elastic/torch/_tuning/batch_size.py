"""Which batch size a job should use: pure decisions, from a fitted model and what was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from adaptdl_elastic.goodput import GoodputFunction, GradParams, PerfParams
from adaptdl_elastic.torch._tuning.step_times import WINDOW, Key

THRESHOLD = 1.05
"""How much better a batch size must be predicted to be before the one in use is left (AdaptDL's)."""

GROWTH = 2.0
"""How far beyond the largest measured atomic batch size, and the global one in use, a decision may go."""

MISFIT = 1.2
"""Up to this factor the model is believed where a measurement says something else; beyond, the latter."""

SETTLED = WINDOW // 2
"""Optimizer steps at one batch size before one that was measured earlier is returned to."""

BLUNDER = 1.5
"""How much better an earlier batch size must be to be returned to at once."""


def local_batch(batch_size: int, replicas: int) -> int:
    """Samples per replica of a global batch: equal on all of them, rounded up."""
    return -(-batch_size // replicas)


@dataclass(frozen=True)
class BatchSize:
    """A decision: samples per pass of one replica, and passes without synchronisation before each step."""

    atomic_bsz: int
    accumulation_steps: int
    predicted_goodput: float | None = None  # samples at the initial batch size per second


@dataclass(frozen=True)
class Limits:
    """What the training loader was given."""

    init: int
    maximum: int | None  # None: the batch size stays as it is
    bounds: tuple[int, int] | None
    accumulation: bool


def initial(limits: Limits, replicas: int) -> BatchSize:
    """The batch size that was given, in equal shares rounded up, and what the bounds make of it.

    Where they do not fit this number of replicas (`misfit`): no pass is above the largest; batches are
    accumulated only where that is allowed, so the total may then be less than was given; and the smallest
    counts only as far as the total stays within the maximum.
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
    """Why the batch size that was given can not be had on so many replicas; None: it can."""
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
"""By configuration: seconds of a pass without synchronisation (0: not measured), and of one with it."""


class _Corrected(GoodputFunction):
    """A model that follows measurements where they prove it wrong by more than `MISFIT`.

    Between two measured atomic batch sizes the correction is interpolated, beyond them the nearest
    counts. To correct only those would make every size that was never tried look better, or
    worse, than its neighbours.
    """

    def __init__(
        self, perf: PerfParams, grads: GradParams, init: int, measured: Times, nodes: int, replicas: int
    ) -> None:
        super().__init__(perf, grads, init)
        self._accum: list[tuple[float, float]] = []  # log size, log correction
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
        """As GoodputFunction's, at the (nodes, replicas) of the measurements."""
        samples = np.multiply(num_replicas, atomic_bsz)
        optim = samples / super().throughput(num_nodes, num_replicas, atomic_bsz, 0)
        total = samples * np.add(accum_steps, 1)
        accum = total / super().throughput(num_nodes, num_replicas, atomic_bsz, accum_steps) - optim
        return total / (optim * _factor(self._optim, atomic_bsz) + accum * _factor(self._accum, atomic_bsz))


def _beyond(ratio: float) -> float:
    """The logarithm of what of `ratio` is beyond `MISFIT`, either way."""
    off = math.log(ratio)
    return math.copysign(max(abs(off) - math.log(MISFIT), 0.0), off)


def _factor(points: list[tuple[float, float]], atomic_bsz: Any) -> Any:
    if not points:
        return 1.0
    sizes, corrections = np.array(points).T
    return np.exp(np.interp(np.log(atomic_bsz), sizes, corrections))


@dataclass(frozen=True)
class Chooser:
    """All that a choice depends on, at one moment."""

    nodes: int
    replicas: int
    limits: Limits
    perf: PerfParams
    grads: GradParams
    measured: Times
    now: BatchSize  # in use; atomic_bsz 0: nothing yet
    steps: int  # optimizer steps that it has been
    reached: int = 0  # global batch size before a change of the number of replicas

    def optimum(self) -> BatchSize | None:
        """The best batch size within the limits and the reach of what is known; None: it is not chosen."""
        return self._optimum(self._model(self.perf))

    def better(self) -> BatchSize | None:
        """The optimum, if it is worth leaving the present batch size for."""
        now, here = self.now, (self.nodes, self.replicas)
        if now.atomic_bsz < 1 or Key(*here, now.atomic_bsz) not in self.measured:
            return None  # what is in use gets its chance first
        model = self._model(self._hopeful())
        best = self._optimum(model)
        if best is None:
            return None
        if (best.atomic_bsz, best.accumulation_steps) == (now.atomic_bsz, now.accumulation_steps):
            return None
        worth = [float(model(*here, c.atomic_bsz, c.accumulation_steps)) for c in (best, now)]
        gained = worth[0] / max(worth[1], 1e-12)
        if Key(*here, best.atomic_bsz) in self.measured and self.steps < SETTLED and gained < BLUNDER:
            return None  # it was left for a reason
        return best if gained > THRESHOLD else None

    def _model(self, perf: PerfParams) -> GoodputFunction:
        return _Corrected(perf, self.grads, self.limits.init, self.measured, self.nodes, self.replicas)

    def _hopeful(self) -> PerfParams:
        """θ; while one atomic batch size is all that was measured, as if any took as long.

        What of a step's time depends on the batch is not known yet. So a larger batch is tried unless
        its samples would be worth too little even so: one trial, and it is known.
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
            # AdaptDL's single replica must accumulate to grow, for the sake of its estimator. Ours splits
            # the batch (`estimator`), so that what fits into one pass need not come in two.
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
