from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scaling_world import MODEL, job, waiting

from adaptdl_elastic.autoscaler.policy.curves import goodputs
from adaptdl_elastic.autoscaler.scaling.economics import (
    Demand,
    Level,
    Offer,
    ScalingSettings,
    buy,
    clear,
    sizes,
    target,
)


def one(settings: ScalingSettings, price: float = 1.0, now: float = 0.0, **more: object) -> int:
    (want,) = Demand([job(**more)], 4, settings, now, 64).at(price)
    return want.replicas


def rates(counts: list[int]) -> np.ndarray:
    every = np.array(counts)
    return goodputs([MODEL], np.ceil(every / 4).astype(int), every).goodput[0]


@given(st.integers(1, 300), st.integers(1, 16))
def test_sizes_are_within_bounds_and_whole(most: int, slots: int) -> None:
    found = sizes(most, slots)
    assert found == sorted(set(found))
    assert found[0] == 1
    assert found[-1] == most
    assert all(size <= slots or size % slots == 0 or size == most for size in found)


@given(st.floats(0.0, 100.0), st.floats(0.01, 50.0))
def test_no_other_size_is_worth_its_price_more(value: float, price: float) -> None:
    chosen = one(ScalingSettings(hour_value=value), price)
    counts = sizes(64, 4)
    costs = (value + price * np.array(counts)) / rates(counts)
    assert costs[counts.index(chosen)] <= costs.min() * (1 + 1e-9)


def test_time_that_is_worth_more_buys_more() -> None:
    bought = [one(ScalingSettings(hour_value=v)) for v in (0.0, 1.0, 10.0, 100.0, 1e6)]
    assert bought == sorted(bought)
    assert bought[0] == 1
    assert bought[-1] == sizes(64, 4)[int(np.argmax(rates(sizes(64, 4))))]


def test_the_default_value_of_time_does_not_depend_on_the_currency() -> None:
    assert one(ScalingSettings(), 1.0) == one(ScalingSettings(), 1000.0)


def test_a_deadline_buys_the_cheapest_size_that_meets_it() -> None:
    counts = sizes(64, 4)
    seconds = 1e6 * 1.1 / rates(counts)
    for deadline in np.linspace(seconds.min() * 1.01, seconds.max() * 1.2, 20):
        chosen = one(ScalingSettings(deadlines={"train": float(deadline)}))
        i = counts.index(chosen)
        assert seconds[i] <= deadline
        cheaper = np.array(counts) / rates(counts) < counts[i] / rates([chosen])[0] * (1 - 1e-9)
        assert not (cheaper & (seconds <= deadline)).any()


def test_a_deadline_that_can_not_be_met_is_said_and_run_for() -> None:
    (want,) = Demand([job()], 4, ScalingSettings(deadlines={"*": 1.0}), 0.0, 64).at(1.0)
    assert want.late
    assert want.replicas == sizes(64, 4)[int(np.argmax(rates(sizes(64, 4))))]


@pytest.mark.parametrize("profiled", [1, 2, 4, 8])
def test_no_job_is_sized_beyond_twice_its_profiled_replicas(profiled: int) -> None:
    assert one(ScalingSettings(hour_value=1e9), max_profiled_replicas=profiled) <= 2 * profiled


def test_a_job_without_a_model_gets_its_requested_or_least_size() -> None:
    jobs = [waiting("a", 7), job("b", model=None, min_replicas=3)]
    assert [w.replicas for w in Demand(jobs, 4, ScalingSettings(), 0.0, 64).at(1.0)] == [7, 3]


@given(st.floats(0, 400), st.integers(0, 100), st.floats(0, 1000), st.floats(0, 1000))
def test_targets_keep_to_the_bounds_and_never_overshoot(
    wanted: float, have: int, since: float, low_for: float
) -> None:
    settings = ScalingSettings(min_nodes=2, max_nodes=50)
    goal = target(wanted, 4, [4] * have, settings, since_change=since, low_for=low_for)
    need = min(max(math.ceil(wanted / 4 - 1e-9), 2), 50)
    assert goal.nodes in (have, need)


