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

Everything that must survive this process is in the store (the restart budget is in the plan, the last
pauses in the status), so that a successor goes on where we were.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from adaptdl_elastic.autoscaler.coordinator import job as jobs
from adaptdl_elastic.autoscaler.coordinator import left_behind, recovery, rounds
from adaptdl_elastic.autoscaler.coordinator.fence import fence_off
from adaptdl_elastic.autoscaler.coordinator.job import Change, Condition, Phase
from adaptdl_elastic.autoscaler.coordinator.policy import Policy, ask
from adaptdl_elastic.autoscaler.coordinator.recovery import Losses
from adaptdl_elastic.autoscaler.coordinator.rounds import Answer, Round
from adaptdl_elastic.autoscaler.coordinator.slots import (
    Ledger,
    holding,
    in_plan,
    nearest,
    released,
    rooms,
)
from adaptdl_elastic.autoscaler.coordinator.status import (
    ITS_TURN,
    counted,
    describe,
    differs,
    exhausted,
    impossible,
    restarts_after_failure,
    why_pending,
)
from adaptdl_elastic.autoscaler.coordinator.types import (
    Action,
    Allocation,
    CompareAndSwap,
    Decided,
    Memory,
    Say,
    Settings,
    Target,
)
from adaptdl_elastic.autoscaler.state import JobView, Seen, View
from adaptdl_elastic.rendezvous.keys import Keys
from adaptdl_elastic.rendezvous.records import (
    INSISTS,
    Cause,
    NodeRecord,
    Placement,
    Plan,
    Rescale,
    Transition,
)


def decide(
    view: View, memory: Memory, *, keys: Keys, fence: int, settings: Settings, answer: Answer | None = None
) -> Decided:
    """What the leader with this `fence` does about what it sees. Pure.

    The policy is not called from here: where `Decided.ask` is a round, somebody computes it
    (`rounds.compute`) and passes the `answer` to a later call.
    """
    return _Deciding(view, memory, keys, fence, settings, answer).run()


def decide_at_once(
    view: View, memory: Memory, *, keys: Keys, fence: int, settings: Settings, policy: Policy
) -> Decided:
    """The same where the policy may take its time: for simulations, in which none passes meanwhile."""
    decided = decide(view, memory, keys=keys, fence=fence, settings=settings)
    if decided.ask is None:
        return decided
    answer = rounds.compute(policy, decided.ask, clock=lambda: 0.0)
    return decide(view, decided.memory, keys=keys, fence=fence, settings=settings, answer=answer)


@dataclass
class _Notes:
    """What one round has found out about one job beyond its condition."""

    waits_for: str = ""
    planned: bool = False  # a plan was written in this round: the rest is for the next


