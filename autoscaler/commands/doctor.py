"""The command `adaptdl doctor`."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import click

from adaptdl_elastic._explained import DOCS
from adaptdl_elastic.autoscaler.cli import (
    CommandError,
    NothingRunsError,
    Where,
    echo,
    json_option,
    refuse,
    standalone_job_option,
    store_options,
)

_SIGNS = {"ok": ("ok", "green"), "warning": ("warn", "yellow"), "error": ("FAIL", "red")}


@click.command()
@click.argument("job", required=False)
@click.option("--node", default=None, help="This node's name. [default: the host's]")
@click.option("--local-addr", default=None, help="Address at which other nodes reach this one.")
@click.option(
    "--checkpoint-path", default=None, metavar="DIR", help="Checkpoint folder to check, on every node."
)
@click.option(
    "--aws", "asgs", multiple=True, metavar="ASG", help="Also check permissions for this EC2 group."
)
@click.option("--region", default=None, help="AWS region of the group.")
@click.option("--profile", default=None, help="AWS profile with the credentials.")
@click.option("--queue-url", default=None, help="SQS queue with the interruption notices of the group.")
@json_option
@standalone_job_option
@store_options
def doctor(
    where: Where,
    job: str | None,
    as_json: bool,
    node: str | None,
    local_addr: str | None,
    checkpoint_path: str | None,
    asgs: tuple[str, ...],
    region: str | None,
    profile: str | None,
    queue_url: str | None,
    standalone_job: str | None,
) -> int:
    """Check this machine and etcd, and suggest remedies. The exit code is 1 if a check fails.

    With JOB its agents and the coordinator write their last decisions into files, for `adaptdl replay`.
    """
    from adaptdl_elastic.autoscaler.diagnostics import checks

    if not asgs:
        refuse(("region", "profile", "queue_url"), "is for --aws")
    standalone_job = standalone_job or job
    endpoint = _endpoint(where, standalone_job)
    address = checks.check_address(local_addr, endpoint) if endpoint or local_addr else []
    found = [*checks.check_versions(), *checks.check_limits(), *checks.check_self_test(), *address]
    directory = None
    if checkpoint_path is not None and "://" not in checkpoint_path:
        directory = Path(checkpoint_path).absolute()
        found += checks.check_directory(directory)
    found += _store(where, standalone_job, node or socket.gethostname(), directory)
    if job is not None:
        found += _decisions(where, job)
    if asgs:
        found += _aws(asgs, region, profile, queue_url)
    if as_json:
        rows = [{**vars(finding), "level": finding.level.value} for finding in found]
        click.echo(json.dumps(rows, indent=2))
    else:
        for finding in found:
            text, colour = _SIGNS[finding.level.value]
            click.secho(f"{text:<5} ", fg=colour, nl=False)
            echo(f"{finding.check}: {finding.detail}")
            if finding.remedy:
                echo(f"      -> {finding.remedy}")
    return int(any(finding.level is checks.Level.ERROR for finding in found))


def _decisions(where: Where, job: str) -> list[Any]:
    from adaptdl_elastic.autoscaler.commands.jobs import last_decisions
    from adaptdl_elastic.autoscaler.diagnostics.checks import ok, warning

    none, remedy = "has written no decisions", "they are in the log directories of the job's agents"
    try:
        files = sorted(last_decisions(where, job).items())
    except CommandError as problem:
        return [warning("decisions", str(problem), remedy)]
    return [
        ok("decisions", f"{one}: {at}") if at else warning("decisions", f"{one} {none}", remedy)
        for one, at in files
    ]


def _endpoint(where: Where, job: str | None) -> str | None:
    try:
        return where.locate(job).endpoint
    except CommandError:
        return None  # the checks of the store report it


def _store(where: Where, job: str | None, node: str, directory: Path | None) -> list[Any]:
    from adaptdl_elastic.autoscaler.commands.tables import read
    from adaptdl_elastic.autoscaler.diagnostics import checks
    from adaptdl_elastic.rendezvous.schema.keys import Keys
    from adaptdl_elastic.rendezvous.store.base import StoreAuthError, StoreError

    found: list[checks.Finding] = []
    place = None
    try:
        place = where.locate(job)
        found = checks.check_server(place.endpoint, where.options(place))
        if all(finding.level is checks.Level.ERROR for finding in found):
            return found
        store = where.open(place)
    except CommandError as problem:
        if isinstance(problem.__cause__, StoreAuthError):
            remedy = (
                "name a user of this etcd with --etcd-user (ADAPTDL_ETCD_USER), and the file that has its "
                "password with ADAPTDL_ETCD_PASSWORD_FILE"
            )
            return [*found, checks.error("rights", str(problem.__cause__), remedy)]
        if isinstance(problem, NothingRunsError):
            return [checks.ok("store", "none was given: jobs of one machine need no etcd")]
        remedy = "give --etcd HOST:PORT of an etcd that runs"
        if found:
            remedy = "is this etcd's port for clients (2379)?"
        if place is not None and place.job:
            remedy = f"see what its agent does: adaptdl status {place.job}"
        return [*found, checks.error("store", problem.message, remedy)]
    except StoreError as problem:
        return [checks.error("store", str(problem), "correct the option or variable named")]
    with store:
        keys = Keys(place.cluster)
        try:
            found += checks.check_rights(store, keys)
            view = read(store, keys)
            found += checks.check_cluster(view, node)
            found += [*checks.check_devices(view), *checks.check_checkpoints(view)]
            if directory is not None:
                with checks.marked(store, keys, node, directory) as marks:
                    found += marks
        except StoreError as problem:
            found.append(checks.error("store", str(problem), "see the store's own log"))
    return found


def _aws(asgs: tuple[str, ...], region: str | None, profile: str | None, queue_url: str | None) -> list[Any]:
    from adaptdl_elastic.autoscaler.diagnostics import checks

    try:
        from adaptdl_elastic.autoscaler.providers.ec2.account_checks import check_aws
    except ImportError as problem:
        return [checks.error("aws", f"cannot be checked: {problem}", "pip install boto3")]
    return [
        checks.ok(check.name, check.detail)
        if check.ok
        else checks.error(
            check.name, check.detail, getattr(check, "remedy", "") or f"see {DOCS}/howto/ec2.md"
        )
        for check in check_aws(asgs, region, profile, queue_url)
    ]
