"""The note that a standalone job leaves on its machine, by which `adaptdl` finds the job's store.

The note is `<job>.json` in the runtime directory (`_private`). Only its owner can read it. Readers look in
every place where that directory may be: another terminal may have other variables, and places come and go.
"""

from __future__ import annotations

import json
import os
import threading
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from adaptdl_elastic._private import RuntimeFileError, check_private, private_directory, runtime_directories
from adaptdl_elastic._whole_file import write_whole
from adaptdl_elastic.rendezvous.local import file_lock
from adaptdl_elastic.rendezvous.schema.keys import check_name

__all__ = ["Announcement", "RuntimeFile", "RuntimeFileError", "find", "read_all", "remove", "write"]


@dataclass(frozen=True)
class RuntimeFile:
    """The endpoint of a standalone job's store, and the process that serves it."""

    endpoint: str
    cluster: str
    job: str
    pid: int

    @property
    def alive(self) -> bool:
        """Whether the process that wrote the note is alive."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True


def write(record: RuntimeFile, directory: Path | None = None) -> Path:
    """Write the note of one job over an older one, remove notes of dead processes, and return its path."""
    directory = private_directory(directory)
    for other in directory.glob("*.json"):
        found = _read(other)
        if found is not None and not found.alive:
            other.unlink(missing_ok=True)
    path = directory / f"{check_name('job', record.job)}.json"
    write_whole(path, json.dumps(asdict(record)))
    return path


def remove(job: str, pid: int, directory: Path | None = None) -> None:
    """Remove the notes of one job that the process `pid` wrote; do nothing if there is none."""
    for place in _usable(directory):
        path = place / f"{check_name('job', job)}.json"
        record = _read(path)
        if record is not None and record.pid == pid:
            path.unlink(missing_ok=True)


def read_all(directory: Path | None = None) -> list[RuntimeFile]:
    """Return the notes of this user's running standalone jobs, the newest first."""
    dated = []
    for path in (path for place in _usable(directory) for path in place.glob("*.json")):
        record = _read(path)
        # gone since it was read: the job has ended
        with suppress(FileNotFoundError):
            if record is not None and record.alive:
                dated.append((path.stat().st_mtime, record))
    return [record for _, record in sorted(dated, key=lambda pair: pair[0], reverse=True)]


def find(job: str, directory: Path | None = None) -> RuntimeFile | None:
    """Return the note of a running job, or None."""
    return next((record for record in read_all(directory) if record.job == job), None)


class Announcement:
    """The lock and the note of a standalone job that this process runs."""

    def __init__(self, job: str) -> None:
        self._job, self._stack = job, ExitStack()
        self._note: RuntimeFile | None = None
        self._path = Path()  # of the lock
        self._status: os.stat_result | None = None  # of the lock; None: not held
        self._turn = threading.Lock()

    def take(self) -> bool:
        """Take the job's lock; return False if another process has it, or runs a job of this name.

        The kernel frees the lock when the process that holds it ends, however it ends.
        """
        self.release()
        path = private_directory() / f"{check_name('job', self._job)}.lock"
        try:
            other = self._stack.enter_context(file_lock.held(path, self._job))
        except OSError as error:
            raise RuntimeFileError(f"{path} cannot be used ({error.strerror}): remove it") from None
        if other or any((one.job, one.pid != os.getpid()) == (self._job, True) for one in read_all()):
            self.release()
            return False
        self._path, self._status = path, path.lstat()
        return True

    def publish(self, note: RuntimeFile) -> None:
        """Write the note beside the lock."""
        self._note = note
        write(note, self._path.parent)

    def restore(self, endpoint: str) -> None:
        """Make the lock and the note again if they were removed; do nothing before `publish`.

        Args:
            endpoint: of the job's store now.

        Raises:
            OSError: they cannot be made.
            RuntimeFileError: there is no place for them, or another job has taken this one's name.
        """
        with self._turn:
            if self._note is None:
                return
            note, place = replace(self._note, endpoint=endpoint), self._path.parent
            held = self._status and place in _usable(place) and file_lock.lies_at(self._path, self._status)
            if not held and not self.take():
                raise RuntimeFileError(f"commands reach another standalone job {self._job!r}, not this one")
            if _read(self._path.with_suffix(".json")) != note:
                self.publish(note)

    def withdraw(self) -> None:
        """Remove the note for good."""
        with self._turn:
            self._note = None
            remove(self._job, os.getpid())

    def release(self) -> None:
        """Release the lock."""
        self._status = None
        self._stack.close()


def _usable(directory: Path | None) -> list[Path]:
    """Return the directory, or the places of notes, without those that another user can enter."""
    places = []
    for place in [directory] if directory else runtime_directories():
        with suppress(OSError, RuntimeFileError):
            check_private(place)
            places.append(place)
    return places


def _read(path: Path) -> RuntimeFile | None:
    try:
        fields = json.loads(path.read_text())
        return RuntimeFile(
            str(fields["endpoint"]),
            str(fields["cluster"]),
            str(fields["job"]),
            int(fields["pid"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
