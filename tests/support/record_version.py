"""Write down that the tests of `make matrix` have passed with this Python and this torch, at which commit."""

from __future__ import annotations

import csv
import datetime
import platform
import subprocess
from pathlib import Path

RECORD = Path(__file__).resolve().parents[1] / "versions.csv"


def runs() -> list[dict[str, str]]:
    """Return the runs that have passed, each with `python`, `torch`, `date` and `commit`."""
    with RECORD.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def main() -> None:
    import torch

    describe = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, cwd=RECORD.parent, capture_output=True, text=True, check=True)
    release = torch.__version__.partition("+")[0]
    with RECORD.open("a", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerow(
            (platform.python_version(), release, datetime.date.today().isoformat(), commit.stdout.strip())
        )


if __name__ == "__main__":
    main()
