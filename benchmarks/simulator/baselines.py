"""Policies for comparison: callables with the signature of `policy.allocate`, some of them with state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from adaptdl_elastic.autoscaler.policy import allocate
from adaptdl_elastic.autoscaler.policy.curves import goodputs
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


class Fifo:
    """Run jobs in order of submission, with the requested replicas, until they end; no job overtakes."""

    def __call__(
        self,
        jobs: Sequence[JobInfo],
        nodes: Sequence[NodeInfo],
        current: Mapping[str, Allocation],
        now: float,
        settings: PolicySettings,
    ) -> Decision:
        """Admit from the head of the queue while there is room."""
        free = {node.name: node.slots for node in nodes}
        chosen = {job.name: dict(current[job.name]) for job in jobs if current.get(job.name)}
        for allocation in chosen.values():
            for node, replicas in allocation.items():
                free[node] -= replicas
        for job in sorted(jobs, key=lambda job: job.submitted):
            if job.name in chosen:
                continue
            wanted = job.requested_replicas or 1
            if wanted > sum(free.values()):
                break
            chosen[job.name] = place_most_free(wanted, free)
        return decision(jobs, current, chosen, "in order of submission")


class Even:
    """Give every job the same number of slots; with more jobs than slots, the first ones submitted."""

    def __call__(
        self,
        jobs: Sequence[JobInfo],
        nodes: Sequence[NodeInfo],
        current: Mapping[str, Allocation],
        now: float,
        settings: PolicySettings,
    ) -> Decision:
        """Divide the slots; a job that already has its share keeps its place."""
        total = sum(node.slots for node in nodes)
        ordered = sorted(jobs, key=lambda job: job.submitted)[:total]
        share = {job.name: min(total // max(len(ordered), 1), job.max_replicas) for job in ordered}
        return _keep_or_place(jobs, nodes, current, share, "an equal share")


def _keep_or_place(
    jobs: Sequence[JobInfo],
    nodes: Sequence[NodeInfo],
    current: Mapping[str, Allocation],
    wanted: Mapping[str, int],
    why: str,
) -> Decision:
    free = {node.name: node.slots for node in nodes}
    chosen: dict[str, Allocation] = {}
    for name, replicas in wanted.items():
        before = current.get(name, {})
        if before and sum(before.values()) == replicas and all(node in free for node in before):
            chosen[name] = dict(before)
            for node, here in before.items():
                free[node] -= here
    for name in sorted(wanted, key=lambda name: -wanted[name]):
        if name not in chosen and wanted[name] > 0:
            chosen[name] = place_most_free(wanted[name], free)
    return decision(jobs, current, chosen, why)


class Optimus:
    """Give replicas one at a time to the job that saves the most time by it (Peng et al., EuroSys 2018).

    As in Pollux's comparison, the remaining work is known and jobs run with their tuned batch size.
    """

    def __call__(
        self,
        jobs: Sequence[JobInfo],
        nodes: Sequence[NodeInfo],
        current: Mapping[str, Allocation],
        now: float,
        settings: PolicySettings,
    ) -> Decision:
        """Assign replicas greedily by their marginal gain in remaining time."""
        total, slots = sum(node.slots for node in nodes), max(node.slots for node in nodes)
        ordered = sorted(jobs, key=lambda job: job.submitted)[:total]
        given = {job.name: 1 for job in ordered}
        times = {job.name: _times(job, total, slots) for job in ordered}

        def gain(name: str) -> float:
            left, count = times[name], given[name]
            return float(left[count] - left[count + 1]) if count + 1 < len(left) else 0.0

        spare = total - len(ordered)
        while spare > 0 and given:
            best = max(given, key=gain)
            if gain(best) <= 0:
                break
            given[best] += 1
            spare -= 1
        return _keep_or_place(jobs, nodes, current, given, "the most time saved by a replica")


def _times(job: JobInfo, total: int, slots: int) -> list[float]:
    """Return the remaining seconds by number of replicas.

    Index 0 is unused. A job without a model has one entry for one replica.
    """
    if job.model is None:
        return [math.inf, math.inf]
    most = min(job.max_replicas, total)
    counts = np.arange(1, most + 1)
    found = goodputs([job.model], np.where(counts > slots, 2, 1), counts).goodput[0]
    left = (job.remaining or 0.0) / np.maximum(found, 1e-9)
    usable = int(np.argmin(found > 0)) if not (found > 0).all() else most
    return [math.inf, *left[:usable].tolist()]


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
        "optimus": (Optimus(), True),
        "fifo": (Fifo(), True),
        "even": (Even(), False),
    }
    return policies[name]


POLICIES = ("goodput", "pollux-like", "tiresias", "optimus", "fifo", "even")
