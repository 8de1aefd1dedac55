"""The commands `adaptdl coordinator`, `nodes`, `drain` and `events`, which are about the whole cluster."""

from __future__ import annotations

import functools
import json
import logging
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from click.core import ParameterSource

from adaptdl_elastic import _program
from adaptdl_elastic.autoscaler.cli import (
    CommandError,
    Finite,
    OptionError,
    Where,
    echo,
    json_option,
    refuse,
    standalone_job_option,
    store_options,
)
from adaptdl_elastic.protocol.environment import METRICS_HOST, METRICS_PORT
from adaptdl_elastic.rendezvous.local.safe_stream import protect
from adaptdl_elastic.rendezvous.schema import records
from adaptdl_elastic.rendezvous.schema.keys import Keys, check_name
from adaptdl_elastic.rendezvous.text import in_url, log_to_stderr

if TYPE_CHECKING:
    from adaptdl_elastic.autoscaler.cli import Place
    from adaptdl_elastic.autoscaler.diagnostics.prometheus import CoordinatorMetrics
    from adaptdl_elastic.rendezvous.store.base import Store


def open_permitted(where: Where, standalone_job: str | None = None, owned: str = "") -> tuple[Store, Place]:
    """Open the store that a command is about, to change what is this person's, or what others have.

    Args:
        where: The stores that the command line selects.
        standalone_job: Only the store of the standalone job of this name.
        owned: The job that is changed; "": what others have is, which is for administrators.

    Raises:
        CommandError: the person may not, in a cluster that has node services.
    """
    place = where.locate(standalone_job)
    store = where.open(place)
    if place.context is not None:
        from adaptdl_elastic.autoscaler.commands.cluster_setup import client_of, told
        from adaptdl_elastic.autoscaler.commands.job_requests import check_administrator, check_owner

        at = store, Keys(place.cluster), place.context, client_of(place.context)
        try:
            told(check_owner)(*at, owned) if owned else told(check_administrator)(*at)
        except CommandError:
            store.close()
            raise
    return store, place


def metrics_port_of(text: str) -> int | Literal["off"]:
    """Return the port that is given, or `off`; raise a usage error if the text is neither."""
    if text == "off":
        return "off"
    if not (text.isascii() and text.isdigit() and int(text) <= 65535):
        raise click.BadParameter(f"{text!r} is neither a port from 0 to 65535 nor off")
    return int(text)


