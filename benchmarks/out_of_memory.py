"""What a batch costs that does not fit into memory, by a limit in samples that is injected into the model.

    adaptdl-run --standalone --nproc-per-node 2 benchmarks/out_of_memory.py forward|backward

An MLP of 4 M parameters is trained with 64 samples on each replica; from step 20 on 40 samples fit on the
last rank. Rank 0 prints the median time of a step before and after, and of the step that did not fit, from
the end of the step before it until it was taken.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch

import adaptdl_elastic.torch as adl

STEPS, FROM, MOST, BATCH = 60, 20, 40, 64
WHERE = sys.argv[1]


def check(samples: int, limited: bool) -> None:
    """Raise the error of an exhausted device."""
    if limited and samples > MOST and adl.rank() == adl.world_size() - 1:
        raise torch.OutOfMemoryError(f"{samples} samples")


class Backward(torch.autograd.Function):
    """The identity, whose backward pass may not fit."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, limited: bool) -> torch.Tensor:
        ctx.limited = limited
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        check(len(gradient), ctx.limited)
        return gradient, None


class Net(torch.nn.Sequential):
    """An MLP with a limit."""

    limited = False

    def forward(self, inputs: torch.Tensor) -> Any:
        if WHERE == "forward":
            check(len(inputs), self.limited)
        outputs = super().forward(inputs)
        return Backward.apply(outputs, self.limited and WHERE == "backward")  # type: ignore[no-untyped-call]


def main() -> None:
    torch.set_num_threads(1)
    adl.init_process_group("gloo")
    net = Net(*(layer for _ in range(4) for layer in (torch.nn.Linear(1024, 1024), torch.nn.ReLU())))
    model = adl.AdaptiveDataParallel(net, torch.optim.SGD(net.parameters(), lr=0.01))
    batch = BATCH * adl.world_size()
    loader = adl.AdaptiveDataLoader(torch.randn(STEPS * batch, 1024), batch_size=batch)
    ends: list[tuple[float, int]] = []  # of steps that were taken: time, and samples before them
    for _ in adl.remaining_epochs_until(1):
        ends.append((time.perf_counter(), 0))
        for inputs in loader:
            done = adl.current_dataloader().current_index
            net.limited = done >= FROM * batch
            model.optimizer.zero_grad()
            model(inputs).square().mean().backward()
            model.optimizer.step()
            if adl.is_optim_step():
                ends.append((time.perf_counter(), done // batch))
    if adl.rank() == 0:
        times = {step: now for now, step in ends}  # a repeated step counts when it is taken
        steps = [times[step] - times[step - 1] for step in sorted(times) if step - 1 in times]
        before, after = statistics.median(steps[5:FROM]), statistics.median(steps[FROM + 3 :])
        failed = steps[FROM - 1]
        print(f"{WHERE}: step {before:.4f} s, then {after:.4f} s; the step that did not fit {failed:.4f} s")


if __name__ == "__main__":
    main()
