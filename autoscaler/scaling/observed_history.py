"""Keep account of costs, failures and interruptions from one observation to the next. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TypeVar

from adaptdl_elastic.autoscaler.providers.base import Instance, InstanceState, Pool, Signal, SignalKind
from adaptdl_elastic.autoscaler.scaling.economics import HOUR, ScalingSettings
from adaptdl_elastic.autoscaler.scaling.pool_account import FORGET_TURN_HOURS, given_back, lost
from adaptdl_elastic.autoscaler.scaling.scaling_types import (
    Billed,
    InVain,
    Known,
    Memory,
    NodeUse,
    Observation,
    PoolMemory,
)

T = TypeVar("T", Memory, Known, PoolMemory, Billed, InVain)

_REMOVED = "its group removes it"
# Weights of past interruptions fall to 1/e within so many hours.
FORGET_HOURS = 24.0
# Bills are kept for so many seconds after the end of a job or instance.
KEEP_BILLS = 86400.0
# What an instance has cost counts for the budget for so many seconds.
_FORGET_PRICE = 86400.0
# A released instance counts as gone for so long, though the provider may still list it.
_STALE_LISTING_SECONDS = 60.0
# An instance that the provider lists so late after its launch is still charged from its launch.
_LATE_LISTING_SECONDS = 60.0
# A new spot pool is credited with so many node hours without an interruption.
PRIOR_HOURS = 6.0


def shifted(memory: Memory, seconds: float) -> Memory:
    """Return the memory for a clock that was set forward by `seconds`.

    Times given by the cloud (deadlines, failures) stay as they are.
    """

    def each(entries: Mapping[str, T]) -> dict[str, T]:
        return {name: _moved(entry, seconds) for name, entry in entries.items()}

    return replace(
        _moved(memory, seconds),
        known=each(memory.known),
        pools=each(memory.pools),
        billed=each(memory.billed),
        vain=each(memory.vain),
        job_runs={name: (run, last + seconds) for name, (run, last) in memory.job_runs.items()},
    )


def _moved(entry: T, seconds: float) -> T:
    """Return `entry` with `seconds` added to each of its fields of the type `Moment`."""
    names = [field.name for field in fields(entry) if str(field.type).startswith("Moment")]
    times = {name: getattr(entry, name) for name in names}
    return replace(entry, **{name: at + seconds for name, at in times.items() if at is not None})


def not_done(memory: Memory, instance: str) -> Memory:
    """Return the memory after the release of `instance` failed, so that it is tried again."""
    entry = memory.known.get(instance)
    if entry is None:
        return memory
    return replace(memory, known={**memory.known, instance: replace(entry, released=None)})


def remember(memory: Memory, seen: Observation, settings: ScalingSettings) -> Memory:
    """Return the memory after this observation."""
    if memory.updated is not None and seen.now < memory.updated:  # written by a clock ahead of ours
        memory = shifted(memory, seen.now - memory.updated)
    memory = account(_forget(memory, seen), seen)
    memory = _beyond(_meet(memory, seen, settings), memory.known, seen)
    memory = _miss(memory, seen, settings)
    memory = _hear(memory, seen)
    memory = _fail(memory, seen, settings)
    for pool in seen.capacity.pools:
        memory = _trouble(memory, pool, seen, settings)
    return replace(memory, updated=seen.now)


def account(memory: Memory, seen: Observation) -> Memory:
    """Add the costs since the last observation, by pool and by job."""
    elapsed = max(0.0, seen.now - memory.updated) / HOUR if memory.updated is not None else 0.0
    fading = math.exp(-elapsed / FORGET_HOURS)
    pools = {
        name: replace(
            pool,
            recent_hours=pool.recent_hours * fading,
            recent_interruptions=pool.recent_interruptions * fading,
            turns=pool.turns * math.exp(-elapsed / FORGET_TURN_HOURS),
        )
        for name, pool in memory.pools.items()
    }
    jobs, total, short = dict(memory.job_costs), memory.cost, lacking(seen, memory)
    billed = {name: entry for name, entry in memory.billed.items() if entry.until > seen.now - KEEP_BILLS}
    start = seen.now if memory.updated is None else memory.updated
    for instance in (*seen.capacity.instances, *seen.capacity.ended):
        billed[instance.id], elapsed, cost = _bill(instance, memory.billed.get(instance.id), start, seen)
        pool = pools.get(instance.pool, PoolMemory())
        if instance.hourly_price >= pool.highest_price or seen.now - pool.highest_seen > _FORGET_PRICE:
            pool = replace(pool, highest_price=instance.hourly_price, highest_seen=seen.now)
        recent = pool.recent_hours + (elapsed if instance.preemptible else 0.0)
        hours, spent = pool.hours + elapsed, pool.cost + cost
        pools[instance.pool] = replace(pool, hours=hours, cost=spent, recent_hours=recent)
        total += cost
        for job, share in shares(seen.nodes.get(instance.id), short).items():
            jobs[job] = jobs.get(job, 0.0) + cost * share
    return replace(memory, pools=pools, job_costs=jobs, cost=total, billed=billed)


def _bill(
    instance: Instance, before: Billed | None, start: float, seen: Observation
) -> tuple[Billed, float, float]:
    """Charge an instance from its launch to its end, as its provider reports them.

    An observation charges the time until its own moment. Price changes become known later: the prices are
    read every few minutes. So the time since the last reading is charged at the latest price, and charged
    again, with all changes, after the next reading.

    Args:
        instance: The instance, which may have ended.
        before: What of it was on the bill before; None: nothing.
        start: When the charge of an instance begins that was not on the bill and that was launched earlier.
        seen: The observation.

    Returns:
        What of the instance is on the bill now, hours added, cost added; these may be negative.
    """
    end = seen.now if instance.ended is None else instance.ended or (before.until if before else start)
    until = max(end, instance.launched)
    first = instance.launched if instance.launched > start - _LATE_LISTING_SECONDS else start
    old = before or Billed(min(until, first), min(until, first))
    # an instance that was stopped and started again has a new launch
    since = max(old.final, instance.launched)
    if instance.launched > old.until:  # what is on the bill of the time before its stop remains
        old = Billed(instance.launched, instance.launched)
    final = max(since, min(until, seen.capacity.priced))
    new = Billed(until, final, instance.cost(final, until))
    return new, (until - old.until) / 3600, instance.cost(since, final) + new.estimate - old.estimate


def _forget(memory: Memory, seen: Observation) -> Memory:
    """Drop bills of jobs that ended long ago, and of earlier runs under the same name."""
    wanted = {job.name for job in seen.jobs}
    runs: dict[str, tuple[str, float]] = {}
    for name in {*memory.job_costs, *wanted} if seen.runs else ():
        run, last = memory.job_runs.get(name, (seen.runs.get(name, ""), seen.now))
        if seen.runs.get(name) == run and (name in wanted or seen.now - last < KEEP_BILLS):
            runs[name] = (run, seen.now if name in wanted else last)
    if not seen.runs:
        return memory
    costs = {name: cost for name, cost in memory.job_costs.items() if name in runs}
    return replace(memory, job_costs=costs, job_runs=runs)


def hourly_costs(seen: Observation, memory: Memory) -> dict[str, float]:
    """Return for every job what its share of the nodes costs per hour, idle ones included."""
    short = lacking(seen, memory)
    hourly = {job.name: 0.0 for job in seen.jobs}
    for instance in seen.capacity.instances:
        for job, share in shares(seen.nodes.get(instance.id), short).items():
            hourly[job] = hourly.get(job, 0.0) + share * instance.hourly_price
    return hourly


def shares(node: NodeUse | None, short: Mapping[str, int]) -> dict[str, float]:
    """Return each job's share of a node's price, idle slots included, in proportion to its replicas.

    A node without a replica is shared by the jobs that lack replicas, in proportion to `short`.
    """
    counts = node.replicas if node is not None and node.busy else short
    total = sum(counts.values())
    return {job: count / total for job, count in counts.items() if count}


def lacking(seen: Observation, memory: Memory) -> dict[str, int]:
    """Return how many replicas each job lacks of what it should have, or needs to run at all."""
    running = running_replicas(seen)
    short = {
        job.name: max(memory.wanted.get(job.name, 0), job.min_replicas) - running.get(job.name, 0)
        for job in seen.jobs
    }
    return {name: count for name, count in short.items() if count > 0}


def running_replicas(seen: Observation) -> dict[str, int]:
    """Return the replicas of each job on all nodes of the provider."""
    found: dict[str, int] = {}
    for node in seen.nodes.values():
        for job, count in node.replicas.items():
            found[job] = found.get(job, 0) + count
    return found


def interruptions_per_hour(pool: PoolMemory) -> float:
    """Return the interruption rate of one spot node: recent ones over recent hours plus `PRIOR_HOURS`.

    So a single interruption counts little, and a pool that was interrupted often is tried again later.
    """
    return pool.recent_interruptions / (pool.recent_hours + PRIOR_HOURS)


def _meet(memory: Memory, seen: Observation, settings: ScalingSettings) -> Memory:
    """Record new instances, and instances that have become nodes."""
    known, pools = dict(memory.known), dict(memory.pools)
    there = Counter(i.pool for i in seen.capacity.instances if i.state is not InstanceState.LEAVING)
    partial = {pool.name for pool in seen.capacity.pools if there[pool.name] < pool.desired}
    elapsed = 0.0 if memory.updated is None else min(max(0.0, seen.now - memory.updated), settings.gap)
    for instance in seen.capacity.instances:
        entry = known.get(instance.id)
        pool = pools.get(instance.pool, PoolMemory())
        if entry is None:
            entry = Known(instance.pool, instance.preemptible, seen.now, bought_at=instance.hourly_price)
            pool = replace(pool, instances=pool.instances + 1)
            if instance.pool not in partial:
                pool = replace(pool, troubles=0)
        node = seen.nodes.get(instance.id)
        if node is None:
            if entry.registered is not None and entry.absent is None:
                entry = replace(entry, absent=seen.now)
        else:
            pool = _pool_of_node(pool, node, entry, instance, seen.now, settings)
            entry = _as_node(entry, node, seen.now, elapsed)
        if entry.registered is not None and not (node and node.busy) and entry.idle_since is None:
            entry = replace(entry, idle_since=seen.now)
        entry = _as_its_group_says(entry, instance, seen.now)
        known[instance.id] = replace(
            entry, hourly_price=instance.hourly_price, preemptible=instance.preemptible
        )
        pools[instance.pool] = pool
    return replace(memory, known=known, pools=pools)


def _beyond(memory: Memory, before: Mapping[str, Known], seen: Observation) -> Memory:
    """Mark instances that a group has launched beyond its desired size to replace nodes at risk.

    The recommendation may be seen later, or never. Instances that were there before are not marked: they
    are beyond the desired size because a person has lowered it. `before`: the known instances until now.
    """
    known = dict(memory.known)
    for pool in seen.capacity.pools:
        if not pool.replaces_at_risk:
            continue
        there = [
            i for i in seen.capacity.instances if i.pool == pool.name and counts(i, known[i.id], seen.now)
        ]
        more = max(0, len(there) - pool.desired)
        new = sorted((i for i in there if i.id not in before), key=lambda i: (-i.launched, i.id))
        for instance in new[:more]:
            known[instance.id] = replace(known[instance.id], early=True)
        for instance in there if not more else ():
            known[instance.id] = replace(known[instance.id], early=False)
    return replace(memory, known=known)


def counts(instance: Instance, entry: Known, now: float) -> bool:
    """Return whether the instance is neither leaving its group nor just released."""
    return instance.state is not InstanceState.LEAVING and not released(entry, now)


def released(entry: Known, now: float) -> bool:
    """Return whether the instance was released so recently that the provider's listing may be stale."""
    return entry.released is not None and now - entry.released < _STALE_LISTING_SECONDS


