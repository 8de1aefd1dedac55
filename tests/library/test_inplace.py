"""Changes of size without a restart, among real processes."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import fake_agent
import generations
import loop_script_path
import pytest
import torch

from adaptdl_elastic.protocol.channel import CAN_NOT_JOIN
from adaptdl_elastic.protocol.messages import SaveCheckpoint, Stop

pytestmark = pytest.mark.processes

SIZE, BATCH = 403, 8


start = fake_agent.starts("step", size=SIZE, batch=BATCH, pace=0.5)


def check(folder: Path, replicas: int, epochs: int = 1, size: int = SIZE) -> None:
    """Every sample once per epoch, and applied so; the same weights everywhere."""
    applied = torch.zeros(size, dtype=torch.float64)
    counts: dict[int, Counter[int]] = {epoch: Counter() for epoch in range(epochs)}
    for line in generations.records(folder):
        if line["loop"] == "train":
            mine = line["samples"][: line["local"]]
            counts[line["epoch"]].update(mine)
            applied[mine] += max(1.0, line["window"] / BATCH) / line["window"]
    assert counts == {epoch: Counter(range(size)) for epoch in range(epochs)}
    for rank in range(replicas):
        torch.testing.assert_close(-torch.load(folder / f"weights-{rank}"), applied)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "given"),
    [
        ((1, 3, 2, 4, 1), {"epochs": 2}),
        pytest.param((2, 3, 1), {"accumulate": 3}, marks=pytest.mark.essential),
        ((1, 2), {"workers": 1, "persistent": True}),
        pytest.param((1, 2), {"stream": True}, marks=pytest.mark.essential),
    ],
    ids=str,
)
def test_every_sample_once_through_changes(
    start: Any, tmp_path: Path, sizes: tuple[int, ...], given: dict[str, Any]
) -> None:
    job = start(sizes[0], **given)
    for replicas in sizes[1:]:
        job.rescale(replicas)
        job.wait_for("step")
    job.finish()
    check(tmp_path, sizes[-1], given.get("epochs", 1))


@pytest.mark.slow
def test_in_evaluation_loops_and_short_epochs(start: Any, tmp_path: Path) -> None:
    """The loop that newcomers come to has often ended when they arrive: they go on after the others."""
    job = start(1, size=80, epochs=20, evaluate=1, pace=0.2)
    for replicas in (2, 3, 1, 2):
        job.rescale(replicas)
    job.finish()
    check(tmp_path, 2, epochs=20, size=80)
    seen = Counter(
        (line["epoch"], sample)
        for line in generations.records(tmp_path)
        if line["loop"] == "evaluate"
        for sample in line["samples"]
    )
    assert seen == Counter({(epoch, sample): 1 for epoch in range(20) for sample in range(80)})


@pytest.mark.exhaustive
def test_a_newcomer_in_mid_evaluation_broadcasts_no_buffers_alone(start: Any, tmp_path: Path) -> None:
    """The others did that when the loop began. Only where deaths are not survived is it DDP's to do."""
    job = start(1, batch=SIZE, epochs=2, evaluate=1, mortal=True, **{"evaluation pace": 1.0})
    job.rescale(2)  # the training loop is one step: this is in the first evaluation loop
    job.finish()
    evaluated = [line for line in generations.records(tmp_path) if line["loop"] == "evaluate"]
    assert {line["replicas"] for line in evaluated if line["epoch"] == 0} == {1, 2}, (
        "it was not amid the loop"
    )
    seen = Counter((line["epoch"], sample) for line in evaluated for sample in line["samples"])
    assert seen == Counter({(epoch, sample): 1 for epoch in range(2) for sample in range(SIZE)})


@pytest.mark.parametrize("trouble", ["crash", "hang", "collective"])
def test_a_newcomer_in_trouble_never_stops_the_training(start: Any, tmp_path: Path, trouble: str) -> None:
    job = start(2)
    job.plan(3, TROUBLE=trouble)
    if trouble == "hang":
        job.wait_for("hello")
    else:
        assert job.pending[0].join() == {"crash": 1, "collective": 76}[trouble]
    job.withdraw()
    job.wait_for("step", 2)
    job.rescale(1)  # another change afterwards
    job.finish()
    check(tmp_path, 1)


def test_a_newcomer_does_not_train_by_itself_where_the_others_have_no_epochs(tmp_path: Path) -> None:
    line = "outside_script.py:30 trains outside of adl.remaining_epochs_until"
    with fake_agent.starter(tmp_path, "look", loop_script_path.OUTSIDE) as start:
        job = start(1)
        job.plan(2)
        (early,) = job.pending
        assert early.join() == CAN_NOT_JOIN
        assert line in early.text()
        job.withdraw()
        (tmp_path / "go").touch()
        job.wait_for("step")
        job.plan(2)
        (late,) = job.pending
        assert late.join() == CAN_NOT_JOIN
        assert "the script trains outside of remaining_epochs_until" in late.text()
        job.withdraw()
        job.finish()
        assert job.running[0].text().count(line) == 1


