"""Measure a job while it trains, report to the agent, and choose the batch size.

Every replica measures how long steps take at each (nodes, replicas, atomic batch size), and receives the
gradient statistics. On rank 0 a thread fits the goodput model, looks for a better batch size, and reports to
the agent; the training loop only appends numbers and reads one attribute. `step_times` averages the times,
`batch_size` chooses. The first `WARMUP` steps after a start or a change of the batch size are not measured,
because they allocate, compile and fill caches.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, BinaryIO

import numpy as np

from adaptdl_elastic import _session, checkpoint, env
from adaptdl_elastic._values import BatchSize, Limits
from adaptdl_elastic.goodput import GoodputFunction, GradParams, PerfParams, fit_perf_params
from adaptdl_elastic.protocol.environment import HERE
from adaptdl_elastic.protocol.hints import MOST, TIMES_KEPT, JobHints, ProfileEntry, Straggler, encode
from adaptdl_elastic.protocol.messages import Hints, NetworkChanged
from adaptdl_elastic.torch._tuning.batch_size import Chooser, accumulation_ratio
from adaptdl_elastic.torch._tuning.model_size import exchanged_bytes
from adaptdl_elastic.torch._tuning.other_types import OnType, dumped, on_type
from adaptdl_elastic.torch._tuning.step_times import (
    ENOUGH,
    Estimates,
    Key,
    Refutation,
    StepTimes,
    estimates,
    robust_mean,
)
from adaptdl_elastic.torch._tuning.training_warnings import TrainingWarnings

logger = logging.getLogger(__name__)

WARMUP = 3
"""Steps that are not measured after a start, or a change of replicas or batch size."""

WINDOW = 64
"""Steps over which the throughput is averaged."""

SOON = 0.1
"""Seconds from a change to the first refresh; then doubled each time, up to the interval."""

UNKNOWN = 60.0
"""Least seconds of work that remain, where the script declares no end."""

CHANGES = 600.0
"""Seconds in which a network that has changed may change again."""

FORMAT = 2


class _State(checkpoint.State):
    """Keep the measurements in the checkpoint."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__("adaptdl-metrics")
        self._metrics = metrics

    def save(self, fileobj: BinaryIO) -> None:
        fileobj.write(json.dumps(self._metrics.dump()).encode())

    def load(self, fileobj: BinaryIO) -> None:
        self._metrics.restore(json.load(fileobj))


