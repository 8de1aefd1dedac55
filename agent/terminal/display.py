"""The user's terminal: a live line while the job runs, and a summary at its end.

Without a terminal only messages are printed, one line each.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adaptdl_elastic._explained import see
from adaptdl_elastic.agent.terminal.run_parser import PROGRAM
from adaptdl_elastic.rendezvous.run_record import Event, Run, numbers
from adaptdl_elastic.rendezvous.text import duration, pluralize, printable, record_lines

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_STYLES = {
    "policy": "green",
    "failure": "red",
    "node_lost": "red",
    "replica_lost": "red",
    "drain": "yellow",
    "manual": "cyan",
}


_COLUMNS = ("at", "replicas", "nodes", "pause", "batch size", "gain")
_LEAST_REASON = 20
"""Narrowest column of reasons, in characters; below it the summary has records instead of a table."""


class Display:
    """The live line, and the summary."""

    def __init__(self, job: str, summary: bool | None, plain: Callable[[str], None]) -> None:
        from rich.console import Console

        self._job, self._plain = job, plain
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._live: Any = None
        self._passing = ""  # a line above the live line that is not printed yet
        watched = self._console.is_terminal and sys.stdout.isatty()
        self._summary = watched if summary is None else summary
        self._run = Run(history=False)
        self._latest: dict[str, Event] = {}
        self._began = time.time()
        if watched:
            from rich.live import Live

            self._live = Live(get_renderable=self.line, console=self._console, refresh_per_second=4)
            self._live.start()

    @property
    def show(self) -> Callable[[str], None] | None:
        """A function that prints a replica's line above the live line; None: replicas print by themselves.

        A line that ends with a carriage return, such as a progress bar, is shown until the next one comes.
        """
        return None if self._live is None else self._show

    def _show(self, text: str) -> None:
        self._passing = text[:-1] if text.endswith("\r") else ""
        if not self._passing:
            self._console.print(text, markup=False)

    def say(self, text: str) -> None:
        """Print one line of the agent."""
        if self._live is None:
            self._plain(text)
        else:
            self._console.print(f"{PROGRAM}: {printable(text)}", markup=False, style="dim")

    def event(self, event: Event) -> None:
        """Take in an event, whose texts may come from other nodes."""
        event = {printable(key): printable(v) if isinstance(v, str) else v for key, v in event.items()}
        with suppress(ValueError):
            self._run.add(event)
        self._latest[event["event"]] = event
        if event["event"] == "generation" and self._live is not None and event.get("pause_s") is not None:
            size = f"{pluralize(event['replicas'], 'replica')} on {pluralize(event['nodes'], 'node')}"
            self.say(f"now {size} after a pause of {duration(event['pause_s'])}: {event['reason']}")

    def line(self) -> RenderableType:
        """Return the present line of the display, without the last cells where the terminal is too narrow.

        The first four cells stay: job, time, size, and the store's state or the batch size.
        """
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        now = time.time()
        cells = [(self._job, "bold"), (duration(now - self._began), ""), *live_cells(self._latest, now)]
        line = Table.grid()
        line.add_column(overflow="fold")
        # Text, not markup: rich renders this line again, without markup, above every line of a replica.
        texts = [Text(text, style=style) for text, style in cells]
        while len(texts) > 4 and Text("  ").join(texts).cell_len > self._console.width:
            texts.pop()
        line.add_row(Text("  ").join(texts))
        passing = Text.from_ansi(self._passing, no_wrap=True, overflow="crop")
        return Group(passing, line) if self._passing else line

    def finish(self, exit_code: int, reason: str, logs: Path | None) -> None:
        """Print the summary at the end of the run."""
        self.close()
        if self._summary:
            print_summary(self._console, self._job, self._run)
        if exit_code == 0:
            return
        where = f"; logs: {logs}" if logs is not None else ""
        self.say(f"{reason} (exit code {exit_code}{where}){see(reason)}")

    def close(self) -> None:
        """Stop the live line."""
        if self._live is not None:
            self._passing = ""
            self._live.stop()
            self._live = None


def live_cells(latest: Mapping[str, Event], now: float) -> list[tuple[str, str]]:
    """Return the cells of the live line (text, style) of the latest event of each kind, by importance.

    The size of a job is known from the store only. While the store does not answer, the last known size is
    shown.
    """
    cells = [*_size_cells(latest, now)]
    if "batch_size" in latest:
        event = latest["batch_size"]
        cells += [(f"batch {event['batch_size']}", ""), (f"gain {event.get('gain', 1.0):.2f}", "")]
    if "epoch" in latest:
        cells.append((f"epoch {latest['epoch']['epoch']}", ""))
    if "metrics" in latest:
        cells += [(f"{name} {value:.4g}", "") for name, value in numbers(latest["metrics"]).items()]
    if latest.get("batch_size", {}).get("goodput"):
        cells.append((f"goodput {latest['batch_size']['goodput']:.0f}/s", ""))
    return cells


def _size_cells(latest: Mapping[str, Event], now: float) -> Iterator[tuple[str, str]]:
    store = latest.get("store", {"state": "back"})
    heard = store["state"] == "back"
    times = {name: float(event["time"]) for name, event in latest.items()}
    started = times.get("started", 0.0)
    if "generation" not in latest:
        yield "starting", ""
    elif times.get("ended", -1.0) >= started:
        well = latest["ended"].get("outcome") == "done"
        yield ("its replicas ended well", "green") if well else ("no replica here", "yellow")
    elif times.get("peers_lost", -1.0) >= started:
        yield "others are lost: waiting for a new plan", "yellow"
    else:
        size = pluralize(latest["generation"]["replicas"], "replica")
        yield (size, "green") if heard else (f"{size} when last heard", "yellow")
    if not heard:
        what = "refuses us" if store["state"] == "refused" else "is away"
        yield f"store {what} ({duration(now - store['time'])})", "red"


def print_summary(console: Console, job: str, run: Run) -> None:
    """Print generations and their reasons, pauses, batch sizes and gains, and final metrics."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"{job}: {duration(run.ended - run.began)}", title_justify="left", expand=False)
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("why", overflow="fold")
    rows = []
    for generation, end in run.spans:
        sizes = [b for b in run.batch_sizes if generation.time <= b.time < end]
        style = _STYLES.get(generation.cause, "")
        cells = (
            duration(generation.time - run.began),
            str(generation.replicas),
            str(generation.nodes),
            "" if generation.pause_s is None else duration(generation.pause_s),
            _span([b.batch_size for b in sizes], "d"),
            _span([b.gain for b in sizes], ".2f"),
        )
        # Text: a reason may quote an error message, whose brackets are no markup
        why = Text.assemble((f"{generation.cause}: " if style else "", style), generation.reason)
        table.add_row(*cells, why)
        rows.append((*cells, why.plain))
    console.print()
    *widths, _ = (max(map(len, column)) for column in zip((*_COLUMNS, "why"), *rows, strict=True))
    # of every column three characters are its border and padding
    if sum(widths) + 3 * len(table.columns) + 1 + _LEAST_REASON <= console.width:
        console.print(table)
    else:
        console.print(table.title, markup=False, style="table.title")
        for line in record_lines((*_COLUMNS, "why"), rows, console.width):
            console.print(line, markup=False)
    for name, items in (("failed", run.failures), ("drained", run.drains)):
        for at, text in items:
            console.print(f"{name} at {duration(at - run.began)}: {text}", markup=False)
    if run.final_metrics:
        final = ", ".join(f"{k} {v:.4g}" for k, v in run.final_metrics.items())
        console.print(f"in the end: {final}", style="bold", markup=False)
    if run.exit_code:
        console.print(run.outcome, markup=False)


def _span(values: list[Any], form: str) -> str:
    """Return the first and the last value, as in `32 → 124`; if they are equal, one of them."""
    if not values:
        return ""
    first, last = format(values[0], form), format(values[-1], form)
    return first if first == last else f"{first} → {last}"
