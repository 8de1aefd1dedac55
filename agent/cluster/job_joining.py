"""Let an agent join a job: choose the job's specification and run, and register the node."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from adaptdl_elastic.agent.cluster.ended_run import NO_OPTIONS, StartOptions, of_status, refuse
from adaptdl_elastic.agent.cluster.ended_run import JoinError as JoinError
from adaptdl_elastic.agent.cluster.store_link import (
    LEASE_SECONDS,
    NameTakenError,
    Registration,
    wait_for_removal,
)
from adaptdl_elastic.rendezvous.local.addresses import address_towards, is_loopback
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import (
    JobRequest,
    JobSpec,
    JobState,
    JobStatus,
    MalformedRecordError,
    NewerRecordError,
    NodeRecord,
    decode,
    encode,
)
from adaptdl_elastic.rendezvous.store.base import KeyValue, Lease, Store, read_record

_ATTEMPTS = 20


class StoppingError(JoinError):
    """The job is being stopped. A later try finds that it has ended."""


def join_job(
    store: Store,
    keys: Keys,
    fresh: JobSpec,
    version: str,
    say: Callable[[str], None],
    options: StartOptions = NO_OPTIONS,
) -> JobSpec:
    """Return the specification of the job's current run; write `fresh` if there is no run to join.

    A run is current while an agent of it is registered. So an agent registers first, with the run of `fresh`:
    otherwise agents that start at the same moment could take each other's run for one without agents.

    Args:
        store: the cluster's store.
        keys: the keys of the cluster.
        fresh: the job as this agent would begin it.
        version: of this agent; agents of other versions are refused.
        say: prints a line for the user.
        options: options of the command line for a job that has ended.

    Raises:
        JobEndedError: the job has ended and is not to be started again (`ended_run.refuse`).
        StoppingError: a node service asks (`--once`), and the job is being stopped.
        JoinError: this agent cannot take part.
    """
    key = keys.job(fresh.job, "spec")
    for _ in range(_ATTEMPTS):
        found, number = last_run(store, key)
        fresh = replace(fresh, number=number)
        agents = live_agents(store, keys, fresh.job)
        _check_versions(agents, version)
        if found is None:
            if store.compare_and_swap(key, encode(fresh), 0) is not None:
                return fresh
            continue
        try:
            spec = decode(JobSpec, found.value, key)
        except NewerRecordError as error:
            raise JoinError(str(error)) from None
        except MalformedRecordError as error:
            raise JoinError(
                f"{error}; another program writes under our prefix: choose another --cluster"
            ) from None
        status = read_record(JobStatus, store.get(keys.job(fresh.job, "status")))
        if (ended := of_status(spec, status)) is not None:
            refuse(ended, fresh, options)
        elif any(agent.run == spec.run for agent in agents):
            _check_command(spec, fresh)
            _compare(spec, fresh, say)
            if options.anew:
                say(f"--anew has no effect: this node joins run {spec.run} of {spec.job!r}, now under way")
            return spec
        elif options.once and _is_stopping(store, keys, spec):
            raise StoppingError(
                f"job {spec.job!r} is being stopped: {spec.run} is not followed by another run"
            )
        if store.compare_and_swap(key, encode(fresh), found.mod_revision) is not None:
            what = "has no agent any more"
            if ended is not None:
                what = "is done" if ended.state is JobState.DONE else f"has {ended.state.value}"
            then = "another run begins, with --anew" if options.anew else "going on from its last checkpoint"
            if options.anew:
                store.delete(keys.job(spec.job, "checkpoint"))
            say(f"job {spec.job!r} (run {spec.run}) {what}: {then}")
            return fresh
    raise JoinError(f"job {fresh.job!r}: other agents keep changing its specification; try again")


def last_run(store: Store, key: str) -> tuple[KeyValue | None, int]:
    """Return a job's specification as it is stored, and the number of a run that begins after it.

    The store's revision never decreases, so that the number also grows where the specification was deleted.
    """
    seen = store.range(key)
    found = next((item for item in seen.items if item.key == key), None)
    spec = read_record(JobSpec, found)
    return found, max(seen.revision, 0 if spec is None else spec.number) + 1


def _is_stopping(store: Store, keys: Keys, spec: JobSpec) -> bool:
    """Return whether a run is to end; its agents may leave before its status says that it has."""
    asked = read_record(JobRequest, store.get(keys.job(spec.job, "request")))
    return asked is not None and asked.stop and asked.run == spec.run


def live_agents(store: Store, keys: Keys, job: str) -> list[NodeRecord]:
    """Return the registrations of a job's agents."""
    found = (item for item in store.range(keys.nodes).items if keys.parse(item.key)[2:] == (job,))
    return [record for item in found if (record := read_record(NodeRecord, item)) is not None]


