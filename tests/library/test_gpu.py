"""Changes in place on a GPU: the real thing of what test_deferred.py has an equivalent of."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import fake_agent
import generations
import loop_script_path
import pytest
import torch
from fake_agent import FakeAgent
from recovered import applied

from adaptdl_elastic._private import runtime_directories
from adaptdl_elastic.torch._process_group import selftest

ROOT = Path(__file__).resolve().parents[2]
CHECKS = ROOT / "benchmarks" / "gpu_checks.py"
SCRIPT = ROOT / "tests" / "support" / "deferred_script.py"
VISIBLE = torch.cuda.device_count()

one = pytest.mark.skipif(VISIBLE < 1, reason="no CUDA device is visible")


@pytest.mark.gpu
@one
@pytest.mark.parametrize("check", ["self_test", "made_anew", "newcomer", "state_transfer"])
def test_the_checks_for_one_gpu_pass(check: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(CHECKS), "--only", check]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu
@one
def test_a_death_and_changes_of_size_with_nccl(tmp_path: Path) -> None:
    """On one GPU both ranks share it, with a host id of their own each."""
    assert selftest.verdict("nccl", runtime_directories({"XDG_RUNTIME_DIR": str(tmp_path)})[0]) is None
    loop = fake_agent.settings(size=2004, batch=12, pace=0.01, epochs=2)
    variables = {"LOOP": loop, "OUT": str(tmp_path), "SCRIPT": str(loop_script_path.PATH), "BACKEND": "nccl"}
    variables |= {"PYTHONPATH": f"{SCRIPT.parent}:{ROOT}", "XDG_RUNTIME_DIR": str(tmp_path)}
    with FakeAgent(SCRIPT, tmp_path, **variables) as job:
        job.start(2)
        job.wait_for("resilient", 2)
        job.recover(1)
        job.rescale(2)
        job.wait_for("step")
        job.rescale(1)
        job.rescale(2)
        job.finish()
    applied(tmp_path, 2, epochs=2)


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/gpu_checks.py, on the deferred backend: its own logic needs no GPU."""
    monkeypatch.syspath_prepend(str(CHECKS.parent))
    importlib.import_module("deferred_backend")
    return importlib.import_module("gpu_checks")


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("made_anew", {"backend": "deferred", "times": 20}),
        ("newcomer", {"backend": "deferred"}),
        ("state_transfer", {"device": "cpu"}),
    ],
)
def test_the_checks_hold_where_they_need_no_gpu(checks: Any, name: str, given: dict[str, Any]) -> None:
    assert getattr(checks, name)(**given)["seconds"] > 0.0


@pytest.mark.processes
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "check",
    [
        *("same_trajectory_as_ddp", "same_statistics_as_on_the_cpu", "grad_scaler_skips_inf", "peak_memory"),
        *("gpt2_step", "resnet50_step", "checkpoint_stalls", "self_test", "ranks_10m"),
    ],
)
def test_a_check_runs_on_a_cpu_at_a_tiny_size(tmp_path: Path, check: str) -> None:
    done = generations.run_alone(CHECKS, tmp_path, "--device", "cpu", "--only", check)
    assert done.code == 0, done.output


@pytest.mark.processes
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import time; print('begun', flush=True); time.sleep(1000)", "it did not end within 2 s"),
        ("import os; os.abort()", "it ended with code -6"),
        ("import sys; open(sys.argv[2], 'w').write('{\"ok\": tr')", "it ended with code 0"),
    ],
)
def test_a_check_that_hangs_or_crashes_is_one_that_failed(checks: Any, code: str, expected: str) -> None:
    found = checks.run_apart([sys.executable, "-c", code], 2.0)
    assert (found["ok"], found["error"]) == (False, expected)


@pytest.mark.processes
def test_the_result_of_a_check_is_read_from_its_process(checks: Any) -> None:
    code = "import sys; open(sys.argv[2], 'w').write('{\"ok\": true, \"bytes\": 7}\\n')"
    found = checks.run_apart([sys.executable, "-c", code], 60.0)
    assert (found["ok"], found["bytes"]) == (True, 7)
