"""`--once` and `--rest` run every test between them, and no test twice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes
SUPPORT = Path(__file__).resolve().parent / "support"

MIXED = """
import pytest

@pytest.mark.parametrize("case", [1, 2])
def test_pure(case): pass

@pytest.mark.exhaustive
def test_long_replay(): pass

@pytest.mark.processes
@pytest.mark.parametrize("case", [1, 2])
def test_real(case): pass

@pytest.mark.etcd
@pytest.mark.exhaustive
def test_fault(): pass

@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.essential
def test_long(): pass
"""


def collected(folder: Path, *options: str) -> list[str]:
    """The names of the tests that pytest would run."""
    command = [sys.executable, "-m", "pytest", "-p", "quick", "-c", "pytest.ini", "--collect-only", "-q"]
    environment = {**os.environ, "PYTHONPATH": str(SUPPORT)}
    ran = subprocess.run([*command, *options], cwd=folder, env=environment, capture_output=True, text=True)
    return [line.partition("::")[2] for line in ran.stdout.splitlines() if "::" in line]


def test_every_feature_once_and_the_rest(tmp_path: Path) -> None:
    names = ("processes", "etcd", "slow", "gpu", "exhaustive", "essential")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n" + "".join(f"    {name}\n" for name in names))
    (tmp_path / "test_mixed.py").write_text(MIXED)
    assert collected(tmp_path, "--once") == ["test_pure[1]", "test_pure[2]", "test_real[1]", "test_long"]
    assert collected(tmp_path, "--rest") == ["test_long_replay", "test_real[2]", "test_fault"]
    assert collected(tmp_path, "--quick") == ["test_pure[1]", "test_pure[2]"]
    assert collected(tmp_path, "--once", "--rest") == []