def test_a_newcomer_that_dies_when_ready_is_withdrawn(start: Any, tmp_path: Path) -> None:
    """Between its readiness and the switch nothing has been given up yet, or all of it: no third thing."""
    job = start(1)
    job.plan(2)
    job.wait_for("hello")
    job.pending[0].process.kill()
    job.withdraw()
    job.finish()
    check(tmp_path, 1)


def test_stops_and_checkpoints_work_after_a_change(start: Any, tmp_path: Path) -> None:
    job = start(1)
    job.rescale(2)
    for each in job.running:
        each.channel.send(SaveCheckpoint(7))
    (saver,) = job.wait_for("saved")
    assert saver.rank == 0
    job.running[1].channel.send(Stop("test"))
    assert [each.join() for each in job.running] == [143, 143]
    environment = dict.fromkeys(("ADAPTDL_AGENT_FD",), "")
    (tmp_path / "hurry").touch()
    (replica,) = generations.run(
        loop_script_path.PATH, 1, tmp_path, **{**job.environment, **environment}, timeout=100
    )
    assert replica.code == 0, replica.output
    check(tmp_path, 1)


def trained(
    tmp_path: Path, script: Path, name: str, schedule: tuple[int, ...], pace: float, **given: Any
) -> list[Any]:
    """What each replica has in the end, having been through these numbers of replicas."""
    folder = tmp_path / name
    folder.mkdir()
    with fake_agent.running(script, folder, schedule[0], pace=pace, **given) as job:
        job.wait_for("step", schedule[0])
        for replicas in schedule[1:]:
            job.rescale(replicas)
            job.wait_for("step")
        job.finish()
    return [torch.load(folder / f"result-{rank}") for rank in range(schedule[-1])]


@pytest.mark.parametrize("scheduler", ["steps", "sequence"])
def test_schedulers_and_modules_know_what_they_are_given(tmp_path: Path, scheduler: str) -> None:
    """Milestones are a Counter, and a module asks for the version of its state dict."""

    train = partial(trained, tmp_path, loop_script_path.MODEL, scheduler=scheduler, size=80, epochs=6)
    (undisturbed,) = train("undisturbed", (1,), 0.0)
    for result in train("changed", (1, 2), 1.0):
        assert result["lr"] == undisturbed["lr"]
        torch.testing.assert_close(result["parameters"], undisturbed["parameters"])


@pytest.mark.slow
@pytest.mark.parametrize("given", [{}, {"kind": "two models"}, {"optimizer": "adam"}], ids=str)
def test_training_is_as_if_nothing_had_happened(tmp_path: Path, given: dict[str, str]) -> None:
    """Scheduler, loss scale, buffers, random states and a second model, through changes up and down."""

    train = partial(trained, tmp_path, loop_script_path.RECOVERY, **given)
    (undisturbed,) = train("undisturbed", (1,), 0.0)
    results = train("changed", (1, 4, 1, 2), 1.5)
    for result in results:
        torch.testing.assert_close(result["parameters"], undisturbed["parameters"])
        torch.testing.assert_close(result["optimizer"]["state"], undisturbed["optimizer"]["state"])
        assert (result["scheduler"], result["scaler"]) == (undisturbed["scheduler"], undisturbed["scaler"])
        assert (result["steps"], result["seen"]) == (40, 480)
        assert result["statistics"]["progress"] == pytest.approx(undisturbed["statistics"]["progress"])
    assert results[0]["draws"] == undisturbed["draws"]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_newcomers_get_through_epochs_that_end_while_they_come(tmp_path: Path) -> None:
    """What `synchronized()` showed in those epochs, it shows them, too."""
    with fake_agent.running(loop_script_path.MODEL, tmp_path, 1, pace=0.1, size=80, epochs=20) as job:
        job.wait_for("step")
        job.rescale(2)
        job.rescale(3)
        job.finish()
    results = [torch.load(tmp_path / f"result-{rank}") for rank in range(3)]
    for result in results[1:]:
        torch.testing.assert_close(result["parameters"], results[0]["parameters"], rtol=0, atol=0)
        assert result["losses"] == results[0]["losses"][-len(result["losses"]) :]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_changes_leave_neither_threads_nor_descriptors_behind(start: Any) -> None:
    job = start(1)

    def count() -> tuple[int, int]:
        process = Path(f"/proc/{job.running[0].process.pid}")
        return len(list((process / "task").iterdir())), len(list((process / "fd").iterdir()))

    def change() -> None:
        job.rescale(2)
        job.rescale(1)
        job.wait_for("step")

    change()
    threads, descriptors = count()
    for _ in range(3):
        change()
    found = [count()]
    while found[-1][0] > threads + 2 or found[-1][1] > descriptors + 2:  # some are about to end
        assert len(found) < 300, found
        job.wait_for("step")
        found.append(count())
    job.finish()
