"""One simulated cluster: a store, machines, and everybody who runs on them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import history

from adaptdl_elastic.autoscaler.coordinator.decision_types import CoordinatorSettings
from adaptdl_elastic.autoscaler.policy.policy_types import Decision, JobInfo, NodeInfo, Reason
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import JobRequest, JobSpec
from faultsim import patching, threads
from faultsim.agents import AgentProcess, CoordinatorProcess, Job
from faultsim.etcd import Etcd
from faultsim.kernel import Dead, Kernel
from faultsim.network import Network
from faultsim.node import Machine, MeetingPoint, Pipes
from faultsim.rescale import Rescaler
from faultsim.truth import Truth


class World:
    """A cluster that begins empty. Use it within `running`."""

    def __init__(self, seed: int, settings: CoordinatorSettings | None = None) -> None:
        self.kernel = Kernel(seed)
        self.keys = Keys("sim")
        self.etcd = Etcd(self.kernel)
        self.points: dict[tuple[str, int], MeetingPoint] = {}
        self.pipes = Pipes()
        self.network = Network(self.kernel)
        self.network.on_mend = self._ring
        self.machines: dict[str, Machine] = {}
        self.jobs: dict[str, Job] = {}
        self.agents: list[AgentProcess] = []
        self.coordinators: list[CoordinatorProcess] = []
        self.requests: dict[str, JobRequest] = {}
        self.stops: set[str] = set()  # jobs that a person has asked to stop
        self.plain_exit_code = 143
        self.on_script_end: list[Callable[[], None]] = []  # called when a replica is behind its last epoch
        self.calm = False  # the policy leaves jobs as they are
        self.settings = settings or CoordinatorSettings(interval=20.0)
        self.truth = Truth(self)
        self.etcd.listeners.append(self.truth.store_changed)
        self.writes: dict[str, int] = {}  # by process
        self.kill_before: dict[str, int] = {}  # process → write before which it dies

    @property
    def specs(self) -> Mapping[str, JobSpec]:
        """What was asked for each job."""
        return {name: job.spec for name, job in self.jobs.items()}

    @contextmanager
    def running(self) -> Iterator[World]:
        """With the product running on this world's clock and threads."""
        log = _Log(self.kernel)
        logger = logging.getLogger("adaptdl_elastic")
        before = logger.level, logger.propagate
        logger.addHandler(log)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        try:
            archive = self.truth.archive
            with patching.installed(self.kernel, os=self.pipes, kept=archive, DirectoryStorage=archive):
                yield self
        finally:
            logger.removeHandler(log)
            logger.setLevel(before[0])
            logger.propagate = before[1]

    def _ring(self) -> None:
        """Replicas that wait for others may reach them now."""
        for replicas in self.truth.live.values():
            for replica in replicas:
                replica.ring()

    # -- who is there

    def machine(self, name: str, slots: int) -> Machine:
        """Another machine, with clocks of its own."""
        chance = self.kernel.random
        machine = Machine(
            self,
            name,
            slots,
            clock_offset=1000.0 * chance.random(),
            wall_offset=1200.0 * chance.random() - 600.0,
        )
        self.machines[name] = machine
        return machine

    def start_agent(self, machine: Machine, job: str) -> None:
        """Start an agent, if its machine runs."""
        if not machine.up:
            return
        agent = AgentProcess(machine, self.jobs[job], next(self.kernel.numbers))
        self.agents.append(agent)

    def start_coordinator(self, machine: Machine, parent_gone: threads.Event) -> CoordinatorProcess:
        """Start a coordinator for an agent."""
        found = CoordinatorProcess(machine, self, self.policy, self.settings, parent_gone)
        self.coordinators.append(found)
        return found

    def rescaler(self, replica: Any) -> Rescaler:
        """A replica's part in changes in place."""
        return Rescaler(replica)

    def before_write(self) -> None:
        """A process is about to write into the store: it may be made to die here."""
        process = self.kernel.running().process
        count = self.writes[process.name] = self.writes.get(process.name, 0) + 1
        if self.kill_before.get(process.name) == count:
            self.truth.excuse()
            self.kernel.kill(process, -9, f"(before its write {count})")
            raise Dead

    # -- the policy

    def policy(
        self,
        jobs: Sequence[JobInfo],
        nodes: Sequence[NodeInfo],
        current: Mapping[str, Mapping[str, int]],
        now: float,
        settings: Any,
    ) -> Decision:
        """Sizes and places drawn at random among what is allowed: every change that there could be."""
        chance = self.kernel.random
        self.kernel.sleep(0.05 * chance.random())
        free = {node.name: node.slots for node in nodes if not node.draining}
        found: dict[str, dict[str, int]] = {}
        order = list(jobs)
        chance.shuffle(order)
        keeps = {job.name for job in order if current.get(job.name) and (self.calm or chance.random() < 0.3)}
        for job in sorted(order, key=lambda one: one.name not in keeps):
            mine = dict(current.get(job.name, {})) if job.name in keeps else _draw(job, free, current, chance)
            if any(free.get(node, 0) < count for node, count in mine.items()):
                mine = _draw(job, free, current, chance)
            for node, count in mine.items():
                free[node] -= count
            found[job.name] = mine
        return Decision(found, {name: Reason("drawn at random") for name in found})

    # -- checks

    def history_violations(self) -> list[str]:
        """What the history checker says of all that was in the store, and of the agents' event logs."""
        found: list[str] = []
        for name in self.jobs:
            logs = {
                f"{agent.machine.name}#{agent.serial}": agent.events
                for agent in self.agents
                if agent.job.spec.job == name
            }
            found += history.violations(self.etcd.history, self.keys, name, logs)
        return found


