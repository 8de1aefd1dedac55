"""Runs of training frameworks under adaptdl-run that are resized and lose a replica, and what they used.

A script writes a line per batch with `step_records.record` (epoch, index, samples, local), slows down by PACE
seconds per step until OUT/hurry exists, and leaves OUT/final.pt and OUT/summary.json.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import generations
import torch
from commands import ended
from elastic_run import PATIENCE, ROOT, ElasticRun, environment

SUPPORT = Path(__file__).parent


def variables(folder: Path, **extra: str) -> dict[str, str]:
    """The environment of a script that writes into `folder`."""
    return {"OUT": str(folder), "PYTHONPATH": f"{SUPPORT}{os.pathsep}{ROOT}", "PACE": "1", **extra}


def ends(folder: Path) -> list[dict[str, Any]]:
    """What each replica of the last generation had at its end."""
    return [json.loads(path.read_text()) for path in folder.glob("end-*")]


def undisturbed(script: Path, folder: Path, **extra: str) -> dict[str, Any]:
    """Run the script as one process without a launcher; return its summary."""
    folder.mkdir()
    (folder / "hurry").touch()
    done = ended([sys.executable, str(script)], folder, env={**environment(), **variables(folder, **extra)})
    assert done.returncode == 0, done.stdout + done.stderr
    return summary(folder)


def resized_and_killed(
    script: Path, folder: Path, *, killed: int = 1, arguments: Sequence[str] = (), **extra: str
) -> str:
    """Run the script on 1, 2 and 1 replicas, then on 2 of which one is killed; return the output."""
    folder.mkdir()
    options = ["--standalone", "--nproc-per-node=1:2", "--rdzv-id=frame", "--no-autoscale"]
    options += ["--max-restarts=0", *arguments]
    with ElasticRun([*options, str(script)], folder, variables(folder, **extra)) as run:
        run.wait_for_event("generation", replicas=1)
        trained(run, folder)
        for replicas in (2, 1, 2):
            seen = len(run.events)
            assert run.adaptdl("scale", "frame", "--replicas", str(replicas)).returncode == 0
            change = run.wait_for_event("generation", after=seen, replicas=replicas)
            assert change["transition"] == "inplace", run.text()
            trained(run, folder, replicas)
        pids = run.wait_for_event("started", generation=change["generation"])["pids"]
        seen = len(run.events)
        os.kill(pids[str(killed)], signal.SIGKILL)
        survived = run.wait_for_event("generation", after=seen)
        assert (survived["cause"], survived["transition"]) == ("replica_lost", "recover"), run.text()
        (folder / "hurry").touch()
        assert run.wait() == 0, run.text()
        assert run.of("failure") == []
        return run.text()


def grown(script: Path, folder: Path, rescale: str = "inplace", **extra: str) -> str:
    """Run the script on 1 replica, and then on 2, which come by `rescale`; return the output."""
    folder.mkdir()
    options = ["--standalone", "--nproc-per-node=1:2", "--rdzv-id=frame", "--no-autoscale"]
    options += [f"--rescale={rescale}", "--max-restarts=0"]
    with ElasticRun([*options, str(script)], folder, variables(folder, **extra)) as run:
        run.wait_for_event("generation", replicas=1)
        trained(run, folder)
        seen = len(run.events)
        assert run.adaptdl("scale", "frame", "--replicas", "2").returncode == 0
        change = run.wait_for_event("generation", after=seen, replicas=2)
        assert change["transition"] == rescale, run.text()
        (folder / "hurry").touch()
        assert run.wait() == 0, run.text()
        assert run.of("failure") == []
        return run.text()


def stopped_and_resumed(script: Path, folder: Path, **extra: str) -> None:
    """Run the script on 1 replica, stop the job as Ctrl-C does, and start it again on 2."""
    folder.mkdir()
    for replicas in (1, 2):
        options = ["--standalone", f"--nproc-per-node={replicas}", "--max-restarts=0", "--no-autoscale"]
        options += ["--rdzv-id=frame", "--checkpoint-path=state", str(script)]
        with ElasticRun(options, folder, variables(folder, **extra)) as run:
            trained(run, folder, replicas)
            if replicas == 1:
                run.interrupt()
                assert run.wait() == 143, run.text()
            else:
                (folder / "hurry").touch()
                assert run.wait() == 0, run.text()


def replicas(script: Path, folder: Path, count: int, **extra: str) -> None:
    """Run the script to its end on `count` replicas."""
    folder.mkdir()
    (folder / "hurry").touch()
    options = ["--standalone", f"--nproc-per-node={count}", "--max-restarts=0", "--no-autoscale"]
    with ElasticRun([*options, str(script)], folder, variables(folder, **extra)) as run:
        assert run.wait() == 0, run.text()


def trained(run: ElasticRun, folder: Path, replicas: int = 1) -> None:
    """Wait until more steps on so many replicas have been recorded than before."""

    def steps() -> int:
        return len([line for line in complete(folder) if line["replicas"] == replicas])

    before, deadline = steps(), time.monotonic() + PATIENCE
    while steps() <= before + 1:
        assert run.process.poll() is None, run.text()
        assert time.monotonic() < deadline, run.text()
        time.sleep(0.05)


def complete(folder: Path) -> list[dict[str, Any]]:
    """The lines that have been written whole."""
    found = []
    for path in folder.glob("record-*"):
        found += [json.loads(line) for line in path.read_text().splitlines(True) if line.endswith("\n")]
    return found


def used(folder: Path) -> dict[int, Counter[int]]:
    """How often every sample was trained with, by epoch.

    A step that a death broke off is done again at the same index by fewer replicas; only the last try counts.
    """
    windows: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for line in generations.records(folder):
        windows.setdefault((line["epoch"], line["index"]), []).append(line)
    count: dict[int, Counter[int]] = {}
    for (epoch, _), lines in windows.items():
        fewest = min(line["replicas"] for line in lines)
        last = {line["rank"]: line for line in lines if line["replicas"] == fewest}
        for line in last.values():
            count.setdefault(epoch, Counter()).update(line["samples"][: line["local"]])
    return count


def steps_by_replicas(folder: Path) -> dict[int, set[int]]:
    """The steps that were made on each number of replicas."""
    found: dict[int, set[int]] = {}
    for line in generations.records(folder):
        found.setdefault(line["replicas"], set()).add(line["step"])
    return found


def summary(folder: Path) -> dict[str, Any]:
    """What the script has written at its end."""
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The final weights."""
    found: dict[str, torch.Tensor] = torch.load(folder / "final.pt")
    return found


def assert_same_weights(folder: Path, other: Path) -> None:
    """The final weights are equal but for rounding."""
    mine, theirs = weights(folder), weights(other)
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        torch.testing.assert_close(
            value, theirs[name], rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
        )


def example(name: str, folder: Path, *arguments: str) -> str:
    """Run an example on two replicas to its end; return what it printed."""
    options = ["--standalone", "--nproc-per-node=2", "--max-restarts=0"]
    with ElasticRun([*options, str(ROOT / "examples" / name), *arguments], folder) as run:
        assert run.wait() == 0, run.text()
        return run.text()
