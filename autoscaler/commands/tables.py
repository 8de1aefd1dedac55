"""Rows of plain values made from a view, and the tables that show them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import click

from adaptdl_elastic.autoscaler.cli import CommandError, Place, Where
from adaptdl_elastic.autoscaler.cluster_view import BILL_SECONDS, ClusterCache, JobView, View, view_of
from adaptdl_elastic.autoscaler.coordinator.job_phase import this_run
from adaptdl_elastic.autoscaler.coordinator.slots import Ledger, in_plan
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import JobState, JobStatus
from adaptdl_elastic.rendezvous.store.base import CompactedError, Store, StoreError
from adaptdl_elastic.rendezvous.store.local_socket import JobEndedError

LOST = "lost"
"""State of a job that was running when its last agent and the last coordinator died."""

Row = dict[str, Any]
T = TypeVar("T")

_LEAST_WIDTH = 12  # narrowest last column of a table, in characters; below it the column is left out


def read(store: Store, keys: Keys) -> View:
    """Return the present view of the cluster."""
    return view_of(keys, store.range(keys.root), time.monotonic(), time.time())


def load(where: Where, name: str) -> tuple[View, JobView]:
    """Read the store of a job; return the view and the job. CommandError if there is no such job."""
    store, cluster = where.connect(name)
    with store:
        view = read(store, Keys(cluster))
    return view, find_job(view, name, cluster)


def ask_all(where: Where, ask: Callable[[Store, Place], T], job: str | None = None) -> list[tuple[Place, T]]:
    """Call a function on every store that a command is about; return the results.

    A standalone job that ends meanwhile is left out. A store that does not answer is reported on stderr,
    unless it is the only one.

    Args:
        where: the stores that the command line selects.
        ask: the function; gets the store and its place.
        job: only the standalone job of this name.

    Raises:
        CommandError: the only store cannot be used.
        StoreError: the only store does not answer.
    """
    places = where.places(job)
    answers = []
    for place in places:
        try:
            with where.open(place) as store:
                answers.append((place, ask(store, place)))
        except (CommandError, StoreError) as error:
            if len(places) == 1:
                raise
            if not isinstance(error.__cause__ or error, JobEndedError):
                click.echo(f"adaptdl: {place.job}: {error}", err=True)
    return answers


def load_all(where: Where, job: str | None = None) -> list[tuple[Place, View]]:
    """Read every store that a command is about; see `ask_all`."""
    return ask_all(where, lambda store, place: read(store, Keys(place.cluster)), job)


def wait_until(store: Store, keys: Keys, done: Callable[[View], bool], timeout: float) -> bool:
    """Watch the cluster until `done`; return False if `timeout` seconds pass first."""
    import threading

    deadline = time.monotonic() + timeout
    while True:
        keeper = ClusterCache(keys)
        snapshot = store.range(keys.root)
        keeper.load(snapshot, time.monotonic())
        if done(keeper.view(time.monotonic(), time.time())):
            return True
        with store.watch(keys.root, snapshot.revision + 1) as watch:
            alarm = threading.Timer(max(0.0, deadline - time.monotonic()), watch.close)
            alarm.daemon = True
            alarm.start()
            try:
                with suppress(CompactedError):
                    for change in watch:
                        keeper.apply(change, time.monotonic())
                        if done(keeper.view(time.monotonic(), time.time())):
                            return True
            finally:
                alarm.cancel()
        if time.monotonic() >= deadline:
            return False


def find_job(view: View, name: str, cluster: str) -> JobView:
    """Return the job of this name; CommandError, which names the existing jobs, if there is none."""
    job = view.jobs.get(name)
    if job is None or job.spec is None:
        names = ", ".join(sorted(n for n, j in view.jobs.items() if j.spec))
        there = f"; its jobs are: {names}" if names else ", and no other"
        raise CommandError(f"there is no job {name!r} in cluster {cluster!r}{there}")
    return job


def is_lost(view: View, job: JobView) -> bool:
    """Return whether a job that has not ended has no agent, and no coordinator is there to report it.

    The store then shows the job as it was when the last of them died.
    """
    return not job.over and view.leader is None and not view.agents(job.job)


def why_lost(job: JobView) -> str:
    """Return what is known of a lost job, and what to do."""
    status, hints, spec = job.status_now, job.hints, job.spec
    signs = [status.updated if status else 0.0, hints.record.time if hints else 0.0]
    signs += [job.checkpoint.record.time if job.checkpoint else 0.0, spec.record.created if spec else 0.0]
    signs += [one.record.time for table in (job.running, job.ended) for one in table.values()]
    goes_on = "goes on from its last checkpoint" if job.checkpoint else "starts it again"
    return f"no agent answers (last heard of at {clock(max(signs))}); the same command {goes_on}"


def clock(seconds: object) -> str:
    """Return local time; with its date if that is not today."""
    try:
        then = time.localtime(seconds)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, OSError):  # written by another program
        return "--:--:--"
    today = time.localtime()[:3]
    return time.strftime("%H:%M:%S" if then[:3] == today else "%Y-%m-%d %H:%M:%S", then)


def job_row(view: View, job: JobView) -> Row:
    """Return one job as `adaptdl ls --json` shows it."""
    spec = job.spec.record if job.spec else None
    status = job.status_now
    hints = job.hints.record if job.hints else None
    plan = this_run(job)
    if hints is not None and plan is not None and hints.generation < plan.first:
        hints = None  # hints of an earlier run
    lost = is_lost(view, job)
    running = status is not None and not status.state.ended and not lost
    done = status is not None and status.state is JobState.DONE
    pauses = status.pauses if status else ()
    return {
        "job": job.job,
        "state": _state(status, lost),
        "generation": plan.generation if plan else None,
        "replicas": plan.replicas if plan and running else 0,
        "nodes": plan.nodes if plan and running else 0,
        "placements": in_plan(plan) if running else {},
        "batch_size": hints.batch_size if hints else None,
        "atomic_bsz": hints.atomic_bsz if hints else None,
        "accumulation_steps": hints.accumulation_steps if hints else None,
        "gain": hints.gain if hints else None,
        "lr_factor": hints.lr_factor if hints else None,
        "goodput": hints.goodput if hints else None,
        "predicted_goodput": (status.predicted_goodput if status else None)
        or (hints.predicted_goodput if hints else None),
        "prediction_error": status.prediction_error if status else None,
        "throughput": hints.throughput if hints else None,
        "efficiency": hints.efficiency if hints else None,
        # the last report may come from the epoch before the end
        "epoch": (hints.epochs if done and hints.epochs else hints.epoch) if hints else None,
        "epochs": hints.epochs if hints else None,
        "progress": 1.0 if done else hints.progress if hints else None,
        "step": hints.step if hints else None,
        "cause": plan.cause.value if plan else None,
        "reason": why_lost(job)
        if lost
        else status.reason
        if status
        else "the coordinator has not seen it yet",
        "last_pause": (status.last_pause if status else None) or (pauses[-1] if pauses else None),
        "restarts_used": status.restarts_used if status else 0,
        "max_restarts": spec.max_restarts if spec else None,
        "exit_code": status.exit_code if status else None,
        "memory_limit": hints.memory_limit if hints and running else None,
        "warnings": list(hints.warnings) if hints and running else [],
        "checkpoint": job.checkpoint.record.id if job.checkpoint else None,
        "cost": cost_row(view, job.job),
    }


def _state(status: JobStatus | None, lost: bool) -> str:
    if status is None or status.state is JobState.PENDING:
        return JobState.PENDING.value
    return LOST if lost else status.state.value


def cost_row(view: View, job: str) -> Row | None:
    """Return what a job's nodes have cost and will cost; None if no autoscaler has reported it."""
    found = view.cost(job)
    if found is None:
        return None
    return {
        "so_far": found.so_far,
        "hourly": found.hourly,
        "forecast": found.forecast,
        "seconds_left": found.seconds_left,
        "seconds_old": round(view.bill_age),
    }