class _Deciding:
    """One call of `decide`; lives no longer."""

    def __init__(
        self, view: View, memory: Memory, keys: Keys, fence: int, settings: Settings, answer: Answer | None
    ) -> None:
        self.view, self.keys, self.fence, self.settings, self.answer = view, keys, fence, settings, answer
        self.memory = memory
        self.round: Round | None = None  # to be computed
        self.actions: list[Action] = []
        self.wake_at = view.now + settings.interval
        self.ledger = Ledger(view)
        self.conditions: dict[str, Condition] = {}
        self.notes: dict[str, _Notes] = {name: _Notes() for name in view.jobs}
        self.late = dict(memory.late)
        self.clumsy = memory.clumsy
        self.described: dict[str, tuple[JobView, Condition]] = {}
        self.blocked: dict[str, set[str]] = {}  # jobs whose target waits for slots, and on which nodes

    def run(self) -> Decided:
        fenced = [job for job in self.view.jobs.values() if self._fence(job)]
        for job in fenced:
            self.conditions[job.job] = jobs.examine(self.view, job, self.settings)
        for job in fenced:
            self._urgent(job, self.conditions[job.job])
        self._remember_waiting()
        if self.answer is not None:
            self._take_answer(self.answer)
        if self.answer is not None or any(isinstance(action, CompareAndSwap) for action in self.actions):
            self.wake_at = self.view.now  # what is about to be written would be missing in the question
        else:
            self._ask_policy()
        for name in sorted(self.memory.targets, key=self._turn):
            self._apply(name, self.memory.targets[name])
        self._untangle()
        for job in fenced:
            self._status(job, self.conditions[job.job])
            self.actions += left_behind.collect(self.view, job, self.conditions[job.job], self.keys)
        self.actions += left_behind.forget_ended(self.view, self.conditions, self.keys, self.settings)
        memory = replace(
            self.memory,
            late=MappingProxyType(self.late),
            clumsy=self.clumsy,
            described=MappingProxyType(self.described),
        )
        return Decided(tuple(self.actions), memory, max(self.wake_at, self.view.now), self.round)

    # -- 1. fence

    def _fence(self, job: JobView) -> bool:
        """Make sure that this job's plan is ours; whether it is already."""
        if job.spec is None:
            return False
        actions = fence_off(self.view, job, self.keys, self.fence)
        self.actions += actions
        return not actions

    # -- 2. what can not wait

    def _urgent(self, job: JobView, condition: Condition) -> None:
        if condition.phase in (Phase.UNKNOWN, Phase.OVER, Phase.FINISHED, Phase.LEFT, Phase.EMPTY):
            return
        assert condition.plan is not None
        if condition.health.recovers is not None:
            self._recover(job, condition.plan, condition.health.recovers, condition.health.lost)
        elif condition.plan.transition is Transition.RECOVER and condition.phase is Phase.CHANGING:
            # what else is wanted can wait for it: nobody could save anything now
            self._wake(condition.health.settled_at)
            self._late_recovery(job, condition.plan)
        elif jobs.stop_requested(job):
            broken = condition.phase is Phase.BROKEN
            how = Transition.ABORT if broken else Transition.RESTART
            self._publish(job, Change({}, Cause.STOP, how, "a person asked for it"))
        elif condition.phase is Phase.BROKEN:
            self._mend(job, condition, condition.plan)
        else:
            self._wake(condition.health.settled_at)
            if self._drain(job, condition, condition.plan):
                return
            if condition.phase is Phase.STEADY:
                self._by_hand(job, condition.plan)
            else:
                self._late(job, condition, condition.plan)

    def _mend(self, job: JobView, condition: Condition, plan: Plan) -> None:
        """Plan again after replicas failed or nodes vanished."""
        lost = condition.health.lost
        if lost:
            restarts = plan.restarts - (1 if self._wrongly_counted(job, plan, lost) else 0)
            why = f"lost {', '.join(lost)}"
            self._replan(job, plan, Cause.NODE_LOST, Transition.ABORT, why, restarts, plan.failed_step)
            return
        if not condition.health.failed:
            self._withdraw(job, condition, plan)
            return
        if exhausted(self.view, job, condition, self.settings):
            return  # the status ends the job
        restarts = restarts_after_failure(self.view, job, plan, self.settings)
        generation = jobs.failed_generation(job, plan)
        not_before = jobs.failed_at(job, generation) + jobs.pause_before_restart(restarts, self.settings)
        found = jobs.failures(job, generation)
        what = (
            f"rank {found[0].rank} failed: {found[0].message or found[0].exit_code}"
            if found
            else "a replica was killed"
        )
        if self.view.now < not_before:
            self._wake(not_before)
            self.notes[job.job].waits_for = f"{what}; restart {restarts} follows after a pause"
            return
        assert job.spec is not None
        why = f"{what} (restart {restarts} of {job.spec.record.max_restarts})"
        step = job.checkpoint.record.step if job.checkpoint else 0
        self._replan(job, plan, Cause.FAILURE, Transition.ABORT, why, restarts, step)

    def _recover(self, job: JobView, plan: Plan, losses: Losses, lost: tuple[str, ...]) -> None:
        """Let those who live go on in their processes without the dead."""
        cause = Cause.NODE_LOST if lost else Cause.REPLICA_LOST
        why = recovery.describe(job, losses, lost)
        found = {one.node: one.replicas for one in losses.survivors}
        self._publish(
            job, Change(found, cause, Transition.RECOVER, why, plan.restarts, placements=losses.survivors)
        )

    def _late_recovery(self, job: JobView, plan: Plan) -> None:
        """Begin anew from the last checkpoint when the survivors do not find together."""
        assert job.plan is not None
        assert job.spec is not None
        timeout = job.spec.record.rescale_timeout
        due = job.plan.seen + timeout
        if self.view.now < due:
            self._wake(due)
            return
        why = f"the survivors did not go on within {timeout:g} s"
        self._replan(job, plan, plan.cause, Transition.ABORT, why)

    def _withdraw(self, job: JobView, condition: Condition, plan: Plan) -> None:
        """Newcomers failed beside the running training: it goes on, and later changes are by restart."""
        ended = [job.ended[plan.generation, node].record for node in condition.health.undone]
        said = next((one.failure.message for one in ended if one.failure and one.failure.message), "")
        self.clumsy |= {plan.run}
        self._take_back(job, plan, f"a change in place was taken back: {said or 'a newcomer ended'}")

    def _take_back(self, job: JobView, plan: Plan, why: str) -> None:
        """Let the generation that a change in place has not left yet go on under a new number."""
        was = _before(plan)
        if was and set(was) <= set(self.view.agents(job.job)) and was != in_plan(plan):
            self._publish(job, Change(was, plan.cause, Transition.INPLACE, why))
        else:
            self._replan(job, plan, plan.cause, Transition.RESTART, why)

    def _wrongly_counted(self, job: JobView, plan: Plan, lost: tuple[str, ...]) -> bool:
        """Whether the failure that led to `plan` was the loss of a node that we only see now."""
        silent = {one.node for one in plan.leaving if (one.generation, one.node) not in job.ended}
        never_ran = {node for node in lost if (plan.generation, node) not in job.running}
        return plan.cause is Cause.FAILURE and bool(silent & never_ran)

    def _drain(self, job: JobView, condition: Condition, plan: Plan) -> bool:
        """Move away from nodes that are to be left; whether there is one."""
        agents, health = self.view.agents(job.job), condition.health
        leaving = [
            node
            for node in (*health.running, *health.starting)
            if node in agents and self.view.draining(agents[node].record)
        ]
        if not leaving:
            return False
        if plan.cause is Cause.DRAIN and plan.transition is Transition.INPLACE and health.starting:
            fresh = set(in_plan(plan)) - set(_before(plan))
            if fresh and not fresh & set(leaving):
                return False  # those who take over are about to join those who leave
        self._replan(job, plan, Cause.DRAIN, None, f"drains {', '.join(leaving)}")
        return True

    def _by_hand(self, job: JobView, plan: Plan) -> None:
        """Give a person what they asked for if there is room; the policy is asked to make some if not."""
        wanted = jobs.requested_replicas(job)
        if wanted is None or wanted == plan.replicas or job.spec is None or impossible(job.spec.record):
            return
        spec, now = job.spec.record, in_plan(plan)
        late = jobs.late_nodes(self._with_late(), self.view, job, self.settings)
        found = nearest(spec, wanted, rooms(self.view, job, self.ledger, late), now)
        if found is not None and sum(found.values()) == wanted:
            why = f"adaptdl scale: {counted(wanted, 'replica')}"
            how, step = self._route(job, found)
            if not self._insists(job, how):
                self._publish(job, Change(step, Cause.MANUAL, how, why, midway=step != found))

    def _late(self, job: JobView, condition: Condition, plan: Plan) -> None:
        """Plan without nodes that have not started in time, if enough others are there."""
        starting = set(condition.health.starting)
        if not starting or job.plan is None or job.spec is None:
            return
        timeout = job.spec.record.rescale_timeout
        if plan.transition is Transition.INPLACE and not condition.health.running:
            self._late_in_place(job, plan, starting, job.plan.seen + timeout, timeout)
            return
        if any(not released(self.view, job, x.node, x.agent, x.generation) for x in plan.leaving):
            return  # nobody can start yet, and their own time-out is running
        gone = [s.seen for s in job.ended.values() if s.record.generation < plan.generation]
        due = max([job.plan.seen, *gone]) + timeout
        if self.view.now < due:
            self._wake(due)
            return
        if starting == set(in_plan(plan)):
            return  # nobody has: there is no better plan than to go on waiting
        agents = self.view.agents(job.job)
        kept, self.late = self.late, dict(self.late)
        self.late.update({(job.job, n): (agents[n].record.agent, self.view.now) for n in starting})
        why = f"{', '.join(sorted(starting))} did not start within {timeout:g} s"
        if not self._replan(job, plan, Cause.NODE_LOST, Transition.ABORT, why, feasible_only=True):
            self.late = kept
            self.notes[job.job].waits_for = f"{why}, and there is no other node"

    def _late_in_place(
        self, job: JobView, plan: Plan, starting: set[str], due: float, timeout: float
    ) -> None:
        """Take back a change in place whose newcomers are late, or that does not come about.

        Nobody has left the generation before, so it simply goes on under a new number.
        """
        was = _before(plan)
        ready = {node for (g, node) in job.ready if g == plan.generation}
        late = {n for n, count in in_plan(plan).items() if n in starting and count > was.get(n, 0)} - ready
        if not late:
            due += timeout  # they are ready: now it is for those who train to find the place to switch
        if self.view.now < due:
            self._wake(due)
            return
        agents = self.view.agents(job.job)
        self.late.update({(job.job, n): (agents[n].record.agent, self.view.now) for n in late - set(was)})
        if not late - set(was):
            self.clumsy |= {plan.run}
        names = f"newcomers on {', '.join(sorted(late))} were not ready" if late else "it did not happen"
        why = f"a change in place was taken back: {names} within {timeout:g} s"
        self._take_back(job, plan, why)

    def _replan(
        self,
        job: JobView,
        plan: Plan,
        cause: Cause,
        transition: Transition | None,
        why: str,
        restarts: int | None = None,
        failed_step: int | None = None,
        feasible_only: bool = False,
    ) -> bool:
        """Publish a plan as near to the present size as what is left allows; an empty one if nothing is."""
        assert job.spec is not None
        spec, now = job.spec.record, in_plan(plan)
        avoided = {node for (name, node) in self.late if name == job.job}
        places = rooms(
            self.view,
            job,
            self.ledger,
            avoided & jobs.late_nodes(self._with_late(), self.view, job, self.settings),
        )
        wanted = jobs.requested_replicas(job) or plan.replicas
        found = None if impossible(spec) else nearest(spec, wanted, places, now)
        if found is None:
            if feasible_only:
                return False
            found, why = {}, f"{why}; {why_pending(spec, rooms(self.view, job), places, self.ledger)}"
        elif sum(found.values()) != plan.replicas:
            why = f"{why}: {sum(found.values())} replicas are left of {plan.replicas}"
        how, step = (transition, found) if transition else self._route(job, found)
        return self._publish(job, Change(step, cause, how, why, restarts, failed_step, midway=step != found))

    def _why_restart(self, job: JobView) -> str:
        """Why a planned change of this job has to be by restart; "" where it may be in place."""
        assert job.spec is not None
        if job.spec.record.run in self.clumsy:
            return "newcomers could not join it"
        return jobs.why_not_in_place(job)

    def _route(self, job: JobView, allocation: Allocation) -> tuple[Transition, Allocation]:
        """How to get to an allocation, and what to plan first on the way there."""
        plan = jobs.this_run(job)
        if not allocation or plan is None or not plan.placements or self._why_restart(job):
            return Transition.RESTART, allocation
        if jobs.stays(job, plan, allocation):
            return Transition.INPLACE, allocation
        first = jobs.bridge(self.view, job, plan, allocation)
        return (Transition.RESTART, allocation) if first is None else (Transition.INPLACE, first)

    def _insists(self, job: JobView, how: Transition) -> bool:
        """Whether a change is not made, because its owner wants none but in place; the status says why."""
        assert job.spec is not None
        plan = jobs.this_run(job)
        insists = job.spec.record.rescale is Rescale.INPLACE and plan is not None and bool(plan.placements)
        if plan is None or not insists or how is Transition.INPLACE:
            return False
        why = self._why_restart(job) or "none of its nodes would stay"
        size = counted(plan.replicas, "replica")
        self.notes[job.job].waits_for = f"keeps its {size}: {INSISTS}, and {why}"
        return True

    def _with_late(self) -> Memory:
        return replace(self.memory, late=MappingProxyType(self.late))

    # -- 3. the policy

    def _remember_waiting(self) -> None:
        waiting = {
            name: self.memory.waiting.get(name, self.view.now)
            for name, condition in self.conditions.items()
            if condition.phase is Phase.EMPTY
        }
        self.memory = replace(self.memory, waiting=MappingProxyType(waiting))

    def _unplanned(self) -> dict[str, Condition]:
        """Jobs that the urgent part of this round has left alone."""
        return {
            name: condition for name, condition in self.conditions.items() if not self.notes[name].planned
        }

    def _take_answer(self, answer: Answer) -> None:
        """Make targets of what still holds of the policy's answer."""
        asked = self.memory.round
        if asked is None or asked.number != answer.number:
            return  # of a round that nobody waits for any more
        conditions = self._unplanned()
        pending: Mapping[str, str] = {}
        if answer.decision is None:
            self.actions.append(Say("policy_failed", {"message": answer.error}))
            question = ask(self.view, conditions, self._with_late(), self.ledger, self.settings)
            found = rounds.without_policy(question, self.view, conditions, self.ledger)
        else:
            found = rounds.still_valid(asked, answer.decision, self.view, conditions)
            pending = dict(answer.decision.pending)
        self.memory = replace(
            self.memory,
            round=None,
            answered=answer.number,
            targets=MappingProxyType(found),
            pending=MappingProxyType(pending),
            policy_seconds=answer.seconds,
        )

    def _ask_policy(self) -> None:
        """Begin a round if one is due."""
        self.memory, self.round, wake_at = rounds.consider(
            self.view, self._unplanned(), self._with_late(), self.ledger, self.settings
        )
        self._wake(wake_at)

    # -- 4. targets

    def _turn(self, name: str) -> tuple[bool, float, str]:
        """Shrinking jobs first, since they make room; then who has waited longest."""
        job, target = self.view.jobs.get(name), self.memory.targets[name]
        now = sum(in_plan(jobs.this_run(job) if job else None).values())
        return (sum(target.allocation.values()) >= now, self.memory.waiting.get(name, self.view.now), name)

    def _apply(self, name: str, target: Target) -> None:
        job, condition = self.view.jobs.get(name), self.conditions.get(name)
        if job is None or condition is None or self.notes[name].planned or jobs.stop_requested(job):
            return
        if condition.phase not in (Phase.EMPTY, Phase.STEADY):
            return
        if job.spec is None or job.spec.record.run != target.run:
            return
        now = in_plan(condition.plan)
        if dict(target.allocation) == now or (target.cause is Cause.MANUAL and now and not target.allocation):
            return  # what a person has asked to be larger or smaller is not taken away
        agents = self.view.agents(name)
        if any(n not in agents or self.view.draining(agents[n].record) for n in target.allocation):
            return  # the world has moved on: the next round will know
        how, step = self._route(job, target.allocation)
        if self._insists(job, how):
            return
        short = {n: r - self.ledger.free_for(name, n) for n, r in target.allocation.items()}
        short = {node: missing for node, missing in short.items() if missing > 0}
        if short:
            self.blocked[name] = set(short)
            if condition.phase is Phase.EMPTY:
                slots = " and ".join(f"{counted(n, 'slot')} on {node}" for node, n in short.items())
                self.notes[name].waits_for = f"waits for {slots} that another job is about to leave"
            return
        if how is Transition.INPLACE and not jobs.said_hello(job, condition):
            # replicas that were started a moment ago would only be started again
            ready = condition.health.started_at + job.spec.record.rescale_timeout
            if self.view.now < ready:
                self._wake(ready)
                return
        self._publish(
            job,
            Change(
                step,
                target.cause,
                how,
                target.reason,
                predicted_goodput=target.predicted_goodput,
                midway=step != target.allocation,
            ),
        )

    def _untangle(self) -> None:
        """Jobs that wait for each other's slots would wait for ever: one of them leaves its slots first."""
        if any(note.planned for note in self.notes.values()) or any(
            condition.phase is Phase.CHANGING for condition in self.conditions.values()
        ):
            return  # somebody is about to leave
        first = rounds.in_the_way(self.conditions, self.blocked, self.ledger)
        if first is not None:
            why = "moves to other nodes, and jobs there wait for the slots that it has"
            self._publish(self.view.jobs[first], Change({}, Cause.POLICY, Transition.RESTART, why))

    def _publish(self, job: JobView, change: Change) -> bool:
        """Write the job's next plan."""
        assert job.plan is not None
        assert job.spec is not None
        before, mine = job.plan.record, jobs.this_run(job)
        if not change.allocation and (mine is None or not mine.placements):
            return False  # it has nothing already
        agents = self.view.agents(job.job)
        restarts = before.restarts if mine is not None else 0
        if change.restarts is not None:
            restarts = change.restarts
        elif mine is not None and jobs.refilled(self.view, job, mine, self.settings):
            restarts = 0
        plan = Plan(
            job=job.job,
            run=job.spec.record.run,
            generation=before.generation + 1,
            placements=change.placements or self._placed(job, mine, change, agents),
            cause=change.cause,
            transition=change.transition,
            reason=change.reason,
            fence=self.fence,
            created=self.view.wall,
            leaving=tuple(holding(self.view, job)),
            base=jobs.base(job, mine) if mine and change.transition is Transition.INPLACE else -1,
            first=before.first,
            restarts=max(0, restarts),
            failed_step=before.failed_step if change.failed_step is None else change.failed_step,
            predicted_goodput=change.predicted_goodput,
        )
        self.actions.append(CompareAndSwap(self.keys.job(job.job, "plan"), plan, job.plan.revision))
        self.actions.append(Say("plan", left_behind.plan_event(plan)))
        self.ledger.hold(job.job, change.allocation)
        self.notes[job.job].planned = True
        if not change.midway:
            self._drop_target(job.job, change.allocation)
        return True

    def _placed(
        self, job: JobView, mine: Plan | None, change: Change, agents: Mapping[str, Seen[NodeRecord]]
    ) -> tuple[Placement, ...]:
        """Who is where, in the order of ranks."""
        allocation = change.allocation
        if change.transition is not Transition.INPLACE or mine is None:
            return tuple(Placement(node, n, agents[node].record.agent) for node, n in allocation.items())
        # rank 0 of the new generation is one of those who were there
        order = [one.node for one in recovery.present(job, mine)[1] if one.node in allocation]
        order += [node for node in allocation if node not in order]
        return tuple(
            Placement(
                node,
                allocation[node],
                agents[node].record.agent,
                recovery.slots_after(job, mine, node, allocation[node]),
            )
            for node in order
        )

    def _drop_target(self, name: str, allocation: Allocation) -> None:
        """What the policy wished for before it knew of this plan must not undo it: it is asked again."""
        target = self.memory.targets.get(name)
        if target is not None and allocation and dict(target.allocation) != dict(allocation):
            left = {other: kept for other, kept in self.memory.targets.items() if other != name}
            self.memory = replace(self.memory, targets=MappingProxyType(left))

    # -- 5. statuses, and what is left behind

    def _status(self, job: JobView, condition: Condition) -> None:
        note = self.notes[job.job]
        if note.planned or job.spec is None or condition.phase in (Phase.OVER, Phase.UNKNOWN):
            return
        waits_for = note.waits_for
        if condition.phase is Phase.EMPTY and not waits_for:
            places = rooms(self.view, job)
            free = rooms(self.view, job, self.ledger)
            waits_for = why_pending(job.spec.record, places, free, self.ledger)
            if waits_for == ITS_TURN:
                waits_for = self.memory.pending.get(job.job, waits_for)
        known = self.memory.described.get(job.job)
        if known is not None and not waits_for and known[0] is job and known[1] == condition:
            self.described[job.job] = known
            return  # nothing that it would be made from has changed
        status = describe(self.view, job, condition, self.settings, waits_for)
        old = job.status
        garbage = job.unreadable.get("status")
        if status is None or (garbage is None and not differs(status, old.record if old else None)):
            if condition.phase is Phase.STEADY and not waits_for:
                self.described[job.job] = job, condition
            return
        revision = garbage or (old.revision if old else 0)
        self.actions.append(CompareAndSwap(self.keys.job(job.job, "status"), status, revision))
        was = old.record if old else None
        if was is None or was.state is not status.state or was.run != status.run:
            self.actions.append(
                Say("state", {"job": job.job, "state": status.state.value, "reason": status.reason})
            )
        if status.prediction_error is not None and (was is None or was.prediction_error is None):
            self.actions.append(Say("prediction", left_behind.prediction_event(job, status.prediction_error)))

    def _wake(self, at: float) -> None:
        self.wake_at = min(self.wake_at, at)


def _before(plan: Plan) -> dict[str, int]:
    """What the generation has that a change in place is to follow."""
    before = recovery.before(plan)
    return {one.node: one.replicas for one in plan.leaving if one.generation == before}
