"""The search for the largest batch that fits."""

from __future__ import annotations

import pytest
import torch
from small_memory import check

from adaptdl_elastic.torch._gradient.memory_search import largest_fitting, passes_fit


@pytest.mark.parametrize(
    ("most", "first", "goal", "found"),
    [(100, 8, 64, None), (30, 12, 960, 30), (5, 8, 64, 5), (0, 8, 64, 0), (64, 8, 64, None), (63, 8, 64, 60)],
)
def test_sizes_are_doubled_then_halved(most: int, first: int, goal: int, found: int | None) -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= most

    assert largest_fitting(fits, first, goal) == found
    assert len(tried) == len(set(tried)) < 10
    assert max(tried) <= min(goal, 2 * max(most, first))


def test_a_trial_leaves_no_trace() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Dropout())
    sizes: list[int] = []
    net.register_forward_pre_hook(
        lambda _, inputs: (sizes.append(len(inputs[0])), check(len(inputs[0]), 6))[1]
    )
    before = {name: value.clone() for name, value in net.state_dict().items()}
    inputs = (torch.randn(3, 2),)
    state = torch.get_rng_state()
    fits = [passes_fit(net, inputs, {}, 3, None, size, 100) for size in (6, 7)]
    assert (fits, sizes) == ([True, False], [6, 7])
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(param.grad is None for param in net.parameters())
    assert torch.equal(torch.get_rng_state(), state)
