"""A script whose replicas drift apart, or seem to. LOOP says how.

kind: clause, steps with every fourth batch and where the counter meets `len(loader)`; right, where it meets
`adl.expected_batches()`;
step, edit and parameter, what one rank does alone; scaler, gradients that are inf; gan, two models of which
one steps with every second batch. no_sync: accumulate in `no_sync()`. dies: a rank that kills itself in
mid-epoch. grows: wait in the first epoch until the number of replicas is about to change.
"""

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import torch

import adaptdl_elastic.torch as adl
from adaptdl_elastic import _session

S = {"kind": "clause", "no_sync": False, "size": 132, "epochs": 3, "grows": False, "dies": -1}
S |= json.loads(os.environ["LOOP"])
OUT = Path(os.environ["OUT"])
KIND = S["kind"]


def main():
    torch.manual_seed(3)
    adl.init_process_group("gloo")
    net = torch.nn.Linear(4, 1)
    net.frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0) if KIND == "scaler" else None
    model = adl.AdaptiveDataParallel(net, optimizer, mp_scaler=scaler)
    if KIND == "gan":
        second = torch.nn.Linear(4, 1)
        optimizer2 = torch.optim.SGD(second.parameters(), lr=0.01)
        model2 = adl.AdaptiveDataParallel(second, optimizer2, name="second")
    loader = adl.AdaptiveDataLoader(torch.randn(S["size"], 4), batch_size=12, shuffle=True)
    session = _session.current()
    every = 4 if KIND in ("clause", "right") else 1
    for epoch in adl.remaining_epochs_until(S["epochs"]):
        for i, batch in enumerate(loader):
            end = adl.expected_batches() if KIND == "right" else len(loader)
            index = adl.current_dataloader().current_index
            last = i + 1 == end or (i + 1) % every == 0
            with contextlib.nullcontext() if last or not S["no_sync"] else model.no_sync():
                loss = model(batch).square().mean()
                if KIND == "scaler":
                    loss = loss * (float("inf") if i == 2 else 1.0)
                    loss = scaler.scale(loss)
                loss.backward()
            if KIND == "step" and index >= 60 and adl.rank() != 0:
                last = False
            if last:
                if scaler is None:
                    optimizer.step()
                else:
                    scaler.step(optimizer)
                    scaler.update()
                optimizer.zero_grad()
            if KIND == "gan":
                model2(batch).square().mean().backward()
                if index // 12 % 2:
                    optimizer2.step()
                optimizer2.zero_grad()
            if KIND in ("edit", "parameter") and index == 60 and adl.rank() == 0:
                (net.weight if KIND == "edit" else net.frozen).data.add_(1)
            if adl.rank() == S["dies"] and (session.generation, epoch, index) == (0, 1, 60):
                os.kill(os.getpid(), signal.SIGKILL)
            while S["grows"] and index >= 24 and session.generation == 0 and not session.consensus.round_open:
                time.sleep(0.01)
    torch.save(net.state_dict(), OUT / f"weights-{adl.rank()}")


if __name__ == "__main__":
    main()
