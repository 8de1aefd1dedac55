"""Make one decision of the autoscaler: (observation, memory) -> (actions, memory). Pure.

Every action is repeated at each step until the observation shows that it is done. So an action that fails,
or an autoscaler that dies between two actions, costs one step. Loops are bounded: a pool whose instances
do not become nodes is closed after `max_replacements`, a pool without capacity is asked with growing
pauses, and growing and shrinking wait for each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from adaptdl_elastic.autoscaler.providers.base import Instance, InstanceState
from adaptdl_elastic.autoscaler.scaling.economics import (
    HOUR,
    ScalingSettings,
    Target,
    Want,
    deadline_of,
    going,
)
from adaptdl_elastic.autoscaler.scaling.exchange import begin_exchange, follow_exchange
from adaptdl_elastic.autoscaler.scaling.idle_nodes import jobs_to_serve, release_idle
from adaptdl_elastic.autoscaler.scaling.node_market import NodeMarket, cost_of_loss, learn_types
from adaptdl_elastic.autoscaler.scaling.observed_history import (
    hourly_costs,
    released,
    remember,
    running_replicas,
)
from adaptdl_elastic.autoscaler.scaling.pool_account import turns_told
from adaptdl_elastic.autoscaler.scaling.scaling_types import (
    Action,
    Drain,
    Forecast,
    Hold,
    Known,
    LetGo,
    Memory,
    NodeUse,
    Observation,
    Protect,
    Release,
    Request,
    Step,
    StopJob,
)

# A draining node counts as gone after so long without a registration.
_ABSENT_SECONDS = 15.0
# Seconds from the drain request of an idle node to its release: a plan may still be under way.
_SETTLE_SECONDS = 2.0


def step(seen: Observation, memory: Memory, settings: ScalingSettings) -> Step:
    """Return the actions that follow from `seen`, and the memory for the next step."""
    memory = learn_types(remember(memory, seen, settings), seen)
    stopped = _jobs_to_stop(seen, memory, settings)
    ending = {stop.job for stop in stopped}
    seen = replace(seen, jobs=tuple(job for job in seen.jobs if job.name not in ending))
    everything = seen
    memory = follow_exchange(NodeMarket(seen, memory, settings))
    memory = _forsake(NodeMarket(seen, memory, settings))
    memory = release_idle(NodeMarket(seen, _relieve(NodeMarket(seen, memory, settings)), settings))
    jobs, unserved = jobs_to_serve(NodeMarket(seen, memory, settings))
    seen = replace(seen, jobs=jobs)
    market = NodeMarket(seen, memory, settings)
    wanted, worth = market.wants()
    memory = replace(memory, wanted={want.job: want.replicas for want in wanted})
    market = replace(market, memory=memory)
    goal = market.target(worth)
    affordable = market.afford(goal)
    if affordable.nodes < goal.nodes:  # the budget does not allow the goal: buy no node for `broke_for`
        goal = affordable
        market = replace(market, memory=replace(memory, broke_until=seen.now + settings.broke_for))
    memory, requests, warnings = _resize(market, goal)
    if not requests:
        memory, requests = begin_exchange(replace(market, memory=memory), wanted, goal)
    memory, leaving, overdue = _leave(replace(market, memory=memory))
    actions = [*stopped, *requests, *leaving, *_protect(seen, memory)]
    late = _late(wanted, everything, settings)
    short = _short(market, worth)
    notes = [*seen.capacity.warnings, *seen.warnings, *unserved, *short, *warnings, *overdue, *late]
    notes += [*_misjudged(seen), *_unknown_jobs(everything, "--max-job-cost", settings.max_job_costs)]
    return Step(
        replace(memory, low_since=_low_since(seen, memory, goal, settings)),
        tuple(actions),
        goal.nodes,
        goal.reason,
        tuple(dict.fromkeys(notes)),
        _forecasts(everything, memory, wanted, market.usual()[1]),
        sum(i.hourly_price for i in seen.capacity.instances),
    )


def _low_since(seen: Observation, memory: Memory, goal: Target, settings: ScalingSettings) -> float | None:
    """Return since when utilisation is below the band, or None."""
    if goal.utilisation >= settings.low:
        return None
    return seen.now if memory.low_since is None else memory.low_since


def _forsake(market: NodeMarket) -> Memory:
    """Mark leaving instances of shut pools as not replaced; other pools replace them.

    Pending instances that a group ordered by itself leave too where its nodes are lost too soon.
    """
    known = dict(market.memory.known)
    for pool in market.seen.capacity.pools:
        spare = market.supply(pool) - market.pending(pool) - pool.minimum
        for instance in market.staying(pool) if market.shut(pool) else ():
            entry = known[instance.id]
            fresh = instance.state is InstanceState.PENDING and market.pool(pool.name).wasted > 1
            if spare > 0 and not market.is_leaving(instance) and (entry.leaving or fresh):
                spare -= 1
                why = entry.leaving or "nodes of its pool are lost too soon"
                since = entry.leaving_since if entry.leaving else market.seen.now
                known[instance.id] = replace(entry, leaving=why, leaving_since=since, replace=False)
    return replace(market.memory, known=known)


def _relieve(market: NodeMarket) -> Memory:
    """Choose what leaves without lowering the desired size where a group has replaced nodes early.

    The group has instances beyond its desired size. As many as these go and are not replaced: first those
    that leave anyway, then nodes at risk, once enough others are nodes. Where no node is known to be at
    risk, the recommendation may still come; those whose loss costs least go `shrink_after` seconds after a
    replacement has become a node.
    """
    known, seen = dict(market.memory.known), market.seen
    for pool in seen.capacity.pools:
        beyond, staying = market.early(pool), market.staying(pool)
        leaving = [i for i in staying if known[i.id].leaving]
        going_anyway = sum(known[i.id].replace for i in leaving)
        given_back = [i for i in leaving if not known[i.id].replace]
        for instance in given_back[: max(0, beyond - going_anyway)]:
            known[instance.id] = replace(known[instance.id], replace=True)
        rest = [i for i in staying if not known[i.id].leaving]
        ready = [i for i in rest if i.id in seen.nodes or (known[i.id].at_risk and _runs(i))]
        spare = min(beyond - len(leaving), len(ready) - market.desired(pool))
        loose = [i for i in ready if known[i.id].at_risk and _runs(i)]
        if any(_settled_early(known[i.id], market) for i in rest):
            loose = sorted(ready, key=lambda i: cost_of_loss(i, known[i.id], seen))
        for instance in loose[: max(0, spare)]:
            known[instance.id] = replace(
                known[instance.id], leaving="its replacement has come", leaving_since=seen.now, replace=True
            )
    return replace(market.memory, known=known)


def _runs(instance: Instance) -> bool:
    return instance.state is InstanceState.RUNNING


def _settled_early(entry: Known, market: NodeMarket) -> bool:
    """Return whether an early replacement has been a node for `shrink_after`."""
    if not entry.early or entry.became is None:
        return False
    return market.seen.now - entry.became >= market.settings.shrink_after


def _resize(market: NodeMarket, goal: Target) -> tuple[Memory, list[Action], list[str]]:
    """Return the requests to pools, the instances chosen to leave (in the memory), and warnings."""
    memory, seen = market.memory, market.seen
    requests: dict[str, Request] = {}
    warnings: list[str] = []
    for pool in seen.capacity.pools:
        entry = market.pool(pool.name)
        warnings += [f"{pool.name}: {text}" for text in turns_told(entry)]
        if entry.closed:
            warnings.append(f"{pool.name}: {entry.closed}")
        elif entry.until > seen.now:
            wait = entry.until - seen.now
            warnings.append(f"{pool.name}: {entry.trouble}; asked again in {wait:.0f} s")
        if market.desired(pool) < pool.desired:
            requests[pool.name] = Request(pool.name, market.desired(pool), "takes back what it cannot give")
        elif market.surplus(pool):
            there = min(pool.maximum, pool.desired + market.surplus(pool))
            reason = "the group was set to fewer instances than are at work"
            requests[pool.name] = Request(pool.name, there, reason)
    missing = goal.nodes - market.have()
    if missing > 0:
        memory, grown, said = _grow(market, missing * market.usual()[0], goal)
        requests |= grown
        warnings += said
    elif missing < 0:
        memory, shrunk = _shrink(market, goal)
        requests |= shrunk
    return memory, list(requests.values()), warnings


def _grow(market: NodeMarket, slots: int, goal: Target) -> tuple[Memory, dict[str, Request], list[str]]:
    settings, pools = market.settings, {pool.name: pool for pool in market.seen.capacity.pools}
    broke = market.seen.now < market.memory.broke_until
    there, hourly = market.present()
    nodes, budget = settings.max_nodes - there, settings.max_hourly_cost - hourly
    slots = min(slots, sum(lack for lack, _ in market.claims) or slots)
    bought = {} if broke else market.purchase(slots, nodes, budget)
    requests = {
        name: Request(name, pools[name].desired + market.surplus(pools[name]) + count, goal.reason)
        for name, count in bought.items()
    }
    got = sum(pools[name].slots * count for name, count in bought.items())
    warnings = []
    if got < slots:
        why = _why_not(market, slots, nodes, bought, broke)
        leaving = there - market.have()
        why += f", {leaving} that still leave included" if leaving > 0 and not broke else ""
        warnings.append(f"{slots - got} slots are wanted that cannot be had: {why}")
    memory = market.memory if not bought else replace(market.memory, changed=market.seen.now)
    return memory, requests, warnings


def _why_not(market: NodeMarket, slots: int, nodes: int, bought: dict[str, int], broke: bool) -> str:
    """Return why no more nodes could be bought."""
    limit = f"--max-hourly-cost {market.settings.max_hourly_cost:g}"
    if broke:
        return f"{limit} was exceeded just now"
    if sum(market.purchase(slots, nodes, math.inf).values()) > sum(bought.values()):
        cheapest = min(offer.limit_price for offer in market.offers)
        if cheapest > market.settings.max_hourly_cost:
            return f"{limit} is less than one node costs ({cheapest:g})"
        return f"{limit} is reached"
    if nodes <= sum(bought.values()):
        return f"--max-nodes {market.settings.max_nodes} is reached"
    return "no pool has any to give"


def _shrink(market: NodeMarket, goal: Target) -> tuple[Memory, dict[str, Request]]:
    """Give up pending instances first, then the nodes whose loss costs least."""
    seen, known = market.seen, dict(market.memory.known)
    candidates = market.candidates(goal.settled)
    sizes, fixed = market.sizes(goal.settled)
    fewer: dict[str, int] = {}
    gone = [candidates[place] for place in going(sizes, goal.keep, goal.floor, goal.most, fixed)]
    for pool, instance in gone:
        if instance is None:
            fewer[pool.name] = fewer.get(pool.name, 0) + 1
            continue
        entry = known[instance.id]
        known[instance.id] = replace(
            entry,
            leaving=entry.leaving or goal.reason,
            leaving_since=entry.leaving_since if entry.leaving else seen.now,
            replace=False,
        )
    requests = {
        pool.name: Request(pool.name, market.desired(pool) - fewer[pool.name], goal.reason)
        for pool in seen.capacity.pools
        if pool.name in fewer
    }
    changed = seen.now if gone else market.memory.changed
    return replace(market.memory, known=known, changed=changed), requests


def _leave(market: NodeMarket) -> tuple[Memory, list[Action], list[str]]:
    """Return what is to be done with leaving instances: drain, release, extend or complete their hooks."""
    seen, settings, known = market.seen, market.settings, dict(market.memory.known)
    actions: list[Action] = []
    warnings: list[str] = []
    for instance in seen.capacity.instances:
        entry = known[instance.id]
        if not entry.leaving:
            continue
        node = seen.nodes.get(instance.id)
        if node is not None:
            actions.append(Drain(instance.id, node.node, entry.leaving, entry.deadline))
        if instance.state is InstanceState.LEAVING:
            if instance.held and node is not None and node.busy:
                if seen.now - entry.held >= _hold_every(seen, instance.pool, settings):
                    actions.append(Hold(instance.id))
                    known[instance.id] = replace(entry, held=seen.now)
            elif instance.held and (node is not None or _left(entry, seen.now)):
                actions.append(LetGo(instance.id))
        elif _left(entry, seen.now) if node is None else _empty(node, entry, seen.now):
            if not released(entry, seen.now):
                actions.append(Release(instance.id, entry.replace, entry.leaving))
                known[instance.id] = replace(entry, released=seen.now)
        elif seen.now - entry.leaving_since > settings.drain_timeout:
            waited = seen.now - entry.leaving_since
            warnings.append(f"{instance.id}: still has replicas {waited:.0f} s after it was asked to drain")
    return replace(market.memory, known=known), actions, warnings


def _empty(node: NodeUse, entry: Known, now: float) -> bool:
    """Return whether a draining node has no replica, and every plan that was under way is published."""
    return not node.busy and node.draining and now - entry.leaving_since >= _SETTLE_SECONDS


def _left(entry: Known, now: float) -> bool:
    """Return whether an instance without a registration will not get one again.

    Registrations depend on leases: after an outage of the store they can be missing for a moment while
    replicas are at work.
    """
    if entry.registered is None or entry.absent is None:
        return True
    return now - entry.absent >= _ABSENT_SECONDS or (entry.deadline is not None and now >= entry.deadline)


def _hold_every(seen: Observation, pool: str, settings: ScalingSettings) -> float:
    """Return the seconds between heartbeats to a lifecycle hook: it tolerates two lost ones."""
    timeout = next((p.hook_timeout for p in seen.capacity.pools if p.name == pool), math.inf)
    return min(settings.hold_every, timeout / 3)


def _protect(seen: Observation, memory: Memory) -> list[Action]:
    """Protect every registered node that stays from the provider's own scale-in."""
    bare = tuple(
        i.id
        for i in seen.capacity.instances
        if i.state is InstanceState.RUNNING
        and not i.protected
        and i.id in seen.nodes
        and not memory.known[i.id].leaving
    )
    return [Protect(bare)] if bare else []


