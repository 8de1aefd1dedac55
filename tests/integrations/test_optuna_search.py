"""`examples/optuna_search.py` with real Optuna and real jobs of this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from commands import ended

pytestmark = [
    pytest.mark.needs("optuna"),
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.timeout(600),
]

EXAMPLES = Path(__file__).parents[2] / "examples"
PATIENCE = 200.0  # seconds that a slow and busy machine may need for the end of a process
TRAIN = """
import os, pathlib, sys, time, torch
import adaptdl_elastic.torch as adl
trial = int(os.environ["TORCHELASTIC_RUN_ID"].rpartition("-")[2])
adl.init_process_group("gloo")
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model = adl.AdaptiveDataParallel(model, optimizer)
loader = adl.AdaptiveDataLoader(torch.utils.data.TensorDataset(torch.randn(64, 4)), batch_size=16)
for epoch in adl.remaining_epochs_until(2):
    for (a,) in loader:
        optimizer.zero_grad()
        model(a).square().mean().backward()
        optimizer.step()
    adl.report(loss=trial + 1 - epoch / 2)
    if trial == 0:
        pathlib.Path(os.environ["OUT"], "hangs").touch()
        time.sleep(10000)
    if trial == 1:
        raise SystemExit("this rate is refused")
"""
SEARCH = """
import os, pathlib, sys
sys.path.insert(0, os.environ["EXAMPLES"])
import optuna_search
# The first trial begins at 0 and is at its limit once it hangs. No other trial comes to its limit.
times = iter([0.0])
hangs = pathlib.Path(os.environ["OUT"], "hangs")
optuna_search.main(lambda: next(times, 3700.0 if hangs.exists() else 1800.0))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder with the script; end what a test that has failed left running."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "search.py").write_text(SEARCH)
    yield tmp_path
    for process in jobs(tmp_path):
        process.kill()


def jobs(folder: Path) -> list[psutil.Process]:
    """Processes of trials: those that have this test's folder in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("OUT") == str(folder):
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_a_search_goes_on_when_a_trial_hangs_and_one_fails(folder: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ran = ended(
        [sys.executable, "search.py", "--trials=5", "--parallel=2", "train.py"],
        folder,
        env={**os.environ, "PATH": path, "OUT": str(folder), "EXAMPLES": str(EXAMPLES)},
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = ran.stdout.splitlines()
    ends = sorted(line.split(":")[0] for line in lines if "exit code" in line)
    assert ends == ["search-0 FAIL", "search-1 FAIL", *(f"search-{n} COMPLETE" for n in (2, 3, 4))], (
        ran.stdout
    )
    assert "search-0 is stopped: it is not done after 3600 s" in lines
    assert lines[-1].startswith("best: search-2, loss 2.5, "), "the last value of each trial counts"
    _, left = psutil.wait_procs(jobs(folder), timeout=PATIENCE)
    assert not left, "the search waits for the jobs that it ends"
