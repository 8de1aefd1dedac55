"""The command `adaptdl explain JOB`."""

from __future__ import annotations

import json

import click

from adaptdl_elastic.autoscaler.cli import CommandError, Where, echo, json_option, store_options
from adaptdl_elastic.autoscaler.commands.tables import find_job, read
from adaptdl_elastic.autoscaler.diagnostics.rows import is_lost, why_lost
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.submissions import ServiceRecord
from adaptdl_elastic.rendezvous.store.base import read_record


@click.command()
@click.argument("job")
@json_option
@store_options
def explain(job: str, where: Where, as_json: bool) -> None:
    """Explain JOB's number of replicas: what one more or fewer would change, and who wants its slots."""
    from adaptdl_elastic.autoscaler.diagnostics import explanation as why
    from adaptdl_elastic.autoscaler.policy import allocate

    place = where.locate(job)
    keys = Keys(place.cluster)
    with where.open(place) as store:
        view = read(store, keys)
        services = [read_record(ServiceRecord, item) for item in store.range(keys.services).items]
    asked = find_job(view, job, place.cluster)
    if is_lost(view, asked):
        raise CommandError(f"{job} has nothing: {why_lost(asked)}")
    found = why.explain(view, asked, allocate, why.leaders_settings(view))
    # such as --node and --has of its owner
    left_out = {one.node: one.problems[job] for one in services if one and job in one.problems}
    if as_json:
        click.echo(json.dumps({**why.as_json(found), "left_out": left_out}, indent=2))
    else:
        for node, reason in sorted(left_out.items()):
            echo(f"not on {node}: {reason}")
        for line in why.lines(found):
            echo(line)
