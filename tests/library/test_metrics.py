from __future__ import annotations

import dataclasses
import json
import math
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_loader import limit, use
from fresh import Script
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

import adaptdl_elastic.torch as adl
from adaptdl_elastic import sched_hints
from adaptdl_elastic._values import BatchSize, ReportedPosition
from adaptdl_elastic.autoscaler.coordinator.node_types import on_types
from adaptdl_elastic.protocol.channel import Channel
from adaptdl_elastic.protocol.hints import TIMES_KEPT
from adaptdl_elastic.protocol.messages import Event, Hints
from adaptdl_elastic.torch._bootstrap import current_session
from adaptdl_elastic.torch._tuning import reporter
from adaptdl_elastic.torch._tuning.memory_limit import memory_limit
from adaptdl_elastic.torch._tuning.model_size import exchanged_bytes
from adaptdl_elastic.torch._tuning.reporter import WARMUP, WINDOW, Metrics
from adaptdl_elastic.torch._tuning.step_times import robust_mean


class Machine:
    """A machine whose steps take as long as `step_time` says, and metrics that watch it."""

    def __init__(self, step_time: Callable[[int], float], load: float = 0.0) -> None:
        self.now = 0.0
        self.step_time = step_time
        self.load = load  # seconds for the data of a step
        self.metrics = Metrics(clock=lambda: self.now, background=False)

    def train(self, steps: int, atomic: int, accum: int = 0, sync: float = 0.0) -> None:
        if current_session().training_loader is None:
            limit(32, 4096, (8, 1024))
        use(self.metrics, atomic, accum)
        for _ in range(steps):
            for number in range(accum + 1):
                self.now += self.load
                self.metrics.profile_step_start(atomic)
                self.now += self.step_time(atomic)
                if number == accum:
                    self.now += sync
                self.metrics.profile_step_commit(accumulation_step=number < accum)

    def time_of(self, atomic: int) -> float:
        return next(e.optim_step_time for e in self.metrics.entries() if e.atomic_bsz == atomic)


@contextmanager
def reported() -> Iterator[list[Any]]:
    """Return a list that has the messages of the session to its agent once the block is left."""
    ours, theirs = Channel.pair()
    session, messages = current_session(), list[Any]()
    session.channel = Channel(theirs)
    yield messages
    session.channel.close()
    session.channel = None
    messages += ours.reports()
    ours.close()


POSITIVE = st.floats(1e-4, 1e2)


@given(st.lists(POSITIVE, min_size=1, max_size=WINDOW))
def test_a_robust_mean_lies_among_the_samples_and_scales_with_them(samples: list[float]) -> None:
    mean = robust_mean(samples)
    assert min(samples) * (1 - 1e-9) <= mean <= max(samples) * (1 + 1e-9)
    assert robust_mean([2 * s for s in samples]) == pytest.approx(2 * mean)


@given(st.lists(st.floats(0.99, 1.01), min_size=9, max_size=WINDOW), st.lists(st.floats(5, 1e6), max_size=4))
def test_a_minority_of_outliers_moves_a_robust_mean_by_nothing_much(
    good: list[float], bad: list[float]
) -> None:
    assert robust_mean([*good, *bad]) == pytest.approx(1, abs=0.02)


def test_no_samples_have_no_mean() -> None:
    assert robust_mean([]) == 0.0


def test_the_first_steps_after_a_start_and_a_change_are_not_believed(script: Script) -> None:
    slow = {32: 0, 64: 0}

    def step_time(atomic: int) -> float:
        slow[atomic] += 1
        return 5.0 if slow[atomic] <= WARMUP else 0.01 * atomic / 32

    machine = Machine(step_time)
    machine.train(20, 32)
    machine.train(20, 64)
    assert machine.time_of(32) == pytest.approx(0.01)
    assert machine.time_of(64) == pytest.approx(0.02)


def test_outliers_are_left_out(script: Script) -> None:
    noise = random.Random(0)
    machine = Machine(lambda _: 0.01 if noise.random() < 0.8 else 1.0)
    machine.train(200, 32)
    assert machine.time_of(32) == pytest.approx(0.01)


