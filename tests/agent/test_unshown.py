"""A run outlives its terminal, the reader of its output, and the disk of its log."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from elastic_run import PATIENCE, ElasticRun, environment

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(600)]

# it prints itself in every step
SCRIPT = """
import sys, time
import torch
import adaptdl_elastic.torch as adl
adl.init_process_group("gloo")
net = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
model = adl.AdaptiveDataParallel(net, optimizer)
loader = adl.AdaptiveDataLoader(torch.randn(64, 2), batch_size=8)
for epoch in adl.remaining_epochs_until(int(sys.argv[1])):
    for batch in loader:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        print("a step", flush=True)
        print("a step", file=sys.stderr, flush=True)
        time.sleep(0.02)
"""


def opened(kind: str, folder: Path) -> tuple[Path, list[int]]:
    """Return what to write to, and the descriptors to close so that writing fails from then on."""
    if kind == "full disk":
        return Path("/dev/full"), []
    if kind == "terminal":
        read, write = pty.openpty()
        return Path(os.ttyname(write)), [read, write]
    os.mkfifo(folder / "pipe")
    return folder / "pipe", [os.open(folder / "pipe", os.O_RDONLY | os.O_NONBLOCK)]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "number"), [("pipe", signal.SIGINT), ("terminal", signal.SIGHUP), ("full disk", signal.SIGTERM)]
)
def test_a_run_that_cannot_be_seen_survives_a_death_and_saves_when_it_is_stopped(
    tmp_path: Path, kind: str, number: signal.Signals
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    place, ends = opened(kind, tmp_path)
    arguments = ["--standalone", "--nproc-per-node=2", "--rdzv-id=job", "--log-dir=logs", "script.py", "1000"]
    with ElasticRun(arguments, tmp_path, terminal=place) as run:
        pids = run.wait_for_event("started")["pids"]
        assert not ends or select.select(ends[:1], [], [], PATIENCE)[0]
        for end in ends:
            os.close(end)
        first = run.wait_for_event("generation")
        os.kill(pids["1"], signal.SIGKILL)
        run.wait_for_event("replica_lost")
        run.wait_for(lambda event: event["event"] == "generation" and event != first)
        run.process.send_signal(number)
        assert run.wait() == 143
        assert run.of("checkpoint")[-1]["kind"] == "stop"
        assert not run.of("failure")
    (unshown,) = (tmp_path / "logs").glob("job_*/unshown.log")
    assert f"{number.name}: saving and stopping" in unshown.read_text()


def test_a_run_without_standard_streams_is_done(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "adaptdl_elastic.agent", "--standalone", "script.py", "1"]
    run = subprocess.run(
        ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command],
        cwd=tmp_path,
        env=environment(XDG_RUNTIME_DIR=str(tmp_path)),
        timeout=PATIENCE,
        check=False,
    )
    assert run.returncode == 0
