"""The process of a trial's job: an agent of this machine, read by its event log."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from adaptdl_elastic import _own_python

_AGENT = "adaptdl_elastic.agent"


def slot_options(endpoint: str, slots: int, least: int, most: int | None) -> list[str]:
    """Return the options of `adaptdl-run` for a job that shares slots of this machine with others.

    The coordinator moves replicas between the jobs by goodput, in place.

    Args:
        endpoint: Store of all of them, a `LocalServer` of this user.
        slots: Replicas of all jobs together.
        least: Replicas without which this one waits.
        most: The most replicas; None: as many as there are slots.
    """
    return [
        "--nnodes=1",
        f"--rdzv-endpoint={endpoint}",
        f"--nproc-per-node=1:{slots}",
        f"--replicas={least}:{slots if most is None else min(most, slots)}",
    ]


class JobProcess:
    """A job that `adaptdl-run` runs. It saves its state and ends if the thread that made this object ends.

    Args:
        job: Name of the job. The same name goes on from the checkpoint of an earlier one.
        command: The script and its arguments.
        folder: Folder for its checkpoints (`FOLDER/JOB`), log and event log.
        options: Further options of `adaptdl-run`: the store and the replicas.
        environment: Variables of the agent and its replicas; None: those of this process.
    """

    def __init__(
        self,
        job: str,
        command: Sequence[str],
        folder: Path,
        options: Sequence[str],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.job, self.checkpoints, self.log = job, folder / job, folder / f"{job}.log"
        self._stopped, self._read = False, 0
        self._events = folder / f"{job}.events.jsonl"
        arguments = [f"--rdzv-id={job}", f"--event-log={self._events}"]
        arguments += [f"--checkpoint-path={self.checkpoints}", *options]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                _own_python.module(_AGENT, *arguments, *command),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                preexec_fn=_end_with_parent, env=environment,
            )  # fmt: skip

    def events(self) -> list[dict[str, Any]]:
        """Return the events since the last call; at first also those of an earlier process of the job."""
        try:
            with self._events.open("rb") as file:
                file.seek(self._read)
                text = file.read()
        except FileNotFoundError:
            return []
        whole = text[: text.rfind(b"\n") + 1]  # the last line may be half written
        self._read += len(whole)
        return parse_events(whole)

    def ended(self) -> int | None:
        """Return the agent's exit code; None: it runs."""
        return self._process.poll()

    def stop(self) -> None:
        """Let the job save its state and end."""
        if not self._stopped and self._process.poll() is None:
            self._stopped = True
            os.kill(self._process.pid, signal.SIGTERM)

    def wait(self) -> int:
        """Wait for the job's end; return the agent's exit code."""
        return self._process.wait()


def _end_with_parent() -> None:
    """Request SIGTERM for when the parent's thread ends; called between fork and exec (Linux, prctl(2))."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def parse_events(text: bytes) -> list[dict[str, Any]]:
    """Return the events in lines of an event log, in order; leave out what is no event."""
    found = []
    for line in text.splitlines():
        with suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict) and "event" in event:
                found.append(event)
    return found
