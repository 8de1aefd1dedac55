"""A small model whose training can be compared with one that was never disturbed. LOOP holds settings."""

import json
import os
from pathlib import Path

import torch
from long_steps import wait
from torch.utils.data import TensorDataset

import adaptdl_elastic.torch as adl

S = {"epochs": 3, "size": 640, "batch": 8, "pace": 0.0, "scheduler": "exponential"}
S |= json.loads(os.environ["LOOP"])
OUT = Path(os.environ["OUT"])


class Versioned(torch.nn.Linear):
    """Refuses a state dict that does not say of which version it is, as torchvision's MNASNet does."""

    _version = 2

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
        if local_metadata.get("version") != 2:
            raise ValueError(f"version {local_metadata.get('version')} of {prefix}")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def schedule(optimizer):
    kinds = torch.optim.lr_scheduler
    if S["scheduler"] == "exponential":
        return kinds.ExponentialLR(optimizer, 0.7)
    steps = kinds.MultiStepLR(optimizer, [1, 3, 3], gamma=0.5)
    if S["scheduler"] == "steps":
        return steps
    return kinds.SequentialLR(optimizer, [kinds.LinearLR(optimizer, 0.5, total_iters=2), steps], [2])


def main():
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    inputs = torch.randn(S["size"], 10)
    targets = (inputs @ torch.randn(10, 1)).tanh()
    adl.init_process_group("gloo")
    loader = adl.AdaptiveDataLoader(TensorDataset(inputs, targets), batch_size=S["batch"], shuffle=True)
    test = adl.AdaptiveDataLoader(TensorDataset(inputs, targets), batch_size=64)
    net = torch.nn.Sequential(torch.nn.Linear(10, 16), torch.nn.Tanh(), Versioned(16, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    scheduler = schedule(optimizer)
    model = adl.AdaptiveDataParallel(net, optimizer, scheduler)
    losses = []
    for epoch in adl.remaining_epochs_until(S["epochs"]):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            wait(OUT, S["pace"], epoch)
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
        "lr": scheduler.get_last_lr(),
        "losses": losses,
    }
    torch.save(result, OUT / f"result-{adl.rank()}")


if __name__ == "__main__":
    main()
