"""Buy all of a job's least nodes or none, and keep no node that is idle for long.

A job that needs several nodes to run at all gets them together or not at all. A node that has had no replica
for `idle_after` is released, whatever the band of utilisation says; `--min-nodes` and the minimum of a pool
are kept. If a job lacks replicas while its nodes are idle, the next nodes are bought for it after a wait that
doubles each time, until it gets more replicas than it had. Pure functions.
"""

from __future__ import annotations

import math
from dataclasses import replace

from adaptdl_elastic.autoscaler.policy.policy_types import JobInfo
from adaptdl_elastic.autoscaler.scaling.economics import ScalingSettings, buy, taken
from adaptdl_elastic.autoscaler.scaling.node_market import NodeMarket
from adaptdl_elastic.autoscaler.scaling.observed_history import lacking, running_replicas
from adaptdl_elastic.autoscaler.scaling.scaling_types import InVain, Memory

# The longest wait for a job whose nodes stayed idle, in seconds.
_MOST_WAIT_SECONDS = 7200.0
# More slots than any purchase needs.
_ALL_SLOTS = 1 << 30


def release_idle(market: NodeMarket) -> Memory:
    """Choose the nodes that leave because they have had no replica for `idle_after`."""
    seen, settings, memory = market.seen, market.settings, market.memory
    known, short, blamed = dict(memory.known), lacking(seen, memory), set[str]()
    waits_since = _waits_since(market) if short else 0.0
    spare = {pool.name: market.supply(pool) - pool.minimum for pool in seen.capacity.pools}
    total = market.have() - settings.min_nodes
    for pool in seen.capacity.pools:
        for instance in market.staying(pool):
            entry = known[instance.id]
            idle = 0.0 if entry.idle_since is None else seen.now - max(entry.idle_since, waits_since)
            stays = not entry.leaving and min(spare[pool.name], total) <= 0
            if idle < settings.idle_after or entry.exchange or stays:
                continue
            # one that cannot be released is no fault of jobs that came later
            blamed |= short.keys() & memory.vain.keys() if entry.leaving else short.keys()
            if not entry.leaving:
                why = f"it has had no replica for {idle / 60:.0f} min (--idle-minutes)"
                known[instance.id] = replace(entry, leaving=why, leaving_since=seen.now, replace=False)
                spare[pool.name], total = spare[pool.name] - 1, total - 1
    running, names = running_replicas(seen), {job.name for job in seen.jobs}
    vain = {
        name: entry
        for name, entry in memory.vain.items()
        if name in names and running.get(name, 0) <= entry.running and seen.runs.get(name, "") == entry.run
    }
    for name in blamed:
        old = vain.get(name, InVain())
        if old.until <= seen.now:
            wait = min(settings.idle_after * 2 ** min(old.times, 10), _MOST_WAIT_SECONDS)
            vain[name] = InVain(old.times + 1, seen.now + wait, running.get(name, 0), seen.runs.get(name, ""))
    return replace(memory, known=known, vain=vain)


def _waits_since(market: NodeMarket) -> float:
    """Return when the last node came that a waiting job may start with; now, while more are on their way.

    A job that needs several nodes starts when the last one is there, so the others are not idle before.
    """
    seen, memory = market.seen, market.memory
    entries = [memory.known[i.id] for i in seen.capacity.instances]
    booting = any(entry.registered is None and not entry.leaving for entry in entries)
    coming = booting or any(market.pending(pool) for pool in seen.capacity.pools)
    if coming and seen.now - memory.changed < market.settings.boot_timeout:
        return seen.now
    return max((entry.became or 0.0 for entry in entries if entry.idle_since is not None), default=0.0)


def jobs_to_serve(market: NodeMarket) -> tuple[tuple[JobInfo, ...], list[str]]:
    """Return the jobs for which nodes are bought and kept, and warnings about the others."""
    seen, settings = market.seen, market.settings
    there, hourly = market.present()
    offers = {offer.pool: offer for offer in market.offers}
    room, budget = settings.max_nodes - there, settings.max_hourly_cost - hourly
    more = buy(list(offers.values()), _ALL_SLOTS, room, budget)
    nodes = market.have() + sum(more.values()) + seen.other_nodes
    slots = sum(level.slots for level in market.current_supply()) + seen.other_slots
    slots += sum(offers[name].slots * count for name, count in more.items())
    running, each = running_replicas(seen), market.usual()[0]
    served, warnings = dict[str, JobInfo](), list[str]()
    for job in sorted(seen.jobs, key=lambda job: not running.get(job.name)):
        size = running.get(job.name, 0)
        vain = market.memory.vain.get(job.name, InVain())
        least = taken(job, max(job.min_replicas, job.min_nodes), each)
        apart = job.min_nodes if job.min_nodes > 1 else 0
        several = apart or least > each
        if vain.until > seen.now:
            warnings.append(
                f"{job.name}: nodes that were bought for it had no replica {vain.times} times in a row; the "
                f"next are bought in {vain.until - seen.now:.0f} s: see `adaptdl status {job.name}`"
            )
            if not size:
                continue
            job = replace(job, requested_replicas=size)
        elif several and not size and (apart > nodes or least > slots):
            what, can = (f"{apart} nodes", nodes) if apart > nodes else (f"{least} slots", slots)
            warnings.append(
                f"{job.name}: needs {what} to run, and {max(0, can)} can be had now: nothing is bought for "
                f"it. Raise {_limits(settings)}, or let it run on fewer"
            )
            continue
        nodes, slots = nodes - apart, slots - least
        served[job.name] = job
    return tuple(served[job.name] for job in seen.jobs if job.name in served), warnings


def _limits(settings: ScalingSettings) -> str:
    """Return the limits that may keep a job from running."""
    found = ["the Max of a group"]
    if settings.max_hourly_cost < math.inf:
        found.insert(0, f"--max-hourly-cost ({settings.max_hourly_cost:g})")
    if settings.max_nodes < ScalingSettings.max_nodes:
        found.insert(0, f"--max-nodes ({settings.max_nodes})")
    return " or ".join(found)
