"""Step times on a machine whose speed changes: what is compared was measured at other moments."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptdl_elastic.torch._tuning import step_times
from adaptdl_elastic.torch._tuning.step_times import Key, StepTimes, entries

Speed = Callable[[float], float]


class Machine:
    """Steps of 1 ms + 10 µs per sample, times `slowness(now)`."""

    def __init__(self, slowness: Speed = lambda _: 1.0) -> None:
        self.now = 0.0
        self.slowness = slowness
        self.times = StepTimes()

    def train(self, atomic: int, seconds: float, replicas: int = 1) -> None:
        end = self.now + seconds
        while self.now < end:
            took = (1e-3 + 1e-5 * atomic) * self.slowness(self.now)
            self.now += took
            self.times.add(Key(1, replicas, atomic), took, self.now, False)

    def ratio(self, atomic: int, other: int) -> float:
        """Time of a step at `atomic` over one at `other`, relative to the truth."""
        found = {e.atomic_bsz: e.optim_step_time for e in self.times.entries()}
        return found[atomic] / found[other] * (1 + 0.01 * other) / (1 + 0.01 * atomic)


def test_a_size_that_was_left_is_told_at_the_speed_of_now() -> None:
    """It kept the time that it took on an idle machine, and looked twice as good on a busy one."""
    machine = Machine(lambda now: 1.0 if now < 30 else 2.0)
    for atomic in (16, 32, 64):
        machine.train(atomic, 9)
    machine.train(64, 13)
    assert machine.now > 40
    assert machine.ratio(16, 64) == pytest.approx(1.0, rel=0.05)
    assert machine.ratio(32, 64) == pytest.approx(1.0, rel=0.05)
    now = next(e for e in machine.times.entries() if e.atomic_bsz == 64)
    assert now.optim_step_time == pytest.approx(2 * 1.64e-3, rel=0.01)


def test_the_speed_of_now_is_told_at_once_and_for_all_sizes() -> None:
    machine = Machine(lambda now: 1.0 if now < 20 else 3.0)
    machine.train(16, 10)
    machine.train(64, 10)
    machine.train(64, 3 * step_times.SPAN)
    assert machine.ratio(16, 64) == pytest.approx(1.0, rel=0.15)


def test_a_slower_network_leaves_the_times_on_one_node_as_they_were() -> None:
    times = StepTimes()
    for key, seconds, end in ((Key(1, 1, 16), 0.4, 8), (Key(2, 2, 8), 0.2, 20), (Key(2, 2, 8), 0.8, 40)):
        for now in range(end - 8, end):
            times.add(key, seconds, float(now), False)
    times.network_changed(32.0, ())
    assert [entry.optim_step_time for entry in times.entries()] == pytest.approx([0.4, 0.8])


def test_sizes_measured_at_other_speeds_meet_when_one_is_returned_to() -> None:
    """16 and 64 have both been measured beside 32 only, at speeds three apart."""
    machine = Machine(lambda now: 1.0 if now < 20 else 3.0)
    machine.train(16, 10)
    machine.train(32, 10)
    machine.train(32, 10)
    machine.train(64, 10)
    assert machine.ratio(16, 64) == pytest.approx(1.0, rel=0.05)
    assert machine.ratio(32, 64) == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("factor", [250.0, 1 / 250.0])
def test_a_jump_at_a_change_is_recognised_when_the_size_before_is_used_again(factor: float) -> None:
    """A trial grew to two replicas when its slow part began, and stayed at one for good after that."""
    machine = Machine(lambda now: 1.0 if now < 10 else factor)
    machine.train(64, 10)
    machine.train(16, 10, replicas=2)
    assert machine.ratio(16, 64) == pytest.approx(factor, rel=0.3), "nothing says that it is a jump"
    machine.train(64, 7 * step_times.SPAN)
    assert machine.ratio(16, 64) == pytest.approx(1.0, rel=0.15)


def test_the_slow_first_steps_after_a_change_drop_nothing() -> None:
    machine = Machine(lambda now: 20.0 if 20 <= now < 22 else 1.0)
    machine.train(64, 10)
    machine.train(16, 10)
    for _ in range(2):
        machine.train(64, 3)
        spans = machine.times.spans()
        assert step_times.since_jump(spans) == spans


def test_a_busy_machine_is_averaged_out() -> None:
    """Speed wanders by a quarter either way within seconds, steps vary by a fifth: ratios still hold."""
    errors = []
    for seed in range(5):
        noise, wander = random.Random(seed), 0.0

        def slowness(_: float, noise: random.Random = noise) -> float:
            nonlocal wander
            wander = 0.999 * wander + noise.gauss(0, 0.25 * math.sqrt(1 - 0.999**2))
            return math.exp(wander + noise.gauss(0, 0.2))

        machine = Machine(slowness)
        for _ in range(3):
            for atomic in (16, 32, 64, 128):
                machine.train(atomic, 10)
        errors += [math.log(machine.ratio(atomic, 128)) for atomic in (16, 32, 64)]
    assert math.sqrt(statistics.mean(error**2 for error in errors)) < 0.13


@pytest.mark.parametrize("seed", range(3))
def test_standing_still_now_and_then_favours_no_size(seed: int) -> None:
    """A tenth of a processor: a tenth of a second's rest comes every 11 ms of work, in whatever step.

    Without it as an outlier the few long steps, each of which has one, looked ten times as bad as
    the many short ones.
    """
    noise = random.Random(seed)
    machine = Machine()
    rest = 0.0
    for _ in range(3):
        for atomic in (16, 1500):  # 1.2 ms, 16 ms
            end = machine.now + 20
            while machine.now < end:
                took = work = 1e-3 + 1e-5 * atomic
                while rest < work:
                    work -= rest
                    took += 0.1
                    rest = noise.expovariate(1 / 0.011)
                rest -= work
                machine.now += took
                machine.times.add(Key(1, 1, atomic), took, machine.now, False)
    assert machine.ratio(16, 1500) == pytest.approx(1.0, rel=0.3)


def test_a_size_is_believed_when_its_mean_is_known() -> None:
    machine = Machine()
    for number in range(60):  # most take 1 ms, some a hundred
        took = 0.1 if number % 20 == 10 else 1e-3
        machine.now += took
        machine.times.add(Key(1, 1, 16), took, machine.now, False)
    assert machine.times.entries() == (), "0.3 s were measured: ±50 %"
    machine.train(16, 5)
    assert len(machine.times.entries()) == 1


def test_kept_step_times_are_bounded_and_forget_no_size() -> None:
    machine = Machine(lambda now: 1.0 + now / 1000)  # slower and slower
    for _ in range(4):
        for atomic in range(8, 128, 8):
            machine.train(atomic, 5)
    machine.train(64, 1000)
    assert len(machine.times.spans()) <= step_times.MOST_SPANS + 1
    assert len(machine.times.entries()) == 15
    for atomic in (8, 56, 120):
        assert machine.ratio(atomic, 64) == pytest.approx(1.0, rel=0.1)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(step_times.ENOUGH, 150)), min_size=1, max_size=30))
def test_any_sequence_of_sizes_on_an_even_machine_is_told_exactly(stays: list[tuple[int, int]]) -> None:
    machine = Machine()
    for size, steps in stays:
        machine.train(size, (steps - 0.5) * (1e-3 + 1e-5 * size))
    found = {e.atomic_bsz: e for e in machine.times.entries()}
    assert set(found) == {size for size, _ in stays}
    for size, entry in found.items():
        assert entry.optim_step_time == pytest.approx(1e-3 + 1e-5 * size, rel=1e-3)
        assert entry.optim_count == sum(steps for other, steps in stays if other == size)


def test_measured_step_times_survive_a_restart() -> None:
    machine = Machine()
    machine.train(16, 5)
    machine.train(64, 5.5)
    before = machine.times.entries()
    after = StepTimes()
    after.load(json.loads(json.dumps(machine.times.dump())), now=3.0)  # another process's clock
    assert after.entries() == pytest.approx(before)
    machine.times, machine.now = after, 3.0
    machine.slowness = lambda _: 2.0  # on another machine
    machine.train(64, 5)
    assert machine.ratio(16, 64) == pytest.approx(1.0, rel=0.05)


def test_no_samples_give_no_entries() -> None:
    assert entries([]) == ()
    times = StepTimes()
    assert times.dump() == []
    times.load([], now=1.0)
    assert times.entries() == ()
