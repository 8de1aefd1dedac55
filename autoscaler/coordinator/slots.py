"""Account for slots of nodes: pure arithmetic for every decision about placement."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from adaptdl_elastic.autoscaler.cluster_view import JobView, View
from adaptdl_elastic.autoscaler.coordinator import survivors
from adaptdl_elastic.autoscaler.coordinator.decision_types import Allocation
from adaptdl_elastic.rendezvous.schema.records import JobSpec, Leaving, Plan


@dataclass(frozen=True)
class Room:
    """What one job could have on one node: no replica, or between `least` and `most`."""

    node: str
    least: int
    most: int
    agent: str
    preferred: int = 0  # smaller is better; preemptible nodes and nodes at risk come last


def capacity(view: View) -> dict[str, int]:
    """Return the slots of every registered node: the most that any job's agent reports."""
    slots: dict[str, int] = {}
    for agents in view.nodes.values():
        for node, seen in agents.items():
            slots[node] = max(slots.get(node, 0), seen.record.slots)
    return slots


def released(view: View, job: JobView, node: str, agent: str, generation: int) -> bool:
    """Return whether a node's replicas of a generation are gone: the node says so, or its agent is gone."""
    if (generation, node) in job.ended:
        return True
    registration = view.agents(job.job).get(node)
    return registration is None or (agent != "" and registration.record.agent != agent)


def holding(view: View, job: JobView) -> list[Leaving]:
    """Return all replicas of this job that exist, or may still exist."""
    if job.plan is None:
        return []
    plan = job.plan.record
    found = [
        leaving
        for leaving in plan.leaving
        if not released(view, job, leaving.node, leaving.agent, leaving.generation)
    ]
    if not plan.claim:
        found += [
            Leaving(p.node, p.replicas, p.agent, plan.generation, p.slots)
            for p in plan.placements
            if not released(view, job, p.node, p.agent, plan.generation)
        ]
    return found


def used(view: View, job: JobView) -> dict[str, int]:
    """Return how many slots of each node a job holds.

    If several generations may still have replicas on a node, the one with the most replicas there counts.
    """
    slots: dict[str, int] = {}
    for leaving in holding(view, job):
        slots[leaving.node] = max(slots.get(leaving.node, 0), leaving.replicas)
    return slots


class Ledger:
    """Every slot of the cluster and the job that holds it, during one decision."""

    def __init__(self, view: View) -> None:
        self.capacity = capacity(view)
        self._by_job: dict[str, dict[str, int]] = {}
        self._total: dict[str, int] = {}
        for job in view.jobs.values():
            self.hold(job.job, used(view, job))

    def hold(self, job: str, slots: Allocation) -> None:
        """Make `job` hold at least these slots."""
        mine = self._by_job.setdefault(job, {})
        for node, count in slots.items():
            more = max(0, count - mine.get(node, 0))
            mine[node] = mine.get(node, 0) + more
            self._total[node] = self._total.get(node, 0) + more

    def free_for(self, job: str, node: str) -> int:
        """Return the slots of a node that no other job holds."""
        others = self._total.get(node, 0) - self._by_job.get(job, {}).get(node, 0)
        return self.capacity.get(node, 0) - others

    def held(self, job: str) -> Allocation:
        """Return the slots that a job holds, by node."""
        return self._by_job.get(job, {})

    @property
    def used(self) -> int:
        """The number of slots that are held."""
        return sum(self._total.values())


def rooms(
    view: View, job: JobView, ledger: Ledger | None = None, late: Iterable[str] = ()
) -> dict[str, Room]:
    """Return where a job's replicas could go: its own registrations, less what others hold.

    Without a ledger the result is where they could go if there were no other job.
    """
    spec = job.spec.record if job.spec else None
    avoided = set(late)
    if job.plan is not None:
        silent = survivors.given_up(job.plan.record)
        avoided |= {o.node for o in silent if not released(view, job, o.node, o.agent, o.generation)}
    found: dict[str, Room] = {}
    for node, seen in view.agents(job.job).items():
        record = seen.record
        if view.draining(record) or node in avoided or (spec is not None and record.run != spec.run):
            continue
        most = record.slots if ledger is None else min(record.slots, ledger.free_for(job.job, node))
        if most < record.min_slots:
            continue
        shun = 1 if record.at_risk else 0
        if record.preemptible and spec is not None and spec.avoid_preemptible_nodes:
            shun += 2
        found[node] = Room(node, record.min_slots, most, record.agent, shun)
    return found


def fits(allocation: Allocation, places: Mapping[str, Room]) -> bool:
    """Return whether every node of an allocation has room for it."""
    return all(
        node in places and places[node].least <= replicas <= places[node].most
        for node, replicas in allocation.items()
    )


