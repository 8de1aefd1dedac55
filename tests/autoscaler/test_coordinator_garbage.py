"""Records that fit the schema and make no sense: of one job, whatever they are, they stop nobody else."""

from __future__ import annotations

import json
import math
import random
import warnings
from typing import Any

import pytest
from at_once import decide_at_once
from coordinator_pump import Pump, elastic
from coordinator_script import play
from fake_agents import hints_of
from prometheus_client import CollectorRegistry

from adaptdl_elastic import sched_hints
from adaptdl_elastic.autoscaler.cluster_view import ClusterCache, View, view_of
from adaptdl_elastic.autoscaler.coordinator import decide, reactive
from adaptdl_elastic.autoscaler.coordinator import job_phase as jobs
from adaptdl_elastic.autoscaler.coordinator import policy_adapter as questions
from adaptdl_elastic.autoscaler.coordinator.decision_types import (
    CompareAndSwap,
    CoordinatorSettings,
    DeletePrefix,
    Memory,
    Say,
)
from adaptdl_elastic.autoscaler.diagnostics.prometheus import CoordinatorMetrics
from adaptdl_elastic.autoscaler.policy import allocate
from adaptdl_elastic.autoscaler.policy.policy_types import Decision
from adaptdl_elastic.autoscaler.providers.base import Capacity, Pool
from adaptdl_elastic.autoscaler.scaling import observe as scaling_observe
from adaptdl_elastic.autoscaler.scaling.economics import ScalingSettings
from adaptdl_elastic.autoscaler.scaling.observe import observe
from adaptdl_elastic.autoscaler.scaling.scaling_types import Memory as Remembered
from adaptdl_elastic.autoscaler.scaling.scaling_types import Request
from adaptdl_elastic.autoscaler.scaling.step import step
from adaptdl_elastic.rendezvous.schema import records
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import Placement
from adaptdl_elastic.rendezvous.store.base import KeyValue, Snapshot

COUNTS = (-(10**18), -5, -1, 0, 1, 2, 3, 4, 8, 1000, 10**6, 10**9, 10**18, 10**30)
NUMBERS = (-1e308, -1.0, 0.0, 1e-300, 0.1, 1.0, 60.0, 1e9, 1e300, 1e308)
NODES = ("n1", "n2", "n3")


def test_a_forecast_of_nearly_zero_stops_no_job(pump: Pump) -> None:
    elastic(pump)
    absurd = hints_of("a", pump.plan("a").generation, 3, goodput=1e10, predicted_goodput=1e-300)
    plan = json.loads(records.encode(pump.plan("a")))
    pump.store.put(pump.keys.job("a", "plan"), json.dumps({**plan, "predicted_goodput": None}))
    pump.store.put(pump.keys.job("a", "hints"), sched_hints.encode(absurd))
    play(pump, "job b; node n9 b; settle -> b/running")
    error = pump.status("a").prediction_error
    assert math.isfinite(math.nan if error is None else error)


