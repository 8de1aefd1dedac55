"""What replicas do in tests/training/test_gather.py. Every function runs inside of a gloo group."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fake_loader import FakeLoader

import adaptdl_elastic.torch as adl
from adaptdl_elastic import _session
from adaptdl_elastic.torch.parallel import AdaptiveDataParallel

Loss = Callable[[torch.Tensor, torch.Tensor, Callable[[torch.Tensor], torch.Tensor], torch.Tensor], Any]


def simclr(
    one: torch.Tensor, other: torch.Tensor, gather: Callable[[torch.Tensor], torch.Tensor], heat: torch.Tensor
) -> torch.Tensor:
    """The same loss on all replicas: every view against all others of the batch."""
    views = F.normalize(torch.cat([gather(one), gather(other)]))
    count = len(views) // 2
    likeness = (views @ views.T * heat).fill_diagonal_(-1e9)
    return F.cross_entropy(likeness, torch.arange(2 * count).roll(count))


def own_rows(
    one: torch.Tensor, other: torch.Tensor, gather: Callable[[torch.Tensor], torch.Tensor], heat: torch.Tensor
) -> torch.Tensor:
    """As CLIP's local loss: this replica's rows against those of all, which sit behind the lower ranks'."""
    all_others = gather(F.normalize(other))
    numbers = gather(torch.arange(len(one)) + 100 * (dist.get_rank() if dist.is_initialized() else 0))
    first = int((numbers < 100 * (dist.get_rank() if dist.is_initialized() else 0)).sum())
    return F.cross_entropy(F.normalize(one) @ all_others.T * heat, torch.arange(len(one)) + first)


def barlow(
    one: torch.Tensor, other: torch.Tensor, gather: Callable[[torch.Tensor], torch.Tensor], heat: torch.Tensor
) -> torch.Tensor:
    """A product over the samples, of numbers that are normalised by them."""
    first, second = gather(one), gather(other)
    first, second = (first - first.mean(0)) / first.std(0), (second - second.mean(0)) / second.std(0)
    return (first.T @ second / len(first) - torch.eye(4, dtype=torch.double)).square().sum() * heat


LOSSES: dict[str, Loss] = {"simclr": simclr, "own_rows": own_rows, "barlow": barlow}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
        self.heat = torch.nn.Parameter(torch.tensor(0.5))
        self.double()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.body(x), self.heat.exp()


def data() -> torch.Tensor:
    return torch.randn(2, 8, 3, dtype=torch.double, generator=torch.Generator().manual_seed(7))


def whole(name: str) -> list[torch.Tensor]:
    """Loss and gradients of the whole batch, without the library."""
    net = Net()
    both, heat = net(data().flatten(0, 1))
    loss = LOSSES[name](*both.split(8), lambda tensor: tensor, heat)
    loss.backward()
    return [loss.detach(), *[p.grad for p in net.parameters() if p.grad is not None]]


def of_shares(name: str, counts: Sequence[int]) -> list[torch.Tensor]:
    """This replica's loss, and the gradients that the hook has averaged."""
    rank = dist.get_rank()
    net = Net()
    adp = AdaptiveDataParallel(net, torch.optim.SGD(net.parameters(), lr=0.1))
    start, count = sum(counts[:rank]), counts[rank]
    with FakeLoader([counts], 8, max(counts)):
        first, second = data()[:, start : start + count] if count else data()[:, :2]
        both, heat = adp(torch.cat([first, second]))
        loss = LOSSES[name](*both.split(len(first)), adl.gather, heat)
        loss.backward()
    return [loss.detach(), *[p.grad.clone() for p in net.parameters() if p.grad is not None]]


def of_all_types() -> list[torch.Tensor]:
    rank = dist.get_rank()
    made = [
        torch.arange(rank + 1),
        torch.tensor([[True, False]] * (rank + 1)),
        torch.full((1, 2), rank + 0.5, dtype=torch.bfloat16),
        torch.tensor([complex(rank, -0.0)]),
        torch.tensor([float("nan") if rank else float("-inf")]),
        torch.empty(0, 2) if rank else torch.ones(1, 2),
        torch.ones(2, 3).T[: rank + 1],
    ]
    return [adl.gather(one) for one in made]


def apart() -> str:
    try:
        adl.gather(torch.ones(2, 2 + dist.get_rank()))
    except ValueError as error:
        return str(error)
    return ""


def dies() -> list[Any]:
    """The peer dies behind the exchange of the numbers of rows; this one's step fails without an error."""
    net = Net()
    adp = AdaptiveDataParallel(net, torch.optim.SGD(net.parameters(), lr=0.1))
    adp.absorb_failures()
    recovery: Any = type("Recovery", (), {"armed": True, "failed": False})()
    vars(_session.current())["recovery"] = recovery
    real = dist.all_reduce

    def reduced(tensor: torch.Tensor, **options: Any) -> Any:
        if dist.get_rank() == 1 and tensor.dtype == torch.uint8:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(tensor, **options)

    dist.all_reduce = reduced
    with FakeLoader([[4, 4]], 8, 4):
        first, second = data()[:, :4]
        both, heat = adp(torch.cat([first, second]))
        simclr(*both.split(4), adl.gather, heat).backward()
    found = [adp.failure is not None, all(not p.grad.any() for p in net.parameters() if p.grad is not None)]
    dist.barrier = lambda: None  # nobody is left
    return found
