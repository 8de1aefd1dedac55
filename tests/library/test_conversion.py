"""A script for DistributedDataParallel that was converted as the README says takes the same steps."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import fake_agent
import generations
import loop_script_path
import pytest
from elastic_run import run_agent
from ports import free_port

pytestmark = pytest.mark.processes

PAGE = Path(__file__).parents[2] / "docs" / "start" / "your-script.md"


def run(folder: Path, ranks: int, converted: bool, batch: float = 32) -> tuple[list[Any], list[str]]:
    """What each rank has written, and what each has printed."""
    given = {"ranks": ranks, "converted": converted, "batch": batch}
    with fake_agent.running(loop_script_path.CONVERSION, folder, ranks, **given) as job:
        job.finish()
        texts = [one.text() for one in job.running]
    name = "after" if converted else "before"
    return [json.loads((folder / f"{name}-{rank}").read_text()) for rank in range(ranks)], texts


@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_have_the_same_samples_and_learning_rate(tmp_path: Path, ranks: int) -> None:
    before, _ = run(tmp_path, ranks, converted=False)
    after, texts = run(tmp_path, ranks, converted=True)
    assert len(before[0][0]) == 2 * 256 // (32 * ranks)
    for (steps, weights), (steps_after, weights_after) in zip(before, after, strict=True):
        assert steps_after == steps
        assert weights_after[0] == pytest.approx(weights[0], rel=1e-5)
    replicas = "1 replica" if ranks == 1 else f"{ranks} replicas"
    assert texts[0].startswith(f"batch size {32 * ranks} over {replicas}\n")
    assert texts[1:] == [""] * (ranks - 1)


def test_replicas_without_a_share_of_the_batch_are_told(tmp_path: Path) -> None:
    after, texts = run(tmp_path, 2, converted=True, batch=0.5)
    assert texts[0].startswith(
        "batch size 1 over 2 replicas, of which only 1 can share it: "
        "run it on at most 1, or raise batch_size\n"
    )
    assert [samples for samples, _ in after[0][0]] == [1] * 512


def written(folder: Path, replicas: int, later: int | None = None, **settings: Any) -> tuple[int, int, Any]:
    """Return the length of the loader, the steps of the schedule, and the weights at the end."""
    folder.mkdir()
    with fake_agent.running(loop_script_path.WRITTEN_BATCH, folder, replicas, **settings) as job:
        if later is not None:
            job.wait_for("step", replicas)
            job.rescale(later)
        job.finish()
    length, steps, weights = json.loads((folder / "result").read_text())
    return length, steps, weights


def test_a_schedule_by_the_length_of_the_loader_ends_on_any_number_of_replicas(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"batch": 8, "size": 124, "epochs": 7, "pace": 0.2}
    length, steps, weights = written(tmp_path / "1", 1, **{**settings, "pace": 0.0})
    assert (length, steps) == (16, 112)
    for begun, later in ((3, 1), (1, 3)):
        found = written(tmp_path / f"{begun} {later}", begun, later, **settings)
        assert found[:2] == (length, steps)
        assert found[2] == pytest.approx(weights, abs=1e-4)


@pytest.mark.parametrize(
    ("batch", "replicas", "most"), [(8, 3, 0), (8, 3, 2), (8, 2, 3), (5, 3, 0), (1, 2, 0)]
)
def test_steps_and_gradients_are_those_of_one_replica(
    tmp_path: Path, batch: int, replicas: int, most: int
) -> None:
    """Also if a replica has no share, or may have `most` samples in a pass."""
    alone = written(tmp_path / "1", 1, batch=batch, size=29)
    found = written(tmp_path / "several", replicas, batch=batch, size=29, most=most)
    assert found[1] == alone[1] == 2 * -(-29 // batch)
    assert most or found[0] == alone[0]
    assert found[2] == pytest.approx(alone[2], abs=1e-5)


@pytest.mark.parametrize(("batch", "size", "replicas"), [(33, 988, 2), (5, 32, 3)])
def test_no_share_is_a_single_sample_that_a_batchnorm_refuses(
    tmp_path: Path, batch: int, size: int, replicas: int
) -> None:
    length, steps, _ = written(tmp_path / "run", replicas, batch=batch, size=size, norm=True, epochs=1)
    assert length == steps == -(-size // batch)


def page(left_out: str) -> list[str]:
    """Return the script of the page and its command line, from the diffs without lines of this kind."""
    diffs = re.findall(r"^```diff test=test_conversion\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    kept = ["\n".join(line[1:] for line in diff.splitlines() if line[:1] != left_out) for diff in diffs]
    assert len(kept) == 2
    return kept


def assert_losses_fall(printed: str) -> None:
    losses = [float(loss) for loss in re.findall(r"epoch \d: (\d\.\d+)", printed)]
    assert len(losses) == 4, printed
    assert all(after < before for before, after in itertools.pairwise(losses)), losses


@pytest.mark.exhaustive
def test_the_script_of_the_page_runs_before_its_conversion(tmp_path: Path) -> None:
    """As `torchrun` runs it, on one replica."""
    script, command = page("+")
    assert re.fullmatch(r"torchrun --standalone --nproc-per-node=\d+ train.py", command)
    (tmp_path / "train.py").write_text(script)
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RANK": "0", "WORLD_SIZE": "1"}
    done = generations.run_alone(tmp_path / "train.py", tmp_path, **common)
    assert done.code == 0, done.output
    assert_losses_fall(done.output)
    assert (tmp_path / "last.pt").exists()


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_converted_script_of_the_page_for_ddp_scripts_runs_as_it_says(tmp_path: Path) -> None:
    script, command = page("-")
    (tmp_path / "train.py").write_text(script)
    program, *arguments = command.replace("--nproc-per-node=8", "--nproc-per-node=1").split()
    assert program == "adaptdl-run"
    done = run_agent(tmp_path, *arguments)
    assert done.returncode == 0, done.stderr
    assert_losses_fall(done.stdout)
    assert not (tmp_path / "last.pt").exists()
    assert "batch size 256 over 1 replica" in done.stdout + done.stderr
    assert (tmp_path / ".adaptdl" / "mine").is_dir()
