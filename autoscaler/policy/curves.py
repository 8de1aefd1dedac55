"""Compute the goodput of many jobs at many sizes in a few array operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from adaptdl_elastic.autoscaler.policy.policy_types import GoodputModel
from adaptdl_elastic.goodput import GoodputFunction, ring_time

Array = NDArray[np.float64]

_CHUNK = 1 << 17  # number of (job, size) pairs evaluated together, each at 50 batch sizes; bounds the memory


class Goodputs(NamedTuple):
    """The best configuration of each job at each size; every array has the shape (jobs, sizes)."""

    goodput: Array  # samples per second at the initial batch size, 0 where no batch size fits
    atomic_bsz: NDArray[Any]
    accumulation_steps: NDArray[Any]


def goodputs(models: Sequence[GoodputModel], nodes: ArrayLike, replicas: ArrayLike) -> Goodputs:
    """Return the best goodput of each model at each pair of (nodes, replicas).

    Args:
        models: The goodput models, one per job.
        nodes: Number of nodes of each size, shape (sizes,).
        replicas: Number of replicas of each size, shape (sizes,).
    """
    nodes, replicas = np.atleast_1d(nodes), np.atleast_1d(replicas)
    shape = len(models), len(replicas)
    out = Goodputs(np.zeros(shape), np.zeros(shape, dtype=int), np.zeros(shape, dtype=int))
    step = max(1, _CHUNK // (50 * max(1, len(replicas))))
    for accumulation in (False, True):
        rows = [i for i, model in enumerate(models) if model.accumulation is accumulation]
        for start in range(0, len(rows), step):
            chunk = rows[start : start + step]
            found = _evaluate([models[i] for i in chunk], nodes, replicas, accumulation)
            for target, values in zip(out, found, strict=True):
                target[chunk] = values
    for row, model in enumerate(models):
        if model.max_batch_size is None:  # unequal shares have this batch size in the time of the largest
            total = replicas * out.atomic_bsz[row] * (out.accumulation_steps[row] + 1)
            efficiency = GoodputFunction(None, model.grad_params, model.init_batch_size).efficiency(total)
            out.goodput[row] *= model.init_batch_size / total / efficiency
        if model.corrections is not None:
            out.goodput[row] *= model.corrections.factors(nodes > 1, replicas)
    return out


def _evaluate(
    models: Sequence[GoodputModel], nodes: NDArray[Any], replicas: NDArray[Any], accumulation: bool
) -> tuple[Any, Any, Any]:
    def column(values: Sequence[float]) -> Array:
        return np.array(values, dtype=float)[:, np.newaxis]

    a_c, b_c, a_n, b_n, *of_one_node = (column(x) for x in zip(*(m.perf_params for m in models), strict=True))
    link = (column([getattr(m.network, name) for m in models]) for name in ("latency", "transfer"))
    ring = ring_time(replicas, *link)
    network = np.maximum(a_n + b_n * np.maximum(replicas - 2, 0), ring)
    perf: Any = (a_c, b_c, network, 0.0, *of_one_node)
    grad: Any = tuple(column(x) for x in zip(*(m.grad_params for m in models), strict=True))
    largest = [m.max_batch_size or m.init_batch_size for m in models]
    low = [m.local_bsz_bounds[0] if m.local_bsz_bounds else 1 for m in models]
    high = [
        m.local_bsz_bounds[1] if m.local_bsz_bounds else top for m, top in zip(models, largest, strict=True)
    ]
    function = GoodputFunction(perf, grad, column([m.init_batch_size for m in models]))
    wide = (
        np.broadcast_to(nodes, (len(models), len(nodes))),
        np.broadcast_to(replicas, (len(models), len(nodes))),
    )
    return function.optimize(*wide, column(largest), (column(low), column(high)), accumulation)
