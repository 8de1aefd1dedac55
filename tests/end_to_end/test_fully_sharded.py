"""A model sharded by fully_shard, resized and killed, ends as an undisturbed one without shards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_run import ElasticRun, environment
from framework_runs import example
from polling import until

from adaptdl_elastic.torch._sharded.fully_shard import TESTED

SCRIPT = Path(__file__).parent / "scripts" / "fully_sharded.py"
SIZE, EPOCHS = 485, 6
LAUNCH = ["--standalone", "--rdzv-id=shards", "--no-autoscale", "--max-restarts=0", "--checkpoint-interval=0"]
EVERY = 4  # batches per optimizer step: most boundaries are between two backward passes of a step

pytestmark = [
    pytest.mark.slow,
    pytest.mark.etcd,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.__version__.startswith(TESTED), reason="torch's interface was not tested"),
]


def applied(folder: Path) -> dict[int, Counter[int]]:
    """How often each sample was part of a step, by epoch; steps before a restart may have been undone."""
    steps: dict[int, list[dict[str, Any]]] = {}
    for path in folder.glob("record-*"):
        for line in map(json.loads, path.read_text().splitlines()):
            steps.setdefault(line["step"], []).append(line)
    count: dict[int, Counter[int]] = {}
    for lines in steps.values():
        last = max(line["generation"] for line in lines)
        for line in lines:
            if line["generation"] == last:
                count.setdefault(line["epoch"], Counter()).update(line["samples"])
    return count


def first_steps(folder: Path) -> list[int]:
    """Return the first step of each process, in the order of their generations."""
    first = [json.loads(path.read_text().splitlines()[0]) for path in folder.glob("record-*")]
    return [line["step"] for line in sorted(first, key=lambda line: int(line["generation"]))]


def assert_equal(mine: object, theirs: object) -> None:
    assert type(mine) is type(theirs)
    if isinstance(mine, torch.Tensor):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    elif isinstance(mine, dict):
        assert mine.keys() == theirs.keys()
        for key in mine:
            assert_equal(mine[key], theirs[key])
    else:
        for one, other in zip(mine, theirs, strict=True):
            assert_equal(one, other)


def undisturbed(folder: Path, every: int = 1) -> dict[str, Any]:
    """Train an undisturbed model without shards; return its final state."""
    folder.mkdir()
    (folder / "hurry").touch()
    command = [sys.executable, str(SCRIPT), str(folder), "--plain", f"--every={every}"]
    done = subprocess.run(command, env=environment(), cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    state: dict[str, Any] = torch.load(folder / "final.pt")
    return state


def scale(run: ElasticRun, replicas: int) -> None:
    """Change the number of replicas, and wait until they have changed in place."""
    seen = len(run.events)
    assert run.adaptdl("scale", "shards", "--replicas", str(replicas)).returncode == 0
    change = run.wait_for_event("generation", after=seen, replicas=replicas)
    assert change["transition"] == "inplace", run.text()


@pytest.mark.parametrize(
    ("every", "options"), [(EVERY, []), (1, ["--most=3"])], ids=["by_hand", "by_the_loader"]
)
def test_resized_in_place_and_restarted_after_a_death_ends_as_an_undisturbed_plain_model(
    every: int, options: list[str], tmp_path: Path
) -> None:
    run_in = tmp_path / "run"
    run_in.mkdir()
    wanted = undisturbed(tmp_path / "plain", every)
    script = [str(SCRIPT), str(run_in), f"--every={every}", *options]
    with ElasticRun([*LAUNCH, "--nproc-per-node=1:3", *script], tmp_path) as run:
        # before the first step a change is a restart
        run.wait_for_event("batch_size")
        for replicas in (2, 3, 2):
            seen = len(run.events)
            scale(run, replicas)
            saved = run.wait_for_event("checkpoint", after=seen)
        pids = run.wait_for_event("started", generation=1)["pids"]  # the one that joined first
        seen = len(run.events)
        os.kill(next(iter(pids.values())), signal.SIGKILL)
        again = run.wait_for_event("generation", after=seen)
        assert (again["transition"], again["cause"]) == ("abort", "replica_lost")  # no restart was allowed
        assert (
            f"starting again, from the checkpoint of step {saved['step']}, as training cannot go on without "
            f"a dead replica: a dead replica's part of a sharded model is only in the checkpoint (rank "
        ) in run.text()
        (run_in / "hurry").touch()
        assert run.wait() == 0, run.text()
    assert first_steps(run_in)[-1] > 1  # after the death: what was done before it is part of the result
    assert applied(run_in) == {epoch: Counter(range(SIZE)) for epoch in range(EPOCHS)}
    assert_equal(torch.load(run_in / "final.pt"), wanted)


def test_with_two_copies_of_each_part_a_death_costs_no_restart(tmp_path: Path) -> None:
    run_in = tmp_path / "run"
    run_in.mkdir()
    wanted = undisturbed(tmp_path / "plain")
    with ElasticRun(
        [*LAUNCH, "--nproc-per-node=1:4", str(SCRIPT), str(run_in), "--copies=2"], tmp_path
    ) as run:

        def kill(rank: int, left: int) -> None:
            seen = len(run.events)
            os.kill(run.of("started")[-1]["pids"][str(rank)], signal.SIGKILL)
            change = run.wait_for_event("generation", after=seen)
            assert (change["transition"], change["replicas"]) == ("recover", left), run.text()

        run.wait_for_event("batch_size")
        scale(run, 4)
        kill(0, left=3)
        # three replicas hold one copy, until the fourth brings the second one back
        until("nothing is said", lambda: "a death starts all replicas again: " in run.text())
        assert "3 replicas cannot hold two copies" in run.text()
        scale(run, 4)
        kill(1, left=3)
        scale(run, 2)
        kill(1, left=1)
        (run_in / "hurry").touch()
        assert run.wait() == 0, run.text()
    assert applied(run_in) == {epoch: Counter(range(SIZE)) for epoch in range(EPOCHS)}
    assert_equal(torch.load(run_in / "final.pt"), wanted)


@pytest.mark.exhaustive
def test_the_example_runs(tmp_path: Path) -> None:
    example("fsdp.py", tmp_path, "--epochs=1", "--samples=40")
