from __future__ import annotations

import pytest
from scaling_cluster import KEYS, Cluster

from adaptdl_elastic.autoscaler.scaling.autoscaler_loop import LoopOptions
from adaptdl_elastic.autoscaler.scaling.economics import ScalingSettings
from adaptdl_elastic.autoscaler.scaling.setting_texts import parse_job_cost
from adaptdl_elastic.rendezvous.schema import records
from adaptdl_elastic.rendezvous.store.memory import MemoryStore

LOOK = 60.0  # seconds between two rounds


def request(store: MemoryStore, job: str = "train") -> records.JobRequest | None:
    item = store.get(KEYS.job(job, "request"))
    return None if item is None else records.decode(records.JobRequest, item.value)


def training(store: MemoryStore, limits: dict[str, float], options: LoopOptions | None = None) -> Cluster:
    """A job on two nodes that cost 1 per hour each."""
    cluster = Cluster(store, options=options).submit(nodes=2)
    cluster.provider.request("workers", 2)
    cluster.plan(*(cluster.register(name) for name in cluster.instances))
    cluster.ruler.change(ScalingSettings(max_job_costs=limits))
    return cluster


@pytest.mark.parametrize("limits", [{"*": 2.0}, {"train": 2.0, "*": 1.0}])
def test_a_job_is_stopped_before_its_run_has_cost_its_limit(
    store: MemoryStore, limits: dict[str, float]
) -> None:
    cluster = training(store, limits)
    while request(store) is None and cluster.now < 20_000:
        cluster.tick(LOOK)
    assert request(store) == records.JobRequest(stop=True, run="run")
    cost = cluster.ruler.memory.job_costs["train"]
    reserve = 2.0 * ScalingSettings.stop_reserve / 3600
    assert 2.0 - reserve - 1e-9 <= cost <= 2.0 - reserve + 2.0 * LOOK / 3600 + 1e-9
    cluster.tick(LOOK)
    (told,) = cluster.events("stop_job")
    assert told["reason"] == (
        f"train has cost {cost:.2f}, and up to 0.07 more until its state is saved: "
        "it stops because of --max-job-cost 2"
    )


def test_nothing_is_bought_for_a_job_that_has_cost_its_limit(store: MemoryStore) -> None:
    cluster = training(store, {"*": 2.0})
    cluster.tick(LOOK)
    instances = cluster.instances
    cluster.submit(nodes=4)  # the same run wants more
    cluster.tick(3600.0)
    cluster.ticks(5, LOOK)
    assert request(store) is not None
    assert cluster.instances == instances


def test_a_limit_for_another_job_or_a_higher_one_stops_nothing(store: MemoryStore) -> None:
    cluster = training(store, {"other": 0.01, "train": 3.0})
    cluster.tick(LOOK)
    cluster.tick(3600.0)
    assert request(store) is None
    (warning,) = (fields["message"] for fields in cluster.events("warning"))
    assert warning == "--max-job-cost other: there is no such job; there are: train"


@pytest.mark.parametrize("run", ["", "run", "earlier"])
def test_a_stop_keeps_what_a_person_has_asked_of_the_same_run(store: MemoryStore, run: str) -> None:
    cluster = training(store, {"*": 2.0})
    asked = records.JobRequest(replicas=2, checkpoint=3, run=run)
    store.put(KEYS.job("train", "request"), records.encode(asked))
    cluster.tick(LOOK)
    cluster.tick(3600.0)
    kept = None if run == "earlier" else 2
    assert request(store) == records.JobRequest(replicas=kept, stop=True, checkpoint=3, run="run")


def test_a_dry_run_stops_no_job(store: MemoryStore) -> None:
    cluster = training(store, {"*": 2.0}, LoopOptions(dry_run=True))
    cluster.tick(LOOK)
    cluster.tick(3600.0)
    assert request(store) is None
    assert len(cluster.events("would stop_job")) == 1


@pytest.mark.parametrize(("text", "meant"), [("50", ("*", 50.0)), ("train=0.5", ("train", 0.5))])
def test_limits_as_they_are_given(text: str, meant: tuple[str, float]) -> None:
    assert parse_job_cost(text) == meant


@pytest.mark.parametrize("text", ["", "=5", "train=", "much"])
def test_a_limit_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"AMOUNT, e\.g\. 50 or train=50"):
        parse_job_cost(text)


@pytest.mark.parametrize("amount", [0.0, -1.0, float("nan"), float("inf")])
def test_a_limit_is_a_positive_amount(amount: float) -> None:
    with pytest.raises(ValueError, match=r"--max-job-cost train=.*positive amount"):
        ScalingSettings(max_job_costs={"train": amount})
