"""`adaptdl explain JOB`."""

from __future__ import annotations

import json

import click

from adaptdl_elastic.autoscaler.cli import Where, json_option, store_options
from adaptdl_elastic.autoscaler.commands.report import find_job, load


@click.command()
@click.argument("job")
@store_options
@json_option
def explain(job: str, where: Where, as_json: bool) -> None:
    """Say why JOB has what it has: what one replica more or fewer would do, and who else wants it."""
    from adaptdl_elastic.autoscaler import explain as why
    from adaptdl_elastic.autoscaler.policy import allocate

    view = load(where, job)
    found = why.explain(view, find_job(view, job, where.locate(job)[1]), allocate)
    if as_json:
        click.echo(json.dumps(why.as_json(found), indent=2))
    else:
        click.echo("\n".join(why.lines(found)))