def test_a_machine_that_becomes_slower_is_believed_within_a_window(script: Script) -> None:
    times = iter([0.01] * 300 + [0.03] * (WINDOW + 1))
    machine = Machine(lambda _: next(times))
    machine.train(300, 32)
    assert machine.time_of(32) == pytest.approx(0.01)
    machine.train(WINDOW, 32)
    assert machine.time_of(32) == pytest.approx(0.03, rel=0.1)


def test_waiting_for_data_is_part_of_a_step_and_a_pause_is_not(script: Script) -> None:
    machine = Machine(lambda _: 0.01, load=0.02)
    for _ in range(10):
        machine.train(5, 32)
        machine.metrics.pause()
        machine.now += 100  # an evaluation
    assert machine.time_of(32) == pytest.approx(0.03)
    assert machine.metrics.throughput() == pytest.approx(32 / 0.03, rel=1e-6)


def test_a_pass_without_synchronisation_is_told_from_one_with_it(script: Script) -> None:
    script.restart(ADAPTDL_NUM_REPLICAS="2", ADAPTDL_NUM_NODES="1")
    machine = Machine(lambda _: 0.01)
    machine.train(20, 32, sync=0.004)
    (entry,) = machine.metrics.entries()
    assert (entry.nodes, entry.replicas, entry.atomic_bsz) == (1, 2, 32)
    assert entry.optim_step_time == pytest.approx(0.014)
    assert entry.accum_step_time == 0.0  # not measured
    machine.train(20, 16, accum=3, sync=0.004)
    entry = machine.metrics.entries()[0]
    assert (entry.atomic_bsz, entry.accum_count > entry.optim_count) == (16, True)
    assert entry.accum_step_time == pytest.approx(0.01)
    assert entry.optim_step_time == pytest.approx(0.014)
    assert machine.metrics.throughput() == pytest.approx(2 * 16 * 4 / 0.044, rel=1e-6)


def noisy_gradients(metrics: Metrics, ratio: float = 1000.0) -> None:
    metrics.update_grad_params("model", 1.0, ratio)


def limits(machine: Machine, **kwargs: Any) -> None:
    limit(32, 4096, (8, 1024), **kwargs)


def noisy(machine: Machine, ratio: float = 1000.0) -> None:
    """Give the machine a loader that may autoscale, and gradients of this noise."""
    limits(machine)
    noisy_gradients(machine.metrics, ratio)


def adapt(machine: Machine, decisions: int = 12) -> BatchSize:
    """Train, and follow every suggestion."""
    now = BatchSize(32, 0)
    for _ in range(decisions):
        machine.train(20, now.atomic_bsz, now.accumulation_steps)
        machine.metrics.refresh()
        now = machine.metrics.suggestion() or now
    return now


def test_one_replica_without_accumulation_adapts_its_batch_size(script: Script) -> None:
    machine = Machine(lambda atomic: 0.01 + 0.00001 * atomic)  # the larger the better, for the machine
    noisy(machine)
    found = adapt(machine)
    assert found.accumulation_steps == 0
    best = max(range(32, 1025), key=lambda m: m / (0.01 + 0.00001 * m) / (1 + m / 32 / 1000))
    assert found.atomic_bsz == pytest.approx(best, rel=0.2)


def test_one_replica_that_may_accumulate_need_not(script: Script) -> None:
    """Else AdaptDL's examples, which all allow it, would stay at the initial size on one replica."""
    machine = Machine(lambda atomic: 0.01 + 0.00001 * atomic)
    limits(machine, gradient_accumulation=True)
    noisy_gradients(machine.metrics)
    allowed = adapt(machine)
    limits(machine)
    assert (allowed.atomic_bsz, allowed.accumulation_steps) == (adapt(machine).atomic_bsz, 0)


def test_a_batch_size_that_does_not_pay_is_left_alone(script: Script) -> None:
    machine = Machine(lambda atomic: 0.001 * atomic)  # twice the samples, twice the time
    limits(machine)
    machine.metrics.update_grad_params("model", 1000.0, 1.0)  # and no noise to average out
    now = adapt(machine)
    assert now.atomic_bsz <= 64  # one try at most: before it is tried nobody knows


