"""Exchange nodes for cheaper ones, one by one: leave on-demand when spot has capacity again. Pure functions.

A node is exchanged if another pool gives the same slots for less, and if that saves at least twice what the
change costs: the boot of the new node, and two pauses of the jobs on the old one. Where the limits allow one
node more, the new node is ordered first and the old one stays until the new one is registered: an order that
cannot be met costs nothing. At the limits the old node leaves first, unless a job would fall below its
minimum; such an attempt is repeated less often while the cheap pool has no capacity.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

from adaptdl_elastic.autoscaler.providers.base import Instance, InstanceState
from adaptdl_elastic.autoscaler.scaling.economics import HOUR, Offer, Target, Want, least_nodes
from adaptdl_elastic.autoscaler.scaling.node_market import NodeMarket, cost_of_loss
from adaptdl_elastic.autoscaler.scaling.scaling_types import CHEAPER, Action, Memory, Request

# An ordered node is given up if neither it nor the order is seen after so many seconds.
_UNSEEN_SECONDS = 60.0
# A saving counts for so many seconds where no job of the node declares its end.
_HORIZON_SECONDS = 3600.0
# A change has to save this multiple of its cost.
_PAYS_TIMES = 2.0


def follow_exchange(market: NodeMarket) -> Memory:
    """Let the old node leave once the new one is registered; give the exchange up where it does not come."""
    seen, known = market.seen, dict(market.memory.known)
    pools = {pool.name: pool for pool in seen.capacity.pools}
    for instance in seen.capacity.instances:
        entry = known[instance.id]
        if not entry.exchange:
            continue
        pool = pools.get(entry.exchange)
        fresh = [i for i in market.staying(pool) if not market.is_leaving(i)] if pool is not None else []
        fresh = [i for i in fresh if known[i.id].first_seen > entry.exchange_since]
        coming = bool(fresh) or (pool is not None and market.pending(pool) > 0)
        unseen = not coming and seen.now - entry.exchange_since > _UNSEEN_SECONDS
        gone = entry.leaving or instance.state is InstanceState.LEAVING
        if not gone and any(i.id in seen.nodes for i in fresh):
            known[instance.id] = replace(
                entry, exchange="", leaving=CHEAPER, leaving_since=seen.now, replace=False
            )
        elif gone or pool is None or unseen or (market.shut(pool) and not fresh):
            known[instance.id] = replace(entry, exchange="")
    return replace(market.memory, known=known)


def begin_exchange(market: NodeMarket, wanted: Sequence[Want], goal: Target) -> tuple[Memory, list[Action]]:
    """Return the memory and the order with which the next exchange begins, if one pays.

    Args:
        market: The supply and the offers of this decision.
        wanted: The size that each job should have.
        goal: How many nodes there should be. No exchange begins while there are too many.
    """
    memory, settings, now = market.memory, market.settings, market.seen.now
    if goal.nodes < market.have() or not _at_rest(market):
        return memory, []
    found = _best(market, wanted)
    if found is None:
        return memory, []
    instance, offer = found
    pool = market.seen.capacity.pool(offer.pool)
    there, hourly = market.present()
    room = there < settings.max_nodes and hourly + offer.limit_price <= settings.max_hourly_cost + 1e-9
    tried = market.pool(offer.pool).troubles > 0 and not room
    wait = settings.exchange_retry if tried else settings.exchange_after
    if now - max(memory.changed, memory.exchanged) < wait or not (room or _can_spare(market, instance)):
        return memory, []
    entry = memory.known[instance.id]
    if room:
        entry = replace(entry, exchange=offer.pool, exchange_since=now)
    else:
        entry = replace(entry, leaving=CHEAPER, leaving_since=now, replace=False)
    memory = replace(memory, known={**memory.known, instance.id: entry}, exchanged=now)
    return memory, [Request(pool.name, pool.desired + 1, CHEAPER)] if room else []


def _at_rest(market: NodeMarket) -> bool:
    """Return whether nothing comes or leaves, and every instance is or has been a node."""
    seen = market.seen
    if seen.now < market.memory.broke_until:
        return False
    still = all(
        i.state is InstanceState.RUNNING
        and market.memory.known[i.id].registered is not None
        and not market.memory.known[i.id].leaving
        and not market.memory.known[i.id].exchange
        for i in seen.capacity.instances
    )
    return still and not any(market.pending(p) or market.early(p) for p in seen.capacity.pools)


def _best(market: NodeMarket, wanted: Sequence[Want]) -> tuple[Instance, Offer] | None:
    """Return the dearest node that can be exchanged and the cheapest offer in its place, if any.

    It is at work, or of a type that no job can use.
    """
    seen, known = market.seen, market.memory.known
    spare = {pool.name: market.supply(pool) > pool.minimum for pool in seen.capacity.pools}
    there = [(i, seen.nodes[i.id], market.type_of(i)) for i in seen.capacity.instances if i.id in seen.nodes]
    usable = {name for _, _, name in there if any(market.can_use(job, name) for job in seen.jobs)}
    usable |= {*market.types_at_work.values()}
    nodes = [i for i, n, name in there if n.busy or not (seen.unsettled or name in usable)]
    nodes = [i for i in nodes if spare[i.pool] and not seen.nodes[i.id].draining]
    price = {i.id: i.hourly_price / i.slots / market.speed(i) for i in nodes}
    nodes.sort(key=lambda i: (-price[i.id], cost_of_loss(i, known[i.id], seen)))
    offers = sorted(market.every_offer, key=lambda o: (o.slot_price, o.preemptible, o.pool))
    for instance in nodes:
        for offer in offers:
            fits = offer.slots == instance.slots and offer.pool != instance.pool
            if fits and _pays(market, instance, offer, wanted):
                return instance, offer
    return None


def _speed_there(market: NodeMarket, instance: Instance, offer: Offer, jobs: Collection[str]) -> float:
    """Return the speed of the jobs of a node on the type offered, relative to their present type.

    Of several jobs the one that loses most counts. It is 0 across types without a measurement of both,
    and while the jobs have nodes of a third type: these run at the pace of the slowest, too. An idle node may
    be replaced by any node of a type at work.
    """
    here, there = market.type_of(instance), offer.node_type
    if here == there:
        return 1.0
    if not jobs:
        return math.inf if there in market.types_at_work.values() else 0.0
    both = {here, there}
    mixed = any(market.type_of(i) not in both for i in _nodes_of(market, jobs))
    rates = [market.rates.get(job, {}) for job in jobs]
    return min(0.0 if mixed or both - rate.keys() else rate[there] / rate[here] for rate in rates)


def _can_spare(market: NodeMarket, instance: Instance) -> bool:
    """Return whether every job keeps its minimum, and --min-nodes holds, while the node is missing."""
    seen = market.seen
    least = max(market.settings.min_nodes, least_nodes(seen.jobs) - seen.other_nodes)
    slots = sum(i.slots for i in seen.capacity.instances) - instance.slots + seen.other_slots
    return market.have() > least and slots >= sum(job.min_replicas for job in seen.jobs)


def _pays(market: NodeMarket, instance: Instance, offer: Offer, wanted: Sequence[Want]) -> bool:
    """Return whether the exchange saves enough per hour, and enough until the jobs of the node end."""
    seen, settings = market.seen, market.settings
    jobs = {name for name, count in seen.nodes[instance.id].replicas.items() if count}
    speed = _speed_there(market, instance, offer, jobs)
    if jobs & seen.unsettled or not speed:
        return False
    now_costs = market.useful_price(instance)
    saving = now_costs - offer.slot_price * offer.speed * offer.slots / speed
    if saving <= 0 or saving < settings.exchange_saving * now_costs:
        return False
    left = [want.seconds_left for want in wanted if want.job in jobs]
    ends = [seconds for seconds in left if seconds is not None]
    horizon = max(ends) if ends and len(ends) == len(left) else _HORIZON_SECONDS
    boot = market.pool(offer.pool).boot
    cost = offer.limit_price * (settings.boot if boot is None else boot)
    for job in seen.jobs:
        if job.name in jobs:
            pause = settings.pause if job.pause is None else job.pause
            # until all nodes of the job are exchanged it runs at the pace of the slowest
            mixed = settings.exchange_after * (1 - min(speed, 1 / speed))
            cost += max(2 * pause, mixed) * sum(i.hourly_price for i in _nodes_of(market, {job.name}))
    return saving * horizon / HOUR >= _PAYS_TIMES * cost / HOUR


def _nodes_of(market: NodeMarket, jobs: Collection[str]) -> list[Instance]:
    """Return the instances on which one of the jobs runs."""
    nodes = market.seen.nodes
    there = [i for i in market.seen.capacity.instances if i.id in nodes]
    return [i for i in there if any(nodes[i.id].replicas.get(job) for job in jobs)]
