"""What the page shows of a cluster, as plain values, and the difference between two such documents. Pure."""

from __future__ import annotations

from typing import Any

from adaptdl_elastic.autoscaler.cluster_view import View
from adaptdl_elastic.autoscaler.coordinator.slots import Ledger
from adaptdl_elastic.autoscaler.diagnostics.rows import WAITING_STATES, job_rows, node_rows
from adaptdl_elastic.rendezvous.schema.records import NodeUsage
from adaptdl_elastic.rendezvous.services.submitted import Submitted

Document = dict[str, Any]

_SHOWN = (
    *("job", "owner", "state", "reason", "replicas", "nodes", "batch_size", "epoch", "epochs"),
    *("restarts_used", "max_restarts", "created", "started", "ended"),
)
_ROUNDED = ("goodput", "predicted_goodput", "progress", "efficiency", "lr_factor", "loss")


def significant(value: float | None) -> float | None:
    """Return a number with four significant digits: what the page shows, so that noise makes no updates."""
    return None if value is None else float(f"{value:.4g}")


def overview(view: View, submitted: Submitted | None, problem: str = "") -> Document:
    """Return what the page's first screen shows.

    Args:
        view: The cluster.
        submitted: Its submissions and node services; None: it has no node services.
        problem: Why the store is not read at the moment; "": it is.
    """
    ledger = Ledger(view)
    jobs = {name: _job_summary(row) for name, row in job_rows(view, submitted).items()}
    usage = {node: seen.record for node, seen in view.usage.items()}
    nodes = {row["node"]: _node_summary(row, usage.get(row["node"])) for row in node_rows(view, ledger)}
    if submitted is not None:
        _add_services(nodes, submitted)
    states = [row["state"] for row in jobs.values()]
    return {
        "jobs": jobs,
        "nodes": nodes,
        "summary": {
            "problem": problem,
            "leader": view.leader.record.host if view.leader else None,
            "slots": sum(node["slots"] for node in nodes.values()),
            "used": sum(sum(node["jobs"].values()) for node in nodes.values()),
            "running": sum(state in ("running", "stopping") for state in states),
            "waiting": sum(state in WAITING_STATES for state in states),
            "hourly_cost": view.autoscaler.record.hourly_cost if view.autoscaler else None,
        },
    }


def _job_summary(row: Document) -> Document:
    return {**{name: row[name] for name in _SHOWN}, **{name: significant(row[name]) for name in _ROUNDED}}


def _node_summary(row: Document, usage: NodeUsage | None) -> Document:
    gpus = usage.gpus if usage is not None else ()
    return {
        "node": row["node"],
        "slots": row["slots"],
        "jobs": {job: held for job, held in row["jobs"].items() if held},
        "host": row["host"],
        "state": row["state"],
        "kind": row["instance_type"] or "",
        "cpu": round(usage.cpu, 2) if usage is not None else None,
        "memory": round(usage.memory_used / usage.memory, 2) if usage is not None and usage.memory else None,
        "gpu": round(sum(gpu.utilization for gpu in gpus) / len(gpus), 2) if gpus else None,
    }


def _add_services(nodes: dict[str, Document], submitted: Submitted) -> None:
    for name, service in submitted.services.items():
        alone = {"node": name, "slots": service.slots, "jobs": {}, "host": service.host, "state": "ok"}
        node = nodes.setdefault(name, _node_summary({**alone, "instance_type": None}, None))
        node["kind"] = node["kind"] or service.gpu_model
        node["slots"] = node["slots"] or service.slots  # a drained node without agents


def difference(before: Document, after: Document) -> Document | None:
    """Return what a page that shows `before` needs to show `after`; None if they are equal.

    A row that is gone is None.
    """
    patch: Document = {}
    for table in ("jobs", "nodes"):
        old, new = before[table], after[table]
        changed = {name: row for name, row in new.items() if old.get(name) != row}
        changed |= {name: None for name in old if name not in new}
        if changed:
            patch[table] = changed
    if before["summary"] != after["summary"]:
        patch["summary"] = after["summary"]
    return patch or None
