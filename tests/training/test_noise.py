"""The estimators' arithmetic, against closed forms and brute force."""

from __future__ import annotations

from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptdl_elastic.torch._gradient.comm_hook import Recording
from adaptdl_elastic.torch._gradient.estimator import (
    Measurement,
    Moments,
    balanced_signs,
    lr_gain,
)
from adaptdl_elastic.torch._gradient.measurement import of_replicas

TRUE_GRADIENT = np.array([1.0, -2.0, 0.5, 0.0])
COVARIANCE = np.diag([4.0, 1.0, 9.0, 2.0])  # of one sample's gradient
SQR, TRACE = float(TRUE_GRADIENT @ TRUE_GRADIENT), float(np.trace(COVARIANCE))


def sample_gradients(count: int, batch: int, seed: int = 0) -> np.ndarray:
    """Gradients of one sample each, shape [count, batch, parameters]."""
    rng = np.random.default_rng(seed)
    return rng.multivariate_normal(TRUE_GRADIENT, COVARIANCE, size=(count, batch))


def squared_norm(gradients: np.ndarray) -> np.ndarray:
    return (gradients**2).sum(-1)


@pytest.mark.parametrize("shares", [(8, 8), (2,) * 8, (3, 3, 2), (3, 2, 0), (8, 1)], ids=str)
def test_shares_of_a_batch_give_both_moments_without_bias(shares: tuple[int, ...]) -> None:
    batch, trials = sum(shares), 20_000
    samples, ends = sample_gradients(trials, batch), np.cumsum(shares)
    parts = [samples[:, end - size : end].sum(1) / batch for size, end in zip(shares, ends, strict=True)]
    mean, own = squared_norm(sum(parts)).mean(), sum(squared_norm(part).mean() for part in parts)
    recording = Recording(
        average=[torch.tensor([mean])], own=[torch.tensor([own])], reduced=torch.tensor([own]), work=Mock()
    )
    known, variance = of_replicas([recording], batch**2 / sum(size**2 for size in shares))
    assert float(variance) == pytest.approx(TRACE / batch, rel=0.02)
    assert float(known - variance) == pytest.approx(SQR, rel=0.03)


@pytest.mark.parametrize("batch", [2, 3, 8, 15])
def test_balanced_signs_give_both_moments_without_bias(batch: int) -> None:
    trials = 10_000
    generator = torch.Generator().manual_seed(1)
    signs = np.stack([balanced_signs(batch, generator).numpy() for _ in range(trials)])
    gradients = sample_gradients(trials, batch)
    signed = (signs[:, :, None] * gradients).mean(1)
    variance, mean = squared_norm(signed), squared_norm(gradients.mean(1))
    assert variance.mean() == pytest.approx(TRACE / batch, rel=0.03)
    assert (mean - variance).mean() == pytest.approx(SQR, rel=0.03)


@given(st.integers(2, 300), st.integers(0, 2**31))
def test_signs_are_balanced(count: int, seed: int) -> None:
    signs = balanced_signs(count, torch.Generator().manual_seed(seed))
    assert float(signs.sum()) == pytest.approx(0.0, abs=1e-4)
    assert float((signs**2).sum()) == pytest.approx(count, rel=1e-5)
    assert int((signs == 0).sum()) == count % 2


def test_signs_do_not_touch_the_global_generator() -> None:
    before = torch.get_rng_state()
    balanced_signs(10, torch.Generator())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("count", [0, 1])
def test_one_part_has_no_variance(count: int) -> None:
    with pytest.raises(ValueError, match=str(count)):
        balanced_signs(count, torch.Generator())


moment = st.floats(0, 1e6)


@given(moment, moment, st.floats(1, 1e4))
def test_gain_is_adascales(sqr: float, var: float, scale: float) -> None:
    """r = (σ² + μ²)/(σ²/S + μ²) (Johnson et al., section 3): 1 ≤ r ≤ S, growing with S."""
    gain = float(lr_gain(np.array([sqr]), np.array([var]), scale)[0])
    assert 1.0 - 1e-9 <= gain <= scale * (1 + 1e-9)
    if var / scale + sqr > 0:
        assert gain == pytest.approx((var + sqr) / (var / scale + sqr))


def test_gain_at_its_limits() -> None:
    noise_only, none, nothing, negative = [
        float(lr_gain(np.array([sqr]), np.array([var]), 8.0)[0])
        for sqr, var in [(0.0, 3.0), (3.0, 0.0), (0.0, 0.0), (-1.0, 3.0)]
    ]
    assert (noise_only, none, nothing, negative) == (8.0, 1.0, 1.0, 8.0)


@given(moment, moment)
def test_gain_at_scale_one_is_exactly_one(sqr: float, var: float) -> None:
    assert lr_gain(np.array([sqr]), np.array([var]), 1.0).tolist() == [1.0]


def measurement(sqr: float, var: float, scale: float = 1.0) -> Measurement:
    variance = np.array([var / scale])
    return Measurement(np.array([sqr]) + variance, variance, scale)


def noisy(sqr: float, var: float, rng: np.random.Generator, scale: float = 1.0) -> Measurement:
    """A measurement as a model of many parameters gives it: |ḡ|² and V with a relative error of 30 %."""
    variance = np.array([var / scale]) * rng.lognormal(-0.045, 0.3)
    return Measurement(np.array([sqr + var / scale]) * rng.lognormal(-0.045, 0.3), variance, scale)