def test_inside_the_band_nothing_moves() -> None:
    settings = ScalingSettings(low=0.8, high=1.0)
    for wanted in (32.1, 36.0, 40.0):
        goal = target(wanted, 4, [4] * 10, settings, since_change=1e9, low_for=1e9)
        assert goal.nodes == 10, goal
    assert target(31.0, 4, [4] * 10, settings, since_change=1e9, low_for=1e9).nodes == 8
    assert target(40.1, 4, [4] * 10, settings, since_change=1e9, low_for=0).nodes == 11


def test_from_zero_and_to_zero() -> None:
    settings = ScalingSettings()
    assert target(1, 4, [4] * 0, settings, since_change=0.0, low_for=0.0).nodes == 1
    assert target(0, 4, [4] * 3, settings, since_change=1e9, low_for=10.0).nodes == 3
    assert target(0, 4, [4] * 3, settings, since_change=1e9, low_for=120.0).nodes == 0


offers = st.lists(
    st.builds(
        Offer,
        pool=st.sampled_from("abcdef"),
        available=st.integers(0, 5),
        slots=st.sampled_from([1, 2, 4, 8]),
        hourly_price=st.floats(0.1, 10),
    ),
    unique_by=lambda offer: offer.pool,
)


@given(offers, st.integers(0, 64), st.integers(0, 10), st.floats(0, 40))
def test_buying_keeps_to_every_bound(choice: list[Offer], slots: int, nodes: int, budget: float) -> None:
    bought = buy(choice, slots, nodes, budget)
    by_name = {offer.pool: offer for offer in choice}
    assert all(0 < count <= by_name[name].available for name, count in bought.items())
    assert sum(bought.values()) <= nodes
    assert sum(by_name[n].hourly_price * c for n, c in bought.items()) <= budget + 1e-6
    got = sum(by_name[n].slots * c for n, c in bought.items())
    assert got < slots + max((o.slots for o in choice), default=1)


