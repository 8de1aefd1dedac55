"""Compute the current supply of nodes and what can be bought, for one decision. Pure functions."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

from adaptdl_elastic.autoscaler.policy.policy_types import JobInfo
from adaptdl_elastic.autoscaler.providers.base import Instance, InstanceState, Pool
from adaptdl_elastic.autoscaler.scaling.economics import (
    HOUR,
    Demand,
    Level,
    Offer,
    ScalingSettings,
    Target,
    Want,
    buy,
    clear,
    least_nodes,
    rates_by_type,
    target,
)
from adaptdl_elastic.autoscaler.scaling.observed_history import (
    counts,
    interruptions_per_hour,
    lacking,
    running_replicas,
)
from adaptdl_elastic.autoscaler.scaling.pool_account import surcharge
from adaptdl_elastic.autoscaler.scaling.scaling_types import Known, Memory, Observation, PoolMemory

_NEW_POOL = PoolMemory()


@dataclass(frozen=True)
class NodeMarket:
    """The instances and the offers of all pools, as one decision sees them."""

    seen: Observation
    memory: Memory
    settings: ScalingSettings

    def pool(self, name: str) -> PoolMemory:
        """Return what is remembered of the pool called `name`."""
        return self.memory.pools.get(name, _NEW_POOL)

    def staying(self, pool: Pool) -> list[Instance]:
        """Return the pool's instances that are neither leaving nor just released."""
        return [
            i
            for i in self.seen.capacity.instances
            if i.pool == pool.name and counts(i, self.memory.known[i.id], self.seen.now)
        ]

    def giving_back(self, pool: Pool) -> int:
        """Return how many staying instances we drain without a replacement; the pool still counts them."""
        return sum(self.is_leaving(i) for i in self.staying(pool))

    def shut(self, pool: Pool) -> bool:
        """Return whether the pool is asked for nothing: closed or backed off."""
        entry = self.pool(pool.name)
        return bool(entry.closed) or entry.until > self.seen.now

    def desired(self, pool: Pool) -> int:
        """Return the desired size of the pool; for a shut pool at most the instances that stay."""
        if not self.shut(pool):
            return pool.desired
        return max(pool.minimum, min(pool.desired, len(self.staying(pool))))

    def pending(self, pool: Pool) -> int:
        """Return how many instances are desired and not there yet."""
        return max(0, self.desired(pool) - len(self.staying(pool)))

    def surplus(self, pool: Pool) -> int:
        """Return how many instances there are above the desired size, early replacements not counted.

        There is a surplus after a person lowered the group's capacity while its instances were protected.
        Instances that the autoscaler released never count: asking for them again would only release them
        again.
        """
        there = sum(self.memory.known[i.id].released is None for i in self.staying(pool))
        return max(0, there - self.desired(pool) - self.early(pool))

    def early(self, pool: Pool) -> int:
        """Return how many replacements CapacityRebalance has started before the instance at risk is gone."""
        if not pool.replaces_at_risk:
            return 0
        entries = [self.memory.known[i.id] for i in self.staying(pool)]
        replaced = max(sum(entry.at_risk for entry in entries), sum(entry.early for entry in entries))
        return max(0, min(replaced, len(entries) - self.desired(pool)))

    def supply(self, pool: Pool) -> int:
        """Return the nodes of the pool: those that stay and those that are pending."""
        there = len(self.staying(pool)) - self.early(pool)
        return there + self.pending(pool) - self.giving_back(pool)

    def candidates(self, settled: bool) -> list[tuple[Pool, Instance | None]]:
        """Return what could be given up, cheapest loss first: pending instances (None), then nodes.

        At most as many per pool as are above its minimum.

        Args:
            settled: Leave out nodes of jobs whose size is changing.
        """
        pools = {pool.name: pool for pool in self.seen.capacity.pools}
        spare = {name: max(0, self.supply(pool) - pool.minimum) for name, pool in pools.items()}
        found: list[tuple[Pool, Instance | None]] = []
        for pool in sorted(pools.values(), key=lambda p: -p.hourly_price / p.slots):
            found += [(pool, None)] * min(self.pending(pool), spare[pool.name])
            spare[pool.name] -= min(self.pending(pool), spare[pool.name])
        there = [i for p in pools.values() for i in self.staying(p) if not self.is_leaving(i)]
        there = [i for i in there if not (settled and self._changes(i))]
        for instance in sorted(there, key=lambda i: cost_of_loss(i, self.memory.known[i.id], self.seen)):
            if spare[instance.pool] > 0:
                spare[instance.pool] -= 1
                found.append((pools[instance.pool], instance))
        return found

    def _changes(self, instance: Instance) -> bool:
        """Return whether a job whose size is changing runs, or will run, on this instance."""
        node = self.seen.nodes.get(instance.id)
        return node is not None and any(
            job in node.planned or node.replicas.get(job) for job in self.seen.unsettled
        )

    def sizes(self, settled: bool) -> tuple[list[int], tuple[int, int]]:
        """Return the slots of each candidate, and (nodes, slots) of what cannot be given up."""
        sizes = [pool.slots if i is None else i.slots for pool, i in self.candidates(settled)]
        nodes, slots = 0, 0
        for pool in self.seen.capacity.pools:
            kept = sorted(i.slots for i in self.staying(pool) if not self.is_leaving(i))
            kept = kept[self.early(pool) :]
            nodes += len(kept) + self.pending(pool)
            slots += sum(kept) + self.pending(pool) * pool.slots
        return sizes, (max(0, nodes - len(sizes)), max(0, slots - sum(sizes)))

    def type_of(self, one: Pool | Instance) -> str:
        """Return the node type of an instance, or of a pool's next one: its family, if no agent said more."""
        family = _family(one.instance_type)
        return self.memory.node_types.get(family, family)

    @cached_property
    def rates(self) -> dict[str, dict[str, float]]:
        """Return for each job its goodput on every type here that is measured; empty where there is one."""
        pools = self.seen.capacity.pools
        names = {*map(self.type_of, pools), *map(self.type_of, self.seen.capacity.instances)}
        slots, jobs = max((p.slots for p in pools), default=1), self.seen.jobs if len(names) > 1 else ()
        return {job.name: rates_by_type(job, slots, names) for job in jobs}

    @cached_property
    def types_at_work(self) -> dict[str, str]:
        """Return for each job with replicas the type of a node that it runs on."""
        nodes = self.seen.nodes
        there = [(nodes[i.id], self.type_of(i)) for i in self.seen.capacity.instances if i.id in nodes]
        return {job: name for node, name in there for job, count in node.replicas.items() if count}

    @cached_property
    def _references(self) -> dict[str, str]:
        """Return for each job the type that its size is chosen for, one that is measured for it.

        It is the type on which the job runs, else that with the lowest price of the job's goodput, first
        among the pools that can give a node.
        """
        pools = self.seen.capacity.pools
        price = [(self.shut(pool), self._slot_price(pool), self.type_of(pool)) for pool in pools]
        found = {}
        for job, rates in self.rates.items():
            sold = [(shut, cost / rates[name], name) for shut, cost, name in price if name in rates]
            best = self.types_at_work.get(job, "")
            if best in rates or sold:
                found[job] = best if best in rates else min(sold)[2]
        return found

    @cached_property
    def _speeds(self) -> dict[str, float]:
        """Return the goodput of a slot of every measured type, relative to the types that jobs have chosen.

        It is the mean over the jobs, by the slots that they want. A type is worth nothing to a job that has
        measured other types only.
        """
        wants = {job: max(1, self.memory.wanted.get(job, 1)) for job in self._references}
        found: dict[str, float] = {}
        for job, chosen in self._references.items():
            for name, rate in self.rates[job].items():
                found[name] = found.get(name, 0.0) + wants[job] * rate / self.rates[job][chosen]
        return {name: speed / sum(wants.values()) for name, speed in found.items()}

    def speed(self, one: Pool | Instance) -> float:
        """Return the relative goodput of a slot of an instance or a pool's next one; 1 if not measured."""
        return self._speeds.get(self.type_of(one), 1.0)

    @cached_property
    def _running(self) -> dict[str, int]:
        """Return the replicas of each job."""
        return running_replicas(self.seen)

    @cached_property
    def _idle(self) -> Counter[str]:
        """Return the slots of each type that have no replica, those of pending nodes included."""
        found, nodes = Counter[str](), self.seen.nodes
        for pool in self.seen.capacity.pools:
            found[self.type_of(pool)] += (self.pending(pool) - self.early(pool)) * pool.slots
            for i in self.staying(pool):
                used = sum(nodes[i.id].replicas.values()) if i.id in nodes else 0
                found[self.type_of(i)] += 0 if self.is_leaving(i) else max(0, i.slots - used)
        return found

    def can_use(self, job: JobInfo, node_type: str) -> bool:
        """Return whether a node of the type is of use to the job.

        A job that waits can use each type that is measured for it, or any type if none is. A job runs at the
        pace of its slowest node. So a job that runs can use its present type, and those that are measured to
        be at least as fast.
        """
        here, rates = self.types_at_work.get(job.name, ""), self.rates.get(job.name, {})
        slowest = rates.get(here, math.inf) if here else 0.0
        return here == node_type or rates.get(node_type, -1.0 if rates or here else 0.0) >= slowest

    @cached_property
    def claims(self) -> list[tuple[int, list[Offer]]]:
        """Return (slots to buy, offers) for each job that lacks slots, where there are several types.

        Waiting jobs come first. Idle slots that a job can use are not bought, nor do replicas count that are
        on leaving nodes.
        """
        staying = {i.id for p in self.seen.capacity.pools for i in self.staying(p) if not self.is_leaving(i)}
        nodes = {name: node for name, node in self.seen.nodes.items() if name in staying}
        lacks = lacking(replace(self.seen, nodes=nodes), self.memory) if self.rates else {}
        idle, found = self._idle.copy(), []
        for job in sorted(self.seen.jobs, key=lambda job: job.name in self.types_at_work):
            lack, offers = lacks.get(job.name, 0), self.offers_for(job)
            if lack and job.min_nodes > 1 and job.name not in self.types_at_work:
                lack = max(lack, job.min_nodes * min((offer.slots for offer in offers), default=0))
            for name in [name for name in idle if self.can_use(job, name)]:
                used = min(lack, max(0, idle[name]))
                idle[name], lack = idle[name] - used, lack - used
            found += [(lack, offers)] if lack else []
        return found

    def purchase(self, slots: int, nodes: int, budget: float) -> dict[str, int]:
        """Return how many nodes of each pool to buy, job by job, then for --min-nodes.

        Args:
            slots: Slots to buy at most.
            nodes: Nodes to buy at most.
            budget: What these may cost per hour.
        """
        bought = Counter[str]()
        for lack, offers in self.claims or [(slots, self.offers)]:
            left = [replace(offer, available=offer.available - bought[offer.pool]) for offer in offers]
            more = buy(left, min(lack, slots), nodes - bought.total(), budget)
            bought.update(more)
            slots -= min(lack, sum(o.slots * more.get(o.pool, 0) for o in offers))
            budget -= sum(o.limit_price * more.get(o.pool, 0) for o in offers)
        least = min(self.settings.min_nodes - self.have(), nodes) - bought.total()
        left = [replace(offer, available=offer.available - bought[offer.pool]) for offer in self.offers]
        bought.update(buy(left, least * max((o.slots for o in left), default=0), least, budget))
        return dict(bought)

    @cached_property
    def offers(self) -> list[Offer]:
        """Return what may be bought now for any job, else the type with the lowest price of a slot."""
        every = self.every_offer
        types = {offer.node_type for job in self.seen.jobs for offer in self.offers_for(job)}
        types = types or {offer.node_type for offer in every[:1]}
        return [offer for offer in every if offer.node_type in types]

    def offers_for(self, job: JobInfo) -> list[Offer]:
        """Return what may be bought now for the job: of the types that it can use, if any is for sale.

        If none is, a job that runs gets a slower type only where it is faster with more replicas of that. It
        gets no type that is not measured. The speed of these offers is the job's goodput. If no type is
        measured for the job, the speeds of other jobs count.

        Of a type that is not measured a job gets as many nodes as it needs to run, mostly one. The type has
        to have the lowest price of a slot, and the job must have measured none, or none that is for sale. If
        no type that the pools sell is measured, only the type with the lowest price of a slot is bought.
        """
        own, here = self.rates.get(job.name, {}), self.types_at_work.get(job.name, "")
        rates, sold = own or self._speeds, {self.type_of(pool) for pool in self.seen.capacity.pools}
        running, size = self._running.get(job.name, 0), self.memory.wanted.get(job.name, 0)
        least = rates.get(here, 0.0) * running / max(size, 1)
        bound = here and not sold.isdisjoint(own)
        every = [offer for offer in self.every_offer if not bound or offer.node_type in own]
        sure = set(own) or {*rates, here}
        usable = [offer for offer in every if self.can_use(job, offer.node_type)]
        usable = usable or [offer for offer in every if rates.get(offer.node_type, math.inf) > least]
        if sold.isdisjoint(rates):
            return [offer for offer in usable if offer.node_type == usable[0].node_type]
        known = [offer for offer in usable if offer.node_type in sure]
        known = [replace(offer, speed=rates.get(offer.node_type, offer.speed)) for offer in known]
        if not usable or usable[0].node_type in sure or (known and job.measured):
            return known
        first = usable[0]
        running += self._idle[first.node_type]
        most = -((running - max(job.min_nodes * first.slots, job.min_replicas)) // first.slots)
        return [replace(first, available=min(first.available, most)), *known] if most > 0 else known

    @cached_property
    def every_offer(self) -> list[Offer]:
        """Return what all pools could give, whatever its type. The lowest price of a slot comes first."""
        pools = [pool for pool in self.seen.capacity.pools if not self.shut(pool)]
        rooms = [(pool, pool.maximum - max(pool.desired, len(self.staying(pool)))) for pool in pools]
        found = [self._offer(pool, room) for pool, room in rooms if room > 0]
        return sorted(found, key=lambda o: (o.slot_price * o.speed, o.preemptible, o.pool))

    def _offer(self, pool: Pool, available: int) -> Offer:
        overhead, dearer = self._overhead(pool), surcharge(self.pool(pool.name))
        price, highest = pool.hourly_price, self.limit_price(pool)
        kind, speed = self.type_of(pool), self.speed(pool)
        return Offer(
            pool.name, available, pool.slots, price, pool.preemptible, overhead, highest, kind, speed, dearer
        )

    def limit_price(self, pool: Pool) -> float:
        """Return the price per hour that an instance of the pool may have, by its types and by experience."""
        return max(pool.hourly_price, pool.highest_price, self.pool(pool.name).highest_price)

    def _slot_price(self, pool: Pool) -> float:
        """Return the price of a useful hour of a slot of the pool's next node, whatever its type."""
        return pool.hourly_price * (1 + self._overhead(pool)) / pool.slots

    def _overhead(self, pool: Pool) -> float:
        """Return the fraction of a node's time that interruptions are expected to cost."""
        rate = interruptions_per_hour(self.pool(pool.name)) if pool.preemptible else 0.0
        return rate * self.settings.interruption_cost / 3600

    def usual(self) -> tuple[int, float, float]:
        """Return (slots, price of a slot hour, seconds to boot) of the next node to buy.

        Where nothing is offered the dearest present instance stands for it.
        """
        if offers := self.offers:
            best = min(offers, key=lambda o: (o.slot_price, o.preemptible, o.pool))
            boot = self.pool(best.pool).boot
            return best.slots, best.paid_price, self.settings.boot if boot is None else boot
        there = [i for i in self.seen.capacity.instances if i.state is not InstanceState.LEAVING]
        known: list[Instance | Pool] = [*(there or self.seen.capacity.pools[:1])]
        dearest = max(known, key=lambda i: i.hourly_price / i.slots, default=None)
        slots, price = (dearest.slots, dearest.hourly_price) if dearest else (1, 0.0)
        return slots, price / slots, self.settings.boot

    def levels(self) -> list[Level]:
        """Return slots by price: the present supply, then what can be bought.

        Prices are without surcharges. An offer costs at least what those cost that are bought before it: jobs
        are not made larger for cheap nodes where dear ones are chosen.
        """
        offers, price = list[Level](), 0.0
        for offer in sorted(self.offers, key=lambda o: (o.slot_price, o.preemptible, o.pool)):
            price = max(price, offer.paid_price)
            offers.append(Level(price, offer.available * offer.slots))
        return [*self.current_supply(), *offers] or [Level(self.usual()[1], 0)]

    def current_supply(self) -> list[Level]:
        """Return slots by price of the instances that stay and of those that are pending."""
        slots: dict[float, int] = {}

        def add(price: float, count: int) -> None:
            slots[price] = slots.get(price, 0) + count

        for pool in self.seen.capacity.pools:
            dearer = 1 + self._overhead(pool)
            kept = sorted((i for i in self.staying(pool) if not self.is_leaving(i)), key=lambda i: i.slots)
            for instance in kept[self.early(pool) :]:
                price = instance.hourly_price * dearer / self.speed(instance)
                add(price / instance.slots, instance.slots)
            if self.pending(pool):
                add(self._slot_price(pool) / self.speed(pool), self.pending(pool) * pool.slots)
        return [Level(price, count) for price, count in slots.items()]

    def wants(self) -> tuple[tuple[Want, ...], int]:
        """Return what each job should have, and the number of slots that are worth their price."""
        most = sum(pool.maximum * pool.slots for pool in self.seen.capacity.pools)
        largest = max((pool.slots for pool in self.seen.capacity.pools), default=1)
        most = min(most, self.settings.max_nodes * largest) + self.seen.other_slots
        seen = self.seen
        slots, _, boot = self.usual()
        there = sum(level.slots for level in self.current_supply()) + seen.other_slots
        demand = Demand(
            [replace(job, model=job.model_on(self._references.get(job.name, ""))) for job in seen.jobs],
            slots,
            self.settings,
            seen.now,
            most,
            self.memory.wanted,
            seen.unsettled,
            self._running,
            max(0, there - sum(self._running.values())),
            boot,
        )
        return clear(demand, self.levels(), self.seen.other_slots)

    def have(self) -> int:
        """Return the nodes of all pools: those that stay and those that are pending."""
        return sum(self.supply(pool) for pool in self.seen.capacity.pools)

    def target(self, wanted: int) -> Target:
        """Return how many nodes there should be.

        Args:
            wanted: Slots that are worth their price, those of nodes outside the provider included.
        """
        slots, _, _ = self.usual()
        low, now = self.memory.low_since, self.seen.now
        settled = self.have() <= self.settings.max_nodes
        sizes, fixed = self.sizes(settled)
        found = target(
            max(0, wanted - self.seen.other_slots),
            slots,
            sizes,
            self.settings,
            since_change=now - self.memory.changed,
            low_for=0.0 if low is None else now - low,
            fixed=fixed,
            least=max(0, least_nodes(self.seen.jobs) - self.seen.other_nodes),
        )
        return replace(found, settled=settled)

    def afford(self, goal: Target) -> Target:
        """Return `goal` with at most the nodes that the budget allows: prices may have risen."""
        hours, most = sum(pool.hours for pool in self.memory.pools.values()), self.settings.max_node_hours
        nodes = max(goal.nodes, len(self.seen.capacity.instances))
        saving = nodes * self.settings.stop_reserve / HOUR
        if goal.nodes and hours + saving >= most:
            text = (
                f"nodes have run for {hours:.2f} h, and up to {saving:.2f} h more until their state is saved"
            )
            text += f": none are left of --max-node-hours {most:g}"
            return replace(goal, nodes=0, reason=text, keep=math.inf, most=0, settled=False)
        budget, there = self.settings.max_hourly_cost, self.hourly()
        if there <= budget + 1e-9:
            return goal
        prices = sorted(
            i.hourly_price
            for pool in self.seen.capacity.pools
            for i in self.staying(pool)
            if not self.is_leaving(i)
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
        """Return the price per hour of all instances that stay or are pending."""
        total = 0.0
        for pool in self.seen.capacity.pools:
            staying = [i for i in self.staying(pool) if not self.is_leaving(i)]
            total += sum(i.hourly_price for i in staying) + self.pending(pool) * self.limit_price(pool)
        return total

    def present(self) -> tuple[int, float]:
        """Return (nodes, price per hour) of every instance, leaving ones too, and of the pending ones."""
        coming = [(self.pending(pool), self.limit_price(pool)) for pool in self.seen.capacity.pools]
        there = self.seen.capacity.instances
        return (
            len(there) + sum(count for count, _ in coming),
            sum(i.hourly_price for i in there) + sum(count * price for count, price in coming),
        )

    def is_leaving(self, instance: Instance) -> bool:
        """Return whether the instance leaves and its pool does not replace it."""
        entry = self.memory.known[instance.id]
        return bool(entry.exchange) or (bool(entry.leaving) and not entry.replace)

    def useful_price(self, instance: Instance) -> float:
        """Return the price of a useful hour of the instance: what interruptions cost included."""
        pool = self.seen.capacity.pool(instance.pool)
        return instance.hourly_price * (1 + self._overhead(pool))


def learn_types(memory: Memory, seen: Observation) -> Memory:
    """Remember a type that the agents on each family of instance types report.

    Where they differ the type does not change while one of them reports it.
    """
    there = [i for i in seen.capacity.instances if i.id in seen.nodes]
    told = [(_family(i.instance_type), seen.nodes[i.id].node_type) for i in there]
    kept = {family: name for family, name in memory.node_types.items() if (family, name) in told}
    return replace(memory, node_types={**memory.node_types, **dict(told), **kept})


def _family(instance_type: str) -> str:
    """Return what instance types with the same GPU have in common: "g5" of g5.xlarge."""
    return instance_type.partition(".")[0]


def cost_of_loss(instance: Instance, entry: Known, seen: Observation) -> tuple[object, ...]:
    """Return a sort key: the instance whose loss costs least comes first.

    In this order: instances that leave anyway, at risk, not registered, idle, expensive, with few replicas,
    without the first node of a job (a job that loses the node of rank 0 restarts, where it can lose any
    other in place), and recently started.
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
