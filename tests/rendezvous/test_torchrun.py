"""The plug-in with torch's own agent: real processes, a real etcd."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from etcd_server import EtcdServer
from guarded_etcd import GuardedEtcd
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters

from adaptdl_elastic.rendezvous.store.connect import connect
from adaptdl_elastic.rendezvous.torchrun import create_handler

SCRIPT = Path(__file__).parents[1] / "support" / "torchrun_script.py"
# as SCRIPT, without torch: what the agents make of each other does not depend on it
LIGHT = """
import os, sys, time
from pathlib import Path
log, stop = map(Path, sys.argv[1:])
with log.open("a", buffering=1) as lines:
    for step in range(0, 10**9, 10):
        lines.write(f"{os.getpid()} {os.environ['RANK']} {os.environ['WORLD_SIZE']} {step}\\n")
        time.sleep(0.05)
        if stop.exists():
            break
"""
pytestmark = [pytest.mark.exhaustive, pytest.mark.etcd, pytest.mark.slow, pytest.mark.timeout(400)]


@dataclass
class Run:
    """Agents of one run id, and the log that their workers write."""

    folder: Path
    server: EtcdServer
    agents: list[subprocess.Popen[str]] = field(default_factory=list)
    environ: dict[str, str] = field(default_factory=dict)  # of the agents, beside this process's
    script: Path = SCRIPT

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def agent(self, *options: str, nnodes: str = "1:3", max_restarts: int = 3) -> subprocess.Popen[str]:
        number = len(self.agents)
        with (self.folder / f"agent{number}").open("w") as output:
            agent = subprocess.Popen(
                [
                    *(sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=adaptdl-etcd"),
                    *(f"--rdzv-endpoint={self.server.endpoint}", "--rdzv-id=job", f"--nnodes={nnodes}"),
                    *("--nproc-per-node=1", f"--max-restarts={max_restarts}"),
                    *("--rdzv-conf=last_call_timeout=1", *options),
                    *(str(self.script), str(self.log), str(self.folder / "stop")),
                ],
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                # torch writes its own logs to TMPDIR
                env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.folder), **self.environ},
            )
        self.agents.append(agent)
        return agent

    def said(self, number: int) -> str:
        return (self.folder / f"agent{number}").read_text()

    def lines(self) -> list[tuple[int, int, int, int]]:
        if not self.log.exists():
            return []
        whole = self.log.read_text().rpartition("\n")[0].splitlines()
        return [tuple(map(int, line.split())) for line in whole]  # type: ignore[misc]

    def wait_for(self, what: str, condition: Callable[[], bool], timeout: float = 120.0) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                said = "\n".join(f"--- agent {n}\n{self.said(n)[-2000:]}" for n in range(len(self.agents)))
                pytest.fail(f"waited {timeout} s for {what}; last lines: {self.lines()[-4:]}\n{said}")
            time.sleep(0.02)

    def wait_for_size(self, size: int, timeout: float = 120.0) -> None:
        """All ranks of a world of this size take part in steps, with nothing older in between."""
        before = len(self.lines())

        def steps() -> bool:
            new = self.lines()[before:]
            return {rank for _, rank, world, step in new if world == size and step >= 10} == set(range(size))

        self.wait_for(f"a world of {size}", steps, timeout)

    def finish(self) -> list[int]:
        (self.folder / "stop").touch()
        return [agent.wait(120) for agent in self.agents]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with EtcdServer() as server:
        yield from cleaned_up(Run(tmp_path, server))


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[GuardedEtcd]:
    with GuardedEtcd(tmp_path / "etcd") as server:
        yield server


@pytest.fixture
def guarded_run(guarded: GuardedEtcd, tmp_path: Path) -> Iterator[Run]:
    (tmp_path / "run").mkdir()
    yield from cleaned_up(Run(tmp_path / "run", guarded.etcd, environ=guarded.environ))


def cleaned_up(run: Run) -> Iterator[Run]:
    """Yield a run, and see that nothing of it is left."""
    try:
        yield run
    finally:
        workers: list[psutil.Process] = []
        for agent in run.agents:
            with suppress(psutil.NoSuchProcess):
                workers += psutil.Process(agent.pid).children(recursive=True)
        for agent in run.agents:
            agent.kill()
            agent.wait()
        for worker in workers:
            with suppress(psutil.NoSuchProcess):
                worker.kill()
    ours = [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(run.folder) in " ".join(process.info["cmdline"] or [])
    ]
    _, left = psutil.wait_procs(ours, timeout=60)  # who was killed may take a moment to go
    assert left == [], "processes were left behind"


def kill_node(agent: subprocess.Popen[str]) -> None:
    """Everything on a node at once, without a word."""
    processes = [psutil.Process(agent.pid), *psutil.Process(agent.pid).children(recursive=True)]
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    agent.wait()


def test_nodes_come_go_and_wait_and_a_pause_of_etcd_disturbs_none(run: Run):
    run.script = run.folder / "light.py"
    run.script.write_text(LIGHT)
    first = run.agent()
    run.wait_for_size(1)
    second = run.agent()
    run.wait_for_size(2)
    pids = {pid for pid, _, size, _ in run.lines() if size == 2}
    run.server.pause()
    pause(run, 10.0)
    run.server.resume()
    pause(run, 5.0)
    assert {pid for pid, _, size, _ in run.lines() if size == 2} == pids
    run.agent()
    run.wait_for_size(3)
    run.agent()
    wait_for_nodes(run, 4)  # the fourth is a spare
    second.send_signal(signal.SIGTERM)  # leaves in an orderly way
    assert second.wait(120) != 0
    run.wait_for_size(3)
    kill_node(first)  # the node of rank 0 vanishes
    run.wait_for_size(2)
    run.agent()  # and comes back
    run.wait_for_size(3)
    run.agent()
    wait_for_nodes(run, 4)
    assert {size for _, _, size, _ in run.lines()} == {1, 2, 3}
    assert run.finish()[2:] == [0, 0, 0, 0], "a spare leaves with the job"


def pause(run: Run, seconds: float) -> None:
    """Let the job train for so long."""
    end = time.monotonic() + seconds
    run.wait_for("the time to pass", lambda: time.monotonic() > end)


def wait_for_nodes(run: Run, count: int) -> None:
    """Until so many nodes are registered."""
    with connect(run.server.endpoint) as store:
        nodes = "/adaptdl/v1/default/torchrun/job/nodes/"
        run.wait_for("the nodes to register", lambda: len(store.range(nodes).items) == count)


def test_a_failing_script_fails_every_node(run: Run):
    for number in range(2):
        run.agent(nnodes="2:2", max_restarts=0)
        assert run.agents[number].poll() is None
    run.wait_for_size(2)
    worker = psutil.Process(run.lines()[-1][0])
    worker.kill()
    assert [agent.wait(120) for agent in run.agents] == [1, 1]


def test_the_password_is_replaced_under_it(guarded_run: Run, guarded: GuardedEtcd):
    """Steps go on; once both are replaced a node that has been killed and another that comes make rounds."""
    run = guarded_run
    agents = [run.agent(), run.agent()]
    run.wait_for_size(2)
    guarded.change_password("second-password")
    guarded.restart()  # nothing that was let in before goes on
    run.wait_for_size(2)
    guarded.write_password("second-password")
    run.wait_for_size(2)
    kill_node(agents[1])
    run.wait_for_size(1)
    run.agent()
    run.wait_for_size(2)
    assert run.finish() == [0, -signal.SIGKILL, 0]


def test_a_node_alone_gives_up_in_time_with_one_reason(run: Run):
    agent = run.agent("--rdzv-conf=join_timeout=3,is_host=true,color=red", nnodes="2:2")
    assert agent.wait(120) == 1
    said = run.said(0)
    (unknown,) = [line for line in said.splitlines() if line.startswith("--rdzv-conf")]
    assert unknown.startswith("--rdzv-conf has no effect with this backend: color; it takes ")
    assert "1 of at least 2 nodes came within 3 s (--rdzv-conf join_timeout=SECONDS)" in said


def test_an_absent_etcd_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ADAPTDL_ETCD_TIMEOUT", "0.3")
    parameters = RendezvousParameters("adaptdl-etcd", "127.0.0.1:1", "job", 1, 1)
    with pytest.raises(RendezvousConnectionError, match=r"127\.0\.0\.1:1: connection refused"):
        create_handler(parameters).next_rendezvous()
