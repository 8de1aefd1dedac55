"""Print which product files one training step runs through: python tests/support/step_path.py.

Counted are the calls of product functions in the main thread, and the changes of file: two consecutive
calls or returns of product functions that lie in different files.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils.data import TensorDataset

import adaptdl_elastic
import adaptdl_elastic.torch as adl
from adaptdl_elastic import _session

PRODUCT = f"{Path(adaptdl_elastic.__file__).resolve().parent}/"
SETTLED = 300
"""Steps after which every part is made, and the noise is measured at some steps only."""
LAST = 400


@dataclass
class StepPath:
    """The product functions that one step of training runs, in their order."""

    calls: Counter[str] = field(default_factory=Counter)
    changes: Counter[tuple[str, str]] = field(default_factory=Counter)
    _at: str | None = None

    @property
    def files(self) -> set[str]:
        return {call.partition(":")[0] for call in self.calls}

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(PRODUCT):
            return
        file = code.co_filename.removeprefix(PRODUCT)
        if event == "call":
            name = getattr(code, "co_qualname", code.co_name)
            self.calls[f"{file}:{name}"] += 1
        if self._at not in (None, file):
            self.changes[self._at, file] += 1
        self._at = file


def train(each: Any) -> None:
    """Train a tiny model for `LAST` steps; call `each(step)` between two steps."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    adl.init_process_group("gloo")
    x = torch.randn(6400, 8)
    loader = adl.AdaptiveDataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, shuffle=True)
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = adl.AdaptiveDataParallel(net, optimizer)
    step = 0
    for _ in adl.remaining_epochs_until(1):
        for inputs, targets in loader:
            each(step)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            step += 1
    _session.reset()


def paths() -> list[StepPath]:
    """Return the path of each step after `SETTLED`."""
    found: list[StepPath] = []

    def each(step: int) -> None:
        if step >= SETTLED:
            found.append(StepPath())
            sys.setprofile(found[-1].note)

    try:
        train(each)
    finally:
        sys.setprofile(None)
    return found[:-1]


def cpu_seconds() -> float:
    """Return the median of the seconds of CPU time of the main thread in a step after `SETTLED`."""
    times: list[float] = []
    train(lambda step: times.append(time.thread_time()))
    return statistics.median(after - before for before, after in pairwise(times[SETTLED:]))


def main() -> None:
    if "--cpu" in sys.argv:
        print(f"{cpu_seconds() * 1e6:.0f}")
        return
    found = [
        (len(path.files), sum(path.changes.values()), sum(path.calls.values()), path) for path in paths()
    ]
    if "--least" in sys.argv:
        print(*min(one[:3] for one in found))
        return
    kinds: dict[tuple[int, int, int], list[StepPath]] = {}
    for *key, path in found:
        kinds.setdefault((key[0], key[1], key[2]), []).append(path)
    for (files, changes, calls), same in sorted(kinds.items(), key=lambda kind: -len(kind[1])):
        print(f"{len(same):3} steps: {files} files, {changes} changes of file, {calls} calls")
    most = max(kinds.values(), key=len)[0]
    print("\nthe most frequent kind, changes of file:")
    for (one, other), times in most.changes.most_common():
        print(f"{times:4}  {one} -> {other}")
    print("\ncalls:")
    for call, times in most.calls.most_common():
        print(f"{times:4}  {call}")


if __name__ == "__main__":
    main()
