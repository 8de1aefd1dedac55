"""Read what `squeue` answers about our jobs, and decide what it means for the pool. Pure."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from adaptdl_elastic.autoscaler.providers.base import Capacity, Instance, InstanceState, Pool

_SEPARATOR = "\x1f"  # the "unit separator", which no value has; a comment, which could have it, comes last

FORMAT = _SEPARATOR.join(("%A", "%T", "%r", "%S", "%e", "%V", "%k"))
"""What `squeue -o` prints of a job: number, state, reason, start, end, submission, comment."""

_WAITING = {"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
_WORKING = {"RUNNING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED"}
_ENDED = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"}
_ENDED |= {"PREEMPTED", "REVOKED", "TIMEOUT"}
_STATES = {
    **dict.fromkeys(_WORKING, InstanceState.RUNNING),
    "CONFIGURING": InstanceState.PENDING,
    "COMPLETING": InstanceState.LEAVING,
}

# Reasons for which a request would wait until something else changes than the use of nodes. A job that a
# person holds is not among them: the request stays as that person has left it.
_REFUSED = re.compile(
    "Account|Assoc|BadConstraints|DependencyNever|Invalid|JobHoldMaxRequeue|JobLaunch|launch failed|Partition"
    "|Max.*Per(Account|Limit)|Q[Oo][Ss]|SystemFailure"
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
        """Whether the pool wants it: it has not ended, and is not ending; unknown states count."""
        return self.state not in _ENDED and self.state != "COMPLETING"

    @property
    def had_node(self) -> bool:
        """Whether it has ended, after it had a node."""
        return self.state in _ENDED and 0 < self.start <= self.end


def parse(text: str, mark: str) -> list[SlurmJob]:
    """Return the jobs in an answer of `squeue -o FORMAT` whose comments begin with `mark`."""
    found = []
    for line in text.split("\n"):
        fields = line.split(_SEPARATOR, FORMAT.count(_SEPARATOR))
        if len(fields) > FORMAT.count(_SEPARATOR) and fields[-1].startswith(mark):
            number, state, reason, *times, comment = fields
            start, end, submitted = (float(one) if one.isdigit() else 0.0 for one in times)
            found.append(SlurmJob(number, state, reason, start, end, submitted, comment.removeprefix(mark)))
    return found


def capacity_of(jobs: Sequence[SlurmJob], pool: str, slots: int, maximum: int, now: float) -> Capacity:
    """Return what these jobs are: a pool, and instances. A node costs 1 an hour.

    The pool's trouble is why requests would not be met when nodes become idle.
    """
    refused = [job for job in jobs if job.waits and _REFUSED.match(job.reason)]
    desired, reasons = sum(job.counts for job in jobs), ", ".join(sorted({job.reason for job in refused}))
    source = Pool(pool, desired, 0, max(maximum, desired), slots, hourly_price=1.0, preemptible=True)
    if refused:
        why, since = f"Slurm holds what was asked for: {reasons}", max(job.submitted for job in refused)
        source = replace(source, trouble=why, trouble_since=since)
    there = tuple(_instance(job, source) for job in jobs if job.state in _STATES)
    ended = tuple(_instance(job, source) for job in jobs if job.had_node)
    return Capacity((source,), there, tuple(_told(jobs, pool, now)), ended)


def _instance(job: SlurmJob, pool: Pool) -> Instance:
    state, ended = _STATES.get(job.state, InstanceState.LEAVING), job.end if job.had_node else None
    one = Instance(job.instance, pool.name, state, pool.slots, preemptible=True, hourly_price=1.0)
    return replace(one, launched=job.start, ended=ended, finished=job.state == "COMPLETED")


def _told(jobs: Sequence[SlurmJob], pool: str, now: float) -> list[str]:
    """Return lines for users about requests that wait, and about nodes that were lost lately."""
    late = [job for job in jobs if job.waits and now - job.submitted >= _TELL_SECONDS]
    lines = []
    for reason, count in sorted(Counter(job.reason for job in late).items()):
        starts = [job.start for job in late if job.reason == reason and job.start > now]
        when = time.strftime(", expected at %Y-%m-%d %H:%M", time.localtime(min(starts))) if starts else ""
        nodes = "1 node was" if count == 1 else f"{count} nodes were"
        lines.append(f"{pool}: {nodes} asked for, and Slurm says {reason}{when}")
    for job in jobs:
        if job.had_node and job.state not in ("COMPLETED", "CANCELLED"):
            lines.append(f"{pool}: job {job.number} of Slurm has ended: {job.state} ({job.reason})")
    return lines
