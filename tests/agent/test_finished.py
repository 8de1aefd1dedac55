"""What the same command does when a run of the job has ended: with a directory, and with a bucket (moto)."""

from __future__ import annotations

import errno
import os
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from moto_process import BUCKET, CREDENTIALS
from odd_files import ODD

from adaptdl_elastic import storage as storage_module
from adaptdl_elastic.agent import launch
from adaptdl_elastic.agent.cluster import checkpoint_archive, ended_run
from adaptdl_elastic.agent.cluster.ended_run import JobEndedError, JoinError, StartOptions
from adaptdl_elastic.agent.terminal.run_options import parse
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import JobSpec, JobState, JobStatus, encode
from adaptdl_elastic.rendezvous.store.base import StoreError
from adaptdl_elastic.rendezvous.store.memory import MemoryStore
from adaptdl_elastic.storage import Manifest, StorageError, locations

pytestmark = pytest.mark.processes

KEYS = Keys("test")


@pytest.fixture(params=["directory", "prefix"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "directory":
        return str(tmp_path / "saved")
    request.getfixturevalue("bucket")
    return f"s3://{BUCKET}" if request.param == "bucket" else f"s3://{BUCKET}/jobs/one"


COMMAND = ("train.py", "--lr", "1")


@dataclass
class Job:
    """A job's checkpoints, its store, and what its agents say."""

    path: str
    store: MemoryStore = field(default_factory=MemoryStore)
    said: list[str] = field(default_factory=list)
    busy: bool = False
    runs: int = 1
    names: dict[int, str] = field(default_factory=dict)  # run → its name

    @property
    def ids(self) -> list[str]:
        return locations.open_storage(self.path).ids()

    @property
    def spec(self) -> JobSpec:
        """What an agent that starts now says of the job."""
        name = self.names.get(self.runs, f"run-{self.runs}")
        made = JobSpec("job", name, COMMAND, profile_key="a", checkpoint_path=self.path)
        return replace(made, number=self.runs)

    def save(self, content: bytes) -> str:
        storage = locations.open_storage(self.path)
        writing = storage.begin(storage_module.new_id(storage.ids(), 0))
        with writing.state("a") as file:
            file.write(content)
        writing.commit(Manifest(id=writing.id, states=writing.entries))
        return writing.id

    def start(self, *, once: bool = False, anew: bool = False, extend: bool = False, **said: object) -> None:
        options = StartOptions(once, anew, extend=extend)
        spec = replace(self.spec, **said)  # type: ignore[arg-type]
        with ended_run.turn_to_start(
            self.store, KEYS, spec, options, lambda: self.busy, lambda text: self.said.append(text)
        ):
            pass

    def end(
        self, state: JobState = JobState.DONE, *, even_if_empty: bool = False, in_store: bool = False
    ) -> None:
        status = JobStatus("job", self.spec.run, state, reason="why", ended=1.0)
        ended_run.write_note(self.spec, status, self.path, self.said.append, even_if_empty=even_if_empty)
        if in_store:
            self.store.put(KEYS.job("job", "spec"), encode(self.spec))
            self.store.put(KEYS.job("job", "status"), encode(status))
        self.runs += 1


@pytest.fixture
def job(path: str) -> Job:
    return Job(path)


@pytest.mark.parametrize("path", ["directory", "bucket", "prefix"], indirect=True)
def test_a_job_that_is_done_stays_done_until_another_run_is_asked_for(job: Job) -> None:
    saved = [job.save(b"one"), job.save(b"two")]
    job.start()
    assert job.ids == saved, "a run that has not ended goes on"
    job.end()
    for _ in range(2):
        with pytest.raises(
            JobEndedError, match=r"^job 'job' is done: why \(run run-1 at 1970-.*--anew"
        ) as told:
            job.start()
        assert told.value.exit_code == 0
        assert (job.ids, job.said) == (saved, [])
    job.start(anew=True)
    assert job.ids == []
    (line,) = job.said
    archive = locations.open_storage(line.rpartition(" ")[2])
    assert archive.ids() == saved
    with archive.open(saved[1], archive.manifest(saved[1]).states["a"]) as file:
        assert file.read() == b"two"
    job.start()
    assert len(job.said) == 1
    assert job.store.range(KEYS.root).items == ()


def test_each_further_run_leaves_its_own_checkpoints(job: Job) -> None:
    for content in (b"first", b"second"):
        saved = job.save(content)
        locations.open_storage(job.path).sweep()
        job.end()
        job.start(anew=True)
        archive = locations.open_storage(job.said[-1].rpartition(" ")[2])
        with archive.open(saved, archive.manifest(saved).states["a"]) as file:
            assert file.read() == content
    assert len(set(job.said)) == 2


@pytest.mark.parametrize("state", [JobState.STOPPED, JobState.FAILED])
@pytest.mark.parametrize("in_store", [False, True])
def test_a_stopped_or_failed_job_goes_on_unless_once_is_given(
    job: Job, state: JobState, in_store: bool
) -> None:
    saved = job.save(b"one")
    job.end(state, in_store=in_store)
    with pytest.raises(JobEndedError, match=f"has {state.value}: why .*--once") as told:
        job.start(once=True)
    assert told.value.exit_code == (143 if state is JobState.STOPPED else 1)
    job.start()
    assert (job.ids, job.said) == ([saved], [])
    if not in_store:  # what goes on now has not ended
        job.start(once=True)
    job.start(anew=True)
    assert job.ids == []


def test_checkpoints_that_are_gone_are_no_reason_to_train_again(job: Job) -> None:
    job.end(in_store=True)
    with pytest.raises(JobEndedError, match=f"is done.*checkpoints: {job.path}"):
        job.start(once=True)
    job.start(anew=True)
    assert job.said == [], "there was nothing to put aside"


def test_they_stay_while_the_job_has_agents(job: Job) -> None:
    saved = job.save(b"one")
    job.end()
    job.busy = True
    job.start()
    job.start(anew=True)
    assert (job.ids, job.said) == ([saved], [])


def test_agents_of_a_job_that_is_done_are_on_their_way_out(job: Job) -> None:
    job.save(b"one")
    job.end(in_store=True)
    job.busy = True
    with pytest.raises(JobEndedError, match="is done"):
        job.start()
    job.start(anew=True)
    assert job.ids == []


def test_where_nothing_was_saved_a_note_is_left_for_once_only(job: Job) -> None:
    job.end()
    job.start()
    job.end(even_if_empty=True)
    with pytest.raises(JobEndedError, match="is done"):
        job.start(once=True)
    job.start(anew=True)
    job.start(once=True)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"command": ("train.py", "--lr", "2")}, ["`train.py --lr 1`", "`train.py --lr 2`", "--anew"]),
        ({}, ["another version of `train.py --lr 1`", "--rdzv-id"]),
        ({"job": "other"}, ["job 'job' is done", "'other'", "--checkpoint-path"]),
    ],
    ids=["other arguments", "another version", "another job"],
)
def test_another_command_is_refused_where_the_job_is_done(
    job: Job, said: dict[str, object], words: list[str]
) -> None:
    saved = job.save(b"one")
    job.end()
    with pytest.raises(JoinError) as told:
        job.start(profile_key="b", **said)
    for word in words:
        assert word in str(told.value)
    assert (job.ids, job.said) == ([saved], [])
    assert "--extend" in str(told.value)
    with pytest.raises(JobEndedError, match="Nothing is started"):
        job.start(extend=True)
    job.start(extend=True, profile_key="b", **said)
    assert job.ids == [saved]
    job.start(anew=True, profile_key="b", **said)
    assert job.ids == []


