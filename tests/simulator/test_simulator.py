"""The replay follows its rules, is deterministic, and refuses bad input in one line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from simulator.application import Application, read_application
from simulator.baselines import POLICIES, Tiresias, make_policy
from simulator.engine import FixedCluster, Simulation, SimulationOptions
from simulator.outcome_report import summarize
from simulator.simulate_command import simulate
from simulator.synthetic import generate_workload, write_applications
from simulator.workload import (
    Submission,
    WorkloadError,
    read_workload,
    write_workload,
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
@pytest.mark.parametrize("number", [3, 6, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 4))])
def test_tiresias_gives_exactly_the_published_figures(number: int) -> None:
    name = f"workload-{number}"
    workload = read_workload(TRACES / "workloads" / f"{name}.csv")
    used = {job.application for job in workload}
    apps = {name: read_application(TRACES / "apps" / name) for name in used}
    outcome = Simulation(
        workload, apps, FixedCluster(16, 4), Tiresias(), options=SimulationOptions(tuned=True)
    ).run()
    published = json.loads((TRACES / "baselines.json").read_text())
    report, tails = summarize(outcome, fairness=False), published["tails"]["tiresias"][name]
    assert report.average_jct == published["tiresias_exact"][name]
    assert report.median_jct == tails["p50"]
    assert report.p99_jct == pytest.approx(tails["p99"], abs=0.01)
    assert report.makespan == tails["makespan"]


def test_tiresias_counts_the_time_of_all_runs_of_a_job() -> None:
    policy, current = Tiresias(), {}
    nodes, sizes = [NodeInfo("n0", 4)], {"first": 2, "wide": 4, "narrow": 2, "late": 4}

    def running(now: float, *names: str) -> set[str]:
        jobs = [JobInfo(name, max_replicas=4, requested_replicas=sizes[name]) for name in names]
        found = policy(jobs, nodes, current, now, PolicySettings()).allocations
        current.update(found)
        return {name for name in names if found[name]}

    assert running(0, "first", "wide", "narrow") == {"first", "narrow"}
    assert running(20_000, "wide", "narrow") == {"wide"}
    assert running(30_000, "narrow") == {"narrow"}
    # 30,000 s on two slots, in two runs, are more than the first queue's 57,600 slot seconds
    assert running(40_000, "narrow", "late") == {"late"}


def test_a_placement_keeps_the_order_in_which_it_was_allocated(apps: dict[str, Application]) -> None:
    class Backwards:
        def __call__(self, jobs: Sequence[JobInfo], nodes: Sequence[NodeInfo], *rest: Any) -> Decision:
            return Decision({job.name: {nodes[2].name: 2, nodes[0].name: 1} for job in jobs}, {})

    (submission,) = WORKLOAD[:1]
    simulation = Simulation([submission], apps, FixedCluster(3, 4), Backwards())
    simulation.run()
    assert simulation.jobs[0].parts == (2, 1)


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


@needs_traces
def test_a_measured_placement_is_what_was_measured() -> None:
    app = read_application(TRACES / "apps" / "cifar10")
    sizes, step, sync = app.placements[(1,)]
    assert app.throughput((1,), int(sizes[0])) == (step[0], sync[0])
    assert app.throughput((2, 0, 1), 64) == app.throughput((1, 2), 64)  # a rotation of it


# --------------------------------------------------------------------------------------- the engine


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_finishes_every_job_and_fits(apps: dict[str, Application], policy: str) -> None:
    simulation = run(apps, policy, pause=30.0, events=False)
    assert all(job.completed is not None for job in simulation.jobs)
    assert all(sum(s.replicas.values()) <= s.slots for s in simulation.outcome.samples)
    report = summarize(simulation.outcome)
    assert 0 < report.median_jct <= report.p99_jct
    assert report.finish_time_fairness["median"] > 0


@pytest.fixture(scope="module")
def plain(apps: dict[str, Application]) -> Simulation:
    """The workload with all the usual settings, run to its end."""
    return run(apps)


def test_the_same_again_is_the_same(apps: dict[str, Application], plain: Simulation) -> None:
    first, second = plain, run(apps)
    assert [job.completed for job in first.jobs] == [job.completed for job in second.jobs]
    assert first.outcome.samples == second.outcome.samples


def test_work_is_conserved(plain: Simulation) -> None:
    for job in plain.jobs:
        assert job.progress == pytest.approx(job.app.total_progress)
        assert job.epoch == job.app.epochs


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


def test_nodes_may_go(apps: dict[str, Application]) -> None:
    cluster = Shrinking(at=1000.0)
    simulation = Simulation(
        WORKLOAD, apps, cluster, allocate, options=SimulationOptions(pause=1.0, events=True)
    )
    outcome = simulation.run()
    assert {s.slots for s in outcome.samples} == {8, 12}
    assert min(s.time for s in outcome.samples if s.slots == 8) == 1000.0
    assert all(sum(s.replicas.values()) <= s.slots for s in outcome.samples)


# --------------------------------------------------------------------------------------- bad input


GOOD = "name,time,application,num_replicas,batch_size\na,0,small,1,128\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "columns name, time, application, num_replicas, batch_size are missing"),
        ("name,time\na,1\n", "columns application, num_replicas, batch_size are missing"),
        ("name,time,application,num_replicas,batch_size\n", "holds no jobs"),
        (GOOD + "a,1,small,1,128\n", "job names must be unique, a occur"),
        (GOOD + "b,soon,small,1,128\n", ":3: time is 'soon', need a number"),
        (GOOD + "b,-1,small,1,128\n", ":3: time is -1, need at least 0"),
        (GOOD + "b,1,small,0,128\n", ":3: num_replicas is 0, need at least 1"),
        (GOOD + "b,1,small,nan,128\n", ":3: num_replicas is nan"),
        (GOOD + "b,1,small\n", ":3: num_replicas is None"),
        (GOOD + "b,1,,1,128\n", ":3: application is empty"),
    ],
)
def test_a_malformed_workload_names_the_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "w.csv"
    path.write_text(text)
    with pytest.raises(WorkloadError) as caught:
        read_workload(path)
    assert message in str(caught.value)


def test_a_workload_survives_being_written(tmp_path: Path) -> None:
    write_workload(tmp_path / "w.csv", WORKLOAD)
    assert read_workload(tmp_path / "w.csv") == WORKLOAD


def test_missing_traces_are_named(tmp_path: Path, apps: dict[str, Application]) -> None:
    with pytest.raises(WorkloadError, match="no application 'gone'"):
        read_application(tmp_path / "gone")
    unknown = [Submission("a", 0.0, "gone", 1, 1)]
    with pytest.raises(WorkloadError, match="no traces for application gone; there are"):
        Simulation(unknown, apps, FixedCluster(1, 1), allocate)
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "placements.csv").write_text("placement,local_bsz\n1,2\n")
    with pytest.raises(WorkloadError, match="column 'step_time' is missing"):
        read_application(tmp_path / "half")


# --------------------------------------------------------------------------------------- the command


def test_the_command_prints_json_and_draws(tmp_path: Path) -> None:
    plot, saved = tmp_path / "run.png", tmp_path / "made"
    arguments = ["--generate", "6", "--hours", "0.2", "--nodes", "2", "--rescale-cost", "1", "--json"]
    result = CliRunner().invoke(simulate, [*arguments, "--plot", str(plot), "--save", str(saved)])
    assert result.exit_code == 0, result.output
    values = json.loads(result.output)
    assert values["jobs"] == 6
    assert values["average_jct"] > 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    again = ["--workload", str(saved / "workload.csv"), "--apps", str(saved / "apps"), *arguments[4:]]
    replayed = json.loads(CliRunner().invoke(simulate, again).output)
    assert replayed["average_jct"] == values["average_jct"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "x.csv"], "--workload and --apps go together"),
        (["--workload", "x.csv", "--apps", "y"], "cannot read workload x.csv"),
        (
            ["--workload", "x.csv", "--apps", "y", "--generate", "3"],
            "either --workload and --apps, or --generate",
        ),
        (["--policy", "magic"], "'magic' is not one of"),
        (["--nodes", "0"], "0 is not in the range"),
    ],
)
def test_a_wrong_option_is_one_clear_line(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(simulate, arguments)
    assert result.exit_code != 0
    assert message in result.output
    assert "Traceback" not in result.output
