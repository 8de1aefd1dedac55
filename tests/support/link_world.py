"""A job on nodes whose wires differ and change: real measurements, reports and decisions, simulated steps."""

from __future__ import annotations

import queue
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from coordinator_pump import Pump
from fake_agents import FakeAgent
from fake_loader import limit, use
from fresh import Script

from adaptdl_elastic import _session, sched_hints
from adaptdl_elastic.agent.cluster.link_probe import LinkWatch
from adaptdl_elastic.autoscaler.policy import allocate
from adaptdl_elastic.goodput import ring_time
from adaptdl_elastic.rendezvous.schema.records import Link, NodeRecord
from adaptdl_elastic.torch._bootstrap import current_session
from adaptdl_elastic.torch._runtime.step_clock import StepParts
from adaptdl_elastic.torch._tuning.lag import NetworkJudge, Report
from adaptdl_elastic.torch._tuning.replica_speed import EVERY
from adaptdl_elastic.torch._tuning.reporter import Metrics

BATCH, LATENCY = 16, 2e-4
PAUSE = 0.3  # seconds of a change, without the transfer of the state
REPORTS = 2.0  # seconds from one report to the next
TICK = 0.5  # seconds from one decision to the next
MEASURING = 3.0  # seconds that a measurement takes


class Agent:
    """The registration of one node, and what measures its links."""

    def __init__(self, world: LinkWorld, fake: FakeAgent) -> None:
        self._world, self._fake = world, fake
        self.record = fake.record(host=fake.node, link_port=1)
        calls: queue.Queue[Callable[[], None]] = queue.Queue()
        self._calls = calls
        self.watch = LinkWatch(partial(world.links, fake.node), self, calls.put, lambda write: write())  # type: ignore[arg-type]

    def update(self, **fields: Any) -> None:
        self.record = replace(self.record, **fields)
        told = self.record
        self._fake.register(
            host=told.host, links=told.links, links_at=told.links_at, links_since=told.links_since
        )

    def measured(self) -> None:
        """Wait for a measurement."""
        self._calls.get(timeout=30)()


