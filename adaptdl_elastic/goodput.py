"""Predict the goodput of a job, its useful samples per second, for an allocation and a batch size.

Goodput is throughput × statistical efficiency (Qiao et al., *Pollux: Co-adaptive Cluster Scheduling
for Goodput-Optimized Deep Learning*, OSDI 2021, section 3; its symbols are used here).

Throughput (section 3.2), for N nodes, R replicas, an atomic batch size m (the samples of one forward
and backward pass of one replica) and s accumulation steps::

    T_grad = α_c + β_c·m
    T_net  = 0                        R = 1
             α_r + β_r·max(R−2, 0)    N = 1, R > 1   (replicas of one node)
             α_n + β_n·max(R−2, 0)    N > 1          (several nodes)
    T_opt  = (T_grad^γ + T_net^γ)^(1/γ)              γ = 1: no overlap; γ → ∞: full overlap
    throughput = R·m·(s+1) / (s·T_grad + T_opt)

Statistical efficiency (section 3.1, after AdaScale SGD, Johnson et al., ICML 2020), for a total batch
size M and an initial one M0, with |G|² = `sqr` and tr Σ = `var` both measured at M0::

    scale = M / M0        gain = (var + sqr) / (var/scale + sqr)        efficiency = gain / scale

So a sample at batch size M is worth `efficiency` samples at M0, and goodput is counted in samples at M0 per
second. All functions here are pure: they read neither a clock nor a file.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

CANDIDATES = 50
"""Total batch sizes tried by `GoodputFunction.optimize`, spaced geometrically."""

_EPS = 1e-8  # tolerance before rounding up, so that an inexact logarithm does not raise 64/4/4 to 5
_TINY = 1e-8  # value of a term that costs nothing in a fit, because logarithms need more than zero
_MAX_GAMMA = 10.0  # Pollux, section 4.1: γ in [1, 10]
_OUTLIER = 0.1  # log error beyond which a measurement pulls linearly instead of quadratically
_PRIOR_GAMMA = 0.01  # γ = 2 weighs as much as one measurement with an error of 1 %
_PRIOR_BETA = 0.1  # β = α weighs as much as one with an error of 10 %: a longer ring is hardly slower


class PerfParams(NamedTuple):
    """Hold the parameters θ of the throughput model."""

    alpha_c: float  # forward and backward pass: constant part, in seconds
    beta_c: float  # forward and backward pass: seconds per sample of the atomic batch
    alpha_n: float  # synchronising two replicas on different nodes, in seconds
    beta_n: float  # seconds per further replica, on several nodes
    alpha_r: float  # synchronising two replicas on one node, in seconds
    beta_r: float  # seconds per further replica, on one node
    gamma: float  # overlap of computation and synchronisation, from 1 (none) to 10


class GradParams(NamedTuple):
    """Hold gradient statistics at the initial batch size."""

    sqr: float  # |G|²: squared norm of the true gradient
    var: float  # tr Σ: variance of the gradient estimate


class GoodputFunction:
    """Predict throughput, efficiency and goodput of one job.

    `perf_params` may be None if only `efficiency` is called. Fields of `perf_params` and `grad_params` may be
    arrays that broadcast against the arguments of the methods, so that one call predicts for many jobs.

    Every method takes scalars or arrays that broadcast against each other. It returns Python numbers for
    scalars, else arrays.
    """

    def __init__(
        self,
        perf_params: PerfParams | tuple[Any, ...] | None,
        grad_params: GradParams | tuple[Any, ...],
        init_batch_size: Any,
    ) -> None:
        _check("init_batch_size", init_batch_size, "positive", lambda x: (x > 0) & (x < np.inf))
        for name, given, kind in (
            ("perf_params", perf_params, PerfParams),
            ("grad_params", grad_params, GradParams),
        ):
            if given is not None and (not isinstance(given, tuple | list) or len(given) != len(kind._fields)):
                raise ValueError(f"{name} are ({', '.join(kind._fields)}), got {given!r}")
        self._perf_params = None if perf_params is None else PerfParams(*perf_params)
        self._grad_params = GradParams(*grad_params)
        self._init_batch_size = init_batch_size

    def __call__(
        self, num_nodes: ArrayLike, num_replicas: ArrayLike, atomic_bsz: ArrayLike, accum_steps: ArrayLike
    ) -> Any:
        """Call `evaluate`."""
        return self.evaluate(num_nodes, num_replicas, atomic_bsz, accum_steps)

    def evaluate(
        self, num_nodes: ArrayLike, num_replicas: ArrayLike, atomic_bsz: ArrayLike, accum_steps: ArrayLike
    ) -> Any:
        """Return the goodput in samples (at the initial batch size) per second.

        Args:
            num_nodes: Number of nodes.
            num_replicas: Number of replicas.
            atomic_bsz: Samples of one replica in one forward and backward pass.
            accum_steps: Passes without an optimizer step before each pass with one.

        Raises:
            ValueError: an argument is not a number or out of range.
        """
        for name, given in (("num_nodes", num_nodes), ("num_replicas", num_replicas)):
            _check(name, given, "at least 1", lambda x: x >= 1)
        _check("atomic_bsz", atomic_bsz, "positive", lambda x: x > 0)
        _check("accum_steps", accum_steps, "at least 0", lambda x: x >= 0)
        return self._evaluate(num_nodes, num_replicas, atomic_bsz, accum_steps)

    def _evaluate(
        self, num_nodes: ArrayLike, num_replicas: ArrayLike, atomic_bsz: ArrayLike, accum_steps: ArrayLike
    ) -> Any:
        batch_size = np.multiply(np.multiply(num_replicas, atomic_bsz), np.add(accum_steps, 1))
        throughput = self.throughput(num_nodes, num_replicas, atomic_bsz, accum_steps)
        return _in_kind(np.asarray(throughput * self.efficiency(batch_size)))

    def throughput(
        self, num_nodes: ArrayLike, num_replicas: ArrayLike, atomic_bsz: ArrayLike, accum_steps: ArrayLike
    ) -> Any:
        """Return the samples per second, regardless of statistical efficiency."""
        if self._perf_params is None:
            raise ValueError("no perf_params: this function can only answer for efficiency")
        nodes, replicas, atomic, accum = (
            np.asarray(x, dtype=float) for x in (num_nodes, num_replicas, atomic_bsz, accum_steps)
        )
        t_grad = np.asarray(self._perf_params.alpha_c + self._perf_params.beta_c * atomic)
        t_opt = _optim_time(self._perf_params, t_grad, _net_time(self._perf_params, nodes, replicas))
        return _in_kind(replicas * atomic * (accum + 1) / (accum * t_grad + t_opt))

    def efficiency(self, batch_size: ArrayLike) -> Any:
        """Return the statistical efficiency: 1 at the initial batch size, less above it.

        Raises:
            ValueError: a batch size is not positive.
        """
        _check("batch_size", batch_size, "positive", lambda x: x > 0)
        scale = np.asarray(batch_size, dtype=float) / self._init_batch_size
        sqr, var = (np.maximum(np.asarray(x, dtype=float), 0.0) for x in self._grad_params)
        # gain/scale = (var + sqr) / (var + scale·sqr). Without statistics assume sqr = 1, var = 0: no gain
        # from a larger batch.
        sqr = np.where(sqr + var > 0, sqr, 1.0)
        return _in_kind((var + sqr) / (var + scale * sqr))

    def optimize(
        self,
        num_nodes: ArrayLike,
        num_replicas: ArrayLike,
        max_batch_size: Any = None,
        atomic_bsz_range: tuple[Any, Any] | None = None,
        accumulation: bool = False,
    ) -> tuple[Any, Any, Any]:
        """Return the batch size with the best goodput for each (num_nodes, num_replicas).

        Tries `CANDIDATES` total batch sizes, spaced geometrically from max(initial batch size, smallest
        atomic batch × replicas) to `max_batch_size`. A total is divided equally among the replicas and
        rounded up. Apart from this rounding, no total is above `max_batch_size`.

        With `accumulation`, a share above the largest atomic batch is accumulated over several passes. A
        single replica above the initial batch size accumulates at least once, because two gradients are
        needed to estimate their variance.

        Args:
            num_nodes: Number of nodes.
            num_replicas: Number of replicas.
            max_batch_size: Largest total batch size; None: the initial batch size.
            atomic_bsz_range: Smallest and largest atomic batch size; None: no bounds.
            accumulation: Whether gradients may be accumulated.

        Returns:
            (goodput, atomic batch size, accumulation steps). Goodput and accumulation steps are 0 if no batch
            size fits the bounds: the smallest atomic batch on every replica exceeds `max_batch_size`, or the
            largest atomic batch is too small to reach the initial batch size without accumulation.

        Raises:
            ValueError: num_nodes < 1, fewer replicas than nodes, a fraction of a replica, or bounds that are
                below 1, infinite, or in the wrong order.
        """
        for name, given in (("num_nodes", num_nodes), ("num_replicas", num_replicas)):
            _check(name, given, "a whole number of at least 1", lambda x: (x >= 1) & (x == np.floor(x)))
        nodes, replicas = np.broadcast_arrays(np.asarray(num_nodes), np.asarray(num_replicas))
        if np.any(replicas < nodes):
            raise ValueError(f"need 1 <= num_nodes <= num_replicas, got {num_nodes!r} and {num_replicas!r}")
        init = self._init_batch_size
        max_bsz = init if max_batch_size is None else max_batch_size
        try:
            low, high = (None, None) if atomic_bsz_range is None else atomic_bsz_range
        except (TypeError, ValueError):
            raise ValueError(
                f"atomic_bsz_range={atomic_bsz_range!r}: give a pair (smallest, largest)"
            ) from None
        low = 1 if low is None else low
        high = max_bsz if high is None else high
        for name, given in (
            ("max_batch_size", max_bsz),
            ("atomic_bsz_range", low),
            ("atomic_bsz_range", high),
        ):
            _check(name, given, "at least 1 and finite", lambda x: (x >= 1) & (x < np.inf))
        if np.any(np.less(max_bsz, init)) or np.any(np.less(high, low)):
            raise ValueError(
                f"need max_batch_size >= init_batch_size, got {max_bsz!r} and {init!r}, and atomic_bsz_range "
                f"in ascending order, got ({low!r}, {high!r})"
            )
        scalar = all(isinstance(x, int) for x in (num_nodes, num_replicas, init, max_bsz, low, high))
        candidates: Callable[..., Any] = batch_candidates if scalar else _candidates
        atomic, accum, valid = candidates(
            num_replicas if scalar else replicas, init, max_bsz, low, high, accumulation
        )
        goodput = np.where(valid, self._evaluate(nodes, replicas, atomic, accum), 0.0)
        best = np.argmax(goodput, axis=0)[np.newaxis]
        accum = np.where(valid, accum, 0.0)
        picked = [np.take_along_axis(x, best, axis=0)[0] for x in (goodput, atomic, accum)]
        return _in_kind(picked[0]), _in_kind(picked[1].astype(int)), _in_kind(picked[2].astype(int))


def ring_time(replicas: NDArray[Any], latency: Array, transfer: Array) -> Array:
    """Return the least seconds of a ring all-reduce.

    Args:
        replicas: Number of replicas.
        latency: Seconds that a message takes from one replica to the next.
        transfer: Bytes of all gradients over the bytes per second of a link.
    """
    return np.asarray(2 * (replicas - 1) * (latency + transfer / replicas))


def _check(name: str, given: Any, allowed: str, holds: Callable[[Array], Any]) -> None:
    """Check that all numbers in `given` are allowed. NaN is never allowed.

    Args:
        name: Name of the argument, for the error.
        given: A number or an array.
        allowed: Description of the allowed numbers, for the error.
        holds: Function that returns for each number whether it is allowed.

    Raises:
        ValueError: `given` holds something else than allowed numbers.
    """
    try:
        fine = bool(np.all(holds(np.asarray(given, dtype=float))))
    except (TypeError, ValueError):
        fine = False
    if not fine:
        raise ValueError(f"{name} must be {allowed}, got {given!r}")


@lru_cache(maxsize=4096)
def batch_candidates(
    replicas: int, init: int, max_bsz: int, low: int, high: int, accumulation: bool
) -> tuple[Array, Array, NDArray[np.bool_]]:
    """Return the batch sizes that `GoodputFunction.optimize` compares; a job asks every few seconds.

    Args:
        replicas: Number of replicas.
        init: Initial batch size, over all replicas.
        max_bsz: Largest batch size over all replicas.
        low: Smallest atomic batch size.
        high: Largest atomic batch size.
        accumulation: Whether gradients may be accumulated.

    Returns:
        Atomic batch sizes, accumulation steps, whether each pair is allowed; arrays of shape (CANDIDATES,).
    """
    return _candidates(np.asarray(replicas), init, max_bsz, low, high, accumulation)


def _candidates(
    replicas: NDArray[Any], init: Any, max_bsz: Any, low: Any, high: Any, accumulation: bool
) -> tuple[Array, Array, NDArray[np.bool_]]:
    """Return (atomic batch size, accumulation steps, whether allowed), each of shape (CANDIDATES, ...)."""
    smallest = np.maximum(init, np.multiply(low, replicas)).astype(float)
    feasible = smallest <= max_bsz
    largest = np.maximum(max_bsz, smallest)
    steps = np.linspace(0.0, 1.0, CANDIDATES).reshape(-1, *([1] * smallest.ndim))
    total = smallest * (largest / smallest) ** steps
    local = total / replicas
    if accumulation:
        accum = np.maximum(np.ceil(local / high - _EPS) - 1, 0)
        accum = np.where((replicas == 1) & (total > np.multiply(init, 1 + _EPS)), np.maximum(accum, 1), accum)
        atomic = np.clip(np.ceil(local / (accum + 1) - _EPS), low, high)
    else:
        accum = np.zeros_like(local)
        atomic = np.maximum(np.ceil(local - _EPS), low)
    share = np.ceil(np.divide(largest, replicas * (accum + 1)) - _EPS)  # largest atomic batch by the total
    return atomic, accum, np.broadcast_to(feasible, local.shape) & (atomic <= np.minimum(high, share))


def _net_time(params: PerfParams, nodes: Array, replicas: Array) -> Array:
    alpha = np.where(nodes > 1, params.alpha_n, params.alpha_r)
    beta = np.where(nodes > 1, params.beta_n, params.beta_r)
    return np.where(replicas > 1, alpha + beta * np.maximum(replicas - 2, 0), 0.0)


def _optim_time(params: PerfParams, t_grad: Array, t_net: Array) -> Array:
    """Return (T_grad^γ + T_net^γ)^(1/γ); the larger term is factored out so that no power underflows."""
    larger, smaller = np.maximum(t_grad, t_net), np.minimum(t_grad, t_net)
    ratio = smaller / np.where(larger > 0, larger, 1.0)
    return np.asarray(larger * (1.0 + ratio**params.gamma) ** (1.0 / np.asarray(params.gamma)))


def _in_kind(x: Any) -> Any:
    """Return a Python number for a 0-d array, else the array."""
    return x.item() if np.ndim(x) == 0 else x


# ---------------------------------------------------------------------------------------------- fit


class _Data(NamedTuple):
    """Hold valid measurements: times relative to a typical step, atomic batches to a typical batch."""

    atomic: Array
    beyond_two: Array  # max(R − 2, 0)
    single: NDArray[np.bool_]  # measured with one replica: no synchronisation
    there: NDArray[np.bool_]  # measured on several nodes
    here: NDArray[np.bool_]  # measured with several replicas on one node
    log_accum: Array  # log time of a pass without synchronisation; NaN: not measured
    log_optim: Array  # log time of a pass with synchronisation and optimizer step


def fit_perf_params(
    num_nodes: ArrayLike,
    num_replicas: ArrayLike,
    atomic_bsz: ArrayLike,
    accum_step_time: ArrayLike,
    optim_step_time: ArrayLike,
    *,
    guess: PerfParams | None = None,
) -> PerfParams:
    """Fit θ to measured step times. All arrays have shape (P,), for P measurements.

    As in Pollux (section 4.1), the squared logarithmic error of both times is minimised, with two weak priors
    (γ near 1, β small against α). A term without measurements is assumed to cost nothing, so that a job is
    tried on more replicas: α_r until the job ran on two replicas of one node, α_n until it ran on two nodes,
    β until it ran on more than two replicas. Several nodes are never predicted to be cheaper than one. If
    only one atomic batch size was measured, half of the time is attributed to α_c.

    Two things differ from Pollux. Errors above about 10 % count linearly (pseudo-Huber loss), so that a few
    slow steps do not distort the fit. The solver is Levenberg-Marquardt in log θ with the analytic Jacobian:
    1-5 ms for 50 measurements.

    Args:
        num_nodes: Nodes of each measurement.
        num_replicas: Replicas of each measurement.
        atomic_bsz: Samples per replica and pass.
        accum_step_time: Seconds of a pass without synchronisation; zero or NaN: not measured.
        optim_step_time: Seconds of a pass with synchronisation and optimizer step; zero or NaN: not measured.
        guess: Result of a fit to earlier measurements, which makes this fit faster; None: no guess.

    Raises:
        ValueError: the lengths of the arguments differ, or no measurement is valid.
    """
    for name, given in (("num_nodes", num_nodes), ("num_replicas", num_replicas), ("atomic_bsz", atomic_bsz)):
        _check(name, given, "numbers", np.isreal)
    for name, given in (("accum_step_time", accum_step_time), ("optim_step_time", optim_step_time)):
        _check(name, given, "seconds", np.isreal)
    if guess is not None and len(guess) != len(PerfParams._fields):
        raise ValueError(f"guess are ({', '.join(PerfParams._fields)}), got {guess!r}")
    arrays = [np.atleast_1d(np.asarray(x, dtype=float)) for x in (num_nodes, num_replicas, atomic_bsz)]
    times = [np.atleast_1d(np.asarray(x, dtype=float)) for x in (accum_step_time, optim_step_time)]
    lengths = {x.shape for x in (*arrays, *times)}
    if len(lengths) != 1 or arrays[0].ndim != 1:
        raise ValueError(f"all arguments must be of one length, got shapes {sorted(lengths)}")
    nodes, replicas, atomic = arrays
    accum, optim = (np.where(np.isfinite(t) & (t > 0), t, np.nan) for t in times)
    keep = np.isfinite(nodes) & np.isfinite(replicas) & np.isfinite(atomic) & np.isfinite(optim)
    keep &= (nodes >= 1) & (replicas >= nodes) & (atomic > 0)
    if not keep.any():
        raise ValueError("no valid measurement: need 1 <= nodes <= replicas, positive batch and step time")
    nodes, replicas, atomic, accum, optim = (x[keep] for x in (nodes, replicas, atomic, accum, optim))
    # without a network the two kinds of step are the same
    accum = np.where(np.isnan(accum) & (replicas == 1), optim, accum)
    return _fit(nodes, replicas, atomic, accum, optim, guess)


def _fit(
    nodes: Array, replicas: Array, atomic: Array, accum: Array, optim: Array, guess: PerfParams | None
) -> PerfParams:
    unit_time = float(np.median(np.where(np.isnan(accum), optim, accum)))
    unit_bsz = float(np.exp(np.mean(np.log(atomic))))
    data = _Data(
        atomic=atomic / unit_bsz,
        beyond_two=np.maximum(replicas - 2, 0),
        single=replicas == 1,
        there=nodes > 1,
        here=(nodes == 1) & (replicas > 1),
        log_accum=np.log(accum / unit_time),
        log_optim=np.log(optim / unit_time),
    )
    starts = [_start(data, gamma) for gamma in (1.3, 4.0)]
    if guess is not None:
        units = np.array([unit_time, unit_time / unit_bsz, *[unit_time] * 4, 1.0])
        # a term that was fixed at zero cost starts from its default value
        known = np.array(guess) > 10 * _TINY * units
        (theta, free), _ = starts
        starts = [(np.where(known & free, np.log(np.maximum(guess, 1e-30) / units), theta), free)]
    fits = [_levenberg_marquardt(*start, data) for start in starts]
    theta = np.exp(min(fits, key=lambda fit: fit[0])[1])
    a_c, b_c, a_n, b_n, a_r, b_r, gamma = (float(x) for x in theta)
    if not data.there.any():
        a_n, b_n = max(a_n, 1.1 * a_r), max(b_n, 1.1 * b_r)
    t = unit_time
    return PerfParams(a_c * t, b_c * t / unit_bsz, a_n * t, b_n * t, a_r * t, b_r * t, gamma)


def _start(data: _Data, gamma: float) -> tuple[Array, NDArray[np.bool_]]:
    """Return the initial log θ, and which parameters the measurements determine; the others stay fixed."""
    theta = np.array([0.5, 0.5, 0.2, 0.02, 0.1, 0.01, gamma])
    free = np.ones(7, dtype=bool)
    if np.ptp(data.atomic) < 1e-9:
        measured = data.log_accum[~np.isnan(data.log_accum)]
        theta[:2] = math.exp(float(np.median(measured if measured.size else data.log_optim))) / 2
        free[0] = False
    for group, first in ((data.there, 2), (data.here, 4)):
        free[first] = group.any()
        free[first + 1] = group.any() and np.ptp(data.beyond_two[group]) > 0
    theta[~free & (np.arange(7) >= 2)] = _TINY
    if data.single.all():  # without synchronisation there is no overlap
        theta[6], free[6] = 1.0, False
    return np.log(theta), free


def _levenberg_marquardt(
    theta: Array, free: NDArray[np.bool_], data: _Data, iterations: int = 60
) -> tuple[float, Array]:
    """Return (loss, log θ) at a minimum of the pseudo-Huber loss, by iteratively reweighted damped steps."""
    low, high = np.full(7, math.log(_TINY)), np.full(7, math.log(1e6))
    low[6], high[6] = 0.0, math.log(_MAX_GAMMA)
    damping = 1e-2
    error, slope = _residuals(theta, data)
    loss = _loss(error)
    for _ in range(iterations):
        weight = 1 / np.sqrt(1 + (error / _OUTLIER) ** 2)
        gradient = slope.T @ (weight * error)
        moves = free & ~((theta <= low) & (gradient > 0)) & ~((theta >= high) & (gradient < 0))
        jacobian = slope[:, moves]
        normal = jacobian.T @ (weight[:, np.newaxis] * jacobian)
        scale = np.diag(np.maximum(np.diag(normal), 1e-6))
        improved = False
        while damping < 1e6 and not improved:
            step = np.linalg.solve(normal + damping * scale, -gradient[moves])
            trial = theta.copy()
            trial[moves] += np.clip(step, -3.0, 3.0)
            trial = np.clip(trial, low, high)
            trial_error, trial_slope = _residuals(trial, data)
            trial_loss = _loss(trial_error)
            improved = trial_loss < loss
            damping = max(damping / 5, 1e-9) if improved else damping * 5
        if not improved:
            break
        gained, theta, error, slope, loss = loss - trial_loss, trial, trial_error, trial_slope, trial_loss
        if gained < 1e-5 * loss + 1e-12:
            break
    return loss, theta


def _loss(error: Array) -> float:
    return float(np.sum(np.sqrt(1 + (error / _OUTLIER) ** 2) - 1))


def _residuals(theta: Array, data: _Data) -> tuple[Array, Array]:
    """Return log errors and priors, shape (2P + 3,), and their Jacobian by log θ, shape (2P + 3, 7)."""
    a_c, b_c, a_n, b_n, a_r, b_r, gamma = np.exp(theta)
    size = data.atomic.size
    t_grad = a_c + b_c * data.atomic
    log_grad = np.log(t_grad)
    t_net = np.where(data.there, a_n + b_n * data.beyond_two, a_r + b_r * data.beyond_two)
    log_net = np.log(t_net)
    share = 1 / (1 + np.exp(np.clip(gamma * (log_grad - log_net), -700, 700)))  # part of T_net in T_opt^γ
    share = np.where(data.single, 0.0, share)
    log_opt = np.where(data.single, log_grad, np.logaddexp(gamma * log_grad, gamma * log_net) / gamma)
    measured = ~np.isnan(data.log_accum)

    error = np.empty(2 * size + 3)
    error[:size] = np.where(measured, log_grad - data.log_accum, 0.0)
    error[size : 2 * size] = log_opt - data.log_optim
    ratios = b_n / a_n, b_r / a_r
    error[2 * size :] = _PRIOR_GAMMA * (gamma - 1), _PRIOR_BETA * ratios[0], _PRIOR_BETA * ratios[1]

    slope = np.zeros((2 * size + 3, 7))
    by_alpha = a_c / t_grad
    slope[:size, 0] = np.where(measured, by_alpha, 0.0)
    slope[:size, 1] = np.where(measured, 1 - by_alpha, 0.0)
    optim = slope[size : 2 * size]
    optim[:, 0] = by_alpha * (1 - share)
    optim[:, 1] = (1 - by_alpha) * (1 - share)
    for group, alpha, beta, column in ((data.there, a_n, b_n, 2), (data.here, a_r, b_r, 4)):
        part = np.where(group, share / t_net, 0.0)
        optim[:, column] = part * alpha
        optim[:, column + 1] = part * beta * data.beyond_two
    mean_log = (1 - share) * log_grad + share * np.where(data.single, 0.0, log_net)
    optim[:, 6] = np.where(data.single, 0.0, mean_log - log_opt)
    slope[2 * size, 6] = _PRIOR_GAMMA * gamma
    for row, ratio, column in ((1, ratios[0], 2), (2, ratios[1], 4)):
        slope[2 * size + row, column : column + 2] = -_PRIOR_BETA * ratio, _PRIOR_BETA * ratio
    return error, slope
