"""Policies for comparison: callables with the signature of `policy.allocate`, some of them with state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from adaptdl_elastic.autoscaler.policy import allocate
from adaptdl_elastic.autoscaler.policy.policy_types import (
    Allocation,
    Decision,
    JobInfo,
    NodeInfo,
    Objective,
    PolicySettings,
    Reason,
)


def place_most_free(replicas: int, free: dict[str, int]) -> dict[str, int]:
    """Place replicas on the node with the most free slots, then on the next; reduces `free` accordingly."""
    placed: dict[str, int] = {}
    for node in sorted(free, key=lambda name: -free[name]):
        taken = min(free[node], replicas)
        if taken > 0:
            placed[node] = taken
            free[node] -= taken
            replicas -= taken
    return placed


def decision(
    jobs: Sequence[JobInfo], current: Mapping[str, Allocation], chosen: Mapping[str, Allocation], why: str
) -> Decision:
    """Return a Decision that gives each job its allocation in `chosen`."""
    allocations = {job.name: chosen.get(job.name, {}) for job in jobs}
    changed = tuple(name for name, found in allocations.items() if dict(found) != dict(current.get(name, {})))
    return Decision(allocations, {name: Reason(why) for name in allocations}, changed)


class Tiresias:
    """Order jobs in two queues by attained service, with fixed replicas (Gu et al., NSDI 2019).

    Service is the time that a job has run, in all its runs together, multiplied by its replicas.
    """

    threshold = 57_600.0  # slot seconds of service after which a job moves to the second queue

    def __init__(self) -> None:
        self._queues: tuple[list[str], list[str]] = ([], [])
        self._executed_seconds: dict[str, float] = {}
        self._running: tuple[str, ...] = ()  # jobs admitted at time `_decided`, the last decision
        self._decided = 0.0

    def __call__(
        self,
        jobs: Sequence[JobInfo],
        nodes: Sequence[NodeInfo],
        current: Mapping[str, Allocation],
        now: float,
        settings: PolicySettings,
    ) -> Decision:
        """Admit all jobs that fit, in queue order."""
        known = {job.name: job for job in jobs}
        for name in self._running:
            self._executed_seconds[name] = self._executed_seconds.get(name, 0.0) + now - self._decided
        for queue in self._queues:
            queue[:] = [name for name in queue if name in known]
        queued = {*self._queues[0], *self._queues[1]}
        self._queues[0].extend(job.name for job in jobs if job.name not in queued)
        for name in list(self._queues[0]):
            service = self._executed_seconds.get(name, 0.0) * (known[name].requested_replicas or 1)
            if name in self._running and service >= self.threshold:
                self._queues[0].remove(name)
                self._queues[1].append(name)
        left = sum(node.slots for node in nodes)
        admitted = []
        for name in (*self._queues[0], *self._queues[1]):
            wanted = known[name].requested_replicas or 1
            if wanted <= left:
                left -= wanted
                admitted.append(name)
        self._running, self._decided = tuple(admitted), now
        chosen = {name: dict(current[name]) for name in admitted if current.get(name)}
        free = {node.name: node.slots for node in nodes}
        for allocation in chosen.values():
            for node, replicas in allocation.items():
                free[node] -= replicas
        for name in admitted:
            if name not in chosen:
                chosen[name] = place_most_free(known[name].requested_replicas or 1, free)
        return decision(jobs, current, chosen, "its turn in the queue")


def pollux_like(
    jobs: Sequence[JobInfo],
    nodes: Sequence[NodeInfo],
    current: Mapping[str, Allocation],
    now: float,
    settings: PolicySettings,
) -> Decision:
    """Maximise Pollux's objective exactly (power mean of speedups, p = −1, lengths unknown)."""
    unknown = [replace(job, remaining=None) for job in jobs]
    return allocate(
        unknown, nodes, current, now, replace(settings, objective=Objective.SPEEDUP, fairness=-1.0)
    )


def make_policy(name: str) -> tuple[Any, bool]:
    """Return the policy called `name`, and whether its jobs run with tuned replicas and batch size."""
    policies: dict[str, tuple[Any, bool]] = {
        "goodput": (allocate, False),
        "pollux-like": (pollux_like, False),
        "tiresias": (Tiresias(), True),
    }
    return policies[name]


POLICIES = ("goodput", "pollux-like", "tiresias")