@pytest.mark.parametrize(
    ("noise", "error", "steps", "grows"),
    [
        (10.0, 0.0, 20, True),
        (10.0, 0.05, 20, True),
        (10.0, 100.0, 20, False),
        (10.0, math.inf, 20, False),
        # Twice the batch is worth 4/3 of the samples, and nobody knows yet that steps hardly depend on it.
        (1.0, 0.0, 300, True),
    ],
)
def test_with_one_size_measured_the_batch_grows_where_that_could_pay_in_spite_of_the_error_of_the_noise(
    script: Script, noise: float, error: float, steps: int, grows: bool
) -> None:
    machine = Machine(lambda atomic: 0.01)
    limits(machine)
    machine.metrics.update_grad_params("model", 1.0, noise, error)
    machine.train(steps, 32)
    machine.metrics.refresh()
    assert (machine.metrics.suggestion() is not None) == grows


def test_measurements_overrule_the_model(script: Script) -> None:
    """A cliff (memory, a cache) that no model of Pollux' form knows is stepped back from, once."""
    machine = Machine(lambda atomic: 0.01 if atomic <= 40 else 0.5)
    noisy(machine)
    visited, now = [], BatchSize(32, 0)
    for _ in range(30):
        machine.train(20, now.atomic_bsz)
        machine.metrics.refresh()
        now = machine.metrics.suggestion() or now
        visited.append(now.atomic_bsz)
    assert visited[-1] <= 40
    assert len(set(visited[-10:])) == 1


def test_a_blunder_is_taken_back_at_once(script: Script) -> None:
    machine = Machine(lambda atomic: 0.01 if atomic <= 40 else 0.5)
    noisy(machine)
    machine.train(20, 32)
    machine.train(8, 64)
    machine.metrics.refresh()
    back = machine.metrics.suggestion()
    assert back is not None
    assert back.atomic_bsz <= 40


@pytest.mark.parametrize("per_sample", [0.0, 1e-3])
def test_one_decision_at_most_doubles_the_batch_size_in_use(script: Script, per_sample: float) -> None:
    machine = Machine(lambda atomic: 0.01 + atomic * per_sample)
    noisy(machine, 1e9)
    machine.train(20, 32)
    machine.metrics.refresh()
    grown = machine.metrics.suggestion()
    assert grown is not None
    assert grown.atomic_bsz * (grown.accumulation_steps + 1) <= 64


@pytest.mark.parametrize(("factor", "seed", "spread"), [(1.0, 1, 0.05), (2.5, 0, 0.0), (0.4, 0, 0.0)])
def test_the_batch_size_does_not_wander_with_noise_or_another_speed(
    script: Script, factor: float, seed: int, spread: float
) -> None:
    """Sizes that were left before looked as fast as then: 201 → 183 → 109 → 104 → 100 → 93 → 88."""
    noise, slowness = random.Random(seed), 1.0
    machine = Machine(lambda atomic: slowness * (0.002 + 0.0001 * atomic) * noise.lognormvariate(0, 0.1))
    noisy(machine, 20.0)
    now = adapt(machine)
    slowness, changes = factor, 0
    for _ in range(40):
        machine.train(20, now.atomic_bsz)
        if spread:
            noisy_gradients(machine.metrics, 20.0 * noise.lognormvariate(0, spread))
        machine.metrics.refresh()
        found = machine.metrics.suggestion()
        changes, now = changes + (found is not None), found or now
    assert changes <= 1


def grown_machine() -> Machine:
    machine = Machine(lambda atomic: 0.01)
    noisy(machine, 1e9)
    assert adapt(machine).atomic_bsz == 1024
    return machine


def test_the_batch_size_in_use_before_a_restart_is_within_reach_after_it(script: Script) -> None:
    """A job at thirty times its initial batch size does not begin again at twice."""
    machine = grown_machine()
    saved = json.loads(json.dumps(machine.metrics.dump()))
    script.restart()
    again = Metrics(background=False)
    again.restore(saved)
    limit(32, 4096, (8, 1024))
    best = again.best_batch_size()
    assert best is not None
    assert best.atomic_bsz > 900


def test_the_batch_size_in_use_is_kept_when_replicas_change_in_place(script: Script) -> None:
    machine = grown_machine()
    session = current_session()
    session.identity = dataclasses.replace(session.identity, replicas=2)
    best = machine.metrics.best_batch_size()
    assert best is not None
    assert 2 * best.atomic_bsz * (best.accumulation_steps + 1) > 900


