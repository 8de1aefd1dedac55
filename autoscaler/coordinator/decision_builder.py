"""Collect the actions of one decision, and make plans.

`decide` and `reactive` use the builder. It exists for one decision; only what goes into `Decided` remains.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

from adaptdl_elastic.autoscaler.cluster_view import JobView, View
from adaptdl_elastic.autoscaler.coordinator import failure_owner, garbage_collection, survivors
from adaptdl_elastic.autoscaler.coordinator import job_phase as jobs
from adaptdl_elastic.autoscaler.coordinator.decision_types import (
    Action,
    Allocation,
    CompareAndSwap,
    CoordinatorSettings,
    Memory,
    Say,
)
from adaptdl_elastic.autoscaler.coordinator.failure_owner import newest_request
from adaptdl_elastic.autoscaler.coordinator.job_models import reports_by_script
from adaptdl_elastic.autoscaler.coordinator.job_phase import JobChange
from adaptdl_elastic.autoscaler.coordinator.node_speeds import NodeClasses, node_classes
from adaptdl_elastic.autoscaler.coordinator.node_types import memory_limits
from adaptdl_elastic.autoscaler.coordinator.slots import Ledger, holding, in_plan, nearest, rooms
from adaptdl_elastic.autoscaler.coordinator.status import impossible, why_pending
from adaptdl_elastic.autoscaler.held_facts import Observed
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import (
    INPLACE_REQUIRED,
    Cause,
    LeftOut,
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
        self.left_out = {name: jobs.left_out(view, job) for name, job in view.jobs.items()}
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
        """Return whether a change is not made, as only one in place is allowed or keeps the code's text."""
        assert job.spec is not None
        plan, agents = jobs.this_run(job), self.view.agents(job.job)
        if plan is None or not plan.placements or how is Transition.INPLACE:
            return False
        files = {agents[one.node].record.changed for one in plan.placements if one.node in agents}
        if changed := max(files, default=""):
            self.notes[job.job].waits_for = f"keeps its size: {changed} has changed since training began"
            return True
        if job.spec.record.rescale is not Rescale.INPLACE:
            return False
        why = self.why_restart(job) or "none of its nodes would stay"
        size = pluralize(plan.replicas, "replica")
        self.notes[job.job].waits_for = f"keeps its {size}: {INPLACE_REQUIRED}, and {why}"
        return True

    def leave_out(self, job: JobView, nodes: Iterable[str], why: str, sure: bool = True) -> None:
        """Have a job do without nodes: for longer each time. The first time is free unless it is `sure`."""
        agents, known = self.view.agents(job.job), self.left_out[job.job]
        for node in sorted(set(nodes) & set(agents)):
            times = known[node].times + 1 if node in known else int(sure)
            reason, agent = f"{node} is left out: {why}", agents[node].record.agent
            until = self.pardon(times)
            known = {**known, node: LeftOut(node, agent, reason, times, until, newest_request(job))}
        self.left_out = {**self.left_out, job.job: known}

    def pardon(self, times: int) -> float:
        """Return the wall-clock time at which something that has failed so often is tried again."""
        settings = self.settings
        wait = min(settings.max_pardon, settings.late_pardon * 2.0 ** min(times - 1, 30))
        return self.view.wall + wait if times else 0.0

    def limit(self, job: JobView, limit: SizeLimit | None, sure: bool = True) -> SizeLimit | None:
        """Return a limit with the time of the next try above it; a first one that is not `sure`: at once."""
        if limit is None:
            return None
        again = job.limit is not None and job.limit.reason != ""
        times = limit.times + int(sure or again)
        return replace(limit, times=times, until=self.pardon(times))

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
        known = self.left_out[job.job].values()
        places = rooms(self.view, job, self.ledger, {o.node for o in known if self.view.wall < o.until})
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
        limit = change.limit or job.limit
        if limit is not None and self.view.wall >= limit.until:
            limit = replace(limit, batch_size=None)  # replicas learn of it when they are started
        base = jobs.base(job, mine) if mine and change.transition is Transition.INPLACE else -1
        # a generation that goes on while the plan is in force has not proven its nodes and size yet
        sizes, worked = failure_owner.worked(job, mine, base) if mine is not None else ((), ())
        failed_as, on, size = failure_owner.remembered(job, mine, change.failed_as)
        leaving, recovers = tuple(holding(self.view, job)), change.transition is Transition.RECOVER
        base = failure_owner.followed(job, before) if recovers else base
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
            leaving=leaving,
            lost=failure_owner.lost(before, base, set(leaving)) if recovers else (),
            base=base,
            groups=change.groups,
            first=before.first,
            restarts=max(0, restarts),
            failed=failed if change.failed is None else change.failed,
            failed_step=before.failed_step if change.failed_step is None else change.failed_step,
            failed_as=failed_as,
            predicted_goodput=change.predicted_goodput,
            failed_on=on,
            failed_size=size,
            left_out=tuple(self.left_out[job.job].values()),
            restart_only=job.spec.record.run in self.restart_only,
            memory_limit=self._memory_limit(job, change.allocation, agents),
            node_type=self._classes.slowest(change.allocation),
            sizes=sizes,
            worked=worked,
            limit=limit,
            links_since=max(
                (agents[one.node].record.links_since for one in placements if one.node in agents), default=-1
            ),
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
