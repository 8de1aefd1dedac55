"""The job of `make ec2-demo`: image_classification.py's network, trained until a file appears.

So the story is never too long or too short for the machine that it is told on; it ends like any other
job, after a whole epoch, by coming to the end of its script.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from image_classification import Net, evaluate, train
from image_data import load
from torch.utils.data import Subset

import adaptdl_elastic.torch as adl

MANY, LARGE = 1_000_000, 1400  # epochs; images of an epoch: it has to end soon wherever this runs


def told(end: Path) -> bool:
    """Whether the end has come, the same answer on every replica."""
    seen = adl.Accumulator()
    seen["end"] += int(end.exists())
    with seen.synchronized():
        return bool(seen["end"] > 0)


def main(end: Path) -> None:
    torch.manual_seed(0)
    data = load(None)
    adl.init_process_group("gloo")
    loader = adl.AdaptiveDataLoader(
        Subset(data.train, range(min(LARGE, len(data.train)))), batch_size=32, shuffle=True
    )
    loader.autoscale_batch_size(256, local_bsz_bounds=(16, 128), gradient_accumulation=True)
    held_out = adl.AdaptiveDataLoader(Subset(data.test, range(min(300, len(data.test)))), batch_size=150)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    model = adl.AdaptiveDataParallel(net, optimizer)
    for epoch in adl.remaining_epochs_until(MANY):
        train(model, loader, optimizer, "cpu")
        loss, accuracy = evaluate(model, held_out, "cpu")
        adl.report(epoch=epoch, loss=loss, accuracy=accuracy)
        if told(end):
            break


if __name__ == "__main__":
    main(Path(sys.argv[1]))
