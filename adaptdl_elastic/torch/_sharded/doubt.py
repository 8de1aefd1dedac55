"""Take back a step of which a replica does not know whether the others have taken it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from adaptdl_elastic.torch._sharded import fully_shard


class StepInDoubt:
    """Copy this replica's parts of parameters and optimizer states before a step.

    They are copied only when a replica was lost at that moment. So the memory for them is needed then, not in
    every step.

    Args:
        reason: Why the step is in doubt.
        optimizer: The model's optimizer.
        statistics: The statistics of its gradients.
    """

    def __init__(
        self, reason: BaseException, optimizer: torch.optim.Optimizer, statistics: dict[str, Any]
    ) -> None:
        self.reason, self.statistics = reason, copy.deepcopy(statistics)
        params = [param for group in optimizer.param_groups for param in group["params"]]
        self._parts = [(param, fully_shard.local(param).clone()) for param in params]
        self._states = {
            param: {key: _copied(value) for key, value in values.items()}
            for param, values in optimizer.state.items()
        }

    def put_back(self, optimizer: torch.optim.Optimizer) -> None:
        """Restore what was copied."""
        with torch.no_grad():
            for param, part in self._parts:
                fully_shard.local(param).copy_(part)
        # not into the present tensors: the step may have added or replaced some
        optimizer.state.clear()
        optimizer.state.update(self._states)


def _copied(value: Any) -> Any:
    if isinstance(value, DTensor):
        return fully_shard.with_part(value, fully_shard.local(value).clone())
    return value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
