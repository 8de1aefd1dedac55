"""A training script that writes down which samples it applied: one line per optimizer step and replica.

Each dataset item is its own index, so the file says exactly which samples each step's gradient held. Until
there is a file `hurry` in the working directory a step takes a while, and the longer the nearer the end of
the epoch is, so that an epoch outlasts a rescale.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch

import adaptdl_elastic.torch as adl

SIZE = 4003
PACE = 0.4  # seconds per step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--crash-at", type=int, default=-1, help="kill -9 the last rank there, in generation 0"
    )
    args = parser.parse_args()

    torch.manual_seed(3)
    adl.init_process_group("gloo")
    loader = adl.AdaptiveDataLoader(range(SIZE), batch_size=16, shuffle=True)
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-9)
    model = adl.AdaptiveDataParallel(net, optimizer)
    step = 0
    generation = os.environ.get("ADAPTDL_NUM_RESTARTS", "0")
    for epoch in adl.remaining_epochs_until(1):
        for indices in loader:
            optimizer.zero_grad()
            model(indices.float().unsqueeze(1) / SIZE).mean().backward()
            optimizer.step()
            with (args.out / f"applied-{generation}-{adl.rank()}").open("a") as applied:
                # behind these come repeated samples of weight 0, where another replica has the rest
                counted = indices.tolist()[: adl.current_dataloader().local_samples]
                print(epoch, *counted, file=applied)
            step += 1
            if step % 5 == 0:
                adl.report(steps=step, replicas=adl.world_size())
            if generation == "0" and step == args.crash_at and adl.rank() == adl.world_size() - 1:
                os.kill(os.getpid(), 9)
            late = 8 * getattr(adl.current_dataloader(), "current_index", 0) / SIZE
            time.sleep(0 if Path("hurry").exists() else PACE * max(1.0, late))
    (args.out / f"parameters-{adl.rank()}").write_text(repr(net.state_dict()))


if __name__ == "__main__":
    main()
