"""torchdata, HF datasets and Accelerate: every sample once over changes of size, restarts and a death."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import loader_runs
import pytest

KINDS = [
    pytest.param("stateful", {}, marks=pytest.mark.needs("torchdata"), id="StatefulDataLoader"),
    pytest.param(
        "stateful", {"workers": 2}, marks=pytest.mark.needs("torchdata"), id="StatefulDataLoader, 2 workers"
    ),
    pytest.param("hf map", {}, marks=pytest.mark.needs("datasets"), id="datasets.Dataset"),
    pytest.param("hf iterable", {}, marks=pytest.mark.needs("datasets"), id="datasets.IterableDataset"),
    pytest.param(
        "hf iterable",
        {"workers": 2},
        marks=pytest.mark.needs("datasets"),
        id="datasets.IterableDataset, 2 workers",
    ),
    pytest.param("accelerate", {}, marks=pytest.mark.needs("accelerate"), id="Accelerator.prepare"),
]


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_every_sample_once_through_restarts(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    loader_runs.restarts(tmp_path, kind=kind, **options)
    assert loader_runs.handed_out(tmp_path) == loader_runs.once(60)


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_every_sample_once_through_changes_and_a_death(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    loader_runs.changes(tmp_path, kind=kind, **options)
    assert loader_runs.handed_out(tmp_path) == loader_runs.once(loader_runs.CHANGED)
