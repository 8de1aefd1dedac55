"""Report on a run from its event log: what its noise allowed, where its time went, what to set next time.

Pure functions over the events that `adaptdl-run --event-log` writes. Three quantities carry the report:

- The critical batch size B = tr Σ / |G|², in samples (the simple noise scale of McCandlish et al., 2018,
  arXiv 1812.06162, section 2.2): at batch size B training needs twice the samples of a small batch, and
  twice the steps of a very large one. Its range is one standard error of |G|² either way: a mean over the
  job's window of measurements, by batch means (`Moments.sqr_error`). A replica that was restarted knows no
  errors at first; there the range is the lowest and highest value of a tenth of the run.
- The progress of a period: its measured goodput times its length, in samples at the initial batch size.
- What other numbers of replicas would have taken: the same progress at the goodput that the job's last
  fitted curve gives them at their best batch size, under the gradient statistics of each period (Pollux,
  OSDI'21, section 3), times the ratio of measured to predicted goodput that this run had.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from adaptdl_elastic.goodput import GoodputFunction
from adaptdl_elastic.rendezvous.run_record import Run, RunLogError, Sample
from adaptdl_elastic.rendezvous.text import duration, pluralize

REPLICAS = (1, 2, 4, 8, 16)
"""Numbers of replicas that a report compares."""

_PERIODS = 10  # parts of the run, each with one critical batch size
_PROPORTIONAL = 1.1  # times the samples a second that twice the batch must give for its size to matter
_MEASUREMENTS = 3  # of goodput on each side of a change, whose medians are compared
_LONGEST_GAP_S = 60.0  # between two samples of a running job; a longer gap is time without training
_WORTH_ADDING = 1.5  # times the goodput that twice the replicas must give to be recommended


@dataclass(frozen=True)
class Period:
    """The critical batch size in a part of the run."""

    start: float  # seconds since the run began
    end: float
    critical_batch_size: float  # samples, median
    lowest: float
    highest: float  # inf: |G|² is smaller than its standard error
    batch_size: float  # median of those used
    gradient: bool = True  # whether any of |G|² was found, in most samples
    standard_error: bool = False  # whether the range is one standard error, not the spread of the period


@dataclass(frozen=True)
class Alternative:
    """What the same progress would have taken on another number of replicas."""

    replicas: int
    seconds: float
    samples: float
    replica_hours: float
    batch_size: float | None  # mean over the run's progress; None: |G|² was 0, so all sizes are alike
    tried: bool  # whether the job has run on it
    cost: float | None = None  # in the currency of the given price


@dataclass(frozen=True)
class Change:
    """A change of the batch size."""

    time: float  # seconds since the run began
    batch_size: int
    lr_factor: float
    predicted: float | None  # goodput predicted before it, divided by that predicted for the size before
    measured: float | None  # goodput measured after it, divided by that measured before it
    why: str  # empty: the log does not tell


@dataclass(frozen=True)
class Report:
    """A run. Times are in seconds."""

    seconds: float  # from the first event to the last
    training: float
    pauses: float  # changes of size and restarts
    starting: float  # until the first step
    ended: str  # how the run ended, or that it has not ended
    replicas: tuple[int, ...]  # sizes that it had, in order
    periods: tuple[Period, ...]
    alternatives: tuple[Alternative, ...]
    changes: tuple[Change, ...]
    samples: tuple[Sample, ...]
    calibration: float | None  # measured over predicted goodput, median
    advice: tuple[str, ...]
    missing: tuple[str, ...]  # what the log does not tell, and why
    estimators: tuple[str, ...] = ()  # how the gradient's noise was measured, in the order of time


def report(run: Run, price: float | None = None) -> Report:
    """Report on a run.

    Args:
        run: As `read_run` returns it.
        price: Price of one replica for an hour, in any currency; None: no cost is computed.

    Raises:
        RunLogError: the job has never trained, or an older version has written the log.
    """
    samples = sorted(run.samples, key=lambda sample: sample.time)
    if not samples:
        raise RunLogError(_nothing(run.kinds))
    pauses = sum(one.pause_s or 0.0 for one in run.generations)
    starting = max(0.0, run.generations[0].time - run.began) if run.generations else 0.0
    ratios = [one.goodput / one.predicted_goodput for one in samples if one.predicted_goodput]
    calibration = statistics.median(ratios) if ratios else None
    periods = _periods(samples, run.began)
    alternatives = _alternatives(samples, run.ended, calibration, price)
    missing = []
    if not periods:
        why = "no gradient was found in the noise, and its error is not known"
        if all(one.variance is None for one in samples):
            why = "the gradient's noise was not measured"
        missing.append(f"no critical batch size: {why}")
    if not alternatives:
        missing.append(
            "no other sizes: no curve of step times was fitted; train longer, or with other batches"
        )
    changes = _changes(run, samples)
    rates = {one.batch_size: one.lr_factor for one in reversed(changes)}
    return Report(
        seconds=run.ended - run.began,
        training=max(0.0, run.ended - run.began - pauses - starting),
        pauses=pauses,
        starting=starting,
        ended=run.outcome or "still running, or killed",
        replicas=tuple(one.replicas for one in run.generations),
        periods=periods,
        alternatives=alternatives,
        changes=changes,
        samples=tuple(samples),
        calibration=calibration,
        advice=_advice(samples, rates, periods, alternatives),
        missing=tuple(missing),
        estimators=tuple(dict.fromkeys(one.estimator for one in samples if one.estimator)),
    )


def _nothing(kinds: set[str]) -> str:
    """Return why there is nothing to report on, and the remedy."""
    if "goodput" in kinds:
        return "an older version has written this log: it has no gradient statistics to report on"
    if "batch_size" in kinds and not kinds & {"started", "generation"}:
        return (
            "a script without an agent has written this log: it has no gradient statistics "
            "to report on; start the script with adaptdl-run --standalone --event-log FILE"
        )
    return "the job has reported nothing yet: train for some seconds with AdaptiveDataParallel"


def _critical_batch_size(sample: Sample) -> float | None:
    """Return the samples of a batch whose noise equals its gradient; None if that is not known.

    Where nothing of |G|² was left (it cannot be negative), it is the size for one standard error of |G|²,
    the lower end of its range. To leave such samples out would understate the size where it is largest.
    """
    sqr = sample.squared_gradient or sample.gradient_error
    if not sqr or sample.variance is None:
        return None
    return sample.variance * sample.init_batch_size / sqr


def _critical_range(sample: Sample, size: float) -> tuple[float, float] | None:
    """Return the critical batch size for |G|² a standard error larger, and smaller; None: not known."""
    error, sqr = sample.gradient_error, sample.squared_gradient
    if error is None:
        return None
    if not sqr:
        return size, math.inf
    return size / (1 + error / sqr), size / (1 - error / sqr) if error < sqr else math.inf


def _model(sample: Sample) -> GoodputFunction | None:
    """Return the goodput as predicted then; None if no curve was fitted or no noise was measured."""
    if sample.curve is None or not (sample.squared_gradient or sample.variance):
        return None
    return GoodputFunction(sample.curve, (sample.squared_gradient, sample.variance), sample.init_batch_size)


def _periods(samples: Sequence[Sample], began: float) -> tuple[Period, ...]:
    sized = [(sample, _critical_batch_size(sample)) for sample in samples]
    known = [(sample, size) for sample, size in sized if size is not None]
    if not known:
        return ()
    length = -(-len(known) // _PERIODS)
    found = []
    for at in range(0, len(known), length):
        part, values = zip(*known[at : at + length], strict=True)
        ranges = [one for one in map(_critical_range, part, values) if one is not None]
        lows, highs = zip(*ranges, strict=True) if ranges else ([min(values)], [max(values)])
        start, end = part[0].time - began, part[-1].time - began
        # a mean of two upper ends could be infinite
        size, low, high = statistics.median(values), statistics.median(lows), statistics.median_high(highs)
        used = statistics.median(sample.batch_size for sample in part)
        gradient = statistics.median(sample.squared_gradient or 0.0 for sample in part) > 0
        found.append(Period(start, end, size, low, high, used, gradient, bool(ranges)))
    return tuple(found)


def _alternatives(
    samples: Sequence[Sample], ended: float, calibration: float | None, price: float | None
) -> tuple[Alternative, ...]:
    curve = next((sample.curve for sample in reversed(samples) if sample.curve is not None), None)
    usable = [one for one in samples if one.squared_gradient or one.variance]
    if curve is None or not usable or calibration is None:
        return ()
    last, ends = samples[-1], [*(one.time for one in usable[1:]), max(ended, usable[-1].time)]
    lengths = np.minimum(np.subtract(ends, [one.time for one in usable]), _LONGEST_GAP_S)
    progress = lengths * [one.goodput for one in usable]
    if not progress.sum():
        return ()
    known = progress * [bool(one.squared_gradient) for one in usable]
    tried = {last.tried_replicas, *(one.replicas for one in samples)}
    gradients = np.array([(one.squared_gradient, one.variance) for one in usable], dtype=float).T
    model = GoodputFunction(curve, (*gradients,), np.array([one.init_batch_size for one in usable]))
    per_node = max(-(-sample.replicas // sample.nodes) for sample in samples)
    found = []
    for replicas in sorted({*REPLICAS, *tried}):
        goodput, atomic, accumulated = model.optimize(
            -(-replicas // per_node), replicas, last.max_batch_size, last.local_bsz_bounds, last.accumulation
        )
        if not np.all(goodput):  # no batch size fits the bounds
            continue
        batch = atomic * (accumulated + 1) * replicas
        seconds = float((progress / goodput).sum() / calibration)
        hours = seconds * replicas / 3600
        worth = float((progress / model.efficiency(batch)).sum())
        size = float(np.average(batch, weights=known)) if known.any() else None
        cost = None if price is None else hours * price
        found.append(Alternative(replicas, seconds, worth, hours, size, replicas in tried, cost))
    return tuple(found)


def _changes(run: Run, samples: Sequence[Sample]) -> tuple[Change, ...]:
    found = list[Change]()
    measurements = [(time, goodput) for time, goodput, _ in run.goodputs if goodput]
    # older versions have not logged all of it
    logged = [one for one in run.batch_sizes if None not in (one.atomic_bsz, one.accumulation_steps)]
    times, tried = [*(one.time for one in logged), math.inf], set[tuple[int, ...]]()
    # replicas, samples of a pass and further passes, and goodput, of the size before
    old, earlier = tuple[int, ...](), list[float]()
    for one, time, end in zip(logged, times, times[1:], strict=False):
        batch, atomic, passes = one.batch_size, one.atomic_bsz or 1, one.accumulation_steps or 0
        new = (max(1, round(batch / atomic / (passes + 1))), atomic, passes)
        later = [goodput for at, goodput in measurements if time <= at < end]
        predicted = measured = None
        last = next((sample for sample in reversed(samples) if sample.time < time), None)
        model = _model(last) if last is not None else None
        if last is not None and model is not None and old[:1] == new[:1]:
            predicted = float(model(last.nodes, *new) / model(last.nodes, *old))
        if earlier and later:
            measured = statistics.median(later[:_MEASUREMENTS]) / statistics.median(earlier[-_MEASUREMENTS:])
        doubtful = "may be better than predicted" if new in tried else "not tried in this run"
        why = "predicted to be better" if (predicted or 0) > 1 else doubtful
        if old[:1] != new[:1]:
            why = f"{pluralize(new[0], 'replica')} instead of {old[0]}" if old else "first measured"
        found.append(Change(time - run.began, batch, one.lr_factor or 1.0, predicted, measured, why))
        tried.add(new)
        old, earlier = new, later
    return tuple(found)


def _advice(
    samples: Sequence[Sample],
    rates: dict[int, float],
    periods: Sequence[Period],
    others: Sequence[Alternative],
) -> tuple[str, ...]:
    """Return settings for the next run, a line each.

    `rates` has the learning rate's factor at each batch size that was used.
    """
    last, lines = samples[-1], list[str]()
    initial = last.init_batch_size
    found = [one.critical_batch_size for one in periods if one.gradient]
    proportional = _is_proportional(last)
    if periods:
        early, size, why = periods[0].critical_batch_size, initial, ""
        if not periods[0].gradient:
            why = "; no gradient was found in the noise at first (|G|² is 0)"
        elif early < initial / 2:
            size, why = _power_of_two(early), f", because samples beyond {early:,.0f} were wasted at first"
        elif proportional:
            why = ", because the time of a step is proportional to the batch: a larger one is no faster"
        elif early >= 2 * initial and _power_of_two(early / 2) > initial:
            size, why = _power_of_two(early / 2), f", because the noise allowed {early:,.0f} at first"
        new = f"{size}{mark(size in rates)} instead of {initial}"
        setting = f"keep {initial}" if size == initial else new
        lines.append(f"initial batch size: {setting}{why}")
        if size != initial:
            lines.append(f"learning rate: {_rate(rates, size, initial)}")
    if found and not proportional:
        wanted, most = _power_of_two(2 * max(initial, *found)), last.max_batch_size
        if most is None:
            lines.append(f"batch size: let it grow, autoscale_batch_size({wanted}, ...)")
        elif max(sample.batch_size for sample in samples) >= 0.95 * most and found[-1] > most:
            lines.append(f"largest batch size: {wanted} instead of {most}, which was reached")
    if others:
        best = _knee([one for one in others if one.tried] or others)
        near = others[: others.index(best) + 2]
        times = ", ".join(f"{duration(one.seconds)} on {one.replicas}{mark(one.tried)}" for one in near)
        lines.append(f"replicas: {best.replicas}{mark(best.tried)}, since the same progress takes {times}")
    return tuple(lines)


def _is_proportional(last: Sample) -> bool:
    """Return whether twice the initial batch would take about twice the time."""
    model = _model(last)
    if model is None:
        return False
    sizes = np.array([1, 2]) * last.init_batch_size / last.replicas
    one, two = model.throughput(last.nodes, last.replicas, sizes, 0)
    return bool(two < _PROPORTIONAL * one)


def _rate(rates: dict[int, float], size: int, initial: int) -> str:
    """Return the learning rate for an initial batch size, by what the rule gave the nearest size."""
    used = rates.keys() - {initial}
    if not used:
        return "the one that suits it; the scaling rule was not used in this run"
    near = min(used, key=lambda one: abs(math.log(one / size)))
    factor = (size / initial) ** (math.log(rates[near]) / math.log(near / initial))
    return f"× {factor:.2f} (the scaling rule gave × {rates[near]:.2f} at {near})"


def _knee(alternatives: Sequence[Alternative]) -> Alternative:
    """Return the largest size up to which every doubling was worth it."""
    best = alternatives[0]
    for one in alternatives[1:]:
        if best.seconds / one.seconds < _WORTH_ADDING ** math.log2(one.replicas / best.replicas):
            break
        best = one
    return best


def mark(tried: bool) -> str:
    """Return what follows a size that was not tried."""
    return "" if tried else " (not tried)"


def _power_of_two(value: float) -> int:
    return int(2 ** round(math.log2(max(1.0, value))))


def as_json(found: Report) -> dict[str, Any]:
    """Return the report as plain values; an upper end of a range that is infinite is None."""
    values = asdict(found)
    for period in values["periods"]:
        if math.isinf(period["highest"]):
            period["highest"] = None
    return values


def range_name(found: Report) -> str:
    """Return text that says what the range of a critical batch size stands for."""
    return "one standard error either way" if found.periods[0].standard_error else "spread"


def range_text(period: Period) -> str:
    """Return the range of a period's critical batch size."""
    return f"{period.lowest:,.0f} – " + ("?" if math.isinf(period.highest) else f"{period.highest:,.0f}")


