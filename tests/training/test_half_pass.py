"""A model that runs once more on half of a batch, to measure the variance of its gradient on one replica."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import insides
import numpy as np
import parallel_cases as cases
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from adaptdl_elastic import _session
from adaptdl_elastic._session import current as current_session
from adaptdl_elastic.torch._elastic.recovery import Recovery
from adaptdl_elastic.torch._gradient.comm_hook import Norms
from adaptdl_elastic.torch._gradient.half_pass import ForwardPass, difference, variance
from adaptdl_elastic.torch.parallel import AdaptiveDataParallel

pytestmark = pytest.mark.usefixtures("alone")


class Model(nn.Module):
    """Returns its loss. The target has the variance 1, so the gradient's variance is that of x·y."""

    def __init__(self, dropout: float = 0.0, checkpointed: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 1, bias=False)
        self.norm = nn.BatchNorm1d(20, affine=False)
        self.dropout, self.checkpointed = nn.Dropout(dropout), checkpointed
        nn.init.constant_(self.layer.weight, 0.1)

    def forward(
        self, x: torch.Tensor, y: torch.Tensor, num_items_in_batch: int | None = None
    ) -> torch.Tensor:
        self.norm(x)  # moves its running statistics
        x = self.dropout(x)
        output = checkpoint(self.layer, x, use_reentrant=True) if self.checkpointed else self.layer(x)
        loss: torch.Tensor = 0.5 * (output - y).square().sum() / (num_items_in_batch or len(x))
        return loss


def batch(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, 20, requires_grad=True), torch.randn(count, 1)


def truth(model: Model) -> float:
    """tr Σ by brute force."""
    x, y = batch(40_000)
    with torch.no_grad():
        x = model.dropout(x)
        gradients = x * (model.layer(x) - y)
    return float(gradients.var(0).sum())


def step(adp: AdaptiveDataParallel, after: Callable[[], object] = lambda: None, **named: int) -> None:
    """Take a step with a batch of 16; `after` is called before it, with the gradients there."""
    adp.optimizer.zero_grad()
    adp(*batch(16), **named).backward()
    after()
    adp.optimizer.step()


def measured(model: Model, steps: int, after: Callable[[], object] = lambda: None, **named: int) -> float:
    """tr Σ as the library tells it, at fixed parameters."""
    adp = cases.adaptive(model, 0.0)
    cases.measure_always(adp)
    insides.seed_signs(adp, 0)
    for _ in range(steps):
        step(adp, after, **named)
    insides.collect(adp)
    return adp.gns.var_avg() * 16


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "reentrant checkpointing"])
def test_the_variance_is_that_of_the_samples(checkpointed: bool) -> None:
    torch.manual_seed(0)
    model = Model(checkpointed=checkpointed)
    assert measured(model, 500) == pytest.approx(truth(model), rel=0.1)


def test_the_variance_is_the_same_in_other_loops() -> None:
    """Clipped gradients, and losses as those of transformers."""

    def of(clip: float = 1e9, **named: int) -> float:
        _session.reset()
        torch.manual_seed(0)
        model = Model()
        return measured(model, 20, lambda: nn.utils.clip_grad_norm_(model.parameters(), clip), **named)

    expected = pytest.approx(of(), rel=1e-3)
    assert [of(clip=0.01), of(num_items_in_batch=16)] == [expected] * 2


def test_with_dropout_the_variance_is_that_of_samples_and_masks() -> None:
    """The half has other masks than the whole: a difference of the two would count them twice."""
    torch.manual_seed(0)
    model = Model(dropout=0.5)
    assert measured(model, 600) == pytest.approx(truth(model), rel=0.15)


