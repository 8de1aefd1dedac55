"""Place replicas on nodes: keep jobs where they are, and move small ones to make room for large ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaptdl_elastic.autoscaler.policy.policy_types import Allocation, JobInfo, NodeInfo, NodeLimit

_ANY = NodeLimit()


def rooms_of(job: JobInfo, nodes: Sequence[NodeInfo]) -> list[tuple[int, int]]:
    """Return (fewest, most) replicas of `job` for each node that can take any."""
    if job.limits is None:
        return [(1, node.slots) for node in nodes if node.slots > 0]
    bounds = ((node.slots, job.limits.get(node.name)) for node in nodes)
    rooms = [(max(b.min_slots, 1), min(b.max_slots, slots)) for slots, b in bounds if b is not None]
    return [(low, high) for low, high in rooms if low <= high]


def limit(job: JobInfo, node: str) -> NodeLimit | None:
    """Return the limits for replicas of `job` on `node`; None if the node may have none."""
    return _ANY if job.limits is None else job.limits.get(node)


@dataclass(frozen=True)
class Want:
    """A request to place a number of replicas of a job, on one node or on several."""

    job: JobInfo
    replicas: int
    several: bool
    node_type: str | None = None  # type of its nodes; None: any


@dataclass
class Board:
    """The placement under construction. Nodes that get nothing new are not on it."""

    nodes: Sequence[NodeInfo]
    current: Mapping[str, Allocation]
    free: dict[str, int] = field(init=False)
    here: dict[str, dict[str, int]] = field(init=False)  # by node, then by job: replicas
    # by job, then by node: replicas
    placed: dict[str, dict[str, int]] = field(init=False, default_factory=dict)
    movable: dict[str, float] = field(init=False, default_factory=dict)  # by job: cost of moving it
    moved: set[str] = field(init=False, default_factory=set)
    stable_wanted: bool = False  # whether some job prefers nodes that are not preemptible

    def __post_init__(self) -> None:
        self.free = {node.name: node.slots for node in self.nodes}
        self.here = {node.name: {} for node in self.nodes}
        self._info = {node.name: node for node in self.nodes}
        self._order = {node.name: i for i, node in enumerate(self.nodes)}
        # free slots, as an array
        self._room: NDArray[Any] = np.array([node.slots for node in self.nodes], dtype=int)
        self._alike = not any(node.at_risk or node.preemptible for node in self.nodes)
        self._types: dict[str | None, NDArray[np.bool_]] = {}  # by wanted type: which nodes are of it

    def copy(self) -> Board:
        """Return a copy for trials; the jobs on it cannot be moved."""
        other = Board(self.nodes, self.current, stable_wanted=self.stable_wanted)
        for job, allocation in self.placed.items():
            other.put(job, allocation)
        return other

    def put(self, job: str, allocation: Mapping[str, int]) -> None:
        """Place a job."""
        self.placed[job] = dict(allocation)
        for node, replicas in allocation.items():
            self.free[node] -= replicas
            self._room[self._order[node]] -= replicas
            self.here[node][job] = replicas

    def is_open(self, want: Want, node: str) -> bool:
        """Return whether the node is of the type that is wanted."""
        return want.node_type is None or self._info[node].node_type == want.node_type

    def _of_type(self, want: Want) -> NDArray[np.bool_]:
        """Return for each node whether it is of the type that is wanted."""
        if want.node_type not in self._types:
            self._types[want.node_type] = np.array([self.is_open(want, node.name) for node in self.nodes])
        return self._types[want.node_type]

    def type_of(self, allocation: Allocation) -> str | None:
        """Return the type of an allocation's nodes; None if they are of several types."""
        types = {self._info[node].node_type for node in allocation}
        return types.pop() if len(types) == 1 else None

    def take(self, job: str) -> dict[str, int]:
        """Remove a job, and return its allocation."""
        allocation = self.placed.pop(job)
        for node, replicas in allocation.items():
            self.free[node] += replicas
            self._room[self._order[node]] += replicas
            del self.here[node][job]
        return allocation

    def spans(self, job: str) -> bool:
        """Return whether the placed job is on several nodes."""
        return len(self.placed[job]) > 1

    def shared_by_spanning(self, node: str, job: str) -> bool:
        """Return whether a multi-node job other than `job` is on the node."""
        return any(other != job and self.spans(other) for other in self.here[node])

    def dislike(self, job: JobInfo, node: str) -> tuple[int, ...]:
        """Return a sort key of nodes: a node with a smaller key is better for the job.

        Nodes at risk come last. Equal nodes are sorted by the job's preference for preemptible nodes.
        """
        info = self._info[node]
        if job.avoid_preemptible_nodes:
            kind = int(info.preemptible)
        else:
            kind = int(self.stable_wanted and not info.preemptible)
        return int(info.at_risk), kind

    def quick_single(self, want: Want, before: Allocation) -> str | None:
        """Return the job's own node if it has room, else the fullest one that has, if all nodes are alike."""
        replicas = want.replicas
        if want.job.limits is not None or not self._alike:
            return None
        for node in before:
            if self.free.get(node, 0) >= replicas and self.is_open(want, node):
                return node
        fits = np.flatnonzero((self._room >= replicas) & self._of_type(want))
        return self.nodes[int(fits[np.argmin(self._room[fits])])].name if fits.size else None

    def quick_several(self, want: Want, before: Allocation) -> dict[str, int] | None:
        """Return whole empty nodes with exactly enough slots, the job's own first, if all nodes are alike."""
        job, replicas = want.job, want.replicas
        if job.limits is not None or not self._alike:
            return None
        empty = [n.name for n in self.nodes if not self.here[n.name] and self.is_open(want, n.name)]
        found: dict[str, int] = {}
        for node in sorted(empty, key=lambda name: name not in before) if before else empty:
            if len(found) == job.max_nodes or replicas <= 0:
                break
            if self.free[node] > replicas:
                return None
            found[node] = self.free[node]
            replicas -= self.free[node]
        return found if replicas == 0 and len(found) >= max(job.min_nodes, 2) else None

    def position(self, node: str) -> int:
        """Return the node's index in the given order, which breaks ties."""
        return self._order[node]


