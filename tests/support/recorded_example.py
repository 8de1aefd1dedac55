"""Run an example of `examples/adaptdl`, and record which samples each of its optimizer steps was made of.

    recorded_example.py EXAMPLE FOLDER ARGUMENTS...

The example itself is unchanged. After each step of the first optimizer that steps on a batch, a line with the
epoch and the batch's indices is written into FOLDER. Until the file `hurry` is there, steps are slow, and
very slow in the second half of an epoch, so that the job does not end before the test has done what it does.
The replica of rank 1 dies where it reads a batch when the file `die` is there, which it removes.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data._utils import fetch

import adaptdl_elastic.torch as adl
from adaptdl_elastic.torch import iterator

SLOW_STEP = 0.02  # seconds
VERY_SLOW_STEP = 1.0  # seconds


def record(folder: Path) -> None:
    """Write a line for each step from now on."""
    block = iterator.Remaining.block
    read, fetched = fetch._MapDatasetFetcher.fetch, list[int]()

    def reads(indices: Any) -> None:
        fetched[:] = indices
        if adl.rank() == 1 and (folder / "die").exists():
            (folder / "die").unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    def fetch_noted(self: Any, indices: Any) -> Any:
        reads(indices)
        return read(self, indices)

    def block_noted(self: Any, *arguments: int) -> Any:
        positions = block(self, *arguments)
        reads(positions.flatten().tolist())
        return positions

    def stepped(optimizer: Any, arguments: Any, options: Any) -> None:
        loader = adl.current_dataloader()
        if not adl.batch_counts() or loader is None:
            return
        adl.report(replicas=adl.world_size())
        if not (folder / "hurry").exists():
            time.sleep(SLOW_STEP if 2 * loader.current_index < loader.end_index else VERY_SLOW_STEP)
        if loader.local_samples and fetched:
            with (folder / f"applied-{os.getpid()}").open("a") as file:
                file.write(" ".join(map(str, (adl.current_epoch(), *fetched))) + "\n")
        fetched.clear()

    fetch._MapDatasetFetcher.fetch = fetch_noted  # type: ignore[method-assign]
    iterator.Remaining.block = block_noted  # type: ignore[method-assign]
    register_optimizer_step_post_hook(stepped)


if __name__ == "__main__":
    torch.set_num_threads(1)
    example, folder, *arguments = sys.argv[1:]
    sys.argv = [example, *arguments]
    record(Path(folder))
    runpy.run_path(example, run_name="__main__")
