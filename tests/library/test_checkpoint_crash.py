from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from commands import ended

pytestmark = pytest.mark.processes

DRIVER = Path(__file__).parent.parent / "support" / "crash_save.py"


def test_killed_at_any_point_of_a_save_a_loadable_checkpoint_is_left(tmp_path: Path) -> None:
    run = ended([sys.executable, str(DRIVER), str(tmp_path / "saved")], timeout=250)
    assert run.returncode == 0, run.stderr
    kills = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(kills) > 20  # it did die that often
    assert all(kill["after"] in (kill["before"], kill["saved"]) for kill in kills)
    outcomes = [kill["after"] == kill["saved"] for kill in kills]
    assert outcomes == sorted(outcomes)  # there is one point from which on it is there
    assert not outcomes[0]
    assert outcomes[-1]
    left = sorted(path.name for path in (tmp_path / "saved").iterdir())
    assert len(left) == 2  # the last, undisturbed save has cleaned up after all others
