"""Run under plain torchrun: all-reduce until told to stop, one line per generation and step to a log.

Arguments: log file, stop file. Every line is `pid rank world_size step`, written at once.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    log, stop = Path(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    step = 0
    with log.open("a", buffering=1) as lines:
        while True:
            stopping = torch.tensor([float(rank == 0 and stop.exists()), 1.0])
            dist.all_reduce(stopping)
            assert stopping[1] == size, f"{stopping[1]} took part in a world of {size}"
            time.sleep(0.005)  # a step's work, on cores that others need too
            if step % 10 == 0:
                lines.write(f"{os.getpid()} {rank} {size} {step}\n")
            step += 1
            if stopping[0] > 0:
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
