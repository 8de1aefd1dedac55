"""Correct the throughput model where measured step times disagree with it.

The seven parameters of the throughput model cannot describe every machine, for example a shared switch or a
bus that saturates at four GPUs. Where a size has been run, by the job or by another job with the same script,
the measured step time is the better prediction. Sizes between measured ones are corrected by interpolation
(in the logarithm of the replicas), sizes beyond them by the nearest measured one. Correcting only the
measured sizes would make every untried size look better than it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from adaptdl_elastic.goodput import GoodputFunction, GradParams, PerfParams

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Corrections:
    """Errors of the model on one node and on several nodes.

    Each entry is (replicas, log of predicted over measured step time), in ascending order of replicas.
    """

    one: tuple[tuple[int, float], ...] = ()
    several: tuple[tuple[int, float], ...] = ()

    def factors(self, several: NDArray[np.bool_], replicas: NDArray[np.int64]) -> Array:
        """Return the factors by which to multiply the predicted throughput of each size."""
        factors = np.zeros(len(replicas))
        for measured, where in ((self.one, ~several), (self.several, several)):
            if measured:
                counts, logs = zip(*measured, strict=True)
                factors[where] = np.interp(np.log(replicas[where]), np.log(counts), logs)
        return np.asarray(np.exp(factors))


def correct(theta: PerfParams, step_times: Mapping[tuple[int, int, int], float]) -> Corrections:
    """Compare the model θ with measured step times.

    Args:
        theta: The parameters of the throughput model.
        step_times: Step times including synchronisation in seconds, by (nodes, replicas, atomic batch size).
            Those that are not positive are left out.
    """
    keys = np.array([key for key, seconds in step_times.items() if seconds > 0], dtype=float).reshape(-1, 3)
    if not len(keys):
        return Corrections()
    measured = np.array([seconds for seconds in step_times.values() if seconds > 0])
    nodes, replicas, atomic = keys.T
    throughput = GoodputFunction(theta, GradParams(1.0, 1.0), 1).throughput(nodes, replicas, atomic, 0)
    off = np.log(replicas * atomic / throughput / measured)

    def means(where: NDArray[np.bool_]) -> tuple[tuple[int, float], ...]:
        found = sorted({int(count) for count in replicas[where]})
        return tuple((count, float(off[where & (replicas == count)].mean())) for count in found)

    return Corrections(means(nodes == 1), means(nodes > 1))
