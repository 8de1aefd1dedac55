"""Between the store's records and the policy: what it is asked about, when, and what its answer means."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from adaptdl_elastic.autoscaler.coordinator import job as jobs
from adaptdl_elastic.autoscaler.coordinator.job import Condition, Phase
from adaptdl_elastic.autoscaler.coordinator.slots import Ledger, Room, everything, in_plan, nearest, rooms
from adaptdl_elastic.autoscaler.coordinator.status import impossible, typical_pause
from adaptdl_elastic.autoscaler.coordinator.types import Allocation, Memory, Settings, Target
from adaptdl_elastic.autoscaler.policy.learning import Corrections, correct
from adaptdl_elastic.autoscaler.policy.types import Decision, GoodputModel, JobInfo, NodeInfo, NodeLimit
from adaptdl_elastic.autoscaler.state import JobView, View
from adaptdl_elastic.goodput import GradParams, PerfParams
from adaptdl_elastic.rendezvous.records import Cause, JobSpec, JobState, Rescale
from adaptdl_elastic.sched_hints import JobHints, ProfileEntry

Policy = Callable[
    [Sequence[JobInfo], Sequence[NodeInfo], Mapping[str, Allocation], float, Any],
    Decision,
]
"""`adaptdl_elastic.autoscaler.policy.allocate`, or one that stands in for it."""

_MOST, _LARGE = 10**9, 1e30  # counts and seconds; goodput and squared norms: beyond that it is nonsense
_ACTIVE = (Phase.EMPTY, Phase.CHANGING, Phase.STEADY, Phase.BROKEN)


@dataclass(frozen=True)
class Question:
    """What the policy is asked."""

    jobs: tuple[JobInfo, ...]
    nodes: tuple[NodeInfo, ...]
    current: Mapping[str, Allocation]
    causes: Mapping[str, tuple[Cause, str]]  # for jobs whose size somebody else chose: why, in words
    fingerprint: Any  # two questions with the same one need not both be asked, unless
    forecasts: Mapping[str, float]  # by job, the goodput it predicts for what it has, is another


def policy_inputs(
    view: View, settings: Settings | None = None
) -> tuple[tuple[JobInfo, ...], tuple[NodeInfo, ...], Mapping[str, Allocation]]:
    """(jobs, nodes, current) as the policy would be asked about this view now."""
    settings = settings or Settings()
    conditions = {name: jobs.examine(view, job, settings) for name, job in view.jobs.items()}
    question = ask(view, conditions, Memory(), Ledger(view), settings)
    return question.jobs, question.nodes, question.current


def ask(
    view: View,
    conditions: Mapping[str, Condition],
    memory: Memory,
    ledger: Ledger,
    settings: Settings,
) -> Question:
    """Put the state of the cluster into the policy's terms."""
    curves = _curves(view)
    infos: list[JobInfo] = []
    current: dict[str, Allocation] = {}
    causes: dict[str, tuple[Cause, str]] = {}
    prints: list[Any] = []
    forecasts: dict[str, float] = {}
    for name in sorted(conditions):
        job, condition = view.jobs[name], conditions[name]
        if condition.phase not in _ACTIVE or job.spec is None or job.plan is None:
            continue
        if jobs.stop_requested(job) or impossible(job.spec.record):
            continue
        late = jobs.late_nodes(memory, view, job, settings)
        places = rooms(view, job, None, late)
        if not places:
            continue
        info, why = _job(view, job, condition, places, memory, settings, curves)
        infos.append(info)
        current[name] = in_plan(condition.plan)
        if why is not None:
            causes[name] = why
        prints.append(_fingerprint(job, condition, info, places))
        hints = own_hints(job)
        if hints is not None and hints.predicted_goodput and hints.predicted_goodput > 0:
            forecasts[name] = hints.predicted_goodput
    asked_about = {info.name for info in infos}
    nodes = _nodes(view, ledger, asked_about)
    return Question(tuple(infos), nodes, current, causes, (tuple(prints), nodes), forecasts)


