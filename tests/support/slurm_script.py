"""A script that trains in jobs of Slurm until there is a file `finish`, and notes each epoch."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "slurm.md"
TRAIN = """
import os, time
from pathlib import Path
import torch
import adaptdl_elastic.torch as adl
from adaptdl_elastic import collective

adl.init_process_group("gloo")
x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model = adl.AdaptiveDataParallel(model, optimizer)
loader = adl.AdaptiveDataLoader(data, batch_size=8, shuffle=True)
for epoch in adl.remaining_epochs_until(100_000):
    for a, b in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(a), b).backward()
        optimizer.step()
        time.sleep(0.02)
    if os.environ["RANK"] == "0":
        with Path("epochs").open("a") as file:
            print(os.environ.get("SLURM_RESTART_COUNT", "0"), epoch, time.time(), file=file)
    if collective.broadcast(Path("finish").exists()):
        break
"""


def epochs(batch: Path) -> list[tuple[int, int]]:
    """Return the number of restarts and the epoch of each epoch that is over."""
    file = batch.parent / "epochs"
    lines = file.read_text().splitlines() if file.exists() else []
    return [(int(line.split()[0]), int(line.split()[1])) for line in lines]


def batch_file(test: str) -> str:
    """Return the batch file of the page that a test tries."""
    return re.search(rf"^```bash test={test}\n(#!.*?)^```$", PAGE.read_text(), re.M | re.S)[1]