def _pool_of_node(
    pool: PoolMemory, node: NodeUse, before: Known, instance: Instance, now: float, settings: ScalingSettings
) -> PoolMemory:
    """Record in the pool that a node works, and how long its boot took. `before`: its entry until now."""
    if node.busy:
        pool = replace(pool, failures=0)
    since = instance.launched or before.first_seen
    if before.registered is None and now > since:
        took = min(now - since, settings.boot_timeout)
        pool = replace(pool, boot=took if pool.boot is None else (pool.boot + took) / 2)
    return pool


def _as_node(entry: Known, node: NodeUse, now: float, elapsed: float) -> Known:
    """Record that an instance is registered as a node, and whether it announced its end."""
    entry = replace(
        entry,
        registered=now,
        became=now if entry.became is None else entry.became,
        absent=None,
        worked=entry.worked or node.busy,
        work=entry.work + (elapsed if node.busy else 0.0),
        idle_since=None if node.busy else entry.idle_since,
        at_risk=entry.at_risk or node.at_risk,
    )
    if node.draining and node.announced and not entry.leaving:
        why = "it announced its end"
        entry = replace(entry, leaving=why, leaving_since=now, deadline=node.deadline, replace=True)
    return entry


def _as_its_group_says(entry: Known, instance: Instance, now: float) -> Known:
    """Record that the group removes the instance, or no longer does (as from Standby)."""
    if instance.state is InstanceState.LEAVING and not entry.leaving:
        return replace(entry, leaving=_REMOVED, leaving_since=now, replace=True)
    if entry.leaving == _REMOVED and instance.state is InstanceState.RUNNING:
        return replace(entry, leaving="", replace=False)
    return entry