def _late(wanted: Sequence[Want], seen: Observation, settings: ScalingSettings) -> list[str]:
    """Return warnings about deadlines that will be missed, or that have no effect."""
    found = _unknown_jobs(seen, "--deadline", settings.deadlines)
    for job in seen.jobs:
        if deadline_of(settings, job.name) is None:
            continue
        if job.requested_replicas is not None:
            if job.name not in seen.unsettled:
                found.append(f"{job.name}: its size is given: its deadline changes nothing")
        elif job.model is None:
            found.append(
                f"{job.name}: its deadline counts from when it is profiled: it has reported nothing yet"
            )
        elif job.declared is None:
            why = "has outlived its declared end" if job.outlived else "declares no end"
            found.append(
                f"{job.name}: {why}, so its deadline is not looked at; "
                "let it train in `remaining_epochs_until`, or give --hour-value"
            )
    for want in wanted:
        if want.late and want.seconds_left is not None:
            end = deadline_of(settings, want.job) or 0.0
            over = f"was {seen.now - end:.0f} s ago" if end < seen.now else "cannot be met"
            need = f"{want.replicas} replicas, the fastest, need {want.seconds_left:.0f} s more"
            found.append(f"{want.job}: its deadline {over}: {need}")
    return found


def _short(market: NodeMarket, worth: int) -> list[str]:
    """Return warnings about --max-nodes and --min-nodes where they prevent the right size."""
    settings, pools = market.settings, market.seen.capacity.pools
    found, most = [], sum(pool.maximum for pool in pools)
    if pools and settings.min_nodes > most:
        found.append(
            f"--min-nodes {settings.min_nodes} is more than the pools may have: their Max is {most} in all"
        )
    largest = max((pool.slots for pool in pools), default=1)
    if worth - market.seen.other_slots >= settings.max_nodes * largest and settings.max_nodes < most:
        free = replace(market, settings=replace(settings, max_nodes=most)).wants()[1]
        if free > worth:
            found.append(
                f"--max-nodes {settings.max_nodes} is the limit: {free} slots would be worth their price"
            )
    return found


