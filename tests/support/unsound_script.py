"""A script whose training learns nothing: `unsound_script.py KIND EPOCHS`, of test_health.py.

It ends early once the file `end` is in the working directory.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import adaptdl_elastic.torch as adl

KIND, EPOCHS = sys.argv[1], int(sys.argv[2])
SMALL = KIND in ("small", "dropped")
STEPS = 60
LIMIT = 100
"""Epochs above which the script waits for the file `end`, at a pace that leaves the machine to others."""


def main() -> None:
    adl.init_process_group("gloo")
    torch.manual_seed(0)
    samples = 24 if SMALL else 8 * STEPS
    data = TensorDataset(torch.randn(samples, 3))
    batch = {"small": 32, "dropped": 32}.get(KIND, 8)
    loader = adl.AdaptiveDataLoader(data, batch_size=batch, drop_last=KIND == "dropped")
    model = torch.nn.Linear(3, 1)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(
        "cpu", enabled=KIND.startswith("scaled"), init_scale=2.0 ** (40 if KIND == "scaled search" else 16)
    )
    parallel = adl.AdaptiveDataParallel(model, optimizer, mp_scaler=scaler)
    step = 0
    for _ in adl.remaining_epochs_until(EPOCHS):
        for (x,) in loader:
            optimizer.zero_grad()
            loss = parallel(x).square().mean()
            if KIND in ("nan", "scaled") or (KIND == "recovers" and 5 <= step < 45):
                loss = loss * float("nan")
            elif KIND == "scaled search" and scaler.get_scale() > 2.0**4:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if KIND == "recovers":
                model.load_state_dict(start)
            step += 1
            if EPOCHS > LIMIT:
                time.sleep(0.01)
        if Path("end").exists():
            return


main()
