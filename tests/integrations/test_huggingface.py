"""The Trainer of Hugging Face: resized in place, a replica killed, each sample used once."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import framework_runs
import generations
import pytest
import torch

SCRIPT = Path(__file__).parent / "scripts" / "hf_trainer.py"
SIZE = 480
SETTINGS = {
    "per_device_train_batch_size": 4, "num_train_epochs": 2, "learning_rate": 1e-3, "logging_steps": 10,
    "eval_strategy": "steps", "eval_steps": 40, "save_steps": 40, "disable_tqdm": True,
}  # fmt: skip

pytestmark = [
    pytest.mark.needs("transformers", "accelerate"),
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.timeout(900),
]


def settings(**changes: object) -> str:
    return json.dumps({**SETTINGS, **changes})


@pytest.mark.parametrize(
    ("killed", "changes"),
    [
        (1, {}),
        (
            0,
            {
                "per_device_train_batch_size": 2,
                "gradient_accumulation_steps": 2,
                "disable_tqdm": False,
                "LANGUAGE": "1",
            },
        ),
    ],
    ids=["the last is killed", "accumulation, a language model, rank 0 is killed"],
)
def test_resized_and_killed_trainer_ends_as_an_undisturbed_one(
    tmp_path: Path, killed: int, changes: dict[str, Any]
) -> None:
    language = {name: changes.pop(name) for name in ["LANGUAGE"] if name in changes}
    given = {"SIZE": str(SIZE), "SETTINGS": settings(**changes), **language}
    plain = framework_runs.undisturbed(SCRIPT, tmp_path / "plain", **given)
    said = framework_runs.resized_and_killed(SCRIPT, tmp_path / "run", killed=killed, **given)
    assert framework_runs.used(tmp_path / "run") == {epoch: Counter(range(SIZE)) for epoch in range(2)}
    summary = framework_runs.summary(tmp_path / "run")
    assert summary["global_step"] == plain["global_step"] == 240
    for name in ("step", "epoch", "learning_rate"):
        assert [line[name] for line in summary["log"]] == [line[name] for line in plain["log"]]
    assert summary["eval"] == pytest.approx(plain["eval"], abs=1e-4)
    assert (summary["updates"], summary["counted"]) == (240, 20)
    assert summary["averages"] == pytest.approx(plain["averages"], abs=1e-3)
    assert said.count("Average.last (deque)") == 1
    framework_runs.assert_same_weights(tmp_path / "run", tmp_path / "plain")


@pytest.mark.parametrize("disturbed", [False, True], ids=["one process", "resized and killed"])
def test_steps_schedule_and_intervals_follow_progress_while_the_batch_changes(
    tmp_path: Path, disturbed: bool
) -> None:
    changed = settings(
        max_batch_size=32, local_bsz_bounds=(2, 16), gradient_accumulation_steps=2, num_train_epochs=8
    )
    given = {"SIZE": str(SIZE), "SETTINGS": changed, "GROW": "1"}
    run = framework_runs.resized_and_killed if disturbed else framework_runs.undisturbed
    run(SCRIPT, tmp_path / "run", **given)
    summary = framework_runs.summary(tmp_path / "run")
    assert summary["global_step"] == 480
    assert 40 < summary["updates"] < 400
    lines = [line for line in generations.records(tmp_path / "run") if line["local"]]
    for line in lines:
        assert line["rate"] == pytest.approx(1e-3 * (1 - line["step"] / 480))
    assert {later - step for step, later in pairwise(sorted({line["step"] for line in lines}))} > {1, 2}
    logged = [line["step"] for line in summary["log"] if line["loss"] is not None]
    evaluated = [line["step"] for line in summary["log"] if line["eval_loss"] is not None]
    assert [step // 40 for step in evaluated[:-1]] == list(range(1, 13))
    assert [step // 10 for step in logged] == sorted({step // 10 for step in logged})
    assert len(logged) > 24
    assert summary["log"][-1]["epoch"] == 8
    used = framework_runs.used(tmp_path / "run")
    assert [set(used[epoch]) for epoch in range(8)] == [set(range(SIZE))] * 8


@pytest.mark.parametrize("most", [None, 32])
@pytest.mark.parametrize(("strategy", "steps"), [("epoch", (20, 20)), ("steps", (12, 15))])
def test_early_stopping_ends_the_training_in_good_order(
    tmp_path: Path, strategy: str, steps: tuple[int, int], most: int | None
) -> None:
    changed = settings(
        num_train_epochs=5, learning_rate=0.0, eval_strategy=strategy, save_strategy=strategy, eval_steps=6,
        save_steps=6, load_best_model_at_end=True, metric_for_best_model="eval_loss", max_batch_size=most,
    )  # fmt: skip
    given = {"SIZE": "40", "SETTINGS": changed, "EARLY": "1", **({"GROW": "1"} if most else {})}
    summary = framework_runs.undisturbed(SCRIPT, tmp_path / "run", **given)
    first, last = steps
    assert first <= summary["global_step"] <= last
    assert sum(line["eval_loss"] is not None for line in summary["log"]) == 3  # one after the training


def test_restarted_trainer_continues_from_the_checkpoint_of_the_job(tmp_path: Path) -> None:
    given = {"SIZE": str(SIZE), "SETTINGS": settings()}
    plain = framework_runs.undisturbed(SCRIPT, tmp_path / "plain", **given)
    framework_runs.grown(SCRIPT, tmp_path / "run", "restart", **given)
    assert framework_runs.used(tmp_path / "run") == {epoch: Counter(range(SIZE)) for epoch in range(2)}
    summary = framework_runs.summary(tmp_path / "run")
    for name in ("step", "epoch", "learning_rate"):
        assert [line[name] for line in summary["log"]] == [line[name] for line in plain["log"]]
    assert summary["updates"] == 240
    assert summary["averages"] == pytest.approx(plain["averages"], abs=1e-3)
    framework_runs.assert_same_weights(tmp_path / "run", tmp_path / "plain")


def test_plain_trainer_is_restarted_from_its_own_checkpoints(tmp_path: Path) -> None:
    changed = settings(max_steps=60, save_steps=1, eval_strategy="no")
    framework_runs.grown(SCRIPT, tmp_path / "run", "restart", PLAIN="1", SIZE=str(SIZE), SETTINGS=changed)
    steps = framework_runs.steps_by_replicas(tmp_path / "run")
    assert steps[1] | steps[2] == set(range(60))
    assert len(steps[1] & steps[2]) <= 2  # at most the step that was under way, and the one being saved
    assert framework_runs.summary(tmp_path / "run")["global_step"] == 60


def test_trainer_resumes_from_its_own_checkpoint_in_mid_epoch(tmp_path: Path) -> None:
    given = {"SIZE": str(SIZE), "SETTINGS": settings()}
    framework_runs.undisturbed(SCRIPT, tmp_path / "first", **given)
    resume = str(tmp_path / "first" / "trainer" / "checkpoint-80")
    summary = framework_runs.undisturbed(SCRIPT, tmp_path / "second", RESUME=resume, **given)
    assert summary["global_step"] == 240
    used = framework_runs.used(tmp_path / "second")
    assert (used[0].total(), max(used[0].values())) == (SIZE - 320, 1)
    assert used[1] == Counter(range(SIZE))
    framework_runs.assert_same_weights(tmp_path / "second", tmp_path / "first")


def test_max_steps_ends_two_replicas_in_mid_epoch(tmp_path: Path) -> None:
    given = {"SIZE": str(SIZE), "SETTINGS": settings(max_steps=50)}
    framework_runs.replicas(SCRIPT, tmp_path / "run", 2, **given)
    assert framework_runs.summary(tmp_path / "run")["global_step"] == 50
    used = framework_runs.used(tmp_path / "run")
    assert (used.keys(), used[0].total(), max(used[0].values())) == ({0}, 200, 1)


def test_samples_that_are_read_ahead_or_again_are_trained_once(tmp_path: Path) -> None:
    changed = settings(
        optim="sgd", learning_rate=4, lr_scheduler_type="constant", max_grad_norm=0, dataloader_num_workers=1
    )
    framework_runs.resized_and_killed(SCRIPT, tmp_path / "run", COUNT="1", SIZE="240", SETTINGS=changed)
    trained = framework_runs.weights(tmp_path / "run")["trained"][:240]
    torch.testing.assert_close(trained, torch.full((240,), -2.0))
    read = Counter(
        int(line) for path in (tmp_path / "run").glob("read-*") for line in path.read_text().split()
    )
    assert max(read[number] for number in range(240)) > 2


def test_loss_per_token_has_the_gradients_of_transformers_own_trainer(tmp_path: Path) -> None:
    changed = settings(
        per_device_train_batch_size=2, gradient_accumulation_steps=4, optim="sgd", learning_rate=0.5,
        num_train_epochs=1, save_strategy="no",
    )  # fmt: skip
    given = {"LANGUAGE": "1", "SIZE": "96", "SETTINGS": changed}
    framework_runs.undisturbed(SCRIPT, tmp_path / "plain", PLAIN="1", **given)
    framework_runs.replicas(SCRIPT, tmp_path / "two", 2, **given)
    framework_runs.assert_same_weights(tmp_path / "two", tmp_path / "plain")


def test_the_example_runs(tmp_path: Path) -> None:
    said = framework_runs.example(
        "huggingface_trainer.py", tmp_path, "--epochs=1", "--samples=64", f"--output={tmp_path}"
    )
    assert "loss on the evaluation set: " in said
