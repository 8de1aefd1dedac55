"""Jobs that share nodes with GPUs: real agents and processes, an etcd, and an NVML of the tests."""

from __future__ import annotations

import json
import os
import random
import signal
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from cluster import EPOCHS, SCRIPTS, TRAIN
from elastic_run import ElasticRun, marked
from etcd_server import EtcdServer

from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.store.connect import connect

pytestmark = [pytest.mark.exhaustive, pytest.mark.etcd, pytest.mark.slow, pytest.mark.timeout(600)]


class Nodes:
    """Two nodes on one machine, each with GPUs of its own, and the jobs on them."""

    def __init__(self, etcd: EtcdServer, folder: Path, stack: ExitStack, gpus: int) -> None:
        self.etcd, self.folder, self._stack = etcd, folder, stack
        self.ledger = folder / "ledger"
        self.agents: dict[tuple[str, str], ElasticRun] = {}
        for node in ("n0", "n1"):
            self.have(node, [{"uuid": f"GPU-{node}-{number}-{uuid.uuid4()}"} for number in range(gpus)])

    def have(self, node: str, gpus: list[dict[str, Any]]) -> None:
        """Give a node these GPUs; its agents, which look now and then, find the file whole."""
        written = self.folder / f"{node}.new"
        written.write_text(json.dumps(gpus))
        written.replace(self.folder / f"{node}.json")

    def start(self, job: str, node: str, slots: str, *options: str, seconds: str = "0.05") -> ElasticRun:
        command = [
            *(f"--rdzv-endpoint={self.etcd.endpoint}", f"--rdzv-id={job}", f"--node-name={node}"),
            *("--nnodes=1:2", f"--nproc-per-node={slots}", "--no-autoscale", *options),
            *(f"--checkpoint-path={self.folder / job}", "--checkpoint-interval=0.5"),
            *(str(SCRIPTS / "with_devices.py"), TRAIN, str(EPOCHS), seconds),
        ]
        folder = self.folder / f"work-{job}"
        folder.mkdir(exist_ok=True)
        given = {"FAKE_NVML": str(self.folder / f"{node}.json"), "LEDGER": str(self.ledger)}
        run = self._stack.enter_context(ElasticRun(command, folder, given))
        self.agents[job, node] = run
        return run

    def adaptdl(self, *arguments: str) -> str:
        first = next(iter(self.agents.values()))
        done = first.adaptdl(*arguments, "--etcd", self.etcd.endpoint)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def wait_for_status(self, job: str, text: str) -> None:
        """Until the coordinator says so of a job."""
        self._wait_for(Keys().job(job, "status"), text)

    def wait_for_record(self, node: str, job: str, text: str) -> None:
        """Until a node's agent has said so."""
        self._wait_for(Keys().node(node, job), text)

    def wait_for_agent(self, job: str, node: str) -> None:
        """Until the agent that was started there last takes part: later it would begin another run."""
        self._wait_for(Keys().node(node, job), f'"pid":{self.agents[job, node].process.pid},')

    def _wait_for(self, key: str, text: str) -> None:
        with connect(self.etcd.endpoint) as store:
            found = store.range(key)
            if not any(text in item.value for item in found.items):
                with store.watch(key, found.revision + 1) as changes:
                    assert any(text in (change.value or "") for change in changes)

    def entries(self) -> list[tuple[int, str, str, int]]:
        """(pid, job, device, LOCAL_RANK) of every replica that has started."""
        lines = self.ledger.read_text().splitlines() if self.ledger.exists() else []
        return [(int(p), job, name, int(rank)) for p, job, name, rank in (line.split() for line in lines)]

    def living(self) -> list[int]:
        """The pids of the replicas that live, in the order in which they have started."""
        ours = {process.pid for run in self.agents.values() for process in marked(run.mark)}
        return [pid for pid, *_ in self.entries() if pid in ours]

    def hurry(self, job: str) -> None:
        (self.folder / f"work-{job}" / "hurry").touch()

    def check(self) -> None:
        """No replica has met another one on its device, nor had to wait for one."""
        for run in self.agents.values():
            said = run.text()
            assert "CLASH" not in said, said
            assert "is still used by a replica" not in said, said


