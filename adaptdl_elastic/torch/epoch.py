"""Run epoch loops that continue at their position after a restart.

    for epoch in remaining_epochs_until(30):
        for inputs, targets in training_loader:
            ...
        for inputs, targets in validation_loader:
            ...
        lr_scheduler.step()

After a restart the script runs again from its first line. The epoch loop then begins with the epoch that was
running, and the data loop that was running continues at its sample. The body of a data loop that had finished
runs once, without effect (`adaptdl_elastic.torch.batch_counts`), so that variables which it assigns exist
after the loop.

So two parts of a script may run again: code *before* an epoch loop, and code of the epoch *before* the data
loop that was running. Code that must run once per epoch, such as `lr_scheduler.step()`, belongs at the end of
the epoch's body, after its last data loop. An epoch is finished when its body has ended, also by `continue`.
`break` leaves the epoch unfinished.

A data loop that was left by `break` is finished as soon as the script reaches the next data loop or the end
of the epoch. An exception that leaves both loops finishes neither. The next epoch loop, in this process or
after a restart from a later checkpoint, continues with the batch in which the exception was raised. Gradients
of an accumulation window that was left in the middle are dropped.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import Any, BinaryIO

from adaptdl_elastic import _codec, _frames, checkpoint, collective, env
from adaptdl_elastic._checks import integer, whole
from adaptdl_elastic._values import RetryDataLoop
from adaptdl_elastic.protocol.messages import EpochsFinished
from adaptdl_elastic.torch._bootstrap import current_session
from adaptdl_elastic.torch._data.loader import AdaptiveDataLoaderHelper
from adaptdl_elastic.torch._data.registry import current_dataloader, registry
from adaptdl_elastic.torch._elastic import script_objects
from adaptdl_elastic.torch._runtime.position import OUTSIDE, UNKNOWN_START, script_position

__all__ = [
    *("continue_at", "current_epoch", "finished_epochs", "once_per_epoch", "progress"),
    *("remaining_epochs_until", "steps"),
]

_NOTHING_LEFT = (
    "remaining_epochs_until({0}) at {1} has no epoch left: it counts the epochs of the whole script, and an "
    "earlier loop has run as many. A loop over another model needs a count of its own: "
    "remaining_epochs_until({0}, name=...)"
)


_COUNTED_BEFORE = (
    "remaining_epochs_until({0}, name={2!r}) at {1} has no epoch left: an earlier loop of this name ran as "
    "many. Give the loop over another model another name"
)


def remaining_epochs_until(epoch: int, name: str | None = None) -> Iterator[int]:
    """Iterate over the numbers of the unfinished epochs below `epoch`, also after restarts.

    A second loop continues the count: `remaining_epochs_until(10)` followed by
    `remaining_epochs_until(15)` runs epochs 0 to 9, then 10 to 14. Loops with a name continue the count of
    that name, which begins at 0: give one where several models are trained after each other.

    Args:
        epoch: Number of epochs that are finished when the loop ends, 0 or more.
        name: Name of the count, such as "fold 2"; None: the count of all epochs of the script.

    Raises:
        ValueError: `epoch` is negative or not an integer.
        RuntimeError: another epoch loop is still running.
    """
    until = integer(epoch)
    if until is None or until < 0:
        raise ValueError(f"remaining_epochs_until({epoch!r}): give the number of epochs, 0 or more")
    return _counted(until, name)


def _counted(until: int, name: str | None) -> Iterator[int]:
    state = script_position()
    declared, what = state.until or 0, f"{until} epochs"
    if name is not None:
        own = state.counts.get(name, 0)
        if 0 < until <= own:
            current_session().metrics.report_problem(
                "an epoch loop", _COUNTED_BEFORE.format(until, _frames.script_line(), name)
            )
        state.counts[name] = max(own, until)
        what = f"{what} of {name}"
        yield from _run(declared + max(until - own, 0), what, declared, declared - own, named=True)
        return
    if 0 < until <= min(declared, state.finished, state.begun + 1):
        problem = _NOTHING_LEFT.format(until, _frames.script_line())
        current_session().metrics.report_problem("an epoch loop", problem)
    yield from _run(until, what)


def _run(
    until: int, what: str, first: int = 0, zero: int = 0, named: bool = False
) -> Generator[int, None, None]:
    """Yield the unfinished epochs below `until`.

    Args:
        until: Number of epochs that are finished at the end, of all loops.
        what: What the caller has declared, for messages.
        first: First epoch of this loop. Earlier ones, of a loop that was left by `break`, end here.
        zero: Epoch that is number 0 of this loop.
        named: Whether the loop has a count of its own.
    """
    session, state = current_session(), script_position()
    if session.epoch is not None:
        raise RuntimeError(
            f"an epoch loop is under way (epoch {session.epoch}): a new one can begin only after it has ended"
        )
    session.start()
    if session.trains_outside:
        session.trains_outside = False
        session.metrics.report_problem(OUTSIDE, None)
        session.report_eligibility()
    if session.consensus.loops_over:
        session.consensus.loops_over = False
        session.send(EpochsFinished(False))
    state.until, state.zero, state.body = until, zero, _frames.script_frame().f_code
    # before anybody edits it
    _frames.lines_of(state.body.co_filename)
    state.epoch_loops += 1
    state.loop_begins()
    script_objects.look(session)
    ran, streams = False, registry(session).streams
    done = session.channel is None and session.rank == 0 and checkpoint.loaded_id()
    try:
        while state.finished < until:
            if state.finished < first:
                state.finished = first - 1
                state.begin_epoch()
            else:
                streams.begin_epoch(state.finished)
                yield state.begin_epoch() - zero
            state.end_epoch()
            script_objects.look(session)
            ran = True
        streams.reach(f"- {state.loops_outside}", anew=ran)
        if ran:
            safe = session.recovery
            safe.recover_if_peer_lost()
            # Wait: no replica may end while another one is still in its last data loop or epoch.
            state.announce((state.finished, 0), "the end of the epochs", wait=True)
            safe.retry_on_peer_loss(lambda: session.consensus.save("exit"))
        elif 0 < until <= state.finished and done and (until == state.finished or not named):
            print(
                f"all {what} are finished in {env.checkpoint_path()}: set another "
                f"ADAPTDL_CHECKPOINT_PATH to train anew",
                file=sys.stderr,
            )
        session.consensus.loops_over = True
        session.send(EpochsFinished(True))
    finally:
        session.epoch = None


class _StepLoopHelper(AdaptiveDataLoaderHelper):
    """Count steps instead of samples: a step of all replicas advances the position by 1."""

    @property
    def equal_shares(self) -> bool:
        """Always true: each replica has a batch of its own."""
        return True

    @property
    def window_length(self) -> int:
        """By how much the current step advances `current_index`."""
        return 1

    @property
    def window_samples(self) -> int:
        """Always 1, so that learning rates are not scaled with the number of replicas."""
        return 1

    def expected_batches(self) -> int | None:
        """Return how many steps this process will have got from the running loop at its end."""
        left = self.end_index - self.current_index - 1
        return super().expected_batches() if self._skipped else self._handed_out + left


class Steps:
    """Count the steps of a data loop that has no loader; `steps` makes it."""

    def __init__(self, count: int) -> None:
        self._count, self._helper = count, _StepLoopHelper()
        self._helper.repeats()

    def __len__(self) -> int:
        """Return the number of steps of the whole loop."""
        return self._count

    def __iter__(self) -> Iterator[int]:
        """Yield the numbers of the steps that are left.

        Raises:
            RuntimeError: a data loop is running.
        """
        if current_dataloader() is not None:
            raise RuntimeError(
                "adl.steps() inside a data loop: the steps of the job are those of the outer loop; "
                "use range() there"
            )
        if current_epoch() is not None:
            yield from _run_steps(self._helper, self._count)
            return
        until = (script_position().until or 0) + 1
        over = script_position().finished >= until
        with closing(_run(until, f"{self._count} steps", first=until - 1)) as epochs:
            for _ in epochs:
                yield from _run_steps(self._helper, self._count)
        # a step that does not count, for the names that the body assigns
        if over:
            yield from _run_steps(self._helper, self._count, over=True)


def _run_steps(helper: AdaptiveDataLoaderHelper, count: int, over: bool = False) -> Iterator[int]:
    """Yield the numbers of the steps that are left of `count`.

    Args:
        helper: The loop's helper.
        count: Steps of the whole loop.
        over: Whether the loop was an epoch by itself that finished before a restart.
    """
    with helper.context(over):
        if helper.skipdone():
            with helper.dry_batch():
                yield 0
            return
        helper.end_index = count
        while True:
            try:
                while helper.current_index < count:
                    helper.resolve_batch_size()
                    helper.begin_batch()
                    yield helper.current_index
                    helper.current_index += 1
                    helper.end_batch(boundary=False)
                    helper.pass_boundary(last=helper.current_index >= count)
            except RetryDataLoop:
                continue
            if not helper.handed_out:
                with helper.dry_batch():
                    yield 0
            if helper.ended():
                return


def steps(count: int) -> Steps:
    """Return a data loop without a loader: each replica gets the numbers 0 to `count` - 1.

        for step in adl.steps(100_000):
            experience = play(environment, model)  # each replica plays by itself
            ...
            optimizer.step()

    The loop continues at its step after a change, a death or a restart. Every step is counted once: one that
    a death breaks off is done again. Gradients are averaged over replicas with equal weights. In an epoch
    loop the steps belong to the epoch. Outside, the loop is an epoch by itself, and counts as one for
    `remaining_epochs_until` and `finished_epochs`. If it finished before a restart, its body runs once,
    without effect (`batch_counts`), so that variables which it assigns exist after the loop.

    Args:
        count: Number of steps of the whole loop, 1 or more.

    Raises:
        ValueError: `count` is not an integer of 1 or more.
    """
    number = integer(count)
    if number is None or number < 1:
        raise ValueError(f"steps({count!r}): give the number of steps, 1 or more")
    return Steps(number)


class _OncePerEpoch(checkpoint.State):
    """Keep what functions have returned in the running epoch, so that they are not called again in it."""

    required = False

    def __init__(self) -> None:
        super().__init__("adaptdl-once-per-epoch")
        # place of the call, after its epoch → (data loops of the epoch behind it, encoded result)
        self.results: dict[str, tuple[int, bytes]] = {}
        checkpoint.load_state(self)

    def save(self, fileobj: BinaryIO) -> None:
        """Write the results."""
        fileobj.write(_codec.encode(self.results))

    def load(self, fileobj: BinaryIO) -> None:
        """Read what `save` wrote."""
        self.results = _codec.decode(fileobj.read())


def once_per_epoch(function: Callable[[], Any]) -> Any:
    """Return what `function` returns, and keep it for this epoch, in checkpoints and for newcomers.

        for epoch in adl.remaining_epochs_until(30):
            hard = adl.once_per_epoch(lambda: hardest(model, images))
            for batch in adl.AdaptiveDataLoader(Subset(images, hard), batch_size=64, shuffle=True):
                ...

    A process that comes to the call later in the epoch, after a restart or as a newcomer, gets the kept
    result, and `function` is not called: the weights are others by then. Otherwise every replica calls
    `function`, which may use data loops and collectives, and all get rank 0's result. Calls of one line are
    told apart by their order.

    Args:
        function: Function without arguments that returns numbers, strings, arrays or tensors on the CPU, or
            lists, tuples, sets and dicts of these.

    Raises:
        RuntimeError: the call is outside of an epoch loop, or inside a data loop.
        TypeError: the result has another type.
    """
    session, state = current_session(), script_position()
    if session.epoch is None or session.in_data_loop:
        raise RuntimeError("once_per_epoch() belongs in an epoch loop, outside of data loops")
    once = session.states.get("adaptdl-once-per-epoch") or _OncePerEpoch()
    assert isinstance(once, _OncePerEpoch)
    key = f"{session.epoch} {registry(session).key()}"
    if key not in once.results:
        mine = _codec.encode(function())
        found = session.recovery.retry_on_peer_loss(lambda: collective.share(mine, "once_per_epoch"))
        now = {place: one for place, one in once.results.items() if place.split()[0] == str(session.epoch)}
        once.results = now | {key: (state.entered, found)}
    state.entered, result = once.results[key]
    registry(session).streams.reach(key)
    return _codec.decode(result)


def progress() -> float:
    """Return how much of the declared training is done, from 0 to 1. For schedules of the learning rate.

    The declared training is that of the last `remaining_epochs_until` or `steps` that the script has reached.
    Within an epoch the first data loop that trains counts, by its samples or steps. With autoscaling its
    statistical progress counts, because that ends the epoch. A batch counts as soon as its optimizer step has
    been taken, so the value is 1 after the last optimizer step. A data loop left by `break` counts as
    a whole one.

    Returns:
        0 before the first epoch loop. A stream counts when its loop has ended.
    """
    state = script_position()
    if not state.until:
        return 0.0
    part, loader = 0.0, current_dataloader()
    # also behind an epoch loop or `steps` that was left by `break`
    if state.training_over:
        part = 1.0
    elif current_epoch() is not None and loader is not None and loader.drives:
        part = loader.part_done()
    return min((state.finished - state.zero + part) / max(state.until - state.zero, 1), 1.0)


def current_epoch() -> int | None:
    """Return the number of the running epoch, as its loop counts; None outside an epoch loop."""
    epoch = current_session().epoch
    return None if epoch is None else epoch - script_position().zero


def finished_epochs() -> int:
    """Return the number of finished epochs of all loops, including those before a restart."""
    return script_position().finished


def continue_at(epoch: int, samples: int = 0) -> None:
    """Begin at a position that another checkpoint than the job's own has given, e.g. a framework's.

    Call it on every replica, before the first epoch. The order of an epoch's samples follows from the
    script's seed, so the samples that are left are the right ones only if the seed is the same as then. Does
    nothing if the job has reached a later position, by a checkpoint of its own or in other replicas.

    Args:
        epoch: Number of finished epochs.
        samples: Samples that the first data loop of the next epoch has handed out, over all replicas.

    Raises:
        RuntimeError: an epoch has begun already.
        ValueError: an argument is negative or not an integer.
    """
    state = script_position()
    if current_session().epoch is not None or state.epoch_loops:
        raise RuntimeError("continue_at() after the first epoch has begun: call it before")
    epoch, samples = whole("epoch", epoch, 0), whole("samples", samples, 0)
    if (epoch, 0, samples) > (state.finished, state.finished_loops, state.index):
        state.finished, state.finished_loops, state.index = epoch, 0, samples
        state.start_progress = UNKNOWN_START
