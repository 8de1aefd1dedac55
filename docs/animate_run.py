"""Make docs/images/run.svg: a real run in which a replica joins and is killed, as a picture that moves.

python docs/animate_run.py --record    run it (about a minute) and keep its events in run-film.jsonl
python docs/animate_run.py             draw them again, and write the run's summary into README.md

The chart is whole; a clip whose width grows uncovers it. It needs no script and no font of another server.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from adaptdl_elastic.agent.terminal.display import print_summary
from adaptdl_elastic.rendezvous.run_record import read_run

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
BEGIN = "<!-- the summary of docs/images/run-film.jsonl: docs/animate_run.py -->"
END = "<!-- end of the summary -->"
EVENTS, PICTURE = ROOT / "docs/images/run-film.jsonl", ROOT / "docs/images/run.svg"
TASK = "--data=digits --net=recurrent --batch-size=32 --lr=0.05 --max-batch-size=512 --epochs=60"
KILL_AFTER = 9.0  # seconds with two replicas

SECONDS, HOLD = 11.0, 3.0  # of the film, and of its last picture
WIDTH, HEIGHT, LEFT, RIGHT = 880, 358, 96, 24
INK, MUTED, BLUE, RED, GREEN, ORANGE = "#1f2933", "#7b8794", "#2f6fde", "#d64545", "#17916b", "#e07b00"

Event = dict[str, Any]


def record() -> None:
    """Run the job, kill its second replica by SIGKILL, and keep its events."""
    with tempfile.TemporaryDirectory() as folder:
        events = Path(folder) / "events.jsonl"
        command = [
            *(sys.executable, "-m", "adaptdl_elastic.agent", "--standalone", "--nproc-per-node=1:2"),
            *(f"--event-log={events}", f"--checkpoint-path={folder}/saved", "--rdzv-id=film"),
            *(str(ROOT / "examples/image_classification.py"), *TASK.split()),
        ]
        with subprocess.Popen(command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}) as job:
            pid = None
            while pid is None and job.poll() is None:
                time.sleep(0.1)
                started = [one for one in read(events) if one["event"] == "started"]
                pid = next((one["pids"]["1"] for one in started if "1" in one["pids"]), None)
            if pid is None:
                raise SystemExit("the job ended with one replica")
            time.sleep(KILL_AFTER)
            os.kill(pid, signal.SIGKILL)
            if job.wait() != 0:
                raise SystemExit("the job has failed")
        kept = ("generation", "batch_size", "metrics", "exit", "restart", "death", "started")
        EVENTS.write_text("".join(json.dumps(one) + "\n" for one in read(events) if one["event"] in kept))


def read(path: Path) -> list[Event]:
    """Return the whole lines of an event log."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def draw(events: Sequence[Event]) -> str:
    """Return the picture as SVG."""
    began, ended = events[0]["time"], events[-1]["time"]

    def x(when: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (when - began) / (ended - began)

    turn = SECONDS + HOLD
    grown = f"0;{SECONDS / turn:.3f};1"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="ui-sans-serif, '
        f'system-ui, sans-serif" font-size="13" fill="{INK}">',
        "<title>A run: a replica joins, is killed, and training goes on</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#ffffff" stroke="#e4e7eb"/>',
        '<text x="20" y="30" font-family="ui-monospace, monospace">$ adaptdl-run --standalone '
        "--nproc-per-node=1:2 train.py</text>",
        *(_label(64 + 26 * rank, f"replica {rank}") for rank in range(2)),
        _label(196, "batch size"),
        _label(290, "accuracy"),
        f'<clipPath id="seen"><rect width="{WIDTH}" height="{HEIGHT}"><animate attributeName="width" '
        f'values="{LEFT};{WIDTH};{WIDTH}" keyTimes="{grown}" dur="{turn:g}s" repeatCount="indefinite"/>'
        "</rect></clipPath>",
        '<g clip-path="url(#seen)">',
        *_lanes(events, x, ended),
        *_batch(events, x, ended),
        *_accuracy(events, x),
        "</g>",
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 10}" text-anchor="end" fill="{MUTED}">'
        f"{ended - began:.0f} s on two CPU cores</text>",
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _label(y: float, text: str) -> str:
    return f'<text x="20" y="{y}" fill="{MUTED}">{text}</text>'


