"""Predict a job's goodput on every type of node, from what was measured on some of them.

Step times are kept and fitted for each type. What a job has not measured on a type is taken from jobs with
the same script that have, and beyond that from another type: all its step times are multiplied by the ratio
of the two types' step times. The ratio is that of the job itself if it has run on both types, else that of
jobs with the same script, else the median over all scripts, else 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import numpy as np

from adaptdl_elastic.autoscaler.cluster_view import View
from adaptdl_elastic.autoscaler.coordinator.job_links import (
    JobLinks,
    declared,
    links_of,
    over_links,
    still_valid,
    with_network,
    with_slow_links,
)
from adaptdl_elastic.autoscaler.coordinator.job_models import (
    Curve,
    Report,
    curve_of,
    fitting,
    informed,
    model,
    own_hints,
    reports_by_script,
)
from adaptdl_elastic.autoscaler.coordinator.node_speeds import NodeClasses, node_classes
from adaptdl_elastic.autoscaler.policy.policy_types import GoodputModel
from adaptdl_elastic.goodput import GoodputFunction, GradParams, PerfParams
from adaptdl_elastic.protocol.hints import MOST_CONFIGURATIONS, JobHints, ProfileEntry

SEVERAL = "+"
"""Joins the names of types where a job's nodes are of several types."""

_SHORTEST = 1e-9  # seconds: a shorter step time is not a valid measurement
_LARGEST = math.log(1e3)  # largest ratio of two types' step times, as a logarithm


@dataclass(frozen=True)
class ScriptProfile:
    """What jobs with the same script have measured together, by type of node."""

    by_type: Mapping[str, Curve]
    totals: Mapping[str, float]  # samples by job, as in `Curve`

    def totals_besides(self, job: str) -> tuple[float, ...]:
        """Return the final or declared lengths, in samples, of all jobs but `job`."""
        return tuple(total for name, total in self.totals.items() if name != job)


@dataclass(frozen=True)
class TypeRatios:
    """Ratios of the step times of two types, as logarithms, by (from, to)."""

    known: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def between(self, one: str, other: str) -> float:
        """Return the ratio of step times on `other` to those on `one`, as a logarithm; 0 if it is unknown.

        A ratio that no job has measured is chained over one other type.
        """
        if one == other:
            return 0.0
        if (one, other) in self.known:
            return self.known[one, other]
        chained = [
            self.known[one, middle] + self.known[middle, other]
            for (start, middle) in self.known
            if start == one and (middle, other) in self.known
        ]
        return median(chained) if chained else 0.0

    def speeds(self, types: Iterable[str]) -> dict[str, float]:
        """Return the speed of each type relative to the fastest one."""
        names = sorted(types)
        if not self.known or not names:
            return {}
        # a type that no job has measured says nothing about the others
        base = max(names, key=lambda name: sum((name, other) in self.known for other in names))
        slowness = {name: self.between(base, name) for name in names}
        return {name: math.exp(min(slowness.values()) - slow) for name, slow in slowness.items()}


