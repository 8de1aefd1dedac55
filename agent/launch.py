"""Run one node's part of a job from a checked command line to an exit code."""

from __future__ import annotations

import importlib
import logging
import os
import shlex
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from adaptdl_elastic._private import private_directory
from adaptdl_elastic.agent.cluster import allocation_store, ended_run, job_joining, link_probe, run_secret
from adaptdl_elastic.agent.cluster.coordinator_host import CoordinatorCommand
from adaptdl_elastic.agent.cluster.store_link import Registration
from adaptdl_elastic.agent.cluster.usage_reporter import UsageReporter
from adaptdl_elastic.agent.core.states import AgentIdentity
from adaptdl_elastic.agent.machine import interruption, slurm_end
from adaptdl_elastic.agent.machine.devices import DeviceWatch, Gpus
from adaptdl_elastic.agent.own_records import job_spec, node_record
from adaptdl_elastic.agent.runtime.agent_config import AgentConfig
from adaptdl_elastic.agent.runtime.fork_server import ForkServer
from adaptdl_elastic.agent.runtime.replica_environment import JobEnvironment, SharePath, job_settings
from adaptdl_elastic.agent.terminal.display import Display
from adaptdl_elastic.agent.terminal.event_log import EventLog
from adaptdl_elastic.agent.terminal.replica_output import Output, Streams
from adaptdl_elastic.agent.terminal.run_options import MeetingPoint, RunOptions
from adaptdl_elastic.agent.terminal.run_parser import PROGRAM
from adaptdl_elastic.protocol.channel import STOPPED
from adaptdl_elastic.protocol.environment import LINE_PREFIX, SECRET, STAND_IN
from adaptdl_elastic.rendezvous.local import file_lock, runtime_file
from adaptdl_elastic.rendezvous.local.addresses import (
    NoPortError,
    address_towards,
    is_local,
    is_loopback,
    listen,
)
from adaptdl_elastic.rendezvous.local.safe_stream import protect
from adaptdl_elastic.rendezvous.local.store_server import LocalServer
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import JobRequest, JobSpec, JobState, JobStatus, Link
from adaptdl_elastic.rendezvous.services.etcd_gateway import EtcdError
from adaptdl_elastic.rendezvous.services.service_config import ServiceConfigError, ServiceDirectory
from adaptdl_elastic.rendezvous.store import local_socket
from adaptdl_elastic.rendezvous.store.base import Lease, Store, StoreAuthError, StoreError, read_record
from adaptdl_elastic.rendezvous.store.connect import connect
from adaptdl_elastic.rendezvous.store.store_options import (
    StoreOptionError,
    StoreOptions,
    parse_endpoints,
    to_environ,
    variable,
)
from adaptdl_elastic.rendezvous.text import pluralize, printable, stamp
from adaptdl_elastic.storage import StorageError
from adaptdl_elastic.storage.locations import open_storage

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import WorkerSpec

logger = logging.getLogger(__name__)

NOTE_SECONDS = 60.0
"""An agent waits so long for a place of checkpoints that does not take the note of a run's end."""

LOCK = ".adaptdl-lock"
"""Name of the file beside the checkpoints that the agents of the job that writes them have locked."""

_Say = Callable[[str], None]
_INTERVAL_OF_ONE_MACHINE = "3"  # seconds between policy rounds where the store is in memory


class LaunchError(RuntimeError):
    """The run cannot start; the message says what to do."""


