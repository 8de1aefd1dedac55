"""The metrics, the dashboard and the alerts, judged by Prometheus' own programs."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from commands import ended
from filled_metrics import filled_pump, observe
from polling import until
from ports import free_port
from prometheus_client import CollectorRegistry, generate_latest

from adaptdl_elastic.autoscaler.diagnostics.prometheus import CoordinatorMetrics, serve
from adaptdl_elastic.rendezvous.services.connections import MOST_UNKNOWN

pytestmark = pytest.mark.processes

GRAFANA = Path(__file__).parents[2] / "docs" / "grafana"
ALERTS = GRAFANA / "alerts.yml"
PATIENCE_SECONDS = 200.0

CONFIG = """
global: {{scrape_interval: 250ms, scrape_timeout: 250ms, evaluation_interval: 250ms}}
rule_files: [{rules}]
scrape_configs:
  - job_name: adaptdl
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed here: apt-get install prometheus")
    return found


def test_promtool_finds_nothing_to_complain_of_in_filled_metrics() -> None:
    registry = CollectorRegistry()
    observe(filled_pump(), CoordinatorMetrics(registry, "1.2.3"))
    checked = subprocess.run(
        [program("promtool"), "check", "metrics"], input=generate_latest(registry), capture_output=True
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, b"")


ALERT_CASES: dict[str, tuple[dict[str, str], str]] = {
    # alert → series of its trouble, and when it has to fire
    "AdaptdlNoCoordinatorLeads": (
        {'adaptdl_leader{instance="a"}': "0x60", 'adaptdl_unfinished_jobs{instance="a"}': "1x60"},
        "10m",
    ),
    # a lone failure on a cluster that was idle
    "AdaptdlJobFailed": ({'adaptdl_failed_jobs_total{instance="a"}': "0x10 1x10"}, "12m"),
    "AdaptdlJobMakesNoSteps": (
        {'adaptdl_job_steps_total{job_name="a"}': "7x60", 'adaptdl_job_replicas{job_name="a"}': "2x60"},
        "40m",
    ),
    "AdaptdlJobNearItsLastRestart": (
        {
            'adaptdl_job_restarts_allowed{job_name="a"}': "3x9",
            'adaptdl_job_restarts_used{job_name="a"}': "3x9",
        },
        "5m",
    ),
    "AdaptdlPolicyFails": ({"adaptdl_policy_failures_total": "0+1x60"}, "30m"),
    "AdaptdlJobsWaitBesideFreeSlots": (
        {
            'adaptdl_jobs{state="pending"}': "1x60",
            "adaptdl_slots": "4x60",
            "adaptdl_slots_used": "2x60",
        },
        "40m",
    ),
    "AdaptdlGpuIdle": (
        {
            'adaptdl_node_gpu_utilization_ratio{node="n", gpu="0"}': "0x120",
            'adaptdl_node_slots_used{node="n"}': "1x120",
        },
        "90m",
    ),
}

QUIET = {
    'adaptdl_leader{instance="a"}': "1x200",
    'adaptdl_leader{instance="b"}': "0x200",
    'adaptdl_unfinished_jobs{instance="a"}': "1x200",
    'adaptdl_unfinished_jobs{instance="b"}': "1x200",
    'adaptdl_failed_jobs_total{instance="a"}': "3x200",
    'adaptdl_job_steps_total{job_name="a"}': "0+30x200",
    'adaptdl_job_replicas{job_name="a"}': "2x200",
    'adaptdl_job_restarts_allowed{job_name="a"}': "3x200",
    'adaptdl_job_restarts_used{job_name="a"}': "1x200",
    "adaptdl_policy_failures_total": "2x200",
    'adaptdl_jobs{state="pending"}': "1x200",
    "adaptdl_slots": "4x200",
    "adaptdl_slots_used": "4x200",
    'adaptdl_node_gpu_utilization_ratio{node="n", gpu="0"}': "0.9x200",
    'adaptdl_node_slots_used{node="n"}': "1x200",
}


