"""The sizes that are considered: numbers of replicas on the nodes of one type, the columns of every table.

A job's replicas work in step, so each waits for the slowest. Therefore all replicas of a job are on nodes of
one type. The exception are sizes beyond the room that the job has on every single type: they may use nodes of
all types, and are as fast as on the slowest of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaptdl_elastic.autoscaler.policy.policy_types import Allocation, JobInfo, NodeInfo
from adaptdl_elastic.autoscaler.policy.solver.placement import bounds_of

SMALL = 32
"""Number of slots up to which all numbers of replicas are considered, instead of some of them."""


@dataclass(frozen=True)
class Sizes:
    """The numbers of replicas that are considered, by type of node."""

    types: tuple[str, ...]  # the node types, in the order of their names
    type_of: Mapping[str, str]  # type by node
    replicas: NDArray[Any]  # (K,)
    several: NDArray[np.bool_]  # (K,): whether on several nodes
    kinds: NDArray[Any]  # (K,): index of the type; len(types) for nodes of several types together
    uses: NDArray[Any]  # (K, types): slots of each type

    @property
    def mixed(self) -> int:
        """The entry of `kinds` for sizes on nodes of several types together."""
        return len(self.types)

    def find(self, allocation: Allocation) -> int | None:
        """Return the column of an allocation; None if its size is not considered.

        Of the columns with as many replicas on several types, it is the one that divides them most alike.
        """
        if not allocation:
            return None
        replicas, several = sum(allocation.values()), len(allocation) > 1
        found = np.flatnonzero(
            (self.replicas == replicas) & (self.several == several) & (self.kinds == self.kind(allocation))
        )
        if len(found) < 2:
            return int(found[0]) if found.size else None
        use = np.array(_split(allocation, self.type_of, self.types))
        return int(found[np.argmin(np.abs(self.uses[found] - use).sum(axis=1))])

    def kind(self, allocation: Allocation) -> int:
        """Return the entry of `kinds` of an allocation. Nodes that are gone count as of any type."""
        types = {self.type_of[node] for node in allocation if node in self.type_of}
        return self.types.index(min(types)) if len(types) == 1 else self.mixed

    def name(self, column: int) -> str | None:
        """Return the node type of a column; None if nodes of all types may be used together."""
        kind = int(self.kinds[column])
        return None if kind == self.mixed else self.types[kind]


def build_sizes(
    jobs: Sequence[JobInfo],
    nodes: Sequence[NodeInfo],
    had: Sequence[Allocation],
    least: Mapping[str, set[int]],
    across: Iterable[tuple[int, ...]] = (),
) -> Sizes:
    """Return the sizes that are considered.

    In a small cluster they are all numbers of replicas, else powers of two on one node and whole nodes. The
    present, minimal and requested sizes of the jobs are always included.

    Args:
        jobs: The jobs that share the nodes.
        nodes: The nodes that may be used.
        had: The present allocation of each job.
        least: By node type, further sizes to include.
        across: Further sizes on nodes of several types, as slots of each type in the order of their names.
    """
    type_of = {node.name: node.node_type for node in nodes}
    types = types_of(nodes)
    small = is_small(nodes)
    total = {t: sum(node.slots for node in nodes if node.node_type == t) for t in types}
    columns: list[tuple[int, bool, int, tuple[int, ...]]] = []
    for kind, name in enumerate(types):
        here = [found for found in had if {type_of.get(node) for node in found} == {name}]
        slots = [node.slots for node in nodes if node.node_type == name]
        for replicas, several in _of_nodes(jobs, slots, here, least.get(name, set()), small):
            use = tuple(replicas if i == kind else 0 for i in range(len(types)))
            columns.append((replicas, several, kind, use))
    if len(types) > 1:
        mixed = {_split(found, type_of, types) for found in had if _is_mixed(found, type_of)} | set(across)
        everything = _of_nodes(jobs, [node.slots for node in nodes], [], set(), small)
        beyond = [replicas for replicas, several in everything if several and replicas > max(total.values())]
        order = sorted(range(len(types)), key=lambda kind: (-total[types[kind]], kind))
        mixed |= {_fill(replicas, order, [total[name] for name in types]) for replicas in beyond}
        columns += [
            (sum(use), True, len(types), use) for use in sorted(mixed, key=lambda use: (sum(use), use))
        ]
    return Sizes(
        types,
        type_of,
        np.array([column[0] for column in columns], dtype=int),
        np.array([column[1] for column in columns], dtype=bool),
        np.array([column[2] for column in columns], dtype=int),
        np.array([column[3] for column in columns], dtype=int).reshape(-1, len(types)),
    )


def types_of(nodes: Sequence[NodeInfo]) -> tuple[str, ...]:
    """Return the types of the nodes, in the order of their names."""
    return tuple(sorted({node.node_type for node in nodes})) or ("",)


def is_small(nodes: Sequence[NodeInfo]) -> bool:
    """Return whether all numbers of replicas are considered on these nodes."""
    return sum(node.slots for node in nodes) <= SMALL


def spread(
    job: JobInfo, nodes: Sequence[NodeInfo], counts: Iterable[int], room: Sequence[int]
) -> set[tuple[int, ...]]:
    """Return how a job's nodes of several types could hold these numbers of replicas, as slots of each type.

    Fill the nodes in order, those of the types with the most room first. If that finds no room, fill the
    nodes with the smallest minimum of replicas first.

    Args:
        job: The job.
        nodes: The nodes that may be used.
        counts: Numbers of replicas; those that find no room this way are left out.
        room: The replicas that the job could have on each type, in the order of the types' names.
    """
    types = types_of(nodes)
    bounds = zip(nodes, bounds_of(job.limits, nodes), strict=True)
    open_to_it = [(types.index(node.node_type), low, high) for node, (low, high) in bounds if low <= high]
    orders = (
        sorted(open_to_it, key=lambda one: (-room[one[0]], one[0], -one[2], one[1])),
        sorted(open_to_it, key=lambda one: (one[1], -room[one[0]], one[0], -one[2])),
    )
    found = set()
    for count in counts:
        uses = (_filled(job, order, count, len(types)) for order in orders)
        use = next((use for use in uses if use is not None and np.count_nonzero(use) > 1), None)
        if use is not None:
            found.add(use)
    return found


def _filled(
    job: JobInfo, order: Sequence[tuple[int, int, int]], replicas: int, types: int
) -> tuple[int, ...] | None:
    """Return the slots of each type if nodes (type, fewest, most) are filled in order; None: no room."""
    use, used, few = [0] * types, 0, max(job.min_nodes, 2)
    for i, (kind, low, high) in enumerate(order):
        if replicas == 0 or used == job.max_nodes:
            break
        later = max(few - used - 1, 0)  # further nodes that are needed
        taken = min(high, replicas - sum(one[1] for one in order[i + 1 : i + 1 + later]))
        if taken >= low:
            use[kind], replicas, used = use[kind] + taken, replicas - taken, used + 1
    return tuple(use) if replicas == 0 and used >= few else None


def _of_nodes(
    jobs: Sequence[JobInfo],
    node_slots: Sequence[int],
    had: Sequence[Allocation],
    least: set[int],
    small: bool,
) -> list[tuple[int, bool]]:
    """Return the sizes on nodes with these slots, those of one node first."""
    slots = sorted(node_slots, reverse=True)
    total, largest = sum(slots), max(slots, default=0)
    most = min(total, max((job.max_replicas for job in jobs), default=0))
    if small:
        one, many = set(range(1, largest + 1)), set(range(2, most + 1))
    else:
        one = {1 << i for i in range(largest.bit_length())} | set(slots)
        many = {int(x) for x in np.cumsum(slots) if x <= most}
    special = {job.min_replicas for job in jobs} | {job.requested_replicas or 0 for job in jobs}
    special |= {min(job.max_replicas, total) for job in jobs} | least
    one |= {x for x in special if 0 < x <= largest}
    many |= {x for x in special if 1 < x <= most and x > largest}
    for job in jobs:
        if job.min_nodes > 1:
            many |= set(range(job.min_nodes, min(job.min_nodes * largest, most) + 1))
    for found in had:
        (many if len(found) > 1 else one).add(sum(found.values()))
    singles, several = sorted(one - {0}), sorted(many - {0, 1})
    return [(size, False) for size in singles] + [(size, True) for size in several]


def _is_mixed(found: Allocation, type_of: Mapping[str, str]) -> bool:
    return len({type_of[node] for node in found if node in type_of}) > 1


def _split(found: Allocation, type_of: Mapping[str, str], types: Sequence[str]) -> tuple[int, ...]:
    """Return the slots of each type that an allocation uses."""
    return tuple(sum(r for node, r in found.items() if type_of.get(node) == name) for name in types)


def _fill(replicas: int, order: Sequence[int], room: Sequence[int]) -> tuple[int, ...]:
    """Return the slots of each type if types are filled in `order`."""
    use = [0] * len(room)
    for kind in order:
        use[kind] = min(replicas, room[kind])
        replicas -= use[kind]
    return tuple(use)
