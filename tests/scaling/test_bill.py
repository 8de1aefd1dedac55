"""The autoscaler's bill is the exact sum of what each instance costs, from its launch to its end."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from pydantic import TypeAdapter

from adaptdl_elastic.autoscaler.providers.base import Capacity, Instance, InstanceState
from adaptdl_elastic.autoscaler.scaling.observed_history import account, shifted
from adaptdl_elastic.autoscaler.scaling.scaling_types import Memory, NodeUse, Observation

LOOK = 7.0
"""Seconds from one observation to the next."""


@dataclass(frozen=True)
class Life:
    """One instance of the market: when it was launched, and when it ended."""

    launched: float
    ended: float = 1e9


class Market:
    """Spot instances at $36 an hour or what `moves` say: one cent a second. Virtual time."""

    def __init__(self, *lives: Life, moves: tuple[tuple[float, float], ...] = (), least: float = 0.0) -> None:
        self.lives = {f"i-{number}": life for number, life in enumerate(lives)}
        self.prices = ((0.0, 36.0), *moves)
        self.least = least
        self.read_every = LOOK  # seconds from one reading of the prices to the next
        self.tells_ends = True

    def end(self, life: Life) -> float:
        """Return until when an instance that has ended is paid for."""
        return max(life.ended, life.launched + self.least)

    def exact(self, now: float) -> float:
        """Add up the seconds of all instances, each at its price."""
        return sum(
            price / 3600 * max(0.0, min(end, until) - max(life.launched, since))
            for life in self.lives.values()
            for end in [self.end(life) if life.ended <= now else now]
            for (since, price), (until, _) in pairwise((*self.prices, (1e9, 0.0)))
            if life.launched <= now
        )

    def capacity(self, now: float) -> Capacity:
        priced = now - now % self.read_every
        known = tuple(change for change in self.prices if change[0] <= priced)
        there = [
            Instance(
                name,
                "spot",
                InstanceState.RUNNING if life.ended > now else InstanceState.LEAVING,
                preemptible=True,
                hourly_price=known[-1][1],
                price_changes=known,
                launched=life.launched,
                ended=None if life.ended > now else self.end(life) if self.tells_ends else 0.0,
            )
            for name, life in self.lives.items()
            if life.launched <= now
        ]
        return Capacity(
            instances=tuple(i for i in there if i.ended is None),
            ended=tuple(i for i in there if i.ended is not None),
            priced=priced,
        )

    def look(self, memory: Memory, now: float) -> Memory:
        nodes = {name: NodeUse(f"n-{name}", {"train": 1}) for name in self.lives}
        seen = Observation(now, self.capacity(now), nodes, ())
        return replace(account(memory, seen), updated=now)

    def bill(self, until: float, memory: Memory | None = None, since: float = 0.0) -> Memory:
        """Look every LOOK seconds."""
        memory = memory or self.look(Memory(), since)
        while since + LOOK <= until:
            since += LOOK
            memory = self.look(memory, since)
        return memory


def restarted(memory: Memory) -> Memory:
    """Return what the next autoscaler reads from the store."""
    adapter: TypeAdapter[Memory] = TypeAdapter(Memory)
    return adapter.validate_json(adapter.dump_json(memory))


@pytest.mark.parametrize(
    ("market", "until", "cost"),
    [
        (Market(Life(3.0, 73.0)), 350.0, 0.70),
        (Market(Life(3.0), moves=((10.0, 72.0), (11.0, 360.0), (40.0, 36.0))), 70.0, 3.29),
        # an instance costs at least for a minute
        (Market(Life(15.0, 19.0), Life(30.0, 95.0), moves=((50.0, 72.0),), least=60.0), 210.0, 0.85 + 1.1),
    ],
)
def test_instances_are_charged_from_their_launch_to_their_end(
    market: Market, until: float, cost: float
) -> None:
    assert market.bill(until).cost == pytest.approx(market.exact(until)) == pytest.approx(cost)


def test_a_price_change_that_is_read_late_is_charged_from_its_change() -> None:
    market = Market(Life(3.0), moves=((10.0, 72.0), (400.0, 36.0)))
    market.read_every = 301.0
    late = market.bill(294.0)
    assert late.cost == pytest.approx(2.91)  # what was known then
    found = market.bill(602.0, late, 294.0)
    assert found.cost == pytest.approx(market.exact(602.0))
    assert found.job_costs["train"] == pytest.approx(found.cost)


def test_an_instance_that_starts_and_ends_between_two_looks_is_charged() -> None:
    market = Market(Life(15.0, 19.0))
    found = market.bill(70.0)
    assert found.cost == pytest.approx(market.exact(70.0)) == pytest.approx(0.04)
    assert found.pools["spot"].hours == pytest.approx(4 / 3600)


def test_the_bill_goes_on_over_a_restart() -> None:
    """While no autoscaler runs one instance ends, one comes and goes, one comes, and the price changes."""
    lives = Life(3.0, 200.0), Life(150.0, 170.0), Life(160.0), Life(5.0)
    market = Market(*lives, moves=((100.0, 72.0), (180.0, 18.0)))
    market.read_every = 49.0
    before = market.bill(91.0)
    assert before.cost == pytest.approx(market.exact(91.0))
    after = market.bill(350.0, restarted(before), 231.0)
    assert after.cost == pytest.approx(market.exact(350.0))


def test_an_end_that_is_listed_late_is_put_right() -> None:
    market = Market(Life(3.0, 50.0))
    told = market.bill(49.0)
    market.lives = {"i-0": Life(3.0)}
    told = market.look(told, 56.0)
    assert told.cost == pytest.approx(0.53)
    market.lives = {"i-0": Life(3.0, 50.0)}
    assert market.look(told, 63.0).cost == pytest.approx(0.47)


def test_an_end_at_an_unknown_time_is_charged_until_the_last_look() -> None:
    market = Market(Life(3.0, 50.0), Life(64.0, 66.0))
    market.tells_ends = False
    assert market.bill(350.0).cost == pytest.approx(0.46)


def test_instances_of_the_time_before_the_first_look_are_not_charged_for_it() -> None:
    market = Market(Life(-500.0, -100.0), Life(-500.0))
    assert market.bill(70.0).cost == pytest.approx(0.70)


def test_an_instance_that_is_stopped_and_started_again_is_charged_for_both_times() -> None:
    market = Market(Life(3.0))
    market.read_every = 49.0
    told = market.bill(42.0)
    market.lives = {"i-0": Life(1000.0)}
    told = market.bill(1050.0, told, 1001.0)
    assert told.cost == pytest.approx(0.39 + 0.50)
    assert told.pools["spot"].hours == pytest.approx((39 + 50) / 3600)


def test_a_clock_that_is_set_changes_no_bill() -> None:
    told = shifted(Market(Life(3.0)).bill(70.0), 3600.0)
    market = Market(Life(3.0))
    market.read_every = 1.0
    assert market.bill(3740.0, told, 3670.0).cost == pytest.approx(1.37)
