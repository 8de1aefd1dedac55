"""The commands `adaptdl cluster up`, `add`, `remove`, `status`, `down`, `grant` and `revoke`."""

from __future__ import annotations

import functools
import getpass
import json
import secrets
import shutil
import tempfile
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click

from adaptdl_elastic._whole_file import write_whole
from adaptdl_elastic.autoscaler.cli import CommandError, Finite, OptionError, echo, json_option
from adaptdl_elastic.autoscaler.commands import job_requests
from adaptdl_elastic.autoscaler.commands.tables import show_table
from adaptdl_elastic.autoscaler.provisioning import bring_up, store_users
from adaptdl_elastic.autoscaler.provisioning.credentials import Credentials
from adaptdl_elastic.autoscaler.provisioning.nodes import private_archive
from adaptdl_elastic.autoscaler.provisioning.ssh import ProvisionError
from adaptdl_elastic.protocol.environment import CLUSTER
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import HEAVIEST
from adaptdl_elastic.rendezvous.schema.submissions import MOST_PRIORITY
from adaptdl_elastic.rendezvous.services import context as contexts
from adaptdl_elastic.rendezvous.services import signatures
from adaptdl_elastic.rendezvous.services.context import ClusterContext, ContextError
from adaptdl_elastic.rendezvous.services.service_client import (
    ServiceClient,
    ServiceError,
    ServiceRefusedError,
    Signer,
    person_context,
)
from adaptdl_elastic.rendezvous.services.signatures import Person, SignatureError
from adaptdl_elastic.rendezvous.services.submitted import SubmissionReader, Submitted
from adaptdl_elastic.rendezvous.store.base import StoreError
from adaptdl_elastic.rendezvous.store.connect import connect
from adaptdl_elastic.rendezvous.store.store_options import parse_endpoints

F = TypeVar("F", bound=Callable[..., Any])


def told(command: F) -> F:
    """Print errors of clusters and nodes as one line."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except (ProvisionError, ContextError, SignatureError, ServiceError) as error:
            raise CommandError(str(error)) from error

    return wrapped  # type: ignore[return-value]


def cluster_option(command: F) -> F:
    """Add `--cluster`, as the parameter `name`; print errors of clusters and nodes as one line."""
    option = click.option(
        "--cluster",
        "name",
        metavar="NAME",
        envvar=CLUSTER,
        show_envvar=True,
        help="Name of the cluster. [default: the only one that this machine knows]",
    )
    return option(told(command))


def open_cluster(context: ClusterContext) -> tuple[SubmissionReader, Any, Keys]:
    """Return a reader of the cluster's store, the store, and its keys; the caller closes the store."""
    if not context.endpoint:
        raise ContextError(f"cluster {context.name} is not up yet: adaptdl cluster up NODE...")
    store = connect(context.endpoint, api="v3", options=context.store_options())
    keys = Keys(context.name)
    return SubmissionReader(store, keys, context.cluster_id), store, keys


def client_of(context: ClusterContext) -> ServiceClient:
    """Return a client that signs as this user."""
    signer = Signer(context.cluster_id, context.person, context.identity)
    return ServiceClient(person_context(context.ca), signer)


def complete_job(context: click.Context, parameter: click.Parameter, typed: str) -> list[str]:
    """Return the names of submitted jobs that begin with what was typed, for the shell's completion."""
    try:
        reader, store, _ = open_cluster(contexts.choose(context.params.get("name")))
        with store:
            names = [one.submission.job for one in reader.read(None).requests]
    except (ContextError, StoreError):
        return []
    return [name for name in names if name.startswith(typed)]


@click.group()
def cluster() -> None:
    """Run jobs on machines of your own that are reached over ssh.

    No root, no container and no shared folder is needed.
    """


