"""Solve sizes and places together as one integer program, for small clusters.

Sizes that were chosen by slots alone may find no room: nodes of several sizes, jobs that cannot use every
node, odd numbers of replicas. With few jobs and nodes, HiGHS (`scipy.optimize.milp`) finds the exact
solution. Its variables, for job j and node n, are:

    keep[j]        the job keeps its allocation
    one[j,n,s]     the job has s replicas, all on node n
    many[j,c]      the job has the number of replicas of column c, on several nodes
    uses[j,n]      the job uses node n as one of several
    on[j,n]        number of its replicas there

Its constraints are one choice per job, the slots of the nodes, the limits of a job on a node, and at most one
multi-node job per node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from adaptdl_elastic.autoscaler.policy.policy_types import Allocation
from adaptdl_elastic.autoscaler.policy.solver.placement import Board, limit
from adaptdl_elastic.autoscaler.policy.solver.tables import Tables

Array = NDArray[np.float64]

SMALL_PROGRAM, LARGE_PROGRAM = 250, 1500
"""Numbers of variables up to which solving takes milliseconds, or about a second."""


@dataclass
class _Program:
    """The variables and rows of a program under construction."""

    worth: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    rows: list[dict[int, float]] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)

    def variable(self, worth: float = 0.0, upper: float = 1.0) -> int:
        self.worth.append(worth)
        self.upper.append(upper)
        return len(self.worth) - 1

    def row(self, terms: dict[int, float], low: float, high: float) -> None:
        self.rows.append(terms)
        self.low.append(low)
        self.high.append(high)


@dataclass
class _Job:
    """The variables of one job."""

    keep: int | None = None
    one: dict[int, tuple[str, int]] = field(default_factory=dict)  # by variable: (node, replicas)
    on: dict[str, int] = field(default_factory=dict)  # by node: variable


def solve_exactly(
    tables: Tables, worths: Array, board: Board, limit_to: int, seconds: float
) -> dict[str, dict[str, int]] | None:
    """Return the place of every job; None if there are too many variables or too little time.

    Args:
        tables: The values of all sizes for all jobs.
        worths: The value of each size of each job, shape (jobs, sizes); 0 where the size is not allowed.
        board: The jobs that stay in any case.
        limit_to: Largest number of variables.
        seconds: Time limit.
    """
    nodes = [node.name for node in board.nodes]
    sizes = int((~tables.sizes.several).sum()) + 2
    if len(tables.jobs) * (len(nodes) * sizes + len(tables.sizes.replicas)) > limit_to or not nodes:
        return None
    program, jobs = _Program(), []
    holds: dict[str, dict[int, float]] = {node: {} for node in nodes}
    spans: dict[str, dict[int, float]] = {node: {} for node in nodes}
    # by name, so that equal solutions do not depend on the order of the jobs
    for row, job in sorted(enumerate(tables.jobs), key=lambda numbered: numbered[1].name):
        jobs.append((job, _add_job(program, tables, worths, board, row, holds, spans)))
    for node in nodes:
        taken = sum(1 for name in board.here[node] if board.spans(name))
        program.row(holds[node], -np.inf, board.free[node])
        program.row(spans[node], -np.inf, 1 - taken)
    found = _run(program, seconds)
    if found is None:
        return None
    # nodes with replicas that stay come first, so that one of these keeps rank 0
    placed = {name: dict(allocation) for name, allocation in board.placed.items()}
    for job, variables in jobs:
        allocation = _read(found, variables, board.current.get(job.name, {}))
        if allocation:
            before = board.current.get(job.name, {})
            allocation = {n: allocation[n] for n in sorted(allocation, key=lambda n: n not in before)}
            placed[job.name] = allocation
    return placed


def _add_job(
    program: _Program,
    tables: Tables,
    worths: Array,
    board: Board,
    row: int,
    holds: dict[str, dict[int, float]],
    spans: dict[str, dict[int, float]],
) -> _Job:
    job, mine, choice = tables.jobs[row], _Job(), {}
    kept = tables.kept[row]
    if kept >= 0:
        mine.keep = program.variable(float(tables.kept_value[row]))
        choice[mine.keep] = 1.0
        before = board.current[job.name]
        for node, replicas in before.items():
            holds[node][mine.keep] = replicas
            if len(before) > 1:
                spans[node][mine.keep] = 1.0
    kinds = {node.name: tables.sizes.types.index(node.node_type) for node in board.nodes}
    many: dict[int, dict[int, float]] = {}  # by type, then by variable: replicas
    for column in np.flatnonzero(worths[row] > 0):
        replicas, worth = int(tables.sizes.replicas[column]), float(worths[row, column])
        worth = float(tables.changed[row, column]) if column == kept else worth
        kind = int(tables.sizes.kinds[column])
        if worth <= 0 or kind == tables.sizes.mixed:
            continue
        if tables.sizes.several[column]:
            variable = program.variable(worth)
            many.setdefault(kind, {})[variable] = replicas
            choice[variable] = 1.0
            continue
        for node in (node for node in holds if kinds[node] == kind):
            least, most = limit(job, node)
            if least <= replicas <= min(most, board.free[node]):
                variable = program.variable(worth)
                mine.one[variable] = node, replicas
                holds[node][variable] = replicas
                choice[variable] = 1.0
    program.row(choice, -np.inf, 1)
    for kind, sizes in many.items():
        nodes = [node for node in holds if kinds[node] == kind]
        _add_several(program, tables, board, row, nodes, mine, sizes, holds, spans)
    return mine


def _add_several(
    program: _Program,
    tables: Tables,
    board: Board,
    row: int,
    nodes: Sequence[str],
    mine: _Job,
    many: dict[int, float],
    holds: dict[str, dict[int, float]],
    spans: dict[str, dict[int, float]],
) -> None:
    job = tables.jobs[row]
    uses_here, on_here = {}, {}
    for node in nodes:
        least, most = limit(job, node)
        most = min(most, board.free[node])
        if most < least:
            continue
        uses, on = program.variable(), program.variable(0.0, most)
        mine.on[node] = on
        uses_here[node], on_here[node] = uses, on
        holds[node][on] = 1.0
        spans[node][uses] = 1.0
        program.row({on: 1.0, uses: -float(most)}, -np.inf, 0)
        program.row({on: 1.0, uses: -float(max(least, 1))}, 0, np.inf)
    program.row({**dict.fromkeys(on_here.values(), 1.0), **{v: -r for v, r in many.items()}}, 0, 0)
    used = dict.fromkeys(uses_here.values(), 1.0)
    program.row({**used, **dict.fromkeys(many, -float(max(job.min_nodes, 2)))}, 0, np.inf)
    program.row({**used, **dict.fromkeys(many, -float(job.max_nodes or len(nodes)))}, -np.inf, 0)


def _run(program: _Program, seconds: float) -> Array | None:
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import lil_matrix

    if not program.worth:
        return None  # there is nothing to choose from
    matrix = lil_matrix((len(program.rows), len(program.worth)))
    for i, terms in enumerate(program.rows):
        for variable, factor in terms.items():
            matrix[i, variable] = factor
    result = milp(
        -np.array(program.worth) / max(program.worth, default=1.0),
        integrality=np.ones(len(program.worth)),
        bounds=Bounds(0, np.array(program.upper)),
        constraints=LinearConstraint(matrix.tocsr(), program.low, program.high),
        options={"time_limit": seconds, "mip_rel_gap": 1e-6},
    )
    return None if result.x is None else np.round(result.x)


def _read(found: Array, mine: _Job, before: Allocation) -> dict[str, int]:
    if mine.keep is not None and found[mine.keep] > 0:
        return dict(before)
    for variable, (node, replicas) in mine.one.items():
        if found[variable] > 0:
            return {node: replicas}
    return {node: int(found[on]) for node, on in mine.on.items() if found[on] > 0}
