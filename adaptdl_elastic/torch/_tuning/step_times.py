"""Average step times per configuration, on a machine whose speed varies.

A configuration that was left keeps its last time. If the machine's speed changes afterwards (other jobs,
heat), configurations would be compared at different speeds, and those not measured lately would look better,
or worse, than they are. So the *ratio* of step times is estimated. The logarithm of a step's time at
configuration k and time t is modelled as

 y = u_k + g(t) + noise,

where u_k belongs to the configuration and g to the machine at that moment: a random walk, since speeds change
gradually or seldom. Measurements are summed up in *spans* of about a second at one configuration. The
least-squares u and g (`levels`) follow from all spans together. Measurements right before and right after a
change of configuration determine their ratio best, and returning to a configuration improves all that were
measured between. Times are returned as of now: exp(u_k), with g of the last span as 0.

One case is ambiguous: the speed jumps at the moment of a change. The jump then looks like a property of the
new configuration. When the old one is used again and its steps take far longer or shorter than before
(`JUMP`), what was measured before it was left is dropped.

A network that becomes slower or faster changes only configurations of several nodes. `lag` tells this from a
change of the machine by the time that replicas wait, and then what was measured on several nodes is dropped.

Measurements fade: the variance of a span grows with its age (`FADE`). So a configuration that is returned to
is believed as it is now, and one that was left long ago counts as hardly known. The estimates have a
covariance (`Estimates`), from which `step_curve` predicts sizes that were not measured.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from adaptdl_elastic.goodput import GoodputFunction, GradParams, PerfParams
from adaptdl_elastic.protocol.hints import ProfileEntry

SPAN = 1.0
"""Least duration of a span in seconds, unless the configuration is left before."""

ENOUGH = 3
"""Least number of measurements of a span, and of a configuration that is used."""

SURE = 0.15
"""A configuration is reported if the relative standard error of its mean is at most this."""

FADE = 0.01
"""Standard deviation by which the logarithm of a measured step time becomes uncertain within a second.

After a minute it is 8 %, after an hour 60 %: then it is hardly known whether another size is faster.
"""

STALL = 0.25
"""Seconds by which a step may exceed the median time and still count in any case.

