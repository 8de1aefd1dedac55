"""What the page shows of one job, as plain values. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from adaptdl_elastic.autoscaler.cluster_view import View
from adaptdl_elastic.autoscaler.diagnostics.rows import ENDED_STATES, job_details, job_row
from adaptdl_elastic.autoscaler.web.history import History
from adaptdl_elastic.autoscaler.web.overview import Document
from adaptdl_elastic.rendezvous.schema.records import JobState
from adaptdl_elastic.rendezvous.services.admission import Request
from adaptdl_elastic.rendezvous.services.submitted import Submitted

_MOST_EVENTS = 100  # most events of a job in one document

_SHOWN = (
    *("generation", "atomic_bsz", "accumulation_steps", "prediction_error", "throughput", "step"),
    *("placements", "warnings", "checkpoint", "cost"),
)
_NOT_BEGUN: Document = {
    **{"pauses": [], "failures": [], "warnings": [], "placements": {}},
    **{"asked": None, "bounds": None, "checkpoint": None, "cost": None},
}


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
    job = view.jobs.get(name)
    begun = job is not None and job.spec is not None
    found: Document = {
        **row,
        "command": list(request.submission.command) if request is not None else [],
        "curves": history.curves(name),
        "allocations": allocations(history.events(name)),
        "events": history.events(name)[-_MOST_EVENTS:],
        **_NOT_BEGUN,
        "can": {
            "scale": begun and not over,
            "stop": begun and not over,
            "cancel": request is not None and not over,
            "resume": request is not None and _can_go_on(request),
            "logs": request is not None,
        },
    }
    if job is None or not begun:
        return found
    full, details, status = job_row(view, job), job_details(view, job), job.status_now
    fewest, most = details["bounds"]["replicas"]
    return {
        **found,
        **{key: full[key] for key in _SHOWN},
        "command": details["command"] or found["command"],
        "pauses": details["pauses"],
        "failures": [f"rank {one.rank}: {one.message}" for one in status.failures] if status else [],
        "asked": details["requested"],
        "bounds": [fewest, min(most, 1 << 16)],
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
