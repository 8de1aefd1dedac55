"""A process that outlives the one that has started it, and that the next service finds."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from adaptdl_elastic._whole_file import write_whole


@dataclass
class KeptProcess:
    """A process and the file that remembers it.

    Attributes:
        pid: Its process id, and its process group's.
        note: The file.
        child: The process if this service has started it, else None.
    """

    pid: int
    note: Path
    child: subprocess.Popen[bytes] | None = None

    @classmethod
    def start(
        cls, command: Sequence[str], note: Path, log: Path, cwd: Path, env: Mapping[str, str], **how: Any
    ) -> KeptProcess:
        """Start a command in a session of its own, as `how` tells Popen; its output is appended to `log`.

        It is killed again if it cannot be noted.

        Raises:
            OSError: it cannot be started or noted.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            child = subprocess.Popen(
                command,
                cwd=cwd,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                **how,
            )
        created = 0.0
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended already
            created = psutil.Process(child.pid).create_time()
        try:
            note.parent.mkdir(parents=True, exist_ok=True)
            write_whole(note, json.dumps({"pid": child.pid, "created": created}))
        except OSError:
            cls(child.pid, note, child).kill_group()
            raise
        return cls(child.pid, note, child)

    @classmethod
    def find(cls, note: Path) -> KeptProcess | None:
        """Return the process that a note remembers if it is alive; delete the note if it is not."""
        try:
            noted = json.loads(note.read_text())
            pid, created = int(noted["pid"]), float(noted["created"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError):
            note.unlink(missing_ok=True)
            return None
        if not _is_alive(pid, created):
            note.unlink(missing_ok=True)
            return None
        return cls(pid, note)

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        if self.child is not None:
            return self.child.poll() is None
        return KeptProcess.find(self.note) is not None

    @property
    def exit_code(self) -> int | None:
        """Its exit code; None while it runs, and for a process that an earlier service has started."""
        return None if self.child is None else self.child.poll()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, if it is there."""
        with contextlib.suppress(ProcessLookupError):
            if self.alive:
                os.kill(self.pid, number)

    def kill_group(self) -> None:
        """Kill the process and all of its group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the process; return False if it has not ended after so many seconds."""
        try:
            if self.child is not None:
                self.child.wait(seconds)
            elif self.alive:
                return _has_ended(self.pid, seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def forget(self) -> None:
        """Delete the note."""
        self.note.unlink(missing_ok=True)


def end_with_parent() -> None:
    """Request SIGKILL for when the parent's thread ends; called between fork and exec (Linux, prctl(2))."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _is_alive(pid: int, created: float) -> bool:
    try:
        process = psutil.Process(pid)
        # the time of the start tells a process from a later one with the same number
        return abs(process.create_time() - created) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _has_ended(pid: int, seconds: float) -> bool:
    """Wait for the end of a process that need not be a child, and that its parent need not collect."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        return bool(poller.poll(seconds * 1000))
    finally:
        os.close(descriptor)


def last_line(path: Path) -> str:
    """Return the last line of a log that is not empty, for messages."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return "it has written nothing"
    return next((line.strip() for line in reversed(lines) if line.strip()), "it has written nothing")
