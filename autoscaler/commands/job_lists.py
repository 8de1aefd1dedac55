"""The commands `adaptdl ls`, `queue` and `history`: lists of jobs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import click

from adaptdl_elastic.autoscaler.cli import Place, Where, json_option, store_options
from adaptdl_elastic.autoscaler.cluster_view import JobView
from adaptdl_elastic.autoscaler.commands.tables import ask_all, percent, progress_text, read, show_table
from adaptdl_elastic.autoscaler.diagnostics.rows import (
    ENDED_STATES,
    WAITING_STATES,
    Row,
    clock,
    job_row,
)
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.services.submitted import SubmissionReader, state_of, waits_because
from adaptdl_elastic.rendezvous.store.base import Store
from adaptdl_elastic.rendezvous.text import duration

Column = tuple[str, Callable[[Row], Any]]


@click.command(name="ls")
@click.option("--all", "everything", is_flag=True, help="Those that have ended too.")
@json_option
@store_options
def ls(where: Where, as_json: bool, everything: bool) -> None:
    """Show what runs: jobs, their size, batch size, goodput, loss and progress."""
    rows = sorted(_all_rows(where), key=lambda row: str(row["job"]))
    if not everything:
        rows = [row for row in rows if row["state"] not in ENDED_STATES]
    now = time.time()
    columns: list[Column] = [
        ("STATE", lambda row: row["state"]),
        ("REPLICAS", lambda row: row["replicas"]),
        ("NODES", lambda row: row["nodes"]),
        ("BATCH", lambda row: row["batch_size"]),
        ("GOODPUT", lambda row: row["goodput"]),
        ("EFFICIENCY", lambda row: percent(row["efficiency"])),
        ("LOSS", lambda row: row["loss"]),
        ("PROGRESS", progress_text),
        ("AGE", lambda row: _age(row["started"] or row["created"], row["ended"] or now)),
        ("RESTARTS", _restarts),
        ("WHY", lambda row: row["reason"]),
    ]
    empty = "nothing runs" + ("" if everything else " (adaptdl ls --all shows what has ended)")
    _print(rows, columns, as_json, empty)


@click.command()
@json_option
@store_options
def queue(where: Where, as_json: bool) -> None:
    """Show which jobs wait, for how long, and why; the one that waits longest first."""
    rows = [row for row in _all_rows(where) if row["state"] in WAITING_STATES]
    rows.sort(key=lambda row: (row["created"] or 0.0, row["job"]))
    now = time.time()
    columns: list[Column] = [
        ("STATE", lambda row: row["state"]),
        ("WAITS FOR", lambda row: _age(row["created"], now)),
        ("NEEDS", lambda row: row["min_replicas"]),
        ("WHY", lambda row: row["reason"]),
    ]
    _print(rows, columns, as_json, "no job waits")


@click.command()
@click.option("--tail", type=click.IntRange(min=1), default=20, show_default=True, help="How many.")
@json_option
@store_options
def history(where: Where, as_json: bool, tail: int) -> None:
    """Show jobs that have ended, the last one first: how long they took, and how they ended."""
    rows = [row for row in _all_rows(where) if row["state"] in ENDED_STATES]
    rows.sort(key=lambda row: (row["ended"] or row["created"] or 0.0, row["job"]), reverse=True)
    columns: list[Column] = [
        ("STATE", lambda row: row["state"]),
        ("ENDED", lambda row: clock(row["ended"]) if row["ended"] else None),
        ("TOOK", lambda row: _age(row["started"], row["ended"]) if row["ended"] else None),
        ("LOSS", lambda row: row["loss"]),
        ("PROGRESS", progress_text),
        ("RESTARTS", _restarts),
        ("WHY", lambda row: row["reason"]),
    ]
    _print(rows[:tail], columns, as_json, "no job has ended")


def _print(rows: Sequence[Row], columns: Sequence[Column], as_json: bool, empty: str) -> None:
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    every: list[Column] = [("JOB", lambda row: row["job"])]
    if any(row["owner"] for row in rows):
        every.append(("OWNER", lambda row: row["owner"]))
    every += columns
    show_table([name for name, _ in every], [[cell(row) for _, cell in every] for row in rows], empty=empty)


def _all_rows(where: Where) -> list[Row]:
    return [row for _, found in ask_all(where, _rows) for row in found]


def _rows(store: Store, place: Place) -> list[Row]:
    """Return one row per job of a store; jobs that were submitted and have not begun are among them."""
    keys = Keys(place.cluster)
    view = read(store, keys)
    rows = {
        name: {**job_row(view, job), "owner": None} for name, job in view.jobs.items() if job.spec is not None
    }
    if place.context is not None:
        found = SubmissionReader(store, keys, place.context.cluster_id).read(None)
        for request in found.requests:
            asked = request.submission
            row = rows.setdefault(asked.job, {**job_row(view, JobView(asked.job)), "owner": None})
            row |= {"owner": asked.owner, "created": asked.created, "min_replicas": asked.min_replicas}
            if request.lacks_status:
                row["state"], row["reason"] = state_of(request, found)
            elif row["state"] in WAITING_STATES:
                row["reason"] = waits_because(row["reason"], found, asked.job)
    return list(rows.values())


def _age(since: float | None, until: float) -> str | None:
    return None if not since else duration(max(0.0, until - since))


def _restarts(row: Row) -> str:
    return f"{row['restarts_used']}/{'-' if row['max_restarts'] is None else row['max_restarts']}"
