"""The command `adaptdl explain JOB`."""

from __future__ import annotations

import json
from dataclasses import replace

import click
from pydantic import TypeAdapter, ValidationError

from adaptdl_elastic.autoscaler.cli import CommandError, Where, json_option, store_options
from adaptdl_elastic.autoscaler.commands.tables import find_job, is_lost, read, why_lost
from adaptdl_elastic.autoscaler.coordinator.decision_types import CoordinatorSettings
from adaptdl_elastic.autoscaler.policy.policy_types import PolicySettings
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import LeaderRecord, MalformedRecordError, decode
from adaptdl_elastic.rendezvous.store.base import Store


@click.command()
@click.argument("job")
@json_option
@store_options
def explain(job: str, where: Where, as_json: bool) -> None:
    """Say why JOB has what it has: what one replica more or fewer would do, and who else wants it."""
    from adaptdl_elastic.autoscaler.diagnostics import explanation as why
    from adaptdl_elastic.autoscaler.policy import allocate

    store, cluster = where.connect(job)
    with store:
        view, settings = read(store, Keys(cluster)), leaders_settings(store, Keys(cluster))
    asked = find_job(view, job, cluster)
    if is_lost(view, asked):
        raise CommandError(f"{job} has nothing: {why_lost(asked)}")
    found = why.explain(view, asked, allocate, settings)
    if as_json:
        click.echo(json.dumps(why.as_json(found), indent=2))
    else:
        click.echo("\n".join(why.lines(found)))


def leaders_settings(store: Store, keys: Keys) -> CoordinatorSettings:
    """Return the leading coordinator's settings.

    The defaults if there is no leader or it has published none.
    """
    found = store.get(keys.coordinator_leader)
    try:
        told = dict(decode(LeaderRecord, found.value, found.key).settings) if found else {}
        policy = told.pop("policy", None)
        return replace(
            TypeAdapter(CoordinatorSettings).validate_python(told),
            policy=None if policy is None else TypeAdapter(PolicySettings).validate_python(policy),
        )
    except (MalformedRecordError, ValidationError, TypeError):
        return CoordinatorSettings()