def break_for_a(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
    """Let a function of the product fail when it is called about job `a`, its second argument."""
    works = getattr(module, name)

    def breaks(*arguments: Any, **named: Any) -> Any:
        if arguments[1].job == "a":
            raise ZeroDivisionError("nobody has thought of this")
        return works(*arguments, **named)

    monkeypatch.setattr(module, name, breaks)


@pytest.mark.parametrize(
    "placement",
    [
        {"node": "n1", "replicas": 10**18},
        {"node": "n1", "replicas": 0},
        {"node": "n1", "replicas": 2, "slots": [0]},
        {"node": "n1", "replicas": 2, "slots": [1, 1]},
        {"node": "n1", "replicas": 1, "slots": [10**18]},
    ],
)
def test_placements_that_can_not_be_are_not_read(placement: dict[str, Any]) -> None:
    text = json.dumps({"v": 1, **placement})
    with pytest.raises(records.MalformedRecordError, match=r"cannot be|Input should be"):
        records.decode(Placement, text)
    with pytest.raises(records.MalformedRecordError, match=r"cannot be|Input should be"):
        records.decode(records.Leaving, json.dumps({"v": 1, "agent": "a", "generation": 0, **placement}))


def test_rates_beyond_any_machine_are_no_hints(pump: Pump) -> None:
    with pytest.raises(ValueError, match="goodput"):
        hints_of("a", 0, 1, goodput=1e13)


STEPS = {
    "fence": (decide, "fence_off"),
    "condition": (jobs, "condition_of"),
    "urgent": (reactive, "see_to"),
    "question": (questions, "_job"),
    "status": (decide, "describe"),
    "left": (decide.garbage_collection, "collect"),
}


@pytest.mark.parametrize("where", STEPS)
def test_a_job_that_can_not_be_dealt_with_is_left_alone_and_said(
    pump: Pump, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    elastic(pump)
    before = pump.plan("a")
    break_for_a(monkeypatch, *STEPS[where])
    pump.store.put(
        pump.keys.job("a", "hints"), sched_hints.encode(hints_of("a", before.generation, 3, inplace=True))
    )
    play(pump, "job b; node n9 b; settle -> b/running")
    assert pump.plan("a").placements == before.placements
    assert pump.status("a").reason == (
        "keeps what it has, because nothing can be decided about it: "
        "ZeroDivisionError: nobody has thought of this"
    )
    pump.later(600)
    assert [fields["job"] for event, fields in pump.said if event == "job_broken"] == ["a"]
    # a leader that comes to power meets it, too
    play(pump, "take_over; settle; job c; node n8 c; settle; later 61 -> c/running")
    # it is taken up again when it can be
    monkeypatch.undo()
    pump.settle().later(61)
    assert "is left alone" not in pump.status("a").reason
    assert pump.plan("a").fence == pump.fence


def test_slots_of_a_broken_job_are_not_given_to_others(pump: Pump, monkeypatch: pytest.MonkeyPatch) -> None:
    elastic(pump)
    break_for_a(monkeypatch, jobs, "condition_of")
    pump.job("b", max_replicas=4, max_nodes=4)
    for node in ("n0", "n1", "n9"):
        pump.node(node, "b")
    play(pump, "settle; later 61 -> b/n9=1")


def test_a_job_that_breaks_the_policy_is_asked_about_without_its_model(pump: Pump) -> None:
    def fragile(asked: Any, *rest: Any) -> Decision:
        if any(info.name == "a" and info.model is not None for info in asked):
            raise FloatingPointError("its curve makes no sense")
        return allocate(asked, *rest)

    pump.policy = fragile
    play(pump, "job a max_replicas=4; job b max_replicas=4")
    for name in ("a", "b"):
        pump.node(f"of-{name}", name, 4)
    pump.settle().later(200)
    assert pump.placed("a") == {"of-a": 1}
    assert pump.placed("b") == {"of-b": 4}
    assert not [event for event, _ in pump.said if event == "policy_failed"]
    broken = [fields for event, fields in pump.said if event == "job_broken"]
    assert [fields["job"] for fields in broken] == ["a"]
    assert "FloatingPointError: its curve makes no sense" in broken[0]["message"]


@pytest.mark.parametrize("where", ["condition", "question", "size"])
def test_the_autoscaler_leaves_alone_what_it_can_not_deal_with_and_says_so(
    pump: Pump, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    elastic(pump)
    play(pump, "job b; node n9 b; settle")
    functions = {
        "condition": (scaling_observe, "condition_of"),
        "question": (questions, "_job"),
        "size": (scaling_observe, "_as_asked"),
    }
    break_for_a(monkeypatch, *functions[where])
    pool = Pool("p", slots=4, hourly_price=1.0, minimum=0, maximum=4, desired=0)
    seen = observe(_view(pump), Capacity((pool,)), ())
    sizes = {info.name: info.requested_replicas for info in seen.jobs}
    assert sizes == {"a": pump.plan("a").replicas, "b": None}
    said = step(seen, Remembered(), ScalingSettings()).warnings
    error = "ZeroDivisionError: nobody has thought of this"
    assert f"a: keeps what it has, because its records cannot be used: {error}" in said


def _view(pump: Pump) -> View:
    return view_of(pump.keys, pump.store.range(pump.keys.root), 0.0, 0.0)


@pytest.mark.parametrize("generation", ["²", "9" * 5000, "1_0", "٣"])
def test_keys_that_are_no_generations_stop_no_job(pump: Pump, generation: str) -> None:
    pump.store.put(f"{pump.keys.root}jobs/a/generations/{generation}/master", "{}")
    play(pump, "job b; node n9 b; settle -> b/running")


# -- whatever may be written


class Garbage:
    """Three jobs on three nodes whose records fit the schema, most of the time, and nothing else."""

    def __init__(self, seed: int, keys: Keys) -> None:
        self.random, self.keys = random.Random(seed), keys
        self.items: list[KeyValue] = []

    def maybe(self, chance: float) -> bool:
        return self.random.random() < chance

    def count(self) -> int:
        return self.random.choice(COUNTS) if self.maybe(0.35) else self.random.choice((1, 1, 2, 4))

    def number(self) -> float:
        return self.random.choice(NUMBERS) if self.maybe(0.4) else 1.0

    def put(self, key: str, **fields: Any) -> None:
        revision = len(self.items) + 1
        self.items.append(KeyValue(key, json.dumps({"v": records.VERSION, **fields}), revision, revision))

    def snapshot(self) -> Snapshot:
        for job in ("a", "b", "c"):
            self.spec(job)
            if self.maybe(0.6):
                self.past(job, self.random.choice((0, 1, 2, 5, 10**6)))
            if self.maybe(0.5):
                self.status(job)
        return Snapshot(tuple(self.items), len(self.items), "")

    def spec(self, job: str) -> None:
        pick = self.random.choice
        bounds = {name: self.count() for name in ("min_nodes", "max_nodes", "min_replicas", "max_replicas")}
        self.put(
            self.keys.job(job, "spec"),
            job=job,
            run="r",
            **bounds,
            max_restarts=self.count(),
            rescale_timeout=self.number(),
            weight=self.number(),
            profile_key=pick(("", "k")),
            preemptible=self.maybe(0.7),
            autoscale=self.maybe(0.8),
            avoid_preemptible_nodes=self.maybe(0.3),
            rescale=pick(("auto", "inplace", "restart")),
        )
        if self.maybe(0.3):
            wanted = pick((None, *COUNTS))
            self.put(
                self.keys.job(job, "request"), replicas=wanted, stop=self.maybe(0.2), run=pick(("", "r"))
            )
        for node in NODES:
            if self.maybe(0.8):
                self.put(
                    self.keys.node(node, job),
                    node=node,
                    job=job,
                    run="r",
                    agent=f"agent-{node}",
                    host="h",
                    slots=pick((1, 2, 4, 8, 1024, self.count())),
                    min_slots=pick((1, 1, 2, self.count())),
                    preemptible=self.maybe(0.3),
                    draining=self.maybe(0.15),
                    at_risk=self.maybe(0.2),
                    instance=pick((None, f"i-{node}")),
                    deadline=pick((None, self.number())),
                )

    def past(self, job: str, generation: int) -> None:
        pick = self.random.choice

        def placed(**more: Any) -> list[dict[str, Any]]:
            size = pick((1, 2, 4, 4, self.count()))
            return [
                {"node": node, "replicas": size, "agent": f"agent-{node}", **more}
                for node in NODES
                if self.maybe(0.6)
            ]

        placements = placed()
        self.put(
            self.keys.job(job, "plan"),
            job=job,
            run=pick(("r", "r", "old")),
            generation=generation,
            placements=placements,
            cause="policy",
            transition=pick(("restart", "inplace", "abort", "recover")),
            reason="x",
            fence=pick((1, 1, 7)),
            restarts=self.count(),
            failed_step=self.count(),
            base=pick((-1, generation - 1)),
            leaving=placed(generation=generation - 1),
            predicted_goodput=pick((None, self.number())),
        )
        for placement in placements:
            node = placement["node"]
            held: dict[str, Any] = {"node": node, "agent": pick(("", f"agent-{node}")), "acted": generation}
            if self.maybe(0.6):
                held |= {"generation": generation, "library": True, "first_step": self.number()}
                held |= {
                    "survives": pick((None, (), ((0, 1),))),
                    "ready": self.maybe(0.2),
                    "to": pick((-1, generation + 1)),
                }
                held["course"] = pick(("training", "joining", "changing", "stopping"))
            if self.maybe(0.15):
                end = {"generation": generation, "outcome": pick(("done", "stopped", "failed", "lost"))}
                held["ends"] = [{**end, "exit_code": self.count(), "ran": True, "last_step": self.number()}]
            if self.maybe(0.15):
                held["loss"] = {"generation": generation, "lost": [0]}
            if self.maybe(0.8):
                self.put(self.keys.held(job, node), **held)
        if self.maybe(0.8):
            self.hints(job, generation)

    def hints(self, job: str, generation: int) -> None:
        pick, theta = self.random.choice, (0, 1e-12, 0.05, 1e9)
        rates = (None, 0, 1e-300, 0.1, 1e10, 1e12)
        fields: dict[str, Any] = {
            "nodes": 1,
            "replicas": 1,
            "init_batch_size": pick((0, 1, 128, 10**9)),
            "batch_size": 128,
            "atomic_bsz": 128,
            "max_profiled_replicas": pick((0, 1, 4, 10**9)),
            "grad_params": [pick((0, 1e-300, 0.001, 1e30)), pick((0, 0.02, 1e30))],
            "perf_params": [*(pick(theta) for _ in range(6)), pick((1, 1.5, 1000))],
            "gradient_accumulation": self.maybe(0.5),
            "remaining_samples": pick((None, 0, 1e6, 1e30)),
            "samples_done": pick((None, 0, 1e30)),
            "goodput": pick(rates),
            "predicted_goodput": pick(rates),
            "inplace": True,
        }
        entry = {"nodes": 1, "accum_step_time": 0, "replicas": pick((1, 10**9))}
        entry |= {"atomic_bsz": pick((1, 128, 10**9)), "optim_step_time": pick((0, 1e-13, 0.1, 1e9))}
        if self.maybe(0.5):
            fields |= {"max_batch_size": 10**9, "local_bsz_bounds": [1, pick((1, 512, 10**9))]}
        self.put(self.keys.job(job, "hints"), job=job, generation=generation, profile=[entry], **fields)

    def status(self, job: str) -> None:
        self.put(
            self.keys.job(job, "status"),
            job=job,
            run="r",
            state=self.random.choice(("pending", "running", "done", "failed")),
            generation=0,
            pauses=[self.number() for _ in range(3)],
            waited=self.number(),
            restarts_used=self.count(),
        )


@pytest.mark.parametrize("first", range(0, 200, 20))
def test_the_coordinator_goes_on_whatever_garbage_is_written(first: int) -> None:
    for seed in range(first, first + 20):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            _survives(seed)


def _survives(seed: int) -> None:
    keys = Keys("garbage")
    garbage = Garbage(seed, keys)
    keeper, memory, now = ClusterCache(keys), Memory(), 100.0
    keeper.take(garbage.snapshot(), now)
    keeper.note(keys.coordinator_leader, records.encode(records.LeaderRecord("this", "host")), 1, now)
    revision = len(garbage.items)
    for _ in range(6):
        view = keeper.view(now, now + 1e9)
        decided = decide_at_once(
            view, memory, keys=keys, fence=1, settings=CoordinatorSettings(), policy=allocate
        )
        memory = decided.memory
        for action in decided.actions:
            match action:
                case CompareAndSwap(key, record, _):
                    revision += 1
                    text = None if record is None else records.encode(record)
                    if text is not None:
                        assert records.decode(type(record), text, key) == record, (seed, key)
                    keeper.note(key, text, revision, now)
                case DeletePrefix(prefix):
                    keeper.forget(prefix, now)
                case Say(event, fields):
                    # to be left alone is for what nobody has thought of, not for what fits the schema
                    assert event not in ("policy_failed", "job_broken"), (seed, fields)
                    json.dumps(dict(fields), allow_nan=False)
        assert now <= decided.wake_at <= now + 1e6, seed
        now += garbage.random.choice((0.5, 5.0, 70.0, 1000.0))
    pool = Pool("p", slots=4, hourly_price=1.0, minimum=0, maximum=4, desired=0)
    seen = observe(keeper.view(now, now + 1e9), Capacity((pool,)), ())
    assert seen.warnings == (), seed
    orders = step(seen, Remembered(), ScalingSettings()).actions
    assert all(isinstance(order, Request) and 0 < order.desired <= 4 for order in orders), seed
    metrics = CoordinatorMetrics(CollectorRegistry())
    metrics.leading(True)
    metrics.decided(keeper.view(now, now + 1e9), decided, 0.1)
    assert list(metrics.collect())