class LinkWorld:
    """A job of `parameters` parameters on nodes a, b, …, whose wires have so many bytes a second."""

    def __init__(self, script: Script, parameters: float, **wires: float) -> None:
        self._script, self._chance = script, random.Random(0)
        self.wires, self.bytes = dict(wires), 4 * parameters
        self.each = 9.2e-9 * parameters  # seconds that a sample is computed for
        self.pump = Pump(policy=allocate)
        self.now = self.pump.clock.now
        self.sizes: list[tuple[float, frozenset[str]]] = []  # when the job got on which nodes
        self.done = 0.0
        self.metrics = Metrics(clock=lambda: self.now, background=False)
        _session.current().metrics = self.metrics  # type: ignore[misc]
        self.pump.job("j", max_replicas=len(wires), max_nodes=len(wires))
        self.agents: dict[str, Agent] = {}
        for node in wires:
            self.agents[node] = Agent(self, self.pump.node(node, "j", reports=False, inplace=True))
            self.agents[node].update(links=self.links(node))
        self._generation, self._reported, self._said = -1, -1e9, 0
        limit(BATCH)
        self.pump.settle()

    def set(self, *wires: float) -> None:
        """Change the wires of all nodes."""
        self.wires = dict(zip(self.wires, wires, strict=True))

    def links(self, node: str, known: Sequence[Link] = ()) -> tuple[Link, ...]:
        """Measure the links from at most three others, as agents do: when they join, from the last ones."""
        others = [other for other in self.agents if other != node]
        joins = len(self.agents) < len(self.wires)
        if not joins:
            self._chance.shuffle(others)
            fastest = max(known, key=lambda link: link.bandwidth).node if known else ""
            others.sort(key=lambda other: other == fastest)
        peers = others[-3:]
        return tuple(Link(other, LATENCY, min(self.wires[node], self.wires[other])) for other in peers)

    def seconds(self, on: frozenset[str]) -> float:
        """The seconds of a step on these nodes."""
        compute = 0.003 + self.each * -(-BATCH // len(on))
        if len(on) == 1:
            return compute
        slowest = min(self.wires[node] for node in on)
        return compute + float(ring_time(len(on), LATENCY, self.bytes / slowest))  # type: ignore[arg-type]

    def best(self) -> float:
        """The most steps a second that any of the nodes make."""
        order = sorted(self.wires, key=lambda node: -self.wires[node])
        return max(1 / self.seconds(frozenset(order[: n + 1])) for n in range(len(order)))

    @property
    def rate(self) -> float:
        """The steps a second on the present nodes."""
        return 1 / self.seconds(self.on)

    @property
    def on(self) -> frozenset[str]:
        return frozenset(self.pump.placed("j"))

    def changes(self, seconds: float) -> int:
        """The changes of the last `seconds`."""
        return sum(when > self.now - seconds for when, _ in self.sizes[1:])

    def measure(self) -> LinkWorld:
        """Train on one, two and three nodes, as a person asks, and then as the policy decides."""
        for replicas in range(1, len(self.wires) + 1):
            self.pump.ask("j", replicas=replicas)
            self.run(25.0)
        self.pump.ask("j", replicas=None)
        return self

    def run(self, seconds: float) -> None:
        """Train for so long."""
        self.pump.settle()
        end = self.now + seconds
        while self.now < end:
            plan = self.pump.plan("j")
            if plan.generation != self._generation:
                self._change(plan.generation)
            on = self.on
            used = BATCH // len(on) + (BATCH % len(on) > 0)
            use(self.metrics, used, 0)
            self.metrics.profile_step_start(used)
            self._pass(self.seconds(on))
            self.metrics.profile_step_commit()
            self.done += 1
            self._compare(on, used)
            if self.now - self._reported >= REPORTS:
                self._report()

    def _pass(self, seconds: float) -> None:
        self.now += seconds
        if self.now - self.pump.clock.now < TICK:
            return
        self.pump.later(self.now - self.pump.clock.now)
        for node, agent in self.agents.items():
            plan, status = self.pump.plan("j"), self.pump.status("j")
            agent.watch.look(self._registered, plan, status, node not in self.on, self.now)
            if agent.watch.measuring:
                agent.measured()

    @property
    def _registered(self) -> Mapping[str, NodeRecord]:
        return {node: agent.record for node, agent in self.agents.items()}

    def _change(self, generation: int) -> None:
        on = self.on
        self.sizes.append((self.now, on))
        self._generation, self._steps = generation, 0
        self._judge = NetworkJudge()
        self._script.set(ADAPTDL_PLACEMENT=",".join(sorted(on)) if len(on) > 1 else "")
        self._script.set(ADAPTDL_LINKS_SINCE=str(self.pump.plan("j").links_since))
        session = current_session()
        session.identity = _session.Identity(0, len(on), len(on), generation, "j")
        slowest = min(self.wires[node] for node in on)
        self.metrics.pause()
        self._pass(PAUSE + (3 * self.bytes / slowest if len(self.sizes) > 1 else 0.0))
        self._reported = self.now

    def _compare(self, on: frozenset[str], used: int) -> None:
        self._steps += 1
        if len(on) == 1 or self._steps % EVERY or self._steps < 3 * EVERY:
            return
        compute = 0.003 + self.each * used
        parts = StepParts(0.0, compute, 0.0, self.seconds(on) - compute)
        since = self._judge.judge([Report(node, parts) for node in on], self.now)
        if since is None:
            return
        self.metrics.network_changed(self.now - since, used, compute)
        for node in on:
            self.agents[node].watch.measure(self._registered, self.pump.plan("j"))
        self._pass(MEASURING)

    def _report(self) -> None:
        self._reported = self.now
        self.metrics.update_grad_params("m", 1.0, 100.0)
        self.metrics.refresh()
        sent = {"gradient_bytes": self.bytes, "state_bytes": 3 * self.bytes, "inplace": True}
        hints = replace(self.metrics.hints(), samples_done=self.done * BATCH, **sent)
        self.pump.store.put(self.pump.keys.job("j", "hints"), sched_hints.encode(hints))
        self.pump.settle()
