"""The goodput model against its formulas (Pollux, OSDI'21, section 3) and its fit against known θ."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptdl_elastic.goodput import CANDIDATES, GoodputFunction, GradParams, PerfParams, fit_perf_params

THETA = PerfParams(0.12, 0.003, 0.40, 0.01, 0.08, 0.002, 1.6)
GRADS = GradParams(sqr=0.01, var=2.0)


def optim_time(theta: PerfParams, nodes: int, replicas: int, atomic: float) -> float:
    """T_opt written down directly."""
    t_grad = theta.alpha_c + theta.beta_c * atomic
    if replicas == 1:
        return t_grad
    alpha, beta = (theta.alpha_n, theta.beta_n) if nodes > 1 else (theta.alpha_r, theta.beta_r)
    t_net = alpha + beta * max(replicas - 2, 0)
    return (t_grad**theta.gamma + t_net**theta.gamma) ** (1 / theta.gamma)


@pytest.mark.parametrize(("nodes", "replicas"), [(1, 1), (1, 2), (1, 4), (2, 2), (3, 12)])
@pytest.mark.parametrize("accum", [0, 1, 5])
def test_throughput_is_the_papers_formula(nodes: int, replicas: int, accum: int) -> None:
    fn = GoodputFunction(THETA, GRADS, 64)
    t_grad = THETA.alpha_c + THETA.beta_c * 32
    expected = replicas * 32 * (accum + 1) / (accum * t_grad + optim_time(THETA, nodes, replicas, 32))
    assert fn.throughput(nodes, replicas, 32, accum) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("batch_size", [64, 65, 640, 64000])
def test_efficiency_is_gain_over_scale(batch_size: int) -> None:
    scale = batch_size / 64
    gain = (GRADS.var + GRADS.sqr) / (GRADS.var / scale + GRADS.sqr)
    assert GoodputFunction(None, GRADS, 64).efficiency(batch_size) == pytest.approx(gain / scale, rel=1e-12)


def test_without_statistics_more_samples_are_worth_nothing_more() -> None:
    fn = GoodputFunction(THETA, GradParams(0.0, 0.0), 64)
    assert fn.efficiency(64) == 1.0
    assert fn.efficiency(128) == 0.5


def test_goodput_is_their_product() -> None:
    fn = GoodputFunction(THETA, GRADS, 64)
    assert fn(2, 8, 32, 1) == pytest.approx(fn.throughput(2, 8, 32, 1) * fn.efficiency(8 * 32 * 2), rel=1e-12)
    assert fn(2, 8, 32, 1) == fn.evaluate(2, 8, 32, 1)


def brute_force(
    nodes: int, replicas: int, init: int, largest: int, bounds: tuple[int, int], accumulation: bool
) -> float:
    """The best of all candidates, one at a time in plain Python."""
    fn = GoodputFunction(THETA, GRADS, init)
    smallest, best = max(init, bounds[0] * replicas), 0.0
    if smallest > largest:
        return 0.0
    for i in range(CANDIDATES):
        total = smallest * (largest / smallest) ** (i / (CANDIDATES - 1))
        local = total / replicas
        accum = max(math.ceil(local / bounds[1] - 1e-8) - 1, 0) if accumulation else 0
        if accumulation and replicas == 1 and total > init * (1 + 1e-8):
            accum = max(accum, 1)
        atomic = max(math.ceil(local / (accum + 1) - 1e-8), bounds[0])
        if atomic <= min(bounds[1], math.ceil(largest / replicas / (accum + 1) - 1e-8)):
            best = max(best, fn(nodes, replicas, atomic, accum))
    return best


@settings(max_examples=60, deadline=None)
@given(
    nodes=st.integers(1, 6),
    per_node=st.integers(1, 8),
    init=st.integers(1, 256),
    growth=st.floats(1, 64),
    low=st.integers(1, 64),
    width=st.floats(1, 16),
    accumulation=st.booleans(),
)
def test_optimize_is_the_best_candidate(
    nodes: int, per_node: int, init: int, growth: float, low: int, width: float, accumulation: bool
) -> None:
    largest, bounds = int(init * growth), (low, int(low * width))
    fn = GoodputFunction(THETA, GRADS, init)
    goodput, atomic, accum = fn.optimize(nodes, nodes * per_node, largest, bounds, accumulation)
    expected = brute_force(nodes, nodes * per_node, init, largest, bounds, accumulation)
    assert goodput == pytest.approx(expected, rel=1e-9)
    if goodput > 0:
        assert bounds[0] <= atomic <= bounds[1]
        assert accum >= 0
        assert goodput == pytest.approx(fn(nodes, nodes * per_node, atomic, accum), rel=1e-9)


def test_optimize_answers_in_kind() -> None:
    fn = GoodputFunction(THETA, GRADS, 64)
    one = fn.optimize(1, 4, 1024, (16, 128), True)
    many = fn.optimize([1, 1, 2], [1, 4, 8], 1024, (16, 128), True)
    assert [type(x) for x in one] == [float, int, int]
    assert [x.shape for x in many] == [(3,)] * 3
    assert (many[0][1], many[1][1], many[2][1]) == one


def test_optimize_for_many_jobs_at_once() -> None:
    other = PerfParams(0.5, 0.01, 0.2, 0.0, 0.1, 0.0, 2.0)
    theta = PerfParams(*(np.array([[a], [b]]) for a, b in zip(THETA, other, strict=True)))
    both = GoodputFunction(theta, GradParams(np.array([[0.01], [3.0]]), 2.0), np.array([[64], [8]]))
    nodes, replicas = np.array([[1, 2]]), np.array([[3, 6]])
    goodput, _, _ = both.optimize(nodes, replicas, np.array([[512], [80]]), (np.array([[4], [2]]), 64), True)
    first = GoodputFunction(THETA, GRADS, 64).optimize([1, 2], [3, 6], 512, (4, 64), True)[0]
    second = GoodputFunction(other, GradParams(3.0, 2.0), 8).optimize([1, 2], [3, 6], 80, (2, 64), True)[0]
    assert goodput == pytest.approx(np.stack([first, second]))


def test_without_a_maximum_the_batch_size_stays() -> None:
    fn = GoodputFunction(THETA, GRADS, 64)
    assert fn.optimize(1, 3)[1:] == (22, 0)  # equal local batches, rounded up


def test_one_replica_may_grow_without_accumulation() -> None:
    assert GoodputFunction(THETA, GradParams(1e-6, 2.0), 64).optimize(1, 1, 1024)[1] > 64


def test_a_total_size_that_does_not_fit_has_no_goodput() -> None:
    assert GoodputFunction(THETA, GRADS, 64).optimize(2, 8, 64, (16, 32), True)[0] == 0.0


def test_a_batch_size_that_fits_no_bounds_accumulates_nothing() -> None:
    fn = GoodputFunction(THETA, GRADS, 64)
    assert fn.optimize(1, 1, 64, (100, 200), True)[::2] == (0.0, 0)
    goodput, _, accum = fn.optimize([1, 1], [1, 8], 640, (100, 200), True)
    assert (goodput > 0).tolist() == [True, False]
    assert accum.tolist()[1] == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda fn: fn.optimize(2, 1), "num_nodes <= num_replicas"),
        (lambda fn: fn.optimize(0, 1), "num_nodes must be a whole number of at least 1, got 0"),
        (lambda fn: fn.optimize(math.nan, 1), "num_nodes must be .* got nan"),
        (lambda fn: fn.optimize(1, 1.5), r"num_replicas must be a whole number .* got 1\.5"),
        (lambda fn: fn.optimize(1, 1, math.nan), "max_batch_size must be .* got nan"),
        (lambda fn: fn.optimize(1, 1, "x"), "max_batch_size must be .* got 'x'"),
        (lambda fn: fn.optimize(1, 1, 128, (-5, 64)), "atomic_bsz_range must be .* got -5"),
        (lambda fn: fn.optimize(1, 1, 128, (math.nan, 64)), "atomic_bsz_range must be .* got nan"),
        (lambda fn: fn.optimize(1, 1, 128, 5), "atomic_bsz_range=5: give a pair"),
        (lambda fn: fn(1, 1, -64, 0), "atomic_bsz must be positive, got -64"),
        (lambda fn: fn("x", 1, 64, 0), "num_nodes must be at least 1, got 'x'"),
        (lambda fn: fn(1, 0, 64, 0), "num_replicas must be at least 1, got 0"),
        (lambda fn: fn(1, 1, 64, [0, -1]), r"accum_steps must be at least 0, got \[0, -1\]"),
        (lambda fn: fn.efficiency(0), "batch_size must be positive, got 0"),
        (lambda fn: GoodputFunction(THETA, GRADS, math.nan), "init_batch_size must be positive, got nan"),
        (lambda fn: GoodputFunction(THETA, GRADS, None), "init_batch_size must be positive, got None"),
        (lambda fn: GoodputFunction((1, 2, 3), GRADS, 64), r"perf_params are \(alpha_c, .*got \(1, 2, 3\)"),
        (lambda fn: fit_perf_params("x", 1, 1, 1, 1), "num_nodes must be numbers, got 'x'"),
        (lambda fn: fit_perf_params([1], [1], [8], [1], [1], guess=(1, 2)), r"guess are .*got \(1, 2\)"),
        (lambda fn: fn.optimize(1, 1, 32), "max_batch_size >= init_batch_size"),
        (lambda fn: fn.optimize(1, 1, 64, (8, 4)), "ascending"),
        (lambda fn: GoodputFunction(None, GRADS, 64).throughput(1, 1, 1, 0), "perf_params"),
        (lambda fn: GoodputFunction(THETA, GRADS, 0), "init_batch_size"),
        (lambda fn: fit_perf_params([1], [1, 2], [1], [1], [1]), "one length"),
        (lambda fn: fit_perf_params([1], [1], [8], [0.1], [float("nan")]), "no valid measurement"),
    ],
)
def test_bad_input_is_named(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(GoodputFunction(THETA, GRADS, 64))  # type: ignore[operator]


# ------------------------------------------------------------------------------------------------ fit


def profile(theta: PerfParams, points: int, seed: int, noise: float = 0.0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    nodes = rng.integers(1, 5, points)
    replicas = nodes * rng.integers(1, 5, points)
    atomic = rng.integers(8, 129, points)
    factor = np.exp(rng.normal(0, noise, (2, points)))
    accum = (theta.alpha_c + theta.beta_c * atomic) * factor[0]
    pairs = zip(nodes, replicas, atomic, strict=True)
    return [nodes, replicas, atomic, accum, np.array([optim_time(theta, *x) for x in pairs]) * factor[1]]


def error(theta: PerfParams, data: list[np.ndarray]) -> float:
    """Root mean squared log error of T_opt."""
    predicted = [optim_time(theta, *x) for x in zip(*data[:3], strict=True)]
    return float(np.sqrt(np.mean(np.log(np.array(predicted) / data[4]) ** 2)))


thetas = st.builds(
    PerfParams,
    st.floats(0.01, 2),
    st.floats(1e-4, 0.02),
    st.floats(0.2, 3),
    st.floats(1e-4, 0.02),
    st.floats(0.01, 0.18),
    st.floats(1e-5, 1e-4),
    st.floats(1, 5),
)


@settings(max_examples=25, deadline=None)
@given(thetas, st.integers(0, 100))
def test_fit_predicts_what_it_was_shown(theta: PerfParams, seed: int) -> None:
    data = profile(theta, 50, seed)
    fitted = fit_perf_params(*data)
    assert error(fitted, data) < 0.03
    more = [np.append(x, y) for x, y in zip(data, profile(theta, 10, seed + 1), strict=True)]
    assert error(fit_perf_params(*more, guess=fitted), more) < 0.03


def test_a_slow_first_step_does_not_bend_the_fit() -> None:
    data = profile(THETA, 20, 0, noise=0.01)
    clean = [x.copy() for x in data]
    data[4][3] *= 30
    data[3][3] *= 30
    assert error(fit_perf_params(*data), clean) < 0.05


@pytest.mark.parametrize("seed", range(5))
def test_a_noisy_neighbour_does_not_bend_the_fit(seed: int) -> None:
    data = profile(THETA, 40, seed, noise=0.02)
    clean = [x.copy() for x in data]
    disturbed = np.random.default_rng(seed).choice(40, 6, replace=False)  # one in seven
    data[3][disturbed] *= 2.5
    data[4][disturbed] *= 2.5
    assert error(fit_perf_params(*data), clean) < 0.1
    # such a fit would be: least squares without robustness are off by far more
    assert error(fit_perf_params(*data), data) > 0.2


def test_units_do_not_matter() -> None:
    data = profile(THETA, 30, 1)
    slow = fit_perf_params(*data[:3], data[3] * 1000, data[4] * 1000)
    fast = fit_perf_params(*data)
    assert slow[:6] == pytest.approx([1000 * x for x in fast[:6]], rel=1e-3)
    assert slow.gamma == pytest.approx(fast.gamma, rel=1e-3)


def test_a_term_that_was_not_measured_costs_nothing() -> None:
    one = fit_perf_params([1, 1], [1, 1], [32, 64], [0.2, 0.3], [0.2, 0.3])
    for nodes, replicas in ((1, 2), (1, 8), (2, 8)):
        assert optim_time(one, nodes, replicas, 32) == pytest.approx(0.2, rel=0.05)
    two = fit_perf_params([1, 1], [1, 2], [32, 32], [0.2, 0.2], [0.2, 0.3])
    assert optim_time(two, 1, 2, 32) == pytest.approx(0.3, rel=0.05)
    assert optim_time(two, 1, 4, 32) == pytest.approx(optim_time(two, 1, 2, 32), rel=1e-3)
    assert two.alpha_n >= two.alpha_r  # several nodes are not predicted to be cheaper than one


def test_one_batch_size_splits_the_time() -> None:
    theta = fit_perf_params([1], [1], [32], [0.2], [0.2])
    assert theta.alpha_c == pytest.approx(0.1, rel=1e-3)
    assert theta.beta_c * 32 == pytest.approx(0.1, rel=1e-3)


def test_accumulation_need_not_have_been_measured() -> None:
    data = profile(THETA, 30, 2)
    assert error(fit_perf_params(*data[:3], np.zeros(30), data[4]), data) < 0.05


def test_garbage_rows_are_left_out() -> None:
    data = [np.append(x, bad) for x, bad in zip(profile(THETA, 20, 3), (1, 1, 8, 0.1, np.inf), strict=True)]
    data = [np.append(x, bad) for x, bad in zip(data, (4, 2, 8, 0.1, 0.1), strict=True)]
    clean = profile(THETA, 20, 3)
    assert error(fit_perf_params(*data), clean) < 0.03


def test_fit_of_fifty_points_is_quick() -> None:
    data = profile(THETA, 50, 4, noise=0.05)
    fit_perf_params(*data)
    seconds = []
    for _ in range(5):
        start = time.process_time()
        fit_perf_params(*data)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.05
