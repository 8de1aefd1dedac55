from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from market_bound import cost_at, epoch_seconds, frontier, pareto
from market_run import (
    Bill,
    Setup,
    run_fixed,
    run_goodput,
    run_threshold,
)
from simulated_market import (
    SimulatedMarket,
    busy_fraction,
    fixed,
    generate,
    parse_market,
)
from simulator.application import Application
from simulator.engine import SimulationOptions
from simulator.workload import Submission, WorkloadError

from adaptdl_elastic.autoscaler.policy import PolicySettings
from adaptdl_elastic.autoscaler.policy.allocate import allocate
from adaptdl_elastic.autoscaler.providers.base import Pool
from adaptdl_elastic.autoscaler.scaling.economics import ScalingSettings

DEMAND = Pool("demand", desired=0, maximum=8, slots=4, hourly_price=1.0)
SPOT = Pool("spot", desired=0, maximum=8, slots=4, hourly_price=0.3, preemptible=True)


def application(name: str = "net", epochs: int = 4) -> Application:
    """Steps of 0.1 s per 32 samples, a synchronisation that grows with the replicas; noise as gradient."""
    locals_ = np.array([32.0, 64.0, 128.0])
    placements = {}
    points, times = [], []
    for nodes in range(1, 17):
        for per_node in (1, 2, 3, 4):
            replicas = nodes * per_node
            sync = 0.0 if replicas == 1 else 0.01 + 0.004 * nodes
            step = locals_ / 320 + sync
            placements[(per_node,) * nodes] = (locals_, step, np.full(3, sync))
            points += [(nodes, replicas, local) for local in locals_]
            times += [(s, sync) for s in step]
    sizes = np.array([32.0, 1024.0])
    progress = np.tile(np.arange(1, epochs + 1) * 600.0, (2, 1))
    grads = np.tile(np.array([1.0, 8.0]), (2, epochs, 1))
    return Application(
        name=name,
        epochs=epochs,
        init_batch_size=32,
        max_batch_size=1024,
        min_local_bsz=32,
        max_local_bsz=128,
        max_replicas=32,
        fixed_batch_size=None,
        placements=placements,
        points=np.array(points),
        times=np.array(times),
        batch_sizes=sizes,
        progress=progress,
        grads=grads,
    )


def setup(jobs: int = 6, gap: float = 120.0) -> Setup:
    workload = [Submission(f"job-{i}", i * gap + 10.0, "net", 1, 32) for i in range(jobs)]
    options = SimulationOptions(pause=1.0, interval=30.0, events=True)
    return Setup(workload, {"net": application()}, allocate, PolicySettings(), options, boot_seconds=60.0)


# -- markets


def test_a_market_is_its_seeds(recwarn: pytest.WarningsRecorder) -> None:
    one, again, other = (generate(seed, 0.3, 0.25) for seed in (1, 1, 2))
    assert np.array_equal(one.prices, again.prices)
    assert np.array_equal(one.rates, again.rates)
    assert not np.array_equal(one.prices, other.prices)


def test_a_generated_market_keeps_to_its_means_and_its_cap() -> None:
    market = generate(3, 0.3, 0.25, hours=5000, cap=0.4)
    assert market.prices.max() <= 0.4
    assert np.exp(np.log(generate(3, 0.3, 0.25, hours=5000).prices).mean()) == pytest.approx(0.3, rel=0.05)
    assert market.rates.mean() == pytest.approx(0.25)


def test_lifetimes_have_the_rate_of_the_market() -> None:
    draws = np.random.default_rng(0).exponential(size=4000)
    for market in (fixed(1.0, 0.25), generate(5, 1.0, 0.25, hours=2000)):
        starts = np.random.default_rng(1).uniform(0, 1000 * 3600, size=4000)
        lives = [market.lifetime(start, draw) - start for start, draw in zip(starts, draws, strict=True)]
        assert np.mean(lives) / 3600 == pytest.approx(4.0, rel=0.1)


def test_a_market_that_gets_safe_and_one_that_is() -> None:
    market = SimulatedMarket(np.array([0.0, 3600.0]), np.ones(2), np.array([1.0, 0.0]))
    assert market.lifetime(0.0, 0.5) == pytest.approx(1800.0)
    assert market.lifetime(0.0, 2.0) > 1e12
    assert fixed(1.0).lifetime(0.0, 1e-9) > 1e12


@given(
    st.lists(st.tuples(st.floats(1, 1e4), st.floats(0, 10), st.floats(0, 10)), max_size=8), st.floats(0, 1e5)
)
def test_csv_of_ones_own(rows: list[tuple[float, float, float]], now: float) -> None:
    table, at = [(0.0, 1.0, 0.5)], 0.0
    for gap, price, rate in rows:
        at += gap
        table.append((at, price, rate))
    text = "seconds,price,interruptions_per_hour\n" + "\n".join(",".join(map(repr, row)) for row in table)
    market = parse_market(text)
    assert market.price(now) == [price for start, price, _ in table if start <= now][-1]
    later = market.next_change(now)
    assert later == next((start for start, _, _ in table if start > now), None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "at 0 seconds"),
        ("10,1,1", "at 0 seconds"),
        ("0,1", "line 1"),
        ("0,1,1\n0,1,1", "line 2: seconds must grow"),
        ("0,-1,1", "negative"),
        ("0,nan,1", "negative"),
        ("0,cheap,1", "line 1"),
    ],
)
def test_bad_csv_names_the_line(text: str, words: str) -> None:
    with pytest.raises(WorkloadError, match=words):
        parse_market(text)