def test_means_of_a_stationary_problem_are_over_nearly_all_of_it() -> None:
    """A mean of 500 has a standard error of 30 % / √500 = 1.3 %; that of a line's end is twice that."""
    errors = []
    for seed in range(10):
        rng, moments = np.random.default_rng(seed), Moments(1)
        for _ in range(500):
            moments.add(noisy(2.0, 5.0, rng))
        assert len(moments) > 400, "nothing has changed"
        errors.append((moments.sqr[0] / 2.0 - 1, moments.var[0] / 5.0 - 1))
    rms = np.sqrt(np.mean(np.square(errors), axis=0))
    assert rms[0] < 0.12
    assert rms[1] < 0.03


def test_a_steady_decay_is_told_without_a_lag() -> None:
    """Both moments shrink by 4 % a step; a plain mean of the window tells those of some steps ago."""
    told = []
    for seed in range(10):
        rng, moments = np.random.default_rng(seed), Moments(1)
        for step in range(80):
            level = 0.96**step
            moments.add(noisy(20.0 * level, 5.0 * level, rng))
            if step >= 10:
                told.append((moments.sqr[0] / (20.0 * level), moments.var[0] / (5.0 * level)))
    assert np.mean(told, axis=0) == pytest.approx(np.ones(2), abs=0.05)


@pytest.mark.parametrize(("sqr", "var"), [(0.02, 5.0), (2.0, 1.0), (20.0, 50.0)])
def test_a_step_change_is_followed(sqr: float, var: float) -> None:
    rng, moments = np.random.default_rng(0), Moments(1)
    for _ in range(300):
        moments.add(noisy(20.0, 5.0, rng))
    for _ in range(100):
        moments.add(noisy(sqr, var, rng))
    assert len(moments) <= 110
    assert moments.var[0] == pytest.approx(var, rel=0.15)
    assert moments.sqr[0] == pytest.approx(sqr, rel=0.3, abs=0.5)


def test_a_geometric_decay_is_followed_within_a_factor_of_two() -> None:
    """|G|² shrinks a thousandfold in 300 steps, its variance tenfold: the noise scale keeps up."""
    rng, moments = np.random.default_rng(0), Moments(1)
    for step in range(600):
        fraction = min(step / 300, 1.0)
        sqr, var = 100.0 * 1e-3**fraction, 10.0 * 0.1**fraction
        moments.add(noisy(sqr, var, rng))
        if step >= 40 and step % 20 == 0 and sqr > 0.5:  # below, 30 % of V drowns |G|²
            assert 0.4 < (moments.var[0] / moments.sqr[0]) / (var / sqr) < 2.5, step
    assert moments.var[0] == pytest.approx(1.0, rel=0.15)


def test_a_change_of_the_batch_size_is_no_change_of_the_noise() -> None:
    rng, moments = np.random.default_rng(1), Moments(1)
    for step in range(400):
        moments.add(noisy(2.0, 5.0, rng, scale=1.0 if step < 200 else 2.0))
    assert len(moments) == 400


def test_the_window_is_bounded() -> None:
    rng, moments = np.random.default_rng(1), Moments(1, smoothing=0.99)
    for _ in range(1000):
        moments.add(noisy(2.0, 5.0, rng))
    assert 80 <= len(moments) <= 150
    assert len(moments.cells) < 60


def test_the_standard_error_of_the_noise_scale_is_that_of_repeated_runs() -> None:
    """|G|² by the exact variance of repeated runs: two thirds of them lie within one standard error."""
    rng, away = np.random.default_rng(0), []
    for _ in range(75):
        moments = Moments(1)
        for _ in range(200):
            moments.add(noisy(2.0, 5.0, rng))
        away.append((moments.sqr[0] - 0.4 * moments.var[0]) / moments.sqr_error())
    assert 0.8 < np.sqrt(np.mean(np.square(away))) < 1.5


def test_few_measurements_have_no_standard_error() -> None:
    rng, moments = np.random.default_rng(0), Moments(1)
    assert moments.sqr_error() == float("inf")
    for _ in range(3):
        moments.add(noisy(2.0, 5.0, rng))
    assert moments.sqr_error() == float("inf")
    moments.add(noisy(2.0, 5.0, rng))
    assert 0.0 < moments.sqr_error() < float("inf")


def test_a_long_window_takes_measurements_in_groups() -> None:
    rng, moments = np.random.default_rng(0), Moments(1)
    changed = [moments.add(noisy(2.0, 5.0, rng)) for _ in range(512)]
    assert all(changed[:64])
    assert sum(changed[-256:]) == 32, "groups of 8"
    assert len(moments) == 512


def test_a_replica_that_joins_within_a_group_tells_what_the_others_tell() -> None:
    """Scaling rules need the same statistics on all replicas."""
    rng, before, after = np.random.default_rng(0), Moments(1), Moments(1)
    for _ in range(515):
        before.add(noisy(2.0, 5.0, rng))
    after.load_state_dict(before.state_dict())
    assert (len(after), after.state_dict()) == (len(before), before.state_dict())
    for _ in range(20):
        one = noisy(2.0, 5.0, rng)
        assert before.add(one) == after.add(one)
        assert (after.sqr, after.var) == (before.sqr, before.var)


def test_a_checkpoint_without_a_group_is_read() -> None:
    moments = Moments(1)
    moments.add(measurement(3.0, 1.0))
    state = moments.state_dict()
    del state["group"]
    after = Moments(1)
    after.load_state_dict(state)
    assert after.sqr.tolist() == moments.sqr.tolist()


def test_an_overflow_is_not_finite() -> None:
    assert measurement(1.0, 1.0).finite
    assert not measurement(float("inf"), 1.0).finite
    assert not measurement(1.0, float("nan")).finite
