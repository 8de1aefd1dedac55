"""Predict the time of a step for batch sizes that were not measured, with an error bar.

The time of a step on fixed replicas is modelled as a constant part and one in proportion to the batch m,
times a smooth deviation (cache, memory, a cliff)::

    log T(m) = level + log(c + (1 − c)·m/m0) + deviation(log m)

The constant's share c is unknown, so all shares from 0 to 1 are weighted by how well they explain the
measurements. Before a second size is measured, each is as likely as another: a doubled batch takes between
once and twice as long. The deviation is a Gaussian process: near a measured size it follows the measurement
(Rasmussen and Williams, *Gaussian Processes for Machine Learning*, 2006, section 2.7). Measurements on other
numbers of nodes and replicas have a level of their own, and tell of the share only.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from adaptdl_elastic.torch._tuning.step_times import Estimates

Array = NDArray[np.float64]

_SHARES = np.linspace(0.0, 1.0, 21)[:, np.newaxis]  # of the constant part
_LEVEL = 10.0  # standard deviation of the logarithm of a step's time before anything is measured
_DEVIATION = 0.1  # of real step times from the two parts, as a logarithm
_ELSEWHERE = 0.2  # the same of steps on other numbers of nodes and replicas
_LENGTH = 1.0  # of log m, over which a deviation varies


class Slowdown(NamedTuple):
    """Prediction of log T(m) − log T(now) for sizes m; arrays of shape (n,)."""

    mean: Array
    variance: Array
    resolved: Array  # part of the variance that a trial of the size takes away


def predict(
    known: Estimates, nodes: int, replicas: int, now: float, sizes: Array, precision: float
) -> Slowdown:
    """Predict how much longer steps take at other atomic batch sizes.

    Args:
        known: What was measured.
        nodes: Number of nodes.
        replicas: Number of replicas.
        now: Atomic batch size to compare with.
        sizes: Atomic batch sizes m, of shape (n,).
        precision: Standard error of log T after a trial.
    """
    groups = np.array([key[:2] for key in known.keys], dtype=float)
    measured = np.array([key.atomic_bsz for key in known.keys], dtype=float)
    here = np.array([nodes, replicas], dtype=float)
    asked = np.concatenate(([now], sizes))
    own = np.tile(here, (asked.size, 1))
    prior = _covariance(groups, measured, groups, measured, here) + known.covariance
    cross = _covariance(own, asked, groups, measured, here)
    residuals = (known.log_seconds - _shape(measured, now)).T
    solved = np.linalg.solve(prior, residuals)
    fits = np.sum(residuals * solved, axis=0)
    weights = np.exp(-0.5 * (fits - fits.min()))
    weights /= weights.sum()
    times = _shape(asked, now) + (cross @ solved).T
    posterior = _covariance(own, asked, own, asked, here) - cross @ np.linalg.solve(prior, cross.T)
    centred = times - weights @ times
    posterior += (centred * weights[:, np.newaxis]).T @ centred
    diagonal = posterior.diagonal()
    variance = np.maximum(diagonal + posterior[0, 0] - 2 * posterior[0], 0.0)
    resolved = (diagonal - posterior[0]) ** 2 / (diagonal + precision**2)
    mean = weights @ times
    return Slowdown(mean[1:] - mean[0], variance[1:], np.minimum(resolved, variance)[1:])


def _shape(sizes: Array, unit: float) -> Array:
    """Return log(c + (1 − c)·m/unit) of every share c and size m, of shape (shares, sizes)."""
    return np.asarray(np.log(_SHARES + (1 - _SHARES) * sizes / unit))


def _covariance(group: Array, size: Array, other_group: Array, other_size: Array, here: Array) -> Array:
    """Return the prior covariance of log T between two lists of configurations; groups have shape (n, 2)."""
    same = np.all(group[:, np.newaxis] == other_group, axis=-1)
    deviation = np.where(np.all(group == here, axis=-1), _DEVIATION, _ELSEWHERE)[:, np.newaxis] ** 2
    apart = np.log(size)[:, np.newaxis] - np.log(other_size)
    return np.asarray(same * (_LEVEL**2 + deviation * np.exp(-0.5 * (apart / _LENGTH) ** 2)))