def _miss(memory: Memory, seen: Observation, settings: ScalingSettings) -> Memory:
    """Record instances that are gone, as interrupted or as lost before they became nodes."""
    there = {instance.id for instance in seen.capacity.instances}
    looked = memory.updated is not None and seen.now - memory.updated <= settings.gap
    known = {name: entry for name, entry in memory.known.items() if name in there}
    pools, finished = dict(memory.pools), {i.id for i in seen.capacity.ended if i.finished}
    for name, entry in [item for item in memory.known.items() if item[0] not in there]:
        pool = pools.get(entry.pool, PoolMemory())
        if not looked:
            continue  # after a long gap the reason is unknown: a person may have emptied the group
        interrupted = entry.preemptible and entry.registered is not None
        ours = name in finished or (entry.leaving not in ("", _REMOVED) and entry.deadline is None)
        if interrupted and not ours:
            pools[entry.pool] = replace(
                pool, interruptions=pool.interruptions + 1, recent_interruptions=pool.recent_interruptions + 1
            )
        elif not interrupted and not entry.worked and not entry.leaving:
            pools[entry.pool] = _one_more_failure(pool, settings, "vanish before they do any work")
        if entry.registered is not None and not ours and (entry.worked or interrupted):
            pool = pools.get(entry.pool, pool)
            pools[entry.pool] = lost(pool, entry, seen.now, settings, known.values())
        elif ours and not entry.replace:
            pools[entry.pool] = given_back(pools.get(entry.pool, pool), entry)
    return replace(memory, known=known, pools=pools)