def resize(
    current: Allocation,
    replicas: int,
    places: Mapping[str, Room],
    *,
    min_nodes: int = 1,
    max_nodes: int | None = None,
) -> dict[str, int] | None:
    """Return an allocation of exactly `replicas` that moves as few replicas, to as few nodes, as possible.

    The order of the nodes that stay is kept, so that rank 0 survives. None if there is no such allocation.
    """
    limit = len(places) if max_nodes is None else min(max_nodes, len(places))
    stay = [node for node in current if node in places]
    stay.sort(key=lambda node: places[node].preferred)  # stable sort: rank order among equals
    fresh = [node for node in places if node not in current]
    roomy = sorted(fresh, key=lambda node: (places[node].preferred, -places[node].most, node))
    small = sorted(fresh, key=lambda node: (places[node].least, places[node].preferred, node))
    largest = sorted(fresh, key=lambda node: (-places[node].most, places[node].preferred, node))
    # First few nodes of the preferred kind, then those with the smallest minimum, then the largest ones.
    for order in (roomy, small, largest):
        best: tuple[tuple[int, int, int], dict[str, int]] | None = None
        for chosen in _choices(stay, order, replicas, places, max(min_nodes, 1), limit):
            filled = _fill(chosen, replicas, current, places)
            moved = sum(max(0, current.get(node, 0) - filled.get(node, 0)) for node in current)
            cost = (moved, len(chosen), sum(places[node].preferred for node in chosen))
            if best is None or cost < best[0]:
                best = cost, filled
            if moved == 0:
                break
        if best is not None:
            return best[1]
    return None


def _choices(
    stay: list[str], fresh: list[str], replicas: int, places: Mapping[str, Room], min_nodes: int, limit: int
) -> Iterator[list[str]]:
    """Yield, for each number of nodes that stay (dropped from the end), the fewest new nodes that suffice."""
    most = list(accumulate((places[node].most for node in fresh), initial=0))
    least = list(accumulate((places[node].least for node in fresh), initial=0))
    for kept in range(min(len(stay), limit), -1, -1):
        has = sum(places[node].most for node in stay[:kept])
        needs = sum(places[node].least for node in stay[:kept])
        added = max(bisect_left(most, replicas - has), min_nodes - kept, 0)
        if added <= min(len(fresh), limit - kept) and kept + added and needs + least[added] <= replicas:
            yield [*stay[:kept], *fresh[:added]]


def _fill(
    chosen: list[str], replicas: int, current: Allocation, places: Mapping[str, Room]
) -> dict[str, int]:
    """Distribute `replicas` over exactly these nodes: their minimum, then what they had, then the rest."""
    filled = {node: places[node].least for node in chosen}
    left = replicas - sum(filled.values())
    for goal in (current, {node: places[node].most for node in chosen}):
        for node in chosen:
            more = min(left, max(0, min(goal.get(node, 0), places[node].most) - filled[node]))
            filled[node] += more
            left -= more
    return filled


def _sizes(spec: JobSpec, places: Mapping[str, Room]) -> range:
    """Return the numbers of replicas that the job may have and that fit into these rooms."""
    least = max(1, spec.min_replicas, spec.min_nodes)
    return range(least, min(spec.max_replicas, sum(room.most for room in places.values())) + 1)


def fewest(view: View, job: JobView) -> int:
    """Return the fewest replicas that a job runs with, by its bounds and the minimum of each node."""
    spec = job.spec.record if job.spec else None
    if spec is None:
        return 1
    agents = (seen.record for seen in view.agents(job.job).values())
    least = sorted(agent.min_slots for agent in agents if agent.run == spec.run)
    return max(1, spec.min_replicas, spec.min_nodes, sum(least[: max(1, spec.min_nodes)]))


def smallest(
    spec: JobSpec, places: Mapping[str, Room], current: Allocation | None = None
) -> dict[str, int] | None:
    """Return the smallest allocation that this job can begin with, or None."""
    return _first(_sizes(spec, places), spec, places, current or {})


def nearest(
    spec: JobSpec, wanted: int, places: Mapping[str, Room], current: Allocation
) -> dict[str, int] | None:
    """Return the allocation whose size is nearest to `wanted`, smaller before larger; None if impossible."""
    sizes = sorted(_sizes(spec, places), key=lambda size: (abs(size - wanted), size))
    return _first(sizes, spec, places, current)


def _first(
    sizes: Iterable[int], spec: JobSpec, places: Mapping[str, Room], current: Allocation
) -> dict[str, int] | None:
    for replicas in sizes:
        found = resize(current, replicas, places, min_nodes=spec.min_nodes, max_nodes=spec.max_nodes)
        if found is not None:
            return found
    return None


def everything(spec: JobSpec, places: Mapping[str, Room], current: Allocation) -> dict[str, int] | None:
    """Return `min_slots` replicas on every node, as torchrun would, within the job's bounds."""
    order = [node for node in current if node in places]
    order += sorted((n for n in places if n not in current), key=lambda n: (places[n].preferred, n))
    chosen: dict[str, int] = {}
    for node in order[: spec.max_nodes]:
        if sum(chosen.values()) + places[node].least <= spec.max_replicas:
            chosen[node] = places[node].least
    if len(chosen) < spec.min_nodes:
        return None
    if sum(chosen.values()) < spec.min_replicas:
        return smallest(spec, places, current)
    return chosen


def in_plan(plan: Plan | None) -> dict[str, int]:
    """Return a plan's allocation, in the order of its ranks."""
    return {} if plan is None else {p.node: p.replicas for p in plan.placements}
