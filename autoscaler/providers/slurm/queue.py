"""Read what `squeue` answers about our jobs, and decide what it means for the pool. Pure."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from adaptdl_elastic.autoscaler.providers.base import Instance, InstanceState, Pool

_SEPARATOR = "\x1f"  # the "unit separator", which no value has; a comment, which could have it, comes last

FORMAT = _SEPARATOR.join(("%A", "%T", "%r", "%S", "%e", "%V", "%k"))
"""What `squeue -o` prints of a job: number, state, reason, start, end, submission, comment."""

_WAITING = {"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
_STATES = {
    "CONFIGURING": InstanceState.PENDING,
    "COMPLETING": InstanceState.LEAVING,
    **dict.fromkeys(
        ("RUNNING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED"), InstanceState.RUNNING
    ),
}

# Reasons for which a request would wait until something else changes than the use of nodes. A job that a
# person holds is not among them: the request stays as that person has left it.
_REFUSED = re.compile(
    "Account|Assoc|BadConstraints|DependencyNever|Invalid|JobHoldMaxRequeue|JobLaunch|launch failed|Partition"
    "|QOS|SystemFailure"
)
# A request that waits for so many seconds is told about.
_TELL_SECONDS = 20.0


@dataclass(frozen=True)
class SlurmJob:
    """One of our jobs. Times in seconds since the epoch; 0: not known.

    Attributes:
        number: What Slurm's commands call it.
        state: Its state.
        reason: Why it waits, or why it has ended.
        start: When it began; of a job that waits when it is expected to.
        end: When it has ended, or will by its limit.
        submitted: When it was submitted.
        instance: Id of the instance, from its comment.
    """

    number: str
    state: str
    reason: str
    start: float
    end: float
    submitted: float
    instance: str

    @property
    def waits(self) -> bool:
        """Whether it is a request that was not met yet."""
        return self.state in _WAITING

    @property
    def counts(self) -> bool:
        """Whether the pool wants it: it waits or has a node, and is not ending."""
        return self.waits or _STATES.get(self.state, InstanceState.LEAVING) is not InstanceState.LEAVING


def parse(text: str, mark: str) -> list[SlurmJob]:
    """Return the jobs in an answer of `squeue -o FORMAT` whose comments begin with `mark`."""
    found = []
    for line in text.split("\n"):
        fields = line.split(_SEPARATOR, FORMAT.count(_SEPARATOR))
        if len(fields) > FORMAT.count(_SEPARATOR) and fields[-1].startswith(mark):
            number, state, reason, start, end, submitted, comment = fields
            at = [float(one) if one.isdigit() else 0.0 for one in (start, end, submitted)]
            instance = comment.removeprefix(mark)
            found.append(SlurmJob(number, state, reason, at[0], at[1], at[2], instance))
    return found


def pool_of(jobs: Sequence[SlurmJob], name: str, slots: int, maximum: int) -> Pool:
    """Return the pool. Its trouble is why requests would not be met when nodes become idle."""
    refused = [job for job in jobs if job.waits and _REFUSED.match(job.reason)]
    reasons = ", ".join(sorted({job.reason for job in refused}))
    return Pool(
        name,
        desired=sum(job.counts for job in jobs),
        maximum=max(maximum, sum(job.counts for job in jobs)),
        slots=slots,
        hourly_price=1.0,
        preemptible=True,
        trouble=f"Slurm holds what was asked for: {reasons}" if refused else "",
        trouble_since=max((job.submitted for job in refused), default=0.0),
    )


def instances_of(
    jobs: Sequence[SlurmJob], pool: str, slots: int
) -> tuple[tuple[Instance, ...], tuple[Instance, ...]]:
    """Return (instances that exist, instances that have ended lately). A node costs 1 an hour."""
    there, ended = list[Instance](), list[Instance]()
    for job in jobs:
        state = _STATES.get(job.state)
        if job.waits or (state is None and not 0 < job.start <= job.end):
            continue
        one = Instance(
            job.instance,
            pool,
            state or InstanceState.LEAVING,
            slots=slots,
            preemptible=True,
            hourly_price=1.0,
            launched=job.start,
            ended=None if state else job.end,
            finished=job.state == "COMPLETED",
        )
        (there if state else ended).append(one)
    return tuple(there), tuple(ended)


def told(jobs: Sequence[SlurmJob], pool: str, now: float) -> list[str]:
    """Return lines for users about requests that wait, and about nodes that were lost lately."""
    late = [job for job in jobs if job.waits and now - job.submitted >= _TELL_SECONDS]
    lines = []
    for reason, count in sorted(Counter(job.reason for job in late).items()):
        starts = [job.start for job in late if job.reason == reason and job.start > now]
        when = time.strftime(", expected at %Y-%m-%d %H:%M", time.localtime(min(starts))) if starts else ""
        nodes = "1 node was" if count == 1 else f"{count} nodes were"
        lines.append(f"{pool}: {nodes} asked for, and Slurm says {reason}{when}")
    for job in jobs:
        if not job.waits and job.state not in (*_STATES, "COMPLETED", "CANCELLED"):
            why = "" if job.reason in ("", "None") else f" ({job.reason})"
            lines.append(f"{pool}: job {job.number} of Slurm has ended: {job.state}{why}")
    return lines
