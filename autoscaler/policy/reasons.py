"""Explain each job's allocation in one sentence with numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from adaptdl_elastic.autoscaler.policy import objective
from adaptdl_elastic.autoscaler.policy.policy_types import (
    Allocation,
    Decision,
    JobInfo,
    PolicySettings,
    Reason,
)
from adaptdl_elastic.rendezvous.text import pluralize

if TYPE_CHECKING:
    from adaptdl_elastic.autoscaler.policy.solver.tables import Tables


def explain(
    decision: Decision,
    jobs: Sequence[JobInfo],
    pinned: Mapping[str, str],
    tables: Tables,
    targets: Sequence[int | None],
    before: Mapping[str, Allocation],
    now: float,
    settings: PolicySettings,
) -> dict[str, Reason]:
    """Return a reason for each job; `pinned` holds the reasons of the jobs that keep what they have."""
    rows = {job.name: row for row, job in enumerate(tables.jobs)}
    given = {}
    for job in jobs:
        after = decision.allocations[job.name]
        if job.name in decision.pending:
            given[job.name] = Reason(f"pending: {decision.pending[job.name]}")
        elif job.name in pinned:
            given[job.name] = Reason(
                f"keeps its {pluralize(sum(after.values()), 'replica')}: {pinned[job.name]}"
            )
        else:
            row = rows[job.name]
            target = targets[row]
            wanted = None if target is None else int(tables.sizes.replicas[target])
            given[job.name] = _reason(job, row, tables, wanted, before[job.name], after, now, settings)
    return given


def _size(allocation: Allocation, tables: Tables) -> str:
    count = pluralize(sum(allocation.values()), "replica")
    sizes = tables.sizes
    kind = sizes.kind(allocation)
    several = len(sizes.types) > 1 and allocation
    names = {sizes.type_of[node] for node in allocation if node in sizes.type_of} - {""}
    mixed = " and ".join(sorted(names))
    name = "" if not several else mixed if kind == sizes.mixed else sizes.types[kind]
    where = f"{name} node" if name else "node"
    if len(allocation) > 1:
        return f"{count} on {pluralize(len(allocation), where)}"
    return f"{count} on a {where}" if name else count


def _reason(
    job: JobInfo,
    row: int,
    tables: Tables,
    wanted: int | None,
    before: Allocation,
    after: Allocation,
    now: float,
    settings: PolicySettings,
) -> Reason:
    had, has = _goodput(tables, row, before), _goodput(tables, row, after)
    pause = settings.pause(job.pause)
    if job.move_pause is not None and before and after and set(before).isdisjoint(after):
        pause = job.move_pause
    if len(after) > 1:
        pause = max(pause, job.link_pause)
    cost = pause if after and before and dict(after) != dict(before) else 0.0
    text = _sentence(job, tables, before, after, wanted, had, has, cost, now, settings)
    one_more = _next_larger(tables, row, sum(after.values()))
    return Reason(text, goodput=has, one_more=one_more, wanted=wanted)


def _sentence(
    job: JobInfo,
    tables: Tables,
    before: Allocation,
    after: Allocation,
    wanted: int | None,
    had: float | None,
    has: float | None,
    pause: float,
    now: float,
    settings: PolicySettings,
) -> str:
    if not after:
        waited = f" (waiting for {now - job.waiting_since:.0f} s)" if job.waiting_since is not None else ""
        return f"the slots are worth more to other jobs{waited}"
    size = _size(after, tables)
    if job.requested_replicas is not None:
        return f"{size}: {job.fixed_because}" if job.fixed_because else f"{size}, as requested"
    if job.model is None:
        return f"{size} until its goodput has been measured"
    if dict(before) == dict(after):
        goodput = f"goodput {has:.4g} samples/s with {size}" if has is not None else size
        return f"{goodput}: no change pays for its {_pause(job, settings)}"
    if has is None:  # a size that is not considered, which it got where it was moved to
        return f"{size}: moved to make room"
    if not before or not had:
        return f"goodput {has:.4g} samples/s with {size}"
    change = f"goodput {had:.4g} → {has:.4g} samples/s ({100 * (has / had - 1):+.0f} %) with {size}"
    # when the samples lost in the pause have been made up for, if the job has not ended before
    paid = pause * has / (has - had) if has > had else math.inf
    if paid <= pause + objective.remaining_work(job) / has:
        return f"{change} pays the {pause:.3g} s pause within {paid:.1f} s"
    if wanted is not None and sum(before.values()) < sum(after.values()) < wanted:
        return f"{change}: on the way to {pluralize(wanted, 'replica')}"
    if sum(before.values()) == sum(after.values()):
        return f"{change}: moved to make room"
    return change if has > had else f"{change}: the slots are worth more to other jobs"


def _pause(job: JobInfo, settings: PolicySettings) -> str:
    pause = settings.pause(job.pause)
    away = f" ({job.link_pause:.3g} s to another node)" if job.link_pause > pause else ""
    return f"{pause:.3g} s pause{away}"


def _goodput(tables: Tables, row: int, allocation: Allocation) -> float | None:
    column = tables.sizes.find(allocation)
    return None if column is None else float(tables.goodput[row, column]) or None


def _next_larger(tables: Tables, row: int, count: int) -> float | None:
    """Return the predicted goodput at the next larger size that is considered."""
    sizes, goodput = tables.sizes.replicas, tables.goodput[row]
    larger = sizes[(sizes > count) & (goodput > 0)]
    return float(goodput[sizes == larger.min()].max()) if larger.size else None
