"""Documents of plain values made from a view, from which commands, page and metrics select. Pure."""

from __future__ import annotations

from typing import Any

from adaptdl_elastic.autoscaler.cluster_view import JobView, View
from adaptdl_elastic.autoscaler.coordinator.job_phase import (
    late_nodes,
    left_out,
    requested_replicas,
    this_run,
)
from adaptdl_elastic.autoscaler.coordinator.slots import Ledger, fewest, in_plan
from adaptdl_elastic.protocol.hints import JobHints
from adaptdl_elastic.rendezvous.schema.records import JobState, JobStatus, NodeRecord
from adaptdl_elastic.rendezvous.services.submitted import Submitted, state_of, waits_because, why_not_started
from adaptdl_elastic.rendezvous.text import clock

LOST = "lost"
"""State of a job that was running when its last agent and the last coordinator died."""


WAITING_STATES = ("pending", "queued", "starting")
"""States of jobs that wait for replicas."""

ENDED_STATES = ("done", "stopped", "failed", "cancelled")
"""States of jobs that are over."""

STATES = (*WAITING_STATES, "running", "stopping", LOST, *ENDED_STATES)
"""All states of jobs."""

Row = dict[str, Any]

_OF_HINTS = (
    *("batch_size", "atomic_bsz", "accumulation_steps", "gain", "lr_factor"),
    *("goodput", "throughput", "efficiency", "epochs", "step"),
)

_OF_NODES = ("node_type", "instance", "instance_type", "zone", "preemptible", "version")


def is_lost(view: View, job: JobView) -> bool:
    """Return whether a job that has not ended has no agent, and no coordinator is there to report it.

    The store then shows the job as it was when the last of them died.
    """
    return not job.over and view.leader is None and not view.agents(job.job)


def why_lost(job: JobView) -> str:
    """Return what is known of a lost job, and what to do."""
    status, hints, spec = job.status_now, job.hints, job.spec
    signs = [status.updated if status else 0.0, hints.record.time if hints else 0.0]
    signs += [job.checkpoint.record.time if job.checkpoint else 0.0, spec.record.created if spec else 0.0]
    signs += [one.record.time for table in (job.running, job.ended) for one in table.values()]
    goes_on = "goes on from its last checkpoint" if job.checkpoint else "starts it again"
    return f"no agent answers (last heard of at {clock(max(signs))}); the same command {goes_on}"


def job_rows(view: View, submitted: Submitted | None) -> dict[str, Row]:
    """Return one row per job, with the state that every command and page shows.

    Args:
        view: The cluster.
        submitted: Its submissions, among them jobs that have not begun; None: it has no node services.
    """
    rows = {
        name: {**job_row(view, job), "owner": None} for name, job in view.jobs.items() if job.spec is not None
    }
    for row in rows.values():
        if row["state"] in WAITING_STATES:
            row["reason"] = "; ".join([row["reason"], *view.drained])
    if submitted is None:
        return rows
    for request in submitted.requests:
        asked = request.submission
        row = rows.setdefault(asked.job, job_row(view, JobView(asked.job)))
        row |= {"owner": asked.owner, "created": asked.created, "min_replicas": asked.min_replicas}
        if request.lacks_status:
            row["state"], row["reason"] = state_of(request, submitted)
        elif row["state"] in WAITING_STATES:
            row["reason"] = waits_because(row["reason"], submitted, asked.job)
        else:
            row["problems"] = why_not_started(submitted, asked.job)
    return rows


def job_row(view: View, job: JobView) -> Row:
    """Return one job as the coordinator sees it."""
    spec = job.spec.record if job.spec else None
    status = job.status_now
    hints, plan = last_hints(job), this_run(job)
    lost = is_lost(view, job)
    running = status is not None and not status.state.ended and not lost
    done = status is not None and status.state is JobState.DONE
    pauses = status.pauses if status else ()
    last_pause = status.last_pause if status else None
    if last_pause is None and pauses:
        last_pause = pauses[-1]
    reason = status.reason if status else "the coordinator has not seen it yet"
    return {
        "job": job.job,
        "state": _state(status, lost),
        "generation": plan.generation if plan else None,
        "replicas": plan.replicas if plan and running else 0,
        "nodes": plan.nodes if plan and running else 0,
        "placements": in_plan(plan) if running else {},
        **{name: getattr(hints, name, None) for name in _OF_HINTS},
        "predicted_goodput": (status.predicted_goodput if status else None)
        or (hints.predicted_goodput if hints else None),
        "prediction_error": status.prediction_error if status else None,
        # the last report may come from the epoch before the end
        "epoch": (hints.epochs if done and hints.epochs else hints.epoch) if hints else None,
        "progress": 1.0 if done else hints.progress if hints else None,
        "cause": plan.cause.value if plan else None,
        "reason": why_lost(job) if lost else reason,
        "last_pause": last_pause,
        "restarts_used": status.restarts_used if status else 0,
        "max_restarts": spec.max_restarts if spec else None,
        "min_replicas": spec.min_replicas if spec else None,
        "created": (spec.created or None) if spec else None,
        "started": status.started if status else None,
        "ended": status.ended if status else None,
        "loss": hints.reported.get("loss") if hints else None,
        "exit_code": status.exit_code if status else None,
        "memory_limit": hints.memory_limit if hints and running else None,
        "warnings": [*(hints.warnings if hints and running else ()), *view.weight_problems(job)],
        "checkpoint": job.checkpoint.record.id if job.checkpoint else None,
        "cost": cost_row(view, job.job),
    }


