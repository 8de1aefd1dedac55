"""Reports of simulated jobs, and what a coordinator derives from those of one application.

The reports have the type that the training library sends (`JobHints`). The coordinator's own functions
(`coordinator.job_models`, `coordinator.node_types`) combine them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from adaptdl_elastic.autoscaler.coordinator.job_models import Report
from adaptdl_elastic.autoscaler.coordinator.node_types import (
    ScriptProfile,
    TypeRatios,
    ratios,
    script_profile,
    script_ratios,
    typed_models,
)
from adaptdl_elastic.autoscaler.policy.learning import correct
from adaptdl_elastic.autoscaler.policy.policy_types import GoodputModel
from adaptdl_elastic.goodput import GradParams, fit_perf_params
from adaptdl_elastic.protocol.hints import JobHints, ProfileEntry, TypeProfile
from simulator.application import Application
from simulator.simulated_job import Profile, SimJob


@dataclass(frozen=True)
class Known:
    """The knowledge about a job at the time of a decision."""

    model: GoodputModel | None = None  # None: the job has not been measured yet
    models: Mapping[str, GoodputModel] = field(default_factory=dict)  # by node type
    speeds: Mapping[str, float] = field(default_factory=dict)  # of the node types, for a job without a model
    max_profiled_replicas: int = 0
    totals: tuple[float, ...] = ()  # final or declared lengths, in samples, of other jobs of its application


@dataclass(frozen=True)
class _Script:
    """What jobs of one application have measured together."""

    state: object  # the measurements that it was computed from
    profile: ScriptProfile | None
    ratios: TypeRatios


class Reports:
    """The reports of all jobs of a simulation.

    Args:
        jobs: All jobs of the simulation.
        remaining: Returns the samples of a job to its declared end; None if it declares none.
    """

    def __init__(self, jobs: Sequence[SimJob], remaining: Callable[[SimJob], float | None]) -> None:
        self._remaining = remaining
        self._kinds: dict[str, list[SimJob]] = {}
        for job in jobs:
            self._kinds.setdefault(job.app.name, []).append(job)
        self._scripts: dict[str, _Script] = {}  # by application
        self._asked: dict[str, float] = {}  # by application, when its script was asked for last
        self._ratios: tuple[object, TypeRatios] = None, TypeRatios()  # with the state it was computed from
        self._known: dict[str, tuple[object, Known]] = {}  # by job, with the state it was computed from
        self._entries: dict[tuple[str, str], tuple[int, tuple[ProfileEntry, ...]]] = {}  # by job and type

    def known(self, job: SimJob, now: float, types: Sequence[str]) -> Known:
        """Return what a coordinator would know about `job` on nodes of these types."""
        script = self._script(job.app.name, now)
        of_all = self._ratios_of_all(types, now)
        # step times of a type that was left do not change
        state = (
            script.state,
            _measured(job),
            job.node_type,
            None if len(types) == 1 else of_all.known,
            types,
        )
        cached = self._known.get(job.name)
        if cached is None or cached[0] != state:
            profile = script.profile
            model, models = typed_models(
                job.name, self._hints(job, types), profile, types, script.ratios, of_all
            )
            found = Known(
                model,
                models if len(types) > 1 else {},
                of_all.speeds(types) if len(types) > 1 else {},
                max((known.max_replicas for known in job.profiles.values()), default=0),
                () if profile is None else profile.totals_besides(job.name),
            )
            cached = self._known[job.name] = state, found
        known = cached[1]
        grads = job.grad_params
        if known.model is None or grads is None:
            return known
        models = {name: replace(one, grad_params=grads) for name, one in known.models.items()}
        return replace(known, model=replace(known.model, grad_params=grads), models=models)

    def _script(self, application: str, now: float) -> _Script:
        """Return what is known of an application; nothing is measured between questions of one moment."""
        if self._asked.get(application) == now:
            return self._scripts[application]
        self._asked[application] = now
        jobs = [job for job in self._kinds[application] if any(p.times for p in job.profiles.values())]
        state = tuple((job.name, _measured(job), job.completed is not None) for job in jobs)
        cached = self._scripts.get(application)
        if cached is None or cached.state != state:
            reports = []
            for job in jobs:
                hints, done = self._hints(job), job.completed is not None
                if hints is not None:
                    seen = now if job.completed is None else job.completed
                    reports.append(Report(job.name, hints, seen, done))
            profile = script_profile(reports) if reports else None
            known = TypeRatios() if profile is None else script_ratios(profile)
            cached = self._scripts[application] = _Script(state, profile, known)
        return cached

    def _ratios_of_all(self, types: Sequence[str], now: float) -> TypeRatios:
        if len(types) == 1:
            return TypeRatios()
        scripts = [self._script(name, now) for name in self._kinds]
        state = tuple(script.state for script in scripts)
        if self._ratios[0] != state:
            profiles = [script.profile for script in scripts if script.profile is not None]
            self._ratios = state, ratios(profiles)
        return self._ratios[1]

    def _hints(self, job: SimJob, types: Sequence[str] = ()) -> JobHints | None:
        """Return the report of a job; None before its first measurement."""
        grads, app = job.grad_params, job.app
        if grads is None or job.measured.theta is None:
            return None
        fixed = job.fixed_batch_size
        here = self._type_profile(job, job.node_type)
        return JobHints(
            job=job.name,
            generation=0,
            nodes=max(1, len(job.parts)),
            replicas=max(1, job.replicas),
            init_batch_size=fixed or app.init_batch_size,
            batch_size=0,
            atomic_bsz=job.atomic_bsz,
            max_batch_size=None if fixed else app.max_batch_size,
            local_bsz_bounds=here.local_bsz_bounds,
            gradient_accumulation=True,
            max_profiled_replicas=here.max_profiled_replicas,
            grad_params=(grads.sqr, grads.var),
            perf_params=here.perf_params,
            profile=here.profile,
            node_type=job.node_type,
            elsewhere=tuple(
                self._type_profile(job, name) for name in sorted({*job.profiles, *types} - {job.node_type})
            ),
            samples_done=job.progress * app.init_batch_size,
            remaining_samples=self._remaining(job),
        )

    def _type_profile(self, job: SimJob, node_type: str) -> TypeProfile:
        """Return what a job knows of a type of node: its batch sizes, and what it has measured there."""
        app, profile = job.app.on(node_type), job.profiles.get(node_type, Profile())
        return TypeProfile(
            node_type=node_type,
            profile=self._profile(job, node_type),
            perf_params=profile.theta,
            max_profiled_replicas=profile.max_replicas,
            local_bsz_bounds=(app.min_local_bsz, max(app.max_local_bsz, app.fixed_batch_size or 0)),
        )

    def _profile(self, job: SimJob, node_type: str) -> tuple[ProfileEntry, ...]:
        times = job.profiles[node_type].times if node_type in job.profiles else {}
        replaced = job.profiles[node_type].replaced if node_type in job.profiles else 0
        before, known = self._entries.get((job.name, node_type), (0, ()))
        known = known if before == replaced else ()
        if len(known) < len(times):
            fresh = list(times.items())[len(known) :]
            known += tuple(
                ProfileEntry(*key, accum_step_time=max(step - sync, 0.0), optim_step_time=step, optim_count=1)
                for key, (step, sync) in fresh
            )
            self._entries[job.name, node_type] = replaced, known
        return known


def _measured(job: SimJob) -> tuple[tuple[str, int, int], ...]:
    """Return the number of measurements of a job by node type."""
    return tuple(
        (name, len(profile.times), profile.replaced)
        for name, profile in job.profiles.items()
        if profile.times
    )


class TrueModels(Reports):
    """Reports of jobs whose step times are all known from the start, as for a clairvoyant policy.

    Lengths of others are known as in `Reports`.
    """

    def __init__(self, jobs: Sequence[SimJob], remaining: Callable[[SimJob], float | None]) -> None:
        super().__init__(jobs, remaining)
        self._true: dict[tuple[str, str], GoodputModel] = {}

    def known(self, job: SimJob, now: float, types: Sequence[str]) -> Known:
        """Return the true models of `job` on nodes of these types."""
        known, app = super().known(job, now, types), job.app
        sqr, var = app.grad_stats(app.init_batch_size, job.epoch)
        grads = job.grad_params or GradParams(sqr, var)
        models = {name: replace(self._model(app, name), grad_params=grads) for name in types}
        return replace(known, model=models[types[0]], models=models, max_profiled_replicas=app.max_replicas)

    def _model(self, app: Application, node_type: str) -> GoodputModel:
        if (app.name, node_type) not in self._true:
            here = app.on(node_type)
            times = {
                (len(parts), sum(parts), int(size)): (step, sync)
                for parts, (sizes, steps, syncs) in here.placements.items()
                for size, step, sync in zip(sizes, steps, syncs, strict=True)
            }
            keys, (step, sync) = np.array(list(times)).T, np.array(list(times.values())).T
            nodes, replicas, atomic = keys
            theta = fit_perf_params(nodes, replicas, atomic, np.maximum(step - sync, 1e-6), step)
            self._true[app.name, node_type] = GoodputModel(
                theta,
                GradParams(1.0, 1.0),
                app.fixed_batch_size or app.init_batch_size,
                None if app.fixed_batch_size else app.max_batch_size,
                (here.min_local_bsz, max(here.max_local_bsz, app.fixed_batch_size or 0)),
                True,
                correct(theta, {key: times[key][0] for key in times}),
            )
        return self._true[app.name, node_type]
