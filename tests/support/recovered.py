"""Runs of `loop_script` and `recovery_script` in which replicas die, and what they end with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fake_agent
import loop_script_path
import torch

SIZE, BATCH = 600, 12  # 1 to 4 replicas divide it: no uneven window, whose samples would weigh more


def applied(folder: Path, replicas: int, epochs: int = 1, size: int = SIZE) -> None:
    """Every sample was applied exactly once per epoch, and the survivors have the same weights.

    The weights tell: each application moves a sample's own weight by what its window gives it, and those
    of a step that did not commit have left no trace.
    """
    weights = [torch.load(folder / f"weights-{rank}", map_location="cpu") for rank in range(replicas)]
    for other in weights[1:]:
        assert torch.equal(other, weights[0])
    torch.testing.assert_close(-weights[0] * BATCH / epochs, torch.ones(size, dtype=torch.float64))


def train(folder: Path, replicas: int, **given: Any) -> list[Any]:
    """Train with `recovery_script`, in which replicas die; what the others have then."""
    folder.mkdir()
    faults, late = given.get("faults", []), given.pop("late", [])
    with fake_agent.running(loop_script_path.RECOVERY, folder, replicas, **given) as job:
        if late:  # die when all have heard that one of them has missed something
            job.wait_for("peer_lost", replicas)
            job.kill(*late)
        elif faults:
            dead = [job.running[rank] for rank, *_ in faults]
            assert [each.join() for each in dead] == [-9] * len(dead)
            job.running = [each for each in job.running if each not in dead]
        if faults:
            job.plan_recovery()
        job.finish()
        print(job.outputs())
        return [torch.load(folder / f"result-{rank}") for rank in range(len(job.running))]


def as_undisturbed(result: Any, undisturbed: Any) -> None:
    assert result["steps"] == undisturbed["steps"] == result["counted"] == 40
    assert result["samples"] == undisturbed["samples"] == [240, 240]
    for key in ("parameters", "mean", "large", "average"):
        torch.testing.assert_close(result[key], undisturbed[key])
    torch.testing.assert_close(result["optimizer"]["state"], undisturbed["optimizer"]["state"])
    assert result["optimizer"]["param_groups"] == undisturbed["optimizer"]["param_groups"]
    assert (result["scheduler"], result["scaler"]) == (undisturbed["scheduler"], undisturbed["scaler"])


def same(results: list[Any]) -> None:
    """Everything that all replicas must share is bit for bit the same."""
    for key in ("parameters", "optimizer", "scheduler", "scaler", "statistics", "mean"):
        for result in results[1:]:
            assert str(result[key]) == str(results[0][key]), key
    for result in results[1:]:
        torch.testing.assert_close(result["parameters"], results[0]["parameters"], rtol=0, atol=0)
