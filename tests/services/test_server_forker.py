"""Fork servers that a node service has forked for its jobs: they outlive it, and serve as own ones would."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from polling import until

from adaptdl_elastic import _own_python
from adaptdl_elastic.agent.machine.kept_process import KeptProcess
from adaptdl_elastic.agent.runtime.fork_server import ForkServer
from adaptdl_elastic.agent.runtime.forked_child import Command
from adaptdl_elastic.agent.service.server_forker import ServerForker, can_fork
from adaptdl_elastic.protocol.environment import FORK_SERVER

pytestmark = pytest.mark.processes

SCRIPT = """
import logging, os, pathlib, sys, time
logging.basicConfig(level=logging.INFO, format="mine %(message)s")
logging.info("of %s", os.environ["NAME"])
here = pathlib.Path(__file__).resolve().parent
assert sys.path[0] == str(here), sys.path
assert os.getcwd() not in sys.path[1:], sys.path
assert "ADAPTDL_FORK_SERVER" not in os.environ
assert sorted(int(path.name) for path in pathlib.Path("/proc/self/fd").iterdir())[-1] < 20
(here / "begun").touch()
while not (here / "go").exists():
    time.sleep(0.01)
print("over", flush=True)
"""


@pytest.fixture
def forker() -> Iterator[ServerForker]:
    made = ServerForker(os.environ)
    made.prepare()
    yield made
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # it may have ended
            if "adaptdl_elastic.agent'" in " ".join(child.cmdline()):
                child.kill()
                child.wait()
    made.close()  # and waits for the end of the process that forks servers


def agent(forker: ServerForker, folder: Path, *command: str) -> tuple[KeptProcess, Path]:
    log, note = folder / "log", folder / "note"
    options = ["--standalone", f"--checkpoint-path={folder / 'saved'}", "--no-summary"]
    with forker.fork(folder, log) as server:
        given = {**os.environ, "NAME": "the job", "XDG_RUNTIME_DIR": str(folder)}
        given[FORK_SERVER] = str(server.fileno())
        line = _own_python.module("adaptdl_elastic.agent", *options, *command)
        return KeptProcess.start(line, note, log, folder, given, pass_fds=[server.fileno()]), log


def warm(process: psutil.Process) -> psutil.Process:
    """Return the process that forks servers."""
    (server,) = (one for one in process.children() if "fork_server" in " ".join(one.cmdline()))
    return server


def test_a_replica_of_a_forked_server_finds_all_and_outlives_the_process_that_forks_servers(
    forker: ServerForker, tmp_path: Path
) -> None:
    (tmp_path / "code").mkdir()
    script = tmp_path / "code" / "train.py"
    script.write_text(SCRIPT)
    made, log = agent(forker, tmp_path, str(script))
    until("the script does not begin", (tmp_path / "code" / "begun").exists)
    assert not psutil.Process(made.pid).children()[1:], "it has a fork server of its own"
    server = warm(psutil.Process())
    server.send_signal(signal.SIGKILL)
    server.wait(60)
    with forker.fork(tmp_path, log) as connection:  # it is started again
        assert warm(psutil.Process()).pid != server.pid
        other = ForkServer.forked(connection, dict(os.environ))
        other.spawn(1, Command("exec", ("true",), "/"))
        assert other.receive()
        other.close()
    assert made.exit_code is None
    (tmp_path / "code" / "go").touch()
    assert made.wait(200)
    assert made.exit_code == 0, log.read_text()
    assert "mine of the job" in log.read_text()
    assert "over" in log.read_text()


@pytest.mark.exhaustive
def test_an_agent_whose_server_cannot_be_forked_starts_one(forker: ServerForker, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("assert os.getcwd()", "#"))
    (tmp_path / "go").touch()
    os.kill(warm(psutil.Process()).pid, signal.SIGKILL)  # before it has read the request, or after
    made, log = agent(forker, tmp_path, str(script))
    assert made.wait(200)
    assert made.exit_code == 0, log.read_text()


def test_variables_that_are_read_early_need_a_server_of_their_own() -> None:
    assert can_fork({"TOKEN": "x", "OMPI": "y"})
    for name in ("LD_PRELOAD", "PYTHONPATH", "OMP_NUM_THREADS", "CUDA_LAUNCH_BLOCKING", "TZ", "TMPDIR"):
        assert not can_fork({name: "x"})


@pytest.mark.exhaustive
def test_nothing_is_forked_for_a_service_that_has_ended_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = ForkServer.start(dict(os.environ), lasting=True)
    assert server.process is not None
    path, wait, pid = tmp_path / "begun", server.process.wait, server.process.pid
    os.kill(pid, signal.SIGSTOP)  # it reads the request only when the connection is closed

    def go_on(timeout: float) -> None:
        os.kill(pid, signal.SIGCONT)
        wait(timeout)

    monkeypatch.setattr(server.process, "wait", go_on)
    server.spawn(0, Command("exec", ("touch", str(path)), str(tmp_path), dict(os.environ)))
    server.close(200)
    assert not path.exists()