def _check_command(spec: JobSpec, fresh: JobSpec) -> None:
    """Raise if this node has another script or arguments: replicas of both would wait for each other."""
    if spec.code and fresh.code and spec.code != fresh.code:
        raise JoinError(f"job {spec.job!r} runs {spec.code}, and this node has {fresh.code}: start it again")
    if spec.gpus_per_replica != fresh.gpus_per_replica:
        each = f"--gpus-per-replica={spec.gpus_per_replica}"
        raise JoinError(f"job {spec.job!r} runs with {each}: give it here, too")
    if not spec.profile_key or spec.profile_key == fresh.profile_key:
        return
    theirs, ours = shlex.join(spec.command), shlex.join(fresh.command)
    if theirs == ours:
        raise JoinError(
            f"job {spec.job!r} runs another version of `{ours}` than this node has: copy the same script to "
            f"all nodes, or give another --rdzv-id"
        )
    raise JoinError(
        f"job {spec.job!r} runs `{theirs}`, and this node was to run `{ours}`: give all nodes the same "
        f"script and arguments (what differs between them in environment variables), or another --rdzv-id"
    )


_OF_THE_JOB: dict[str, Callable[[JobSpec], str]] = {
    "--nnodes": lambda spec: f"{spec.min_nodes}:{spec.max_nodes}",
    "--max-restarts": lambda spec: str(spec.max_restarts),
    "--rescale": lambda spec: spec.rescale.value,
    "--rescale-timeout": lambda spec: f"{spec.rescale_timeout:g}",
    "--checkpoint-timeout": lambda spec: f"{spec.checkpoint_timeout:g}",
    "--weight": lambda spec: f"{spec.weight:g}",
}
_FLAGS: dict[str, Callable[[JobSpec], bool]] = {
    "--no-autoscale": lambda spec: not spec.autoscale,
    "--no-preempt": lambda spec: not spec.preemptible,
    "--avoid-preemptible-nodes": lambda spec: spec.avoid_preemptible_nodes,
}


def _compare(spec: JobSpec, fresh: JobSpec, say: Callable[[str], None]) -> None:
    """Report options of this agent that have no effect: options of the job count when its run begins."""
    for name, told in _OF_THE_JOB.items():
        holds, given = told(spec), told(fresh)
        if holds != given:
            say(f"{name} {given} has no effect: job {spec.job!r} runs with {holds}, as its first agent said")
    for name, flag in _FLAGS.items():
        if flag(fresh) and not flag(spec):
            say(f"{name} has no effect: job {spec.job!r} was started without it")
        elif flag(spec) and not flag(fresh):
            say(f"job {spec.job!r} runs with {name}, as its first agent said")


def _check_versions(agents: list[NodeRecord], version: str) -> None:
    for agent in agents:
        if agent.version and agent.version != version:
            raise JoinError(
                f"job {agent.job} runs adaptdl-elastic {agent.version} on node {agent.node}, this node "
                f"{version}: with the same on all, adaptdl stop {agent.job}, then adaptdl resume {agent.job}"
            )


def reachable_host(node: NodeRecord, agents: Iterable[NodeRecord], given: bool) -> str:
    """Return the address at which a job's agents on other machines reach a node.

    Args:
        node: the registration of this agent.
        agents: all registrations of the job.
        given: whether the user has given the address.

    Raises:
        JoinError: one of the nodes is registered at an address of its own loopback interface.
    """
    host = node.host
    for other in agents:
        if "" in (node.network, other.network) or node.network == other.network:
            continue
        if is_loopback(host) and not given and not is_loopback(other.host):
            host = address_towards((f"//[{other.host}]:9" if ":" in other.host else f"//{other.host}:9",))
        for one, peer, its in ((other, node, other.host), (node, other, host)):
            if is_loopback(its):
                raise JoinError(
                    f"node {one.node} of job {node.job!r} has the address {its}, at which node {peer.node} "
                    f"cannot reach it: start {one.node} with --local-addr=ADDRESS"
                )
    return host


def node_name(host: str) -> str:
    """Return a host's name with the characters of node names only."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", host).strip("-._") or "node"


def register(
    store: Store, keys: Keys, record: NodeRecord, exact: bool, lease: Lease | None = None
) -> Registration:
    """Register under `record.node`; if it is taken, under the first free variant unless `exact`."""
    deadline = time.monotonic() + LEASE_SECONDS + 1.0
    tried = 1
    while True:
        name = record.node if tried == 1 or exact else f"{record.node}-{tried}"
        registration = Registration(store, keys, replace(record, node=name), lease=lease)
        try:
            registration.register()
        except NameTakenError as error:
            tried += 1
            if not exact:
                continue
            if time.monotonic() > deadline:
                raise JoinError(
                    f"--node-name={record.node} is taken by {error.by}, of job {record.job!r}: choose another"
                ) from None
            # the lease of an agent that has just been killed may not have expired yet
            wait_for_removal(store, keys.node(record.node, record.job), max(0.1, deadline - time.monotonic()))
        else:
            return registration
