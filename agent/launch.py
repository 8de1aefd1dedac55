"""Run one node's part of a job from a checked command line to an exit code."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from adaptdl_elastic._private import private_directory
from adaptdl_elastic.agent import taking_part
from adaptdl_elastic.agent.cluster import allocation_store, ended_run, job_joining
from adaptdl_elastic.agent.cluster.coordinator_host import CoordinatorCommand
from adaptdl_elastic.agent.cluster.usage_reporter import UsageReporter
from adaptdl_elastic.agent.core.states import AgentIdentity
from adaptdl_elastic.agent.machine import interruption, slurm_end
from adaptdl_elastic.agent.machine.devices import DeviceWatch
from adaptdl_elastic.agent.runtime.agent import NodeAgent
from adaptdl_elastic.agent.runtime.agent_config import AgentConfig
from adaptdl_elastic.agent.runtime.fork_server import ForkServer
from adaptdl_elastic.agent.runtime.replica_environment import JobEnvironment, SharePath, job_settings
from adaptdl_elastic.agent.taking_part import Found, LaunchError, Say, StoreAccess
from adaptdl_elastic.agent.terminal.display import Display
from adaptdl_elastic.agent.terminal.event_log import EventLog
from adaptdl_elastic.agent.terminal.event_recorder import EventRecorder
from adaptdl_elastic.agent.terminal.replica_output import Output, Streams
from adaptdl_elastic.agent.terminal.run_options import RunOptions
from adaptdl_elastic.agent.terminal.run_parser import PROGRAM
from adaptdl_elastic.protocol.channel import STOPPED
from adaptdl_elastic.protocol.environment import FORK_SERVER, LINE_PREFIX, SECRET, STAND_IN
from adaptdl_elastic.rendezvous.local import file_lock, runtime_file
from adaptdl_elastic.rendezvous.local.safe_stream import protect
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import JobSpec, JobState, JobStatus
from adaptdl_elastic.rendezvous.services.etcd_gateway import EtcdError
from adaptdl_elastic.rendezvous.services.service_config import ServiceConfigError, ServiceDirectory
from adaptdl_elastic.rendezvous.text import printable, stamp

logger = logging.getLogger(__name__)

NOTE_SECONDS = 60.0
"""An agent waits so long for a place of checkpoints that does not take the note of a run's end."""

LOCK = ".adaptdl-lock"
"""Name of the file beside the checkpoints that the agents of the job that writes them have locked."""

_INTERVAL_OF_ONE_MACHINE = "3"  # seconds between policy rounds where the store is in memory


def launch(options: RunOptions, say: Say) -> int:
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
        taking_part.check_checkpoint_path(options.checkpoint_path)
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
        fork_server = start_fork_server()  # imports torch while the agent starts
        stack.callback(fork_server.close)
        environ = {**os.environ}
        if step is not None:
            environ |= step.store_environment()
            options = replace(options, endpoint=step.read_config().endpoint)
        access = taking_part.open_store(options, environ, stack, announcement.restore)
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
        keys = Keys(options.cluster)
        parts = AgentParts(access, keys, fork_server, output, events, display, share, at_end)
        try:
            found = taking_part.join(options, access, keys, display.say)
        except ended_run.JobEndedError as ended:
            events.write(
                {"time": time.time(), "event": "exit", "exit_code": ended.exit_code, "reason": str(ended)}
            )
            display.say(str(ended))
            return ended.exit_code
        return run_agent(options, found, parts)


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


def _step_directory(options: RunOptions, stack: ExitStack, say: Say) -> ServiceDirectory | None:
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


def _open_event_log(options: RunOptions, say: Say) -> EventLog:
    try:
        return EventLog(options.event_log, say)
    except OSError as error:
        raise LaunchError(f"--event-log {options.event_log}: {error.strerror}") from None


def run_agent(options: RunOptions, found: Found, parts: AgentParts) -> int:
    """Run the agent until this node's part is over; return the exit code."""
    recorder = EventRecorder(parts.events.write)
    agent = NodeAgent(
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


def note_end(options: RunOptions, spec: JobSpec, status: JobStatus | None, say: Say) -> None:
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

    A replica gets only the secret of its own run. The first one may have been forked by the node service.
    """
    number = os.environ.pop(FORK_SERVER, None)
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("ADAPTDL_ETCD_") and name not in (SECRET, STAND_IN)
    }
    environment.setdefault("OMP_NUM_THREADS", "1")  # no thread pool may exist before the fork
    if number is not None and (inherited := _inherited_socket(number)) is not None:
        return ForkServer.forked(inherited, environment)
    return ForkServer.start(environment)


def _inherited_socket(number: str) -> socket.socket | None:
    """Return the connection to a fork server that the node service has handed over; None: it is none."""
    try:
        found = socket.socket(fileno=int(number))
        if (found.family, found.type) == (socket.AF_UNIX, socket.SOCK_STREAM):
            found.set_inheritable(False)
            return found
        found.detach()
    except (ValueError, OSError):
        pass
    complain(f"{FORK_SERVER}={number} is ignored: only a node service sets it")
    return None


def complain(text: str) -> None:
    """Print one line for the user, with its time if the lines of replicas have theirs."""
    written = f"{stamp(time.time())} " if "${time}" in os.environ.get(LINE_PREFIX, "") else ""
    print(f"{written}{PROGRAM}: {printable(text)}", file=sys.stderr, flush=True)
