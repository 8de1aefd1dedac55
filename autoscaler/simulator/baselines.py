"""Policies to compare with: callables with the signature of `policy.allocate`, some with a memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from adaptdl_elastic.autoscaler.policy.types import Allocation, Decision, JobInfo, NodeInfo, Reason, Settings


def place_most_free(replicas: int, free: dict[str, int]) -> dict[str, int]:
    """As many as needed or there are of the node with the most free slots, then the next; updates `free`."""
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
    """A Decision that gives each job what is `chosen`."""
    allocations = {job.name: chosen.get(job.name, {}) for job in jobs}
    changed = tuple(name for name, found in allocations.items() if dict(found) != dict(current.get(name, {})))
    return Decision(allocations, {name: Reason(why) for name in allocations}, changed)


class Tiresias:
    """Two queues by attained service, requested replicas fixed (Gu et al., NSDI 2019)."""

    threshold = 57_600.0  # slot seconds after which a job goes to the second queue

    def __init__(self) -> None:
        self._queues: tuple[list[str], list[str]] = ([], [])
        self._running_since: dict[str, float] = {}

    def __call__(
        self,
        jobs: Sequence[JobInfo],
        nodes: Sequence[NodeInfo],
        current: Mapping[str, Allocation],
        now: float,
        settings: Settings,
    ) -> Decision:
        """Admit in queue order whatever fits."""
        known = {job.name: job for job in jobs}
        for queue in self._queues:
            queue[:] = [name for name in queue if name in known]
        queued = {*self._queues[0], *self._queues[1]}
        self._queues[0].extend(job.name for job in jobs if job.name not in queued)
        for name in list(self._queues[0]):
            since = self._running_since.get(name)
            if since is not None and (now - since) * (known[name].requested_replicas or 1) >= self.threshold:
                self._queues[0].remove(name)
                self._queues[1].append(name)
        left = sum(node.slots for node in nodes)
        admitted = []
        for name in (*self._queues[0], *self._queues[1]):
            wanted = known[name].requested_replicas or 1
            if wanted <= left:
                left -= wanted
                admitted.append(name)
                self._running_since.setdefault(name, now)
            else:
                self._running_since.pop(name, None)
        chosen = {name: dict(current[name]) for name in admitted if current.get(name)}
        free = {node.name: node.slots for node in nodes}
        for allocation in chosen.values():
            for node, replicas in allocation.items():
                free[node] -= replicas
        for name in admitted:
            if name not in chosen:
                chosen[name] = place_most_free(known[name].requested_replicas or 1, free)
        return decision(jobs, current, chosen, "its turn in the queue")