@pytest.mark.parametrize("clocks", [1, -1], ids=["alike", "differ"])
def test_a_late_note_of_an_earlier_run_ends_no_other(job: Job, clocks: int) -> None:
    if clocks < 0:  # the clock of the node that began the second run is behind
        job.names = {1: "run-2", 2: "run-1"}
    job.save(b"first")
    job.end()
    job.start(anew=True)
    job.store.put(KEYS.job("job", "spec"), encode(job.spec))
    saved = job.save(b"second")
    job.runs = 1
    job.end()  # an agent of run-1, which was cut off
    job.start()
    assert (job.ids, len(job.said)) == ([saved], 1)
    job.end()
    with pytest.raises(JobEndedError, match=job.names.get(2, "run-2")):
        job.start()


@pytest.mark.parametrize("other", [False, True])
def test_a_run_before_the_noted_one_or_elsewhere_says_nothing(job: Job, other: bool) -> None:
    job.save(b"one")
    job.end()
    number, path = (2, "elsewhere") if other else (0, job.path)
    spec = replace(job.spec, run="another", number=number, checkpoint_path=path)
    job.store.put(KEYS.job("job", "spec"), encode(spec))
    with pytest.raises(JobEndedError, match="run-1"):
        job.start()


@pytest.mark.parametrize("state", [JobState.DONE, JobState.FAILED])
@pytest.mark.parametrize("in_store", [False, True])
def test_a_cut_note_starts_nothing_ends_nothing_and_stays(
    tmp_path: Path, state: JobState, in_store: bool
) -> None:
    job, note = Job(str(tmp_path)), tmp_path / "finished.json"
    saved = job.save(b"one")
    job.end(state, in_store=in_store)
    whole = note.read_bytes()
    odd = [b"[]", b'{"run": 7, "state": "odd", "time": "never"}', b'{"run": "run-1"}', b"\xff"]
    for text in (*(whole[:end] for end in range(len(whole))), *odd):
        note.write_bytes(text)
        for anew in (False, True):
            with pytest.raises(JoinError, match=r"finished\.json does not say how .* give it another name"):
                job.start(once=not anew, anew=anew)
        job.end()
        assert "cannot be noted" in job.said.pop()
        assert (note.read_bytes(), job.ids) == (text, [saved])
    if not in_store:
        job.busy = True  # another run is under way
        job.start()
        job.busy = False
        note.rename(tmp_path / "kept")
        job.start()
    assert (job.ids, job.said) == ([saved], [])


