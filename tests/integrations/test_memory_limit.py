"""The batch size inside Trainers grows by itself, and up to what fits into memory, at the cost of a step."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import framework_runs
import pytest
from commands import ended

SCRIPT = Path(__file__).parent / "scripts" / "memory_limit.py"

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("framework", "steps"),
    [
        pytest.param("lightning", 2000, marks=pytest.mark.needs("lightning")),
        pytest.param("trainer", 1000, marks=pytest.mark.needs("transformers")),
    ],
)
def test_a_trainer_finds_the_memory_limit_by_itself(tmp_path: Path, framework: str, steps: int) -> None:
    given = framework_runs.variables(tmp_path, ADAPTDL_REPORT_INTERVAL="0.2")
    given |= {"ADAPTDL_CHECKPOINT_PATH": str(tmp_path / "saved"), "ADAPTDL_CHECKPOINT_INTERVAL": "0"}
    done = ended(
        [sys.executable, str(SCRIPT), framework], tmp_path, env={**framework_runs.environment(), **given}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    passes = dict(found["passes"])
    assert found["steps"] == steps
    assert passes[16] > steps / 4, "it grew"
    assert sum(count for samples, count in passes.items() if samples > 24) == 1, "one pass did not fit"
