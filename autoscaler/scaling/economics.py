"""How many nodes there should be: pure arithmetic over goodput curves and prices.

An hour of a node costs `p` per slot, and an hour that a job takes longer is worth `v` (`hour_value`).
With goodput g(r) on r replicas a job's remaining work W costs

    (v + p · r) · W / g(r)

until its end, so the size that is worth its price minimises (v + p r) / g(r), whatever W is: goodput per
dollar, where time has a price too. v = 0 is the cheapest way to the end (mostly one replica), a large
v the fastest. Summed over the jobs this is the least of (cost + v × total completion time), which is
what a trade between the two can be; the jobs are independent of each other as long as nodes can be had,
and where they can not, the policy shares what there is.

A deadline replaces v: the cheapest size, p r / g(r), among those that finish in time.

What is not there yet has to boot, and a change makes a job pause. With b seconds of the one (none for
slots that are there or coming) and q of the other, a job of r now, g(r) · b samples on, needs

    T(s) = b + q + (W - g(r) b) / g(s)

to its end at size s, and (v + p s) T(s) is what is least: a job that is nearly done buys nothing. Where
no end is declared W is without bounds, and this is the above.

*Utilisation* is the slots that are worth their price over the slots there are. It is kept in a band:
above it nodes are asked for, below it for a while (`shrink_after`) nodes are let go, inside nothing
moves. So a demand that wavers by less than the band's width never buys and sells.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from adaptdl_elastic.autoscaler.policy.curves import goodputs
from adaptdl_elastic.autoscaler.policy.policy_types import JobInfo

HOUR = 3600.0
_HALVINGS = 10  # of the span between two prices, to find the one at which what there is suffices


@dataclass(frozen=True)
class ScalingSettings:
    """What the owner of the bill decides. Times in seconds, money in the price table's currency."""

    hour_value: float | None = None  # what an hour of a job's time is worth; None: `slots_value` slot hours
    slots_value: float = 4.0
    low: float = 0.85  # the band of utilisation
    high: float = 1.0
    grow_after: float = 15.0  # since the last change, before more is asked for
    shrink_after: float = 120.0  # below the band for so long, before anything is let go
    min_nodes: int = 0
    max_nodes: int = 1_000_000
    max_hourly_cost: float = math.inf
    deadlines: Mapping[str, float] = field(default_factory=dict)  # job, or "*", to seconds since the epoch
    deadline_margin: float = 0.1  # forecasts are taken for so much too good
    boot: float = 120.0  # from an order to a node, until a pool has shown how long it takes
    pause: float = 5.0  # that a change costs a job of which nothing is known
    boot_timeout: float = 600.0  # from an instance's order to its registration
    max_replacements: int = 3  # of instances that never became a node, in a row and pool
    drain_timeout: float = 600.0
    broke_for: float = 600.0  # after nodes were let go because the budget was exceeded, none is bought
    back_off: float = 60.0  # after a pool had nothing to give; doubles up to `max_back_off`
    max_back_off: float = 1800.0
    interruption_cost: float = 180.0  # seconds of a node that an interruption costs
    gap: float = 300.0  # without a look, after which what is missing is no interruption: nobody was there
    max_interruptions: float = 1.0  # per spot node and hour, above which spot is not bought
    hold_every: float = 30.0  # heartbeats of lifecycle hooks
    hysteresis: float = 0.05  # a size is left only for one that is cheaper by this fraction
    exploration: float = 2.0  # a job is not sized beyond so many times what it was profiled on

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.high < math.inf:
            raise ValueError(
                f"utilisation band {self.low}:{self.high}: needs 0 < low <= high, and no infinity"
            )
        if not 0 <= self.min_nodes <= self.max_nodes:
            raise ValueError(
                f"--min-nodes {self.min_nodes} and --max-nodes {self.max_nodes}: needs 0 <= min <= max"
            )
        if not self.max_hourly_cost > 0:  # nan, too
            raise ValueError(f"--max-hourly-cost {self.max_hourly_cost:g}: needs a positive amount per hour")
        for option, value in (
            ("--hour-value", 0.0 if self.hour_value is None else self.hour_value),
            ("--shrink-after", self.shrink_after),
            ("--max-interruptions", self.max_interruptions),
        ):
            if not 0 <= value < math.inf:
                raise ValueError(f"{option} {value:g}: needs a number from 0 on")
        if not 0 < self.boot_timeout < math.inf:
            raise ValueError(f"--boot-timeout {self.boot_timeout:g}: needs more than 0 seconds")


