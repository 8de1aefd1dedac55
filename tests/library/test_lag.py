"""A replica that the others wait for is named, with the part of a step that it is slow in."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from elastic_run import ElasticRun

from adaptdl_elastic.torch._runtime import step_clock
from adaptdl_elastic.torch._runtime.step_clock import Stage, StepClock, StepParts
from adaptdl_elastic.torch._tuning.lag import AGREEING, BEGINS, LagJudge, NetworkJudge, Report
from adaptdl_elastic.torch._tuning.replica_speed import EVERY, KIND, STEADY, WINDOW, ReplicaSpeed

SCRIPT = str(Path(__file__).parents[1] / "support" / "lag_script.py")


def reports(*own: float, part: str = "compute") -> dict[int, Report]:
    """Reports of replicas that are busy for so long in one part, and wait for the slowest one."""
    found = {}
    for rank, seconds in enumerate(own):
        parts = StepParts(0.001, 0.002, 0.0, max(own) - seconds)
        found[rank] = Report(f"host{rank}", parts._replace(**{part: seconds}))
    return found


@pytest.mark.parametrize("part", ["data", "compute", "communication"])
@pytest.mark.parametrize("replicas", [2, 3, 8])
def test_three_times_slower_is_named_with_host_and_part(part: str, replicas: int) -> None:
    judge = LagJudge()
    times = [0.1] * replicas
    times[1] = 0.3
    for _ in range(AGREEING):
        assert judge.lags == {}
        judge.judge(reports(*times, part=part))
    (lag,) = judge.lags.values()
    assert (lag.rank, lag.host, lag.part) == (1, "host1", part)
    assert lag.ratio == pytest.approx(3, rel=0.05)


def test_a_lag_ends_only_when_it_is_clearly_less() -> None:
    judge = LagJudge()
    for own in (0.3, 0.3, 0.19, 0.19, 0.16, 0.12, 0.16, 0.12):
        judge.judge(reports(0.1, own, 0.1))
    assert set(judge.lags) == {1}  # reports below the lower limit did not follow one another
    judge.judge(reports(0.1, 0.12, 0.1))
    assert judge.lags == {}


def test_two_of_five_that_lag_are_both_named() -> None:
    judge = LagJudge()
    for _ in range(AGREEING):
        judge.judge(reports(0.1, 0.5, 0.1, 0.4, 0.1))
    assert set(judge.lags) == {1, 3}


@pytest.mark.parametrize(
    ("own", "waiting"), [((0.001, 0.004), 0.003), ((0.02, 0.06), 1.0)], ids=["in short steps", "in long ones"]
)
def test_a_small_loss_is_no_lag(own: tuple[float, float], waiting: float) -> None:
    judge = LagJudge()
    for _ in range(5):
        found = reports(*own)
        judge.judge({r: one._replace(parts=one.parts._replace(waiting=waiting)) for r, one in found.items()})
    assert judge.lags == {}


def test_replicas_that_share_all_cores_of_a_host_are_not_said_to_compute_slowly() -> None:
    judge = LagJudge()
    for host, expected in (("host1", set()), ("host0", {1})):  # replica 0's host
        for _ in range(AGREEING):
            found = {r: one._replace(crowded=True) for r, one in reports(0.1, 0.3).items()}
            judge.judge({0: found[0]._replace(host=host), 1: found[1]})
        assert set(judge.lags) == expected


@pytest.mark.parametrize(
    ("own", "waiting", "changed"),
    [(0.2, 0.8, True), (0.1, 0.8, True), (0.4, 0.8, False), (0.05, 0.1, False), (0.2, 0.15, False)],
    ids=["the network", "a network that leaves cores free", "both", "the machine", "a little"],
)
@pytest.mark.parametrize("ends", [False, True], ids=["begins", "ends"])
def test_a_network_has_changed_if_steps_change_by_waiting(
    own: float, waiting: float, changed: bool, ends: bool
) -> None:
    judge, found = NetworkJudge(), list[float | None]()
    usual = (0.2, 0.1)
    first, then = ((own, waiting), usual) if ends else (usual, (own, waiting))
    for now in range(30):
        busy, waits = then if now >= 10 else first
        parts = StepParts(0.0, busy, 0.0, waits)
        others = Report("b", parts._replace(waiting=10.0))  # it waits for the first one, too
        found.append(judge.judge([Report("a", parts), others], float(now)))
    times = [since for since in found if since is not None]
    assert times == ([pytest.approx(10 - 3 * sum(then))] if changed else [])


def test_a_busy_machine_is_no_lag() -> None:
    """Steps that are now and then, on any replica, many times longer: no verdict in 500 reports."""
    random = np.random.default_rng(0)
    judge = LagJudge()
    for _ in range(500):
        steps = (
            0.05 * random.lognormal(0, 0.2, (WINDOW, 4)) * np.where(random.random((WINDOW, 4)) < 0.15, 8, 1)
        )
        judge.judge(reports(*np.median(steps, axis=0)))
        assert judge.lags == {}


def test_a_lag_is_named_within_20_steps() -> None:
    """At the latest the lag begins one step after a report; more than half of the window must have it."""
    slow = WINDOW // 2 + 1
    first = -(-slow // EVERY) * EVERY
    assert first + (AGREEING - 1) * EVERY + EVERY - 1 <= 20
    assert BEGINS < 3


class Clock:
    """A clock that moves by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(step_clock.time, "monotonic", lambda: self.now)

    def __call__(self, seconds: float) -> None:
        self.now += seconds


