"""What the page shows of one job, as plain values. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from adaptdl_elastic.autoscaler.cluster_view import View
from adaptdl_elastic.autoscaler.coordinator.slots import fewest
from adaptdl_elastic.autoscaler.diagnostics.rows import ENDED_STATES, job_row
from adaptdl_elastic.autoscaler.web.history import History
from adaptdl_elastic.autoscaler.web.overview import Document
from adaptdl_elastic.rendezvous.schema.records import JobState
from adaptdl_elastic.rendezvous.services.admission import Request
from adaptdl_elastic.rendezvous.services.submitted import Submitted

_MOST_EVENTS = 100  # most events of a job in one document


def job_document(view: View, history: History, row: Document, submitted: Submitted | None) -> Document:
    """Return everything that a job's page shows.

    Args:
        view: The cluster.
        history: What happened to its jobs.
        row: The job's row in the overview.
        submitted: The cluster's submissions; None: it has no node services.
    """
    name = str(row["job"])
    request = submitted.find(name) if submitted is not None else None
    over = row["state"] in ENDED_STATES
    found: Document = {
        **row,
        "command": list(request.submission.command) if request is not None else [],
        "curves": history.curves(name),
        "allocations": allocations(history.events(name)),
        "events": history.events(name)[-_MOST_EVENTS:],
        "pauses": [],
        "failures": [],
        "warnings": [],
        "placements": {},
        "asked": None,
        "bounds": None,
        "checkpoint": None,
        "cost": None,
        "can": {
            "scale": False,
            "stop": False,
            "cancel": request is not None and not over,
            "resume": request is not None and _can_go_on(request),
            "logs": request is not None,
        },
    }
    job = view.jobs.get(name)
    if job is None or job.spec is None:
        return found
    spec, status, full = job.spec.record, job.status_now, job_row(view, job)
    asked = job.request.record if job.request and job.request.record.run in ("", spec.run) else None
    return {
        **found,
        "command": list(spec.command) or found["command"],
        "generation": full["generation"],
        "atomic_bsz": full["atomic_bsz"],
        "accumulation_steps": full["accumulation_steps"],
        "prediction_error": full["prediction_error"],
        "throughput": full["throughput"],
        "step": full["step"],
        "placements": full["placements"],
        "warnings": full["warnings"],
        "checkpoint": full["checkpoint"],
        "cost": full["cost"],
        "pauses": list(status.pauses) if status else [],
        "failures": [f"rank {one.rank}: {one.message}" for one in status.failures] if status else [],
        "asked": asked.replicas if asked else None,
        "bounds": [fewest(view, job), min(spec.max_replicas, 1 << 16)],
        "can": {**found["can"], "scale": not over, "stop": not over},
    }


def _can_go_on(request: Request) -> bool:
    """Return whether `adaptdl resume` takes this submission: it has not come to its end."""
    run = request.run
    broke_off = run.state in (JobState.STOPPED, JobState.FAILED) and request.cancelled_by is None
    return broke_off and not run.resumed and not run.forgotten


def allocations(events: Sequence[dict[str, Any]]) -> list[Document]:
    """Return the plans among a job's events: when it had how many replicas, and why."""
    return [
        {
            "time": one["time"],
            "replicas": one["replicas"],
            "nodes": one.get("nodes"),
            "cause": str(one.get("cause", "")),
            "reason": str(one.get("reason", "")),
        }
        for one in events
        if one.get("event") == "plan" and isinstance(one.get("replicas"), int)
    ]
