"""A count of a job's failures without progress, kept beside the product's own.

A restart after a failure uses one of the allowed restarts. Only progress gives all of them back, and only the
loss of a node gives the last one back. A restart after a signal from outside is free only if there was
progress since the restart before. The failure of a node or of a size is free, because the run does without
that node, or stays below that size, from then on; the first at a larger size is free once. So a
job whose script always fails must be FAILED in the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from adaptdl_elastic.rendezvous.schema.held import Held
from adaptdl_elastic.rendezvous.schema.records import Cause, CheckpointRecord, Outcome, Plan, Transition
from adaptdl_elastic.rendezvous.store.base import read_record

if TYPE_CHECKING:
    from faultsim.world import World


@dataclass
class Budget:
    """What counts against the restarts of one run."""

    used: int = 0
    step_at_restart: int = 0  # of the newest recorded checkpoint when the last restart was counted
    recorded: int = 0  # step of the newest recorded checkpoint
    written_at: dict[int, float] = field(default_factory=dict)  # generation → when its plan was first written

    def record(self, checkpoint: CheckpointRecord) -> None:
        """A checkpoint is recorded in the store."""
        self.recorded = max(self.recorded, checkpoint.step)

    def planned(self, world: World, name: str, before: Plan | None, plan: Plan) -> str:
        """Count a plan of the run; return what is wrong with it, or "".

        Args:
            world: where it was written.
            name: the job.
            before: the plan that it replaces; None: there is none of this run.
            plan: the plan.
        """
        now = world.kernel.now
        lived = now - self.written_at.get(before.generation, now) if before is not None else 0.0
        self.written_at.setdefault(plan.generation, now)
        if before is None:
            self.used = plan.restarts
            return ""
        if before.generation == plan.generation:
            return ""
        least, why = self.used, ""
        if lived >= world.settings.refill_after and self.recorded > self.step_at_restart:
            least = 0
        elif _vanished(world, name, before):
            least = max(0, least - 1)
        if plan.cause is Cause.FAILURE and plan.failed != before.failed:
            least += 1
            self.step_at_restart = self.recorded
        died = plan.cause is Cause.REPLICA_LOST and plan.transition is Transition.ABORT
        if died and before.transition is not Transition.RECOVER and not _goes_back(world, name, before, plan):
            if not before.failed_step < plan.failed_step <= self.recorded:
                why = f"job {name} starts again after step {plan.failed_step} for free, without progress"
            self.step_at_restart = self.recorded
        if plan.restarts < least:
            why = f"job {name} counts {plan.restarts} restarts, and {least} were without progress"
        self.used = max(plan.restarts, least)
        return why


def _goes_back(world: World, name: str, before: Plan, plan: Plan) -> bool:
    """Return whether a plan goes back to a smaller size, or leaves out a node, or tries a size once more."""
    most = plan.limit.replicas if plan.limit is not None and plan.limit != before.limit else None
    without = {one.node for one in plan.left_out if one not in before.left_out}
    # a node whose agent has left is not left out by name
    without |= {node for node in plan.failed_on if world.etcd.get(world.keys.node(node, name)) is None}
    once_more = not before.failed_as and plan.failed_as and min(plan.sizes, default=0) < plan.failed_size
    smaller = most is not None and plan.replicas <= most < plan.failed_size
    return smaller or bool(without - {one.node for one in plan.placements}) or bool(once_more)


def _vanished(world: World, name: str, before: Plan) -> bool:
    """Return whether a node of the generation that failed last is gone without having said how it ended."""
    for one in before.leaving:
        found = world.etcd.get(world.keys.node(one.node, name))
        here = found is not None and f'"agent":"{one.agent}"' in found.value
        held = read_record(Held, world.etcd.get(world.keys.held(name, one.node)))
        ended = held is not None and held.has_left(one.generation, one.agent)
        if held is not None and (end := held.end_of(one.generation)) is not None:
            ended = end.outcome is not Outcome.LOST
        if one.generation == before.failed and not here and not ended:
            return True
    return False
