"""A script in the shape of torchvision's classification reference ends as if nothing had happened to it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import framework_runs
import generations
import loop_script_path
import pytest
import torch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.exhaustive,
    pytest.mark.timeout(580),
]

SCRIPT = loop_script_path.CLASSIFICATION
SIZE, EPOCHS, PACE = 96, 30, "0.3"


@pytest.mark.parametrize("killed", [1, 0])
def test_resized_and_killed_in_place_it_ends_as_an_undisturbed_run(tmp_path: Path, killed: int) -> None:
    plain = framework_runs.undisturbed(SCRIPT, tmp_path / "plain")
    framework_runs.resized_and_killed(SCRIPT, tmp_path / "run", killed=killed, PACE=PACE)
    as_undisturbed(tmp_path / "run", plain, died=1)


def test_stopped_and_resumed_on_two_replicas_it_ends_as_an_undisturbed_run(tmp_path: Path) -> None:
    plain = framework_runs.undisturbed(SCRIPT, tmp_path / "plain")
    framework_runs.stopped_and_resumed(SCRIPT, tmp_path / "run", PACE=PACE)
    as_undisturbed(tmp_path / "run", plain, died=0)


def as_undisturbed(folder: Path, plain: dict[str, Any], died: int) -> None:
    """Check counters, samples, weights of all replicas after every step, and the best checkpoint."""
    summary = framework_runs.summary(folder)
    # 28 epochs behind the warm-up, 8 steps each, every fourth is averaged
    assert (plain["n_averaged"], plain["last_epoch"], plain["samples"]) == (56, [30, 1, 28], [SIZE] * EPOCHS)
    for name in ("n_averaged", "last_epoch", "lr"):
        assert summary[name] == pytest.approx(plain[name]), name
    # an accumulator lacks what a dead replica had added to it in the running training loop
    less = [samples for samples in summary["samples"] if samples != SIZE]
    assert len(summary["samples"]) == EPOCHS
    assert len(less) <= died
    assert all(SIZE / 2 <= samples < SIZE for samples in less)
    assert summary["accuracy"] > 0.9
    assert framework_runs.used(folder) == {epoch: Counter(range(SIZE)) for epoch in range(EPOCHS)}
    by_step: dict[tuple[int, int, int], dict[int, list[float]]] = {}
    for line in generations.records(folder):
        step = line["epoch"], line["index"], line["replicas"]
        by_step.setdefault(step, {})[line["rank"]] = line["digests"]
    shared = [[*ranks.values()] for ranks in by_step.values() if len(ranks) == 2]
    assert len(shared) > 1
    assert [digests for digests in shared if digests[0] != digests[1]] == []
    assert all(weight.isfinite().all() for weight in framework_runs.weights(folder).values())
    best = torch.load(folder / "best.pt")
    assert best["model"].keys() < {name.removeprefix("module.") for name in best["model_ema"]}
