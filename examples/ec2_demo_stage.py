"""The stage of `make ec2-demo`: a market whose price moves, a machine for every instance, a coordinator."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import psutil
from ec2_demo_story import CHEAP, GROUP, HERE, JOB, NOTICE, OUT, TYPE, ZONE, Line, Story

sys.path.insert(0, str(HERE.parent / "tests" / "support"))  # the fakes are the tests' own

from etcd_server import tied
from fake_imds import FakeImds
from moto_process import Moto

LEAST_SECONDS = 60.0  # that AWS charges for every instance
PATIENCE = 100.0  # seconds until a process has ended, which only one that hangs reaches


class Spot:
    """The market: a price that this program moves."""

    def __init__(self) -> None:
        self._moves = ((0.0, CHEAP),)  # (since when, price per hour)

    @property
    def price(self) -> float:
        """The price of the moment."""
        return self._moves[-1][1]

    def move(self, price: float) -> None:
        """Change the price now."""
        self._moves = (*self._moves, (time.time(), price))

    def prices(self) -> Mapping[tuple[str, str], tuple[tuple[float, float], ...]]:
        """What EC2's price history would be, for the provider."""
        return {(TYPE, ZONE): self._moves}

    def cost(self, begin: float, end: float) -> float:
        """Add up what an instance costs, for the demo's own account."""
        total, until = 0.0, end
        for since, price in reversed(self._moves):
            total += max(0.0, until - max(since, begin)) * price / 3600
            until = min(until, since)
        return total


class Machines:
    """Keeps one agent and one metadata service for every instance that moto says is running."""

    def __init__(self, moto: Moto, command: Callable[[str], list[str]], story: Story, spot: Spot) -> None:
        self._autoscaling = moto.client("autoscaling")
        self._moto, self._command, self._story, self._spot = moto, command, story, spot
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.metadata: dict[str, FakeImds] = {}
        self.ends: dict[str, float] = {}  # of announced ones, seconds since the epoch
        self.codes: dict[str, int | None] = {}  # of agents; None: it had to be killed

    def group(self) -> dict[str, Any]:
        answer = self._autoscaling.describe_auto_scaling_groups(AutoScalingGroupNames=[GROUP])
        found: dict[str, Any] = answer["AutoScalingGroups"][0]
        return found

    def follow(self) -> int:
        """Start what is missing, pull the plug of what is gone; how many instances there are."""
        self._take_back()
        members = self.group()["Instances"]
        running = {m["InstanceId"] for m in members if m["LifecycleState"] == "InService"}
        self._account(running)
        for instance in running - set(self.metadata):
            self._boot(instance)
        for instance in set(self.agents) - running:
            self._unplug(instance)
        for instance, agent in self.agents.items():
            if agent.poll() is not None:
                self.codes[instance] = agent.returncode
        return len(running)

    def announce(self, instance: str) -> None:
        """The two-minute notice; at its end the machine is gone, if its agent has left."""
        self.ends[instance] = self.metadata[instance].spot(NOTICE)

    def _take_back(self) -> None:
        """Take what the autoscaler has not given back. It may have looked too seldom to see it leave."""
        for instance, end in self.ends.items():
            agent = self.agents.get(instance)
            if agent is not None and agent.poll() is not None and time.time() >= end:
                self._kill(instance)
                self._story.bill[instance].why = "EC2 took it back"
                self._autoscaling.terminate_instance_in_auto_scaling_group(
                    InstanceId=instance, ShouldDecrementDesiredCapacity=False
                )

    def charge(self) -> None:
        """Charge every instance that EC2 has had, from its launch to its end: the demo's own account."""
        for reservation in self._moto.client("ec2").describe_instances()["Reservations"]:
            for instance in reservation["Instances"]:
                began = instance["LaunchTime"].timestamp()
                ended = time.time()
                if instance["State"]["Name"] == "terminated":
                    said = instance["StateTransitionReason"].partition("(")[2].removesuffix(" UTC)")
                    ended = datetime.fromisoformat(f"{said}+00:00").timestamp()
                line = self._story.bill.setdefault(instance["InstanceId"], Line(0.0))
                line.seconds = max(LEAST_SECONDS, ended - began)
                line.cost = self._spot.cost(began, began + line.seconds)

    def _account(self, running: set[str]) -> None:
        for instance in running:
            self._story.bill.setdefault(instance, Line(self._story.now))
        for instance, line in self._story.bill.items():
            if instance not in running and line.ended is None:
                line.ended = self._story.now

    def _boot(self, instance: str) -> None:
        imds = self.metadata[instance] = FakeImds(instance, TYPE, ZONE, "spot")
        environ = {
            **os.environ,
            **self._moto.environment,
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": imds.endpoint,
            "AWS_EC2_METADATA_DISABLED": "false",
        }
        with (OUT / f"{instance}.log").open("wb") as log:
            self.agents[instance] = subprocess.Popen(
                tied(self._command(instance)), env=environ, stdout=log, stderr=log, start_new_session=True
            )

    def _unplug(self, instance: str) -> None:
        """The instance is terminated; an agent on its way out is waited for, as a shutdown does."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.agents[instance].wait(PATIENCE)
        self._kill(instance)

    def _kill(self, instance: str) -> None:
        agent = self.agents.pop(instance)
        self.codes[instance] = agent.poll()
        agent.kill()  # its replicas end with it
        agent.wait()
        self.metadata[instance].close()

    def close(self) -> None:
        for instance in list(self.agents):
            self._kill(instance)


def agent_command(endpoint: str) -> Callable[[str], list[str]]:
    """What an instance's user-data would start."""

    def command(instance: str) -> list[str]:
        return [
            *(sys.executable, "-m", "adaptdl_elastic.agent", f"--etcd={endpoint}", f"--rdzv-id={JOB}"),
            *("--nnodes=1:2", "--nproc-per-node=1", f"--node-name={instance}", "--checkpoint-interval=10"),
            *(f"--checkpoint-path={OUT / 'checkpoint'}", f"--event-log={OUT / instance}.jsonl"),
            *(str(HERE / "ec2_demo_job.py"), str(OUT / "end")),
        ]

    return command


@contextlib.contextmanager
def coordinator(endpoint: str) -> Iterator[None]:
    command = [sys.executable, "-m", "adaptdl_elastic.autoscaler", "coordinator", "--etcd", endpoint]
    with (OUT / "coordinator.log").open("wb") as log:
        process = subprocess.Popen(
            tied([*command, "--interval", "3"]), stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def left_behind(seconds: float = PATIENCE) -> Sequence[str]:
    """End what still runs under this process, which orphans are given to, too; what had to be killed."""
    me = psutil.Process()
    _, alive = psutil.wait_procs(me.children(recursive=True), seconds)
    found = []
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(f"{process.pid} {' '.join(process.cmdline())[:100]}")
            process.kill()
    psutil.wait_procs(alive, 5.0)
    return found
