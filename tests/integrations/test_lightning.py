"""Lightning's Trainer: resized in place, a replica killed, each sample used once."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import framework_runs
import generations
import pytest

SCRIPT = Path(__file__).parent / "scripts" / "lightning_fit.py"
SIZE = 480
SETTINGS = {"batch": 4, "max_epochs": 2, "val_check_interval": 0.5, "log_every_n_steps": 10}

pytestmark = [
    pytest.mark.needs("lightning"),
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.timeout(900),
]


def given(**changes: object) -> dict[str, str]:
    return {"SIZE": str(SIZE), "SETTINGS": json.dumps({**SETTINGS, **changes})}


@pytest.mark.parametrize(
    ("killed", "changes"),
    [(1, {}), (0, {"batch": 2, "accumulate_grad_batches": 2})],
    ids=["the last is killed", "accumulation, rank 0 is killed"],
)
def test_resized_and_killed_run_ends_as_an_undisturbed_one(
    tmp_path: Path, killed: int, changes: dict[str, int]
) -> None:
    plain = framework_runs.undisturbed(SCRIPT, tmp_path / "plain", **given(**changes))
    framework_runs.resized_and_killed(SCRIPT, tmp_path / "run", killed=killed, **given(**changes))
    assert framework_runs.used(tmp_path / "run") == {epoch: Counter(range(SIZE)) for epoch in range(2)}
    summary = framework_runs.summary(tmp_path / "run")
    assert (summary["global_step"], summary["epoch"]) == (240, 2)
    assert summary["seen"] == plain["seen"] == [[0, 60], [0, 120], [1, 180], [1, 240]]
    assert summary["rate"] == plain["rate"]
    assert summary["best"] == pytest.approx(plain["best"], abs=1e-4)
    framework_runs.assert_same_weights(tmp_path / "run", tmp_path / "plain")


@pytest.mark.parametrize("disturbed", [False, True], ids=["one process", "resized and killed"])
def test_with_a_batch_size_that_changes_a_step_is_one_at_the_initial_size(
    tmp_path: Path, disturbed: bool
) -> None:
    saves = {"every_n_train_steps": 50, "save_top_k": -1}
    settings = given(most=32, batch=2, accumulate_grad_batches=2, max_epochs=4, saves=saves)
    run = framework_runs.resized_and_killed if disturbed else framework_runs.undisturbed
    run(SCRIPT, tmp_path / "run", **settings)
    summary = framework_runs.summary(tmp_path / "run")
    assert (summary["global_step"], summary["epoch"]) == (480, 4)
    assert summary["rate"] == pytest.approx(1e-2 * 0.99**480)
    assert 40 < summary["updates"] < 400
    lines = [line for line in generations.records(tmp_path / "run") if line["local"]]
    for line in lines:
        assert line["rate"] == pytest.approx(1e-2 * 0.99 ** line["step"])
    assert {later - step for step, later in pairwise(sorted({line["step"] for line in lines}))} > {1, 2}
    assert [(epoch, step // 60) for epoch, step in summary["seen"]] == [
        (half // 2, half + 1) for half in range(8)
    ]
    assert [step // 10 for step in summary["logged"]] == sorted({step // 10 for step in summary["logged"]})
    assert len(summary["logged"]) > 24
    saved = sorted(int(name.partition("step=")[2].partition(".")[0]) for name in summary["saved"])
    assert [step // 50 for step in saved] == list(range(1, 10))
    used = framework_runs.used(tmp_path / "run")
    assert [set(used[epoch]) for epoch in range(4)] == [set(range(SIZE))] * 4


@pytest.mark.needs("jsonargparse")
def test_a_resized_and_killed_run_of_the_command_line_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    plain = framework_runs.undisturbed(SCRIPT, tmp_path / "plain", CLI="1", **given())
    framework_runs.resized_and_killed(SCRIPT, tmp_path / "run", CLI="1", **given())
    assert framework_runs.used(tmp_path / "run") == {epoch: Counter(range(SIZE)) for epoch in range(2)}
    assert framework_runs.summary(tmp_path / "run")["seen"] == plain["seen"]
    framework_runs.assert_same_weights(tmp_path / "run", tmp_path / "plain")
    framework_runs.stopped_and_resumed(SCRIPT, tmp_path / "resumed", CLI="1", **given())
    framework_runs.assert_same_weights(tmp_path / "resumed", tmp_path / "plain")


def test_restarted_run_continues_from_the_checkpoint_of_the_job(tmp_path: Path) -> None:
    plain = framework_runs.undisturbed(SCRIPT, tmp_path / "plain", **given())
    framework_runs.grown(SCRIPT, tmp_path / "run", "restart", **given())
    assert framework_runs.used(tmp_path / "run") == {epoch: Counter(range(SIZE)) for epoch in range(2)}
    summary = framework_runs.summary(tmp_path / "run")
    assert summary == {**plain, "best": pytest.approx(plain["best"], abs=1e-4)}
    framework_runs.assert_same_weights(tmp_path / "run", tmp_path / "plain")


def test_plain_run_is_restarted_from_its_own_checkpoints(tmp_path: Path) -> None:
    changed = given(max_steps=60, max_epochs=-1, saves={"every_n_train_steps": 1}, limit_val_batches=0)
    framework_runs.grown(SCRIPT, tmp_path / "run", "restart", PLAIN="1", **changed)
    steps = framework_runs.steps_by_replicas(tmp_path / "run")
    assert steps[1] | steps[2] == set(range(60))
    assert len(steps[1] & steps[2]) <= 2  # at most the step that was under way, and the one being saved
    assert framework_runs.summary(tmp_path / "run")["global_step"] == 60


def test_newcomer_in_the_last_epoch_gets_averages_metrics_and_folders(tmp_path: Path) -> None:
    changed = given(average=True, saves={"monitor": "age", "mode": "min"})
    framework_runs.undisturbed(SCRIPT, tmp_path / "plain", **changed)
    said = framework_runs.grown(SCRIPT, tmp_path / "run", HOLD="1", **changed)
    assert framework_runs.used(tmp_path / "run") == {epoch: Counter(range(SIZE)) for epoch in range(2)}
    framework_runs.assert_same_weights(tmp_path / "run", tmp_path / "plain")
    one, other = framework_runs.ends(tmp_path / "run")
    assert one["weights"] == other["weights"]
    assert {*one["counts"], *other["counts"]} == {20}
    for name in ("best", "folder", "epoch"):
        assert one[name] == other[name]
    assert one["best"].endswith("version_0/checkpoints/epoch=0-step=60.ckpt")
    assert said.count("that training_step updates see only rank 0's share") == 1


def test_stopped_run_keeps_its_averages_and_its_best_checkpoint(tmp_path: Path) -> None:
    changed = given(average=True, saves={"monitor": "age", "mode": "min"}, val_check_interval=2)
    framework_runs.undisturbed(SCRIPT, tmp_path / "plain", **changed)
    framework_runs.stopped_and_resumed(SCRIPT, tmp_path / "run", **changed)
    framework_runs.assert_same_weights(tmp_path / "run", tmp_path / "plain")
    one, other = framework_runs.ends(tmp_path / "run")
    assert one["weights"] == other["weights"]
    assert one["best"] == other["best"]
    assert one["best"].endswith("version_0/checkpoints/epoch=0-step=2.ckpt")


def test_run_resumes_from_its_own_checkpoint(tmp_path: Path) -> None:
    framework_runs.undisturbed(SCRIPT, tmp_path / "first", **given(max_epochs=1))
    whole = framework_runs.undisturbed(SCRIPT, tmp_path / "whole", **given())
    last = str(tmp_path / "first" / "kept" / "last.ckpt")
    summary = framework_runs.undisturbed(SCRIPT, tmp_path / "second", RESUME=last, **given())
    assert summary["global_step"] == whole["global_step"]
    assert framework_runs.used(tmp_path / "second") == {1: Counter(range(SIZE))}
    framework_runs.assert_same_weights(tmp_path / "second", tmp_path / "whole")


def test_max_steps_ends_two_replicas_in_mid_epoch(tmp_path: Path) -> None:
    framework_runs.replicas(SCRIPT, tmp_path / "run", 2, **given(max_steps=50))
    assert framework_runs.summary(tmp_path / "run")["global_step"] == 50
    used = framework_runs.used(tmp_path / "run")
    assert (used.keys(), used[0].total(), max(used[0].values())) == ({0}, 200, 1)


def test_the_example_runs(tmp_path: Path) -> None:
    said = framework_runs.example(
        "lightning_fit.py", tmp_path, "--epochs=1", "--samples=64", f"--output={tmp_path}"
    )
    assert "loss on the evaluation set: " in said
