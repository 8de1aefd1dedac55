"""The rule that chooses batch sizes, in runs of a minute on a simulated machine, against every fixed size.

The machine's speed wanders, steps vary by a tenth, and statistics of the gradient are noisy. A run is worth
its samples, counted at the initial batch size, over those of the best fixed size of the same run.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fake_loader import limit, use

from adaptdl_elastic import _session
from adaptdl_elastic._values import BatchSize, Limits, ReportedPosition
from adaptdl_elastic.goodput import GradParams
from adaptdl_elastic.torch._bootstrap import current_session
from adaptdl_elastic.torch._tuning import batch_size, reporter, step_times
from adaptdl_elastic.torch._tuning.batch_size import Chooser
from adaptdl_elastic.torch._tuning.reporter import Metrics
from adaptdl_elastic.torch._tuning.step_curve import predict
from adaptdl_elastic.torch._tuning.step_times import Estimates, Key

INIT = 32
SECONDS = 60.0
SIZES = (32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
Curve = Callable[[float], float]


pytestmark = pytest.mark.usefixtures("script")


class Run:
    """One run: `worth` is the samples at the initial batch size, `visited` the sizes that were chosen.

    Args:
        step: Seconds of a step by batch size.
        noise: tr Σ / |G|² by the part of the run that is done.
        seed: Of the machine and of the measurements.
        fixed: A size that is kept; 0: sizes are chosen.
        slowed: By what steps are slower at a time.
    """

    def __init__(
        self, step: Curve, noise: Curve, seed: int, fixed: int = 0, slowed: Curve = lambda _: 1.0
    ) -> None:
        _session.reset()
        current_session()
        self.now, self.worth, self.visited = 0.0, 0.0, list[tuple[float, int]]()
        chance, wander = random.Random(seed), random.Random(1000 + seed)
        speeds = [0.0]
        while len(speeds) < 8 * SECONDS:
            speeds.append(0.9 * speeds[-1] + wander.gauss(0, 0.05))
        metrics = Metrics(clock=lambda: self.now, background=False)
        limit(INIT, SIZES[-1], (8, SIZES[-1]))
        size, refresh, cold = fixed or INIT, 0.3, 0
        while self.now < SECONDS:
            ratio = noise(self.now / SECONDS)
            use(metrics, size)
            metrics.profile_step_start(size)
            slow = math.exp(speeds[int(2 * self.now)] + chance.gauss(0, 0.1)) * slowed(self.now)
            self.now += step(size) * slow * (1.5 if cold > 0 else 1.0)
            cold -= 1
            metrics.profile_step_commit()
            scale = size / INIT
            self.worth += size * (ratio + 1) / (ratio / scale + 1) / scale
            metrics.update_grad_params("model", 1.0, ratio * math.exp(chance.gauss(0, 0.1)), 0.1)
            total = self.worth / self.now * SECONDS
            _session.current().reported_position = ReportedPosition(1, 0, None, self.worth, total)
            if self.now > refresh and not fixed:
                refresh = self.now + 1.0
                metrics.refresh()
                found = metrics.suggestion()
                if found is not None:
                    size, cold = found.atomic_bsz * (found.accumulation_steps + 1), 3
                    self.visited.append((self.now, size))


CASES: dict[str, tuple[Curve, Curve, Curve, float]] = {
    # the demo's network on two cores, whose first seconds are slowed by a replica that is prepared
    "proportional and a constant": (
        lambda m: 4.75e-3 + 1.42e-3 * m, lambda part: 5 + 60 * part, lambda now: 1.4 if now < 4 else 1.0, 0.93
    ),
    "proportional": (lambda m: 5e-4 * m, lambda part: 2 + 100 * part, lambda now: 1.0, 0.95),
    "constant share": (lambda m: 0.02 + 2e-4 * m, lambda part: 5 + 60 * part, lambda now: 1.0, 0.97),
    "a wait of 20 ms": (lambda m: 0.02 + 2e-5 * m, lambda part: 2 + 100 * part, lambda now: 1.0, 0.97),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_run_is_worth_nearly_as_much_as_with_the_best_fixed_size(case: str) -> None:
    step, noise, slowed, least = CASES[case]
    shares = []
    for seed in range(2):
        best = max(Run(step, noise, seed, fixed, slowed).worth for fixed in SIZES)
        shares.append(Run(step, noise, seed, slowed=slowed).worth / best)
    assert np.mean(shares) > least, shares


def test_a_replay_of_the_recorded_demo_grows_no_later_than_the_run_did() -> None:
    """Step times and noise are those that the run in the README's picture reported at its changes."""
    log = Path(__file__).resolve().parents[2] / "docs" / "images" / "run.jsonl"
    events = [json.loads(line) for line in log.read_text().splitlines()]
    changes = [event for event in events if event["event"] == "batch_size"]
    began, lasted = events[0]["time"], events[-1]["time"] - events[0]["time"]
    seconds = {e["batch_size"]: e["batch_size"] / e["throughput"] for e in changes}
    sizes = sorted(seconds)
    when, ratios = [], []
    for event in changes:
        scale, gain = event["batch_size"] / INIT, event["gain"]
        if scale > 1:
            when.append((event["time"] - began) / lasted)
            ratios.append(min((gain - 1) / max(1 - gain / scale, 1e-9), 1e4))

    def step(size: float) -> float:
        return float(np.interp(size, sizes, [seconds[one] for one in sizes]))

    run = Run(step, lambda part: float(np.interp(part, when, ratios)), 0)
    grown = next(now for now, size in run.visited if size >= changes[-1]["batch_size"] / 2)
    assert grown / SECONDS <= next(
        (e["time"] - began) / lasted for e in changes if e["batch_size"] >= changes[-1]["batch_size"] / 2
    )


