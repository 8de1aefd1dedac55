"""Let a script's steps take their time until all is done that a test does to it."""

from __future__ import annotations

import time
from pathlib import Path


def wait(folder: Path, seconds: float, epoch: int = 0) -> None:
    """Sleep as long as a step of this epoch takes, unless there is a file `hurry` in the folder.

    Steps take longer and longer from the fifth epoch on. So few epochs outlast whatever is done on a busy
    machine, and those that are left then cost little.
    """
    if not (folder / "hurry").exists():
        time.sleep(seconds * max(1.0, (epoch / 4) ** 2))
