"""Read the stores that a command is about, and print tables."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from adaptdl_elastic.autoscaler.cli import CommandError, Place, Where, echo
from adaptdl_elastic.autoscaler.cluster_view import BILL_SECONDS, ClusterCache, JobView, View, view_of
from adaptdl_elastic.autoscaler.diagnostics.rows import Row, job_rows
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.services.submitted import SubmissionReader
from adaptdl_elastic.rendezvous.store.base import Store, StoreError
from adaptdl_elastic.rendezvous.store.follow import Follow
from adaptdl_elastic.rendezvous.store.local_socket import JobEndedError
from adaptdl_elastic.rendezvous.text import printable, record_lines

T = TypeVar("T")

_LEAST_WIDTH = 12  # narrowest last column of a table, in characters; below it rows are shown as records


def read(store: Store, keys: Keys) -> View:
    """Return the present view of the cluster."""
    return view_of(keys, store.range(keys.root), time.monotonic(), time.time())


def read_rows(store: Store, place: Place) -> tuple[View, dict[str, Row]]:
    """Return the present view of a cluster, and its jobs as `rows.job_rows` shows them."""
    keys = Keys(place.cluster)
    context = place.context
    submitted = None if context is None else SubmissionReader(store, keys, context.cluster_id).read(None)
    view = read(store, keys)
    return view, job_rows(view, submitted)


def ask_all(where: Where, ask: Callable[[Store, Place], T]) -> list[tuple[Place, T]]:
    """Call a function on every store that a command is about; return the results.

    A standalone job that ends meanwhile is left out. A store that does not answer is reported on stderr,
    unless it is the only one.

    Args:
        where: the stores that the command line selects.
        ask: the function; gets the store and its place.

    Raises:
        CommandError: the only store cannot be used.
        StoreError: the only store does not answer.
    """
    places = where.places()
    answers = []
    for place in places:
        try:
            with where.open(place) as store:
                answers.append((place, ask(store, place)))
        except (CommandError, StoreError) as error:
            if len(places) == 1:
                raise
            if not isinstance(error.__cause__ or error, JobEndedError):
                echo(f"adaptdl: {place.job or f'cluster {place.cluster}'}: {error}", err=True)
    return answers


def load_all(where: Where) -> list[tuple[Place, View]]:
    """Read every store that a command is about; a store that does not answer is reported."""
    return ask_all(where, lambda store, place: read(store, Keys(place.cluster)))


def wait_until(store: Store, keys: Keys, done: Callable[[View], bool], timeout: float) -> bool:
    """Watch the cluster until `done`; return False if `timeout` seconds pass first."""
    keeper = ClusterCache(keys)
    with Follow(store, keys.root) as follow:
        for news in follow:
            keeper.take(news, time.monotonic())
            if done(keeper.view(time.monotonic(), time.time())):
                return True
            # what is there is looked at even if there is no time to wait
            follow.close_in(timeout)
    return False


def find_job(view: View, name: str, cluster: str) -> JobView:
    """Return the job of this name; CommandError, which names the existing jobs, if there is none."""
    job = view.jobs.get(name)
    if job is None or job.spec is None:
        if name in view.submitted:
            raise CommandError(
                f"job {name!r} was submitted and has not begun: adaptdl ls --all says why, "
                f"adaptdl cancel {name} ends it"
            )
        names = ", ".join(sorted(n for n, j in view.jobs.items() if j.spec))
        there = f"; its jobs are: {names}" if names else ", and no other"
        raise CommandError(f"there is no job {name!r} in cluster {cluster!r}{there}")
    return job


def cost_text(cost: Row) -> str:
    """Return the same as text."""
    if cost["seconds_old"] > BILL_SECONDS:
        return f"{cost['so_far']:.2f} {cost['seconds_old'] / 60:.0f} min ago: no autoscaler has looked since"
    text = f"{cost['so_far']:.2f} so far, {cost['hourly']:.2f} an hour now"
    if cost["forecast"] is not None:
        text += f"; {cost['forecast']:.2f} expected by its end in {cost['seconds_left'] / 60:.0f} min"
    return text


def show_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], empty: str = "") -> None:
    """Print a table, on a terminal no wider than the terminal."""
    import sys

    if not rows and empty:
        echo(empty)
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    cells = [list(columns), *([printable(show(value).replace("\n", " ")) for value in row] for row in rows)]
    for line in layout(cells, width):
        echo(line)


def layout(cells: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """Return lines of at most `width` columns: a table, or records if the terminal is too narrow for it.

    The first row has the names of the columns. The last column of a table is cut to fit. Widths are those on
    a terminal, where a wide character takes two columns.
    """
    from rich.cells import cell_len as size
    from rich.text import Text

    widths = [max(size(row[i]) for row in cells) for i in range(len(cells[0]))]
    left = max(widths[-1], 1) if width is None else width - sum(widths[:-1]) - 2 * len(widths[:-1])
    if width is not None and left < min(_LEAST_WIDTH, widths[-1]):
        return record_lines(cells[0], cells[1:], width)
    lines = []
    for row in cells:
        text = "".join(
            cell + " " * (wide - size(cell) + 2) for cell, wide in zip(row[:-1], widths[:-1], strict=True)
        )
        last = Text(row[-1])
        last.truncate(left, overflow="ellipsis")
        lines.append((text + last.plain).rstrip())
    return lines


def percent(value: float | None) -> str:
    """Return a fraction as text."""
    return "-" if value is None else f"{value:.0%}"


def progress_text(row: Row) -> str:
    """Return how far a job is, as text."""
    epoch = (
        "-"
        if row["epoch"] is None
        else f"epoch {row['epoch']}" + (f"/{row['epochs']}" if row["epochs"] else "")
    )
    return epoch if row["progress"] is None else f"{row['progress']:.0%} ({epoch})"


def show(value: Any) -> str:
    """Return a value as text for users."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)