def test_nothing_of_the_training_is_changed_by_it() -> None:
    def train(sampled: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Model(dropout=0.5)
        adp = cases.adaptive(model, name=f"sampled {sampled}")
        cases.measure_always(adp)
        insides.run_halves(adp)
        if not sampled:
            adp.gns.settles_after = 1000
        for _ in range(8):
            step(adp)
        assert adp.gns.known == sampled
        return [*model.parameters(), *model.buffers(), torch.get_rng_state()]

    for one, other in zip(train(True), train(False), strict=True):
        assert torch.equal(one, other)


class OutOfMemory(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")


class HalfTooLarge(Model):
    """Has memory for a backward pass of a whole batch, and not for one of half of it besides."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = super().forward(x, y)
        return OutOfMemory.apply(loss) if len(x) < 16 else loss  # type: ignore[no-any-return, no-untyped-call]


def test_a_half_that_does_not_fit_into_memory_costs_a_measurement_and_no_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Recovery, "why_not_repeatable", lambda self: None)  # as in a data loop
    model = HalfTooLarge()
    adp = cases.adaptive(model)
    cases.measure_always(adp)
    insides.say_samples(adp, 16)
    for _ in range(3):
        before = model.layer.weight.clone()
        step(adp)
        assert model.layer.weight.grad is not None
        expected = before - 0.1 * model.layer.weight.grad
        assert adp.failure is None
        torch.testing.assert_close(model.layer.weight, expected)
    assert not adp.gns.known


def pair(model: nn.Module, x: torch.Tensor, samples: int | None = None) -> ForwardPass:
    return ForwardPass(model, ((x,), {}), samples, None, [torch.ones(())])


def test_a_batch_that_cannot_be_halved_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))
    norms = Norms(lambda: [{"params": list(model.parameters())}])
    generator = torch.Generator()
    with pytest.raises(ValueError, match="no input has a dimension of 5 samples"):
        variance([pair(model, torch.ones(4, 3), 5)], [], torch.ones(1), norms, generator)
    with pytest.raises(ValueError, match="a batch of 1 cannot be split"):
        variance([pair(model, torch.ones(1, 3))], [], torch.ones(1), norms, generator)
    assert all(p.grad is None for p in model.parameters())


def test_a_difference_undoes_one_factor_and_no_more() -> None:
    first, second = torch.zeros(2), torch.zeros(3)
    norms = Norms(lambda: [{"params": [first]}, {"params": [second]}])
    mean = {first: torch.tensor([3.0, 4.0]), second: torch.tensor([1.0, 2.0, 2.0])}
    mean_sqr = norms.squares(mean.items())
    part = lambda: [(p, g + 1.0) for p, g in mean.items()]  # noqa: E731
    halved = [(p, g / 2) for p, g in mean.items()]
    told = difference(part(), halved, mean_sqr, norms)
    assert told is not None
    np.testing.assert_allclose(told.numpy(), [2.0, 3.0], rtol=1e-5)
    assert difference(part(), [(first, mean[first] / 2), (second, mean[second])], mean_sqr, norms) is None


@pytest.mark.parametrize(
    ("returns_its_loss", "name"),
    [(True, "half of the batch again"), (False, "two halves of the batch by signs")],
)
def test_a_report_says_how_the_noise_was_measured_and_how_well(returns_its_loss: bool, name: str) -> None:
    model = Model() if returns_its_loss else nn.Linear(20, 1)
    adp = cases.adaptive(model, 0.0)
    cases.measure_always(adp)
    for _ in range(12):
        if returns_its_loss:
            step(adp)
        else:
            cases.fit(adp, adp.optimizer, *batch(16))
    hints = current_session().metrics.hints()
    assert hints.estimator == name
    assert hints.grad_error == pytest.approx(adp.gns.sqr_error())


def test_with_adam_a_parameter_that_is_never_used_does_not_hinder() -> None:
    model = Model()
    model.unused = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    adp = AdaptiveDataParallel(model, optimizer, find_unused_parameters=True)
    cases.measure_always(adp)
    for _ in range(20):
        step(adp)
    insides.collect(adp)
    assert adp.gns.known
