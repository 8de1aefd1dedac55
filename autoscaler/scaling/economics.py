"""Decide how many nodes there should be: pure arithmetic on goodput curves and prices.

An hour of a slot costs `p`, and each hour that a job takes longer costs `v` (`hour_value`). With goodput g(r)
on r replicas, the remaining work W of a job costs

 (v + p · r) · W / g(r)

until its end. So the size that is worth its price minimises (v + p r) / g(r), whatever W is: it is goodput
per dollar, where time has a price, too. v = 0 gives the cheapest way to the end (mostly one replica), a large
v the fastest. Summed over the jobs this minimises cost + v × total completion time. The jobs are independent
of each other as long as nodes can be bought; otherwise the policy shares what there is.

A deadline replaces v: the size is the cheapest one, p r / g(r), among those that finish in time.

New nodes have to boot, and a change makes a job pause. With b seconds of booting (0 for slots that exist or
are ordered) and a pause of q seconds, a job that has r replicas now and does g(r) · b samples meanwhile needs

 T(s) = b + q + (W - g(r) b) / g(s)

until its end at size s, and (v + p s) T(s) is minimised: a job that is nearly done buys nothing. Without a
declared end W is infinite, which gives the first formula.

*Utilisation* is the number of slots that are worth their price, divided by the slots that exist. It is kept
in a band: above the band nodes are bought; below it for some time (`shrink_after`) nodes are released; inside
nothing changes. So a demand that varies by less than the width of the band never buys and sells.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np

from adaptdl_elastic.autoscaler.policy.curves import goodputs
from adaptdl_elastic.autoscaler.policy.policy_types import GoodputModel, JobInfo

HOUR = 3600.0
_HALVINGS = 10  # bisections between two prices, to find the price at which the supply suffices


@dataclass(frozen=True)
class ScalingSettings:
    """The user's settings of the autoscaler. Times in seconds, money in the currency of the price table."""

    hour_value: float | None = None  # value of an hour of a job's time; None: `slots_value` slot hours
    slots_value: float = 4.0
    low: float = 0.85  # lower bound of the band of utilisation
    high: float = 1.0
    grow_after: float = 15.0  # after the last change, before more is requested
    shrink_after: float = 120.0  # below the band, before anything is released
    min_nodes: int = 0
    max_nodes: int = 1_000_000
    max_hourly_cost: float = math.inf
    max_node_hours: float = math.inf  # of all nodes since the first one
    max_job_costs: Mapping[str, float] = field(default_factory=dict)  # by job, or "*": of one run
    stop_reserve: float = 120.0  # of a job's costs that are kept for its stop; a stop waits for so long
    deadlines: Mapping[str, float] = field(default_factory=dict)  # job, or "*" → seconds since the epoch
    deadline_margin: float = 0.1  # fraction by which forecasts are assumed to be too good
    boot: float = 120.0  # seconds from a request to a running node, until measured
    pause: float = 5.0  # pause of a change, for a job whose pauses are unknown
    boot_timeout: float = 600.0  # from an instance's order to its registration
    max_replacements: int = 3  # replacements in a row of instances that never became a node, per pool
    idle_after: float = 300.0  # without a replica, before a node is released
    max_wasted: int = 3  # purchases in a row with too little useful work that close an on-demand pool
    lost_work: float = 600.0  # seconds of work that are lost with a node that is lost without a notice
    drain_timeout: float = 600.0
    broke_for: float = 600.0  # after nodes were released because of the budget, no node is bought for so long
    back_off: float = 60.0  # after a pool had no capacity; doubles up to `max_back_off`
    max_back_off: float = 1800.0
    interruption_cost: float = 180.0  # seconds of a node's time that an interruption costs
    gap: float = 300.0  # after such a gap between rounds, missing instances do not count as interrupted
    exchange_saving: float = 0.2  # fraction by which a node must be cheaper to take another one's place
    exchange_after: float = 300.0  # from the last purchase or exchange to the next exchange
    exchange_retry: float = (
        1800.0  # the same after the cheap pool had no capacity, if the old node goes first
    )
    hold_every: float = 30.0  # between heartbeats of lifecycle hooks
    hysteresis: float = 0.05  # a size is changed only if that is cheaper by this fraction
    exploration: float = 2.0  # a job gets at most this multiple of the replicas that it was profiled on

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.high < math.inf:
            raise ValueError(
                f"utilisation band {self.low}:{self.high}: needs 0 < low <= high, and no infinity"
            )
        if not 0 <= self.min_nodes <= self.max_nodes:
            raise ValueError(
                f"--min-nodes {self.min_nodes} and --max-nodes {self.max_nodes}: needs 0 <= min <= max"
            )
        if not self.max_hourly_cost > 0:  # rejects NaN, too
            raise ValueError(f"--max-hourly-cost {self.max_hourly_cost:g}: needs a positive amount per hour")
        for job, limit in self.max_job_costs.items():
            if not 0 < limit < math.inf:
                named = "" if job == "*" else f"{job}="
                raise ValueError(f"--max-job-cost {named}{limit:g}: needs a positive amount")
        for option, value in (
            ("--hour-value", 0.0 if self.hour_value is None else self.hour_value),
            ("--shrink-after", self.shrink_after),
        ):
            if not 0 <= value < math.inf:
                raise ValueError(f"{option} {value:g}: needs a number from 0 on")
        if not 0 < self.idle_after < math.inf:
            raise ValueError(f"--idle-minutes {self.idle_after / 60:g}: needs more than 0 minutes")
        if not 0 < self.boot_timeout < math.inf:
            raise ValueError(f"--boot-timeout {self.boot_timeout:g}: needs more than 0 seconds")


