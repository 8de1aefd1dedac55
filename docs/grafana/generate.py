"""Writes adaptdl.json, the Grafana dashboard of a coordinator's metrics, beside itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

JOB = '{job_name=~"$job_name"}'
# (title, unit, [(expression, legend)], width of 24)
ROWS: list[tuple[str, list[tuple[str, str, list[tuple[str, str]], int]]]] = [
    (
        "Cluster",
        [
            ("Slots", "short", [("adaptdl_slots", "all"), ("adaptdl_slots_used", "used")], 8),
            ("Jobs", "short", [("adaptdl_jobs > 0", "{{state}}"), ("adaptdl_queue", "queue")], 8),
            (
                "Jobs that have not ended, and how many have failed so far",
                "short",
                [("max(adaptdl_unfinished_jobs)", "unfinished"), ("adaptdl_failed_jobs_total", "failed")],
                8,
            ),
            ("Nodes", "short", [("adaptdl_nodes", "nodes"), ("adaptdl_nodes_draining", "draining")], 8),
            (
                "Plans a minute",
                "short",
                [("sum by (cause) (rate(adaptdl_plans_total[5m])) * 60", "{{cause}}")],
                8,
            ),
            (
                "Policy, decision (99th percentile)",
                "s",
                [
                    ("histogram_quantile(0.99, rate(adaptdl_policy_seconds_bucket[15m]))", "policy"),
                    ("histogram_quantile(0.99, rate(adaptdl_decision_seconds_bucket[15m]))", "decision"),
                ],
                8,
            ),
            ("Cost an hour", "currencyUSD", [("adaptdl_hourly_cost", "now")], 8),
            ("Cost so far", "currencyUSD", [("adaptdl_cost_total", "all nodes")], 8),
            ("Which coordinator decides", "short", [("adaptdl_leader", "{{instance}}")], 8),
        ],
    ),
    (
        "Nodes",
        [
            (
                "Slots used, of each node's",
                "percentunit",
                [("adaptdl_node_slots_used / adaptdl_node_slots", "{{node}}")],
                8,
            ),
            ("Processors", "percentunit", [("adaptdl_node_cpu_utilization_ratio", "{{node}}")], 8),
            (
                "Memory",
                "percentunit",
                [("adaptdl_node_memory_used_bytes / adaptdl_node_memory_size_bytes", "{{node}}")],
                8,
            ),
            ("GPUs", "percentunit", [("adaptdl_node_gpu_utilization_ratio", "{{node}} {{gpu}}")], 8),
            (
                "Memory of GPUs",
                "percentunit",
                [
                    (
                        "adaptdl_node_gpu_memory_used_bytes / adaptdl_node_gpu_memory_size_bytes",
                        "{{node}} {{gpu}}",
                    )
                ],
                8,
            ),
            (
                "Coordinator: processors",
                "short",
                [("rate(process_cpu_seconds_total[1m])", "{{instance}}")],
                8,
            ),
        ],
    ),
    (
        "Jobs",
        [
            ("Replicas", "short", [(f"adaptdl_job_replicas{JOB}", "{{job_name}}")], 12),
            ("Batch size", "short", [(f"adaptdl_job_batch_size_samples{JOB}", "{{job_name}}")], 12),
            (
                "Goodput, samples per second",
                "short",
                [
                    (f"adaptdl_job_goodput_samples_per_second{JOB}", "{{job_name}}"),
                    (f"adaptdl_job_goodput_predicted_samples_per_second{JOB}", "{{job_name}} predicted"),
                ],
                12,
            ),
            (
                "Prediction error",
                "percentunit",
                [(f"adaptdl_job_prediction_error_ratio{JOB}", "{{job_name}}")],
                12,
            ),
            (
                "Statistical efficiency",
                "percentunit",
                [(f"adaptdl_job_efficiency_ratio{JOB}", "{{job_name}}")],
                8,
            ),
            ("Gain", "short", [(f"adaptdl_job_gain{JOB}", "{{job_name}}")], 8),
            ("Learning rate factor", "short", [(f"adaptdl_job_lr_factor{JOB}", "{{job_name}}")], 8),
            (
                "Throughput, samples per second",
                "short",
                [(f"adaptdl_job_throughput_samples_per_second{JOB}", "{{job_name}}")],
                8,
            ),
            ("Progress", "percentunit", [(f"adaptdl_job_progress_ratio{JOB}", "{{job_name}}")], 8),
            ("Pause of the last change", "s", [(f"adaptdl_job_last_pause_seconds{JOB}", "{{job_name}}")], 8),
            (
                "Restarts that failures have cost, of those allowed",
                "short",
                [
                    (f"adaptdl_job_restarts_used{JOB}", "{{job_name}}"),
                    (f"adaptdl_job_restarts_allowed{JOB}", "{{job_name}} allowed"),
                ],
                8,
            ),
            ("Steps a second", "short", [(f"rate(adaptdl_job_steps_total{JOB}[1m])", "{{job_name}}")], 8),
            ("Reported by the script", "short", [(f"adaptdl_job_reported{JOB}", "{{job_name}} {{name}}")], 8),
            (
                "Cost",
                "currencyUSD",
                [
                    (f"adaptdl_job_cost_total{JOB}", "{{job_name}} so far"),
                    (f"adaptdl_job_cost_forecast{JOB}", "{{job_name}} at its end"),
                ],
                8,
            ),
            (
                "Replicas that the others wait for: their time per step over the others'",
                "short",
                [(f"adaptdl_job_straggler_ratio{JOB}", "{{job_name}} rank {{rank}} on {{host}}: {{part}}")],
                8,
            ),
            ("Generation", "short", [(f"adaptdl_job_generation{JOB}", "{{job_name}}")], 8),
            ("Nodes of the job", "short", [(f"adaptdl_job_nodes{JOB}", "{{job_name}}")], 8),
        ],
    ),
]


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for heading, graphs in ROWS:
        panels.append(_row(len(panels) + 1, heading, y))
        x, y = 0, y + 1
        for title, unit, targets, width in graphs:
            if x + width > 24:
                x, y = 0, y + 8
            panels.append(_graph(len(panels) + 1, title, unit, targets, {"x": x, "y": y, "w": width, "h": 8}))
            x += width
        y += 8
    return {
        "title": "adaptdl-elastic",
        "uid": "adaptdl-elastic",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
                {
                    "name": "job_name",
                    "type": "query",
                    "datasource": {"type": "prometheus", "uid": "${datasource}"},
                    "query": "label_values(adaptdl_job_replicas, job_name)",
                    "refresh": 2,
                    "multi": True,
                    "includeAll": True,
                    "current": {"text": "All", "value": "$__all"},
                },
            ]
        },
        "panels": panels,
    }


def _row(number: int, title: str, y: int) -> dict[str, Any]:
    return {"id": number, "type": "row", "title": title, "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}}


def _graph(
    number: int, title: str, unit: str, targets: list[tuple[str, str]], where: dict[str, int]
) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "id": number,
        "type": "timeseries",
        "title": title,
        "datasource": source,
        "gridPos": where,
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "targets": [
            {"refId": chr(65 + i), "datasource": source, "expr": expression, "legendFormat": legend}
            for i, (expression, legend) in enumerate(targets)
        ],
    }


if __name__ == "__main__":
    Path(__file__).with_name("adaptdl.json").write_text(json.dumps(dashboard(), indent=1) + "\n")
