"""A small elastic job: `train.py EPOCHS SECONDS_PER_STEP`; each replica says how many samples an
epoch had, and where it arrived at the end.

A file `hurry` in the working directory makes it go as fast as it can; without one its steps take longer and
longer from the fifth epoch on, so that a job of 60 epochs outlasts whatever is done to it.
"""

import sys
import time
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import adaptdl_elastic.torch as adl
from adaptdl_elastic.torch._runtime.position import script_position

epochs, pause = int(sys.argv[1]), float(sys.argv[2])
adl.init_process_group("gloo")
torch.manual_seed(0)
features = torch.randn(200, 8, generator=torch.Generator().manual_seed(1))
loader = adl.AdaptiveDataLoader(
    TensorDataset(features, features.sum(1, keepdim=True)), batch_size=40, shuffle=True
)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model = adl.AdaptiveDataParallel(model, optimizer)
for epoch in adl.remaining_epochs_until(epochs):
    for x, y in loader:
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
        time.sleep(0 if Path("hurry").exists() else pause * max(1.0, epoch / 5, (epoch / 10) ** 2))
    print(f"epoch {epoch} had {script_position().samples}", flush=True)
print(f"weights {model.module.weight.sum().item():.6f} of rank {adl.rank()}", flush=True)
