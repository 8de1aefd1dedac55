"""AdaptDL's five examples as scripts of our own: from one replica to two, to a death, and back to one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from elastic_run import ROOT, ElasticRun

RUNNER = ROOT / "tests" / "support" / "recorded_example.py"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def applied(directory: Path) -> Counter[tuple[int, int]]:
    """How often each (epoch, sample) was part of a step, on whichever replica."""
    counts: Counter[tuple[int, int]] = Counter()
    for path in directory.glob("applied-*"):
        for line in path.read_text().splitlines():
            epoch, *samples = map(int, line.split())
            counts.update((epoch, sample) for sample in samples)
    return counts


def drive(example: str, arguments: list[str], directory: Path) -> ElasticRun:
    """Run an example on 1, 2, 1 (by a death), 2 and 1 replicas."""
    options = ["--standalone", "--nproc-per-node=1:2", "--rdzv-id=port", "--no-autoscale"]
    options += ["--checkpoint-interval=0.5"]
    script = [str(RUNNER), str(ROOT / "examples" / "adaptdl" / f"{example}.py"), str(directory)]
    with ElasticRun([*options, *script, *arguments], directory) as run:
        run.wait_for_event("metrics", replicas=1)
        assert run.adaptdl("scale", "port", "--replicas", "2").returncode == 0
        run.wait_for_event("metrics", replicas=2)
        seen = len(run.events)
        (directory / "die").touch()
        run.wait_for(lambda event: event["event"] in ("replica_lost", "failure"), after=seen)
        run.wait_for_event("metrics", replicas=2, after=len(run.events))
        seen = len(run.events)
        assert run.adaptdl("scale", "port", "--replicas", "1").returncode == 0
        run.wait_for_event("metrics", replicas=1, after=seen)
        (directory / "hurry").touch()
        assert run.wait() == 0, run.text()
    return run


@pytest.mark.parametrize(
    ("example", "epochs", "samples", "arguments"),
    [
        ("cifar", 1, 1200, ["--bs=4", "--width=2"]),
        ("ncf", 1, 2000, ["--bs=8"]),
        ("bert", 1, 2000, ["--bs=8", "--width=16"]),
    ],
)
def test_each_sample_is_in_one_step_through_two_changes_and_a_death(
    tmp_path: Path, example: str, epochs: int, samples: int, arguments: list[str]
) -> None:
    run = drive(example, [f"--epochs={epochs}", f"--samples={samples}", *arguments], tmp_path)
    assert not run.of("failure"), run.text()
    wanted = {(epoch, sample) for epoch in range(epochs) for sample in range(samples)}
    assert applied(tmp_path) == Counter(wanted)


@pytest.mark.parametrize(
    ("example", "samples", "arguments"),
    [("dcgan", 800, ["--bs=4", "--width=2"]), ("transformer", 6000, ["--bs=4", "--bptt=8", "--width=8"])],
)
def test_a_death_that_restarts_an_example_leaves_no_sample_out(
    tmp_path: Path, example: str, samples: int, arguments: list[str]
) -> None:
    """Two optimizers, and hidden streams: the job may go on from its checkpoint, and do steps again."""
    drive(example, ["--epochs=1", f"--samples={samples}", *arguments], tmp_path)
    missing = set(range(samples)) - {sample for _, sample in applied(tmp_path)}
    assert len(missing) < 4  # the text's last tokens, too few for a token in each of four streams
