"""Decide what the coordinator writes: `decide(view, memory, …)`, without any I/O.

The order of a decision:

1. **Fence.** A plan that another leader wrote is written again with this leader's fence, and a job without a
   plan gets a claim. Until that is written, nothing else is decided about the job. From then on the
   compare-and-swap of an older leader fails.
2. **Urgent changes**, job by job: stops, failures, lost nodes, drains, nodes that do not start.
3. **The policy** decides for all other jobs together when its interval is over, or when the question has
   changed. It is computed elsewhere, from an immutable question, while decisions go on. The parts of its
   answer that are still valid when it comes are used.
4. **Targets** become plans as soon as the slots that they need are free: slots of another job are used only
   after that job has released them.
5. **Statuses**, derived from the view; **events**; and the deletion of keys that are not needed any more.

A job whose records cannot be used keeps what it has, and its status says so; the other jobs are decided.

Everything that must survive this process is in the store (the restart budget is in the plan, the last pauses
in the status), so that the next leader can continue.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from adaptdl_elastic.autoscaler.cluster_view import JobView, View, failed_jobs, limited, without_older_agents
from adaptdl_elastic.autoscaler.coordinator import garbage_collection, reactive, rounds, survivors
from adaptdl_elastic.autoscaler.coordinator import job_phase as jobs
from adaptdl_elastic.autoscaler.coordinator.decision_builder import DecisionBuilder
from adaptdl_elastic.autoscaler.coordinator.decision_types import (
    Action,
    CompareAndSwap,
    CoordinatorSettings,
    Decided,
    Memory,
    PolicyAnswer,
    PolicyRound,
    Say,
)
from adaptdl_elastic.autoscaler.coordinator.job_models import declared_ends
from adaptdl_elastic.autoscaler.coordinator.job_phase import Condition, JobChange, Phase
from adaptdl_elastic.autoscaler.coordinator.policy_adapter import ask, described
from adaptdl_elastic.autoscaler.coordinator.slots import holding, in_plan, rooms
from adaptdl_elastic.autoscaler.coordinator.status import (
    ITS_TURN,
    WAITED_STEP,
    describe,
    differs,
    left_alone,
    steps_waited,
    waiting_since,
    why_pending,
)
from adaptdl_elastic.protocol.self_test import NOT_ENDED
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import Cause, JobSpec, JobState, JobStatus, Plan, Transition
from adaptdl_elastic.rendezvous.text import pluralize

SELF_TEST_WAIT = 15.0
"""Seconds after the start of replicas for which a change waits for NCCL's self-test."""


def decide(
    view: View,
    memory: Memory,
    *,
    keys: Keys,
    fence: int,
    settings: CoordinatorSettings,
    answer: PolicyAnswer | None = None,
) -> Decided:
    """Return what the leader with this `fence` does about the view. Pure.

    The policy is not called here. If `Decided.ask` is a round, the caller computes it (`rounds.compute`) and
    passes the `answer` to a later call. A leader that is `deposed` decides nothing.
    """
    if deposed(view, fence):
        return Decided((), memory, math.inf)
    return _Deciding(view, memory, keys, fence, settings, answer).run()


def deposed(view: View, fence: int) -> bool:
    """Return whether the coordinator with this `fence` has lost its lease, even if it does not know it yet.

    Then another one was elected after it, or its key is gone: a successor may have been elected, have written
    plans and have ended. The older one has seen these plans, so a compare-and-swap alone would not reject its
    writes.
    """
    if view.leader is not None and view.leader.revision > fence:
        return True
    return not view.led and view.revision >= fence


