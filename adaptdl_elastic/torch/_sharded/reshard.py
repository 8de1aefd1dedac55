"""Divide a sharded model among another number of replicas, in memory.

Only rows that change their replica are sent, point to point. At any time memory for the new part of one
tensor is needed besides the model. All replicas go through the tensors and their moves in the same order, and
each move is a send here and a receive there, so that no two replicas wait for each other.

1. `hand_over`, in the old process group, if replicas leave or their order changes: those that stay get the
   parts of those that leave.
2. `spread`, in the new process group: the replicas that hold the model share it with the newcomers, and every
   parameter gets its new mesh.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from adaptdl_elastic.torch._process_group.backends import Group
from adaptdl_elastic.torch._sharded import fully_shard
from adaptdl_elastic.torch._sharded.layout import moves, spans

Ranks = Sequence[Sequence[int]]
"""The ranks of the replicas that hold each part."""


def hand_over(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    group: Group,
    rank: int,
    holders: Ranks,
    takers: Ranks,
) -> None:
    """Give the parts of all replicas to those that stay. A collective of the old process group.

    Args:
        model: The sharded model.
        optimizer: Its optimizer.
        group: The old process group.
        rank: Rank of this replica in it.
        holders: Old ranks of the replicas that hold each part.
        takers: Old ranks of the replicas that stay, by the part that each will hold.
    """
    for handle in _handles(model):
        rows = handle._orig_size[0]
        for tensor in _sharded_tensors(handle, optimizer):
            old = fully_shard.local(tensor)
            count = _rows(rows, takers, rank)
            new = old.new_empty((count, *old.shape[1:]))
            _transfer(group, rank, rows, holders, takers, old, new)
            fully_shard.keep(handle, tensor, new)


def spread(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    group: Group,
    rank: int,
    holders: Ranks,
    takers: Ranks,
    info: Any,
) -> None:
    """Divide the model among all replicas of the new process group. A collective of it.

    Args:
        model: The sharded model.
        optimizer: Its optimizer. A newcomer's has a state of the same keys as the others'.
        group: The new process group.
        rank: Rank of this replica in it.
        holders: Ranks of the replicas that hold each part of the model.
        takers: Ranks of the replicas that will hold each new part.
        info: Torch's description of the new mesh.
    """
    for params in fully_shard.groups(model):
        for handle in params.fsdp_params:
            rows, param = handle._orig_size[0], handle.sharded_param
            states = {
                key: fully_shard.local(value)
                for key, value in sorted(optimizer.state.get(param, {}).items())
                if isinstance(value, DTensor)
            }
            old = fully_shard.local(param)
            padded, part = fully_shard.lay_out(handle, info)
            _transfer(group, rank, rows, holders, takers, old, part)
            fully_shard.install(handle, padded, part)
            del old
            for key in list(states):
                value = states.pop(key)
                new = value.new_empty(part.shape)
                _transfer(group, rank, rows, holders, takers, value, new)
                optimizer.state[param][key] = fully_shard.sharded(handle, new)
        fully_shard.use_mesh(params, info)


def _handles(model: torch.nn.Module) -> Iterator[fully_shard.Parameter]:
    for group in fully_shard.groups(model):
        yield from group.fsdp_params


def _sharded_tensors(
    handle: fully_shard.Parameter, optimizer: torch.optim.Optimizer
) -> Iterator[torch.Tensor]:
    """Yield a parameter, and its sharded states in the optimizer."""
    param = handle.sharded_param
    yield param
    for _, value in sorted(optimizer.state.get(param, {}).items()):
        if isinstance(value, DTensor):
            yield value


def _rows(rows: int, takers: Ranks, rank: int) -> int:
    """Return how many rows the part of `rank` has; 0 if it takes none."""
    parts = zip(takers, spans(rows, len(takers)), strict=True)
    return next((end - first for ranks, (first, end) in parts if rank in ranks), 0)


def _transfer(
    group: Group,
    rank: int,
    rows: int,
    holders: Ranks,
    takers: Ranks,
    old: torch.Tensor,
    new: torch.Tensor,
) -> None:
    """Carry out this replica's moves: from `old`, its part so far, and into `new`, its new part."""
    for move in moves(rows, holders, takers):
        if rank not in (move.source, move.target):
            continue
        given = old.narrow(0, move.source_row, move.rows) if rank == move.source else None
        taken = new.narrow(0, move.target_row, move.rows) if rank == move.target else None
        if given is None:
            assert taken is not None
            group.receive(taken.view(-1), move.source)
        elif taken is None:
            group.send(given.reshape(-1), move.target)
        else:
            taken.copy_(given)
