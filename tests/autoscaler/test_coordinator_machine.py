"""Random joins, leaves, failures, requests and takeovers against the core; the agents keep the protocol."""

from __future__ import annotations

from coordinator_pump import Pump
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from adaptdl_elastic.autoscaler.coordinator.slots import Ledger
from adaptdl_elastic.rendezvous.schema.records import JobState, Outcome, Plan

JOBS = ("a", "b", "c")
NODES = {"n0": 1, "n1": 2, "n2": 3, "n3": 4}  # slots


class Cluster(RuleBasedStateMachine):
    """Three jobs whose agents come and go on four nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.pump = Pump()
        self.checked = 0
        self.runs = dict.fromkeys(JOBS, 1)

    @initialize(
        bounds=st.tuples(*[st.tuples(st.integers(1, 3), st.integers(1, 6)) for _ in JOBS]),
        nodes=st.tuples(*[st.integers(1, 3) for _ in JOBS]),
    )
    def submit(self, bounds: tuple[tuple[int, int], ...], nodes: tuple[int, ...]) -> None:
        for job, (least, more), max_nodes in zip(JOBS, bounds, nodes, strict=True):
            self.pump.job(job, min_replicas=least, max_replicas=least + more, max_nodes=max_nodes)

    def alive(self) -> list[int]:
        return [i for i, agent in enumerate(self.pump.agents) if agent.exit_code is None]

    def over(self, job: str) -> bool:
        item = self.pump.store.get(self.pump.keys.job(job, "status"))
        return item is not None and self.pump.status(job).state.ended and self.current(job)

    def current(self, job: str) -> bool:
        return self.pump.status(job).run == f"{job}-{self.runs[job]}"

    # -- what happens

    @rule(node=st.sampled_from(sorted(NODES)), job=st.sampled_from(JOBS), kind=st.integers(0, 2))
    def join(self, node: str, job: str, kind: int) -> None:
        if self.over(job):
            return
        for agent in self.pump.agents:
            if (agent.node, agent.job) == (node, job) and agent.exit_code is None:
                return
        self.pump.node(node, job, NODES[node], library=kind > 0, resilient=kind > 1)

    @precondition(lambda self: self.alive())
    @rule(
        data=st.data(),
        how=st.sampled_from(
            ("vanish", "fail", "finish", "drain", "replace", "stall", "wake", "lose", "notice")
        ),
    )
    def befall(self, data: st.DataObject, how: str) -> None:
        agent = self.pump.agents[data.draw(st.sampled_from(self.alive()))]
        if how in ("fail", "finish", "lose", "notice") and agent.running is None:
            return
        if how == "notice" and not agent.resilient:
            return
        if how == "drain":
            agent.register(draining=True)
        elif how == "replace":
            agent.exit_code = -9
            self.pump.node(agent.node, agent.job, agent.slots)
        elif how in ("stall", "wake"):
            agent.holds_start = how == "stall"
        elif how == "lose":
            agent.lose(data.draw(st.sampled_from(agent.alive)))
        else:
            getattr(agent, how)()

    @rule(job=st.sampled_from(JOBS), replicas=st.one_of(st.none(), st.integers(1, 8)))
    def ask(self, job: str, replicas: int | None) -> None:
        self.pump.ask(job, replicas=replicas)

    @rule(job=st.sampled_from(JOBS))
    def stop(self, job: str) -> None:
        self.pump.ask(job, stop=True, run=f"{job}-{self.runs[job]}")

    @rule(job=st.sampled_from(JOBS))
    def rerun(self, job: str) -> None:
        if self.over(job):
            self.runs[job] += 1
            self.pump.job(job, run=f"{job}-{self.runs[job]}", max_replicas=4)

    @rule()
    def take_over(self) -> None:
        self.pump.take_over()

    @rule(seconds=st.sampled_from((0.5, 3.0, 10.0, 70.0, 700.0)))
    def wait(self, seconds: float) -> None:
        self.pump.later(seconds)

    @rule()
    def one_decision(self) -> None:
        self.pump.decide()

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def one_step(self, data: st.DataObject) -> None:
        self.pump.agents[data.draw(st.sampled_from(self.alive()))].step()

    # -- what always holds

    @invariant()
    def generations_only_grow_and_fences_too(self) -> None:
        last: dict[str, Plan] = {}
        for plan in self.pump.plans:
            before = last.get(plan.job)
            if before is not None:
                assert plan.fence >= before.fence
                assert plan.generation >= before.generation
                if plan.generation == before.generation:  # fenced anew, or a claim for another run
                    assert plan.placements == before.placements or plan.claim
            last[plan.job] = plan

    @invariant()
    def plans_name_registered_nodes_and_keep_their_bounds(self) -> None:
        view = self.pump.view()
        fresh, self.checked = self.pump.plans[self.checked :], len(self.pump.plans)
        for plan in fresh:
            for placement in plan.placements:
                assert placement.agent
                assert placement.replicas >= 1
            spec = view.jobs[plan.job].spec
            assert spec is not None
            if plan.placements and plan.run == spec.record.run:
                assert spec.record.min_replicas <= plan.replicas <= spec.record.max_replicas
                assert spec.record.min_nodes <= plan.nodes <= spec.record.max_nodes

    @invariant()
    def nobody_runs_more_than_a_node_holds(self) -> None:
        slots = Ledger(self.pump.view()).capacity
        busy: dict[str, int] = {}
        for agent in self.pump.agents:
            if agent.exit_code is None and agent.running is not None:
                busy[agent.node] = busy.get(agent.node, 0) + agent.history[-1][1]
        for node, count in busy.items():
            assert count <= slots[node], f"{node} runs {count} replicas in {slots[node]} slots"

    @invariant()
    def no_two_generations_of_a_job_run_at_once(self) -> None:
        for job in JOBS:
            running = {a.running for a in self.pump.agents if a.job == job and a.exit_code is None}
            assert len(running - {None}) <= 1

    def teardown(self) -> None:
        """Left alone, every job runs, or is over, or says why it waits."""
        for agent in self.pump.agents:
            agent.holds_start = False
        self.pump.later(2000).settle()
        for job in JOBS:
            status = self.pump.status(job)
            plan = self.pump.plan(job)
            if status.state is JobState.RUNNING:
                assert plan.placements
                for placement in plan.placements:
                    ended = self.pump.view().jobs[job].ended.get((plan.generation, placement.node))
                    if ended is not None and ended.record.outcome is Outcome.DONE:
                        continue  # the others are about to end well, too
                    assert any(
                        agent.agent == placement.agent and agent.running == plan.generation
                        for agent in self.pump.agents
                    ), f"{job} should run on {placement.node}: {status.reason}"
            else:
                assert status.reason, job
                assert status.state is not JobState.STOPPING
                assert not any(
                    a.running is not None and a.exit_code is None for a in self.pump.agents if a.job == job
                )


Cluster.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestCluster = Cluster.TestCase
