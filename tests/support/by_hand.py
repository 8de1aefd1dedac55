"""Replicas started by hand, without a launcher, as a person would on several nodes."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ports import free_port

ROOT = Path(__file__).resolve().parents[2]


class Ended(NamedTuple):
    """How a replica ended, and all that it printed."""

    code: int
    output: str


def run_replicas(
    arguments: Sequence[str],
    replicas: int,
    environment: Mapping[str, str] | None = None,
    *,
    generation: int = 0,
    timeout: float = 200.0,
) -> list[Ended]:
    """Run `python *arguments` as that many replicas; how each ended, by rank. Leaves none behind."""
    common = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'support'}",
        "OMP_NUM_THREADS": "1",
        "ADAPTDL_MASTER_ADDR": "127.0.0.1",
        "ADAPTDL_MASTER_PORT": str(free_port()),
        "ADAPTDL_NUM_REPLICAS": str(replicas),
        "ADAPTDL_NUM_RESTARTS": str(generation),
        "ADAPTDL_SECRET": secrets.token_hex(8),
        **(environment or {}),
    }
    outputs = [tempfile.TemporaryFile("w+") for _ in range(replicas)]  # noqa: SIM115
    processes = [
        subprocess.Popen(
            [sys.executable, *arguments],
            env={**common, "ADAPTDL_REPLICA_RANK": str(rank)},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        for rank, output in enumerate(outputs)
    ]
    try:
        for process in processes:
            process.wait(timeout)
        ended = []
        for process, output in zip(processes, outputs, strict=True):
            output.seek(0)
            ended.append(Ended(process.returncode, output.read()))
        return ended
    finally:
        for process, output in zip(processes, outputs, strict=True):
            if process.poll() is None:
                process.kill()
                process.wait()
            output.close()
