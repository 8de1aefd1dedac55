"""Every rule against its paper's formula, and against torch's optimizers."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import insides
import numpy as np
import parallel_cases as cases
import pytest
import torch
from fake_loader import FakeLoader

from adaptdl_elastic import _session
from adaptdl_elastic._torch_versions import muon
from adaptdl_elastic.torch import scaling_rules
from adaptdl_elastic.torch._gradient.estimator import Measurement
from adaptdl_elastic.torch.gradient_noise_scale import AdamGradientNoiseScale
from adaptdl_elastic.torch.parallel import AdaptiveDataParallel
from adaptdl_elastic.torch.scaling_rules import (
    AdamScale,
    AdamSqrtScale,
    AdaScale,
    LEGWScale,
    LinearScale,
    SqrtScale,
)

pytestmark = pytest.mark.usefixtures("alone")


def model_with(rule: Any, kind: Any = torch.optim.SGD, **options: Any) -> AdaptiveDataParallel:
    model = cases.linear()
    groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.5}]
    return AdaptiveDataParallel(model, kind(groups, lr=0.1, **options), scaling_rule=rule)


def feed(adp: AdaptiveDataParallel) -> tuple[np.ndarray, np.ndarray]:
    sqr, var = np.array([1.0, 3.0]), np.array([8.0, 2.0])
    adp.gns.record(Measurement(sqr + var, var, 1.0), 0)
    return sqr, var


def test_adascale_is_the_gain_of_each_group() -> None:
    """r_t = (σ² + μ²)/(σ²/S + μ²): Johnson et al., 2020, section 3."""
    adp = model_with(AdaScale())
    sqr, var = feed(adp)
    for scale in (2.0, 5.5, 64.0):
        np.testing.assert_allclose(adp.scaling_rule.scale_lr(scale), (var + sqr) / (var / scale + sqr))


def test_adamscale_is_its_square_root_in_adams_metric() -> None:
    adp = model_with(AdamScale(), torch.optim.Adam)
    sqr, var = feed(adp)
    assert isinstance(adp.gns, AdamGradientNoiseScale)
    np.testing.assert_allclose(adp.scaling_rule.scale_lr(4.0), ((var + sqr) / (var / 4.0 + sqr)) ** 0.5)
    assert AdamScale(power=1.0).power == 1.0
    with pytest.raises(ValueError, match="power"):
        AdamScale(power=0.0)


def test_linear_and_square_root() -> None:
    assert LinearScale().scale_lr(7.0) == 7.0
    assert SqrtScale().scale_lr(9.0) == 3.0


def test_legw_warms_up_linearly_over_scale_times_the_epochs() -> None:
    """You et al., 2019: batch ×S, learning rate ×√S, warm-up epochs ×S."""
    rule = LEGWScale(base_warmup_epochs=2, data_size=80)
    adp = model_with(rule)
    with pytest.raises(RuntimeError, match="AdaptiveDataLoader"):
        rule.scale_lr(1.0)
    adp._batch_sizes.last = 8
    factors = []
    for _ in range(40):  # ten steps of the initial batch size an epoch; at scale 4, two and a half
        factors.append(rule.scale_lr(4.0))
        adp.gns.advance(4.0)
    warmup = 4 * 2 * 80 / (4 * 8)
    expected = [math.sqrt(4.0) * min(1.0, (step + 1) / warmup) for step in range(40)]
    assert factors == pytest.approx(expected)
    with pytest.raises(ValueError, match="base_warmup_epochs"):
        LEGWScale(-1, 10)
    with pytest.raises(ValueError, match="data_size"):
        LEGWScale(1, 0)


@pytest.mark.parametrize("rule", [AdaScale(), LinearScale(), SqrtScale()])
def test_a_step_is_torchs_at_the_scaled_learning_rate(rule: Any) -> None:
    adp = model_with(rule, momentum=0.9)
    feed(adp)
    insides.measure_no_more(adp)  # no new measurements: the factors stay
    oracle = cases.linear()
    factor = np.broadcast_to(rule.scale_lr(3.0), (2,))
    theirs = torch.optim.SGD(
        [
            {"params": [oracle.weight], "lr": 0.1 * factor[0]},
            {"params": [oracle.bias], "lr": 0.5 * factor[1]},
        ],
        lr=0.1,
        momentum=0.9,
    )
    x, y = cases.samples(12)
    with FakeLoader([[12]], 4, 12):
        for _ in range(4):
            for model, optimizer in ((adp, adp.optimizer), (oracle, theirs)):
                cases.fit(model, optimizer, x, y)
    assert adp.scale == 3.0
    assert torch.equal(cases.flat(adp.module), cases.flat(oracle))
    assert [group["lr"] for group in adp.optimizer.param_groups] == [0.1, 0.5], "put back"


@pytest.mark.parametrize(
    ("kind", "decay", "scaled_decay"),
    [(torch.optim.AdamW, 0.01, 0.02), (torch.optim.Adam, 0.01, 0.01)],
)
def test_adams_square_root_rule_is_malladis(kind: Any, decay: float, scaled_decay: float) -> None:
    """lr' = √S lr, 1 − β' = S (1 − β), ε' = ε/√S (definition 5.3); AdamW's lr' · decay' = S · lr · decay."""
    model = cases.linear()
    adp = AdaptiveDataParallel(
        model,
        kind(model.parameters(), lr=0.1, betas=(0.9, 0.99), eps=1e-3, weight_decay=decay),
        scaling_rule=AdamSqrtScale(),
    )
    oracle = cases.linear()
    theirs = kind(oracle.parameters(), lr=0.2, betas=(0.6, 0.96), eps=5e-4, weight_decay=scaled_decay)
    x, y = cases.samples(16)
    with FakeLoader([[16]], 4, 16):
        for _ in range(4):
            for net, optimizer in ((adp, adp.optimizer), (oracle, theirs)):
                cases.fit(net, optimizer, x, y)
    assert adp.scale == 4.0
    torch.testing.assert_close(cases.flat(adp.module), cases.flat(oracle), rtol=1e-6, atol=0.0)
    [group] = adp.optimizer.param_groups
    assert (group["lr"], group["betas"], group["eps"]) == (0.1, (0.9, 0.99), 1e-3), "put back"
    assert group["weight_decay"] == decay


def test_adams_square_root_rule_beyond_its_range_and_its_optimizers() -> None:
    rule = AdamSqrtScale(weight_decay=False)
    group = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "decoupled_weight_decay": True}
    changed = rule.scale_options(16.0, group)
    assert changed["betas"] == (0.0, pytest.approx(0.984))
    assert "weight_decay" not in changed
    assert rule.scale_options(1.0, group) == {}
    with pytest.raises(ValueError, match="betas and eps, which SGD does not have"):
        model_with(AdamSqrtScale())


def test_adams_square_root_rule_keeps_the_path_over_samples() -> None:
    """The loss after the same samples is that of the small batch; with the rate alone it is not.

    A quadratic in 512 dimensions whose gradient has ten times as much noise as signal; ε is as large as the
    noise, so that it matters.
    """

    def mean_loss(scale: int, options: dict[str, Any]) -> float:
        generator = torch.Generator().manual_seed(0)
        weights = torch.nn.Parameter(torch.full((512,), 1.0))
        optimizer = torch.optim.Adam([weights], lr=0.01, betas=(0.9, 0.99), eps=10.0)
        optimizer.param_groups[0].update(options, lr=0.01 * math.sqrt(scale))
        losses = []
        for _ in range(3200 // scale):
            noise = torch.randn(512, generator=generator) * 10.0 / math.sqrt(scale)
            weights.grad = weights.detach() + noise
            optimizer.step()
            losses.append(float((weights.detach() ** 2).mean()))
        return sum(losses) / len(losses)

    group = {"betas": (0.9, 0.99), "eps": 10.0}
    small = mean_loss(1, {})
    assert mean_loss(8, AdamSqrtScale().scale_options(8.0, group)) == pytest.approx(small, rel=0.1)
    assert mean_loss(8, {}) > 1.3 * small


@pytest.mark.parametrize("rule", [AdaScale(), AdamScale(), LinearScale(), SqrtScale()])
def test_scale_one_changes_nothing(rule: Any) -> None:
    adp = model_with(rule)
    feed(adp)
    assert np.all(np.asarray(rule.scale_lr(1.0)) == 1.0)


def test_the_learning_rate_is_put_back_when_the_step_raises() -> None:
    adp = model_with(LinearScale())
    insides.scale_next_batch(adp, 4.0)
    adp.scaling_rule._step = lambda: (_ for _ in ()).throw(RuntimeError("disk on fire"))
    with pytest.raises(RuntimeError, match="on fire"):
        adp.optimizer.step()
    assert [group["lr"] for group in adp.optimizer.param_groups] == [0.1, 0.5]


def test_a_learning_rate_that_is_a_tensor() -> None:
    model = cases.linear()
    rate = torch.tensor(0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, capturable=False, foreach=False)
    adp = AdaptiveDataParallel(model, optimizer, scaling_rule=SqrtScale())
    insides.scale_next_batch(adp, 4.0)
    x, y = cases.samples(4)
    ((model(x) - y) ** 2).mean().backward()
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        (torch.optim.SGD, AdaScale),
        (torch.optim.Adam, AdamScale),
        (torch.optim.AdamW, AdamScale),
        (type("SGDScheduleFree", (torch.optim.Adagrad,), {}), AdaScale),
        (type("RAdamScheduleFree", (torch.optim.Adagrad,), {}), AdamScale),
    ],
)
def test_defaults(kind: Any, rule: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert type(model_with(None, kind).scaling_rule) is rule
    assert not caplog.text


class AdamWScheduleFree(torch.optim.Optimizer):
    """Keep what the package's one keeps: second moments by parameter, the count of steps by group."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "k": 0})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta = group["betas"][1]
            for p in group["params"]:
                square = self.state[p].setdefault("exp_avg_sq", torch.zeros_like(p))
                square.mul_(beta).addcmul_(p.grad, p.grad, value=1 - beta)
            group["k"] += 1


