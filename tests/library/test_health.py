"""Training that learns nothing says so: on stderr, in the event log, and in `adaptdl status`."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import generations
import pytest
from elastic_run import ElasticRun

from adaptdl_elastic.torch._gradient.gradient_health import LEAST_STEPS, GradientHealth
from adaptdl_elastic.torch._tuning.training_warnings import data_problem

SCRIPT = Path(__file__).parents[1] / "support" / "unsound_script.py"


def bad(health: GradientHealth, *steps: int) -> str | None:
    for step in steps:
        health.measured(step, finite=False)
    return health.problem


def test_gradients_that_are_finite_now_and_then_are_no_problem() -> None:
    health = GradientHealth()
    for step in range(300):
        health.measured(step, finite=step % LEAST_STEPS == 0)
        assert health.problem is None


def test_gradients_that_are_never_finite_are_a_problem_until_one_is() -> None:
    health = GradientHealth()
    assert bad(health, *range(7, 7 + LEAST_STEPS - 1)) is None
    assert "since step 7" in str(bad(health, 7 + LEAST_STEPS - 1))
    health.measured(40, finite=True)
    assert health.problem is None
    assert bad(health, 41) is None


def test_two_measurements_far_apart_do_not_stand_for_the_steps_between_them() -> None:
    health = GradientHealth()
    assert bad(health, 2000, 2040) is None
    assert "since step 2000" in str(bad(health, 2080))


def test_steps_that_a_grad_scaler_leaves_out_in_its_search_are_no_problem() -> None:
    health = GradientHealth()
    for exponent in range(39, 0, -1):
        health.skipped(0, partial(pow, 2.0, exponent))
        assert health.problem is None
    health.skipped(0, lambda: 1.0)
    assert "GradScaler" in str(health.problem)
    health.stepped()
    assert health.problem is None


def test_a_grad_scaler_asks_for_the_scale_only_after_many_steps() -> None:
    def asked() -> float:
        raise AssertionError("waited for the GPU")

    health = GradientHealth()
    for _ in range(10):
        for _ in range(LEAST_STEPS - 1):
            health.skipped(0, asked)
        health.stepped()


@pytest.mark.parametrize(
    ("samples", "batch", "initial", "parts", "message"),
    [
        (0, 64, 64, 1, None),  # a stream
        (64, 64, 64, 1, None),
        (63, 64, 64, 1, "batch_size=64 is more than the 63 samples"),
        (10, 12, 10, 3, None),  # rounded up to equal parts
        (300, 302, 64, 2, "max_batch_size of 300 at most"),
        (300, 301, 64, 2, None),
    ],
)
def test_a_batch_beyond_the_data_set(
    samples: int, batch: int, initial: int, parts: int, message: str | None
) -> None:
    problem = data_problem(samples, batch, initial, parts)
    assert problem is None if message is None else message in str(problem)


def run(kind: str, folder: Path) -> tuple[list[dict[str, Any]], str]:
    """The events about warnings, and what it printed, of one replica without an agent."""
    log = folder / "events"
    done = generations.run_alone(SCRIPT, folder, kind, "2", ADAPTDL_EVENT_LOG=str(log))
    assert done.code == 0, done.output
    events = [json.loads(line) for line in log.read_text().splitlines()]
    return [event for event in events if event["event"].startswith("warning")], done.output


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("nan", "inf or nan in every step since step 0"),
        ("scaled", "GradScaler has left out 20 steps and come down to a scale of 0.125"),
        ("small", "batch_size=32 is more than the 24 samples of the data set: every step takes all of them"),
        ("dropped", "drop_last leaves all of them out"),
    ],
)
def test_training_that_learns_nothing_is_said_once(kind: str, message: str, tmp_path: Path) -> None:
    events, said = run(kind, tmp_path)
    assert [event["event"] for event in events] == ["warning"]
    assert message in events[0]["message"]
    assert said.count(events[0]["message"]) == 1


@pytest.mark.exhaustive
@pytest.mark.processes
def test_a_problem_that_is_over_is_said_to_be(tmp_path: Path) -> None:
    events, _ = run("recovers", tmp_path)
    assert [event["event"] for event in events] == ["warning", "warning_over"]
    # step 16 is the first one that is measured, and then every seventh
    assert "since step 16" in events[0]["message"]
    assert 5 + LEAST_STEPS <= events[0]["step"] < 45 <= events[1]["step"] < 45 + 7


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["sound", "scaled search"])
def test_sound_training_is_silent(kind: str, tmp_path: Path) -> None:
    events, said = run(kind, tmp_path)
    assert events == []
    assert "inf or nan" not in said


@pytest.mark.etcd
@pytest.mark.timeout(300)
def test_status_says_it_with_the_remedy(tmp_path: Path) -> None:
    arguments = ["--standalone", "--nproc-per-node=1", "--rdzv-id=unsound", str(SCRIPT), "nan", "1000000"]
    with ElasticRun(arguments, tmp_path) as job:
        job.wait_for_event("warning")
        for _ in range(200):
            answer = job.adaptdl("status", "unsound")
            lines = [line for line in answer.stdout.splitlines() if line.startswith("warning")]
            if lines:
                break
        assert len(lines) == 1
        assert "inf or nan" in lines[0]
        (tmp_path / "end").touch()
        assert job.wait() == 0
