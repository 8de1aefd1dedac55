"""The note beside a job's checkpoints that a run has ended, and the archive for its checkpoints.

`ended_run` defines the content of the note and what follows from it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from adaptdl_elastic._whole_file import NotRegularError, open_regular, write_whole
from adaptdl_elastic.agent.cluster.store_link import wait_for_removal
from adaptdl_elastic.rendezvous.store.base import Store, StoreError
from adaptdl_elastic.storage import StorageError, own_directories, reason

NOTE = "finished.json"  # name of the note, in the directory of the checkpoints
_LOCK_TTL = 5.0  # seconds; if an agent dies while it moves checkpoints, others wait this long


class CheckpointArchive(Protocol):
    """The checkpoints of a run that has ended, and their note. All methods raise StorageError."""

    def read_note(self) -> bytes | None:
        """Return the note, or None if there is none; b"" if its place holds something else than a file."""

    def write_note(self, note: bytes, *, even_if_empty: bool) -> None:
        """Write the note if there are checkpoints; with `even_if_empty` also if there are none."""

    def withdraw_note(self) -> None:
        """Delete the note if there is one."""

    def move_aside(self, name: str) -> str | None:
        """Move all checkpoints, then the note; return the new place, or None if there was nothing to move.

        If the move is interrupted, the newest checkpoints and the note are still in their old place.
        """


class _Directory:
    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def read_note(self) -> bytes | None:
        try:
            with open_regular(self._path / NOTE) as file:
                return file.read()
        except FileNotFoundError:
            return None
        except NotRegularError:
            return b""
        except OSError as error:
            raise StorageError(reason(error)) from None

    def write_note(self, note: bytes, *, even_if_empty: bool) -> None:
        try:
            if even_if_empty:
                self._path.mkdir(parents=True, exist_ok=True)
            if even_if_empty or self._entries():
                write_whole(self._path / NOTE, note, mode=0o666)
        except OSError as error:
            raise StorageError(reason(error)) from None

    def withdraw_note(self) -> None:
        try:
            (self._path / NOTE).unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(reason(error)) from None

    def move_aside(self, name: str) -> str | None:
        archive = self._path / name
        try:
            entries = self._entries()
            if (note := self._path / NOTE).is_file():
                entries.append(note)
            if not entries:
                return None
            archive.mkdir()
            for entry in entries:
                entry.rename(archive / entry.name)
        except OSError as error:
            raise StorageError(reason(error)) from None
        return str(archive)

    def _entries(self) -> list[Path]:
        """Return what runs have left in the directory, older checkpoints first, without the note."""
        return [self._path / name for name in own_directories(self._path)]


def kept(path: str) -> CheckpointArchive:
    """Return the archive for a checkpoint path; StorageError if checkpoints cannot be kept there."""
    if path.startswith("s3://"):
        try:
            from adaptdl_elastic.storage.s3 import S3Storage

            return S3Storage(path)
        except (ImportError, ValueError) as error:
            raise StorageError(reason(error)) from None
    return _Directory(path.removeprefix("file://"))


def move_aside(path: str) -> str | None:
    """Move the checkpoints in `path` to a new place beside them and return it. Raises StorageError."""
    return kept(path).move_aside(f"archive-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}")


@contextmanager
def exclusive(store: Store, key: str) -> Iterator[None]:
    """Hold the lock `key`, which one agent at a time has; a lease frees it when its holder dies."""
    lease = store.lease(_LOCK_TTL)
    try:
        while store.compare_and_swap(key, "", 0, lease) is None:
            wait_for_removal(store, key, _LOCK_TTL)  # then try again
        yield
    finally:
        with suppress(StoreError):
            lease.revoke()  # this also deletes the key if this agent holds it