def test_the_noise_scale_of_an_optimizer_that_counts_steps_by_group() -> None:
    adp = model_with(None, AdamWScheduleFree)
    with FakeLoader([[12]], 4, 12):
        for _ in range(15):
            cases.fit(adp, adp.optimizer, *cases.samples(12))
    assert adp.gns.known
    # the same gradient in every step, since nothing moves: P is its absolute value
    weight, (group, *_) = adp.module.weight, adp.optimizer.param_groups
    divisor = adp.gns.preconditioner(weight, group)(slice(None))
    torch.testing.assert_close(divisor, weight.grad.abs().flatten())


def test_adamsqrtscale_refuses_schedule_free_optimizers() -> None:
    with pytest.raises(ValueError, match=r"AdamWScheduleFree.*AdamScale or SqrtScale"):
        model_with(AdamSqrtScale(), AdamWScheduleFree)


@pytest.mark.skipif(not muon(), reason="torch.optim.Muon came with torch 2.9")
def test_muon_gets_the_root_of_the_plain_gradients_gain() -> None:
    model = torch.nn.Linear(3, 2, bias=False)
    adp = AdaptiveDataParallel(model, torch.optim.Muon(model.parameters(), lr=0.1))
    sqr, var = np.array([1.0]), np.array([8.0])
    adp.gns.record(Measurement(sqr + var, var, 1.0), 0)
    assert type(adp.scaling_rule) is AdaScale
    assert not isinstance(adp.gns, AdamGradientNoiseScale)
    np.testing.assert_allclose(adp.scaling_rule.scale_lr(4.0), (9.0 / 3.0) ** 0.5)


def test_the_choice_for_an_optimizer_that_none_is_derived_for_is_named_where_a_loader_autoscales(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    adp = model_with(None, torch.optim.Adagrad)
    assert type(adp.scaling_rule) is AdaScale
    monkeypatch.setattr(adp, "begin_step", lambda closure: True)
    for adaptive in (False, True):
        monkeypatch.setattr(_session.current(), "training_loader", SimpleNamespace(adaptive=adaptive))
        adp.scaling_rule.step()
        assert ("AdaScale, derived for SGD, is chosen" in caplog.text) is adaptive
    assert "Adagrad" in caplog.text


def test_a_rule_of_ones_own() -> None:
    class Fixed(scaling_rules.ScalingRuleBase):
        def scale_lr(self, scale: float) -> float:
            return 2.0

    adp = model_with(Fixed())
    assert adp.lr_factor == 2.0
    with pytest.raises(NotImplementedError, match="ScalingRuleBase"):
        scaling_rules.ScalingRuleBase().scale_lr(1.0)
    with pytest.raises(RuntimeError, match="one Fixed serves one model"):
        cases.adaptive(scaling_rule=adp.scaling_rule, name="b")
    with pytest.raises(RuntimeError, match="not in use"):
        _ = Fixed().adp