def worth_asking(question: Question, before: Question | None, drift: float) -> bool:
    """Whether the answer may be another than to the question before.

    Reports are noisy: forecasts count when one has moved by more than the factor 1 + `drift` since then.
    """
    if before is None or question.fingerprint != before.fingerprint:
        return True
    then, now = before.forecasts, question.forecasts
    return then.keys() != now.keys() or any(
        abs(math.log(now[name]) - math.log(then[name])) > math.log1p(drift) for name in now
    )


def _nodes(view: View, ledger: Ledger, asked_about: set[str]) -> tuple[NodeInfo, ...]:
    """Every node with the slots that the jobs in question may share."""
    elsewhere: dict[str, int] = {}
    for name in view.jobs:
        if name not in asked_about:
            for node, slots in ledger.held(name).items():
                elsewhere[node] = elsewhere.get(node, 0) + slots
    facts: dict[str, NodeInfo] = {}
    for agents in view.nodes.values():
        for node, seen in agents.items():
            record = seen.record
            was = facts.get(node)
            facts[node] = NodeInfo(
                name=node,
                slots=max(0, ledger.capacity[node] - elsewhere.get(node, 0)),
                preemptible=record.preemptible or (was is not None and was.preemptible),
                # one agent that leaves is its own job's concern: the node leaves when all of them do
                draining=view.draining(record) and (was is None or was.draining),
                at_risk=record.at_risk or (was is not None and was.at_risk),
            )
    return tuple(facts[node] for node in sorted(facts))


def _job(
    view: View,
    job: JobView,
    condition: Condition,
    places: Mapping[str, Room],
    memory: Memory,
    settings: Settings,
    curves: Mapping[str, _Curve],
) -> tuple[JobInfo, tuple[Cause, str] | None]:
    assert job.spec is not None
    assert job.plan is not None
    spec, now = job.spec.record, in_plan(condition.plan)
    size = sum(now.values())
    curve = curves.get(spec.curve_key)
    hints = _informed(own_hints(job), curve)
    fixed, places = _fixed_size(view, job, condition, places, settings)
    unsettled = condition.phase in (Phase.CHANGING, Phase.BROKEN)
    if unsettled:
        fixed = _Fixed(size, "a change of it is under way")
    chosen = fixed is not None and fixed.cause is not None and fixed.size == size
    info = JobInfo(
        name=job.job,
        min_replicas=max(1, spec.min_replicas),
        max_replicas=spec.max_replicas,
        min_nodes=spec.min_nodes,
        max_nodes=spec.max_nodes,
        limits={name: NodeLimit(room.least, room.most) for name, room in places.items()},
        model=None if hints is None else model(hints),
        max_profiled_replicas=0 if hints is None else hints.max_profiled_replicas,
        requested_replicas=None if fixed is None else fixed.size,
        fixed_because="" if fixed is None else fixed.text,
        preemptible=spec.preemptible and not unsettled and not chosen,
        avoid_preemptible_nodes=spec.avoid_preemptible_nodes,
        weight=spec.weight,
        remaining=None if hints is None else hints.remaining_samples,
        attained=_attained(hints),
        kind_totals=() if curve is None else curve.totals,
        pause=expected_pause(job, settings),
        submitted=job.spec.seen,
        waiting_since=memory.waiting.get(job.job, view.now) if not size else None,
        last_change=job.plan.seen if now else None,
    )
    return info, None if fixed is None or fixed.cause is None else (fixed.cause, fixed.text)


@dataclass(frozen=True)
class _Fixed:
    """A size that is not the policy's to choose."""

    size: int
    text: str  # why
    cause: Cause | None = None  # of plans that give it; None: it has it already


