"""The most memory that a training step takes, in units of the model's gradients."""

from __future__ import annotations

import ctypes
import gc
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import insides
import torch
import torch.distributed as dist
from fake_loader import FakeLoader
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from adaptdl_elastic.torch._gradient import comm_hook
from adaptdl_elastic.torch.parallel import AdaptiveDataParallel

WIDTH, LAYERS, BATCH = 1024, 8, 4
GRADIENTS = 4 * LAYERS * WIDTH * WIDTH  # bytes: 32 MiB, in layers of 4 MiB


def _highest() -> int:
    """Bytes of memory at most since `_forget`."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def _return_what_is_freed() -> None:
    """Large blocks go back to the system at once: no arena of any thread keeps some for later."""
    threshold, size = -3, 1 << 16  # M_MMAP_THRESHOLD, bytes
    assert ctypes.CDLL(None).mallopt(threshold, size)


def _forget() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _net() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def _adaptive(net: nn.Module, optimizer: torch.optim.Optimizer, sampled: bool) -> AdaptiveDataParallel:
    adp = AdaptiveDataParallel(net, optimizer)
    adp.gns.gap = 1
    if not sampled:
        insides.measure_no_more(adp)
    return adp


def peak(adaptive: bool, adam: bool = False, micro_batches: int = 1, **options: Any) -> float:
    """The most memory of a few steps, above what there was before the model, in units of its gradients.

    `sampled`: every step is measured, or none. `waste`: the hook copies what it is given, for comparison.
    """
    _return_what_is_freed()
    torch.manual_seed(0)
    inputs = torch.randn(BATCH, WIDTH)
    gc.collect()
    _forget()
    before = _highest()
    net = _net()
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(net.parameters(), foreach=False)
        if adam
        else torch.optim.SGD(net.parameters(), lr=1e-3, foreach=False)
    )
    model: Any = (
        _adaptive(net, optimizer, options.get("sampled", True)) if adaptive else DistributedDataParallel(net)
    )
    if options.get("waste"):
        bucket, kept = comm_hook.Norms.bucket, []

        def wasteful(self: comm_hook.Norms, flat: torch.Tensor, *args: Any) -> torch.Tensor:
            kept.append(flat.clone())
            return bucket(self, flat, *args)

        comm_hook.Norms.bucket = wasteful  # type: ignore[method-assign]
    replicas = dist.get_world_size()
    window = [[BATCH] * replicas] * micro_batches
    for step in range(4):
        if step == 2:  # DDP's buckets have been rebuilt, Adam has its moments
            if options.get("waste"):
                kept.clear()
            _forget()
        for chunk in range(micro_batches):
            last = chunk + 1 == micro_batches
            feeding = FakeLoader(window, BATCH * replicas, BATCH, chunk) if adaptive else nullcontext()
            syncing = nullcontext() if adaptive or last else model.no_sync()
            with feeding, syncing:
                if chunk == 0 or adaptive:
                    optimizer.zero_grad()
                model(inputs).square().mean().backward()
                if last or adaptive:
                    optimizer.step()
        if options.get("waste"):
            kept.clear()
    return (_highest() - before) / GRADIENTS
