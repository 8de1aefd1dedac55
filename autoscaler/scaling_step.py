"""One decision of the autoscaler: (what it sees, what it remembers) -> (what it does, what it remembers).

Everything here is said again at every step until it is seen to be done, so an action that fails, or an
autoscaler that dies between two of them, costs a step and nothing else. What could make it turn in
circles is bounded: instances that never become nodes close their pool after a few (`max_replacements`),
a pool with nothing to give is asked less and less often, growing and shrinking wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from adaptdl_elastic.autoscaler.providers.base import Instance, InstanceState, Pool
from adaptdl_elastic.autoscaler.scaling import Offer, ScalingSettings, Target, Want, buy, target, wants
from adaptdl_elastic.autoscaler.scaling_memory import interruptions_per_hour, remember, shares
from adaptdl_elastic.autoscaler.scaling_types import (
    Action,
    Drain,
    Hold,
    Known,
    LetGo,
    Memory,
    Observation,
    PoolMemory,
    Protect,
    Release,
    Request,
    Step,
)

_SETTLE = 2.0  # seconds between a drain request and the release of an idle node: plans may be under way


def step(seen: Observation, memory: Memory, settings: ScalingSettings) -> Step:
    """Decide."""
    memory = remember(memory, seen, settings)
    market = _Market(seen, memory, settings)
    wanted = market.wants()
    goal = market.target(wanted)
    affordable = market.afford(goal)
    if affordable.nodes < goal.nodes:  # what is bought costs more than was said: not again at once
        goal = affordable
        market = replace(market, memory=replace(memory, broke_until=seen.now + settings.broke_for))
    memory, requests, warnings = _resize(market, goal)
    memory, leaving, overdue = _leave(replace(market, memory=memory))
    actions = [*requests, *leaving, *_protect(seen, memory)]
    low = goal.utilisation < settings.low
    low_since = (seen.now if memory.low_since is None else memory.low_since) if low else None
    notes = [*seen.capacity.warnings, *warnings, *overdue, *_late(wanted, seen)]
    return Step(
        replace(memory, low_since=low_since, wanted={want.job: want.replicas for want in wanted}),
        tuple(actions),
        goal.nodes,
        goal.reason,
        tuple(dict.fromkeys(notes)),
        _forecasts(seen, wanted),
        sum(i.hourly_price for i in seen.capacity.instances),
    )


@dataclass(frozen=True)
class _Market:
    """What can be had, and what there is, in one decision."""

    seen: Observation
    memory: Memory
    settings: ScalingSettings

    def pool(self, name: str) -> PoolMemory:
        return self.memory.pools.get(name, PoolMemory())

    def staying(self, pool: Pool) -> list[Instance]:
        """Its instances that are not on their way out."""
        return [
            i
            for i in self.seen.capacity.instances
            if i.pool == pool.name and i.state is not InstanceState.LEAVING
        ]

    def giving_back(self, pool: Pool) -> int:
        """How many of them we let go without a replacement, and the pool does not know yet."""
        entries = (self.memory.known[i.id] for i in self.staying(pool))
        return sum(bool(entry.leaving) and not entry.replace for entry in entries)

    def asked(self, pool: Pool) -> int:
        """How many the pool is to have; no more than there are where it has nothing to give."""
        stuck = self.pool(pool.name).closed or self.pool(pool.name).until > self.seen.now
        return max(pool.minimum, min(pool.desired, len(self.staying(pool)))) if stuck else pool.desired

    def supply(self, pool: Pool) -> int:
        return self.asked(pool) - self.giving_back(pool)

    def offers(self) -> list[Offer]:
        """What can be bought now."""
        found = []
        for pool in self.seen.capacity.pools:
            entry = self.pool(pool.name)
            if entry.closed or entry.until > self.seen.now or self._too_wild(pool):
                continue
            available = pool.maximum - max(self.asked(pool), pool.desired)
            if available > 0:
                found.append(self._offer(pool, available))
        return found

    def _too_wild(self, pool: Pool) -> bool:
        rate = interruptions_per_hour(self.pool(pool.name))
        return pool.preemptible and rate > self.settings.max_interruptions

    def _offer(self, pool: Pool, available: int) -> Offer:
        rate = interruptions_per_hour(self.pool(pool.name)) if pool.preemptible else 0.0
        overhead = rate * self.settings.interruption_cost / 3600
        return Offer(pool.name, available, pool.slots, pool.hourly_price, pool.preemptible, overhead)

    def usual(self) -> tuple[int, float]:
        """(slots, price of a slot hour) of the node that would be bought next, else of the dearest one."""
        offers = self.offers()
        if offers:
            best = min(offers, key=lambda o: (o.slot_price, o.preemptible, o.pool))
            return best.slots, best.slot_price
        there = [i for i in self.seen.capacity.instances if i.state is not InstanceState.LEAVING]
        if there:
            dearest = max(there, key=lambda i: i.hourly_price / i.slots)
            return dearest.slots, dearest.hourly_price / dearest.slots
        pools = self.seen.capacity.pools
        return (pools[0].slots, pools[0].hourly_price / pools[0].slots) if pools else (1, 0.0)

    def wants(self) -> tuple[Want, ...]:
        slots, price = self.usual()
        most = sum(pool.maximum * pool.slots for pool in self.seen.capacity.pools)
        most = min(most, self.settings.max_nodes * slots) + self.seen.other_slots
        return wants(self.seen.jobs, slots, price, self.settings, self.seen.now, most, self.memory.wanted)

    def have(self) -> int:
        """Nodes of the usual size."""
        slots, _ = self.usual()
        return round(sum(self.supply(pool) * pool.slots for pool in self.seen.capacity.pools) / slots)

    def target(self, wanted: Sequence[Want]) -> Target:
        slots, _ = self.usual()
        total = max(0, sum(want.replicas for want in wanted) - self.seen.other_slots)
        low = self.memory.low_since
        return target(
            total,
            slots,
            self.have(),
            self.settings,
            since_change=self.seen.now - self.memory.changed,
            low_for=0.0 if low is None else self.seen.now - low,
        )

    def afford(self, goal: Target) -> Target:
        """No more nodes than the budget bears: prices may have risen since they were bought."""
        budget, there = self.settings.max_hourly_cost, self.hourly()
        if there <= budget + 1e-9:
            return goal
        prices = sorted(
            i.hourly_price
            for pool in self.seen.capacity.pools
            for i in self.staying(pool)
            if not self._goes(i)
        )
        total, nodes = 0.0, 0
        for price in prices:
            total += price
            nodes += total <= budget + 1e-9
        if nodes >= goal.nodes:
            return goal
        text = (
            f"{there:.2f} per hour are more than --max-hourly-cost {budget:g}: {self.have()} -> {nodes} nodes"
        )
        return replace(goal, nodes=nodes, reason=text)

    def hourly(self) -> float:
        """Of everything that is there or asked for and stays."""
        total = 0.0
        for pool in self.seen.capacity.pools:
            staying = [i for i in self.staying(pool) if not self._goes(i)]
            coming = max(0, self.asked(pool) - len(self.staying(pool)))
            total += sum(i.hourly_price for i in staying) + coming * pool.hourly_price
        return total

    def _goes(self, instance: Instance) -> bool:
        entry = self.memory.known[instance.id]
        return bool(entry.leaving) and not entry.replace


def _resize(market: _Market, goal: Target) -> tuple[Memory, list[Action], list[str]]:
    """Requests to pools, and the choice of who is to leave."""
    memory, seen = market.memory, market.seen
    requests: dict[str, Request] = {}
    warnings: list[str] = []
    for pool in seen.capacity.pools:
        entry = market.pool(pool.name)
        if entry.closed:
            warnings.append(f"{pool.name}: {entry.closed}")
        elif entry.until > seen.now:
            wait = entry.until - seen.now
            warnings.append(f"{pool.name}: {entry.trouble}; asked again in {wait:.0f} s")
        if market.asked(pool) < pool.desired:
            requests[pool.name] = Request(pool.name, market.asked(pool), "takes back what it can not give")
    slots, _ = market.usual()
    missing = goal.nodes - market.have()
    if missing > 0:
        memory, grown, said = _grow(market, missing * slots, goal)
        requests |= grown
        warnings += said
    elif missing < 0:
        memory, shrunk = _shrink(market, -missing * slots, goal)
        requests |= shrunk
    return memory, list(requests.values()), warnings


def _grow(market: _Market, slots: int, goal: Target) -> tuple[Memory, dict[str, Request], list[str]]:
    settings, pools = market.settings, {pool.name: pool for pool in market.seen.capacity.pools}
    budget = settings.max_hourly_cost - market.hourly()
    nodes = settings.max_nodes - sum(market.supply(pool) for pool in pools.values())
    broke = market.seen.now < market.memory.broke_until
    offers = market.offers()
    bought = {} if broke else buy(offers, slots, nodes, budget)
    requests = {
        name: Request(name, pools[name].desired + count, goal.reason) for name, count in bought.items()
    }
    got = sum(pools[name].slots * count for name, count in bought.items())
    warnings = []
    if got < slots:
        afford = {} if broke else buy(offers, slots, nodes, float("inf"))
        why = (
            f"--max-hourly-cost {settings.max_hourly_cost:g} was exceeded a moment ago"
            if broke
            else f"--max-hourly-cost {settings.max_hourly_cost:g} is reached"
            if sum(afford.values()) > sum(bought.values())
            else f"--max-nodes {settings.max_nodes} is reached"
            if nodes <= sum(bought.values())
            else "no pool has any to give"
        )
        warnings.append(f"{slots - got} slots are wanted that can not be had: {why}")
    memory = market.memory if not bought else replace(market.memory, changed=market.seen.now)
    return memory, requests, warnings


def _shrink(market: _Market, slots: int, goal: Target) -> tuple[Memory, dict[str, Request]]:
    """First what has not come, then the instances that are missed least."""
    seen, known = market.seen, dict(market.memory.known)
    spare = {pool.name: market.supply(pool) - pool.minimum for pool in seen.capacity.pools}
    requests: dict[str, Request] = {}
    for pool in sorted(seen.capacity.pools, key=lambda p: -p.hourly_price / p.slots):
        coming = pool.desired - len(market.staying(pool))
        drop = max(0, min(coming, spare[pool.name], slots // pool.slots))
        if drop:
            requests[pool.name] = Request(pool.name, pool.desired - drop, goal.reason)
            spare[pool.name] -= drop
            slots -= drop * pool.slots
    candidates = [i for pool in seen.capacity.pools for i in market.staying(pool)]
    for instance in sorted(candidates, key=lambda i: _worth(i, known[i.id], seen)):
        entry = known[instance.id]
        if instance.slots > slots or spare[instance.pool] <= 0 or (entry.leaving and not entry.replace):
            continue
        known[instance.id] = replace(
            entry,
            leaving=entry.leaving or goal.reason,
            leaving_since=entry.leaving_since if entry.leaving else seen.now,
            replace=False,
        )
        spare[instance.pool] -= 1
        slots -= instance.slots
    return replace(market.memory, known=known, changed=seen.now), requests


def _worth(instance: Instance, entry: Known, seen: Observation) -> tuple[object, ...]:
    """Sorts those first that are missed least.

    They are leaving, at risk, not up, idle, dear, little used, without rank 0 (a job whose first node goes
    is started again, where any other can go in place), and new.
    """
    node = seen.nodes.get(instance.id)
    replicas = sum(node.replicas.values()) if node else 0
    return (
        not entry.leaving,
        not entry.at_risk,
        node is not None,
        replicas > 0,
        -instance.hourly_price / instance.slots,
        replicas,
        node is not None and node.first,
        -entry.first_seen,
        instance.id,
    )


def _leave(market: _Market) -> tuple[Memory, list[Action], list[str]]:
    """Drain, release, keep hooks waiting."""
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
                if seen.now - entry.held >= settings.hold_every:
                    actions.append(Hold(instance.id))
                    known[instance.id] = replace(entry, held=seen.now)
            elif instance.held:
                actions.append(LetGo(instance.id))
        elif node is None or (not node.busy and node.draining and seen.now - entry.leaving_since >= _SETTLE):
            actions.append(Release(instance.id, entry.replace, entry.leaving))
        elif seen.now - entry.leaving_since > settings.drain_timeout:
            waited = seen.now - entry.leaving_since
            warnings.append(f"{instance.id}: still has replicas {waited:.0f} s after it was asked to drain")
    return replace(market.memory, known=known), actions, warnings


def _protect(seen: Observation, memory: Memory) -> list[Action]:
    """Every node that is to stay."""
    bare = tuple(
        i.id
        for i in seen.capacity.instances
        if i.state is InstanceState.RUNNING
        and not i.protected
        and i.id in seen.nodes
        and not memory.known[i.id].leaving
    )
    return [Protect(bare)] if bare else []


def _late(wanted: Sequence[Want], seen: Observation) -> list[str]:
    return [
        f"{want.job}: can not meet its deadline: {want.replicas} replicas need {want.seconds_left:.0f} s more"
        for want in wanted
        if want.late and want.seconds_left is not None
    ]


def _forecasts(seen: Observation, wanted: Sequence[Want]) -> dict[str, tuple[float, float | None]]:
    """For every job: what it costs per hour now, and the seconds to its end at the size it is to have."""
    hourly: dict[str, float] = {job.name: 0.0 for job in seen.jobs}
    for instance in seen.capacity.instances:
        for job, share in shares(seen.nodes.get(instance.id)).items():
            hourly[job] = hourly.get(job, 0.0) + share * instance.hourly_price
    left = {want.job: want.seconds_left for want in wanted}
    return {job: (cost, left.get(job)) for job, cost in hourly.items()}
