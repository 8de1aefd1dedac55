"""A script whose replicas read the wrong data, of the kind that LOOP names."""

from __future__ import annotations

import json
import os

import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import adaptdl_elastic.torch as adl

KIND = json.loads(os.environ["LOOP"])["kind"]
STEPS = 40
SAMPLES = torch.arange(8.0 * STEPS).unsqueeze(1) / (8.0 * STEPS)


class Stream(IterableDataset):
    def __iter__(self):
        rank, replicas = (adl.rank(), adl.world_size()) if KIND == "divided stream" else (0, 1)
        return iter(SAMPLES[rank::replicas])


def main() -> None:
    torch.manual_seed(0)
    adl.init_process_group("gloo")
    data = TensorDataset(SAMPLES)
    if "stream" in KIND:
        loader = adl.AdaptiveDataLoader(Stream(), batch_size=8)
    elif KIND == "plain":
        loader = DataLoader(data, batch_size=8, shuffle=True)
    else:
        loader = adl.AdaptiveDataLoader(data, batch_size=8, shuffle=True)
        if KIND == "remade":
            loader = DataLoader(data, batch_sampler=loader.batch_sampler)
    model = torch.nn.Linear(1, 1)
    rate = 0.001 * (adl.rank() + 1) if KIND == "own rate" else 0.001
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    scheduler = None
    if KIND in ("sound", "plain"):  # another learning rate in every step, and the same on all replicas
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
    model = adl.AdaptiveDataParallel(model, optimizer, scheduler)
    model.own_random_streams = KIND != "equal noise"
    for _ in adl.remaining_epochs_until(1):
        for batch in loader:
            x = batch if "stream" in KIND else batch[0]
            if "noise" in KIND:
                x = torch.randn(4, 1)
            optimizer.zero_grad()
            if KIND == "own rate":  # as a loop does that computes it from a counter of its own
                optimizer.param_groups[0]["lr"] = rate
            (model(x) - 2 * x + 1).square().mean().backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()


main()