A process that shares its processor is stopped now and then, for the same share of any time. Leaving such
steps out, which are rare among short steps and common among long ones, would favour small batches.
"""

# most measurements of a span
_LONGEST = 4096
JUMP = 5.0
"""Factor between the times of two stays at one configuration from which on the earlier stay is dropped."""

# most spans that are kept: `levels` then takes a millisecond
MOST_SPANS = 96
# noise of a span (logarithms); its correlation time (seconds); smallest noise
_JITTER, _CORRELATED, _FLOOR = 0.08, 0.5, 0.02
# standard deviation of g after a second
_DRIFT = 0.1
# seconds of drift that a restart, perhaps on another machine, counts for
_RESTART = 60.0

REFUTED = 5.0
"""Factor by which a step exceeds a prediction that it refutes."""

CHECK_INTERVAL = 0.5
"""Seconds between two checks while the step after a slow one is under way."""

SLOW_STEPS = 2.0
"""Least seconds that two such steps take. Shorter steps are soon measured as usual."""


class Key(NamedTuple):
    """Identify a configuration at which steps are measured."""

    nodes: int
    replicas: int
    atomic_bsz: int
    # names of several nodes, as far as they are known
    on: tuple[str, ...] = ()

    @property
    def place(self) -> tuple[int, int, tuple[str, ...]]:
        """The configuration without its batch size."""
        return self.nodes, self.replicas, self.on


def robust(samples: Iterable[float]) -> NDArray[np.float64]:
    """Return the samples within three scaled median absolute deviations of the median (Hampel's rule).

    Samples within a tenth of the median, and those slower by at most `STALL`, are always kept.
    """
    values = np.fromiter(samples, dtype=float)
    if not values.size:
        return values
    median = float(np.median(values))
    spread = max(3 * 1.4826 * float(np.median(np.abs(values - median))), 0.1 * abs(median))
    return values[(values >= median - spread) & (values <= median + max(spread, STALL))]


def robust_mean(samples: Iterable[float]) -> float:
    """Return the mean of what `robust` keeps; 0 without samples."""
    values = robust(samples)
    return float(values.mean()) if values.size else 0.0


class Mean(NamedTuple):
    """Statistics of one kind of pass in a span: log of its robust mean in seconds, number, standard error."""

    level: float
    number: int
    # of the logarithm
    error: float


NOTHING = Mean(0.0, 0, 0.0)


def mean_of(times: Sequence[float]) -> Mean:
    """Return the statistics of passes with these times."""
    values = robust(times)
    if not values.size:
        return NOTHING
    mean = max(float(values.mean()), 1e-9)
    return Mean(math.log(mean), len(times), float(values.std()) / mean / math.sqrt(values.size))


class Span(NamedTuple):
    """Successive measurements at one configuration."""

    key: Key
    # seconds on a clock that continues across restarts
    began: float
    ended: float
    # passes without synchronisation
    accum: Mean
    # passes with synchronisation and optimizer step
    optim: Mean

    def kinds(self) -> list[tuple[bool, Mean]]:
        """Return (without synchronisation?, mean) of the kinds of pass that were measured."""
        return [(kind, mean) for kind, mean in ((True, self.accum), (False, self.optim)) if mean.number]


def _joined(one: Mean, other: Mean) -> Mean:
    count = max(one.number + other.number, 1)
    level = (one.level * one.number + other.level * other.number) / count
    error = math.hypot(one.error * one.number, other.error * other.number) / count
    return Mean(level, one.number + other.number, error)


@dataclass
class _Open:
    """Hold the measurements of the current span, which has not ended yet."""

    key: Key
    began: float
    ended: float
    accum: list[float] = field(default_factory=list)
    optim: list[float] = field(default_factory=list)

    def copy(self) -> _Open:
        return _Open(self.key, self.began, self.ended, self.accum.copy(), self.optim.copy())

    def close(self) -> Span:
        return Span(self.key, self.began, self.ended, mean_of(self.accum), mean_of(self.optim))


class StepTimes:
    """Keep the measurements of a job.

    `add` is cheap and is called only by the training thread. Any thread may call the other methods.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._open: _Open | None = None
        # from this process's clock to that of the spans
        self._offset = 0.0

    def add(self, key: Key, seconds: float, now: float, accumulation: bool) -> None:
        """Record a pass of `seconds` at `key` that has ended `now`."""
        with self._lock:
            now += self._offset
            open_ = self._open
            if open_ is None or open_.key != key:
                self._close()
                open_ = self._open = _Open(key, now - seconds, now)
            times = open_.accum if accumulation else open_.optim
            times.append(seconds)
            open_.ended = now
            count = len(open_.accum) + len(open_.optim)
            if (count >= ENOUGH and now - open_.began >= SPAN) or count >= _LONGEST:
                self._close()

    def _close(self) -> None:
        if self._open is not None and max(len(self._open.accum), len(self._open.optim)) >= ENOUGH:
            self._spans = thinned([*self._spans, self._open.close()])
        self._open = None

    def spans(self) -> list[Span]:
        """Return all spans in the order of time, including the one under way."""
        # only for the copy, since the training loop waits for this lock
        with self._lock:
            spans, open_ = self._spans, None if self._open is None else self._open.copy()
        if open_ is None or max(len(open_.accum), len(open_.optim)) < ENOUGH:
            return list(spans)
        return [*spans, open_.close()]

    def estimates(self) -> Estimates:
        """Return the times of all configurations as of now, with their covariance."""
        return estimates(on_newest_nodes(since_jump(self.spans())))

    def entries(self) -> tuple[ProfileEntry, ...]:
        """Return mean times as of now of the configurations that were measured often enough."""
        return entries(self.spans())

    def network_changed(self, since: float, on: tuple[str, ...]) -> None:
        """Forget what was measured before `since` on these nodes, and on several without known names."""
        with self._lock:
            self._close()
            self._spans = [
                span
                for span in self._spans
                if span.key.nodes == 1 or span.began >= since + self._offset or span.key.on not in (on, ())
            ]

    def dump(self) -> list[Any]:
        """Return the spans as JSON."""
        return [
            [list(span.key), span.began, span.ended, list(span.accum), list(span.optim)]
            for span in self.spans()
        ]

    def load(self, dumped: list[Any], now: float) -> None:
        """Continue from what `dump` returned; `now` is on this process's clock."""
        spans = [
            # an earlier version saved no names
            Span(Key(*key[:3], *map(tuple, key[3:])), began, ended, Mean(*accum), Mean(*optim))
            for key, began, ended, accum, optim in dumped
        ]
        with self._lock:
            self._spans, self._open = spans, None
            self._offset = (spans[-1].ended + _RESTART if spans else 0.0) - now


def thinned(spans: list[Span]) -> list[Span]:
    """Return at most `MOST_SPANS` spans: the ends of long stays, and the latest at each configuration."""
    while len(spans) > MOST_SPANS:
        same = [one.key == other.key for one, other in pairwise(spans)]
        inner = next((i for i in range(1, len(same) - 1) if all(same[i - 1 : i + 2])), None)
        place = same.index(True) if inner is None and any(same[:-1]) else inner
        if place is not None:
            one, other = spans[place : place + 2]
            accum, optim = _joined(one.accum, other.accum), _joined(one.optim, other.optim)
            spans[place : place + 2] = [Span(one.key, one.began, other.ended, accum, optim)]
            continue
        later = {span.key: i for i, span in enumerate(spans)}
        del spans[next((i for i, span in enumerate(spans) if later[span.key] > i), 0)]
    return spans


def on_newest_nodes(spans: Sequence[Span]) -> list[Span]:
    """Return for each number of nodes and replicas the spans on the nodes of its last span, without names."""
    newest = {span.key[:2]: span.key.on for span in spans}
    kept = (span for span in spans if span.key.on == newest[span.key[:2]])
    return [span._replace(key=span.key._replace(on=())) for span in kept]


class Levels(NamedTuple):
    """The least-squares u, where g of the last span is 0: the logarithms of times as of now."""

    # configuration, without synchronisation?; shape (n,)
    of: tuple[tuple[Key, bool], ...]
    # shape (n,)
    u: NDArray[np.float64]
    # shape (n, n)
    covariance: NDArray[np.float64]


def _level(span: Span) -> float:
    return (span.optim if span.optim.number else span.accum).level


def since_jump(spans: Sequence[Span]) -> Sequence[Span]:
    """Return the spans after the last stay that a later one at the same configuration contradicts.

    Two stays contradict each other if steps take `JUMP` times as long in one as in the other. The later one
    counts when it has lasted five times `SPAN`: the first steps after a change are often slow. On several
    nodes the network may be the reason, so there only what was measured on the same nodes is left out.
    """
    places = [0] + [i + 1 for i, (one, other) in enumerate(pairwise(spans)) if one.key != other.key]
    stays = [spans[begin:end] for begin, end in zip(places, [*places[1:], len(spans)], strict=True)]
    for later in range(len(stays) - 1, 0, -1):
        stay = stays[later]
        same = [i for i in range(later) if stays[i][0].key == stay[0].key]
        enough = next((span for span in stay if span.ended - stay[0].began >= 5 * SPAN), None)
        if not same or enough is None:
            continue
        if abs(_level(enough) - _level(stays[same[-1]][-1])) > math.log(JUMP):
            kept, key = spans[places[same[-1] + 1] :], stay[0].key
            before = spans[: places[same[-1] + 1]] if key.nodes > 1 else ()
            return [*(one for one in before if one.key.place != key.place), *kept]
    return spans


def levels(spans: Sequence[Span]) -> Levels:
    """Return u of every configuration and kind of pass. `spans` are in order of time."""
    found = tuple(dict.fromkeys((span.key, kind) for span in spans for kind, _ in span.kinds()))
    column = {which: len(spans) + i for i, which in enumerate(found)}
    size, now = len(spans) + len(column), spans[-1].ended
    normal, right = np.zeros((size, size)), np.zeros(size)
    for i, span in enumerate(spans):
        lasted = max(span.ended - span.began, 1e-3)
        jitter = _JITTER**2 * min(1.0, _CORRELATED / lasted)
        faded = _FLOOR**2 + FADE**2 * max(now - span.ended, 0.0)
        for kind, mean in span.kinds():
            precision = 1 / (faded + max(jitter, mean.error**2))
            k = column[span.key, kind]
            for place in (i, k):
                normal[place, place] += precision
                right[place] += precision * mean.level
            normal[i, k] += precision
            normal[k, i] += precision
        if i:
            apart = (span.began + span.ended - spans[i - 1].began - spans[i - 1].ended) / 2
            stiffness = 1 / (_DRIFT**2 * max(apart, 0.05))
            normal[i - 1 : i + 1, i - 1 : i + 1] += stiffness * np.array([[1.0, -1.0], [-1.0, 1.0]])
    # g of the last span is 0
    keep = np.arange(size) != len(spans) - 1
    inverse = np.asarray(np.linalg.inv(normal[np.ix_(keep, keep)]), dtype=np.float64)
    first = len(spans) - 1
    return Levels(found, (inverse @ right[keep])[first:], inverse[first:, first:])


class Estimates(NamedTuple):
    """Times of passes with synchronisation, as of the end of the last span, and how uncertain they are."""

    # shape (n,)
    keys: tuple[Key, ...]
    # shape (n,)
    log_seconds: NDArray[np.float64]
    # of log_seconds, shape (n, n)
    covariance: NDArray[np.float64]


def estimates(spans: Sequence[Span]) -> Estimates:
    """Return the times of configurations that were measured `ENOUGH` times. `spans` are in order of time."""
    counts: dict[Key, int] = {}
    for span in spans:
        counts[span.key] = counts.get(span.key, 0) + span.optim.number
    if not any(count >= ENOUGH for count in counts.values()):
        return Estimates((), np.zeros(0), np.zeros((0, 0)))
    found = levels(spans)
    chosen = [i for i, (key, kind) in enumerate(found.of) if not kind and counts[key] >= ENOUGH]
    keys = tuple(found.of[i][0] for i in chosen)
    return Estimates(keys, found.u[chosen], found.covariance[np.ix_(chosen, chosen)])


def entries(spans: Sequence[Span]) -> tuple[ProfileEntry, ...]:
    """Return mean times by configuration, as of the end of the last span. `spans` are in order of time."""
    if not spans:
        return ()
    spans = since_jump(spans)
    counts = {(span.key, kind): 0 for span in spans for kind in (True, False)}
    precision = dict.fromkeys(counts, 0.0)
    for span in spans:
        for kind, mean in span.kinds():
            counts[span.key, kind] += mean.number
            precision[span.key, kind] += 1 / max(mean.error, 1e-6) ** 2
    level = levels(spans)
    times = {which: math.exp(u) for which, u in zip(level.of, level.u, strict=True)}
    found = []
    for key in sorted({key for key, _ in counts}):
        if counts[key, False] >= ENOUGH and precision[key, False] >= SURE**-2:
            optim = times[key, False]
            accum = times.get((key, True), optim if key.replicas == 1 else 0.0)
            count = counts[key, True], counts[key, False]
            found.append(ProfileEntry(*key[:3], accum, optim, *count, key.on))
    return tuple(found)


class Refutation:
    """Notice within two steps that a change of replicas was a mistake.

    The first steps after a change are not measured, because they allocate and compile. Where steps take
    seconds, as over a slow link, it would take half a minute until the prediction for the new number of
    replicas is replaced by measurements. So a slow step of the warm-up counts as measured once a later one is
    slow, too. The later one may still be under way. The first step alone may be slow for another reason, such
    as the compilation of the model.
    """

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        # a slow step, its seconds, and when it ended
        self._slow: tuple[Key, float, float] | None = None
        # the model, and the configurations to which it was fitted
        self.model: tuple[PerfParams | None, Sequence[ProfileEntry]] = None, ()

    def step_ended(self, key: Key, seconds: float, now: float, warm_up: bool) -> bool:
        """Take note of a step with synchronisation; return whether it may refute the prediction."""
        slow = warm_up and self._exceeds(key, seconds)
        self._slow = (key, seconds, now) if slow else None
        return slow

    @property
    def interval(self) -> float:
        """Seconds after which `check` is to be called again."""
        return math.inf if self._slow is None else CHECK_INTERVAL

    def check(self, begun: float | None, now: float) -> None:
        """Record the slow step if the step that has `begun` is slow already. From any thread."""
        slow = self._slow
        if slow is None or begun is None or now - slow[2] + slow[1] < SLOW_STEPS:
            return
        if self._exceeds(slow[0], now - begun):
            self._slow = None
            for _ in range(ENOUGH):
                self._times.add(*slow, accumulation=False)

    def _exceeds(self, key: Key, seconds: float) -> bool:
        """Return whether a step refutes the prediction for a number of replicas that was not measured yet."""
        perf, known = self.model
        if perf is None or any((entry.nodes, entry.replicas, entry.on) == key.place for entry in known):
            return False
        rate = float(GoodputFunction(perf, GradParams(1.0, 1.0), 1).throughput(*key[:3], 0))
        return seconds * rate > REFUTED * key.replicas * key.atomic_bsz
