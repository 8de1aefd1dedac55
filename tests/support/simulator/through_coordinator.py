"""A policy behind the real coordinator, so that simulations run the same code as a cluster.

`ThroughCoordinator(policy)` is called like a policy by a simulator that knows jobs, nodes and the time. It
writes the records that agents and replicas would write, calls `decide` until nothing changes, acts as agents
that obey at once, and returns the resulting plans. Fences and claims, capacity and release, hysteresis and
urgent changes are those of the coordinator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from at_once import decide_at_once

from adaptdl_elastic.autoscaler.cluster_view import ClusterCache
from adaptdl_elastic.autoscaler.coordinator.decision_types import (
    Allocation,
    CompareAndSwap,
    CoordinatorSettings,
    DeletePrefix,
    Memory,
)
from adaptdl_elastic.autoscaler.coordinator.policy_adapter import Policy
from adaptdl_elastic.autoscaler.coordinator.slots import in_plan
from adaptdl_elastic.autoscaler.policy.policy_types import Decision, JobInfo, NodeInfo
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import (
    EndedRecord,
    JobSpec,
    JobState,
    JobStatus,
    NodeRecord,
    Outcome,
    Plan,
    RunningRecord,
    encode,
)

_ROUNDS = 100


class ThroughCoordinator:
    """A policy like `policy.allocate`; one instance is one simulated cluster."""

    def __init__(self, policy: Policy, **settings: Any) -> None:
        self._ask = policy
        self._keys = Keys("simulated")
        self._keeper = ClusterCache(self._keys)
        self._memory = Memory()
        self._settings = settings
        self._revision = 0
        self._jobs: dict[str, JobInfo] = {}
        self._nodes: dict[str, NodeInfo] = {}
        self._plans: dict[str, Plan] = {}
        self._answer: Decision | None = None
        self.decisions = 0  # number of calls of `decide`

    def __call__(
        self,
        jobs: Sequence[JobInfo],
        nodes: Sequence[NodeInfo],
        current: Mapping[str, Allocation],
        now: float,
        settings: Any,
    ) -> Decision:
        """Return the allocations that the coordinator makes for this cluster at `now`."""
        infos = {job.name: job for job in jobs}
        self._follow_nodes(infos, nodes, now)
        self._follow_jobs(infos, now)
        self._memory = replace(self._memory, round_at=float("-inf"))  # the simulator says when a round is due
        self._decide(infos, now, settings)
        answer = self._answer or Decision({}, {})
        allocations = {name: in_plan(self._plans.get(name)) for name in infos}
        changed = tuple(name for name in infos if allocations[name] != dict(current.get(name, {})))
        return replace(answer, allocations=allocations, changed=changed)

    # The simulated cluster

    def _note(self, key: str, record: object, now: float) -> None:
        self._revision += 1
        self._keeper.note(key, encode(record), self._revision, now)

    def _follow_nodes(self, infos: Mapping[str, JobInfo], nodes: Sequence[NodeInfo], now: float) -> None:
        """Register an agent of every job on every node that the job may use."""
        there = {node.name: node for node in nodes}
        for name in set(self._nodes) - set(there):
            self._keeper.forget(f"{self._keys.nodes}{name}/", now)
        for node in nodes:
            fresh = self._nodes.get(node.name) != node
            for job in infos.values():
                if fresh or job.name not in self._jobs:
                    self._register(node, job, now)
        self._nodes = there

    def _register(self, node: NodeInfo, job: JobInfo, now: float) -> None:
        limit = None if job.limits is None else job.limits.get(node.name)
        if job.limits is not None and limit is None:
            return
        record = NodeRecord(
            node=node.name,
            job=job.name,
            run=job.name,
            agent=node.name,
            host=node.name,
            slots=node.slots if limit is None else min(node.slots, limit.max_slots),
            min_slots=1 if limit is None else limit.min_slots,
            preemptible=node.preemptible,
            draining=node.draining,
            at_risk=node.at_risk,
            node_type=node.node_type,
        )
        self._note(self._keys.node(node.name, job.name), record, now)

    def _follow_jobs(self, infos: Mapping[str, JobInfo], now: float) -> None:
        """Submit new jobs, and end those that are gone."""
        for name in set(self._jobs) - set(infos):
            self._end(name, now)
        for name, info in infos.items():
            if name not in self._jobs:
                spec = JobSpec(
                    job=name,
                    run=name,
                    min_nodes=info.min_nodes,
                    max_nodes=info.max_nodes or len(self._nodes) or 1,
                    min_replicas=info.min_replicas,
                    max_replicas=info.max_replicas,
                    preemptible=info.preemptible,
                    avoid_preemptible_nodes=info.avoid_preemptible_nodes,
                    weight=info.weight,
                )
                self._note(self._keys.job(name, "spec"), spec, now)
        self._jobs = dict(infos)

    def _end(self, name: str, now: float) -> None:
        plan = self._plans.pop(name, None)
        if plan is not None:
            for placement in plan.placements:
                self._ended(plan, placement.node, Outcome.DONE, now)
        status = JobStatus(job=name, run=name, state=JobState.DONE)
        self._note(self._keys.job(name, "status"), status, now)
        for node in self._nodes:
            self._keeper.forget(self._keys.node(node, name), now)
        self._keeper.forget(self._keys.job(name), now)

    def _ended(self, plan: Plan, node: str, outcome: Outcome, now: float) -> None:
        key = self._keys.generation(plan.job, plan.generation, "ended", node)
        self._note(key, EndedRecord(node, plan.generation, outcome, time=now), now)

    def _obey(self, plan: Plan, now: float) -> None:
        """End the previous generation and start this one."""
        before = self._plans.get(plan.job)
        if before is not None and before.generation < plan.generation:
            for placement in before.placements:
                self._ended(before, placement.node, Outcome.STOPPED, now)
        for placement in plan.placements:
            key = self._keys.generation(plan.job, plan.generation, "running", placement.node)
            self._note(key, RunningRecord(placement.node, plan.generation, now, now, library=True), now)
        self._plans[plan.job] = plan

    # The coordinator

    def _decide(self, infos: Mapping[str, JobInfo], now: float, settings: Any) -> None:
        self._answer = None
        options = CoordinatorSettings(
            **{"interval": float("inf"), "min_gap": 0.0, "policy": settings, **self._settings}
        )
        for _ in range(_ROUNDS):
            decided = decide_at_once(
                self._keeper.view(now, now),
                self._memory,
                keys=self._keys,
                fence=1,
                settings=options,
                policy=self._informed(infos),
            )
            self._memory = decided.memory
            self.decisions += 1
            moved = False
            for action in decided.actions:
                match action:
                    case CompareAndSwap(key, record, _):
                        self._note(key, record, now)
                        moved = True
                        if isinstance(record, Plan) and not record.claim:
                            self._obey(record, now)
                    case DeletePrefix(prefix):
                        self._keeper.forget(prefix, now)
            if not moved:
                return
        raise RuntimeError(f"the coordinator's decisions do not settle at {now}")

    def _informed(self, infos: Mapping[str, JobInfo]) -> Callable[..., Decision]:
        """Return the policy with the simulator's knowledge instead of reports.

        It is computed once per round.
        """

        def ask(
            jobs: Sequence[JobInfo],
            nodes: Sequence[NodeInfo],
            current: Mapping[str, Allocation],
            now: float,
            settings: Any,
        ) -> Decision:
            if self._answer is None:
                known = [_merge(infos[job.name], job) for job in jobs]
                self._answer = self._ask(known, nodes, current, now, settings)
            return self._answer

        return ask


def _merge(known: JobInfo, asked: JobInfo) -> JobInfo:
    """Return the simulator's knowledge of a job under the coordinator's constraints."""
    return replace(
        known,
        limits=asked.limits,
        preemptible=asked.preemptible,
        requested_replicas=known.requested_replicas
        if known.requested_replicas is not None
        else asked.requested_replicas,
    )