def test_busy_fraction() -> None:
    assert busy_fraction((), 1.0, 0.5, 0) == 0.0
    assert busy_fraction((1,), 1.0, 0.0, 0) == 1.0
    assert busy_fraction((4, 4), 1.0, 0.5, 0) == pytest.approx(0.5)
    assert busy_fraction((4, 4), 1.0, 0.5, 1) == pytest.approx(2 / 3)


# -- runs


def test_the_same_run_twice_is_the_same_bill() -> None:
    markets = {"demand": fixed(1.0), "spot": generate(1, 0.3, 2.0)}
    bills = [
        run_goodput(setup(), [SPOT, DEMAND], markets, ScalingSettings(max_nodes=8), "x") for _ in range(2)
    ]
    assert bills[0] == bills[1]


def test_every_job_ends_and_the_bill_adds_up() -> None:
    bill = run_goodput(setup(), [DEMAND], {"demand": fixed(1.0)}, ScalingSettings(max_nodes=8), "goodput")
    assert math.isfinite(bill.jct)
    assert bill.cost == pytest.approx(bill.node_hours)
    assert 0 < bill.most_nodes <= 8
    assert bill.interruptions == 0
    still = run_fixed(setup(), 4, 1.0)
    assert still.cost == pytest.approx(4 * still.makespan / 3600)


def test_time_that_is_worth_more_is_bought() -> None:
    bills = [
        run_goodput(
            setup(), [DEMAND], {"demand": fixed(1.0)}, ScalingSettings(max_nodes=8, slots_value=value), "x"
        )
        for value in (0.5, 30.0)
    ]
    assert bills[0].cost < bills[1].cost
    assert bills[0].jct > bills[1].jct


def test_spot_is_interrupted_and_everything_still_ends() -> None:
    markets = {"demand": fixed(1.0), "spot": fixed(0.3, 6.0)}
    cautious = ScalingSettings(max_nodes=8)
    bill = run_goodput(setup(jobs=10), [SPOT, DEMAND], markets, cautious, "spot")
    assert bill.interruptions > 0
    assert math.isfinite(bill.jct)
    on_demand = run_goodput(setup(jobs=10), [DEMAND], {"demand": fixed(1.0)}, cautious, "demand")
    assert bill.cost < 0.6 * on_demand.cost


def test_what_goes_without_a_notice_is_trained_again() -> None:
    markets = {"demand": fixed(1.0), "spot": fixed(0.3, 20.0)}
    cautious = ScalingSettings(max_nodes=8)
    sudden = replace(setup(jobs=10), notice=0.0)
    bills = [
        run_goodput(replace(sudden, loss=seconds), [SPOT, DEMAND], markets, cautious, "spot")
        for seconds in (0.0, 40.0)
    ]
    assert all(bill.interruptions > 0 and math.isfinite(bill.jct) for bill in bills)
    assert bills[0].jct + 2 < bills[1].jct


def test_the_threshold_autoscaler_works_too() -> None:
    bill = run_threshold(
        setup(), [DEMAND], {"demand": fixed(1.0)}, ScalingSettings(max_nodes=8), low=0.7, high=0.9
    )
    assert math.isfinite(bill.jct)
    assert 0 < bill.cost < 8 * bill.makespan / 3600


@settings(max_examples=3, deadline=None)
@given(st.sampled_from([1, 3, 10]), st.sampled_from([0.5, 4.0, 20.0]))
def test_nobody_beats_the_bound(jobs: int, value: float) -> None:
    made = setup(jobs=jobs)
    bound = frontier(made.workload, made.apps, 4, range(1, 33))
    bills: Sequence[Bill] = [
        run_goodput(
            made, [DEMAND], {"demand": fixed(1.0)}, ScalingSettings(max_nodes=8, slots_value=value), "x"
        ),
        run_fixed(made, 4, 1.0),
    ]
    for bill in bills:
        assert bill.cost >= bound.least(bill.jct) * 0.999


def test_the_bound_is_a_frontier() -> None:
    made = setup()
    found = frontier(made.workload, made.apps, 4, (1, 2, 4, 8))
    costs, times = zip(*found.points, strict=True)
    assert list(costs) == sorted(costs)
    assert list(times) == sorted(times, reverse=True)
    for cost, time in found.points:  # what it does itself is not below its own bound, and on it
        assert found.least(time) == pytest.approx(cost)
    assert found.least(min(times) / 2) > max(costs)
    assert found.least(max(times) * 2) == pytest.approx(min(costs))
    more = frontier(made.workload, made.apps, 4, range(1, 9))
    assert more.least(times[50]) <= found.least(times[50])  # more sizes to choose from
    table = epoch_seconds(made.apps["net"], [1, 2, 4, 8], 4)
    assert np.isfinite(table).all()
    assert (np.diff(table, axis=0) < 0).all()  # more replicas are faster here


def test_pareto_and_between_its_points() -> None:
    points = [(3.0, 1.0), (1.0, 3.0), (2.5, 3.5), (2.0, 2.0)]
    assert pareto(points) == [(1.0, 3.0), (2.0, 2.0), (3.0, 1.0)]
    assert cost_at(points, 2.5) == pytest.approx(1.5)
    assert math.isnan(cost_at(points, 4.0))
    assert math.isnan(cost_at([], 1.0))
