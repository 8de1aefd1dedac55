"""Save a sharded model in checkpoints, and send newcomers its state before the parts are shared.

A checkpoint has the same content as that of an AdaptiveDataParallel: whole tensors. So it can be continued
with any number of replicas, sharded or not. Rank 0 collects it in host memory, tensor by tensor; no GPU holds
the whole model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from torch.distributed.tensor import DTensor

from adaptdl_elastic import _session
from adaptdl_elastic.checkpoint.state_copy import copy_to_host
from adaptdl_elastic.reducer import PeerLostError
from adaptdl_elastic.torch._gradient import script_options
from adaptdl_elastic.torch._gradient.model_state import BatchSizes, ModelState
from adaptdl_elastic.torch._process_group.backends import Group, present
from adaptdl_elastic.torch._sharded import fully_shard
from adaptdl_elastic.torch._sharded.layout import Layout, spans


class ShardedModelState(ModelState):
    """Everything of one sharded model that a checkpoint holds.

    Args:
        name: Name of the model.
        module: The sharded module.
        optimizer: Its optimizer.
        parts: Other objects with a state dict, by key; None for what the script does not have.
        sizes: Batch sizes of the model.
        collect: Reads the pending measurement of gradients.
        layout: Returns how the replicas share the model.
    """

    def __init__(
        self,
        name: str,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        parts: dict[str, Any],
        sizes: BatchSizes,
        collect: Callable[[], None],
        layout: Callable[[], Layout],
    ) -> None:
        super().__init__(name, parts, sizes, collect)
        self._module, self._optimizer, self._layout = module, optimizer, layout
        self._options = script_options.options_of({**parts, "optimizer": optimizer})
        self._collected: dict[str, Any] | None = None

    # What a newcomer is sent, and what is equal on all replicas.

    def state_dict(self) -> Any:
        """Return what is equal on all replicas; a sharded state of the optimizer is an empty tensor."""

        def blank(value: Any) -> Any:
            return torch.empty(0, dtype=value.dtype) if isinstance(value, DTensor) else value

        return {
            "buffers": dict(self._module.named_buffers()),
            "optimizer": self._optimizer_state(blank),
            **super().state_dict(),
        }

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the result of `state_dict`, or a checkpoint, which has the key `model`."""
        if "model" in state_dict:
            self._load_whole(state_dict)
            return
        with torch.no_grad():
            for name, buffer in self._module.named_buffers():
                buffer.copy_(state_dict["buffers"][name])

        def fresh(param: torch.Tensor, value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.shape == (0,):
                return fully_shard.with_part(
                    param,
                    fully_shard.local(param).new_empty(fully_shard.local(param).shape, dtype=value.dtype),
                )
            return value

        self._load_optimizer(state_dict["optimizer"], fresh)
        super().load_state_dict(state_dict)

    # A checkpoint.

    def collect_for_save(self) -> None:
        """Collect the whole state on rank 0, in host memory. Called on every replica.

        Raises:
            PeerLostError: a replica is gone, and this one survives that.
        """
        try:
            self._collect_whole()
        except RuntimeError as error:
            if _session.current().recovery.armed:
                raise PeerLostError(str(error)) from error
            raise

    def _collect_whole(self) -> None:
        group = present(_session.current()) or Group("")

        def whole(value: Any) -> Any:
            if not isinstance(value, DTensor):
                return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
            return _collected(value, group, self._layout().parts)

        model = self._module.state_dict()
        for key in model:
            model[key] = whole(model[key])
        optimizer = self._optimizer_state(whole)
        if torch.distributed.get_rank() == 0:
            self._collected = {
                "model": model,
                "optimizer": optimizer,
                **copy_to_host(super().state_dict(), self.name),
            }

    def snapshot(self) -> Any:
        """Return the collected state."""
        collected, self._collected = self._collected, None
        if collected is None:
            raise RuntimeError(f"state {self.name!r} was not collected from the replicas")
        return collected

    def _load_whole(self, state_dict: Any) -> None:
        missing = sorted({"model", "optimizer", *self._parts} - state_dict.keys())
        if missing:
            raise ValueError(f"it was saved without {', '.join(missing)}")
        own = self._module.state_dict()
        saved = state_dict["model"]
        for key, value in saved.items():
            if key in own and isinstance(own[key], DTensor) and own[key].shape == value.shape:
                saved[key] = self._own_part(own[key], value)
        self._module.load_state_dict(saved)

        def part(param: torch.Tensor, value: Any) -> Any:
            whole = isinstance(value, torch.Tensor) and value.shape == param.shape
            return self._own_part(param, value) if whole else value

        self._load_optimizer(state_dict["optimizer"], part)
        super().load_state_dict(state_dict)

    def _own_part(self, like: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """Return this replica's part of a whole tensor, in the layout and on the device of `like`."""
        layout = self._layout()
        first, end = spans(whole.shape[0], layout.parts)[layout.part(torch.distributed.get_rank())]
        return fully_shard.with_part(like, whole[first:end].to(fully_shard.local(like).device))

    def _optimizer_state(self, change: Callable[[Any], Any]) -> dict[str, Any]:
        """Return the optimizer's state dict, with `change` applied to the values by parameter."""
        found = self._optimizer.state_dict()
        states = {
            index: {key: change(value) for key, value in sorted(values.items())}
            for index, values in found["state"].items()
        }
        return {**found, "state": states}

    def _load_optimizer(self, saved: Any, change: Callable[[torch.Tensor, Any], Any]) -> None:
        params = [param for group in self._optimizer.param_groups for param in group["params"]]
        states = {
            index: {key: change(params[index], value) for key, value in values.items()}
            for index, values in saved["state"].items()
        }
        self._optimizer.load_state_dict({**saved, "state": states})


def _collected(tensor: DTensor, group: Group, parts: int) -> torch.Tensor | None:
    """Return the whole tensor in host memory on rank 0, and None on the others.

    The first `parts` replicas hold one copy of each part, and send theirs.
    """
    part, rank = fully_shard.local(tensor), torch.distributed.get_rank()
    if rank != 0:
        if part.numel() and rank < parts:
            group.send(part.reshape(-1), 0)
        return None
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    for source, (first, end) in enumerate(spans(tensor.shape[0], parts)):
        rows = whole[first:end]
        if source == 0:
            rows.copy_(part)
        elif first < end and part.is_cpu:
            group.receive(rows.view(-1), source)
        elif first < end:
            staged = torch.empty_like(rows, device=part.device)
            group.receive(staged.view(-1), source)
            rows.copy_(staged)
    return whole
