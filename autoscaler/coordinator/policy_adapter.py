"""Translate between the store's records and the policy: its question, when to ask, its answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from adaptdl_elastic.autoscaler.cluster_view import JobView, View
from adaptdl_elastic.autoscaler.coordinator import job_phase as jobs
from adaptdl_elastic.autoscaler.coordinator.decision_types import (
    Allocation,
    CoordinatorSettings,
    Memory,
    PolicyQuestion,
    Target,
)
from adaptdl_elastic.autoscaler.coordinator.job_links import declared, link_pause, still_valid
from adaptdl_elastic.autoscaler.coordinator.job_models import DeclaredEnd, attained, own_hints, reported_on
from adaptdl_elastic.autoscaler.coordinator.job_phase import Condition, Phase
from adaptdl_elastic.autoscaler.coordinator.node_types import Measured, measured, most_profiled
from adaptdl_elastic.autoscaler.coordinator.slots import (
    Ledger,
    Room,
    devices_each,
    everything,
    in_plan,
    nearest,
    rooms,
)
from adaptdl_elastic.autoscaler.coordinator.status import impossible, typical_pause
from adaptdl_elastic.autoscaler.policy.policy_types import Decision, JobInfo, NodeInfo, NodeLimit
from adaptdl_elastic.goodput import GoodputFunction, GradParams, PerfParams
from adaptdl_elastic.rendezvous.schema.records import Cause, JobSpec, NodeRecord, Rescale
from adaptdl_elastic.rendezvous.text import pluralize

Policy = Callable[[Sequence[JobInfo], Sequence[NodeInfo], Mapping[str, Allocation], float, Any], Decision]
"""`adaptdl_elastic.autoscaler.policy.allocate`, or a replacement for it."""

_UNSETTLED = (Phase.CHANGING, Phase.BROKEN)
_ACTIVE = (Phase.EMPTY, Phase.STEADY, *_UNSETTLED)


def ask(
    view: View,
    conditions: Mapping[str, Condition],
    memory: Memory,
    ledger: Ledger,
    settings: CoordinatorSettings,
) -> PolicyQuestion:
    """Return the state of the cluster in the policy's terms."""
    known = measured(view, memory.classes)
    infos: list[JobInfo] = []
    current: dict[str, Allocation] = {}
    causes: dict[str, tuple[Cause, str]] = {}
    prints: list[Any] = []
    forecasts: dict[str, float] = {}
    undecidable: dict[str, str] = {}
    for name in sorted(conditions):
        job, condition = view.jobs[name], conditions[name]
        if condition.phase not in _ACTIVE or job.spec is None or job.plan is None:
            continue
        if jobs.stop_requested(job) or impossible(job.spec.record):
            continue
        late = jobs.late_nodes(view, job)
        places = rooms(view, job, None, late)
        if not places:
            continue
        try:
            info, why = _job(view, job, condition, places, memory, settings, known)
        except Exception as error:  # an error in this job's records: the policy is asked about the others
            undecidable[name] = described(error)
            continue
        infos.append(info)
        current[name] = in_plan(condition.plan)
        if why is not None:
            causes[name] = why
        prints.append(_fingerprint(job, condition, info, places))
        hints = own_hints(job)
        if hints is not None and hints.predicted_goodput and hints.predicted_goodput > 0:
            forecasts[name] = hints.predicted_goodput
        if hints is not None and hints.perf_params is not None and hints.atomic_bsz:
            seconds = GoodputFunction(PerfParams(*hints.perf_params), GradParams(1.0, 1.0), 1)
            forecasts[f"{name} on one node"] = float(seconds.throughput(1, 1, hints.atomic_bsz, 0))
    asked_about = {info.name for info in infos}
    each = {name: slots_each(view, view.jobs[name]) for name in asked_about}
    share = math.gcd(*each.values())
    nodes = _nodes(view, ledger, asked_about, max(1, share), known)
    marks = tuple(prints), nodes, tuple(undecidable)
    unsettled = frozenset(name for name in asked_about if conditions[name].phase in _UNSETTLED)
    several = {name: count // share for name, count in each.items() if count > share}
    return PolicyQuestion(
        tuple(infos), nodes, current, causes, marks, forecasts, undecidable, unsettled, several
    )


def slots_each(view: View, job: JobView) -> int:
    """Return how many slots a replica of a job takes up on the nodes that have agents of it."""
    return max((devices_each(job, seen.record) for seen in view.agents(job.job).values()), default=1)


def in_slots(job: JobInfo, each: int) -> JobInfo:
    """Return a job whose replicas take up `each` slots as one whose replicas take up one."""
    limits = job.limits and {
        name: NodeLimit(each * limit.min_slots, each * limit.max_slots) for name, limit in job.limits.items()
    }
    return replace(
        job,
        min_replicas=each * job.min_replicas,
        max_replicas=each * job.max_replicas,
        limits=limits,
        min_slots=each * job.min_slots,
        max_profiled_replicas=each * job.max_profiled_replicas,
        requested_replicas=None if job.requested_replicas is None else each * job.requested_replicas,
    )


def described(error: Exception) -> str:
    """Return an error as one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300].removesuffix(": ")


def worth_asking(question: PolicyQuestion, before: PolicyQuestion | None, drift: float) -> bool:
    """Return whether the answer may differ from that to the previous question.

    Reports are noisy: a forecast counts as changed if it has moved by more than the factor 1 + `drift`.
    """
    if before is None or question.fingerprint != before.fingerprint:
        return True
    then, now = before.forecasts, question.forecasts
    return then.keys() != now.keys() or any(
        abs(math.log(now[name]) - math.log(then[name])) > math.log1p(drift) for name in now
    )


def _nodes(view: View, ledger: Ledger, asked: set[str], share: int, known: Measured) -> tuple[NodeInfo, ...]:
    """Return every node with the slots of `share` devices that the jobs of the question may share."""
    elsewhere: dict[str, int] = {}
    for name in view.jobs:
        if name not in asked:
            for node, slots in ledger.held(name).items():
                elsewhere[node] = elsewhere.get(node, 0) + slots
    found: dict[str, list[NodeRecord]] = {}
    for agents in view.nodes.values():
        for node, seen in agents.items():
            found.setdefault(node, []).append(seen.record)
    return tuple(
        NodeInfo(
            name=node,
            slots=max(0, ledger.capacity[node] - elsewhere.get(node, 0)) // share,
            preemptible=any(record.preemptible for record in records),
            # a node leaves only if the agents of all its jobs do
            draining=all(view.draining(record) for record in records),
            at_risk=any(record.at_risk for record in records),
            node_type=known.type_of[node],
        )
        for node, records in sorted(found.items())
    )


def _job(
    view: View,
    job: JobView,
    condition: Condition,
    places: Mapping[str, Room],
    memory: Memory,
    settings: CoordinatorSettings,
    known: Measured,
) -> tuple[JobInfo, tuple[Cause, str] | None]:
    assert job.spec is not None
    assert job.plan is not None
    spec, now = job.spec.record, in_plan(condition.plan)
    size = sum(now.values())
    script = known.scripts.get(spec.profile_key)
    hints = own_hints(job)
    hints = known.placed(hints and still_valid(hints, view.agents(job.job)), reported_on(job))
    goodput_model, models = known.models(job.job, spec.profile_key, hints)
    several = len(known.types) > 1
    speeds = known.ratios.speeds({declared(name) for name in known.types}) if several else {}
    pause = expected_pause(job, settings)
    fixed, places = _fixed_size(view, job, condition, places, settings)
    unsettled = condition.phase in _UNSETTLED
    if unsettled:
        fixed = _Fixed(size, "a change of it is under way")
    chosen = fixed is not None and fixed.cause is not None and fixed.size == size
    info = JobInfo(
        name=job.job,
        min_replicas=spec.min_replicas,
        max_replicas=spec.max_replicas,
        min_nodes=spec.min_nodes,
        max_nodes=spec.max_nodes,
        limits=_limits(tuple((name, room.least, room.most) for name, room in places.items())),
        model=goodput_model,
        models=models if len(models) > 1 else {},
        measured=known.measured_on(spec.profile_key, hints),
        speeds={name: speeds.get(declared(name), 1.0) for name in known.types} if speeds else {},
        max_profiled_replicas=most_profiled(hints),
        requested_replicas=None if fixed is None else fixed.size,
        fixed_because="" if fixed is None else fixed.text,
        preemptible=spec.preemptible and not unsettled and not chosen,
        avoid_preemptible_nodes=spec.avoid_preemptible_nodes,
        weight=spec.weight,
        remaining=None if hints is None else hints.remaining_samples,
        outlived=memory.ends.get(job.job, DeclaredEnd()).outlived(view.now),
        attained=attained(hints),
        kind_totals=() if script is None else script.totals_besides(job.job),
        pause=pause,
        # a move in place takes two changes: replicas join on the new nodes, and then leave the old nodes
        move_pause=None if pause is None or hints is None or not hints.inplace else 2 * pause,
        link_pause=link_pause(hints, known.links.get(job.job), typical_pause(job) is not None),
        submitted=job.spec.seen,
        waiting_since=memory.waiting.get(job.job, view.now) if not size else None,
        last_change=job.plan.seen if now else None,
    )
    return info, None if fixed is None or fixed.cause is None else (fixed.cause, fixed.text)


@lru_cache(maxsize=64)
def _limits(places: tuple[tuple[str, int, int], ...]) -> Mapping[str, NodeLimit]:
    """Return the limits of (node, fewest, most) replicas; jobs with the same ones share a mapping."""
    return {name: NodeLimit(least, most) for name, least, most in places}


@dataclass(frozen=True)
class _Fixed:
    """A size that the policy does not choose."""

    size: int
    text: str  # reason
    cause: Cause | None = None  # cause of plans that give this size; None: the job has it already


def _fixed_size(
    view: View, job: JobView, condition: Condition, places: Mapping[str, Room], settings: CoordinatorSettings
) -> tuple[_Fixed | None, Mapping[str, Room]]:
    """Return a size that the policy does not choose (None: it chooses), and the nodes that are possible."""
    assert job.spec is not None
    spec, now = job.spec.record, in_plan(condition.plan)
    wanted = jobs.requested_replicas(job)
    if wanted is not None:
        possible = nearest(spec, wanted, places, now)
        size = sum((possible or {}).values()) or spec.min_replicas
        text = f"adaptdl scale: {pluralize(wanted, 'replica')}"
        text = text if size == wanted else f"{text}, of which {size} are possible"
        return _Fixed(size, text, Cause.MANUAL), places
    size, hints = sum(now.values()), own_hints(job)
    if size and hints is not None and hints.outside_epochs:
        return _Fixed(size, "its script trains outside of adl.remaining_epochs_until"), places
    if not spec.autoscale:
        if condition.plan is not None and jobs.size_of(condition.plan) != size:  # a move was cancelled
            size = sum((nearest(spec, jobs.size_of(condition.plan), places, now) or now).values())
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


def expected_pause(job: JobView, settings: CoordinatorSettings) -> float | None:
    """Return how many seconds the next change is expected to pause the job; None if that is unknown.

    Use the median of the job's measured pauses. Before the first measurement, use the settings' pause of a
    change in place if the job can change in place. For None the policy takes its own default.
    """
    measured = typical_pause(job)
    hints = own_hints(job)
    if measured is None and hints is not None and hints.inplace and job.spec is not None:
        return None if job.spec.record.rescale is Rescale.RESTART else settings.inplace_pause
    return measured


def _fingerprint(job: JobView, condition: Condition, info: JobInfo, places: Mapping[str, Room]) -> Any:
    hints = own_hints(job)
    return (
        job.job,
        condition.phase,
        info.requested_replicas,
        info.model and info.model.network,
        tuple(model.network for model in info.models.values()),
        info.link_pause,
        info.max_profiled_replicas,
        None if hints is None else hints.generation,
        tuple(places),
    )


# The answer


def targets(
    question: PolicyQuestion, decision: Decision, view: View, conditions: Mapping[str, Condition]
) -> dict[str, Target]:
    """Return the target of each job, from the policy's answer.

    Leave out the jobs whose size was changing when the question was made. The question did not contain nodes
    that were missing for a moment then.
    """
    found: dict[str, Target] = {}
    for name, allocation in decision.allocations.items():
        if name not in conditions or name in question.unsettled:
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


def _cause(question: PolicyQuestion, name: str, condition: Condition, spec: JobSpec) -> tuple[Cause, str]:
    if name in question.causes:
        return question.causes[name]
    if condition.phase is Phase.EMPTY:
        if condition.plan is None:
            return Cause.START, ""
        if condition.plan.cause in (Cause.FAILURE, Cause.NODE_LOST, Cause.REPLICA_LOST, Cause.DRAIN):
            return condition.plan.cause, "resumes"
    return Cause.POLICY, ""


def _survivors_first(allocation: Allocation, now: Allocation) -> dict[str, int]:
    """Return the same allocation with the nodes that stay first, in the order of their ranks."""
    order = [node for node in now if node in allocation] + [node for node in allocation if node not in now]
    return {node: allocation[node] for node in order if allocation[node] > 0}
