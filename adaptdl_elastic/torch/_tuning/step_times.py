"""How long steps take at each configuration, on a machine that is not always equally fast.

A configuration that was left keeps the time that it took then. When the machine's speed changes
afterwards (other jobs, heat, a noisy neighbour), configurations would be compared at different speeds, and
those that were not measured lately look better, or worse, than they are. So what is kept is how much
*longer* one takes than another. The logarithm of a step's time at configuration k and time t is taken for

    y = u_k + g(t) + noise,

u_k being the configuration's own and g the machine's of that moment: a random walk, since speeds change
gradually or seldom. Measurements are summed up in *spans* of about a second at one configuration. The
least-squares u and g (`levels`) follow from all spans together: what was measured right before and
right after a change of configuration says most about their ratio, and when one is returned to, all that were
measured in between profit. Then times are told as of now: that of the configuration in use is what was
measured last, the others' are that times exp(u_k − u_now).
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

from adaptdl_elastic.protocol.hints import ProfileEntry

WINDOW = 64
"""Measurements that a span has at least, unless the configuration was left before."""

SPAN = 1.0
"""Seconds that it lasts at least."""

ENOUGH = 3
"""Measurements that a configuration needs before it is believed."""

SURE = 0.15
"""Relative standard error of the mean at which it is believed, or once it has been measured `LONG`."""

LONG = 5.0
"""Seconds."""

STALL = 0.25
"""Seconds: what takes longer than usual by less than that is the machine's way, and counts.