@dataclass(frozen=True)
class Measured:
    """What all jobs have measured on the cluster's types of nodes."""

    type_of: Mapping[str, str] = field(default_factory=dict)  # type by node
    scripts: Mapping[str, ScriptProfile] = field(default_factory=dict)  # by `profile_key`
    ratios: TypeRatios = field(default_factory=TypeRatios)  # the medians over all scripts
    of_scripts: Mapping[str, TypeRatios] = field(default_factory=dict)  # by `profile_key`
    links: Mapping[str, JobLinks] = field(default_factory=dict)  # between the nodes of a job, by job
    classes: NodeClasses = field(default_factory=NodeClasses)  # slow nodes are a type of their own
    slow: frozenset[str] = frozenset()  # nodes with slow links
    # as `scripts`, with the step times on several nodes over slow links instead of those over fast ones
    over_slow: Mapping[str, ScriptProfile] = field(default_factory=dict)

    @property
    def types(self) -> tuple[str, ...]:
        """The types of the nodes."""
        return tuple(sorted(set(self.type_of.values())))

    def models(
        self, job: str, profile_key: str, hints: JobHints | None
    ) -> tuple[GoodputModel | None, dict[str, GoodputModel]]:
        """Return a job's goodput model, and its models by type of node; none without a report."""
        if hints is None:
            return None, {}
        of_script = self.of_scripts.get(profile_key, TypeRatios())
        types = {*self.types, *self.measured_on(profile_key, hints)}
        types = {declared(name) for name in types}
        links = self.links.get(job, JobLinks())
        found: list[tuple[GoodputModel | None, dict[str, GoodputModel]]] = []
        kinds = (False, self.scripts, links.fast), (True, self.over_slow, links.slow or links.fast)
        for slow, scripts, link in kinds if self.slow else kinds[:1]:
            told = over_links(hints, self.slow, slow)
            one, by_type = typed_models(job, told, scripts.get(profile_key), types, of_script, self.ratios)
            if one is not None:
                one = with_network(one, told, link)
                by_type = {
                    with_slow_links(name) if slow else name: with_network(of, told, link)
                    for name, of in by_type.items()
                }
            found.append((one, by_type))
        return found[0][0], {name: of for _, by_type in found for name, of in by_type.items()}

    def measured_on(self, profile_key: str, hints: JobHints | None) -> frozenset[str]:
        """Return the types on which a job's step times are known by a measurement, its own or another job's.

        Types without a node at present count, too. Measurements on nodes of several types together do not.
        """
        own = {} if hints is None else on_types(hints)
        found = {name for name, told in own.items() if told.perf_params is not None}
        if found and profile_key in self.scripts:
            found |= set(self.scripts[profile_key].by_type)
        found |= {other for one, other in self.ratios.known if one in found}
        found |= {with_slow_links(name) for name in found if self.slow}  # one replica is as fast there
        return frozenset(name for name in found if SEVERAL not in name)

    def placed(self, hints: JobHints | None, nodes: Iterable[str]) -> JobHints | None:
        """Return a report from `nodes` under the joined names of their types, if these are several."""
        type_of = self.classes.type_of
        types = sorted({self.classes.declared(type_of[node]) for node in nodes if node in type_of})
        if hints is None or len(types) < 2:
            return hints and self.classes.labelled(hints, nodes)
        return replace(hints, node_type=SEVERAL.join(types))


def measured(view: View, before: Mapping[str, str] | None = None) -> Measured:
    """Return what the jobs of a cluster have measured on its types of nodes.

    Args:
        view: The cluster.
        before: The class that each node had in the last question.
    """
    reports = reports_by_script(view)
    found = node_classes(view, reports, before or {})
    links, slow = links_of(view)
    # over fast links, and over slow ones
    scripts: tuple[dict[str, ScriptProfile], dict[str, ScriptProfile]] = {}, {}
    of_scripts: dict[str, TypeRatios] = {}
    for key, told in reports.items():
        try:
            told = [replace(one, hints=still_valid(one.hints, view.agents(one.job))) for one in told]
            named = [replace(one, hints=found.labelled(one.hints, one.nodes)) for one in told]
            made = [
                script_profile([replace(one, hints=over_links(one.hints, slow, kind)) for one in named])
                for kind in ((False, True) if slow else (False,))
            ]
            of_scripts[key] = script_ratios(made[0]) if len(made[0].by_type) > 1 else TypeRatios()
        except Exception:  # an error in these reports: their jobs share nothing, and all others are decided
            continue
        for profiles, profile in zip(scripts, made, strict=False):
            profiles[key] = profile
    ratios_known = TypeRatios(found.ratios | dict(_medians(of_scripts.values()).known))
    type_of = {node: with_slow_links(name) if node in slow else name for node, name in found.type_of.items()}
    return Measured(type_of, scripts[0], ratios_known, of_scripts, links, found, slow, scripts[1])


def most_profiled(hints: JobHints | None) -> int:
    """Return the largest number of replicas that a job was profiled on, on any type of node."""
    if hints is None:
        return 0
    return max(hints.max_profiled_replicas, *(one.max_profiled_replicas for one in hints.elsewhere), 0)


