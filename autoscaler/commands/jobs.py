"""The commands `adaptdl status`, `scale`, `checkpoint` and `stop`.

A request is one record in the store, changed by compare-and-swap; the coordinator carries it out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import click

from adaptdl_elastic.autoscaler.cli import (
    CommandError,
    Finite,
    OptionError,
    Where,
    echo,
    json_option,
    refuse,
    store_options,
)
from adaptdl_elastic.autoscaler.cluster_view import JobView, View
from adaptdl_elastic.autoscaler.commands import job_requests
from adaptdl_elastic.autoscaler.commands.cluster import open_permitted
from adaptdl_elastic.autoscaler.commands.tables import (
    cost_text,
    find_job,
    percent,
    progress_text,
    read,
    read_rows,
    show,
    wait_until,
)
from adaptdl_elastic.autoscaler.diagnostics.rows import ENDED_STATES, LOST, Row, job_details, job_row
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import JobRequest
from adaptdl_elastic.rendezvous.store.base import Store
from adaptdl_elastic.rendezvous.text import pluralize

_ANSWER_SECONDS = 10.0  # for agents to write the last decisions


@click.command()
@click.argument("job")
@json_option
@store_options
def status(job: str, where: Where, as_json: bool) -> None:
    """Show one job in detail."""
    place = where.locate(job)
    with where.open(place) as store:
        view, rows = read_rows(store, place)
    begun = job not in rows or (job in view.jobs and view.jobs[job].spec is not None)
    details = job_details(view, find_job(view, job, place.cluster)) if begun else {}
    row = {**rows[job], **details}
    if as_json:
        click.echo(json.dumps(row, indent=2))
        return
    if not begun:
        echo(f"{'job':<13} {job}   {row['state']}\n{'why':<13} {row['reason']}")
        return
    error = None if row["goodput"] is None else row["prediction_error"]
    lines = [
        ("job", f"{job}   {row['state']}   generation {show(row['generation'])}"),
        ("why", row["reason"]),
        ("size", _size(row)),
        ("ran on", ", ".join(row["ran_on"]) or "-"),
        ("batch", f"{_batch(row)}; gain {show(row['gain'])}, learning rate x{show(row['lr_factor'])}"),
        (
            "goodput",
            f"{show(row['goodput'])} samples/s (predicted {show(row['predicted_goodput'])}"
            f"{'' if error is None else f', off by {error:+.0%}'}); throughput {show(row['throughput'])}, "
            f"efficiency {percent(row['efficiency'])}",
        ),
        ("progress", progress_text(row)),
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
    if row.get("problems"):
        lines.append(("warning", row["problems"]))
    lines += [("failure", text) for text in row["failures"]]
    for name, text in lines:
        echo(f"{name:<13} {text}")


@click.command()
@click.argument("job")
@click.option("--replicas", type=int, default=None, help="Use exactly this many, until --auto is given.")
@click.option("--auto", is_flag=True, help="Choose the number automatically again.")
@click.option("--wait", is_flag=True, help="Wait until the job runs with that number.")
@click.option("--timeout", type=Finite(min=0), default=300.0, show_default=True, help="Seconds to --wait.")
@store_options
def scale(job: str, where: Where, replicas: int | None, auto: bool, wait: bool, timeout: float) -> None:
    """Set the number of replicas of JOB, or choose it automatically again."""
    if (replicas is None) == (not auto):
        raise OptionError("give either --replicas N or --auto")
    if auto:
        refuse(("wait", "timeout"), "is for --replicas N: with --auto the policy may well keep the size")
    _needs_wait(wait)
    if replicas is not None and replicas < 1:
        raise OptionError(f"--replicas {replicas} is less than 1; adaptdl stop {job} saves and ends it")

    store, keys = _open(where, job)
    with store:
        run = _ask(store, keys, job, lambda request: replace(request, replicas=replicas), replicas)
        echo(
            f"{job}: "
            + ("sized by the policy again" if auto else f"{pluralize(replicas or 0, 'replica')} asked for")
        )
        if wait and not _reached(store, keys, job, run, lambda v: _runs_at(v, job, replicas), timeout):
            row = job_row(read(store, keys), read(store, keys).jobs[job])
            raise CommandError(
                f"{job} has {pluralize(row['replicas'], 'replica')} after {timeout:g} s: {row['reason']} "
                f"(adaptdl explain {job} says more)"
            )


def _needs_wait(wait: bool) -> None:
    if not wait:
        refuse(("timeout",), "says how long --wait waits: give --wait, too")


def _reached(
    store: Store, keys: Keys, job: str, run: str, done: Callable[[View], bool], timeout: float
) -> bool:
    """Wait until `done`; return False if `timeout` seconds pass first.

    Raises:
        CommandError: this run of the job ends first.
    """
    ended: list[View] = []

    def seen(view: View) -> bool:
        if not done(view) and has_stopped(view, job, run):
            ended.append(view)
        return bool(ended) or done(view)

    reached = wait_until(store, keys, seen, timeout)
    if ended:
        found = ended[0].jobs.get(job)
        status = None if found is None else found.status_now
        reason = "" if status is None else f": {status.reason}"
        raise CommandError(f"{job} has ended meanwhile{reason}")
    return reached


def _runs_at(view: View, name: str, replicas: int | None) -> bool:
    job = view.jobs.get(name)
    if job is None or job.plan is None or job.plan.record.replicas != replicas:
        return False
    plan = job.plan.record
    return all((plan.generation, p.node) in job.running for p in plan.placements)


@click.command()
@click.argument("job")
@click.option("--wait", is_flag=True, help="Wait until the job has saved its state and stopped.")
@click.option("--timeout", type=Finite(min=0), default=300.0, show_default=True, help="Seconds to --wait.")
@store_options
def stop(job: str, where: Where, wait: bool, timeout: float) -> None:
    """Save JOB's state and end it. The command that started JOB resumes it."""
    _needs_wait(wait)
    store, keys = _open(where, job)
    with store:
        run = _ask(store, keys, job, lambda request: replace(request, stop=True))
        echo(f"{job} is stopping")
        # the store of a standalone job is gone a moment after the job's end: look at what was seen of it
        ended: list[JobView | None] = []

        def over(view: View) -> bool:
            ended[:] = [view.jobs.get(job)]
            return has_stopped(view, job, run)

        if wait and not wait_until(store, keys, over, timeout):
            raise CommandError(f"{job} has not stopped after {timeout:g} s; see adaptdl status {job}")
        status = ended[0].status_now if ended and ended[0] is not None else None
        if status is not None and status.unsaved:
            raise CommandError(f"{job}: {status.reason}")


