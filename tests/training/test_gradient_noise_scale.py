"""The estimators on linear regression, whose |G|² and tr Σ are known in closed form."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import regression
import replicas
import torch

from adaptdl_elastic.torch._noise import Measurement
from adaptdl_elastic.torch.gradient_noise_scale import AdamGradientNoiseScale, GradientNoiseScale

SEEDS = 5
LEARNING_RATES = pytest.mark.parametrize("lr", [0.0, 0.01, 0.1])


@pytest.mark.timeout(600)
@pytest.mark.slow
@pytest.mark.usefixtures("alone")
@LEARNING_RATES
def test_one_replica_splits_its_batch_by_signs(lr: float) -> None:
    """Where AdaptDL's differenced estimator has |G|² = 0 at a learning rate of 0.1."""
    for name, relative in regression.train_seeds(lr, SEEDS).items():
        assert relative == pytest.approx(1.0, abs=0.15), name


@pytest.mark.timeout(600)
@pytest.mark.slow
@LEARNING_RATES
def test_replicas_are_the_parts_of_a_batch(lr: float) -> None:
    for found in replicas.run(regression.train_seeds, 2, lr, SEEDS, timeout=560):
        for name, relative in found.items():
            assert relative == pytest.approx(1.0, abs=0.05), name


@pytest.mark.usefixtures("alone")
def test_measured_now_and_then_the_means_are_the_same() -> None:
    for name, relative in regression.train_seeds(0.1, SEEDS, every_step=False).items():
        assert relative == pytest.approx(1.0, abs=0.15), name


@pytest.mark.usefixtures("alone")
def test_the_closed_form_is_right() -> None:
    problem = regression.Problem(features=8)
    delta = torch.linspace(-1, 1, 8)
    x, noise = problem.batch(400_000, torch.Generator().manual_seed(0))
    gradients = x * (x @ delta[:, None] - noise)
    sqr, var = problem.truth(delta)
    assert float(gradients.mean(0).square().sum()) == pytest.approx(sqr, rel=0.02)
    assert float(gradients.var(0).sum()) == pytest.approx(var, rel=0.02)


def optimizer(groups: int = 1) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.ones(2))]} for _ in range(groups)], lr=0.1)


def fed(sqr: float, var: float) -> GradientNoiseScale:
    gns = GradientNoiseScale(None, optimizer())
    gns.record(Measurement(np.array([sqr + var]), np.array([var]), 1.0), 0)
    return gns


def test_gain_and_progress() -> None:
    gns = fed(2.0, 6.0)
    assert (gns.sqr_avg(), gns.var_avg()) == (2.0, 6.0)
    assert gns.gain(1.0) == 1.0
    assert gns.gain(3.0) == pytest.approx((6 + 2) / (6 / 3 + 2))
    gns.set_progress(10.0)
    gns.advance(3.0)
    assert gns.get_progress() == pytest.approx(12.0)
    assert gns.batches_seen == 3.0


def test_nothing_is_gained_before_anything_is_known() -> None:
    assert GradientNoiseScale(None, optimizer()).gain(8.0) == 1.0


def test_inf_and_nan_are_skipped_and_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="adaptdl_elastic")
    gns = fed(2.0, 6.0)
    assert not gns.record(Measurement(np.array([np.inf]), np.array([1.0]), 1.0), 3)
    assert gns.skipped == 1
    assert "step 3" in caplog.text
    assert gns.sqr_avg() == 2.0


def test_accumulation_is_counted() -> None:
    gns = GradientNoiseScale(None, optimizer(), accum_scale=2.0)
    assert gns.accum_scale == 2.0
    assert gns.should_zero_grad
    gns.count_micro_batch()
    assert gns.accum_count == 1
    assert not gns.should_zero_grad
    gns.set_accum_scale(4.0)
    assert gns.should_zero_grad


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_is_a_number_above_zero(scale: float) -> None:
    gns = fed(1.0, 1.0)
    with pytest.raises(ValueError, match="scale"):
        gns.gain(scale)
    with pytest.raises(ValueError, match="scale"):
        gns.set_accum_scale(scale)


def test_other_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="smoothing"):
        GradientNoiseScale(None, optimizer(), smoothing=1.0)
    with pytest.raises(ValueError, match="progress"):
        fed(1.0, 1.0).set_progress(-1.0)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_the_preconditioner_is_what_torchs_optimizer_divides_by(kind: Any, amsgrad: bool) -> None:
    """Adam's step without momentum is −lr·g/P: P read off a step of torch's own."""
    if kind is torch.optim.RMSprop and amsgrad:
        pytest.skip("RMSprop has no amsgrad")
    torch.manual_seed(0)
    options = {"alpha": 0.9} if kind is torch.optim.RMSprop else {"betas": (0.0, 0.9), "amsgrad": amsgrad}
    if kind is torch.optim.AdamW:
        options["weight_decay"] = 0.0
    weight = torch.nn.Parameter(torch.zeros(3, 4, dtype=torch.float64))
    theirs = kind([weight], lr=1.0, **options)
    gns = AdamGradientNoiseScale(None, theirs)
    assert gns.preconditioner is not None
    assert gns.preconditioner(weight, theirs.param_groups[0]) is None, "nothing to divide by yet"
    for _ in range(5):
        before = weight.detach().clone()
        weight.grad = torch.randn(3, 4, dtype=torch.float64)
        theirs.step()
    divisor = gns.preconditioner(weight, theirs.param_groups[0])
    assert divisor is not None
    step = (weight.detach() - before).flatten()
    torch.testing.assert_close(-weight.grad.flatten() / divisor(slice(None)), step)


def test_statistics_survive_a_checkpoint() -> None:
    before = fed(2.0, 6.0)
    before.advance(3.0)
    after = GradientNoiseScale(None, optimizer())
    after.load_state_dict(before.state_dict())
    assert after.state_dict() == before.state_dict()
    assert after.gain(4.0) == before.gain(4.0)
    with pytest.raises(ValueError, match="parameter groups"):
        GradientNoiseScale(None, optimizer(2)).load_state_dict(before.state_dict())
