"""The commands `adaptdl ls`, `status`, `scale`, `checkpoint` and `stop`.

A request is one record in the store, changed by compare-and-swap; the coordinator carries it out.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace

import click

from adaptdl_elastic.autoscaler.cli import (
    CommandError,
    Finite,
    OptionError,
    Place,
    Where,
    json_option,
    refuse,
    store_options,
)
from adaptdl_elastic.autoscaler.cluster_view import JobView, View
from adaptdl_elastic.autoscaler.commands.tables import (
    LOST,
    Row,
    ask_all,
    cost_text,
    find_job,
    is_lost,
    job_row,
    load,
    read,
    show,
    show_table,
    wait_until,
    why_lost,
)
from adaptdl_elastic.autoscaler.coordinator.slots import fewest
from adaptdl_elastic.rendezvous.schema import records
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import JobRequest
from adaptdl_elastic.rendezvous.services.submitted import SubmissionReader, state_of
from adaptdl_elastic.rendezvous.store.base import Store
from adaptdl_elastic.rendezvous.text import pluralize

_ATTEMPTS = 20
_ENDED = tuple(state.value for state in records.JobState if state.ended)


@click.command(name="ls")
@click.option("--all", "everything", is_flag=True, help="Those that have ended too.")
@json_option
@store_options
def ls(where: Where, as_json: bool, everything: bool) -> None:
    """Show what runs: jobs, their size, batch size, goodput and progress."""
    rows = [row for _, found in ask_all(where, _rows) for row in found]
    rows.sort(key=lambda row: row["job"])
    if not everything:
        rows = [row for row in rows if row["state"] not in (*_ENDED, "cancelled")]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    owned = any(row["owner"] for row in rows)
    show_table(
        (
            "JOB",
            *(["OWNER"] if owned else []),
            "STATE",
            "REPLICAS",
            "NODES",
            "BATCH",
            "GOODPUT",
            "EFFICIENCY",
            "PROGRESS",
            "RESTARTS",
            "WHY",
        ),
        [
            (
                row["job"],
                *([row["owner"]] if owned else []),
                row["state"],
                row["replicas"],
                row["nodes"],
                row["batch_size"],
                row["goodput"],
                _percent(row["efficiency"]),
                _progress(row),
                f"{row['restarts_used']}/{row['max_restarts']}",
                row["reason"],
            )
            for row in rows
        ],
        empty="nothing runs" + ("" if everything else " (adaptdl ls --all shows what has ended)"),
    )


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
            name = request.submission.job
            row = rows.setdefault(name, {**job_row(view, JobView(name)), "owner": None})
            row["owner"] = request.submission.owner
            if request.run.state is None or (request.cancelled_by is not None and not request.run.agents):
                row["state"], row["reason"] = state_of(request, found)
    return list(rows.values())


@click.command()
@click.argument("job")
@json_option
@store_options
def status(job: str, where: Where, as_json: bool) -> None:
    """Show one job in detail."""
    view, found = load(where, job)
    row = {**job_row(view, found), **_details(view, found)}
    if as_json:
        click.echo(json.dumps(row, indent=2))
        return
    error = row["prediction_error"]
    lines = [
        ("job", f"{job}   {row['state']}   generation {show(row['generation'])}"),
        ("why", row["reason"]),
        ("size", _size(row)),
        (
            "batch",
            f"{_batch(row)}; gain {show(row['gain'])}, learning rate x{show(row['lr_factor'])}",
        ),
        (
            "goodput",
            f"{show(row['goodput'])} samples/s (predicted {show(row['predicted_goodput'])}"
            f"{'' if error is None else f', off by {error:+.0%}'}); throughput {show(row['throughput'])}, "
            f"efficiency {_percent(row['efficiency'])}",
        ),
        ("progress", _progress(row)),
        ("last rescale", "-" if row["last_pause"] is None else f"{row['last_pause']:.2f} s without a step"),
        ("restarts", f"{row['restarts_used']} of {row['max_restarts']}"),
        ("checkpoint", show(row["checkpoint"])),
    ]
    if row["cost"] is not None:
        lines.append(("cost", cost_text(row["cost"])))
    if row["requested"] is not None:
        asked = pluralize(row["requested"], "replica")
        lines.append(("asked for", f"{asked} (adaptdl scale {job} --auto to undo)"))
    if row["memory_limit"] is not None:
        most = pluralize(row["memory_limit"], "sample")
        lines.append(("memory", f"at most {most} of one replica fit; more are accumulated"))
    lines += [("warning", text) for text in row["warnings"]]
    lines += [("failure", text) for text in row["failures"]]
    for name, text in lines:
        click.echo(f"{name:<13} {text}")


def _details(view: View, job: JobView) -> Row:
    assert job.spec is not None
    spec = job.spec.record
    status = job.status_now
    request = job.request.record if job.request and job.request.record.run in ("", spec.run) else None
    return {
        "run": spec.run,
        "command": list(spec.command),
        "bounds": {
            "nodes": [spec.min_nodes, spec.max_nodes],
            "replicas": [fewest(view, job), spec.max_replicas],
        },
        "requested": request.replicas if request else None,
        "pauses": list(status.pauses) if status else [],
        "failures": [
            f"rank {f.rank} exit code {f.exit_code} {f.message}".strip()
            for f in (status.failures if status else ())
        ],
        "checkpoint_path": spec.checkpoint_path,
    }


@click.command()
@click.argument("job")
@click.option("--replicas", type=int, default=None, help="Exactly so many, until --auto.")
@click.option("--auto", is_flag=True, help="Let the policy choose again.")
@click.option("--wait", is_flag=True, help="Until the job runs at that size.")
@click.option("--timeout", type=Finite(min=0), default=300.0, show_default=True, help="Seconds to --wait.")
@store_options
def scale(job: str, where: Where, replicas: int | None, auto: bool, wait: bool, timeout: float) -> None:
    """Choose JOB's size by hand, or hand it back to the policy."""
    if (replicas is None) == (not auto):
        raise OptionError("give either --replicas N or --auto")
    if auto:
        refuse(("wait", "timeout"), "is for --replicas N: with --auto the policy may well keep the size")
    _needs_wait(wait)
    if replicas is not None and replicas < 1:
        raise OptionError(f"--replicas {replicas} is less than 1; adaptdl stop {job} saves and ends it")

    def check(view: View, found: JobView) -> None:
        assert found.spec is not None
        _not_ended(job)(view, found)
        least, most = fewest(view, found), found.spec.record.max_replicas
        if replicas is not None and not least <= replicas <= most:
            raise CommandError(f"{job} was started for {least} to {most} replicas, not {replicas}")

    store, keys = _open(where, job)
    with store:
        _ask(store, keys, job, lambda request: replace(request, replicas=replicas), check)
        click.echo(
            f"{job}: "
            + ("sized by the policy again" if auto else f"{pluralize(replicas or 0, 'replica')} asked for")
        )
        if wait and not auto and not wait_until(store, keys, lambda v: _runs_at(v, job, replicas), timeout):
            row = job_row(read(store, keys), read(store, keys).jobs[job])
            raise CommandError(
                f"{job} has {pluralize(row['replicas'], 'replica')} after {timeout:g} s: {row['reason']} "
                f"(adaptdl explain {job} says more)"
            )