class _Deciding:
    """The state of one call of `decide`."""

    def __init__(
        self,
        view: View,
        memory: Memory,
        keys: Keys,
        fence: int,
        settings: CoordinatorSettings,
        answer: PolicyAnswer | None,
    ) -> None:
        view, older = without_older_agents(limited(view))
        self.draft = DecisionBuilder(view, memory, keys, fence, settings)
        self.view, self.keys, self.fence, self.settings, self.answer = view, keys, fence, settings, answer
        self.ledger, self.notes, self.actions = self.draft.ledger, self.draft.notes, self.draft.actions
        self.round: PolicyRound | None = None  # round to be computed
        self.conditions: dict[str, Condition] = {}
        self.described: dict[str, tuple[JobView, Condition]] = {}
        # jobs whose target waits for slots, and the nodes of those slots
        self.blocked: dict[str, set[str]] = {}
        self.undecidable = older  # jobs about which nothing can be decided, and why

    def run(self) -> Decided:
        fenced = [job for job in self.view.jobs.values() if self._one(job, self._fence)]
        for job in fenced:
            self._one(job, self._examine)
        for job in fenced:
            self._one(job, self._urgent)
        self._remember_times()
        if self.answer is not None:
            self._take_answer(self.answer)
        if self.answer is not None or any(isinstance(action, CompareAndSwap) for action in self.actions):
            # the question would miss the plans that are about to be written
            self.draft.wake_at = self.view.now
        else:
            self._ask_policy()
        for name in sorted(self.draft.memory.targets, key=self._turn):
            if (found := self.view.jobs.get(name)) is not None:
                self._one(found, self._apply)
        self._break_deadlock()
        asked = self.draft.memory.asked
        for name, why in (asked.undecidable if asked is not None else {}).items():
            if name in self.conditions:
                self._leave_alone(name, why)
        for job in fenced:
            self._one(job, self._conclude)
        self.actions += garbage_collection.forget_ended(self.view, self.conditions, self.keys, self.settings)
        memory = replace(
            self.draft.memory,
            undecidable=MappingProxyType(self._say_undecidable()),
            restart_only=self.draft.restart_only,
            described=MappingProxyType(self.described),
        )
        return Decided(tuple(self.actions), memory, max(self.draft.wake_at, self.view.now), self.round)

    # One job at a time

    def _one(self, job: JobView, what: Callable[[JobView], bool]) -> bool:
        """Call a function on a job; an error excludes that job only, and its actions are dropped."""
        if job.job in self.undecidable:
            return False
        before = len(self.actions)
        try:
            return what(job)
        except Exception as error:
            del self.actions[before:]
            self._leave_alone(job.job, described(error))
            return False

    def _leave_alone(self, name: str, why: str) -> None:
        """Decide nothing more about this job: it keeps what it has."""
        self.undecidable[name] = why
        self.conditions.pop(name, None)
        self.blocked.pop(name, None)

    def _say_undecidable(self) -> dict[str, str]:
        """Add statuses and events about jobs that could not be decided.

        Return all messages reported so far.
        """
        for name, why in self.undecidable.items():
            job = self.view.jobs[name]
            status = left_alone(self.view, job, why)
            if status is not None:
                at = job.unreadable.get("status") or (job.status.revision if job.status else 0)
                self.actions.append(CompareAndSwap(self.keys.job(name, "status"), status, at))
        unusable = self.draft.memory.unusable_reports
        found = {name: why for name, why in unusable.items() if name in self.view.jobs} | self.undecidable
        for name, why in found.items():
            if self.draft.memory.undecidable.get(name) != why:
                self.actions.append(Say("job_broken", {"job": name, "message": why}))
        return found

    def _examine(self, job: JobView) -> bool:
        self.conditions[job.job] = jobs.condition_of(self.view, job, self.settings)
        return True

    def _urgent(self, job: JobView) -> bool:
        reactive.see_to(self.draft, job, self.conditions[job.job])
        return True

    def _conclude(self, job: JobView) -> bool:
        self._status(job, self.conditions[job.job])
        self.actions += garbage_collection.collect(self.view, job, self.conditions[job.job], self.keys)
        return True

    # 1. Fence

    def _fence(self, job: JobView) -> bool:
        """Make sure that the job's plan has this leader's fence; return whether it has already."""
        if job.spec is None:
            return False
        actions = fence_off(self.view, job, self.keys, self.fence)
        self.actions += actions
        return not actions

    # 3. The policy

    def _remember_times(self) -> None:
        """Remember when each job's wait for replicas began, and each job's declared end.

        A wait includes the time that earlier leaders have counted.
        """
        memory = self.draft.memory
        waiting = waiting_since(self.view, self.conditions, memory.waiting)
        ends = declared_ends(self.view, memory.ends)
        self.draft.memory = replace(memory, waiting=MappingProxyType(waiting), ends=MappingProxyType(ends))

    def _unplanned(self) -> dict[str, Condition]:
        """Return the jobs for which no plan was written in this decision."""
        return {
            name: condition for name, condition in self.conditions.items() if not self.notes[name].planned
        }

    def _take_answer(self, answer: PolicyAnswer) -> None:
        """Turn the parts of the policy's answer that are still valid into targets."""
        asked = self.draft.memory.round
        if asked is None or asked.number != answer.number:
            return  # the answer belongs to a round that was given up
        conditions = self._unplanned()
        pending: Mapping[str, str] = {}
        if answer.decision is None:
            self.actions.append(Say("policy_failed", {"message": answer.error}))
            question = ask(self.view, conditions, self.draft.memory, self.ledger, self.settings)
            found = rounds.without_policy(question, self.view, conditions, self.ledger)
        else:
            found = rounds.still_valid(asked, answer.decision, self.view, conditions)
            pending = dict(answer.decision.pending)
        unusable = answer.unusable_reports
        for name in found.keys() & unusable.keys():
            why = f"{found[name].reason}; its reports cannot be calculated with: {unusable[name]}"
            found[name] = replace(found[name], reason=why)
        self.draft.memory = replace(
            self.draft.memory,
            round=None,
            answered=answer.number,
            targets=MappingProxyType(found),
            pending=MappingProxyType(pending),
            policy_seconds=answer.seconds,
            unusable_reports=MappingProxyType(dict(answer.unusable_reports)),
        )

    def _ask_policy(self) -> None:
        """Begin a round of the policy if one is due."""
        self.draft.memory, self.round, wake_at = rounds.consider(
            self.view, self._unplanned(), self.draft.memory, self.ledger, self.settings
        )
        self.draft.wake(wake_at)

    # 4. Targets

    def _turn(self, name: str) -> tuple[bool, float, str]:
        """Return the sort key by which targets are applied.

        Jobs that shrink come first, since they free slots. Then the job that has waited longest comes first.
        """
        job, target = self.view.jobs.get(name), self.draft.memory.targets[name]
        now = sum(in_plan(jobs.this_run(job) if job else None).values())
        return (
            sum(target.allocation.values()) >= now,
            self.draft.memory.waiting.get(name, self.view.now),
            name,
        )

    def _apply(self, job: JobView) -> bool:
        """Write a plan for the job's target if its slots are free; return whether one was written."""
        name, condition = job.job, self.conditions.get(job.job)
        target = self.draft.memory.targets.get(name)  # a plan for another reason may have dropped it
        if target is None or condition is None or self.notes[name].planned or jobs.stop_requested(job):
            return False
        if condition.phase not in (Phase.EMPTY, Phase.STEADY):
            return False
        if job.spec is None or job.spec.record.run != target.run:
            return False
        now = in_plan(condition.plan)
        if dict(target.allocation) == now or (target.cause is Cause.MANUAL and now and not target.allocation):
            return False  # a job whose size a user has chosen keeps its replicas
        agents = self.view.agents(name)
        if any(n not in agents or self.view.draining(agents[n].record) for n in target.allocation):
            return False  # the cluster has changed: the next round takes it into account
        ready = self._in_place_by(job, condition)
        if self.view.now < ready:
            # replicas that have just been started would be started a second time
            self.draft.wake(ready)
            return False
        how, step = self.draft.route(job, target.allocation)
        if self.draft.insists(job, how):
            return False
        agents = self.view.agents(name)
        short = {
            node: replicas - (self.ledger.room_for(job, agents[node].record) if node in agents else 0)
            for node, replicas in target.allocation.items()
        }
        short = {node: missing for node, missing in short.items() if missing > 0}
        if short:
            self.blocked[name] = set(short)
            if condition.phase is Phase.EMPTY:
                slots = " and ".join(f"{pluralize(n, 'slot')} on {node}" for node, n in short.items())
                self.notes[name].waits_for = f"waits for {slots} that another job still has"
            return False
        return self.draft.publish(
            job,
            JobChange(
                step,
                target.cause,
                how,
                target.reason,
                predicted_goodput=target.predicted_goodput,
                midway=step != target.allocation,
            ),
        )

    def _in_place_by(self, job: JobView, condition: Condition) -> float:
        """Return until when a change waits, as it will probably be possible in place; 0.0: it does not wait.

        Not all replicas have said hello yet, or NCCL's self-test has not ended.
        """
        plan = condition.plan
        if job.spec is None or plan is None or not plan.placements:
            return 0.0
        why = self.draft.why_restart(job)
        wait = SELF_TEST_WAIT if why.endswith(NOT_ENDED) else 0.0
        if not why and not survivors.said_hello(job, plan):
            wait = job.spec.record.rescale_timeout
        return condition.health.started_at + wait

    def _break_deadlock(self) -> None:
        """Let one of the jobs that wait for each other's slots leave its slots."""
        if any(note.planned for note in self.notes.values()) or any(
            condition.phase is Phase.CHANGING for condition in self.conditions.values()
        ):
            return  # slots are about to become free
        first = rounds.in_the_way(self.conditions, self.blocked, self.ledger)
        if first is not None:
            why = "moves to other nodes, and jobs there wait for the slots that it has"
            leaves = JobChange({}, Cause.POLICY, Transition.RESTART, why)
            self._one(self.view.jobs[first], lambda job: self.draft.publish(job, leaves))

    # 5. Statuses, and keys that are not needed any more

    def _status(self, job: JobView, condition: Condition) -> None:
        if self.notes[job.job].planned or job.spec is None or condition.phase in (Phase.OVER, Phase.UNKNOWN):
            return
        waits_for = self._why_waits(job, job.spec.record, condition)
        known = self.draft.memory.described.get(job.job)
        if known is not None and not waits_for and known[0] is job and known[1] == condition:
            self.described[job.job] = known
            return  # nothing that the status depends on has changed
        since = self.draft.memory.waiting.get(job.job)
        if since is not None:
            self.draft.wake(since + (steps_waited(self.view.now, since) + 1) * WAITED_STEP)
        status = describe(self.view, job, condition, self.settings, waits_for, since)
        old = job.status.record if job.status else None
        if status is not None and ("status" in job.unreadable or differs(status, old)):
            self._write_status(job, status, old)
        elif condition.phase is Phase.STEADY and not waits_for:
            self.described[job.job] = job, condition

    def _why_waits(self, job: JobView, spec: JobSpec, condition: Condition) -> str:
        """Return what a job waits for; "" if nothing is known here."""
        waits_for = self.notes[job.job].waits_for
        if waits_for or condition.phase is not Phase.EMPTY:
            return waits_for
        places, free = rooms(self.view, job), rooms(self.view, job, self.ledger)
        found = why_pending(spec, places, free, self.ledger)
        return self.draft.memory.pending.get(job.job, found) if found == ITS_TURN else found

    def _failed_jobs(self) -> int:
        """Return how often jobs of this cluster have failed. The newest status of an end always has that."""
        written = (action.record for action in self.actions if isinstance(action, CompareAndSwap))
        return max([failed_jobs(self.view), *(getattr(record, "failed_jobs", 0) for record in written)])

    def _write_status(self, job: JobView, status: JobStatus, was: JobStatus | None) -> None:
        revision = job.unreadable.get("status") or (job.status.revision if job.status else 0)
        changed = was is None or was.state is not status.state or was.run != status.run
        if changed:
            failed = self._failed_jobs() + (status.state is JobState.FAILED)
            status = replace(status, failed_jobs=failed)
        self.actions.append(CompareAndSwap(self.keys.job(job.job, "status"), status, revision))
        if changed:
            self.actions.append(
                Say("state", {"job": job.job, "state": status.state.value, "reason": status.reason})
            )
        if status.prediction_error is not None and (was is None or was.prediction_error is None):
            self.actions.append(
                Say("prediction", garbage_collection.prediction_event(job, status.prediction_error))
            )


