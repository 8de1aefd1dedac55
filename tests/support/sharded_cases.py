"""What the replicas of tests/training/test_fully_sharded.py do."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import adaptdl_elastic.torch as adl
from adaptdl_elastic import checkpoint
from adaptdl_elastic.torch._process_group.backends import Gloo
from adaptdl_elastic.torch._sharded import fully_shard as private
from adaptdl_elastic.torch._sharded import reshard


def network(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))


def sharded(seed: int = 0) -> tuple[torch.nn.Sequential, torch.optim.Optimizer]:
    net = network(seed)
    fully_shard(net[0])
    fully_shard(net)
    return net, torch.optim.AdamW(net.parameters(), lr=0.1)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    inputs = torch.arange(20.0).view(4, 5) / 20
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def weights(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in net.state_dict().items()
    }


def save(folder: str) -> dict[str, Any]:
    """Train a step, save it in `folder`, and return the weights after a further step as lists."""
    net, optimizer = sharded()
    model = adl.AdaptiveFSDP(net, optimizer)
    step(model, optimizer)
    checkpoint.save_state(model._state, folder)
    step(model, optimizer)
    return {name: value.tolist() for name, value in weights(net).items()}


def load(folder: str) -> dict[str, Any]:
    """Load what `save` has saved into another model, and return the weights after a further step."""
    net, optimizer = sharded(seed=1)
    model = adl.AdaptiveFSDP(net, optimizer)
    assert checkpoint.load_state(model._state, folder)
    step(model, optimizer)
    return {name: value.tolist() for name, value in weights(net).items()}


def turned() -> dict[str, Any]:
    """Give the parts to the replicas in reversed order, then divide the model again."""
    net, optimizer = sharded()
    model = adl.AdaptiveFSDP(net, optimizer)
    step(model, optimizer)
    before, held = weights(net), [*net.parameters()]
    rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
    order = [*reversed(range(count))]
    group = Gloo("gloo")
    with torch.no_grad():
        reshard.hand_over(net, optimizer, group, rank, order)
        parts = [part.shape[0] for part in map(private.local, net.parameters())]
        reshard.spread(net, optimizer, group, rank, order, torch.device("cpu"))
    assert all(one is other for one, other in zip(held, net.parameters(), strict=True))
    after = weights(net)
    step(model, optimizer)
    return {
        "equal": all(torch.equal(value, after[name]) for name, value in before.items()),
        "parts": parts,
        "next": {name: value.tolist() for name, value in weights(net).items()},
    }
