"""Keep the position and the batch size of an elastic data loader, and run the steps of its data loop.

A script that defines a loader of its own uses `AdaptiveDataLoaderHelper` as in AdaptDL::

    class MyLoader(AdaptiveDataLoaderMixin):
        def __iter__(self):
            with self._elastic.context():
                if self._elastic.skipdone():
                    return
                while self._elastic.current_index < self._elastic.end_index:
                    batch = ...  # current_local_bsz samples of this replica
                    with self._elastic.profile():
                        yield batch
                        self._elastic.current_index += ...  # samples of all replicas

A *window* is the batches of one optimizer step. If gradients are accumulated and fewer full batches than a
window needs are left before `end_index`, the window is shorter.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch

from adaptdl_elastic import _session, checkpoint, collective, env
from adaptdl_elastic._checks import flag, integer, whole
from adaptdl_elastic._interfaces import Command, ElasticLoader
from adaptdl_elastic.reducer import PeerLostError
from adaptdl_elastic.torch._data.checks import check_bounds, check_writer
from adaptdl_elastic.torch._data.loop_length import Progress, part_done, windows_needed
from adaptdl_elastic.torch._data.partition import Window, share
from adaptdl_elastic.torch._data.registry import registry
from adaptdl_elastic.torch._data.unequal_shares import UnequalShares
from adaptdl_elastic.torch._runtime.position import ScriptPosition, script_position
from adaptdl_elastic.torch._runtime.step_clock import Stage
from adaptdl_elastic.torch._tuning.batch_size import BatchSize, Limits, initial, local_batch, misfit
from adaptdl_elastic.torch._tuning.memory_limit import limited, memory_limit, split
from adaptdl_elastic.torch._tuning.shares import Shares

logger = logging.getLogger(__name__)

_IDLE_PASSES = 10  # passes without progress, every step skipped (inf, nan), that end an autoscaled epoch


class AdaptiveDataLoaderHelper:
    """Keep the position and the batch size of one loader, and run the steps of its data loop.

    Args:
        batch_size: Initial number of samples per optimizer step, over all replicas.
    """

    def __init__(self, batch_size: int = 1) -> None:
        size = integer(batch_size)
        if size is None or size < 1:
            raise ValueError(
                f"batch_size={batch_size!r}: give the number of samples per step over all replicas, 1 or more"
            )
        self.batch_size = batch_size = size
        self.sample_dimension: int | None = None  # dimension of batch tensors that counts samples, if known
        self._registry = registry()
        self.key = self._registry.key()
        self._registry.unrepeatable += 1
        self._max_batch_size: int | None = None
        self._local_bounds: tuple[int, int] | None = None
        self._accumulation = False
        self._atomic = local_batch(batch_size, self.replicas)
        self._accum = 0
        self._generation: int | None = None  # generation whose batch size has been settled
        self._repeats = 0  # how often the batches have become smaller, or have been repeated, in this process
        self._reported_for: tuple[int, int] | None = None  # (generation, epoch) of the eligibility report
        self._loops: ScriptPosition | None = None
        self._skipped = False
        self.unequal = UnequalShares(self._registry.speed, self.key)
        self._mark = (0.0, 0, 0)  # progress, attempted steps and index when progress was last made
        self._entered: tuple[int, list[int]] = (0, [])  # at loop start: session step, attempts of each model
        # the current window
        self._window: Window | None = None  # None: a script-defined loader, whose windows are not planned
        self._chunk = 0  # number of the current batch within the window
        self._window_start = (0, 0)  # index and attempted steps when the window began
        self._trained = False  # a model has been trained with this loader in this process
        self._handed_out = 0  # batches of the running data loop that this process has got
        self.left_out = 0  # samples at the end of a pass that `drop_last` leaves out
        self._rest = (0, 0)  # index before and after the rest that was left out last
        # the number of batches from a position to the end of its pass; None: not known
        self.count_from: Callable[[int], int] | None = None
        self._left: int | None = None  # script-defined loader: batches left when the window began, if known

    def repeats(self) -> None:
        """Record that this loader hands out the same samples again when its index is put back."""
        self._registry.unrepeatable -= 1

    # -- position ----------------------------------------------------------------------------------

    @property
    def replicas(self) -> int:
        """Number of replicas that share the data."""
        return _session.current().replicas

    @property
    def current_index(self) -> int:
        """Samples that all replicas together have taken in the running data loop, over all its passes."""
        running = self._running()
        return 0 if _session.current().dry else running.index

    @current_index.setter
    def current_index(self, index: int) -> None:
        self._running().index = index

    def leave_out_rest(self, end: int) -> None:
        """Leave out the rest of the pass, which fills no window: set `current_index` to the pass's `end`."""
        self._rest = self.current_index, end
        self.current_index = end

    @property
    def index_trained(self) -> int:
        """The `current_index`; the index before the rest of the pass if that rest was left out.

        Two replicas that have made the same optimizer steps have the same value.
        """
        before, after = self._rest
        return before if self.current_index == after else self.current_index

    @property
    def end_index(self) -> int:
        """Samples of one pass, over all replicas; 0 if not known. The value is kept in checkpoints."""
        return script_position().end_indices.get(self.key, 0)

    @end_index.setter
    def end_index(self, index: int) -> None:
        script_position().end_indices[self.key] = whole("end_index", index, 0)

    def _running(self) -> ScriptPosition:
        if self._loops is None:
            raise RuntimeError("the position of a data loop is known only inside of its context()")
        return self._loops

    # -- batch size --------------------------------------------------------------------------------

    @property
    def max_batch_size(self) -> int | None:
        """Largest batch size that autoscaling may choose; None without autoscaling."""
        return self._max_batch_size

    @property
    def local_bsz_bounds(self) -> tuple[int, int] | None:
        """Smallest and largest batch of one replica; None if there are no bounds."""
        return self._local_bounds

    @property
    def current_local_bsz(self) -> int:
        """Samples of a full batch on this replica: the atomic batch size."""
        return self._atomic

    @property
    def accumulation_steps(self) -> int:
        """Batches without an optimizer step in the current window; an epoch's last window may have fewer."""
        if self._window is not None:
            return len(self._window) - 1
        if not self.training:
            return 0
        return self._accum if self._left is None else min(self._accum, self._left - 1)

    @property
    def current_batch_size(self) -> int:
        """Samples of a full optimizer step, over all replicas."""
        known = self.step_samples
        if known is not None:
            return known
        return self.replicas * self._atomic * (self._accum + 1 if self.training else 1)

    @property
    def largest_pass(self) -> int | None:
        """Samples of one replica that fit into memory in training; None: not known."""
        return memory_limit().largest if self.training else None

    @property
    def step_samples(self) -> int | None:
        """Samples of a full step, if they are fewer than its full batches have; else None.

        Without autoscaling, a step has the same samples when memory forces a smaller local batch.
        """
        if self.adaptive or not (self.training and self._accum):
            return None
        return self.replicas * local_batch(self.batch_size, self.replicas)

    @property
    def may_accumulate(self) -> bool:
        """Whether the gradients of several batches may be accumulated before a step."""
        return self._limits.accumulation

    @property
    def accumulation(self) -> int:
        """Batches without an optimizer step in a full window."""
        return self._accum

    @property
    def micro_batch(self) -> int:
        """Number of the current batch within its window, counted from 0."""
        return self._chunk

    def is_accum_step(self) -> bool:
        """Return whether more batches follow the current one before the optimizer steps."""
        return self._chunk < self.accumulation_steps

    def is_optim_step(self) -> bool:
        """Return whether the optimizer steps after the current batch."""
        return not self.is_accum_step()

    @property
    def window_samples(self) -> int:
        """Samples of the current optimizer step, over all replicas and all batches of its window."""
        if self._window is None:
            return self.replicas * self._atomic * (self.accumulation_steps + 1)
        return sum(self._window)

    @property
    def local_samples(self) -> int:
        """Samples of the current batch that count for training; 0 for a padding batch or a dry batch."""
        if _session.current().dry:
            return 0
        if self._window is None:
            return self._atomic
        rank, chunk = _session.current().rank, self._window[self._chunk]
        if self.unequal.shares is None:
            return share(chunk, self.replicas, rank)
        return self.unequal.counts(chunk, self.replicas)[rank]

    @property
    def gradient_weight(self) -> float:
        """Factor by which to multiply the mean gradient of the current batch.

        With it, the plain mean over replicas and over the window's batches is the mean over samples. The
        factor is 1 unless the batches of the window have different sizes.
        """
        if self._window is None:
            return 1.0
        return self.local_samples * self.replicas * len(self._window) / sum(self._window)

    @property
    def concentration(self) -> float:
        """Sum over replicas of the squared fractions of the window's samples that they take."""
        replicas, window = self.replicas, self._window
        if window is None or self.unequal.shares is None:
            return 1.0 / replicas
        counts = zip(*(self.unequal.counts(chunk, replicas) for chunk in window), strict=True)
        return float(sum(sum(own) ** 2 for own in counts)) / sum(window) ** 2

    @property
    def adaptive(self) -> bool:
        """Whether the batch size is chosen during training (`autoscale_batch_size` was called)."""
        return self._max_batch_size is not None

    @property
    def training(self) -> bool:
        """Whether models are trained with this loader."""
        return self._registry.training is self

    @property
    def training_loader_undecided(self) -> bool:
        """Whether no loader has been used for training yet."""
        return self._registry.training is None and script_position().trainer is None

    @property
    def settled(self) -> tuple[int, int, int, int, Shares | None]:
        """Generation, batch of one replica, accumulation steps, count of repeated steps, unequal shares.

        If this value changes, the replicas' shares or the position have changed, and the iterator must be
        made again.
        """
        return _session.current().generation, self._atomic, self._accum, self._repeats, self.unequal.shares

    def train(self) -> None:
        """Make this the loader that models are trained with.

        AdaptiveDataParallel calls this when a module in training mode gets a batch of this loader.

        Raises:
            RuntimeError: another loader, with autoscaling, is the training loader already.
        """
        known = self._registry.training
        if known is self:
            return
        if known is not None and known.adaptive and not self._replaces(known):
            raise RuntimeError(
                "a second loader would be used for training: autoscale_batch_size was called on another one"
            )
        self._registry.training = self
        self._trained = True  # if several loaders train in turn, this one will train again
        script_position().trainer = self.key
        self._announce()

    def _announce_limits(self) -> None:
        limits = self._limits
        _session.current().metrics.set_batch_size(
            limits.init, limits.maximum, limits.bounds, limits.accumulation
        )

    def _announce(self) -> None:
        self._announce_limits()
        _session.current().metrics.set_current_batch_size(self._atomic, self._accum)

    def fit_memory(self) -> None:
        """Choose batches that fit into the new, smaller memory limit. On all replicas at one boundary."""
        fitting = split(BatchSize(self._atomic, self._accum), memory_limit().largest)
        self._atomic, self._accum = fitting.atomic_bsz, fitting.accumulation_steps
        self.unequal.share_equally(self._limits.bounds, self._accum + 1)
        self._repeats += 1
        self._announce()

    def autoscale_batch_size(
        self,
        max_batch_size: int,
        local_bsz_bounds: tuple[int | None, int | None] | None = None,
        gradient_accumulation: bool = False,
    ) -> None:
        """Let the batch size be chosen during training, and make this the training loader.

        Once the job's goodput is known, the scheduler assigns no number of replicas that does not fit these
        limits. The job can still have such a number, for example after the loss of a node. It then logs a
        warning and continues:

        - No batch of a replica is above the upper bound.
        - Nothing is accumulated unless allowed, so the batch size may be below `batch_size`.
        - If the lower bound and `max_batch_size` contradict each other, `max_batch_size` holds.

        Args:
            max_batch_size: Largest batch size over all replicas (the equal shares of it are rounded up).
            local_bsz_bounds: Smallest and largest batch of one replica, as its memory allows; None: no bound.
            gradient_accumulation: Whether gradients of several batches may be accumulated before a step.

        Raises:
            ValueError: the arguments contradict each other, or the initial batch size does not fit them on
                the number of replicas with which the job begins.
            RuntimeError: this method was called on another loader already.
        """
        largest = integer(max_batch_size)
        bounds = check_bounds(self.batch_size, max_batch_size, largest, local_bsz_bounds)
        gradient_accumulation = flag("gradient_accumulation", gradient_accumulation)
        problem = misfit(Limits(self.batch_size, largest, bounds, gradient_accumulation), self.replicas)
        if problem is not None and _begins():
            raise ValueError(problem)
        known = self._registry.training
        self._generation = None
        if known is not None and known is not self and known.adaptive:
            if not self._replaces(known):
                raise RuntimeError(
                    "autoscale_batch_size was called on another loader already; only one trains"
                )
            assert isinstance(known, AdaptiveDataLoaderHelper)
            if known.batch_size == self.batch_size:
                self._atomic, self._accum, self._generation = known._atomic, known._accum, known._generation
            polls = _session.current().consensus.polls
            polls[:] = [self._poll if poll == known._poll else poll for poll in polls]
            _session.current().consensus.handlers["batch_size"] = self._change
        self._max_batch_size, self._local_bounds = largest, bounds
        self._accumulation = gradient_accumulation
        self._registry.training = self
        self._announce()

    def _replaces(self, known: ElasticLoader) -> bool:
        """Return whether the script has made this loader to replace `known`, e.g. one loader per epoch."""
        return known.key == self.key and self._registry.current is not known

    def resolve_batch_size(self) -> int:
        """Call `sync_local_bsz`, and recover if a peer dies meanwhile.

        Returns:
            The batch of one replica.

        Raises:
            RetryDataLoop: a peer died and the job has recovered; the data loop must be continued from its
                new position.
        """
        return _session.current().recovery.restart_loop_on_peer_loss(self.sync_local_bsz, self)

    def sync_local_bsz(self) -> int:
        """Settle the batch size of this generation on all replicas, and return the batch of one replica."""
        session = _session.current()
        if self._generation != session.generation:
            self._generation = session.generation
            self._atomic, self._accum = self._initial()
            if self.training:
                self._announce_limits()
            if self.adaptive:
                problem = misfit(self._limits, self.replicas)
                if problem is not None and session.rank == 0:
                    logger.warning(
                        "%s; until there are others, a batch is %d", problem, self.current_batch_size
                    )
                best = session.metrics.best_batch_size() if session.rank == 0 else None
                chosen = None if best is None else (best.atomic_bsz, best.accumulation_steps)
                chosen = collective.share(chosen, "batch size")
                if chosen is not None:
                    self._atomic, self._accum = chosen
                session.consensus.handlers["batch_size"] = self._change
                if self._poll not in session.consensus.polls:
                    session.consensus.polls.append(self._poll)
                    session.consensus.poll_soon()
            if self.training:
                session.metrics.set_current_batch_size(self._atomic, self._accum)
            self.unequal.share_equally(self._limits.bounds, self._accum + 1)
        return self._atomic

    def _initial(self) -> tuple[int, int]:
        """Return the batch of one replica and the accumulation steps that make up the initial batch size."""
        given = initial(self._limits, self.replicas)
        return given.atomic_bsz, given.accumulation_steps

    @property
    def _limits(self) -> Limits:
        given = Limits(self.batch_size, self._max_batch_size, self._local_bounds, self._accumulation)
        return limited(given, memory_limit().largest) if self.training else given

    def _poll(self) -> Command | None:
        """Return a command to change to a better batch size, if there is one. Runs in the control thread.

        There is none before the script enters this loader's loop in this generation. Until then, a replica
        that joined in another loader's loop could not carry out the command. On entering the loop, all
        replicas agree on the batch size anyway (`sync_local_bsz`).
        """
        session = _session.current()
        if self._generation != session.generation:
            return None
        better = session.metrics.suggestion()
        if better is None or (better.atomic_bsz, better.accumulation_steps) == (self._atomic, self._accum):
            return None
        return {
            "kind": "batch_size",
            "atomic": better.atomic_bsz,
            "accumulation": better.accumulation_steps,
        }

    def _change(self, command: Command) -> None:
        """Change the batch size, as `command` says. Runs on every replica at the same boundary."""
        largest = memory_limit().largest
        if largest is not None and command["atomic"] > largest:
            return  # it was chosen before the limit was known
        self._atomic, self._accum = command["atomic"], command["accumulation"]
        self.unequal.limit(self._limits.bounds, self._accum + 1)
        _session.current().metrics.set_current_batch_size(self._atomic, self._accum)

    # -- the data loop -----------------------------------------------------------------------------

    @contextmanager
    def context(self, over: bool = False) -> Iterator[None]:
        """Enclose a whole data loop.

        The body of the loop may leave it by `break` or by an exception; this method cannot tell them apart.
        Such a loop counts as finished when the script reaches the next data loop or the end of the epoch. If
        the epoch is run again before that, in this process or after a restart, the data loop continues after
        its last optimizer step.

        Outside of an epoch loop, a data loop runs from its start each time the script reaches it.

        Args:
            over: Whether the loop was an epoch by itself that finished before a restart.

        Raises:
            RuntimeError: the script is inside another data loop.
        """
        session = _session.current()
        session.start()
        state, streams = script_position(), self._registry.streams
        if self._registry.current is not None and state.looping:
            state.enter(self.key)  # raises
        self._registry.current = self
        ended, left, drawing = False, None, False
        try:
            if self.replicas > 1:
                for model in session.models:
                    model.refuse_thawed("replicas would train them apart, as under DistributedDataParallel")
            if session.epoch is not None:
                session.recovery.arm()
            if over:
                state.looping = self._skipped = True
            else:
                self._skipped = not state.enter(self.key)
            known = self._registry.training
            if state.trainer == self.key and (known is None or self._replaces(known)):
                self.train()  # known from the epoch before, or to a newcomer from the other replicas
            self._loops, self._chunk, self._window, self._handed_out = state, 0, None, 0
            self._window_start, self._left = (state.index, self._attempts()), None
            if not (self._skipped or self.training) and state.index == 0:
                # Only at the start of the loop. A newcomer that joins later has got rank 0's buffers, and no
                # other replica would take part in this collective.
                for model in session.models:
                    model.data_loop_begins()
            if state.index == 0 and not self._skipped:
                state.start_progress = session.metrics.get_progress() if self.adaptive else 0.0
            self._mark = (*self._effort(), state.index)
            self._entered = session.step, self._each_attempts()
            self._registry.speed.clock.restart()
            self._registry.speed.clock.enter(Stage.DATA)
            if not self._skipped:
                streams.enter_loop()
                drawing = True
            try:
                yield
                ended = True
                if self._chunk and session.models:
                    logger.warning(
                        "a data loop ended in the middle of an accumulation window: the gradients of its "
                        "last %d batches are dropped; let its last batch end at end_index",
                        self._chunk,
                    )
            except GeneratorExit:  # the loop's body was left by `break` or by an exception
                ended = True
                if not self._skipped:
                    left = self._goes_on_at()
                    self._tell_shorter(state.inner.exhausted(), left)
                    session.recovery.loop_left(self)
                raise
        finally:
            if self.training and (left is not None or self._chunk):
                for model in session.models:
                    model.drop_window()
            if drawing:
                streams.leave_loop()
            if state.looping:
                state.leave(ended and not self._skipped, left, self.drives)
            self._registry.current = None
            self._loops = self._window = None
            self.pause()

    def _tell_shorter(self, others: list[str], left: int) -> None:
        """Report a problem if this loop ends at index `left` because loaders beside it have no batch left.

        Args:
            others: Keys of these loaders.
            left: Samples of this loader that were used.
        """
        if not others or _session.current().dry:
            return
        used = f"{left} of {self.end_index} samples" if self.end_index else f"{left} samples"
        _session.current().metrics.report_problem(
            f"the loaders read beside loader {self.key}",
            f"the loop over loader {self.key} ended after {used}, because loader {' and '.join(others)}, "
            f"which is read beside it (as by zip), had no batch left: the rest is left out. Let the shorter "
            f"loader begin again, or give it first",
        )

    def _goes_on_at(self) -> int:
        """Return the index after the last optimizer step. For use in the loop's body."""
        return self._window_start[0] + (self.window_length if self._stepped() else 0)

    @property
    def window_length(self) -> int:
        """By how much the current window advances `current_index`; 0 if that is not known beforehand."""
        return sum(self._window or ())

    def _stepped(self) -> bool:
        """Return whether the optimizer has stepped in the current window."""
        return self._attempts() > self._window_start[1]

    @property
    def drives(self) -> bool:
        """Whether this loop counts as the training of its epoch."""
        return self.training or (self.training_loader_undecided and not _session.current().models)

    def part_done(self) -> float:
        """Return the part of the running data loop that is done, from 0 to 1; 0 if its length is not known.

        The samples of a window are done when the optimizer has stepped. With autoscaling, the part is that of
        the statistical progress.
        """
        if _session.current().dry:
            return 0.0
        progress = self._progress() if self.adaptive else None
        return part_done(self._goes_on_at(), self.end_index - self.left_out, progress)

    def _progress(self) -> Progress:
        """Return the statistical progress of the running data loop."""
        return Progress(self._effort()[0] - self._running().start_progress, self._steps_of_pass())

    def expected_batches(self) -> int | None:
        """Return how many batches of the running data loop this process will have got at its end.

        Returns:
            Batches so far and those that are left at the current batch size; None if that is not known.
        """
        left = self._batches_left()
        return None if left is None or _session.current().dry else self._handed_out + left

    def _batches_left(self) -> int | None:
        """Return how many batches follow the current one; None if that is not known."""
        if self._window is None:
            return None if self._left is None else max(self._left - 1 - self._chunk, 0)
        if self.count_from is None or not self.end_index:
            return None
        more = len(self._window) - 1 - self._chunk
        index = self._window_start[0] + self.window_length
        left = self.count_from(index % self.end_index) if index % self.end_index else 0
        if not (self.adaptive and self.training):
            return more + left
        gain = max((model.gain for model in _session.current().models), default=1.0)
        needed = windows_needed(self._progress(), gain, self._stepped()) * (self._accum + 1)
        return more + (max(left, needed) if index < self.end_index else needed)

    def ended(self) -> bool:
        """Return whether this data loop is over; False if a death made it necessary to repeat batches.

        Waits for the other replicas if a death can be survived.
        """
        return _session.current().recovery.loop_ended(self)

    def pause(self) -> None:
        """Exclude the time until the next batch from the measured step times."""
        if self.training:
            _session.current().metrics.pause()

    def skipdone(self) -> bool:
        """Return whether this data loop finished before a restart, so that it must hand out no batch now.

        Raises:
            RuntimeError: the call is not inside of `context()`.
        """
        if self._loops is None:
            raise RuntimeError("skipdone() belongs inside of context()")
        return self._skipped

    @property
    def handed_out(self) -> bool:
        """Whether this process has got a batch of the running data loop."""
        return self._handed_out > 0

    @contextmanager
    def dry_batch(self) -> Iterator[None]:
        """Enclose the fetching and the `yield` of a batch that does not count for training.

        Used for a loop whose batches have all gone to other replicas or earlier processes. The loop's body
        runs once, so that variables which it assigns exist after the loop. See
        `adaptdl_elastic.torch._elastic.dry_batch`.
        """
        window, self._window = self._window, (self.replicas * self._atomic,)
        self._handed_out += 1
        try:
            with _session.current().recovery.dry_batch():
                yield
        finally:
            self._window = window

    @contextmanager
    def profile(self, commit: bool = True, boundary: bool = True) -> Iterator[None]:
        """Enclose the `yield` of one batch.

        Measures the time of the batch. At its end, saves a checkpoint, stops, or changes the batch size or
        the number of replicas if all replicas have agreed to. The enclosed code must advance
        `current_index` before it ends.

        Args:
            commit: Whether to record the time; give False for the first batch of an iterator, which includes
                the start of the iterator.
            boundary: Whether to call `pass_boundary` at the end; if False, the caller calls it.
        """
        self.begin_batch()
        yield
        self.end_batch(commit, boundary=boundary)

    def begin_window(self, window: Window) -> None:
        """Begin `window` before its first batch is fetched."""
        self._window, self._chunk = window, 0
        self._seed_window()

    def _seed_window(self) -> None:
        state = self._running()
        state.inner.begin_window(state.index)
        self._registry.streams.begin_window(state.finished, state.entered, state.index)

    def begin_batch(self) -> None:
        """Prepare to hand out a batch."""
        self._handed_out += 1
        self._registry.speed.clock.enter(Stage.BODY)
        if self._chunk == 0:
            index = self._running().index
            self._window_start = index, self._attempts()
            if self._window is None:
                self._seed_window()
            if self._window is None and self.end_index:
                full = self.replicas * self._atomic
                self._left = -(-(self.end_index - index % self.end_index) // full)
            if self._may_train():
                _session.current().recovery.begin_window(index)
        if self.training:
            _session.current().metrics.profile_step_start(self._atomic)

    def _may_train(self) -> bool:
        """Return whether an optimizer step may follow in this loop.

        That may be so although another loader is the training loader: this loader takes its place only in
        the forward pass.
        """
        if self.training or self.training_loader_undecided or self._trained:
            return True
        return any(model.module.training for model in _session.current().models)

    def end_batch(self, commit: bool = True, even: bool = True, boundary: bool = True) -> None:
        """Finish a batch, after the loop's body has run and `current_index` has been advanced.

        Args:
            commit: Whether to record the time.
            even: Whether all replicas had a full batch; the time is recorded only if so.
            boundary: Whether to call `pass_boundary` at the end of a window; if False, the caller calls it.
        """
        session, state, training = _session.current(), self._running(), self.training
        accumulating, safe, speed = self.is_accum_step(), session.recovery, self._registry.speed
        speed.clock.enter(Stage.DATA if accumulating else Stage.BOUNDARY)
        if training:
            if commit and even and not (safe.broken or safe.failed):
                session.metrics.profile_step_commit(accumulating)
            else:
                session.metrics.pause()
            if not accumulating:
                counts = commit and even and not safe.broken
                samples = self.local_samples * (self._accum + 1)
                speed.step_ended(counts, (self._atomic, self._accum, self.unequal.shares), samples)
        if accumulating:
            self._chunk += 1
            return
        self._chunk = 0
        counts = training or (self.training_loader_undecided and not session.models)
        if counts and not (training and safe.failed):
            state.step += 1
            if self._window is not None or training:
                state.samples += self.window_samples
            session.last_step_time = time.time()
            if training:
                self._report_position(session, state)
        if safe.repeat_step(self):
            return
        if safe.broken and not state.outside:
            safe.recover("a replica is gone", self)
            return
        if safe.failed:
            raise PeerLostError("a replica is gone, in a training loop outside of remaining_epochs_until")
        session.consensus.report_step()
        if boundary:
            self.pass_boundary()

    def pass_boundary(self, last: bool = False) -> None:
        """Pass the boundary between two steps, and carry out there what all replicas have agreed on.

        Args:
            last: Whether the data loop has no batch left.
        """
        session, state = _session.current(), self._running()
        session.recovery.retry_on_peer_loss(lambda: state.boundary(last), self)
        self._registry.speed.clock.enter(Stage.DATA)

    def _report_position(self, session: _session.Session, state: ScriptPosition) -> None:
        now = (session.generation, state.finished)
        if self._reported_for != now:
            self._reported_for = now
            session.report_eligibility()
        done = total = None
        if self.end_index:
            done = state.finished * self.end_index + self._samples_of_pass()
            total = None if state.until is None else float(state.until * self.end_index)
        session.metrics.update_position(
            step=session.step,
            epoch=state.finished,
            epochs=state.until,
            samples_done=done,
            samples_total=total,
            data_size=self.end_index,
        )

    def _samples_of_pass(self) -> float:
        """Return the samples of this pass so far; with autoscaling, progress × initial batch size."""
        state = self._running()
        if not self.adaptive:
            return float(min(state.index, self.end_index))
        progress = (self._effort()[0] - state.start_progress) * self._windows_per_step() * self.batch_size
        return min(max(progress, 0.0), float(self.end_index))

    def _windows_per_step(self) -> int:
        """Return the number of windows per optimizer step: more than 1 if the script accumulates by hand."""
        windows, before_each = _session.current().step - self._entered[0], self._entered[1]
        counts = zip_longest(self._each_attempts(), before_each, fillvalue=0)
        own = max((now - then for now, then in counts), default=0)
        return max(1, round(windows / own)) if own else 1

    def epoch_done(self) -> bool:
        """Return whether this loop has made the progress of one pass at the initial batch size.

        For loaders with autoscaling. Rank 0 decides for all replicas. Progress is counted in steps of the
        initial batch size: a pass of n samples is n / batch_size steps, rounded to whole steps. A script that
        accumulates by hand and steps once in k windows makes 1/k of that progress in a pass.

        The loop ends also if a pass took no optimizer step, or if `_IDLE_PASSES` passes made no progress.

        Raises:
            RetryDataLoop: a peer died and the job has recovered; the data loop must be continued from its
                new position.
        """
        session, state = _session.current(), self._running()
        progress, attempts = self._effort()
        done = progress - state.start_progress + 0.5 >= self._steps_of_pass()
        before, tried, index = self._mark
        if progress > before:
            self._mark = progress, attempts, state.index
        elif state.index - index >= self.end_index * (1 if attempts == tried else _IDLE_PASSES):
            if session.rank == 0 and not done:
                logger.warning(
                    "no optimizer step was taken while all samples came by: the loop ends here, as it would "
                    "without autoscaling"
                )
            done = True
        safe = session.recovery
        return safe.restart_loop_on_peer_loss(lambda: bool(collective.share(done, "end of epoch")), self)

    def _steps_of_pass(self) -> float:
        """Return the optimizer steps of one pass at the initial batch size."""
        return self.end_index / self.batch_size / self._windows_per_step()

    def _effort(self) -> tuple[float, int]:
        """Return the progress of the models (0 without autoscaling) and their number of attempted steps."""
        return _session.current().metrics.get_progress() if self.adaptive else 0.0, self._attempts()

    def _attempts(self) -> int:
        return sum(self._each_attempts())

    def _each_attempts(self) -> list[int]:
        return [model.attempted_steps for model in _session.current().models]

    # -- reporting ---------------------------------------------------------------------------------

    def to_tensorboard(self, writer: Any, global_step: int, tag_prefix: str = "") -> None:
        """Write the batch sizes to TensorBoard. Does nothing on ranks other than 0.

        Args:
            writer: A `torch.utils.tensorboard.SummaryWriter`.
            global_step: Step under which the values are written.
            tag_prefix: Prefix of the tags; a `/` is appended if it lacks one.
        """
        check_writer(writer)
        if _session.current().rank != 0:
            return
        if tag_prefix and not tag_prefix.endswith("/"):
            tag_prefix += "/"
        values = {
            "Total_Batch_Size": self.current_batch_size,
            "Local_Batch_Size": self._atomic,
            "Accumulation_Steps": self._accum,
        }
        for name, value in values.items():
            writer.add_scalar(tag_prefix + name, value, global_step)


def _begins() -> bool:
    """Return whether the run has just begun: no restart, no join and no checkpoint came before."""
    fresh = env.num_restarts() == 0 and not _session.current().joining
    return fresh and checkpoint.loaded_id() is None


def initial_seed(loader: AdaptiveDataLoaderHelper, generator: torch.Generator | None) -> int:
    """Return the seed of a loader's sample order, the same on all replicas.

    The seed is that of rank 0's `generator`, or of `torch.manual_seed` if `generator` is None. It is kept in
    checkpoints, so that a script that sets no seed continues in the same order after a restart.

    Raises:
        RetryDataLoop: a peer died and the job has recovered; the data loop must be continued from its new
            position.
    """
    state = script_position()
    known = state.seeds.get(loader.key)
    if known is None:
        own = generator.initial_seed() if generator is not None else registry().streams.seed
        mine, safe = own & (2**63 - 1), _session.current().recovery
        known = safe.restart_loop_on_peer_loss(lambda: int(collective.share(mine, "seed")), loader)
        state.seeds[loader.key] = known
    return known
