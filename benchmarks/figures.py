"""Write the page of figures, benchmarks/README.md, from results/figures.json.

    python benchmarks/figures.py                      write the page
    python benchmarks/figures.py --check              fail if the page or a text that quotes a figure differs
    python benchmarks/figures.py --measure [ROW ...]  measure (make figures), record, and write the page

A row of figures.json holds figures, their goals, another program's figure (`beside`), when and where it was
measured, and `run`: commands, each with the places of its figures in the JSON that the command prints. Rows
without `run` say what they need: a person measures them, and writes them down with what the benchmark prints.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "figures.json"
PAGE = ROOT / "benchmarks" / "README.md"
END = "<!-- end of the rows -->"
LONGEST_LINE = 120  # columns
MOST_ROWS = 25
SECONDS_OF_ALL = 13 * 60  # no further command begins after these
SECONDS_OF_ONE = 240

QUOTES = (
    ("README.md", "go on with one more: [{figure}]", "gpu-join"),
    ("README.md", "the others go on: [{figure}]", "gpu-death"),
    ("README.md", "all restart: [{beside}]", "gpu-death"),
    ("README.md", "one H100, ranks that share it, {date}.", "gpu-join"),
    ("docs/reference/versions.md", "one H100 80 GB, once ({date}, commit {commit},", "gpu-join"),
)
"""Texts that quote a row: the file, the text with fields of the row, and the row's name."""


@dataclass
class Row:
    """A line of the page."""

    row: str
    heading: str
    what: str
    figure: list[float]
    unit: str
    joined: str  # what stands between two figures: " / ", or "–" for a range
    sign: str  # of the goals
    goal: list[float | None]  # of each figure
    beside: str  # another program, or nothing
    beside_figure: str
    commit: str
    date: str
    machine: str
    load: str
    needs: str
    run: list[tuple[str, list[str]]]

    def missed(self) -> list[bool]:
        """For each figure, whether it misses its goal."""
        pairs = zip_longest(self.figure, self.goal[: len(self.figure)])
        return [g is not None and (f > g if self.sign == "≤" else f < g) for f, g in pairs]

    def line(self) -> str:
        goals = list(dict.fromkeys(f"{g:g}" for g in self.goal if g is not None))  # equal ones once
        goal = f"{self.sign} {' / '.join(goals)}" if goals else "–"
        cells = [
            self.what,
            self.joined.join(
                f"**{f:g}**" if m else f"{f:g}" for f, m in zip(self.figure, self.missed(), strict=True)
            )
            + self.unit,
            f"{goal}{' ✗' * any(self.missed())}",
            f"{self.beside} {self.beside_figure}".strip() or "–",
            f"{self.date} {self.commit}",
            f"{self.machine}{'°' * bool(self.needs)}, {self.load}",
        ]
        return f"| {' | '.join(cells)} |"

    def quoted(self, text: str) -> str:
        figure = self.joined.join(f"{f:g}" for f in self.figure) + self.unit
        return text.format(figure=figure, beside=self.beside_figure, date=self.date, commit=self.commit)


def read() -> list[Row]:
    return [Row(**one) for one in json.loads(RESULTS.read_text(encoding="utf-8"))]


def write(rows: list[Row]) -> None:
    """Write the results, a row a line, and the page."""
    lines = ",\n".join(json.dumps(asdict(row), ensure_ascii=False) for row in rows)
    RESULTS.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    PAGE.write_text(page(rows), encoding="utf-8")


def page(rows: list[Row]) -> str:
    """Return the page as it should be: a table between the marks of each heading, and the rest as it is."""

    def table(mark: re.Match[str]) -> str:
        head = [mark[1], "| what | figure | goal | beside | measured | on, load |", 6 * "|---" + "|"]
        return "\n".join([*head, *(row.line() for row in rows if row.heading == mark[2]), END])

    return re.sub(f"(?s)(<!-- rows: ([a-zA-Z ]+) -->)\n.*?{END}", table, PAGE.read_text(encoding="utf-8"))


def wrong(rows: list[Row]) -> list[str]:
    """Return what is wrong with the page, and with texts that quote it."""
    text = PAGE.read_text(encoding="utf-8")
    found = [f"{row.row}: too long" for row in rows if len(row.line()) > LONGEST_LINE]
    found += [f"{row.row}: not on the page" for row in rows if row.line() not in text]
    if page(rows) != text:
        found.append(f"{PAGE.name} is not made of {RESULTS.name}: run benchmarks/figures.py")
    if len(rows) > MOST_ROWS:
        found.append(f"{len(rows)} rows; {MOST_ROWS} are allowed")
    named = {row.row: row for row in rows}
    texts = [(file, named[name].quoted(text)) for file, text, name in QUOTES]
    return found + [
        f"{file}: not said: {t}" for file, t in texts if t not in (ROOT / file).read_text("utf-8")
    ]


def here() -> dict[str, str]:
    """Return the commit, date, machine and load of now, for what a benchmark prints."""
    command = ["git", "rev-parse", "--short=7", "HEAD"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    date, machine = time.strftime("%Y-%m-%d"), f"{os.cpu_count()} cores"
    return {"commit": commit, "date": date, "machine": machine, "load": f"{os.getloadavg()[0]:.1f}"}


def record(row: Row, figures: list[float]) -> None:
    """Put figures of now into a row."""
    row.figure = [round(one, 3) for one in figures]
    for name, value in here().items():
        setattr(row, name, value)


def figures_of(command: str, places: list[str]) -> list[float]:
    """Run a command, or several by pipes, and return the figures at these places of its JSON."""
    text = ""
    for name, *arguments in map(shlex.split, command.split("|")):
        words = [sys.executable, str(ROOT / "benchmarks" / name), *arguments]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            try:
                text, _ = process.communicate(text, timeout=SECONDS_OF_ONE)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)  # so that it ends what it has started
                raise
        if process.returncode:
            raise RuntimeError(f"{command} ended with {process.returncode}")
    found = json.loads(text)
    figures = []
    for place in places:
        value: Any = found
        for key in place.split("."):
            value = value[int(key) if isinstance(value, list) else key]
        figures.append(float(value))
    return figures


def measure(rows: list[Row], names: list[str]) -> list[str]:
    """Measure the rows of these names, or all that take minutes, and return those that were not measured."""
    left, end, commit = [], time.monotonic() + SECONDS_OF_ALL, here()["commit"]
    for row in rows:
        if (names and row.row not in names) or row.commit == commit:
            continue
        if not row.run:
            left.append(f"{row.row}: needs {row.needs}")
        elif time.monotonic() > end:
            left.append(f"{row.row}: no time was left; the same command goes on with it")
        else:
            try:
                record(row, [one for command, places in row.run for one in figures_of(command, places)])
                write(rows)
                print(row.line(), flush=True)
            except (RuntimeError, ValueError, LookupError, subprocess.TimeoutExpired) as error:
                left.append(f"{row.row}: {error}")
    return left


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--measure", nargs="*", metavar="ROW")
    arguments = parser.parse_args()
    rows = read()
    if arguments.check:
        found = wrong(rows)
        print("\n".join(found))
        return int(bool(found))
    if arguments.measure is not None:
        print("\n".join(["not measured:", *measure(rows, arguments.measure)]))
    write(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
