"""Explain why a job has its size, from the same view and with the same policy that decided it.

Pure: `explain` returns plain values, `lines` makes sentences of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from adaptdl_elastic.autoscaler.cluster_view import JobView, View, limited
from adaptdl_elastic.autoscaler.coordinator import failure_owner
from adaptdl_elastic.autoscaler.coordinator import job_phase as jobs
from adaptdl_elastic.autoscaler.coordinator.decision_types import Allocation, CoordinatorSettings, Memory
from adaptdl_elastic.autoscaler.coordinator.job_models import model, own_hints
from adaptdl_elastic.autoscaler.coordinator.job_phase import Phase
from adaptdl_elastic.autoscaler.coordinator.policy_adapter import Policy, ask, expected_pause
from adaptdl_elastic.autoscaler.coordinator.rounds import ask_policy
from adaptdl_elastic.autoscaler.coordinator.slots import Ledger, in_plan, nearest, rooms
from adaptdl_elastic.autoscaler.coordinator.status import typical_pause, waiting_since, why_pending
from adaptdl_elastic.autoscaler.diagnostics.rows import job_row
from adaptdl_elastic.autoscaler.policy.curves import goodputs
from adaptdl_elastic.autoscaler.policy.policy_types import GoodputModel, JobInfo, PolicySettings
from adaptdl_elastic.rendezvous.text import pluralize


@dataclass(frozen=True)
class Option:
    """The job at another size, or at its present size."""

    replicas: int
    placements: Allocation
    goodput: float | None  # predicted samples per second
    speedup: float | None  # compared with one replica
    change: float | None  # change of goodput compared with the present one, as a fraction
    pays_after: float | None  # seconds until the gain has compensated the pause; None: never
    note: str = ""


@dataclass(frozen=True)
class Rival:
    """Another job that could use slots of this job's nodes."""

    job: str
    replicas: int
    shared_nodes: tuple[str, ...]
    wants: int | None  # replicas that it would have alone on the cluster
    marginal_speedup: float | None  # speedup (compared with one replica) that one more replica would add


@dataclass(frozen=True)
class Explanation:
    """Everything that is known about a job's size."""

    job: str
    state: str
    reason: str
    cause: str | None
    replicas: int
    placements: Allocation
    bounds: Mapping[str, Any]
    now: Option | None
    one_more: Option | None
    one_fewer: Option | None
    limited_by: tuple[str, ...]
    policy_wants: int | None  # replicas that the policy would give the job now
    policy_reason: str
    pause: float | None
    pause_from: str  # text that says how the pause is known
    rivals: tuple[Rival, ...]
    free_slots: int
    prediction_error: float | None


def leaders_settings(view: View) -> CoordinatorSettings:
    """Return the leading coordinator's settings; the defaults if none leads or it has published none."""
    if view.leader is None:
        return CoordinatorSettings()
    told = dict(view.leader.record.settings)
    policy = told.pop("policy", None)
    try:
        return replace(
            TypeAdapter(CoordinatorSettings).validate_python(told),
            policy=None if policy is None else TypeAdapter(PolicySettings).validate_python(policy),
        )
    except (ValidationError, TypeError):
        return CoordinatorSettings()


