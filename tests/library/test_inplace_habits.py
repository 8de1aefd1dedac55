"""What a script may not do where its size changes in place: found out, and a restart instead."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_agent
import loop_script_path
import pytest
import torch
from fake_agent import FakeAgent

pytestmark = pytest.mark.processes

CAN_NOT_JOIN = 76


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., FakeAgent]]:
    variables = {"ADAPTDL_REPORT_INTERVAL": "0.5"}
    with fake_agent.starter(tmp_path, "step", loop_script_path.HABIT, variables=variables) as start:
        yield lambda replicas, habit, **given: start(replicas, habit=habit, **given)


def test_every_collective_of_torchs_that_moves_data_ends_a_newcomer(tmp_path: Path) -> None:
    script = loop_script_path.PATH.with_name("waiting_calls.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    ended = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(ended) == 26
    assert {name: code for name, code in ended if code != CAN_NOT_JOIN} == {}
    lines = [line for line in done.stderr.splitlines() if "cannot be rescaled in place" in line]
    for (name, _), line in zip(ended, lines, strict=True):
        assert line.startswith(f"{name}: this script cannot be rescaled in place: it calls ")
        what = name if name.startswith("a collective") else f"torch.distributed.{name} "
        assert what in line.partition("it calls ")[2]
        assert f"({script}:" in line


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("habit", "named"),
    [("gather", "torch.distributed.all_gather ("), ("large", "torch.distributed.broadcast (")],
)
def test_a_newcomer_gives_up_at_a_collective_of_torchs(start: Any, habit: str, named: str) -> None:
    job = start(2, habit)
    job.plan(3)
    (newcomer,) = job.pending
    assert newcomer.join() == CAN_NOT_JOIN
    assert named in newcomer.text()
    job.withdraw()
    job.wait_for("step", 2)
    job.rescale(1)
    job.finish()


def test_a_newcomer_gets_the_results_of_collectives_that_the_others_have_passed(
    start: Any, tmp_path: Path
) -> None:
    job = start(2, "results")
    stays_in_place(job, tmp_path)
    first, *others = [torch.load(tmp_path / f"results-{rank}") for rank in range(3)]
    assert len(first) == 19  # of all epochs, and of before them
    for other in others:
        assert None in other
        assert other == {epoch: first[epoch] for epoch in other}


@pytest.mark.parametrize(
    ("habit", "why"),
    [
        ("hidden scheduler", "AdaptiveDataParallel was not given the StepLR in use as lr_scheduler"),
        ("scaler", "AdaptiveDataParallel was not given the GradScaler in use as mp_scaler"),
        ("new group", "the script has process groups of its own"),
        ("late group", "the script has process groups of its own"),
        ("plain DDP", "there is a DistributedDataParallel beside AdaptiveDataParallel"),
    ],
)
def test_unshared_objects_prevent_a_change_in_place(start: Any, habit: str, why: str) -> None:
    """The agent hears of it; and who comes all the same is told, and leaves the others in peace."""
    job = start(2, habit)
    assert hints(job, lambda told: not told["inplace"])["inplace_reason"] == why
    job.plan(3)
    (newcomer,) = job.pending
    assert newcomer.join() == CAN_NOT_JOIN
    if habit not in ("new group", "plain DDP"):  # which it comes to before it asks where the others are
        assert f"this script cannot be rescaled in place: {why}\n" in newcomer.text()
    job.withdraw()
    job.drain()
    job.wait_for("step", 2)
    if habit in ("hidden scheduler", "scaler"):  # those who are there have what they need
        job.rescale(1)
    job.finish()


def test_thawed_parameters_are_no_change_in_place(start: Any) -> None:
    job = start(1, "thaw")
    assert "thawed" in hints(job, lambda told: not told["inplace"])["inplace_reason"]
    job.finish()


@pytest.mark.exhaustive
def test_thawed_parameters_of_several_replicas_are_an_error(start: Any) -> None:
    job = start(2, "thaw", pace=0.05)
    first = job.first_to_end()  # the other one may learn of its end, and wait for what the agent says
    assert first.join() == 1
    assert "parameters require gradients that did not" in first.text()
    assert "whose learning rate is 0 until they are to train" in first.text()


@pytest.mark.parametrize(
    "habit", ["scheduler", pytest.param("nested scheduler", marks=pytest.mark.slow), "scaler"]
)
def test_given_objects_take_part_in_a_change_in_place(start: Any, tmp_path: Path, habit: str) -> None:
    job = start(2, habit, given=True)
    stays_in_place(job, tmp_path)


@pytest.mark.exhaustive
def test_a_scheduler_in_a_variable_goes_along(start: Any, tmp_path: Path) -> None:
    job = start(2, "scheduler")
    stays_in_place(job, tmp_path)


@pytest.mark.parametrize("habit", ["", "barrier", pytest.param("dry run", marks=pytest.mark.slow)])
def test_unused_objects_do_not_prevent_a_change_in_place(start: Any, tmp_path: Path, habit: str) -> None:
    """A scheduler and a GradScaler that are there and do nothing; a barrier; a step before the data loop."""
    job = start(2, habit)
    stays_in_place(job, tmp_path)


@pytest.mark.exhaustive
def test_changes_and_deaths_in_an_evaluation_in_inference_mode_leave_no_trace(
    start: Any, tmp_path: Path
) -> None:
    job = start(2, "inference")
    job.rescale(3)
    job.wait_for("step", 3)
    job.recover(2)
    stays_in_place(job, tmp_path)


def stays_in_place(job: FakeAgent, folder: Path) -> None:
    assert hints(job, lambda told: told["step"] > 8)["inplace"]  # some epochs
    job.rescale(3)
    job.wait_for("step", 3)
    job.finish()
    first, *others = [torch.load(folder / f"result-{rank}") for rank in range(3)]
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)


def hints(job: FakeAgent, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The first such report of rank 0's."""
    while True:
        sender, message, _ = job.messages.get(timeout=fake_agent.PATIENCE)
        if message["type"] == "hints" and sender is job.running[0] and wanted(message["hints"]):
            found: dict[str, Any] = message["hints"]
            return found
