from __future__ import annotations

import json
import re
import urllib.request
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from at_once import decide_at_once
from coordinator_pump import Pump
from fake_agents import FakeAgent, spec_of
from filled_metrics import filled_pump, observe
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from submitted_jobs import put_submission, submission_by

from adaptdl_elastic.autoscaler.coordinator.decision_types import CoordinatorSettings, Memory
from adaptdl_elastic.autoscaler.diagnostics.prometheus import (
    CLUSTER_METRICS,
    DEFAULT_PORTS,
    JOB_METRICS,
    CoordinatorMetrics,
    PortsTakenError,
    serve,
)
from adaptdl_elastic.rendezvous.schema.autoscaler_status import AutoscalerStatus, JobCost
from adaptdl_elastic.rendezvous.schema.records import JobState, encode
from adaptdl_elastic.rendezvous.schema.submissions import Cancellation, ServiceRecord, Signed
from adaptdl_elastic.rendezvous.services.submitted import SubmissionReader, Submitted
from adaptdl_elastic.rendezvous.store.base import StoreError

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana" / "adaptdl.json"


@pytest.fixture
def pump() -> Pump:
    return filled_pump()


class Scraped:
    """The metrics of a coordinator of version 1.2.3, and what is read of them."""

    def __init__(self, *decided: Pump) -> None:
        self.registry = CollectorRegistry()
        self.metrics = CoordinatorMetrics(self.registry, "1.2.3")
        for pump in decided:
            observe(pump, self.metrics)

    @property
    def text(self) -> str:
        return generate_latest(self.registry).decode()

    @property
    def samples(self) -> dict[tuple[str, str], float]:
        return samples(self.text)