def explain(
    view: View, job: JobView, policy: Policy, settings: CoordinatorSettings | None = None
) -> Explanation:
    """Explain the size of `job`; the policy is called once, as the coordinator would call it."""
    settings = settings or CoordinatorSettings()
    weighed = view.weight_problems(job)
    view = limited(view)
    job = view.jobs[job.job]
    ledger = Ledger(view)
    condition = jobs.condition_of(view, job, settings)
    assert job.spec is not None
    spec, row = job.spec.record, job_row(view, job)
    now = {} if condition.phase is Phase.OVER else in_plan(condition.plan)
    conditions = {name: jobs.condition_of(view, one, settings) for name, one in view.jobs.items()}
    memory = Memory(waiting=waiting_since(view, conditions, {}))
    question = ask(view, conditions, memory, ledger, settings)
    policy_settings = settings.policy or PolicySettings()
    reasons: Mapping[str, Any] = {}
    wants, why = None, ""
    if any(info.name == job.job for info in question.jobs):
        decision = ask_policy(policy, question, question.jobs, view.now, policy_settings)
        reasons = decision.reasons
        wants = sum(decision.allocations.get(job.job, {}).values())
        found = decision.reasons.get(job.job)
        why = decision.pending.get(job.job, "") or (found.text if found else "")
    type_of = {node.name: node.node_type for node in question.nodes}
    known = {info.name: Curve(info, type_of) for info in question.jobs}
    curve = known.get(job.job)
    pause = expected_pause(job, settings)
    everywhere, free = rooms(view, job), rooms(view, job, ledger)
    size = sum(now.values())
    here = _option(curve, now, now, 0.0) if now else None
    cost = policy_settings.pause(pause)
    status = job.status_now
    waits = why_pending(spec, everywhere, free, ledger) if condition.phase is Phase.EMPTY else ""
    return Explanation(
        job=job.job,
        state=row["state"],
        reason="; ".join([(status.reason if status else "") or waits, *(view.drained if waits else ())]),
        cause=row["cause"],
        replicas=size,
        placements=now,
        bounds={
            "replicas": [spec.min_replicas, spec.max_replicas],
            "nodes": [spec.min_nodes, spec.max_nodes],
            "requested": jobs.requested_replicas(job),
            "autoscale": spec.autoscale,
        },
        now=here,
        one_more=_neighbour(job, curve, now, size + 1, everywhere, free, cost) if size else None,
        one_fewer=_neighbour(job, curve, now, size - 1, everywhere, free, cost) if size > 1 else None,
        limited_by=(*weighed, *_limits(view, job, size, everywhere, free, settings)),
        policy_wants=wants,
        policy_reason=why,
        pause=cost,
        pause_from=_pause_from(job, pause),
        rivals=_rivals(view, job, ledger, known, reasons),
        free_slots=sum(max(0, room.most - now.get(node, 0)) for node, room in free.items()),
        prediction_error=row["prediction_error"],
    )


def _pause_from(job: JobView, expected: float | None) -> str:
    if typical_pause(job) is not None:
        return "median of its last changes"
    how = "by restart" if expected is None else "in place"
    return f"assumed: {how}, it was never changed"


def _neighbour(
    job: JobView,
    curve: Curve | None,
    now: Allocation,
    replicas: int,
    everywhere: Mapping[str, Any],
    free: Mapping[str, Any],
    pause: float,
) -> Option | None:
    """Return the job at another size: on free slots if possible, else on slots of other jobs, too."""
    assert job.spec is not None
    spec = job.spec.record
    for places, note in ((free, ""), (everywhere, "needs slots that other jobs have")):
        found = nearest(spec, replicas, places, now)
        if found is not None and sum(found.values()) == replicas:
            over_link = curve.info.link_pause if curve and len(found) > 1 else 0.0
            return _option(curve, found, now, max(pause, over_link), note)
    return None


def _option(
    curve: Curve | None, allocation: Allocation, now: Allocation, pause: float, note: str = ""
) -> Option:
    goodput, one, has = (_goodput(curve, a) for a in (allocation, {"": 1}, now))
    change = None if not goodput or not has else goodput / has - 1
    pays = None
    if goodput and has and goodput > has:
        pays = pause * goodput / (goodput - has)  # (t - pause) * goodput = t * has
    return Option(
        replicas=sum(allocation.values()),
        placements=dict(allocation),
        goodput=goodput,
        speedup=goodput / one if goodput and one else None,
        change=change,
        pays_after=pays,
        note=note,
    )


@dataclass(frozen=True)
class Curve:
    """The models of a job, by the types of the cluster's nodes."""

    info: JobInfo
    type_of: Mapping[str, str]  # node type by node

    def goodput(self, allocation: Allocation) -> float | None:
        """Return the predicted goodput; None without a model.

        On nodes of several types it is the goodput on the slowest type.
        """
        types = {self.type_of[node] for node in allocation if node in self.type_of} or {""}
        found = [_predicted(self.info.model_on(name), allocation) for name in types]
        return min((value for value in found if value is not None), default=None)


def _goodput(curve: Curve | None, allocation: Allocation) -> float | None:
    return None if curve is None else curve.goodput(allocation)


def _predicted(curve: GoodputModel | None, allocation: Allocation) -> float | None:
    """Return the predicted goodput of an allocation; None without a model."""
    replicas = sum(allocation.values())
    if curve is None or replicas < 1:
        return None
    value = float(goodputs([curve], len(allocation), replicas).goodput[0, 0])
    return value if value > 0 else None