def test_the_parts_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = Clock(monkeypatch)
    clock = StepClock()
    clock.restart()
    clock.enter(Stage.DATA)
    wait(1)
    clock.enter(Stage.BODY)
    wait(2)
    clock.sent(0.5)  # a first bucket, during these two seconds
    clock.computed(on_gpu=False)
    wait(4)
    clock.sent(0.25)  # the last bucket
    clock.arrived()
    wait(8)
    clock.stepping()
    wait(16)
    clock.enter(Stage.BOUNDARY)
    wait(32)
    (parts,) = clock.finish()
    assert parts == StepParts(1, 1.5 + 24, 0.75, 3.75 + 32)
    assert parts.own == 1 + 25.5 + 0.75
    wait(1)
    (parts,) = clock.finish()
    assert parts == StepParts(0, 0, 0, 1)


def run(directory: Path, part: str) -> tuple[list[dict[str, Any]], str]:
    """The events of a job whose replica 1 is slow in that part of steps 8 to 24, and what was printed.

    Of the other replicas a busy machine may slow one down, too.
    """
    settings = {"slow": {part: 0.3}, "from": 8, "until": 25, "samples": 24 * 200}
    arguments = ["--standalone", "--nproc-per-node=3", "--no-autoscale", SCRIPT]
    with ElasticRun(arguments, directory, {"LAG": json.dumps(settings)}) as job:
        assert job.wait() == 0, job.text()
        warnings = [e for e in job.events if e["event"].startswith("warning")]
        return [e for e in warnings if e["about"] == "the speed of replica 1"], job.text()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_slow_replica_of_a_job_is_named_once_and_it_is_said_when_that_is_over(tmp_path: Path) -> None:
    (begun, over), text = run(tmp_path, "communication")
    assert (begun["event"], over["event"]) == ("warning", "warning_over")
    assert "slow in sending gradients" in begun["message"]
    assert 8 < begun["step"] <= 28
    assert begun["step"] < over["step"]
    assert text.count("replica 1 on") == text.count("the speed of replica 1: the problem is over") == 1


def test_the_time_of_a_node_is_the_shortest_of_its_last_reports_about_one_batch_size() -> None:
    found: list[tuple[int, dict[str, float]]] = []
    take: dict[str, Any] = {}
    metrics = SimpleNamespace(set_node_times=lambda *told: found.append(told), set_stragglers=lambda _: None)
    consensus = SimpleNamespace(listen=take.__setitem__)
    session: Any = SimpleNamespace(generation=1, replicas=2, rank=0, metrics=metrics, consensus=consensus)
    ReplicaSpeed(session)

    def report(number: int, accumulation: int, *seconds: float) -> None:
        for rank, one in enumerate(seconds):
            body = [[1, 32, accumulation], "host", [0.0, one, 0.0, 0.0], False, f"n{rank}"]
            take[KIND](rank, number, body)

    for number, seconds in enumerate((0.03, 0.04, 0.02)):
        assert found == []
        report(number, 0, 0.01, seconds)
    assert found.pop() == (32, {"n0": 0.01, "n1": 0.02})
    for number in range(3, 3 + STEADY):
        assert found == []
        report(number, 1, 0.01, 0.03)  # two passes
    assert found.pop() == (32, {"n0": 0.005, "n1": 0.015})