@dataclass(frozen=True)
class Want:
    """The size of one job that is worth its price."""

    job: str
    replicas: int
    goodput: float = 0.0  # samples per second at the initial batch size; 0: unknown
    seconds_left: float | None = None  # at that size
    late: bool = False  # no possible size meets the deadline


def sizes(most: int, slots: int) -> list[int]:
    """Return replica counts to evaluate: powers of two within a node, then whole nodes, and `most`."""
    within = [2**k for k in range(slots.bit_length()) if 2**k < slots]
    whole = list(range(slots, most + 1, slots))
    return sorted({r for r in [*within, *whole, most] if 1 <= r <= most})


@dataclass(frozen=True)
class Demand:
    """What jobs want at a given price.

    Args:
        jobs: as in the policy's question.
        slots: slots per node.
        settings: `hour_value`, `deadlines` and `exploration` are used.
        now: seconds since the epoch.
        most_slots: slots of the largest possible cluster.
        before: the sizes of the last round; kept while they are nearly as good.
        unsettled: jobs whose size is changing; one with a fixed size may be on its way to the size of the
            last round.
        running: present replicas of each job.
        idle: further slots that exist or are ordered; they need not boot.
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
        """(replica counts, goodput at each) of the jobs whose size can be chosen."""
        free = [j for j in self.jobs if j.model is not None and j.requested_replicas is None]
        curves = _curves(free, self.slots, self.most_slots, self.settings.exploration)
        return {job.name: curve for job, curve in zip(free, curves, strict=True)}

    def at(self, slot_price: float) -> tuple[Want, ...]:
        """Return every job's size at this price of a slot hour, interruptions included."""
        return tuple(self._want(job, slot_price) for job in self.jobs)

    def _want(self, job: JobInfo, slot_price: float) -> Want:
        if job.name not in self._free:
            least = self.before.get(job.name, 0) if job.name in self.unsettled else 0
            return Want(job.name, max(_fixed(job, self.slots, self.most_slots), least))
        settings, (counts, rates) = self.settings, self._free[job.name]
        if not len(counts):
            return Want(job.name, _least(job, self.slots))
        value = settings.hour_value
        if value is None:  # value in slot hours: the price cancels out, even if it is 0
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
        """Return the seconds to a job's end at each size, with `left` samples to do; per sample if infinite.

        Slots that have to boot come later, and until then the job runs at its present size. Any other size
        costs a pause.
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
    """Slots at one price per useful slot hour: existing, ordered or for sale."""

    slot_price: float
    slots: int


def clear(demand: Demand, levels: Sequence[Level], free: int = 0) -> tuple[tuple[Want, ...], int]:
    """Find where supply meets demand: (size of each job, number of slots that are worth their price).

    Each level is used only as far as jobs want slots at *its* price, so cheap slots are not judged by the
    price of more expensive ones. At the highest price jobs may want more than there is; then a warning
    follows.

    Args:
        demand: what jobs want at a given price.
        levels: slots by price.
        free: slots that cost nothing, and are used first.
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
    """Return the sizes at the lowest price, between these two, at which all of them fit."""
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
    """Return the nodes that jobs of several nodes need to run at all; two such jobs share no node."""
    return sum(job.min_nodes for job in jobs if job.min_nodes > 1)


def _fixed(job: JobInfo, slots: int, most_slots: int) -> int:
    """Return the replicas of a job without a goodput model: the requested number, else its minimum."""
    return min(max(job.requested_replicas or 0, _least(job, slots)), max(most_slots, 1))


def _fewest(job: JobInfo, slots: int) -> int:
    """Return the fewest replicas of a job on a node, by its nodes' limits, else by its own."""
    if job.limits:
        return max(1, min(limit.min_slots for limit in job.limits.values()))
    return max(1, min(job.min_slots, slots))


def _least(job: JobInfo, slots: int) -> int:
    """Return the smallest size of a job on nodes with this number of slots."""
    return taken(job, max(1, job.min_replicas, job.min_nodes * _fewest(job, slots)), slots)


