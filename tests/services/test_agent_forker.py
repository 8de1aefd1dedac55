"""Agents that a node service forks: they outlive what has forked them, and find what a program would."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest
from polling import until

from adaptdl_elastic.agent.runtime.fork_server import ForkServer
from adaptdl_elastic.agent.runtime.forked_child import Command
from adaptdl_elastic.agent.service.agent_forker import AgentForker, can_fork

pytestmark = pytest.mark.processes

SCRIPT = """
import logging, os, pathlib, sys, time
logging.basicConfig(level=logging.INFO, format="mine %(message)s")
logging.info("of %s", os.environ["NAME"])
here = pathlib.Path(__file__).resolve().parent
assert sys.path[0] == str(here), sys.path
assert os.getcwd() not in sys.path[1:], sys.path
assert sorted(int(path.name) for path in pathlib.Path("/proc/self/fd").iterdir())[-1] < 20
(here / "begun").touch()
while not (here / "go").exists():
    time.sleep(0.01)
print("over", flush=True)
"""


@pytest.fixture
def forker() -> Iterator[AgentForker]:
    made = AgentForker(os.environ, lambda: None)
    made.prepare()
    yield made
    made.close()  # and waits for the end of the process that forks agents


def agent(
    forker: AgentForker, folder: Path, *command: str, environment: Mapping[str, str] = os.environ
) -> tuple[object, Path]:
    log = folder / "log"
    options = ["--standalone", f"--checkpoint-path={folder / 'saved'}", "--no-summary"]
    given = {**environment, "NAME": "the job", "XDG_RUNTIME_DIR": str(folder)}
    return forker.start([*options, *command] if command else ["--version"], folder, log, given), log


def test_a_job_of_a_forked_agent_finds_what_a_program_would(forker: AgentForker, tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    script = tmp_path / "code" / "train.py"
    script.write_text(SCRIPT)
    (tmp_path / "code" / "go").touch()
    made, log = agent(forker, tmp_path, str(script))
    made.wait(200)  # type: ignore[attr-defined]
    assert made.poll() == 0, log.read_text()  # type: ignore[attr-defined]
    assert "mine of the job" in log.read_text()
    assert "over" in log.read_text()


def test_an_agent_outlives_the_process_that_has_forked_it(forker: AgentForker, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("assert os.getcwd()", "#"))
    made, log = agent(forker, tmp_path, str(script))
    until("the script does not begin", (tmp_path / "begun").exists)
    (server,) = (one for one in psutil.Process().children() if "fork_server" in " ".join(one.cmdline()))
    server.send_signal(signal.SIGKILL)
    server.wait(60)
    other, _ = agent(forker, tmp_path)  # it is started again
    other.wait(200)  # type: ignore[attr-defined]
    assert other.poll() == 0  # type: ignore[attr-defined]
    assert made.poll() is None  # type: ignore[attr-defined]
    (tmp_path / "go").touch()
    made.wait(200)  # type: ignore[attr-defined]
    assert "over" in log.read_text()


def test_variables_that_are_read_early_need_an_agent_of_their_own() -> None:
    assert can_fork({"TOKEN": "x", "OMPI": "y"})
    for name in ("LD_PRELOAD", "PYTHONPATH", "OMP_NUM_THREADS", "CUDA_LAUNCH_BLOCKING", "TZ", "TMPDIR"):
        assert not can_fork({name: "x"})


def test_nothing_is_forked_for_a_service_that_has_ended_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = ForkServer.start(dict(os.environ), lasting=True)
    path, wait = tmp_path / "begun", server.process.wait
    os.kill(server.process.pid, signal.SIGSTOP)  # it reads the request only when the connection is closed

    def go_on(timeout: float) -> None:
        os.kill(server.process.pid, signal.SIGCONT)
        wait(timeout)

    monkeypatch.setattr(server.process, "wait", go_on)
    server.spawn(0, Command("exec", ("touch", str(path)), str(tmp_path), dict(os.environ), independent=True))
    server.close(200)
    assert not path.exists()
