"""A provider of another package: nodes are agent processes of this machine, which inherit its directory."""

from __future__ import annotations

import dataclasses
import shlex
import subprocess
import time
from pathlib import Path

from adaptdl_elastic.autoscaler.providers.base import Capacity, Instance, InstanceState, Pool, Provider
from adaptdl_elastic.autoscaler.providers.registry import ProviderRequest


def from_request(request: ProviderRequest) -> LocalProvider:
    """Return a provider of one pool (`-o command=COMMAND -o price=PRICE`); {node} is the name of the node."""
    options = request.known("command", "price")
    pool = Pool("local", desired=0, maximum=request.max_nodes or 1, hourly_price=float(options["price"]))
    return LocalProvider(shlex.split(options["command"]), pool)


class LocalProvider(Provider):
    """Starts a command once per node, with its output in NODE.log. An agent that ends is not replaced."""

    name = "local"

    def __init__(self, command: list[str], pool: Pool) -> None:
        self._command, self._pool = command, pool
        self._instances: dict[str, Instance] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def capacity(self) -> Capacity:
        """Return the agents. One that has ended is shown once more, so that an early end is counted, too."""
        shown = tuple(self._instances.values())
        pool = dataclasses.replace(self._pool, desired=self._staying())
        for instance in shown:
            if self._processes[instance.id].poll() is not None:
                del self._instances[instance.id]
        return Capacity((pool,), shown)

    def request(self, pool: str, desired: int) -> None:
        """Start agents until there are `desired`."""
        for _ in range(desired - self._staying()):
            name = f"local-{len(self._processes) + 1}"
            with Path(f"{name}.log").open("wb") as log:
                command = [word.replace("{node}", name) for word in self._command]
                self._processes[name] = subprocess.Popen(command, stdout=log, stderr=log)
            self._instances[name] = Instance(
                name,
                pool,
                InstanceState.RUNNING,
                hourly_price=self._pool.hourly_price,
                launched=time.time(),
            )

    def release(self, instance: str, replace: bool = False) -> None:
        """Ask the agent to leave; nothing takes its place."""
        if instance in self._instances:
            leaving = dataclasses.replace(self._instances[instance], state=InstanceState.LEAVING)
            self._instances[instance] = leaving
            self._processes[instance].terminate()

    def hand_back(self) -> None:
        """Ask every agent to leave, and wait for its end."""
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            process.wait()

    def _staying(self) -> int:
        return sum(instance.state is not InstanceState.LEAVING for instance in self._instances.values())
