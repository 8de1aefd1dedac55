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
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from adaptdl_elastic.torch._process_group.backends import Group
from adaptdl_elastic.torch._sharded import fully_shard
from adaptdl_elastic.torch._sharded.layout import moves, spans

Ranks = Sequence[Sequence[int]]
"""The ranks of the replicas that hold each part."""


@dataclass(frozen=True)
class Resharding:
    """Give parts of a model to other replicas.

    Attributes:
        model: The sharded model.
        optimizer: Its optimizer. A newcomer's has a state of the same keys as the others'.
        group: The process group in which the parts move.
        rank: Rank of this replica in it.
        holders: Ranks of the replicas that hold each part now.
        takers: Ranks of the replicas that will hold each new part.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    group: Group
    rank: int
    holders: Ranks
    takers: Ranks

    def hand_over(self) -> None:
        """Give the parts of all replicas to those that stay. A collective of the old process group."""
        for handle in _handles(self.model):
            rows = handle._orig_size[0]
            for tensor in _sharded_tensors(handle, self.optimizer):
                old = fully_shard.local(tensor)
                new = old.new_empty((self._rows_taken(rows), *old.shape[1:]))
                self._transfer(rows, old, new)
                fully_shard.keep(handle, tensor, new)

    def spread(self, info: Any) -> None:
        """Divide the model among all replicas of the new process group. A collective of it.

        Args:
            info: Torch's description of the new mesh.
        """
        states_of = self.optimizer.state
        for params in fully_shard.groups(self.model):
            for handle in params.fsdp_params:
                rows, param = handle._orig_size[0], handle.sharded_param
                states = {
                    key: fully_shard.local(value)
                    for key, value in sorted(states_of.get(param, {}).items())
                    if isinstance(value, DTensor)
                }
                old = fully_shard.local(param)
                padded, part = fully_shard.lay_out(handle, info)
                self._transfer(rows, old, part)
                fully_shard.install(handle, padded, part)
                del old
                for key in list(states):
                    value = states.pop(key)
                    new = value.new_empty(part.shape)
                    self._transfer(rows, value, new)
                    states_of[param][key] = fully_shard.sharded(handle, new)
            fully_shard.use_mesh(params, info)

    def _rows_taken(self, rows: int) -> int:
        """Return how many of a tensor's rows this replica will hold; 0 if it takes none."""
        parts = zip(self.takers, spans(rows, len(self.takers)), strict=True)
        return next((end - first for ranks, (first, end) in parts if self.rank in ranks), 0)

    def _transfer(self, rows: int, old: torch.Tensor, new: torch.Tensor) -> None:
        """Carry out this replica's moves: from `old`, its part so far, and into `new`, its new part."""
        for move in moves(rows, self.holders, self.takers):
            if self.rank not in (move.source, move.target):
                continue
            given = old.narrow(0, move.source_row, move.rows) if self.rank == move.source else None
            taken = new.narrow(0, move.target_row, move.rows) if self.rank == move.target else None
            if given is None:
                assert taken is not None
                self.group.receive(taken.view(-1), move.source)
            elif taken is None:
                self.group.send(given.reshape(-1), move.target)
            else:
                taken.copy_(given)


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
