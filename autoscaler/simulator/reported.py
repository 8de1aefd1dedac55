"""Reports of simulated jobs, and what a coordinator derives from those of one application.

The reports have the type that the training library sends (`JobHints`). The coordinator's own functions
(`coordinator.job_models`) combine them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from adaptdl_elastic.autoscaler.coordinator.job_models import Curve, Report, curve_of, informed, model
from adaptdl_elastic.autoscaler.policy.policy_types import GoodputModel
from adaptdl_elastic.autoscaler.simulator.simulated_job import SimJob
from adaptdl_elastic.protocol.hints import JobHints, ProfileEntry


@dataclass(frozen=True)
class Known:
    """The knowledge about a job at the time of a decision."""

    model: GoodputModel | None = None  # None: the job has not been measured yet
    max_profiled_replicas: int = 0
    totals: tuple[float, ...] = ()  # samples that others of its application came to, or declare


class Reports:
    """The reports of all jobs of a simulation.

    Args:
        jobs: All jobs of the simulation.
        shared: Whether jobs of one application share their measurements.
        remaining: Returns the samples of a job to its declared end; None if it declares none.
    """

    def __init__(
        self, jobs: Sequence[SimJob], shared: bool, remaining: Callable[[SimJob], float | None]
    ) -> None:
        self._shared = shared
        self._remaining = remaining
        self._kinds: dict[str, list[SimJob]] = {}
        for job in jobs:
            self._kinds.setdefault(job.app.name, []).append(job)
        # by application, with the state it was computed from
        self._curves: dict[str, tuple[object, Curve | None]] = {}
        self._known: dict[str, tuple[object, Known]] = {}  # by job, with the state it was computed from
        self._entries: dict[str, tuple[ProfileEntry, ...]] = {}

    def known(self, job: SimJob, now: float) -> Known:
        """Return what a coordinator would know about `job`."""
        state, curve = self._curve(job.app.name, now) if self._shared else (None, None)
        state = state, len(job.profile.times)
        cached = self._known.get(job.name)
        if cached is None or cached[0] != state:
            hints = informed(job.name, self._hints(job), curve)
            found = Known(
                None if hints is None else model(hints),
                0 if hints is None else hints.max_profiled_replicas,
                () if curve is None else curve.totals_besides(job.name),
            )
            cached = self._known[job.name] = state, found
        known = cached[1]
        if known.model is None or job.grad_params is None:
            return known
        return replace(known, model=replace(known.model, grad_params=job.grad_params))

    def _curve(self, application: str, now: float) -> tuple[object, Curve | None]:
        jobs = [job for job in self._kinds[application] if job.profile.times]
        state = tuple((job.name, len(job.profile.times), job.completed is not None) for job in jobs)
        cached = self._curves.get(application)
        if cached is None or cached[0] != state:
            reports = []
            for job in jobs:
                hints, done = self._hints(job), job.completed is not None
                if hints is not None:
                    seen = now if job.completed is None else job.completed
                    reports.append(Report(job.name, hints, seen, done))
            cached = self._curves[application] = state, curve_of(reports) if reports else None
        return cached

    def _hints(self, job: SimJob) -> JobHints | None:
        """Return the report of a job; None before its first measurement."""
        theta, grads, app = job.profile.theta, job.grad_params, job.app
        if theta is None or grads is None:
            return None
        fixed = job.fixed_batch_size
        return JobHints(
            job=job.name,
            generation=0,
            nodes=max(1, len(job.parts)),
            replicas=max(1, job.replicas),
            init_batch_size=fixed or app.init_batch_size,
            batch_size=0,
            atomic_bsz=job.atomic_bsz,
            max_batch_size=None if fixed else app.max_batch_size,
            local_bsz_bounds=(app.min_local_bsz, max(app.max_local_bsz, app.fixed_batch_size or 0)),
            gradient_accumulation=True,
            max_profiled_replicas=job.profile.max_replicas,
            grad_params=(grads.sqr, grads.var),
            perf_params=theta,
            profile=self._profile(job),
            samples_done=job.progress * app.init_batch_size,
            remaining_samples=self._remaining(job),
        )

    def _profile(self, job: SimJob) -> tuple[ProfileEntry, ...]:
        known = self._entries.get(job.name, ())
        if len(known) < len(job.profile.times):
            fresh = list(job.profile.times.items())[len(known) :]
            known += tuple(
                ProfileEntry(*key, accum_step_time=max(step - sync, 0.0), optim_step_time=step, optim_count=1)
                for key, (step, sync) in fresh
            )
            self._entries[job.name] = known
        return known
