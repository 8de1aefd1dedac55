"""Estimate the gradient noise scale by pure arithmetic on squared norms.

A training step computes ḡ, the mean gradient of m = S·m₀ samples, where m₀ is the initial batch size and S
the *scale*. With the true gradient G and the covariance Σ of one sample's gradient::

    E|ḡ|² = |G|² + tr Σ / m

so an unbiased estimate V of the variance of the mean, E V = tr Σ / m, gives both moments without bias::

    |G|²  ≈  |ḡ|² − V                    `sqr`
    tr Σ / m₀  ≈  S·V                    `var`: the variance of a gradient at the initial batch size

(McCandlish, Kaplan, Amodei et al., *An Empirical Model of Large-Batch Training*, 2018, appendix A.1, with
B_small and B_big.) There are five ways to V, depending on what a step computes anyway:

* **Parts** (`measurement.of_replicas`). ḡ is the mean of n part-gradients of equal size, whose mean squared
  norm is Q = mean |gᵢ|²: V = (Q − |ḡ|²)/(n − 1). The parts are the replicas' gradients; with one replica and
  accumulation, the first micro-batch's gradient represents all. Parts of unequal size count as
  n = 1/Σ pᵢ² parts, where pᵢ are their parts of the samples.
* **Signs** (`balanced_signs`). With one replica and no accumulation, half of the samples get the sign +1 and
  half −1, at random. g± = (1/m) Σ sᵢ gᵢ has mean zero because the signs sum to zero, and V = |g±|² because
  E|g±|² = tr Σ / m. This splits the batch in two halves, (g₁ − g₂)/2, with one squared norm instead of two.
  It costs one more backward pass through the existing graph, on sampled steps only. The weights do not change
  between the halves. Several backward passes through one forward pass are measured as one; V of several
  forward passes is the sum of theirs, which is right if their samples' gradients are uncorrelated (a GAN's
  real and generated ones).
* **Rows** (`row_gradients`). The same with half of the samples against the others, taken from the backward
  pass of the training itself where parameters are used. It takes the place of signs if both have given the
  same for a graph of this form. They do not if samples are mixed (batch norm), and rows are not known
  everywhere (a compiled model, checkpointing).
* **Half of the batch** (`half_pass`). If the graph cannot be walked twice, or the loss is computed in the
  forward pass, so that the output has no dimension of samples, the model runs once more on half of the batch.
* **Successive gradients**, V = |g₁ − g₂|²/2. If the inputs have no dimension of samples, or derivatives of
  the outputs are part of the loss (a gradient penalty), which no walk from the outputs sees, the gradients of
  two successive steps are taken as parts of one batch of twice the size, as AdaptDL's differenced estimator
  does. This is biased when weights move: the step −η·g₁ shifts G by −η·H·g₁, which makes g₁·g₂ too small by
  η·tr(HΣ)/m, and with it |G|². It is a last resort, and logged.

`gain` and AdaScale's learning-rate factor are the same quotient: Johnson, Agrawal, Gu, Guestrin, *AdaScale
SGD: A User-Friendly Algorithm for Distributed Training*, ICML 2020, section 3. Pollux (Qiao et al., OSDI
2021, section 3.1) divides it by the scale, which gives the statistical efficiency.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[np.float64]

SMOOTHING = 0.999
"""The longest window is 1/(1 − SMOOTHING) steps of the initial batch size, as in AdaptDL."""

# fewest measurements before and after a border at which a change is searched
_LEAST = 8
# measurements that are kept for any batch size
_ENOUGH = 64
# fewest cells whose spread gives a standard error
_FEWEST = 4
# measurements that are summed up before they enter the window, at most
_LARGEST_GROUP = 8
# most cells of a size before two become one of twice the size; borders are 1/12 of the window apart
_CELLS = 6
# standard errors; seldom exceeded by chance, with ~30 borders and spreads of 8 measurements
_SIGNIFICANT = 5.0
# with it, a trend of one standard error counts for two thirds
_DOUBT = 0.5
# indices in `_Cell.seen`
_KNOWN, _VARIANCE = 0, 1
# a smaller squared norm counts as none: its logarithm would hide every later change
_NOTHING = 1e-150
# least change that counts, of a logarithm or relative to |G|²
_RELEVANT = 0.25


def balanced_signs(count: int, generator: torch.Generator) -> torch.Tensor:
    """Return `count` numbers ±1 in random order that sum to zero, shape [count].

    With an odd count one sample gets 0 and the others are multiplied by √(count/(count − 1)), so that E|(1/m)
    Σ sᵢ gᵢ|² = tr Σ / m in both cases. At least two samples are needed.
    """
    if count < 2:
        raise ValueError(f"a batch of {count} cannot be split in two halves")
    half = count // 2
    signs = torch.zeros(count)
    order = torch.randperm(count, generator=generator)
    magnitude = (count / (2 * half)) ** 0.5
    signs[order[:half]] = magnitude
    signs[order[half : 2 * half]] = -magnitude
    return signs


def lr_gain(sqr: Array, var: Array, scale: float) -> Array:
    """Return (var + sqr)/(var/scale + sqr), AdaScale's r_t; 1 if nothing is known. Same shape as `sqr`.

    At scale 1 it is exactly 1. If the gradient is all noise (sqr ≤ 0) it is `scale`; without noise (var ≤ 0)
    it is 1.
    """
    sqr, var = np.maximum(sqr, 0.0), np.maximum(var, 0.0)
    total = sqr + var
    below = sqr + var / scale
    return np.divide(total, below, out=np.ones_like(total), where=below > 0.0)


@dataclass(frozen=True)
class Measurement:
    """Hold the measurement of one step. Arrays have shape [groups]."""

    # |ḡ|²
    mean_sqr: Array
    # V, the variance of the mean
    variance: Array
    # S
    scale: float

    @property
    def sqr(self) -> Array:
        """Estimate of |G|²."""
        return self.mean_sqr - self.variance

    @property
    def var(self) -> Array:
        """Estimate of tr Σ / m₀."""
        return self.scale * self.variance

    @property
    def finite(self) -> bool:
        """Whether all values are finite.

        They are not after an overflow in mixed precision, or after a loss of inf or nan.
        """
        return bool(np.isfinite(self.mean_sqr).all() and np.isfinite(self.variance).all())


@dataclass
class _Cell:
    """Hold the sums of successive measurements."""

    # number of measurements
    count: int
    # Σ S: a step at scale S is S times as precise as one at the initial batch size
    weight: float
    # Σ S·|G|², shape [groups]
    sqr: Array
    # Σ S·tr Σ/m₀, shape [groups]
    var: Array
    # Σ x of the three quantities in which changes are searched, shape [3]
    seen: Array
    # Σ x²
    seen_sqr: Array

    @property
    def holds_nothing(self) -> bool:
        """Whether it contains a gradient of zero, as old checkpoints do from Adam's first step."""
        mean = self.seen / self.count
        spread = self.seen_sqr - self.count * mean**2
        far = np.log(_NOTHING)
        return bool((mean < far)[:2].any() or (spread > far**2)[:2].any())

    def as_list(self) -> list[Any]:
        """Return the attributes in order, as plain numbers and lists."""
        arrays = (self.sqr, self.var, self.seen, self.seen_sqr)
        return [self.count, self.weight, *(array.tolist() for array in arrays)]

    @classmethod
    def of_list(cls, values: list[Any]) -> _Cell:
        """Return the cell whose `as_list` is `values`."""
        count, weight, *arrays = values
        return cls(int(count), float(weight), *(as_array(array) for array in arrays))

    def add(self, other: _Cell) -> None:
        self.count += other.count
        self.weight += other.weight
        self.sqr = self.sqr + other.sqr
        self.var = self.var + other.var
        self.seen = self.seen + other.seen
        self.seen_sqr = self.seen_sqr + other.seen_sqr


