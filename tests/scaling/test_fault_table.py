"""The table of faults in docs/ec2.md: two hours of virtual time for each, with the autoscaler's own loop.

A job wants four nodes, of spot (0.3 an hour) where there is any, else on-demand (1.0). A node registers when
its instance runs. None of these faults makes a node leave in an orderly way: those are in the other tests.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from fake_provider import FakeProvider
from scaling_cluster import KEYS, Cluster

from adaptdl_elastic.agent.machine.dead_mans_switch import Look, watch
from adaptdl_elastic.autoscaler.providers.base import InstanceState, Pool, ProviderError, TryLaterError
from adaptdl_elastic.autoscaler.scaling.economics import ScalingSettings
from adaptdl_elastic.rendezvous.schema import records
from adaptdl_elastic.rendezvous.store.memory import MemoryStore

PAGE = Path(__file__).resolve().parents[2] / "docs" / "ec2.md"
SPOT = Pool("spot", desired=0, maximum=8, slots=1, hourly_price=0.3, preemptible=True, replaces_at_risk=True)
DEMAND = Pool("on-demand", desired=0, maximum=8, slots=1, hourly_price=1.0)
SPEC = records.JobSpec("train", "run", min_nodes=1, max_nodes=4, min_replicas=1, max_replicas=4)
WANTED = records.JobRequest(replicas=4, run="run")
LIMITS = ScalingSettings(max_nodes=5, max_hourly_cost=4.5)
STEP, HOURS = 15.0, 2.0


@dataclass
class Ledger:
    """What two hours have cost; `over_limit` is what was paid beyond --max-hourly-cost."""

    bought: int = 0
    most_nodes: int = 0
    cost: float = 0.0
    over_limit: float = 0.0


@dataclass
class Fault(Cluster):
    """A cluster under a fault, which `happen` brings about before each look."""

    store: MemoryStore
    happen: Callable[[Fault, float], None]
    ledger: Ledger = field(default_factory=Ledger)
    registers: bool = True  # instances become nodes

    def __post_init__(self) -> None:
        pools = {pool.name: pool for pool in (SPOT, DEMAND)}
        provider = FakeProvider(pools, lambda: self.now, boot_seconds=60)
        super().__init__(self.store, provider=provider)
        self.ruler.change(LIMITS)
        self.began = self.now
        self.at_work: dict[str, float] = {}  # instance → since when
        self.generation = 0
        self.random = random.Random(0)

    def run(self) -> Ledger:
        self.store.put(KEYS.job("train", "spec"), records.encode(SPEC))
        self.store.put(KEYS.job("train", "request"), records.encode(WANTED))
        while self.now < self.began + HOURS * 3600:
            self.happen(self, self.now - self.began)
            self._agents()
            self.now += STEP
            with suppress(ProviderError):  # as the loop does: it looks again
                self.ruler.tick()
            self._count()
        self.ledger.bought = self.provider.launched
        return self.ledger

    def _agents(self) -> None:
        """Register nodes whose instances run, and forget those whose instances are gone."""
        self.provider.advance()
        up = {i.id for i in self.provider.instances.values() if i.state is InstanceState.RUNNING}
        stays = up if self.registers else set()
        assert not self.store.range(KEYS.drains).items, "no fault of this table makes a node leave"
        if stays != self.at_work.keys():
            for gone in self.at_work.keys() - stays:
                self.store.delete(KEYS.node(f"node-{gone}", "train"))
            for instance in sorted(stays - self.at_work.keys()):
                self.register(instance)
            self.generation += 1
            self.plan(*(f"node-{one}" for one in sorted(stays)), generation=self.generation)
        self.at_work = {one: self.at_work.get(one, self.now) for one in sorted(stays)}

    def _count(self) -> None:
        living = self.provider.instances.values()
        hourly = sum(instance.hourly_price for instance in living)
        self.ledger.most_nodes = max(self.ledger.most_nodes, len(living))
        self.ledger.cost += hourly * STEP / 3600
        self.ledger.over_limit += max(0.0, hourly - LIMITS.max_hourly_cost) * STEP / 3600


def nothing(world: Fault, seconds: float) -> None:
    """No fault."""


def no_capacity(world: Fault, seconds: float) -> None:
    world.provider.outage = {"spot": "no capacity", "on-demand": "quota"}


def no_agents(world: Fault, seconds: float) -> None:
    world.registers = False


def dead_on_arrival(world: Fault, seconds: float) -> None:
    world.provider.dead_on_arrival = {"spot", "on-demand"}


def lost_after_a_minute(world: Fault, seconds: float) -> None:
    for instance, since in list(world.at_work.items()):
        if world.now - since >= 60:
            world.provider.vanish(instance)


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
    "every node vanishes after a minute of work": lost_after_a_minute,
    "half of AWS's answers are errors": half_of_the_calls_fail,
    "the autoscaler is restarted every five minutes": restarts,
}


def row(name: str, ledger: Ledger) -> str:
    return f"| {name} | {ledger.bought} | {ledger.most_nodes} | {ledger.cost:.2f} | {ledger.over_limit:.2f} |"


def rows_on_the_page() -> Iterator[tuple[str, str]]:
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        found = re.match(r"\| ([^|]+) \| \d+ \| \d+ \| [\d.]+ \| [\d.]+ \|$", line)
        if found:
            yield found[1], line


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    with MemoryStore() as memory:
        yield memory


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_costs_what_the_page_says(name: str, store: MemoryStore) -> None:
    ledger = Fault(store, FAULTS[name]).run()
    assert dict(rows_on_the_page()).get(name) == row(name, ledger)
    assert ledger.most_nodes <= LIMITS.max_nodes
    assert ledger.over_limit == 0


def test_the_page_has_no_other_rows() -> None:
    assert {name for name, _ in rows_on_the_page()} == {*FAULTS, HEAD_LOST}


def test_four_nodes_without_a_head_cost_an_hour() -> None:
    now = [0.0]

    def wait(seconds: float) -> None:
        now[0] += seconds

    watch(lambda: Look(trouble="no answer"), lambda _: None, lambda: now[0], wait)
    ledger = Ledger(0, 4, 4 * SPOT.hourly_price * now[0] / 3600, 0.0)
    assert dict(rows_on_the_page()).get(HEAD_LOST) == row(HEAD_LOST, ledger)
