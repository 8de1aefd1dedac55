"""Decide which job gets which replicas, as a pure function."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from adaptdl_elastic.autoscaler.policy import objective, reasons
from adaptdl_elastic.autoscaler.policy.policy_types import (
    Allocation,
    Decision,
    JobInfo,
    NodeInfo,
    PolicySettings,
)
from adaptdl_elastic.autoscaler.policy.solver.placement import Board, share_limits
from adaptdl_elastic.autoscaler.policy.solver.solve import Solution, solve
from adaptdl_elastic.autoscaler.policy.solver.tables import Room, Tables, build, rooms_of


def allocate(
    jobs: Sequence[JobInfo],
    nodes: Sequence[NodeInfo],
    current: Mapping[str, Allocation],
    now: float,
    settings: PolicySettings = PolicySettings(),  # noqa: B008 (frozen)
) -> Decision:
    """Choose replicas for every job so that the objective of `settings` is as large as possible.

    The allocation never exceeds the slots of a node or the limits of a job, and never puts two multi-node
    jobs on one node. A job gets at least its minimum or nothing, and a draining node gets nothing. The
    function is deterministic; the only clock it reads is the CPU's, for `Decision.seconds`.
    """
    started = time.process_time()
    usable = [node for node in nodes if not node.draining and node.slots > 0]
    jobs = share_limits(jobs, usable)
    before = {job.name: dict(current.get(job.name, {})) for job in jobs}
    intact = _intact(jobs, usable, before)
    pinned = {
        job.name: job.fixed_because or "it may not be preempted"
        for job in jobs
        if job.name in intact and _pinned(job, before[job.name])
    }
    rooms = {job.name: room for job, room in zip(jobs, rooms_of(jobs, usable), strict=True)}
    pending = {job.name: why for job in jobs if (why := _impossible(job, len(usable), rooms[job.name]))}
    able = [job for job in jobs if job.name not in pending]
    problem = _Problem(able, usable, rooms, before, intact, now, settings)
    stable_wanted = any(job.avoid_preemptible_nodes for job in jobs)
    tables, solution = problem.solved(pinned, stable_wanted)
    fresh = _fresh(
        [job for job, kept in zip(tables.jobs, tables.kept, strict=True) if kept >= 0], now, settings
    )
    if _disturbed(able, fresh, before, solution.placed, now, settings):
        pinned = {**pinned, **fresh}
        tables, solution = problem.solved(pinned, stable_wanted)
    allocations = {job.name: solution.placed.get(job.name, {}) for job in jobs}
    changed = tuple(name for name, found in allocations.items() if found != before[name])
    decision = Decision(
        allocations=allocations,
        reasons={},
        changed=changed,
        objective=float(sum(_speedup(tables, i, allocations[job.name]) for i, job in enumerate(tables.jobs))),
        pending=pending,
    )
    given = reasons.explain(decision, jobs, pinned, tables, solution.targets, before, now, settings)
    return replace(decision, reasons=given, seconds=time.process_time() - started)


@dataclass(frozen=True)
class _Problem:
    """The jobs that can run, and the nodes that may be used."""

    jobs: Sequence[JobInfo]
    nodes: Sequence[NodeInfo]
    rooms: Mapping[str, Room]
    before: Mapping[str, Allocation]
    intact: set[str]
    now: float
    settings: PolicySettings

    def solved(self, pinned: Collection[str], stable_wanted: bool) -> tuple[Tables, Solution]:
        """Return the best allocation of the jobs that are not `pinned`; pinned jobs keep what they have."""
        free = [job for job in self.jobs if job.name not in pinned]
        tables = build(free, self.nodes, self.rooms, self.before, self.intact, self.now, self.settings)
        board = Board(self.nodes, self.before, stable_wanted=stable_wanted)
        for name in pinned:
            board.put(name, self.before[name])
        types = tables.sizes.types
        capacity = np.zeros(len(types), dtype=int)
        for node in self.nodes:
            capacity[types.index(node.node_type)] += max(board.free[node.name], 0)
        return tables, solve(tables, board, capacity, self.settings.time_limit)


def _intact(jobs: Sequence[JobInfo], nodes: Sequence[NodeInfo], before: Mapping[str, Allocation]) -> set[str]:
    """Return the jobs that could stay as they are: their nodes exist, do not drain and are not overfull."""
    room = {node.name: node.slots for node in nodes}
    for job in jobs:
        for node, replicas in before[job.name].items():
            if node in room:
                room[node] -= replicas
    return {
        job.name
        for job in jobs
        if before[job.name] and all(room.get(node, -1) >= 0 for node in before[job.name])
    }


def _pinned(job: JobInfo, before: Allocation) -> bool:
    """Return whether a running job keeps its replicas even where another allocation would be better."""
    if job.requested_replicas is not None:
        return sum(before.values()) == job.requested_replicas and not job.preemptible
    return not job.preemptible


def _fresh(jobs: Sequence[JobInfo], now: float, settings: PolicySettings) -> dict[str, str]:
    """Return the running jobs that changed too recently to be changed for other jobs, with the reason."""
    found = {}
    for job in jobs:
        if job.last_change is None:
            continue
        pause = settings.pause(job.pause)
        ago, peace = now - job.last_change, min(objective.PAUSES_PER_HORIZON * pause, settings.max_wait)
        if ago < peace:
            others = f"it was changed {ago:.0f} s ago, and others wait"
            found[job.name] = f"{others}: it is left in peace for {peace:.0f} s"
    return found


def _disturbed(
    jobs: Sequence[JobInfo],
    fresh: Collection[str],
    before: Mapping[str, Allocation],
    after: Mapping[str, Allocation],
    now: float,
    settings: PolicySettings,
) -> bool:
    """Return whether jobs that have waited too long would start with replicas of protected jobs.

    The jobs in `fresh` are protected because they changed a short time ago. Without protection, a cluster
    with more jobs than slots would do nothing but pause: some job has always waited too long. But the
    protection may begin again although no waiting job has started, for example after a recovery or under a
    new coordinator. So it no longer holds once one of the starting jobs has waited for `max_wait` and, for
    each job that has waited too long, for twice that time more.
    """
    late = [job for job in jobs if objective.overdue(job, now, settings)]
    waits = [now - (job.waiting_since or 0.0) for job in late if after.get(job.name)]
    if not waits or max(waits) >= settings.max_wait * (1 + 2 * len(late)):
        return False
    return any(sum(after.get(n, {}).values()) < sum(before[n].values()) for n in fresh)


def _impossible(job: JobInfo, nodes: int, room: Room) -> str:
    """Return why a job cannot run on these nodes even if it had them alone; empty if it can run."""
    least = max(job.requested_replicas or job.min_replicas, job.min_nodes, 1)
    if room.nodes == 0:
        return f"none of the {nodes} nodes can take it" if nodes else "there are no nodes"
    if room.nodes < job.min_nodes:
        return f"needs {job.min_nodes} nodes, {room.nodes} of {nodes} can take it"
    if room.total < least:
        return f"needs {least} replicas, there is room for {room.total} on {room.nodes} nodes"
    if room.least > job.max_replicas:
        return f"its nodes take {room.least} replicas at least, its maximum is {job.max_replicas}"
    if job.requested_replicas is not None and job.requested_replicas > job.max_replicas:
        return f"{job.requested_replicas} replicas were requested, its maximum is {job.max_replicas}"
    return ""


def _speedup(tables: Tables, row: int, found: Allocation) -> float:
    column = tables.sizes.find(found)
    return float(tables.speedup[row, column]) if column is not None else 0.0
