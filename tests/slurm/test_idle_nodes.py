"""`adaptdl autoscale --provider slurm` on a real Slurm of three nodes, with the batch file of the page."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from guarded_etcd import GuardedEtcd
from polling import until
from slurm_cluster import Slurm
from slurm_script import TRAIN, batch_file, epochs

from adaptdl_elastic.agent.cluster.job_joining import live_agents
from adaptdl_elastic.rendezvous.schema.autoscaler_status import AutoscalerStatus
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.store.base import Store, read_record
from adaptdl_elastic.rendezvous.store.connect import connect

pytestmark = [pytest.mark.processes, pytest.mark.etcd, pytest.mark.slow, pytest.mark.exhaustive]

KEYS, JOB = Keys(), "shared"
ALIVE = ("PENDING", "RUNNING", "COMPLETING")

# A command of Slurm that waits before or after its work while there is a file of that name.
_SLOW = """#!/bin/sh
hold() {{ while [ -e "{folder}/$1" ]; do touch "{folder}/reached"; sleep 0.1; done; }}
hold before
{command} "$@" && echo >> "{folder}/asked"
hold after
"""


class Idle:
    """A folder of the user's, an etcd with TLS and passwords, and an autoscaler that can be killed."""

    def __init__(self, slurm: Slurm, folder: Path, etcd: GuardedEtcd, store: Store) -> None:
        self.slurm, self.folder, self.store = slurm, folder, store
        self.batch, self.sbatch = folder / "idle.sbatch", folder / "bin" / "sbatch"
        self.sbatch.parent.mkdir(parents=True)
        self.batch.write_text(batch_file("test_idle_nodes"))
        (folder / "train.py").write_text(TRAIN)
        (folder / "asked").touch()
        self.sbatch.write_text(_SLOW.format(folder=folder, command=shutil.which("sbatch")))
        self.sbatch.chmod(0o755)
        path = f"{self.sbatch.parent}:{slurm.environment['PATH']}"
        self.environ = {**slurm.environment, **etcd.environ, "ADAPTDL_ETCD": etcd.etcd.endpoint, "PATH": path}

    def adaptdl(self, *words: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "adaptdl_elastic.autoscaler", *words]
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(command, cwd=self.folder, env=self.environ, stdout=log, stderr=log)

    def start(self, *options: str) -> None:
        """Start the autoscaler."""
        where = ("--provider=slurm", "--partition=idle", f"--batch-file={self.batch}", "--max-nodes=3")
        often = ("--interval=0.5", f"--job={JOB}", "--until-done", "--shrink-after=5")
        self.process = self.adaptdl("autoscale", *where, *often, *options)

    def kill(self) -> None:
        """Kill the autoscaler, and nothing that it has started."""
        self.process.kill()
        self.process.wait()

    def scale(self, replicas: int) -> None:
        """Ask for a size of the training, as a person."""
        assert self.adaptdl("scale", JOB, f"--replicas={replicas}").wait(60) == 0

    def jobs(self, *states: str) -> list[str]:
        """Return the numbers of the jobs of this cluster in these states."""
        shown = self.slurm.run("squeue", "--noheader", f"--states={','.join(states)}", "-o", "%A %k")
        return [line.split()[0] for line in shown.splitlines() if "adaptdl/" in line]

    def asked(self) -> int:
        """Return how often `sbatch` has done its work."""
        return len((self.folder / "asked").read_text())

    def wait_until_told(self, words: str, told: bool = True) -> None:
        """Wait until a line of the status has these words, or none has."""

        def look() -> bool:
            status = read_record(AutoscalerStatus, self.store.get(KEYS.autoscaler_status))
            return any(words in line for line in (*status.warnings, status.reason)) == told

        until(f"told: {words} is not {told}", look, pause=0.2)

    def trains_on(self, nodes: int) -> None:
        """Wait until so many agents have joined and two further epochs are over."""
        until(f"not {nodes} agents", lambda: len(live_agents(self.store, KEYS, JOB)) == nodes, pause=0.2)
        before = len(epochs(self.batch))
        until("no epoch is over", lambda: len(epochs(self.batch)) > before + 1, pause=0.2)


@pytest.fixture
def idle(slurm: Slurm, tmp_path: Path) -> Iterator[Idle]:
    with GuardedEtcd(tmp_path / "etcd") as etcd, connect(etcd.etcd.endpoint, options=etcd.options()) as store:
        found = Idle(slurm, tmp_path / "job", etcd, store)
        yield found
        print(*(file.read_text() for file in (found.folder / "log", *found.folder.glob("*.out"))))
        found.kill()


