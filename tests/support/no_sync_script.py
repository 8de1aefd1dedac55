"""A script that accumulates by hand, in `no_sync`: one weight per sample, one step for four batches.

LOOP: epochs; pace, seconds of a batch; dies, one of two replicas that dies between two steps of the second
epoch, when the other is between them, too.
"""

import contextlib
import json
import os
import signal
from pathlib import Path

import torch
from long_steps import wait

import adaptdl_elastic.torch as adl

S = {"epochs": 3, "size": 96, "pace": 0.0, "dies": -1, **json.loads(os.environ["LOOP"])}
OUT = Path(os.environ["OUT"])
BATCH, PASSES = 12, 4


class Weights(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.of = torch.nn.Parameter(torch.zeros(S["size"], dtype=torch.float64))

    def forward(self, samples):
        return self.of[samples]


def main():
    torch.manual_seed(3)
    adl.init_process_group("gloo")
    loader = adl.AdaptiveDataLoader(range(S["size"]), batch_size=BATCH, shuffle=True)
    weights = Weights()
    optimizer = torch.optim.SGD(weights.parameters(), lr=1.0)
    model = adl.AdaptiveDataParallel(weights, optimizer)
    for epoch in adl.remaining_epochs_until(S["epochs"]):
        for samples in loader:
            place = adl.current_dataloader().current_index // BATCH % PASSES
            with contextlib.nullcontext() if place == PASSES - 1 else model.no_sync():
                model(samples).mean().backward()
            if place == PASSES - 1:
                optimizer.step()
                optimizer.zero_grad()
            if (epoch, place) == (1, 1):
                store = torch.distributed.distributed_c10d._get_default_store()
                store.set(f"between-{adl.rank()}", "")
                if adl.rank() == S["dies"]:
                    store.wait([f"between-{1 - adl.rank()}"])  # the other one is as far
                    os.kill(os.getpid(), signal.SIGKILL)
            wait(OUT, S["pace"], epoch)
    torch.save(weights.of.detach(), OUT / f"weights-{adl.rank()}")


if __name__ == "__main__":
    main()
