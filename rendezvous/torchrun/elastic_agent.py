"""torch's interface of an agent, for programs that call `ElasticAgent.run` with a WorkerSpec.

An agent forks, which a process with torch's threads should not. So it runs as the program `adaptdl-run`,
whose event log says what the result is.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server import api
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from adaptdl_elastic import _own_python
from adaptdl_elastic.protocol.channel import STOPPED

_STATES = {0: api.WorkerState.SUCCEEDED, STOPPED: api.WorkerState.STOPPED}


class ElasticAgent(api.ElasticAgent):
    """Runs a node's replicas for a WorkerSpec, whose entrypoint is a command.

    The spec's rendezvous handler only names the job. Without `--rdzv-endpoint` the job is this node's alone.

    Args:
        spec: The replicas.
        options: Options of `adaptdl-run` that have no place in a WorkerSpec.
        log_dir: For logs and error files, which are kept; None: a new directory.
    """

    def __init__(self, spec: api.WorkerSpec, options: Sequence[str] = (), log_dir: str | None = None) -> None:
        if not isinstance(spec.entrypoint, str):
            raise ValueError(f"the entrypoint {spec.entrypoint} is a function: give a command")
        self._group, self._options = api.WorkerGroup(spec), options
        self._log_dir = Path(log_dir or tempfile.mkdtemp(prefix="adaptdl-elastic-"))

    def get_worker_group(self, role: str = "default") -> api.WorkerGroup:
        """Return the replicas' specification and state."""
        return self._group

    def run(self, role: str = "default") -> api.RunResult:
        """Run the agent until this node's part of the job is over.

        In the main thread SIGTERM, SIGINT, SIGHUP and SIGQUIT are passed on: the job is saved and stopped. It
        goes on if this process is killed.

        Raises:
            RuntimeError: the job has failed, but no replica of this node.
        """
        self._group.state = api.WorkerState.HEALTHY
        with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as log:
            self._group.state = _STATES.get(self._run(log.name), api.WorkerState.FAILED)
            events: list[dict[str, Any]] = [json.loads(line) for line in log]
        result = api.RunResult(self._group.state)
        if result.is_failed() and not (failures := _failures(events, self._log_dir)):
            reason = events[-1].get("reason") if events else None
            raise RuntimeError(f"adaptdl-run has failed: {reason or 'stderr says why'}")
        if result.is_failed():
            result.failures.update(failures)
        return result

    def _run(self, event_log: str) -> int:
        spec = self._group.spec
        options = {
            "rdzv-id": spec.rdzv_handler.get_run_id(),
            "nproc-per-node": spec.local_world_size,
            "max-restarts": spec.max_restarts,
            "role": spec.role,
            "master-addr": spec.master_addr,
            "master-port": spec.master_port,
            "local-addr": spec.local_addr,
            "log-dir": self._log_dir,
            "event-log": event_log,
        }
        given = [f"--{name}={value}" for name, value in options.items() if value is not None]
        script = _script(str(spec.entrypoint), [str(argument) for argument in spec.args])
        command = _own_python.module("adaptdl_elastic.agent", *given, *self._options, *script)
        # in a session of its own, so that Ctrl-C reaches it once
        process = subprocess.Popen(command, start_new_session=True)

        def pass_on(number: int, frame: FrameType | None) -> None:
            process.send_signal(number)

        in_main = threading.current_thread() is threading.main_thread()
        passed = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT) if in_main else ()
        before = {number: signal.signal(number, pass_on) for number in passed}
        try:
            return process.wait()
        finally:
            process.terminate()
            for number, handler in before.items():
                signal.signal(number, handler)


def _script(entrypoint: str, arguments: list[str]) -> list[str]:
    """Return a command as `adaptdl-run` takes it, which forks replicas if Python runs a script or module."""
    rest = arguments[1:] if arguments[:1] == ["-u"] else arguments
    if entrypoint == sys.executable and rest[:1] == ["-m"]:
        return ["--module", *rest[1:]]
    if entrypoint == sys.executable and rest and not rest[0].startswith("-"):
        return rest
    return ["--no-python", entrypoint, *arguments]


def _failures(events: list[dict[str, Any]], log_dir: Path) -> dict[int, ProcessFailure]:
    """Return the last failure of a replica of this node by its rank, if there is one."""
    found, pids = {}, dict[str, int]()
    for event in events:
        if event["event"] == "started":
            pids = event["pids"]
        elif event["event"] == "failure" and str(rank := event["rank"]) in pids:
            local_rank = sorted(map(int, pids)).index(rank)
            files = log_dir.glob(f"*/attempt_*/{local_rank}/error.json")
            newest = max(files, key=lambda path: path.stat().st_mtime, default=Path())
            found = {rank: ProcessFailure(local_rank, pids[str(rank)], event["exit_code"], str(newest))}
    return found