def has_stopped(view: View, name: str, run: str) -> bool:
    """Return whether this run of the job is over: its status says so, or a later run has begun."""
    job = view.jobs.get(name)
    return job is None or job.over or (job.spec is not None and job.spec.record.run != run)


@click.command()
@click.argument("job")
@click.option("--wait", is_flag=True, help="Wait until the checkpoint is saved.")
@click.option("--timeout", type=Finite(min=0), default=300.0, show_default=True, help="Seconds to --wait.")
@store_options
def checkpoint(job: str, where: Where, wait: bool, timeout: float) -> None:
    """Save JOB's state now. JOB continues to run."""
    _needs_wait(wait)
    store, keys = _open(where, job)
    with store:
        before = read(store, keys).jobs.get(job)
        newest = before.checkpoint.record.id if before and before.checkpoint else None
        more = lambda request: replace(request, checkpoint=request.checkpoint + 1)  # noqa: E731
        run = _ask(store, keys, job, more)
        echo(f"{job} is asked for a checkpoint")
        if wait and not _reached(store, keys, job, run, lambda v: _newer(v, job, newest), timeout):
            raise CommandError(f"{job} has recorded no new checkpoint after {timeout:g} s")


def last_decisions(where: Where, name: str) -> dict[str, str]:
    """Ask a job's agents and the leading coordinator for their last decisions; return the file of each.

    The file of an agent that does not answer in time is "".

    Raises:
        CommandError: there is no such job, it has ended, or it is another person's.
    """
    found: dict[str, str] = {}

    def written(view: View) -> bool:
        found.update({node: seen.record.decisions for node, seen in view.agents(name).items()})
        if view.leader is not None:
            found[f"coordinator on {view.leader.record.host}"] = view.leader.record.decisions
        return all(found.values())

    store, keys = _open(where, name)
    with store:
        more = lambda request: replace(request, decisions=request.decisions + 1)  # noqa: E731
        _ask(store, keys, name, more)
        wait_until(store, keys, written, _ANSWER_SECONDS)
    return found


def _newer(view: View, name: str, newest: str | None) -> bool:
    job = view.jobs.get(name)
    return job is not None and job.checkpoint is not None and job.checkpoint.record.id != newest


def _open(where: Where, job: str) -> tuple[Store, Keys]:
    """Return the store of a job that this person may change; raise CommandError if it is another person's."""
    store, place = open_permitted(where, job, owned=job)
    return store, Keys(place.cluster)


def _ask(
    store: Store,
    keys: Keys,
    name: str,
    change: Callable[[JobRequest], JobRequest],
    replicas: int | None = None,
) -> str:
    """Change the request of a running job; return the run that it is for.

    Raises:
        CommandError: there is no such job.
        RequestError: it does not run, or cannot have so many `replicas`.
    """

    def look(view: View) -> JobView:
        job = find_job(view, name, keys.cluster)
        job_requests.check_running(view, job)
        if replicas is not None:
            job_requests.check_size(view, job, replicas)
        return job

    return job_requests.change(store, keys, name, change, look)


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
        return "none: it has ended" if row["state"] in ENDED_STATES else "no replica yet"
    size = f"{pluralize(row['replicas'], 'replica')} on {pluralize(row['nodes'], 'node')}"
    return f"{size}   {_places(row)}"


def _places(row: Row) -> str:
    return " ".join(f"{node}:{count}" for node, count in row["placements"].items())