def test_limits_that_are_announced_before_the_first_step_forget_no_batch_size(script: Script) -> None:
    machine = Machine(lambda atomic: 0.01)
    limits(machine)
    machine.train(20, 256)
    script.restart()
    again = Metrics(background=False)
    again.restore(json.loads(json.dumps(machine.metrics.dump())))
    limit(32, 4096, (8, 1024))
    use(again, 32, 0)
    assert again.dump()["batch_size"] == 256


def test_step_times_are_kept_by_the_type_of_node(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    def on(node_type: str, seconds: float, saved: Any) -> tuple[Metrics, Any]:
        monkeypatch.setenv("ADAPTDL_NODE_TYPE", node_type)
        script.restart()
        machine = Machine(lambda atomic: seconds)
        if saved is not None:
            machine.metrics.restore(saved)
        limit(32, 4096, (8, 1024))
        noisy_gradients(machine.metrics)
        machine.train(2 * WINDOW, 32)
        machine.metrics.refresh()
        return machine.metrics, json.loads(json.dumps(machine.metrics.dump()))

    _, saved = on("slow", 0.1, None)
    fast, saved = on("fast", 0.01, saved)
    hints = fast.hints()
    assert hints.node_type == "fast"
    assert [entry.optim_step_time for entry in hints.profile] == pytest.approx([0.01])
    (slow,) = hints.elsewhere
    assert slow.node_type == "slow"
    assert slow.perf_params is not None
    assert [entry.optim_step_time for entry in slow.profile] == pytest.approx([0.1])
    again, _ = on("slow", 0.1, saved)
    assert [one.node_type for one in again.hints().elsewhere] == ["fast"]
    assert [entry.optim_step_time for entry in again.hints().profile] == pytest.approx([0.1])


def test_a_memory_limit_is_kept_by_the_type_of_node_that_it_was_learnt_on(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: Any = None

    def limits_on(node_type: str, largest: int | None) -> dict[str, int | None]:
        nonlocal saved
        monkeypatch.setenv("ADAPTDL_NODE_TYPE", node_type)
        script.restart()
        machine = Machine(lambda atomic: 0.1)
        if saved is not None:
            machine.metrics.restore(saved)
        memory_limit(current_session()).largest = largest  # as from the checkpoint: a job keeps it
        limits(machine)
        noisy_gradients(machine.metrics)
        machine.train(2 * WINDOW, 32)
        machine.metrics.refresh()
        saved = json.loads(json.dumps(machine.metrics.dump()))
        return {name: hints.memory_limit for name, hints in on_types(machine.metrics.hints()).items()}

    assert limits_on("small", 100) == {"small": 100}
    assert limits_on("large", 100) == {"small": 100, "large": None}
    assert limits_on("other", 70) == {"small": 100, "large": None, "other": 70}
    assert limits_on("small", 70) == {"small": None, "large": None, "other": 70}


def test_without_autoscaling_nothing_is_suggested(script: Script) -> None:
    machine = Machine(lambda atomic: 0.01)
    limit(32)
    noisy_gradients(machine.metrics)
    assert adapt(machine) == BatchSize(32, 0)
    assert machine.metrics.best_batch_size() is None
    assert machine.metrics.get_goodput_fn() is not None  # the size of the job can still be decided


def test_a_suggestion_for_another_batch_size_than_the_present_is_dropped(script: Script) -> None:
    machine = Machine(lambda atomic: 0.01)
    noisy(machine)
    machine.train(20, 32)
    machine.metrics.refresh()
    assert machine.metrics.suggestion() is not None
    use(machine.metrics, 48, 0)
    assert machine.metrics.suggestion() is None


def test_the_learnt_profile_survives_a_restart(script: Script) -> None:
    session = current_session()
    metrics = session.metrics
    machine = Machine.__new__(Machine)
    machine.now, machine.step_time, machine.load, machine.metrics = 0.0, lambda _: 0.01, 0.0, metrics
    metrics._clock, metrics._background = lambda: machine.now, False
    limits(machine)
    noisy_gradients(metrics)
    machine.train(20, 32)
    before = metrics.hints()
    script.resume()
    again = current_session().metrics
    limit(32, 4096, (8, 1024))
    assert again.hints().profile == before.profile
    assert again.hints().grad_params == (1.0, 1000.0)
    assert again.hints().grad_error is None, "errors are not kept"
    assert again.best_batch_size() is not None  # without one step in this generation


def test_a_newer_format_is_not_misread(script: Script) -> None:
    with pytest.raises(ValueError, match="format 99"):
        Metrics(background=False).restore({"v": 99})


def test_statistics_that_are_no_numbers_are_not_believed(script: Script) -> None:
    metrics = Metrics(background=False)
    metrics.update_grad_params("model", 1.0, 2.0)
    metrics.update_grad_params("model", math.nan, 2.0)
    metrics.update_grad_params("other", 1.0, -5.0)  # an unbiased estimate may be negative
    assert metrics.grad_params() == (2.0, 2.0)


def test_statistics_of_training_that_diverges_are_reported(script: Script) -> None:
    metrics = Metrics(background=False)
    metrics.update_grad_params("model", 1e34, 5e33)
    metrics.update_grad_params("other", 1e30, 0.0)
    hints = metrics.hints()  # raises where they are not in the schema
    assert hints.grad_params is not None
    metrics.update_grad_params("other", 0.0, 0.0)
    sqr, var = metrics.hints().grad_params or (0.0, 0.0)
    assert sqr / var == pytest.approx(2.0)


def test_an_end_that_is_never_reached_is_reported_as_none(script: Script) -> None:
    loader = adl.AdaptiveDataLoader(TensorDataset(torch.zeros(8)), batch_size=4)
    loader.autoscale_batch_size(8)
    # the epochs of a Trainer that counts steps
    for _ in adl.remaining_epochs_until(sys.maxsize):
        for _ in loader:
            pass
        break
    hints = current_session().metrics.hints()
    assert (hints.epochs, hints.remaining_samples, hints.samples_done) == (None, None, 0.0)


def test_the_report_and_the_event_say_all_that_is_documented(
    monkeypatch: pytest.MonkeyPatch, script: Script
) -> None:
    with reported() as messages:
        machine = Machine(lambda atomic: 0.01)
        noisy(machine)
        machine.metrics.update_gain("model", 1.5, 1.25)
        current_session().reported_position = ReportedPosition(20, 1, 4, 100, 400)
        machine.train(20, 64)
        machine.metrics.refresh()
        machine.metrics.refresh()
    events = [m for m in messages if isinstance(m, Event)]
    assert len(events) == 1  # once, however often it is looked at
    event = events[0].fields
    names = (
        "batch_size atomic_bsz accumulation_steps gain lr_factor predicted_goodput goodput throughput "
        "efficiency step epoch"
    )
    assert set(names.split()) <= set(event)
    assert (event["batch_size"], event["gain"], event["lr_factor"]) == (64, 1.5, 1.25)
    assert event["throughput"] == pytest.approx(6400)
    assert event["efficiency"] == pytest.approx(1001 / 1002)
    assert event["goodput"] == pytest.approx(event["throughput"] * event["efficiency"])
    assert event["predicted_goodput"] == pytest.approx(event["goodput"], rel=0.02)
    hints = [sched_hints.decode(json.dumps(m.hints)) for m in messages if isinstance(m, Hints)]
    assert len(hints) == 2
    assert hints[0].perf_params is not None
    assert (hints[0].progress, hints[0].samples_done, hints[0].remaining_samples) == (0.25, 100, 300)
    assert hints[0].profile[0].optim_count == 20 - WARMUP


def test_the_training_loop_never_waits_for_a_fit(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    fitting, go = threading.Event(), threading.Event()
    fit = reporter.fit_perf_params

    def endless(*args: Any) -> Any:
        fitting.set()
        assert go.wait(100)
        return fit(*args)

    monkeypatch.setattr(reporter, "fit_perf_params", endless)
    script.set(ADAPTDL_REPORT_INTERVAL="0.01")
    metrics = Metrics()
    limit(32, 1024)
    noisy_gradients(metrics)
    use(metrics, 32, 0)

    def step() -> None:
        metrics.profile_step_start(32)
        metrics.profile_step_commit()
        noisy_gradients(metrics)
        assert metrics.suggestion() is None
        metrics.hints()

    while not fitting.is_set():  # as soon as the mean of these steps is known well enough
        step()
    for _ in range(100):  # with the fit under way: it comes to an end only after this
        step()
    assert metrics.get_goodput_fn() is None
    go.set()
    metrics.close()


def test_an_error_in_the_background_is_logged_and_does_not_end_it(
    script: Script, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    twice, calls = threading.Event(), []

    def broken(self: Metrics) -> None:
        calls.append(1)
        if len(calls) > 1:
            twice.set()
        raise ZeroDivisionError("of the test")

    monkeypatch.setattr(Metrics, "refresh", broken)
    script.set(ADAPTDL_REPORT_INTERVAL="0.01")
    metrics = Metrics()
    metrics.profile_step_start(1)
    metrics.profile_step_commit()
    assert twice.wait(100)
    metrics.close()
    assert "of the test" in caplog.text


def test_every_replica_measures_and_only_rank_0_decides_and_reports(script: Script) -> None:
    script.restart(ADAPTDL_NUM_REPLICAS="2", ADAPTDL_REPLICA_RANK="1")
    machine = Machine(lambda atomic: 0.01)
    noisy(machine)
    machine.train(20, 32)
    machine.metrics.refresh()
    assert machine.metrics.suggestion() is None
    assert machine.metrics.get_goodput_fn() is None
    assert len(machine.metrics.entries()) == 1  # what it needs when rank 0 dies


def test_the_report_interval_is_checked(script: Script) -> None:
    script.set(ADAPTDL_REPORT_INTERVAL="never")
    with pytest.raises(ValueError, match="ADAPTDL_REPORT_INTERVAL=never"):
        Metrics()


def test_hints_of_ones_own(script: Script) -> None:
    limit(32)
    given = {
        "initBatchSize": np.int64(64),
        "maxBatchSize": None,
        "localBszBounds": [8, 64],
        "gradParams": {"norm": np.float32(1.0), "var": 2.0},
        "perfParams": dict.fromkeys(sched_hints.PERF_PARAMS, 1.0),
    }
    with reported() as messages:
        assert sched_hints.post_sched_hints(given, "namespace/job")
    (message,) = messages
    hints = sched_hints.decode(json.dumps(message.hints))
    assert (hints.init_batch_size, hints.local_bsz_bounds, hints.grad_params) == (64, (8, 64), (1.0, 2.0))
    with pytest.raises(ValueError, match="no such hint: 'batchSize'"):
        sched_hints.post_sched_hints({"batchSize": 1})
    with pytest.raises(ValueError, match="perfParams needs"):
        sched_hints.post_sched_hints({"perfParams": {"alpha": 1}})
    with pytest.raises(sched_hints.MalformedHintsError, match="init_batch_size"):
        sched_hints.post_sched_hints({"initBatchSize": "many"})


def test_a_newcomer_to_adamw_needs_three_times_the_bytes_of_the_gradients() -> None:
    module = torch.nn.Linear(30, 10, bias=False)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 30)).sum().backward()
    optimizer.step()
    gradients, state = exchanged_bytes([SimpleNamespace(module=module, optimizer=optimizer)])  # type: ignore[list-item]
    assert gradients == 4 * 300
    assert state == 3 * 4 * 300 + 4, "and the number of steps"
    assert exchanged_bytes([SimpleNamespace(module=module)]) == (None, None)  # type: ignore[list-item]


@pytest.mark.parametrize(("first", "others", "believed"), [(4.0, 4.0, [2, 1]), (4.0, 0.1, [1])])
def test_steps_on_more_replicas_that_refute_the_prediction_are_reported_in_the_second_of_them(
    script: Script, first: float, others: float, believed: list[int]
) -> None:
    machine = Machine(lambda _: 0.1)
    machine.train(20, 32)
    machine.metrics.refresh()
    session = current_session()
    session.identity = dataclasses.replace(session.identity, nodes=2, replicas=2)
    assert machine.metrics.throughput() is None  # not that of one replica
    machine.train(1, 32, sync=first)
    machine.metrics.profile_step_start(32)
    machine.now += min(others, 1.0)
    machine.metrics.refresh()
    assert sorted((entry.replicas for entry in machine.metrics.entries()), reverse=True) == believed


def test_times_of_nodes_are_forgotten_after_some_hours(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = Metrics(background=False)
    for now, node in ((1e6, "n0"), (1e6 + TIMES_KEPT, "n1"), (1e6 + TIMES_KEPT + 1.0, "n2")):
        monkeypatch.setattr(reporter.time, "time", lambda now=now: now)
        metrics.set_node_times(32, {node: 0.1})
    assert set(metrics.dump()["node_times"]) == {"n1", "n2"}