def cost_text(cost: Row) -> str:
    """Return the same as text."""
    if cost["seconds_old"] > BILL_SECONDS:
        return f"{cost['so_far']:.2f} {cost['seconds_old'] / 60:.0f} min ago: no autoscaler has looked since"
    text = f"{cost['so_far']:.2f} so far, {cost['hourly']:.2f} an hour now"
    if cost["forecast"] is not None:
        text += f"; {cost['forecast']:.2f} expected by its end in {cost['seconds_left'] / 60:.0f} min"
    return text


def node_rows(view: View, ledger: Ledger) -> list[Row]:
    """Return one row per node."""
    rows: dict[str, Row] = {}
    for job, agents in sorted(view.nodes.items()):
        for node, seen in agents.items():
            record = seen.record
            row = rows.setdefault(
                node,
                {
                    "node": node,
                    "slots": ledger.capacity[node],
                    "free": ledger.capacity[node],
                    "host": record.host,
                    "jobs": {},
                    "state": "ok",
                    "instance": record.instance,
                    "instance_type": record.instance_type,
                    "zone": record.zone,
                    "preemptible": record.preemptible,
                    "version": record.version,
                },
            )
            held = ledger.held(job).get(node, 0)
            row["jobs"][job] = held
            row["free"] -= held
            if view.draining(record):
                row["state"] = "draining"  # for at least one of its jobs
            elif record.at_risk and row["state"] == "ok":
                row["state"] = "at risk"
    return [rows[node] for node in sorted(rows)]


def show_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], empty: str = "") -> None:
    """Print a table, on a terminal no wider than the terminal."""
    import sys

    if not rows and empty:
        print(empty)
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    cells = [list(columns), *([show(value).replace("\n", " ") for value in row] for row in rows)]
    for line in layout(cells, width):
        print(line)


def layout(cells: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """Return lines of aligned columns, at most `width` characters if the first columns fit into that.

    The last column is cut to fit, or left out if hardly any of it would remain. Widths are those on a
    terminal, where a wide character takes two columns.
    """
    from rich.cells import cell_len as size

    widths = [max(size(row[i]) for row in cells) for i in range(len(cells[0]))]
    first = sum(widths[:-1]) + 2 * len(widths[:-1])
    left = max(widths[-1], 1) if width is None else width - first
    lines = []
    for row in cells:
        text = "".join(
            cell + " " * (wide - size(cell) + 2) for cell, wide in zip(row[:-1], widths[:-1], strict=True)
        )
        last = row[-1] if left >= min(_LEAST_WIDTH, widths[-1]) else ""
        if size(last) > left:
            while size(last) > left - 1:
                last = last[:-1]
            last += "…"
        lines.append((text + last).rstrip())
    return lines


def show(value: Any) -> str:
    """Return a value as text for users."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)
