"""How often a step is measured, by what it costs: times are given."""

from __future__ import annotations

import random

import pytest

from adaptdl_elastic.torch._gradient.pace import EARLY, LONGEST, SHARE, Pace, gap_of


def trained(
    cost: float, noise: float, steps: int = 4000, late: bool = False, slow: int = 0
) -> tuple[Pace, float]:
    """Train at one second a step; return the pace and the share of time that it took in the second half.

    Args:
        cost: Cost of a measurement in plain steps.
        noise: Standard deviation of a step's time.
        steps: Number of steps.
        late: Whether a measurement's work is done in the step after it, as on a GPU.
        slow: From this step on every step takes three times as long.
    """
    pace, rng, due, spent, owed = Pace({"way": 0.5}), random.Random(0), 0, 0.0, 0.0
    for step in range(steps):
        way = "way" if step == due else None
        extra = cost if way else 0.0
        if step >= steps / 2:
            spent += extra
        extra, owed = (owed, extra) if late else (extra, 0.0)
        # an evaluation, a checkpoint, or another program
        pause = 30.0 * (rng.random() < 0.002)
        speed = 3.0 if slow and step >= slow else 1.0
        pace.stepped(max(1.0 + extra + rng.gauss(0.0, noise), 0.1) * speed + pause, way)
        if way:
            due = step + pace.gap(pace.cost("way"), step)
    return pace, spent / (steps / 2)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("cost", [0.03, 0.2, 0.6, 1.0])
def test_measuring_takes_one_percent_of_the_time(cost: float, late: bool) -> None:
    _, share = trained(cost, noise=0.02, late=late)
    assert 0.4 * SHARE < share < 1.3 * SHARE


def test_a_slower_machine_does_not_change_the_cost_in_steps() -> None:
    pace, _ = trained(0.2, noise=0.02, slow=2000)
    assert pace.cost("way") == pytest.approx(0.2, abs=0.05)


def test_an_uncertain_cost_makes_measurements_rarer() -> None:
    sure, _ = trained(0.1, noise=0.01)
    unsure, _ = trained(0.1, noise=0.3)
    assert unsure.cost("way") > sure.cost("way") > 0.09


def test_a_free_measurement_is_made_in_almost_every_step_and_still_compared() -> None:
    pace = Pace({"way": 0.0})
    gaps = [pace.gap(0.0, 1000) for _ in range(64)]
    assert sorted(set(gaps)) == [1, 5]
    assert gaps.count(5) == 4


def test_the_first_steps_may_cost_more_and_there_is_a_longest_gap() -> None:
    assert gap_of(0.6, EARLY - 1) == 12
    assert gap_of(0.6, EARLY) == 60
    assert gap_of(1e9, EARLY) == LONGEST