def _fixed_size(
    view: View, job: JobView, condition: Condition, places: Mapping[str, Room], settings: Settings
) -> tuple[_Fixed | None, Mapping[str, Room]]:
    """The size of a job that the policy is not to choose, None where it is; and where it may be."""
    assert job.spec is not None
    spec, now = job.spec.record, in_plan(condition.plan)
    wanted = jobs.requested_replicas(job)
    if wanted is not None:
        possible = nearest(spec, wanted, places, now)
        size = sum((possible or {}).values()) or max(1, spec.min_replicas)
        text = f"adaptdl scale: {wanted} replica{'' if wanted == 1 else 's'}"
        text = text if size == wanted else f"{text}, of which {size} are possible"
        return _Fixed(size, text, Cause.MANUAL), places
    size = sum(now.values())
    if not spec.autoscale:
        return _Fixed(size, "it was started with autoscaling off") if size else None, places
    if condition.phase is Phase.STEADY and not jobs.uses_library(job):
        if view.now - condition.health.started_at < settings.hello_grace:
            return _Fixed(size, "its script has not said yet that it uses the library"), places
        least = {name: replace(room, most=room.least) for name, room in places.items()}
        wide = everything(spec, least, now)
        if wide is not None and sum(wide.values()) >= size:
            text = f"the script reports nothing to decide by: every node there is ({len(wide)})"
            return _Fixed(sum(wide.values()), text, Cause.JOIN), {n: least[n] for n in wide}
        return _Fixed(size, "its script reports nothing to decide by"), places
    return None, places


def expected_pause(job: JobView, settings: Settings) -> float | None:
    """Seconds that a change would cost: as measured; before the first what one in place takes, if it can be.

    None where neither is known: the policy has a default.
    """
    measured = typical_pause(job)
    hints = own_hints(job)
    if measured is None and hints is not None and hints.inplace and job.spec is not None:
        return None if job.spec.record.rescale is Rescale.RESTART else settings.inplace_pause
    return measured


def own_hints(job: JobView) -> JobHints | None:
    """The last good report of the job's present run."""
    if job.hints is None or job.plan is None or job.spec is None:
        return None
    if job.plan.record.run != job.spec.record.run or job.hints.record.generation < job.plan.record.first:
        return None
    return job.hints.record if sensible(job.hints.record) else None


def sensible(hints: JobHints) -> bool:
    """Whether a report's numbers can be calculated with: its schema says of what type they are only."""
    low, high = hints.local_bsz_bounds or (1, _MOST)
    counts = [hints.init_batch_size, hints.max_batch_size or 1, hints.max_profiled_replicas, low, high]
    times = []
    for entry in hints.profile:
        counts += [entry.nodes, entry.replicas, entry.atomic_bsz]
        times += [entry.optim_step_time, entry.accum_step_time]
    theta = hints.perf_params
    return (
        all(0 <= count <= _MOST for count in counts)
        and all(0 <= seconds <= _MOST for seconds in times)
        and 1 <= low <= high
        and (hints.max_batch_size is None or hints.max_batch_size >= hints.init_batch_size)
        and (theta is None or (all(0 <= x <= _MOST for x in theta) and sum(theta[:6]) > 0 and theta[6] >= 1))
        and all(0 <= x <= _LARGE for x in hints.grad_params or ())
        and (hints.goodput is None or 0 <= hints.goodput <= _LARGE)
    )


def model(hints: JobHints) -> GoodputModel | None:
    """A report's goodput model; None while it has none, or one that makes no sense."""
    if hints.perf_params is None or hints.grad_params is None:
        return None
    square, variance = hints.grad_params
    if square < 0 or variance < 0 or min(hints.perf_params[:6]) < 0 or hints.init_batch_size < 1:
        return None
    try:
        return GoodputModel(
            perf_params=PerfParams(*hints.perf_params),
            grad_params=GradParams(square, variance),
            init_batch_size=hints.init_batch_size,
            max_batch_size=hints.max_batch_size,
            local_bsz_bounds=hints.local_bsz_bounds,
            accumulation=hints.gradient_accumulation,
            corrections=_corrections(hints.perf_params, hints.profile),
        )
    except (ValueError, ArithmeticError):
        return None


@lru_cache(maxsize=8192)
def _corrections(theta: tuple[float, ...], profile: tuple[ProfileEntry, ...]) -> Corrections | None:
    """What the measured step times say that θ does not; remembered, for it is asked at every decision."""
    times = {
        (entry.nodes, entry.replicas, entry.atomic_bsz): entry.optim_step_time
        for entry in profile
        if entry.optim_step_time > 0 and entry.nodes > 0 and entry.replicas > 0 and entry.atomic_bsz > 0
    }
    return correct(PerfParams(*theta), times) if times else None