A process that has to share its processor stands still every now and then, in the same share of any time. To
leave such steps out, which are rare among short ones and common among long ones, would favour small batches.
"""

_LONGEST = 4096  # measurements of a span
_MOST = 96  # spans that are kept: `levels` takes a millisecond
_JITTER, _CORRELATED, _FLOOR = 0.15, 0.5, 0.02  # noise of a span, logarithms; its correlation time, seconds
_DRIFT = 0.4  # standard deviation of g after a second
_RESTART = 60.0  # seconds of drift that a restart, perhaps on another machine, counts for


class Key(NamedTuple):
    """A configuration that steps are measured at."""

    nodes: int
    replicas: int
    atomic_bsz: int


def robust(samples: Iterable[float]) -> NDArray[np.float64]:
    """What lies within three scaled median absolute deviations of the median (Hampel's rule).

    A tenth of the median either way, and what is slower by `STALL`, are always let through.
    """
    values = np.fromiter(samples, dtype=float)
    if not values.size:
        return values
    median = float(np.median(values))
    spread = max(3 * 1.4826 * float(np.median(np.abs(values - median))), 0.1 * abs(median))
    return values[(values >= median - spread) & (values <= median + max(spread, STALL))]


def robust_mean(samples: Iterable[float]) -> float:
    """The mean of what `robust` leaves; 0 without any."""
    values = robust(samples)
    return float(values.mean()) if values.size else 0.0


class Mean(NamedTuple):
    """Of one kind of pass in a span: logarithm of its robust mean in seconds, how many, standard error."""

    level: float
    number: int
    error: float  # of the logarithm


NOTHING = Mean(0.0, 0, 0.0)


def mean_of(times: Sequence[float]) -> Mean:
    """Of passes that took so long."""
    values = robust(times)
    if not values.size:
        return NOTHING
    mean = max(float(values.mean()), 1e-9)
    return Mean(math.log(mean), len(times), float(values.std()) / mean / math.sqrt(values.size))


class Span(NamedTuple):
    """Measurements in succession at one configuration."""

    key: Key
    began: float  # seconds on a clock that goes on through restarts
    ended: float
    accum: Mean  # passes without synchronisation
    optim: Mean  # passes with synchronisation and optimizer step

    def kinds(self) -> list[tuple[bool, Mean]]:
        """(without synchronisation?, mean) of the kinds of pass that were measured."""
        return [(kind, mean) for kind, mean in ((True, self.accum), (False, self.optim)) if mean.number]


def _joined(one: Mean, other: Mean) -> Mean:
    count = max(one.number + other.number, 1)
    level = (one.level * one.number + other.level * other.number) / count
    error = math.hypot(one.error * one.number, other.error * other.number) / count
    return Mean(level, one.number + other.number, error)


@dataclass
class _Open:
    """The span under way."""

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
    """The measurements of a job. `add` is cheap and for the training thread, the rest for any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._open: _Open | None = None
        self._offset = 0.0  # of this process's clock

    def add(self, key: Key, seconds: float, now: float, accumulation: bool) -> None:
        """A pass of `seconds` at `key` has ended `now`."""
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
            if (count >= WINDOW and now - open_.began >= SPAN) or count >= _LONGEST:
                self._close()

    def _close(self) -> None:
        if self._open is not None and max(len(self._open.accum), len(self._open.optim)) >= ENOUGH:
            self._spans = thinned([*self._spans, self._open.close()])
        self._open = None

    def spans(self) -> list[Span]:
        """All that is known, the span under way included, in the order of time."""
        with self._lock:  # only for the copy: the training loop waits for this lock
            spans, open_ = self._spans, None if self._open is None else self._open.copy()
        if open_ is None or max(len(open_.accum), len(open_.optim)) < ENOUGH:
            return list(spans)
        return [*spans, open_.close()]

    def keys(self) -> set[Key]:
        """Configurations of which anything was measured."""
        with self._lock:
            spans, open_ = self._spans, self._open
            return {span.key for span in spans} | ({open_.key} if open_ is not None else set())

    def entries(self) -> tuple[ProfileEntry, ...]:
        """Mean times by configuration, as of now, of those that were measured often enough."""
        return entries(self.spans())

    def dump(self) -> list[Any]:
        """The spans, as JSON."""
        return [
            [list(span.key), span.began, span.ended, list(span.accum), list(span.optim)]
            for span in self.spans()
        ]

    def load(self, dumped: list[Any], now: float) -> None:
        """Go on, `now` on this process's clock, from what `dump` returned."""
        spans = [
            Span(Key(*key), began, ended, Mean(*accum), Mean(*optim))
            for key, began, ended, accum, optim in dumped
        ]
        with self._lock:
            self._spans, self._open = spans, None
            self._offset = (spans[-1].ended + _RESTART if spans else 0.0) - now


def thinned(spans: list[Span]) -> list[Span]:
    """At most `_MOST` of them: a long stay needs its ends only, a configuration its latest stay."""
    while len(spans) > _MOST:
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


def levels(spans: Sequence[Span]) -> dict[tuple[Key, bool], float]:
    """u by (configuration, whether passes are without synchronisation), the last span's g being 0."""
    found = dict.fromkeys((span.key, kind) for span in spans for kind, _ in span.kinds())
    column = {which: len(spans) + i for i, which in enumerate(found)}
    size = len(spans) + len(column)
    normal, right = np.zeros((size, size)), np.zeros(size)
    for i, span in enumerate(spans):
        lasted = max(span.ended - span.began, 1e-3)
        jitter = _JITTER**2 * min(1.0, _CORRELATED / lasted)
        for kind, mean in span.kinds():
            precision = 1 / (_FLOOR**2 + max(jitter, mean.error**2))
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
    keep = np.arange(size) != len(spans) - 1  # g of now is 0
    solved = np.zeros(size)
    solved[keep] = np.linalg.solve(normal[np.ix_(keep, keep)], right[keep])
    return {which: float(solved[place]) for which, place in column.items()}


def _lately(spans: Sequence[Span]) -> dict[bool, float]:
    """Levels of the last `WINDOW` or more passes of each kind at the configuration in use."""
    last = spans[-1]
    before = dict(spans[-2].kinds()) if len(spans) > 1 and spans[-2].key == last.key else {}
    found = {}
    for kind, mean in last.kinds():
        earlier = before.get(kind, NOTHING)
        share = max(min(earlier.number, WINDOW) - mean.number, 0)
        found[kind] = _joined(mean, Mean(earlier.level, share, 0.0)).level
    return found


def entries(spans: Sequence[Span]) -> tuple[ProfileEntry, ...]:
    """Mean times by configuration, as of the end of the last of `spans`, which are in the order of time."""
    if not spans:
        return ()
    counts = {(span.key, kind): 0 for span in spans for kind in (True, False)}
    lasted, precision = dict.fromkeys(counts, 0.0), dict.fromkeys(counts, 0.0)
    for span in spans:
        for kind, mean in span.kinds():
            counts[span.key, kind] += mean.number
            lasted[span.key, kind] += span.ended - span.began
            precision[span.key, kind] += 1 / max(mean.error, 1e-6) ** 2
    level, here = levels(spans), spans[-1].key
    lately = _lately(spans)
    shift = next(lately[kind] - level[here, kind] for kind in (False, True) if kind in lately)
    times = {which: math.exp(value + shift) for which, value in level.items()}
    times.update({(here, kind): math.exp(value) for kind, value in lately.items()})
    found = []
    for key in sorted({key for key, _ in counts}):
        believed = lasted[key, False] >= LONG or precision[key, False] >= SURE**-2
        if counts[key, False] >= ENOUGH and believed:
            optim = times[key, False]
            accum = times.get((key, True), optim if key.replicas == 1 else 0.0)
            found.append(ProfileEntry(*key, accum, optim, counts[key, True], counts[key, False]))
    return tuple(found)
