"""A script as users write them goes through changes of size and deaths without knowing of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fake_agent
import generations
import loop_script_path
import pytest
import torch

from adaptdl_elastic.protocol.messages import SaveCheckpoint

pytestmark = [pytest.mark.processes, pytest.mark.exhaustive]

SIZE, EPOCHS = 60, 16  # outlasts whatever is done, and is over in seconds once that is done


start = fake_agent.starts("step", loop_script_path.USER, size=SIZE, epochs=EPOCHS, pace=0.4)


def as_ever(folder: Path, replicas: int, size: int = SIZE) -> list[dict[str, Any]]:
    """All have the same, and every epoch has seen every sample; what the first process has counted."""
    results = [torch.load(folder / f"result-{rank}") for rank in range(replicas)]
    for result in results:
        assert (result["best"], result["weights"]) == ([size] * EPOCHS, results[0]["weights"])
        assert result["lr"] == results[0]["lr"]
    return results


@pytest.mark.parametrize("leave", [(1,), (0, 1)])
def test_up_and_down_at_once(start: Any, tmp_path: Path, leave: tuple[int, ...]) -> None:
    """Some leave, rank 0 as well, while others come."""
    job = start(3)
    job.rescale(3, leave=leave)
    job.wait_for("step", 3)
    job.finish()
    as_ever(tmp_path, 3)


def test_batches_are_counted_on_and_rank_0_writes(start: Any, tmp_path: Path) -> None:
    job = start(1)
    job.rescale(3)
    job.wait_for("step")
    job.rescale(2)
    job.finish()
    first, second = as_ever(tmp_path, 2)
    per_epoch = range(SIZE // 12)
    assert first["numbers"] == [(epoch, number) for epoch in range(EPOCHS) for number in per_epoch]
    assert set(second["numbers"]) < set(first["numbers"])  # a newcomer's enumerate begins where it came
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert lines == [{"epoch": epoch, "samples": SIZE} for epoch in range(EPOCHS)]
    printed = job.running[0].text()
    assert "of 3 replicas" in printed
    assert "of 2 replicas" in printed


def test_between_epochs(start: Any, tmp_path: Path) -> None:
    """An epoch is one step, and almost all of the time is spent between epochs."""
    job = start(1, size=12, pace=0.0, between=0.6)
    for replicas in (2, 3, 1):
        job.rescale(replicas)
    job.finish()
    as_ever(tmp_path, 1, size=12)


def test_while_a_checkpoint_is_being_written(start: Any, tmp_path: Path) -> None:
    """A change of size and a death wait for no disk; the checkpoint is of before, and whole."""
    # a later one would lack what the dead replica had added to the sum and nobody else knew
    job = start(2, hold=True, variables={"ADAPTDL_CHECKPOINT_INTERVAL": "0"})
    job.running[1].channel.send(SaveCheckpoint(1))
    (writer,) = job.wait_for("writing")
    assert writer is job.running[0]
    job.rescale(3)
    job.wait_for("step", 3)
    job.recover(1)
    job.wait_for("step", 2)
    (tmp_path / "written").touch()
    (saver,) = job.wait_for("saved")
    assert saver is writer
    for each in job.running:
        each.process.kill()
        each.process.join()
    (tmp_path / "hurry").touch()
    (replica,) = generations.run(
        loop_script_path.USER, 1, tmp_path, **{**job.environment, "ADAPTDL_AGENT_FD": ""}
    )
    assert replica.code == 0, replica.output
    as_ever(tmp_path, 1)