def last_hints(job: JobView) -> JobHints | None:
    """Return the last valid report; None if it is of a run before the one that has the present plan."""
    hints, plan = job.hints.record if job.hints else None, this_run(job)
    return None if hints is not None and plan is not None and hints.generation < plan.first else hints


def job_details(view: View, job: JobView) -> Row:
    """Return what is shown of one job only, and not in a list."""
    assert job.spec is not None
    spec, status = job.spec.record, job.status_now
    return {
        "run": spec.run,
        "command": list(spec.command),
        "bounds": {
            "nodes": [spec.min_nodes, spec.max_nodes],
            "replicas": [fewest(view, job), spec.max_replicas],
        },
        "requested": requested_replicas(job),
        "pauses": list(status.pauses) if status else [],
        "failures": [
            f"rank {f.rank} exit code {f.exit_code} {f.message}".strip()
            for f in (status.failures if status else ())
        ],
        "checkpoint_path": spec.checkpoint_path,
        "ran_on": list(status.ran_on) if status else [],
    }


def _state(status: JobStatus | None, lost: bool) -> str:
    if status is None or status.state is JobState.PENDING:
        return JobState.PENDING.value
    return LOST if lost else status.state.value


def cost_row(view: View, job: str) -> Row | None:
    """Return what a job's nodes have cost and will cost; None if no autoscaler has reported it."""
    found = view.cost(job)
    if found is None:
        return None
    values = {name: getattr(found, name) for name in ("so_far", "hourly", "forecast", "seconds_left")}
    return {**values, "seconds_old": round(view.bill_age)}


def node_rows(view: View, ledger: Ledger) -> list[Row]:
    """Return one row per node."""
    rows: dict[str, Row] = {}
    told = view.autoscaler.record.idle if view.autoscaler else ()
    idle = {node.instance: node for node in told}
    for job, agents in sorted(view.nodes.items()):
        for node, seen in agents.items():
            record = seen.record
            row = rows.setdefault(node, _node_row(record, ledger))
            row["unusable"] = sorted({*row["unusable"], *record.unusable})
            row["links"] |= {link.node: [link.latency, link.bandwidth] for link in record.links}
            held = ledger.held(job).get(node, 0)
            row["jobs"][job] = held
            row["free"] -= held
            if (known := view.jobs.get(job)) is not None and node in late_nodes(view, known):
                row["state"] = f"{job}: {left_out(view, known)[node].reason}"
            if view.draining(record):  # for at least one of its jobs
                row["state"] = view.drains[node].record.text if node in view.drains else "draining"
            elif record.changed and row["state"] == "ok":
                row["state"] = f"{job}: {record.changed} has changed"
            elif record.at_risk and row["state"] == "ok":
                row["state"] = "at risk"
            elif (here := record.instance or node) in idle and row["state"] == "ok":
                told_of = idle[here]
                minutes = (view.wall - told_of.since) / 60
                row["state"] = f"idle for {minutes:.0f} min, costs {told_of.hourly_price:.2f} an hour"
    for node, drain in view.drains.items():
        if node not in rows and drain.record.instance is None:  # its agents have left
            rows[node] = _node_row(NodeRecord(node, "", "", "", "-", 0), ledger)
            rows[node]["state"] = drain.record.text
    return [rows[node] for node in sorted(rows)]


def _node_row(record: NodeRecord, ledger: Ledger) -> Row:
    slots = ledger.capacity.get(record.node, 0)
    return {
        "node": record.node,
        "slots": slots,
        "free": slots,
        "host": record.host,
        "jobs": {},
        "state": "ok",
        **{name: getattr(record, name) for name in _OF_NODES},
        "unusable": [],
        "links": {},  # other node → seconds of one way, bytes per second
    }
