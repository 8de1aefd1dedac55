"""Which slots are whose: pure arithmetic over nodes, used by every decision about placement."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from adaptdl_elastic.autoscaler.coordinator.types import Allocation
from adaptdl_elastic.autoscaler.state import JobView, View
from adaptdl_elastic.rendezvous.records import JobSpec, Leaving, Plan


@dataclass(frozen=True)
class Room:
    """What one job could have on one node: none, or between `least` and `most` replicas."""

    node: str
    least: int
    most: int
    agent: str
    preferred: int = 0  # smaller is better: preemptible or at risk nodes last


def capacity(view: View) -> dict[str, int]:
    """Slots of every node that is registered: the most that any job's agent reports for it."""
    slots: dict[str, int] = {}
    for agents in view.nodes.values():
        for node, seen in agents.items():
            slots[node] = max(slots.get(node, 0), seen.record.slots)
    return slots


def released(view: View, job: JobView, node: str, agent: str, generation: int) -> bool:
    """Whether a node's replicas of a generation are gone: it says so, or its agent is no more."""
    if (generation, node) in job.ended:
        return True
    registration = view.agents(job.job).get(node)
    return registration is None or (agent != "" and registration.record.agent != agent)


def holding(view: View, job: JobView) -> list[Leaving]:
    """Everybody who has, or may still have, replicas of this job."""
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
            Leaving(p.node, p.replicas, p.agent, plan.generation)
            for p in plan.placements
            if not released(view, job, p.node, p.agent, plan.generation)
        ]
    return found


def used(view: View, job: JobView) -> dict[str, int]:
    """Slots that a job holds on each node: the most of any generation that is not gone."""
    slots: dict[str, int] = {}
    for leaving in holding(view, job):
        slots[leaving.node] = max(slots.get(leaving.node, 0), leaving.replicas)
    return slots


class Ledger:
    """Every slot of the cluster and who holds it, kept while one round of decisions goes on."""

    def __init__(self, view: View) -> None:
        self.capacity = capacity(view)
        self._by_job: dict[str, dict[str, int]] = {}
        self._total: dict[str, int] = {}
        for job in view.jobs.values():
            self.hold(job.job, used(view, job))

    def hold(self, job: str, slots: Allocation) -> None:
        """`job` holds at least so many slots from now on."""
        mine = self._by_job.setdefault(job, {})
        for node, count in slots.items():
            more = max(0, count - mine.get(node, 0))
            mine[node] = mine.get(node, 0) + more
            self._total[node] = self._total.get(node, 0) + more

    def free_for(self, job: str, node: str) -> int:
        """Slots of a node that no other job holds."""
        others = self._total.get(node, 0) - self._by_job.get(job, {}).get(node, 0)
        return self.capacity.get(node, 0) - others

    def held(self, job: str) -> Allocation:
        """Slots that a job holds, by node."""
        return self._by_job.get(job, {})

    @property
    def used(self) -> int:
        """Slots that anybody holds."""
        return sum(self._total.values())


def rooms(
    view: View, job: JobView, ledger: Ledger | None = None, late: Iterable[str] = ()
) -> dict[str, Room]:
    """Where a job's replicas could go: its own registrations, less what others hold by the `ledger`.

    Without a ledger: where they could go if no other job were there.
    """
    spec = job.spec.record if job.spec else None
    avoided = set(late)
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
    """Whether every node of an allocation has the room for it."""
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
    """An allocation of exactly `replicas` that moves as few as can be, on as few nodes as can be.

    Keeps the order of the nodes that stay, so that rank 0 survives. None when there is none that
    these rooms allow.
    """
    limit = len(places) if max_nodes is None else min(max_nodes, len(places))
    stay = [node for node in current if node in places]
    fresh = sorted(
        (node for node in places if node not in current),
        key=lambda node: (places[node].preferred, -places[node].most, node),
    )
    stay.sort(key=lambda node: places[node].preferred)  # stable: rank order among equals
    best: tuple[tuple[int, int, int], dict[str, int]] | None = None
    for kept in range(min(len(stay), limit), -1, -1):
        for added in range(min(len(fresh), limit - kept) + 1):
            count = kept + added
            if count < max(min_nodes, 1) or count > replicas:
                continue
            # dropping from the end keeps rank 0; adding the roomiest first keeps nodes few
            chosen = [*stay[:kept], *fresh[:added]]
            filled = _fill(chosen, replicas, current, places)
            if filled is None:
                continue
            moved = sum(max(0, current.get(node, 0) - filled.get(node, 0)) for node in current)
            cost = (moved, count, sum(places[node].preferred for node in chosen))
            if best is None or cost < best[0]:
                best = cost, filled
        if best is not None and best[0][0] == 0:
            break
    return None if best is None else best[1]


def _fill(
    chosen: list[str], replicas: int, current: Allocation, places: Mapping[str, Room]
) -> dict[str, int] | None:
    """`replicas` over exactly these nodes: first what each needs, then what it had, then the rest."""
    filled = {node: places[node].least for node in chosen}
    left = replicas - sum(filled.values())
    if left < 0:
        return None
    for goal in (current, {node: places[node].most for node in chosen}):
        for node in chosen:
            more = min(left, max(0, min(goal.get(node, 0), places[node].most) - filled[node]))
            filled[node] += more
            left -= more
    return filled if left == 0 else None


def smallest(
    spec: JobSpec, places: Mapping[str, Room], current: Allocation | None = None
) -> dict[str, int] | None:
    """The least that this job can begin with."""
    for replicas in range(max(1, spec.min_replicas, spec.min_nodes), spec.max_replicas + 1):
        found = resize(current or {}, replicas, places, min_nodes=spec.min_nodes, max_nodes=spec.max_nodes)
        if found is not None:
            return found
    return None


def nearest(
    spec: JobSpec, wanted: int, places: Mapping[str, Room], current: Allocation
) -> dict[str, int] | None:
    """The allocation whose size is as near to `wanted` as these rooms allow, smaller before larger."""
    least, most = max(1, spec.min_replicas), spec.max_replicas
    for distance in range(max(wanted, most) + 1):
        for replicas in (wanted - distance, wanted + distance):
            if least <= replicas <= most:
                found = resize(current, replicas, places, min_nodes=spec.min_nodes, max_nodes=spec.max_nodes)
                if found is not None:
                    return found
    return None


def everything(spec: JobSpec, places: Mapping[str, Room], current: Allocation) -> dict[str, int] | None:
    """What torchrun would do: `min_slots` on every node there is, as far as the job's bounds allow."""
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
    """A plan's allocation, in the order of its ranks."""
    return {} if plan is None else {p.node: p.replicas for p in plan.placements}
