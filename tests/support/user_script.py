"""A script as users write them: numbered batches, files and a run of rank 0's, a state of its own.

LOOP holds settings. `between` is how long the end of an epoch takes; with `hold` every checkpoint is being
written until the file `written` is there.
"""

import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from long_steps import wait
from signs import sign

import adaptdl_elastic.torch as adl
from adaptdl_elastic import checkpoint

S = {"epochs": 3, "size": 120, "pace": 0.0, "between": 0.0, "hold": False, **json.loads(os.environ["LOOP"])}
OUT = Path(os.environ["OUT"])


class Best(checkpoint.State):
    """What decides about the script's way belongs into a state."""

    def __init__(self):
        super().__init__("best")
        self.losses = []
        checkpoint.load_state(self)

    def save(self, file):
        file.write(json.dumps(self.losses).encode())

    def load(self, file):
        self.losses = json.load(file)

    def write_snapshot(self, snapshot, file):
        if S["hold"]:
            sign("writing")
            while not (OUT / "written").exists():
                time.sleep(0.01)
        super().write_snapshot(snapshot, file)


def main():
    torch.manual_seed(3)
    run = (OUT / "run.jsonl").open("a") if adl.rank() == 0 else None
    numbers = []  # of the batches, as this process has counted them
    adl.init_process_group("gloo")
    loader = adl.AdaptiveDataLoader(range(S["size"]), batch_size=12, shuffle=True)
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model = adl.AdaptiveDataParallel(net, optimizer, scheduler)
    best = Best()
    for epoch in adl.remaining_epochs_until(S["epochs"]):
        seen = adl.Accumulator()
        for number, batch in enumerate(loader):
            assert (adl.rank(), adl.world_size()) == (dist.get_rank(), dist.get_world_size())
            if adl.batch_counts():
                numbers.append((epoch, number))
            optimizer.zero_grad()
            model(batch[:, None].float()).mean().backward()
            optimizer.step()
            seen["samples"] += len(batch)
            if adl.rank() == 0:
                print(f"epoch {epoch}, batch {number}, of {adl.world_size()} replicas", flush=True)
            wait(OUT, S["pace"], epoch)
        with seen.synchronized():
            best.losses.append(seen["samples"])
            adl.report(samples=seen["samples"])
        if adl.rank() == 0 and run is not None:
            run.write(json.dumps({"epoch": epoch, "samples": best.losses[-1]}) + "\n")
            run.flush()
        scheduler.step()
        wait(OUT, S["between"], epoch)
    result = {
        "best": best.losses,
        "lr": scheduler.get_last_lr(),
        "numbers": numbers,
        "weights": [p.tolist() for p in net.parameters()],
    }
    torch.save(result, OUT / f"result-{adl.rank()}")


if __name__ == "__main__":
    main()
