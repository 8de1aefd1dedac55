"""Nodes of several types in a replay: slow nodes help, and their speed is learnt from measurements."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from simulator.application import Application, read_application
from simulator.engine import GivenCluster, Simulation, SimulationOptions
from simulator.outcome_report import summarize
from simulator.synthetic import generate_workload, write_applications

from adaptdl_elastic.autoscaler.coordinator.job_models import Report
from adaptdl_elastic.autoscaler.coordinator.node_types import (
    TypeRatios,
    on_types,
    pace,
    ratios,
    script_profile,
    script_ratios,
    typed_models,
)
from adaptdl_elastic.autoscaler.policy import NodeInfo, allocate
from adaptdl_elastic.autoscaler.policy.curves import goodputs
from adaptdl_elastic.protocol.hints import JobHints, ProfileEntry, TypeProfile

WORKLOAD = generate_workload(20, 0.6, seed=8)


def average(folder: Path, fast: int, slow: int, named: bool = True) -> float:
    """Replay with nodes at full speed and at a fifth of it; `named`: whether the policy knows their types."""
    apps = {path.name: read_application(path) for path in folder.iterdir()}
    for app in apps.values():
        app.types["slow"] = app.slowed(0.2)
    types = ["slow" if named and i >= fast else "" for i in range(fast + slow)]
    nodes = [NodeInfo(f"n{i}", 4, node_type=name) for i, name in enumerate(types)]
    speeds = {} if named else {f"n{i}": 0.2 for i in range(fast, fast + slow)}
    options = SimulationOptions(pause=30.0, node_speeds=speeds)
    outcome = Simulation(WORKLOAD, apps, GivenCluster(nodes), allocate, options=options).run()
    return summarize(outcome, fairness=False).average_jct


def test_slow_nodes_make_jobs_faster_whether_their_types_are_declared_or_found(tmp_path: Path) -> None:
    write_applications(tmp_path)
    without = average(tmp_path, 2, 0)
    assert average(tmp_path, 2, 2) < 0.95 * without
    assert average(tmp_path, 2, 2, named=False) < 1.01 * without


def entries(seconds: float, *replicas: int) -> tuple[ProfileEntry, ...]:
    return tuple(ProfileEntry(1, count, 64, 0.9 * seconds, seconds, 1, 1) for count in replicas)


def hints(job: str, node_type: str, seconds: float, *replicas: int, **more: object) -> JobHints:
    theta = (0.9 * seconds, 1e-9, 0.0, 0.0, 0.1 * seconds, 0.0, 1.0)
    base = JobHints(
        job=job,
        generation=0,
        nodes=1,
        replicas=1,
        init_batch_size=64,
        batch_size=64,
        atomic_bsz=64,
        max_profiled_replicas=max(replicas),
        grad_params=(1.0, 100.0),
        perf_params=theta,
        profile=entries(seconds, *replicas),
        node_type=node_type,
    )
    return replace(base, **more)  # type: ignore[arg-type]


def test_the_ratio_of_two_types_is_that_of_their_step_times() -> None:
    both = [Report("a", hints("a", "fast", 0.1, 1, 2), 0.0), Report("b", hints("b", "slow", 0.4, 1, 2), 0.0)]
    known = script_ratios(script_profile(both))
    assert known.between("fast", "slow") == pytest.approx(-known.between("slow", "fast"), abs=0.2)
    assert known.speeds(["fast", "slow"])["slow"] == pytest.approx(0.25, rel=0.15)


def test_a_ratio_is_chained_over_a_third_type() -> None:
    known = TypeRatios({("a", "b"): 1.0, ("b", "c"): 0.5})
    assert known.between("a", "c") == 1.5
    assert known.between("c", "a") == 0.0


def test_a_job_is_predicted_on_a_type_by_what_other_scripts_lost_there() -> None:
    others = [Report("a", hints("a", "fast", 0.1, 1), 0.0), Report("b", hints("b", "slow", 0.4, 1), 0.0)]
    learnt = ratios([script_profile(others)])
    mine = hints("mine", "fast", 1.0, 1, 2, 4)
    model, models = typed_models("mine", mine, None, ["fast", "slow"], TypeRatios(), learnt)
    assert model is not None
    fast, slow = (float(goodputs([models[name]], [1], [4]).goodput[0, 0]) for name in ("fast", "slow"))
    assert slow / fast == pytest.approx(0.25, rel=0.15)


def test_what_a_job_measured_itself_counts_more_than_what_others_lost() -> None:
    mine = hints("mine", "fast", 1.0, 1, 2, 4)
    slow = TypeProfile("slow", entries(2.0, 1), (1.8, 1e-9, 0.0, 0.0, 0.0, 0.0, 1.0), 1)
    learnt = TypeRatios({("fast", "slow"): 3.0, ("slow", "fast"): -3.0})
    _, models = typed_models("mine", replace(mine, elsewhere=(slow,)), None, ["fast", "slow"], learnt, learnt)
    at_four = [float(goodputs([models[name]], [1], [4]).goodput[0, 0]) for name in ("fast", "slow")]
    assert at_four[1] / at_four[0] == pytest.approx(0.5, rel=0.15)


def test_a_report_without_types_is_one_of_a_nameless_type() -> None:
    plain = hints("mine", "", 1.0, 1)
    assert on_types(plain) == {"": plain}
    model, models = typed_models("mine", plain, None, [""], TypeRatios(), TypeRatios())
    assert models == {"": model}
    assert pace(plain, replace(plain, profile=())) is None


def test_nodes_of_several_types_are_as_fast_as_the_slowest(tmp_path: Path) -> None:
    write_applications(tmp_path)
    app: Application = read_application(next(iter(sorted(tmp_path.iterdir()))))
    app.types = {"slow": app.slowed(0.5)}
    assert app.on("fast+slow").throughput((1,), 64) == app.on("slow").throughput((1,), 64)
    assert app.on("slow").throughput((1,), 64)[0] == pytest.approx(2 * app.throughput((1,), 64)[0])