def test_a_disk_that_does_not_answer_keeps_no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, said, status = threading.Event(), list[str](), JobStatus("job", "run-1", JobState.DONE)
    monkeypatch.setattr(ended_run, "write_note", lambda *_, **__: answers.wait())
    monkeypatch.setattr(launch, "NOTE_SECONDS", 0.01)
    options = parse(["--standalone", "--checkpoint-path=/hung", __file__], {"OMP_NUM_THREADS": "1"})
    launch.note_end(options, JobSpec("job", "run-1"), status, said.append)
    answers.set()
    assert said == ["that the job has ended is not noted in /hung: it does not answer for 0.01 s"]


@pytest.mark.parametrize("kind", ODD)
def test_an_odd_file_in_place_of_the_note_is_not_waited_for_and_not_written(
    tmp_path: Path, kind: str
) -> None:
    job, note, target = Job(str(tmp_path)), tmp_path / "finished.json", tmp_path / "moved"
    job.save(b"one")
    target.write_text("mine")
    ODD[kind](note)
    before = note.lstat()
    with pytest.raises(JoinError, match=r"finished\.json does not say how"):
        job.start(anew=True)
    job.end()
    assert "cannot be noted" in job.said[0]
    assert (note.lstat().st_ino, target.read_text()) == (before.st_ino, "mine")
    assert not (tmp_path / "nowhere").exists()


def test_a_full_disk_leaves_the_note_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(str(tmp_path))
    job.save(b"one")
    job.end(JobState.STOPPED)
    before = sorted(tmp_path.iterdir())
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=full))
    job.end()
    assert "cannot be noted" in job.said[0]
    assert sorted(tmp_path.iterdir()) == before
    job.start()


def test_an_agent_waits_while_another_moves_the_checkpoints_aside(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.save(b"one")
    job.end()
    begun, waits, go_on = threading.Event(), threading.Event(), threading.Event()
    move_aside, watch = checkpoint_archive.move_aside, job.store.watch
    monkeypatch.setattr(job.store, "watch", lambda *what: (waits.set(), watch(*what))[1])

    def slowly(path: str) -> str | None:
        """The first agent is in the middle of it until it is let go on."""
        begun.set()
        assert go_on.wait(200)
        return move_aside(path)

    monkeypatch.setattr(checkpoint_archive, "move_aside", slowly)
    first = threading.Thread(target=lambda: job.start(anew=True))
    first.start()
    assert begun.wait(200)
    second = threading.Thread(target=job.start)
    second.start()
    assert waits.wait(200)
    go_on.set()
    first.join(200)
    second.join(200)
    assert not second.is_alive()
    assert len(job.said) == 1
    assert job.ids == []


def test_an_agent_that_gives_up_leaves_the_lock_alone(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    key, impatient = f"{KEYS.root}archiving/job", job.store.client()

    def away(*what: object) -> None:
        raise StoreError("away for a moment")

    monkeypatch.setattr(impatient, "watch", away)
    with checkpoint_archive.exclusive(job.store, key):
        held = job.store.get(key)
        assert held is not None
        with pytest.raises(StoreError, match="away"), checkpoint_archive.exclusive(impatient, key):
            pass
        assert job.store.get(key) == held
    assert job.store.get(key) is None


def test_a_storage_that_cannot_be_read_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    away = {"AWS_ENDPOINT_URL": "http://127.0.0.1:1", "AWS_MAX_ATTEMPTS": "1"}
    for name, value in {**CREDENTIALS, **away}.items():
        monkeypatch.setenv(name, value)
    job, said = Job(f"s3://{BUCKET}/x"), "cannot list checkpoints in s3://checkpoints/x"
    with pytest.raises(StorageError, match=said):
        job.start()
    job.end()
    assert said in job.said[0]
    with pytest.raises(StorageError, match="names no bucket"):
        checkpoint_archive.kept("s3://")


def test_the_end_of_a_job_is_noted_before_its_agent_goes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    order = Mock()
    order.registration.record.unusable = ()
    monkeypatch.setattr(launch, "ignore_signals", order.ignore_signals)
    status = JobStatus("job", "run-1", JobState.DONE)
    monkeypatch.setattr(launch, "NodeAgent", lambda *what: Mock(job_ended=status, exit_code=0))
    monkeypatch.setattr(ended_run, "write_note", order.note)
    options = parse(["--standalone", __file__], {"OMP_NUM_THREADS": "1"})
    found = Mock(identity=None, registration=order.registration)
    parts = Mock(share=order.share, access=Mock(environ={}))
    assert launch.run_agent(options, found, parts) == 0
    names = [call[0] for call in order.mock_calls]
    assert names == ["ignore_signals", "note", "registration.close", "share.close"]
