"""The coordinator's core on a store in memory, moved by hand: no threads, and time is what the test says."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from at_once import decide_at_once
from fake_agents import FakeAgent, spec_of, submit

from adaptdl_elastic.autoscaler.cluster_view import ClusterCache, View
from adaptdl_elastic.autoscaler.coordinator.decide import decide
from adaptdl_elastic.autoscaler.coordinator.decision_types import (
    CompareAndSwap,
    CoordinatorSettings,
    Decided,
    DeletePrefix,
    Memory,
    PolicyAnswer,
    PolicyQuestion,
    PolicyRound,
    Say,
)
from adaptdl_elastic.autoscaler.coordinator.job_phase import condition_of
from adaptdl_elastic.autoscaler.coordinator.policy_adapter import Policy, ask
from adaptdl_elastic.autoscaler.coordinator.rounds import compute
from adaptdl_elastic.autoscaler.coordinator.slots import Ledger
from adaptdl_elastic.autoscaler.policy.policy_types import Decision, JobInfo, NodeInfo, Reason
from adaptdl_elastic.rendezvous.schema import records
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import CheckpointRecord, JobRequest, JobStatus, Plan
from adaptdl_elastic.rendezvous.store.memory import MemoryStore


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def share_policy(
    jobs: Sequence[JobInfo],
    nodes: Sequence[NodeInfo],
    current: Mapping[str, Mapping[str, int]],
    now: float,
    settings: Any,
) -> Decision:
    """First come, first served, minimum first, then one replica at a time in turn: a stand-in."""
    free = {node.name: node.slots for node in nodes if not node.draining}
    got: dict[str, dict[str, int]] = {job.name: {} for job in jobs}

    def room(job: JobInfo, node: str) -> bool:
        limit = None if job.limits is None else job.limits.get(node)
        if (job.limits is not None and limit is None) or free.get(node, 0) < 1:
            return False
        return limit is None or got[job.name].get(node, 0) < limit.max_slots

    def add(job: JobInfo) -> bool:
        mine = got[job.name]
        order = [*current.get(job.name, {}), *mine, *sorted(free)]
        if len(mine) < job.min_nodes:
            order = [node for node in order if node not in mine]
        for node in order:
            limit = (job.limits or {}).get(node)
            first = 0 if node in mine or limit is None else limit.min_slots
            if not room(job, node) or free[node] < max(1, first):
                continue
            if node not in mine and job.max_nodes is not None and len(mine) >= job.max_nodes:
                continue
            count = max(1, first)
            if sum(mine.values()) + count > (job.requested_replicas or job.max_replicas):
                continue
            mine[node] = mine.get(node, 0) + count
            free[node] -= count
            return True
        return False

    for job in jobs:
        least = job.requested_replicas or job.min_replicas
        while sum(got[job.name].values()) < least and add(job):
            pass
        if sum(got[job.name].values()) < job.min_replicas or len(got[job.name]) < job.min_nodes:
            for node, count in got[job.name].items():
                free[node] += count
            got[job.name] = {}
    growing = [job for job in jobs if got[job.name] and job.model is not None and not job.requested_replicas]
    while growing:
        growing = [
            job
            for job in growing
            if sum(got[job.name].values()) < 2 * max(1, job.max_profiled_replicas) and add(job)
        ]
    reasons = {name: Reason(f"shares: {sum(mine.values())} replicas") for name, mine in got.items()}
    return Decision(allocations=got, reasons=reasons)


@dataclass
class Pump:
    """One coordinator and its agents, stepped until nothing moves."""

    policy: Policy = share_policy
    settings: CoordinatorSettings = field(
        default_factory=lambda: CoordinatorSettings(interval=60.0, min_gap=0.0)
    )
    clock: Clock = field(default_factory=Clock)
    keys: Keys = field(default_factory=Keys)
    fence: int = field(init=False)
    store: MemoryStore = field(init=False)
    agents: list[FakeAgent] = field(default_factory=list)
    memory: Memory = field(default_factory=Memory)
    said: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    wake_at: float = 0.0
    slow: bool = False  # rounds of the policy wait for `answer()`
    asked: list[PolicyRound] = field(default_factory=list)  # those that do
    _serials: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.store = MemoryStore(self.clock)
        self.keeper = ClusterCache(self.keys)
        self.steady_since = float("-inf")
        self._elect()

    def _elect(self) -> None:
        """Write the leader's key; its revision is the fence."""
        leader = records.encode(records.LeaderRecord("coordinator", "host"))
        self.fence = self.store.put(self.keys.coordinator_leader, leader)

    # -- moving

    def view(self) -> View:
        self.keeper.take(self.store.range(self.keys.root), self.clock())
        return self.keeper.view(self.clock(), self.clock(), self.steady_since)

    def question(self) -> PolicyQuestion:
        """What the policy would be asked about all jobs now."""
        view = self.view()
        conditions = {name: condition_of(view, job, self.settings) for name, job in view.jobs.items()}
        return ask(view, conditions, self.memory, Ledger(view), self.settings)

    def decide(self) -> int:
        """One decision, carried out; how many writes it made."""
        given: dict[str, Any] = {"keys": self.keys, "fence": self.fence, "settings": self.settings}
        if not self.slow:
            return self._carry_out(decide_at_once(self.view(), self.memory, policy=self.policy, **given))
        decided = decide(self.view(), self.memory, **given)
        self.asked += [decided.ask] if decided.ask is not None else []
        return self._carry_out(decided)

    def answer(self, given: PolicyAnswer | None = None) -> int:
        """The oldest round that waits is answered."""
        answer = given or compute(self.policy, self.asked.pop(0), lambda: 0.0)
        decided = decide(
            self.view(),
            self.memory,
            keys=self.keys,
            fence=self.fence,
            settings=self.settings,
            answer=answer,
        )
        self.asked += [decided.ask] if decided.ask is not None else []
        return self._carry_out(decided)

    def _carry_out(self, decided: Decided) -> int:
        self.memory, self.wake_at = decided.memory, decided.wake_at
        written = 0
        for action in decided.actions:
            match action:
                case CompareAndSwap(key, record, revision):
                    text = None if record is None else records.encode(record)
                    done = self.store.compare_and_swap(key, text, revision)
                    assert done is not None, f"{key} was not what the view said"
                    written += 1
                    if isinstance(record, Plan):
                        self.plans.append(record)
                case DeletePrefix(prefix):
                    self.store.delete_prefix(prefix)
                case Say(event, fields):
                    json.dumps(dict(fields))
                    self.said.append((event, dict(fields)))
        return written

    def settle(self, limit: int = 200) -> Pump:
        """Coordinator and agents take turns until nothing moves."""
        for _ in range(limit):
            moved = self.decide() > 0
            for agent in self.agents:
                moved = agent.step() or moved
            if not moved:
                return self
        raise AssertionError("it does not settle")

    def later(self, seconds: float) -> Pump:
        """Let time pass, deciding whenever the coordinator wants to."""
        end = self.clock.now + seconds
        while self.wake_at < end:
            self.clock.now = max(self.clock.now, self.wake_at) + 1e-6
            self.settle()
        self.clock.now = end
        return self.settle()

    def take_over(self) -> Pump:
        """Another coordinator leads: a higher fence, and nothing in its memory."""
        self._elect()
        self.memory = Memory()
        self.keeper = ClusterCache(self.keys)
        self.steady_since = self.clock()
        return self

    # -- the world

    def job(self, name: str, **changes: object) -> None:
        submit(self.store, self.keys, replace(spec_of(name), **changes))  # type: ignore[arg-type]

    def node(self, node: str, job: str, slots: int = 1, **changes: Any) -> FakeAgent:
        serial = next(self._serials)
        agent = FakeAgent(
            self.store.client(), self.keys, node, job, slots, serial=serial, clock=self.clock, **changes
        )
        self.agents.append(agent)
        return agent.register()

    def ask(self, job: str, **changes: Any) -> None:
        item = self.store.get(self.keys.job(job, "request"))
        old = JobRequest() if item is None else records.decode(JobRequest, item.value)
        self.store.put(self.keys.job(job, "request"), records.encode(replace(old, **changes)))

    def checkpoint(self, job: str, step: int, generation: int | None = None) -> None:
        generation = self.plan(job).generation if generation is None else generation
        record = CheckpointRecord(f"{job}-{step}", "/nowhere", generation, step)
        self.store.put(self.keys.job(job, "checkpoint"), records.encode(record))

    def plan(self, job: str) -> Plan:
        item = self.store.get(self.keys.job(job, "plan"))
        assert item is not None
        return records.decode(Plan, item.value)

    def placed(self, job: str) -> dict[str, int]:
        return {p.node: p.replicas for p in self.plan(job).placements}

    def status(self, job: str) -> JobStatus:
        item = self.store.get(self.keys.job(job, "status"))
        assert item is not None
        return records.decode(JobStatus, item.value)


def start(pump: Pump, nodes: int = 2, slots: int = 1, **changes: object) -> None:
    """A job `a` that runs on every one of `nodes`."""
    size = nodes * slots
    pump.job("a", min_nodes=nodes, min_replicas=size, max_replicas=size, **changes)
    for index in range(nodes):
        pump.node(f"n{index}", "a", slots)
    pump.settle()
    assert pump.plan("a").replicas == size


def elastic(pump: Pump, nodes: int = 3, **changes: object) -> None:
    """A job `a` that runs on `nodes` single-slot nodes and could run on one."""
    pump.job("a", max_replicas=nodes, max_nodes=nodes, **changes)
    for index in range(nodes):
        pump.node(f"n{index}", "a")
    pump.settle()
    assert pump.plan("a").replicas == nodes
