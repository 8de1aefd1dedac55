"""Simulated markets for nodes: varying prices, and spot nodes that are reclaimed.

A `SimulatedMarket` is the price and the hazard of one pool over time, both constant between its `times`.
`fixed` makes one with a constant price and rate, such as on-demand; `generate` makes a random one from a
seed; `read_market` reads one from a CSV file (`seconds,price,interruptions_per_hour`; the last row holds for
ever).

The generated price is the exponential of an Ornstein-Uhlenbeck process around `price`. Spot prices have
behaved like this since EC2 stopped auctioning: slow, mean-reverting and capped by the on-demand price. The
hazard follows the price, twice as strongly, because capacity is scarce when prices are high.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from fake_provider import FakeProvider
from numpy.typing import NDArray

from adaptdl_elastic.autoscaler.policy.policy_types import JobInfo, NodeInfo
from adaptdl_elastic.autoscaler.providers.base import Instance, InstanceState, Pool
from adaptdl_elastic.autoscaler.scaling.scaling_types import (
    Action,
    Drain,
    Hold,
    LetGo,
    Memory,
    NodeUse,
    Observation,
    Protect,
    Release,
    Request,
    Step,
)

Array = NDArray[np.float64]
HOUR = 3600.0
NOTICE = 120.0  # seconds between the notice of an interruption and the interruption, as on EC2
_NEVER = 1e18


@dataclass(frozen=True)
class SimulatedMarket:
    """Price per hour and interruptions per node and hour, from each of `times` (in seconds) on."""

    times: Array
    prices: Array
    rates: Array

    def price(self, now: float) -> float:
        """Return the price per hour at `now`."""
        return float(self.prices[self._at(now)])

    def next_change(self, now: float) -> float | None:
        """Return the time of the next change of price or hazard; None if there is none."""
        later = np.searchsorted(self.times, now, side="right")
        return float(self.times[later]) if later < len(self.times) else None

    def lifetime(self, start: float, exponential: float) -> float:
        """Return the time at which a node that starts at `start` is reclaimed.

        Inverts the integral of the hazard, so that the interruption rate at every moment is the market's.
        `exponential` is a random draw of Exp(1).
        """
        left, at = exponential, start
        while left > 0:
            rate, end = float(self.rates[self._at(at)]) / HOUR, self.next_change(at)
            if rate > 0 and (end is None or left <= rate * (end - at)):
                return at + left / rate
            if end is None:
                return _NEVER
            left, at = left - rate * (end - at), end
        return at

    def _at(self, now: float) -> int:
        return max(0, int(np.searchsorted(self.times, now, side="right")) - 1)


def fixed(price: float, interruptions_per_hour: float = 0.0) -> SimulatedMarket:
    """Return a market whose price and rate never change."""
    return SimulatedMarket(np.zeros(1), np.array([price]), np.array([interruptions_per_hour]))


def generate(
    seed: int,
    price: float,
    interruptions_per_hour: float,
    *,
    hours: float = 72.0,
    step: float = 600.0,
    spread: float = 0.15,
    memory_hours: float = 6.0,
    cap: float = math.inf,
) -> SimulatedMarket:
    """Return a random market; the same seed gives the same market.

    Args:
        seed: Seed of the random generator.
        price: Geometric mean of the price per hour.
        interruptions_per_hour: Mean over time of the hazard of one node.
        hours: Length of the random part; the market is constant after it.
        step: Seconds between changes.
        spread: Standard deviation of the price's logarithm.
        memory_hours: Hours after which deviations have decayed to 1/e.
        cap: Largest price, for example the on-demand price.
    """
    rng = np.random.default_rng(seed)
    count = max(1, round(hours * HOUR / step))
    decay = math.exp(-step / (memory_hours * HOUR))
    x = np.empty(count)
    x[0] = rng.normal(0.0, spread)
    for i in range(1, count):
        x[i] = decay * x[i - 1] + rng.normal(0.0, spread * math.sqrt(1 - decay**2))
    hazard = np.exp(2 * x)
    rates = np.asarray(interruptions_per_hour * hazard / hazard.mean(), np.float64)
    return SimulatedMarket(
        np.arange(count, dtype=float) * step, np.asarray(np.minimum(price * np.exp(x), cap), float), rates
    )


def read_market(path: Path) -> SimulatedMarket:
    """Read a market from a CSV file without a header, whose seconds grow from 0."""
    return SimulatedMarket(*np.loadtxt(path, delimiter=",", ndmin=2, unpack=True))


Scaler = Callable[[Observation, Memory], Step]
"""Decides the next actions: `scaling.step.step` with its settings, or a replacement for it."""


class MarketCluster:
    """A simulated cluster whose nodes are bought on markets; implements the simulator's `Cluster`.

    Like the real autoscaler it decides every `interval` seconds, and whenever the simulator asks for the
    nodes. Between decisions its instances boot and are reclaimed.

    Args:
        pools: The pools to buy from; a pool has the price of its market.
        markets: The market of each pool, by the pool's name.
        scaler: The autoscaler.
        jobs: Returns for a time the unfinished jobs, as the policy sees them, with their allocations.
        boot_seconds: Seconds from a request to a running node.
        interval: Seconds between decisions.
        seed: Seed of the interruptions.
        notice: Seconds between the notice of an interruption and the interruption; 0: without notice.
        on_loss: Called with the id of an instance that is lost without notice, before it is removed.
    """

    def __init__(
        self,
        pools: Sequence[Pool],
        markets: Mapping[str, SimulatedMarket],
        scaler: Scaler,
        jobs: Callable[[float], Sequence[tuple[JobInfo, Mapping[str, int]]]],
        *,
        boot_seconds: float = 120.0,
        interval: float = 30.0,
        seed: int = 0,
        notice: float = NOTICE,
        on_loss: Callable[[str], None] = lambda instance: None,
    ) -> None:
        self._markets, self._scaler, self._jobs = markets, scaler, jobs
        self._interval, self._seed = interval, seed
        self._notice, self._on_loss = notice, on_loss
        self._now = 0.0
        self._looked = -math.inf
        self._provider = FakeProvider({pool.name: pool for pool in pools}, lambda: self._now, boot_seconds)
        self._ends: dict[str, float] = {}
        self._told: set[str] = set()
        self._draining: set[str] = set()
        self.memory = Memory()
        self.interruptions = 0
        self.history: list[tuple[float, int, float]] = []  # (time, nodes, price per hour)

    @property
    def cost(self) -> float:
        """Amount paid up to the last decision."""
        return self.memory.cost

    def nodes(self, now: float) -> Sequence[NodeInfo]:
        """Return the running nodes at `now`, after a decision."""
        self._look(now)
        return [
            NodeInfo(i.id, i.slots, i.preemptible, draining=i.id in self._draining)
            for i in self._provider.capacity().instances
            if i.state is InstanceState.RUNNING
        ]

    def next_change(self, now: float) -> float | None:
        """Return the time of the next boot, notice or interruption, or of the next decision without jobs."""
        if not self._jobs(now):
            self._look(now)  # without jobs the simulator does not ask for the nodes
            return now + self._interval
        self._bring(now)
        moments = [end - lead for end in self._ends.values() for lead in {0.0, self._notice}]
        moments += [
            i.launched + self._provider.boot_seconds
            for i in self._provider.capacity().instances
            if i.state is InstanceState.PENDING
        ]
        return min((moment for moment in moments if now < moment < _NEVER), default=None)

    def finish(self, now: float) -> None:
        """Account for the time up to `now`, when the last job has completed."""
        self._look(now)

    def _bring(self, now: float) -> None:
        """Apply the prices, boots, notices and interruptions up to `now`."""
        self._now = now
        pools = self._provider.capacity()
        for name, market in self._markets.items():
            pool = pools.pool(name)
            if pool.hourly_price != market.price(now):
                self._provider.reprice(name, market.price(now))
        for instance in self._provider.capacity().instances:
            if instance.preemptible and instance.state is InstanceState.RUNNING:
                self._hazard(instance)
        there = {i.id for i in self._provider.capacity().instances}
        self._ends = {name: end for name, end in self._ends.items() if name in there}
        self._draining &= there

    def _hazard(self, instance: Instance) -> None:
        if instance.id not in self._ends:
            rng = np.random.default_rng([self._seed, int(instance.id.rpartition("-")[2])])
            start = instance.launched + self._provider.boot_seconds
            self._ends[instance.id] = self._markets[instance.pool].lifetime(start, rng.exponential())
        end = self._ends[instance.id]
        if end - self._notice <= self._now and instance.id not in self._told:
            self._told.add(instance.id)
            self.interruptions += 1
            if self._notice:
                self._provider.interrupt(instance.id, end - self._now)
            else:
                self._on_loss(instance.id)
        if end <= self._now:
            self._provider.vanish(instance.id)

    def _look(self, now: float) -> None:
        self._bring(now)
        if now == self._looked:
            return
        self._looked = now
        jobs = self._jobs(now)
        capacity = self._provider.capacity()
        use: dict[str, dict[str, int]] = {}
        for info, allocation in jobs:
            for node, replicas in allocation.items():
                use.setdefault(node, {})[info.name] = replicas
        nodes = {
            i.id: NodeUse(i.id, use.get(i.id, {}), i.id in self._draining)
            for i in capacity.instances
            if i.state is not InstanceState.PENDING
        }
        infos = tuple(info for info, _ in jobs)
        done = self._scaler(Observation(now, capacity, nodes, infos, self._provider.signals()), self.memory)
        self.memory = done.memory
        for action in done.actions:
            self._act(action)
        # a node that was asked to drain leaves even if it is needed again
        self._draining &= {i.id for i in capacity.instances}
        self.history.append((now, len(nodes), done.hourly_cost))

    def _act(self, action: Action) -> None:
        match action:
            case Request(pool, desired, _):
                self._provider.request(pool, desired)
            case Release(instance, again, _):
                self._provider.release(instance, again)
            case Drain(instance):
                self._draining.add(instance)
            case Protect() | Hold() | LetGo():
                pass


def busy_fraction(parts: Sequence[int], step_time: float, sync_time: float, accumulation_steps: int) -> float:
    """Return the part of the time in which the hardware computes instead of waiting for its peers."""
    if not parts:
        return 0.0
    compute = (step_time - sync_time) * (accumulation_steps + 1)
    return float(compute / (compute + sync_time)) if compute + sync_time > 0 else 0.0


Utilisation = Callable[[], tuple[float, int]]
"""Returns (number of computing slots, number of waiting jobs) at this moment."""


@dataclass
class ThresholdScaler:
    """An autoscaler that knows no goodput: adds nodes above one utilisation, removes them below another.

    Utilisation is what a monitor would show: the part of the slots' time in which they compute. All else
    (which nodes to buy, which to release, and how to drain them) is as with goodput, so that the two
    autoscalers differ in this point only.
    """

    low: float
    high: float
    utilisation: Utilisation
    scale: Callable[[Observation, Memory], Any]
    cool_down: float = 60.0
    step: float = 0.1  # part of the nodes that is added or removed at once; at least one node
    slots: int = 4
    most: int = 64
    wanted: int = 0
    changed: float = -math.inf

    def __call__(self, seen: Observation, memory: Memory) -> Step:
        """Set the number of nodes by the thresholds, and let `scale` carry it out."""
        computing, waiting = self.utilisation()
        up = [i for i in seen.capacity.instances if i.state is InstanceState.RUNNING]
        pending = len(seen.capacity.instances) - len(up)
        used = computing / max(1, sum(i.slots for i in up))
        stride = max(1, math.ceil(self.step * max(self.wanted, 1)))
        if not seen.jobs:
            self.wanted = 0
        elif seen.now - self.changed >= self.cool_down and not pending:
            before = self.wanted
            if waiting or self.wanted == 0:
                self.wanted += max(stride, math.ceil(waiting / self.slots))
            elif used > self.high:
                self.wanted += stride
            elif used < self.low:
                self.wanted = max(1, self.wanted - stride)
            self.wanted = min(self.wanted, self.most)
            self.changed = seen.now if self.wanted != before else self.changed
        pseudo = JobInfo(
            "threshold", max_replicas=self.wanted * self.slots, requested_replicas=self.wanted * self.slots
        )
        jobs = (pseudo,) if self.wanted else ()
        done: Step = self.scale(replace(seen, jobs=jobs), memory)
        return done
