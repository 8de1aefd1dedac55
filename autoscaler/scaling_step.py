"""One decision of the autoscaler: (what it sees, what it remembers) -> (what it does, what it remembers).

Everything here is said again at every step until it is seen to be done, so an action that fails, or an
autoscaler that dies between two of them, costs a step and nothing else. What could make it turn in
circles is bounded: instances that never become nodes close their pool after a few (`max_replacements`),
a pool with nothing to give is asked less and less often, growing and shrinking wait for each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from adaptdl_elastic.autoscaler.providers.base import Instance, InstanceState, Pool
from adaptdl_elastic.autoscaler.scaling import (
    Demand,
    Level,
    Offer,
    ScalingSettings,
    Target,
    Want,
    buy,
    clear,
    deadline_of,
    going,
    least_nodes,
    target,
)
from adaptdl_elastic.autoscaler.scaling_memory import (
    interruptions_per_hour,
    remember,
    running_replicas,
    shares,
)
from adaptdl_elastic.autoscaler.scaling_types import (
    Action,
    Drain,
    Forecast,
    Hold,
    Known,
    LetGo,
    Memory,
    NodeUse,
    Observation,
    PoolMemory,
    Protect,
    Release,
    Request,
    Step,
)

_VANISH = 60.0  # seconds for which a released instance is believed to be gone, though it is shown
_ABSENT = 15.0  # seconds without a registration after which a draining node is believed to have left
_SETTLE = 2.0  # seconds between a drain request and the release of an idle node: plans may be under way


def step(seen: Observation, memory: Memory, settings: ScalingSettings) -> Step:
    """Decide."""
    elapsed = 0.0 if memory.updated is None else max(0.0, seen.now - memory.updated)
    memory = remember(memory, seen, settings)
    memory = _forsake(_Market(seen, memory, settings))
    memory = _relieve(_Market(seen, memory, settings))
    market = _Market(seen, memory, settings)
    wanted, worth = market.wants()
    goal = market.target(worth)
    affordable = market.afford(goal)
    if affordable.nodes < goal.nodes:  # what is bought costs more than was said: not again at once
        goal = affordable
        market = replace(market, memory=replace(memory, broke_until=seen.now + settings.broke_for))
    memory, requests, warnings = _resize(market, goal)
    memory, leaving, overdue = _leave(replace(market, memory=memory))
    actions = [*requests, *leaving, *_protect(seen, memory)]
    late = _late(wanted, seen, settings)
    short = _short(market, worth)
    notes = [*seen.capacity.warnings, *short, *warnings, *overdue, *late, *_misjudged(seen)]
    return Step(
        replace(
            memory,
            low_since=_low_since(seen, memory, elapsed, goal, settings),
            wanted={want.job: want.replicas for want in wanted},
        ),
        tuple(actions),
        goal.nodes,
        goal.reason,
        tuple(dict.fromkeys(notes)),
        _forecasts(seen, wanted, market.usual()[1]),
        sum(i.hourly_price for i in seen.capacity.instances),
    )


def _low_since(
    seen: Observation, memory: Memory, elapsed: float, goal: Target, settings: ScalingSettings
) -> float | None:
    """Since when utilisation is below the band; time in which a job changes does not count."""
    if goal.utilisation >= settings.low:
        return None
    if memory.low_since is None:
        return seen.now
    return memory.low_since + (elapsed if seen.unsettled else 0.0)


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
            if i.pool == pool.name
            and i.state is not InstanceState.LEAVING
            and not _released(self.memory.known[i.id], self.seen.now)
        ]

    def giving_back(self, pool: Pool) -> int:
        """How many of them we let go without a replacement, and the pool does not know yet."""
        entries = (self.memory.known[i.id] for i in self.staying(pool))
        return sum(bool(entry.leaving) and not entry.replace for entry in entries)

    def shut(self, pool: Pool) -> bool:
        """Whether nothing more is to come of it: it has none to give, gives duds, or takes them back."""
        entry = self.pool(pool.name)
        return bool(entry.closed) or entry.until > self.seen.now or self.too_wild(pool)

    def asked(self, pool: Pool) -> int:
        """How many the pool is to have; no more than there are where it is shut."""
        if not self.shut(pool):
            return pool.desired
        return max(pool.minimum, min(pool.desired, len(self.staying(pool))))

    def coming(self, pool: Pool) -> int:
        """How many were asked for and are not there."""
        return max(0, self.asked(pool) - len(self.staying(pool)))

    def extra(self, pool: Pool) -> int:
        """How many are there beyond what was asked for, those aside that stand in for one at risk.

        Somebody has lowered the group's capacity, and what is protected has stayed. What we have given
        back is never one of them, however long it is shown: bought back it would be given back again.
        """
        there = sum(self.memory.known[i.id].released is None for i in self.staying(pool))
        return max(0, there - self.asked(pool) - self._early(pool))

    def _early(self, pool: Pool) -> int:
        """Replacements that CapacityRebalance has brought before the one at risk goes."""
        if not pool.replaces_at_risk:
            return 0
        risky = sum(self.memory.known[i.id].at_risk for i in self.staying(pool))
        return max(0, min(risky, len(self.staying(pool)) - self.asked(pool)))

    def supply(self, pool: Pool) -> int:
        """Nodes that there are, or that were asked for, less those that go."""
        there = len(self.staying(pool)) - self._early(pool)
        return there + self.coming(pool) - self.giving_back(pool)

    def candidates(self) -> list[tuple[Pool, Instance | None]]:
        """What could go, in the order in which it would: what has not come (None), then the least missed.

        Of each pool at most so many as are above its minimum.
        """
        pools = {pool.name: pool for pool in self.seen.capacity.pools}
        spare = {name: max(0, self.supply(pool) - pool.minimum) for name, pool in pools.items()}
        found: list[tuple[Pool, Instance | None]] = []
        for pool in sorted(pools.values(), key=lambda p: -p.hourly_price / p.slots):
            found += [(pool, None)] * min(self.coming(pool), spare[pool.name])
            spare[pool.name] -= min(self.coming(pool), spare[pool.name])
        there = [i for p in pools.values() for i in self.staying(p) if not self._goes(i)]
        for instance in sorted(there, key=lambda i: _worth(i, self.memory.known[i.id], self.seen)):
            if spare[instance.pool] > 0:
                spare[instance.pool] -= 1
                found.append((pools[instance.pool], instance))
        return found

    def sizes(self) -> tuple[list[int], tuple[int, int]]:
        """Slots of the candidates, and (nodes, slots) of those that can not go."""
        sizes = [pool.slots if i is None else i.slots for pool, i in self.candidates()]
        nodes, slots = 0, 0
        for pool in self.seen.capacity.pools:
            kept = sorted(i.slots for i in self.staying(pool) if not self._goes(i))
            kept = kept[self._early(pool) :]
            nodes += len(kept) + self.coming(pool)
            slots += sum(kept) + self.coming(pool) * pool.slots
        return sizes, (max(0, nodes - len(sizes)), max(0, slots - sum(sizes)))

    def offers(self) -> list[Offer]:
        """What can be bought now."""
        found = []
        for pool in self.seen.capacity.pools:
            if self.shut(pool):
                continue
            available = pool.maximum - max(pool.desired, len(self.staying(pool)))
            if available > 0:
                found.append(self._offer(pool, available))
        return found

    def too_wild(self, pool: Pool) -> bool:
        """Whether its nodes are interrupted too often."""
        rate = interruptions_per_hour(self.pool(pool.name))
        return pool.preemptible and rate > self.settings.max_interruptions

    def _offer(self, pool: Pool, available: int) -> Offer:
        overhead = self._overhead(pool)
        return Offer(pool.name, available, pool.slots, pool.hourly_price, pool.preemptible, overhead)

    def _overhead(self, pool: Pool) -> float:
        """Fraction of its nodes' time that interruptions cost."""
        rate = interruptions_per_hour(self.pool(pool.name)) if pool.preemptible else 0.0
        return rate * self.settings.interruption_cost / 3600

    def usual(self) -> tuple[int, float, float]:
        """(slots, price of a slot hour, seconds to boot) of the next node, else of the dearest there is."""
        offers = self.offers()
        if offers:
            best = min(offers, key=lambda o: (o.slot_price, o.preemptible, o.pool))
            boot = self.pool(best.pool).boot
            return best.slots, best.slot_price, self.settings.boot if boot is None else boot
        there = [i for i in self.seen.capacity.instances if i.state is not InstanceState.LEAVING]
        if there:
            dearest = max(there, key=lambda i: i.hourly_price / i.slots)
            return dearest.slots, dearest.hourly_price / dearest.slots, self.settings.boot
        pools = self.seen.capacity.pools
        slots, price = (pools[0].slots, pools[0].hourly_price / pools[0].slots) if pools else (1, 0.0)
        return slots, price, self.settings.boot

    def levels(self) -> list[Level]:
        """What there is, each at its own price, and what could be had."""
        offers = [Level(offer.slot_price, offer.available * offer.slots) for offer in self.offers()]
        return [*self.there(), *offers] or [Level(self.usual()[1], 0)]

    def there(self) -> list[Level]:
        """What there is and stays, and what was asked for."""
        slots: dict[float, int] = {}

        def add(price: float, count: int) -> None:
            slots[price] = slots.get(price, 0) + count

        for pool in self.seen.capacity.pools:
            dearer = 1 + self._overhead(pool)
            kept = sorted((i for i in self.staying(pool) if not self._goes(i)), key=lambda i: i.slots)
            for instance in kept[self._early(pool) :]:
                add(instance.hourly_price * dearer / instance.slots, instance.slots)
            if self.coming(pool):
                add(pool.hourly_price * dearer / pool.slots, self.coming(pool) * pool.slots)
        return [Level(price, count) for price, count in slots.items()]

    def wants(self) -> tuple[tuple[Want, ...], int]:
        """What each job is to have, and the slots that are worth their price."""
        most = sum(pool.maximum * pool.slots for pool in self.seen.capacity.pools)
        largest = max((pool.slots for pool in self.seen.capacity.pools), default=1)
        most = min(most, self.settings.max_nodes * largest) + self.seen.other_slots
        seen = self.seen
        slots, _, boot = self.usual()
        running = running_replicas(seen)
        there = sum(level.slots for level in self.there()) + seen.other_slots
        demand = Demand(
            seen.jobs,
            slots,
            self.settings,
            seen.now,
            most,
            self.memory.wanted,
            seen.unsettled,
            running,
            max(0, there - sum(running.values())),
            boot,
        )
        return clear(demand, self.levels(), self.seen.other_slots)

    def have(self) -> int:
        """Nodes that there are, or that were asked for, less those that go."""
        return sum(self.supply(pool) for pool in self.seen.capacity.pools)

    def target(self, wanted: int) -> Target:
        slots, _, _ = self.usual()
        total = max(0, wanted - self.seen.other_slots)
        low = self.memory.low_since
        sizes, fixed = self.sizes()
        return target(
            total,
            slots,
            sizes,
            self.settings,
            since_change=self.seen.now - self.memory.changed,
            low_for=0.0 if low is None else self.seen.now - low,
            fixed=fixed,
            least=max(0, least_nodes(self.seen.jobs) - self.seen.other_nodes),
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
        return replace(goal, nodes=nodes, reason=text, keep=math.inf, most=nodes)

    def hourly(self) -> float:
        """Of everything that is there or asked for and stays."""
        total = 0.0
        for pool in self.seen.capacity.pools:
            staying = [i for i in self.staying(pool) if not self._goes(i)]
            total += sum(i.hourly_price for i in staying) + self.coming(pool) * pool.hourly_price
        return total

    def present(self) -> tuple[int, float]:
        """(nodes, price per hour) of all there is, on its way out or not, and of what was asked for."""
        coming = [(self.coming(pool), pool.hourly_price) for pool in self.seen.capacity.pools]
        there = self.seen.capacity.instances
        return (
            len(there) + sum(count for count, _ in coming),
            sum(i.hourly_price for i in there) + sum(count * price for count, price in coming),
        )

    def _goes(self, instance: Instance) -> bool:
        entry = self.memory.known[instance.id]
        return bool(entry.leaving) and not entry.replace


def _forsake(market: _Market) -> Memory:
    """Where a pool is shut, its group replaces nobody: what goes is made good elsewhere.

    What a group has ordered by itself to replace an interrupted node is let go, if the pool is too wild.
    """
    known = dict(market.memory.known)
    for pool in market.seen.capacity.pools:
        spare = len(market.staying(pool)) - market.giving_back(pool) - pool.minimum
        for instance in market.staying(pool) if market.shut(pool) else ():
            entry = known[instance.id]
            fresh = instance.state is InstanceState.PENDING and market.too_wild(pool)
            if spare > 0 and not market._goes(instance) and (entry.leaving or fresh):
                spare -= 1
                why = entry.leaving or "nodes of its pool are interrupted too often"
                since = entry.leaving_since if entry.leaving else market.seen.now
                known[instance.id] = replace(entry, leaving=why, leaving_since=since, replace=False)
    return replace(market.memory, known=known)


def _relieve(market: _Market) -> Memory:
    """Where a group has brought a replacement early, the one at risk goes once that is a node.

    It is given back without one less desired: the group has one too many as it is.
    """
    known, seen = dict(market.memory.known), market.seen
    for pool in seen.capacity.pools:
        staying = [i for i in market.staying(pool) if not known[i.id].leaving]
        risky = [i for i in staying if known[i.id].at_risk and i.state is InstanceState.RUNNING]
        sound = sum(not known[i.id].at_risk and i.id in seen.nodes for i in staying)
        spare = len(staying) - market.asked(pool) if pool.replaces_at_risk else 0
        for instance in risky[: max(0, min(spare, sound + len(risky) - market.asked(pool)))]:
            known[instance.id] = replace(
                known[instance.id], leaving="its replacement has come", leaving_since=seen.now, replace=True
            )
    return replace(market.memory, known=known)


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
        elif market.too_wild(pool):
            rate = interruptions_per_hour(entry)
            warnings.append(
                f"{pool.name}: {rate:.1f} interruptions per node and hour, left alone for a while"
            )
        if market.asked(pool) < pool.desired:
            requests[pool.name] = Request(pool.name, market.asked(pool), "takes back what it can not give")
        elif market.extra(pool):
            there = min(pool.maximum, pool.desired + market.extra(pool))
            requests[pool.name] = Request(pool.name, there, "somebody has asked for fewer than are at work")
    missing = goal.nodes - market.have()
    if missing > 0:
        memory, grown, said = _grow(market, missing * market.usual()[0], goal)
        requests |= grown
        warnings += said
    elif missing < 0:
        memory, shrunk = _shrink(market, goal)
        requests |= shrunk
    return memory, list(requests.values()), warnings


def _grow(market: _Market, slots: int, goal: Target) -> tuple[Memory, dict[str, Request], list[str]]:
    settings, pools = market.settings, {pool.name: pool for pool in market.seen.capacity.pools}
    broke = market.seen.now < market.memory.broke_until
    back = {} if broke else _call_back(market, slots)
    if back:
        slots -= sum(i.slots for i in market.seen.capacity.instances if i.id in back)
        now, known = market.seen.now, {**market.memory.known, **back}
        market = replace(market, memory=replace(market.memory, known=known, changed=now))
        if slots <= 0:
            return market.memory, {}, []
    there, hourly = market.present()
    nodes, budget = settings.max_nodes - there, settings.max_hourly_cost - hourly
    offers = market.offers()
    bought = {} if broke else buy(offers, slots, nodes, budget)
    requests = {
        name: Request(name, pools[name].desired + market.extra(pools[name]) + count, goal.reason)
        for name, count in bought.items()
    }
    got = sum(pools[name].slots * count for name, count in bought.items())
    warnings = []
    if got < slots:
        why = _why_not(settings, offers, slots, nodes, bought, broke)
        leaving = there - market.have()
        why += f", {leaving} that still leave included" if leaving > 0 and not broke else ""
        warnings.append(f"{slots - got} slots are wanted that can not be had: {why}")
    memory = market.memory if not bought else replace(market.memory, changed=market.seen.now)
    return memory, requests, warnings


def _call_back(market: _Market, slots: int) -> dict[str, Known]:
    """Nodes that were to leave because nobody wanted them: the most missed ones, until there are `slots`."""
    seen, known, found = market.seen, market.memory.known, dict[str, Known]()
    wild = {
        pool.name for pool in seen.capacity.pools if market.pool(pool.name).closed or market.too_wild(pool)
    }
    nodes = market.settings.max_nodes - market.have()
    budget = market.settings.max_hourly_cost - market.hourly()
    there = [
        i
        for i in seen.capacity.instances
        if known[i.id].spared
        and known[i.id].released is None
        and i.state is not InstanceState.LEAVING
        and i.pool not in wild
    ]
    for instance in sorted(there, key=lambda i: _worth(i, known[i.id], seen), reverse=True):
        if slots <= 0 or nodes <= 0 or instance.hourly_price > budget + 1e-9:
            break
        slots, nodes, budget = slots - instance.slots, nodes - 1, budget - instance.hourly_price
        found[instance.id] = replace(known[instance.id], leaving="", leaving_since=0.0, spared=False)
    return found


def _why_not(
    settings: ScalingSettings,
    offers: list[Offer],
    slots: int,
    nodes: int,
    bought: dict[str, int],
    broke: bool,
) -> str:
    """Why no more could be bought."""
    limit = f"--max-hourly-cost {settings.max_hourly_cost:g}"
    if broke:
        return f"{limit} was exceeded a moment ago"
    if sum(buy(offers, slots, nodes, math.inf).values()) > sum(bought.values()):
        cheapest = min(offer.hourly_price for offer in offers)
        if cheapest > settings.max_hourly_cost:
            return f"{limit} is less than one node costs ({cheapest:g})"
        return f"{limit} is reached"
    if nodes <= sum(bought.values()):
        return f"--max-nodes {settings.max_nodes} is reached"
    return "no pool has any to give"


def _shrink(market: _Market, goal: Target) -> tuple[Memory, dict[str, Request]]:
    """First what has not come, then the instances that are missed least."""
    seen, known = market.seen, dict(market.memory.known)
    candidates = market.candidates()
    sizes, fixed = market.sizes()
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
            spared=entry.spared or not entry.leaving,
        )
    requests = {
        pool.name: Request(pool.name, market.asked(pool) - fewer[pool.name], goal.reason)
        for pool in seen.capacity.pools
        if pool.name in fewer
    }
    changed = seen.now if gone else market.memory.changed
    return replace(market.memory, known=known, changed=changed), requests


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
                if seen.now - entry.held >= _hold_every(seen, instance.pool, settings):
                    actions.append(Hold(instance.id))
                    known[instance.id] = replace(entry, held=seen.now)
            elif instance.held and (node is not None or _left(entry, seen.now)):
                actions.append(LetGo(instance.id))
        elif _left(entry, seen.now) if node is None else _empty(node, entry, seen.now):
            if not _released(entry, seen.now):
                actions.append(Release(instance.id, entry.replace, entry.leaving))
                known[instance.id] = replace(entry, released=seen.now)
        elif seen.now - entry.leaving_since > settings.drain_timeout:
            waited = seen.now - entry.leaving_since
            warnings.append(f"{instance.id}: still has replicas {waited:.0f} s after it was asked to drain")
    return replace(market.memory, known=known), actions, warnings