def taken(job: JobInfo, replicas: int, slots: int) -> int:
    """Return the slots that a job takes for `replicas`, on nodes of `slots`.

    Each of the nodes, as few as possible, gets at least its minimum. That may be more than `replicas` if
    nodes are used as a whole (`--nproc-per-node=4`).
    """
    fewest = _fewest(job, slots)
    return max(replicas, -(-replicas // max(slots, fewest)) * fewest)


def deadline_of(settings: ScalingSettings, job: str) -> float | None:
    """Return a job's deadline in seconds since the epoch, or None."""
    return settings.deadlines.get(job, settings.deadlines.get("*"))


def _curves(
    jobs: Sequence[JobInfo], slots: int, most_slots: int, exploration: float
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (replica counts, goodput at each) of every job, computed together."""
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
        usable &= every >= -(-every // max(slots, fewest)) * fewest  # the same rule as in `taken`
        found.append((every[usable], row[usable]))
    return found


def rates_by_type(job: JobInfo, slots: int, types: Collection[str]) -> dict[str, float]:
    """Return a job's goodput on those of `types` that are measured for it, at the largest profiled size."""
    models = {name: job.model_on(name) for name in sorted(job.measured.intersection(types))}
    count = max(1, job.max_profiled_replicas)
    rates = {name: _rate_of(model, -(-count // slots), count) for name, model in models.items() if model}
    return {name: rate for name, rate in rates.items() if rate > 0}


@lru_cache(maxsize=1024)
def _rate_of(model: GoodputModel, nodes: int, replicas: int) -> float:
    """Return the best goodput; a decision asks for the same ones several times."""
    return float(goodputs([model], nodes, replicas).goodput[0, 0])


def _most(job: JobInfo, slots: int, most_slots: int, exploration: float) -> int:
    """Return the largest size that may be tried."""
    profiled = int(exploration * max(job.max_profiled_replicas, _least(job, slots)))
    nodes = job.max_nodes if job.max_nodes is not None else most_slots
    return max(1, min(profiled, job.max_replicas, nodes * slots, most_slots))


def _rate(counts: np.ndarray, rates: np.ndarray, replicas: int) -> float:
    """Return the goodput at the present size."""
    return float(np.interp(replicas, counts, rates)) if replicas else 0.0


@dataclass(frozen=True)
class Target:
    """How many nodes there should be, and why."""

    slots: float  # slots that are worth their price
    nodes: int  # after band and bounds
    utilisation: float
    reason: str
    keep: float = math.inf  # slots that are not released voluntarily
    floor: int = 0  # nodes that are not released voluntarily
    most: int = 1_000_000  # nodes above which some are released in any case
    settled: bool = True  # only nodes without jobs whose size is changing are released


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
    """Return how many nodes there should be.

    Args:
        wanted: slots that are worth their price.
        slots: slots of the node that would be bought next.
        there: slots of each existing or ordered node, in the order in which they would go.
        settings: the band, the waits and the bounds.
        since_change: seconds since more was requested or something was released.
        low_for: seconds for which utilisation has been below the band.
        fixed: (nodes, slots) that cannot go.
        least: nodes without which a job could not run at all, however few slots it needs.
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
    """Return the positions in `there` of nodes that go: those that can be spared, and those beyond `most`."""
    nodes, slots = len(there) + fixed[0], sum(there) + fixed[1]
    gone = []
    for place, size in enumerate(there):
        if nodes > most or (nodes > floor and slots - size >= keep - 1e-9):
            gone.append(place)
            nodes, slots = nodes - 1, slots - size
    return gone


@dataclass(frozen=True)
class Offer:
    """Nodes of one pool that could be bought."""

    pool: str
    available: int
    slots: int
    hourly_price: float
    preemptible: bool = False
    overhead: float = 0.0  # fraction of its time that is lost by interruptions
    highest_price: float = 0.0  # that the node may cost per hour instead; 0: `hourly_price`
    node_type: str = ""
    speed: float = 1.0  # goodput of a slot, of those that the jobs' sizes are chosen for
    surcharge: float = 0.0  # fraction by which it counts as dearer in a choice, and is not

    @property
    def limit_price(self) -> float:
        """Price per hour that a budget has to allow."""
        return max(self.hourly_price, self.highest_price)

    @property
    def slot_price(self) -> float:
        """Price that offers are compared by: of a useful slot hour, with the surcharge."""
        return self.hourly_price * (1 + self.overhead + self.surcharge) / self.slots / self.speed

    @property
    def paid_price(self) -> float:
        """Price of one useful slot hour, or of as much goodput where types differ in speed."""
        return self.hourly_price * (1 + self.overhead) / self.slots / self.speed


def buy(offers: Sequence[Offer], slots: int, nodes: int, budget: float) -> dict[str, int]:
    """Return how many nodes of each pool give `slots`, the cheapest first.

    At most `nodes` nodes, and at most `budget` per hour, each at the highest price of its pool. A pool that
    is too expensive for the rest of the budget is skipped.
    """
    bought: dict[str, int] = {}
    for offer in sorted(offers, key=lambda o: (o.slot_price, o.preemptible, o.pool)):
        while slots > 0 and nodes > 0 and bought.get(offer.pool, 0) < offer.available:
            if offer.limit_price > budget + 1e-9:
                break
            bought[offer.pool] = bought.get(offer.pool, 0) + 1
            slots, nodes, budget = slots - offer.slots, nodes - 1, budget - offer.limit_price
    return bought