def _misjudged(seen: Observation) -> list[str]:
    """Return warnings about nodes whose slots differ from those assumed for their instance type."""
    found = []
    for instance in seen.capacity.instances:
        node = seen.nodes.get(instance.id)
        if node is not None and node.slots not in (0, instance.slots):
            kind = instance.instance_type or "this kind"
            found.append(
                f"{instance.pool}: {kind} is taken to have {instance.slots} slots, but its agents offer "
                f"{node.slots} (--nproc-per-node): give --slots {node.slots}"
            )
    return found


def _forecasts(
    seen: Observation, memory: Memory, wanted: Sequence[Want], price: float
) -> dict[str, Forecast]:
    """Return for every job its cost per hour now, and its cost until its end at its future size."""
    running, found = running_replicas(seen), {want.job: want for want in wanted}
    return {
        job: _forecast(cost, running.get(job, 0), found.get(job), price)
        for job, cost in hourly_costs(seen, memory).items()
    }


def _forecast(hourly: float, running: int, want: Want | None, slot_price: float) -> Forecast:
    """Price additional replicas as the next node to buy, from the moment it is ordered."""
    if want is None or want.seconds_left is None:
        return Forecast(hourly)
    if want.replicas >= running:
        later = hourly + (want.replicas - running) * slot_price
    else:
        later = hourly * want.replicas / running
    return Forecast(hourly, want.seconds_left, later * want.seconds_left / HOUR)


