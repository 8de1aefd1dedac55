"""`adaptdl sweep` with real Optuna, real agents and a study that survives the death of the search."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

pytestmark = [
    pytest.mark.needs("optuna"),
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.timeout(900),
]

TRAIN = """
import os, sys, time, torch
import adaptdl_elastic.torch as adl
rate, slow = float(sys.argv[1]), sys.argv[2] == "slow"
adl.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=rate)
model = adl.AdaptiveDataParallel(model, optimizer)
x = torch.randn(3200 if slow else 64, 4)
loader = adl.AdaptiveDataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16)
for epoch in adl.remaining_epochs_until(4):
    for a, b in loader:
        optimizer.zero_grad()
        loss = (model(a) - b).square().mean()
        loss.backward()
        optimizer.step()
        if slow and epoch >= 1 and not os.path.exists("go-on"):
            open("in-epoch-1", "w").close()
            time.sleep(len(a) / 32)  # a step that takes long, so that the search is killed in the middle
    if rate > 90:
        raise SystemExit("this rate is refused")
    adl.report(loss=loss)
"""
STUDY = """
import optuna, os
study = optuna.create_study(
    study_name="rates", storage="sqlite:///rates.db", load_if_exists=True,
    sampler=optuna.samplers.GridSampler({"rate": [float(r) for r in os.environ["RATES"].split()]}, seed=0),
)
def command(trial):
    return ["train.py", trial.suggest_float("rate", 0.001, 100.0), os.environ.get("SPEED", "fast")]
"""
PATIENCE = 300.0  # seconds that a slow and busy machine may need for a program of Optuna or torch
PACE = '"slow" if trial.number else "fast"'


def sweep(folder: Path, *options: str, **variables: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "adaptdl_elastic.autoscaler", "sweep", "study.py", *options]
    return subprocess.Popen(
        command, cwd=folder, env={**os.environ, **variables},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder with the script and the study; end what the test left running."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "study.py").write_text(STUDY)
    before = set(psutil.Process().children(recursive=True))
    yield tmp_path
    left = [one for one in psutil.Process().children(recursive=True) if one not in before]
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=60)


def test_the_best_rate_is_found_and_a_trial_that_fails_is_one_line(folder: Path) -> None:
    search = sweep(folder, "--trials", "3", RATES="0.01 0.1 99")
    output, _ = search.communicate(timeout=300)
    assert search.returncode == 0, output
    assert "failed with exit code" in output
    assert "3 trials: " in output
    assert "1 fail" in output
    assert "with rate=0.1\n" in output
    output, _ = sweep(folder, "--trials", "3", RATES="0.01 0.1 99").communicate(timeout=PATIENCE)
    assert "train.py" not in output, "the study has its trials already"


def test_a_search_that_is_killed_goes_on_with_its_trial(folder: Path) -> None:
    search = sweep(folder, "--trials", "1", SPEED="slow", RATES="0.1")
    deadline = time.monotonic() + PATIENCE
    while not (folder / "in-epoch-1").exists():
        assert search.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    agents = psutil.Process(search.pid).children()
    search.kill()
    search.communicate()
    _, alive = psutil.wait_procs(agents, timeout=60)
    assert not alive, "trials save and end with the search"
    (folder / "go-on").touch()
    again = sweep(folder, "--trials", "1", SPEED="slow", RATES="0.1")
    output, _ = again.communicate(timeout=200)
    assert again.returncode == 0, output
    assert "goes on where it was interrupted" in output
    assert "1 complete" in output


def test_an_interrupt_saves_and_says_how_to_go_on(folder: Path) -> None:
    search = sweep(folder, "--trials", "1", SPEED="slow", RATES="0.1")
    deadline = time.monotonic() + PATIENCE
    while not (folder / "in-epoch-1").exists():
        assert search.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    search.send_signal(signal.SIGINT)
    output, _ = search.communicate(timeout=PATIENCE)
    assert search.returncode == 1
    assert "the same command goes on" in output


def test_trials_share_slots_and_the_last_one_gets_what_others_leave(folder: Path) -> None:
    """Two trials of up to three replicas on three slots; a slow one goes on when the other has ended."""
    (folder / "study.py").write_text(STUDY.replace('os.environ.get("SPEED", "fast")', PACE))
    # Slow from the start: steps that became slower at a change of size would look as if the size had made
    # them so. And so slow that what replicas save exceeds what they wait for each other on a loaded machine.
    script = TRAIN.replace("epoch >= 1 and ", "").replace("len(a) / 32", "len(a) / 8")
    (folder / "train.py").write_text(script)
    search = sweep(
        folder, "--trials", "2", "--parallel", "2", "--slots", "3", "--replicas", "1:3", RATES="0.01 0.1"
    )
    logs = [folder / f".adaptdl/sweeps/rates/rates-{number}.events.jsonl" for number in (0, 1)]
    deadline = time.monotonic() + 400
    while not any(3 in sizes(log) for log in logs):
        assert search.poll() is None, search.communicate()[0]
        assert time.monotonic() < deadline, [sizes(log) for log in logs]
        time.sleep(0.1)
    (folder / "go-on").touch()
    output, _ = search.communicate(timeout=200)
    assert search.returncode == 0, output
    assert "2 complete" in output
    assert sum(max(sizes(log)) == 3 for log in logs) == 1, "while both ran, there were no three slots for one"


def sizes(log: Path) -> list[int]:
    """The numbers of replicas that a trial had."""
    lines = log.read_text().splitlines() if log.exists() else []
    events = [json.loads(line) for line in lines if '"event": "generation"' in line and line.endswith("}")]
    return [event["replicas"] for event in events]
