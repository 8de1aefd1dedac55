"""A loss that is a sum over samples is found out in the first step, and no other loss is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import adaptdl_elastic.torch as adl

pytestmark = pytest.mark.usefixtures("alone")

Loss = Callable[[Tensor, Tensor], Tensor]


def square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target) ** 2


def train(loss_of: Loss, path: Path, scaler: Any = None) -> Iterator[str]:
    """Train for one epoch, and yield the messages of problems with the loss."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.ReLU(), torch.nn.Linear(6, 5))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    model = adl.AdaptiveDataParallel(net, optimizer, mp_scaler=scaler)
    data = torch.utils.data.TensorDataset(torch.randn(24, 3), torch.rand(24, 5).softmax(1))
    for _ in adl.remaining_epochs_until(1):
        for inputs, targets in adl.AdaptiveDataLoader(data, batch_size=8):
            optimizer.zero_grad()
            loss = loss_of(model(inputs), targets)
            (loss if scaler is None else scaler.scale(loss)).backward()
            optimizer.step()
    for line in (path / "events").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "warning" and event["about"].startswith("the loss"):
            yield event["message"]


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda o, t: F.cross_entropy(o, t.argmax(1), reduction="sum"),
        lambda o, t: F.cross_entropy(o, t.argmax(1), reduction="none").sum(),
        lambda o, t: F.mse_loss(o, t, reduction="sum"),
        lambda o, t: -(o.log_softmax(1)[:, 0]).sum(),
        # as a variational autoencoder's
        lambda o, t: (
            F.binary_cross_entropy_with_logits(o, t, reduction="sum") - 0.5 * torch.sum(1 + o - o.exp())
        ),
        lambda o, t: 0.5 * (0.5 * square(o, t)).sum(),
        lambda o, t: square(o, t).mean(1).mean() + square(o, t).sum(),
    ],
)
def test_a_loss_that_is_a_sum_is_reported_once_with_the_remedy(loss_of: Loss, tmp_path: Path) -> None:
    (message,) = train(loss_of, tmp_path)
    assert "test_loss_reduction.py:" in message
    assert message.endswith("give the loss function reduction='mean'")


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda o, t: F.cross_entropy(o, t),
        lambda o, t: F.cross_entropy(o, t.argmax(1), label_smoothing=0.1),
        lambda o, t: square(o, t).sum() / len(o),
        lambda o, t: 100 * square(o, t).sum() * (1 / len(o)),
        lambda o, t: (square(o, t) / len(o)).sum(),
        lambda o, t: (square(o, t).mean(1) * torch.full((8,), 1 / 8)).sum(),
        lambda o, t: square(o, t).mean(0).sum(),
        lambda o, t: o.repeat(1, 8).var(0).sum(),
        lambda o, t: torch.stack([F.cross_entropy(o, t)] * 8).sum(),
        lambda o, t: F.kl_div(o.log_softmax(1), t, reduction="batchmean"),
        lambda o, t: square(o, t).mean() + sum(p.pow(2).sum() for p in [torch.ones(8, requires_grad=True)]),
    ],
)
def test_a_mean_over_samples_is_not_reported(loss_of: Loss, tmp_path: Path) -> None:
    assert list(train(loss_of, tmp_path)) == []


def unit(output: Tensor) -> Tensor:
    return F.normalize(output)


@pytest.mark.parametrize(
    ("loss_of", "name"),
    [
        (lambda o, t: F.cross_entropy(unit(o) @ unit(o).T, torch.arange(8)), "Mm"),
        (lambda o, t: F.cross_entropy(torch.einsum("nd,md->nm", unit(o), unit(o)), torch.arange(8)), "Bmm"),
        (lambda o, t: torch.cdist(o, o).max(1).values.mean(), "Cdist"),
        (lambda o, t: (torch.cat([o, o]) @ torch.cat([o, o]).T).exp().mean(), "Mm"),
        (lambda o, t: (o.T @ o / 8 - torch.eye(5)).square().sum(), "Mm"),
        (lambda o, t: 1 - 2 * (o * t).sum() / (o.sum() + t.sum()), "Div"),
        (lambda o, t: 1 - (2 * (o * t).sum(0) / (o.sum(0) + t.sum(0))).mean(), "Div"),
    ],
)
def test_a_loss_that_compares_samples_is_reported_once_with_the_remedy(
    loss_of: Loss, name: str, tmp_path: Path
) -> None:
    (message,) = train(loss_of, tmp_path)
    assert f"({name})" in message
    assert "compute it of adl.gather(output)" in message


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda o, t: F.cross_entropy(unit(adl.gather(o)) @ unit(adl.gather(o)).T, torch.arange(8)),
        lambda o, t: F.cross_entropy(unit(o) @ unit(adl.gather(o)).T, torch.arange(8)),
        lambda o, t: F.cross_entropy(adl.gather(o), t.argmax(1), reduction="sum"),
        # of each sample alone, or against constants
        lambda o, t: (o[:, :, None] @ o[:, None, :]).mean(),
        lambda o, t: F.cross_entropy(unit(o) @ unit(t).T, torch.arange(8)),
        lambda o, t: o.std(1).mean() + (o / o.sum(1, keepdim=True)).mean(),
        lambda o, t: (2 * (o * t).sum(1) / (o.sum(1) + t.sum(1))).mean(),
        lambda o, t: (o @ torch.nn.Linear(5, 8).weight.T).mean(),
    ],
)
def test_a_loss_of_gathered_rows_or_of_each_sample_is_not_reported(loss_of: Loss, tmp_path: Path) -> None:
    assert list(train(loss_of, tmp_path)) == []


def test_the_scale_of_a_grad_scaler_does_not_hide_a_sum(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu")
    (message,) = train(lambda o, t: F.mse_loss(o, t, reduction="sum"), tmp_path, scaler)
    assert "(MseLoss)" in message
