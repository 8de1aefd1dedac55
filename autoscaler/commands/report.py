"""The command `adaptdl report EVENTS`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from adaptdl_elastic.autoscaler.cli import CommandError, echo, json_option


@click.command()
@click.argument("events", type=click.Path(path_type=Path))
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE", help="Also write an HTML page.")
@click.option("--price", type=float, metavar="X", help="Price of one replica for an hour, in any currency.")
@json_option
def report(events: Path, html: Path | None, price: float | None, as_json: bool) -> None:
    """Say what a run's gradient noise allowed, where its time went, and what to set for the next run.

    EVENTS is the file that `adaptdl-run --event-log` writes; the job may still be running.
    """
    from adaptdl_elastic.autoscaler.diagnostics import report_page, run_report
    from adaptdl_elastic.rendezvous.run_record import RunLogError, read_run

    if price is not None and not price >= 0:
        raise CommandError(f"--price {price}: give what one replica costs for an hour, 0 or more")
    left_out: list[str] = []
    try:
        found = run_report.report(read_run(events, left_out.append), price)
    except RunLogError as error:
        raise CommandError("; ".join([str(error), *left_out])) from None
    if html is not None:
        try:
            html.write_text(report_page.page(found, f"Report on {events.name}"), encoding="utf-8")
        except OSError as error:
            raise CommandError(f"--html {html}: {error.strerror}") from None
    if as_json:
        click.echo(json.dumps(run_report.as_json(found), indent=2))
    else:
        for line in run_report.lines(found):
            echo(line)
    for line in left_out:
        echo(line, err=True)
