"""Workloads: which jobs arrive when, read from a CSV file of the traces."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Submission:
    """A job of a workload."""

    name: str
    time: float  # seconds after the start
    application: str
    num_replicas: int  # requested by the owner; used by tiresias and fifo
    batch_size: int  # tuned by the owner for `num_replicas`


def read_workload(path: Path) -> tuple[Submission, ...]:
    """Read the jobs in a CSV file with the names of `Submission` as columns, in the file's order."""
    with path.open(newline="", encoding="utf-8") as file:
        return tuple(
            Submission(
                row["name"],
                float(row["time"]),
                row["application"],
                int(row["num_replicas"]),
                int(row["batch_size"]),
            )
            for row in csv.DictReader(file)
        )
