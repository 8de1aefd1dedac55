"""The policy holds its bounds in replays of a small workload."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from simulator.application import Application, read_application
from simulator.baselines import make_policy
from simulator.engine import FixedCluster, Simulation, SimulationOptions
from simulator.outcome_report import summarize
from simulator.synthetic import generate_workload, write_applications
from simulator.workload import (
    read_workload,
)

from adaptdl_elastic.autoscaler.policy import Decision, JobInfo, NodeInfo, PolicySettings, allocate

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason=f"no traces in {TRACES}")


@pytest.fixture(scope="session")
def apps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Application]:
    folder = tmp_path_factory.mktemp("apps")
    write_applications(folder)
    return {path.name: read_application(path) for path in folder.iterdir()}


WORKLOAD = generate_workload(12, 0.5, seed=3)


def run(
    apps: dict[str, Application], policy: str = "goodput", nodes: int = 4, **options: object
) -> Simulation:
    function, tuned = make_policy(policy)
    how = replace(SimulationOptions(tuned=tuned, pause=1.0, events=True), **options)  # type: ignore[arg-type]
    simulation = Simulation(WORKLOAD, apps, FixedCluster(nodes, 4), function, options=how)
    simulation.run()
    return simulation


# --------------------------------------------------------------------------------------- the rules


@needs_traces
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.exhaustive
def test_goodput_beats_pollux_by_a_fifth() -> None:
    workload = read_workload(TRACES / "workloads" / "workload-6.csv")
    used = {job.application for job in workload}
    apps = {name: read_application(TRACES / "apps" / name) for name in used}
    options = SimulationOptions(pause=1.0, events=True)
    outcome = Simulation(workload, apps, FixedCluster(16, 4), allocate, options=options).run()
    published = json.loads((TRACES / "baselines.json").read_text())["policies"]["pollux"]["workload-6"]
    report = summarize(outcome, fairness=False)
    assert report.average_jct < 0.78 * published
    assert report.longest_wait <= 1200


# --------------------------------------------------------------------------------------- the engine


@pytest.fixture(scope="module")
def plain(apps: dict[str, Application]) -> Simulation:
    """The workload with all the usual settings, run to its end."""
    return run(apps)


def test_nothing_grows_faster_than_twofold(apps: dict[str, Application]) -> None:
    most: dict[str, int] = {}
    for sample in run(apps, report_delay=5.0).outcome.samples:
        for name, replicas in sample.replicas.items():
            assert replicas <= max(2 * most.get(name, 0), 1)
            most[name] = max(most.get(name, 0), replicas)


def test_nobody_waits_much_longer_than_the_bound(apps: dict[str, Application]) -> None:
    slots, most = 4, 6
    crowd = [replace(job, time=0.0) for job in WORKLOAD[:most]]
    options = SimulationOptions(pause=1.0, events=True)
    given = PolicySettings(max_wait=300.0)
    outcome = Simulation(crowd, apps, FixedCluster(1, slots), allocate, given, options).run()
    report = summarize(outcome, fairness=False)
    assert any(sample.waiting for sample in outcome.samples)
    assert 0 < report.longest_wait <= given.max_wait + options.interval
    patient = Simulation(
        crowd, apps, FixedCluster(1, slots), allocate, replace(given, max_wait=1e9), options
    ).run()
    assert summarize(patient, fairness=False).longest_wait > 2 * report.longest_wait


def test_lengths_are_learnt_from_jobs_that_have_ended(apps: dict[str, Application]) -> None:
    seen: list[JobInfo] = []

    def spy(jobs: Sequence[JobInfo], *rest: Any) -> Decision:
        seen.extend(jobs)
        return allocate(jobs, *rest)

    options = SimulationOptions(pause=1.0, events=True, undeclared=True)
    simulation = Simulation(WORKLOAD, apps, FixedCluster(2, 4), spy, options=options)
    simulation.run()
    kinds = {job.name: job.app for job in simulation.jobs}
    told = [info for info in seen if info.kind_totals]
    assert told
    for info in told:
        app = kinds[info.name]
        expected = app.total_progress * app.init_batch_size
        assert info.kind_totals == pytest.approx([expected] * len(info.kind_totals))
        assert info.remaining is None


def test_knowing_lengths_helps_and_not_knowing_them_works(apps: dict[str, Application]) -> None:
    known = summarize(run(apps, nodes=2).outcome, fairness=False)
    unknown = summarize(run(apps, nodes=2, undeclared=True).outcome, fairness=False)
    assert known.average_jct <= unknown.average_jct * 1.02


def declaring(apps: dict[str, Application], job: str, factor: float, kin: bool) -> tuple[float, float]:
    """Replay on two nodes; return the job's completion time and the mean of the others.

    The job declares `factor` times its length. With `kin` other jobs of its application are there.
    """
    jobs = [one for one in WORKLOAD if kin or one.application == "small" or one.name == job]
    options = SimulationOptions(declared={job: factor})
    outcome = Simulation(jobs, apps, FixedCluster(2, 4), allocate, options=options).run()
    taken = {one.name: (one.completed or 0.0) - one.submission.time for one in outcome.jobs}
    own = taken.pop(job)
    return own, sum(taken.values()) / len(taken)


@pytest.mark.parametrize("factor", [0.01, 0.5])
def test_a_job_that_outlives_what_it_declared_neither_freezes_nor_gains(
    apps: dict[str, Application], factor: float
) -> None:
    honest, others = declaring(apps, "medium-9", 1.0, kin=False)
    own, theirs = declaring(apps, "medium-9", factor, kin=False)
    assert own == pytest.approx(honest, rel=0.05)
    assert theirs == pytest.approx(others, rel=0.05)


def test_a_job_gains_nothing_by_declaring_less_than_others_of_its_kind(apps: dict[str, Application]) -> None:
    assert declaring(apps, "medium-9", 0.5, kin=True) == declaring(apps, "medium-9", 1.0, kin=True)


def test_the_cheaper_the_change_the_shorter_the_jobs(apps: dict[str, Application], plain: Simulation) -> None:
    cheap = summarize(plain.outcome, fairness=False)
    dear = summarize(run(apps, pause=30.0, events=False).outcome, fairness=False)
    assert cheap.average_jct < dear.average_jct


@dataclass
class Shrinking:
    """Loses a node at a given time."""

    at: float

    def nodes(self, now: float) -> Sequence[NodeInfo]:
        return FixedCluster(3 if now < self.at else 2, 4).nodes(now)

    def next_change(self, now: float) -> float | None:
        return self.at if now < self.at else None


# --------------------------------------------------------------------------------------- bad input


GOOD = "name,time,application,num_replicas,batch_size\na,0,small,1,128\n"


# --------------------------------------------------------------------------------------- the command