def place(board: Board, wants: Sequence[Want], jobs: Mapping[str, JobInfo]) -> list[Want]:
    """Place `wants` on the board, the largest first, and return those that found no room.

    A `movable` job on the board is moved when that makes room for a larger one. The placement never puts two
    multi-node jobs on one node, and never exceeds a node's slots or a job's limits.
    """
    failed = []
    queue = deque(sorted(wants, key=_size))
    while queue:
        want = queue.popleft()
        found, evicted = _find(board, want)
        if found is None:
            failed.append(want)
            continue
        for name in evicted:
            allocation = board.take(name)
            board.moved.add(name)
            moved_type = board.type_of(allocation)
            queue.append(Want(jobs[name], sum(allocation.values()), len(allocation) > 1, moved_type))
        if evicted:
            queue = deque(sorted(queue, key=_size))
        board.put(want.job.name, _ranked(found, board.current.get(want.job.name, {})))
    return failed


def _size(want: Want) -> tuple[bool, int, str]:
    return not want.several, -want.replicas, want.job.name


def _ranked(found: Mapping[str, int], before: Allocation) -> dict[str, int]:
    """Put the nodes that the job already has first, so that a replica that stays gets rank 0."""
    names = [node for node in before if node in found] + [node for node in found if node not in before]
    return {node: found[node] for node in names}


def _find(board: Board, want: Want) -> tuple[dict[str, int] | None, list[str]]:
    """Return an allocation for the job (None: there is none), and the jobs that have to move for it."""
    if want.several:
        return _find_several(board, want)
    job, before = want.job, board.current.get(want.job.name, {})
    quick = board.quick_single(want, before)
    if quick is not None:
        return {quick: want.replicas}, []
    best: tuple[tuple[float, ...], str, list[str]] | None = None
    for node, free in board.free.items():
        bound = limit(job, node)
        if bound is None or not bound.min_slots <= want.replicas <= bound.max_slots:
            continue
        if not board.is_open(want, node):
            continue
        evicted = _make_room(board, node, want.replicas - free, want.replicas)
        if evicted is None:
            continue
        cost = sum(board.movable[name] for name in evicted)
        key = (cost, *board.dislike(job, node), node not in before, free, board.position(node))
        if best is None or key < best[0]:
            best = key, node, evicted
    return ({best[1]: want.replicas}, best[2]) if best else (None, [])