def _draw(
    job: JobInfo, free: Mapping[str, int], current: Mapping[str, Mapping[str, int]], chance: Any
) -> dict[str, int]:
    """An allocation for one job; empty where there is no room."""
    limits = job.limits or {}
    rooms = {
        node: (limits[node].min_slots, min(slots, limits[node].max_slots))
        for node, slots in free.items()
        if node in limits and min(slots, limits[node].max_slots) >= limits[node].min_slots
    }
    now = current.get(job.name, {})
    names = [node for node in now if node in rooms]
    others = sorted(node for node in rooms if node not in names)
    chance.shuffle(others)
    if chance.random() < 0.2:
        chance.shuffle(names)
    names = [*names, *others]
    most_nodes = min(len(names), job.max_nodes or len(names), job.max_replicas)
    if most_nodes < job.min_nodes:
        return {}
    count = chance.randint(max(1, job.min_nodes), most_nodes) if most_nodes >= 1 else 0
    wanted = job.requested_replicas or chance.randint(job.min_replicas, job.max_replicas)
    for nodes in range(count, most_nodes + 1):
        chosen = names[:nodes]
        least, most = sum(rooms[n][0] for n in chosen), sum(rooms[n][1] for n in chosen)
        size = min(max(wanted, least, job.min_replicas), most, job.max_replicas)
        if size < max(least, job.min_replicas) or (job.requested_replicas and size != job.requested_replicas):
            continue
        mine = {node: rooms[node][0] for node in chosen}
        for node in chosen:
            more = min(rooms[node][1] - mine[node], size - sum(mine.values()))
            mine[node] += more
        if mine:
            return mine
    return {}


class _Log(logging.Handler):
    """What the product logs goes into the trace; an error is a defect of it."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self._kernel = kernel

    def emit(self, record: logging.LogRecord) -> None:
        task = self._kernel.current
        who = task.name if task is not None else "kernel"
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += f": {record.exc_info[1]!r}"
        if record.levelno >= logging.ERROR and task is not None and task.process.alive:
            self._kernel.defect(f"{who} logs an error: {text}")
        else:
            self._kernel.note(f"{who} logs: {text}")


Check = Callable[[World], list[str]]
