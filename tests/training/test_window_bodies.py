"""Bodies of training loops as people write them: in windows of micro-batches they train as without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import adaptdl_elastic.torch as adl
from adaptdl_elastic import _session
from adaptdl_elastic.torch._runtime import consensus

pytestmark = pytest.mark.usefixtures("alone")

NUMBERS = torch.randn(44, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def loss(model: nn.Module, x: torch.Tensor, of: float = 1.0) -> None:
    model(of * x).square().mean().backward()


def penalty(model: nn.Module) -> None:
    torch.stack([p.square().sum() for p in model.parameters()]).sum().mul(0.1).backward()


def plain(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss(model, x)
    optimizer.step()


def two_losses(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss(model, x)
    loss(model, x, of=2.0)
    optimizer.step()


def dropped_by_the_next(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    """As a judge that its generator is trained through afterwards."""
    plain(model, optimizer, x)
    loss(model, x, of=2.0)


def dropped_by_the_next_after_zero_grad(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    plain(model, optimizer, x)
    optimizer.zero_grad()
    loss(model, x, of=2.0)


def dropped_before(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    loss(model, x, of=2.0)
    plain(model, optimizer, x)


def dropped_before_and_zero_grad_last(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    loss(model, x, of=2.0)
    plain(model, optimizer, x)
    optimizer.zero_grad()


def dropped_behind(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    loss(model, x)
    optimizer.step()
    optimizer.zero_grad()
    loss(model, x, of=2.0)
    optimizer.zero_grad()


def dropped_before_and_behind(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    loss(model, x, of=3.0)
    plain(model, optimizer, x)
    loss(model, x, of=2.0)
    optimizer.zero_grad()


def penalty_behind(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    """With a backward of its own, which does not go through the module's outputs."""
    optimizer.zero_grad()
    loss(model, x)
    penalty(model)
    optimizer.step()


def penalty_before(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    penalty(model)
    loss(model, x)
    optimizer.step()


BODIES: list[Callable[[Any, Any, torch.Tensor], None]] = [
    plain,
    two_losses,
    dropped_by_the_next,
    dropped_by_the_next_after_zero_grad,
    dropped_before,
    dropped_before_and_zero_grad_last,
    dropped_behind,
    dropped_before_and_behind,
    penalty_behind,
    penalty_before,
]


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loader_of(most: int) -> adl.AdaptiveDataLoader[torch.Tensor]:
    """Batches of 12, in micro-batches of `most`."""
    loader: adl.AdaptiveDataLoader[torch.Tensor] = adl.AdaptiveDataLoader(NUMBERS, batch_size=12)  # type: ignore[arg-type]
    loader.autoscale_batch_size(12, (1, most), gradient_accumulation=True)
    return loader


@pytest.mark.parametrize("most", [5, 12])
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_a_body_trains_as_without_windows(body: Callable[[Any, Any, torch.Tensor], None], most: int) -> None:
    model, optimizer = made()
    adp = adl.AdaptiveDataParallel(model, optimizer)
    loader = loader_of(most)
    for _ in adl.remaining_epochs_until(2):
        for x in loader:
            body(adp, optimizer, x)
    alone, its_optimizer = made()
    for _ in range(2):
        for x in NUMBERS.split(12):
            body(alone, its_optimizer, x)
    assert adp.gns.steps == 8
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_layers_that_are_thawed_can_not_be_accumulated() -> None:
    model, optimizer = made()
    frozen: Any = model[0]  # type: ignore[index]
    frozen.requires_grad_(False)
    adp = adl.AdaptiveDataParallel(model, optimizer)
    frozen.requires_grad_(True)

    def train() -> None:
        for _ in adl.remaining_epochs_until(1):
            for x in loader_of(4):
                plain(adp, optimizer, x)

    with pytest.raises(RuntimeError, match="would not be averaged over the batches of a step"):
        train()


@pytest.mark.parametrize("every", [2, 3])
def test_an_epoch_of_two_models_by_hand_is_one_pass(every: int) -> None:
    """Both are stepped once in so many batches."""
    models = [made() for _ in range(2)]
    adps = [adl.AdaptiveDataParallel(*one, name=str(number)) for number, one in enumerate(models)]
    loader: Any = adl.AdaptiveDataLoader(NUMBERS, batch_size=4)  # type: ignore[arg-type]
    loader.autoscale_batch_size(4)
    for _ in adl.remaining_epochs_until(3):
        samples = 0
        for number, x in enumerate(loader):
            samples += len(x)
            for adp, (_, optimizer) in zip(adps, models, strict=True):
                if (number + 1) % every == 0:
                    loss(adp, x)
                    optimizer.step()
                    optimizer.zero_grad()
                else:
                    with adp.no_sync():
                        loss(adp, x)
        assert samples == len(NUMBERS)


def test_a_checkpoint_is_saved_before_a_change_that_was_agreed_on_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To save is a matter of all replicas of a generation: newcomers would not know of it."""
    control, done = _session.current().consensus, list[str]()
    monkeypatch.setattr(consensus.BoundaryConsensus, "save", lambda *_: done.append("checkpoint"))
    control.handlers["switch"] = lambda _: done.append("switch")
    commands = [{"kind": "switch"}, {"kind": "checkpoint", "request": 1}]
    control._execute(commands)
    assert done == ["checkpoint", "switch"]