TROUBLE = [
    # a job fails while another coordinator begins to lead: neither series grows
    (
        {
            'adaptdl_failed_jobs_total{instance="a"}': "3x10 _x10",
            'adaptdl_failed_jobs_total{instance="b"}': "_x11 4x10",
        },
        "AdaptdlJobFailed",
        "12m",
    ),
    # no coordinator is there; a node service is
    (
        {'adaptdl_unfinished_jobs{instance="n1"}': "1x30"},
        "AdaptdlNoCoordinatorLeads",
        "20m",
    ),
    # one that has led, and one that never did
    (
        {
            'adaptdl_leader{instance="a"}': "1x10 0x20",
            'adaptdl_leader{instance="b"}': "0x30",
            'adaptdl_unfinished_jobs{instance="b"}': "2x30",
        },
        "AdaptdlNoCoordinatorLeads",
        "20m",
    ),
    # one of two clusters has a leader
    (
        {
            'adaptdl_leader{adaptdl_cluster="a"}': "1x30",
            'adaptdl_unfinished_jobs{adaptdl_cluster="a"}': "1x30",
            'adaptdl_leader{adaptdl_cluster="b"}': "0x30",
            'adaptdl_unfinished_jobs{adaptdl_cluster="b"}': "1x30",
        },
        "AdaptdlNoCoordinatorLeads",
        "20m",
    ),
]

NO_TROUBLE = [
    # jobs of one of two clusters failed long ago; free slots and idle GPUs are those of the other cluster
    {
        'adaptdl_failed_jobs_total{adaptdl_cluster="a"}': "3x200",
        'adaptdl_failed_jobs_total{adaptdl_cluster="b"}': "0x200",
        'adaptdl_jobs{adaptdl_cluster="a",state="pending"}': "1x200",
        'adaptdl_slots{adaptdl_cluster="a"}': "4x200",
        'adaptdl_slots_used{adaptdl_cluster="a"}': "4x200",
        'adaptdl_slots{adaptdl_cluster="b"}': "4x200",
        'adaptdl_slots_used{adaptdl_cluster="b"}': "0x200",
        'adaptdl_node_gpu_utilization_ratio{adaptdl_cluster="b", node="n", gpu="0"}': "0x200",
        'adaptdl_node_slots_used{adaptdl_cluster="a", node="n"}': "1x200",
        'adaptdl_job_steps_total{adaptdl_cluster="b", job_name="j"}': "5x200",
        'adaptdl_job_replicas{adaptdl_cluster="a", job_name="j"}': "1x200",
    },
    # another coordinator begins to lead
    {
        'adaptdl_leader{instance="a"}': "1x10 0x20",
        'adaptdl_leader{instance="b"}': "0x10 1x20",
        'adaptdl_unfinished_jobs{instance="a"}': "1x30",
        'adaptdl_failed_jobs_total{instance="a"}': "3x10 _x20",
        'adaptdl_failed_jobs_total{instance="b"}': "_x11 3x20",
    },
    # nobody leads, and no job needs that
    {'adaptdl_leader{instance="a"}': "1x5 0x25", 'adaptdl_unfinished_jobs{instance="a"}': "1x5 0x25"},
    # the last agents have ended, and the coordinator with them
    {'adaptdl_leader{instance="a"}': "1x5 _x25", 'adaptdl_unfinished_jobs{instance="a"}': "1x5 _x25"},
    {'adaptdl_unfinished_jobs{instance="n1"}': "0x30"},
    # a job waits for another one beside free slots
    {
        'adaptdl_leader{instance="a"}': "1x200",
        'adaptdl_jobs{state="queued"}': "1x200",
        "adaptdl_queue": "1x200",
        "adaptdl_slots": "4x200",
        "adaptdl_slots_used": "2x200",
    },
    {},
]


