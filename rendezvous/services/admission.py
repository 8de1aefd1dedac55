"""Decide which submitted jobs may begin, and why each other one waits. Pure.

Every node service and every command decides this by itself from the same records; a short difference between
two of them starts a job's agents a moment earlier or later, and nothing else. The coordinator then divides
the slots among the jobs that have begun.

A job begins when the slots of the cluster are enough for its least number of replicas beside those of the
jobs before it. Jobs that have begun come first, then higher priorities, then earlier submissions. A job that
has begun is never displaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from adaptdl_elastic.rendezvous.schema import records
from adaptdl_elastic.rendezvous.schema.submissions import Submission
from adaptdl_elastic.rendezvous.text import pluralize


@dataclass(frozen=True)
class JobState:
    """What is known of a job's run: agents, and the coordinator's word."""

    agents: int = 0
    state: records.JobState | None = None
    reason: str = ""

    @property
    def ended(self) -> bool:
        """Whether the coordinator says that the run has ended."""
        return self.state is not None and self.state.ended


@dataclass(frozen=True)
class Request:
    """A submission, who has cancelled it (None: nobody), and its run."""

    submission: Submission
    cancelled_by: str | None
    run: JobState

    @property
    def over(self) -> bool:
        """Whether no agent is to be started for it any more."""
        return self.run.ended or self.cancelled_by is not None


@dataclass(frozen=True)
class Verdict:
    """Whether a job may begin, and if not, why."""

    admitted: bool
    reason: str = ""


def admit(requests: Iterable[Request], slots: int) -> dict[str, Verdict]:
    """Return a verdict on each job that is not over.

    Args:
        requests: All submissions of the cluster.
        slots: How many replicas fit on all its nodes.
    """
    every = {one.submission.job: one for one in requests}
    waiting = sorted((one for one in every.values() if not one.over), key=_order)
    verdicts: dict[str, Verdict] = {}
    taken = 0
    for one in waiting:
        least = one.submission.min_replicas
        begun = one.run.agents > 0
        hindrance = "" if begun else _hindrance(one.submission, every)
        if not hindrance and not begun and taken + least > slots:
            hindrance = _full(least, taken, slots)
        if hindrance:
            verdicts[one.submission.job] = Verdict(False, hindrance)
        else:
            verdicts[one.submission.job] = Verdict(True)
            taken += least
    return verdicts


def _order(one: Request) -> tuple[bool, int, float, str]:
    submission = one.submission
    return one.run.agents == 0, -submission.priority, submission.created, submission.job


def _full(least: int, taken: int, slots: int) -> str:
    if slots == 0:
        return "no node service is registered; see adaptdl cluster status"
    if least > slots:
        return f"needs {pluralize(least, 'slot')}, the cluster has {slots}"
    return f"needs {pluralize(least, 'slot')}, jobs before it need {taken} of {slots}"


def _hindrance(submission: Submission, every: Mapping[str, Request]) -> str:
    """Return why a job's predecessors keep it from beginning; "" if they do not."""
    for name in submission.after:
        before = every.get(name)
        if before is None:
            return f"waits for {name}, which was never submitted; adaptdl cancel {submission.job} ends it"
        if before.run.state is records.JobState.DONE:
            continue
        if before.over:
            how = before.run.state.value if before.run.state and before.run.ended else "cancelled"
            return f"waits for {name}, which is {how}; adaptdl cancel {submission.job} ends it"
        return f"waits for {name}"
    return ""