@pytest.fixture
def nodes(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Nodes]:
    with EtcdServer() as etcd, ExitStack() as stack:
        made = Nodes(etcd, tmp_path, stack, request.param)
        yield made
        for (job, node), run in made.agents.items():  # pytest shows it when the test has failed
            print(f"--- {job} on {node}, exit code {run.process.poll()}\n{run.text()}")


@pytest.mark.essential
@pytest.mark.parametrize("nodes", [2], indirect=True)
def test_a_second_job_waits_for_the_devices_of_the_first_and_then_gets_them(nodes: Nodes) -> None:
    first = nodes.start("a", "n0", "2")
    first.wait_for_event("generation", replicas=2)
    second = nodes.start("b", "n0", "2")
    nodes.wait_for_status("b", "waits for slots: needs 2 replicas on 1 node, 0 free, other jobs have 2")
    before = {name for _, job, name, _ in nodes.entries() if job == "a"}
    assert len(before) == 2
    nodes.hurry("a")
    assert first.wait() == 0, first.text()
    second.wait_for_event("generation", replicas=2)
    nodes.hurry("b")
    assert second.wait() == 0, second.text()
    assert {(name, rank) for _, job, name, rank in nodes.entries() if job == "b"} == {
        (name, rank) for _, job, name, rank in nodes.entries() if job == "a"
    }
    nodes.check()


@pytest.mark.parametrize("nodes", [2], indirect=True)
def test_a_gpu_that_another_program_fills_is_left_out_and_said(nodes: Nodes) -> None:
    run = nodes.start("a", "n0", "1:2")
    run.wait_for_event("generation", replicas=1)
    ((_, _, used, _),) = nodes.entries()
    gpus = json.loads((nodes.folder / "n0.json").read_text())
    (free,) = (gpu["uuid"] for gpu in gpus if gpu["uuid"] != used)
    # a replica has memory, too: what it has locked is not another program's
    nodes.have("n0", [{**gpu, "used": 40 << 30} for gpu in gpus])
    line = f"{free}: another program has 40 of its 80 GiB"
    assert run.wait_for_event("devices")["unusable"] == [line]
    assert f"not usable on this node: {line}" in run.text()
    nodes.wait_for_record("n0", "a", line)
    assert f"n0: not usable: {line}" in nodes.adaptdl("nodes")
    assert line in nodes.adaptdl("doctor", "--node=elsewhere")
    nodes.have("n0", gpus)
    seen = len(run.events)
    assert run.wait_for_event("devices", after=seen)["unusable"] == []
    nodes.adaptdl("scale", "a", "--replicas", "2")
    run.wait_for_event("generation", replicas=2, after=seen)
    nodes.hurry("a")
    assert run.wait() == 0, run.text()


@pytest.mark.parametrize("nodes", [4], indirect=True)
def test_jobs_come_grow_shrink_and_die_and_no_device_has_two_owners(nodes: Nodes) -> None:
    chance, jobs = random.Random(5), "abc"
    for job in jobs:
        for node in ("n0", "n1"):
            nodes.start(job, node, "1:4", seconds="0.1")
    for job in jobs:
        nodes.wait_for_status(job, '"state":"running"')
    for _ in range(15):
        job, node = chance.choice(jobs), chance.choice(["n0", "n1"])
        match chance.choice(["scale", "scale", "kill", "drain", "kill the agent"]):
            case "scale":
                nodes.adaptdl("scale", job, "--replicas", str(chance.randint(1, 4)))
            case "kill":
                with suppress(ProcessLookupError, IndexError):
                    os.kill(chance.choice(nodes.living()), signal.SIGKILL)
            case how:
                other = "n1" if node == "n0" else "n0"
                if nodes.agents[job, other].process.poll() is None:
                    nodes.wait_for_agent(job, other)
                    number = signal.SIGTERM if how == "drain" else signal.SIGKILL
                    nodes.agents[job, node].process.send_signal(number)
                    nodes.agents[job, node].wait()
                    nodes.start(job, node, "1:4", seconds="0.1")
        nodes.check()
    for job in jobs:
        for node in ("n0", "n1"):
            nodes.wait_for_agent(job, node)
        nodes.adaptdl("stop", job)
    for run in nodes.agents.values():
        run.wait()
    nodes.check()
    assert len({name for _, _, name, _ in nodes.entries()}) > 4