def on_types(hints: JobHints) -> dict[str, JobHints]:
    """Split a report by type of node: return for each type a report about that type alone.

    A job keeps the memory limit that it learnt on one type when it moves to another one. So a limit that is
    reported for an earlier type, too, says nothing of the present type.
    """
    earlier = {other.memory_limit for other in hints.elsewhere}
    limit = None if hints.memory_limit in earlier else hints.memory_limit
    found = {hints.node_type: replace(hints, memory_limit=limit, elsewhere=())}
    for other in hints.elsewhere:
        found[other.node_type] = replace(
            hints,
            node_type=other.node_type,
            profile=other.profile,
            perf_params=other.perf_params,
            max_profiled_replicas=other.max_profiled_replicas,
            local_bsz_bounds=other.local_bsz_bounds or hints.local_bsz_bounds,
            memory_limit=other.memory_limit,
            elsewhere=(),
        )
    return found


def memory_limits(view: View) -> dict[str, list[tuple[frozenset[str], int]]]:
    """Return for each `profile_key` the limits of memory that jobs have learnt, with the types of nodes."""
    found: dict[str, list[tuple[frozenset[str], int]]] = {}
    for job in view.jobs.values():
        key, hints = job.spec.record.profile_key if job.spec else "", own_hints(job)
        for name, told in on_types(hints).items() if key and hints else ():
            if told.memory_limit is not None:
                types = frozenset(name.split(SEVERAL))
                found.setdefault(key, []).append((types, told.memory_limit))
    return found


def script_profile(reports: Sequence[Report]) -> ScriptProfile:
    """Return what at least one report of jobs with the same script says, by type."""
    by_type: dict[str, list[Report]] = {}
    for report in reports:
        for name, hints in on_types(report.hints).items():
            if hints.perf_params is not None:
                by_type.setdefault(name, []).append(replace(report, hints=hints))
    curves = {name: curve_of(found) for name, found in by_type.items()}
    return ScriptProfile(curves, curve_of(reports).totals)


def pace(one: JobHints, other: JobHints) -> float | None:
    """Return the ratio of step times in `other` to those in `one`, as a logarithm; None if it is unknown.

    The step times of `other` are measured; those of `one` are predicted by its model for the same
    configurations. Configurations with more replicas than `one` has run on are left out, unless `other` has
    measured no smaller ones.
    """
    if one.perf_params is None:
        return None
    measured = [entry for entry in other.profile if entry.optim_step_time > _SHORTEST]
    if not measured:
        return None
    most = max(one.max_profiled_replicas, min(entry.replicas for entry in measured))
    within = [entry for entry in measured if entry.replicas <= most]
    nodes, replicas, atomic = (
        np.array([getattr(entry, name) for entry in within], dtype=float)
        for name in ("nodes", "replicas", "atomic_bsz")
    )
    function = GoodputFunction(PerfParams(*one.perf_params), GradParams(1.0, 1.0), 1)
    predicted = replicas * atomic / function.throughput(nodes, replicas, atomic, 0)
    logs = np.log(np.array([entry.optim_step_time for entry in within]) / predicted)
    return float(np.clip(np.median(logs), -_LARGEST, _LARGEST))


def ratios(scripts: Iterable[ScriptProfile]) -> TypeRatios:
    """Return the median over all scripts of the ratios between types."""
    return _medians(script_ratios(script) for script in scripts)


def _medians(scripts: Iterable[TypeRatios]) -> TypeRatios:
    found: dict[tuple[str, str], list[float]] = {}
    for script in scripts:
        for pair, ratio in script.known.items():
            found.setdefault(pair, []).append(ratio)
    return TypeRatios({pair: median(values) for pair, values in found.items()})


def script_ratios(script: ScriptProfile) -> TypeRatios:
    """Return the ratios between types that jobs with this script have measured."""
    whole = {name: _joined(curve) for name, curve in script.by_type.items()}
    known = {}
    for one in whole:
        for other in whole:
            both = pace(whole[one], whole[other]) if one != other else None
            if both is not None:
                known[one, other] = both
    return TypeRatios(known)