def _empty(node: NodeUse, entry: Known, now: float) -> bool:
    """Whether a draining node has nothing on it, and plans that were under way are published."""
    return not node.busy and node.draining and now - entry.leaving_since >= _SETTLE


def _left(entry: Known, now: float) -> bool:
    """Whether an instance without a registration has none for good.

    Registrations hang on leases: after the store was away they may be missing for a moment, replicas at work.
    """
    if entry.registered is None or entry.absent is None:
        return True
    return now - entry.absent >= _ABSENT or (entry.deadline is not None and now >= entry.deadline)


def _released(entry: Known, now: float) -> bool:
    """Whether it was given back a moment ago, so that what is shown of it may be old."""
    return entry.released is not None and now - entry.released < _VANISH


def _hold_every(seen: Observation, pool: str, settings: ScalingSettings) -> float:
    """Seconds between heartbeats: two may be lost before a hook gives up waiting."""
    timeout = next((p.hook_timeout for p in seen.capacity.pools if p.name == pool), math.inf)
    return min(settings.hold_every, timeout / 3)


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


def _late(wanted: Sequence[Want], seen: Observation, settings: ScalingSettings) -> list[str]:
    """Deadlines that are not kept, and those by which nothing can be decided."""
    found = []
    there = {job.name for job in seen.jobs}
    for name in sorted(set(settings.deadlines) - {"*", *seen.runs, *there}):
        known = ", ".join(sorted({*seen.runs, *there})) or "none"
        found.append(f"--deadline {name}: there is no such job; there are: {known}")
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
        elif job.remaining is None:
            found.append(
                f"{job.name}: declares no end, so its deadline is not looked at; "
                "let it train in `remaining_epochs_until`, or give --hour-value"
            )
    for want in wanted:
        if want.late and want.seconds_left is not None:
            end = deadline_of(settings, want.job) or 0.0
            over = f"was {seen.now - end:.0f} s ago" if end < seen.now else "can not be met"
            need = f"{want.replicas} replicas, the fastest, need {want.seconds_left:.0f} s more"
            found.append(f"{want.job}: its deadline {over}: {need}")
    return found


