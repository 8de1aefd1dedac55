"""Place replicas on nodes: keep jobs where they are, and move small ones to make room for large ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaptdl_elastic.autoscaler.policy.policy_types import Allocation, JobInfo, NodeInfo, NodeLimit

_ANY, _NONE = NodeLimit(), NodeLimit(1, 0)
_MOST_SLOTS = 1 << 32  # more than a node has


def share_limits(jobs: Sequence[JobInfo], nodes: Sequence[NodeInfo]) -> list[JobInfo]:
    """Return the jobs with one mapping for all limits that are equal on these nodes.

    So what follows from limits is computed once, and not for each job.
    """
    names = [node.name for node in nodes]
    known: dict[tuple[NodeLimit | None, ...], Mapping[str, NodeLimit]] = {}
    limits = [j.limits and known.setdefault(tuple(map(j.limits.get, names)), j.limits) for j in jobs]
    return [replace(job, limits=shared) for job, shared in zip(jobs, limits, strict=True)]


def bounds_of(limits: Mapping[str, NodeLimit] | None, nodes: Sequence[NodeInfo]) -> list[tuple[int, int]]:
    """Return the fewest and the most replicas on each node; the most is less where a job may have none."""
    if limits is None:
        return [(1, node.slots) for node in nodes]
    bounds = ((node.slots, limits.get(node.name, _NONE)) for node in nodes)
    return [(max(low, 1), min(high, slots)) for slots, (low, high) in bounds]


def limit(job: JobInfo, node: str) -> NodeLimit:
    """Return the limits for replicas of `job` on `node`; the largest number is 0 if it may have none."""
    return _ANY if job.limits is None else job.limits.get(node, _NONE)


@dataclass(frozen=True)
class Want:
    """A request to place a number of replicas of a job, on one node or on several."""

    job: JobInfo
    replicas: int
    several: bool
    node_type: str | None = None  # type of its nodes; None: any
    # by type: the slots with which a size on several types was chosen; empty for a size on one type
    uses: Mapping[str, int] = field(default_factory=dict)


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
        self._evictable = np.zeros_like(self._room)  # slots of movable jobs
        self._spanning = np.zeros_like(self._room)  # number of multi-node jobs
        self._known: dict[Hashable, NDArray[Any]] = {}  # what `_facts` has returned

    def copy(self) -> Board:
        """Return a copy for trials; the jobs on it cannot be moved."""
        other = Board(self.nodes, self.current, stable_wanted=self.stable_wanted)
        other._known = self._known
        for job, allocation in self.placed.items():
            other.put(job, allocation)
        return other

    def put(self, job: str, allocation: Mapping[str, int]) -> None:
        """Place a job."""
        self.placed[job] = dict(allocation)
        for node, replicas in allocation.items():
            self.here[node][job] = replicas
        self._count(job, allocation, 1)

    def let_move(self, job: str, cost: float) -> None:
        """Allow to move a placed job, at a cost."""
        self.movable[job] = cost
        for node, replicas in self.placed[job].items():
            self._evictable[self._order[node]] += replicas

    def _count(self, job: str, allocation: Allocation, sign: int) -> None:
        for node, replicas in allocation.items():
            here = self._order[node]
            self.free[node] -= sign * replicas
            self._room[here] -= sign * replicas
            self._evictable[here] += sign * replicas * (job in self.movable)
            self._spanning[here] += sign * (len(allocation) > 1)

    def is_open(self, want: Want, node: str) -> bool:
        """Return whether the node is of the type that is wanted."""
        return want.node_type is None or self._info[node].node_type == want.node_type

    def _facts(self, want: Want) -> NDArray[Any]:
        """Return the fewest and the most replicas on each node, and the job's dislike, shape (3, nodes)."""
        job = want.job
        kind = want.node_type, job.avoid_preemptible_nodes
        key = *kind, id(job.limits)
        if kind not in self._known:
            nodes = [(self.is_open(want, node.name), *self.dislike(job, node.name)) for node in self.nodes]
            self._known[kind] = np.array(nodes, dtype=int).reshape(-1, 3).T
        if key not in self._known:
            is_open, at_risk, disliked = self._known[kind]
            low, high = np.array(bounds_of(job.limits, self.nodes), dtype=int).reshape(-1, 2).T
            self._known[key] = np.array((low, high * is_open, 2 * at_risk + disliked))
        return self._known[key]

    def _is_new(self, before: Allocation) -> NDArray[Any]:
        """Return for each node 1, or 0 if it is one of the job's own."""
        new = np.ones_like(self._room)
        new[[self._order[node] for node in before if node in self._order]] = 0
        return new

    def type_of(self, allocation: Allocation) -> str | None:
        """Return the type of an allocation's nodes; None if they are of several types."""
        types = {self._info[node].node_type for node in allocation}
        return types.pop() if len(types) == 1 else None

    def take(self, job: str) -> dict[str, int]:
        """Remove a job, and return its allocation."""
        allocation = self.placed.pop(job)
        self._count(job, allocation, -1)
        for node in allocation:
            del self.here[node][job]
        return allocation

    def spans(self, job: str) -> bool:
        """Return whether the placed job is on several nodes."""
        return len(self.placed[job]) > 1

    def has_spanning(self, node: str) -> bool:
        """Return whether a multi-node job is on the node."""
        return bool(self._spanning[self._order[node]])

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

    def single(self, want: Want, before: Allocation) -> str | None:
        """Return the best node that has room: the job's own one, else the fullest one."""
        low, high, dislike = self._facts(want)
        fits = np.flatnonzero((low <= want.replicas) & (want.replicas <= np.minimum(high, self._room)))
        key = ((2 * dislike + self._is_new(before)) * _MOST_SLOTS + self._room)[fits]
        return self.nodes[int(fits[np.argmin(key)])].name if fits.size else None

    def several(self, want: Want, before: Allocation) -> dict[str, tuple[int, int]]:
        """Return (most, fewest) replicas on nodes from which no job has to move, the best nodes first."""
        low, high, dislike = self._facts(want)
        room = np.minimum(high, self._room)
        settled = (self._evictable == 0) | (high <= self._room)
        fits = np.flatnonzero((room >= low) & (self._spanning == 0) & settled)
        key = ((dislike * _MOST_SLOTS - room) * 2 + self._is_new(before))[fits]
        best = fits[np.argsort(key, kind="stable")][: None if want.uses else want.replicas]
        return {self.nodes[i].name: (int(room[i]), int(low[i])) for i in best}

    def shared(self, want: Want, rooms: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
        """Return the rooms without slots of a type beyond those with which the size was chosen."""
        left, found = dict(want.uses), {}
        for node, (room, low) in rooms.items():
            kind = self._info[node].node_type
            most = min(room, left.get(kind, 0))
            if most >= max(low, 1):
                found[node] = most, low
                left[kind] -= most
        return found

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
    free_node = board.single(want, before)
    if free_node is not None:
        return {free_node: want.replicas}, []
    best: tuple[tuple[float, ...], str, list[str]] | None = None
    for node, free in board.free.items():
        least, most = limit(job, node)
        if not (board.is_open(want, node) and least <= want.replicas <= most):
            continue
        evicted = _make_room(board, node, want.replicas - free, want.replicas)
        if evicted is None:
            continue
        cost = sum(board.movable[name] for name in evicted)
        key = (cost, len(evicted), *board.dislike(job, node), node not in before, free, board.position(node))
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
    idle = board.several(want, before)
    found = _fill(board.shared(want, idle) if want.uses else idle, want)
    if found is not None:
        return found, []
    rooms, keys = dict[str, tuple[int, int]](), dict[str, tuple[float, ...]]()
    for node, free in board.free.items():
        if board.has_spanning(node) or not board.is_open(want, node):
            continue
        least, most = limit(job, node)
        evictable = [n for n in board.here[node] if n in board.movable]
        room = min(free + sum(board.here[node][n] for n in evictable), most)
        if room >= least:
            cost = sum(board.movable[n] for n in evictable) if room > free else 0.0
            rooms[node] = room, least
            keys[node] = cost, room > free, *board.dislike(job, node), -min(free, most), node not in before
    # the second order prefers nodes with the most room, even if jobs must move
    by_cost = sorted(rooms, key=keys.__getitem__)
    by_room = sorted(rooms, key=lambda n: (-rooms[n][0], keys[n][0], keys[n][-1]))
    ordered = [{node: rooms[node] for node in order} for order in (by_cost, by_room)]
    # a job that uses other types than it was chosen with takes slots that other jobs were chosen with
    ways = [(_fill, board.shared(want, these)) for these in ordered]
    ways += [(how, these) for these in ordered for how in (_fill, _even)]
    found = next((found for how, these in ways if (found := how(these, want)) is not None), None)
    evicted: list[str] = []
    for node, replicas in (found or {}).items():
        leaving = _make_room(board, node, replicas - board.free[node], replicas + 1_000_000)
        if leaving is None:
            return None, []
        evicted += leaving
    return found, evicted


def _fill(rooms: Mapping[str, tuple[int, int]], want: Want) -> dict[str, int] | None:
    """Fill nodes in order; leave enough replicas for the last ones to get their minimum.

    Args:
        rooms: The most and the fewest replicas on each node.
        want: The request for nodes.
    """
    few, most = max(want.job.min_nodes, 2), want.job.max_nodes
    found: dict[str, int] = {}
    left, least = want.replicas, [low for _, low in rooms.values()]
    for i, (node, (room, low)) in enumerate(rooms.items()):
        if left <= 0 or (most is not None and len(found) >= most):
            break
        later = max(few - len(found) - 1, 0)
        reserve = sum(least[i + 1 : i + 1 + later])
        taken = min(room, left - reserve)
        if taken < low:
            continue
        found[node] = taken
        left -= taken
    return found if left <= 0 and len(found) >= few else None


def _even(rooms: Mapping[str, tuple[int, int]], want: Want) -> dict[str, int] | None:
    """Spread replicas evenly over few nodes, where filling leaves less than a node's minimum."""
    few, most = max(want.job.min_nodes, 2), min(want.job.max_nodes or len(rooms), len(rooms))
    for count in range(few, most + 1):
        share, extra = divmod(want.replicas, count)
        if share == 0:
            return None
        fitting = [n for n, (room, low) in rooms.items() if low <= share <= room]
        roomy = [n for n in fitting if rooms[n][0] >= share + 1][:extra]
        rest = [n for n in fitting if n not in roomy][: count - len(roomy)]
        if len(roomy) == extra and len(roomy) + len(rest) == count:
            return {**dict.fromkeys(roomy, share + 1), **dict.fromkeys(rest, share)}
    return None
