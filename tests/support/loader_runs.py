"""Jobs over loaders of other kinds, and what they must have handed out; loaders_script is the job."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import fake_agent
import generations

SCRIPT = Path(__file__).parent / "loaders_script.py"
CHANGED = 600
"""Size of the data of `changes`: its epoch takes two minutes, unless it is told to hurry."""


def run(folder: Path, replicas: int, code: int = 0, **settings: Any) -> str:
    """One generation, started by hand; what its replicas printed."""
    return generations.run_settings(SCRIPT, replicas, folder, code, **settings)


def restarts(folder: Path, **settings: Any) -> None:
    """1, 2, 3 and 1 replicas in an epoch, each generation from the checkpoint of the one before."""
    for replicas, batches in ((1, 2), (2, 2), (3, 1)):
        run(folder, replicas, 143, stop=[0, batches], **settings)
    run(folder, 1, **settings)


def changes(folder: Path, **settings: Any) -> None:
    """1, 2, 3 replicas in place, then one dies, and one leaves."""
    loop = {"size": CHANGED, "batch": 6, "pace": 0.4, **settings}
    with fake_agent.running(SCRIPT, folder, 1, **loop) as job:
        job.wait_for("step")
        job.rescale(2)
        job.rescale(3)
        job.drain()
        job.wait_for("step")
        job.recover(2)
        job.rescale(1)
        job.finish()


def handed_out(folder: Path) -> Counter[int]:
    """How often every sample of epoch 0 was handed out so that it counts.

    A step that broke off is made again at the same index by those who are left.
    """
    windows: dict[int, tuple[int, dict[int, list[int]]]] = {}
    order = sorted(generations.records(folder), key=lambda line: -line["replicas"])
    for line in order:  # of an index that was made by two generations, the smaller one came later
        if line["epoch"] == 0:
            known = windows.get(line["index"])
            if known is None or known[0] != line["replicas"]:
                known = windows[line["index"]] = (line["replicas"], {})
            known[1][line["rank"]] = line["samples"][: line["local"]]
    count: Counter[int] = Counter()
    for _, ranks in windows.values():
        for samples in ranks.values():
            count.update(samples)
    return count


def once(size: int) -> Counter[int]:
    """Every sample exactly once."""
    return Counter(range(size))
