"""Train a network sharded by fully_shard; write down the samples of each step and the final weights.

The optimizer steps after every `--every` batches of an epoch. What is left at the epoch's end is part of the
next epoch's first step. FOLDER/record-PID gets a line per batch, FOLDER/final.pt the weights and the
optimizer's state. Until there is a file `hurry` in FOLDER a batch takes a while. With `--plain` the model is
not sharded.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset

import adaptdl_elastic.torch as adl

SIZE, BATCH, EPOCHS = 485, 12, 6  # the last batch of an epoch has 5 samples
WIDTH = 13  # rows that cannot be divided by 2 or 3


def network() -> torch.nn.Sequential:
    torch.manual_seed(7)
    layers = [torch.nn.Linear(6, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--every", type=int, default=1, help="batches per optimizer step")
    parser.add_argument("--copies", type=int, default=1)
    parser.add_argument("--most", type=int, help="samples of a replica's batch; the loader accumulates")
    args = parser.parse_args()
    adl.init_process_group("gloo")
    inputs = torch.randn(SIZE, 6, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin(), torch.arange(SIZE))
    loader = adl.AdaptiveDataLoader(data, batch_size=BATCH, shuffle=True)
    if args.most:
        loader.autoscale_batch_size(BATCH, local_bsz_bounds=(1, args.most), gradient_accumulation=True)
    net = network()
    if not args.plain:
        for layer in net:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer)
        fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    held = list(net.parameters())
    if args.plain:
        model: torch.nn.Module = adl.AdaptiveDataParallel(net, optimizer, scheduler)
    else:
        model = adl.AdaptiveFSDP(net, optimizer, scheduler, copies=args.copies)
    for epoch in adl.remaining_epochs_until(EPOCHS):
        for turn, (x, y, numbers) in enumerate(loader):
            step = int(optimizer.state[held[0]]["step"]) + 1 if held[0] in optimizer.state else 1
            # before the step: a replica that dies right after it has no time to
            local = adl.current_dataloader().local_samples
            fields = {
                "epoch": epoch,
                "step": step,
                "generation": int(os.environ.get("ADAPTDL_GENERATION", "0")),
                "samples": numbers.tolist()[:local],
            }
            with (args.folder / f"record-{os.getpid()}").open("a") as file:
                file.write(json.dumps(fields) + "\n")
            torch.nn.functional.mse_loss(model(x), y).backward()
            if (turn + 1) % args.every == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                if adl.is_optim_step():
                    scheduler.step()
                optimizer.zero_grad()
            assert [id(param) for param in held] == [id(param) for param in net.parameters()]
            if not (args.folder / "hurry").exists():
                time.sleep(0.5)
    state = {name: whole(value) for name, value in net.state_dict().items()}
    moments = [
        {key: whole(value) for key, value in optimizer.state[param].items()} for param in net.parameters()
    ]
    if adl.rank() == 0:
        torch.save({"model": state, "optimizer": moments}, args.folder / "final.pt")


def whole(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()


if __name__ == "__main__":
    main()