def _jobs_to_stop(seen: Observation, memory: Memory, settings: ScalingSettings) -> list[StopJob]:
    """Return the jobs that have cost their limit (`--max-job-cost`), or will have once their state is saved.

    While a job saves its state, its nodes go on to cost.

    Args:
        seen: jobs that were already asked to stop are not among its jobs.
        memory: its bills include the time until `seen`.
        settings: `max_job_costs` and `stop_reserve` are used.
    """
    hourly, found = hourly_costs(seen, memory), []
    for job in seen.jobs:
        limit = settings.max_job_costs.get(job.name, settings.max_job_costs.get("*"))
        run = seen.runs.get(job.name)
        if limit is None or run is None:
            continue
        cost, saving = memory.job_costs.get(job.name, 0.0), hourly[job.name] * settings.stop_reserve / HOUR
        if cost + saving >= limit:
            reason = (
                f"{job.name} has cost {cost:.2f}, and up to {saving:.2f} more until its state is saved: it "
                f"stops because of --max-job-cost {limit:g}"
            )
            found.append(StopJob(job.name, run, reason))
    return found


def _unknown_jobs(seen: Observation, option: str, names: Iterable[str]) -> list[str]:
    """Return warnings about jobs that an option names and that do not exist."""
    there = {*seen.runs, *(job.name for job in seen.jobs)}
    known = ", ".join(sorted(there)) or "none"
    missing = sorted(set(names) - {"*", *there})
    return [f"{option} {name}: there is no such job; there are: {known}" for name in missing]