def _hear(memory: Memory, seen: Observation) -> Memory:
    """Record what the provider announced."""
    known = dict(memory.known)
    for signal in seen.signals:
        entry = known.get(signal.instance)
        if entry is not None:
            known[signal.instance] = _told(entry, signal, seen.now)
    return replace(memory, known=known)


def _told(entry: Known, signal: Signal, now: float) -> Known:
    if signal.kind is SignalKind.REBALANCE:
        return replace(entry, at_risk=True)
    if signal.kind is SignalKind.GONE:
        return entry
    deadline = (
        signal.deadline if entry.deadline is None else min(entry.deadline, signal.deadline or entry.deadline)
    )
    if entry.leaving:
        return replace(entry, deadline=deadline)
    return replace(entry, leaving=signal.reason, leaving_since=now, deadline=deadline, replace=True)


def _fail(memory: Memory, seen: Observation, settings: ScalingSettings) -> Memory:
    """Mark instances as leaving if they have been up for too long without being a node."""
    known, pools = dict(memory.known), dict(memory.pools)
    for instance in seen.capacity.instances:
        entry = known[instance.id]
        if (
            pools[entry.pool].closed
            and entry.registered is None
            and not (entry.leaving and not entry.replace)
        ):
            known[instance.id] = replace(
                entry,
                leaving="instances of its pool do not become nodes",
                leaving_since=seen.now,
                replace=False,
            )
            continue
        if entry.leaving or instance.id in seen.nodes or not _overdue(instance, entry, seen.now, settings):
            continue
        if entry.registered is not None and not seen.jobs:
            continue  # agents end with their jobs
        what = "did not become a node" if entry.registered is None else "has had no agent any more"
        text = f"{what} for {settings.boot_timeout:.0f} s"
        pool = pools[entry.pool]
        if not entry.worked:  # an instance that has worked is not defective; the job's script may have failed
            pool = _one_more_failure(pool, settings, f"had no agent for {settings.boot_timeout:.0f} s")
        else:
            pool = lost(pool, entry, seen.now, settings, known.values())
        pools[entry.pool] = pool
        known[instance.id] = replace(
            entry, leaving=f"it {text}", leaving_since=seen.now, replace=not pool.closed
        )
    return replace(memory, known=known, pools=pools)


