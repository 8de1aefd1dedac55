"""A loop of Accelerate: resized in place, a replica killed, each sample used once."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path

import framework_runs
import pytest
from commands import ended

SCRIPT = Path(__file__).parent / "scripts" / "accelerate_loop.py"
SIZE = 480

pytestmark = [
    pytest.mark.needs("accelerate", "tensorboard"),
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.timeout(900),
]


@pytest.mark.parametrize(
    ("killed", "batch", "accumulation"),
    [(1, 4, 1), (0, 2, 2)],
    ids=["the last is killed", "accumulation, a loss per item, rank 0 is killed"],
)
def test_resized_and_killed_loop_ends_as_an_undisturbed_one(
    tmp_path: Path, killed: int, batch: int, accumulation: int
) -> None:
    items = accumulation > 1
    settings = json.dumps({"batch": batch, "epochs": 2, "accumulation": accumulation, "items": items})
    given = {"SIZE": str(SIZE), "SETTINGS": settings}
    plain = framework_runs.undisturbed(SCRIPT, tmp_path / "plain", **given)
    framework_runs.resized_and_killed(SCRIPT, tmp_path / "run", killed=killed, **given)
    assert framework_runs.used(tmp_path / "run") == {epoch: Counter(range(SIZE)) for epoch in range(2)}
    summary = framework_runs.summary(tmp_path / "run")
    assert summary["steps"] == plain["steps"] == 240
    assert summary["rate"] == pytest.approx(plain["rate"])
    assert summary["counted"] == 20
    assert summary["validation"] == pytest.approx(plain["validation"], abs=1e-4)
    framework_runs.assert_same_weights(tmp_path / "run", tmp_path / "plain")


def test_schedule_follows_progress_while_the_batch_changes(tmp_path: Path) -> None:
    settings = {"batch": 2, "epochs": 4, "accumulation": 2, "grow": True}
    given = {"SIZE": str(SIZE), "SETTINGS": json.dumps(settings)}
    framework_runs.resized_and_killed(SCRIPT, tmp_path / "run", **given)
    summary = framework_runs.summary(tmp_path / "run")
    assert summary["rate"] == pytest.approx(1e-2 * 0.99**480)
    assert 40 < summary["steps"] < 400
    used = framework_runs.used(tmp_path / "run")
    assert [set(used[epoch]) for epoch in range(4)] == [set(range(SIZE))] * 4


def test_trigger_that_one_replica_sets_ends_the_loop_on_all(tmp_path: Path) -> None:
    settings = json.dumps({"batch": 4, "epochs": 2, "accumulation": 1, "stop": 40})
    given = {"SIZE": str(SIZE), "SETTINGS": settings}
    plain = framework_runs.undisturbed(SCRIPT, tmp_path / "plain", **given)
    framework_runs.replicas(SCRIPT, tmp_path / "run", 2, **given)
    used = framework_runs.used(tmp_path / "run")
    assert {epoch: samples.total() for epoch, samples in used.items()} == {0: 44, 1: 44}
    assert framework_runs.summary(tmp_path / "run") == pytest.approx(plain, rel=1e-4)


def test_the_example_runs(tmp_path: Path) -> None:
    assert "epoch 0: loss " in framework_runs.example(
        "accelerate_loop.py", tmp_path, "--epochs=1", "--samples=64"
    )


@pytest.mark.parametrize("stop", [2, 11, 19])
def test_folds_after_a_resume_are_those_of_an_undisturbed_run(tmp_path: Path, stop: int) -> None:
    def printed(folder: str, stop: int) -> list[str]:
        variables = {"STOP": str(stop), "ADAPTDL_CHECKPOINT_PATH": str(tmp_path / folder)}
        command = [sys.executable, str(SCRIPT.with_name("accelerate_folds.py"))]
        done = ended(command, env=os.environ | variables, timeout=200)
        assert done.returncode == 0, done.stderr
        return [line for line in done.stdout.splitlines() if line[:2] in ("0 ", "1 ", "2 ")]

    undisturbed = printed("calm", -1)
    assert len({line[2:] for line in undisturbed}) == 3
    assert printed("stopped", stop) == undisturbed[: stop // 8]
    assert printed("stopped", -1) == undisturbed