def _short(market: _Market, worth: int) -> list[str]:
    """What --max-nodes and --min-nodes keep from being as it should."""
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
    """Nodes with other room than their instance is believed to have: too many or too few would be bought."""
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


def _forecasts(seen: Observation, wanted: Sequence[Want], slot_price: float) -> dict[str, Forecast]:
    """For every job what it costs now, and to its end at the size that it is to have."""
    hourly: dict[str, float] = {job.name: 0.0 for job in seen.jobs}
    for instance in seen.capacity.instances:
        for job, share in shares(seen.nodes.get(instance.id)).items():
            hourly[job] = hourly.get(job, 0.0) + share * instance.hourly_price
    running, found = running_replicas(seen), {want.job: want for want in wanted}
    return {
        job: _forecast(cost, running.get(job, 0), found.get(job), slot_price) for job, cost in hourly.items()
    }


def _forecast(hourly: float, running: int, want: Want | None, slot_price: float) -> Forecast:
    """What more it is to have costs as much as what would be bought next, from its order on."""
    if want is None or want.seconds_left is None:
        return Forecast(hourly)
    if want.replicas >= running:
        later = hourly + (want.replicas - running) * slot_price
    else:
        later = hourly * want.replicas / running
    return Forecast(hourly, want.seconds_left, later * want.seconds_left / 3600)
