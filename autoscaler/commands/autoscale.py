"""`adaptdl autoscale`: let EC2, or this machine, give and take nodes."""

from __future__ import annotations

import json
import logging
import math
import shlex
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from adaptdl_elastic.autoscaler.cli import CommandError, Where, store_options


def _deadline(text: str, now: float) -> tuple[str, float]:
    """`JOB=2h30m`, `2h` (every job) or an ISO time, to (job, seconds since the epoch)."""
    from datetime import datetime

    bad = CommandError(f"--deadline {text!r}: say [JOB=]2h30m, or [JOB=]2026-11-22T06:00:00+00:00")
    job, equals, when = text.rpartition("=")
    if equals and not job:
        raise bad
    job = job if equals else "*"
    units = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    total, number = 0.0, ""
    for character in when:
        if character in units and number:
            try:
                total, number = total + float(number) * units[character], ""
            except ValueError:
                raise bad from None
        elif character.isdigit() or character == ".":
            number += character
        else:
            break
    else:
        if when and not number:
            return job, now + total
    try:
        return job, datetime.fromisoformat(when.replace("Z", "+00:00")).timestamp()
    except ValueError:
        raise bad from None


def _band(text: str) -> tuple[float, float]:
    low, _, high = text.partition(":")
    try:
        return float(low), float(high)
    except ValueError:
        raise CommandError(f"--utilisation {text!r}: say LOW:HIGH, e.g. 0.85:1") from None


@click.command()
@store_options
@click.option(
    "--asg", "groups", multiple=True, metavar="NAME", help="An auto-scaling group to rule; repeatable."
)
@click.option("--region", help="AWS region. [default: as boto3 finds it]")
@click.option("--profile", help="AWS profile. [default: as boto3 finds it]")
@click.option("--queue-url", metavar="URL", help="SQS queue that EventBridge puts interruption notices into.")
@click.option(
    "--price", "prices", multiple=True, metavar="TYPE=PRICE", help="On-demand price per hour; repeatable."
)
@click.option(
    "--prices",
    "price_file",
    type=click.Path(path_type=Path),
    help="The same as a JSON or CSV table in a file.",
)
@click.option("--slots", type=click.IntRange(min=1), help="Replicas per node. [default: its GPUs]")
@click.option(
    "--local", "local", metavar="COMMAND", help="Instead of EC2: start COMMAND here, once per node."
)
@click.option(
    "--local-price", type=float, default=1.0, show_default=True, help="Price of a local node per hour."
)
@click.option("--min-nodes", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--max-nodes", type=click.IntRange(min=0), help="Never more nodes. [default: the groups' Max]")
@click.option("--max-hourly-cost", type=float, metavar="AMOUNT", help="Never more per hour.")
@click.option(
    "--hour-value",
    type=float,
    metavar="AMOUNT",
    help="What an hour of a job's time is worth. [default: 4 slot hours]",
)
@click.option(
    "--deadline",
    "deadlines",
    multiple=True,
    metavar="[JOB=]WHEN",
    help="End by then at the least cost: 2h30m, or an ISO time; repeatable.",
)
@click.option(
    "--utilisation",
    default="0.85:1",
    show_default=True,
    metavar="LOW:HIGH",
    help="Band inside which nothing moves.",
)
@click.option(
    "--shrink-after",
    type=float,
    default=120.0,
    show_default=True,
    help="Seconds below the band before nodes go.",
)
@click.option(
    "--boot-timeout",
    type=float,
    default=600.0,
    show_default=True,
    help="Seconds an instance has to become a node.",
)
@click.option(
    "--max-interruptions",
    type=float,
    default=1.0,
    show_default=True,
    help="Per spot node and hour, above which on-demand is bought.",
)
@click.option(
    "--job",
    "expected",
    multiple=True,
    metavar="JOB",
    help="Have a node for this job before it is started; repeatable.",
)
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1),
    default=5.0,
    show_default=True,
    help="Seconds between looks.",
)
@click.option(
    "--until-done",
    is_flag=True,
    help="End when all jobs have ended and all nodes but the least are given back.",
)
@click.option(
    "--take-over", "seize", is_flag=True, help="Rule the groups though they belong to another cluster."
)
@click.option("--dry-run", is_flag=True, help="Print what would be done once, and do nothing.")
@click.option("--json", "as_json", is_flag=True, help="Events as JSON, one per line.")
def autoscale(
    where: Where,
    groups: tuple[str, ...],
    local: str | None,
    min_nodes: int,
    max_nodes: int | None,
    max_hourly_cost: float | None,
    hour_value: float | None,
    deadlines: tuple[str, ...],
    utilisation: str,
    shrink_after: float,
    boot_timeout: float,
    max_interruptions: float,
    expected: tuple[str, ...],
    interval: float,
    until_done: bool,
    dry_run: bool,
    as_json: bool,
    **more: Any,
) -> None:
    """Buy the nodes that are worth their price, and give back those that are not.

    Runs beside the coordinator until it is stopped (Ctrl-C, SIGTERM); nodes stay when it goes.
    """
    from adaptdl_elastic.autoscaler.providers.base import ProviderError
    from adaptdl_elastic.autoscaler.scaling.economics import ScalingSettings
    from adaptdl_elastic.autoscaler.scaling.loop import Autoscaler, LoopOptions, identity
    from adaptdl_elastic.rendezvous.keys import Keys, check_name

    if any(not name.strip() for name in groups):
        raise CommandError("--asg '': say the name of an auto-scaling group")
    if bool(groups) == bool(local):
        raise CommandError("say either --asg NAME (an auto-scaling group) or --local COMMAND")
    if not math.isfinite(interval):
        raise CommandError(f"--interval {interval:g}: needs a number of seconds")
    low, high = _band(utilisation)
    try:
        for job in expected:
            check_name("job", job)
        settings = ScalingSettings(
            hour_value=hour_value,
            low=low,
            high=high,
            shrink_after=shrink_after,
            min_nodes=min_nodes,
            max_nodes=1_000_000 if max_nodes is None else max_nodes,
            max_hourly_cost=math.inf if max_hourly_cost is None else max_hourly_cost,
            deadlines=dict(_deadline(text, time.time()) for text in deadlines),
            boot_timeout=boot_timeout,
            gap=max(ScalingSettings.gap, 3 * interval),
            max_interruptions=max_interruptions,
        )
    except ValueError as error:
        raise CommandError(str(error)) from error
    options = LoopOptions(interval, dry_run, expected, until_done)
    logging.basicConfig(level=logging.WARNING, format="adaptdl autoscale: %(message)s")
    try:
        store, cluster = where.connect()
        keys = Keys(cluster)
        with store:
            if local:
                provider = _local(local, max_nodes, **more)
            else:
                provider = _ec2(groups, owner=identity(store, keys, create=not dry_run), **more)
            ruler = Autoscaler(store, keys, provider, settings, options, _printer(as_json))
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: ruler.stop())
            code = ruler.run()
    except ProviderError as error:
        raise CommandError(str(error)) from error
    if dry_run and not as_json:
        click.echo("dry run: nothing was done")
    sys.exit(code)