def _lanes(events: Sequence[Event], x: Any, ended: float) -> Iterator[str]:
    plans = [one for one in events if one["event"] == "generation"]
    for plan, end in zip(plans, [*(one["time"] for one in plans[1:]), ended], strict=True):
        for rank in range(plan["replicas"]):
            wide = x(end) - x(plan["time"]) - 1
            yield (
                f'<rect x="{x(plan["time"]):.1f}" y="{52 + 26 * rank}" width="{wide:.1f}" height="16" rx="3" '
                f'fill="{BLUE}"/>'
            )
    for row, (before, plan) in enumerate(itertools.pairwise(plans)):
        at, pause = x(plan["time"]), plan["pause_s"]
        died = plan["replicas"] < before["replicas"]
        colour, y = RED if died else GREEN, 112 + 17 * row
        text = f"{'killed with SIGKILL' if died else 'a replica joins'}: {pause:.2g} s without a step"
        place = (
            f'x="{at - 6:.1f}" text-anchor="end"'
            if at > WIDTH * 0.7
            else f'x="{at + 6:.1f}" text-anchor="start"'
        )
        yield (
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="46" y2="{HEIGHT - 30}" stroke="{colour}" '
            f'stroke-dasharray="3 3"/>'
        )
        yield f'<text {place} y="{y}" fill="{colour}">{text}</text>'


def _batch(events: Sequence[Event], x: Any, ended: float) -> Iterator[str]:
    sizes = [(one["time"], one["batch_size"]) for one in events if one["event"] == "batch_size"]
    low, high = (math.log2(f(size for _, size in sizes)) for f in (min, max))

    def y(size: float) -> float:
        return 226 - 52 * (math.log2(size) - low) / max(high - low, 1)

    path = ""
    for (when, size), (until, _) in zip(sizes, [*sizes[1:], (ended, 0)], strict=True):
        path += f"{'L' if path else 'M'}{x(when):.1f} {y(size):.1f} H{x(until):.1f} "
    yield f'<path d="{path}" fill="none" stroke="{ORANGE}" stroke-width="2"/>'
    for when, size in (sizes[0], sizes[-1]):
        yield f'<text x="{x(when) + 4:.1f}" y="{y(size) - 5:.1f}" fill="{ORANGE}">{size}</text>'


def _accuracy(events: Sequence[Event], x: Any) -> Iterator[str]:
    seen = [(one["time"], one["accuracy"]) for one in events if "accuracy" in one]
    low, high = (f(value for _, value in seen) for f in (min, max))
    points = " ".join(f"{x(when):.1f},{320 - 66 * (value - low) / (high - low):.1f}" for when, value in seen)
    yield f'<polyline points="{points}" fill="none" stroke="{GREEN}" stroke-width="2"/>'
    last = f"{100 * seen[-1][1]:.1f} %"
    yield f'<text x="{WIDTH - RIGHT}" y="248" text-anchor="end" fill="{GREEN}">{last}</text>'


def summary() -> str:
    """Return the summary that `adaptdl-run` prints at the end of the run, as a block of text."""
    out = io.StringIO()
    console = Console(file=out, width=100, color_system=None, highlight=False, soft_wrap=True)
    print_summary(console, "images", read_run(EVENTS))
    lines = (line.rstrip() for line in out.getvalue().strip().splitlines())
    return "```text\n" + "\n".join(lines) + "\n```\n"


def with_summary(page: str) -> str:
    """Return a page with the summary between its two marks."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{summary()}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    if "--record" in sys.argv[1:]:
        record()
    README.write_text(with_summary(README.read_text()))
    PICTURE.write_text(draw(read(EVENTS)))