@cluster.command()
@click.argument("nodes", nargs=-1, metavar="[NODE]...")
@click.option("--python", metavar="PATH", help="Interpreter on the nodes that has adaptdl-elastic already.")
@click.option("--etcd", "etcd_binary", metavar="PATH", help="etcd on the first node. [default: on its PATH]")
@click.option("--etcd-port", type=click.IntRange(1, 65535), help="Port of etcd. [default: 2379]")
@click.option(
    "--port-range", metavar="LOW:HIGH", help="Ports that services and jobs listen on. [default: any]"
)
@click.option(
    "--slots",
    type=click.IntRange(0, 1024),
    help="Most replicas of a node; 0 means its number of GPUs, or 1. [default: 0]",
)
@click.option(
    "-F", "--ssh-config", metavar="FILE", type=click.Path(exists=True), help="Configuration file for ssh."
)
@click.option("--person", metavar="NAME", help="Your name on the cluster. [default: that of your user]")
@cluster_option
def up(name: str | None, nodes: tuple[str, ...], **options: Any) -> None:
    """Start a cluster on NODEs, or start what is missing of it.

    The first NODE runs etcd. A NODE that belongs to the cluster already stays in it. Without a NODE those of
    the last time are meant.
    """
    name = name or (contexts.names()[0] if len(contexts.names()) == 1 else "default")
    with contexts.locked(name):
        known = contexts.load(name)
        context = known or ClusterContext(name, secrets.token_hex(8), person=getpass.getuser())
        Credentials(context).check_authority()
        wanted = with_options(context, known is None, nodes, options)
        if known is None:
            contexts.save(replace(wanted, nodes=()))  # the look at a node claims it for this identifier
        _bring_up(wanted)


def _own(name: str | None) -> ClusterContext:
    """Return the context of a cluster that this user has brought up; ProvisionError if another user has."""
    context = contexts.choose(name)
    Credentials(context).check_authority()
    return context


def with_options(
    context: ClusterContext, fresh: bool, nodes: tuple[str, ...], options: dict[str, Any]
) -> ClusterContext:
    """Return the cluster as the command line asks for it.

    Raises:
        OptionError: an option is invalid.
    """
    given = {key: value for key, value in options.items() if value is not None}
    if "ssh_config" in given:
        given["ssh_config"] = str(Path(given["ssh_config"]).absolute())
    if "port_range" in given:
        low, _, high = given["port_range"].partition(":")
        if not (low.isdigit() and high.isdigit() and 1024 <= int(low) <= int(high) <= 65535):
            raise OptionError(f"--port-range {given['port_range']}: give LOW:HIGH, as in 29500:29600")
    if not fresh and given.get("person", context.person) != context.person:
        raise OptionError(f"--person {given['person']}: you are {context.person} in this cluster already")
    every = (*context.nodes, *(node for node in dict.fromkeys(nodes) if node not in context.nodes))
    if not every:
        raise OptionError("name the nodes, as in adaptdl cluster up node1 node2 node3")
    return replace(context, nodes=every, **given)


def _bring_up(context: ClusterContext, dispensable: Collection[str] = ()) -> None:
    reports = bring_up.bring_up(context, lambda text: echo(text, err=True), dispensable)
    for one in reports:
        what = "etcd, " if one.etcd else ""
        state = "started" if one.changed else "unchanged"
        slots = f"{one.slots} slot{'s' if one.slots != 1 else ''}"
        echo(f"{one.node}: {state} at {one.host}, {what}{slots}, kept by {one.kept_by}")
    echo(f"cluster {context.name} is up; adaptdl submit SCRIPT runs a job on it")


@cluster.command()
@click.argument("nodes", nargs=-1, required=True, metavar="NODE...")
@cluster_option
def add(name: str | None, nodes: tuple[str, ...]) -> None:
    """Add NODEs to a cluster. Other nodes need not be reachable, but for the first, which runs etcd."""
    context = _own(name)
    with contexts.locked(context.name):
        context = contexts.choose(context.name)
        others = set(context.nodes[1:]) - set(nodes)
        _bring_up(with_options(context, False, nodes, {}), others)