def _ec2(
    groups: tuple[str, ...],
    *,
    region: str | None,
    profile: str | None,
    queue_url: str | None,
    prices: tuple[str, ...],
    price_file: Path | None,
    slots: int | None,
    local_price: float,
    owner: str,
    seize: bool,
) -> Any:
    from adaptdl_elastic.autoscaler.providers.ec2 import Ec2Provider
    from adaptdl_elastic.autoscaler.providers.prices import parse_price_option, read_prices

    table = {} if price_file is None else read_prices(price_file)
    table |= dict(parse_price_option(text) for text in prices)
    return Ec2Provider(
        groups,
        table,
        slots=slots,
        region=region,
        profile=profile,
        queue_url=queue_url,
        owner=owner,
        seize=seize,
    )


def _local(command: str, max_nodes: int | None, *, slots: int | None, local_price: float, **_: Any) -> Any:
    from adaptdl_elastic.autoscaler.providers.base import Pool
    from adaptdl_elastic.autoscaler.providers.local import LocalProvider

    try:
        words = shlex.split(command)
    except ValueError as error:
        raise CommandError(f"--local {command!r}: {error}") from None
    if not (0 <= local_price < math.inf):
        raise CommandError(f"--local-price {local_price:g}: needs a price per hour, e.g. 1.0")
    pool = Pool(
        "local",
        desired=0,
        maximum=1 if max_nodes is None else max_nodes,
        slots=slots or 1,
        hourly_price=local_price,
    )
    return LocalProvider(words, [pool], Path(".adaptdl") / "local")


def _printer(as_json: bool) -> Any:
    def say(event: str, fields: Mapping[str, Any]) -> None:
        if as_json:
            click.echo(json.dumps({"time": time.time(), "event": event, **fields}, default=str))
            return
        text = fields.get("message") or ", ".join(
            f"{name} {value}"
            for name, value in fields.items()
            if name != "hourly_cost" and value not in (None, "")
        )
        click.echo(f"{time.strftime('%H:%M:%S')} {event}: {text}")
        sys.stdout.flush()

    return say
