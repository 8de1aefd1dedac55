"""Take part in a job: connect to its store, register this node, and join the job's run or begin it."""

from __future__ import annotations

import os
import shlex
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from adaptdl_elastic.agent.cluster import ended_run, job_joining, link_probe, run_secret
from adaptdl_elastic.agent.cluster.store_link import Registration
from adaptdl_elastic.agent.machine import interruption
from adaptdl_elastic.agent.machine.devices import Gpus
from adaptdl_elastic.agent.own_records import job_spec, node_record
from adaptdl_elastic.agent.terminal.run_options import MeetingPoint, RunOptions
from adaptdl_elastic.agent.terminal.run_parser import PROGRAM
from adaptdl_elastic.protocol.environment import STAND_IN
from adaptdl_elastic.rendezvous.local import addresses
from adaptdl_elastic.rendezvous.local.store_server import LocalServer
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import JobRequest, JobSpec, Link
from adaptdl_elastic.rendezvous.store import local_socket, store_options
from adaptdl_elastic.rendezvous.store.base import Lease, Store, StoreAuthError, StoreError, read_record
from adaptdl_elastic.rendezvous.store.connect import connect
from adaptdl_elastic.rendezvous.text import pluralize
from adaptdl_elastic.storage import StorageError
from adaptdl_elastic.storage.locations import open_storage

Say = Callable[[str], None]


class LaunchError(RuntimeError):
    """The run cannot start; the message says what to do."""


@dataclass(frozen=True)
class StoreAccess:
    """A connection to the store, and what a child process needs to open its own."""

    endpoint: str
    store: Store
    confidential: bool  # only users who may write the store can read it, so that it may keep a secret
    # this process's environment with `ADAPTDL_ETCD_*` for this store
    environ: Mapping[str, str] = field(repr=False)


@dataclass(frozen=True)
class Found:
    """The job that was joined, and this node's registration."""

    spec: JobSpec
    registration: Registration
    identity: interruption.InstanceIdentity | None
    host: str
    gpus: Gpus
    secret: str = field(repr=False)  # secret of the run
    measure_links: Callable[[Sequence[Link]], tuple[Link, ...]] = tuple


def open_store(
    options: RunOptions, environ: Mapping[str, str], stack: ExitStack, look: Callable[[str], None]
) -> StoreAccess:
    """Connect to the store; without an endpoint serve one from this process, which calls `look`."""
    environ = store_environment(options, environ)
    if options.endpoint is None:
        try:
            server = stack.enter_context(LocalServer())
            server.look = look
        except (OSError, store_options.StoreOptionError) as error:
            raise LaunchError(f"--standalone: the store's socket cannot be made: {error}") from None
        return StoreAccess(server.endpoint, server.store, True, environ)
    settings = store_options.StoreOptions.from_environment(environ)
    try:
        store = connect(options.endpoint, api=options.etcd_api, options=settings)  # type: ignore[arg-type]
    except store_options.StoreOptionError:
        raise
    except StoreError as error:
        then = " Run" if str(error).endswith("?") else "; run"
        refused = "the store refuses us: " if isinstance(error, StoreAuthError) else ""
        raise LaunchError(f"{refused}{error}{then} `adaptdl doctor --etcd {options.endpoint}`") from None
    stack.callback(store.close)
    confidential = _confidential(store, options.endpoint, settings)
    return StoreAccess(options.endpoint, store, confidential, environ)


def _confidential(store: Store, endpoint: str, options: store_options.StoreOptions) -> bool:
    """Return whether only this user, or users with a password, can read this store.

    etcd's v2 API lets guests read.
    """
    if local_socket.is_local(endpoint):
        return True
    urls = store_options.parse_endpoints(endpoint, options.secure)
    encrypted = all(url.startswith("https://") for url in urls)
    return encrypted and options.user is not None and store.has_users


