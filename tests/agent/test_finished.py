"""What the same command does when a run of the job has ended: with a directory, and with a bucket (moto)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from moto_process import REGION, Moto, running_moto

from adaptdl_elastic import storage as storage_module
from adaptdl_elastic.agent import launch
from adaptdl_elastic.agent.cluster import checkpoint_archive, ended_run
from adaptdl_elastic.agent.cluster.ended_run import JobEndedError, JoinError, StartOptions
from adaptdl_elastic.agent.runtime import agent
from adaptdl_elastic.agent.terminal.run_options import parse
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import JobSpec, JobState, JobStatus, encode
from adaptdl_elastic.rendezvous.store.base import StoreError
from adaptdl_elastic.rendezvous.store.memory import MemoryStore
from adaptdl_elastic.storage import Manifest, StorageError, locations

pytestmark = pytest.mark.processes

KEYS = Keys("test")
BUCKET = "checkpoints"


@pytest.fixture(scope="module")
def moto() -> Iterator[Moto]:
    with running_moto() as server:
        yield server


@pytest.fixture(params=["directory", "bucket", "prefix"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    if request.param == "directory":
        return str(tmp_path / "saved")
    moto: Moto = request.getfixturevalue("moto")
    moto.reset()
    for name, value in moto.environment.items():
        monkeypatch.setenv(name, value)
    location = {"LocationConstraint": REGION}
    moto.client("s3").create_bucket(Bucket=BUCKET, CreateBucketConfiguration=location)
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

    @property
    def ids(self) -> list[str]:
        return locations.open_storage(self.path).ids()

    @property
    def spec(self) -> JobSpec:
        """What an agent that starts now says of the job."""
        return JobSpec("job", f"run-{self.runs}", COMMAND, profile_key="a", checkpoint_path=self.path)

    def save(self, content: bytes) -> str:
        storage = locations.open_storage(self.path)
        writing = storage.begin(storage_module.new_id(storage.ids(), 0))
        with writing.state("a") as file:
            file.write(content)
        writing.commit(Manifest(id=writing.id, states=writing.entries))
        return writing.id

    def start(self, *, once: bool = False, anew: bool = False, **said: object) -> None:
        options = StartOptions(once, anew)
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
def test_what_was_stopped_or_has_failed_goes_on_except_with_once(
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
    job.start(anew=True, profile_key="b", **said)
    assert job.ids == []


def test_a_late_note_of_an_earlier_run_ends_no_other(job: Job) -> None:
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
    with pytest.raises(JobEndedError, match="run-2"):
        job.start()


@pytest.mark.parametrize("other", [False, True])
def test_a_run_before_the_noted_one_or_elsewhere_says_nothing(job: Job, other: bool) -> None:
    job.save(b"one")
    job.end()
    run, path = ("run-2", "elsewhere") if other else ("run-0", job.path)
    job.store.put(KEYS.job("job", "spec"), encode(replace(job.spec, run=run, checkpoint_path=path)))
    with pytest.raises(JobEndedError, match="run-1"):
        job.start()


@pytest.mark.parametrize(
    "note", [b"", b"[]", b'{"run": 7, "state": "odd", "time": "never"}', b'{"run": "run-1"}']
)
def test_a_note_that_cannot_be_read_says_that_the_job_is_done(tmp_path: Path, note: bytes) -> None:
    (tmp_path / "finished.json").write_bytes(note)
    with pytest.raises(JobEndedError, match="is done"):
        Job(str(tmp_path)).start()


def test_who_comes_while_another_puts_them_aside_waits_for_it(
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


def test_who_gives_up_while_it_waits_lets_nobody_else_in(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_where_nobody_can_look_it_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    job, said = Job(f"s3://{BUCKET}/x"), "cannot list checkpoints in s3://checkpoints/x"
    with pytest.raises(StorageError, match=said):
        job.start()
    job.end()
    assert said in job.said[0]
    with pytest.raises(StorageError, match="names no bucket"):
        checkpoint_archive.kept("s3://")


def test_that_a_job_is_done_is_noted_before_its_agent_goes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    order = Mock()
    order.registration.record.unusable = ()
    monkeypatch.setattr(launch, "ignore_signals", order.ignore_signals)
    status = JobStatus("job", "run-1", JobState.DONE)
    monkeypatch.setattr(agent, "ElasticAgent", lambda *what: Mock(job_ended=status, exit_code=0))
    monkeypatch.setattr(ended_run, "write_note", order.note)
    options = parse(["--standalone", __file__], {"OMP_NUM_THREADS": "1"})
    found = Mock(identity=None, registration=order.registration)
    parts = Mock(share=order.share, access=Mock(environ={}))
    assert launch.run_agent(options, found, parts) == 0
    names = [call[0] for call in order.mock_calls]
    assert names == ["ignore_signals", "note", "registration.close", "share.close"]
