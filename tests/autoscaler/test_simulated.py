from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from simulator.application import read_application
from simulator.engine import FixedCluster, Simulation, SimulationOptions
from simulator.outcome_report import summarize
from simulator.synthetic import generate_workload, write_applications
from simulator.through_coordinator import ThroughCoordinator

from adaptdl_elastic.autoscaler.policy import allocate
from adaptdl_elastic.autoscaler.policy.policy_types import Allocation, Decision, JobInfo, NodeInfo


def fixed(places: Mapping[str, Allocation]) -> Any:
    def policy(
        jobs: Sequence[JobInfo], nodes: Sequence[NodeInfo], current: Any, now: float, settings: Any
    ) -> Decision:
        return Decision(allocations={job.name: places.get(job.name, {}) for job in jobs}, reasons={})

    return policy


def test_a_swap_is_carried_out_within_one_call() -> None:
    places: dict[str, Allocation] = {"a": {"n0": 2}, "b": {"n1": 2}}
    through = ThroughCoordinator(fixed(places))
    jobs = [JobInfo(name, max_replicas=4) for name in places]
    nodes = [NodeInfo("n0", 2), NodeInfo("n1", 2)]
    assert through(jobs, nodes, {}, 0.0, None).allocations == places
    before = dict(places)
    places.update(a={"n1": 2}, b={"n0": 2})
    found = through(jobs, nodes, before, 60.0, None)
    assert found.allocations == places
    assert set(found.changed) == {"a", "b"}


def test_a_node_that_goes_is_planned_without_and_a_job_that_ends_leaves_its_slots() -> None:
    places: dict[str, Allocation] = {"a": {"n0": 2}, "b": {"n1": 2}}
    through = ThroughCoordinator(fixed(places))
    jobs = [JobInfo(name, max_replicas=4) for name in places]
    nodes = [NodeInfo("n0", 2), NodeInfo("n1", 2)]
    through(jobs, nodes, {}, 0.0, None)
    del places["b"]
    places["a"] = {"n1": 2}
    found = through([jobs[0]], [nodes[1]], {"a": {"n0": 2}}, 60.0, None)
    assert found.allocations == {"a": {"n1": 2}}


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_simulation_through_the_coordinator_comes_to_the_same(tmp_path: Path) -> None:
    write_applications(tmp_path, 4, 4)
    apps = {path.name: read_application(path) for path in tmp_path.iterdir()}
    workload = generate_workload(12, 0.4)
    reports = []
    for policy in (allocate, ThroughCoordinator(allocate)):
        options = SimulationOptions(pause=1.0, events=True)
        outcome = Simulation(workload, apps, FixedCluster(4, 4), policy, options=options).run()
        reports.append(replace(summarize(outcome, False), policy_seconds=0.0))
    plain, through = reports
    assert through.average_jct == pytest.approx(plain.average_jct, rel=0.02)
    assert through.makespan == pytest.approx(plain.makespan, rel=0.02)
    assert through.longest_wait <= plain.longest_wait + 60