def launch(options: RunOptions, say: _Say) -> int:
    """Run this node's part of the job and return the exit code; LaunchError if it cannot start."""
    unshown = protect()
    with ExitStack() as stack:
        redirects = Streams.parse("--redirects", options.redirects)
        tee = Streams.parse("--tee", options.tee)
        private_directory(say=say)
        at_end = stack.enter_context(ExitStack())
        announcement = runtime_file.Announcement(options.job)
        stack.callback(announcement.release)
        if options.of_one_machine:
            _lock_job(announcement, options.job)
        check_checkpoint_path(options.checkpoint_path)
        _lock_folder(options, stack)
        try:
            step = _step_directory(options, stack, say)
        except ended_run.JobEndedError as ended:
            say(str(ended))
            return ended.exit_code
        events = _open_event_log(options, say)
        stack.callback(events.close)
        share = SharePath(os.environ, options.job)
        stack.callback(share.close)
        fork_server = start_fork_server()  # imports torch while the rest of the agent starts
        stack.callback(fork_server.close)
        environ = {**os.environ}
        if step is not None:
            environ |= step.store_environment()
            options = replace(options, endpoint=step.read_config().endpoint)
        access = _store(options, environ, stack, announcement.restore)
        if step is not None and options.allocation is not None and options.allocation.first:
            agents = partial(job_joining.live_agents, access.store, Keys(options.cluster), options.job)
            stack.callback(allocation_store.wait_for_others, agents)
        display = Display(options.job, options.summary, say)
        events.listeners.append(display.event)
        events.say = display.say
        stack.callback(display.close)
        output = Output(
            options.job,
            options.log_dir,
            redirects,
            tee,
            options.local_ranks_filter,
            options.role,
            display.show,
            options.line_prefix,
            unshown=unshown,
            several=options.slots > 1
            and (options.local_ranks_filter is None or len(options.local_ranks_filter) > 1),
        )
        stack.callback(output.close)
        if options.of_one_machine:
            note = runtime_file.RuntimeFile(access.endpoint, options.cluster, options.job, os.getpid())
            announcement.publish(note)
            stack.callback(announcement.withdraw)
        # Import torch before a lease is taken: while it is loaded no other thread of this process runs, on a
        # busy machine for longer than a lease lasts.
        importlib.import_module("adaptdl_elastic.agent.runtime.agent")
        keys = Keys(options.cluster)
        parts = AgentParts(access, keys, fork_server, output, events, display, share, at_end)
        try:
            found = _join(options, parts)
        except ended_run.JobEndedError as ended:
            events.write(
                {"time": time.time(), "event": "exit", "exit_code": ended.exit_code, "reason": str(ended)}
            )
            display.say(str(ended))
            return ended.exit_code
        return run_agent(options, found, parts)


@dataclass(frozen=True)
class StoreAccess:
    """A connection to the store, and what a child process needs to open its own."""

    endpoint: str
    store: Store
    confidential: bool  # only users who may write the store can read it, so that it may keep a secret
    # this process's environment with `ADAPTDL_ETCD_*` for this store
    environ: Mapping[str, str] = field(repr=False)


@dataclass(frozen=True)
class AgentParts:
    """The parts that an agent needs; `launch` closes them."""

    access: StoreAccess
    keys: Keys
    fork_server: ForkServer
    output: Output
    events: EventLog
    display: Display
    share: SharePath
    at_end: ExitStack  # what is done when all else is closed


def _lock_job(announcement: runtime_file.Announcement, job: str) -> None:
    """Make sure that no other run of this job of one machine exists; it would write the same checkpoints."""
    if announcement.take():
        return
    other = runtime_file.find(job)
    who = f" (process {other.pid})" if other is not None else ""
    raise LaunchError(
        f"a standalone job {job!r} runs already{who}: `adaptdl stop {job}` ends it, "
        f"another --rdzv-id runs beside it"
    )


def _lock_folder(options: RunOptions, stack: ExitStack) -> None:
    """Make sure that no other job writes to this job's folder of checkpoints."""
    folder = options.checkpoint_path.removeprefix("file://")
    alone = options.endpoint is None and not options.of_step
    if "://" in folder:
        return
    path = Path(folder) / LOCK
    name = f"job {options.job!r}" + ("" if alone else f" of cluster {options.cluster!r}")
    if options.of_step and options.allocation:
        name += f" in step {options.allocation.lasting_step} of Slurm"
    try:
        other = stack.enter_context(file_lock.held(path, name, shared=not alone))
    except OSError as error:
        raise LaunchError(f"{path} cannot be used ({error.strerror}): give it another name") from None
    if other:
        raise LaunchError(
            f"a job that writes to {folder} runs already ({other}): `adaptdl stop` ends it, another "
            f"--checkpoint-path runs beside it; if that process has ended, remove {path}"
        )


def _step_directory(options: RunOptions, stack: ExitStack, say: _Say) -> ServiceDirectory | None:
    """Serve or find the store of this step of Slurm; None if the job has another store."""
    found = options.allocation
    if found is None or not options.of_step:
        return None
    folder = options.checkpoint_path.removeprefix("file://")
    place = Path(found.directory if "://" in folder else folder)
    how = options.local_addr, options.port_range, options.cluster, say
    try:
        return stack.enter_context(allocation_store.of_step(found, place, *how))
    except (EtcdError, OSError, ServiceConfigError) as error:
        raise LaunchError(f"the store of this step of Slurm: {error}") from None


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


