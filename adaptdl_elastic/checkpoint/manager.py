"""Choose the checkpoint to start from, return its states, and write new ones in the background.

There is one manager per session, on every replica; only rank 0's writes. Three rules:

* A generation starts from *one* complete checkpoint, the newest one that is intact. If there are checkpoints
  and none is intact, or the one that the store recorded cannot be seen, that is an error: training never
  starts from scratch by accident.
* A state that has not been asked for yet is carried over into every new checkpoint, because the part of the
  script that will ask for it may not have run yet.
* The training step only waits for the copy of the states. A problem with the disk is reported (by a log line
  and an event), leaves the previous checkpoint unchanged, and does not stop training.
"""

from __future__ import annotations

import io
import logging
import queue
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, BinaryIO
from uuid import UUID

from adaptdl_elastic.protocol.uncaught_error import chain
from adaptdl_elastic.storage import (
    ChecksumWriter,
    DamagedError,
    Manifest,
    Storage,
    StorageError,
    Writing,
    generation_number,
    new_id,
    reason,
    sequence_number,
)

logger = logging.getLogger(__name__)

HISTORY = 256
"""Number of earlier ids in a manifest."""

# between two looks for a checkpoint that is being copied
_LOOK_SECONDS = 0.05
# between two looks for a checkpoint that cannot be read: the first pause and the longest
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 30.0

Write = Callable[[ChecksumWriter], None]


class CheckpointError(RuntimeError):
    """Raised if no checkpoint is usable, and starting from scratch would lose training."""


@dataclass(frozen=True)
class Saved:
    """Hold the result of one save. `error` is None for a complete checkpoint."""

    id: str
    path: str
    kind: str
    step: int
    seconds: float = 0.0
    bytes: int = 0
    error: str | None = None


@dataclass
class _Job:
    """Hold a save whose states have been copied. It waits for the writer thread."""

    kind: str
    step: int
    generation: int
    replicas: int
    # state → (its writer, epoch after which it expires)
    writes: Mapping[str, tuple[Write, int | None]]
    # states that had not been loaded when the save was submitted
    carried: Mapping[str, _Unclaimed]
    on_done: Callable[[Saved], None]
    begun: float
    done: threading.Event = field(default_factory=threading.Event)
    result: Saved | None = None


class _Unclaimed:
    """Hold a saved state that the script has not loaded yet. The last holder to release it closes its file.

    Holders are the manager, until the state is claimed or expires, and every save that carries it over.
    """

    def __init__(self, file: BinaryIO, expires: int | None, crc32: tuple[int, ...]) -> None:
        self.expires, self.crc32 = expires, crc32
        self._file = file
        self._holders = 1
        self._counting, self._reading = threading.Lock(), threading.Lock()

    def hold(self) -> None:
        """Add a holder."""
        with self._counting:
            self._holders += 1

    def let_go(self) -> None:
        """Remove a holder; the last one closes the file."""
        with self._counting:
            self._holders -= 1
            last = not self._holders
        if last:
            self._file.close()

    def copy_to(self, file: Any) -> None:
        """Write the whole content to `file`."""
        with self._reading:
            self._file.seek(0)
            shutil.copyfileobj(self._file, file, 1 << 20)
            self._file.seek(0)

    def take(self) -> BinaryIO:
        """Return the content to a holder and remove that holder. The caller closes the returned file."""
        with self._counting:
            if self._holders == 1:
                return self._file
        # a save still reads the file
        copy = io.BytesIO()
        self.copy_to(copy)
        self.let_go()
        copy.seek(0)
        return copy


