"""`adaptdl autoscale --provider slurm` on a real Slurm of three nodes, with the batch file of the page."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from guarded_etcd import GuardedEtcd
from polling import until
from slurm_script import TRAIN, epochs

from adaptdl_elastic.agent.cluster.job_joining import live_agents
from adaptdl_elastic.rendezvous.schema import records
from adaptdl_elastic.rendezvous.schema.autoscaler_status import AutoscalerStatus
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.store.base import Store
from adaptdl_elastic.rendezvous.store.connect import connect

if TYPE_CHECKING:
    from slurm.conftest import Slurm

pytestmark = [pytest.mark.processes, pytest.mark.etcd, pytest.mark.slow, pytest.mark.exhaustive]

ROOT, KEYS, JOB = Path(__file__).resolve().parents[2], Keys(), "shared"

# A command of Slurm that waits before or after its work while there is a file of that name.
_SLOW = """#!/bin/sh
hold() {{
    if [ -e "{folder}/$1" ]; then touch "{folder}/reached"; fi
    while [ -e "{folder}/$1" ]; do sleep 0.1; done
}}
hold before-{name}
{command} "$@"
code=$?
echo {name} >> "{folder}/done"
hold after-{name}
exit $code
"""


class Idle:
    """A folder of the user's, an etcd with TLS and passwords, and an autoscaler that can be killed."""

    def __init__(self, slurm: Slurm, folder: Path, etcd: GuardedEtcd, store: Store) -> None:
        self.slurm, self.folder, self.store = slurm, folder, store
        self.process: subprocess.Popen[bytes] | None = None
        page = (ROOT / "docs" / "howto" / "slurm.md").read_text()
        fence = r"^```bash test=test_idle_nodes\n(#!.*?)^```$"
        self.batch = folder / "idle.sbatch"
        self.batch.write_text(re.search(fence, page, re.MULTILINE | re.DOTALL)[1])
        (folder / "train.py").write_text(TRAIN)
        (folder / "bin").mkdir()
        for name in ("sbatch", "scancel"):
            file = folder / "bin" / name
            file.write_text(_SLOW.format(folder=folder, name=name, command=shutil.which(name)))
            file.chmod(0o755)
        self.environ = {
            **slurm.environment,
            **etcd.environ,
            "ADAPTDL_ETCD": etcd.etcd.endpoint,
            "PATH": f"{folder / 'bin'}:{slurm.environment['PATH']}",
        }

    def start(self, *options: str) -> subprocess.Popen[bytes]:
        """Start the autoscaler."""
        words = (
            "autoscale",
            "--provider=slurm",
            f"--batch-file={self.batch}",
            "--partition=idle",
            "--max-nodes=3",
        )
        often = ("--interval=0.5", f"--job={JOB}", "--until-done", "--shrink-after=5")
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "adaptdl_elastic.autoscaler", *words, *often, *options],
                cwd=self.folder,
                env=self.environ,
                stdout=log,
                stderr=log,
            )
        return self.process

    def kill(self) -> None:
        """Kill the autoscaler, and nothing that it has started."""
        self.process.kill()
        self.process.wait()

    def scale(self, replicas: int) -> None:
        """Ask for a size of the training, as a person."""
        command = [sys.executable, "-m", "adaptdl_elastic.autoscaler", "scale", JOB, f"--replicas={replicas}"]
        subprocess.run(command, env=self.environ, check=True, capture_output=True, timeout=60)

    def jobs(self, *states: str) -> list[str]:
        """Return the numbers of the jobs of this cluster in these states."""
        shown = self.slurm.run("squeue", "--noheader", f"--states={','.join(states)}", "-o", "%A %k")
        return [line.split()[0] for line in shown.splitlines() if "adaptdl/" in line]

    def done(self, command: str) -> int:
        """Return how often a command of Slurm has done its work."""
        file = self.folder / "done"
        return file.read_text().split().count(command) if file.exists() else 0

    def agents(self) -> int:
        return len(live_agents(self.store, KEYS, JOB))

    def status(self) -> AutoscalerStatus | None:
        item = self.store.get(KEYS.autoscaler_status)
        return None if item is None else records.decode(AutoscalerStatus, item.value, item.key)

    def told(self, words: str) -> bool:
        """Return whether a line of the status has these words."""
        status = self.status()
        return status is not None and any(words in line for line in (*status.warnings, status.reason))

    def trains_on(self, nodes: int) -> None:
        """Wait until so many agents have joined and two further epochs are over."""
        until(f"there are not {nodes} agents", lambda: self.agents() == nodes, pause=0.2)
        before = len(epochs(self.batch))
        until("no epoch is over", lambda: len(epochs(self.batch)) > before + 1, pause=0.2)

    def grown(self, nodes: int) -> None:
        """Let the training grow from its first node to so many."""
        self.trains_on(1)
        self.scale(nodes)
        self.trains_on(nodes)

    def ends(self) -> None:
        """Let the training end; nothing may be left in Slurm's queue, and no epoch was repeated."""
        (self.folder / "finish").touch()
        until("jobs are left", lambda: not self.jobs("PENDING", "RUNNING", "COMPLETING"), pause=0.2)
        seen = [epoch for _, epoch in epochs(self.batch)]
        assert seen == list(range(len(seen)))
        assert self.process.wait(60) == 0

    def text(self) -> str:
        """Return all that was printed."""
        return "".join(
            f"== {file}\n{file.read_text()}"
            for file in self.folder.glob("*")
            if file.name == "log" or file.suffix == ".out"
        )


