"""Goodput models of jobs, from their own reports and from those of jobs with the same script."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from adaptdl_elastic.autoscaler.cluster_view import JobView, View
from adaptdl_elastic.autoscaler.policy.learning import Corrections, correct
from adaptdl_elastic.autoscaler.policy.policy_types import GoodputModel
from adaptdl_elastic.goodput import GradParams, PerfParams
from adaptdl_elastic.protocol.hints import MOST_CONFIGURATIONS, JobHints, ProfileEntry
from adaptdl_elastic.rendezvous.schema.records import JobState

END_GRACE = 300.0
"""Seconds that a job may take from the end of its last declared epoch to its exit: to evaluate and save."""

OVERSHOOT = 1.01
"""Ratio of the work done to a declared end above which the job trains on; the last batch may pass the end."""

MOST_SHARED = 200
"""Configurations of one script on one type of node that jobs share: those measured in the most steps.

Without a bound, a decision about n jobs of one script costs n² configurations.
"""

_SHORTEST = 1e-9  # seconds: a shorter step time is not a valid measurement
_LONGEST = 1e6  # seconds: longer step times are not shared with other jobs
_LARGEST = math.log(1e3)  # largest ratio, as a logarithm, of two jobs' step times that is used

_Key = tuple[int, int, int]
"""Nodes, replicas, atomic batch size."""


def own_hints(job: JobView) -> JobHints | None:
    """Return the last valid report of the job's present run."""
    if job.hints is None or job.plan is None or job.spec is None:
        return None
    if job.plan.record.run != job.spec.record.run or job.hints.record.generation < job.plan.record.first:
        return None
    return job.hints.record


def model(hints: JobHints) -> GoodputModel | None:
    """Return the goodput model in a report, or None."""
    if hints.perf_params is None or hints.grad_params is None or hints.init_batch_size < 1:
        return None
    return GoodputModel(
        perf_params=PerfParams(*hints.perf_params),
        grad_params=GradParams(*hints.grad_params),
        init_batch_size=hints.init_batch_size,
        max_batch_size=None if _exact(hints) else hints.max_batch_size,
        local_bsz_bounds=_bounds(hints),
        accumulation=hints.gradient_accumulation,
        corrections=_corrections(hints.perf_params, hints.profile),
    )


def _exact(hints: JobHints) -> bool:
    """Return whether a step has exactly the initial batch size, in unequal shares if it must."""
    most = hints.max_batch_size
    return most is None or (most == hints.init_batch_size and hints.gradient_accumulation)


def _bounds(hints: JobHints) -> tuple[int, int] | None:
    """Return the bounds of one replica's batch. With unequal shares, no replica has a single sample."""
    if not _exact(hints):
        return hints.local_bsz_bounds
    _, high = hints.local_bsz_bounds or (1, hints.init_batch_size)
    return min(2, hints.init_batch_size, high), high


@lru_cache(maxsize=8192)
def _corrections(theta: tuple[float, ...], profile: tuple[ProfileEntry, ...]) -> Corrections | None:
    """Return the measured step times as corrections of θ; cached, since every decision needs them."""
    times = {_key(entry): entry.optim_step_time for entry in profile if entry.optim_step_time > _SHORTEST}
    return correct(PerfParams(*theta), times) if times else None


def attained(hints: JobHints | None) -> float:
    """Return the samples that the job has completed, counted at the initial batch size."""
    return 0.0 if hints is None or hints.samples_done is None else hints.samples_done


@dataclass(frozen=True)
class DeclaredEnd:
    """The nearest end that a job has declared. Once it is reached, no later declaration counts."""

    samples: float = math.inf
    reached: float = math.inf  # time by the view's clock; -inf: the job has trained beyond the end

    def after(self, done: float, remaining: float | None, now: float) -> DeclaredEnd:
        """Return the end after a report of the samples done and those to the end (None: none is declared)."""
        nearest = min(self.samples, math.inf if remaining is None else done + remaining)
        reached = -math.inf if done > OVERSHOOT * nearest else now if done >= nearest else math.inf
        return DeclaredEnd(nearest, min(self.reached, reached))

    def outlived(self, now: float) -> bool:
        """Return whether the job has gone on beyond the end."""
        return now - self.reached > END_GRACE


