"""The job of one trial: start it, read what it reports, save its state, and resume from a saved state."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from adaptdl_elastic import _own_python
from adaptdl_elastic.storage import is_id
from adaptdl_elastic.tune.job_process import JobProcess

LOOK_EVERY = 0.1  # seconds between two looks at the event log
SAVE_SECONDS = 120.0  # the longest wait for a checkpoint
_SAVED, _PENDING = "checkpoints", "reports.json"
_LINES_OF_LOG = 3  # in the message of a failure
_CHECKPOINT = _own_python.module("adaptdl_elastic.autoscaler", "checkpoint")


class TrialFailedError(RuntimeError):
    """The job of a trial has failed; the message has the end of its log."""


class _Report(NamedTuple):
    time: float  # wall clock of the replica that made it; 0: an earlier job of the trial has made it
    values: dict[str, Any]


class _Checkpoint(NamedTuple):
    id: str
    taken: float  # wall clock of that replica when it copied its state; it was written after that


class TrialJob:
    """A trial's job, and the reports that nobody has asked for yet.

    Args:
        name: Name of the trial.
        folder: Folder for its checkpoints, logs and event logs.
        command: The script and its arguments.
        options: Options of `adaptdl-run`: the store and the replicas.
        endpoint: Endpoint of that store.
        environment: Variables of the job; None: those of this process.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        command: Sequence[str],
        options: Sequence[str],
        endpoint: str,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._name, self._folder, self._command = name, folder, list(command)
        self._options, self._endpoint, self._environment = list(options), endpoint, environment
        self._process: JobProcess | None = None
        self._reports = deque[_Report]()
        self._last_returned = 0.0  # time of the newest report that `next` has returned
        self._newest: _Checkpoint | None = None  # checkpoint of the process
        self._size: dict[str, Any] = {}

    def next(self) -> dict[str, Any] | None:
        """Wait for the next report; start the job if it has not been started.

        Returns:
            The reported values by name, with the number of `replicas` and the `batch_size` at that moment.
            None: the job has ended well.

        Raises:
            TrialFailedError: the job has failed.
        """
        while not self._reports:
            process = self.start()
            code = process.ended()  # asked before the events are read, so that the last ones are not missed
            self._read(process)
            if self._reports:
                break
            if code == 0:
                return None
            if code is not None:
                raise TrialFailedError(f"{self._name} failed with exit code {code}: {_end_of(process.log)}")
            time.sleep(LOOK_EVERY)
        self._last_returned, values = self._reports.popleft()
        return values

    def save(self, target: Path) -> None:
        """Save the trial's state, with the reports that belong to it, into a folder.

        Training goes on meanwhile: a report that is made after the state was saved is made again by a job
        that resumes from it. A state of before a report that `next` has returned is therefore not taken. If
        the job has ended, its last state is taken.

        Raises:
            TrialFailedError: the job cannot save its state.
        """
        process = self.start()
        self._read(process)
        before = self._newest
        refused = ask_for_checkpoint(process.job, self._endpoint) if process.ended() is None else ""
        deadline = time.monotonic() + SAVE_SECONDS
        # a job that refuses because it is at its end saves its state, too, and ends
        while process.ended() is None and (self._newest is before or self._is_behind()):
            if time.monotonic() > deadline:
                why = refused or f"it takes longer than {SAVE_SECONDS:g} s"
                raise TrialFailedError(f"{self._name} cannot save its state: {why}")
            time.sleep(LOOK_EVERY)
            self._read(process)
        self._read(process)
        if not process.checkpoints.is_dir():
            raise TrialFailedError(f"{self._name} has no checkpoint: {_end_of(process.log)}")
        newest = self._newest
        _copy(process.checkpoints, newest, target / _SAVED)
        waiting = [one.values for one in self._reports if newest is None or one.time <= newest.taken]
        (target / _PENDING).write_text(json.dumps(waiting))

    def resume(self, saved: Path) -> None:
        """Go on from a state that `save` has written, of this trial or of another one of the same script."""
        self.end()
        job = self._unused_name()
        shutil.copytree(saved / _SAVED, self._folder / job)
        self._last_returned, self._newest = 0.0, None
        self._reports.extend(_Report(0.0, values) for values in json.loads((saved / _PENDING).read_text()))
        self._start(job)

    def end(self) -> None:
        """End the job, if it runs; its replicas are free for other trials then."""
        if self._process is not None:
            self._process.stop()
            self._process.wait()
        self._reports.clear()

    def start(self) -> JobProcess:
        """Start the job, unless it has been started; return its process."""
        return self._process or self._start(self._unused_name())

    def _start(self, job: str) -> JobProcess:
        self._process = JobProcess(job, self._command, self._folder, self._options, self._environment)
        return self._process

    def _unused_name(self) -> str:
        """Return a name for a job that no earlier process of this trial has used in this folder."""
        names = (f"{self._name}-{number}" for number in itertools.count())
        return next(name for name in names if not any(self._folder.glob(f"{name}*")))

    def _read(self, process: JobProcess) -> None:
        """Take new reports from the event log."""
        for event in process.events():
            match event["event"]:
                case "generation" if event.get("replicas") is not None:
                    self._size["replicas"] = event["replicas"]
                case "batch_size" if event.get("batch_size") is not None:
                    self._size["batch_size"] = event["batch_size"]
                case "metrics":
                    values = {name: _number(value) for name, value in event.items()}
                    del values["event"], values["time"]
                    self._reports.append(_Report(event["time"], {**self._size, **values}))
                case "checkpoint":
                    self._newest = _Checkpoint(event["id"], event["taken"])

    def _is_behind(self) -> bool:
        """Return whether the newest checkpoint is of before a report that `next` has returned.

        The script reports further values while a checkpoint is written.
        """
        return self._newest is not None and self._newest.taken < self._last_returned


def ask_for_checkpoint(job: str, endpoint: str) -> str:
    """Ask a job for a checkpoint; return why it cannot be asked, or an empty text."""
    command = [*_CHECKPOINT, job, f"--etcd={endpoint}"]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    return asked.stderr.strip() if asked.returncode != 0 else ""


def _copy(checkpoints: Path, newest: _Checkpoint | None, target: Path) -> None:
    """Copy a job's newest checkpoint, without the note of a job that is done: another job goes on from it.

    Older ones may be removed meanwhile. If the job has written none itself, what it has begun with is copied.
    """
    target.mkdir(parents=True)
    found = [place.name for place in checkpoints.iterdir()] if newest is None else [newest.id]
    for name in filter(is_id, found):
        shutil.copytree(checkpoints / name, target / name)


def _number(value: Any) -> Any:
    """Return a value as it was reported: the event log has nan and inf as text."""
    return float(value) if value in ("nan", "inf", "-inf") else value


def _end_of(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-_LINES_OF_LOG:])
