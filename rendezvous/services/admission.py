"""Decide which submitted jobs may begin, and why each other one waits. Pure.

Every node service and every command decides this by itself from the same records; a short difference between
two of them starts a job's agents a moment earlier or later, and nothing else. The coordinator then divides
the slots among the jobs that have begun.

A job begins when the slots of the cluster are enough for its least number of replicas beside those of the
jobs before it. Jobs that have begun come first, then higher priorities, then earlier submissions. A priority
counts only up to the limit of the job's owner. Of two submissions, the earlier one is the one that the store
got first. A job that has begun is never displaced. Later jobs that need fewer slots begin beside a job that
waits for slots, if they were submitted within `OVERTAKING_SECONDS` after it. For jobs submitted later, its
slots are kept. A job counts as submitted no earlier than the waiting jobs that the store got before it,
whatever time its owner signs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from adaptdl_elastic.rendezvous.schema import records
from adaptdl_elastic.rendezvous.schema.submissions import MOST_PRIORITY, Submission
from adaptdl_elastic.rendezvous.text import pluralize

OVERTAKING_SECONDS = 900.0
"""A job that waits for slots is overtaken by jobs that are submitted within so many seconds after it.

Without a bound, a job that needs many slots never begins as long as small jobs are submitted.
"""


@dataclass(frozen=True)
class JobState:
    """What is known of a job's run.

    Attributes:
        agents: How many agents it has.
        state: What the coordinator says; None: nothing yet.
        reason: Why, in the coordinator's words.
        run: Which run that is; "": none yet.
        resumed: Whether the run has ended and the job is to go on in another run.
        forgotten: Whether the run's records are deleted, except for how it ended.
        exit_code: Exit code of a process that mirrors the run's end.
        resumption: The run that a person wants to be followed by another; "": none.
        resumption_number: `JobSpec.number` of that run.
        number: `JobSpec.number` of the run; 0: it is not known.
        ran_on: The nodes where the run has had replicas.
    """

    agents: int = 0
    state: records.JobState | None = None
    reason: str = ""
    run: str = ""
    resumed: bool = False
    forgotten: bool = False
    exit_code: int = 0
    resumption: str = ""
    resumption_number: int = 0
    number: int = 0
    ran_on: tuple[str, ...] = ()

    @property
    def ended(self) -> bool:
        """Whether the coordinator says that the run has ended."""
        return self.state is not None and self.state.ended


@dataclass(frozen=True)
class Request:
    """A submission, who has cancelled it (None: nobody), and its run.

    Attributes:
        submission: What the owner asked for.
        cancelled_by: Who has cancelled it; None: nobody.
        run: Its run.
        most_priority: Largest priority that the owner may give.
        revision: Revision of the store at which the submission was written.
        most_weight: Largest weight that the owner may give.
    """

    submission: Submission
    cancelled_by: str | None
    run: JobState
    most_priority: int = MOST_PRIORITY
    revision: int = 0
    most_weight: float = 1.0

    @property
    def priority(self) -> int:
        """The priority that counts."""
        return min(self.submission.priority, self.most_priority)

    @property
    def over(self) -> bool:
        """Whether no agent is to be started for it any more."""
        return self.run.ended or self.cancelled_by is not None

    @property
    def lacks_status(self) -> bool:
        """Whether its state is shown from the submission, because no status of a coordinator says it."""
        cancelled = self.cancelled_by is not None and not self.run.agents
        return self.run.state is None or self.run.forgotten or cancelled


@dataclass(frozen=True)
class Verdict:
    """Whether a job may begin, and if not, why."""

    admitted: bool
    reason: str = ""


def admit(requests: Iterable[Request], slots: int, unused: str = "") -> dict[str, Verdict]:
    """Return a verdict on each job that is not over.

    Args:
        requests: All submissions of the cluster.
        slots: How many slots all its nodes have on which jobs begin.
        unused: The other nodes, and why no job begins there.
    """
    every = {one.submission.job: one for one in requests}
    waiting = sorted((one for one in every.values() if not one.over), key=_order)
    verdicts: dict[str, Verdict] = {}
    submitted = _submission_times(waiting)
    taken, held_up = 0, list[Submission]()
    for one in waiting:
        least, at = one.submission.least_slots, submitted[one.submission.job]
        begun = one.run.agents > 0
        hindrance = "" if begun else _hindrance(one.submission, every)
        kept = sum(job.least_slots for job in held_up if at - submitted[job.job] > OVERTAKING_SECONDS)
        if not hindrance and not begun and taken + kept + least > slots:
            hindrance = _full(least, taken + kept, slots, unused)
            if slots >= least and one.priority < one.submission.priority:
                hindrance += (
                    f"; its priority counts as {one.priority}, the most that {one.submission.owner} may give"
                )
            held_up += [one.submission] if least <= slots else []
        if hindrance:
            verdicts[one.submission.job] = Verdict(False, hindrance)
        else:
            verdicts[one.submission.job] = Verdict(True)
            taken += least
    return verdicts


def _submission_times(waiting: Iterable[Request]) -> dict[str, float]:
    """Return when each job was submitted, by job: not before a job that the store got earlier."""
    times: dict[str, float] = {}
    latest = float("-inf")
    for one in sorted(waiting, key=lambda one: (one.revision, one.submission.created)):
        latest = max(latest, one.submission.created)
        times[one.submission.job] = latest
    return times


def _order(one: Request) -> tuple[bool, int, int, float, str]:
    submission = one.submission
    return one.run.agents == 0, -one.priority, one.revision, submission.created, submission.job


def _full(least: int, taken: int, slots: int, unused: str) -> str:
    if slots == 0 and not unused:
        return "no node service is registered; see adaptdl cluster status"
    there = f"the cluster has {slots}" if least > slots else f"jobs before it need {taken} of {slots}"
    return f"needs {pluralize(least, 'slot')}, {there}" + (f"; not counted: {unused}" if unused else "")


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
