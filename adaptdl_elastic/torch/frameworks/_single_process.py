"""Let a framework see a single process, although a launcher has started several replicas."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType

import torch
import torch.distributed

import adaptdl_elastic.torch as adl
from adaptdl_elastic import env

_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@contextmanager
def single_process() -> Iterator[None]:
    """Hide the launcher's variables, so that the framework sees a single process."""
    hidden = {name: os.environ.pop(name) for name in _LAUNCHER if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def refuse_autoscaling(arguments: Iterable[str], where: str) -> None:
    """Raise ValueError if one of these names asks for a batch size that is chosen during training.

    Args:
        arguments: Names of arguments.
        where: For the message: to what they were given, and what to do instead.
    """
    for name in {"autoscale_batch_size", "max_batch_size", "local_bsz_bounds"}.intersection(arguments):
        raise ValueError(f"{name} in {where}")


def connect(device_type: str, backend: str | None = None) -> None:
    """Connect the replicas, and choose this replica's device, unless the script has done so.

    torchmetrics sees a single process then, too.

    Args:
        device_type: "cuda", "cpu", …: type of the device that the framework has chosen.
        backend: Backend of `torch.distributed`; None: the usual one for this device.
    """
    if device_type == "cuda":
        torch.cuda.set_device(env.local_rank())
    if not torch.distributed.is_initialized():
        adl.init_process_group(backend or ("nccl" if device_type == "cuda" else "gloo"))
    _hide_group_from_metrics()


def _hide_group_from_metrics() -> None:
    """Let metrics of torchmetrics, if the script has imported it, count what this replica gives them.

    Every replica evaluates the whole set, so a sum over the replicas would count each sample several times,
    and `compute()` would be a collective. The function's code is replaced, since metrics that exist already
    have kept the function itself.
    """
    module = sys.modules.get("torchmetrics.metric")
    if module is None:
        return
    available = getattr(module, "jit_distributed_available", None)
    if not isinstance(available, FunctionType):
        raise RuntimeError("this version of torchmetrics in an elastic Trainer : use torchmetrics 1.9")
    available.__code__ = _alone.__code__


def _alone() -> bool:
    return False
