"""How often a step is measured, by what it costs: times are given."""

from __future__ import annotations

import random

import pytest
import torch

from adaptdl_elastic.torch._gradient.pace import (
    EARLY,
    EARLY_SHARE,
    LONGEST,
    SHARE,
    UNSETTLED,
    Pace,
    Stopwatch,
    gap,
)


def trained(cost: float, noise: float = 0.0, every: int = 0, slow: int = 0) -> tuple[Pace, float]:
    """Train 4,000 steps; return the pace and the share of the second half's time in which it measured.

    Args:
        cost: Cost of a measurement in plain steps.
        noise: Spread of the logarithm of a step's time.
        every: Number of steps between two pauses of ten steps' time; 0: none.
        slow: From this step on everything takes three times as long.
    """
    clock, spent, began, due = 0.0, 0.0, 0.0, 0
    pace, rng = Pace({"way": 0.5}, lambda: clock), random.Random(0)
    for step in range(4000):
        if step == 2000:
            spent, began = 0.0, clock
        unit = 3.0 if slow and step >= slow else 1.0
        clock += unit * rng.lognormvariate(0.0, noise) + (10.0 if every and step % every == 0 else 0.0)
        if step == due:
            clock += cost * unit
            spent += cost * unit
            pace.measured("way", cost * unit, step)
            due = step + gap(pace.cost("way"), step, settled=True)
    return pace, spent / (clock - began)


@pytest.mark.parametrize("cost", [0.002, 0.03, 0.2, 0.6, 1.0])
@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_measuring_takes_one_percent_of_the_time(cost: float, noise: float) -> None:
    _, share = trained(cost, noise)
    assert min(0.7 * SHARE, cost / 2) < share < 1.3 * SHARE


@pytest.mark.parametrize("every", [4, 5, 20, 300])
def test_pauses_of_the_script_do_not_make_measurements_rare(every: int) -> None:
    _, share = trained(0.2, every=every)
    assert 0.5 * SHARE < share < 1.3 * SHARE


def test_a_slower_machine_does_not_change_the_cost_in_steps() -> None:
    pace, _ = trained(0.2, slow=2000)
    assert pace.cost("way") == pytest.approx(0.2, abs=0.02)


def test_estimates_that_are_not_precise_may_cost_more_for_some_time() -> None:
    assert gap(0.6, EARLY - 1, settled=True) == gap(0.6, UNSETTLED - 1, settled=False) == 12
    assert gap(0.6, EARLY, settled=True) == gap(0.6, UNSETTLED, settled=False) == 60
    assert EARLY_SHARE >= 0.6 / 12.6
    assert gap(1e9, EARLY, settled=True) == LONGEST


def test_an_untimed_way_has_the_expected_cost() -> None:
    pace = Pace({"way": 0.5}, iter(range(100)).__next__)
    for step in range(20):
        pace.measured("way", 0.0, step)
    assert pace.cost("way") == 0.5


def test_a_stopwatch_adds_blocks_up_and_begins_again() -> None:
    clock = iter([0.0, 1.0, 5.0, 7.0])
    stopwatch = Stopwatch(clock.__next__)
    for _ in range(2):
        with stopwatch.running(torch.device("cpu")):
            pass
    assert (stopwatch.take(), stopwatch.take()) == (3.0, 0.0)
