"""The GPUs of this machine, from the driver's files: without a CUDA context."""

from __future__ import annotations

import contextlib
from pathlib import Path


def gpus(folder: Path = Path("/proc/driver/nvidia/gpus")) -> tuple[int, str]:
    """Return how many GPUs the driver knows, and the model of the first, without a CUDA context."""
    found = sorted(folder.glob("*")) if folder.is_dir() else []
    model = ""
    for one in found[:1]:
        with contextlib.suppress(OSError):
            for line in (one / "information").read_text().splitlines():
                name, _, value = line.partition(":")
                if name.strip() == "Model":
                    model = value.strip()
    return len(found), model