class Metrics:
    """Keep a job's measurements and model. One object per session; all methods are cheap and thread-safe.

    Args:
        session: the session; None: the current one.
        clock: monotonic seconds.
        background: False leaves `refresh` to the caller.
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
        self._interval = env.report_interval()
        self._node_type = HERE.node_type
        # on nodes of this type
        self._times = StepTimes()
        self._refutation = Refutation(self._times)
        # node type → measurements on it
        self._elsewhere: dict[str, OnType] = {}
        self._grads: dict[str, tuple[float, float]] = {}
        # standard errors of |G|²
        self._errors: dict[str, float] = {}
        # how each model's statistics are measured
        self._estimators: dict[str, str] = {}
        self._gains: dict[str, tuple[float, float]] = {}
        self._wake = threading.Event()
        self._warnings = TrainingWarnings(self._session, changed=self._wake.set)
        # an attribute, because every training step calls it
        self.report_problem = self._warnings.report
        self._stragglers: tuple[Straggler, ...] = ()
        # node → (samples, seconds of a pass on it, time of that measurement)
        self._node_times: dict[str, tuple[int, float, float]] = {}
        self._measured = BatchSize(0, 0)
        # global batch size of the last step, also before a restart
        self._reached = 0
        self._started = self._clock()
        self._network_changed = -math.inf
        self._max_profiled = 1
        # the step that is being measured
        self._begun: float | None = None
        self._ended: float | None = None
        self._atomic = 0
        self._skip = WARMUP
        self._where: Key | None = None
        # generation and names of its nodes
        self._on: tuple[int | None, tuple[str, ...]] = None, ()
        # names of nodes → newest generation that was measured on them
        self._generations: dict[tuple[str, ...], int] = {}
        # rate of the last steps, for the measured throughput
        self._recent: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._window_time, self._window_samples = 0.0, 0.0
        # results of the background thread
        self._estimates: Estimates = estimates(())
        # to which `_perf_params` were fitted
        self._entries: tuple[ProfileEntry, ...] = ()
        self._perf_params: PerfParams | None = None
        self._suggestion: BatchSize | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._announced: BatchSize | None = None
        self._state = _State(self)
        checkpoint.load_state(self._state)

    # Measuring

    def profile_step_start(self, atomic_bsz: int) -> None:
        """Begin a forward pass with `atomic_bsz` samples on this replica."""
        if atomic_bsz != self._atomic:
            self._atomic = atomic_bsz
            self._skip = max(self._skip, WARMUP)
        self._begun = self._clock()

    def profile_step_commit(self, accumulation_step: bool = False) -> None:
        """End the pass; `accumulation_step`: it had no optimizer step.

        Its time counts from the end of the previous pass, so that waiting for data is part of a step.
        """
        if self._begun is None:
            return
        now = self._clock()
        elapsed = now - (self._begun if self._ended is None else self._ended)
        self._begun, self._ended = None, now
        session = self._session
        if session.generation != self._on[0]:
            on = tuple(HERE.placement.split(",")) if HERE.placement else ()
            self._on = session.generation, on
            if on and self._generations.get(on, -1) < HERE.links_since:
                self._times.network_changed(now, on)
        key = Key(session.nodes, session.replicas, self._atomic, self._on[1])
        if self._where != key:
            if self._where is not None and self._where.place != key.place:
                self._skip = WARMUP
                self._recent.clear()
                if key.nodes > 1 and now - self._network_changed < CHANGES:
                    # it may have changed again
                    self._times.network_changed(now, key.on)
            self._where = key
        self._window_time += elapsed
        batch_size = self._batch_size()
        self._window_samples += batch_size / (self._current.accumulation_steps + 1)
        if not accumulation_step:
            self._recent.append((self._window_time, self._window_samples))
            self._window_time, self._window_samples = 0.0, 0
            self._reached = batch_size
            if self._refutation.step_ended(key, elapsed, now, self._skip > 0):
                self._wake.set()
        if self._skip > 0:
            self._skip -= 1
        else:
            # on every replica, since any of them may become rank 0
            self._times.add(key, elapsed, now, accumulation_step)
            if key.on:
                self._generations[key.on] = session.generation
            self._max_profiled = max(self._max_profiled, key.replicas)
        self._start()

    def pause(self) -> None:
        """Do not count the time until the next pass: another loop, a checkpoint, a rescale."""
        # no step is measured if all are shorter than the batch size
        self._start()
        self._begun = self._ended = None
        self._window_time, self._window_samples = 0.0, 0

    # Receiving values

    def update_grad_params(
        self, key: str, sqr: float, var: float, sqr_error: float = 0.0, estimator: str = ""
    ) -> None:
        """Set |G|² and tr Σ of the model `key`, both at the initial batch size. Several models are summed.

        Args:
            key: name of the model.
            sqr: |G|².
            var: tr Σ.
            sqr_error: standard error of `sqr`, inf: unknown. The batch size grows only where it pays in
                spite of it.
            estimator: how they are measured.
        """
        self._estimators[key] = estimator
        if math.isfinite(sqr) and math.isfinite(var):
            self._grads[key] = (max(float(sqr), 0.0), max(float(var), 0.0))
            self._errors[key] = float(sqr_error)

    def update_gain(self, key: str, gain: float, lr_factor: float) -> None:
        """Set AdaScale's gain of the model `key`, and the factor on its learning rate."""
        self._gains[key] = (float(gain), float(lr_factor))

    def batch_size_changed(self) -> None:
        """Begin to measure the batch size of the training loader, if it is another one now."""
        if self._measured != self._current:
            self._measured, self._suggestion = self._current, None
            self._recent.clear()
            self._wake.set()

    def set_stragglers(self, stragglers: tuple[Straggler, ...]) -> None:
        """Set the replicas that the others wait for."""
        self._stragglers = stragglers
        self._wake.set()

    def set_node_times(self, atomic_bsz: int, seconds: Mapping[str, float]) -> None:
        """Set how long a pass of `atomic_bsz` samples takes a replica on each node, without waiting."""
        now = time.time()
        kept = {node: told for node, told in self._node_times.items() if now - told[2] <= TIMES_KEPT}
        self._node_times = kept | {node: (atomic_bsz, one, now) for node, one in seconds.items()}

    def network_changed(self, age: float, atomic_bsz: int, busy: float) -> None:
        """Forget the step times on these nodes from before the network changed, and have links measured.

        Args:
            age: Seconds since then.
            atomic_bsz: Samples of a pass.
            busy: Seconds of a pass without waiting: one replica takes as long, over whatever network.
        """
        now = self._network_changed = self._clock()
        self._times.network_changed(now - age, self._on[1])
        self._session.send(NetworkChanged())
        for _ in range(ENOUGH):
            self._times.add(Key(1, 1, atomic_bsz), busy, now, accumulation=False)
        self._wake.set()

    # Returning values

    def get_goodput_fn(self) -> GoodputFunction | None:
        """Return the fitted model; None until step times and gradient statistics suffice."""
        limits, grads, perf = self._limits, self.grad_params(), self._perf_params
        if limits is None or grads is None or perf is None:
            return None
        return GoodputFunction(perf, grads, limits.init)

    def grad_params(self) -> GradParams | None:
        """Return the sum over models; None before the first statistics."""
        values = list(self._grads.values())
        if not values:
            return None
        sqr, var = sum(v[0] for v in values), sum(v[1] for v in values)
        # limits values of diverging training; only their ratio matters
        factor = MOST / max(sqr, var, MOST)
        return GradParams(sqr * factor, var * factor)

    def gain(self) -> tuple[float, float]:
        """Return (gain, learning-rate factor), the mean over models; (1, 1) before the first."""
        values = list(self._gains.values())
        if not values:
            return 1.0, 1.0
        return sum(v[0] for v in values) / len(values), sum(v[1] for v in values) / len(values)

    def best_batch_size(self) -> BatchSize | None:
        """Return the best batch size on the replicas of this generation; None until there is a model.

        For the start of a generation, when no batch size is in use yet: it takes milliseconds.
        """
        # after a restart; otherwise the background thread has done it
        if self._perf_params is None:
            self._refit()
        chooser = self._chooser()
        return None if chooser is None else chooser.first()

    def suggestion(self) -> BatchSize | None:
        """Return the last suggestion of the background thread, or None. Costs nothing."""
        return self._suggestion

    def throughput(self) -> float | None:
        """Return samples per second over the last steps; None before there are any."""
        recent, where, session = list(self._recent), self._where, self._session
        # the steps of other replicas do not count
        if len(recent) <= ENOUGH or where is None or where[:2] != (session.nodes, session.replicas):
            return None
        # the first may be a warm-up step
        seconds = robust_mean(seconds for seconds, _ in recent[1:])
        return sum(n for _, n in recent[1:]) / (len(recent) - 1) / seconds if seconds > 0 else None

    def _chooser(self) -> Chooser | None:
        """Return everything that a choice of the batch size depends on now; None until there is a model."""
        session, limits, perf, grads = self._session, self._limits, self._perf_params, self.grad_params()
        if limits is None or perf is None or grads is None:
            return None
        return Chooser(
            session.nodes,
            session.replicas,
            limits,
            grads,
            self._estimates,
            self._current,
            self._remaining(),
            self._reached,
            self._grad_error(grads),
            accumulation_ratio(
                self._entries, perf, session.nodes, session.replicas, self._current.atomic_bsz
            ),
        )

    def _remaining(self) -> float:
        """Return the seconds of work that remain; as many as have passed where the script declares no end."""
        position, rate = self._session.reported_position, self._goodput()
        done, total = position.samples_done, position.samples_total
        if done is None or total is None or not rate:
            return max(self._clock() - self._started, UNKNOWN)
        return max(total - done, 0.0) / rate

    def _batch_size(self) -> int:
        """Return the global batch size in use; 0: none yet."""
        loader = self._session.training_loader
        if loader is None:
            return 0
        # without autoscaling also the same on any number of replicas in `steps`, where each has its own batch
        return loader.current_batch_size if loader.adaptive else loader.batch_size

    @property
    def _current(self) -> BatchSize:
        """Batch size in use; (0, 0): none yet."""
        loader = self._session.training_loader
        return BatchSize(0, 0) if loader is None else loader.size

    @property
    def _limits(self) -> Limits | None:
        """Limits of the batch size; None: no loader trains yet."""
        loader = self._session.training_loader
        return None if loader is None else loader.limits

    def _efficiency(self) -> float | None:
        """Return the statistical efficiency of the batch size in use; None if it is unknown."""
        grads, size = self.grad_params(), self._batch_size()
        limits = self._limits
        if limits is None or grads is None or not size:
            return None
        return float(GoodputFunction(None, grads, limits.init).efficiency(size))

    def _goodput(self) -> float | None:
        """Return the measured goodput of the last steps; None if it is unknown."""
        throughput, efficiency = self.throughput(), self._efficiency()
        return None if throughput is None or efficiency is None else throughput * efficiency

    def _grad_error(self, grads: GradParams) -> float:
        """Return the standard error of |G|² in the units of `grads`; inf: unknown."""
        # after a restart, which keeps no errors
        if self._grads.keys() != self._errors.keys():
            return math.inf
        raw = sum(sqr for sqr, _ in list(self._grads.values()))
        return math.hypot(*list(self._errors.values())) * (grads.sqr / raw if raw else 1.0)

    def entries(self) -> tuple[ProfileEntry, ...]:
        """Return every configuration that was measured often enough."""
        found = self._times.entries()
        return tuple(replace(one, generation=self._generations.get(one.on, -1)) for one in found)

    def hints(self) -> JobHints:
        """Return the report of the job."""
        session, limits, position = self._session, self._limits, self._session.reported_position
        now, grads, model = self._current, self.grad_params(), self.get_goodput_fn()
        batch_size, predicted, (gain, lr_factor) = self._batch_size(), None, self.gain()
        if model is not None and batch_size:
            predicted = float(model(session.nodes, session.replicas, now.atomic_bsz, now.accumulation_steps))
        done, total = position.samples_done, position.samples_total
        error = math.inf if grads is None else self._grad_error(grads)
        gradients, state = exchanged_bytes(session.models)
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
            memory_limit=None if session.memory is None else session.memory.largest,
            max_profiled_replicas=self._max_profiled,
            grad_params=None if grads is None else (grads.sqr, grads.var),
            grad_error=error if error <= MOST else None,
            estimator=", ".join(sorted(set(self._estimators.values()) - {""})),
            gradient_bytes=gradients,
            state_bytes=state,
            perf_params=self._perf_params,
            profile=self.entries(),
            node_type=self._node_type,
            elsewhere=tuple(one.profile for _, one in sorted(self._elsewhere.items())),
            node_times=self._node_times,
            gain=gain,
            lr_factor=lr_factor,
            throughput=self.throughput(),
            goodput=self._goodput(),
            predicted_goodput=predicted,
            efficiency=self._efficiency(),
            epoch=position.epoch,
            epochs=position.epochs,
            progress=None if done is None or not total else min(done / total, 1.0),
            samples_done=done,
            remaining_samples=None if done is None or total is None else max(total - done, 0.0),
            step=position.step,
            outside_epochs=session.trains_outside,
            inplace=session.inplace[0],
            inplace_reason=session.inplace[1],
            warnings=self._warnings.messages,
            stragglers=self._stragglers,
            time=time.time(),
        )

    # In the background

    def _start(self) -> None:
        if self._session.rank or not self._background or self._thread is not None:
            return
        self._thread = threading.Thread(target=self._run, name="adaptdl-metrics", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        pause = SOON
        while not self._closed:
            pause = min(pause, self._interval, self._refutation.interval)
            pause = SOON if self._wake.wait(pause) else 2 * pause
            self._wake.clear()
            try:
                self.refresh()
            except Exception:
                # an error is logged, and does not disturb the training loop
                logger.exception("fitting the goodput model")

    def refresh(self) -> None:
        """Fit, look for a better batch size, and report. The background thread calls this."""
        session = self._session
        if session.rank != 0:
            return
        self._refutation.check(self._ended, self._clock())
        self._refit()
        chooser = self._chooser()
        self._suggestion = None if chooser is None else chooser.better()
        if self._current.atomic_bsz < 1 or self._limits is None:
            return
        hints = self.hints()
        self._announce(hints)
        session.send(Hints(json.loads(encode(hints))))

    def _refit(self) -> None:
        session, on = self._session, self._on[1]
        here = session.nodes, session.replicas
        # of the present number of nodes and replicas, only what was measured on these nodes
        entries = tuple(
            one for one in self._times.entries() if (one.nodes, one.replicas) != here or one.on in (on, ())
        )
        self._estimates, self._entries = self._times.estimates(), entries
        if not entries:
            return
        try:
            self._perf_params = fit_perf_params(
                *(
                    np.array([getattr(e, name) for e in entries])
                    for name in ("nodes", "replicas", "atomic_bsz", "accum_step_time", "optim_step_time")
                )
            )
            self._refutation.model = self._perf_params, entries
        except ValueError as error:
            logger.debug("no model from these step times: %s", error)

    def _announce(self, hints: JobHints) -> None:
        """Write a `batch_size` event when it has changed and its goodput was measured."""
        if self._announced == self._current or hints.throughput is None:
            return
        self._announced = self._current
        names = (
            "batch_size", "atomic_bsz", "accumulation_steps", "gain", "lr_factor", "predicted_goodput",
            "goodput", "throughput", "efficiency", "step", "epoch",
        )  # fmt: skip
        self._session.emit("batch_size", **{name: getattr(hints, name) for name in names})

    def close(self) -> None:
        """End the thread. One that runs while the interpreter ends can abort the process."""
        self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout=10)

    # Saving

    def dump(self) -> dict[str, Any]:
        """Return everything that a later generation needs, as JSON."""
        return {
            "v": FORMAT,
            "times": self._times.dump(),
            "grads": self._grads,
            "gains": self._gains,
            "progress": self._session.progress,
            "max_profiled": self._max_profiled,
            "node_type": self._node_type,
            "theta": self._perf_params,
            "memory_limit": self._limit_learnt_here(),
            "elsewhere": {name: dumped(one) for name, one in self._elsewhere.items()},
            "batch_size": self._reached,
            "node_times": self._node_times,
            "generations": [[list(on), number] for on, number in self._generations.items()],
        }

    def _limit_learnt_here(self) -> int | None:
        """Return the memory limit; None if the job has kept it from nodes of another type."""
        memory = self._session.memory
        largest = None if memory is None else memory.largest
        return None if largest in {one.profile.memory_limit for one in self._elsewhere.values()} else largest

    def restore(self, saved: dict[str, Any]) -> None:
        """Restore what `dump` returned; ValueError for another format."""
        if saved.get("v") != FORMAT:
            raise ValueError(f"metrics of format {saved.get('v')}, this version reads {FORMAT}")
        self._restore_types(saved)
        self._grads = {key: (pair[0], pair[1]) for key, pair in saved["grads"].items()}
        self._gains = {key: (pair[0], pair[1]) for key, pair in saved["gains"].items()}
        self._session.saved_progress = saved["progress"]
        self._reached = saved["batch_size"]
        # an earlier version saved none
        self._node_times = saved.get("node_times", {})
        self._generations = {tuple(on): number for on, number in saved.get("generations", ())}

    def _restore_types(self, saved: dict[str, Any]) -> None:
        """Restore the step times of every type, those of the present type as this session's own."""
        # a checkpoint of an earlier version names none
        before = saved.get("node_type", "")
        types = {**saved.get("elsewhere", {}), before: saved}
        mine = types.pop(self._node_type, None)
        if mine is not None:
            self._times.load(mine["times"], self._clock())
            self._max_profiled = mine["max_profiled"]
        self._elsewhere = {
            name: on_type(name, one)
            for name, one in types.items()
            if one["times"] or one.get("memory_limit") is not None
        }
