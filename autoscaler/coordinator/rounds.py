"""Rounds of the policy: the question, its computation, and the valid part of the answer.

A round takes from milliseconds to seconds. Meanwhile nodes die and users ask for other sizes, and the
coordinator goes on deciding. So a `PolicyRound` holds an immutable copy of everything that the policy reads,
and any thread may compute it. When its `PolicyAnswer` comes, the answer is checked against the present state
of the cluster.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from adaptdl_elastic.autoscaler.cluster_view import JobView, View
from adaptdl_elastic.autoscaler.coordinator import job_phase as jobs
from adaptdl_elastic.autoscaler.coordinator.decision_types import (
    CoordinatorSettings,
    Memory,
    PolicyAnswer,
    PolicyQuestion,
    PolicyRound,
    Standing,
    Target,
)
from adaptdl_elastic.autoscaler.coordinator.job_phase import Condition, Phase
from adaptdl_elastic.autoscaler.coordinator.policy_adapter import (
    Policy,
    ask,
    described,
    in_slots,
    targets,
    worth_asking,
)
from adaptdl_elastic.autoscaler.coordinator.slots import Ledger, in_plan, nearest, rooms, smallest
from adaptdl_elastic.autoscaler.policy.policy_types import Allocation, Decision, JobInfo, PolicySettings
from adaptdl_elastic.rendezvous.schema.records import Cause


def consider(
    view: View,
    conditions: Mapping[str, Condition],
    memory: Memory,
    ledger: Ledger,
    settings: CoordinatorSettings,
) -> tuple[Memory, PolicyRound | None, float]:
    """Decide whether a round is due; return the new memory, the round, and when to check again."""
    if memory.round is not None:
        return memory, None, math.inf  # one round at a time: its answer causes the next decision
    now, missing = view.now, any(condition.health.missing for condition in conditions.values())
    held_up_since = (now if memory.held_up_since is None else memory.held_up_since) if missing else None
    memory = replace(memory, held_up_since=held_up_since)
    # Missing nodes probably come back soon, so wait for them. The wait has a limit, because other nodes may
    # go missing meanwhile.
    if held_up_since is not None:
        until = held_up_since + settings.steady + settings.node_ttl + settings.interval
        if now < until:
            return memory, None, until
    wake_at = _silent_until(view, conditions, settings)
    by_hand = asked_by_hand(view, conditions)
    hurry = bool(by_hand - memory.by_hand)
    starts = somebody_starts(conditions, memory)
    soonest = _soonest(memory, settings)
    if now < soonest and not starts and not hurry:
        return memory, None, min(wake_at, soonest)
    memory = replace(memory, looked_at=now)
    question = ask(view, conditions, memory, ledger, settings)
    if not question.jobs:
        return replace(memory, targets=MappingProxyType({}), asked=question), None, wake_at
    changed = worth_asking(question, memory.asked, settings.drift)
    due = soonest if changed else memory.round_at + settings.interval
    if now < due and not hurry and not (changed and starts):
        return memory, None, min(wake_at, due)
    begun = begin(memory.rounds + 1, question, view, settings)
    memory = replace(memory, round_at=now, asked=question, by_hand=by_hand, round=begun, rounds=begun.number)
    return memory, begun, wake_at


def _silent_until(view: View, conditions: Mapping[str, Condition], settings: CoordinatorSettings) -> float:
    """Return when the next script that has not said hello counts as a script without the library."""
    ends = (
        condition.health.started_at + settings.hello_grace
        for name, condition in conditions.items()
        if condition.phase is Phase.STEADY and not jobs.uses_library(view.jobs[name])
    )
    return min((end for end in ends if end > view.now), default=math.inf)


def _soonest(memory: Memory, settings: CoordinatorSettings) -> float:
    """Return the earliest time to check again whether a round is due, if nothing is urgent.

    Checks are spaced because building the question is expensive and events come in groups.
    """
    gap = min(settings.interval, max(settings.min_gap, 10 * memory.policy_seconds))
    return max(memory.round_at + gap, memory.looked_at + settings.min_gap)


def begin(number: int, question: PolicyQuestion, view: View, settings: CoordinatorSettings) -> PolicyRound:
    """Return a round about a question that was made from `view`."""
    standing = {info.name: _standing(view.jobs[info.name]) for info in question.jobs}
    return PolicyRound(number, question, view.now, settings.policy or PolicySettings(), standing)


def compute(
    policy: Policy, asked: PolicyRound, clock: Callable[[], float] = time.perf_counter
) -> PolicyAnswer:
    """Ask the policy. Never raises an error, since the coordinator must go on without the policy.

    If the policy fails, it is asked again without the reports of those jobs for which it fails even alone.
    """
    started = clock()
    unusable: dict[str, str] = {}
    try:
        try:
            decision = _asked(policy, asked, asked.question.jobs)
        except Exception:
            unusable = _unusable_reports(policy, asked)
            if not unusable:
                raise
            silent = [_silent(job) if job.name in unusable else job for job in asked.question.jobs]
            decision = _asked(policy, asked, silent)
    except Exception as error:
        return PolicyAnswer(asked.number, None, clock() - started, described(error))
    seconds = clock() - started
    return PolicyAnswer(asked.number, replace(decision, seconds=seconds), seconds, unusable_reports=unusable)


def _asked(policy: Policy, asked: PolicyRound, about: Sequence[JobInfo]) -> Decision:
    return ask_policy(policy, asked.question, about, asked.now, asked.settings)


def ask_policy(
    policy: Policy, question: PolicyQuestion, about: Sequence[JobInfo], now: float, settings: PolicySettings
) -> Decision:
    """Ask the policy about some of the jobs of a question.

    To the policy a replica that takes up several slots is as many replicas. That overstates how much faster
    such a job becomes with more of them, but only where other jobs take up fewer slots.
    """
    each = question.each
    current = {job.name: _times(question.current[job.name], each.get(job.name, 1)) for job in about}
    jobs = [in_slots(job, each[job.name]) if job.name in each else job for job in about]
    decision = policy(jobs, question.nodes, current, now, settings)
    found = {
        name: {node: n // each[name] for node, n in mine.items() if n >= each[name]} if name in each else mine
        for name, mine in decision.allocations.items()
    }
    return replace(decision, allocations=found)


def _times(allocation: Allocation, count: int) -> Allocation:
    return {node: count * replicas for node, replicas in allocation.items()}


def _unusable_reports(policy: Policy, asked: PolicyRound) -> dict[str, str]:
    """Return the jobs for which the policy fails even if they are alone, and its errors."""
    found: dict[str, str] = {}
    for job in asked.question.jobs:
        try:
            _asked(policy, asked, [job])
        except Exception as error:
            found[job.name] = described(error)
    return found


def _silent(job: JobInfo) -> JobInfo:
    """Return a job as if it had reported nothing."""
    return replace(job, model=None, remaining=None, attained=0.0, kind_totals=(), pause=None)


def still_valid(
    asked: PolicyRound, decision: Decision, view: View, conditions: Mapping[str, Condition]
) -> dict[str, Target]:
    """Return the targets of jobs that have not changed since the question.

    Left out is a job that has another plan by now (after a death, or because a user chose its size), or for
    which a user has asked for another size: the next round takes it into account. Whether the nodes exist and
    have room is checked when a target is applied.
    """
    same = {
        name: condition
        for name, condition in conditions.items()
        if name in asked.standing and asked.standing[name] == _standing(view.jobs[name])
    }
    return targets(asked.question, decision, view, same)


def _standing(job: JobView) -> Standing:
    return (
        job.spec.record.run if job.spec else "",
        job.plan.revision if job.plan else 0,
        jobs.requested_replicas(job),
    )


def asked_by_hand(view: View, conditions: Mapping[str, Condition]) -> frozenset[tuple[str, int]]:
    """Return (job, replicas) for each size that a user has asked for and that the job does not have."""
    found = set()
    for name, condition in conditions.items():
        wanted = jobs.requested_replicas(view.jobs[name])
        if wanted is None or condition.phase not in (Phase.EMPTY, Phase.STEADY):
            continue
        if wanted != sum(in_plan(condition.plan).values()):
            found.add((name, wanted))
    return frozenset(found)


def somebody_starts(conditions: Mapping[str, Condition], memory: Memory) -> bool:
    """Return whether a job that was never started waits for replicas and has no target.

    Such a job does not wait for the gap between rounds.
    """
    return any(
        condition.phase is Phase.EMPTY and condition.plan is None and name not in memory.targets
        for name, condition in conditions.items()
    )


def without_policy(
    question: PolicyQuestion, view: View, conditions: Mapping[str, Condition], ledger: Ledger
) -> dict[str, Target]:
    """Return minimal allocations for waiting jobs, and sizes that users asked for; nothing else."""
    found: dict[str, Target] = {}
    for info in question.jobs:
        if info.name in question.unsettled:
            continue
        job, condition = view.jobs[info.name], conditions[info.name]
        assert job.spec is not None
        free, now, run = rooms(view, job, ledger), in_plan(condition.plan), job.spec.record.run
        if info.requested_replicas is not None:
            asked_for = nearest(job.spec.record, info.requested_replicas, free, now)
            cause, text = question.causes.get(info.name, (Cause.POLICY, "as before"))
            if asked_for is not None:
                found[info.name] = Target(run, asked_for, cause, text)
        elif condition.phase is Phase.EMPTY:
            least = smallest(job.spec.record, free)
            if least is not None:
                found[info.name] = Target(run, least, Cause.START, "the least it can begin with")
    return found


def in_the_way(
    conditions: Mapping[str, Condition], blocked: Mapping[str, set[str]], ledger: Ledger
) -> str | None:
    """Return the job that leaves its slots first, of the jobs that wait for each other's slots.

    That is the smallest of them. Return None if no jobs wait for each other.

    Args:
        conditions: condition of every job.
        blocked: jobs whose target waits for slots, and the nodes of those slots.
        ledger: slots by job.
    """
    wanted = set().union(*blocked.values())
    found = [
        (sum(in_plan(conditions[name].plan).values()), name)
        for name in blocked
        if conditions[name].phase is Phase.STEADY
        and wanted & set(in_plan(conditions[name].plan))
        and any(blocked[other] & set(ledger.held(name)) for other in blocked if other != name)
    ]
    return min(found)[1] if found else None
