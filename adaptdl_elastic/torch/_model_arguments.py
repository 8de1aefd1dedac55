"""Check the arguments of AdaptiveDataParallel before anything is changed."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from adaptdl_elastic.torch._gradient import grad_scaler
from adaptdl_elastic.torch.scaling_rules import ScalingRuleBase

OWNER = "_adaptdl_elastic"  # attribute of an optimizer that holds the name of its AdaptiveDataParallel

_DDP_KEYWORDS = frozenset(inspect.signature(DistributedDataParallel.__init__).parameters) - {"self", "module"}


def check_arguments(
    model: Any,
    optimizer: Any,
    lr_scheduler: Any,
    mp_scaler: Any,
    scaling_rule: Any,
    ddp_kwargs: dict[str, Any],
    sharded: bool = False,
) -> None:
    """Check the arguments of AdaptiveDataParallel, which describes them, or of AdaptiveFSDP if `sharded`.

    Raises:
        TypeError: an argument has the wrong type, or `ddp_kwargs` holds an unknown name.
        ValueError: the arguments do not belong together, or the optimizer is in use already.
        RuntimeError: there is no process group.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, DistributedDataParallel):
        raise TypeError("pass the model itself: AdaptiveDataParallel is its DistributedDataParallel")
    if not sharded and _is_sharded(model):
        raise TypeError("fully_shard was applied to the model: make it an AdaptiveFSDP instead")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    owner = getattr(optimizer, OWNER, None)
    if owner is not None:
        raise ValueError(
            f"the optimizer is that of the AdaptiveDataParallel named {owner!r} already: make one for each, "
            f"or put both models into one torch.nn.Module"
        )
    if lr_scheduler is not None:
        if isinstance(lr_scheduler, type) or not callable(getattr(lr_scheduler, "state_dict", None)):
            raise TypeError(
                f"lr_scheduler must be an object with a state_dict, got {lr_scheduler!r}: give its class "
                f"state_dict() and load_state_dict(), or leave it out (its plain attributes are kept)"
            )
        if getattr(lr_scheduler, "optimizer", optimizer) is not optimizer:
            raise ValueError("lr_scheduler is that of another optimizer: pass the one made for this one")
    if sharded and mp_scaler is not None:
        raise TypeError(
            "AdaptiveFSDP supports no mp_scaler: leave it out and train in bfloat16, which needs none "
            "(mp_policy of fully_shard), or use AdaptiveDataParallel without fully_shard"
        )
    if mp_scaler is not None:
        grad_scaler.check(mp_scaler)
    if scaling_rule is not None and not isinstance(scaling_rule, ScalingRuleBase):
        raise TypeError(
            f"scaling_rule must be an instance of a ScalingRuleBase, such as AdaScale(), got {scaling_rule!r}"
        )
    unknown = sorted(ddp_kwargs.keys() - _DDP_KEYWORDS)
    if unknown:
        raise TypeError(f"unknown argument {unknown[0]!r}: further ones are DistributedDataParallel's")
    ours = {id(p) for p in model.parameters() if p.requires_grad}
    if not any(id(p) in ours for group in optimizer.param_groups for p in group["params"]):
        raise ValueError("the optimizer holds no parameter of the model that needs a gradient")
    if not dist.is_initialized():
        raise RuntimeError(
            "there is no process group: call adaptdl_elastic.torch.init_process_group('gloo' or 'nccl') first"
        )


def _is_sharded(model: torch.nn.Module) -> bool:
    """Return whether `fully_shard` was applied to a part of the model, without importing it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(module, fsdp.FSDPModule) for module in model.modules())
