"""What a node remembers of jobs, against people who write the store and sign nothing, or as themselves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from submitted_jobs import submission_by

from adaptdl_elastic.agent.service.known_jobs import KnownJobs, LostListError
from adaptdl_elastic.autoscaler.provisioning.bring_up import merged_jobs
from adaptdl_elastic.rendezvous.schema.records import JobState as State
from adaptdl_elastic.rendezvous.schema.submissions import Submission
from adaptdl_elastic.rendezvous.services.admission import JobState, Request
from adaptdl_elastic.rendezvous.services.signatures import Person
from adaptdl_elastic.rendezvous.services.submitted import Submitted

PEOPLE = {name: Person(name, "ssh-ed25519 AAAA") for name in ("alice", "bob", "admin")}


def opened(path: Path) -> KnownJobs:
    """Return what the service of a node remembers; the file is begun as `cluster up` does."""
    if not path.exists():
        path.write_text("{}")
    return KnownJobs(path, "n1")


def job(owner: str = "alice", *, created: float = 1.0) -> Submission:
    return submission_by(owner, created=created)


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
    known = opened(tmp_path / "jobs.json")
    known.check(found, PEOPLE)
    assert known.unfinished == 1
    needed = opened(tmp_path / "jobs.json").needed_archives()
    assert needed == {"1" * 64, "e" * 64, "2" * 64}


def test_a_job_is_not_replaced_by_another_of_its_name(tmp_path: Path) -> None:
    known = opened(tmp_path / "jobs.json")
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
    opened(path).check(read(waiting(job())), PEOPLE)
    noted = json.loads(path.read_text())
    fields = json.loads(noted["job"]["submission"])
    del fields["priority"]  # as if the version before did not know it
    noted["job"]["submission"] = json.dumps({**fields, "later": 1})
    path.write_text(json.dumps(noted))
    cancelled = Request(job(), "alice", JobState())
    found = opened(path).check(read(cancelled), PEOPLE)
    assert (found.requests, dict(found.refused)) == ((cancelled,), {})


def test_an_ended_job_stays_ended_when_its_record_is_deleted(tmp_path: Path) -> None:
    cancelled = Request(job(), "admin", JobState())
    known = opened(tmp_path / "cancelled")
    known.check(read(cancelled), PEOPLE)
    for again in (known, opened(tmp_path / "cancelled")):  # and after a restart of the service
        # the administrator is revoked, or the key deleted: the reader sees no valid cancellation
        assert again.check(read(waiting(job())), PEOPLE).requests == (cancelled,)
    for state in (State.DONE, State.FAILED, State.STOPPED):
        known = opened(tmp_path / state.value)
        known.check(read(Request(job(), None, JobState(state=state))), PEOPLE)
        (found,) = opened(tmp_path / state.value).check(read(waiting(job())), PEOPLE).requests
        assert found.run.state is state


def test_a_stopped_job_is_over_until_it_is_resumed_or_runs_again(tmp_path: Path) -> None:
    stopped = Request(job(), None, JobState(state=State.STOPPED, run="r1"))
    resumed = Request(job(), None, JobState(run="r1", resumed=True))
    running = Request(job(), None, JobState(1, State.RUNNING, "", "r2"))
    for number, again in enumerate((resumed, running)):
        known = opened(tmp_path / str(number))
        assert known.check(read(stopped), PEOPLE).requests[0].over
        assert known.check(read(waiting(job())), PEOPLE).requests[0].over  # the coordinator forgot its status
        assert known.check(read(again), PEOPLE).requests == (again,)
        assert known.check(read(waiting(job())), PEOPLE).requests == (waiting(job()),)
        assert known.check(read(stopped), PEOPLE).requests == (stopped,)
    failed = Request(job(), None, JobState(state=State.FAILED, run="r2"))
    known.check(read(failed), PEOPLE)
    assert known.check(read(resumed), PEOPLE).requests[0].run.state is State.FAILED


def test_jobs_of_the_revoked_are_told_from_jobs_whose_records_have_vanished(tmp_path: Path) -> None:
    known = opened(tmp_path / "jobs.json")
    known.check(read(waiting(job())), PEOPLE)
    without = {name: person for name, person in PEOPLE.items() if name != "alice"}
    jobs = ("job", "of an earlier version")
    assert known.vanished(jobs, read(), PEOPLE) == set(jobs)
    assert known.vanished(jobs, read(), without) == {"of an earlier version"}
    assert known.vanished(jobs, read(waiting(job())), PEOPLE) == {"of an earlier version"}


@pytest.mark.parametrize("text", [None, "{", "[]", '{"job": {"submission": "{}"}}', '{"job": {"x": 1}}'])
def test_without_its_list_a_node_starts_nothing(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "jobs.json"
    if text is not None:
        path.write_text(text)
    known = KnownJobs(path, "n1")
    with pytest.raises(LostListError, match=r"node n1 starts no job, .* is lost: adaptdl cluster up brings"):
        known.check(read(waiting(job())), PEOPLE)
    assert (known.owner("job"), known.needed_archives(), path.exists()) == (None, set(), text is not None)
    # no restart of the service is needed
    path.write_text("{}")
    assert known.check(read(waiting(job())), PEOPLE).requests == (waiting(job()),)


def test_a_node_that_is_added_later_starts_nothing_that_has_ended(tmp_path: Path) -> None:
    """Whoever has the store's password can delete the records of an end."""
    runs = waiting(replace(job(), job="runs"))
    ended = {
        "cancelled": Request(replace(job(), job="cancelled"), "alice", JobState()),
        "done": Request(replace(job(), job="done"), None, JobState(state=State.DONE)),
    }
    lists = []
    for number, seen in enumerate(([runs, ended["done"]], [runs, *map(waiting_again, ended.values())])):
        opened(tmp_path / str(number)).check(read(*seen), PEOPLE)
        lists.append(json.loads((tmp_path / str(number)).read_text()))
    opened(tmp_path / "1").check(read(ended["cancelled"]), PEOPLE)
    lists[1] = json.loads((tmp_path / "1").read_text())
    for merged in (merged_jobs(lists), merged_jobs(reversed(lists))):
        (tmp_path / "added").write_text(json.dumps(merged))
        found = opened(tmp_path / "added").check(read(runs, *map(waiting_again, ended.values())), PEOPLE)
        assert found.requests == (runs, *ended.values())
    assert merged_jobs([]) == {}