def _overdue(instance: Instance, entry: Known, now: float, settings: ScalingSettings) -> bool:
    since = entry.first_seen if entry.registered is None else entry.registered
    return instance.state is not InstanceState.LEAVING and now - since > settings.boot_timeout


def _one_more_failure(pool: PoolMemory, settings: ScalingSettings, what: str) -> PoolMemory:
    failures = pool.failures + 1
    closed = pool.closed
    if failures > settings.max_replacements and not closed:
        closed = (
            f"{failures} instances in a row {what}: look at one's system log (start-up script, etcd address, "
            "security group), then start the autoscaler again"
        )
    return replace(pool, failures=failures, closed=closed)


def _trouble(memory: Memory, pool: Pool, seen: Observation, settings: ScalingSettings) -> Memory:
    """Back off from a pool that reports that it could not meet the last request."""
    entry = memory.pools.get(pool.name, PoolMemory())
    there = sum(i.pool == pool.name and i.state is not InstanceState.LEAVING for i in seen.capacity.instances)
    if not pool.trouble or pool.trouble_since == entry.trouble_seen:
        return memory
    if pool.desired <= there:  # an old report: nothing is missing
        entry = replace(entry, trouble_seen=pool.trouble_since)
        return replace(memory, pools={**memory.pools, pool.name: entry})
    entry = replace(entry, trouble_seen=pool.trouble_since)
    memory = replace(memory, pools={**memory.pools, pool.name: entry})
    return refused(memory, pool.name, pool.trouble, seen.now, settings)


def refused(memory: Memory, pool: str, why: str, now: float, settings: ScalingSettings) -> Memory:
    """Back off from a pool that refused a request: twice as long after each refusal in a row."""
    entry = memory.pools.get(pool, PoolMemory())
    wait = min(settings.back_off * 2 ** min(entry.troubles, 20), settings.max_back_off)
    entry = replace(entry, troubles=entry.troubles + 1, trouble=why, until=now + wait)
    return replace(memory, pools={**memory.pools, pool: entry})
