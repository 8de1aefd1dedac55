"""One job of a simulation: its true behaviour and its measurements so far."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from adaptdl_elastic.autoscaler.policy.policy_types import NOTHING, Allocation
from adaptdl_elastic.goodput import GoodputFunction, GradParams, PerfParams, fit_perf_params
from simulator.application import Application
from simulator.workload import Submission

_EPS = 1e-8
_GOOD_ENOUGH = 0.01  # log error of a prediction below which a measurement causes no new fit

_OTHER_SPEED = math.log(1.3)  # log ratio of step times from which on a new measurement replaces one


@dataclass
class Profile:
    """Step times by (nodes, replicas, atomic batch size), and θ, which is fitted to them on demand."""

    times: dict[tuple[int, int, int], tuple[float, float]] = field(default_factory=dict)
    max_replicas: int = 0
    replaced: int = 0  # how often a measurement was replaced, on nodes of another speed
    _theta: PerfParams | None = None
    _stale: bool = False
    _error: float = 0.0  # root mean squared log error of the last fit

    def add(self, nodes: int, replicas: int, atomic_bsz: int, step_time: float, sync_time: float) -> None:
        """Record a measurement; a configuration that is already measured is ignored."""
        key = nodes, replicas, atomic_bsz
        if key in self.times:
            if abs(math.log(step_time / self.times[key][0])) < _OTHER_SPEED:
                return
            self._stale, self.replaced = True, self.replaced + 1
        self.times[key] = step_time, sync_time
        self._stale = self._stale or self._theta is None or replicas > self.max_replicas
        self.max_replicas = max(self.max_replicas, replicas)
        if not self._stale and self._theta is not None:
            predicted = GoodputFunction(self._theta, GradParams(1.0, 1.0), 1).throughput(*key, 0)
            error = abs(math.log(predicted * step_time / (replicas * atomic_bsz)))
            self._stale = error > max(_GOOD_ENOUGH, 1.5 * self._error)

    @property
    def theta(self) -> PerfParams | None:
        """Throughput parameters fitted to the measurements; None before the first one."""
        if self._stale:
            nodes, replicas, atomic = zip(*self.times, strict=True)
            step, sync = zip(*self.times.values(), strict=True)
            accum = [max(a - b, 1e-6) for a, b in zip(step, sync, strict=True)]
            self._theta = fit_perf_params(nodes, replicas, atomic, accum, step, guess=self._theta)
            self._stale = False
            predicted = GoodputFunction(self._theta, GradParams(1.0, 1.0), 1).throughput(
                nodes, replicas, atomic, 0
            )
            errors = np.log(predicted * np.array(step) / (np.array(replicas) * np.array(atomic)))
            self._error = float(np.sqrt(np.mean(errors**2)))
        return self._theta


class SimJob:
    """A job that replays an application's traces under its allocations.

    `fixed_batch_size` is None for a job that chooses its batch size by goodput.
    """

    def __init__(self, submission: Submission, app: Application, fixed_batch_size: int | None) -> None:
        self.submission = submission
        self.name = submission.name
        self.app = app
        self.fixed_batch_size = fixed_batch_size
        self.profiles: dict[str, Profile] = {}  # by node type
        self.node_type = ""  # type of the present nodes; the names of several types are joined by a plus sign
        self.grad_params: GradParams | None = None
        self.allocation: Allocation = NOTHING
        self.parts: tuple[int, ...] = ()
        self.atomic_bsz = 0
        self.accumulation_steps = 0
        self.progress = 0.0
        self.epoch = 0
        self.now = 0.0
        self.pause_left = 0.0
        self.completed: float | None = None
        self.starts = 0
        self.waiting_since: float | None = submission.time
        self.last_change: float | None = None
        self.ran_since = 0.0  # seconds of training since the allocation changed
        self.longest_wait = 0.0
        self._configuration: tuple[object, ...] | None = None
        self._rate = 0.0

    @property
    def replicas(self) -> int:
        """Number of replicas."""
        return sum(self.parts)

    @property
    def profile(self) -> Profile:
        """The measurements on the present type of node."""
        return self.profiles.setdefault(self.node_type, Profile())

    @property
    def measured(self) -> Profile:
        """The measurements on the present type of node, else those on the type that it has run on most."""
        here = self.profiles.get(self.node_type)
        if here is not None and here.times:
            return here
        return max(self.profiles.values(), key=lambda profile: len(profile.times), default=self.profile)

    @property
    def speed(self) -> Application:
        """The application's step times and batch sizes on the present type of node."""
        return self.app.on(self.node_type)

    def goodput_function(self) -> GoodputFunction | None:
        """Return the goodput function fitted to the job's own measurements; None before the first one."""
        theta = self.measured.theta
        if self.grad_params is None or theta is None:
            return None
        return GoodputFunction(theta, self.grad_params, self.app.init_batch_size)

    def allocate(self, allocation: Allocation, pause: float, node_type: str = "") -> None:
        """Change the allocation now.

        Args:
            allocation: The replicas by node; ranks follow its order.
            pause: Seconds that the change costs.
            node_type: The type of its nodes.
        """
        self.node_type = node_type
        if self.waiting_since is not None and allocation:
            self.longest_wait = max(self.longest_wait, self.now - self.waiting_since)
        self.waiting_since = None if allocation else (self.waiting_since or self.now)
        self.allocation = dict(allocation)
        self.parts = tuple(allocation.values())
        self.last_change = self.now
        self.ran_since = 0.0
        if self.parts:
            self._choose_batch()
            self.pause_left = pause
            self.starts += 1
        else:
            self.atomic_bsz = 0

    def _choose_batch(self) -> None:
        app, replicas = self.speed, self.replicas
        function = self.goodput_function() if self.fixed_batch_size is None else None
        if function is not None:
            bounds = app.min_local_bsz, app.max_local_bsz
            _, self.atomic_bsz, self.accumulation_steps = function.optimize(
                len(self.parts), replicas, app.max_batch_size, bounds, accumulation=True
            )
        else:
            total = self.fixed_batch_size or max(app.init_batch_size, app.min_local_bsz * replicas)
            local = math.ceil(total / replicas - _EPS)
            accum = math.ceil(local / app.max_local_bsz - _EPS) - 1
            if replicas == 1 and total > app.init_batch_size:
                accum = max(accum, 1)
            self.accumulation_steps = accum
            self.atomic_bsz = math.ceil(local / (accum + 1) - _EPS)
        count = replicas * (self.accumulation_steps + 1)
        self.atomic_bsz = min(self.atomic_bsz, int(app.max_batch_size / count))

    def rate(self) -> float:
        """Return the true progress per second, and record the job's measurements in this configuration."""
        app, replicas = self.speed, self.replicas
        configuration = self.node_type, self.parts, self.atomic_bsz, self.accumulation_steps, self.epoch
        if configuration == self._configuration:
            return self._rate
        batch_size = replicas * self.atomic_bsz * (self.accumulation_steps + 1)
        scale = batch_size / app.init_batch_size
        step_time, sync_time = app.throughput(self.parts, self.atomic_bsz)
        sqr, var = app.grad_stats(batch_size, self.epoch)
        gain = (var + sqr) / (var / scale + sqr)
        self.profile.add(len(self.parts), replicas, self.atomic_bsz, step_time, sync_time)
        self.grad_params = GradParams(sqr, var)
        self._configuration = configuration
        self._rate = gain / (step_time + (step_time - sync_time) * self.accumulation_steps)
        return self._rate

    def step(self, seconds: float) -> None:
        """Simulate `seconds` of the job."""
        if not self.parts or self.completed is not None:
            self.now += seconds
            return
        delay = min(self.pause_left, seconds)
        self.pause_left -= delay
        self.now += delay
        seconds -= delay
        while seconds > 0 and self.completed is None:
            rate = self.rate()
            end = float(self.app.ends[self.epoch])
            if self.progress + rate * seconds < end:
                self.progress += rate * seconds
                self.ran_since += seconds
                self.now += seconds
                return
            delta = min(round((end - self.progress) / rate), seconds)
            self.epoch += 1
            self.progress = end
            self.ran_since += delta
            self.now += delta
            seconds -= delta
            if self.epoch > self.app.epochs - 1:
                self.completed = self.now
                break
            self._choose_batch()
        self.now += seconds

    def next_stop(self, within: float) -> float:
        """Return the seconds until the job may complete; infinite if surely more than `within`."""
        if not self.parts or self.completed is not None:
            return math.inf
        rate = self.rate()
        if self.pause_left + (self.app.total_progress - self.progress) / rate > 4 * within:
            return math.inf
        return self.pause_left + float(round((self.app.ends[self.epoch] - self.progress) / rate))
