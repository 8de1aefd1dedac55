"""Workloads: which jobs arrive when, read from a CSV file or generated."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_LATEST = 365 * 86400.0  # latest submission in seconds; bounds the length of a replay

COLUMNS = ("name", "time", "application", "num_replicas", "batch_size")


class WorkloadError(ValueError):
    """A workload or an application's traces cannot be used; the message names file, line and remedy."""


@dataclass(frozen=True)
class Submission:
    """A job of a workload."""

    name: str
    time: float  # seconds after the start
    application: str
    num_replicas: int  # requested by the owner; used by tiresias, optimus and fifo
    batch_size: int  # tuned by the owner for `num_replicas`


def read_workload(path: Path) -> tuple[Submission, ...]:
    """Read the jobs in a CSV file with the columns `COLUMNS`, in the file's order.

    Raises:
        WorkloadError: If the file cannot be read or a line is wrong; the message names the line.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # spreadsheets write a byte order mark
        reader = csv.DictReader(text.splitlines())
        rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise WorkloadError(f"cannot read workload {path}: {error}") from None
    missing = [column for column in COLUMNS if column not in (reader.fieldnames or ())]
    if missing:
        raise WorkloadError(f"{path}: columns {', '.join(missing)} are missing; need {','.join(COLUMNS)}")
    jobs = tuple(_submission(path, number, row) for number, row in enumerate(rows, start=2))
    if not jobs:
        raise WorkloadError(f"{path}: holds no jobs")
    names = [job.name for job in jobs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise WorkloadError(f"{path}: job names must be unique, {', '.join(twice[:3])} occur more than once")
    return jobs


def _submission(path: Path, number: int, row: dict[str, str]) -> Submission:
    def value(column: str, least: float, most: float) -> float:
        try:
            found = float(row[column])
        except (TypeError, ValueError):
            raise WorkloadError(f"{path}:{number}: {column} is {row[column]!r}, need a number") from None
        if not np.isfinite(found):
            raise WorkloadError(f"{path}:{number}: {column} is {row[column]}, need a finite number")
        if found < least:
            raise WorkloadError(f"{path}:{number}: {column} is {row[column]}, need at least {least:g}")
        if found > most:
            raise WorkloadError(f"{path}:{number}: {column} is {row[column]}, need at most {most:g}")
        return found

    for column in ("name", "application"):
        if not row[column]:
            raise WorkloadError(f"{path}:{number}: {column} is empty")

    def whole(column: str, most: float) -> int:
        found = value(column, 1, most)
        if found != int(found):
            raise WorkloadError(f"{path}:{number}: {column} is {row[column]}, need a whole number")
        return int(found)

    replicas, batch_size = whole("num_replicas", 1e6), whole("batch_size", 1e9)
    return Submission(row["name"], value("time", 0, _LATEST), row["application"], replicas, batch_size)
