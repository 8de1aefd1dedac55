"""Derive the input of a decision from the cluster view and the provider's answers. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from adaptdl_elastic.autoscaler.cluster_view import JobView, View, limited
from adaptdl_elastic.autoscaler.coordinator.decision_types import CoordinatorSettings
from adaptdl_elastic.autoscaler.coordinator.decision_types import Memory as Rounds
from adaptdl_elastic.autoscaler.coordinator.job_models import model, own_hints
from adaptdl_elastic.autoscaler.coordinator.job_phase import (
    Condition,
    Phase,
    condition_of,
    requested_replicas,
    resume_requested,
    stop_requested,
)
from adaptdl_elastic.autoscaler.coordinator.node_types import Measured, measured
from adaptdl_elastic.autoscaler.coordinator.policy_adapter import ask, described, in_slots, slots_each
from adaptdl_elastic.autoscaler.coordinator.slots import Ledger, devices_each, used
from adaptdl_elastic.autoscaler.policy.policy_types import JobInfo
from adaptdl_elastic.autoscaler.providers.base import Capacity, Signal, told_or_named
from adaptdl_elastic.autoscaler.scaling.scaling_types import NodeUse, Observation
from adaptdl_elastic.rendezvous.schema.records import MOST_SLOTS, NodeRecord

InstanceOf = Callable[[str, str | None], str]
"""`Provider.instance_of`."""


def observe(
    view: View,
    capacity: Capacity,
    signals: Sequence[Signal],
    expected: Sequence[str] = (),
    instance_of: InstanceOf = told_or_named,
) -> Observation:
    """Return the input of one decision.

    Args:
        view: The cluster as the store has it.
        capacity: What the provider has and offers.
        signals: What the provider announced since the last call.
        expected: Jobs that get a first node before they are in the store.
        instance_of: The provider's.
    """
    jobs, changing, warnings = _jobs(view)
    coming = [JobInfo(name) for name in expected if name not in view.jobs or view.jobs[name].spec is None]
    nodes = node_uses(view, capacity, instance_of)
    slots: dict[str, int] = {}
    for job, agents in view.nodes.items():
        for node, seen in agents.items():
            ours = capacity.instance(instance_of(node, seen.record.instance)) is not None
            if not ours and not view.draining(seen.record):
                slots[node] = max(slots.get(node, 0), _slots(view, job, seen.record))
    return Observation(
        view.wall,
        capacity,
        nodes,
        (*jobs, *coming),
        tuple(signals),
        sum(slots.values()),
        len(slots),
        {name: job.spec.record.run for name, job in view.jobs.items() if job.spec is not None},
        changing,
        warnings,
    )


def _slots(view: View, job: str, record: NodeRecord) -> int:
    """Return how many slots the replicas that an agent of a job offers take up."""
    return record.slots * (devices_each(view.jobs[job], record) if job in view.jobs else 1)


def _jobs(view: View) -> tuple[list[JobInfo], frozenset[str], tuple[str, ...]]:
    """Return (jobs to decide about, names of jobs whose size is changing, warnings).

    A job is changing while its plan differs from what runs and no person has set its size. A job whose
    records cannot be used keeps what it has, as in the coordinator, and does not affect other jobs.
    """
    view = limited(view)
    settings, conditions, broken = CoordinatorSettings(), dict[str, Condition](), dict[str, str]()
    for name, job in view.jobs.items():
        try:
            conditions[name] = condition_of(view, job, settings)
        except Exception as error:
            broken[name] = described(error)
    question = ask(view, conditions, Rounds(), Ledger(view), settings)
    broken |= question.undecidable
    asked = {info.name: info for info in question.jobs}
    known = measured(view)
    found: list[JobInfo] = []
    changing: set[str] = set()
    for name, job in view.jobs.items():
        try:
            if name in broken:
                continue
            phase = conditions[name].phase if requested_replicas(job) is None else None
            unsettled = phase in (Phase.CHANGING, Phase.BROKEN)
            info = _as_asked(asked[name], job, unsettled) if name in asked else without_nodes(job, known)
            if info is not None and job.spec is not None:
                # the nodes that may be bought for a waiting job have GPUs
                waiting = job.spec.record.gpus_per_replica
                info = in_slots(info, slots_each(view, job) if view.agents(name) else waiting)
        except Exception as error:
            broken[name] = described(error)
            continue
        found += [] if info is None else [info]
        changing |= {name} if unsettled else set()
    found += [info for name in sorted(broken) if (info := _as_planned(view, view.jobs[name])) is not None]
    warnings = (
        f"{name}: keeps what it has, because its records cannot be used: {broken[name]}"
        for name in sorted(broken)
    )
    return found, frozenset(changing), tuple(warnings)


def _as_planned(view: View, job: JobView) -> JobInfo | None:
    """Return a job of fixed size, as its plan says; None if it has no replicas or wants none."""
    size = 0 if job.plan is None else sum(p.replicas for p in job.plan.record.placements)
    size *= slots_each(view, job)
    if not size or _wants_nothing(job):
        return None
    return JobInfo(job.job, max_replicas=size, requested_replicas=size)


def node_uses(view: View, capacity: Capacity, instance_of: InstanceOf = told_or_named) -> dict[str, NodeUse]:
    """Return every node that runs on an instance, by instance id.

    A node that was told no instance is one if the provider has the instance.
    """
    holds = {name: used(view, job) for name, job in view.jobs.items()}
    plans = {name: job.plan.record for name, job in view.jobs.items() if job.plan is not None}
    first = {plan.placements[0].node for plan in plans.values() if plan.placements}
    planned: dict[str, set[str]] = {}
    for name, plan in plans.items():
        for placement in plan.placements:
            planned.setdefault(placement.node, set()).add(name)
    found: dict[str, NodeUse] = {}
    for name, agents in view.nodes.items():
        for node, seen in agents.items():
            record = seen.record
            instance = instance_of(node, record.instance)
            if record.instance is None and capacity.instance(instance) is None:
                continue
            request = view.drains.get(node)
            deadlines = [record.deadline, request.record.deadline if request else None]
            before = found.get(instance)
            asked = request is not None and (request.record.instance, request.record.deadline) != (None, None)
            found[instance] = NodeUse(
                node,
                {job: len(names[node]) for job, names in holds.items() if names.get(node)},
                draining=view.draining(record) or (before is not None and before.draining),
                announced=record.draining or asked or (before is not None and before.announced),
                deadline=min((d for d in deadlines if d is not None), default=None),
                at_risk=record.at_risk or (before is not None and before.at_risk),
                slots=_slots(view, name, record),
                first=node in first,
                planned=frozenset(planned.get(node, ())),
                node_type=record.node_type,
            )
    return found


def _as_asked(info: JobInfo, job: JobView, changing: bool) -> JobInfo:
    """Return `info` with the whole size that a person asked for, beyond what present nodes can hold.

    The policy sees a fixed size while a change is under way; a purchase may be for any size.
    """
    if changing and info.model is not None and job.spec and job.spec.record.autoscale:
        return replace(info, requested_replicas=None)
    wanted = requested_replicas(job)
    return info if wanted is None else replace(info, requested_replicas=min(wanted, info.max_replicas))


def without_nodes(job: JobView, known: Measured) -> JobInfo | None:
    """Return a waiting job for which no present node is suitable; None if it wants no node.

    Args:
        job: The job.
        known: What all jobs have measured on every type of node.
    """
    if job.spec is None or _wants_nothing(job):
        return None
    spec = job.spec.record
    hints = own_hints(job)
    return JobInfo(
        name=job.job,
        min_replicas=spec.min_replicas,
        max_replicas=spec.max_replicas,
        min_nodes=spec.min_nodes,
        max_nodes=spec.max_nodes,
        min_slots=max(1, min(spec.min_slots, MOST_SLOTS)),
        model=None if hints is None else model(hints),
        models=known.models(job.job, spec.profile_key, hints)[1],
        measured=known.measured_on(spec.profile_key, hints),
        max_profiled_replicas=0 if hints is None else hints.max_profiled_replicas,
        requested_replicas=requested_replicas(job),
        remaining=None if hints is None else hints.remaining_samples,
        weight=spec.weight,
    )


def _wants_nothing(job: JobView) -> bool:
    """Return whether the job has ended for good, is to stop, or has no specification."""
    return job.spec is None or (job.over and not resume_requested(job)) or stop_requested(job)


def all_ended(view: View, expected: Sequence[str]) -> bool:
    """Return whether every known or expected job has ended, and there is at least one."""
    names = set(view.jobs) | set(expected)
    over = {name for name, job in view.jobs.items() if job.over and not resume_requested(job)}
    return bool(names) and names <= over