def test_a_disturbed_measurement_does_not_decide_for_good() -> None:
    """The first size was measured while a process started beside it, at half the speed.

    The curve looked proportional to the batch, and the size stayed for the rest of the run.
    """
    run = Run(lambda m: 0.02 + 2e-4 * m, lambda part: 50.0, 0, slowed=lambda now: 2.0 if now < 3 else 1.0)
    assert max(size for _, size in run.visited) >= 256
    assert next(now for now, size in run.visited if size >= 128) < 10


def test_nothing_changes_shortly_before_the_end() -> None:
    run = Run(lambda m: 0.02 + 2e-5 * m, lambda part: 2.0 if part < 0.99 else 1000.0, 0)
    assert all(now < 0.99 * SECONDS for now, _ in run.visited)


def known(times: dict[Key, float], error: float = 0.02) -> Estimates:
    """Times that were measured independently, with this standard error."""
    seconds = np.log(np.array(list(times.values())))
    return Estimates(tuple(times), seconds, np.eye(len(times)) * error**2)


def slowdown(times: Estimates, sizes: list[int]) -> tuple[list[float], list[float]]:
    """Return T(m)/T(32) on one replica, and the standard deviation of its logarithm."""
    found = predict(times, 1, 1, 32, np.array(sizes, float), batch_size.PRECISION)
    return list(np.exp(found.mean)), list(np.sqrt(found.variance))


def test_with_one_size_a_doubled_one_may_take_once_to_twice_as_long() -> None:
    (ratio,), (error,) = slowdown(known({Key(1, 1, 32): 0.01}), [64])
    assert 1.3 < ratio < 1.6
    assert math.log(ratio) - 2 * error < 0.05
    assert math.log(ratio) + 2 * error > math.log(2) - 0.05


@pytest.mark.parametrize("constant", [0.0, 0.5, 0.95])
def test_two_sizes_tell_the_constant_part(constant: float) -> None:
    def time(m: int) -> float:
        return 0.01 * (constant + (1 - constant) * m / 32)

    ratios, errors = slowdown(known({Key(1, 1, 32): time(32), Key(1, 1, 64): time(64)}), [64, 128])
    for m, ratio, error in zip((64, 128), ratios, errors, strict=True):
        assert abs(math.log(ratio / (time(m) / time(32)))) < max(2 * error, 0.03), (m, ratio)
    assert errors[0] < 0.05 < errors[1]


def test_a_cliff_that_was_measured_is_followed() -> None:
    ratios, _ = slowdown(known({Key(1, 1, 32): 0.01, Key(1, 1, 64): 0.5}), [64])
    assert ratios[0] > 30


def test_sizes_on_other_replicas_tell_of_the_constant_part_only() -> None:
    elsewhere = {Key(1, 2, 32): 5.0, Key(1, 2, 256): 5.1}
    (alone,), (before,) = slowdown(known({Key(1, 1, 32): 0.01}), [64])
    (helped,), (after,) = slowdown(known({Key(1, 1, 32): 0.01, **elsewhere}), [64])
    assert helped < alone
    assert after < before
    assert helped < 1.25


def test_a_trial_takes_away_the_doubt_about_a_size_that_was_left_long_ago() -> None:
    fresh = known({Key(1, 1, 32): 0.01, Key(1, 1, 64): 0.02})
    stale = fresh._replace(covariance=np.diag([0.02**2, 0.6**2]))
    resolved = [
        predict(times, 1, 1, 32, np.array([64.0]), batch_size.PRECISION).resolved[0]
        for times in (fresh, stale)
    ]
    assert resolved[0] < 0.03**2
    assert resolved[1] > 0.15**2


LIMITS = Limits(32, 1024, (8, 1024), False)


def chooser(times: dict[Key, float], now: int, var: float = 1000.0, **fields: object) -> Chooser:
    return Chooser(
        1, 1, LIMITS, GradParams(1.0, var), known(times), BatchSize(now, 0), **{"remaining": 60.0, **fields}
    )  # type: ignore[arg-type]