@click.command()
@click.option(
    "--interval",
    type=Finite(min=0.05, max=86400),
    default=60.0,
    show_default=True,
    help="Seconds between two decisions, if nothing happens in between.",
)
@click.option(
    "--fairness",
    type=Finite(min=-20, max=1),
    default=None,
    help="Exponent p of the power mean of --objective speedup.",
)
@click.option(
    "--objective",
    type=click.Choice(["completion", "speedup"]),
    default=None,
    help="Aim for short completion times, or for a high power mean of the speedups. [default: completion]",
)
@click.option(
    "--default-pause",
    type=Finite(min=0),
    default=None,
    help="Expected pause, in seconds, of a job whose number of replicas has never been changed.",
)
@click.option(
    "--metrics-port",
    type=metrics_port_of,
    metavar="PORT|off",
    envvar=METRICS_PORT,
    show_envvar=True,
    help="Port of the Prometheus metrics; 0: any free one. [default: the first free one from 9300 to 9309]",
)
@click.option(
    "--metrics-host",
    default="127.0.0.1",
    envvar=METRICS_HOST,
    show_default=True,
    show_envvar=True,
    help="Address on which metrics are served.",
)
@click.option(
    "--decisions", type=Path, metavar="FILE", help="Write the last decisions to FILE when a job fails."
)
@click.option("--parent-fd", type=int, default=None, hidden=True, help="Stop when this pipe is closed.")
@click.option(
    "--log-level",
    default="warning",
    show_default=True,
    type=click.Choice(["debug", "info", "warning", "error"]),
    help="Write messages of this level and above to standard error.",
)
@store_options
def coordinator(
    where: Where,
    interval: float,
    fairness: float | None,
    objective: str | None,
    default_pause: float | None,
    metrics_port: int | Literal["off"] | None,
    metrics_host: str,
    decisions: Path | None,
    parent_fd: int | None,
    log_level: str,
) -> None:
    """Serve every job of a cluster. Several coordinators may run; one of them leads."""
    from adaptdl_elastic.autoscaler.coordinator.decision_types import CoordinatorSettings
    from adaptdl_elastic.autoscaler.coordinator.process import Coordinator, stop_with_parent
    from adaptdl_elastic.autoscaler.policy import allocate
    from adaptdl_elastic.autoscaler.policy.policy_types import Objective, PolicySettings
    from adaptdl_elastic.rendezvous.services.submitted import SubmissionReader
    from adaptdl_elastic.rendezvous.store.base import StoreAuthError

    if objective != Objective.SPEEDUP.value:
        refuse(("fairness",), "is for --objective speedup")
    protect()
    log_to_stderr(log_level.upper(), "%(asctime)s coordinator %(levelname)s %(message)s")
    given: dict[str, Any] = {
        "fairness": fairness,
        "objective": None if objective is None else Objective(objective),
        "default_pause": default_pause,
    }
    policy_settings = PolicySettings(**{name: value for name, value in given.items() if value is not None})
    settings = CoordinatorSettings(interval=interval, policy=policy_settings)
    store, place = open_permitted(where)
    release = _program.version()
    metrics = None
    if metrics_port != "off":
        asked_for = parent_fd is None and not _from_environment("metrics_port", "metrics_host")
        metrics = serve_metrics(metrics_host, metrics_port, release, place.cluster, asked_for)
    keys = Keys(place.cluster)
    if metrics is not None:
        metrics.read_submitted = functools.partial(SubmissionReader(store, keys, "").read, None)
    with store:
        served = Coordinator(
            store,
            keys,
            settings,
            allocate,
            observers=() if metrics is None else (metrics,),
            version=release,
            metrics="" if metrics is None else f"{in_url(metrics_host)}:{metrics.port}",
            decisions=decisions and decisions.absolute(),
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            # a shell ignores SIGINT for a program in the background
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda *_: served.stop())
        if parent_fd is not None:
            # Slurm and systemd send it to all processes of a job: it decides how the parent's node leaves
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            stop_with_parent(parent_fd, served.stop)
        try:
            served.run()
        except StoreAuthError as error:
            raise CommandError(f"the store refuses us: {error}") from error


def _from_environment(*names: str) -> bool:
    """Return whether one of these parameters of the running command has its value from the environment."""
    context = click.get_current_context()
    return any(context.get_parameter_source(name) is ParameterSource.ENVIRONMENT for name in names)


def serve_metrics(
    host: str, port: int | None, release: str, cluster: str, asked_for: bool
) -> CoordinatorMetrics | None:
    """Serve metrics, or warn that none are served; jobs need no metrics.

    Args:
        host: Address to listen on.
        port: Port to listen on; 0: any free one; None: a free one of the default ports.
        release: Version of adaptdl-elastic.
        cluster: Name of the cluster.
        asked_for: Whether a person chose the address by the command line, and so can name another one.

    Raises:
        CommandError: the address was asked for and cannot be used.
    """
    from adaptdl_elastic.autoscaler.diagnostics.prometheus import PortsTakenError, serve

    at = f"{in_url(host)}:{port}" if port is not None else host
    try:
        return serve(host, port, release, cluster)
    except PortsTakenError as error:
        problem = str(error.strerror)
    except OSError as error:
        if asked_for:
            raise CommandError(
                f"metrics cannot be served on {at}: {error.strerror}; "
                f"choose another --metrics-port, 0 for any, or off, or another --metrics-host"
            ) from error
        problem = f"{at}: {error.strerror}; see ADAPTDL_METRICS_PORT and ADAPTDL_METRICS_HOST"
    logging.getLogger(__name__).warning("no metrics are served: %s", problem)
    return None


@click.command()
@json_option
@store_options
def nodes(where: Where, as_json: bool) -> None:
    """Show the nodes of the cluster and the jobs on them."""
    from adaptdl_elastic.autoscaler.commands.tables import load_all
    from adaptdl_elastic.autoscaler.coordinator.slots import Ledger
    from adaptdl_elastic.autoscaler.diagnostics.rows import node_rows

    rows = [row for _, view in load_all(where) for row in node_rows(view, Ledger(view))]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    from adaptdl_elastic.autoscaler.commands.tables import show_table

    empty = "no node is registered"
    if not rows and any(place.context is not None for place in where.places()):
        empty = "no node has a job's agent now; adaptdl cluster status shows the nodes of the cluster"
    show_table(
        ("NODE", "TYPE", "SLOTS", "FREE", "HOST", "JOBS", "STATE"),
        [
            (
                row["node"],
                row["node_type"] or "-",
                row["slots"],
                row["free"],
                row["host"],
                ", ".join(f"{job}:{count}" for job, count in row["jobs"].items()) or "-",
                row["state"],
            )
            for row in rows
        ],
        empty=empty,
    )
    for row in rows:
        for line in row["unusable"]:
            echo(f"{row['node']}: not usable: {line}")
        for other, (latency, bandwidth) in sorted(row["links"].items()):
            echo(f"link {other} → {row['node']}: {bandwidth / 1e6:.3g} MB/s, {1e3 * latency:.2g} ms")