def store_environment(options: RunOptions, environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` with `ADAPTDL_ETCD_*` from the command line, or without them if there is no etcd.

    A coordinator started by this agent gets it. Options on its command line would be visible in the process
    list.
    """
    found = dict(environ)
    given = {name: getattr(options, f"etcd_{name}") for name in ("ca", "cert", "key", "user")}
    if options.of_one_machine:
        for name in (*given, "password", "password_file"):
            found.pop(store_options.variable(name), None)
    else:
        found |= store_options.to_environ(
            **{name: value for name, value in given.items() if value is not None}
        )
    if options.etcd_timeout is not None:
        found |= store_options.to_environ(timeout=f"{options.etcd_timeout:g}")
    return found


def check_checkpoint_path(path: str) -> None:
    """Check at the start that checkpoints can be written to `path`."""
    path = path.removeprefix("file://")
    if "://" in path:
        try:
            open_storage(path)
        except (ImportError, ValueError) as error:
            raise LaunchError(f"--checkpoint-path: {error}") from None
        return
    directory = Path(path)
    probe = directory / f".probe-{uuid.uuid4().hex[:8]}"
    try:
        # The job's secret lies there, so the user's group must not write there, whatever the umask.
        directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise LaunchError(
            f"checkpoints cannot be written to {path}: {error.strerror}; "
            f"give a directory that can be, with --checkpoint-path"
        ) from None


def check_meeting_point(point: MeetingPoint, host: str) -> None:
    """Check at the start that the only node of a job can serve its store at the given address.

    Raises:
        LaunchError: the address belongs to another machine.
        NoPortError: the port is in use.
    """
    if point.host is not None and not addresses.is_local(point.host):
        raise LaunchError(
            f"{point}: {point.host} is not an address of this machine, the only node of the job"
        )
    try:
        addresses.listen(point.host or host, (point.port, point.port)).close()
    except addresses.NoPortError as error:
        raise addresses.NoPortError(f"{point}: {error}") from None


def join(options: RunOptions, access: StoreAccess, keys: Keys, say: Say) -> Found:
    """Register this node and join the job, or begin it; LaunchError if that is impossible."""
    host = options.local_addr or "127.0.0.1"
    if not (options.local_addr or options.of_one_machine):
        host = addresses.address_towards(store_options.parse_endpoints(access.endpoint))
    addresses.listen(host, options.port_range).close()  # a replica here will have to listen, so check it now
    if options.meeting_point is not None and options.max_nodes == 1:
        check_meeting_point(options.meeting_point, host)
    try:
        return take_part(options, host, access, keys, say)
    except StorageError as error:
        raise LaunchError(
            f"the checkpoints in {options.checkpoint_path} cannot be looked at or put aside: {error}; "
            f"give another --checkpoint-path"
        ) from None
    except (job_joining.JoinError, StoreError) as error:
        raise LaunchError(str(error)) from None


def take_part(
    options: RunOptions,
    host: str,
    access: StoreAccess,
    keys: Keys,
    say: Say,
    lease: Lease | None = None,
) -> Found:
    """Register this node for the job, and join the job's run or begin it.

    An agent that a node service has started takes over the service's registration.

    Args:
        options: of the job.
        host: address by which other nodes reach this one.
        access: to the store.
        keys: of the cluster.
        say: prints a line for the user.
        lease: that of a node service, with which the registration vanishes; None: one of its own.

    Raises:
        JobEndedError: nothing is to be started.
        JoinError: this node cannot take part.
        StorageError: the checkpoints cannot be read or moved.
        StoreError: the store fails.
    """
    store, identity = access.store, interruption.discover()
    common = run_secret.common_secret(
        access.environ, store, keys, access.confidential, options.checkpoint_path, say
    )
    fresh, stand_in = job_spec(options), access.environ.get(STAND_IN)
    agents = job_joining.live_agents(store, keys, options.job) if stand_in else []
    own = [one for one in agents if one.agent == stand_in]
    if own:
        fresh = replace(fresh, run=own[-1].run)
    fresh = replace(fresh, secret_mark=common.mark(keys.cluster, fresh))
    asked = read_record(JobRequest, store.get(keys.job(options.job, "request")))
    follows = options.follows or (asked.run if asked is not None and asked.resume else "")
    start = ended_run.StartOptions(options.once, options.anew, follows, options.extend)

    def busy() -> bool:
        return bool(job_joining.live_agents(store, keys, options.job))

    key, port = common.link_key(keys.cluster), 0
    if options.max_nodes > 1 and not addresses.is_loopback(host):
        port = link_probe.serve(host, options.port_range, key)
    measured = partial(link_probe.measured_links, store, keys, options.job, key if port else None)
    # before this node is registered, so that the first decision about it knows the links
    links = measured(options.node_name or "", own[-1].links if own else ())
    with ended_run.turn_to_start(store, keys, fresh, start, busy, say):
        gpus = Gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
        record = node_record(options, host, identity, fresh.run, gpus)
        record = replace(record, agent=stand_in or record.agent, link_port=port, links=links)
        if record.slots < options.slots:
            have = pluralize(len(record.devices), "GPU")
            most = pluralize(record.slots, "replica")
            say(f"{most} at most on this node with {have}; with CUDA_VISIBLE_DEVICES= they share its cores")
        registration = job_joining.register(store, keys, record, options.node_name is not None, lease)
        try:
            if options.max_nodes > 1:
                agents, given = job_joining.live_agents(store, keys, options.job), bool(options.local_addr)
                host = job_joining.reachable_host(registration.record, agents, given)
                if host != registration.record.host:
                    registration.update(host=host)
            spec = job_joining.join_job(store, keys, fresh, record.version, say, start)
            if spec.run != fresh.run:
                _check_secret(spec, common, store, keys)
                registration.update(run=spec.run)
            elif options.max_nodes > 1 and not addresses.is_loopback(host):
                invite(options, common, registration.record.node, say)
            node = registration.record.node
            if (further := measured(node, links)) != links:
                registration.update(links=further)
        except BaseException:
            registration.close()
            raise
        secret, again = common.of_run(keys.cluster, spec), partial(measured, node, again=True)
        return Found(spec, registration, identity, host, gpus, secret, again)


def _check_secret(spec: JobSpec, common: run_secret.CommonSecret, store: Store, keys: Keys) -> None:
    """Refuse to join a run whose secret is not this node's: its replicas would refuse those of this node."""
    agents = [agent for agent in job_joining.live_agents(store, keys, spec.job) if agent.run == spec.run]
    first = min(agents, key=lambda agent: agent.joined, default=None)
    refusal = run_secret.refusal(common, spec, keys.cluster, "another node" if first is None else first.node)
    if refusal is not None:
        raise job_joining.JoinError(refusal)


def invite(options: RunOptions, common: run_secret.CommonSecret, node: str, say: Say) -> None:
    """Print the command for nodes that do not see this node's folder of checkpoints."""
    command = shlex.join([PROGRAM, *options.typed])
    given = {"--local-addr": options.local_addr, "--node-name": options.node_name}
    own = [name for name, value in given.items() if value]
    line = run_secret.invitation(common, node, command, sys.stderr.isatty(), own)
    if line is not None:
        say(line)
