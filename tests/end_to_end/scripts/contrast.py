"""SimCLR's loss over the whole batch by `adl.gather`: `contrast.py EPOCHS SECONDS_PER_STEP`.

A file `hurry` in the working directory makes it go as fast as it can. The process that a file `die` names by
its id ends in the middle of a gather: behind the exchange of the numbers of rows.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.nn.functional as F

import adaptdl_elastic.torch as adl

dist: Any = torch.distributed


def dying(real: Any) -> Any:
    def reduced(tensor: torch.Tensor, **options: Any) -> Any:
        told = Path("die").read_text() if Path("die").exists() else ""
        if tensor.dtype == torch.uint8 and told == str(os.getpid()):
            os.kill(os.getpid(), signal.SIGKILL)
        return real(tensor, **options)

    return reduced


def main() -> None:
    epochs, pause = int(sys.argv[1]), float(sys.argv[2])
    torch.manual_seed(3)
    samples = torch.randn(88, 6, dtype=torch.double)
    adl.init_process_group("gloo")
    dist.all_reduce = dying(dist.all_reduce)
    loader = adl.AdaptiveDataLoader(samples, batch_size=8, shuffle=True)
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4)).double()
    model = adl.AdaptiveDataParallel(net, torch.optim.SGD(net.parameters(), lr=0.05))
    values = adl.Values(total=0.0, steps=0)
    for _ in adl.remaining_epochs_until(epochs):
        for x in loader:
            model.zero_grad()
            one, other = model(torch.cat([x, x.roll(1, 1)])).split(len(x))
            views = F.normalize(torch.cat([adl.gather(one), adl.gather(other)]))
            labels = torch.arange(len(views)).roll(len(views) // 2)
            loss = F.cross_entropy((views @ views.T * 4).fill_diagonal_(-1e9), labels)
            loss.backward()
            model.optimizer.step()
            values.total += round(loss.item(), 7)
            values.steps += 1
            time.sleep(0 if Path("hurry").exists() else pause)
        adl.report(steps=values.steps)
    if adl.rank() == 0:
        weights = [round(p.sum().item(), 9) for p in net.parameters()]
        print(f"ended with {weights}, {values.total:.5f} in {values.steps} steps", flush=True)


if __name__ == "__main__":
    main()