def _store(
    options: RunOptions, environ: Mapping[str, str], stack: ExitStack, look: Callable[[str], None]
) -> StoreAccess:
    """Connect to the store; without an endpoint serve one from this process, which calls `look`."""
    environ = store_environment(options, environ)
    if options.endpoint is None:
        try:
            server = stack.enter_context(LocalServer())
            server.look = look
        except (OSError, StoreOptionError) as error:
            raise LaunchError(f"--standalone: the store's socket cannot be made: {error}") from None
        return StoreAccess(server.endpoint, server.store, True, environ)
    store_options = StoreOptions.from_environment(environ)
    try:
        store = connect(options.endpoint, api=options.etcd_api, options=store_options)  # type: ignore[arg-type]
    except StoreOptionError:
        raise
    except StoreError as error:
        then = " Run" if str(error).endswith("?") else "; run"
        refused = "the store refuses us: " if isinstance(error, StoreAuthError) else ""
        raise LaunchError(f"{refused}{error}{then} `adaptdl doctor --etcd {options.endpoint}`") from None
    stack.callback(store.close)
    confidential = _confidential(store, options.endpoint, store_options)
    return StoreAccess(options.endpoint, store, confidential, environ)


def _confidential(store: Store, endpoint: str, options: StoreOptions) -> bool:
    """Return whether only this user, or users with a password, can read this store.

    etcd's v2 API lets guests read.
    """
    if local_socket.is_local(endpoint):
        return True
    urls = parse_endpoints(endpoint, options.secure)
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
            found.pop(variable(name), None)
    else:
        found |= to_environ(**{name: value for name, value in given.items() if value is not None})
    if options.etcd_timeout is not None:
        found |= to_environ(timeout=f"{options.etcd_timeout:g}")
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


def _open_event_log(options: RunOptions, say: _Say) -> EventLog:
    try:
        return EventLog(options.event_log, say)
    except OSError as error:
        raise LaunchError(f"--event-log {options.event_log}: {error.strerror}") from None


def _join(options: RunOptions, parts: AgentParts) -> Found:
    """Register this node and join the job, or begin it; LaunchError if that is impossible."""
    host = options.local_addr or "127.0.0.1"
    if not (options.local_addr or options.of_one_machine):
        host = address_towards(parse_endpoints(parts.access.endpoint))
    listen(host, options.port_range).close()  # a replica here will have to listen, so check it now
    if options.meeting_point is not None and options.max_nodes == 1:
        check_meeting_point(options.meeting_point, host)
    try:
        return take_part(options, host, parts.access, parts.keys, parts.display.say)
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
    say: _Say,
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
    if options.max_nodes > 1 and not is_loopback(host):
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
            elif options.max_nodes > 1 and not is_loopback(host):
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


def invite(options: RunOptions, common: run_secret.CommonSecret, node: str, say: _Say) -> None:
    """Print the command for nodes that do not see this node's folder of checkpoints."""
    command = shlex.join([PROGRAM, *options.typed])
    given = {"--local-addr": options.local_addr, "--node-name": options.node_name}
    own = [name for name, value in given.items() if value]
    line = run_secret.invitation(common, node, command, sys.stderr.isatty(), own)
    if line is not None:
        say(line)


def run_agent(options: RunOptions, found: Found, parts: AgentParts) -> int:
    """Run the agent until this node's part is over; return the exit code."""
    from adaptdl_elastic.agent.runtime.agent import ElasticAgent
    from adaptdl_elastic.agent.terminal.event_recorder import EventRecorder

    recorder = EventRecorder(parts.events.write)
    agent = ElasticAgent(
        _worker_spec(options),
        _agent_config(options, found, parts),
        parts.access.store,
        parts.keys,
        found.registration,
        parts.fork_server,
        parts.output,
        recorder,
        parts.display.say,
        start_fork_server,
    )
    watcher = None
    if found.identity is not None:
        watcher = interruption.watch(found.identity, lambda notice: agent.post(notice))
    over = slurm_end.watch(options.allocation, options.checkpoint_timeout, agent.post)
    registration = found.registration
    record, store = registration.record, parts.access.store
    looks = (agent.code.refusal, DeviceWatch(found.gpus, agent.post, record.unusable).look)
    usage = UsageReporter(store, parts.keys, record.node, found.gpus, lambda: registration.lease, looks)
    try:
        agent.run()
    finally:
        ignore_signals(options.signals)
        usage.close()
        if watcher is not None:
            watcher.stop()
        over.set()
        try:
            # before the registration is closed: another agent must not move aside what this one is about to
            # note
            note_end(options, found.spec, agent.job_ended, parts.display.say)
        finally:
            found.registration.close()
            parts.share.close(agent.job_done)
    unfinished = agent.exit_code in (0, STOPPED) and not agent.job_done
    if unfinished and agent.state.departure and options.allocation and options.allocation.first:
        how = options.allocation, options.job, options.checkpoint_timeout, complain
        parts.at_end.callback(slurm_end.requeue, *how)
    output = parts.output
    output.keep = output.keep or agent.exit_code not in (0, STOPPED)
    recorder.flush()
    recorder.emit("exit", exit_code=agent.exit_code, reason=agent.exit_reason)
    parts.display.finish(agent.exit_code, agent.exit_reason, output.directory if output.keep else None)
    return agent.exit_code


