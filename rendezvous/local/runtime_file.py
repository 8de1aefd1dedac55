"""The note that a standalone job leaves on its machine, by which `adaptdl` finds the job's store.

The note is `${XDG_RUNTIME_DIR:-/tmp}/adaptdl-<uid>/<job>.json`. Only its owner can read it.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from adaptdl_elastic._private import RuntimeFileError, check_private, private_directory, runtime_directory
from adaptdl_elastic.rendezvous.schema.keys import check_name

__all__ = ["RuntimeFile", "RuntimeFileError", "find", "locked", "read_all", "remove", "write"]


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
    number, name = tempfile.mkstemp(dir=directory, prefix=".")  # mode 0600
    with os.fdopen(number, "w") as file:
        json.dump(asdict(record), file)
    Path(name).replace(path)
    return path


def remove(job: str, pid: int, directory: Path | None = None) -> None:
    """Remove the note of one job if the process `pid` wrote it; do nothing if there is none."""
    directory = directory or runtime_directory()
    path = directory / f"{check_name('job', job)}.json"
    record = _read(path)
    if record is not None and record.pid == pid:
        path.unlink(missing_ok=True)


def read_all(directory: Path | None = None) -> list[RuntimeFile]:
    """Return the notes of this user's running standalone jobs, the newest first."""
    directory = directory or runtime_directory()
    if not directory.is_dir():
        return []
    check_private(directory)
    dated = []
    for path in directory.glob("*.json"):
        record = _read(path)
        if record is not None and record.alive:
            dated.append((path.stat().st_mtime, record))
    return [record for _, record in sorted(dated, key=lambda pair: pair[0], reverse=True)]


def find(job: str, directory: Path | None = None) -> RuntimeFile | None:
    """Return the note of a running job, or None."""
    return next((record for record in read_all(directory) if record.job == job), None)


@contextmanager
def locked(job: str, directory: Path | None = None) -> Iterator[bool]:
    """Hold this user's lock of a standalone job; yield False if another process holds it.

    The kernel frees the lock when the process that holds it ends, however it ends.
    """
    path = private_directory(directory) / f"{check_name('job', job)}.lock"
    while True:
        try:
            number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise RuntimeFileError(
                f"{path} cannot be used ({error.strerror}): set XDG_RUNTIME_DIR to a directory of your own"
            ) from None
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(number)
            yield False
            return
        with suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(number)):
                break
        os.close(number)  # the process that held the lock has removed the file meanwhile
    try:
        yield True
    finally:
        path.unlink(missing_ok=True)
        os.close(number)


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