class _Averages:
    """Compute the averages over the cells of a window, at least one.

    Each cell is moved to the last measurement along the trend. Otherwise the mean lags: while gradients
    shrink by a fifth in each step it would be that of steps ago.

    Attributes:
        recency: Weight of a measurement in each cell, shape [cells]: e⁻¹ after a third of the window. With
            it, slow drift that is not cut lags less, for a quarter more of standard error.
        trends: Slopes per measurement of log |ḡ|² and of log V.
        carried: Factors that move both quantities of each cell to the end of the window, shape [cells, 2].
        weight: Σ S of each cell, shape [cells].
        sqr: Estimate of |G|², shape [groups].
        var: Estimate of tr Σ / m₀, shape [groups].
    """

    def __init__(self, cells: Sequence[_Cell]) -> None:
        counts = np.array([cell.count for cell in cells], dtype=np.float64)
        # from the middle of each cell to the end of the window
        ages = counts[::-1].cumsum()[::-1] - counts / 2.0 - 0.5
        self.recency: Array = np.exp(-3.0 * ages / counts.sum())
        self.weight = np.array([cell.weight for cell in cells])
        self.trends = np.zeros(2)
        if len(cells) >= 3:
            seen, seen_sqr = (
                np.array([getattr(cell, name)[:2] for cell in cells]) for name in ("seen", "seen_sqr")
            )
            self.trends = _trends(counts, ages, self.recency, seen, seen_sqr)
        self.carried: Array = np.exp(np.clip(self.trends * ages[:, None], -3.0, 3.0))
        weights = self.recency[:, None] * self.carried / (self.recency @ self.weight)
        self.sqr: Array = weights[:, _KNOWN] @ np.stack([cell.sqr for cell in cells])
        self.var: Array = weights[:, _VARIANCE] @ np.stack([cell.var for cell in cells])


