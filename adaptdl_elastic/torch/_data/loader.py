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
from functools import partial

import torch

from adaptdl_elastic import collective
from adaptdl_elastic._checks import whole
from adaptdl_elastic._session import Session
from adaptdl_elastic._values import ReportedPosition
from adaptdl_elastic.protocol.hints import MANY
from adaptdl_elastic.reducer import PeerLostError
from adaptdl_elastic.torch._data.loop_progress import LoopProgress, part_done, windows_needed
from adaptdl_elastic.torch._data.partition import Window, shares, taken
from adaptdl_elastic.torch._data.registry import LoaderBatchSize
from adaptdl_elastic.torch._data.window_items import WindowItems
from adaptdl_elastic.torch._runtime.position import UNKNOWN_START, ScriptPosition, script_position
from adaptdl_elastic.torch._runtime.step_clock import Stage
from adaptdl_elastic.torch._tuning.training_warnings import data_problem

logger = logging.getLogger(__name__)


class AdaptiveDataLoaderHelper(LoaderBatchSize):
    """Keep the position and the batch size of one loader, and run the steps of its data loop.

    Args:
        batch_size: Initial number of samples per optimizer step, over all replicas.
    """

    def __init__(self, batch_size: int = 1) -> None:
        super().__init__(batch_size)
        # made here: rank 0 may ask for this replica's place from now on
        self._speed = self.registry.speed
        # dimension of batch tensors that counts samples, if known
        self.sample_dimension: int | None = None
        # (generation, epoch) of the eligibility report
        self._reported_for: tuple[int, int] | None = None
        # position of the script and progress of the running data loop
        self._loops: ScriptPosition | None = None
        self._progress: LoopProgress | None = None
        self._skipped = False
        # None: a script-defined loader, whose windows are not planned
        self._window: Window | None = None
        # this replica's samples in each batch of a planned window
        self._mine: Window = ()
        # number of the current batch within the window
        self.micro_batch = 0
        self.items = WindowItems()
        # index and attempted steps when the window began
        self._window_start = (0, 0)
        # batches of the running data loop that this process has got
        self._handed_out = 0
        # samples at the end of a pass that `drop_last` leaves out
        self.left_out = 0
        # index before and after the rest that was left out last
        self._rest = (0, 0)
        # batches from a position to its pass's end
        self.count_from: Callable[[int], int] | None = None
        # script-defined loader: batches left when the window began, if known
        self._left: int | None = None

    def repeats(self) -> None:
        """Record that this loader hands out the same samples again when its index is put back."""
        self.registry.unrepeatable -= 1

    @property
    def current_index(self) -> int:
        """Samples that all replicas together have taken in the running data loop, over all its passes."""
        running = self._running()
        return 0 if self.session.dry else running.index

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
        # a death may be noticed at a loop's beginning, before the loop is entered
        index, (before, after) = (self._loops or script_position()).index, self._rest
        return before if index == after else index

    @property
    def end_index(self) -> int:
        """Samples of one pass, over all replicas; 0 if not known. The value is kept in checkpoints."""
        return (self._loops or script_position()).end_indices.get(self.key, 0)

    @end_index.setter
    def end_index(self, index: int) -> None:
        script_position().end_indices[self.key] = whole("end_index", index, 0)

    def _running(self) -> ScriptPosition:
        if self._loops is None:
            raise RuntimeError("the position of a data loop is known only inside of its context()")
        return self._loops

    @property
    def accumulation_steps(self) -> int:
        """Batches without an optimizer step in the current window; an epoch's last window may have fewer."""
        if self._window is not None or not self.training:
            return len(self._window or (0,)) - 1
        full = self.size.accumulation_steps
        return full if self._left is None else min(full, self._left - 1)

    def is_accum_step(self) -> bool:
        """Return whether more batches follow the current one before the optimizer steps."""
        return self.micro_batch < self.accumulation_steps

    def is_optim_step(self) -> bool:
        """Return whether the optimizer steps after the current batch."""
        return not self.is_accum_step()

    @property
    def window_samples(self) -> int:
        """Samples of the current optimizer step, over all replicas and all batches of its window."""
        return sum(self._chunks)

    @property
    def _chunks(self) -> Window:
        """Samples of each batch of the current window, over all replicas."""
        return self._window or (self.full_chunk,) * (self.accumulation_steps + 1)

    @property
    def local_samples(self) -> int:
        """Samples of the current batch that count for training; 0 for a padding batch or a dry batch."""
        if self.session.dry:
            return 0
        if self._window is not None:
            return self._mine[self.micro_batch]
        if self.full_chunk != self.batch_size or self.equal_shares:
            return self.current_local_bsz
        return len(taken(self.batch_size, self.session.replicas, self.session.rank, self.largest_pass))

    @property
    def gradient_weight(self) -> float:
        """Factor by which to multiply the mean gradient of the current batch.

        With it, the plain mean over replicas and over the window's batches is the mean over samples, or over
        items if they are counted (`weigh_by`). The factor is 1 unless the batches have different sizes.
        """
        if self.items.shares:
            return self.items.shares[self.micro_batch] * self.session.replicas * len(self._chunks)
        if self._window is None and self.equal_shares:
            return 1.0
        return self.local_samples * self.session.replicas * len(self._chunks) / sum(self._chunks)

    @property
    def parts(self) -> float:
        """Number of equal parts to which the parts of the window's gradient are equivalent.

        The parts are the replicas' shares: 1 / Σ shares², with shares whose sum is 1. On one replica, the
        first batch and the rest are compared: 1 / the first batch's share.
        """
        chunks, replicas = self._chunks, self.session.replicas
        if replicas == 1:
            return sum(chunks) / chunks[0]
        if self._window is None and self.equal_shares:
            return float(replicas)
        each = [shares(chunks, replicas, rank, self.largest_pass) for rank in range(replicas)]
        return sum(chunks) ** 2 / sum(sum(map(len, one)) ** 2 for one in each)

    @property
    def settled(self) -> tuple[int, int, int, int]:
        """Generation, batch of one replica, accumulation steps, count of repeated steps.

        If this value changes, the replicas' shares or the position have changed, and the iterator must be
        made again.
        """
        return self.session.generation, *self.size, self._repeats

    def resolve_batch_size(self) -> int:
        """Call `sync_local_bsz`, and recover if a peer dies meanwhile.

        Returns:
            The batch of one replica.

        Raises:
            RetryDataLoop: a peer died and the job has recovered; the data loop must be continued from its
                new position.
        """
        return self.session.recovery.restart_loop_on_peer_loss(self.sync_local_bsz, self)

    @contextmanager
    def context(self, over: bool = False) -> Iterator[None]:
        """Enclose a whole data loop.

        The body of the loop may leave it by `break` or by an exception; this method cannot tell them apart.
        Such a loop counts as finished at the next data loop or the end of the epoch. If the epoch is run
        again before that, in this process or another one, the loop continues after its last optimizer step.

        Outside of an epoch loop, a data loop runs from its start each time the script reaches it.

        Args:
            over: Whether the loop was an epoch by itself that finished before a restart.

        Raises:
            RuntimeError: the script is inside another data loop.
        """
        session = self.session
        session.start()
        state, streams = script_position(), self.registry.streams
        if self.session.loader is not None and state.looping:
            state.enter(self.key)
        self.session.loader = self
        ended, left, drawing, place = False, None, False, state.place
        try:
            if self.session.replicas > 1:
                for model in session.models:
                    model.refuse_thawed("replicas would train them apart, as under DistributedDataParallel")
            if session.epoch is not None:
                session.recovery.arm()
            if over:
                state.looping = self._skipped = True
            else:
                self._skipped, place = not state.enter(self.key), state.place
            known = self.session.training_loader
            if state.trainer == self.key and (known is None or self.replaces(known)):
                # known from the epoch before, or to a newcomer from the other replicas
                self.train()
            self._loops, self.micro_batch, self._window, self._handed_out = state, 0, None, 0
            self._window_start, self._left = (state.index, self._attempts()), None
            if not (self._skipped or self.training) and state.index == 0:
                # only there: a newcomer that joins later has rank 0's buffers, and would be alone in this
                for model in session.models:
                    model.data_loop_begins()
            if not self._skipped and (state.index == 0 or state.start_progress == UNKNOWN_START):
                # also without autoscaling, which may begin in mid-epoch after a restart
                state.start_progress = session.progress - state.index / self.batch_size
            self._progress = LoopProgress(self, state)
            self._speed.clock.restart()
            self._speed.clock.enter(Stage.DATA)
            if not self._skipped:
                streams.enter_loop(place)
                drawing = True
            try:
                yield
                ended = True
                if self.micro_batch and session.models:
                    logger.warning(
                        "a data loop ended in the middle of an accumulation window: the gradients of its "
                        "last %d batches are dropped; let its last batch end at end_index",
                        self.micro_batch,
                    )
            except GeneratorExit:
                # the loop's body was left by `break` or by an exception
                ended = True
                if not self._skipped:
                    left = self._goes_on_at()
                    self._measured().tell_shorter(state.inner.exhausted(), left)
                    session.recovery.loop_left(self)
                raise
        finally:
            if self.training and (left is not None or self.micro_batch):
                for model in session.models:
                    model.drop_window()
            if drawing:
                streams.leave_loop()
            if state.looping:
                state.leave(ended and not self._skipped, left, self.drives)
            self.session.loader = None
            self._loops = self._window = self._progress = None
            self.pause()
            if ended:
                streams.reach(place)

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

    def _attempts(self) -> int:
        """Return how many optimizer steps the session's models have attempted, in total."""
        return sum([model.attempted_steps for model in self.session.models])

    @property
    def drives(self) -> bool:
        """Whether this loop counts as the training of its epoch."""
        return self.training or (self.training_loader_undecided and not self.session.models)

    def part_done(self) -> float:
        """Return the part of the running data loop that is done, from 0 to 1; 0 if its length is not known.

        The samples of a window are done when the optimizer has stepped. With autoscaling, the part is that of
        the statistical progress.
        """
        if self.session.dry:
            return 0.0
        progress = self._measured().statistical() if self.adaptive else None
        return part_done(self._goes_on_at(), self.end_index - self.left_out, progress)

    def whole_steps(self) -> int:
        """Return how many whole steps at the initial batch size the optimizer step of this window completes.

        A step counts as its gain. The fraction that is left counts for the windows that follow, and the last
        window of a loop completes what is missing. So the sum over a loop is the number of its batches at the
        initial batch size, on any number of replicas. A stream, whose length is not known, has no last one.

        Returns:
            0 before the optimizer has stepped.
        """
        if self.session.dry or not self._stepped():
            return 0
        return self._measured().whole_steps(over=self.part_done() == 1.0)

    def _measured(self) -> LoopProgress:
        if self._progress is None:
            raise RuntimeError("the progress of a data loop is known only inside of its context()")
        return self._progress

    def expected_batches(self) -> int | None:
        """Return how many batches of the running data loop this process will have got at its end.

        Returns:
            Batches so far and those that are left at the current batch size; None if that is not known.
        """
        left = self._batches_left()
        return None if left is None or self.session.dry else self._handed_out + left

    def _batches_left(self) -> int | None:
        """Return how many batches follow the current one; None if that is not known."""
        if self._window is None:
            return None if self._left is None else max(self._left - 1 - self.micro_batch, 0)
        if self.count_from is None or not self.end_index:
            return None
        more = len(self._window) - 1 - self.micro_batch
        index = self._window_start[0] + self.window_length
        left = self.count_from(index % self.end_index) if index % self.end_index else 0
        if not (self.adaptive and self.training):
            return more + left
        gain = max((model.gain for model in self.session.models), default=1.0)
        progress = self._measured().statistical()
        needed = windows_needed(progress, gain, self._stepped()) * (self.size.accumulation_steps + 1)
        return more + (max(left, needed) if index < self.end_index else needed)

    def ended(self) -> bool:
        """Return whether this data loop is over; False if a death made it necessary to repeat batches.

        Waits for the other replicas if a death can be survived.
        """
        return self.session.recovery.loop_ended(self)

    def pause(self) -> None:
        """Exclude the time until the next batch from the measured step times."""
        if self.training:
            self.session.metrics.pause()

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
        window, self._window = self._window, (self.full_chunk,)
        self._handed_out += 1
        try:
            with self.registry.streams.own_unchanged(), self.session.recovery.dry_batch():
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

    def begin_window(self, window: Window, mine: Window) -> None:
        """Begin `window`, of which this replica has `mine`, before its first batch is fetched."""
        self._window, self._mine, self.micro_batch = window, mine, 0
        self._seed_window(self._running())

    def _seed_window(self, state: ScriptPosition) -> None:
        state.inner.begin_window(state.index)
        self.registry.streams.begin_window(state.finished, state.entered, state.index)

    def begin_batch(self) -> None:
        """Prepare to hand out a batch."""
        self._handed_out += 1
        self._speed.clock.enter(Stage.BODY)
        session, training = self.session, self.session.training_loader is self
        if self.micro_batch == 0:
            state = self._running()
            index = state.index
            self._window_start = index, self._attempts()
            if self._window is None:
                self._seed_window(state)
                if self.end_index:
                    self._left = -(-(self.end_index - index % self.end_index) // self.full_chunk)
            session.consensus.drift.window_begins((state.finished, state.entered, state.outside_loop, index))
            if not self.registry.unrepeatable and (training or self._may_train()):
                session.recovery.begin_window(index)
        if training:
            session.metrics.profile_step_start(self.size.atomic_bsz)

    def _may_train(self) -> bool:
        """Return whether an optimizer step may follow in this loop.

        That may be so although another loader is the training loader until the coming forward pass.
        """
        return (
            self.training_loader_undecided
            or self.trained
            or any(model.module.training for model in self.session.models)
        )

    def fills(self, shuffle: bool = False) -> bool:
        """Return whether every replica must get a batch each time, as a backward pass needs all replicas.

        Args:
            shuffle: Whether the order is random, as if the loop trained.
        """
        if self.training or not torch.is_grad_enabled():
            return self.training
        in_training_mode = any(model.module.training for model in self.session.models)
        return in_training_mode or (self.training_loader_undecided and shuffle)

    def end_batch(self, commit: bool = True, even: bool = True, boundary: bool = True) -> None:
        """Finish a batch, after the loop's body has run and `current_index` has been advanced.

        Args:
            commit: Whether to record the time.
            even: Whether all replicas had a full batch; the time is recorded only if so.
            boundary: Whether to call `pass_boundary` at the end of a window; if False, the caller calls it.
        """
        session, state, training = self.session, self._running(), self.session.training_loader is self
        accumulating, safe, drift = self.is_accum_step(), session.recovery, session.consensus.drift
        drift.check()
        failed, broken = safe.trouble()
        self._speed.clock.enter(Stage.DATA if accumulating else Stage.BOUNDARY)
        if training:
            counts = commit and even and not broken
            if counts and not failed:
                session.metrics.profile_step_commit(accumulating)
            else:
                session.metrics.pause()
            if not accumulating:
                self._speed.step_ended(counts, self.size)
        if accumulating:
            self.micro_batch += 1
            return
        self.micro_batch = 0
        counts = training or (self.training_loader_undecided and not session.models)
        if counts and not (training and failed):
            state.step += 1
            if self._window is not None or training:
                state.samples += self.window_samples
            session.last_step_time = time.time()
            if training:
                self._report_position(session, state)
        if failed and safe.repeat_step(self):
            return
        if broken and not state.outside:
            safe.recover("a replica is gone", self)
            return
        if failed:
            raise PeerLostError("a replica is gone, in a training loop outside of remaining_epochs_until")
        if training:
            state.idle = state.idle + 1 if drift.synchronised and not self._stepped() else 0
            drift.window_ends()
        session.consensus.report_step()
        if boundary:
            self.pass_boundary()

    def pass_boundary(self, last: bool = False) -> None:
        """Pass the boundary between two steps, and carry out there what all replicas have agreed on.

        Args:
            last: Whether the data loop has no batch left.
        """
        self.session.recovery.retry_on_peer_loss(partial(self._running().boundary, last), self)
        self._speed.clock.enter(Stage.DATA)

    def _report_position(self, session: Session, state: ScriptPosition) -> None:
        if self._reported_for != (session.generation, state.finished):
            self._reported_for = session.generation, state.finished
            session.report_eligibility()
        # a Trainer that counts steps declares sys.maxsize epochs
        epochs = None if state.until is None or state.until > MANY else state.until
        done, total, size = None, None, self.end_index
        if size:
            done = state.finished * size + self._measured().samples_of_pass()
            total = None if epochs is None else float(epochs * size)
        session.reported_position = ReportedPosition(state.step, state.finished, epochs, done, total)
        batch, parts = self.current_batch_size, session.replicas * (self.size.accumulation_steps + 1)
        problem = data_problem(size, batch, self.batch_size, parts)
        session.metrics.report_problem("the batch size", problem)

    def epoch_done(self) -> bool:
        """Return whether this loop has made the progress of one pass at the initial batch size.

        For loaders with autoscaling. Rank 0 decides for all replicas. Progress is counted in steps of the
        initial batch size: a pass of n samples is n / batch_size steps, rounded to whole steps. A script that
        accumulates by hand and steps once in k windows makes 1/k of that progress in a pass.

        The loop ends also if too many passes made no progress (`LoopProgress.pass_made`).

        Raises:
            RetryDataLoop: a peer died and the job has recovered; the data loop must be continued from its
                new position.
        """
        done, safe = self._measured().pass_made(), self.session.recovery
        return safe.restart_loop_on_peer_loss(lambda: bool(collective.share(done, "end of epoch")), self)
