"""A training script that draws random numbers everywhere, and writes down which.

Settings come as JSON in LOOP. With "stop" [epoch, index] the job stops after that step. With "hold" [epoch,
index] the replicas of the first generation make a file `held-<rank>` in that step and wait for the file `go`.
"""

import json
import os
import random
import time
from pathlib import Path

import numpy as np
import torch
from step_records import note, stop
from torch.utils.data import TensorDataset

import adaptdl_elastic.torch as adl

S = {"epochs": 2, "size": 48, "batch": 12, "own": True, "seed": 5, "stop": None, "hold": None}
S |= json.loads(os.environ.get("LOOP", "{}"))
OUT = Path(os.environ["OUT"])


def draw():
    return [torch.rand(()).item(), float(np.random.rand()), random.random()]


def main():
    torch.manual_seed(S["seed"])
    random.seed(S["seed"])
    np.random.seed(S["seed"])
    first = "ADAPTDL_JOIN" not in os.environ
    adl.init_process_group("gloo")
    data = TensorDataset(torch.randn(S["size"], 4))
    loader = adl.AdaptiveDataLoader(data, batch_size=S["batch"], shuffle=True)
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    initial = [parameter.sum().item() for parameter in module.parameters()]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    model = adl.AdaptiveDataParallel(module, optimizer)
    model.own_random_streams = S["own"]
    note(what="model", initial=initial)
    for epoch in adl.remaining_epochs_until(S["epochs"]):
        for (batch,) in loader:
            index = adl.current_dataloader().current_index
            mask = torch.nn.functional.dropout(torch.ones(8)).tolist()
            note(what="step", epoch=epoch, index=index, drawn=draw(), mask=mask)
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            if S["stop"] == [epoch, index]:
                stop()
            while S["hold"] == [epoch, index] and first and not (OUT / "go").exists():
                (OUT / f"held-{adl.rank()}").touch()
                time.sleep(0.01)
        note(what="between", epoch=epoch, drawn=draw())


if __name__ == "__main__":
    main()