class CheckpointManager:
    """Load and save the checkpoints of one session.

    Args:
        storage: Storage of the checkpoints; None: nothing is loaded or saved.
        recorded: Id of the checkpoint that the store records.
        job: Name of the job.
        keep: Number of checkpoints to keep.
        writes: Whether this replica saves.
        wait: Seconds to wait for a checkpoint that this generation has to start from and that is not there
            yet: where nodes share no directory, their services copy it.
        patience: Seconds to wait for a place that cannot be read now, which is no damage.
        tell: Function that is told, while it waits, what for, and "" when that is over.
        clock: Function that returns monotonic seconds.
        pause: Function that sleeps for so many seconds.
    """

    def __init__(
        self,
        storage: Storage | None,
        *,
        recorded: str | None = None,
        job: str = "",
        keep: int = 3,
        writes: bool = True,
        wait: float = 0.0,
        patience: float = 0.0,
        tell: Callable[[str], None] = lambda problem: None,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        if keep < 1:
            raise ValueError(f"the number of checkpoints to keep must be at least 1, got {keep}")
        self.storage = storage
        self._recorded = recorded or None
        self._job, self._keep, self._writes = job, keep, writes
        self._wait, self._clock = wait, clock
        self._patience, self._tell, self._pause = patience, tell, pause
        # whether replicas choose their first checkpoint, which may take minutes: a stop interrupts it
        self.waits = False
        # guards _unclaimed and _history
        self._lock = threading.Lock()
        self._opened = False
        self._manifest: Manifest | None = None
        self._unclaimed: dict[str, _Unclaimed] = {}
        self._memory: dict[str, Any] = {}
        self._history: tuple[str, ...] = ()
        self._damaged: set[str] = set()
        # highest checkpoint number when this session began
        self._number_at_start: int | None = None
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._pending: list[_Job] = []
        self._thread: threading.Thread | None = None
        self._swept = False
        self._told = self._told_uncleaned = False
        # when the last checkpoint was saved, or this session began
        self.saved_at = clock()
        # last epoch that has ended
        self.ended = -1

    # Loading

    @property
    def loaded_id(self) -> str | None:
        """Id of the checkpoint that this generation started from; None: it started from scratch."""
        return self._manifest.id if self._manifest else None

    def open(self, exactly: str | None = None) -> str | None:
        """Choose and verify a checkpoint at the first call; return its id, or None if there is none.

        Args:
            exactly: Id of the only acceptable checkpoint, which rank 0 has chosen; None: any.

        Raises:
            CheckpointError: something was saved before and cannot be used.
        """
        if self._opened:
            if exactly is not None and exactly != self.loaded_id:
                raise CheckpointError(
                    f"this replica has loaded checkpoint {self.loaded_id} and rank 0 {exactly}: "
                    f"call init_process_group before anything that loads a state"
                )
            return self.loaded_id
        self._opened = True
        if self.storage is None:
            if self._recorded:
                raise CheckpointError(
                    f"checkpoint {self._recorded} is recorded for this job, and ADAPTDL_CHECKPOINT_PATH "
                    f"is not set"
                )
            return None
        until, pause, problem = self._clock() + self._patience, _PAUSE_SECONDS, ""
        while True:
            try:
                found = self._choose(self.storage, exactly)
            except CheckpointError as error:
                if not getattr(error.__cause__, "may_pass", False) or self._clock() >= until:
                    raise
                if not problem:
                    problem = f"{error.__cause__}: waiting for it, {self._patience:g} s at most"
                    logger.warning("%s", problem)
                    self._tell(problem)
                self._pause(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
                continue
            if problem:
                logger.warning("%s can be read again", self.storage.path)
                self._tell("")
            return found

    def _choose(self, storage: Storage, exactly: str | None) -> str | None:
        """Verify the candidates, and return the first one that is intact."""
        candidates = self._candidates(storage, exactly)
        # report it now, not at the first save
        if self._writes:
            try:
                storage.check_writable()
            except StorageError as error:
                # elsewhere training would start from scratch
                remedy = "make it writable" if candidates else "choose another ADAPTDL_CHECKPOINT_PATH"
                raise CheckpointError(f"{error}; {remedy}") from error
        for checkpoint_id in candidates:
            try:
                self._take(storage, checkpoint_id)
            except DamagedError as error:
                self._damaged.add(checkpoint_id)
                logger.warning(
                    "checkpoint %s in %s is damaged (%s): falling back to the one before",
                    checkpoint_id,
                    storage.path,
                    error,
                )
            # not damage: reading an older checkpoint might succeed, and would lose training
            except StorageError as error:
                raise CheckpointError(f"{error}: not going on from an older checkpoint") from error
            else:
                self._tell_whose(storage)
                return checkpoint_id
        if candidates:
            raise CheckpointError(
                f"every checkpoint in {storage.path} is damaged ({', '.join(candidates)}): restore one "
                f"from a copy, or remove them to start afresh"
            )
        return None

    def _candidates(self, storage: Storage, exactly: str | None) -> list[str]:
        """Return the candidates, newest first; CheckpointError if a checkpoint that must exist does not."""
        until = self._clock() + self._wait
        try:
            ids = storage.ids()
            while (missing := self._is_missing(storage, ids, exactly)) and self._clock() < until:
                time.sleep(_LOOK_SECONDS)
                ids = storage.ids()
        except StorageError as error:
            raise CheckpointError(f"{error}: not starting afresh") from error
        self._number_at_start = _highest(ids)
        if exactly is not None:
            if missing:
                raise CheckpointError(
                    f"rank 0 goes on from checkpoint {exactly}, and this replica does not see it in "
                    f"{storage.path} (it sees {', '.join(ids) or 'none'}): "
                    f"the path must be shared by all nodes"
                )
            return [exactly]
        if missing:
            raise CheckpointError(
                f"checkpoint {self._recorded} is recorded for this job and is not in {storage.path} "
                f"(found: {', '.join(ids) or 'none'}): the path must be shared by all nodes (a network "
                f"directory or s3://bucket/prefix), or start the job under another name to begin afresh"
            )
        return self._newest_first(ids)

    def _is_missing(self, storage: Storage, ids: list[str], exactly: str | None) -> bool:
        """Return whether the checkpoint that rank 0 has chosen or the store records has not been found."""
        if exactly is not None:
            return exactly not in ids
        return bool(self._recorded) and self._recorded not in ids and not self._descends(storage, ids)

    def _newest_first(self, ids: list[str]) -> list[str]:
        """Return ids by their numbers; those that an older generation saved late follow the recorded one.

        Such a generation had lost its connection and did not know that a newer one had replaced it.
        """
        recorded = self._recorded or ""
        number, generation = sequence_number(recorded), generation_number(recorded)
        late = [id for id in ids if sequence_number(id) > number and generation_number(id) < generation]
        for checkpoint_id in late:
            logger.warning(
                "checkpoint %s is passed over: generation %d saved it after %s of generation %d",
                checkpoint_id,
                generation_number(checkpoint_id),
                recorded,
                generation,
            )

        def age(checkpoint_id: str) -> tuple[int, bool, str]:
            is_late = checkpoint_id in late
            return number if is_late else sequence_number(checkpoint_id), not is_late, checkpoint_id

        return sorted(ids, key=age, reverse=True)

    def _descends(self, storage: Storage, ids: list[str]) -> bool:
        """Return whether a checkpoint here was saved after the recorded one, which is no longer kept."""
        for checkpoint_id in reversed(ids):
            with suppress(DamagedError):
                if self._recorded in storage.manifest(checkpoint_id).history:
                    return True
        return False

    def _take(self, storage: Storage, checkpoint_id: str) -> None:
        manifest = storage.manifest(checkpoint_id)
        if manifest.id != checkpoint_id:
            raise DamagedError(f"its manifest belongs to {manifest.id}")
        files: dict[str, _Unclaimed] = {}
        try:
            for name, entry in manifest.states.items():
                files[name] = _Unclaimed(storage.open(checkpoint_id, entry), entry.expires, entry.crc32)
        except BaseException:
            for opened in files.values():
                opened.let_go()
            raise
        self._manifest, self._unclaimed = manifest, files
        self._history = (*manifest.history, checkpoint_id)[-HISTORY:]

    def _tell_whose(self, storage: Storage) -> None:
        assert self._manifest is not None
        logger.info("going on from checkpoint %s in %s", self._manifest.id, storage.path)
        whose = self._manifest.job
        if self._writes and self._job != whose and _is_name(self._job) and _is_name(whose):
            logger.warning(
                "checkpoint %s in %s is of job %s, and this is job %s, which goes on from it: two jobs that "
                "run at a time need an ADAPTDL_CHECKPOINT_PATH each",
                self._manifest.id,
                storage.path,
                whose,
                self._job,
            )

    def decline(self) -> None:
        """Start without a checkpoint, as rank 0 does."""
        if self._opened and self._manifest is not None:
            raise CheckpointError(
                f"rank 0 starts afresh and this replica has loaded checkpoint {self.loaded_id}: "
                f"the checkpoint path must be shared by all nodes"
            )
        self._opened = True

    def offer(self, snapshots: Mapping[str, Any]) -> None:
        """Keep snapshots from which states of these names are restored when they register."""
        self._memory.update(snapshots)

    def offered(self, name: str) -> tuple[bool, Any]:
        """Return and remove what `offer` kept for `name`."""
        return (True, self._memory.pop(name)) if name in self._memory else (False, None)

    def claim(self, name: str) -> BinaryIO | None:
        """Return a file with the saved content of a state; None if there is none. The caller closes it.

        A second call for the same state returns None.
        """
        self.open()
        with self._lock:
            found = self._unclaimed.pop(name, None)
        return found.take() if found else None

    def expire(self, epoch: int) -> None:
        """Forget unclaimed states that belong to `epoch` or an earlier one."""
        with self._lock:
            self.ended = max(self.ended, epoch)
            self._drop_expired()

    def _drop_expired(self) -> None:
        gone = [n for n, u in self._unclaimed.items() if u.expires is not None and u.expires <= self.ended]
        for name in gone:
            self._unclaimed.pop(name).let_go()

    def unclaimed(self) -> list[str]:
        """Return the states in the checkpoint that the script has not asked for so far."""
        with self._lock:
            return sorted(self._unclaimed)

    def tell_unclaimed(self) -> None:
        """Log once, after the first epoch, which saved states the script has not asked for."""
        names = self.unclaimed()
        if names and not self._told:
            self._told = True
            logger.warning(
                "checkpoint %s has states that this script has not asked for: %s; they are kept",
                self.loaded_id,
                ", ".join(names),
            )

    # Saving

    @property
    def has_one(self) -> bool:
        """Whether there is a checkpoint that this session has loaded or saved."""
        return bool(self._history)

    def busy(self) -> bool:
        """Return whether a save is still being written."""
        return any(not job.done.is_set() for job in self._pending)

    def submit(
        self,
        kind: str,
        step: int,
        writes: Mapping[str, tuple[Write, int | None]],
        on_done: Callable[[Saved], None],
        *,
        generation: int = 0,
        replicas: int = 1,
    ) -> _Job:
        """Queue a save behind those that are being written; return at once."""
        # now, since the script may claim some of them before they are written
        with self._lock:
            self._drop_expired()
            carried = {name: u for name, u in self._unclaimed.items() if name not in writes}
            for unclaimed in carried.values():
                unclaimed.hold()
        job = _Job(kind, step, generation, replicas, writes, carried, on_done, self._clock())
        self._pending = [other for other in self._pending if not other.done.is_set()] + [job]
        if self._thread is None:
            # a daemon, so that a disk that hangs does not keep the process from ending; `flush` waits
            # properly
            self._thread = threading.Thread(target=self._run, name="adaptdl-checkpoint", daemon=True)
            self._thread.start()
        self._queue.put(job)
        return job

    def flush(self, timeout: float | None = None) -> bool:
        """Wait for pending saves; return False if `timeout` seconds did not suffice."""
        deadline = None if timeout is None else self._clock() + timeout
        for job in list(self._pending):
            if not job.done.wait(None if deadline is None else max(deadline - self._clock(), 0)):
                return False
        return True

    def close(self) -> None:
        """Close open files, and end the thread after its pending writes."""
        self._queue.put(None)
        with self._lock:
            for unclaimed in self._unclaimed.values():
                unclaimed.let_go()
            self._unclaimed.clear()

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                job.result = self._write(job)
                job.on_done(job.result)
            except Exception:
                # the thread survives errors of callbacks
                logger.exception("after saving checkpoint (%s)", job.kind)
            finally:
                for unclaimed in job.carried.values():
                    unclaimed.let_go()
                job.done.set()

    def _write(self, job: _Job) -> Saved:
        assert self.storage is not None
        path = self.storage.path
        try:
            manifest = self._write_to(self.storage, job)
        except Exception as error:
            # any error of a disk, a network or a serialiser
            message = f"cannot save a checkpoint to {path}: {reason(root_cause(error))}"
            logger.debug("%s", message, exc_info=True)
            return Saved("", path, job.kind, job.step, self._clock() - job.begun, error=message)
        # too many old checkpoints do not make the new one invalid
        self._clean(self._prune)
        return Saved(manifest.id, path, job.kind, job.step, self._clock() - job.begun, manifest.size)

    def _write_to(self, storage: Storage, job: _Job) -> Manifest:
        if not self._swept:
            self._clean(lambda storage: storage.sweep())
            self._swept = True
        ids = storage.ids()
        self._check_generation(ids, job.generation)
        self._follow(storage, ids)
        checkpoint_id = new_id([*ids, *self._history[-1:]], job.generation)
        writing = storage.begin(checkpoint_id)
        try:
            for name, (write, expires) in job.writes.items():
                with writing.state(name, expires) as file:
                    write(file)
            self._carry_over(writing, job)
            manifest = Manifest(
                id=checkpoint_id,
                states=writing.entries,
                kind=job.kind,
                job=self._job,
                generation=job.generation,
                step=job.step,
                replicas=job.replicas,
                created=time.time(),
                history=self._history,
            )
            writing.commit(manifest)
        except BaseException:
            writing.abandon()
            raise
        self._history = (*self._history, checkpoint_id)[-HISTORY:]
        self.saved_at = self._clock()
        return manifest

    def _check_generation(self, ids: list[str], generation: int) -> None:
        """Raise StorageError where a later generation has saved since this process began."""
        # this replica joined running ones, and has loaded no checkpoint
        if self._number_at_start is None:
            self._number_at_start = _highest(ids)
        for checkpoint_id in ids:
            later = generation_number(checkpoint_id) > generation
            if later and sequence_number(checkpoint_id) > self._number_at_start:
                raise StorageError(
                    f"generation {generation_number(checkpoint_id)} has saved there, and this is generation "
                    f"{generation}, which it has replaced"
                )

    def _follow(self, storage: Storage, ids: list[str]) -> None:
        """Continue the history that another replica, whose place this one has taken, has written."""
        if ids and ids[-1] not in self._history and ids[-1] not in self._damaged:
            with suppress(DamagedError):
                self._history = (*storage.manifest(ids[-1]).history, ids[-1])[-HISTORY:]

    def _carry_over(self, writing: Writing, job: _Job) -> None:
        for name, unclaimed in job.carried.items():
            with writing.state(name, unclaimed.expires) as file:
                unclaimed.copy_to(file)
            # never give damaged data new checksums
            if writing.entries[name].crc32 != unclaimed.crc32:
                del writing.entries[name]
                with self._lock:
                    if self._unclaimed.get(name) is unclaimed:
                        self._unclaimed.pop(name).let_go()
                logger.error("state %r has rotted since it was opened: left out of checkpoints", name)

    def _clean(self, clean: Callable[[Storage], None]) -> None:
        """Remove what is not needed any more; report a failure once."""
        assert self.storage is not None
        try:
            clean(self.storage)
        except Exception as error:
            level = logging.DEBUG if self._told_uncleaned else logging.WARNING
            self._told_uncleaned = True
            logger.log(level, "old checkpoints stay: %s", reason(error))

    def _prune(self, storage: Storage) -> None:
        """Remove what is older than the newest `keep` checkpoints that seem intact.

        For that their manifests are read, not their states. While there are fewer, nothing is removed: a
        directory without a manifest may be one that a user is copying back.
        """
        ids, whole = storage.ids(), 0
        for position in reversed(range(len(ids))):
            whole += self._seems_whole(storage, ids[position])
            if whole == self._keep:
                for checkpoint_id in ids[:position]:
                    storage.remove(checkpoint_id)
                return

    def _seems_whole(self, storage: Storage, checkpoint_id: str) -> bool:
        """Return whether neither `open` nor its manifest has shown a problem with it."""
        if checkpoint_id in self._damaged:
            return False
        try:
            return storage.manifest(checkpoint_id).id == checkpoint_id
        except DamagedError:
            return False


def root_cause(error: BaseException) -> BaseException:
    """Return the cause of an error that tells a user most.

    That is a StorageError itself, else the OSError that caused it, for example for a full disk.
    """
    causes = [] if isinstance(error, StorageError) else chain(error)
    return next((cause for cause in causes if isinstance(cause, OSError)), error)


def _highest(ids: list[str]) -> int:
    """Return the highest number of a checkpoint."""
    return max((sequence_number(checkpoint_id) for checkpoint_id in ids), default=0)


def _is_name(job: str) -> bool:
    """Return whether a user chose the name, and not torchrun (nothing, or a random UUID)."""
    with suppress(ValueError):
        UUID(job)
        return False
    return job not in ("", "none")