def _make_room(board: Board, node: str, missing: int, size: int) -> list[str] | None:
    """Return movable single-node jobs below `size` replicas whose removal frees `missing` slots; or None."""
    if missing <= 0:
        return []
    small = [
        (-replicas, board.movable[name], name)
        for name, replicas in board.here[node].items()
        if name in board.movable and not board.spans(name) and replicas < size
    ]
    chosen: list[str] = []
    for replicas, _, name in sorted(small):
        if missing <= 0:
            break
        chosen.append(name)
        missing += replicas
    return chosen if missing <= 0 else None


def _find_several(board: Board, want: Want) -> tuple[dict[str, int] | None, list[str]]:
    """Place a job on few nodes, empty ones and its own first, each filled before the next."""
    job, before = want.job, board.current.get(want.job.name, {})
    quick = board.quick_several(want, before)
    if quick is not None:
        return quick, []
    rooms = {}
    for node in board.free:
        bound = limit(job, node)
        if bound is None or board.shared_by_spanning(node, job.name) or not board.is_open(want, node):
            continue
        evictable = [n for n in board.here[node] if n in board.movable]
        room = board.free[node] + sum(board.here[node][n] for n in evictable)
        room = min(room, bound.max_slots)
        if room >= bound.min_slots:
            cost = sum(board.movable[n] for n in evictable) if room > board.free[node] else 0.0
            rooms[node] = room, cost, bound
    by_room = sorted(
        rooms,
        key=lambda n: (
            rooms[n][1],
            *board.dislike(job, n),
            -min(board.free[n], rooms[n][2].max_slots),
            n not in before,
            board.position(n),
        ),
    )
    few = max(job.min_nodes, 2)
    found = _fill(by_room, rooms, want.replicas, few, job.max_nodes)
    if found is None:  # else prefer nodes with the most room, even if jobs must move
        by_room.sort(key=lambda n: (-rooms[n][0], rooms[n][1], n not in before, board.position(n)))
        found = _fill(by_room, rooms, want.replicas, few, job.max_nodes)
    if found is None:
        return None, []
    evicted: list[str] = []
    for node, replicas in found.items():
        leaving = _make_room(board, node, replicas - board.free[node], replicas + 1_000_000)
        if leaving is None:
            return None, []
        evicted += leaving
    return found, evicted


def _fill(
    order: Sequence[str],
    rooms: Mapping[str, tuple[int, float, NodeLimit]],
    replicas: int,
    few: int,
    most: int | None,
) -> dict[str, int] | None:
    """Fill nodes in order; leave enough replicas for the last ones to get their minimum."""
    found: dict[str, int] = {}
    left = replicas
    for i, node in enumerate(order):
        room, _, bound = rooms[node]
        if left <= 0 or (most is not None and len(found) >= most):
            break
        later = max(few - len(found) - 1, 0)
        reserve = sum(rooms[n][2].min_slots for n in order[i + 1 : i + 1 + later])
        taken = min(room, left - reserve)
        if taken < bound.min_slots:
            continue
        if taken < left and left - taken - reserve == 0 and not later:
            taken = left
        found[node] = taken
        left -= taken
    if left > 0 or len(found) < few:
        return _even(order, rooms, replicas, few, most)
    return found


def _even(
    order: Sequence[str],
    rooms: Mapping[str, tuple[int, float, NodeLimit]],
    replicas: int,
    few: int,
    most: int | None,
) -> dict[str, int] | None:
    """Spread replicas evenly over few nodes, where filling leaves less than a node's minimum."""
    for count in range(few, min(most or len(order), len(order)) + 1):
        share, extra = divmod(replicas, count)
        if share == 0:
            return None
        fitting = [n for n in order if rooms[n][2].min_slots <= share <= rooms[n][0]]
        roomy = [n for n in fitting if rooms[n][0] >= share + 1][:extra]
        rest = [n for n in fitting if n not in roomy][: count - len(roomy)]
        if len(roomy) == extra and len(roomy) + len(rest) == count:
            return {**dict.fromkeys(roomy, share + 1), **dict.fromkeys(rest, share)}
    return None
