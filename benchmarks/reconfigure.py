"""Compare two ways to move gloo's process group from two to three replicas and back, on this machine.

`destroy + init` is the library's way: `destroy_process_group`, then `init_process_group` on a fresh prefix of
the same store. `reconfigure` is `torch.distributed._reconfigure` (torch >= 2.14, experimental). Both end with
the first all-reduce of the new group. Prints the median and the largest time on the slowest replica.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing

dist: Any = torch.distributed


def replica(rank: int, port: int, rounds: int) -> None:
    """Move between groups of two and three; rank 0 prints the times."""
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, timeout=timedelta(seconds=60))
    for way in ("destroy + init", "reconfigure"):
        slowest = []
        for number in range(2 * rounds):
            size = 2 + number % 2
            meet(store, f"{way}/{number}", rank, 3)
            if rank >= size:
                if way == "destroy + init" and dist.is_initialized():
                    dist.destroy_process_group()
                continue
            began = time.perf_counter()
            prefix = dist.PrefixStore(f"{way}/{number}/torch", store)
            if way == "reconfigure":
                reconfigure(prefix, store, number, rank, size)
            else:
                if dist.is_initialized():
                    dist.destroy_process_group()
                dist.init_process_group("gloo", store=prefix, rank=rank, world_size=size)
            dist.all_reduce(torch.ones(1))
            store.set(f"{way}/{number}/took/{rank}", json.dumps(1000 * (time.perf_counter() - began)))
            took = [json.loads(store.get(f"{way}/{number}/took/{each}")) for each in range(size)]
            slowest.append(max(took))
        meet(store, f"{way}/end", rank, 3)
        if dist.is_initialized():
            dist.destroy_process_group()
        if rank == 0:
            print(f"{way:15} median {statistics.median(slowest):6.1f} ms, largest {max(slowest):6.1f} ms")
    meet(store, "end", rank, 3)


def reconfigure(prefix: Any, store: Any, number: int, rank: int, size: int) -> None:
    """Exchange handles through the store, and reconfigure the group with them."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, enable_reconfigure=True)
    prefix.set(str(rank), dist._get_reconfigure_handle())
    handles = [prefix.get(str(each)).decode() for each in range(size)]
    dist._reconfigure(uuid=number + 1, handles=handles).wait()


def meet(store: Any, name: str, rank: int, replicas: int) -> None:
    """Wait for the other replicas."""
    store.set(f"{name}/{rank}", "here")
    store.wait([f"{name}/{each}" for each in range(replicas)])


def main() -> None:
    """Start three replicas."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--port", type=int, default=29731)
    given = parser.parse_args()
    torch.multiprocessing.spawn(replica, (given.port, given.rounds), nprocs=3)


if __name__ == "__main__":
    main()
