"""Register this node for submitted jobs, and start the agent of a job once a plan has replicas here.

A job that has no replicas on a node costs it no process: the service fetches the job's files and registers
the node, as an agent would (`take_part`). Where the coordinator then plans replicas, the service starts an
agent, which takes over the registration. The agent ends when a plan has no replicas here any more, and the
service registers the node again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from adaptdl_elastic import _own_python, _program
from adaptdl_elastic._whole_file import write_whole
from adaptdl_elastic.agent.cluster.ended_run import JobEndedError
from adaptdl_elastic.agent.cluster.job_joining import live_agents
from adaptdl_elastic.agent.machine.kept_process import KeptProcess, last_line
from adaptdl_elastic.agent.service import environments
from adaptdl_elastic.agent.service.archives import read_private, unpack
from adaptdl_elastic.agent.service.blobs import AbsentError, Blobs
from adaptdl_elastic.agent.service.checkpoint_copies import WAIT_SECONDS
from adaptdl_elastic.agent.service.decisions import AgentState, Step
from adaptdl_elastic.agent.service.job_packages import python_with
from adaptdl_elastic.agent.service.server_forker import ServerForker, can_fork
from adaptdl_elastic.agent.service.stand_in import Membership, StandIn, StandInError, record_failure
from adaptdl_elastic.protocol import environment
from adaptdl_elastic.protocol.environment import CHECKPOINT_WAIT, FORK_SERVER, SECRET
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import JobState, Plan, encode
from adaptdl_elastic.rendezvous.schema.submissions import ServiceRecord, Submission
from adaptdl_elastic.rendezvous.services.admission import Request
from adaptdl_elastic.rendezvous.services.service_client import ServiceClient
from adaptdl_elastic.rendezvous.services.service_config import ServiceConfig, ServiceDirectory
from adaptdl_elastic.rendezvous.store.base import Store
from adaptdl_elastic.rendezvous.text import split_stamp

logger = logging.getLogger(__name__)

LINE_PREFIX = "${time} [rank${rank}]: "
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
        self._requests: dict[str, Request] = {}  # as of the last `review`
        # of jobs without an agent, and of those whose agents have taken them over
        self._stand_ins: dict[str, StandIn] = {}
        self._ghosts: list[StandIn] = []  # to be withdrawn again: the store did not answer
        self.forker = ServerForker(_of_others(os.environ))
        self._states: dict[str, AgentState] = {}
        self.problems: dict[str, str] = {}
        """Why this node cannot run a job, by job."""
        self.unsuited: dict[str, str] = {}
        """Why a job is not for this node, as its owner wants it, by job."""
        self._find_agents()

    def _notes(self) -> Path:
        return self._directory.state / "agents"

    def _spec(self, job: str) -> Path:
        return self._notes() / f"{job}.spec"

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
                # the agent may have ended before it has taken the registration over
                self._drop(job)
            return dict(self._states)

    def due(self, since: float, now: float) -> bool:
        """Return whether between two times an agent came to be allowed to start again."""
        with self._lock:
            return any(not one.alive and since < one.not_before <= now for one in self._states.values())

    def _note_end(self, job: str, code: int | None) -> None:
        if code in (0, None) or not self._states[job].failures:
            self.problems.pop(job, None)
            return
        then = " and is not started again" if self._states[job].given_up else ""
        _, said = split_stamp(last_line(self._directory.log(job)))
        self.problems[job] = f"its agent exits with code {code}{then}: {said}"

    def start(self, request: Request, peers: Sequence[ServiceRecord], membership: Membership) -> None:
        """Register this node for a job, in a thread that fetches the job's files first.

        Args:
            request: Of the job.
            peers: The other nodes, which may have the files.
            membership: The store, and the lease of the registration.
        """
        job = request.submission.job
        with self._lock:
            self._states[job] = self._states.get(job, AgentState()).started(time.monotonic())
            self._preparing.add(job)
        threading.Thread(
            target=self._stand_in, args=(request, peers, membership), name=f"start-{job}", daemon=True
        ).start()

    def review(self, requests: Iterable[Request], number_of: Callable[[str], int]) -> None:
        """Withdraw registrations that belong to another submission or run than a job has now.

        Args:
            requests: All requests.
            number_of: Returns `JobSpec.number` of a job's present run; 0: it is not known.
        """
        with self._lock:
            self._requests = {one.submission.job: one for one in requests}
            ghosts, self._ghosts = self._ghosts, []
            for job, stand_in in list(self._stand_ins.items()):
                fits = self._fits(stand_in) and number_of(job) <= stand_in.number
                if self._states[job].standing and not fits:
                    self._drop(job)
        for ghost in ghosts:
            self._withdraw(ghost)

    def _fits(self, stand_in: StandIn) -> bool:
        """Return whether a registration is for a submission and a run that are to go on."""
        request = self._requests.get(stand_in.job)
        if request is None or request.over or request.submission != stand_in.submission:
            return False
        return not (request.run.resumed and request.run.run == stand_in.run)

    def _drop(self, job: str) -> None:
        """End this node's registration for a job, if there is one that no agent has taken over."""
        stand_in = self._stand_ins.pop(job, None)
        if stand_in is not None:
            self._states[job] = replace(self._states[job], alive=False, standing=False)
            threading.Thread(target=self._withdraw, args=(stand_in,), daemon=True).start()

    def _withdraw(self, stand_in: StandIn) -> None:
        if not stand_in.withdraw():
            with self._lock:
                self._ghosts.append(stand_in)

    def follow(self, plan_of: Callable[[str], Plan | None]) -> None:
        """Start the agents of those jobs of which a plan has replicas here."""
        with self._lock:
            for job, stand_in in self._stand_ins.items():
                plan = plan_of(job) if self._states[job].standing else None
                if plan is not None and stand_in.is_named(plan) and self._fits(stand_in):
                    self._states[job] = self._states[job].started(time.monotonic())
                    self._preparing.add(job)
                    threading.Thread(target=self._start, args=(stand_in,), daemon=True).start()

    def withdraw(self, lost: Callable[[Membership], bool]) -> None:
        """Forget the registrations of which `lost` says that the store has them no more."""
        with self._lock:
            for job, stand_in in list(self._stand_ins.items()):
                if self._states[job].standing and lost(stand_in.membership):
                    del self._stand_ins[job]
                    self._states[job] = replace(self._states[job], alive=False, standing=False)
                    self._changed()

    def renew(self, _: object = None) -> None:
        """Register anew for each job without an agent: other devices of this node can be used now."""
        with self._lock:
            for job in [job for job in self._stand_ins if self._states[job].standing]:
                self._drop(job)

    def end(self, job: str, step: Step) -> None:
        """Tell the agent of a job to leave, or kill it; without one end this node's registration."""
        with self._lock:
            process = self._processes.get(job)
            if self._states[job].standing:
                self._drop(job)
            elif process is not None and step is Step.TERMINATE:
                self._states[job] = replace(self._states[job], terminated=time.monotonic())
                process.signal(signal.SIGTERM)
            elif process is not None and step is Step.KILL:
                process.kill_group()

    def _stand_in(self, request: Request, peers: Sequence[ServiceRecord], membership: Membership) -> None:
        submission = request.submission
        job, path = submission.job, self._checkpoint_path(submission)
        try:
            if why := why_unsuited(submission, self._config.node):
                self.unsuited[job] = why
                return self._failed(job, "", counts=False)
            self.unsuited.pop(job, None)
            given, environment = self.fetch(submission, peers)
            write_spec(request, path, self._spec(job))
            options = agent_options(self._config, self._slots, self._spec(job))
            work = self._directory.work(submission.folder)
            stand_in = StandIn(submission, work, given, options, environment, membership)
            stand_in = self._of_its_version(stand_in, request)
            self.unsuited[job] = "it installs its packages"
            named, content = submission.requirements, submission.bundle
            variables = {**_of_others(os.environ), **given}
            python = python_with(
                self._directory, work, named, content, stand_in.python, variables, submission.python
            )
            self.unsuited.pop(job, None)
            if python != stand_in.python:
                place = os.pathsep.join([str(Path(python).parent), environment.get("PATH", os.defpath)])
                stand_in = replace(stand_in, python=python, variables={**environment, "PATH": place})
            # this process has neither the job's variables nor what was imported under them
            if not can_fork(given) or ("://" in path and submission.environment is not None):
                return self._start(stand_in)
            stand_in = stand_in.register()
        except JobEndedError as ended:
            return self._failed(job, str(ended))
        except AbsentError as error:  # after a power failure the nodes that have it may come later
            return self._failed(job, str(error), counts=False)
        except StandInError as error:  # a job that runs may grow to this node later
            return self._failed(job, str(error), counts=not (error.passing or request.run.agents))
        except Exception as error:  # or the job would be prepared for ever
            return self._failed(job, str(error) or repr(error))
        with self._lock:
            self._preparing.discard(job)
            self._stand_ins[job] = stand_in
            self._states[job] = replace(self._states[job], standing=True)
            if not self._fits(stand_in):
                self._drop(job)
            elif not self._states[job].failures:
                self.problems.pop(job, None)
        self._changed()

    def _of_its_version(self, stand_in: StandIn, request: Request) -> StandIn:
        """Return a stand-in with the version of a job that runs: it keeps that until it is resumed."""
        store, keys = stand_in.membership.store, Keys(self._config.cluster)
        if request.run.state is not JobState.RUNNING or request.run.resumed:
            return stand_in
        versions = {one.version for one in live_agents(store, keys, stand_in.job)} - {"", _program.version()}
        for version in versions:
            if (python := environments.python_of(self._directory, version)) is not None:
                return replace(stand_in, version=version, python=python)
        return stand_in

    def _start(self, stand_in: StandIn) -> None:
        job = stand_in.job
        log, note = self._directory.log(job), self._notes() / f"{job}.json"
        try:
            command = _own_python.module("adaptdl_elastic.agent", *stand_in.options, python=stand_in.python)
            where = note, log, stand_in.work
            if can_fork(stand_in.given) and stand_in.python == sys.executable:
                with self.forker.fork(stand_in.work, log) as server:
                    given = {**stand_in.environment, FORK_SERVER: str(server.fileno())}
                    process = KeptProcess.start(command, *where, given, pass_fds=[server.fileno()])
            else:
                process = KeptProcess.start(command, *where, stand_in.environment)
        except Exception as error:  # or the job would be prepared for ever
            with self._lock:
                self._drop(job)
            return self._failed(job, str(error) or repr(error))
        with self._lock:
            self._preparing.discard(job)
            self._processes[job] = process
        self._changed()

    def _failed(self, job: str, problem: str, counts: bool = True) -> None:
        with self._lock:
            self._preparing.discard(job)
            now, state = time.monotonic(), self._states[job]
            self._states[job] = state.ended(now, 1) if counts else state.postponed(now)
            if problem:
                logger.warning("job %s cannot be started: %s", job, problem)
                self.problems[job] = problem
        self._changed()

    def _checkpoint_path(self, submission: Submission) -> str:
        return submission.checkpoint_path or str(self._directory.checkpoints(submission.job))

    def fetch(
        self, submission: Submission, peers: Sequence[ServiceRecord]
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Fetch and unpack what the job needs; return the job's variables and the agent's environment."""
        self._blobs.fetch(submission.bundle, peers, self._client)
        work = self._directory.work(submission.folder)
        unpack(self._blobs.path(submission.bundle), work, submission.owner)
        given: dict[str, str] = {}
        if submission.environment is not None:
            self._blobs.fetch(submission.environment, peers, self._client)
            given = dict(read_private(self._blobs.path(submission.environment), submission.owner))
        if not submission.checkpoint_path:
            given[CHECKPOINT_WAIT] = str(WAIT_SECONDS)
        secret = self._directory.job_secret(submission.job)
        return given, agent_environment(os.environ, given, self._directory, secret)

    def forget(self, job: str) -> None:
        """Forget how often the agent of a job that is over has failed: a job that is resumed begins again."""
        with self._lock:
            self.problems.pop(job, None)
            self.unsuited.pop(job, None)
            if job not in {*self._processes, *self._preparing, *self._stand_ins}:
                self._states.pop(job, None)
                with contextlib.suppress(OSError):
                    self._spec(job).unlink()

    @property
    def given_up(self) -> tuple[str, ...]:
        """The jobs that are not tried again here."""
        with self._lock:
            return tuple(sorted(job for job, state in self._states.items() if state.given_up))

    @property
    def pythons(self) -> list[str]:
        """The interpreters of jobs that may have replicas here, and have no process yet."""
        with self._lock:
            return [one.python for one in self._stand_ins.values()]

    def record_failure(self, request: Request, reason: str, store: Store) -> None:
        """Write into the store that a job has failed because no node can start it."""
        keys = Keys(self._config.cluster)
        record_failure(store, keys, request.submission, reason, _followed(request))

    @property
    def running(self) -> list[str]:
        """The jobs that have an agent here, or are about to."""
        with self._lock:
            return sorted({*self._processes, *self._preparing})

    @property
    def registered(self) -> set[str]:
        """The jobs that may have replicas here."""
        with self._lock:
            return {*self._processes, *self._preparing, *self._stand_ins}

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


def why_unsuited(submission: Submission, node: str) -> str:
    """Return why a job is not for a node, on which this runs; "" if it is.

    A file system that does not answer keeps the caller waiting.
    """
    if submission.nodes and node not in submission.nodes:
        return f"--node {', '.join(submission.nodes)}"
    # one that cannot be looked at is not there
    missing = (path for path in submission.has if not os.path.exists(path))  # noqa: PTH110
    return next((f"there is no {path} (--has)" for path in missing), "")


def _followed(request: Request) -> str:
    """Return the run that has ended, and is to be followed by another one; "" if there is none."""
    return request.run.run if request.run.resumed else request.submission.follows


def write_spec(request: Request, checkpoint_path: str, file: Path) -> None:
    """Write the file that tells an agent its job.

    An agent that comes late starts nothing when the job has ended, unless by the run that it `follows`.
    """
    spec = replace(
        request.submission.of_agents,
        most_weight=request.most_weight,
        checkpoint_path=checkpoint_path,
        follows=_followed(request),
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, encode(spec))


def agent_options(config: ServiceConfig, slots: int, file: Path) -> list[str]:
    """Return the options of an agent on this node, whose job is in a file."""
    return [
        *("--spec", str(file)),
        f"--rdzv-endpoint={config.endpoint}",
        f"--cluster={config.cluster}",
        f"--nproc-per-node=1:{slots}" if slots > 1 else "--nproc-per-node=1",
        f"--node-name={config.node}",
        f"--local-addr={config.host}",
        "--once",
        "--no-summary",
        *([f"--port-range={config.port_range}"] if config.port_range else []),
    ]


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
    return {
        "PYTHONUNBUFFERED": "1",
        **_of_others(own),
        SECRET: secret,
        **given,
        environment.LINE_PREFIX: LINE_PREFIX,
        **directory.store_environment(),
    }


def _of_others(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables of this project."""
    return {name: value for name, value in environ.items() if not name.startswith("ADAPTDL_")}
