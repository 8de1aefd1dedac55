"""`ElasticAgent.run` with a WorkerSpec of torch: real replicas on this machine."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from elastic_run import environment
from polling import until
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from torch.distributed.elastic.rendezvous import RendezvousParameters
from warm_agent import WarmAgent

from adaptdl_elastic.rendezvous.torchrun import create_handler, elastic_agent
from adaptdl_elastic.rendezvous.torchrun.elastic_agent import ElasticAgent

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.exhaustive, pytest.mark.processes, pytest.mark.slow]

SUM = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
given = torch.tensor(dist.get_rank() + 1)
dist.all_reduce(given)
open(f"sum-{dist.get_rank()}", "w").write(f"{given.item()} {os.environ['ROLE_NAME']}")
"""
FAIL = """
import os, torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    raise ValueError("no such sample")
dist.barrier()
"""
WAIT = "import time; open('started', 'w').close(); time.sleep(100)"


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def agent(text: str, **fields: Any) -> ElasticAgent:
    """The agent of two replicas that run a text; `torchrun` gives such a command."""
    Path("script.py").write_text(text)
    handler = create_handler(RendezvousParameters("adaptdl-etcd", "localhost:2379", "job", 1, 1))
    command = {"entrypoint": sys.executable, "args": ("-u", "script.py")}
    spec = WorkerSpec("trainer", 2, handler, **{"max_restarts": 0, **command, **fields})
    return ElasticAgent(spec, ("--no-summary",), "logs")


class Warm(WarmAgent):
    """The agent that `ElasticAgent` starts, forked."""

    def __init__(self, command: list[str], start_new_session: bool) -> None:
        assert start_new_session
        output = Path("output")
        super().__init__(command[3:], Path.cwd(), environment(**os.environ), output, output)
        self.terminate = self.kill


@pytest.fixture
def _warm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic_agent, "subprocess", SimpleNamespace(Popen=Warm))


@pytest.mark.essential
def test_a_script_that_succeeds_gives_a_result_without_failures() -> None:
    """As the page for torchrun's users shows it, with a script that has no arguments."""
    page = (ROOT / "docs" / "howto" / "from-torchrun.md").read_text()
    (block,) = re.findall(r"^```python test=test_elastic_agent\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    Path("train.py").write_text(SUM)
    found: dict[str, Any] = {}
    exec(block, found)
    assert found["result"] == RunResult(WorkerState.SUCCEEDED)
    assert [Path(f"sum-{rank}").read_text() for rank in (0, 1)] == ["3 default"] * 2


@pytest.mark.usefixtures("_warm")
def test_a_script_that_fails_gives_the_failure_of_its_replica() -> None:
    runner = agent(FAIL)
    assert runner.get_worker_group().state is WorkerState.INIT
    result = runner.run()
    assert result.state is runner.get_worker_group().state is WorkerState.FAILED
    ((rank, failure),) = result.failures.items()
    assert (rank, failure.local_rank, failure.exitcode) == (1, 1, 1)
    assert failure.error_file_data["message"]["message"] == "ValueError: no such sample"
    assert Path(failure.error_file).exists()


@pytest.mark.usefixtures("_warm")
def test_a_program_that_is_not_python_runs_as_it_is() -> None:
    result = agent("", entrypoint="sh", args=("-c", "exit $((3 * RANK))")).run()
    assert {rank: failure.exitcode for rank, failure in result.failures.items()} == {1: 3}


@pytest.mark.usefixtures("_warm")
def test_a_job_that_cannot_start_raises_an_error_with_the_reason() -> None:
    with pytest.raises(RuntimeError, match="stderr says why"):
        agent(SUM, args=("missing.py",)).run()


@pytest.mark.usefixtures("_warm")
def test_sigterm_stops_the_job() -> None:
    def stop() -> None:
        until("the script has not started", Path("started").exists)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    before = signal.getsignal(signal.SIGTERM)
    assert agent(WAIT).run() == RunResult(WorkerState.STOPPED)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.essential
def test_a_function_is_refused() -> None:
    with pytest.raises(ValueError, match="is a function: give a command"):
        agent("", entrypoint=print)
