"""Types of nodes on their way from an agent's registration and a job's report to a plan."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from typing import Any

import pytest
from coordinator_pump import Pump
from coordinator_script import play
from fake_agents import FakeAgent

from adaptdl_elastic.autoscaler.coordinator import node_types
from adaptdl_elastic.autoscaler.coordinator.job_models import MOST_SHARED, Report
from adaptdl_elastic.autoscaler.coordinator.node_speeds import classes, slowness
from adaptdl_elastic.autoscaler.coordinator.node_types import (
    TypeRatios,
    on_types,
    pace,
    ratios,
    script_profile,
    script_ratios,
    typed_models,
)
from adaptdl_elastic.autoscaler.coordinator.slots import Ledger
from adaptdl_elastic.autoscaler.diagnostics.rows import node_rows
from adaptdl_elastic.autoscaler.policy import allocate
from adaptdl_elastic.autoscaler.policy.curves import goodputs
from adaptdl_elastic.autoscaler.providers.base import Capacity
from adaptdl_elastic.autoscaler.scaling.observe import node_uses, without_nodes
from adaptdl_elastic.protocol import hints as job_hints
from adaptdl_elastic.protocol.hints import MOST_CONFIGURATIONS, JobHints, ProfileEntry, TypeProfile
from adaptdl_elastic.rendezvous.schema.records import NodeRecord, decode, encode


@pytest.fixture
def pump() -> Pump:
    return Pump(policy=allocate)


def two_types(pump: Pump, profile_key: str = "") -> None:
    """A job that runs on a slow node and has run on a fast one, and both nodes."""
    pump.job("a", max_replicas=2, max_nodes=2, profile_key=profile_key)
    slow = pump.node("n0", "a", 2, reports=False)
    slow.register(node_type="slow")
    pump.settle()
    pump.node("n1", "a", 2, reports=False).register(node_type="fast")
    plan = pump.plan("a")
    theta = (0.05, 0.001, 0.0, 0.0, 0.0, 0.0, 1.0)
    slow.report(
        plan,
        node_type="slow",
        perf_params=(0.5, 0.01, 0.0, 0.0, 0.0, 0.0, 1.0),
        profile=(ProfileEntry(1, 1, 64, 1.0, 1.14, 9, 9),),
        max_profiled_replicas=2,
        elsewhere=(TypeProfile("fast", (ProfileEntry(1, 1, 64, 0.1, 0.114, 9, 9),), theta, 1),),
    )


def test_the_policy_is_asked_with_the_types_of_nodes_and_a_model_for_each(pump: Pump) -> None:
    two_types(pump)
    question = pump.question()
    assert {node.name: node.node_type for node in question.nodes} == {"n0": "slow", "n1": "fast"}
    (info,) = question.jobs
    slow, fast = (info.models[name].perf_params.alpha_c for name in ("slow", "fast"))
    assert slow == pytest.approx(10 * fast, rel=0.01)


def test_a_job_moves_to_the_fast_node_and_is_told_why(pump: Pump) -> None:
    two_types(pump)
    play(pump, "later 120.0; settle")
    assert set(pump.placed("a")) == {"n1"}
    assert "on a fast node" in pump.plan("a").reason


def test_a_report_from_nodes_of_several_types_is_of_none_of_them(pump: Pump) -> None:
    pump.job("a", min_replicas=4, max_replicas=4, max_nodes=2)
    for node, name in (("n0", "slow"), ("n1", "fast")):
        pump.node(node, "a", 2).register(node_type=name)
    pump.settle()
    assert set(pump.placed("a")) == {"n0", "n1"}
    (info,) = pump.question().jobs
    assert set(info.models) == {"fast", "slow", "fast+slow"}


def test_nodes_are_shown_with_their_types(pump: Pump) -> None:
    two_types(pump)
    rows = node_rows(pump.view(), Ledger(pump.view()))
    assert {row["node"]: row["node_type"] for row in rows} == {"n0": "slow", "n1": "fast"}


def test_a_registration_without_a_type_is_still_read() -> None:
    record = NodeRecord("n0", "a", "run", "agent", "127.0.0.1", 2, node_type="A100")
    fields = json.loads(encode(record))
    del fields["node_type"]
    assert decode(NodeRecord, json.dumps(fields)).node_type == ""
    assert decode(NodeRecord, encode(record)) == record


def test_a_cluster_of_one_type_is_asked_about_as_before(pump: Pump) -> None:
    play(pump, "job a max_replicas=2; node n0 a 2; settle")
    (info,) = pump.question().jobs
    assert info.model is not None
    assert (info.models, info.speeds) == ({}, {})
    assert pytest.approx(info.model.perf_params) == info.model_on("").perf_params  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "impossible", [{"perf_params": [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]}, {"local_bsz_bounds": [9, 3]}]
)
def test_an_impossible_profile_of_another_type_is_not_read_and_stops_no_other_job(
    pump: Pump, impossible: dict[str, Any]
) -> None:
    play(pump, "job a profile_key=k; node n0 a 2; settle")
    hints = job_hints.encode(
        JobHints("a", 0, 1, 1, 64, 64, 64, perf_params=(0.1, 0.001, 0.0, 0.0, 0.0, 0.0, 1.0))
    )
    report = {**json.loads(hints), "generation": pump.plan("a").generation}
    report["elsewhere"] = [{"node_type": "old", **impossible}]
    with pytest.raises(job_hints.MalformedHintsError):
        job_hints.decode(json.dumps(report))
    pump.store.put(pump.keys.job("a", "hints"), json.dumps(report))
    play(pump, "job b; node n1 b; settle -> b/running")


def test_jobs_of_one_script_may_have_measured_more_configurations_than_one_report_holds() -> None:
    theta = (0.1, 0.001, 0.0, 0.0, 0.0, 0.0, 1.0)

    def profile(start: int, seconds: float) -> tuple[ProfileEntry, ...]:
        sizes = range(start, start + MOST_CONFIGURATIONS // 2 + 1)
        return tuple(ProfileEntry(1, 1, size, seconds, seconds, 1, 1) for size in sizes)

    reports = []
    for name, start in (("a", 1), ("b", MOST_CONFIGURATIONS)):
        elsewhere = (TypeProfile("slow", profile(start, 4.0), theta, 1),)
        hints = JobHints(
            name, 0, 1, 1, 64, 64, 64, perf_params=theta, profile=profile(start, 2.0),
            node_type="fast", elsewhere=elsewhere,
        )  # fmt: skip
        reports.append(Report(name, hints, 0.0))
    assert set(script_ratios(script_profile(reports)).known) == {("fast", "slow"), ("slow", "fast")}


def test_jobs_of_one_script_share_the_configurations_that_were_measured_most() -> None:
    """All jobs may have measured many more: each decision would read them once for every job."""
    reports = []
    for number in range(20):
        sizes = range(1 + 50 * number, 51 + 50 * number)
        profile = tuple(ProfileEntry(1, 1, size, 0.1, 0.1, 1, 1 + (size % 5 == 0)) for size in sizes)
        hints = JobHints(str(number), 0, 1, 1, 64, 64, 64, perf_params=THETA, profile=profile)
        reports.append(Report(str(number), hints, 0.0))
    told = script_profile(reports).by_type[""].told
    assert {at[-1] for at in told} == set(range(5, 1001, 5))
    assert len(told) == MOST_SHARED


def test_a_type_that_no_job_has_measured_does_not_hide_the_speeds_of_the_others() -> None:
    ratios = TypeRatios({("T4", "V100"): math.log(0.25), ("V100", "T4"): math.log(4.0)})
    speeds = ratios.speeds(["A100", "T4", "V100"])
    assert speeds["T4"] == pytest.approx(0.25 * speeds["V100"])


THETA = (0.1, 0.001, 0.0, 0.0, 0.0, 0.0, 1.0)


def moved(limit: int | None, limit_before: int | None) -> JobHints:
    """The report of a job that runs on large nodes and has run on small ones."""
    entry = ProfileEntry(1, 1, 64, 0.2, 0.2, 9, 9)
    before = TypeProfile("small", (entry,), THETA, 1, (1, 512), limit_before)
    return JobHints(
        "a", 0, 1, 1, 64, 64, 64, max_batch_size=512, local_bsz_bounds=(1, 512), perf_params=THETA,
        grad_params=(1.0, 1.0), profile=(entry,), memory_limit=limit, node_type="large", elsewhere=(before,),
    )  # fmt: skip


def largest(job: str, hints: JobHints, others: tuple[Report, ...] = ()) -> dict[str, int]:
    """The largest batch of one replica that may be chosen on each type of node."""
    script = script_profile([*others, Report(job, hints, 0.0)])
    none = TypeRatios()
    models = node_types.typed_models(job, hints, script, ("large", "small"), none, none)[1]
    bounds = {name: model.local_bsz_bounds for name, model in models.items()}
    return {name: 0 if found is None else found[1] for name, found in bounds.items()}


@pytest.mark.parametrize(
    ("limit", "limit_before", "found"),
    [
        (100, 100, {"large": 512, "small": 100}),  # learnt on the small node, and kept
        (70, 100, {"large": 70, "small": 100}),  # learnt on both
        (70, None, {"large": 70, "small": 512}),
        (None, None, {"large": 512, "small": 512}),
    ],
)
def test_a_memory_limit_holds_on_the_type_where_it_was_learnt(
    limit: int | None, limit_before: int | None, found: dict[str, int]
) -> None:
    assert largest("a", moved(limit, limit_before)) == found


def test_a_memory_limit_that_others_have_learnt_on_a_type_holds_there() -> None:
    hints = replace(moved(None, None), elsewhere=())
    other = replace(hints, job="b", node_type="small", memory_limit=100)
    assert largest("a", hints, (Report("b", other, 0.0),)) == {"large": 512, "small": 100}


def test_a_memory_limit_that_others_have_learnt_holds_for_a_job_that_has_just_moved_there() -> None:
    """It has no step time there yet, but its report names bounds of the batch."""
    hints = moved(None, None)
    other = replace(hints, job="b", node_type="small", memory_limit=100, elsewhere=())
    arrived = replace(
        hints, node_type="small", perf_params=None, profile=(),
        elsewhere=(replace(hints.elsewhere[0], node_type="large"),),
    )  # fmt: skip
    assert largest("a", arrived, (Report("b", other, 0.0),)) == {"large": 512, "small": 100}


def test_bounds_of_another_job_on_a_type_are_not_taken_for_a_job_s_own() -> None:
    """A job of the library keeps its limit on every node, so its reports have smaller bounds everywhere."""
    hints = replace(moved(None, None), elsewhere=())
    kept = replace(hints, job="b", node_type="small", local_bsz_bounds=(1, 100), max_profiled_replicas=4)
    assert largest("a", hints, (Report("b", kept, 0.0),)) == {"large": 512, "small": 512}


def test_reports_of_one_script_that_cannot_be_combined_stop_no_other_job(
    pump: Pump, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(reports: object) -> None:
        raise ValueError("cannot be combined")

    monkeypatch.setattr(node_types, "script_profile", fail)
    two_types(pump, profile_key="k")
    play(pump, "job b; node n2 b; settle -> b/running running")


def test_types_that_were_measured_are_told_apart_from_assumed_ones(pump: Pump) -> None:
    """The autoscaler buys by them. A job without nodes knows what it has measured, too."""
    two_types(pump)
    pump.node("n2", "a", 2, reports=False).register(node_type="new", instance="i-2")
    (info,) = pump.question().jobs
    assert set(info.models) == {"fast", "slow", "new"}
    assert info.measured == {"fast", "slow"}
    view = pump.view()
    waiting = without_nodes(view.jobs["a"], node_types.measured(view))
    assert waiting is not None
    assert waiting.measured == {"fast", "slow"}
    assert waiting.models["fast"] == info.models["fast"]
    assert node_uses(view, Capacity())["i-2"].node_type == "new"


def test_a_ratio_that_other_scripts_have_measured_counts_as_a_measurement() -> None:
    theta = (0.5, 0.01, 0.0, 0.0, 0.0, 0.0, 1.0)
    told = JobHints("a", 0, 1, 1, 64, 64, 64, node_type="slow", perf_params=theta, grad_params=(1.0, 1.0))
    known = node_types.Measured(ratios=TypeRatios({("slow", "fast"): -1.0, ("V100", "fast"): 1.0}))
    assert known.measured_on("", told) == {"slow", "fast"}
    assert known.measured_on("", replace(told, node_type="fast+slow")) == set()
    assert known.measured_on("", None) == set()
    assert known.models("a", "", told)[1].keys() == {"slow", "fast"}


def test_a_node_where_a_job_computed_for_longer_is_of_a_slower_class(pump: Pump) -> None:
    pump.job("a", max_replicas=2, max_nodes=2, profile_key="script")
    agents = [pump.node(name, "a", 2, reports=False) for name in ("n0", "n1", "n2", "n3")]
    for agent, machine in zip(agents, ("m0", "m1", "m0", "m3"), strict=True):
        agent.register(host=machine)
    pump.settle()
    assert set(pump.placed("a")) == {"n0"}
    theta = (0.5, 0.01, 0.0, 0.0, 0.0, 0.0, 1.0)
    times = {"n1": (64, 0.2, 100.0), "n0": (32, 0.8, 200.0)}  # a larger batch in a quarter of the time
    play(pump, "job b; node n9 b")
    times["n9"] = (64, 1e-9, 200.0)  # does not count: the job has no agent there
    agents[0].report(pump.plan("a"), perf_params=theta, node_times=times, time=200.0)
    question, slow = pump.question(), "nodes, slow 1"
    types = {node.name: node.node_type for node in question.nodes}
    # n2 is n0's machine, n3 is not known
    assert types == {"n0": slow, "n1": "", "n2": slow, "n3": "", "n9": ""}
    assert set(question.jobs[0].models) == {"", slow}


SLOW = (0.5, 0.005, 0.0, 0.0, 0.0, 0.0, 1.0)
FAST = (0.1, 0.001, 0.0, 0.0, 0.0, 0.0, 1.0)


def two_nodes(pump: Pump) -> tuple[FakeAgent, str, str]:
    """Return the agent of a job on one of two nodes, and the nodes: where it is, and the other one."""
    pump.job("a", max_replicas=2, max_nodes=2, profile_key="script")
    agents = {name: pump.node(name, "a", 2, reports=False) for name in ("n0", "n1")}
    for name, agent in agents.items():
        agent.register(host=name)
    pump.settle()
    (here,) = pump.placed("a")
    (other,) = agents.keys() - {here}
    return agents[here], here, other


@pytest.mark.parametrize("times", [{"n0": (1, 5e-324, 1.0)}, {"n0": (32, 5e-324, 1.0), "n1": (32, 1e9, 1.0)}])
def test_impossible_times_of_nodes_stop_no_decision(
    pump: Pump, times: dict[str, tuple[int, float, float]]
) -> None:
    agent, *_ = two_nodes(pump)
    agent.report(pump.plan("a"), perf_params=(2.0, 1.0, *SLOW[2:]), node_times=times, time=1.0)
    play(pump, "job b; node n2 b; later 120.0; settle -> b/running")


def test_a_job_leaves_a_node_that_only_it_has_found_to_be_slow(pump: Pump) -> None:
    agent, here, other = two_nodes(pump)
    now = pump.clock.now
    agent.report(
        pump.plan("a"), time=now, perf_params=SLOW, profile=(ProfileEntry(1, 1, 64, 0.82, 0.82, 50, 50),),
        grad_params=(1.0, 100.0), remaining_samples=1e7, inplace=True,
        node_times={other: (64, 0.164, now - 200.0), here: (64, 0.82, now)},
    )  # fmt: skip
    play(pump, "later 120.0; settle")
    assert set(pump.placed("a")) == {other}


@pytest.mark.parametrize("generation", [0, 7])
def test_step_times_on_a_fast_node_are_not_of_the_slow_class(pump: Pump, generation: int) -> None:
    """The last time of a node may be that of the slow one: of an earlier moment, or by another clock."""
    agent, here, other = two_nodes(pump)
    slow, now = "nodes, slow 1", pump.clock.now
    entry = ProfileEntry(1, 1, 64, 0.164, 0.164, 50, 50)
    before = TypeProfile(slow, (replace(entry, accum_step_time=0.82, optim_step_time=0.82),), SLOW, 1)
    plan = replace(pump.plan("a"), generation=pump.plan("a").generation + generation)
    agent.report(
        plan, time=now, init_batch_size=64, perf_params=FAST, profile=(entry,), elsewhere=(before,),
        node_times={here: (64, 0.164, now - 100.0), other: (64, 0.82, now)},
    )  # fmt: skip
    models = pump.question().jobs[0].models
    alphas = {name: found.perf_params.alpha_c for name, found in models.items()}
    assert alphas == pytest.approx({"": 0.1, slow: 0.5}, rel=0.01)


def test_a_node_that_is_about_1_5_times_slower_does_not_change_its_class_every_round() -> None:
    noise = random.Random(1)
    types, before, changes = dict.fromkeys(("n0", "n1", "n2"), ""), dict[str, str](), 0
    for _ in range(200):
        told = {"n0": 0.0, "n1": noise.gauss(0.0, 0.02), "n2": math.log(1.5) + noise.gauss(0.0, 0.05)}
        now = classes(types, told, before).type_of
        assert (now["n0"], now["n1"]) == ("", "")
        changes += bool(before) and now != before
        before = dict(now)
    assert changes <= 1
    assert before["n2"] == "nodes, slow 1"


def test_noise_does_not_split_a_large_cluster_of_equal_nodes() -> None:
    noise = random.Random(1)
    told = [
        (f"s{n}", f"s{n}", f"n{(3 * n + k) % 128}", noise.gauss(0.0, 0.1))
        for n in range(128)
        for k in range(4)
    ]
    assert not classes(dict.fromkeys((one[2] for one in told), ""), slowness(told), {}).slower


def test_a_class_is_no_chain_of_nodes_that_are_each_a_bit_slower() -> None:
    """Each node is 1.45 times slower than the one before."""
    slow = {f"n{number}": number * math.log(1.45) for number in range(4)}
    found = classes(dict.fromkeys(slow, "T4"), slow, {}).type_of
    assert list(found.values()) == ["T4", "T4", "T4, slow 1", "T4, slow 1"]


def test_one_job_cannot_make_a_node_slow_that_two_other_scripts_find_fast() -> None:
    honest = [(script, script, node, 0.0) for script in ("a", "b") for node in ("n0", "n1")]
    liar = [
        ("c", f"c{number}", node, log) for number in range(5) for node, log in (("n0", 0.0), ("n1", 20.0))
    ]
    assert slowness([*honest, *liar]) == pytest.approx({"n0": 0.0, "n1": 0.0})


def test_jobs_that_stay_on_one_node_each_compare_no_nodes() -> None:
    """Their batch sizes and data may differ."""
    assert slowness([("a", "a0", "n0", 0.0), ("a", "a1", "n1", 5.0)]) == {}


def entries(seconds: float, *replicas: int) -> tuple[ProfileEntry, ...]:
    return tuple(ProfileEntry(1, count, 64, 0.9 * seconds, seconds, 1, 1) for count in replicas)


def report_on(job: str, node_type: str, seconds: float, *replicas: int, **more: object) -> JobHints:
    theta = (0.9 * seconds, 1e-9, 0.0, 0.0, 0.1 * seconds, 0.0, 1.0)
    base = JobHints(
        job, 0, 1, 1, 64, 64, 64, max_profiled_replicas=max(replicas), grad_params=(1.0, 100.0),
        perf_params=theta, profile=entries(seconds, *replicas), node_type=node_type,
    )  # fmt: skip
    return replace(base, **more)  # type: ignore[arg-type]


def test_the_ratio_of_two_types_is_that_of_their_step_times() -> None:
    both = [
        Report("a", report_on("a", "fast", 0.1, 1, 2), 0.0),
        Report("b", report_on("b", "slow", 0.4, 1, 2), 0.0),
    ]
    known = script_ratios(script_profile(both))
    assert known.between("fast", "slow") == pytest.approx(-known.between("slow", "fast"), abs=0.2)
    assert known.speeds(["fast", "slow"])["slow"] == pytest.approx(0.25, rel=0.15)


def test_a_ratio_is_chained_over_a_third_type() -> None:
    known = TypeRatios({("a", "b"): 1.0, ("b", "c"): 0.5})
    assert known.between("a", "c") == 1.5
    assert known.between("c", "a") == 0.0


def test_a_job_is_predicted_on_a_type_by_what_other_scripts_lost_there() -> None:
    others = [
        Report("a", report_on("a", "fast", 0.1, 1), 0.0),
        Report("b", report_on("b", "slow", 0.4, 1), 0.0),
    ]
    learnt = ratios([script_profile(others)])
    mine = report_on("mine", "fast", 1.0, 1, 2, 4)
    model, models = typed_models("mine", mine, None, ["fast", "slow"], TypeRatios(), learnt)
    assert model is not None
    fast, slow = (float(goodputs([models[name]], [1], [4]).goodput[0, 0]) for name in ("fast", "slow"))
    assert slow / fast == pytest.approx(0.25, rel=0.15)


def test_a_jobs_own_measurement_counts_more_than_ratios_learnt_from_others() -> None:
    mine = report_on("mine", "fast", 1.0, 1, 2, 4)
    slow = TypeProfile("slow", entries(2.0, 1), (1.8, 1e-9, 0.0, 0.0, 0.0, 0.0, 1.0), 1)
    learnt = TypeRatios({("fast", "slow"): 3.0, ("slow", "fast"): -3.0})
    _, models = typed_models("mine", replace(mine, elsewhere=(slow,)), None, ["fast", "slow"], learnt, learnt)
    at_four = [float(goodputs([models[name]], [1], [4]).goodput[0, 0]) for name in ("fast", "slow")]
    assert at_four[1] / at_four[0] == pytest.approx(0.5, rel=0.15)


def test_a_report_without_types_is_one_of_a_nameless_type() -> None:
    plain = report_on("mine", "", 1.0, 1)
    assert on_types(plain) == {"": plain}
    model, models = typed_models("mine", plain, None, [""], TypeRatios(), TypeRatios())
    assert models == {"": model}
    assert pace(plain, replace(plain, profile=())) is None
    unmeasured = replace(plain, perf_params=None, profile=())
    assert typed_models("mine", unmeasured, None, [""], TypeRatios(), TypeRatios()) == (None, {})
