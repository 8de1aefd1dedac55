"""The command `adaptdl autoscale`: let a provider start and stop nodes."""

from __future__ import annotations

import json
import logging
import math
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import click

from adaptdl_elastic.autoscaler.cli import (
    CommandError,
    Finite,
    OptionError,
    Where,
    echo,
    store_options,
)
from adaptdl_elastic.autoscaler.commands.cluster import open_permitted
from adaptdl_elastic.protocol.environment import CLUSTER, ETCD
from adaptdl_elastic.rendezvous.local.safe_stream import protect
from adaptdl_elastic.rendezvous.text import log_to_stderr

logger = logging.getLogger(__name__)


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    epilog="Options of the provider are given by their names: --NAME VALUE is -o NAME=VALUE. Of ec2 (--asg): "
    "--region, --profile (as boto3 finds them) and --queue-url (SQS queue with the interruption notices of "
    "EventBridge). Of slurm: --batch-file (what a node runs), --partition and, repeatable, --sbatch-option.",
)
@click.option("--provider", metavar="NAME", help="Name of the provider, which may come from another package.")
@click.option(
    "-o",
    "provider_options",
    multiple=True,
    metavar="KEY=VALUE",
    help="An option of the provider; repeatable.",
)
@click.option(
    *("--asg", "groups"),
    multiple=True,
    metavar="NAME",
    help="The same as --provider ec2 --groups NAME, an auto-scaling group; repeatable.",
)
@click.option("--price", "prices", multiple=True, metavar="TYPE=PRICE", help="Price per hour; repeatable.")
@click.option("--slots", type=click.IntRange(min=1), help="Replicas per node. [default: its GPUs]")
@click.option("--min-nodes", type=click.IntRange(min=0), default=0, show_default=True, help="Fewest nodes.")
@click.option("--max-nodes", type=click.IntRange(min=0), help="Most nodes. [default: those of the pools]")
@click.option(
    "--max-hourly-cost", type=float, metavar="AMOUNT", help="Highest cost of an hour, in the unit of --price."
)
@click.option(
    *("--max-node-hours", "max_hours"),
    type=Finite(min=0, min_open=True),
    default=None,
    help="Hours of all nodes so far, after which they are given back.",
)
@click.option(
    "--max-job-cost",
    "job_costs",
    multiple=True,
    metavar="[JOB=]AMOUNT",
    help="Highest cost of a job, or of each job: it is saved and stopped before it costs more; repeatable.",
)
@click.option(
    "--hour-value",
    type=float,
    metavar="AMOUNT",
    help="Value of an hour of a job's time, in the unit of --price. [default: the price of 4 slots]",
)
@click.option(
    "--deadline",
    "deadlines",
    multiple=True,
    metavar="[JOB=]WHEN",
    help="Finish by this time at the lowest cost: 2h30m, or an ISO time (local without a zone); repeatable.",
)
@click.option(
    "--utilisation",
    default="0.85:1",
    show_default=True,
    metavar="LOW:HIGH",
    help="Ratio of wanted to existing slots between which no node is bought or given back.",
)
@click.option(
    "--shrink-after",
    type=float,
    default=120.0,
    show_default=True,
    help="Seconds below --utilisation after which nodes are given back.",
)
@click.option(
    "--idle-minutes",
    type=float,
    default=5.0,
    show_default=True,
    help="Minutes without a replica after which a node is given back.",
)
@click.option(
    "--boot-timeout",
    type=float,
    default=600.0,
    show_default=True,
    help="Seconds after which an instance that has no agent yet counts as failed.",
)
@click.option(
    "--job",
    "expected",
    multiple=True,
    metavar="JOB",
    help="Keep a node ready for this job, which has not started yet; repeatable.",
)
@click.option(
    "--interval", type=Finite(min=0.1), default=5.0, show_default=True, help="Seconds between two decisions."
)
@click.option(
    "--until-done",
    is_flag=True,
    help="Exit when all jobs have ended and all nodes but --min-nodes are given back.",
)
@click.option(
    "--take-over", "seize", is_flag=True, help="Change the pools even if they belong to another cluster."
)
@click.option("--dry-run", is_flag=True, help="Only print what would be done now.")
@click.option("--json", "as_json", is_flag=True, help="Events as JSON, one per line.")
@store_options
@click.pass_context
def autoscale(
    context: click.Context,
    where: Where,
    provider: str | None,
    provider_options: tuple[str, ...],
    groups: tuple[str, ...],
    prices: tuple[str, ...],
    slots: int | None,
    seize: bool,
    min_nodes: int,
    max_nodes: int | None,
    max_hourly_cost: float | None,
    max_hours: float | None,
    job_costs: tuple[str, ...],
    hour_value: float | None,
    deadlines: tuple[str, ...],
    utilisation: str,
    shrink_after: float,
    idle_minutes: float,
    boot_timeout: float,
    expected: tuple[str, ...],
    interval: float,
    until_done: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Buy the nodes that are worth their price, and give back those that are not.

    Runs beside the coordinator until it is stopped (Ctrl-C, SIGTERM); nodes are kept when it stops.
    """
    from adaptdl_elastic.autoscaler.providers.base import ProviderError, ProviderOptionError
    from adaptdl_elastic.autoscaler.providers.ec2.prices import parse_price_option
    from adaptdl_elastic.autoscaler.providers.registry import ProviderRequest, make_provider
    from adaptdl_elastic.autoscaler.scaling.autoscaler_loop import Autoscaler, LoopOptions, identity
    from adaptdl_elastic.autoscaler.scaling.economics import ScalingSettings
    from adaptdl_elastic.autoscaler.scaling.setting_texts import parse_band, parse_deadline, parse_job_cost
    from adaptdl_elastic.rendezvous.schema.keys import Keys, check_name

    if any(not name.strip() for name in groups):
        raise OptionError("--asg '': give the name of an auto-scaling group")
    if groups and provider:
        raise OptionError("give one of --asg and --provider")
    name, own = "ec2" if groups else provider, _options(provider_options, context.args)
    if name is None:
        raise OptionError("give --asg NAME (an auto-scaling group) or --provider NAME")
    own |= {"groups": ",".join(groups)} if groups else {}
    try:
        low, high = parse_band(utilisation)
        for job in expected:
            check_name("job", job)
        settings = ScalingSettings(
            hour_value=hour_value,
            low=low,
            high=high,
            shrink_after=shrink_after,
            idle_after=idle_minutes * 60,
            min_nodes=min_nodes,
            max_nodes=1_000_000 if max_nodes is None else max_nodes,
            max_hourly_cost=math.inf if max_hourly_cost is None else max_hourly_cost,
            max_node_hours=math.inf if max_hours is None else max_hours,
            max_job_costs=dict(parse_job_cost(text) for text in job_costs),
            deadlines=dict(parse_deadline(text, time.time()) for text in deadlines),
            boot_timeout=boot_timeout,
            gap=max(ScalingSettings.gap, 3 * interval),
        )
    except ValueError as error:
        raise OptionError(str(error)) from error
    try:
        table = dict(parse_price_option(text) for text in prices)
    except ProviderError as error:
        raise OptionError(str(error)) from error
    options = LoopOptions(interval, dry_run, expected, until_done)
    protect()
    log_to_stderr(logging.WARNING, "adaptdl autoscale: %(message)s")
    for job, when in settings.deadlines.items():
        if when <= time.time():
            logger.warning("the --deadline of %s has passed", "all jobs" if job == "*" else f"job {job!r}")
    try:
        store, place = open_permitted(where)
        keys = Keys(place.cluster)
        with store:
            owner = identity(store, keys, create=not dry_run)
            access = {ETCD: place.endpoint, CLUSTER: place.cluster}
            access |= {} if place.context is None else place.context.store_environment()
            request = ProviderRequest(own, table, slots, max_nodes, owner, seize, access)
            ruler = Autoscaler(
                store, keys, make_provider(name, request), settings, options, _printer(as_json)
            )
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: ruler.stop())
            code = ruler.run()
    except ProviderOptionError as error:
        raise OptionError(str(error)) from error
    except ProviderError as error:
        raise CommandError(str(error)) from error
    if dry_run and not as_json:
        echo("dry run: nothing was done")
    sys.exit(code)


def _options(pairs: Sequence[str], others: Sequence[str]) -> dict[str, str]:
    """Return the options of the provider; those that are repeated have a line for each value.

    Args:
        pairs: KEY=VALUE.
        others: Words of the command line as `--KEY VALUE` or `--KEY=VALUE`.
    """
    words = iter(others)
    named = [word if "=" in word else f"{word}={next(words, '')}" for word in words]
    for word in named:
        if not word.startswith("--") or word.endswith("="):
            raise OptionError(
                f"{word.partition('=')[0]}: there is no such option, and one of the provider has a value"
            )
    found: dict[str, str] = {}
    for pair in (*pairs, *(word.removeprefix("--") for word in named)):
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise OptionError(f"-o {pair!r}: give KEY=VALUE")
        name = name.replace("-", "_")
        found[name] = f"{found[name]}\n{value}" if name in found else value
    return found


def _printer(as_json: bool) -> Any:
    def say(event: str, fields: Mapping[str, Any]) -> None:
        if as_json:
            click.echo(json.dumps({"time": time.time(), "event": event, **fields}, default=str))
            return
        text = fields.get("message")
        if event == "target":
            text = f"{fields['target']} nodes (now {fields['nodes']}): {fields['reason']}"
        text = text or ", ".join(
            f"{name} {value}"
            for name, value in fields.items()
            if name != "hourly_cost" and value not in (None, "")
        )
        echo(f"{time.strftime('%H:%M:%S')} {event}: {text}")
        sys.stdout.flush()

    return say