TWO = {Key(1, 1, 32): 0.0100, Key(1, 1, 64): 0.0104}


@pytest.mark.parametrize(("remaining", "changes"), [(0.05, False), (60.0, True)])
def test_a_change_has_to_pay_within_the_work_that_remains(remaining: float, changes: bool) -> None:
    assert (chooser(TWO, 32, remaining=remaining).better() is not None) == changes


def test_a_gain_within_the_precision_of_a_trial_is_none() -> None:
    """Both sizes were measured: the larger one is 4 % better, then 12 %."""
    for gain, changes in ((1.04, False), (1.12, True)):
        times = {Key(1, 1, 60): 0.01, Key(1, 1, 64): 0.01 * 64 / 60 / gain}
        found = chooser(times, 60, var=1e9)._gain(np.array([64.0]), np.array([1.0]))
        assert (found[0] > 0) == changes, gain


def test_a_generation_begins_with_the_global_batch_size_that_was_reached() -> None:
    times = {Key(1, 1, size): 1e-3 * size for size in (32, 64, 128)}
    made = chooser(times, 0, var=100.0, reached=128)
    for replicas, local in ((1, 128), (2, 64), (4, 32)):
        found = Chooser(**{**vars(made), "replicas": replicas}).first()
        assert found == BatchSize(local, 0)


@pytest.mark.parametrize("name", ["GROWTH", "PRECISION", "CHANGE"])
@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_each_constant_of_the_rule_matters(name: str, factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decisions at the edge of each constant, which another value decides otherwise."""
    before = edge_decisions()
    monkeypatch.setattr(batch_size, name, factor * getattr(batch_size, name))
    assert edge_decisions() != before


def edge_decisions() -> list[object]:
    found: list[object] = []
    for gain in (1.02, 1.04, 1.07, 1.12, 1.2):
        times = {Key(1, 1, 60): 0.01, Key(1, 1, 64): 0.01 * 64 / 60 / gain}
        found.append(chooser(times, 60, var=1e9)._gain(np.array([64.0]), np.array([1.0]))[0] > 0)
    for remaining in (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6):
        found.append(chooser(TWO, 32, remaining=remaining).better() is not None)
    found.append(chooser({Key(1, 1, 32): 0.01}, 32, var=1e9).better())
    return found


@pytest.mark.parametrize("name", ["ENOUGH", "FADE", "SPAN", "SURE", "STALL", "JUMP"])
@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_each_constant_of_the_measurement_matters(
    name: str, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = measured()
    value = getattr(step_times, name) * factor
    monkeypatch.setattr(step_times, name, math.ceil(value) if name == "ENOUGH" else value)
    assert measured() != before


def measured() -> list[object]:
    """Outcomes of measurements at the edge of each constant, which another value makes different."""
    times = step_times.StepTimes()
    clock = 0.0
    for size, steps in ((16, 100), (32, 2), (64, 100), (128, 4), (32, 100)):
        for _ in range(steps):
            clock += 0.02
            times.add(Key(1, 1, size), 0.02, clock, False)
    found = times.estimates()
    outcomes: list[object] = [found.keys, [round(float(x), 6) for x in found.covariance.diagonal()]]
    for error in (0.1, 0.14, 0.2, 0.25):
        outcomes.append(len(step_times.entries([span(32, 0.0, 0.01, error)])))
    for stall in (0.15, 0.2, 0.4):
        outcomes.append(len(step_times.robust([0.01] * 9 + [0.01 + stall])))
    for jump in (3.0, 4.0, 7.0):
        stays = [span(32, 0.0, 0.01), span(64, 6.0, 0.01), span(32, 12.0, 0.01 * jump)]
        outcomes.append(len(step_times.since_jump(stays)))
    return outcomes


def span(size: int, began: float, seconds: float, error: float = 0.01) -> step_times.Span:
    """A span of 20 seconds, and of as many steps of this duration, known with this relative error."""
    mean = step_times.Mean(math.log(seconds), 20, error)
    return step_times.Span(Key(1, 1, size), began, began + 20.0, step_times.NOTHING, mean)


@pytest.mark.parametrize("factor", [0, 2])
def test_the_number_of_steps_that_are_not_measured_matters(
    factor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def counted() -> list[int]:
        _session.reset()
        current_session()
        clock = 0.0
        metrics = Metrics(clock=lambda: clock, background=False)
        for _ in range(20):
            metrics.profile_step_start(32)
            clock += 0.01
            metrics.profile_step_commit()
        return [entry.optim_count for entry in metrics.entries()]

    before = counted()
    monkeypatch.setattr(reporter, "WARMUP", factor * reporter.WARMUP)
    assert counted() != before