def ratio(value: float | None) -> str:
    """Return a gain as text."""
    return "–" if value is None else f"{value:.2f}"


def lines(found: Report) -> list[str]:
    """Return the report as text."""
    sizes = " → ".join(str(size) for size in found.replicas) or "?"
    text = [
        f"run: {duration(found.seconds)}, replicas {sizes}, {found.ended}",
        f"time: training {duration(found.training)}, changes and restarts {duration(found.pauses)}, "
        f"start {duration(found.starting)}",
    ]
    if found.periods:
        text += ["", f"critical batch size, in samples ({range_name(found)}) and batch size used:"]
        text += [
            f"  {duration(one.start):>11} – {duration(one.end):<11} {one.critical_batch_size:>10,.0f}  "
            f"({range_text(one)})   {one.batch_size:,.0f}"
            for one in found.periods
        ]
        if found.estimators:
            text.append(f"  (noise measured from: {'; '.join(found.estimators)})")
    if found.changes:
        text += ["", "changes of the batch size:"]
        text += [
            f"  {duration(one.time):>11}  {one.batch_size:>7,}  learning rate × {one.lr_factor:.2f}"
            f"  goodput × {ratio(one.measured)} (predicted {ratio(one.predicted)})  {one.why}"
            for one in found.changes
        ]
    if found.alternatives:
        text += ["", "the same progress would have taken:"]
        for one in found.alternatives:
            cost = "" if one.cost is None else f"  cost {one.cost:,.2f}"
            text.append(
                f"  {pluralize(one.replicas, 'replica'):>11}  {duration(one.seconds):>11}  "
                f"{one.samples:>13,.0f} samples  "
                f"{one.replica_hours:.2f} replica hours{cost}{mark(one.tried)}"
            )
        if found.calibration is not None:
            text.append(
                f"  (predictions times {found.calibration:.2f}: measured over predicted goodput of this run)"
            )
    if found.advice:
        text += ["", "for the next run:", *(f"  {line}" for line in found.advice)]
    text += [f"not known: {line}" for line in found.missing]
    return text
