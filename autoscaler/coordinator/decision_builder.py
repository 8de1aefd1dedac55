"""Collect the actions of one decision, and make plans.

`decide` and `reactive` use the builder. It exists for one decision; only what goes into `Decided` remains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

from adaptdl_elastic.autoscaler.cluster_view import JobView, Observed, View
from adaptdl_elastic.autoscaler.coordinator import garbage_collection, repeated_failure, survivors
from adaptdl_elastic.autoscaler.coordinator import job_phase as jobs
from adaptdl_elastic.autoscaler.coordinator.decision_types import (
    Action,
    Allocation,
    CompareAndSwap,
    CoordinatorSettings,
    JoinFailures,
    Memory,
    Say,
)
from adaptdl_elastic.autoscaler.coordinator.job_models import reports_by_script
from adaptdl_elastic.autoscaler.coordinator.job_phase import JobChange
from adaptdl_elastic.autoscaler.coordinator.node_speeds import NodeClasses, node_classes
from adaptdl_elastic.autoscaler.coordinator.node_types import memory_limits
from adaptdl_elastic.autoscaler.coordinator.slots import Ledger, holding, in_plan, nearest, rooms
from adaptdl_elastic.autoscaler.coordinator.status import impossible, why_pending
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import (
    INPLACE_REQUIRED,
    Cause,
    NodeRecord,
    Placement,
    Plan,
    Rescale,
    SizeLimit,
    Transition,
    devices_by_slot,
)
from adaptdl_elastic.rendezvous.text import pluralize


@dataclass
class JobNotes:
    """Hold what one decision finds out about a job, beyond the job's condition."""

    waits_for: str = ""
    planned: bool = False  # a plan was written in this decision; all else waits for the next one


