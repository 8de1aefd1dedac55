"""What can be had and what there is, as one decision of the autoscaler sees it. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from adaptdl_elastic.autoscaler.providers.base import Instance, InstanceState, Pool
from adaptdl_elastic.autoscaler.scaling.economics import (
    Demand,
    Level,
    Offer,
    ScalingSettings,
    Target,
    Want,
    clear,
    least_nodes,
    target,
)
from adaptdl_elastic.autoscaler.scaling.observed_history import interruptions_per_hour, running_replicas
from adaptdl_elastic.autoscaler.scaling.scaling_types import Known, Memory, Observation, PoolMemory

_PATIENCE = 5  # times --shrink-after, for which jobs that change one after the other can hold everything
_VANISH = 60.0  # seconds for which a released instance is believed to be gone, though it is shown


@dataclass(frozen=True)
class NodeMarket:
    """What can be had, and what there is, in one decision."""

    seen: Observation
    memory: Memory
    settings: ScalingSettings

    def pool(self, name: str) -> PoolMemory:
        """What is remembered of a pool."""
        return self.memory.pools.get(name, PoolMemory())

    def staying(self, pool: Pool) -> list[Instance]:
        """Its instances that are not on their way out."""
        return [
            i
            for i in self.seen.capacity.instances
            if i.pool == pool.name
            and i.state is not InstanceState.LEAVING
            and not released(self.memory.known[i.id], self.seen.now)
        ]

    def giving_back(self, pool: Pool) -> int:
        """How many of them we let go without a replacement, and the pool does not know yet."""
        entries = (self.memory.known[i.id] for i in self.staying(pool))
        return sum(bool(entry.leaving) and not entry.replace for entry in entries)

    def shut(self, pool: Pool) -> bool:
        """Whether nothing more is to come of it: none to give, none that become nodes, or taken back."""
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

    def candidates(self, settled: bool = False) -> list[tuple[Pool, Instance | None]]:
        """What could go, in the order in which it would: what has not come (None), then the least missed.

        Of each pool at most so many as are above its minimum. `settled`: of the nodes only those that no
        job has, or is to have, of which a change is under way.
        """
        pools = {pool.name: pool for pool in self.seen.capacity.pools}
        spare = {name: max(0, self.supply(pool) - pool.minimum) for name, pool in pools.items()}
        found: list[tuple[Pool, Instance | None]] = []
        for pool in sorted(pools.values(), key=lambda p: -p.hourly_price / p.slots):
            found += [(pool, None)] * min(self.coming(pool), spare[pool.name])
            spare[pool.name] -= min(self.coming(pool), spare[pool.name])
        there = [i for p in pools.values() for i in self.staying(p) if not self.goes(i)]
        there = [i for i in there if not (settled and self._changes(i))]
        for instance in sorted(there, key=lambda i: missed(i, self.memory.known[i.id], self.seen)):
            if spare[instance.pool] > 0:
                spare[instance.pool] -= 1
                found.append((pools[instance.pool], instance))
        return found

    def _changes(self, instance: Instance) -> bool:
        """Whether a job of which a change is under way has it, or is to have it."""
        node = self.seen.nodes.get(instance.id)
        return node is not None and any(
            job in node.planned or node.replicas.get(job) for job in self.seen.unsettled
        )

    def sizes(self, settled: bool = False) -> tuple[list[int], tuple[int, int]]:
        """Slots of the candidates, and (nodes, slots) of those that can not go."""
        sizes = [pool.slots if i is None else i.slots for pool, i in self.candidates(settled)]
        nodes, slots = 0, 0
        for pool in self.seen.capacity.pools:
            kept = sorted(i.slots for i in self.staying(pool) if not self.goes(i))
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
            kept = sorted((i for i in self.staying(pool) if not self.goes(i)), key=lambda i: i.slots)
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
        """How many nodes there should be for so many slots, those of others included."""
        slots, _, _ = self.usual()
        total = max(0, wanted - self.seen.other_slots)
        low_for, low_ever = (
            0.0 if low is None else self.seen.now - low
            for low in (self.memory.low_since, self.memory.low_began)
        )

        def goal(low_for: float, settled: bool) -> Target:
            sizes, fixed = self.sizes(settled)
            return target(
                total,
                slots,
                sizes,
                self.settings,
                since_change=self.seen.now - self.memory.changed,
                low_for=low_for,
                fixed=fixed,
                least=max(0, least_nodes(self.seen.jobs) - self.seen.other_nodes),
            )

        usual = goal(low_for, False)
        if usual.nodes != self.have() or not low_for < self.settings.shrink_after <= low_ever / _PATIENCE:
            return usual
        forced = goal(low_ever, True)
        if forced.nodes >= usual.nodes:
            return usual
        why = f"low for {low_ever:.0f} s, in which some job was changing nearly all the time"
        return replace(forced, reason=f"{forced.reason} ({why})", settled=True)

    def afford(self, goal: Target) -> Target:
        """No more nodes than the budget bears: prices may have risen since they were bought."""
        budget, there = self.settings.max_hourly_cost, self.hourly()
        if there <= budget + 1e-9:
            return goal
        prices = sorted(
            i.hourly_price
            for pool in self.seen.capacity.pools
            for i in self.staying(pool)
            if not self.goes(i)
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
        return replace(goal, nodes=nodes, reason=text, keep=math.inf, most=nodes, settled=False)

    def hourly(self) -> float:
        """Of everything that is there or asked for and stays."""
        total = 0.0
        for pool in self.seen.capacity.pools:
            staying = [i for i in self.staying(pool) if not self.goes(i)]
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

    def goes(self, instance: Instance) -> bool:
        """Whether it leaves for good: nothing is to come in its place."""
        entry = self.memory.known[instance.id]
        return bool(entry.leaving) and not entry.replace


def missed(instance: Instance, entry: Known, seen: Observation) -> tuple[object, ...]:
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


def released(entry: Known, now: float) -> bool:
    """Whether it was given back a moment ago, so that what is shown of it may be old."""
    return entry.released is not None and now - entry.released < _VANISH