def samples(text: str) -> dict[tuple[str, str], float]:
    return {
        (
            sample.name,
            sample.labels.get("job_name") or sample.labels.get("state") or sample.labels.get("cause") or "",
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_scrape_shows_cluster_and_jobs(pump: Pump) -> None:
    found = Scraped(pump).samples
    assert found["adaptdl_leader", ""] == 1
    assert found["adaptdl_slots", ""] == 4
    assert found["adaptdl_slots_used", ""] == 2
    assert found["adaptdl_queue", ""] == 1
    assert found["adaptdl_jobs", "running"] == 1
    assert found["adaptdl_job_replicas", "a"] == 2
    assert found["adaptdl_job_gain", "a"] == 3.0
    assert found["adaptdl_plans_total", "manual"] == 1
    assert found["adaptdl_hourly_cost", ""] == 2.5
    assert found["adaptdl_job_cost_total", "a"] == 6.5
    assert found["adaptdl_job_cost_forecast", "a"] == 9.0


@pytest.mark.parametrize(("age", "said"), [(30.0, True), (90.0, False)])
def test_the_hourly_cost_of_a_dead_autoscaler_is_not_shown(pump: Pump, age: float, said: bool) -> None:
    status = AutoscalerStatus("ec2", 1, 1, 2.5, 7.0, jobs=(JobCost("a", 6.5, 2.5, 9.0, 3600.0),))
    pump.store.put(pump.keys.autoscaler_status, encode(replace(status, updated=pump.view().wall - age)))
    found = Scraped(pump).samples
    assert (("adaptdl_hourly_cost", "") in found) is said
    assert (("adaptdl_job_cost_forecast", "a") in found) is said
    assert found["adaptdl_cost_total", ""] == 7.0
    assert found["adaptdl_job_cost_total", "a"] == 6.5


def test_one_that_does_not_lead_says_nothing_of_jobs(pump: Pump) -> None:
    scraped = Scraped(pump)
    scraped.metrics.leading(False)
    found = scraped.samples
    assert found["adaptdl_leader", ""] == 0
    assert ("adaptdl_job_replicas", "a") not in found


def test_every_metric_of_the_dashboard_exists(pump: Pump) -> None:
    exported = {name for name, _ in Scraped(pump).samples}
    board = json.loads(DASHBOARD.read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    expressions += [variable["query"] for variable in board["templating"]["list"]]
    named = set(re.findall(r"\badaptdl_\w+", " ".join(expressions)))
    assert named <= exported, named - exported
    assert {*JOB_METRICS, *CLUSTER_METRICS} <= named, "a metric that no panel shows"


def test_the_dashboard_is_what_its_generator_writes() -> None:
    import runpy

    module = runpy.run_path(str(DASHBOARD.with_name("generate.py")))
    assert json.loads(DASHBOARD.read_text()) == module["dashboard"]()


def test_metrics_are_served_at_the_given_address(pump: Pump) -> None:
    metrics = serve("127.0.0.1", 0)
    try:
        observe(pump, metrics)
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}/metrics", timeout=100) as answer:
            assert b"adaptdl_job_replicas" in answer.read()
    finally:
        metrics.close()


def test_the_page_of_metrics_names_every_metric() -> None:
    page = DASHBOARD.parents[1].joinpath("reference/metrics.md").read_text()
    assert {name for name in (*JOB_METRICS, *CLUSTER_METRICS) if f"`{name}" not in page} == set()


def test_a_replica_that_lags_is_a_series_with_rank_host_and_part(pump: Pump) -> None:
    scraped = Scraped(pump)
    assert 'adaptdl_job_straggler_ratio{host="n7",job_name="a",part="data",rank="3"} 3.5' in scraped.text
    pump.agents[0].report(pump.plan("a"))
    observe(pump, scraped.metrics)
    assert "adaptdl_job_straggler_ratio{" not in scraped.text
    assert "`adaptdl_job_straggler_ratio" in DASHBOARD.parents[1].joinpath("reference/metrics.md").read_text()
    assert "adaptdl_job_straggler_ratio" in DASHBOARD.read_text()


def test_no_label_is_one_that_prometheus_sets_itself(pump: Pump) -> None:
    labels = {
        label
        for family in text_string_to_metric_families(Scraped(pump).text)
        for sample in family.samples
        for label in sample.labels
    }
    assert "job_name" in labels
    assert labels.isdisjoint({"job", "instance"})


def test_the_load_of_a_node_is_shown_while_it_is_registered(pump: Pump) -> None:
    scraped = Scraped(pump)
    text = scraped.text
    for line in (
        'adaptdl_node_cpu_utilization_ratio{node="n0"} 0.75',
        'adaptdl_node_gpu_utilization_ratio{gpu="0",node="n0"} 0.5',
        'adaptdl_node_slots_used{node="n0"} 2.0',
        'adaptdl_job_reported{job_name="a",name="loss"} 0.25',
    ):
        assert line in text
    assert 'version="1.2.3"' in text
    for agent in pump.agents:
        agent.vanish()
    pump.settle()
    observe(pump, scraped.metrics)
    assert 'node="n0"' not in scraped.text


def test_by_default_the_first_free_port_is_taken() -> None:
    with ExitStack() as stack:
        served = []
        for _ in range(2):
            try:
                metrics = serve("127.0.0.1", None)
            except PortsTakenError:  # by other programs of this machine
                break
            stack.callback(metrics.close)
            served.append(metrics.port)
        assert served == sorted(set(served))
        assert set(served) <= set(DEFAULT_PORTS)


def shown(pump: Pump, scraped: Scraped) -> dict[str, float]:
    """Return the failures and the jobs by state that a leader serves."""
    scraped.metrics.leading(True)
    decided = decide_at_once(
        pump.view(), Memory(), keys=pump.keys, fence=pump.fence, settings=pump.settings, policy=pump.policy
    )
    scraped.metrics.decided(pump.view(), decided, 0.01)
    found = scraped.samples
    states = {label: number for (name, label), number in found.items() if name == "adaptdl_jobs" and number}
    totals = ("adaptdl_failed_jobs_total", "adaptdl_unfinished_jobs", "adaptdl_queue")
    return states | {name: found[name, ""] for name in totals}


def test_failures_are_counted_in_the_store_and_every_leader_shows_the_number() -> None:
    pump = Pump(settings=CoordinatorSettings(interval=60.0, min_gap=0.0, keep_ended=1))

    def failures() -> float:
        return shown(pump, Scraped())["adaptdl_failed_jobs_total"]

    def agents(*jobs: str) -> list[FakeAgent]:
        for job in jobs:
            pump.job(job, max_restarts=0, run=f"of-{job}")
        return [pump.node(f"n-{job}", job) for job in jobs]

    first, second, third = agents("a", "b", "c")
    pump.settle()
    assert failures() == 0  # it is there before the first failure
    first.fail()
    pump.settle()
    assert (failures(), pump.status("a").state) == (1, JobState.FAILED)
    pump.take_over().settle()
    assert failures() == 1
    # two fail at once
    second.fail()
    third.fail()
    pump.settle()
    assert failures() == 3
    # the records of all but one are deleted
    for agent in (first, second, third):
        agent.vanish()
    (fourth,) = agents("d")
    pump.settle()
    fourth.finish()
    pump.settle()
    fourth.vanish()
    pump.later(60.0)
    assert [job for job in "abcd" if pump.store.get(pump.keys.job(job, "status"))] == ["d"]
    assert failures() == 3
    # another run of the job that has the number
    pump.store.put(pump.keys.job("d", "spec"), encode(replace(spec_of("d"), run="again")))
    pump.settle()
    assert (failures(), pump.status("d").run) == (3, "again")


def test_jobs_are_counted_by_the_states_that_commands_show() -> None:
    pump, scraped = Pump(), Scraped()
    reader = SubmissionReader(pump.store, pump.keys, "")
    scraped.metrics.read_submitted = lambda: reader.read(None)
    pump.store.put(pump.keys.service("n0"), encode(ServiceRecord("n0", "127.0.0.1", 1, 1)))
    for name, replicas in (("runs", 1), ("queued", 2), ("cancelled", 1), ("pending", 1)):
        asked = submission_by("eve", name, command=("t.py",), min_replicas=replicas, max_replicas=replicas)
        put_submission(pump.store, pump.keys, asked)
    wish = Signed(encode(Cancellation("cancelled", "eve")), "eve", "-")
    for name in ("runs", "cancelled", "pending"):
        pump.job(name, min_replicas=1 if name == "runs" else 9)
    pump.node("n0", "runs")
    pump.node("n0", "pending")
    pump.settle()
    assert pump.status("cancelled").state is JobState.PENDING
    pump.store.put(pump.keys.cancellation("cancelled"), encode(wish))
    assert shown(pump, scraped) == {
        "running": 1,
        "queued": 1,
        "pending": 1,
        "cancelled": 1,
        "adaptdl_queue": 2,
        "adaptdl_unfinished_jobs": 3,
        "adaptdl_failed_jobs_total": 0,
    }

    def silent() -> Submitted:
        raise StoreError("it does not answer")

    scraped.metrics.read_submitted = silent  # the agents' own jobs are still counted
    assert shown(pump, scraped)["running"] == 1


def test_one_that_does_not_lead_says_whether_jobs_need_one_that_does() -> None:
    pump, scraped = Pump(), Scraped()
    metrics = scraped.metrics
    assert ("adaptdl_unfinished_jobs", "") not in scraped.samples
    pump.job("a")
    agent = pump.node("n0", "a")
    pump.settle()
    metrics.follows(pump.view())
    found = scraped.samples
    assert (found["adaptdl_leader", ""], found["adaptdl_unfinished_jobs", ""]) == (0, 1)
    assert not {name for name, _ in found} & {"adaptdl_jobs", "adaptdl_slots", *JOB_METRICS}
    agent.finish()
    pump.settle()
    metrics.follows(pump.view())
    assert scraped.samples["adaptdl_unfinished_jobs", ""] == 0
    # the last that one knows that leads no more
    observe(filled_pump(), metrics)
    metrics.leading(False)
    assert scraped.samples["adaptdl_unfinished_jobs", ""] == 2
