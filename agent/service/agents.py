"""Start the agent of a submitted job on this node: fetch its files, and run `adaptdl-run` in them."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from adaptdl_elastic.agent.service.archives import unpack
from adaptdl_elastic.agent.service.blobs import BlobError, Blobs
from adaptdl_elastic.agent.service.checkpoint_copies import WAIT_SECONDS
from adaptdl_elastic.agent.service.decisions import MOST_FAILURES, AgentState, Step
from adaptdl_elastic.agent.service.kept_process import KeptProcess, last_line
from adaptdl_elastic.agent.service.private_archive import read_private
from adaptdl_elastic.protocol.environment import CHECKPOINT_WAIT, SECRET
from adaptdl_elastic.rendezvous.schema.submissions import ServiceRecord, Submission
from adaptdl_elastic.rendezvous.services.service_client import ServiceClient
from adaptdl_elastic.rendezvous.services.service_config import (
    ServiceConfig,
    ServiceConfigError,
    ServiceDirectory,
)

logger = logging.getLogger(__name__)

LINE_PREFIX = "[rank${rank}]: "
"""What stands before a replica's lines in a job's output: torchrun's variable for it has this value."""


class Agents:
    """The agents of this node, by job.

    Args:
        config: Of the service.
        directory: Of the service.
        slots: How many replicas fit on this node.
        blobs: The archives of this node.
        client: Asks other nodes for archives.
        changed: Called when an agent has started or could not be.
    """

    def __init__(
        self,
        config: ServiceConfig,
        directory: ServiceDirectory,
        slots: int,
        blobs: Blobs,
        client: ServiceClient,
        changed: Callable[[], None],
    ) -> None:
        self._config, self._directory, self._slots = config, directory, slots
        self._blobs, self._client, self._changed = blobs, client, changed
        self._lock = threading.Lock()
        self._processes: dict[str, KeptProcess] = {}
        self._preparing: set[str] = set()
        self._states: dict[str, AgentState] = {}
        self.problems: dict[str, str] = {}
        """Why this node cannot run a job, by job."""
        self._find_agents()

    def _notes(self) -> Path:
        return self._directory.state / "agents"

    def _find_agents(self) -> None:
        """Take over the agents that an earlier service has started."""
        for note in sorted(self._notes().glob("*.json")):
            found = KeptProcess.find(note)
            if found is not None:
                self._processes[note.stem] = found
                self._states[note.stem] = AgentState(alive=True, since=time.monotonic())

    def states(self) -> dict[str, AgentState]:
        """Look at every agent, and return what is known of each."""
        now = time.monotonic()
        with self._lock:
            for job, process in list(self._processes.items()):
                if process.alive:
                    continue
                code = process.exit_code
                self._states[job] = self._states[job].ended(now, code)
                self._note_end(job, code)
                process.forget()
                del self._processes[job]
            return dict(self._states)

    def _note_end(self, job: str, code: int | None) -> None:
        failures = self._states[job].failures
        if code in (0, None) or not failures:
            self.problems.pop(job, None)
            return
        then = " and is not started again" if failures >= MOST_FAILURES else ""
        said = last_line(self._directory.log(job))
        self.problems[job] = f"its agent exits with code {code}{then}: {said}"

    def start(self, submission: Submission, peers: Sequence[ServiceRecord], resumed: bool) -> None:
        """Start the agent of a job, in a thread that fetches the job's files first.

        Args:
            submission: Of the job.
            peers: The other nodes, which may have the files.
            resumed: Whether a run of the job has ended and it goes on.
        """
        job = submission.job
        with self._lock:
            self._states[job] = self._states.get(job, AgentState()).started(time.monotonic())
            self._preparing.add(job)
        threading.Thread(
            target=self._start, args=(submission, peers, resumed), name=f"start-{job}", daemon=True
        ).start()

    def end(self, job: str, step: Step) -> None:
        """Tell the agent of a job to leave, or kill it."""
        with self._lock:
            process = self._processes.get(job)
            if process is not None and step is Step.TERMINATE:
                self._mark_terminated(job, time.monotonic())
                process.signal(signal.SIGTERM)
            elif process is not None and step is Step.KILL:
                process.kill_group()

    def _mark_terminated(self, job: str, now: float) -> None:
        state = self._states[job]
        self._states[job] = AgentState(True, state.since, state.failures, state.not_before, now)

    def _start(self, submission: Submission, peers: Sequence[ServiceRecord], resumed: bool) -> None:
        job = submission.job
        process = None
        problem = ""
        try:
            environment = self._prepare(submission, peers)
            process = KeptProcess.start(
                command_line(
                    self._config, submission, self._slots, self._checkpoint_path(submission), resumed
                ),
                self._notes() / f"{job}.json",
                self._directory.log(job),
                self._directory.work(submission.folder),
                environment,
            )
        except (
            BlobError,
            ServiceConfigError,
            OSError,
            ValueError,
        ) as error:  # ValueError: a NUL in a variable or an argument
            problem = str(error)
            logger.warning("job %s cannot be started: %s", job, problem)
        with self._lock:
            self._preparing.discard(job)
            if process is not None:
                self._processes[job] = process
                self.problems.pop(job, None)
            else:
                self._states[job] = self._states[job].ended(time.monotonic(), 1)
                last = self._states[job].failures >= MOST_FAILURES
                again = f"; not tried again before adaptdl stop {job} and adaptdl resume {job}"
                self.problems[job] = problem + (again if last else "")
        self._changed()

    def _checkpoint_path(self, submission: Submission) -> str:
        return submission.checkpoint_path or str(self._directory.checkpoints(submission.job))

    def _prepare(self, submission: Submission, peers: Sequence[ServiceRecord]) -> dict[str, str]:
        """Fetch and unpack what the job needs; return the agent's environment."""
        self._blobs.fetch(submission.bundle, peers, self._client)
        work = self._directory.work(submission.folder)
        unpack(self._blobs.path(submission.bundle), work, submission.owner)
        given: dict[str, str] = {}
        if submission.environment is not None:
            self._blobs.fetch(submission.environment, peers, self._client)
            private = read_private(self._blobs.path(submission.environment), submission.owner)
            given = dict(private.variables)
        if not submission.checkpoint_path:
            given[CHECKPOINT_WAIT] = str(WAIT_SECONDS)
        secret = self._directory.job_secret(submission.job)
        return agent_environment(os.environ, given, self._directory, secret)

    def forget(self, job: str) -> None:
        """Forget how often the agent of a job that is over has failed: a job that is resumed begins again."""
        with self._lock:
            self.problems.pop(job, None)
            if job not in self._processes and job not in self._preparing:
                self._states.pop(job, None)

    @property
    def running(self) -> list[str]:
        """The jobs that have an agent here, or are about to."""
        with self._lock:
            return sorted({*self._processes, *self._preparing})

    def stop_all(self, seconds: float) -> None:
        """Tell every agent to leave, and kill those that have not after so many seconds."""
        with self._lock:
            processes = list(self._processes.values())
        for process in processes:
            process.signal(signal.SIGTERM)
        deadline = time.monotonic() + seconds
        for process in processes:
            if not process.wait(max(0.1, deadline - time.monotonic())):
                process.kill_group()
            process.forget()


