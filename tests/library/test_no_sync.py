"""Accumulation by hand over changes of size and deaths: each sample counts once per epoch, or it restarts."""

from __future__ import annotations

from pathlib import Path

import fake_agent
import loop_script_path
import pytest
import torch

pytestmark = pytest.mark.processes

EPOCHS = 12


def test_changes_of_size_come_between_its_steps(tmp_path: Path) -> None:
    with fake_agent.running(loop_script_path.NO_SYNC, tmp_path, 1, epochs=EPOCHS, pace=0.4) as job:
        for replicas in (2, 3, 1, 2):
            job.wait_for("step")
            job.rescale(replicas)
        job.finish()
    for rank in range(2):
        weights = torch.load(tmp_path / f"weights-{rank}")
        torch.testing.assert_close(weights, torch.full_like(weights, -EPOCHS / 12))


@pytest.mark.parametrize("dies", [0, 1])
def test_a_death_between_its_steps_restarts_and_says_why(tmp_path: Path, dies: int) -> None:
    with fake_agent.running(loop_script_path.NO_SYNC, tmp_path, 2, dies=dies) as job:
        assert job.running[dies].join() == -9
        assert job.running[1 - dies].join() == 1
        assert "restarts from the last checkpoint, because what it had accumulated by hand" in (
            job.running[1 - dies].text()
        )
