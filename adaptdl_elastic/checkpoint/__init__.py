"""Save and load the states that outlive a generation, in checkpoints.

A state of a script is a subclass of `State`::

    class History(adaptdl_elastic.checkpoint.State):
        def __init__(self):
            super().__init__("history")
            self.losses = []
            adaptdl_elastic.checkpoint.load_state(self)

        def save(self, fileobj):
            fileobj.write(json.dumps(self.losses).encode())

        def load(self, fileobj):
            self.losses = json.load(fileobj)

Models, optimizers, loaders and epoch loops of this library save themselves. `TensorState` is for anything
that has a state dict. Checkpoints are kept in `ADAPTDL_CHECKPOINT_PATH`, a directory that all nodes share or
`s3://bucket/prefix`; without it nothing is saved or loaded. The last three checkpoints are kept
(`ADAPTDL_CHECKPOINT_KEEP`). `docs/contributing/architecture.md` lists the guarantees of a checkpoint.

| module | question that it answers |
|---|---|
| (this one) | Which states are saved, and by which calls does a script save and load them? |
| `manager` | From which checkpoint does a generation start, and when is a new one written? |
| `state_copy` | How is a nested state dict copied, stripped of its tensors, written and read? |
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO

from adaptdl_elastic import _session, env, storage
from adaptdl_elastic._interfaces import SavedState
from adaptdl_elastic._session import Session
from adaptdl_elastic.checkpoint.manager import CheckpointError, CheckpointManager, Saved
from adaptdl_elastic.protocol.channel import STOPPED
from adaptdl_elastic.protocol.environment import HERE
from adaptdl_elastic.protocol.messages import Hints
from adaptdl_elastic.reducer import PeerFinishedError
from adaptdl_elastic.storage.locations import open_storage

if TYPE_CHECKING:
    from adaptdl_elastic.checkpoint.state_copy import HostBuffers

__all__ = [
    "CheckpointError",
    "CheckpointSaveError",
    "Saved",
    "State",
    "TensorState",
    "agree",
    "end_epoch",
    "flush",
    "load_state",
    "loaded_id",
    "restore_states",
    "save_all_states",
    "save_state",
    "snapshot_states",
    "unregister",
]

logger = logging.getLogger(__name__)

_STOP_SECONDS = 5.0  # between the ends of two replicas that are asked to stop at the same time
PATIENCE = 300.0
"""Seconds that a start waits for checkpoints that cannot be read now."""


class CheckpointSaveError(RuntimeError):
    """Raised if a checkpoint could not be saved; the previous checkpoint is unchanged."""


class State:
    """Define a part of the script's state that is saved in every checkpoint, under a unique name.

    Subclasses override `save` and `load`, and `sync` if replicas hold different parts of the state. A later
    generation finds the state by its name, so the name must be the same in every run of the script. Make
    states outside of data loops, in the same order on every replica.

    Raises:
        ValueError: the name is empty or already taken.
    """

    required = True
    """Whether to warn if a loaded checkpoint does not contain this state."""

    expires: int | None = None
    """The epoch after whose end the state is not needed any more; None: it is always needed."""

    part_of_step = False
    """Whether a step that did not commit undoes the state's changes. Always True for classes outside of this
    library. Adapters of frameworks, which are a part of this library, set it to True."""

    def __init__(self, name: str) -> None:
        if not isinstance(name, str) or not name:
            raise ValueError(f"a state needs a name that is a non-empty string, got {name!r}")
        states = _session.current().states
        if name in states:
            raise ValueError(
                f"there is already a state named {name!r}: give this one another name (models take `name=`)"
            )
        self.name = name
        if not type(self).__module__.startswith("adaptdl_elastic."):
            self.__dict__["part_of_step"] = True
        states[name] = self

    def save(self, fileobj: BinaryIO) -> None:
        """Write the state to a binary file. Called between two steps, on rank 0 for a checkpoint.

        If replicas may die without a restart, it is also called on every replica before each step, as long as
        it writes little (docs/explanation/death.md).
        """

    def load(self, fileobj: BinaryIO) -> None:
        """Read what `save` wrote. Called on every replica; the number of replicas may have changed."""

    def sync(self) -> None:
        """Make the replicas' parts consistent before rank 0 saves. Called on every replica."""

    def collect_for_save(self) -> None:
        """Collect on rank 0 what only other replicas hold. Called on every replica before a checkpoint.

        Unlike `sync` it is not called before a change in place, in which each replica keeps its part.
        """

    def snapshot(self) -> Any:
        """Return a copy that later changes do not affect, for a background save or for rolling back."""
        file = io.BytesIO()
        self.save(file)
        return file.getvalue()

    def restore(self, snapshot: Any) -> None:
        """Go back to what `snapshot` returned, in this process or in another replica."""
        self.load(io.BytesIO(snapshot))

    def write_snapshot(self, snapshot: Any, fileobj: Any) -> None:
        """Write a snapshot so that `load` can read it. Called in another thread."""
        fileobj.write(snapshot)

    def _copy_for_save(self) -> Any:
        """Return a snapshot that is passed to `_saved` later."""
        return self.snapshot()

    def _saved(self, snapshot: Any) -> None:
        """Let the next snapshot reuse the memory of a written one. Called in the writer's thread."""


