"""Copy what a step may change of a model besides its parameters, and put it back if the step is abandoned."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class _Model(Protocol):
    """Define the attributes of a model that this module uses."""

    irreparable: str | None
    """Why a failed step cannot be put back, or None."""

    @property
    def module(self) -> torch.nn.Module: ...

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    @property
    def lr_scheduler(self) -> Any: ...

    @property
    def mp_scaler(self) -> Any: ...

    @property
    def attempted_steps(self) -> int: ...

    @property
    def accumulates_by_hand(self) -> bool: ...

    @property
    def failure(self) -> BaseException | None: ...


class DataParallelSnapshot:
    """Copy what a step may change of one model besides its parameters, when a window begins."""

    def __init__(self, model: _Model, last: object) -> None:
        self._model = model
        self._attempted = model.attempted_steps
        self._by_hand = model.accumulates_by_hand
        self._hyperparameters = _hyperparameters(model.optimizer)
        scheduler, scaler = model.lr_scheduler, model.mp_scaler
        self._scheduler = None if scheduler is None else scheduler.state_dict()
        self._scaler = _scale_of(scaler)
        buffers = list(model.module.buffers())
        self._buffers: list[torch.Tensor] = []
        if not buffers:
            return
        kinds = [_kind(buffer) for buffer in buffers]
        if isinstance(last, DataParallelSnapshot) and [_kind(one) for one in last._buffers] == kinds:
            self._buffers = last._buffers
        else:
            self._buffers = [torch.empty_like(buffer) for buffer in buffers]
        with torch.no_grad():
            torch._foreach_copy_(self._buffers, buffers)

    def why_irreparable(self) -> str | None:
        """Return why the step cannot be put back; None if it can."""
        model = self._model
        if model.irreparable is not None:
            return model.irreparable
        # what a failed step has accumulated since its own beginning is computed again
        if self._by_hand or (model.accumulates_by_hand and model.failure is None):
            return "what it had accumulated by hand in no_sync(), over several batches, is lost"
        if model.attempted_steps != self._attempted:
            return "a part of the step was taken already (several models or several steps in one batch)"
        unknown = model.lr_scheduler is None and hasattr(model.optimizer.step, "_wrapped_by_lr_sched")
        if unknown and _hyperparameters(model.optimizer) != self._hyperparameters:
            return "a scheduler changed the learning rate, and AdaptiveDataParallel was given no lr_scheduler"
        return None

    def put_back(self) -> None:
        """Restore all copied values. May be called more than once."""
        model = self._model
        with torch.no_grad():
            for buffer, before in zip(model.module.buffers(), self._buffers, strict=True):
                buffer.copy_(before)
        for group, values in zip(model.optimizer.param_groups, self._hyperparameters, strict=True):
            group.update(values)
        if self._scheduler is not None:
            model.lr_scheduler.load_state_dict(self._scheduler)
        if self._scaler is not None:
            scaler = model.mp_scaler
            scaler._scale, scaler._growth_tracker = (None if t is None else t.clone() for t in self._scaler)
            scaler._per_optimizer_states.clear()


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def _hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key != "params"
        }
        for group in optimizer.param_groups
    ]


def _scale_of(scaler: Any) -> list[torch.Tensor | None] | None:
    """Return GradScaler's two tensors, which it makes at its first use, without waiting for the device."""
    if scaler is None or not scaler.is_enabled():
        return None
    tensors = [getattr(scaler, "_scale", None), getattr(scaler, "_growth_tracker", None)]
    return [None if tensor is None else tensor.clone() for tensor in tensors]