def _needs_wait(wait: bool) -> None:
    if not wait:
        refuse(("timeout",), "says how long --wait waits: give --wait, too")


def _runs_at(view: View, name: str, replicas: int | None) -> bool:
    job = view.jobs.get(name)
    if job is None or job.plan is None or job.plan.record.replicas != replicas:
        return False
    plan = job.plan.record
    return all((plan.generation, p.node) in job.running for p in plan.placements)


@click.command()
@click.argument("job")
@click.option("--wait", is_flag=True, help="Until it has saved its state and stopped.")
@click.option("--timeout", type=Finite(min=0), default=300.0, show_default=True, help="Seconds to --wait.")
@store_options
def stop(job: str, where: Where, wait: bool, timeout: float) -> None:
    """Save JOB's state and end it; the same command line resumes it."""
    _needs_wait(wait)
    store, keys = _open(where, job)
    with store:
        run = _ask(store, keys, job, lambda request: replace(request, stop=True), _not_ended(job))
        click.echo(f"{job} is stopping")
        if wait and not wait_until(store, keys, lambda v: has_stopped(v, job, run), timeout):
            raise CommandError(f"{job} has not stopped after {timeout:g} s; see adaptdl status {job}")


def has_stopped(view: View, name: str, run: str) -> bool:
    """Return whether this run of the job is over: its status says so, or a later run has begun."""
    job = view.jobs.get(name)
    return job is None or job.over or (job.spec is not None and job.spec.record.run != run)