def note_end(options: RunOptions, spec: JobSpec, status: JobStatus | None, say: _Say) -> None:
    """Write a note beside the checkpoints that the job has ended.

    A job that is not done needs the note only for `--once`. In a cluster the store has that information; the
    store of one machine ends with its process.
    """
    if status is None or not (status.state is JobState.DONE or options.of_one_machine):
        return
    path = options.checkpoint_path
    write = partial(ended_run.write_note, spec, status, path, say, even_if_empty=options.once)
    thread = threading.Thread(target=write, name="note", daemon=True)
    thread.start()
    thread.join(NOTE_SECONDS)
    if thread.is_alive():
        say(f"that the job has ended is not noted in {path}: it does not answer for {NOTE_SECONDS:g} s")


def check_meeting_point(point: MeetingPoint, host: str) -> None:
    """Check at the start that the only node of a job can serve its store at the given address.

    Raises:
        LaunchError: the address belongs to another machine.
        NoPortError: the port is in use.
    """
    if point.host is not None and not is_local(point.host):
        raise LaunchError(
            f"{point}: {point.host} is not an address of this machine, the only node of the job"
        )
    try:
        listen(point.host or host, (point.port, point.port)).close()
    except NoPortError as error:
        raise NoPortError(f"{point}: {error}") from None


def _agent_config(options: RunOptions, found: Found, parts: AgentParts) -> AgentConfig:
    record = found.registration.record
    threads = max(1, options.cores // record.slots) if options.cores and record.slots > 1 else None
    # what the run's first agent said counts, but for the place of checkpoints
    settings = job_settings(found.spec, options.checkpoint_interval, options.role)
    settings.node, settings.node_type, settings.secret = record.node, record.node_type, found.secret
    settings.share_path, settings.hang_timeout = str(parts.share.path), options.hang_timeout or None
    settings.checkpoint_path = options.checkpoint_path
    on_demand = STAND_IN in parts.access.environ
    return AgentConfig(
        AgentIdentity(record.node, record.agent, found.spec, options.hang_timeout, on_demand),
        found.host,
        options,
        JobEnvironment(record.node, settings, threads, options.virtual_local_rank, record.devices),
        _coordinator_command(options, parts.access),
        found.measure_links,
    )


def _worker_spec(options: RunOptions) -> WorkerSpec:
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    from adaptdl_elastic.agent.runtime.plan_handler import PlanHandler

    return WorkerSpec(
        role=options.role,
        local_world_size=options.slots,
        rdzv_handler=PlanHandler(options.job),
        entrypoint=options.command[0],
        max_restarts=options.max_restarts,
    )


def _coordinator_command(options: RunOptions, access: StoreAccess) -> CoordinatorCommand:
    """Return how to start a coordinator, if this agent comes to run one."""
    arguments = ["--etcd", access.endpoint, "--cluster", options.cluster, "--etcd-api", options.etcd_api]
    if options.of_one_machine:
        arguments += ["--interval", _INTERVAL_OF_ONE_MACHINE]
    return CoordinatorCommand(tuple(arguments), access.environ)


def ignore_signals(numbers: Iterable[signal.Signals]) -> None:
    """Ignore these signals from now on: nothing is left to stop, and the exit code is final.

    While Python exits it restores the default handlers, by which a late signal would kill the process.
    """
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


def start_fork_server() -> ForkServer:
    """Start a fork server with this environment, without credentials of the store and secrets of other runs.

    A replica gets only the secret of its own run.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("ADAPTDL_ETCD_") and name not in (SECRET, STAND_IN)
    }
    environment.setdefault("OMP_NUM_THREADS", "1")  # no thread pool may exist before the fork
    return ForkServer.start(environment)


def complain(text: str) -> None:
    """Print one line for the user, with its time if the lines of replicas have theirs."""
    written = f"{stamp(time.time())} " if "${time}" in os.environ.get(LINE_PREFIX, "") else ""
    print(f"{written}{PROGRAM}: {printable(text)}", file=sys.stderr, flush=True)
