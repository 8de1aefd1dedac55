"""Choose the batch size of a job: pure decisions, from measured step times and gradient statistics.

There is one rule. The gain of a size over the present one is predicted: the logarithm of the ratio of
goodputs. Where its time is uncertain, a trial may show that it is better than predicted, so the standard
deviation that a trial takes away is added to the gain. What stays uncertain is subtracted, and |G|² is taken
within its standard error where it speaks for the present size. The best size is chosen if its gain, over the
work that remains, exceeds what a change costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from adaptdl_elastic._values import BatchSize, Limits
from adaptdl_elastic.goodput import GoodputFunction, GradParams, PerfParams, batch_candidates
from adaptdl_elastic.protocol.hints import ProfileEntry
from adaptdl_elastic.torch._tuning.step_curve import predict
from adaptdl_elastic.torch._tuning.step_times import Estimates, Key

GROWTH = 2.0
"""Largest ratio of a new atomic batch size to the largest measured one; also for the global batch size."""

PRECISION = 0.05
"""Standard error of the ratio of two step times after a trial. A smaller gain is not seen."""

CHANGE = 10.0
"""Cost of a change, in steps: the first ones are slow, and batches that were loaded are dropped."""


def local_batch(batch_size: int, replicas: int) -> int:
    """Return the samples per replica of a global batch: equal on all replicas, rounded up."""
    return -(-batch_size // replicas)


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


def accumulation_ratio(
    entries: Sequence[ProfileEntry], perf: PerfParams, nodes: int, replicas: int, atomic_bsz: int
) -> float:
    """Return the time of a pass without synchronisation to that of one with it.

    Args:
        entries: What was measured.
        perf: Model for the case that no such pass was measured on so many nodes and replicas.
        nodes: Number of nodes.
        replicas: Number of replicas.
        atomic_bsz: Batch size for the model; 0: none is in use yet.
    """
    measured = [
        entry.accum_step_time / entry.optim_step_time
        for entry in entries
        if (entry.nodes, entry.replicas) == (nodes, replicas) and entry.accum_step_time
    ]
    if measured:
        return float(np.mean(measured))
    size = max(atomic_bsz, 1)
    compute = perf.alpha_c + perf.beta_c * size
    model = GoodputFunction(perf, GradParams(1.0, 1.0), 1)
    return compute * float(model.throughput(nodes, replicas, size, 0)) / (replicas * size)


@dataclass(frozen=True)
class Chooser:
    """Everything that a choice depends on, at one moment."""

    nodes: int
    replicas: int
    limits: Limits
    grads: GradParams
    times: Estimates
    # in use; atomic_bsz 0: nothing yet
    now: BatchSize
    # seconds of work at the present goodput
    remaining: float
    # global batch size before a change of the number of replicas
    reached: int = 0
    # standard error of |G|² in `grads`; inf: unknown
    sqr_error: float = 0.0
    # time of a pass without synchronisation to that of one with it
    accumulation_ratio: float = 1.0

    def first(self) -> BatchSize | None:
        """Return the size to begin a generation with; None if it is fixed or nothing was measured.

        It is the global batch size `reached`, or the initial one, unless another one is better. A change
        costs nothing yet.
        """
        limits = self.limits
        if limits.maximum is None or not self.times.keys:
            return None
        reached = replace(limits, init=min(max(limits.init, self.reached), limits.maximum))
        kept = initial(reached, self.replicas)
        return replace(self, now=kept)._best(0.0) or kept

    def better(self) -> BatchSize | None:
        """Return the best size if it is enough better than the present one, which has to be measured."""
        now = Key(self.nodes, self.replicas, self.now.atomic_bsz)
        if self.limits.maximum is None or now not in self.times.keys:
            return None
        seconds = math.exp(self.times.log_seconds[self.times.keys.index(now)])
        passes = 1 + self.now.accumulation_steps * self.accumulation_ratio
        return self._best(CHANGE * seconds * passes / max(self.remaining, 1e-9))

    def _best(self, least: float) -> BatchSize | None:
        """Return the size with the largest gain if that exceeds `least`, else None."""
        atomic, passes = self._candidates()
        if not atomic.size:
            return None
        gain = self._gain(atomic, passes)
        best = int(np.argmax(gain))
        found = BatchSize(int(atomic[best]), int(passes[best]) - 1)
        return found if gain[best] > least and found != self.now else None

    def _gain(self, atomic: NDArray[np.float64], passes: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the gains that count, of sizes with so many passes a step; arrays of shape (n,)."""
        now, ratio = self.now, self.accumulation_ratio
        here = (self.nodes, self.replicas)
        slower = predict(self.times, *here, now.atomic_bsz, atomic, PRECISION)
        in_use = now.accumulation_steps + 1
        passes_slower = np.log((1 + (passes - 1) * ratio) / (1 + (in_use - 1) * ratio))
        samples = np.log(atomic * passes / (now.atomic_bsz * in_use))
        total, present = self.replicas * atomic * passes, self.replicas * now.atomic_bsz * in_use
        error = min(self.sqr_error, 1e3 * (self.grads.sqr + self.grads.var))
        worth = np.min(
            [
                np.log(np.maximum(model.efficiency(total), 1e-12) / max(model.efficiency(present), 1e-12))
                for model in (
                    GoodputFunction(None, self.grads._replace(sqr=max(sqr, 0.0)), self.limits.init)
                    for sqr in (self.grads.sqr - error, self.grads.sqr, self.grads.sqr + error)
                )
            ],
            axis=0,
        )
        doubt = np.sqrt(PRECISION**2 + slower.variance - slower.resolved)
        return np.asarray(samples + worth - slower.mean - passes_slower + np.sqrt(slower.resolved) - doubt)

    def _candidates(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the allowed atomic sizes and passes a step near what was measured, of shape (n,) each."""
        limits, now = self.limits, self.now
        assert limits.maximum is not None
        low, high = limits.bounds or (1, limits.maximum)
        tried = max([key.atomic_bsz for key in self.times.keys] or [limits.init])
        reach = max(int(GROWTH * tried), math.ceil(limits.init / self.replicas), low)
        in_use = self.replicas * now.atomic_bsz * (now.accumulation_steps + 1)
        largest = max(limits.init, min(limits.maximum, math.ceil(GROWTH * max(in_use, limits.init))))
        # AdaptDL's single replica must accumulate to grow, because of its estimator. Here the estimator
        # splits the batch (`estimator`), so a batch that fits into one pass need not be split into two.
        ways = {limits.accumulation, limits.accumulation and self.replicas > 1}
        found = [
            batch_candidates(self.replicas, limits.init, largest, low, min(high, reach), way) for way in ways
        ]
        atomic, accum, valid = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return atomic[valid].astype(float), accum[valid].astype(float) + 1