def _not_ended(name: str) -> Callable[[View, JobView], None]:
    def check(view: View, job: JobView) -> None:
        status = job.status_now
        if status is not None and status.state.ended:
            raise CommandError(f"{name} has already ended: {status.state.value} ({status.reason})")
        if is_lost(view, job):
            raise CommandError(f"{name} cannot be asked for anything: {why_lost(job)}")

    return check


@click.command()
@click.argument("job")
@click.option("--wait", is_flag=True, help="Until a newer checkpoint is recorded.")
@click.option("--timeout", type=Finite(min=0), default=300.0, show_default=True, help="Seconds to --wait.")
@store_options
def checkpoint(job: str, where: Where, wait: bool, timeout: float) -> None:
    """Save JOB's state now; it goes on."""
    _needs_wait(wait)
    store, keys = _open(where, job)
    with store:
        before = read(store, keys).jobs.get(job)
        newest = before.checkpoint.record.id if before and before.checkpoint else None
        _ask(store, keys, job, lambda r: replace(r, checkpoint=r.checkpoint + 1), _not_ended(job))
        click.echo(f"{job} is asked for a checkpoint")
        if wait and not wait_until(store, keys, lambda v: _newer(v, job, newest), timeout):
            raise CommandError(f"{job} has recorded no new checkpoint after {timeout:g} s")


def _newer(view: View, name: str, newest: str | None) -> bool:
    job = view.jobs.get(name)
    return job is not None and job.checkpoint is not None and job.checkpoint.record.id != newest


def _open(where: Where, job: str) -> tuple[Store, Keys]:
    store, cluster = where.connect(job)
    return store, Keys(cluster)


def _ask(
    store: Store,
    keys: Keys,
    name: str,
    change: Callable[[JobRequest], JobRequest],
    check: Callable[[View, JobView], None],
) -> str:
    """Change the job's request by compare-and-swap, again if others change it; return the run it is for."""
    for attempt in range(_ATTEMPTS):
        view = read(store, keys)
        job = find_job(view, name, keys.cluster)
        check(view, job)
        assert job.spec is not None
        run = job.spec.record.run
        old = job.request.record if job.request else JobRequest()
        if old.run not in ("", run):
            old = JobRequest(checkpoint=old.checkpoint)  # requests to an earlier run are not valid any more
        wanted = records.encode(replace(change(old), run=run))
        revision = job.unreadable.get("request") or (job.request.revision if job.request else 0)
        if store.compare_and_swap(keys.job(name, "request"), wanted, revision) is not None:
            return run
        time.sleep(0.01 * attempt)
    raise CommandError(f"the request of {name} keeps changing; try again")


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _progress(row: Row) -> str:
    epoch = (
        "-"
        if row["epoch"] is None
        else f"epoch {row['epoch']}" + (f"/{row['epochs']}" if row["epochs"] else "")
    )
    return epoch if row["progress"] is None else f"{row['progress']:.0%} ({epoch})"


def _batch(row: Row) -> str:
    if row["batch_size"] is None:
        return "-"
    passes = (row["accumulation_steps"] or 0) + 1
    each = f"{show(row['atomic_bsz'])} per replica"
    return f"{show(row['batch_size'])} samples a step: {each}, " + (
        "no accumulation" if passes == 1 else f"accumulated over {passes} passes"
    )


def _size(row: Row) -> str:
    if not row["replicas"]:
        if row["state"] == LOST:
            return "none"
        return "none: it has ended" if row["state"] in _ENDED else "no replica yet"
    size = f"{pluralize(row['replicas'], 'replica')} on {pluralize(row['nodes'], 'node')}"
    return f"{size}   {_places(row)}"


def _places(row: Row) -> str:
    return " ".join(f"{node}:{count}" for node, count in row["placements"].items())
