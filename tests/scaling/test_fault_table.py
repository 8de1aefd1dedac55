"""The table of faults in docs/howto/ec2.md: hours of virtual time for each, with the autoscaler's own loop.

A job wants four nodes, of spot (0.3 an hour) where there is any, else on-demand (1.0). A node registers when
its instance runs, and has a replica as soon as the job has its least number of nodes.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from fake_provider import FakeProvider
from scaling_cluster import KEYS, Cluster

from adaptdl_elastic.agent.machine.dead_mans_switch import Look, watch
from adaptdl_elastic.autoscaler.providers.base import InstanceState, Pool, ProviderError, TryLaterError
from adaptdl_elastic.autoscaler.scaling.economics import ScalingSettings
from adaptdl_elastic.rendezvous.schema import records
from adaptdl_elastic.rendezvous.store.memory import MemoryStore

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "ec2.md"
SPOT = Pool("spot", desired=0, maximum=8, slots=1, hourly_price=0.3, preemptible=True, replaces_at_risk=True)
DEMAND = Pool("on-demand", desired=0, maximum=8, slots=1, hourly_price=1.0)
SPEC = records.JobSpec("train", "run", min_nodes=1, max_nodes=4, min_replicas=1, max_replicas=4)
WANTED = records.JobRequest(replicas=4, run="run")
LIMITS = ScalingSettings(max_nodes=5, max_hourly_cost=4.5)
STEP, HOURS, LONG = 30.0, 2.0, 8.0
QUARTER = 900.0
"""Seconds from one change of a price that flips to the next."""


@dataclass
class Ledger:
    """What the hours have cost.

    Attributes:
        over_limit: what was paid beyond --max-hourly-cost.
        lost: nodes that were lost while they had a replica.
        idle: what nodes cost while they had no replica, also while they booted.
        warned: what was said to the user.
    """

    bought: int = 0
    most_nodes: int = 0
    cost: float = 0.0
    over_limit: float = 0.0
    lost: int = 0
    idle: float = 0.0
    warned: str = ""


@dataclass
class Fault(Cluster):
    """A cluster under a fault, which `happen` brings about before each look."""

    store: MemoryStore
    happen: Callable[[Fault, float], None]
    ledger: Ledger = field(default_factory=Ledger)
    least: int = 1  # nodes that the job needs to run
    limits: ScalingSettings = LIMITS
    registers: bool = True  # instances become nodes
    places: bool = True  # the coordinator plans replicas

    def __post_init__(self) -> None:
        pools = {pool.name: pool for pool in (SPOT, DEMAND)}
        provider = FakeProvider(pools, lambda: self.now, boot_seconds=60)
        super().__init__(self.store, provider=provider)
        self.ruler.change(self.limits)
        self.began = self.now
        self.registered: set[str] = set()
        self.at_work: dict[str, float] = {}  # instances with a replica, since when
        self.generation = 0
        self.random = random.Random(0)

    def run(self, hours: float = HOURS) -> Ledger:
        spec = replace(SPEC, min_nodes=self.least, min_replicas=self.least)
        self.store.put(KEYS.job("train", "spec"), records.encode(spec))
        self.store.put(KEYS.job("train", "request"), records.encode(WANTED))
        while self.now < self.began + hours * 3600:
            self.happen(self, self.now - self.began)
            self._agents()
            self.now += STEP
            with suppress(ProviderError):  # as the loop does: it looks again
                self.ruler.tick()
            self._count()
        self.ledger.bought = self.provider.launched
        self.ledger.warned = "\n".join(str(fields["message"]) for fields in self.events("warning"))
        return self.ledger

    def _agents(self) -> None:
        """Register nodes whose instances run, forget those whose instances are gone, and plan replicas."""
        self.provider.advance()
        up = {i.id for i in self.provider.instances.values() if i.state is InstanceState.RUNNING}
        registered = up if self.registers else set()
        for gone in self.registered - registered:
            self.store.delete(KEYS.node(f"node-{gone}", "train"))
        for instance in sorted(registered - self.registered):
            self.register(instance)
        self.registered = registered
        drained = {item.key.rpartition("/")[2] for item in self.store.range(KEYS.drains).items}
        rest = sorted((one for one in registered if f"node-{one}" not in drained), key=self._by_age)
        works = rest[:4] if self.places and len(rest) >= self.least else []
        self.ledger.lost += len(self.at_work.keys() - registered)
        if set(works) != self.at_work.keys():
            self.generation += 1
            self.plan(*(f"node-{one}" for one in works), generation=self.generation)
        self.at_work = {one: self.at_work.get(one, self.now) for one in works}

    def _by_age(self, instance: str) -> tuple[bool, int]:
        """Nodes with replicas keep them; others get them in the order in which they were launched."""
        return instance not in self.at_work, int(instance.rpartition("-")[2])

    def _count(self) -> None:
        living = self.provider.instances.values()
        hourly = sum(instance.hourly_price for instance in living)
        idle = sum(instance.hourly_price for instance in living if instance.id not in self.at_work)
        self.ledger.most_nodes = max(self.ledger.most_nodes, len(living))
        self.ledger.cost += hourly * STEP / 3600
        self.ledger.idle += idle * STEP / 3600
        self.ledger.over_limit += max(0.0, hourly - self.limits.max_hourly_cost) * STEP / 3600


def nothing(world: Fault, seconds: float) -> None:
    """No fault."""


def no_capacity(world: Fault, seconds: float) -> None:
    world.provider.outage = {"spot": "no capacity", "on-demand": "quota"}


def no_agents(world: Fault, seconds: float) -> None:
    world.registers = False


def dead_on_arrival(world: Fault, seconds: float) -> None:
    world.provider.dead_on_arrival = {"spot", "on-demand"}


def lost_after(minutes: float) -> Callable[[Fault, float], None]:
    def happen(world: Fault, seconds: float) -> None:
        for instance, since in list(world.at_work.items()):
            if world.now - since >= minutes * 60:
                world.provider.vanish(instance)

    return happen


def interrupted_after(minutes: float) -> Callable[[Fault, float], None]:
    """Announce each node's end two minutes before it has been up for `minutes`, its boot not counted."""

    def happen(world: Fault, seconds: float) -> None:
        for instance in list(world.provider.instances.values()):
            age = world.now - instance.launched - world.provider.boot_seconds
            if age == minutes * 60 - 120:
                world.provider.interrupt(instance.id, 120)
            elif age >= minutes * 60:
                world.provider.vanish(instance.id)

    return happen


