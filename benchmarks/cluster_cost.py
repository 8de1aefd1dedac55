"""Measure what jobs cost the nodes of a cluster, and how long a submitted job takes to its first step.

python benchmarks/cluster_cost.py [--jobs 20] [--seconds 60]

Three nodes are reached over a real ssh on this machine. Printed are, per node and job that it does not run,
the memory (unique set size) and the CPU time of the node service, and the seconds from the command
`adaptdl submit` to the first step. With `--jobs 0` each node has one slot, and jobs have two replicas.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from etcd_server import find_etcd  # noqa: E402
from ports import free_port  # noqa: E402
from ssh_nodes import SshNodes  # noqa: E402

SCRIPT = """
import sys, time
import torch
import adaptdl_elastic.torch as adl
adl.init_process_group("gloo")
net = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
model = adl.AdaptiveDataParallel(net, optimizer)
loader = adl.AdaptiveDataLoader(torch.randn(4096, 8), batch_size=16)
for epoch in adl.remaining_epochs_until(1000000):
    for batch in loader:
        optimizer.zero_grad()
        model(batch).mean().backward()
        optimizer.step()
        print("step", adl.rank(), time.time(), flush=True)
        time.sleep(float(sys.argv[1]))
"""
NODES = ("node1", "node2", "node3")


def adaptdl(environment: dict[str, str], work: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "adaptdl_elastic.autoscaler", *arguments]
    done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def services(nodes: SshNodes) -> dict[str, psutil.Process]:
    folder = ".local/share/adaptdl/lab/state/service.json"
    return {
        node: psutil.Process(json.loads((nodes.home(node) / folder).read_text())["pid"])
        for node in nodes.names
    }


def first_step(nodes: SshNodes, job: str, since: float, rank: int = 0) -> float:
    """Wait for a rank's first step; return the seconds since `since`."""
    logs = [nodes.home(node) / ".local/share/adaptdl/lab/logs" / job / "output.log" for node in nodes.names]
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for log in logs:
            for line in log.read_text().splitlines() if log.exists() else ():
                words = line.split()
                if len(words) > 3 and words[-3:-1] == ["step", str(rank)]:
                    return float(words[-1]) - since
        time.sleep(0.01)
    raise SystemExit(f"{job}: rank {rank} took no step")


def cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def measure(jobs: int, seconds: float) -> None:
    """Print the figures."""
    with tempfile.TemporaryDirectory() as name, SshNodes(Path(name) / "nodes", *NODES) as nodes:
        work = Path(name) / "work"
        work.mkdir()
        (work / "train.py").write_text(SCRIPT)
        environment = {**os.environ, "XDG_CONFIG_HOME": str(Path(name) / "config")}
        options = ["--cluster", "lab", "-F", str(nodes.config), "--python", sys.executable]
        options += ["--slots", str(jobs or 1)]
        options += ["--etcd", str(find_etcd()), "--etcd-port", str(free_port()), "--person", "eve"]
        adaptdl(environment, work, "cluster", "up", *NODES, *options)
        try:
            time.sleep(20)
            for number in range(3):
                began = time.time()
                replicas = "1" if jobs else "2"
                name = f"first{number}"
                submit = "submit", "--replicas", replicas, "--name", name, "train.py", "0.5"
                adaptdl(environment, work, *submit)
                told = time.time() - began
                took = [first_step(nodes, name, began, rank) for rank in range(int(replicas))]
                shown = ", ".join(f"{seconds:.2f} s" for seconds in took)
                print(f"submit typed -> first step of each rank: {shown}; the command takes {told:.2f} s")
                adaptdl(environment, work, "cancel", f"first{number}")
                time.sleep(5)
            if not jobs:
                return
            before = {node: (one.memory_full_info().uss, cpu(one)) for node, one in services(nodes).items()}
            time.sleep(seconds)
            idle = {node: cpu(one) - before[node][1] for node, one in services(nodes).items()}
            for number in range(jobs):
                submit = "submit", "--replicas", "1", "--name", f"job{number}", "--", "sleep", "9999"
                adaptdl(environment, work, *submit)
            time.sleep(20)
            agents = {
                node: len(list((nodes.home(node) / ".local/share/adaptdl/lab/state/agents").glob("*.json")))
                for node in NODES
            }
            middle = {node: cpu(one) for node, one in services(nodes).items()}
            time.sleep(seconds)
            for node, one in services(nodes).items():
                others = jobs - agents[node]
                memory = (one.memory_full_info().uss - before[node][0]) / 2**20
                spent = (cpu(one) - middle[node] - idle[node]) * 60 / seconds
                print(
                    f"{node}: {agents[node]} agents of {jobs} jobs; service: {memory:.1f} MiB more, "
                    f"{spent:.2f} s of CPU per minute more than the {idle[node] * 60 / seconds:.2f} s "
                    f"without jobs; for each that it does not run {memory / others:.2f} MiB, "
                    f"{spent / others:.3f} s"
                )
        finally:
            adaptdl(environment, work, "cluster", "down", "--purge")
            shutil.rmtree(work)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=60)
    given = parser.parse_args()
    measure(given.jobs, given.seconds)
