"""A GradScaler that several optimizers share, while gradients accumulate."""

from __future__ import annotations

import copy

import parallel_cases as cases
import pytest
import torch
from fake_loader import FakeLoader

from adaptdl_elastic.torch.parallel import AdaptiveDataParallel
from adaptdl_elastic.torch.scaling_rules import LinearScale

pytestmark = pytest.mark.usefixtures("alone")

INF = float("inf")


def step(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("other_first", [False, True])
@pytest.mark.parametrize("attached", [False, True], ids=["plain", "AdaptiveDataParallel"])
def test_the_scale_does_not_change_within_a_sum_of_gradients(other_first: bool, attached: bool) -> None:
    """Each of two optimizers makes it grow after its step; what the other one has accumulated counts."""
    model, other = cases.linear(), cases.linear()
    whole, whole_other = copy.deepcopy(model), copy.deepcopy(other)
    plain = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (whole, whole_other)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, other)]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    adp = AdaptiveDataParallel(model, optimizers[0], mp_scaler=scaler, scaling_rule=LinearScale())
    seen: torch.nn.Module = other
    if attached:
        seen = AdaptiveDataParallel(
            other, optimizers[1], mp_scaler=scaler, scaling_rule=LinearScale(), name="other"
        )
    models = [(adp, optimizers[0]), (seen, optimizers[1])]
    scales = []
    for window in range(3):
        x, y = cases.samples(12, 12 * window)
        for chunk in range(3):
            part = slice(4 * chunk, 4 * chunk + 4)
            with FakeLoader([[4], [4], [4]], 12, 4, chunk=chunk, training=True):
                for each, optimizer in models[::-1] if other_first else models:
                    step(scaler, optimizer, (each(x[part]) - y[part]).square().mean())
            if not attached:
                plain[1].zero_grad()
                (whole_other(x[part]) - y[part]).square().mean().backward()
                plain[1].step()
        for each, optimizer in zip((whole, whole_other)[: 1 + attached], plain, strict=False):
            optimizer.zero_grad()
            (each(x) - y).square().mean().backward()
            optimizer.step()
        torch.testing.assert_close(cases.flat(model), cases.flat(whole))
        torch.testing.assert_close(cases.flat(other), cases.flat(whole_other))
        scales.append(scaler.get_scale())
    assert scales[0] > 8.0
    assert scales == sorted(set(scales)), "it grows after each window"


@pytest.mark.parametrize("chunk_with_inf", [0, 1])
def test_an_infinity_of_another_optimizer_in_a_window_counts_at_its_end(chunk_with_inf: int) -> None:
    model, other = cases.linear(), cases.linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other_optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    adp = AdaptiveDataParallel(model, optimizer, mp_scaler=scaler)
    x, y = cases.samples(4)
    scales = []
    for chunk in range(2):
        with FakeLoader([[4], [4]], 8, 4, chunk=chunk, training=True):
            optimizer.zero_grad()
            other_optimizer.zero_grad()
            scaler.scale((adp(x) - y).square().mean()).backward()
            factor = INF if chunk == chunk_with_inf else 1.0
            scaler.scale((other(x) - y).square().mean() * factor).backward()
            before = cases.flat(other)
            scaler.step(optimizer)
            scaler.step(other_optimizer)
            scaler.update()
            assert torch.equal(before, cases.flat(other)) == (chunk == chunk_with_inf)
        scales.append(scaler.get_scale())
    assert scales == [8.0, 4.0]
    assert (adp.gns.steps, adp.gns.skipped) == (1, 0)
    step(scaler, optimizer, (adp(x) - y).square().mean())
    assert scaler.get_scale() == 8.0, "it is over"


def test_a_disabled_scaler_may_be_shared() -> None:
    model, other = cases.linear(), cases.linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other_optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    adp = AdaptiveDataParallel(model, optimizer, mp_scaler=scaler)
    x, y = cases.samples(4)
    for chunk in range(2):
        with FakeLoader([[4], [4]], 8, 4, chunk=chunk, training=True):
            step(scaler, other_optimizer, (other(x) - y).square().mean())
            step(scaler, optimizer, (adp(x) - y).square().mean())
    assert adp.gns.steps == 1
