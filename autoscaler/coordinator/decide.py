"""The coordinator's decisions, without any I/O: `decide(view, memory, …)` says what to write.

The order of a round:

1. **Fence.** A plan that another leader wrote is written again with our fence, and a job without one
   gets a claim; until that has gone through nothing else is decided about the job. An older leader's
   compare-and-swap fails from then on.
2. **What can not wait**, job by job: stop, failure, lost nodes, drains, nodes that do not start.
3. **The policy** decides for all other jobs together, when its interval is over or when what it would
   be asked has changed. It is computed elsewhere, from a question that nothing changes any more, while
   decisions go on; of its answer counts what still holds when it comes.
4. **Targets** become plans as soon as the slots they need are free: what another job holds is used only
   after that job has released it.
5. **Statuses**, derived from the view; **events**; and what nobody needs any more is collected.

A job whose records can not be dealt with is left alone, with what it holds, and said; the others are decided.

Everything that must survive this process is in the store (the restart budget is in the plan, the last
pauses in the status), so that a successor goes on where we were.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from adaptdl_elastic.autoscaler.cluster_view import JobView, View
from adaptdl_elastic.autoscaler.coordinator import garbage_collection, reactive, rounds
from adaptdl_elastic.autoscaler.coordinator import job_phase as jobs
from adaptdl_elastic.autoscaler.coordinator.decision_builder import DecisionBuilder
from adaptdl_elastic.autoscaler.coordinator.decision_types import (
    CompareAndSwap,
    CoordinatorSettings,
    Decided,
    Memory,
    PolicyAnswer,
    PolicyRound,
    Say,
)
from adaptdl_elastic.autoscaler.coordinator.fence import fence_off
from adaptdl_elastic.autoscaler.coordinator.job_models import at_end_since
from adaptdl_elastic.autoscaler.coordinator.job_phase import Condition, JobChange, Phase
from adaptdl_elastic.autoscaler.coordinator.policy_adapter import Policy, ask, described
from adaptdl_elastic.autoscaler.coordinator.slots import in_plan, rooms
from adaptdl_elastic.autoscaler.coordinator.status import (
    ITS_TURN,
    WAITED_STEP,
    describe,
    differs,
    left_alone,
    waiting_since,
    why_pending,
)
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import Cause, JobSpec, JobStatus, Transition
from adaptdl_elastic.rendezvous.text import pluralize


def decide(
    view: View,
    memory: Memory,
    *,
    keys: Keys,
    fence: int,
    settings: CoordinatorSettings,
    answer: PolicyAnswer | None = None,
) -> Decided:
    """What the leader with this `fence` does about what it sees. Pure.

    The policy is not called from here: where `Decided.ask` is a round, somebody computes it
    (`rounds.compute`) and passes the `answer` to a later call. A leader that is `deposed` decides nothing.
    """
    if deposed(view, fence):
        return Decided((), memory, math.inf)
    return _Deciding(view, memory, keys, fence, settings, answer).run()


def deposed(view: View, fence: int) -> bool:
    """Return True if another coordinator was elected after the one with this `fence`.

    The older one has lost its lease then, though nobody has told it so yet. What it would write of plans that
    it has seen from its successor would fit, compare-and-swap or not.
    """
    return view.leader is not None and view.leader.revision > fence


def decide_at_once(
    view: View, memory: Memory, *, keys: Keys, fence: int, settings: CoordinatorSettings, policy: Policy
) -> Decided:
    """The same where the policy may take its time: for simulations, in which none passes meanwhile."""
    decided = decide(view, memory, keys=keys, fence=fence, settings=settings)
    if decided.ask is None:
        return decided
    answer = rounds.compute(policy, decided.ask, clock=lambda: 0.0)
    # what the first has said is not carried out
    memory = replace(decided.memory, undecidable=memory.undecidable)
    return decide(view, memory, keys=keys, fence=fence, settings=settings, answer=answer)


class _Deciding:
    """One call of `decide`; lives no longer."""

    def __init__(
        self,
        view: View,
        memory: Memory,
        keys: Keys,
        fence: int,
        settings: CoordinatorSettings,
        answer: PolicyAnswer | None,
    ) -> None:
        self.draft = DecisionBuilder(view, memory, keys, fence, settings)
        self.view, self.keys, self.fence, self.settings, self.answer = view, keys, fence, settings, answer
        self.ledger, self.notes, self.actions = self.draft.ledger, self.draft.notes, self.draft.actions
        self.round: PolicyRound | None = None  # to be computed
        self.conditions: dict[str, Condition] = {}
        self.described: dict[str, tuple[JobView, Condition]] = {}
        self.blocked: dict[str, set[str]] = {}  # jobs whose target waits for slots, and on which nodes
        self.undecidable: dict[str, str] = {}  # jobs that nothing can be decided about, and why

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
            self.draft.wake_at = self.view.now  # what is about to be written would be missing in the question
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
            late=MappingProxyType(self.draft.late),
            restart_only=self.draft.restart_only,
            described=MappingProxyType(self.described),
        )
        return Decided(tuple(self.actions), memory, max(self.draft.wake_at, self.view.now), self.round)

    # -- one job at a time

    def _one(self, job: JobView, what: Callable[[JobView], bool]) -> bool:
        """Do something about a job, unless nothing can be: the others do not suffer from it."""
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
        """Decide no more about this job than what it holds."""
        self.undecidable[name] = why
        self.conditions.pop(name, None)
        self.blocked.pop(name, None)

    def _say_undecidable(self) -> dict[str, str]:
        """Statuses and events of what has gone wrong; what is said by now."""
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

    # -- 1. fence

    def _fence(self, job: JobView) -> bool:
        """Make sure that this job's plan is ours; whether it is already."""
        if job.spec is None:
            return False
        actions = fence_off(self.view, job, self.keys, self.fence)
        self.actions += actions
        return not actions

    # -- 3. the policy

    def _remember_times(self) -> None:
        """Remember since when jobs have had no replicas, or have been at their declared end.

        A leader before this one may have counted the former, too.
        """
        memory = self.draft.memory
        waiting = waiting_since(self.view, self.conditions, memory.waiting)
        at_end = at_end_since(self.view, memory.at_end)
        self.draft.memory = replace(
            memory, waiting=MappingProxyType(waiting), at_end=MappingProxyType(at_end)
        )

    def _unplanned(self) -> dict[str, Condition]:
        """Jobs that the urgent part of this round has left alone."""
        return {
            name: condition for name, condition in self.conditions.items() if not self.notes[name].planned
        }

    def _take_answer(self, answer: PolicyAnswer) -> None:
        """Make targets of what still holds of the policy's answer."""
        asked = self.draft.memory.round
        if asked is None or asked.number != answer.number:
            return  # of a round that nobody waits for any more
        conditions = self._unplanned()
        pending: Mapping[str, str] = {}
        if answer.decision is None:
            self.actions.append(Say("policy_failed", {"message": answer.error}))
            question = ask(self.view, conditions, self.draft.with_late(), self.ledger, self.settings)
            found = rounds.without_policy(question, self.view, conditions, self.ledger)
        else:
            found = rounds.still_valid(asked, answer.decision, self.view, conditions)
            pending = dict(answer.decision.pending)
        unusable = answer.unusable_reports
        for name in found.keys() & unusable.keys():
            why = f"{found[name].reason}; its reports can not be calculated with: {unusable[name]}"
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
        """Begin a round if one is due."""
        self.draft.memory, self.round, wake_at = rounds.consider(
            self.view, self._unplanned(), self.draft.with_late(), self.ledger, self.settings
        )
        self.draft.wake(wake_at)

    # -- 4. targets

    def _turn(self, name: str) -> tuple[bool, float, str]:
        """Shrinking jobs first, since they make room; then who has waited longest."""
        job, target = self.view.jobs.get(name), self.draft.memory.targets[name]
        now = sum(in_plan(jobs.this_run(job) if job else None).values())
        return (
            sum(target.allocation.values()) >= now,
            self.draft.memory.waiting.get(name, self.view.now),
            name,
        )

    def _apply(self, job: JobView) -> bool:
        """Make a plan of the job's target if it can be had; whether it was."""
        name, condition = job.job, self.conditions.get(job.job)
        target = self.draft.memory.targets.get(name)  # a plan of another reason may have dropped it
        if target is None or condition is None or self.notes[name].planned or jobs.stop_requested(job):
            return False
        if condition.phase not in (Phase.EMPTY, Phase.STEADY):
            return False
        if job.spec is None or job.spec.record.run != target.run:
            return False
        now = in_plan(condition.plan)
        if dict(target.allocation) == now or (target.cause is Cause.MANUAL and now and not target.allocation):
            return False  # what a person has asked to be larger or smaller is not taken away
        agents = self.view.agents(name)
        if any(n not in agents or self.view.draining(agents[n].record) for n in target.allocation):
            return False  # the world has moved on: the next round will know
        how, step = self.draft.route(job, target.allocation)
        if self.draft.insists(job, how):
            return False
        if condition.plan is not None and self.draft.backs_off(job, condition.plan, target.allocation):
            return False
        short = {n: r - self.ledger.free_for(name, n) for n, r in target.allocation.items()}
        short = {node: missing for node, missing in short.items() if missing > 0}
        if short:
            self.blocked[name] = set(short)
            if condition.phase is Phase.EMPTY:
                slots = " and ".join(f"{pluralize(n, 'slot')} on {node}" for node, n in short.items())
                self.notes[name].waits_for = f"waits for {slots} that another job is about to leave"
            return False
        if how is Transition.INPLACE and not jobs.said_hello(job, condition):
            # replicas that were started a moment ago would only be started again
            ready = condition.health.started_at + job.spec.record.rescale_timeout
            if self.view.now < ready:
                self.draft.wake(ready)
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

    def _break_deadlock(self) -> None:
        """Jobs that wait for each other's slots would wait for ever: one of them leaves its slots first."""
        if any(note.planned for note in self.notes.values()) or any(
            condition.phase is Phase.CHANGING for condition in self.conditions.values()
        ):
            return  # somebody is about to leave
        first = rounds.in_the_way(self.conditions, self.blocked, self.ledger)
        if first is not None:
            why = "moves to other nodes, and jobs there wait for the slots that it has"
            leaves = JobChange({}, Cause.POLICY, Transition.RESTART, why)
            self._one(self.view.jobs[first], lambda job: self.draft.publish(job, leaves))

    # -- 5. statuses, and what is left behind

    def _status(self, job: JobView, condition: Condition) -> None:
        if self.notes[job.job].planned or job.spec is None or condition.phase in (Phase.OVER, Phase.UNKNOWN):
            return
        waits_for = self._why_waits(job, job.spec.record, condition)
        known = self.draft.memory.described.get(job.job)
        if known is not None and not waits_for and known[0] is job and known[1] == condition:
            self.described[job.job] = known
            return  # nothing that it would be made from has changed
        since = self.draft.memory.waiting.get(job.job)
        if since is not None:
            self.draft.wake(since + (1 + (self.view.now - since) // WAITED_STEP) * WAITED_STEP)
        status = describe(self.view, job, condition, self.settings, waits_for, since)
        old = job.status.record if job.status else None
        if status is not None and ("status" in job.unreadable or differs(status, old)):
            self._write_status(job, status, old)
        elif condition.phase is Phase.STEADY and not waits_for:
            self.described[job.job] = job, condition

    def _why_waits(self, job: JobView, spec: JobSpec, condition: Condition) -> str:
        """What a job waits for; "": for nothing that is known here."""
        waits_for = self.notes[job.job].waits_for
        if waits_for or condition.phase is not Phase.EMPTY:
            return waits_for
        places, free = rooms(self.view, job), rooms(self.view, job, self.ledger)
        found = why_pending(spec, places, free, self.ledger)
        return self.draft.memory.pending.get(job.job, found) if found == ITS_TURN else found

    def _write_status(self, job: JobView, status: JobStatus, was: JobStatus | None) -> None:
        revision = job.unreadable.get("status") or (job.status.revision if job.status else 0)
        self.actions.append(CompareAndSwap(self.keys.job(job.job, "status"), status, revision))
        if was is None or was.state is not status.state or was.run != status.run:
            self.actions.append(
                Say("state", {"job": job.job, "state": status.state.value, "reason": status.reason})
            )
        if status.prediction_error is not None and (was is None or was.prediction_error is None):
            self.actions.append(
                Say("prediction", garbage_collection.prediction_event(job, status.prediction_error))
            )
