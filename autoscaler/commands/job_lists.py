"""The commands `adaptdl ls`, `queue` and `history`: lists of jobs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import click

from adaptdl_elastic.autoscaler.cli import NothingRunsError, Place, Where, echo, json_option, store_options
from adaptdl_elastic.autoscaler.commands.tables import ask_all, percent, progress_text, read_rows, show_table
from adaptdl_elastic.autoscaler.diagnostics.rows import ENDED_STATES, WAITING_STATES, Row
from adaptdl_elastic.rendezvous.store.base import Store
from adaptdl_elastic.rendezvous.text import clock, duration

Column = tuple[str, Callable[[Row], Any]]


@click.command(name="ls")
@click.option("--all", "everything", is_flag=True, help="Include jobs that have ended.")
@json_option
@store_options
def ls(where: Where, as_json: bool, everything: bool) -> None:
    """List the jobs that run: replicas, batch size, goodput, loss and progress."""
    rows = sorted(_all_rows(where, as_json), key=lambda row: str(row["job"]))
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
        ("AGE", lambda row: _age(row["created"] or row["started"], row["ended"] or now)),
        ("RESTARTS", _restarts),
        ("WHY", lambda row: row["reason"]),
    ]
    empty = "nothing runs" + ("" if everything else " (adaptdl ls --all shows what has ended)")
    _print(rows, columns, as_json, empty)


@click.command()
@json_option
@store_options
def queue(where: Where, as_json: bool) -> None:
    """List the jobs that wait, for how long, and why. The one that waits longest comes first."""
    rows = [row for row in _all_rows(where, as_json) if row["state"] in WAITING_STATES]
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
@click.option("--tail", type=click.IntRange(min=1), default=20, show_default=True, help="Rows to show.")
@json_option
@store_options
def history(where: Where, as_json: bool, tail: int) -> None:
    """List the jobs that have ended, how long they took, and how they ended. The last one comes first."""
    rows = [row for row in _all_rows(where, as_json) if row["state"] in ENDED_STATES]
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


def _all_rows(where: Where, as_json: bool) -> list[Row]:
    try:
        return [row for _, found in ask_all(where, _rows) for row in found]
    except NothingRunsError as error:
        if not as_json:
            echo(error.message)
            click.get_current_context().exit()
        return []


def _rows(store: Store, place: Place) -> list[Row]:
    """Return one row per job of a store; jobs that were submitted and have not begun are among them."""
    return list(read_rows(store, place)[1].values())


def _age(since: float | None, until: float) -> str | None:
    return None if not since else duration(max(0.0, until - since))


def _restarts(row: Row) -> str:
    return f"{row['restarts_used']}/{'-' if row['max_restarts'] is None else row['max_restarts']}"