def three_of_four(world: Fault, seconds: float) -> None:
    world.provider.most = {"spot": 3, "on-demand": 0}


def never_placed(world: Fault, seconds: float) -> None:
    world.places = False


def release_denied(world: Fault, seconds: float) -> None:
    world.places = seconds < 3600
    world.provider.errors = {"release": [ProviderError("AccessDenied: not authorized to terminate")] * 20}


def price_flips(world: Fault, seconds: float) -> None:
    world.provider.reprice("spot", 0.3 if seconds // QUARTER % 2 == 0 else 2.0)


def one_peak(world: Fault, seconds: float) -> None:
    world.provider.reprice("spot", 2.0 if 3600 <= seconds < 5400 else 0.3)


def half_of_the_calls_fail(world: Fault, seconds: float) -> None:
    error = TryLaterError("RequestLimitExceeded")
    world.provider.errors = {
        method: [error]
        for method in ("capacity", "request", "release", "protect")
        if world.random.random() < 0.5
    }


def restarts(world: Fault, seconds: float) -> None:
    if seconds % 300 == 0:
        world.ruler.memory = world.ruler.recall()


HEAD_LOST = "the head is lost for good while four nodes train"

FAULTS = {
    "none": nothing,
    "no capacity anywhere": no_capacity,
    "agents never start": no_agents,
    "instances end as they start": dead_on_arrival,
    "every node vanishes after a minute of work": lost_after(1),
    "half of AWS's answers are errors": half_of_the_calls_fail,
    "the autoscaler is restarted every five minutes": restarts,
}


@dataclass(frozen=True)
class Long:
    """A fault of eight hours. `said`: what the user is told of it."""

    happen: Callable[[Fault, float], None]
    said: str
    least: int = 1
    limits: ScalingSettings = LIMITS


LONG_FAULTS = {
    "needs 4 nodes, `--max-nodes 3`": Long(nothing, "needs 4 nodes", 4, replace(LIMITS, max_nodes=3)),
    "needs 4 nodes, there is capacity for 3": Long(three_of_four, "needs 4 nodes", 4),
    "nothing is ever placed": Long(never_placed, "had no replica"),
    "after an hour nothing is placed, and no node can be released": Long(release_denied, "AccessDenied"),
    "every node vanishes after 11 minutes of work": Long(lost_after(11), "bought useful work"),
    "every node vanishes after 30 minutes of work": Long(lost_after(30), "bought useful work"),
    "every node is interrupted with notice after 5 minutes of work": Long(
        interrupted_after(5), "bought useful work"
    ),
    "every node is interrupted with notice after 11 minutes of work": Long(
        interrupted_after(11), "bought useful work"
    ),
    "every node is interrupted with notice after 30 minutes of work": Long(interrupted_after(30), ""),
    "spot costs 0.3 and 2.0 by turns, 15 minutes each": Long(
        price_flips, "its price has risen", limits=ScalingSettings(max_nodes=5)
    ),
    "spot costs 2.0 for half an hour, else 0.3": Long(
        one_peak, "its price has risen", limits=ScalingSettings(max_nodes=5)
    ),
}


def row(name: str, ledger: Ledger) -> str:
    amounts = f"{ledger.cost:.2f} | {ledger.over_limit:.2f} | {ledger.lost} | {ledger.idle:.2f}"
    return f"| {name} | {ledger.bought} | {ledger.most_nodes} | {amounts} |"


def rows_on_the_page() -> Iterator[tuple[str, str]]:
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        found = re.match(r"\| ([^|]+)( \| \d+){2}( \| [\d.]+){2} \| \d+ \| [\d.]+ \|$", line)
        if found:
            yield found[1], line


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_costs_what_the_page_says(name: str, store: MemoryStore) -> None:
    ledger = Fault(store, FAULTS[name]).run()
    assert dict(rows_on_the_page()).get(name) == row(name, ledger)
    assert ledger.most_nodes <= LIMITS.max_nodes
    assert ledger.over_limit == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", LONG_FAULTS)
def test_eight_hours_of_a_fault_cost_what_the_page_says(name: str, store: MemoryStore) -> None:
    fault = LONG_FAULTS[name]
    ledger = Fault(store, fault.happen, least=fault.least, limits=fault.limits).run(LONG)
    assert dict(rows_on_the_page()).get(name) == row(name, ledger)
    assert ledger.most_nodes <= fault.limits.max_nodes
    assert ledger.cost <= LONG * 4 * DEMAND.hourly_price, "never dearer than on-demand all the time"
    assert fault.said in ledger.warned


def test_the_page_has_no_other_rows() -> None:
    assert {name for name, _ in rows_on_the_page()} == {*FAULTS, *LONG_FAULTS, HEAD_LOST}


def test_four_nodes_without_a_head_cost_an_hour() -> None:
    now = [0.0]

    def wait(seconds: float) -> None:
        now[0] += seconds

    watch(lambda: Look(trouble="no answer"), lambda _: None, lambda: now[0], wait)
    ledger = Ledger(0, 4, 4 * SPOT.hourly_price * now[0] / 3600, 0.0)
    assert dict(rows_on_the_page()).get(HEAD_LOST) == row(HEAD_LOST, ledger)


if __name__ == "__main__":  # prints the rows
    for name, happen in FAULTS.items():
        with MemoryStore() as there:
            print(row(name, Fault(there, happen).run()), flush=True)
    for name, long in LONG_FAULTS.items():
        with MemoryStore() as there:
            world = Fault(there, long.happen, least=long.least, limits=long.limits)
            print(row(name, world.run(LONG)), world.ledger.warned if "-v" in sys.argv else "", flush=True)
