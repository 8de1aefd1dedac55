"""Replicas for `replicas.run` whose link is slow."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from adaptdl_elastic.torch._process_group.backends import STALL, Gloo

dist: Any = torch.distributed  # its stub does not export the stores

RATE = 3 << 20
"""Bytes a second of the link."""

SO_MAX_PACING_RATE = 47  # of Linux; `socket` has no name for it
LONG = timedelta(hours=1)


def slow_and_stopped(folder: str) -> str | None:
    """Send a tensor that takes longer than `STALL`, then one of which the receiver takes only the first half.

    Returns:
        The sender's error of the second transfer.
    """
    rank, group, store = dist.get_rank(), Gloo("gloo"), dist.FileStore(f"{folder}/store", 2)
    ones, error = torch.ones(int((STALL.total_seconds() + 0.5) * RATE), dtype=torch.uint8), None
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, **group.limits)
    if rank == 1:
        received = torch.zeros_like(ones)
        group.receive(received, 0, LONG)
        assert torch.equal(received, ones)
        group.receive(received[: len(ones) // 2 >> 20 << 20], 0, LONG)
        store.wait(["ended"])
    else:
        limit_rate()
        group.send(ones, 1, LONG)
        try:
            group.send(ones, 1, LONG)
        except RuntimeError as failed:
            error = str(failed)
        store.set("ended", "")
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=2)
    return error


def limit_rate() -> None:
    """Limit what each socket of this process sends."""
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError), socket.socket(fileno=os.dup(int(entry.name))) as one:
            if one.family in (socket.AF_INET, socket.AF_INET6):
                one.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, RATE)
