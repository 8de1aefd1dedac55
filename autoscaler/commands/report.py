"""What people are shown: rows of plain values made from a view, and the tables they are put in."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from adaptdl_elastic.autoscaler.cli import CommandError, Where
from adaptdl_elastic.autoscaler.coordinator.job import this_run
from adaptdl_elastic.autoscaler.coordinator.slots import Ledger, in_plan
from adaptdl_elastic.autoscaler.state import JobView, Keeper, View, view_of
from adaptdl_elastic.rendezvous.keys import Keys
from adaptdl_elastic.rendezvous.store import CompactedError, Store

Row = dict[str, Any]


def read(store: Store, keys: Keys) -> View:
    """The cluster as it stands now."""
    return view_of(keys, store.range(keys.root), time.monotonic(), time.time())


def load(where: Where, job: str | None = None) -> View:
    """Connect, read, and hang up."""
    store, cluster = where.connect(job)
    with store:
        return read(store, Keys(cluster))


def wait_until(store: Store, keys: Keys, done: Callable[[View], bool], timeout: float) -> bool:
    """Watch the cluster until `done`; False when `timeout` seconds pass first."""
    import threading

    deadline = time.monotonic() + timeout
    while True:
        keeper = Keeper(keys)
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
    """The job of this name; CommandError, naming those that there are, when there is none."""
    job = view.jobs.get(name)
    if job is None or job.spec is None:
        there = ", ".join(sorted(n for n, j in view.jobs.items() if j.spec)) or "none"
        raise CommandError(f"no job {name!r} in cluster {cluster!r}; there is: {there}")
    return job


def job_row(view: View, job: JobView) -> Row:
    """One job as `adaptdl ls --json` shows it."""
    spec = job.spec.record if job.spec else None
    status = job.status.record if job.status and spec and job.status.record.run == spec.run else None
    hints = job.hints.record if job.hints else None
    plan = this_run(job)
    if hints is not None and plan is not None and hints.generation < plan.first:
        hints = None  # of an earlier run
    running = status is not None and not status.state.ended
    pauses = status.pauses if status else ()
    return {
        "job": job.job,
        "state": status.state.value if status else "pending",
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
        "epoch": hints.epoch if hints else None,
        "epochs": hints.epochs if hints else None,
        "progress": hints.progress if hints else None,
        "step": hints.step if hints else None,
        "cause": plan.cause.value if plan else None,
        "reason": status.reason if status else "the coordinator has not seen it yet",
        "last_pause": (status.last_pause if status else None) or (pauses[-1] if pauses else None),
        "restarts_used": status.restarts_used if status else 0,
        "max_restarts": spec.max_restarts if spec else None,
        "exit_code": status.exit_code if status else None,
        "checkpoint": job.checkpoint.record.id if job.checkpoint else None,
    }


def node_rows(view: View, ledger: Ledger) -> list[Row]:
    """One row a node."""
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
                row["state"] = "draining"  # for one of its jobs at least
            elif record.at_risk and row["state"] == "ok":
                row["state"] = "at risk"
    return [rows[node] for node in sorted(rows)]


def show_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], empty: str = "") -> None:
    """Print a table; as wide as it needs to be when nobody's terminal limits it."""
    import sys

    from rich.console import Console
    from rich.table import Table

    if not rows and empty:
        print(empty)
        return
    console = Console() if sys.stdout.isatty() else Console(width=240)
    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for name in columns:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(show(value) for value in row))
    console.print(table)


def show(value: Any) -> str:
    """A value for a person's eyes."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)
