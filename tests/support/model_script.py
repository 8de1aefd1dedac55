"""A small model whose training can be compared with one that was never disturbed. LOOP holds settings."""

import json
import os
import time
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import adaptdl_elastic.torch as adl

S = {"epochs": 3, "size": 640, "batch": 8, "pace": 0.0, "optimizer": "sgd", **json.loads(os.environ["LOOP"])}
OUT = Path(os.environ["OUT"])


def main():
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    inputs = torch.randn(S["size"], 10)
    targets = (inputs @ torch.randn(10, 1)).tanh()
    adl.init_process_group("gloo")
    loader = adl.AdaptiveDataLoader(TensorDataset(inputs, targets), batch_size=S["batch"], shuffle=True)
    test = adl.AdaptiveDataLoader(TensorDataset(inputs, targets), batch_size=64)
    net = torch.nn.Sequential(torch.nn.Linear(10, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    if S["optimizer"] == "adam":
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    else:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    model = adl.AdaptiveDataParallel(net, optimizer, scheduler)
    losses = []
    for _ in adl.remaining_epochs_until(S["epochs"]):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            if not (OUT / "hurry").exists():
                time.sleep(S["pace"])  # what a step takes
        stats = adl.Accumulator()
        with torch.no_grad():
            for x, y in test:
                stats["loss"] += torch.nn.functional.mse_loss(model(x), y, reduction="sum").item()
                stats["count"] += len(x)
        with stats.synchronized():
            losses.append(stats["loss"] / stats["count"])
            assert stats["count"] == S["size"]
        scheduler.step()
    result = {
        "parameters": [p.detach() for p in net.parameters()],
        "optimizer": optimizer.state_dict(),
        "lr": scheduler.get_last_lr(),
        "losses": losses,
        "progress": model.gns.get_progress(),
    }
    torch.save(result, OUT / f"result-{adl.rank()}")


if __name__ == "__main__":
    main()