def test_how_a_replaced_job_ended_says_nothing_of_the_one_that_replaced_it(tmp_path: Path) -> None:
    old = Request(job(), "alice", JobState(state=State.STOPPED, run="r1"))
    new = waiting(replace(job(created=2.0), replaces=1.0, follows="r1"))
    lists = []
    for number, seen in enumerate((old, new)):
        opened(tmp_path / str(number)).check(read(seen), PEOPLE)
        lists.append(json.loads((tmp_path / str(number)).read_text()))
    for merged in (merged_jobs(lists), merged_jobs(reversed(lists))):
        (tmp_path / "added").write_text(json.dumps(merged))
        assert opened(tmp_path / "added").check(read(new), PEOPLE).requests == (new,)


def waiting_again(request: Request) -> Request:
    return waiting(request.submission)


def test_the_owner_replaces_a_job_and_no_other_brings_the_old_one_back(tmp_path: Path) -> None:
    path = tmp_path / "jobs.json"
    failed = Request(job(), None, JobState(state=State.FAILED, run="r1"))
    opened(path).check(read(failed), PEOPLE)
    second = replace(job(created=2.0), command=("mended.py",), replaces=1.0, follows="r1")
    third = replace(job(created=3.0), replaces=2.0, follows="r2")
    for other in (
        replace(second, owner="bob"),
        replace(second, created=1.0),  # not newer than what it names
        replace(second, replaces=None),
        replace(second, replaces=0.5),  # names one that this one has replaced
    ):
        assert opened(path).check(read(waiting(other)), PEOPLE).requests[0].submission == job()
    goes_on = Request(second, None, JobState(run="r1", resumed=True, resumption="r1"))
    assert opened(path).check(read(goes_on), PEOPLE).requests == (goes_on,)
    for replayed in (failed, Request(job(), "alice", JobState()), waiting(job())):
        found = opened(path).check(read(replayed), PEOPLE)
        assert found.requests[0].submission == second
        assert (found.requests[0].cancelled_by, found.refused.keys()) == (None, {"job"})
    # a node that was away knows nothing of the second one, and takes the third one all the same
    opened(tmp_path / "away").check(read(failed), PEOPLE)
    for at in (path, tmp_path / "away"):
        assert opened(at).check(read(waiting(third)), PEOPLE).requests == (waiting(third),)
        assert opened(at).check(read(goes_on), PEOPLE).requests[0].submission == third


@pytest.mark.parametrize("names", [("r1", "r2", "r3"), ("r3", "r2", "r1")], ids=["alike", "clocks differ"])
def test_a_node_that_was_away_takes_a_later_resumption_and_no_earlier_one(
    tmp_path: Path, names: tuple[str, str, str]
) -> None:
    """Names of runs begin with the time on the node that begins them."""
    first, second, third = names
    failed = Request(job(), None, JobState(state=State.FAILED, run=second, number=5))
    known = opened(tmp_path / "jobs.json")
    known.check(read(failed), PEOPLE)
    for signed, number, goes_on in ((first, 3, False), (third, 9, True)):
        runs = JobState(1, State.RUNNING, "", "another", resumption=signed, resumption_number=number)
        (found,) = known.check(read(Request(job(), None, runs)), PEOPLE).requests
        assert (found.run.state is State.RUNNING) == goes_on


def test_a_failed_job_goes_on_only_if_a_person_has_signed_that(tmp_path: Path) -> None:
    failed = Request(job(), None, JobState(state=State.FAILED, run="r2"))
    forged = Request(job(), None, JobState(1, State.RUNNING, "", "r3"))
    old = Request(job(), None, JobState(run="r1", resumed=True, resumption="r1"))
    resumed = Request(job(), None, JobState(run="r2", resumed=True, resumption="r2"))
    runs = Request(job(), None, JobState(1, State.RUNNING, "", "r3", resumption="r2"))
    for number, again in enumerate((resumed, runs)):
        known = opened(tmp_path / str(number))
        known.check(read(failed), PEOPLE)
        for refused in (waiting(job()), forged, old):
            assert known.check(read(refused), PEOPLE).requests[0].run.state is State.FAILED
        assert known.check(read(again), PEOPLE).requests == (again,)
        # what it has to go on with is still there
        assert known.needed_archives() == {"0" * 64}
