"""Decide what to start when a job's command is given again after a run of the job has ended.

The same command may be given again without intent: a systemd unit starts at a reboot, a node boots late. A
job that is done must not be trained again by that. The store knows how a run ended, but its data may be gone,
and the private store of `--standalone` ends with its job.

So the agents of a run also write a note beside its checkpoints (`checkpoint_archive`) with the job's status.
`find` reads both, and `refuse` raises `JobEndedError` if nothing is to be started:

========================  =====================  ===================  =====================================
the last run              the same command       with ``--once``      with ``--anew``
========================  =====================  ===================  =====================================
is done                   reports it, exits 0    the same             new run, checkpoints moved aside
was stopped or failed     continues from the     reports it, exits    new run, checkpoints moved aside
                          checkpoint             with its exit code
is under way              joins or continues it  the same             joins it; new run if it has no agent
========================  =====================  ===================  =====================================

If a run is done, another script or other arguments are refused: the user may want to train them, or may have
made a mistake. With ``--extend`` another run with these arguments begins from the last checkpoint of the run
that is done. When that run is done too, the same command starts nothing.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from adaptdl_elastic.agent.cluster import checkpoint_archive
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import (
    JobSpec,
    JobState,
    JobStatus,
    MalformedRecordError,
    decode,
    encode,
)
from adaptdl_elastic.rendezvous.store.base import Store, read_record
from adaptdl_elastic.storage import StorageError


class JoinError(RuntimeError):
    """This agent cannot take part; the message says why, and what to do."""


class JobEndedError(Exception):
    """Nothing is to be started because the job has ended; the message says how and when."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class EndedRun:
    """The last run of a job, if it has ended; the note beside its checkpoints is this record."""

    job: str
    run: str
    state: JobState
    checkpoint_path: str
    reason: str = ""
    exit_code: int = 0
    time: float | None = None  # wall clock
    command: tuple[str, ...] = ()
    profile_key: str = ""  # JobSpec.profile_key of the run; "": unknown
    number: int = 0  # JobSpec.number of the run


@dataclass(frozen=True)
class StartOptions:
    """Options of the command line for a job that has ended."""

    once: bool = False
    anew: bool = False
    follows: str = ""  # the run that is to be followed by another one, however it has ended
    extend: bool = False


NO_OPTIONS = StartOptions()


def write_note(
    spec: JobSpec, status: JobStatus, path: str, say: Callable[[str], None], *, even_if_empty: bool
) -> None:
    """Write a note beside the checkpoints in `path` that a run has ended.

    Args:
        spec: specification of the run.
        status: its last status.
        path: directory or URL of its checkpoints.
        say: prints a line for the user if the note cannot be written.
        even_if_empty: write it even if there are no checkpoints.
    """
    note = replace(_ended(spec, status), time=status.ended or time.time())
    try:
        # a file of another meaning stays
        _noted(path)
        checkpoint_archive.kept(path).write_note(encode(note).encode(), even_if_empty=even_if_empty)
    except (JoinError, StorageError) as error:
        say(f"that the job has ended cannot be noted in {path}: {error}; only the store knows it now")


def of_status(spec: JobSpec, status: JobStatus | None) -> EndedRun | None:
    """Return how a run ended, or None if its status does not say that it has."""
    if status is None or status.run != spec.run or not status.state.ended:
        return None
    return _ended(spec, status)


def _ended(spec: JobSpec, status: JobStatus) -> EndedRun:
    how = (status.state, spec.checkpoint_path, status.reason, status.process_exit_code, status.ended)
    return EndedRun(spec.job, spec.run, *how, spec.command, spec.profile_key, spec.number)


def fail(store: Store, keys: Keys, job: str, run: str, reason: str, now: float) -> None:
    """Write that a run has failed before any replica of it trained, unless its status says that it has ended.

    Args:
        store: the cluster's store.
        keys: the keys of the cluster.
        job: the job's name.
        run: the run.
        reason: why.
        now: the time, in seconds since the epoch.

    Raises:
        StoreError: the store fails.
    """
    key = keys.job(job, "status")
    found = store.get(key)
    status = read_record(JobStatus, found)
    if status is None or status.run != run or not status.state.ended:
        failed = JobStatus(job, run, JobState.FAILED, reason=reason, exit_code=1, ended=now)
        store.compare_and_swap(key, encode(failed), 0 if found is None else found.mod_revision)


def find(store: Store, keys: Keys, job: str, path: str, busy: Callable[[], bool]) -> EndedRun | None:
    """Return the last run of a job if it has ended, else None.

    Args:
        store: the cluster's store.
        keys: the keys of the cluster.
        job: the job's name.
        path: where its checkpoints would be.
        busy: returns whether the job has agents. Then a note has no effect: another run is under way.

    Raises:
        JoinError: the note cannot be understood.
        StorageError: the place of the checkpoints cannot be read.
    """
    spec = read_record(JobSpec, store.get(keys.job(job, "spec")))  # `join_job` reports a malformed one
    status = read_record(JobStatus, store.get(keys.job(job, "status")))
    ended = None if spec is None else of_status(spec, status)
    if ended is None and busy():
        return None
    note = _noted(path)
    if note is None or ended is not None:
        return ended
    # an agent that was cut off for longer than its lease may write its note after another run has begun
    late = spec is not None and spec.checkpoint_path == path and note.number < spec.number
    return None if late else note


