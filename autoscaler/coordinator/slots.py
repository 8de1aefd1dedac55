"""Account for slots of nodes: pure arithmetic for every decision about placement."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from adaptdl_elastic.autoscaler.cluster_view import JobView, View
from adaptdl_elastic.autoscaler.coordinator import survivors
from adaptdl_elastic.autoscaler.coordinator.decision_types import Allocation
from adaptdl_elastic.rendezvous.schema.records import JobSpec, Leaving, NodeRecord, Plan, devices_by_slot


@dataclass(frozen=True)
class Room:
    """What one job could have on one node: no replica, or between `least` and `most`."""

    node: str
    least: int
    most: int
    agent: str
    preferred: int = 0  # smaller is better; preemptible nodes and nodes at risk come last


def device_name(node: NodeRecord, number: int) -> str:
    """Return the name of an agent's device in the cluster; without GPUs, that of a share of its node's cores.

    Agents of several jobs on one machine give a GPU the same name, and may give it different numbers. A
    machine may have several names as a node; its GPUs have one.
    """
    return node.devices[number] if number < len(node.devices) else f"{node.node}/{number}"


def devices_each(job: JobView, node: NodeRecord) -> int:
    """Return how many devices of a node one replica of a job has."""
    return job.spec.record.gpus_per_replica if job.spec is not None and node.devices else 1


def _unusable(node: NodeRecord) -> set[str]:
    return {line.partition(":")[0] for line in node.unusable}


def released(view: View, job: JobView, node: str, agent: str, generation: int) -> bool:
    """Return whether a node's replicas of a generation are gone: the node says so, or its agent is gone."""
    if (generation, node) in job.ended:
        return True
    registration = view.agents(job.job).get(node)
    return registration is None or (agent != "" and registration.record.agent != agent)


def holding(view: View, job: JobView) -> list[Leaving]:
    """Return all replicas of this job that exist, or may still exist."""
    known = [] if job.plan is None else named(job.plan.record)
    return [one for one in known if not released(view, job, one.node, one.agent, one.generation)]


def named(plan: Plan) -> list[Leaving]:
    """Return the replicas that a plan names: those that leave, and its own."""
    mine, own = plan.generation, plan.placements
    return [*plan.leaving, *(Leaving(p.node, p.replicas, p.agent, mine, p.slots, p.devices) for p in own)]


def used(view: View, job: JobView) -> dict[str, set[str]]:
    """Return the names of the devices that a job holds, by node, in whichever of its generations."""
    found: dict[str, set[str]] = {}
    for leaving in holding(view, job):
        record = view.agents(job.job)[leaving.node].record
        for numbers in devices_by_slot(leaving).values():
            found.setdefault(leaving.node, set()).update(device_name(record, n) for n in numbers)
    return found


class Ledger:
    """Every device of the cluster and the job that holds it, during one decision."""

    def __init__(self, view: View) -> None:
        self._by_job = {job.job: used(view, job) for job in view.jobs.values()}
        self._holders: dict[str, set[tuple[str, str]]] = {}  # device → (job, node) of those that hold it
        for job, held in self._by_job.items():
            for node, names in held.items():
                for name in names:
                    self._holders.setdefault(name, set()).add((job, node))
        gpus: dict[str, set[str]] = {}
        cores: dict[str, int] = {}
        for agents in view.nodes.values():
            for node, seen in agents.items():
                record = seen.record
                cores[node] = max(cores.get(node, 0), 0 if record.devices else record.slots)
                lost = {name for name in _unusable(record) if name not in self._holders}
                gpus.setdefault(node, set()).update(name for name in record.devices if name not in lost)
        self.capacity = {node: count + len(gpus.get(node, ())) for node, count in cores.items()}
        """How many devices every registered node has, as the agents of all jobs report them."""
        self.drained = sorted(view.drains)
        """Nodes that are drained by request, also those that have no agent any more."""

    def _is_free(self, name: str, job: str, node: str) -> bool:
        """Return whether nobody holds a device but the replicas of this job on this node."""
        return self._holders.get(name, set()) <= {(job, node)}

    def _free(self, job: JobView, node: NodeRecord) -> list[tuple[int, ...]]:
        """Return the groups of neighbouring devices that one replica each could have, or has."""
        each, lost = devices_each(job, node), _unusable(node)
        mine = self._by_job.get(job.job, {}).get(node.node, set())
        count = len(node.devices) or self.capacity[node.node]
        names = [device_name(node, number) for number in range(count)]
        good = [
            self._is_free(name, job.job, node.node) and (name not in lost or name in mine) for name in names
        ]
        starts = range(0, count - each + 1, each)
        return [tuple(range(first, first + each)) for first in starts if all(good[first : first + each])]

    def room_for(self, job: JobView, node: NodeRecord) -> int:
        """Return how many replicas of a job the devices of a node that no other job holds are enough for."""
        return min(node.slots, len(self._free(job, node)))

    def place(
        self, job: JobView, node: NodeRecord, slots: Sequence[int], kept: Mapping[int, tuple[int, ...]]
    ) -> tuple[int, ...] | None:
        """Give the replicas of a job on a node their devices, and hold them for it.

        Args:
            job: the job.
            node: its agent there.
            slots: the LOCAL_RANKs of the replicas, in the order of their ranks.
            kept: LOCAL_RANK → devices of the replicas that go on in their processes.

        Returns:
            `Placement.devices`; None if there are not enough.
        """
        mine = self._by_job.setdefault(job.job, {}).setdefault(node.node, set())
        kept = {slot: devices for slot, devices in kept.items() if slot in slots}
        stay = {number for devices in kept.values() for number in devices}
        bad = _unusable(node)
        free = [
            group
            for group in self._free(job, node)
            if not stay & set(group) and not any(device_name(node, number) in bad for number in group)
        ]
        # the job's own first, since it would hold two sets until its old processes are gone
        free.sort(key=lambda group: sum(device_name(node, number) not in mine for number in group))
        if len(free) < len(slots) - len(kept):
            return None
        rest = iter(free)
        found = [number for slot in slots for number in kept.get(slot) or next(rest)]
        for number in found:
            name = device_name(node, number)
            mine.add(name)
            self._holders.setdefault(name, set()).add((job.job, node.node))
        return () if found == list(slots) else tuple(found)

    def free_for(self, job: str, node: str) -> int:
        """Return the devices of a node that no other job holds."""
        others = {name for other, held in self._by_job.items() if other != job for name in held.get(node, ())}
        return self.capacity.get(node, 0) - len(others)

    def held(self, job: str) -> Allocation:
        """Return the number of devices that a job holds, by node."""
        return {node: len(names) for node, names in self._by_job.get(job, {}).items() if names}

    @property
    def used(self) -> int:
        """The number of devices that are held."""
        return sum(sum(self.held(job).values()) for job in self._by_job)


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
        most = record.slots if ledger is None else ledger.room_for(job, record)
        if record.changed:
            most = min(most, in_plan(job.plan.record if job.plan else None).get(node, 0))
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
    least = max(spec.min_replicas, spec.min_nodes)
    return range(least, min(spec.max_replicas, sum(room.most for room in places.values())) + 1)


def fewest(view: View, job: JobView) -> int:
    """Return the fewest replicas that a job runs with, by its bounds and the minimum of each node."""
    spec = job.spec.record if job.spec else None
    if spec is None:
        return 1
    agents = (seen.record for seen in view.agents(job.job).values())
    least = sorted(agent.min_slots for agent in agents if agent.run == spec.run)
    return max(spec.min_replicas, spec.min_nodes, sum(least[: spec.min_nodes]))


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
