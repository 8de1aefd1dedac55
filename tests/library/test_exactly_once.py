"""Every sample is applied exactly once per epoch, whatever happens to the number of replicas."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import zip_longest
from pathlib import Path
from typing import Any

import generations
import loop_script_path
import pytest
import torch

pytestmark = pytest.mark.processes


class Job:
    """One job through its generations."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder, self.settings = folder, settings

    def run(self, replicas: int, stop: tuple[int, str, int, int] | None = None, **more: Any) -> None:
        settings = {**self.settings, **more, "stop": stop}
        code = 143 if stop else 0
        generations.run_settings(loop_script_path.PATH, replicas, self.folder, code, **settings)

    def handed_out(self, epoch: int, loop: str = "train") -> Counter[int]:
        """How often every sample was handed out so that it counts."""
        count: Counter[int] = Counter()
        for line in generations.records(self.folder):
            if line["loop"] == loop and line["epoch"] == epoch:
                count.update(line["samples"][: line["local"]])
        return count

    def weights(self, replicas: int) -> torch.Tensor:
        """The final weights, which must be the same on every replica."""
        found = [torch.load(self.folder / f"weights-{rank}") for rank in range(replicas)]
        for other in found[1:]:
            assert torch.equal(found[0], other)
        return found[0]

    def check(self, replicas: int, epochs: int = 1) -> None:
        size, batch = self.settings.get("size", 61), self.settings.get("batch", 8)
        for epoch in range(epochs):
            assert self.handed_out(epoch) == Counter(range(size))
        applied = torch.zeros(size, dtype=torch.float64)
        for line in generations.records(self.folder):
            if line["loop"] == "train":  # LinearScale never makes a learning rate smaller
                applied[line["samples"][: line["local"]]] += max(1.0, line["window"] / batch) / line["window"]
        torch.testing.assert_close(-self.weights(replicas), applied)


@pytest.fixture
def job(tmp_path: Path) -> Any:
    return lambda **settings: Job(tmp_path, **settings)


@pytest.mark.parametrize(("replicas", "size"), [(3, 61), (1, 61), (3, 2)])
def test_without_any_change(job: Any, replicas: int, size: int) -> None:
    """Also with fewer samples than replicas."""
    run = job(size=size, epochs=2)
    run.run(replicas)
    run.check(replicas, epochs=2)


Stop = tuple[int, str, int, int]
GENERATIONS: dict[str, tuple[dict[str, Any], list[tuple[int, Stop]], int]] = {
    "in a training loop": (
        {"evaluate": 1}, [(1, (0, "train", 0, 2)), (2, (1, "train", 0, 1)), (3, (2, "train", 0, 1))], 1
    ),
    "in an evaluation loop": (
        {"evaluate": 1, "epochs": 2}, [(2, (1, "evaluate", 0, 2)), (3, (0, "evaluate", 1, 1))], 1
    ),
    "when 2 of 10 samples are left": ({"size": 10}, [(1, (0, "train", 0, 1))], 3),
    "with persistent workers": (
        {"workers": 2, "persistent": True, "epochs": 2}, [(2, (0, "train", 1, 2))], 1
    ),
    "without a seed": ({"seed": None}, [(2, (0, "train", 0, 3))], 1),
}  # fmt: skip
"""Settings, replicas and stop of each generation, and the replicas of the last one."""


@pytest.mark.slow
@pytest.mark.parametrize("name", GENERATIONS)
def test_through_several_generations(job: Any, name: str) -> None:
    settings, stopped, last = GENERATIONS[name]
    run, epochs = job(**settings), settings.get("epochs", 1)
    for replicas, stop in stopped:
        run.run(replicas, stop=stop)
    run.run(last)
    run.check(last, epochs)
    for epoch in range(epochs if settings.get("evaluate") else 0):
        assert run.handed_out(epoch, "evaluate") == Counter(range(61))


@pytest.mark.slow
def test_stopped_in_the_middle_of_an_accumulation(job: Any) -> None:
    run = job(accumulate=3, size=50, batch=16)
    run.run(2, stop=(1, "train", 0, 3))
    run.run(1, stop=(0, "train", 0, 2))
    run.run(3)
    run.check(3)
    windows = [line for line in generations.records(run.folder) if line["loop"] == "train"]
    assert any(not line["optim"] for line in windows), "nothing was accumulated"


@pytest.mark.exhaustive
def test_the_order_is_the_same_on_any_number_of_replicas(job: Any, tmp_path: Path) -> None:
    """Position k of the epoch's order is the same sample whoever gets it."""

    def order(folder: Path) -> list[int]:
        chunks: dict[int, dict[int, list[int]]] = defaultdict(dict)
        for line in generations.records(folder):
            if line["loop"] == "train" and line["epoch"] == 0 and line["local"]:
                chunks[line["index"]][line["rank"]] = line["samples"]
        shares = [[chunks[index][rank] for rank in sorted(chunks[index])] for index in sorted(chunks)]
        rows = [row for share in shares for row in zip_longest(*share)]
        return [sample for row in rows for sample in row if sample is not None]

    orders = []
    for replicas in (1, 3):
        folder = tmp_path / str(replicas)
        folder.mkdir()
        Job(folder).run(replicas)
        orders.append(order(folder))
    assert orders[0] == orders[1] != sorted(orders[0])
