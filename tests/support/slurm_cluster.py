"""A real Slurm of three nodes on this machine, in a folder of its own; nothing of the system's is touched."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from polling import until
from ports import free_port

NODES = ("n1", "n2", "n3")
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")

_CONF = """
ClusterName=tests
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SlurmUser=root
SlurmdUser=root
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
StateSaveLocation={folder}/state
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=100
SchedulerParameters=sched_interval=1,bf_interval=1
PartitionName=idle Nodes=ALL Default=YES PriorityTier=1 PreemptMode=CANCEL GraceTime=100
PartitionName=owner Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""


class Slurm:
    """The daemons of one cluster, and its commands."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._conf = folder, folder / "slurm.conf"
        self.environment = {
            **os.environ,
            "SLURM_CONF": str(self._conf),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }

    def start(self) -> None:
        """Start all daemons, and return when the nodes are idle."""
        folder, ports = self._folder, [free_port() for _ in range(1 + len(NODES))]
        (folder / "state").mkdir()
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o400)
        nodes = (
            f"NodeName={node} NodeAddr=127.0.0.1 NodeHostname=localhost Port={port} CPUs=1 RealMemory=1\n"
            for node, port in zip(NODES, ports[1:], strict=True)
        )
        self._conf.write_text(_CONF.format(folder=folder, port=ports[0]) + "".join(nodes))
        (folder / "cgroup.conf").touch()
        files = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munged.pid"}
        files |= {"log-file": "munged.log", "seed-file": "munged.seed"}
        self.run("munged", "--force", *(f"--{name}={folder / file}" for name, file in files.items()))
        self.run("slurmctld", "-f", str(self._conf))
        for node in NODES:
            self.run("slurmd", "-f", str(self._conf), "-N", node)
        until("nodes are not idle", lambda: self.run("sinfo", "-h", "-o", "%T").split() == ["idle"])

    def run(self, *command: str, cwd: Path | None = None) -> str:
        """Run a command of Slurm, and return what it prints."""
        pipe = subprocess.PIPE
        # the daemons keep the standard error
        ran = subprocess.run(
            command, cwd=cwd, env=self.environment, stdout=pipe, stderr=None, text=True, timeout=60
        )
        assert ran.returncode == 0, f"{command}: {ran.stdout}"
        return ran.stdout

    def submit(self, file: Path, *options: str) -> str:
        """Submit a batch file in its folder; return the job's number."""
        return self.run("sbatch", "--parsable", *options, str(file), cwd=file.parent).strip()

    def state(self, job: str) -> str:
        """Return the state of a job, and its exit code, as in `COMPLETED 0:0`."""
        shown = self.run("scontrol", "show", "job", job)
        return " ".join(re.search(rf"{name}=(\S+)", shown)[1] for name in ("JobState", "ExitCode"))

    def close(self) -> None:
        """End all jobs, then all daemons."""
        if (self._folder / "slurmctld.pid").exists():
            self.run("scancel", "--full", "--signal=KILL", "--user=root")
            self.run("scancel", "--user=root")
            until("jobs have not ended", lambda: not self.run("squeue", "-h", "-t", "R,CG"))
        for file in sorted(self._folder.glob("*.pid"), reverse=True):
            number = int(file.read_text())
            os.kill(number, signal.SIGTERM)
            until(f"{file} has not ended", lambda number=number: not Path(f"/proc/{number}").exists())


def missing() -> str:
    """Return what a cluster needs and this machine lacks; nothing if it can be started."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    if not os.geteuid() and all(shutil.which(program, path=path) for program in _PROGRAMS):
        return ""
    packages = "slurmctld slurmd slurm-client munge"
    return f"Slurm is not installed here, or this is not root: apt-get install {packages}"
