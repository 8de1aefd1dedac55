"""Ctrl-C at the terminal is KeyboardInterrupt in the script of rank 0, after the checkpoint."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from elastic_run import ElasticRun

pytestmark = [pytest.mark.exhaustive, pytest.mark.processes, pytest.mark.timeout(600)]

SCRIPT = """
import sys, time, torch
from pathlib import Path
import adaptdl_elastic.torch as adl

adl.init_process_group("gloo")
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model = adl.AdaptiveDataParallel(model, optimizer)
loader = adl.AdaptiveDataLoader(torch.ones(100, 1), batch_size=4)
def train():
    for epoch in adl.remaining_epochs_until(10**6):
        for x in loader:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            time.sleep(0.01)
def saw(name):
    Path(f"{name}-{adl.rank()}").write_text(" ".join(sorted(p.name for p in Path("saved").iterdir())))
try:
    train()
except KeyboardInterrupt as error:
    saw("KeyboardInterrupt")
    ENDING
    print("ends", flush=True)
except SystemExit:
    saw("SystemExit")
    raise
"""
OPTIONS = (
    "--standalone",
    "--rdzv-id=job",
    "--no-autoscale",
    "--checkpoint-path=saved",
    "--checkpoint-interval=600",
)
TWO, SOON = ("--nproc-per-node=2",), ("--checkpoint-timeout=3",)
ENDINGS = {
    "saves": "torch.save(model.module.state_dict(), 'own.pt')",
    "uncaught": "raise",
    "raises another": "raise KeyboardInterrupt('by hand') from None",
    "exits with a text": "sys.exit('interrupted by hand')",
    "ignores all": "while True:\n        try: train()\n        except BaseException: pass",
}


def started(directory: Path, ending: str, *options: str) -> ElasticRun:
    (directory / "script.py").write_text(SCRIPT.replace("ENDING", ending))
    return ElasticRun([*OPTIONS, *options, "script.py"], directory)


@pytest.mark.parametrize(
    ("ending", "options"),
    [
        pytest.param("saves", TWO, marks=pytest.mark.essential),
        ("uncaught", ("--no-python", sys.executable)),
        ("raises another", ()),
        ("exits with a text", TWO),
        ("ignores all", (*TWO, *SOON)),
    ],
)
def test_a_script_may_end_as_it_likes_after_an_interrupt(
    tmp_path: Path, ending: str, options: tuple[str, ...]
) -> None:
    with started(tmp_path, ENDINGS[ending], *options) as run:
        run.wait_for_event("epoch")
        run.interrupt()
        assert run.wait() == 143, run.text()
        assert "Traceback" not in run.text()
        assert "this error" not in run.text()
        assert not run.of("failure")
        assert [e["reason"] for e in run.of("exit")] == ["stopped: SIGINT"], run.text()
    # the checkpoint of the stop comes before the script's own
    lock, saved, *more = (tmp_path / "KeyboardInterrupt-0").read_text().split()
    assert (lock, saved[:16], more) == (".adaptdl-lock", "00000001-g00000-", [])
    assert not [*tmp_path.glob("KeyboardInterrupt-[1-9]")]
    assert (tmp_path / "own.pt").exists() == (ending == "saves")


@pytest.mark.parametrize("how", ["SIGTERM", "stop"])
def test_another_stop_is_no_interrupt(tmp_path: Path, how: str) -> None:
    with started(tmp_path, "raise") as run:
        run.wait_for_event("epoch")
        if how == "SIGTERM":
            run.process.send_signal(signal.SIGTERM)
        else:
            assert run.adaptdl("stop", "job").returncode == 0
        assert run.wait() == 143, run.text()
    assert (tmp_path / "SystemExit-0").exists()
    assert not [*tmp_path.glob("KeyboardInterrupt-*")]