@dataclass(frozen=True)
class Want:
    """The size of one job that is worth its price."""

    job: str
    replicas: int
    goodput: float = 0.0  # samples per second at the initial batch size; 0: not known
    seconds_left: float | None = None  # at that size
    late: bool = False  # no size that can be tried meets its deadline


def sizes(most: int, slots: int) -> list[int]:
    """Replica counts worth a look: powers of two within a node, then whole nodes; `most` as well."""
    within = [2**k for k in range(slots.bit_length()) if 2**k < slots]
    whole = list(range(slots, most + 1, slots))
    return sorted({r for r in [*within, *whole, most] if 1 <= r <= most})


@dataclass(frozen=True)
class Demand:
    """What jobs want at any price.

    Args:
        jobs: as the policy is asked about them.
        slots: per node.
        settings: whose `hour_value`, `deadlines` and `exploration` are used.
        now: seconds since the epoch, to compare deadlines with.
        most_slots: of the largest cluster there could be.
        before: what each job was found to be worth at the last look; kept while it is nearly as good.
        unsettled: jobs of which a change is under way: one of a given size may be on its way to what it
            was worth before.
        running: replicas of each job now.
        idle: slots beyond those that are there or coming: they need not boot.
        boot: seconds from an order to a node.
    """

    jobs: Sequence[JobInfo]
    slots: int
    settings: ScalingSettings
    now: float
    most_slots: int
    before: Mapping[str, int] = field(default_factory=dict)
    unsettled: Collection[str] = ()
    running: Mapping[str, int] = field(default_factory=dict)
    idle: int = 0
    boot: float = 0.0

    @cached_property
    def _free(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """(replica counts, goodput at each) of the jobs whose size is ours to choose."""
        free = [j for j in self.jobs if j.model is not None and j.requested_replicas is None]
        curves = _curves(free, self.slots, self.most_slots, self.settings.exploration)
        return {job.name: curve for job, curve in zip(free, curves, strict=True)}

    def at(self, slot_price: float) -> tuple[Want, ...]:
        """For every job the size that is worth its price, of one slot and hour, interruptions included."""
        return tuple(self._want(job, slot_price) for job in self.jobs)

    def _want(self, job: JobInfo, slot_price: float) -> Want:
        if job.name not in self._free:
            least = self.before.get(job.name, 0) if job.name in self.unsettled else 0
            return Want(job.name, max(_fixed(job, self.slots, self.most_slots), least))
        settings, (counts, rates) = self.settings, self._free[job.name]
        if not len(counts):
            return Want(job.name, _least(job, self.slots))
        value = settings.hour_value
        if value is None:  # in slot hours: then it is all the same what one costs, were it nothing
            slot_price, value = 1.0, settings.slots_value
        deadline, late = deadline_of(settings, job.name), False
        if deadline is not None and job.declared is not None:
            seconds = self._seconds(job, counts, rates, job.declared * (1 + settings.deadline_margin))
            in_time = seconds <= max(deadline - self.now, 0.0)
            late = not bool(in_time.any())
            costs = seconds if late else np.where(in_time, slot_price * counts * seconds, np.inf)
        else:
            left = math.inf if job.declared is None else job.declared
            costs = (value + slot_price * counts) * self._seconds(job, counts, rates, left)
        best = int(np.argmin(costs))
        kept = np.flatnonzero(counts == self.before.get(job.name))
        if len(kept) and not late and costs[kept[0]] <= costs[best] * (1 + settings.hysteresis):
            best = int(kept[0])
        rest = None
        if job.declared is not None:
            rest = float(self._seconds(job, counts, rates, job.declared)[best])
        return Want(job.name, int(counts[best]), float(rates[best]), rest, late)

    def _seconds(self, job: JobInfo, counts: np.ndarray, rates: np.ndarray, left: float) -> np.ndarray:
        """To the job's end at each size, `left` samples from here; without a known end, of each sample.

        What has to boot comes later, and until then the job runs as it does; any other size than the
        present one costs a pause.
        """
        if not math.isfinite(left):
            return np.asarray(1 / rates)
        running = self.running.get(job.name, 0)
        rate = _rate(counts, rates, running)
        boot = np.where(counts > running + self.idle, self.boot, 0.0)
        pause = self.settings.pause if job.pause is None else job.pause
        change = np.where((counts == running) | (running == 0), 0.0, pause)
        later = boot + change + np.maximum(left - rate * boot, 0.0) / rates
        return np.asarray(np.where(left <= rate * boot, left / max(rate, 1e-9), later))


@dataclass(frozen=True)
class Level:
    """Slots of one price per useful slot and hour: there, asked for, or to be had."""

    slot_price: float
    slots: int


def clear(demand: Demand, levels: Sequence[Level], free: int = 0) -> tuple[tuple[Want, ...], int]:
    """Where supply meets demand: (what each job is to have, slots that are worth their price).

    Each level is filled only as far as jobs want slots at *its* price. So what is cheap is never judged by
    the price of what would be bought after it. Of the dearest level more may be wanted than there is:
    it is to be said that it can not be had. `free`: slots that cost nothing, and are used first.
    """
    ladder = sorted(levels, key=lambda level: level.slot_price)
    room, filled, low, found = free, -1, 0, demand.at(ladder[0].slot_price)
    for place, level in enumerate(ladder):
        room += level.slots
        wanted = demand.at(level.slot_price)
        total = _replicas(wanted)
        fits = total if place == len(ladder) - 1 else min(total, room)
        if fits > filled:
            filled, low, found = fits, place, wanted
        if total <= room:
            break
    if _replicas(found) > filled:
        found = _shadow(demand, filled, ladder[low].slot_price, ladder[low + 1].slot_price)
    return found, filled


def _shadow(demand: Demand, room: int, low: float, high: float) -> tuple[Want, ...]:
    """What is wanted at the least price, between these two, at which all of it has room."""
    best = demand.at(high)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        wanted = demand.at(middle)
        if _replicas(wanted) <= room:
            best, high = wanted, middle
        else:
            low = middle
    return best


def _replicas(wanted: Sequence[Want]) -> int:
    return sum(want.replicas for want in wanted)


def least_nodes(jobs: Sequence[JobInfo]) -> int:
    """Nodes without which some of the jobs could not run: two jobs of several nodes each share none."""
    return sum(job.min_nodes for job in jobs if job.min_nodes > 1)


def _fixed(job: JobInfo, slots: int, most_slots: int) -> int:
    """A job that says its size, or says nothing yet and so gets its least."""
    return min(max(job.requested_replicas or 0, _least(job, slots)), max(most_slots, 1))


def _fewest(job: JobInfo, slots: int) -> int:
    """Replicas on a node at least: by its nodes' word, else by its own, on nodes of so many slots."""
    if job.limits:
        return max(1, min(limit.min_slots for limit in job.limits.values()))
    return max(1, min(job.min_slots, slots))


def _least(job: JobInfo, slots: int) -> int:
    """The smallest size of a job on nodes of so many slots."""
    return taken(job, max(1, job.min_replicas, job.min_nodes * _fewest(job, slots)), slots)


def taken(job: JobInfo, replicas: int, slots: int) -> int:
    """Slots that a job takes for so many replicas, on nodes of `slots`.

    On as few nodes as hold them each has its least: what that comes to is more than was wanted, where
    nodes are taken whole (`--nproc-per-node=4`).
    """
    fewest = _fewest(job, slots)
    return max(replicas, -(-replicas // max(slots, fewest)) * fewest)


def deadline_of(settings: ScalingSettings, job: str) -> float | None:
    """When a job is to have ended, in seconds since the epoch."""
    return settings.deadlines.get(job, settings.deadlines.get("*"))


def _curves(
    jobs: Sequence[JobInfo], slots: int, most_slots: int, exploration: float
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(replica counts, goodput at each) of every job; all jobs in one evaluation."""
    if not jobs:
        return []
    tops = [_most(job, slots, most_slots, exploration) for job in jobs]
    every = np.array(sizes(max(tops), slots) + sorted(set(tops)), dtype=int)
    every = np.unique(every)
    models = [job.model for job in jobs if job.model is not None]
    table = goodputs(models, np.ceil(every / slots).astype(int), every).goodput
    found = []
    for job, top, row in zip(jobs, tops, table, strict=True):
        usable = (every <= top) & (every >= min(_least(job, slots), top)) & (row > 0)
        fewest = _fewest(job, slots)
        usable &= every >= -(-every // max(slots, fewest)) * fewest  # as `taken` has it
        found.append((every[usable], row[usable]))
    return found


def _most(job: JobInfo, slots: int, most_slots: int, exploration: float) -> int:
    """The largest size that may be tried."""
    profiled = int(exploration * max(job.max_profiled_replicas, _least(job, slots)))
    nodes = job.max_nodes if job.max_nodes is not None else most_slots
    return max(1, min(profiled, job.max_replicas, nodes * slots, most_slots))


def _rate(counts: np.ndarray, rates: np.ndarray, replicas: int) -> float:
    """Goodput at what a job has now."""
    return float(np.interp(replicas, counts, rates)) if replicas else 0.0


@dataclass(frozen=True)
class Target:
    """How many slots there should be, and why."""

    slots: float  # worth their price
    nodes: int  # that there should be, after band and bounds
    utilisation: float
    reason: str
    keep: float = math.inf  # slots below which nothing goes of its own accord
    floor: int = 0  # nodes, the same
    most: int = 1_000_000  # nodes above which something goes whatever is kept
    settled: bool = False  # only nodes go that no job has, or is to have, of which a change is under way


def target(
    wanted: float,
    slots: int,
    there: Sequence[int],
    settings: ScalingSettings,
    *,
    since_change: float,
    low_for: float,
    fixed: tuple[int, int] = (0, 0),
    least: int = 0,
) -> Target:
    """How many nodes there should be.

    Args:
        wanted: slots that are worth their price.
        slots: of the node that would be bought next.
        there: slots of each node that there is, or that was asked for, in the order in which they would go.
        settings: the band, the waits and the bounds.
        since_change: seconds since more was asked for or something was let go.
        low_for: seconds for which utilisation has been below the band.
        fixed: (nodes, slots) of those that can not go.
        least: nodes below which a job could not run at all, however few slots it needs.
    """
    have, have_slots = len(there) + fixed[0], sum(there) + fixed[1]
    floor = min(max(settings.min_nodes, least), settings.max_nodes)
    missing = math.ceil((wanted - have_slots) / slots - 1e-9)
    need = min(max(have + max(missing, 0), floor), settings.max_nodes)
    used = wanted / have_slots if have_slots else (math.inf if wanted else settings.high)
    text = "1 slot is worth its price" if wanted == 1 else f"{wanted:g} slots are worth their price"
    text += f", {have_slots} {'is' if have_slots == 1 else 'are'} there"
    if need > have and (used > settings.high or have < floor):
        text += f", {floor} nodes are the least" if have < floor else ""
        if since_change < settings.grow_after and have:
            return Target(wanted, have, used, f"{text}: more in {settings.grow_after - since_change:.0f} s")
        return Target(wanted, need, used, f"{text}: {have} -> {need} nodes")
    left = have - len(going(there, wanted, floor, settings.max_nodes, fixed))
    if left < have and (used < settings.low or have > settings.max_nodes):
        if low_for < settings.shrink_after and have <= settings.max_nodes:
            return Target(wanted, have, used, f"{text}: fewer if it stays so {settings.shrink_after:.0f} s")
        reason = f"{text}: {have} -> {left} nodes"
        return Target(wanted, left, used, reason, wanted, floor, settings.max_nodes)
    return Target(wanted, have, used, f"{text}: kept")


def going(
    there: Sequence[int], keep: float, floor: int, most: int, fixed: tuple[int, int] = (0, 0)
) -> list[int]:
    """Places in `there` of the nodes that go: those that can be spared, and what is beyond `most`."""
    nodes, slots = len(there) + fixed[0], sum(there) + fixed[1]
    gone = []
    for place, size in enumerate(there):
        if nodes > most or (nodes > floor and slots - size >= keep - 1e-9):
            gone.append(place)
            nodes, slots = nodes - 1, slots - size
    return gone


@dataclass(frozen=True)
class Offer:
    """Nodes that could be bought of one pool."""

    pool: str
    available: int
    slots: int
    hourly_price: float
    preemptible: bool = False
    overhead: float = 0.0  # fraction of its time that is lost to interruptions

    @property
    def slot_price(self) -> float:
        """Of one useful slot and hour."""
        return self.hourly_price * (1 + self.overhead) / self.slots


def buy(offers: Sequence[Offer], slots: int, nodes: int, budget: float) -> dict[str, int]:
    """How many of each pool make up `slots`, the cheapest first.

    Never more than `nodes` nodes, nor more per hour than `budget`. A pool too dear for the rest of the
    budget is passed over.
    """
    bought: dict[str, int] = {}
    for offer in sorted(offers, key=lambda o: (o.slot_price, o.preemptible, o.pool)):
        while slots > 0 and nodes > 0 and bought.get(offer.pool, 0) < offer.available:
            if offer.hourly_price > budget + 1e-9:
                break
            bought[offer.pool] = bought.get(offer.pool, 0) + 1
            slots, nodes, budget = slots - offer.slots, nodes - 1, budget - offer.hourly_price
    return bought
