"""`--once` and `--rest` run every test between them, and none twice. No test is skipped unseen in .ci/run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from elastic_run import environment
from warm_agent import suits

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

SKIPPED = """
import pytest

@pytest.fixture
def machine(): pytest.skip("ssh to node1 fails")

def test_asks_for_it(machine): pass

@pytest.mark.skipif(True, reason="RMSprop has no amsgrad")
def test_has_a_listed_reason(): pass

@pytest.mark.skip
def test_has_no_reason(): pass

@pytest.mark.xfail
def test_cannot_do_it_yet(): assert False
"""
TIMED = """
import pytest

@pytest.fixture(scope="session")
def server(): raise AssertionError("it is started")

def test_alone(): pass

def test_asks_a_server(server): pass
"""
FAILS = """
import pathlib
import pytest

@pytest.mark.processes
@pytest.mark.parametrize("case", [1, 2])
def test_second(case): assert case == 1 or pathlib.Path("mended").exists()
"""
MAKEFILE = """
test-all:
	.venv/bin/python -m pytest -q --rest || { touch $(MENDED); false; }
install install-integrations test test-integrations:
"""
WHOLE_MODULE = "import pytest\npytest.importorskip('no_such_package')"


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


def test_a_skip_whose_reason_is_not_listed_fails(tmp_path: Path) -> None:
    (tmp_path / "test_skipped.py").write_text(SKIPPED)
    (tmp_path / "test_whole_module.py").write_text(WHOLE_MODULE)
    (tmp_path / "pytest.ini").touch()
    command = [sys.executable, "-m", "pytest", "-p", "quick", "-n", "1", "-q", "-rfEs", "-c", "pytest.ini"]
    listed = str(SUPPORT.parent / "skips.txt")
    environment = {**os.environ, "PYTHONPATH": str(SUPPORT), "ADAPTDL_TESTS_MAY_SKIP": listed}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.returncode == 1, ran.stdout
    lines = [line for line in ran.stdout.splitlines() if line.startswith(("ERROR", "FAILED", "SKIPPED"))]
    assert [line.partition(" - ")[0] for line in sorted(lines)] == [
        "ERROR test_skipped.py::test_asks_for_it",
        "ERROR test_skipped.py::test_has_no_reason",
        "ERROR test_whole_module.py",
        "SKIPPED [1] test_skipped.py:9: RMSprop has no amsgrad",
    ]
    assert f"skipped, for a reason that {listed} does not list: ssh to node1 fails" in ran.stdout


@pytest.mark.parametrize(("mended", "returned"), [("nothing", 1), ("mended", 0)])
def test_ci_runs_a_failed_case_again_and_believes_only_its_second_result(
    mended: str, returned: int, tmp_path: Path
) -> None:
    for folder in (".ci", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(SUPPORT.parents[1] / ".ci" / "run", tmp_path / ".ci")
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (tmp_path / "Makefile").write_text(MAKEFILE)
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\naddopts = -p quick\nmarkers =\n    processes\n    exhaustive\n"
    )
    (tmp_path / "test_fails.py").write_text(FAILS)
    environment = {**os.environ, "PYTHONPATH": str(SUPPORT), "MENDED": mended}
    ran = subprocess.run([tmp_path / ".ci" / "run"], env=environment, capture_output=True, text=True)
    alone = [line for line in ran.stdout.splitlines() if line.startswith(("again", "passed only"))]
    said = ["again, alone", "passed only alone"][: 2 - returned]
    assert alone == [f"{words}: test_fails.py::test_second[2]" for words in said]
    assert ran.returncode == returned, ran.stdout


@pytest.mark.parametrize(("seconds", "passed"), [(-1, 0), (600, 1)])
def test_after_a_time_of_day_no_test_begins(seconds: int, passed: int, tmp_path: Path) -> None:
    (tmp_path / "test_timed.py").write_text(TIMED)
    (tmp_path / "pytest.ini").touch()
    command = [sys.executable, "-m", "pytest", "-p", "deadline", "-q", "-rs", "-c", "pytest.ini"]
    until = str(time.time() + seconds)
    environment = {**os.environ, "PYTHONPATH": str(SUPPORT), "ADAPTDL_TESTS_UNTIL": until}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ("SKIPPED [2]" in ran.stdout, "1 passed, 1 error" in ran.stdout) == (not passed, bool(passed))
    assert ran.returncode == passed


def test_agents_are_forked_also_after_a_test_has_made_an_optimizer() -> None:
    torch.optim.SGD([torch.zeros(1)], lr=1.0)
    assert suits(environment())