@cluster.command()
@click.argument("nodes", nargs=-1, required=True, metavar="NODE...")
@click.option("--purge", is_flag=True, help="Also delete output, files and checkpoints of jobs there.")
@click.option("--lost", is_flag=True, help="Also remove a NODE that cannot be reached, for good.")
@cluster_option
def remove(name: str | None, nodes: tuple[str, ...], purge: bool, lost: bool) -> None:
    """Remove NODEs from a cluster. Their replicas are saved and moved first.

    Its service, keys and packages are deleted there. What jobs wrote stays without --purge.
    """
    context = _own(name)
    with contexts.locked(context.name):
        context = contexts.choose(context.name)
        unknown = [node for node in nodes if node not in (*context.nodes, *context.left)]
        if unknown:
            raise CommandError(
                f"cluster {context.name} has no node {unknown[0]}; its nodes are: {', '.join(context.nodes)}"
            )
        if context.nodes and context.nodes[0] in nodes:
            raise CommandError(f"{context.nodes[0]} runs etcd: adaptdl cluster down ends the cluster")
        stays = bring_up.take_down(context, nodes, "everything" if purge else "service", lost)
        others = tuple(node for node in context.nodes if node not in nodes)
        left = dict.fromkeys(node for node in (*context.left, *nodes) if stays.get(node, "something") != "")
        contexts.save(replace(context, nodes=others, left=tuple(left)))
    for node, kept in stays.items():
        deletes = f"adaptdl cluster remove --purge {node} deletes"
        what = f"; what jobs wrote stays in {kept}, and {deletes} it" if kept else ""
        if kept is None:
            what = f"; it cannot be reached, and keeps what it has: {deletes} that once it is back"
        echo(f"{node} is not in cluster {context.name} any more{what}")


@cluster.command()
@click.option("--purge", is_flag=True, help="Also delete output, checkpoints and keys.")
@click.option("--lost", is_flag=True, help="Leave nodes out that cannot be reached.")
@cluster_option
def down(name: str | None, purge: bool, lost: bool) -> None:
    """Stop a cluster. `adaptdl cluster up` starts it and continues its jobs from their checkpoints."""
    context = _own(name)
    with contexts.locked(context.name):
        context = contexts.choose(context.name)
        every = (*context.nodes, *context.left) if purge else context.nodes
        stays = bring_up.take_down(context, every, "everything" if purge else "nothing", lost)
        if purge:
            if context.directory.exists():
                shutil.rmtree(context.directory)
            contexts.forget(context.name)
    missed = ", ".join(node for node, kept in stays.items() if kept is None)
    but = f" but on {missed}, which cannot be reached" if missed else ""
    echo(f"cluster {context.name} is down" + (f", and nothing of it is left{but}" if purge else but))


@cluster.command()
@json_option
@cluster_option
def status(name: str | None, as_json: bool) -> None:
    """Show the nodes of a cluster and what runs on them."""
    context = contexts.choose(name)
    reader, store, _ = open_cluster(context)
    with store:
        found = reader.read(None)
    rows = [_row(context, found, node) for node in sorted({*context.nodes, *found.services})]
    if as_json:
        click.echo(
            json.dumps({"cluster": context.name, "endpoint": context.endpoint, "nodes": rows}, indent=2)
        )
        return
    echo(f"cluster {context.name}, etcd at {parse_endpoints(context.endpoint)[0]}")
    show_table(
        ("NODE", "STATE", "SLOTS", "GPUS", "VERSION", "DISK FREE", "JOBS", "PROBLEM"),
        [
            (
                row["node"],
                row["state"],
                row["slots"],
                row["gpu_model"] or row["gpus"],
                row["version"],
                None if row["disk_free"] is None else f"{row['disk_free'] / 2**30:.0f} GiB",
                ", ".join(row["jobs"]) or "-",
                row["problem"],
            )
            for row in rows
        ],
    )


def _row(context: ClusterContext, found: Submitted, node: str) -> dict[str, Any]:
    service = found.services.get(node)
    row: dict[str, Any] = {
        **{"node": node, "state": "up", "disk_free": None, "jobs": [], "problem": ""},
        "gpu_model": getattr(service, "gpu_model", ""),
        **{name: getattr(service, name, None) for name in ("slots", "gpus", "version")},
    }
    if service is None:
        missing = f"no service is registered: adaptdl cluster up, or ssh {node}"
        return {**row, "state": "down", "problem": missing}
    try:
        said = client_of(context).get_json(service, "/v1/status")
    except ServiceError as error:
        state = "refuses" if isinstance(error, ServiceRefusedError) else "unreachable"
        return {**row, "state": state, "problem": str(error)}
    problems = [f"{job}: {text}" for job, text in sorted(said["problems"].items())]
    problems = [found.unused[node], *problems] if node in found.unused else problems
    row |= {"disk_free": said["disk_free"], "jobs": said["agents"], "problem": "; ".join(problems)}
    return {**row, "state": "drained"} if node in found.drains else row