@dataclass(frozen=True)
class _Curve:
    """What jobs of one script have found out together."""

    profile: tuple[ProfileEntry, ...]
    widest: JobHints  # the report of whichever has been on the most replicas
    totals: tuple[float, ...] = ()  # samples that those which are done came to


def _curves(view: View) -> dict[str, _Curve]:
    """By `curve_key`: jobs of one script with the same arguments share what they know, ended ones too."""
    entries: dict[str, dict[tuple[int, int, int], ProfileEntry]] = {}
    widest: dict[str, JobHints] = {}
    totals: dict[str, tuple[float, ...]] = {}
    for job in view.jobs.values():
        key = job.spec.record.curve_key if job.spec else ""
        hints = own_hints(job)
        if not key or hints is None or hints.perf_params is None:
            continue
        pool = entries.setdefault(key, {})
        for entry in hints.profile:
            at = entry.nodes, entry.replicas, entry.atomic_bsz
            if at not in pool or pool[at].optim_count < entry.optim_count:
                pool[at] = entry
        if jobs.has_ended(job) and job.status and job.status.record.state is JobState.DONE:
            totals[key] = (*totals.get(key, ()), _attained(hints) + (hints.remaining_samples or 0.0))
        if key not in widest or widest[key].max_profiled_replicas < hints.max_profiled_replicas:
            widest[key] = hints
    return {
        key: _Curve(tuple(entries[key].values()), hints, totals.get(key, ())) for key, hints in widest.items()
    }


def _informed(hints: JobHints | None, curve: _Curve | None) -> JobHints | None:
    """A job's own report, enriched by what others like it have measured; theirs where it has none yet."""
    if curve is None:
        return hints
    if hints is None or hints.perf_params is None or hints.grad_params is None:
        unknown: dict[str, Any] = {"samples_done": None, "remaining_samples": None, "progress": None}
        return replace(curve.widest, profile=curve.profile, **unknown)
    reached = max(hints.max_profiled_replicas, curve.widest.max_profiled_replicas)
    return replace(hints, profile=curve.profile, max_profiled_replicas=reached)


def _attained(hints: JobHints | None) -> float:
    return 0.0 if hints is None or hints.samples_done is None else hints.samples_done


def _fingerprint(job: JobView, condition: Condition, info: JobInfo, places: Mapping[str, Room]) -> Any:
    hints = own_hints(job)
    return (
        job.job,
        condition.phase,
        info.requested_replicas,
        info.model is None,
        info.max_profiled_replicas,
        None if hints is None else hints.generation,
        tuple(places),
    )


# -- the answer


def targets(
    question: Question, decision: Decision, view: View, conditions: Mapping[str, Condition]
) -> dict[str, Target]:
    """What each job is to have, by the policy's answer."""
    found: dict[str, Target] = {}
    for name, allocation in decision.allocations.items():
        if name not in conditions:
            continue
        spec = view.jobs[name].spec
        assert spec is not None
        now = question.current.get(name, {})
        reason = decision.reasons.get(name)
        cause, text = _cause(question, name, conditions[name], spec.record)
        if reason is not None and reason.text and name not in question.causes:
            text = reason.text if not text else f"{text}: {reason.text}"
        found[name] = Target(
            run=spec.record.run,
            allocation=_survivors_first(allocation, now),
            cause=cause,
            reason=text,
            predicted_goodput=None if reason is None else reason.goodput,
        )
    return found


def _cause(question: Question, name: str, condition: Condition, spec: JobSpec) -> tuple[Cause, str]:
    if name in question.causes:
        return question.causes[name]
    if condition.phase is Phase.EMPTY:
        if condition.plan is None:
            return Cause.START, ""
        if condition.plan.cause in (Cause.FAILURE, Cause.NODE_LOST, Cause.DRAIN):
            return condition.plan.cause, "resumes"
    return Cause.POLICY, ""


def _survivors_first(allocation: Allocation, now: Allocation) -> dict[str, int]:
    """The same allocation with the nodes that stay first, in the order of their ranks."""
    order = [node for node in now if node in allocation] + [node for node in allocation if node not in now]
    return {node: allocation[node] for node in order if allocation[node] > 0}
