"""Let GradScaler calls that a loop makes once per batch do nothing in the middle of a window.

`scaler.unscale_` and `scaler.step` would divide a partial sum by the loss scale, and `scaler.update` without
a step raises. The calls of the scaler that was given to AdaptiveDataParallel are skipped in the middle of its
window. Other optimizers that share the scaler step as usual, but the scale does not change until no model has
a partial sum, which is in units of it.
"""

from __future__ import annotations

import logging
import types
from typing import Any

import torch

from adaptdl_elastic import _frames
from adaptdl_elastic._interfaces import ScaledModel
from adaptdl_elastic.torch._runtime.heap import instances_of

logger = logging.getLogger(__name__)

_ATTRIBUTE = "_adaptdl_elastic"
# key among the scaler's optimizers, for what the optimizers of a postponed update have found
_FOUND = "_adaptdl_elastic"


class _Models:
    """Hold the models whose optimizers a scaler steps, and whether one stepped since its last update."""

    def __init__(self) -> None:
        self.by_optimizer: dict[int, ScaledModel] = {}
        self.stepped = False

    def summing(self) -> bool:
        """Return whether one of them has gradients of a window that has not been stepped."""
        return any(not adp.stepping or adp.window_under_way for adp in self.by_optimizer.values())


def check(scaler: Any) -> None:
    """Raise TypeError if the object is neither a GradScaler nor like one."""
    for name in ("step", "unscale_", "update", "state_dict", "load_state_dict", "get_scale"):
        if not callable(getattr(scaler, name, None)):
            raise TypeError(f"mp_scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}")


def attach(scaler: Any, adp: ScaledModel, optimizer: torch.optim.Optimizer) -> None:
    """Make `scaler` respect the windows of `adp`. Once per scaler and model; models can share one."""
    models: _Models | None = getattr(scaler, _ATTRIBUTE, None)
    if models is None:
        models = _Models()
        setattr(scaler, _ATTRIBUTE, models)
        _patch(scaler, models)
    models.by_optimizer[id(optimizer)] = adp


def attached(scaler: Any) -> bool:
    """Return whether an AdaptiveDataParallel was given this scaler."""
    return getattr(scaler, _ATTRIBUTE, None) is not None


def _patch(scaler: Any, models: _Models) -> None:
    step, unscale, update = scaler.step, scaler.unscale_, scaler.update

    def patched_step(self: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        adp = models.by_optimizer.get(id(optimizer))
        if adp is None:
            models.stepped = True
            return step(optimizer, *args, **kwargs)
        if not adp.stepping:
            adp.step_left_out()
            return None
        models.stepped = True
        before = adp.gns.steps + adp.gns.skipped
        result = step(optimizer, *args, **kwargs)
        if adp.gns.steps + adp.gns.skipped == before:
            adp.skipped_step()
        return result

    def patched_unscale(self: Any, optimizer: torch.optim.Optimizer) -> None:
        adp = models.by_optimizer.get(id(optimizer))
        if adp is None or adp.stepping:
            unscale(optimizer)

    def patched_update(self: Any, *args: Any, **kwargs: Any) -> None:
        if not models.stepped:
            return
        models.stepped = False
        if not (models.summing() and _postpone(scaler)):
            update(*args, **kwargs)

    scaler.step = types.MethodType(patched_step, scaler)
    scaler.unscale_ = types.MethodType(patched_unscale, scaler)
    scaler.update = types.MethodType(patched_update, scaler)


def _postpone(scaler: Any) -> bool:
    """Let optimizers step again at the same scale; the next update uses what they have found so far.

    Returns False if there is nothing to update, because the scaler is disabled.
    """
    states = getattr(scaler, "_per_optimizer_states", None)
    if states is None:
        return False
    found: dict[torch.device, torch.Tensor] = {}
    for state in states.values():
        for device, one in state["found_inf_per_device"].items():
            found[device] = found[device] + one if device in found else one
    states.clear()
    states[_FOUND] = {"found_inf_per_device": found}
    return True


def skipped(optimizer: torch.optim.Optimizer) -> bool:
    """Return inside `optimizer.step()` whether it changed no parameter, because gradients were inf or nan.

    GradScaler calls fused optimizers all the same, and passes that information in this attribute. Reading it
    waits for the device, as GradScaler does for other optimizers.
    """
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


def guard(adp: ScaledModel, optimizer: torch.optim.Optimizer) -> None:
    """Make scalers that `adp` was not given raise in the middle of a window, where they find no gradients.

    It is unknown which scalers a script uses, so all scalers of the process are looked up.
    """
    for scaler in instances_of(torch.amp.GradScaler):
        if not attached(scaler):
            _guard(scaler, adp, optimizer)


def _guard(scaler: Any, adp: ScaledModel, ours: torch.optim.Optimizer) -> None:
    def guarded(method: Any) -> Any:
        def call(self: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            if optimizer is ours and scaler.is_enabled() and not adp.stepping:
                raise RuntimeError(
                    "gradients are accumulated, and AdaptiveDataParallel was not given the GradScaler in "
                    "use: pass it as mp_scaler"
                )
            return method(optimizer, *args, **kwargs)

        return types.MethodType(call, scaler)

    scaler.step, scaler.unscale_ = guarded(scaler.step), guarded(scaler.unscale_)


def loss_scale(scaler: Any) -> torch.Tensor | float:
    """Return the factor on losses, and so on gradients; on its device, without waiting for it."""
    if scaler is None or not scaler.is_enabled():
        return 1.0
    value = getattr(scaler, "_scale", None)  # get_scale() waits for the device
    return value.detach().double() if isinstance(value, torch.Tensor) else float(scaler.get_scale())


def why_irreparable(mp_scaler: Any) -> str | None:
    """Return why a failed step cannot be put back; None if it can.

    A GradScaler that the model was not given may be among the callers, and would count a step that was not
    taken.
    """
    for frame in _frames.callers():
        caller = frame.f_locals.get("self")
        if isinstance(caller, torch.amp.GradScaler) and caller is not mp_scaler:
            return "AdaptiveDataParallel was not given the GradScaler in use as mp_scaler"
    return None
