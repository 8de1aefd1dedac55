"""Remember on a node what was submitted, by whom, and what has ended, across restarts of the service.

Everybody with the store's password can overwrite and delete its records. A node therefore acts on the first
valid submission of each name only: another person's, or an older one that is written again, does not replace
it. Only a newer submission of its owner does that names it, or one that came after it (`submit --replace`).
A job that was cancelled or is done is not started again when the record of that is deleted, or when the
administrator who cancelled it is revoked. A job that was stopped or has failed is not, either, until a person
resumes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from adaptdl_elastic._whole_file import write_whole
from adaptdl_elastic.rendezvous.schema.records import JobState, MalformedRecordError, decode, encode
from adaptdl_elastic.rendezvous.schema.submissions import Submission
from adaptdl_elastic.rendezvous.services.admission import Request
from adaptdl_elastic.rendezvous.services.signatures import People
from adaptdl_elastic.rendezvous.services.submitted import Submitted


class LostListError(Exception):
    """The list of jobs is lost, so that an ended one could be started again; the message says what to do."""


@dataclass(frozen=True)
class KnownJob:
    """What a node remembers of a job.

    Attributes:
        submission: The first valid submission of this name, or what has replaced it, as text.
        cancelled_by: Who has cancelled it; None: nobody.
        ended: How its last run has ended; None: it has not. "stopped" and "failed" are not for good.
        run: The last run that has ended.
        number: `JobSpec.number` of that run.
    """

    submission: str
    cancelled_by: str | None = None
    ended: str | None = None
    run: str = ""
    number: int = 0

    def read(self) -> Submission:
        """Return the submission."""
        return decode(Submission, self.submission)

    def learn(self, request: Request) -> KnownJob:
        """Return what is known after a request of this submission was read."""
        run, ended, last, number = request.run, self.ended, self.run, self.number
        asked = last in (run.resumption, request.submission.follows) or run.resumption_number > number
        # statuses are not signed: a failed run is only followed by another if a person has signed that
        kept = ended == JobState.FAILED.value and not asked
        if ended != JobState.DONE.value and not kept:
            if run.ended:
                ended, last, number = JobState(run.state).value, run.run, max(number, run.number)
            elif run.state is not None or run.resumed:
                ended = None
        cancelled_by = self.cancelled_by or request.cancelled_by
        return replace(self, cancelled_by=cancelled_by, ended=ended, run=last, number=number)

    def replaced_by(self, other: Submission) -> bool:
        """Return whether a submission of the same name takes the place of this one."""
        mine = self.read()
        named = other.replaces if other.owner == mine.owner else None
        return named is not None and mine.created <= named < other.created

    def complete(self, request: Request) -> Request:
        """Return the request with what the store does not say any more."""
        run = request.run
        if self.ended is not None and not run.ended:
            run = replace(run, state=JobState(self.ended), run=self.run)
        return replace(request, cancelled_by=self.cancelled_by or request.cancelled_by, run=run)


class KnownJobs:
    """The jobs that this node has seen, in a file.

    Args:
        path: The file. `adaptdl cluster up` begins it, with what other nodes remember.
        node: Name of the node.
    """

    def __init__(self, path: Path, node: str) -> None:
        self._path, self._node = path, node
        self._jobs = _read(path)
        jobs = self._jobs or {}
        # how many jobs had not ended at the last `check`
        self.unfinished = sum(not (known.ended or known.cancelled_by) for known in jobs.values())

    def owner(self, job: str) -> str | None:
        """Return who owns a job; None: no valid submission of it was seen."""
        known = (self._jobs or {}).get(job)
        return None if known is None else known.read().owner

    def folder(self, job: str) -> str | None:
        """Return the name of a job's working directory; None: no valid submission of it was seen."""
        known = (self._jobs or {}).get(job)
        return None if known is None else known.read().folder

    def needed_archives(self) -> set[str]:
        """Return the digests of the archives of jobs that may run, or run again."""
        lasting = [
            known.read()
            for known in (self._jobs or {}).values()
            if known.cancelled_by is None and known.ended != JobState.DONE.value
        ]
        return {
            archive
            for submission in lasting
            for archive in (submission.bundle, submission.environment)
            if archive is not None
        }

    def vanished(self, jobs: Iterable[str], found: Submitted, people: People) -> set[str]:
        """Return those of the jobs that have no submission any more, although their owner is not revoked."""
        there = {request.submission.job for request in found.requests}
        return {job for job in jobs if job not in there and (self.owner(job) or "") in {"", *people}}

    def check(self, found: Submitted, people: People) -> Submitted:
        """Remember what is new, and return what was found as this node acts on it.

        Raises:
            OSError: it cannot be remembered.
            LostListError: it is not known what has ended.
        """
        if self._jobs is None:
            self._jobs = _read(self._path)
        if self._jobs is None:
            raise LostListError(
                f"node {self._node} starts no job, because its list of jobs that have ended is lost: "
                f"adaptdl cluster up brings it that of the other nodes"
            )
        jobs, requests = dict(self._jobs), list[Request]()
        # what a person who was revoked has submitted before needs nobody's attention
        revoked = {job for job, known in jobs.items() if known.read().owner not in people}
        refused = {job: why for job, why in found.refused.items() if job not in revoked}
        for request in found.requests:
            job = request.submission.job
            known = jobs.get(job)
            if known is None or known.replaced_by(request.submission):
                known = KnownJob(encode(request.submission))
            first = known.read()
            if first != request.submission:  # not their texts: another version writes other fields
                refused[job] = (
                    f"a job of this name was submitted by {first.owner} before: choose another --name"
                )
                if first.owner not in people:
                    continue
                # who has cancelled it was checked against the owner of the record that replaces it
                request = replace(request, submission=first, cancelled_by=None)
            jobs[job] = known.learn(request)
            requests.append(jobs[job].complete(request))
        if jobs != self._jobs:
            _write(self._path, jobs)
            self._jobs = jobs
        self.unfinished = sum(not request.over for request in requests)
        return replace(found, requests=tuple(requests), refused=refused)


def _read(path: Path) -> dict[str, KnownJob] | None:
    """Return the jobs in a file; None if it is lost."""
    try:
        jobs = {str(job): KnownJob(**known) for job, known in json.loads(path.read_text()).items()}
        for known in jobs.values():
            known.read()
            JobState(known.ended or JobState.DONE)
    except (OSError, ValueError, TypeError, AttributeError, MalformedRecordError):
        return None
    return jobs


def _write(path: Path, jobs: dict[str, KnownJob]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps({job: asdict(jobs[job]) for job in sorted(jobs)}))
