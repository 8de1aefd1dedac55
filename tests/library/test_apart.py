"""Replicas that do not all do the same: what is still right, and what is a clear error instead of a hang."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import fake_agent
import generations
import loop_script_path
import pytest
import torch

from adaptdl_elastic.protocol.messages import ChangePlan, SaveCheckpoint
from adaptdl_elastic.torch._elastic.rescale import Plan

pytestmark = pytest.mark.processes

SIZE = 48


start = fake_agent.starts(None, loop_script_path.APART, size=SIZE)


def seen(folder: Path, loop: str) -> dict[int, Counter[int]]:
    """How often each sample was handed out, by epoch."""
    counts: dict[int, Counter[int]] = {}
    for line in generations.records(folder):
        if line["loop"] == loop:
            assert line["training"] == (loop == "train")
            counts.setdefault(line["epoch"], Counter()).update(line["samples"])
    return counts


def trained_alike(folder: Path, replicas: int, epochs: int, size: int = SIZE) -> None:
    assert seen(folder, "train") == {epoch: Counter(range(size)) for epoch in range(epochs)}
    weights = [torch.load(folder / f"weights-{rank}") for rank in range(replicas)]
    assert all(str(each) == str(weights[0]) for each in weights)


@pytest.mark.exhaustive
def test_loaders_that_are_made_when_first_needed(start: Any, tmp_path: Path) -> None:
    """On a replica that joins that is another epoch."""
    job = start(1, kind="lazy", epochs=18, pace=0.2)
    job.wait_for("step")
    while not seen(tmp_path, "evaluate"):
        job.wait_for("step")
    job.rescale(2)
    job.wait_for("step")
    job.rescale(1)
    job.rescale(3)
    job.finish()
    trained_alike(tmp_path, 3, 18)
    assert seen(tmp_path, "evaluate") == {epoch: Counter(range(SIZE)) for epoch in range(1, 18)}


@pytest.mark.parametrize("size", [SIZE, 12])  # in loops of one batch the boundary is an epoch's beginning
def test_one_that_joins_at_another_loop_gives_up(start: Any, tmp_path: Path, size: int) -> None:
    """A variable of the script decided otherwise on it: training goes on without, and it says why."""
    job = start(1, kind="fickle", epochs=40, pace=0.2, size=size)
    while 1 not in seen(tmp_path, "train"):
        job.wait_for("step")
    job.plan(2)
    (newcomer,) = job.pending
    assert newcomer.join() == 76, newcomer.text()
    assert "cannot be rescaled in place: data loop 1 of epoch" in newcomer.text()
    assert "is over loader 1 here, and over 0 on the running replicas" in newcomer.text()
    job.withdraw()
    (tmp_path / "hurry").touch()
    job.finish()
    trained_alike(tmp_path, 1, 40, size)


def test_newcomers_that_stay_behind_short_loops_are_waited_for_longer_and_longer() -> None:
    plan = Plan(ChangePlan(1, 2, 1, (0,), (1,), "127.0.0.1", 1))
    waits = [plan.catch_up() for _ in range(63)]
    assert {number + 1: wait.total_seconds() for number, wait in enumerate(waits) if wait is not None} == {
        **{1: 2.0, 3: 4.0, 7: 8.0, 15: 16.0},
        **{31: 16.0, 63: 16.0},
    }


@pytest.mark.exhaustive
def test_one_that_does_not_stop_early_as_the_others_do(start: Any, tmp_path: Path) -> None:
    job = start(2, kind="early", epochs=10**6, pace=0.05)
    job.wait_for("step")
    job.rescale(3)
    job.wait_for("step", 3)
    (tmp_path / "hurry").touch()
    assert [each.join() for each in job.running] == [0, 0, 1]
    assert "rank 0 has finished, and this replica has not" in job.running[2].text()


# the loop in question is the very last one, or others follow
@pytest.mark.parametrize(("rank", "epochs"), [(0, 2), (1, 4)])
def test_a_loop_of_one_replica_only_is_a_clear_error(start: Any, rank: int, epochs: int) -> None:
    job = start(2, kind="alone", rank=rank, epochs=epochs)
    here = job.running[rank]
    assert here.join() == 1
    assert "data loop 2 of epoch 1, over loader 1" in here.text()
    assert "every replica must call the same" in here.text()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_loop_of_one_replica_only_without_an_agent(tmp_path: Path, rank: int) -> None:
    settings = fake_agent.settings(size=SIZE, kind="alone", rank=rank)
    ended = generations.run(loop_script_path.APART, 2, tmp_path, LOOP=settings, OUT=str(tmp_path))
    assert all(replica.code == 1 for replica in ended)
    assert "every replica must call the same" in ended[rank].output


@pytest.mark.parametrize("rank", [0, 1])
def test_a_checkpoint_while_one_has_left_an_evaluation_loop(start: Any, tmp_path: Path, rank: int) -> None:
    """Those behind go on until they have caught up, and all save together."""
    job = start(2, kind="leave", rank=rank, epochs=3)
    job.wait_for("there", 2)
    job.running[0].channel.send(SaveCheckpoint(1))
    job.wait_for("saved")
    job.finish()


def test_no_replica_ends_before_the_others_have_reached_the_end(start: Any, tmp_path: Path) -> None:
    """What follows the last loop takes one replica longer than the end takes another."""
    job = start(2, kind="slow", epochs=2, rank=1)
    job.finish()
    trained_alike(tmp_path, 2, 2)


def test_an_error_is_not_taken_for_an_end(start: Any, tmp_path: Path) -> None:
    """Who waits for one that has failed is not told that it had finished: it comes to its own end."""
    job = start(2, kind="fail", epochs=2)
    failed, waiting = job.running
    assert failed.join() == 1
    assert "ArithmeticError: by this replica" in failed.text()
    assert waiting.join() == 0, waiting.text()
