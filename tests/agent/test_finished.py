"""What a rerun does with the checkpoints of a job that is done: in a directory, and in a bucket (moto)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import Mock

import pytest
from moto_process import REGION, Moto, running_moto

from adaptdl_elastic import storage as storage_module
from adaptdl_elastic.agent import launch
from adaptdl_elastic.agent.cluster import checkpoint_archive
from adaptdl_elastic.agent.runtime import agent
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import JobSpec, encode
from adaptdl_elastic.rendezvous.store.base import StoreError
from adaptdl_elastic.rendezvous.store.memory import MemoryStore
from adaptdl_elastic.storage import Manifest, StorageError, locations

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


@dataclass
class Job:
    """A job's checkpoints, and what its agents say."""

    path: str
    store: MemoryStore
    said: list[str]
    busy: bool = False

    @property
    def ids(self) -> list[str]:
        return locations.open_storage(self.path).ids()

    def save(self, content: bytes) -> str:
        storage = locations.open_storage(self.path)
        writing = storage.begin(storage_module.new_id(storage.ids(), 0))
        with writing.state("a") as file:
            file.write(content)
        writing.commit(Manifest(id=writing.id, states=writing.entries))
        return writing.id

    def start(self) -> None:
        checkpoint_archive.archive_finished(
            self.store, KEYS, "job", self.path, lambda: self.busy, lambda text: self.said.append(text)
        )

    def end(self) -> None:
        checkpoint_archive.note_finished(self.path, "run-1", self.said.append)


@pytest.fixture
def job(path: str) -> Job:
    return Job(path, MemoryStore(), [])


def test_the_checkpoints_of_a_finished_job_are_put_aside_once(job: Job) -> None:
    saved = [job.save(b"one"), job.save(b"two")]
    job.start()
    assert job.ids == saved, "an unfinished one stays"
    job.end()
    job.start()
    assert job.ids == []
    (line,) = job.said
    assert "starting anew" in line
    archive = locations.open_storage(line.rpartition(" ")[2])
    assert archive.ids() == saved
    with archive.open(saved[1], archive.manifest(saved[1]).states["a"]) as file:
        assert file.read() == b"two"
    job.start()
    assert len(job.said) == 1
    assert job.store.range(KEYS.root).items == ()


def test_each_rerun_leaves_its_own(job: Job) -> None:
    for content in (b"first", b"second"):
        saved = job.save(content)
        locations.open_storage(job.path).sweep()
        job.end()
        job.start()
        archive = locations.open_storage(job.said[-1].rpartition(" ")[2])
        with archive.open(saved, archive.manifest(saved).states["a"]) as file:
            assert file.read() == content
    assert len(set(job.said)) == 2


def test_they_stay_while_somebody_runs_the_job(job: Job) -> None:
    saved = job.save(b"one")
    job.end()
    job.busy = True
    job.start()
    assert (job.ids, job.said) == ([saved], [])


def test_where_nothing_was_saved_nothing_is_noted(job: Job) -> None:
    job.end()
    job.start()
    assert job.said == []


def spec(run: str, path: str) -> str:
    return encode(JobSpec("job", run, (), 1, 1, 1, 1, checkpoint_path=path))


def test_a_late_note_of_an_earlier_run_makes_no_other_run_finished(job: Job) -> None:
    job.save(b"first")
    job.end()
    job.start()
    job.store.put(KEYS.job("job", "spec"), spec("run-2", job.path))
    saved = job.save(b"second")
    job.end()  # an agent of run-1, which was cut off
    job.start()
    assert (job.ids, len(job.said)) == ([saved], 1)
    checkpoint_archive.note_finished(job.path, "run-2", job.said.append)
    job.start()
    assert (job.ids, len(job.said)) == ([], 2)


@pytest.mark.parametrize("other", [False, True])
def test_a_run_before_the_noted_one_or_elsewhere_says_nothing(job: Job, other: bool) -> None:
    job.save(b"one")
    job.end()
    job.store.put(
        KEYS.job("job", "spec"), spec("run-2" if other else "run-0", "elsewhere" if other else job.path)
    )
    job.start()
    assert job.ids == []


def test_who_comes_while_another_puts_them_aside_waits_for_it(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.save(b"one")
    job.end()
    begun, waits, go_on = threading.Event(), threading.Event(), threading.Event()
    kept, watch = checkpoint_archive.kept, job.store.watch
    monkeypatch.setattr(job.store, "watch", lambda *what: (waits.set(), watch(*what))[1])

    class Slow:
        """The first agent is in the middle of it until it is let go on."""

        def __init__(self, path: str) -> None:
            self._kept = kept(path)

        def note(self) -> bytes | None:
            return self._kept.note()

        def move_aside(self, name: str) -> str:
            begun.set()
            assert go_on.wait(200)
            return self._kept.move_aside(name)

    monkeypatch.setattr(checkpoint_archive, "kept", Slow)
    first = threading.Thread(target=job.start)
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
    with checkpoint_archive._alone(job.store, key):
        held = job.store.get(key)
        assert held is not None
        with pytest.raises(StoreError, match="away"), checkpoint_archive._alone(impatient, key):
            pass
        assert job.store.get(key) == held
    assert job.store.get(key) is None


def test_where_nobody_can_look_it_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    job, said = Job(f"s3://{BUCKET}/x", MemoryStore(), []), "can not list checkpoints in s3://checkpoints/x"
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
    monkeypatch.setattr(launch, "ignore_signals", order.ignore_signals)
    monkeypatch.setattr(agent, "ElasticAgent", lambda *what: Mock(job_done=True, exit_code=0))
    monkeypatch.setattr(checkpoint_archive, "note_finished", order.note)
    options = Mock(slots=1, role="worker", max_restarts=0, job="job", standalone=True)
    found = Mock(identity=None, registration=order.registration)
    assert launch._run(options, found, Mock(share=order.share)) == 0
    names = [call[0] for call in order.mock_calls]
    assert names == ["ignore_signals", "note", "registration.close", "share.close"]
