"""What a job learns about itself while it trains, and the batch size that follows from it.

Every replica measures how long steps take at each (nodes, replicas, atomic batch size), and is told
the gradient statistics. On rank 0 a thread of its own fits the goodput model to them, looks for a better
batch size, and reports to the agent; the training loop only appends numbers and reads one attribute.
How times are averaged is `step_times`'s business, how a batch size is chosen `batch_size`'s. No step is
measured before `WARMUP` have passed since a start or a change of the batch size: the first ones allocate,
compile and fill caches.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from adaptdl_elastic import _session, checkpoint
from adaptdl_elastic.goodput import GoodputFunction, GradParams, PerfParams, fit_perf_params
from adaptdl_elastic.protocol import environment
from adaptdl_elastic.protocol.hints import MOST, JobHints, ProfileEntry, encode
from adaptdl_elastic.protocol.messages import Hints
from adaptdl_elastic.torch._tuning.batch_size import BatchSize, Chooser, Limits
from adaptdl_elastic.torch._tuning.step_times import ENOUGH, WINDOW, Key, StepTimes, robust_mean
from adaptdl_elastic.torch._tuning.training_warnings import TrainingWarnings, data_problem

logger = logging.getLogger(__name__)

WARMUP = 3
"""Steps that are not measured after a start, a change of size or of the batch size."""

REFIT = 0.05
"""Relative change of a mean step time that makes the model be fitted anew."""

SOON = 0.1
"""Seconds from a change to the first look at it; then twice as long each time, up to the interval."""

FORMAT = 2


@dataclass
class _Position:
    step: int = 0
    epoch: int = 0
    epochs: int | None = None
    samples_done: float | None = None
    samples_total: float | None = None


class _State(checkpoint.State):
    """The measurements, in the checkpoint."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__("adaptdl-metrics")
        self._metrics = metrics

    def save(self, fileobj: BinaryIO) -> None:
        fileobj.write(json.dumps(self._metrics.dump()).encode())

    def load(self, fileobj: BinaryIO) -> None:
        self._metrics.restore(json.load(fileobj))


