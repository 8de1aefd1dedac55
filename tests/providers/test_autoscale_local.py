"""`adaptdl autoscale` with a provider of another package, a real etcd, real agents and a real job."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from commands import ended
from elastic_run import MARK, ROOT, environment, marked
from etcd_server import EtcdServer
from other_package import write_distribution

from adaptdl_elastic.rendezvous.schema import records
from adaptdl_elastic.rendezvous.schema.autoscaler_status import AutoscalerStatus
from adaptdl_elastic.rendezvous.schema.held import Held
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.store.base import Store
from adaptdl_elastic.rendezvous.store.connect import connect

KEYS = Keys("default")
JOB = "count"
SCRIPT = Path(__file__).resolve().parents[1] / "support" / "loop_script.py"


class Autoscaled:
    """One `adaptdl autoscale --provider local`, what it says, and everything that it starts."""

    def __init__(self, endpoint: str, directory: Path, agent: str, *options: str) -> None:
        self.directory, self.endpoint, self.mark = directory, endpoint, uuid.uuid4().hex
        entry = "[adaptdl_elastic.providers]\nlocal = local_provider:from_request\n"
        write_distribution(directory, "local-provider", entry)
        settings = {"size": 61, "batch": 8, "epochs": 400, "pace": 0.1}
        self.environ = environment(
            **{MARK: self.mark, "OUT": str(directory), "LOOP": json.dumps(settings)},
            XDG_RUNTIME_DIR=str(directory),
            PYTHONPATH=f"{ROOT}:{SCRIPT.parent}:{directory}",
        )
        self.errors = (directory / "errors").open("w+")
        self.process = subprocess.Popen(
            [
                *self._adaptdl("autoscale"),
                *("--provider=local", "-o", f"command={agent}", "-o", "price=1"),
                *(*options, "--json", "--interval=0.5"),
            ],
            cwd=directory,
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )

    def _adaptdl(self, command: str) -> list[str]:
        return [sys.executable, "-m", "adaptdl_elastic.autoscaler", command, "--etcd", self.endpoint]

    def run(self, command: str, *arguments: str) -> str:
        """An `adaptdl` command, as in another terminal; what it printed."""
        done = ended([*self._adaptdl(command), *arguments], env=self.environ, timeout=200)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def end(self) -> tuple[int, list[dict[str, Any]]]:
        """Its exit code and its events."""
        output, _ = self.process.communicate()
        return self.process.returncode, [json.loads(line) for line in output.splitlines()]

    def text(self) -> str:
        logs = sorted(self.directory.glob("local-*.log"))
        return "\n".join(f"== {log}\n{log.read_text()}" for log in [*logs, Path(self.errors.name)])


@pytest.fixture
def store() -> Iterator[tuple[str, Store]]:
    with EtcdServer() as etcd, connect(etcd.endpoint) as store:
        yield etcd.endpoint, store


@pytest.fixture
def start(store: tuple[str, Store], tmp_path: Path) -> Iterator[Callable[..., Autoscaled]]:
    started: list[Autoscaled] = []

    def begin(agent: str, *options: str) -> Autoscaled:
        started.append(Autoscaled(store[0], tmp_path, agent, *options))
        return started[-1]

    yield begin
    for one in started:
        ended = one.process.poll() is not None
        left = marked(one.mark)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, 60)
        one.process.wait()
        assert one.process.stdout is not None
        one.process.stdout.close()
        one.errors.close()
        assert not (ended and left), f"left behind: {left}"


def until(store: Store, condition: Callable[[], bool]) -> None:
    """Until a change in the store makes it true; the test's own time-out is the limit."""
    prefix = KEYS.root
    with store.watch(prefix, store.range(prefix).revision + 1) as watch:
        if condition():
            return
        for _ in watch:
            if condition():
                return


def at_work(store: Store, replicas: int) -> records.Plan | None:
    """The plan, once all replicas of it run, if there are so many."""
    item = store.get(KEYS.job(JOB, "plan"))
    plan = None if item is None else records.decode(records.Plan, item.value, item.key)
    if plan is None or plan.claim or plan.replicas != replicas:
        return None
    found = store.range(KEYS.reports(JOB)).items
    running = [records.decode(Held, item.value, item.key).runs for item in found].count(plan.generation)
    return plan if running == plan.nodes else None


def instances(store: Store) -> list[str]:
    """Return the nodes, which are called as their instances: no agent was told an instance."""
    found = [records.decode(records.NodeRecord, i.value, i.key) for i in store.range(KEYS.nodes).items]
    assert not any(record.instance for record in found)
    return sorted(record.node for record in found)


@pytest.mark.slow
@pytest.mark.etcd
@pytest.mark.timeout(600)
@pytest.mark.exhaustive
def test_agents_of_this_machine_come_and_go_with_their_job(
    store: tuple[str, Store], start: Callable[..., Autoscaled], tmp_path: Path
) -> None:
    endpoint, there = store
    agent = (
        f"{shlex.quote(sys.executable)} -m adaptdl_elastic.agent --etcd={endpoint} --rdzv-id={JOB} --once "
        "--node-name={node} "
        f"--nnodes=1:2 --nproc-per-node=1 {shlex.quote(str(SCRIPT))}"
    )
    scaled = start(agent, "--max-nodes=2", f"--job={JOB}", "--until-done", "--shrink-after=1")
    try:
        until(there, lambda: at_work(there, 1) is not None)
        scaled.run("scale", JOB, "--replicas=2")
        until(there, lambda: at_work(there, 2) is not None)
        both = instances(there)
        scaled.run("scale", JOB, "--replicas=1")
        until(there, lambda: len(instances(there)) == 1 and at_work(there, 1) is not None)
        plan = at_work(there, 1)
        assert plan is not None
        assert [p.node for p in plan.placements] == instances(there)
        assert "so far" in scaled.run("status", JOB)
        (tmp_path / "hurry").touch()
        code, events = scaled.end()
    except BaseException:
        print(scaled.text())
        raise
    assert code == 0, scaled.text()
    said = [(e["event"], e.get("desired"), e.get("instance")) for e in events]
    (released,) = set(both) - {plan.placements[0].node}
    assert [s for s in said if s[0] == "request"] == [("request", 1, None), ("request", 2, None)]
    drained = [instance for event, _, instance in said if event == "drain"]
    assert drained[0] == released, said
    given_back = [instance for event, _, instance in said if event == "release"]
    assert set(given_back) <= set(drained), "who has left by itself need not be given back"
    assert both == ["local-1", "local-2"]
    assert len(list(tmp_path.glob("local-*.log"))) == 2, "an agent that has ended is not started again"
    item = there.get(KEYS.job(JOB, "status"))
    assert item is not None
    assert records.decode(records.JobStatus, item.value, item.key).state is records.JobState.DONE


@pytest.mark.slow
@pytest.mark.etcd
@pytest.mark.timeout(600)
def test_agents_that_can_not_run_are_not_started_for_ever(
    store: tuple[str, Store], start: Callable[..., Autoscaled], tmp_path: Path
) -> None:
    _, there = store
    scaled = start(f"{shlex.quote(sys.executable)} -m adaptdl_elastic.agent --no-such-option", f"--job={JOB}")

    def closed() -> bool:
        item = there.get(KEYS.autoscaler_status)
        status = None if item is None else records.decode(AutoscalerStatus, item.value, item.key)
        return status is not None and any("in a row" in warning for warning in status.warnings)

    until(there, closed)
    assert len(list(tmp_path.glob("local-*.log"))) == 4  # one, and three in its place
    scaled.process.terminate()
    code, _ = scaled.end()
    assert code == 0