@click.command()
@click.argument("node")
@click.option("--reason", default="adaptdl drain", show_default=True, help="Reason that events show.")
@click.option("--deadline", type=Finite(min=0), default=None, help="Seconds until the node is switched off.")
@click.option("--cancel", is_flag=True, help="Cancel the request: jobs may use NODE again.")
@click.option("--wait", is_flag=True, help="Wait until no replica is left on NODE.")
@click.option("--timeout", type=Finite(min=0), default=300.0, show_default=True, help="Seconds to --wait.")
@standalone_job_option
@store_options
def drain(
    node: str,
    where: Where,
    reason: str,
    deadline: float | None,
    cancel: bool,
    wait: bool,
    timeout: float,
    standalone_job: str | None,
) -> None:
    """Move every replica off NODE in an orderly way.

    Its agents then exit. So does every agent that is started there, until --cancel.
    """
    if cancel:
        refuse(("reason", "deadline", "wait", "timeout"), "has no meaning with --cancel")
    if not wait:
        refuse(("timeout",), "says how long --wait waits: give --wait, too")
    from adaptdl_elastic.autoscaler.commands.tables import read, wait_until
    from adaptdl_elastic.autoscaler.coordinator.slots import Ledger

    try:
        check_name("node", node)
    except ValueError as error:
        raise OptionError(str(error)) from error
    store, place = open_permitted(where, standalone_job)
    keys = Keys(place.cluster)
    with store:
        view = read(store, keys)
        known = {name for agents in view.nodes.values() for name in agents}
        if place.context is not None:  # its nodes have agents only while jobs run there
            known.update(place.context.nodes)
        if cancel:
            if not store.delete(keys.drain(node)):
                raise CommandError(f"{node} is not being drained by request")
            echo(f"{node} may be used again")
            return
        if node not in known:
            there = f"; its nodes are: {', '.join(sorted(known))}" if known else ", and no other"
            raise CommandError(f"there is no node {node!r} in cluster {place.cluster!r}{there}")
        now = time.time()
        until = None if deadline is None else now + deadline
        person = place.context.person if place.context is not None else ""
        request = records.DrainRequest(node, reason, until, created=now, person=person)
        store.put(keys.drain(node), records.encode(request))
        echo(f"{node} is being drained")
        if wait and not wait_until(store, keys, lambda v: not _busy(Ledger(v), v, node), timeout):
            raise CommandError(f"{node} still has replicas after {timeout:g} s; see adaptdl nodes")


def _busy(ledger: Any, view: Any, node: str) -> bool:
    return any(ledger.held(job).get(node) for job in view.jobs)


@click.command()
@click.option("--tail", type=click.IntRange(min=1), default=20, show_default=True, help="Rows to show.")
@json_option
@store_options
def events(where: Where, as_json: bool, tail: int) -> None:
    """List the latest decisions of the coordinator."""
    from adaptdl_elastic.autoscaler.commands.tables import ask_all
    from adaptdl_elastic.rendezvous.text import clock

    answers = ask_all(where, lambda store, place: store.range(Keys(place.cluster).events).items)
    merged = [item for _, items in answers for item in items]
    items = sorted(merged, key=lambda item: item.key.rpartition("/")[2])[-tail:]
    if not items and not as_json:
        echo("no events yet")
    for item in items:
        try:
            event = json.loads(item.value)
        except ValueError:
            continue
        if not isinstance(event, dict):  # written by another program
            continue
        if as_json:
            click.echo(json.dumps(event))
            continue
        when = clock(event.pop("time", 0))
        name = event.pop("event", "?")
        event.pop("fence", None)
        text = "  ".join(f"{key}={value}" for key, value in event.items() if value not in (None, "", {}, []))
        echo(f"{when}  {name!s:<10}  {text}")