class TensorState(State):
    """Define a state that is a nested dict of tensors and plain values.

    Subclasses override `state_dict` and `load_state_dict`. Files are read with `weights_only=True`: they can
    hold tensors, numbers, strings, None, and dicts, lists and tuples of these, but nothing that runs code.
    Saving anything else is a TypeError that names it. Counters, OrderedDicts (with a module's `_metadata`)
    and defaultdicts of built-in types keep their type. Tensors are loaded to the CPU.
    """

    _buffers: HostBuffers | None = None

    def state_dict(self) -> Any:
        """Return the state dict with the tensors themselves, not copies."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: Any) -> None:
        """Copy `state_dict` into the objects whose state this is."""
        raise NotImplementedError

    def save(self, fileobj: BinaryIO) -> None:
        """Write the state dict with `torch.save`."""
        self.write_snapshot(self.snapshot(), fileobj)

    def load(self, fileobj: BinaryIO) -> None:
        """Read a state dict with `torch.load(weights_only=True)`, and pass it to `load_state_dict`."""
        self.load_state_dict(self._read(fileobj))

    def _read(self, fileobj: BinaryIO) -> Any:
        from adaptdl_elastic.checkpoint.state_copy import read

        try:
            return read(fileobj)
        except pickle.UnpicklingError as error:
            raise CheckpointError(f"state {self.name!r} holds what is not tensors or plain values") from error

    def snapshot(self) -> Any:
        """Return the state dict with every tensor copied to the host; shared tensors stay shared."""
        from adaptdl_elastic.checkpoint.state_copy import copy_to_host

        return copy_to_host(self.state_dict(), self.name)

    def prepare_save(self) -> None:
        """Allocate the pinned memory of the first save in the background, on the replica that saves."""
        import torch

        from adaptdl_elastic.checkpoint.state_copy import HostBuffers

        on_gpus: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if self._buffers is None and on_gpus and _session.current().rank == 0 and env.checkpoint_path():
            self._buffers = HostBuffers()
            # what fails here fails in the save, which reports it
            with contextlib.suppress(Exception):
                self._buffers.prepare(self.state_dict())

    def _copy_for_save(self) -> Any:
        """Copy into the memory of the last save, so that no new memory must be allocated."""
        from adaptdl_elastic.checkpoint.state_copy import HostBuffers, copy_to_host

        if type(self).snapshot is not TensorState.snapshot:
            return self.snapshot()
        self._buffers = self._buffers or HostBuffers()
        return copy_to_host(self.state_dict(), self.name, self._buffers)

    def _saved(self, snapshot: Any) -> None:
        if self._buffers is not None:
            self._buffers.give(snapshot)

    def restore(self, snapshot: Any) -> None:
        """Call `load_state_dict`, which must copy the tensors: the snapshot may be used again."""
        self.load_state_dict(snapshot)

    def write_snapshot(self, snapshot: Any, fileobj: Any) -> None:
        """Write with `torch.save`, without a second copy and without zip's slow checksums.

        The manifest has checksums of its own.
        """
        from adaptdl_elastic.checkpoint.state_copy import write

        write(snapshot, fileobj)


def save_all_states(
    *,
    kind: str = "request",
    background: bool = False,
    step: int | None = None,
    done: Callable[[Saved], None] | None = None,
) -> Saved | None:
    """Save every registered state as one checkpoint. Call it on every replica, between the same steps.

    Every state's `sync` runs on every replica; rank 0 then copies the states and writes them.

    A background save with kind "periodic" is left out while an earlier one is still being written. A
    foreground save waits for an earlier one, and at most `ADAPTDL_CHECKPOINT_TIMEOUT` (120 s) altogether.
    After any failure the previous checkpoint is still there.

    Args:
        kind: Name of this kind of save in the event log: "request", "periodic", ….
        background: Whether to return as soon as the states are copied.
        step: Step to which the checkpoint belongs; None: the current one.
        done: Function that is called on rank 0 with the result, in the writer's thread, when the checkpoint
            is complete and durable.

    Returns:
        The result on rank 0 of a foreground save, if there is a checkpoint path; else None.

    Raises:
        CheckpointSaveError: the states could not be copied or written. (A background save logs a warning and
            an event instead.)
    """
    begun = time.monotonic()
    session = _session.current()
    manager = manager_of(session)
    states = dict(sorted(session.states.items()))
    for state in states.values():
        state.sync()
        if manager.storage is not None:
            state.collect_for_save()
    if session.rank != 0 or manager.storage is None:
        return None
    # carries the states of the old checkpoint over, even if nothing was loaded so far
    manager.open()
    if kind == "periodic" and background and manager.busy():
        logger.debug("periodic checkpoint left out: the one before is still being written")
        _report_overdue(session, manager, f"one is still being written to {manager.storage.path}")
        return None

    def finished(saved: Saved) -> None:
        _report_overdue(session, manager, saved.error)
        if saved.error is not None:
            logger.warning("%s%s", saved.error, "; the checkpoint before stays" if manager.has_one else "")
            session.emit("checkpoint_failed", kind=saved.kind, step=saved.step, message=saved.error)
        elif done is not None:
            done(saved)

    step, path = session.step if step is None else step, manager.storage.path
    try:
        writes = {name: (_writer(state), state.expires) for name, state in states.items()}
    except Exception as error:
        # an error of a state dict or of a user's `save` must not end the training
        message = f"cannot save a checkpoint to {path}: {storage.reason(error)}"
        finished(Saved("", path, kind, step, time.monotonic() - begun, error=message))
        if background:
            return None
        raise CheckpointSaveError(message) from error
    job = manager.submit(
        kind, step, writes, finished, generation=session.generation, replicas=session.replicas
    )
    if background:
        return None
    timeout = env.checkpoint_timeout()
    if not job.done.wait(max(timeout - (time.monotonic() - begun), 0)):
        message = f"saving a checkpoint to {path} took longer than {timeout:g} s (ADAPTDL_CHECKPOINT_TIMEOUT)"
        finished(Saved("", path, kind, step, time.monotonic() - begun, error=message))
        raise CheckpointSaveError(message)
    if job.result is None or job.result.error is not None:
        raise CheckpointSaveError(job.result.error if job.result and job.result.error else "could not save")
    return job.result


def _report_overdue(session: Session, manager: CheckpointManager, problem: str | None) -> None:
    """Report a problem for which no checkpoint was saved for two intervals; None: one has been saved."""
    interval = env.checkpoint_interval()
    overdue = problem is None or 0 < 2 * interval < time.monotonic() - manager.saved_at
    # else no loop of the library has begun, and there may be no reporter
    if overdue and session.started:
        line = f"no checkpoint was saved for longer than two intervals of {interval:g} s: {problem}"
        session.metrics.report_problem("checkpoints", problem and line)


def _writer(state: SavedState) -> Callable[[Any], None]:
    """Return a function that later writes the state as it is now."""
    snapshot = state._copy_for_save()

    def write(file: Any) -> None:
        try:
            state.write_snapshot(snapshot, file)
        finally:
            state._saved(snapshot)

    return write


def save_state(state: State, checkpoint_dir: str | os.PathLike[str], sync: bool = True) -> None:
    """Save one state as a separate file in a directory, apart from the job's checkpoints.

    Call it on every replica; `sync` runs there first unless it is False, and rank 0 writes. An older file is
    replaced only by a complete one.

    Args:
        state: the state.
        checkpoint_dir: the directory.
        sync: whether to call `state.sync`.

    Raises:
        OSError: it cannot be written.
    """
    _check_state(state)
    if sync:
        state.sync()
    state.collect_for_save()
    if _session.current().rank != 0:
        return
    directory = Path(checkpoint_dir)
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / storage.file_name(state.name)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            state.save(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def load_state(state: State, checkpoint_dir: str | os.PathLike[str] | None = None) -> bool:
    """Load a state from the checkpoint that this generation started from; return whether it was there.

    With `checkpoint_dir`, load what `save_state` wrote there.

    Raises:
        CheckpointError: there are checkpoints and none can be used, or the saved content does not fit the
            state.
    """
    _check_state(state)
    if checkpoint_dir is not None:
        path = Path(checkpoint_dir) / storage.file_name(state.name)
        if not path.is_file():
            return False
        with path.open("rb") as file:
            _load(state, file, str(path))
        return True
    manager = manager_of(_session.current())
    found, snapshot = manager.offered(state.name)
    if found:
        state.restore(snapshot)
        return True
    claimed = manager.claim(state.name)
    if claimed is None:
        if state.required and manager.loaded_id is not None:
            logger.warning(
                "checkpoint %s has no state %r: it starts from its initial value",
                manager.loaded_id,
                state.name,
            )
        return False
    with claimed:
        _load(state, claimed, f"checkpoint {manager.loaded_id}")
    return True


def _check_state(state: Any) -> None:
    if not isinstance(state, State):
        raise TypeError(f"a checkpoint.State is needed, got {type(state).__name__}: make a subclass of it")


def _load(state: State, file: IO[bytes], where: str) -> None:
    try:
        state.load(file)  # type: ignore[arg-type]
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"state {state.name!r} of {where} does not fit this script ({storage.reason(error)}): use the "
            f"script that saved it, or another checkpoint path to start afresh"
        ) from error


def loaded_id() -> str | None:
    """Return the id of the checkpoint that this generation started from; None if there was none."""
    return manager_of(_session.current()).open()


def agree(broadcast: Callable[[Any], Any]) -> str | None:
    """Make all replicas start from the checkpoint that rank 0 chooses; return its id.

    Args:
        broadcast: Function that returns rank 0's argument on every replica.

    Raises:
        CheckpointError: rank 0 cannot choose (raised on every replica), or this replica does not see the
            checkpoint that rank 0 chose.
    """
    session = _session.current()
    manager = manager_of(session)
    manager.waits = True
    try:
        # a stop that was asked for earlier found nothing to interrupt; a newcomer loads nothing
        if session.stop_asked and session.newcomer is None:
            raise SystemExit(STOPPED)
        return _agree(manager, session.rank, broadcast)
    finally:
        manager.waits = False


def _agree(manager: CheckpointManager, rank: int, broadcast: Callable[[Any], Any]) -> str | None:
    if rank == 0:
        try:
            chosen, problem = manager.open(), None
        except CheckpointError as error:
            chosen, problem = None, str(error)
        broadcast((chosen, problem))
        if problem is not None:
            raise CheckpointError(problem)
        return chosen
    try:
        chosen, problem = broadcast(None)
    except PeerFinishedError:
        # a stop has ended rank 0; this replica's own comes as a signal, which ends the wait
        threading.Event().wait(_STOP_SECONDS)
        raise
    if problem is not None:
        raise CheckpointError(f"rank 0: {problem}")
    if chosen is None:
        manager.decline()
        return None
    return manager.open(exactly=chosen)


def end_epoch(epoch: int) -> None:
    """Drop the states that belong to `epoch` or an earlier one, since they are not needed any more."""
    session = _session.current()
    for name, state in list(session.states.items()):
        if state.expires is not None and state.expires <= epoch:
            del session.states[name]
    manager = manager_of(session)
    manager.expire(epoch)
    manager.tell_unclaimed()


def unregister(state: State) -> None:
    """Remove a state from future checkpoints; do nothing if it was removed before."""
    states = _session.current().states
    if states.get(state.name) is state:
        del states[state.name]


def flush(timeout: float | None = None) -> bool:
    """Wait until background saves are on disk; return False if `timeout` seconds did not suffice."""
    manager = _session.current().checkpoints
    return manager.flush(timeout) if isinstance(manager, CheckpointManager) else True


def snapshot_states(names: Iterable[str] | None = None) -> dict[str, Any]:
    """Return copies in memory of the states called `names` (None: all), without calling `sync`."""
    states = _session.current().states
    return {name: states[name].snapshot() for name in (states if names is None else names)}


def restore_states(snapshots: Mapping[str, Any]) -> None:
    """Put states back to `snapshots` of this process or of another replica.

    A state that is not registered yet is restored when it is loaded.
    """
    session = _session.current()
    later = {}
    for name, snapshot in snapshots.items():
        state = session.states.get(name)
        if state is None:
            later[name] = snapshot
        else:
            state.restore(snapshot)
    if later:
        manager_of(session).offer(later)


def manager_of(session: Session) -> CheckpointManager:
    """Return the checkpoint manager of a session."""
    manager = session.checkpoints
    if manager is None:
        path = env.checkpoint_path()
        manager = session.checkpoints = CheckpointManager(
            open_storage(path) if path else None,
            recorded=HERE.checkpoint_id,
            job=session.job,
            keep=env.checkpoint_keep(),
            writes=session.rank == 0,
            wait=env.checkpoint_wait(),
            patience=PATIENCE,
            tell=partial(_tell, session),
        )
    assert isinstance(manager, CheckpointManager)
    return manager


def _tell(session: Session, problem: str) -> None:
    """Report what a start waits for, in place of the job's hints; the next report replaces it."""
    sizes = dict.fromkeys(("init_batch_size", "batch_size", "atomic_bsz"), 0)
    who = {name: getattr(session, name) for name in ("job", "generation", "nodes", "replicas")}
    if session.rank == 0:
        session.send(Hints({**who, **sizes, "warnings": [problem] if problem else []}))