def fence_off(view: View, job: JobView, keys: Keys, fence: int) -> list[Action]:
    """Return the writes that give the job's plan this `fence`; none if it has it.

    After them the compare-and-swap of an older leader fails, since its revision of the plan is outdated.
    A job without a plan gets a claim. A new run of a job gets a claim over the plan of the previous run.
    """
    assert job.spec is not None
    spec, key = job.spec.record, keys.job(job.job, "plan")
    garbage = job.unreadable.get("plan")
    if job.plan is None:
        claim = _claim(spec, job.newest_generation, fence, view.wall)
        return [CompareAndSwap(key, claim, garbage or 0)]
    plan = job.plan.record
    if garbage is not None:  # the last valid plan is still in force
        return [CompareAndSwap(key, replace(plan, fence=fence), garbage)]
    if plan.run != spec.run:
        claim = _claim(spec, plan.generation, fence, view.wall)
        claim = replace(claim, leaving=tuple(holding(view, job)))
        said = Say("rerun", {"job": job.job, "run": spec.run})
        return [CompareAndSwap(key, claim, job.plan.revision), said]
    if plan.fence != fence:
        return [CompareAndSwap(key, replace(plan, fence=fence), job.plan.revision)]
    return []


def _claim(spec: JobSpec, last: int, fence: int, wall: float) -> Plan:
    """Return a plan that defines no generation: the run's first generation will be the one after `last`."""
    return Plan(
        job=spec.job,
        run=spec.run,
        generation=last,
        placements=(),
        cause=Cause.START,
        transition=Transition.RESTART,
        reason="no plan yet",
        fence=fence,
        created=wall,
        first=last + 1,
    )
