"""A rerun of a finished job trains anew: the note that a job is done, and where its checkpoints go then."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import JobSpec, MalformedRecordError, decode
from adaptdl_elastic.rendezvous.store.base import Store, StoreError
from adaptdl_elastic.storage import StorageError, reason

FINISHED = "finished.json"  # the note, beside the checkpoints
_LOCK_TTL = 5.0  # seconds: an agent that dies while it puts checkpoints aside holds up others for so long


class CheckpointArchive(Protocol):
    """What can be done with the checkpoints of a job that is done. All raise StorageError."""

    def note(self) -> bytes | None:
        """The note, None when there is none."""

    def note_finished(self, note: bytes) -> None:
        """Leave the note, where there is anything to be noted."""

    def move_aside(self, name: str) -> str:
        """Move all of it, the note last; where to. Whoever is interrupted leaves the note."""


class _Directory:
    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def note(self) -> bytes | None:
        path = self._path / FINISHED
        try:
            return path.read_bytes() if path.is_file() else None
        except FileNotFoundError:  # another agent has just put it aside
            return None
        except OSError as error:
            raise StorageError(reason(error)) from None

    def note_finished(self, note: bytes) -> None:
        try:
            if self._path.is_dir() and any(self._path.iterdir()):
                (self._path / FINISHED).write_bytes(note)
        except OSError as error:
            raise StorageError(reason(error)) from None

    def move_aside(self, name: str) -> str:
        archive = self._path / name
        try:
            archive.mkdir()
            entries = [e for e in self._path.iterdir() if not e.name.startswith("finished")]
            for entry in [*entries, self._path / FINISHED]:
                entry.rename(archive / entry.name)
        except OSError as error:
            raise StorageError(reason(error)) from None
        return str(archive)


def kept(path: str) -> CheckpointArchive:
    """What a checkpoint path stands for. StorageError when nobody can keep checkpoints there."""
    if path.startswith("s3://"):
        try:
            from adaptdl_elastic.storage.s3 import S3Storage

            return S3Storage(path)
        except (ImportError, ValueError) as error:
            raise StorageError(reason(error)) from None
    return _Directory(path.removeprefix("file://"))


def note_finished(path: str, run: str, say: Callable[[str], None]) -> None:
    """Leave a note with the checkpoints that the job which wrote them is done."""
    try:
        kept(path).note_finished(json.dumps({"run": run, "time": time.time()}).encode())
    except StorageError as error:
        say(f"that the job is done can not be noted in {path}: {error}; the same command will train no more")


def archive_finished(
    store: Store, keys: Keys, job: str, path: str, busy: Callable[[], bool], say: Callable[[str], None]
) -> None:
    """Put the checkpoints of a finished job aside, so that the same command trains anew.

    Not while the job is `busy`: has agents. Of agents that start at the same moment one does it, and the
    others wait until it is done. StorageError when it can not be done.
    """
    found = kept(path)

    def is_finished() -> bool:
        note = found.note()
        return note is not None and not _is_late(note, store, keys, job, path)

    if not is_finished():
        return
    with _alone(store, f"{keys.root}archiving/{job}"):
        if busy() or not is_finished():
            return
        archive = found.move_aside(f"finished-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}")
    say(f"job {job!r} has finished before: starting anew; its checkpoints are kept in {archive}")


def _is_late(note: bytes, store: Store, keys: Keys, job: str, path: str) -> bool:
    """Whether a later run than the noted one has begun with these checkpoints: they are of that run.

    An agent that was cut off for longer than its lease may note that its run is done after another run has
    put that one's checkpoints aside. Names of runs begin with when they began.
    """
    item = store.get(keys.job(job, "spec"))
    try:
        run = json.loads(note)["run"]
        last = decode(JobSpec, item.value, item.key) if item is not None else None
    except (ValueError, TypeError, KeyError, MalformedRecordError):
        return False
    return last is not None and last.checkpoint_path == path and isinstance(run, str) and run < last.run


@contextmanager
def _alone(store: Store, key: str) -> Iterator[None]:
    """Among all who use this key one at a time; a lease frees it when its holder is gone."""
    lease = store.lease(_LOCK_TTL)
    try:
        while store.compare_and_swap(key, "", 0, lease) is None:
            revision = store.range(key).revision
            if store.get(key) is None:
                continue
            with store.watch(key, revision + 1) as watch:
                timer = threading.Timer(_LOCK_TTL, watch.close)  # and look again
                timer.start()
                for change in watch:
                    if change.kind == "delete":
                        break
                timer.cancel()
        yield
    finally:
        with suppress(StoreError):
            lease.revoke()  # the key goes with it, when it is ours