def test_the_cheaper_pool_first_and_the_dearer_for_the_rest() -> None:
    spot = Offer("spot", 2, 4, 1.2, True, 0.02)
    demand = Offer("demand", 10, 4, 4.0)
    assert buy([demand, spot], 16, 100, math.inf) == {"spot": 2, "demand": 2}
    assert buy([demand, spot], 16, 100, 7.0) == {"spot": 2, "demand": 1}
    assert buy([demand, spot], 16, 3, math.inf) == {"spot": 2, "demand": 1}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"low": 0.9, "high": 0.5}, "band"),
        ({"min_nodes": 3, "max_nodes": 2}, "--min-nodes 3"),
        ({"max_hourly_cost": 0.0}, "--max-hourly-cost"),
    ],
)
def test_settings_check_themselves(wrong: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ScalingSettings(**wrong)  # type: ignore[arg-type]


def test_a_size_is_kept_while_it_is_nearly_as_good() -> None:
    settings = ScalingSettings(hour_value=4.0, hysteresis=0.05)
    counts = np.array(sizes(64, 4))
    costs = (4.0 + counts) / rates(list(counts))
    for before, cost in zip(counts, costs, strict=True):
        (want,) = Demand([job()], 4, settings, 0.0, 64, {"train": int(before)}).at(1.0)
        near = cost <= costs.min() * 1.05
        assert want.replicas == (before if near else counts[int(np.argmin(costs))])


levels = st.lists(
    st.builds(Level, st.sampled_from([0.0, 0.05, 0.1, 0.25, 0.5, 1.0, 4.0]), st.integers(0, 60)),
    min_size=1,
    max_size=6,
)


@given(levels, st.integers(0, 12), st.sampled_from([None, 0.0, 0.5, 2.0, 8.0]), st.integers(1, 3))
def test_every_slot_is_worth_its_own_price(
    ladder: list[Level], free: int, value: float | None, count: int
) -> None:
    jobs = [job(f"j{k}", remaining=None) for k in range(count)]
    demand = Demand(jobs, 4, ScalingSettings(hour_value=value), 0.0, 200)
    found, filled = clear(demand, ladder, free)
    assert sum(want.replicas for want in found) <= filled

    def at(price: float) -> int:
        return sum(want.replicas for want in demand.at(price))

    dearest = max(level.slot_price for level in ladder)
    for price in {level.slot_price for level in ladder}:
        below = free + sum(level.slots for level in ladder if level.slot_price < price)
        upto = below + sum(level.slots for level in ladder if level.slot_price == price)
        assert filled >= min(at(price), upto)  # what is cheap enough is filled
        if filled > max(below, 0) and price < dearest:
            assert filled <= max(at(price), upto)
    assert filled <= max(at(level.slot_price) for level in ladder)


def test_a_nearly_done_job_gets_no_node_that_must_boot() -> None:
    rate = float(rates([1])[0])
    settings = ScalingSettings(hour_value=100.0)
    for left, more in ((11.0, False), (60.0, False), (120.0, False), (36000.0, True)):
        running = {"train": 1}
        demand = Demand([job(remaining=left * rate)], 1, settings, 0.0, 64, running=running, boot=120.0)
        (want,) = demand.at(1.0)
        assert (want.replicas > 1) is more
        (there,) = Demand([job(remaining=left * rate)], 1, settings, 0.0, 64, running=running, idle=63).at(
            1.0
        )
        assert there.replicas >= want.replicas


@given(
    st.floats(1.0, 1e5),
    st.integers(0, 16),
    st.integers(0, 8),
    st.floats(0, 600),
    st.floats(0, 60),
    st.floats(0.1, 50),
)
def test_bought_nodes_save_more_than_they_cost_with_boot_and_pause(
    seconds: float, running: int, idle: int, boot: float, pause: float, value: float
) -> None:
    left = seconds * float(rates([1])[0])
    info = job(remaining=left, pause=pause)
    settings = ScalingSettings(hour_value=value)
    demand = Demand([info], 1, settings, 0.0, 64, running={"train": running}, idle=idle, boot=boot)
    (want,) = demand.at(1.0)
    if running and want.replicas > running + idle:
        before, after = rates([running, want.replicas])
        ends = boot + pause + max(left - before * boot, 0.0) / after
        saved = left / before - ends
        assert saved * value >= want.replicas * ends - running * left / before - 1e-6
        assert left > before * boot


def test_a_deadline_counts_boot_and_pause() -> None:
    (rate, fast) = (float(x) for x in rates([1, 8]))
    info = job(remaining=fast * 1000.0, pause=30.0, max_replicas=8)
    for spare, late in ((100.0, True), (1.0e5, False)):
        settings = ScalingSettings(deadlines={"*": 1100.0 + spare})
        (want,) = Demand([info], 4, settings, 0.0, 64, running={"train": 1}, boot=200.0).at(1.0)
        assert want.late is late
        assert want.seconds_left is not None
        if late:
            assert want.seconds_left == pytest.approx(230.0 + (info.remaining - 200.0 * rate) / fast)


def test_noise_does_not_change_the_size_that_meets_a_deadline() -> None:
    counts = sizes(64, 4)
    seconds = 1e6 * 1.1 / rates(counts)
    settings = ScalingSettings(deadlines={"train": float(seconds[5]) * 1.01}, hysteresis=0.05)
    price = np.array(counts) * seconds
    for before in counts:
        (want,) = Demand([job()], 4, settings, 0.0, 64, {"train": before}).at(1.0)
        k = counts.index(before)
        good = seconds <= seconds[5] * 1.01
        near = good[k] and price[k] <= price[good].min() * 1.05
        assert want.replicas == (before if near else counts[int(np.argmin(np.where(good, price, np.inf)))])