@pytest.fixture
def idle(slurm: Slurm, tmp_path: Path) -> Iterator[Idle]:
    with GuardedEtcd(tmp_path / "etcd") as etcd, connect(etcd.etcd.endpoint, options=etcd.options()) as store:
        (tmp_path / "job").mkdir()
        found = Idle(slurm, tmp_path / "job", etcd, store)
        try:
            yield found
        finally:
            print(found.text())
            if found.process is not None and found.process.poll() is None:
                found.kill()
            if left := found.jobs("PENDING", "RUNNING", "COMPLETING"):
                slurm.run("scancel", "--full", "--signal=KILL", *left)
                slurm.run("scancel", *left)
            until("jobs are left", lambda: not found.jobs("PENDING", "RUNNING", "COMPLETING"), pause=0.2)


def owner_takes(idle: Idle, nodes: int) -> Callable[[], None]:
    """Submit a job of the partition's owner; return what ends it."""
    (idle.folder / "owner").write_text("#!/bin/sh\nuntil [ -e ended ]; do sleep 0.1; done\n")
    idle.slurm.submit(idle.folder / "owner", "--partition=owner", f"--nodes={nodes}")
    return (idle.folder / "ended").touch


def test_a_training_grows_into_idle_nodes_that_their_owner_takes_and_gives_back(idle: Idle) -> None:
    idle.start()
    idle.grown(3)
    assert idle.done("sbatch") == 3
    give_back = owner_takes(idle, 2)
    idle.trains_on(1)
    until("none was asked for again", lambda: len(idle.jobs("PENDING")) == 2, pause=0.2)
    until("nothing is told", lambda: idle.told("asked for, and Slurm says"), pause=0.2)
    idle.trains_on(1)
    assert idle.done("sbatch") == 5
    give_back()
    idle.trains_on(3)
    assert idle.done("sbatch") == 5
    idle.ends()


def test_an_autoscaler_that_is_killed_submits_nothing_twice_and_leaves_nothing(idle: Idle) -> None:
    folder = idle.folder

    def killed_at(place: str) -> None:
        until(f"{place} is not reached", (folder / "reached").exists, pause=0.1)
        idle.kill()
        # one that has not done its work yet is ended by its own limit
        command = str(folder / "bin" / place.partition("-")[2])
        until("a command has outlived it", lambda: not running(command), pause=0.2)
        (folder / place).unlink()
        (folder / "reached").unlink()

    (folder / "before-sbatch").touch()
    idle.start()
    killed_at("before-sbatch")
    assert not idle.jobs("PENDING", "RUNNING")
    (folder / "after-sbatch").touch()
    idle.start()
    killed_at("after-sbatch")
    idle.start()
    idle.trains_on(1)
    assert idle.done("sbatch") == 1
    give_back = owner_takes(idle, 2)
    idle.scale(2)
    until("no second node is asked for", lambda: len(idle.jobs("PENDING")) == 1, pause=0.2)
    idle.kill()
    idle.start()
    until("its successor does not look", lambda: idle.told("1 node was asked for"), pause=0.2)
    give_back()
    idle.trains_on(2)
    idle.kill()
    idle.start()
    (folder / "before-scancel").touch()
    idle.scale(1)
    # the agent of a drained node ends by itself, and its job with it: Slurm need not be asked
    until("the second node is still there", lambda: len(idle.jobs("RUNNING")) == 1, pause=0.2)
    idle.kill()
    (folder / "before-scancel").unlink()
    idle.trains_on(1)
    assert idle.done("sbatch") == 2
    (folder / "finish").touch()
    until("jobs are left", lambda: not idle.jobs("PENDING", "RUNNING", "COMPLETING"), pause=0.2)


def running(command: str) -> bool:
    """Return whether a process runs that has this word."""
    return any(command in (one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"]))


def test_nodes_go_before_their_hours_are_over(idle: Idle) -> None:
    idle.start("--max-node-hours=0.14")
    idle.grown(3)
    until("nodes are left", lambda: not idle.jobs("PENDING", "RUNNING", "COMPLETING"), pause=0.2)
    status = idle.status()
    assert 0.02 < sum(hours for _, _, hours, _ in status.bought) < 0.14
    assert idle.done("sbatch") == 3


def test_a_lost_node_and_a_controller_that_is_away_are_lines_of_the_status(idle: Idle) -> None:
    idle.start()
    idle.grown(2)
    (controller,) = (one for one in psutil.process_iter(["name"]) if one.info["name"] == "slurmctld")
    controller.suspend()
    try:
        until("nothing is told", lambda: idle.told("squeue: "), pause=0.2)
        idle.trains_on(2)
    finally:
        controller.resume()
    until("it is still told", lambda: not idle.told("squeue: "), pause=0.2)
    (job,) = idle.jobs("RUNNING")[-1:]
    node = idle.slurm.run("squeue", "--noheader", f"--jobs={job}", "-o", "%N").strip()
    idle.slurm.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")
    try:
        until("its end is not told", lambda: idle.told(f"job {job} of Slurm has ended: NODE_FAIL"), pause=0.2)
        until("no other node has come", lambda: len(idle.jobs("RUNNING")) == 2, pause=0.2)
        idle.trains_on(2)
    finally:
        idle.slurm.run("scontrol", "update", f"NodeName={node}", "State=IDLE")
    assert idle.done("sbatch") == 3
    idle.ends()