def refuse(ended: EndedRun, fresh: JobSpec, options: StartOptions) -> None:
    """Raise if a job that has ended is not to be started; else return.

    Raises:
        JobEndedError: it is done, or it has ended in another way and `--once` is given.
        JoinError: it is done, and this is another command.
    """
    if options.anew or ended.run == (options.follows or None):
        return
    if ended.state is not JobState.DONE and not options.once:
        return
    when = "" if ended.time is None else time.strftime(" at %Y-%m-%d %H:%M:%S", time.localtime(ended.time))
    where = f"run {ended.run}{when}; checkpoints: {ended.checkpoint_path or 'none'}"
    if ended.state is JobState.DONE:
        same = ended.job == fresh.job and ended.profile_key == fresh.profile_key
        if options.extend and not (same and fresh.profile_key):
            return
        what = f"job {ended.job!r} is done: {ended.reason or 'every replica ended well'} ({where})"
        if not options.once:
            _refuse_another_command(ended, fresh, what)
        text = f"{what}. Nothing is started; --anew trains again and puts these checkpoints aside"
        raise JobEndedError(text, 0)
    reason = ended.reason.removeprefix(f"{ended.state.value}: ") or "no reason is known"
    raise JobEndedError(
        f"job {ended.job!r} has {ended.state.value}: {reason} ({where}). Nothing is started because of "
        f"--once; without it the job goes on from its last checkpoint",
        ended.exit_code,
    )


def _refuse_another_command(ended: EndedRun, fresh: JobSpec, what: str) -> None:
    remedy = (
        "--extend continues from its last checkpoint, --anew starts from nothing and puts these checkpoints "
        "aside, another --rdzv-id starts another job"
    )
    if ended.job != fresh.job:
        raise JoinError(
            f"{what}, and these are its checkpoints: give job {fresh.job!r} a --checkpoint-path of its own, "
            f"--extend to continue from the last one, or --anew to put them aside"
        )
    if not ended.profile_key or not fresh.profile_key or ended.profile_key == fresh.profile_key:
        return
    theirs, ours = shlex.join(ended.command), shlex.join(fresh.command)
    if theirs == ours:
        raise JoinError(f"{what}; it ran another version of `{ours}`: {remedy}")
    raise JoinError(f"{what}; it ran `{theirs}`, and this is `{ours}`: {remedy}")


@contextmanager
def turn_to_start(
    store: Store,
    keys: Keys,
    fresh: JobSpec,
    options: StartOptions,
    busy: Callable[[], bool],
    say: Callable[[str], None],
) -> Iterator[None]:
    """Let this agent register for the job and join or begin it, unless the job has ended.

    If a run of the job has ended, a lock lets in one agent at a time: the first one moves the checkpoints
    aside and begins another run, and the next one finds that run under way.

    Args:
        store: the cluster's store.
        keys: the keys of the cluster.
        fresh: the job as this agent would begin it.
        options: options of the command line.
        busy: returns whether the job has agents.
        say: prints a line for the user.

    Raises:
        JobEndedError: nothing is to be started.
        JoinError: the job is done, and this is another command, or its note cannot be understood.
        StorageError: the checkpoints cannot be read or moved.
    """

    def ended() -> EndedRun | None:
        return find(store, keys, fresh.job, fresh.checkpoint_path, busy)

    with ExitStack() as stack:
        if options.anew or ended() is not None:
            stack.enter_context(checkpoint_archive.exclusive(store, f"{keys.root}archiving/{fresh.job}"))
            if (found := ended()) is not None:
                refuse(found, fresh, options)
            # agents that are still registered when the job has ended are about to exit
            if options.anew and (found is not None or not busy()):
                archive = checkpoint_archive.move_aside(fresh.checkpoint_path)
                if archive is not None:
                    say(f"--anew: what was in {fresh.checkpoint_path} is kept in {archive}")
            elif found is not None:
                checkpoint_archive.kept(fresh.checkpoint_path).withdraw_note()
        yield


def _noted(path: str) -> EndedRun | None:
    """Return the run that the note in `path` describes; JoinError if it describes none."""
    note = checkpoint_archive.kept(path).read_note()
    if note is None:
        return None
    try:
        return replace(decode(EndedRun, note.decode(errors="replace")), checkpoint_path=path)
    except MalformedRecordError:
        raise JoinError(
            f"{path}/{checkpoint_archive.NOTE} does not say how the last run ended, and stays as it is: "
            f"give it another name, and the job goes on from its checkpoint"
        ) from None