def declared_ends(view: View, known: Mapping[str, DeclaredEnd]) -> dict[str, DeclaredEnd]:
    """Return the declared ends of the jobs that are not over, from the earlier ones and their reports."""
    ends: dict[str, DeclaredEnd] = {}
    for name, job in view.jobs.items():
        ends[name], hints = known.get(name, DeclaredEnd()), own_hints(job)
        if hints is not None:
            ends[name] = ends[name].after(attained(hints), hints.remaining_samples, view.now)
    return {name: end for name, end in ends.items() if not view.jobs[name].over}


# Jobs with the same script


@dataclass(frozen=True)
class _Told:
    """A measurement, the job that reported it, and the time of that report."""

    seen: float
    job: str
    entry: ProfileEntry


@dataclass(frozen=True)
class Curve:
    """What jobs with the same script have measured together."""

    told: Mapping[_Key, tuple[_Told, ...]]  # configuration → reports of at most two jobs, the latest first
    widest: JobHints  # report of the job that has run on the most replicas
    totals: Mapping[str, float]  # job → samples: the final number if it is done, else to its declared end
    memory_limit: int | None = None  # largest batch of one replica that fits into memory, once known

    def besides(self, job: str) -> dict[_Key, ProfileEntry]:
        """Return the measurements of other jobs than `job`. The latest report of a configuration counts."""
        found: dict[_Key, ProfileEntry] = {}
        for at, told in self.told.items():
            for one in told:
                if one.job != job:
                    found.setdefault(at, one.entry)
        return found


@dataclass(frozen=True)
class Report:
    """The last report of a job."""

    job: str
    hints: JobHints
    seen: float  # when it was received, on a clock common to all reports
    done: bool = False  # whether the job has ended well
    nodes: tuple[str, ...] = ()  # of the generation that reported; empty: not known


def reported_on(job: JobView) -> tuple[str, ...]:
    """Return the nodes of the generation that sent the job's last report; () if the plan is of another."""
    if job.plan is None or job.hints is None or job.plan.record.generation != job.hints.record.generation:
        return ()
    return tuple(placement.node for placement in job.plan.record.placements)


def reports_by_script(view: View) -> dict[str, list[Report]]:
    """Return the reports with step times by `profile_key`; jobs that have ended contribute, too."""
    reports: dict[str, list[Report]] = {}
    for job in view.jobs.values():
        key = job.spec.record.profile_key if job.spec else ""
        hints = own_hints(job)
        measured = hints is not None and (hints.perf_params or any(t.perf_params for t in hints.elsewhere))
        if not key or hints is None or not measured or job.hints is None:
            continue
        done = job.status_now is not None and job.status_now.state is JobState.DONE
        if job.over and not done:  # stopped or failed: its full length stays unknown
            hints = replace(hints, remaining_samples=None)
        reports.setdefault(key, []).append(Report(job.job, hints, job.hints.seen, done, reported_on(job)))
    return reports


def curve_of(reports: Sequence[Report]) -> Curve:
    """Return the shared measurements of at least one report."""
    told: dict[_Key, tuple[_Told, ...]] = {}
    for report in reports:
        # of several measurements of a job on different nodes, the last one
        for entry in {_key(one): one for one in sorted(report.hints.profile, key=_generation)}.values():
            both = (*told.get(_key(entry), ()), _Told(report.seen, report.job, entry))
            told[_key(entry)] = tuple(sorted(both, key=lambda one: (-one.seen, -one.entry.optim_count))[:2])
    if len(told) > MOST_SHARED:
        best = heapq.nlargest(MOST_SHARED, told.items(), key=lambda item: _weight(item[1]))
        told = dict(sorted(best))
    widest = max(reports, key=lambda report: (report.hints.max_profiled_replicas, report.seen))
    totals = {
        report.job: attained(report.hints) + (0.0 if report.done else report.hints.remaining_samples or 0.0)
        for report in reports
        if report.done or report.hints.remaining_samples is not None
    }
    limits = [report.hints.memory_limit for report in reports if report.hints.memory_limit is not None]
    return Curve(told, widest.hints, totals, min(limits, default=None))