def test_each_alert_fires_on_its_trouble_and_none_on_a_healthy_cluster(tmp_path: Path) -> None:
    alerts = re.findall(r"alert: (\w+)", ALERTS.read_text())
    assert sorted(alerts) == sorted(ALERT_CASES)
    assert set(re.findall(r"severity: (\w+)", ALERTS.read_text())) == {"page", "ticket"}
    tests = [
        {
            "interval": "1m",
            "input_series": [{"series": series, "values": values} for series, values in given.items()],
            "promql_expr_test": [
                {
                    "expr": f'count(ALERTS{{alertname="{name}",alertstate="firing"}}) or vector(0)',
                    "eval_time": when,
                    "exp_samples": [{"labels": "{}", "value": expected}],
                }
                for name, when, expected in wanted
            ],
        }
        for given, wanted in (
            *((given, [(name, when, 1)]) for name, (given, when) in ALERT_CASES.items()),
            *((given, [(name, when, 1)]) for given, name, when in TROUBLE),
            (QUIET, [(name, "3h", 0) for name in alerts]),
            *(
                (given, [(name, f"{at}m", 0) for name in alerts for at in (12, 20, 29, 90)])
                for given in NO_TROUBLE
            ),
        )
    ]
    path = tmp_path / "tests.yml"
    path.write_text(json.dumps({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": tests}))
    checked = ended([program("promtool"), "test", "rules", str(path)])
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the address of a Prometheus that scrapes filled metrics."""
    binary, folder = program("prometheus"), tmp_path_factory.mktemp("prometheus")
    with ExitStack() as stack:
        metrics = serve("127.0.0.1", 0, "1.2.3")
        stack.callback(metrics.close)
        observe(filled_pump(), metrics)
        config = folder / "prometheus.yml"
        config.write_text(CONFIG.format(rules=ALERTS, port=metrics.port))
        address = f"127.0.0.1:{free_port()}"
        command = [binary, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [*command, f"--web.listen-address={address}"], stdout=log, stderr=subprocess.STDOUT
            )
        stack.callback(process.wait)
        stack.callback(process.kill)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not scraped_twice(address):
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.1)
        yield address


def scraped_twice(address: str) -> bool:
    try:
        found = query(address, "count_over_time(adaptdl_leader[1h]) > 3")
    except (urllib.error.URLError, OSError):  # it does not listen yet
        return False
    return bool(found)


def query(address: str, expression: str) -> list[dict[str, Any]]:
    quoted = urllib.parse.urlencode({"query": expression})
    with urllib.request.urlopen(f"http://{address}/api/v1/query?{quoted}", timeout=100) as answer:
        found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return found


def wait_for(address: str, expression: str) -> list[dict[str, Any]]:
    """Return the answer once there is one: after a scrape that took too long there is none for a moment."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (found := query(address, expression)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def test_every_curve_of_the_dashboard_has_points_and_a_name_of_its_own(prometheus: str) -> None:
    board = json.loads((GRAFANA / "adaptdl.json").read_text())
    targets = [target for panel in board["panels"] for target in panel.get("targets", [])]
    empty, unnamed = [], []
    for target in targets:
        found = wait_for(prometheus, target["expr"].replace("$job_name", ".*"))
        if not found:
            empty.append(target["expr"])
        named = re.findall(r"{{(\w+)}}", target["legendFormat"])
        unnamed += [target["expr"] for one in found for label in named if not one["metric"].get(label)]
    assert len(targets) > 20
    assert (empty, unnamed) == ([], [])


def test_a_job_is_told_from_the_scrape_job(prometheus: str) -> None:
    found = wait_for(prometheus, "adaptdl_job_replicas")
    assert {one["metric"]["job_name"] for one in found} == {"a", "b"}
    assert {one["metric"]["job"] for one in found} == {"adaptdl"}
    assert all("exported_job" not in one["metric"] for one in found)
    assert wait_for(prometheus, 'process_resident_memory_bytes{adaptdl_cluster="default"} > 0')
    assert wait_for(prometheus, 'adaptdl_build_info{version="1.2.3"} == 1')


def test_silent_connections_keep_no_scraper_out_and_take_few_threads() -> None:
    metrics, before = serve("127.0.0.1", 0), threading.active_count()
    with ExitStack() as stack:
        stack.callback(metrics.close)
        address = ("127.0.0.1", metrics.port)
        silent = [stack.enter_context(socket.create_connection(address)) for _ in range(2 * MOST_UNKNOWN)]
        # the server has ended the first ones, so it has accepted the last
        for one in silent[:MOST_UNKNOWN]:
            one.settimeout(100)
            assert one.recv(1) == b""
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}/metrics", timeout=100) as answer:
            assert b"adaptdl_leader" in answer.read()
        until("too many threads", lambda: threading.active_count() - before <= MOST_UNKNOWN + 1)