def command_line(
    config: ServiceConfig, submission: Submission, slots: int, checkpoint_path: str, resumed: bool
) -> list[str]:
    """Return the command line of an agent, as a person would type it on this node.

    Unless the job is resumed, an agent that comes late starts nothing when the job has ended.
    """
    options = [
        f"--rdzv-endpoint={config.endpoint}",
        f"--cluster={config.cluster}",
        f"--rdzv-id={submission.job}",
        f"--nnodes=1:{submission.max_replicas}",
        f"--nproc-per-node=1:{slots}" if slots > 1 else "--nproc-per-node=1",
        f"--replicas={submission.min_replicas}:{submission.max_replicas}",
        f"--gpus-per-replica={submission.gpus_per_replica}",
        f"--max-restarts={submission.max_restarts}",
        f"--node-name={config.node}",
        f"--local-addr={config.host}",
        f"--checkpoint-path={checkpoint_path}",
        *([] if resumed else ["--once"]),
        *([f"--follows={submission.follows}"] if submission.follows else []),
        "--no-summary",
    ]
    if config.port_range:
        options.append(f"--port-range={config.port_range}")
    mode = {"script": [], "module": ["--module"], "exec": ["--no-python"]}[submission.mode]
    return [sys.executable, "-m", "adaptdl_elastic.agent", *options, *mode, *submission.command]


def agent_environment(
    own: Mapping[str, str], given: Mapping[str, str], directory: ServiceDirectory, secret: str
) -> dict[str, str]:
    """Return the environment of an agent: the service's, the job's variables, access to the store.

    Args:
        own: The service's environment.
        given: The job's variables.
        directory: Of the service.
        secret: What the secrets of the job's runs are derived from. Without it agents would agree on one in
            the store, where everybody with the store's password could read it and pose as a replica.
    """
    kept = {name: value for name, value in own.items() if not name.startswith("ADAPTDL_")}
    return {
        "PYTHONUNBUFFERED": "1",
        **kept,
        SECRET: secret,
        **given,
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": LINE_PREFIX,
        **directory.store_environment(),
    }