def _generation(entry: ProfileEntry) -> int:
    return entry.generation


def _weight(told: tuple[_Told, ...]) -> tuple[int, float]:
    """Return how many steps a configuration was measured in, and when last."""
    return sum(one.entry.optim_count for one in told), max(one.seen for one in told)


def informed(job: str, hints: JobHints | None, curve: Curve | None) -> JobHints | None:
    """Return a job's own report, extended by what only other jobs with the same script have measured.

    A job's own measurements always count, even if others measured the same configuration more often: the job
    may run on another machine, or have changed its behaviour. Step times of others are converted to the job's
    own pace. θ is taken from the job that has run on the most replicas, since it predicts larger sizes best;
    at measured sizes the measurements correct it. Before its first measurement a job uses nothing of others,
    and their sizes do not count as tried: the job tries sizes itself, each at most twice as large as the
    largest one before. In replays each of these rules makes completion times shorter.
    """
    if curve is None or hints is None or hints.perf_params is None or hints.grad_params is None:
        return hints
    hints = fitting(hints, curve.memory_limit)
    own = {_key(entry): entry for entry in hints.profile}
    profile = (*hints.profile, *_at_pace(own, curve.besides(job)))[:MOST_CONFIGURATIONS]
    wider = curve.widest.max_profiled_replicas > hints.max_profiled_replicas
    theta = curve.widest.perf_params if wider else hints.perf_params
    return replace(hints, profile=profile, perf_params=theta or hints.perf_params)


def fitting(hints: JobHints, largest: int | None) -> JobHints:
    """Return a report whose batches of one replica are at most `largest`, which fit into memory."""
    low, high = hints.local_bsz_bounds or (1, hints.max_batch_size or hints.init_batch_size)
    if largest is None or high <= largest:
        return hints
    accumulates = hints.gradient_accumulation or hints.init_batch_size > largest
    return replace(hints, local_bsz_bounds=(min(low, largest), largest), gradient_accumulation=accumulates)


def _at_pace(own: Mapping[_Key, ProfileEntry], others: Mapping[_Key, ProfileEntry]) -> Iterable[ProfileEntry]:
    """Yield what only others have measured, multiplied by the ratio of this job's step times to theirs.

    The ratio is known for configurations that both have measured. Between those numbers of replicas its
    logarithm is interpolated in log R; beyond them the nearest ratio is used. If the ratio is known only for
    one node, or only for several nodes, it is used for both.
    """
    ratios: dict[bool, dict[int, list[float]]] = {False: {}, True: {}}
    for (nodes, replicas, _), entry in own.items():
        told = others.get(_key(entry))
        if told is not None and min(entry.optim_step_time, told.optim_step_time) > _SHORTEST:
            ratio = math.log(entry.optim_step_time / told.optim_step_time)
            ratios[nodes > 1].setdefault(replicas, []).append(max(-_LARGEST, min(ratio, _LARGEST)))
    for at, entry in others.items():
        if at in own or entry.optim_step_time > _LONGEST:
            continue
        known = ratios[at[0] > 1] or ratios[at[0] <= 1]
        if not known:
            yield entry
            continue
        sizes = sorted(known)
        levels = [sum(known[size]) / len(known[size]) for size in sizes]
        pace = math.exp(float(np.interp(math.log(at[1]), np.log(sizes), levels)))
        optim, accum = pace * entry.optim_step_time, pace * entry.accum_step_time
        yield replace(entry, optim_step_time=optim, accum_step_time=accum)


def _key(entry: ProfileEntry) -> _Key:
    return entry.nodes, entry.replicas, entry.atomic_bsz
