from __future__ import annotations

import json
import re
import urllib.request
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from coordinator_pump import Pump
from filled_metrics import filled_pump, observe
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from adaptdl_elastic.autoscaler.diagnostics.prometheus import (
    CLUSTER_METRICS,
    DEFAULT_PORTS,
    JOB_METRICS,
    CoordinatorMetrics,
    PortsTakenError,
    serve,
)
from adaptdl_elastic.rendezvous.schema.records import AutoscalerStatus, JobCost, encode

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana" / "adaptdl.json"


@pytest.fixture
def pump() -> Pump:
    return filled_pump()


def samples(text: str) -> dict[tuple[str, str], float]:
    return {
        (
            sample.name,
            sample.labels.get("job_name") or sample.labels.get("state") or sample.labels.get("cause") or "",
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_what_a_scrape_shows(pump: Pump) -> None:
    registry = CollectorRegistry()
    observe(pump, CoordinatorMetrics(registry))
    found = samples(generate_latest(registry).decode())
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
def test_what_a_dead_autoscaler_paid_an_hour_is_not_said(pump: Pump, age: float, said: bool) -> None:
    status = AutoscalerStatus("ec2", 1, 1, 2.5, 7.0, jobs=(JobCost("a", 6.5, 2.5, 9.0, 3600.0),))
    pump.store.put(pump.keys.autoscaler_status, encode(replace(status, updated=pump.view().wall - age)))
    registry = CollectorRegistry()
    observe(pump, CoordinatorMetrics(registry))
    found = samples(generate_latest(registry).decode())
    assert (("adaptdl_hourly_cost", "") in found) is said
    assert (("adaptdl_job_cost_forecast", "a") in found) is said
    assert found["adaptdl_cost_total", ""] == 7.0
    assert found["adaptdl_job_cost_total", "a"] == 6.5


def test_every_metric_has_a_value_when_all_is_known(pump: Pump) -> None:
    registry = CollectorRegistry()
    observe(pump, CoordinatorMetrics(registry))
    names = {name for name, _ in samples(generate_latest(registry).decode())}
    assert {*JOB_METRICS, *CLUSTER_METRICS} <= names


def test_one_that_does_not_lead_says_nothing_of_jobs(pump: Pump) -> None:
    registry = CollectorRegistry()
    metrics = CoordinatorMetrics(registry)
    observe(pump, metrics)
    metrics.leading(False)
    found = samples(generate_latest(registry).decode())
    assert found["adaptdl_leader", ""] == 0
    assert ("adaptdl_job_replicas", "a") not in found


def test_every_metric_of_the_dashboard_exists(pump: Pump) -> None:
    registry = CollectorRegistry()
    observe(pump, CoordinatorMetrics(registry))
    exported = {name for name, _ in samples(generate_latest(registry).decode())}
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


def test_it_is_served_where_it_is_asked_to_be(pump: Pump) -> None:
    metrics = serve("127.0.0.1", 0)
    try:
        observe(pump, metrics)
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}/metrics", timeout=100) as answer:
            assert b"adaptdl_job_replicas" in answer.read()
    finally:
        metrics.close()


def test_the_page_about_monitoring_names_every_metric() -> None:
    page = DASHBOARD.parents[1].joinpath("monitoring.md").read_text()
    assert {name for name in (*JOB_METRICS, *CLUSTER_METRICS) if f"`{name}" not in page} == set()


def test_a_replica_that_lags_is_a_series_with_rank_host_and_part(pump: Pump) -> None:
    registry = CollectorRegistry()
    metrics = CoordinatorMetrics(registry)
    observe(pump, metrics)
    line = 'adaptdl_job_straggler_ratio{host="n7",job_name="a",part="data",rank="3"} 3.5'
    assert line in generate_latest(registry).decode()
    pump.agents[0].report(pump.plan("a"))
    observe(pump, metrics)
    assert "adaptdl_job_straggler_ratio{" not in generate_latest(registry).decode()
    assert "`adaptdl_job_straggler_ratio" in DASHBOARD.parents[1].joinpath("monitoring.md").read_text()
    assert "adaptdl_job_straggler_ratio" in DASHBOARD.read_text()


def test_no_label_is_one_that_prometheus_sets_itself(pump: Pump) -> None:
    registry = CollectorRegistry()
    observe(pump, CoordinatorMetrics(registry))
    labels = {
        label
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
        for label in sample.labels
    }
    assert "job_name" in labels
    assert labels.isdisjoint({"job", "instance"})


def test_the_load_of_a_node_is_shown_while_it_is_registered(pump: Pump) -> None:
    registry = CollectorRegistry()
    metrics = CoordinatorMetrics(registry, "1.2.3")
    observe(pump, metrics)
    text = generate_latest(registry).decode()
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
    observe(pump, metrics)
    assert 'node="n0"' not in generate_latest(registry).decode()


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