class DecisionBuilder:
    """One decision under construction."""

    def __init__(
        self, view: View, memory: Memory, keys: Keys, fence: int, settings: CoordinatorSettings
    ) -> None:
        self.view, self.memory, self.keys, self.fence, self.settings = view, memory, keys, fence, settings
        self.actions: list[Action] = []
        self.wake_at = view.now + settings.interval
        self.ledger = Ledger(view)
        self.notes: dict[str, JobNotes] = {name: JobNotes() for name in view.jobs}
        self.late = {**_handed_down(view), **memory.late}
        self.restart_only = memory.restart_only | {
            plan.run for job in view.jobs.values() if (plan := jobs.this_run(job)) and plan.restart_only
        }

    def wake(self, at: float) -> None:
        """Decide again at this time at the latest."""
        self.wake_at = min(self.wake_at, at)

    def why_restart(self, job: JobView) -> str:
        """Return why a planned change of this job must be a restart; "" if it may be in place."""
        assert job.spec is not None
        if job.spec.record.run in self.restart_only:
            return "newcomers could not join it"
        return jobs.why_not_in_place(job)

    def route(self, job: JobView, allocation: Allocation) -> tuple[Transition, Allocation]:
        """Return how to get to an allocation, and the allocation to plan first."""
        plan = jobs.this_run(job)
        if not allocation or plan is None or not plan.placements or self.why_restart(job):
            return Transition.RESTART, allocation
        if not survivors.said_hello(job, plan):  # agents could only stop replicas that have not said hello
            return Transition.RESTART, allocation
        if jobs.stays(job, plan, allocation):
            return Transition.INPLACE, allocation
        first = jobs.bridge(self.view, job, plan, allocation)
        return (Transition.RESTART, allocation) if first is None else (Transition.INPLACE, first)

    def insists(self, job: JobView, how: Transition) -> bool:
        """Return whether a change is not made because the user allows changes in place only."""
        assert job.spec is not None
        plan = jobs.this_run(job)
        insists = job.spec.record.rescale is Rescale.INPLACE and plan is not None and bool(plan.placements)
        if plan is None or not insists or how is Transition.INPLACE:
            return False
        why = self.why_restart(job) or "none of its nodes would stay"
        size = pluralize(plan.replicas, "replica")
        self.notes[job.job].waits_for = f"keeps its {size}: {INPLACE_REQUIRED}, and {why}"
        return True

    def count_stillborn(self, plan: Plan, started_at: float) -> None:
        """Record the death of a newcomer if it came soon after the newcomer had joined.

        A death does not count against the restart budget. One that is caused by joining (no memory for one
        more replica, a library that crashes) would be repeated at once and without end.
        """
        now, settings = self.view.now, self.settings
        if started_at and now - started_at > settings.joined:
            return
        last = self.memory.stillborn.get(plan.run)
        if last is not None and last.generation == plan.generation:
            return  # the plan that answered it could not be written
        again = last is not None and now - last.at < 2 * (self._pause(last) + settings.max_backoff)
        runs = {found.run for job in self.view.jobs.values() if (found := jobs.this_run(job)) is not None}
        known = {run: one for run, one in self.memory.stillborn.items() if run in runs}
        known[plan.run] = JoinFailures(
            last.times + 1 if last is not None and again else 1, now, plan.generation
        )
        self.memory = replace(self.memory, stillborn=MappingProxyType(known))

    def _pause(self, last: JoinFailures) -> float:
        return jobs.pause_before_restart(last.times, self.settings)

    def backs_off(self, job: JobView, plan: Plan, allocation: Allocation) -> bool:
        """Return whether a change is delayed because its newcomers would join where the last ones died."""
        last, now = self.memory.stillborn.get(plan.run), in_plan(plan)
        if last is None or all(count <= now.get(node, 0) for node, count in allocation.items()):
            return False
        pause = self._pause(last)
        if self.view.now >= last.at + pause:
            return False
        self.wake(last.at + pause)
        size = pluralize(plan.replicas, "replica")
        self.notes[job.job].waits_for = (
            f"keeps its {size}: those that joined have died at once, "
            f"{pluralize(last.times, 'time')} in a row "
            f"(is there memory for one more?); the next try follows after {pause:g} s"
        )
        return True

    def with_late(self) -> Memory:
        """Return the memory with the nodes that this decision found to be late."""
        return replace(self.memory, late=MappingProxyType(self.late))

    def _late_nodes(self, job: JobView) -> tuple[tuple[str, str], ...]:
        late = jobs.late_nodes(self.with_late(), self.view, job, self.settings)
        return tuple((node, self.late[job.job, node][0]) for node in sorted(late))

    def replan(
        self,
        job: JobView,
        plan: Plan,
        cause: Cause,
        transition: Transition | None,
        why: str,
        restarts: int | None = None,
        failed: int | None = None,
        failed_step: int | None = None,
        failed_as: str | None = None,
        feasible_only: bool = False,
        limit: SizeLimit | None = None,
    ) -> bool:
        """Publish the possible plan whose size is nearest to the present size.

        Publish an empty plan if no other one is possible.
        """
        assert job.spec is not None
        spec, now = job.spec.record, in_plan(plan)
        if limit is not None and limit.replicas is not None:
            spec = replace(spec, max_replicas=limit.replicas)
        avoided = {node for (name, node) in self.late if name == job.job}
        places = rooms(
            self.view,
            job,
            self.ledger,
            avoided & jobs.late_nodes(self.with_late(), self.view, job, self.settings),
        )
        had = jobs.size_of(plan)
        wanted = jobs.requested_replicas(job) or had
        found = None if impossible(spec) else nearest(spec, wanted, places, now)
        if found is None:
            if feasible_only:
                return False
            found, room = {}, rooms(self.view, job)
            if room or cause is not Cause.DRAIN:  # a job that leaves its last node does not wait, but stops
                why = f"{why}; {why_pending(spec, room, places, self.ledger)}"
        elif sum(found.values()) != had and limit is None:
            left = sum(found.values())
            verb = "is" if left == 1 else "are"
            why = f"{why}: {pluralize(left, 'replica')} {verb} left of {had}"
        how, step = (transition, found) if transition else self.route(job, found)
        change = JobChange(
            step, cause, how, why, restarts, failed, failed_step, failed_as, midway=step != found, limit=limit
        )
        return self.publish(job, change)

    def publish(self, job: JobView, change: JobChange) -> bool:
        """Write the job's next plan; return False if the job has no replicas and is to have none."""
        assert job.plan is not None
        assert job.spec is not None
        before, mine = job.plan.record, jobs.this_run(job)
        if not change.allocation and (mine is None or not mine.placements):
            return False  # the job has no replicas already
        agents = self.view.agents(job.job)
        placements = change.placements or self._placed(job, mine, change, agents)
        if placements is None:
            self.notes[job.job].waits_for = "waits for devices that another job still has"
            return False
        restarts = jobs.restarts_counted(self.view, job, mine) if mine is not None else 0
        failed = before.failed if mine is not None and restarts == mine.restarts else -1
        if change.restarts is not None:
            restarts = change.restarts
        elif mine is not None and jobs.refilled(self.view, job, mine, self.settings):
            restarts = 0
        plan = Plan(
            job=job.job,
            run=job.spec.record.run,
            generation=before.generation + 1,
            placements=placements,
            cause=change.cause,
            transition=change.transition,
            reason=change.reason,
            fence=self.fence,
            created=self.view.wall,
            leaving=tuple(holding(self.view, job)),
            base=jobs.base(job, mine) if mine and change.transition is Transition.INPLACE else -1,
            first=before.first,
            restarts=max(0, restarts),
            failed=failed if change.failed is None else change.failed,
            failed_step=before.failed_step if change.failed_step is None else change.failed_step,
            failed_as=_failed_as(job, mine, change),
            predicted_goodput=change.predicted_goodput,
            late=self._late_nodes(job),
            restart_only=job.spec.record.run in self.restart_only,
            memory_limit=self._memory_limit(job, change.allocation, agents),
            node_type=self._classes.slowest(change.allocation),
            stepped=0 if mine is None else repeated_failure.last_that_stepped(job, mine),
            limit=change.limit or job.limit,
        )
        self.actions.append(CompareAndSwap(self.keys.job(job.job, "plan"), plan, job.plan.revision))
        self.actions.append(Say("plan", garbage_collection.plan_event(plan)))
        self.notes[job.job].planned = True
        if not change.midway:
            self._drop_target(job.job, change.allocation)
        return True

    @cached_property
    def _memory_limits(self) -> dict[str, list[tuple[frozenset[str], int]]]:
        return memory_limits(self.view)

    @cached_property
    def _classes(self) -> NodeClasses:
        return node_classes(self.view, reports_by_script(self.view), self.memory.classes)

    def _memory_limit(
        self, job: JobView, allocation: Allocation, agents: Mapping[str, Observed[NodeRecord]]
    ) -> int | None:
        """Return the smallest limit of memory that jobs of the script have learnt on these nodes' types."""
        assert job.spec is not None
        types = {agents[node].record.node_type for node in allocation if node in agents}
        types |= {self._classes.slowest(allocation)}
        known = self._memory_limits.get(job.spec.record.profile_key, ())
        return min((limit for where, limit in known if where <= types), default=None)

    def _placed(
        self, job: JobView, mine: Plan | None, change: JobChange, agents: Mapping[str, Observed[NodeRecord]]
    ) -> tuple[Placement, ...] | None:
        """Return the placements in the order of ranks; None if there are not enough devices."""
        allocation = change.allocation
        stay: dict[str, Placement] = {}
        if change.transition is Transition.INPLACE and mine is not None:
            stay = {one.node: one for one in survivors.present(job, mine)[1] if one.node in allocation}
        found = []
        # rank 0 of the new generation is a survivor
        for node in (*stay, *(node for node in allocation if node not in stay)):
            replicas, record = allocation[node], agents[node].record
            slots = survivors.slots_after(stay.get(node), replicas)
            kept = devices_by_slot(stay[node]) if node in stay else {}
            devices = self.ledger.place(job, record, slots or range(replicas), kept)
            if devices is None:
                return None
            found.append(Placement(node, replicas, record.agent, slots, devices))
        return tuple(found)

    def _drop_target(self, name: str, allocation: Allocation) -> None:
        """Drop a target that was chosen before this plan and differs from it; the policy is asked again."""
        target = self.memory.targets.get(name)
        if target is not None and allocation and dict(target.allocation) != dict(allocation):
            left = {other: kept for other, kept in self.memory.targets.items() if other != name}
            self.memory = replace(self.memory, targets=MappingProxyType(left))


def _failed_as(job: JobView, mine: Plan | None, change: JobChange) -> str:
    if change.failed_as is not None:
        return change.failed_as
    return "" if mine is None else repeated_failure.kind_to_keep(job, mine)


def _handed_down(view: View) -> dict[tuple[str, str], tuple[str, float]]:
    """Return the nodes that were late under earlier leaders, with times on this process's clock."""
    return {
        (job.job, node): (agent, view.now)
        for job in view.jobs.values()
        if (plan := jobs.this_run(job)) is not None
        for node, agent in plan.late
    }
