"""What a node remembers of jobs, against people who write the store and sign nothing, or as themselves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from adaptdl_elastic.agent.service.known_jobs import KnownJobs
from adaptdl_elastic.rendezvous.schema.records import JobState as State
from adaptdl_elastic.rendezvous.schema.submissions import Submission
from adaptdl_elastic.rendezvous.services.admission import JobState, Request
from adaptdl_elastic.rendezvous.services.signatures import Person
from adaptdl_elastic.rendezvous.services.submitted import Submitted

PEOPLE = {name: Person(name, "ssh-ed25519 AAAA") for name in ("alice", "bob", "admin")}


def job(owner: str = "alice", *, created: float = 1.0) -> Submission:
    return Submission("job", owner, "script", ("train.py",), "0" * 64, created=created)


def read(*requests: Request) -> Submitted:
    return Submitted({}, requests, {})


def waiting(submission: Submission) -> Request:
    return Request(submission, None, JobState())


def test_archives_are_needed_until_a_job_has_ended_for_good(tmp_path: Path) -> None:
    runs = replace(job(), job="runs", bundle="1" * 64, environment="e" * 64)
    stopped = replace(job(), job="stopped", bundle="2" * 64)
    done = replace(job(), job="done", bundle="3" * 64)
    cancelled = replace(job(), job="cancelled", bundle="4" * 64)
    found = read(
        waiting(runs),
        Request(stopped, None, JobState(state=State.STOPPED)),
        Request(done, None, JobState(state=State.DONE)),
        Request(cancelled, "alice", JobState()),
    )
    KnownJobs(tmp_path / "jobs.json").check(found, PEOPLE)
    needed = KnownJobs(tmp_path / "jobs.json").needed_archives()
    assert needed == {"1" * 64, "e" * 64, "2" * 64}


def test_a_job_is_not_replaced_by_another_of_its_name(tmp_path: Path) -> None:
    known = KnownJobs(tmp_path / "jobs.json")
    first = waiting(job())
    assert known.check(read(first), PEOPLE) == read(first)
    for other in (job("bob"), job(created=0.5)):  # another person's, and an older one of the same person
        found = known.check(read(Request(other, other.owner, JobState())), PEOPLE)
        assert found.requests == (first,)
        assert "job of this name was submitted by alice before" in found.refused["job"]
        assert known.owner("job") == "alice"
    without = {name: person for name, person in PEOPLE.items() if name != "alice"}
    assert known.check(read(waiting(job("bob"))), without).requests == ()
    assert known.owner("job") == "alice"
    assert known.owner("gone") is None


def test_a_job_that_another_version_has_noted_with_other_fields_is_the_same_job(tmp_path: Path) -> None:
    path = tmp_path / "jobs.json"
    KnownJobs(path).check(read(waiting(job())), PEOPLE)
    noted = json.loads(path.read_text())
    fields = json.loads(noted["job"]["submission"])
    del fields["notify"]  # which the version before did not know
    noted["job"]["submission"] = json.dumps({**fields, "later": 1})
    path.write_text(json.dumps(noted))
    cancelled = Request(job(), "alice", JobState())
    found = KnownJobs(path).check(read(cancelled), PEOPLE)
    assert (found.requests, dict(found.refused)) == ((cancelled,), {})


def test_what_has_ended_stays_ended_when_the_record_of_it_is_deleted(tmp_path: Path) -> None:
    cancelled = Request(job(), "admin", JobState())
    known = KnownJobs(tmp_path / "cancelled")
    known.check(read(cancelled), PEOPLE)
    for again in (known, KnownJobs(tmp_path / "cancelled")):  # and after a restart of the service
        # the administrator is revoked, or the key deleted: the reader sees no valid cancellation
        assert again.check(read(waiting(job())), PEOPLE).requests == (cancelled,)
    for state in (State.DONE, State.FAILED, State.STOPPED):
        known = KnownJobs(tmp_path / state.value)
        known.check(read(Request(job(), None, JobState(state=state))), PEOPLE)
        (found,) = KnownJobs(tmp_path / state.value).check(read(waiting(job())), PEOPLE).requests
        assert found.run.state is state


def test_a_stopped_job_is_over_until_it_is_resumed_or_runs_again(tmp_path: Path) -> None:
    stopped = Request(job(), None, JobState(state=State.STOPPED, run="r1"))
    resumed = Request(job(), None, JobState(run="r1", resumed=True))
    running = Request(job(), None, JobState(1, State.RUNNING, "", "r2"))
    for number, again in enumerate((resumed, running)):
        known = KnownJobs(tmp_path / str(number))
        assert known.check(read(stopped), PEOPLE).requests[0].over
        assert known.check(read(waiting(job())), PEOPLE).requests[0].over  # the coordinator forgot its status
        assert known.check(read(again), PEOPLE).requests == (again,)
        assert known.check(read(waiting(job())), PEOPLE).requests == (waiting(job()),)
        assert known.check(read(stopped), PEOPLE).requests == (stopped,)
    failed = Request(job(), None, JobState(state=State.FAILED, run="r2"))
    known.check(read(failed), PEOPLE)
    assert known.check(read(resumed), PEOPLE).requests[0].run.state is State.FAILED


def test_jobs_of_the_revoked_are_told_from_jobs_whose_records_have_vanished(tmp_path: Path) -> None:
    known = KnownJobs(tmp_path / "jobs.json")
    known.check(read(waiting(job())), PEOPLE)
    without = {name: person for name, person in PEOPLE.items() if name != "alice"}
    jobs = ("job", "of an earlier version")
    assert known.vanished(jobs, read(), PEOPLE) == set(jobs)
    assert known.vanished(jobs, read(), without) == {"of an earlier version"}
    assert known.vanished(jobs, read(waiting(job())), PEOPLE) == {"of an earlier version"}


def test_a_damaged_file_is_begun_again(tmp_path: Path) -> None:
    path = tmp_path / "jobs.json"
    for text in ("{", "[]", '{"job": {"submission": "{}"}}', '{"job": {"x": 1}}'):
        path.write_text(text)
        known = KnownJobs(path)
        assert known.owner("job") is None
        known.check(read(waiting(job())), PEOPLE)
        assert KnownJobs(path).owner("job") == "alice"
