"""Nodes as agent processes on this machine, for laptops, demos and tests of the autoscaler.

A pool behaves like an auto-scaling group: an agent that is killed is replaced while the pool wants it. An
agent that exits by itself is not replaced, and the pool wants one node less: its job is over, or it has
nothing to run, and another agent would only start the job again. Nothing runs in the background; `capacity`
starts and stops processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from adaptdl_elastic.autoscaler.providers.base import (
    Capacity,
    Instance,
    InstanceState,
    Pool,
    Provider,
    ProviderError,
    ProviderOptionError,
    UnknownInstanceError,
)
from adaptdl_elastic.autoscaler.providers.registry import ProviderRequest

logger = logging.getLogger(__name__)


def from_request(request: ProviderRequest) -> LocalProvider:
    """Return a provider of one pool for `--local COMMAND` (options `command` and `price`).

    Raises:
        ProviderOptionError: the command cannot be split into words, or the price is no number.
    """
    options = request.known("command", "price")
    try:
        words, price = shlex.split(options.get("command", "")), float(options.get("price", "1"))
    except ValueError as error:
        raise ProviderOptionError(f"--local {options.get('command', '')!r}: {error}") from None
    pool = Pool(
        "local",
        desired=0,
        maximum=1 if request.max_nodes is None else request.max_nodes,
        slots=request.slots or 1,
        hourly_price=price,
    )
    return LocalProvider(words, [pool], Path(".adaptdl") / "local")


@dataclass
class _Agent:
    instance: Instance
    process: subprocess.Popen[bytes]
    kill_at: float | None = None  # monotonic time
    told: bool = False  # `capacity` has reported the agent, so that its early death can be counted


class LocalProvider(Provider):
    """Starts `command` once per node, with the identity of its instance in the environment.

    Args:
        command: the agent's command line, e.g. `["adaptdl-run", "--etcd", …, "train.py"]`.
        pools: the pools, with their initial `desired`.
        directory: for each agent's output, `<instance>.log`.
        grace_seconds: how long an agent may take to leave before it is killed.
        environment: returns further variables for an instance, e.g. the address of its fake metadata service.
    """

    name = "local"

    def __init__(
        self,
        command: Sequence[str],
        pools: Sequence[Pool],
        directory: Path,
        grace_seconds: float = 60.0,
        environment: Callable[[Instance], Mapping[str, str]] = lambda _: {},
    ) -> None:
        self._command = list(command)
        self._pools = {pool.name: pool for pool in pools}
        self._directory = directory
        self.grace = grace_seconds
        self._environment = environment
        self._agents: dict[str, _Agent] = {}
        self._known: set[str] = set()

    def capacity(self) -> Capacity:
        """Reap ended agents, kill late ones, start missing ones; return instances and pools."""
        self._reconcile()
        for agent in self._agents.values():
            agent.told = True
        return Capacity(tuple(self._pools.values()), tuple(agent.instance for agent in self._agents.values()))

    def request(self, pool: str, desired: int) -> None:
        """Start agents until there are `desired`."""
        known = Capacity(tuple(self._pools.values())).pool(pool)
        if not known.minimum <= desired <= known.maximum:
            raise ProviderError(f"{pool}: {desired} is outside [{known.minimum}, {known.maximum}]")
        there = sum(1 for _ in self._staying(pool))
        self._pools[pool] = replace(known, desired=max(desired, min(there, known.desired)))
        self._reconcile()

    def release(self, instance: str, replace: bool = False) -> None:
        """Ask the agent to leave (SIGTERM); kill it after the grace time."""
        if instance not in self._known:
            raise UnknownInstanceError(f"{instance!r} is none of this machine's agents")
        agent = self._agents.get(instance)
        if agent is None or agent.instance.state is InstanceState.LEAVING:
            return
        pool = self._pools[agent.instance.pool]
        if not replace and pool.desired <= pool.minimum:
            raise ProviderError(f"{pool.name}: has its minimum of {pool.minimum}")
        if not replace:
            self._pools[pool.name] = _with_desired(pool, pool.desired - 1)
        agent.instance = _leaving(agent.instance)
        agent.kill_at = time.monotonic() + self.grace
        _signal(agent.process, signal.SIGTERM)

    def terminate(self, instance: str) -> None:
        """Kill the agent at once, as a cloud does at the end of a notice."""
        agent = self._agents.get(instance)
        if agent is not None:
            _kill(agent.process)

    def hand_back(self) -> None:
        """Ask every agent to leave, and kill it after the grace time, so that none outlives this process."""
        for agent in self._agents.values():
            _signal(agent.process, signal.SIGTERM)
        end = time.monotonic() + self.grace
        for agent in self._agents.values():
            try:
                agent.process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.warning("%s did not leave within %.0f s: killed", agent.instance.id, self.grace)
            _kill(agent.process)
        self._agents.clear()

    def _staying(self, pool: str) -> list[_Agent]:
        return [
            agent
            for agent in self._agents.values()
            if agent.instance.pool == pool and agent.instance.state is not InstanceState.LEAVING
        ]

    def _reconcile(self) -> None:
        now = time.monotonic()
        for name, agent in list(self._agents.items()):
            if agent.process.poll() is not None and agent.told:
                logger.info("%s exited with %s", name, agent.process.returncode)
                _kill(agent.process)  # kill what it may have left in its process group
                del self._agents[name]
                pool = self._pools[agent.instance.pool]
                if agent.process.returncode >= 0 and agent.instance.state is not InstanceState.LEAVING:
                    self._pools[pool.name] = _with_desired(pool, max(pool.minimum, pool.desired - 1))
            elif agent.kill_at is not None and now >= agent.kill_at:
                _kill(agent.process)
        for pool in self._pools.values():
            for _ in range(pool.desired - len(self._staying(pool.name))):
                self._start(pool)

    def _start(self, pool: Pool) -> None:
        identifier = f"{pool.name}-{len(self._known) + 1}"
        instance = Instance(
            identifier,
            pool.name,
            InstanceState.RUNNING,
            slots=pool.slots,
            preemptible=pool.preemptible,
            instance_type=pool.instance_type,
            zone=pool.zones[0] if pool.zones else "",
            hourly_price=pool.hourly_price,
            launched=time.time(),
        )
        environ = os.environ | identity_variables(instance) | dict(self._environment(instance))
        self._directory.mkdir(parents=True, exist_ok=True)
        with (self._directory / f"{identifier}.log").open("wb") as log:
            try:
                process = subprocess.Popen(
                    self._command,
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=end_with_parent if sys.platform == "linux" else None,
                )
            except OSError as error:
                raise ProviderError(f"cannot start {self._command[0]!r}: {error.strerror}") from None
        self._known.add(identifier)
        self._agents[identifier] = _Agent(instance, process)


def identity_variables(instance: Instance) -> dict[str, str]:
    """Return the variables that tell an agent its instance, without a metadata service."""
    return {
        "ADAPTDL_INSTANCE_ID": instance.id,
        "ADAPTDL_INSTANCE_TYPE": instance.instance_type,
        "ADAPTDL_ZONE": instance.zone,
        "ADAPTDL_PREEMPTIBLE": "1" if instance.preemptible else "0",
    }


def _with_desired(pool: Pool, desired: int) -> Pool:
    return replace(pool, desired=desired)


def _leaving(instance: Instance) -> Instance:
    return replace(instance, state=InstanceState.LEAVING)


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    if process.poll() is None:
        process.send_signal(number)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def end_with_parent() -> None:
    """Request SIGTERM for when the parent's thread ends; called between fork and exec (Linux, prctl(2))."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