def _joined(curve: Curve) -> JobHints:
    """Return the widest report of a curve with the measurements of all."""
    latest = sorted((told[0] for told in curve.told.values()), key=lambda told: -told.seen)
    return replace(curve.widest, profile=tuple(told.entry for told in latest[:MOST_CONFIGURATIONS]))


def typed_models(
    job: str,
    hints: JobHints | None,
    script: ScriptProfile | None,
    types: Iterable[str],
    of_script: TypeRatios,
    of_all: TypeRatios,
) -> tuple[GoodputModel | None, dict[str, GoodputModel]]:
    """Return the model of a job on the type that it has run on most, and its models by type.

    Args:
        job: The name of the job.
        hints: Its own report.
        script: What jobs with the same script have measured, itself included.
        types: The types of the cluster's nodes.
        of_script: The ratios between types that jobs with the same script have measured.
        of_all: The median ratios between types.
    """
    if hints is None:
        return None, {}
    curves = {} if script is None else script.by_type
    reported = on_types(hints)
    own = {
        name: told
        for name, found in reported.items()
        if (told := informed(job, found, curves.get(name))) is not None and told.perf_params is not None
    }
    if not own:
        return model(hints), {}
    own = {name: told for name, told in own.items() if SEVERAL not in name} or own
    widest = max(
        own.values(), key=lambda told: (told.max_profiled_replicas, told.node_type == hints.node_type)
    )
    found = {}
    for name in sorted({*types, *own}):
        told = _on_type(name, own, curves, widest, of_script, of_all)
        if name not in own:  # it has no step time there: its own bounds hold, and others' limit
            bounds = reported.get(name, hints).local_bsz_bounds
            told = replace(told, local_bsz_bounds=bounds, gradient_accumulation=hints.gradient_accumulation)
            told = fitting(told, curves[name].memory_limit if name in curves else None)
        known = model(told)
        if known is not None:
            found[name] = known
    return found.get(widest.node_type), found


def _on_type(
    name: str,
    own: Mapping[str, JobHints],
    curves: Mapping[str, Curve],
    widest: JobHints,
    of_script: TypeRatios,
    of_all: TypeRatios,
) -> JobHints:
    """Return what is known of a job on a type: measured by itself, by others, or on its widest type."""
    source = widest.node_type
    if name == source:
        return widest
    here = own.get(name)
    if here is None and name in curves:  # others with this script have measured it
        joined = _joined(curves[name])
        here = replace(
            widest,
            node_type=name,
            perf_params=joined.perf_params,
            profile=joined.profile,
            max_profiled_replicas=joined.max_profiled_replicas,
        )
    if here is not None:
        measured = pace(widest, here)
        ratio = 0.0 if measured is None else measured
    else:
        pair = (source, name)
        ratio = (of_script if pair in of_script.known else of_all).between(source, name)
        here = replace(widest, node_type=name, profile=(), max_profiled_replicas=0)
    return _with_transfer(here, widest, ratio)


def _with_transfer(here: JobHints, widest: JobHints, ratio: float) -> JobHints:
    """Return a report extended by what was measured on another type, in this type's pace."""
    factor = math.exp(ratio)
    known = {(entry.nodes, entry.replicas, entry.atomic_bsz) for entry in here.profile}
    others = tuple(
        _scaled(entry, factor)
        for entry in widest.profile
        if (entry.nodes, entry.replicas, entry.atomic_bsz) not in known
    )
    theta = here.perf_params
    if widest.max_profiled_replicas > here.max_profiled_replicas and widest.perf_params is not None:
        *times, gamma = widest.perf_params
        theta = (*(seconds * factor for seconds in times), gamma)  # type: ignore[assignment]
    profile = (*here.profile, *others)[:MOST_CONFIGURATIONS]
    return replace(here, profile=profile, perf_params=theta)


def _scaled(entry: ProfileEntry, factor: float) -> ProfileEntry:
    return replace(
        entry, optim_step_time=factor * entry.optim_step_time, accum_step_time=factor * entry.accum_step_time
    )