def _trends(counts: Array, ages: Array, recency: Array, seen: Array, seen_sqr: Array) -> Array:
    """Return slopes per measurement of two quantities, whose sums over cells are `seen`, shape [cells, 2].

    A weighted straight line is fitted to the cells and shrunk where it may be chance: its slope is multiplied
    by t²/(t² + `_DOUBT`), where t is the slope in standard errors.
    """
    weights, size = counts * recency, counts.sum()
    total = weights.sum()
    mean = seen / counts[:, None]
    within = seen_sqr / counts[:, None] - mean**2
    from_middle = ages - weights @ ages / total
    spread = weights @ from_middle**2
    slope = -(weights * from_middle) @ mean / spread
    off = mean - weights @ mean / total + slope * from_middle[:, None]
    # subtract what the line itself adds within a cell
    noise = weights @ (off**2 + within - slope**2 * (counts**2 - 1)[:, None] / 12) / total
    t_squared = slope**2 * spread / np.maximum(noise * size / (size - 2), 1e-9)
    result: Array = slope * t_squared / (t_squared + _DOUBT)
    return result


@dataclass
class Moments:
    """Average the moments over a window of measurements, which grows until the moments change.

    A fixed exponential average is either noisy or late: gradients shrink by orders of magnitude in the first
    steps, which would dominate its mean for a thousand steps. So the window is cut where the measurements
    before and after differ, as in ADWIN (Bifet and Gavaldà, *Learning from Time-Changing Data with Adaptive
    Windowing*, SIAM SDM 2007). Measurements are kept in cells of 1, 2, 4, … measurements, at most `_CELLS` of
    a size. After each measurement the older part is dropped if, at some border between cells, the mean of log
    |ḡ|², of log V (both nearly normal) or of the estimate of |G|² differs by more than `_SIGNIFICANT`
    standard errors and by more than `_RELEVANT`. While training is stationary the window grows to `1/(1 −
    smoothing)` steps of the initial batch size. The result is the mean of the window, moved to its end along
    its `trend`.

    To search the window costs more than a measurement. So once it is long, measurements enter it in groups of
    2, 4 and at last `_LARGEST_GROUP`, at most a 32nd of the window. Until a group is complete, its
    measurements do not count.
    """

    groups: int
    smoothing: float = SMOOTHING
    # oldest first
    cells: list[_Cell] = field(default_factory=list, init=False)
    # measurements that are not in the window yet
    _group: _Cell | None = field(default=None, init=False)
    # of the window
    _averages: _Averages | None = field(default=None, init=False)

    def add(self, measurement: Measurement) -> bool:
        """Add a measurement; return whether the means have changed. One with a zero gradient is left out."""
        scale, sqr, var = measurement.scale, measurement.sqr, measurement.var
        total, variance = float(measurement.mean_sqr.sum()), float(measurement.variance.sum())
        # estimates of positive quantities may be negative, and have no logarithm
        least = 1e-3 * abs(total)
        # in units of the initial batch size, since a larger batch does not change the gradient's noise
        known = max(float(sqr.sum()) + scale * variance, least)
        floor = max(scale * variance, scale * least)
        if min(known, floor) < _NOTHING:
            return False
        seen = np.array([math.log(known), math.log(floor), float(sqr.sum())])
        cell = _Cell(1, scale, scale * sqr, scale * var, seen, seen**2)
        if self._group is None:
            self._group = cell
        else:
            self._group.add(cell)
        if self._group.count < self._group_size:
            return False
        self.cells.append(self._group)
        self._group = self._averages = None
        self._cut()
        self._merge()
        return True

    @property
    def _group_size(self) -> int:
        """Measurements that enter the window together, a power of two as the counts of cells are."""
        size, length = 1, len(self)
        while 2 * size <= min(_LARGEST_GROUP, length // 32):
            size *= 2
        return size

    def __len__(self) -> int:
        """Return the number of measurements in the window."""
        return sum(cell.count for cell in self.cells)

    def _cut(self) -> None:
        limit = 1.0 / (1.0 - self.smoothing)
        while len(self) > _ENOUGH and sum(cell.weight for cell in self.cells[1:]) > limit:
            del self.cells[0]
        while (border := self._border()) is not None:
            del self.cells[:border]

    def _border(self) -> int | None:
        """Return the index of the first cell to keep; None if nothing has changed."""
        if len(self) < 2 * _LEAST:
            return None
        count = np.cumsum([cell.count for cell in self.cells])[:, None].astype(np.float64)
        seen = np.cumsum([cell.seen for cell in self.cells], axis=0)
        square = np.cumsum([cell.seen_sqr for cell in self.cells], axis=0)
        before, after = count[:-1], count[-1] - count[:-1]
        mean_before, mean_after = seen[:-1] / before, (seen[-1] - seen[:-1]) / after
        spread_before = np.maximum(square[:-1] / before - mean_before**2, 0.0)
        spread_after = np.maximum((square[-1] - square[:-1]) / after - mean_after**2, 0.0)
        apart = spread_before / np.maximum(before - 1, 1.0) + spread_after / np.maximum(after - 1, 1.0)
        pooled = (before * spread_before + after * spread_after) / (count[-1] - 2)
        # the larger of both, because eight measurements can lie close together by chance
        error = np.sqrt(np.maximum(apart, pooled * (1.0 / before + 1.0 / after)))
        change = np.abs(mean_before - mean_after)
        size = np.maximum(np.abs(mean_before), np.abs(mean_after))
        relevant = change > np.stack([np.full(len(size), _RELEVANT)] * 2 + [_RELEVANT * size[:, 2]], axis=1)
        found = (change > _SIGNIFICANT * error) & relevant & (before >= _LEAST) & (after >= _LEAST)
        borders = np.flatnonzero(found.any(axis=1))
        return int(borders[-1]) + 1 if borders.size else None

    def _merge(self) -> None:
        index = len(self.cells) - 1
        run = 0
        while index > 0:
            run = run + 1 if self.cells[index - 1].count == self.cells[index].count else 0
            # the two oldest of a size become one of the next size
            if run >= _CELLS:
                self.cells[index - 1].add(self.cells.pop(index))
                run = 0
            index -= 1

    @property
    def known(self) -> bool:
        """Whether there is any measurement."""
        return bool(self.cells)

    @property
    def sqr(self) -> Array:
        """Estimate of |G|², shape [groups]; not clipped. Zero before the first measurement."""
        return self._now.sqr if self.cells else np.zeros(self.groups)

    @property
    def var(self) -> Array:
        """Estimate of tr Σ / m₀, shape [groups]; not clipped."""
        return self._now.var if self.cells else np.zeros(self.groups)

    @property
    def _now(self) -> _Averages:
        if self._averages is None:
            self._averages = _Averages(self.cells)
        return self._averages

    def sqr_error(self) -> float:
        """Return the standard error of |G|² of all groups together, if tr Σ / m₀ were exact; inf: unknown.

        It is var times the standard error of sqr/var, on which every gain depends. Cells are the batches of a
        mean by batches. With their shares w of the window and the deviations z of their ratios from the
        window's, to first order (sqr_c − ratio · var_c)/var, the squared error is Σ w²z² / (1 − Σ w²)
        (Cochran, *Sampling Techniques*, 1977, section 6.3: the variance of a ratio).
        """
        if len(self.cells) < _FEWEST:
            return math.inf
        now = self._now
        sqr, var = (
            np.array([getattr(cell, name) for cell in self.cells]).sum(1) / now.weight * carried
            for name, carried in (("sqr", now.carried[:, _KNOWN]), ("var", now.carried[:, _VARIANCE]))
        )
        share = now.recency * now.weight
        share /= share.sum()
        mean = share @ var
        if mean <= 0.0:
            return math.inf
        deviation = sqr - (share @ sqr) / mean * var
        squares = share**2
        return float(np.sqrt(squares @ deviation**2 / (1.0 - squares.sum())))

    def state_dict(self) -> dict[str, Any]:
        """Return plain lists and numbers."""
        group = [] if self._group is None else [self._group.as_list()]
        return {"groups": self.groups, "cells": [cell.as_list() for cell in self.cells], "group": group}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; ValueError if the number of groups differs."""
        if state["groups"] != self.groups:
            raise ValueError(
                f"the saved gradient statistics are of {state['groups']} parameter groups, the "
                f"optimizer has {self.groups}: build it as it was when the checkpoint was written"
            )
        cells = [_Cell.of_list(values) for values in state["cells"]]
        self.cells = [cell for cell in cells if not cell.holds_nothing]
        # older checkpoints have none
        group = [_Cell.of_list(values) for values in state.get("group", [])]
        self._group, self._averages = group[0] if group else None, None


def as_array(values: Sequence[float]) -> Array:
    """Return a float64 array, shape [len(values)]."""
    return np.asarray(values, dtype=np.float64)
