"""What every elastic data loader has in common: position, batch size, and the pace of its loop.

`AdaptiveDataLoaderHelper` is for loaders of one's own, used as AdaptDL's::

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

Where gradients accumulate, a window is shorter where fewer full batches are left up to `end_index`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch

from adaptdl_elastic import _session, checkpoint, collective, env
from adaptdl_elastic._checks import flag, integer, whole
from adaptdl_elastic._interfaces import Command, ElasticLoader
from adaptdl_elastic.reducer import PeerLostError
from adaptdl_elastic.torch._data.checks import check_bounds, check_writer
from adaptdl_elastic.torch._data.partition import Window, share
from adaptdl_elastic.torch._data.registry import registry
from adaptdl_elastic.torch._runtime.position import ScriptPosition, script_position
from adaptdl_elastic.torch._tuning.batch_size import Limits, initial, local_batch, misfit

logger = logging.getLogger(__name__)

_IDLE_PASSES = 10  # without progress, all steps left out, that end an epoch with autoscaling


class AdaptiveDataLoaderHelper:
    """Position, batch size and pace of one loader.

    Args:
        batch_size: Samples per optimizer step over all replicas, at first.
    """

    def __init__(self, batch_size: int = 1) -> None:
        size = integer(batch_size)
        if size is None or size < 1:
            raise ValueError(
                f"batch_size={batch_size!r}: give the number of samples per step over all replicas, 1 or more"
            )
        self.batch_size = batch_size = size
        self.sample_dimension: int | None = None  # of the batches, along which samples lie; None: not known
        self._registry = registry()
        self.key = self._registry.key()
        self._registry.unrepeatable += 1
        self._max_batch_size: int | None = None
        self._local_bounds: tuple[int, int] | None = None
        self._accumulation = False
        self._atomic = local_batch(batch_size, self.replicas)
        self._accum = 0
        self._generation: int | None = None  # whose best batch size was asked for
        self._reported_for: tuple[int, int] | None = None  # when the agent was told what can be done in place
        self._loops: ScriptPosition | None = None
        self._skipped = False
        self._mark = (0.0, 0, 0)  # progress, attempted steps, index: when a pass was last found to be made
        self._entered: tuple[int, list[int]] = (0, [])  # windows, each model's attempted steps: at the start
        # the window under way
        self._window: Window | None = None  # None: a loader of one's own, whose windows are not planned
        self._chunk = 0
        self._window_start = (0, 0)  # index and attempted steps when it began
        self._trained = False  # with this loader, in this process
        self._handed_out = False  # a batch, to this process in the loop under way
        self._left: int | None = None  # batches that were left then to a loader of one's own; None: not known

    def repeats(self) -> None:
        """Record that this loader hands out the same samples again when its index is put back."""
        self._registry.unrepeatable -= 1

    # -- where it is -------------------------------------------------------------------------------

    @property
    def replicas(self) -> int:
        """How many replicas share the data."""
        return _session.current().replicas

    @property
    def current_index(self) -> int:
        """Samples that this loop has handed out so far, on all replicas together, over all passes."""
        running = self._running()
        return 0 if _session.current().dry else running.index

    @current_index.setter
    def current_index(self, index: int) -> None:
        self._running().index = index

    @property
    def end_index(self) -> int:
        """Samples of one pass, over all replicas: what was set last, also before a restart. 0: not known."""
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
        """Largest batch size that may be chosen; None: it stays as it was given."""
        return self._max_batch_size

    @property
    def local_bsz_bounds(self) -> tuple[int, int] | None:
        """Smallest and largest atomic batch size, None where any will do."""
        return self._local_bounds

    @property
    def current_local_bsz(self) -> int:
        """Samples of a full batch on this replica: the atomic batch size."""
        return self._atomic

    @property
    def accumulation_steps(self) -> int:
        """Batches without an optimizer step in the window under way; the last of an epoch may have fewer."""
        if self._window is not None:
            return len(self._window) - 1
        if not self.training:
            return 0
        return self._accum if self._left is None else min(self._accum, self._left - 1)

    @property
    def current_batch_size(self) -> int:
        """Samples of a full optimizer step, over all replicas."""
        return self.replicas * self._atomic * (self._accum + 1 if self.training else 1)

    @property
    def may_accumulate(self) -> bool:
        """Whether several batches may be accumulated to one step."""
        return self._accumulation

    @property
    def accumulation(self) -> int:
        """Batches without an optimizer step in a full window."""
        return self._accum

    @property
    def micro_batch(self) -> int:
        """Place of the batch just handed out among those of its optimizer step."""
        return self._chunk

    def is_accum_step(self) -> bool:
        """Whether the batch just handed out is followed by others before the optimizer steps."""
        return self._chunk < self.accumulation_steps

    def is_optim_step(self) -> bool:
        """Whether the optimizer steps after the batch just handed out."""
        return not self.is_accum_step()

    @property
    def window_samples(self) -> int:
        """Samples of the present optimizer step: all replicas, all its batches."""
        if self._window is None:
            return self.replicas * self._atomic * (self.accumulation_steps + 1)
        return sum(self._window)

    @property
    def local_samples(self) -> int:
        """Samples of the batch just handed out that count: 0 where it only fills a gap, or does not count."""
        if _session.current().dry:
            return 0
        if self._window is None:
            return self._atomic
        return share(self._window[self._chunk], self.replicas, _session.current().rank)

    @property
    def gradient_weight(self) -> float:
        """What this batch's mean gradient has to be multiplied by: 1 unless the window is uneven.

        Relative to the plain mean over replicas and over the window's batches.
        """
        if self._window is None:
            return 1.0
        return self.local_samples * self.replicas * len(self._window) / sum(self._window)

    @property
    def adaptive(self) -> bool:
        """Whether the batch size is chosen while training."""
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
    def settled(self) -> tuple[int, int, int]:
        """Changes whenever the shares of the replicas do: the iterator has to begin anew."""
        return _session.current().generation, self._atomic, self._accum

    def train(self) -> None:
        """Make this the loader that models are trained with. There can be one only.

        AdaptiveDataParallel calls it when a module in training mode is fed from this loader.
        """
        known = self._registry.training
        if known is self:
            return
        if known is not None and known.adaptive and not self._replaces(known):
            raise RuntimeError(
                "a second loader would be used for training: autoscale_batch_size was called on another one"
            )
        self._registry.training = self
        self._trained = True  # where several loaders train in turn, this one will be the one again
        script_position().trainer = self.key
        self._announce_limits()

    def _announce_limits(self) -> None:
        metrics = _session.current().metrics
        metrics.set_batch_size(self.batch_size, self._max_batch_size, self._local_bounds, self._accumulation)
        metrics.set_current_batch_size(self._atomic, self._accum)

    def autoscale_batch_size(
        self,
        max_batch_size: int,
        local_bsz_bounds: tuple[int | None, int | None] | None = None,
        gradient_accumulation: bool = False,
    ) -> None:
        """Have the batch size chosen while training, and make this the loader to train with.

        A job is not given numbers of replicas that do not fit these limits once its goodput is known. Where
        it has such a number all the same, e.g. after the loss of a node, in place or restarted, it says so
        and goes on: no batch of a replica is above the largest, nothing is accumulated where that is not
        allowed (so that the total may be below `batch_size`), and the smallest gives way to the maximum.

        Args:
            max_batch_size: Largest batch size, over all replicas (its equal shares are rounded up).
            local_bsz_bounds: Smallest and largest batch of one replica, as memory allows; None: no bound.
            gradient_accumulation: Whether several batches may be accumulated to one step.

        Raises:
            ValueError: when the initial batch size does not fit these limits, on the replicas that a job
                begins with.
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
        self._announce_limits()

    def _replaces(self, known: ElasticLoader) -> bool:
        """Whether this is the loader that a script makes anew in every epoch, `known` being the last one."""
        return known.key == self.key and self._registry.current is not known

    def resolve_batch_size(self) -> int:
        """Settle the batch size of this generation; the atomic batch size.

        Raises:
            RetryDataLoop: a death was survived instead.
        """
        return _session.current().recovery.restart_loop_on_peer_loss(self.sync_local_bsz, self)

    def sync_local_bsz(self) -> int:
        """Settle the batch size of this generation, the same on every replica; the atomic batch size."""
        session = _session.current()
        if self._generation != session.generation:
            self._generation = session.generation
            self._atomic, self._accum = self._initial()
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
        return self._atomic

    def _initial(self) -> tuple[int, int]:
        """Return the initial batch size, divided among the present replicas."""
        given = initial(self._limits, self.replicas)
        return given.atomic_bsz, given.accumulation_steps

    @property
    def _limits(self) -> Limits:
        return Limits(self.batch_size, self._max_batch_size, self._local_bounds, self._accumulation)

    def _poll(self) -> Command | None:
        """In rank 0's control thread: a better batch size, if one was found."""
        better = _session.current().metrics.suggestion()
        if better is None or (better.atomic_bsz, better.accumulation_steps) == (self._atomic, self._accum):
            return None
        return {
            "kind": "batch_size",
            "atomic": better.atomic_bsz,
            "accumulation": better.accumulation_steps,
        }

    def _change(self, command: Command) -> None:
        """At an agreed boundary, on every replica."""
        self._atomic, self._accum = command["atomic"], command["accumulation"]
        _session.current().metrics.set_current_batch_size(self._atomic, self._accum)

    # -- the loop ----------------------------------------------------------------------------------

    @contextmanager
    def context(self) -> Iterator[None]:
        """All of a data loop happens inside of this.

        A loop that its body leaves, by `break` or by an exception (which look the same from here), is over
        once the next data loop is come to, or the epoch ends. Until then an epoch loop that begins anew, in
        this process or after a restart, goes on behind the last optimizer step.

        Outside of an epoch loop it is run from its start whenever the script comes to it.

        Raises:
            RuntimeError: inside another data loop.
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
            self._skipped = not state.enter(self.key)
            known = self._registry.training
            if state.trainer == self.key and (known is None or self._replaces(known)):
                self.train()  # as is known from the epoch before, or to the replicas that were there
            self._loops, self._chunk, self._window, self._handed_out = state, 0, None, False
            self._window_start, self._left = (state.index, self._attempts()), None
            if not (self._skipped or self.training) and state.index == 0:
                # Further on, who has come in the meantime would do it alone, and has rank 0's buffers.
                for model in session.models:
                    model.data_loop_begins()
            if state.index == 0 and not self._skipped:
                state.start_progress = session.metrics.get_progress() if self.adaptive else 0.0
            self._mark = (*self._effort(), state.index)
            self._entered = session.step, self._each_attempts()
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
            except GeneratorExit:  # the loop's body said `break`, or raised an exception
                ended = True
                if not self._skipped:
                    left = self._goes_on_at()
                    session.recovery.loop_left(self)
                raise
        finally:
            if self.training and (left is not None or self._chunk):
                for model in session.models:
                    model.drop_window()
            if drawing:
                streams.leave_loop()
            if state.looping:
                state.leave(ended and not self._skipped, left)
            self._registry.current = None
            self._loops = self._window = None
            self.pause()

    def _goes_on_at(self) -> int:
        """In the loop's body: the index behind the last optimizer step."""
        index, attempts = self._window_start
        if self._window is not None and self._attempts() > attempts:
            return index + sum(self._window)
        return index

    def ended(self) -> bool:
        """All batches have been handed out; False: some have to be once more, because a replica died."""
        return _session.current().recovery.loop_ended(self)

    def pause(self) -> None:
        """Leave the time until the next batch out of the step times."""
        if self.training:
            _session.current().metrics.pause()

    def skipdone(self) -> bool:
        """Whether this loop had ended already before a restart, and must hand out nothing now."""
        if self._loops is None:
            raise RuntimeError("skipdone() belongs inside of context()")
        return self._skipped

    @property
    def handed_out(self) -> bool:
        """Whether this process has got a batch of the loop under way."""
        return self._handed_out

    @contextmanager
    def dry_batch(self) -> Iterator[None]:
        """Around the fetching and the `yield` of a batch that does not count.

        For a loop of which this process has got no batch, though there are some: the names that the loop's
        body sets exist then behind the loop. See `adaptdl_elastic.torch._elastic.dry_batch`.
        """
        window, self._window = self._window, (self.replicas * self._atomic,)
        self._handed_out = True
        try:
            with _session.current().recovery.dry_batch():
                yield
        finally:
            self._window = window

    @contextmanager
    def profile(self, commit: bool = True, boundary: bool = True) -> Iterator[None]:
        """Around the `yield` of one batch: measures it, and at its end does what all replicas agreed on.

        The body must have moved `current_index` on when it ends.

        Args:
            commit: Whether to record the time (not of the first batch after an iterator has started).
            boundary: False: the caller calls `pass_boundary` itself.
        """
        self.begin_batch()
        yield
        self.end_batch(commit, boundary=boundary)

    def begin_window(self, window: Window) -> None:
        """Begin `window`, of which no batch has been fetched."""
        self._window, self._chunk = window, 0
        self._seed_window()

    def _seed_window(self) -> None:
        state = self._running()
        self._registry.streams.begin_window(state.finished, state.entered, state.index)

    def begin_batch(self) -> None:
        """A batch is about to be handed out."""
        self._handed_out = True
        if self._chunk == 0:
            index = self._running().index
            self._window_start = index, self._attempts()
            if self._window is None:
                self._seed_window()
            if self._window is None and self.end_index:
                full = self.replicas * self._atomic
                self._left = -(-(self.end_index - index % self.end_index) // full)
            trains = self.training or self.training_loader_undecided or self._trained
            if trains and not self._running().outside:
                _session.current().recovery.begin_window(index)
        if self.training:
            _session.current().metrics.profile_step_start(self._atomic)

    def end_batch(self, commit: bool = True, even: bool = True, boundary: bool = True) -> None:
        """The loop's body has done with the batch, and `current_index` is behind it.

        Args:
            commit: Whether to record the time.
            even: Whether all replicas had a full batch.
            boundary: False: the caller calls `pass_boundary` itself when a window has ended.
        """
        session, state, training = _session.current(), self._running(), self.training
        accumulating, safe = self.is_accum_step(), session.recovery
        if training:
            if commit and even and not safe.broken:
                session.metrics.profile_step_commit(accumulating)
            else:
                session.metrics.pause()
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
        if safe.broken and not state.outside:
            safe.recover("a replica is gone", self)
            return
        if safe.failed:
            raise PeerLostError("a replica is gone, in a training loop outside of remaining_epochs_until")
        session.consensus.report_step()
        if boundary:
            self.pass_boundary()

    def pass_boundary(self, last: bool = False) -> None:
        """Between two steps: do what all replicas have agreed on.

        Args:
            last: Whether nothing of the data loop is left.
        """
        session, state = _session.current(), self._running()
        if not any(model.accumulates_by_hand for model in session.models):  # others could not go on from here
            session.recovery.retry_on_peer_loss(lambda: state.boundary(last), self)

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
        """Return how far this pass is, in samples; with autoscaling in samples at the initial batch size."""
        state = self._running()
        if not self.adaptive:
            return float(min(state.index, self.end_index))
        progress = (self._effort()[0] - state.start_progress) * self._windows_per_step() * self.batch_size
        return min(max(progress, 0.0), float(self.end_index))

    def _windows_per_step(self) -> int:
        """Return in how many windows the script takes one step: more than 1 where it accumulates by hand."""
        windows, before_each = _session.current().step - self._entered[0], self._entered[1]
        counts = zip_longest(self._each_attempts(), before_each, fillvalue=0)
        own = max((now - then for now, then in counts), default=0)
        return max(1, round(windows / own)) if own else 1

    def epoch_done(self) -> bool:
        """With autoscaling: whether this loop has made the progress of one pass at the initial batch size.

        Rank 0's view, on every replica. Progress is counted in steps of the initial batch size; a pass
        of n samples is n / batch_size of them, and the last one is rounded. A script that accumulates by
        hand, and steps once in k windows, makes a k-th of that in a pass.

        Raises:
            RetryDataLoop: a death was survived instead.
        """
        session, state = _session.current(), self._running()
        progress, attempts = self._effort()
        steps = self.end_index / self.batch_size / self._windows_per_step()
        done = progress - state.start_progress + 0.5 >= steps
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

    def _effort(self) -> tuple[float, int]:
        """Progress of the models, and how often they were to be stepped."""
        return _session.current().metrics.get_progress() if self.adaptive else 0.0, self._attempts()

    def _attempts(self) -> int:
        return sum(self._each_attempts())

    def _each_attempts(self) -> list[int]:
        return [model.attempted_steps for model in _session.current().models]

    # -- telling -----------------------------------------------------------------------------------

    def to_tensorboard(self, writer: Any, global_step: int, tag_prefix: str = "") -> None:
        """Write batch sizes to a `torch.utils.tensorboard.SummaryWriter`. On rank 0 only."""
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
    """Return whether this is the first generation of a run, and nothing has been trained yet."""
    fresh = env.num_restarts() == 0 and not _session.current().joining
    return fresh and checkpoint.loaded_id() is None


def initial_seed(loader: AdaptiveDataLoaderHelper, generator: torch.Generator | None) -> int:
    """Return the seed of a loader's order: rank 0's generator's or `torch.manual_seed`, for all replicas.

    Once settled it is kept in checkpoints: a script that does not seed goes on in the order it began in.

    Raises:
        RetryDataLoop: a death was survived instead.
    """
    state = script_position()
    known = state.seeds.get(loader.key)
    if known is None:
        own = generator.initial_seed() if generator is not None else registry().streams.seed
        mine, safe = own & (2**63 - 1), _session.current().recovery
        known = safe.restart_loop_on_peer_loss(lambda: int(collective.share(mine, "seed")), loader)
        state.seeds[loader.key] = known
    return known