@cluster.command()
@click.argument("person")
@click.argument("key", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="KEY.pub")
@click.option("--admin", is_flag=True, help="PERSON may see and cancel other people's jobs, and drain nodes.")
@click.option(
    "--most-priority",
    type=click.IntRange(-MOST_PRIORITY, MOST_PRIORITY),
    metavar="N",
    help="Highest priority of the jobs of PERSON. [default: 0; no limit with --admin]",
)
@click.option(
    "--most-weight", type=Finite(1, HEAVIEST), help="Likewise of weights. [default: 1; no limit with --admin]"
)
@click.option(
    "--archive",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.tar",
    help="Write the access of PERSON to this file, to be unpacked in ~/.config/adaptdl. It holds a password.",
)
@cluster_option
def grant(name: str | None, person: str, key: Path, archive: Path | None, **may: Any) -> None:
    """Let PERSON use the cluster with the ssh key KEY.pub.

    The same command with other options changes what PERSON may do.
    """
    granted = Person(person, signatures.public_key(key.read_text(errors="replace")), **may)
    context = _own(name)
    if archive is not None:
        _check_writable(archive)  # before PERSON is let in
    with contexts.locked(context.name):
        credentials = Credentials(context)
        credentials.write_people({**credentials.people(), person: granted})
        bring_up.send_people(context)
        if archive is not None:
            password = store_users.add(context, person)
            files = credentials.person_files(person, store_users.user_of(person), password)
            write_whole(archive, private_archive(files))
    echo(f"{person} may use cluster {context.name}" + (" as an administrator" if may["admin"] else ""))


def _check_writable(archive: Path) -> None:
    try:
        tempfile.TemporaryFile(dir=archive.absolute().parent).close()
    except OSError as error:
        raise OptionError(
            f"--archive {archive}: {error.strerror}; give a file in a directory where you may write"
        ) from None


def _cancel_jobs_of(context: ClusterContext, person: str) -> None:
    """Cancel the jobs of a person that have not ended; say which, or why they cannot be cancelled now."""
    try:
        reader, store, keys = open_cluster(context)
        with store:
            hers = [one for one in reader.read(None).requests if one.submission.owner == person]
            for job in (one.submission.job for one in hers if not one.over):
                try:
                    job_requests.cancel(store, keys, context, client_of(context), job)
                except CommandError as error:  # it has ended just now
                    echo(str(error), err=True)
                else:
                    echo(f"{job} of {person} is cancelled: it saves and ends")
    except (CommandError, ContextError, SignatureError, StoreError) as error:
        echo(f"the jobs of {person} are only stopped on each node: {error}", err=True)


@cluster.command()
@click.argument("person")
@cluster_option
def revoke(name: str | None, person: str) -> None:
    """Remove PERSON from the cluster. The jobs of PERSON are saved and stopped.

    A person with jobs here could read all that the nodes' user can. The page access.md of the
    documentation says what else to do.
    """
    context = _own(name)
    with contexts.locked(context.name):
        credentials = Credentials(context)
        people = credentials.people()
        if person == context.person:
            raise CommandError("you cannot take your own right away")
        _cancel_jobs_of(context, person)  # while nodes know whose they are
        known = people.pop(person, None) is not None
        credentials.write_people(people)
        store_users.remove(context, person)  # before ssh, so that the access ends even if a node is down
        bring_up.send_people(context)  # again if an earlier attempt did not reach every node
        if not known:
            raise CommandError(f"{person} has no right to use cluster {context.name}; every node knows that")
    echo(f"{person} may not use cluster {context.name} any more")