def _limits(
    view: View,
    job: JobView,
    size: int,
    everywhere: Mapping[str, Any],
    free: Mapping[str, Any],
    settings: CoordinatorSettings,
) -> tuple[str, ...]:
    """Return what keeps the job from being larger, independent of the policy."""
    assert job.spec is not None
    spec, found = job.spec.record, []
    if avoided := failure_owner.avoided(view, job):
        found += avoided
    elif size >= spec.max_replicas:
        found.append(f"max_replicas {spec.max_replicas} is reached")
    requested = jobs.requested_replicas(job)
    if requested is not None:
        found.append(f"a person asked for {requested} (adaptdl scale {job.job} --auto hands it back)")
    if not spec.autoscale:
        found.append("it was started with autoscaling off")
    if not spec.preemptible:
        found.append("it may not be preempted: it keeps what it has")
    hints = own_hints(job)
    if not jobs.uses_library(job):
        found.append("its script has not said that it uses the library")
    elif hints is None or model(hints) is None:
        found.append("it has not been profiled yet: no goodput model")
    elif size >= (limit := _exploration(settings) * max(1, hints.max_profiled_replicas)):
        found.append(
            f"it has been profiled on {hints.max_profiled_replicas}, so {limit:g} are the most for now"
        )
    if sum(room.most for room in everywhere.values()) <= size and size < spec.max_replicas:
        found.append("every slot that its nodes have is its own")
    elif sum(room.most for room in free.values()) <= size and size < spec.max_replicas:
        found.append("every other slot of its nodes is another job's")
    return tuple(found)


def _exploration(settings: CoordinatorSettings) -> float:
    return float((settings.policy or PolicySettings()).exploration)


def _rivals(
    view: View, job: JobView, ledger: Ledger, known: Mapping[str, Curve], reasons: Mapping[str, Any]
) -> tuple[Rival, ...]:
    mine, found = set(view.agents(job.job)), []
    for name in sorted(known):
        shared = mine & set(view.agents(name))
        if name == job.job or not shared:
            continue
        reason, held = reasons.get(name), sum(ledger.held(name).values())
        one = _goodput(known[name], {"": 1})
        gain = None
        if reason is not None and reason.one_more and reason.goodput and one:
            gain = (reason.one_more - reason.goodput) / one
        found.append(Rival(name, held, tuple(sorted(shared)), reason.wanted if reason else None, gain))
    return tuple(sorted(found, key=lambda rival: -(rival.marginal_speedup or 0.0)))


# Text for users


def lines(found: Explanation) -> list[str]:
    """Return the explanation as sentences."""
    places = " ".join(f"{node}:{count}" for node, count in found.placements.items())
    said = [
        f"{found.job} is {found.state} with {pluralize(found.replicas, 'replica')}"
        + (f" on {places}" if places else ""),
        f"  why: {found.reason or '-'}",
    ]
    if found.now is not None and found.now.goodput is not None:
        said.append(f"  it has    {_size(found.now)}")
    for name, option in (("one more", found.one_more), ("one fewer", found.one_fewer)):
        if option is not None and option.goodput is not None:
            said.append(f"  {name:<10}{_size(option)}{_worth(option)}")
    if found.pause is not None:
        said.append(f"  a change costs {found.pause:.2g} s without a step ({found.pause_from})")
    if found.policy_wants is not None:
        agrees = "which it has" if found.policy_wants == found.replicas else f"it has {found.replicas}"
        said.append(f"  the policy would choose {found.policy_wants} now, {agrees}: {found.policy_reason}")
    said += [f"  limit: {text}" for text in found.limited_by]
    said.append(f"  free on its nodes: {pluralize(found.free_slots, 'slot')}")
    for rival in found.rivals:
        wants = "" if rival.wants is None else f", it would take {rival.wants} alone"
        speedup = rival.marginal_speedup
        gain = "" if speedup is None else f", one more is worth {speedup:+.2f} speedup"
        has = pluralize(rival.replicas, "replica")
        said.append(f"  shares {', '.join(rival.shared_nodes)} with {rival.job}: {has}{wants}{gain}")
    if found.prediction_error is not None:
        said.append(f"  the model is off by {found.prediction_error:+.0%} for what it has")
    return said


def _size(option: Option) -> str:
    speedup = "" if option.speedup is None else f", speedup {option.speedup:.2f}"
    return f"{pluralize(option.replicas, 'replica')}: {option.goodput:.4g} samples/s{speedup}"


def _worth(option: Option) -> str:
    change = "" if option.change is None else f" ({option.change:+.1%})"
    pays = "" if option.pays_after is None else f", pays for its pause after {option.pays_after:.3g} s"
    note = f"; {option.note}" if option.note else ""
    return change + pays + note


def as_json(found: Explanation) -> dict[str, Any]:
    """Return the explanation as plain values."""
    return asdict(found)
