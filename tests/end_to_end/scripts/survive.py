"""A training script that counts the samples of every epoch: `survive.py EPOCHS SECONDS_PER_STEP`.

A file `hurry` in the working directory makes it go as fast as it can; without one its steps take longer and
longer from the fifth epoch on, so that a job of 30 epochs outlasts whatever is done to it. Newcomers to a
running job wait for somebody to write to the FIFO SLOW_NEWCOMERS, unless there is a file `quick`. The process
that a file `broken` names by its id writes junk to its channel, and then a line without an end.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

import adaptdl_elastic.torch as adl

SIZE = 240


class Indices(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> int:
        return index


def break_channel() -> None:
    if Path("broken").exists() and Path("broken").read_text() == str(os.getpid()):
        channel = int(os.environ["ADAPTDL_AGENT_FD"])
        for _ in range(10_000):
            os.write(channel, b"junk\n")
        while True:
            os.write(channel, b"x" * 4096)


def main() -> None:
    epochs, pause = int(sys.argv[1]), float(sys.argv[2])
    fifo = os.environ.get("SLOW_NEWCOMERS")
    if fifo and os.environ.get("ADAPTDL_JOIN") and not Path("quick").exists():
        Path(fifo).read_text()
    torch.manual_seed(3)
    adl.init_process_group("gloo")
    loader = adl.AdaptiveDataLoader(Indices(), batch_size=12, shuffle=True)
    net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-9)
    model = adl.AdaptiveDataParallel(net, optimizer)
    counted = adl.Accumulator()
    for epoch in adl.remaining_epochs_until(epochs):
        for indices in loader:
            optimizer.zero_grad()
            model(indices.float().unsqueeze(1) / SIZE).mean().backward()
            optimizer.step()
            counted["samples"] += len(indices)
            counted["sum"] += int(indices.sum())
            break_channel()
            time.sleep(0 if Path("hurry").exists() else pause * max(1.0, epoch / 5))
        with counted.synchronized():
            adl.report(samples=counted["samples"], sum=counted["sum"], replicas=adl.world_size())
    print(f"weights {net[0].weight.sum().item():.9f} of rank {adl.rank()} in {os.getpid()}", flush=True)


if __name__ == "__main__":
    main()