class Metrics:
    """See the module's docstring. One per session; all methods are cheap and safe from any thread.

    `clock` is a monotonic clock in seconds. `background=False` leaves `refresh` to the caller.
    """

    def __init__(
        self,
        session: _session.Session | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        background: bool = True,
    ) -> None:
        self._session = session or _session.current()
        self._clock = clock
        self._background = background
        self._interval = _report_interval()
        self._times = StepTimes()
        self._grads: dict[str, tuple[float, float]] = {}
        self._gains: dict[str, tuple[float, float]] = {}
        self._progress = 0.0
        self._warnings = TrainingWarnings(self._session)
        self._limits: Limits | None = None
        self._current = BatchSize(0, 0)
        self._steps = 0  # with an optimizer step, since it was changed
        self._reached = 0  # global batch size in use before a restart
        self._position = _Position()
        self._inplace = (False, "")
        self._max_profiled = 1
        # the step that is being measured
        self._begun: float | None = None
        self._ended: float | None = None
        self._atomic = 0
        self._skip = WARMUP
        self._where: Key | None = None
        # rate of finished steps, for the measured throughput
        self._recent: deque[tuple[float, int]] = deque(maxlen=WINDOW)
        self._window_time, self._window_samples = 0.0, 0
        # what the background thread found
        self._measured: dict[Key, tuple[float, float]] = {}
        self._fitted: dict[Key, tuple[float, float]] = {}  # what `_perf_params` were fitted to
        self._perf_params: PerfParams | None = None
        self._suggestion: BatchSize | None = None
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._closed = False
        self._announced: BatchSize | None = None
        self._state = _State(self)
        checkpoint.load_state(self._state)

    # ----------------------------------------------------------------------------------- measuring

    def profile_step_start(self, atomic_bsz: int) -> None:
        """A forward pass with `atomic_bsz` samples on this replica begins."""
        if atomic_bsz != self._atomic:
            self._atomic = atomic_bsz
            self._skip = max(self._skip, WARMUP)
        self._begun = self._clock()

    def profile_step_commit(self, accumulation_step: bool = False) -> None:
        """The pass has ended; it was one without an optimizer step if `accumulation_step`.

        Its time counts from the end of the pass before, so that waiting for data is part of a step.
        """
        if self._begun is None:
            return
        now = self._clock()
        elapsed = now - (self._begun if self._ended is None else self._ended)
        self._begun, self._ended = None, now
        session = self._session
        key = Key(session.nodes, session.replicas, self._atomic)
        if self._where != key:
            if self._where is not None and self._where[:2] != key[:2]:
                self._skip = WARMUP
                self._recent.clear()
            self._where = key
        self._window_time += elapsed
        self._window_samples += session.replicas * self._atomic
        if not accumulation_step:
            self._steps += 1
            self._recent.append((self._window_time, self._window_samples))
            self._window_time, self._window_samples = 0.0, 0
        if self._skip > 0:
            self._skip -= 1
        else:  # on every replica: any of them may have to take rank 0's place
            self._times.add(key, elapsed, now, accumulation_step)
            self._max_profiled = max(self._max_profiled, key.replicas)
        if session.rank == 0 and self._background and self._thread is None:
            self._start()

    def pause(self) -> None:
        """The time from here to the next pass is no step's: another loop, a checkpoint, a rescale."""
        self._begun = self._ended = None
        self._window_time, self._window_samples = 0.0, 0

    # ------------------------------------------------------------------------------- being told

    def update_grad_params(self, key: str, sqr: float, var: float) -> None:
        """|G|² and tr Σ of the model `key`, both at the initial batch size. Several models add up."""
        if math.isfinite(sqr) and math.isfinite(var):
            self._grads[key] = (max(float(sqr), 0.0), max(float(var), 0.0))

    def update_gain(self, key: str, gain: float, lr_factor: float) -> None:
        """AdaScale's gain of the model `key`, and what its learning rate is multiplied by."""
        self._gains[key] = (float(gain), float(lr_factor))

    def update_progress(self, progress: float) -> None:
        """Progress so far, in steps at the initial batch size."""
        self._progress = float(progress)

    def get_progress(self) -> float:
        """Progress so far, in steps at the initial batch size."""
        return self._progress

    def set_batch_size(
        self,
        init_batch_size: int,
        max_batch_size: int | None = None,
        local_bsz_bounds: tuple[int, int] | None = None,
        gradient_accumulation: bool = False,
    ) -> None:
        """What the training loader was given. `max_batch_size` None: the batch size stays as it is."""
        bounds = None if local_bsz_bounds is None else (int(local_bsz_bounds[0]), int(local_bsz_bounds[1]))
        self._limits = Limits(init_batch_size, max_batch_size, bounds, bool(gradient_accumulation))

    def set_current_batch_size(self, atomic_bsz: int, accumulation_steps: int) -> None:
        """The batch size that is in use from now on."""
        now = BatchSize(atomic_bsz, accumulation_steps)
        if now != self._current:
            self._current, self._suggestion, self._steps = now, None, 0
            self._recent.clear()
            self._wake.set()

    def update_position(
        self,
        *,
        step: int,
        epoch: int = 0,
        epochs: int | None = None,
        samples_done: float | None = None,
        samples_total: float | None = None,
        data_size: int = 0,
    ) -> None:
        """Where the job is: steps, epoch of how many, samples (at the initial batch size) of how many.

        data_size: Samples of the data set, 0 where that is not known.
        """
        self._position = _Position(step, epoch, epochs, samples_done, samples_total)
        now, limits, replicas = self._current, self._limits, self._session.replicas
        if limits is not None:
            parts = replicas * (now.accumulation_steps + 1)
            problem = data_problem(data_size, parts * now.atomic_bsz, limits.init, parts)
            self.report_problem("the batch size", problem)
        if self._session.rank == 0 and self._background and self._thread is None:
            self._start()  # no step is ever measured where all of them are shorter than the batch size

    def report_problem(self, about: str, problem: str | None) -> None:
        """Take what is wrong with a part of the training and what to do, or None: nothing is any more."""
        if self._warnings.report(about, problem):
            self._wake.set()

    def set_inplace(self, possible: bool, reason: str = "") -> None:
        """Whether this script can be rescaled without a restart, and why not."""
        self._inplace = (possible, reason)

    # --------------------------------------------------------------------------------- answering

    def get_goodput_fn(self) -> GoodputFunction | None:
        """The fitted model; None until enough was measured and gradient statistics are known."""
        limits, grads, perf = self._limits, self.grad_params(), self._perf_params
        if limits is None or grads is None or perf is None:
            return None
        return GoodputFunction(perf, grads, limits.init)

    def grad_params(self) -> GradParams | None:
        """The sum over models; None before the first statistics."""
        values = list(self._grads.values())
        if not values:
            return None
        sqr, var = sum(v[0] for v in values), sum(v[1] for v in values)
        factor = MOST / max(sqr, var, MOST)  # of training that diverges; it is their ratio that counts
        return GradParams(sqr * factor, var * factor)

    def gain(self) -> tuple[float, float]:
        """(gain, learning-rate factor), the mean over models; (1, 1) before the first."""
        values = list(self._gains.values())
        if not values:
            return 1.0, 1.0
        return sum(v[0] for v in values) / len(values), sum(v[1] for v in values) / len(values)

    def best_batch_size(self) -> BatchSize | None:
        """The best batch size on the replicas of this generation; None until there is a model.

        For the start of a generation, when nothing is in use yet: it takes milliseconds.
        """
        if self._perf_params is None:  # after a restart; else the background thread has done it
            self._refit()
        chooser = self._chooser()
        return None if chooser is None else chooser.optimum()

    def suggestion(self) -> BatchSize | None:
        """A batch size that is worth changing to, as the background thread last found; costs nothing."""
        return self._suggestion

    def throughput(self) -> float | None:
        """Samples per second over the last steps; None before there are any."""
        recent = list(self._recent)
        if len(recent) <= ENOUGH:
            return None
        seconds = robust_mean(seconds for seconds, _ in recent[1:])  # the first may be a warm-up
        return sum(n for _, n in recent[1:]) / (len(recent) - 1) / seconds if seconds > 0 else None

    def _chooser(self) -> Chooser | None:
        """All that a choice of the batch size depends on now; None until there is a model."""
        session, limits, perf, grads = self._session, self._limits, self._perf_params, self.grad_params()
        if limits is None or perf is None or grads is None:
            return None
        here = session.nodes, session.replicas
        return Chooser(*here, limits, perf, grads, self._measured, self._current, self._steps, self._reached)

    def entries(self) -> tuple[ProfileEntry, ...]:
        """Every configuration that was measured often enough."""
        return self._times.entries()

    def hints(self) -> JobHints:
        """What is reported to those who decide on this job's size."""
        session, limits, position = self._session, self._limits, self._position
        now, grads, model = self._current, self.grad_params(), self.get_goodput_fn()
        batch_size = session.replicas * now.atomic_bsz * (now.accumulation_steps + 1)
        throughput, (gain, lr_factor) = self.throughput(), self.gain()
        efficiency = predicted = None
        if limits is not None and grads is not None and batch_size:
            efficiency = float(GoodputFunction(None, grads, limits.init).efficiency(batch_size))
        if model is not None and batch_size:
            predicted = float(model(session.nodes, session.replicas, now.atomic_bsz, now.accumulation_steps))
        goodput = None if throughput is None or efficiency is None else throughput * efficiency
        done, total = position.samples_done, position.samples_total
        return JobHints(
            job=session.job,
            generation=session.generation,
            nodes=session.nodes,
            replicas=session.replicas,
            init_batch_size=limits.init if limits else 0,
            batch_size=batch_size,
            atomic_bsz=now.atomic_bsz,
            accumulation_steps=now.accumulation_steps,
            max_batch_size=limits.maximum if limits else None,
            local_bsz_bounds=limits.bounds if limits else None,
            gradient_accumulation=limits.accumulation if limits else False,
            max_profiled_replicas=self._max_profiled,
            grad_params=None if grads is None else (grads.sqr, grads.var),
            perf_params=self._perf_params,
            profile=self.entries(),
            gain=gain,
            lr_factor=lr_factor,
            throughput=throughput,
            goodput=goodput,
            predicted_goodput=predicted,
            efficiency=efficiency,
            epoch=position.epoch,
            epochs=position.epochs,
            progress=None if done is None or not total else min(done / total, 1.0),
            samples_done=done,
            remaining_samples=None if done is None or total is None else max(total - done, 0.0),
            step=position.step,
            inplace=self._inplace[0],
            inplace_reason=self._inplace[1],
            warnings=self._warnings.messages,
            time=time.time(),
        )

    # ------------------------------------------------------------------------------ in the background

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="adaptdl-metrics", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        pause = SOON
        while not self._closed:
            pause = SOON if self._wake.wait(min(pause, self._interval)) else 2 * pause
            self._wake.clear()
            try:
                self.refresh()
            except Exception:  # never the training loop's trouble; say it and go on
                logger.exception("fitting the goodput model")

    def refresh(self) -> None:
        """Fit, look for a better batch size, report. What the background thread does."""
        session = self._session
        if session.rank != 0:
            return
        self._refit()
        chooser = self._chooser()
        self._suggestion = None if chooser is None else chooser.better()
        if self._current.atomic_bsz < 1 or self._limits is None:
            return
        hints = self.hints()
        self._announce(hints)
        session.send(Hints(json.loads(encode(hints))))

    def _refit(self) -> None:
        entries = self.entries()
        means = {
            Key(e.nodes, e.replicas, e.atomic_bsz): (e.accum_step_time, e.optim_step_time) for e in entries
        }
        self._measured = means
        if not means or not self._changed(means):
            return
        try:
            self._perf_params = fit_perf_params(
                *(
                    np.array([getattr(e, name) for e in entries])
                    for name in ("nodes", "replicas", "atomic_bsz", "accum_step_time", "optim_step_time")
                )
            )
        except ValueError as error:
            logger.debug("no model from these step times: %s", error)
        self._fitted = means

    def _changed(self, means: dict[Key, tuple[float, float]]) -> bool:
        def near(a: float, b: float) -> bool:
            return abs(a - b) <= REFIT * max(abs(a), abs(b))

        old = self._fitted
        return means.keys() != old.keys() or not all(
            near(a, b) for key, pair in means.items() for a, b in zip(pair, old[key], strict=True)
        )

    def _announce(self, hints: JobHints) -> None:
        """A `batch_size` event when it has changed, once its goodput was measured."""
        if self._announced == self._current or hints.throughput is None:
            return
        self._announced = self._current
        names = (
            "batch_size", "atomic_bsz", "accumulation_steps", "gain", "lr_factor", "predicted_goodput",
            "goodput", "throughput", "efficiency", "step", "epoch",
        )  # fmt: skip
        self._session.emit("batch_size", **{name: getattr(hints, name) for name in names})

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout=1)

    # -------------------------------------------------------------------------------- being saved

    def dump(self) -> dict[str, Any]:
        """Everything that a later generation needs, as JSON."""
        now = self._current
        batch_size = self._session.replicas * now.atomic_bsz * (now.accumulation_steps + 1)
        return {
            "v": FORMAT,
            "times": self._times.dump(),
            "grads": self._grads,
            "gains": self._gains,
            "progress": self._progress,
            "max_profiled": self._max_profiled,
            "batch_size": batch_size or self._reached,
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """The inverse of `dump`. ValueError for a newer format."""
        if saved.get("v") != FORMAT:
            raise ValueError(f"metrics of format {saved.get('v')}, this version reads {FORMAT}")
        self._times.load(saved["times"], self._clock())
        self._grads = {key: (pair[0], pair[1]) for key, pair in saved["grads"].items()}
        self._gains = {key: (pair[0], pair[1]) for key, pair in saved["gains"].items()}
        self._progress = saved["progress"]
        self._max_profiled = saved["max_profiled"]
        self._reached = saved["batch_size"]
        self._measured = self._fitted = {}


def _report_interval() -> float:
    text = os.environ.get(environment.REPORT_INTERVAL)
    if not text:
        return 2.0
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"ADAPTDL_REPORT_INTERVAL={text}: a positive number of seconds is needed")
    return value