def running(*words: str) -> list[psutil.Process]:
    """Return the processes whose command lines have these words."""
    return [one for one in psutil.process_iter(["cmdline"]) if {*words} <= {*(one.info["cmdline"] or ())}]


def owner_takes(idle: Idle, nodes: int) -> Callable[[], None]:
    """Submit a job of the partition's owner; return what ends it."""
    (idle.folder / "owner").write_text("#!/bin/sh\nuntil [ -e ended ]; do sleep 0.1; done\n")
    idle.slurm.submit(idle.folder / "owner", "--partition=owner", f"--nodes={nodes}")
    return (idle.folder / "ended").touch


def test_a_training_grows_into_idle_nodes_loses_them_and_gives_them_back(idle: Idle) -> None:
    idle.start()
    idle.trains_on(1)
    idle.scale(3)
    idle.trains_on(3)
    assert idle.asked() == 3
    give_back = owner_takes(idle, 2)
    idle.trains_on(1)
    idle.wait_until_told("asked for, and Slurm says")
    assert len(idle.jobs("PENDING")) == 2
    give_back()
    idle.trains_on(3)
    assert idle.asked() == 5
    (controller,) = running("slurmctld", idle.slurm.environment["SLURM_CONF"])
    controller.suspend()
    try:
        idle.wait_until_told("squeue: ")
        idle.trains_on(3)
    finally:
        controller.resume()
    idle.wait_until_told("squeue: ", told=False)
    job = idle.jobs("RUNNING")[-1]
    node = idle.slurm.run("squeue", "--noheader", f"--jobs={job}", "-o", "%N").strip()
    idle.slurm.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")
    idle.wait_until_told(f"job {job} of Slurm has ended: NODE_FAIL")
    idle.trains_on(3)
    idle.scale(1)
    until("two nodes are not given back", lambda: len(idle.jobs(*ALIVE)) == 1, pause=0.2)
    assert idle.asked() == 6
    (idle.folder / "finish").touch()
    until("jobs are left", lambda: not idle.jobs(*ALIVE), pause=0.2)


def test_all_nodes_go_at_once_before_their_hours_are_over(idle: Idle) -> None:
    idle.start("--max-node-hours=0.14")
    idle.trains_on(1)
    idle.scale(3)
    idle.trains_on(3)
    until("nodes have outlived their hours", lambda: not idle.jobs(*ALIVE), pause=0.2)
    idle.wait_until_told("--max-node-hours 0.14")
    status = read_record(AutoscalerStatus, idle.store.get(KEYS.autoscaler_status))
    assert 0.02 < sum(hours for _, _, hours, _ in status.bought) < 0.14
    assert idle.asked() == 3


def test_an_autoscaler_that_is_killed_submits_nothing_twice_and_leaves_nothing(idle: Idle) -> None:
    def killed(place: str) -> None:
        """Start it, and kill it while `sbatch` waits before or after its work."""
        (idle.folder / place).touch()
        idle.start()
        until(f"{place} is not reached", (idle.folder / "reached").exists, pause=0.1)
        idle.kill()
        until("sbatch has outlived it", lambda: not running(str(idle.sbatch)), pause=0.2)
        (idle.folder / place).unlink()
        (idle.folder / "reached").unlink()

    killed("before")
    assert not idle.jobs(*ALIVE)
    killed("after")
    idle.start()
    idle.trains_on(1)
    assert idle.asked() == 1
    give_back = owner_takes(idle, 2)
    idle.scale(2)
    until("no second node is asked for", lambda: len(idle.jobs("PENDING")) == 1, pause=0.2)
    idle.kill()
    idle.start()
    idle.wait_until_told("1 node was asked for")
    give_back()
    idle.trains_on(2)
    idle.kill()
    idle.start()
    idle.scale(1)
    until("the second node is still there", lambda: len(idle.jobs("RUNNING")) == 1, pause=0.2)
    idle.kill()
    idle.trains_on(1)
    assert idle.asked() == 2
    (idle.folder / "finish").touch()
    until("jobs are left", lambda: not idle.jobs(*ALIVE), pause=0.2)
    assert [epoch for _, epoch in epochs(idle.batch)] == list(range(len(epochs(idle.batch))))
