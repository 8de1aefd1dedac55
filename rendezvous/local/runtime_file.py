"""The note a standalone run leaves, so that `adaptdl` finds the store of a job on this machine.

`${XDG_RUNTIME_DIR:-/tmp}/adaptdl-<uid>/<job>.json`, readable by its owner only.
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
    """Where the store of a standalone job is, and who keeps it."""

    endpoint: str
    cluster: str
    job: str
    pid: int

    @property
    def alive(self) -> bool:
        """Whether the process that wrote it still lives."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True


def write(record: RuntimeFile, directory: Path | None = None) -> Path:
    """Write the note of one job, over an older one; the path. Notes of processes that are gone go."""
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
    """Remove the note of one job if it is still that of `pid`; harmless when it is gone."""
    directory = directory or runtime_directory()
    path = directory / f"{check_name('job', job)}.json"
    record = _read(path)
    if record is not None and record.pid == pid:
        path.unlink(missing_ok=True)


def read_all(directory: Path | None = None) -> list[RuntimeFile]:
    """The notes of all standalone jobs of this user that still run, the newest first."""
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
    """The note of a job that runs; None when there is none."""
    return next((record for record in read_all(directory) if record.job == job), None)


@contextmanager
def locked(job: str, directory: Path | None = None) -> Iterator[bool]:
    """Whether nobody else of this user has the lock of this standalone job; it is held until the end.

    The kernel frees it when its holder dies, however that goes.
    """
    path = private_directory(directory) / f"{check_name('job', job)}.lock"
    while True:
        try:
            number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise RuntimeFileError(
                f"{path} can not be used ({error.strerror}): set XDG_RUNTIME_DIR to a directory of your own"
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
        os.close(number)  # whoever had it has removed it meanwhile
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
