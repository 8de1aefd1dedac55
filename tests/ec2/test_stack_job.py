"""Which code a node of an EC2 stack runs, and how it is fetched."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from adaptdl_elastic.agent.service import stack_job
from adaptdl_elastic.agent.service.blobs import BlobError
from adaptdl_elastic.agent.service.stack_job import choose, fetch
from adaptdl_elastic.autoscaler.provisioning import bundle
from adaptdl_elastic.protocol.environment import CODE
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import JobSpec, JobState, JobStatus, NodeRecord, encode
from adaptdl_elastic.rendezvous.schema.submissions import STACK_OWNER
from adaptdl_elastic.rendezvous.store.memory import MemoryStore

KEYS = Keys("default")
OLD, NEW = (f"s3://lab/stack/code-{digit * 64}.tar.gz" for digit in "01")


def store_of(code: str, state: JobState = JobState.RUNNING) -> MemoryStore:
    store = MemoryStore()
    store.put(KEYS.job("train", "spec"), encode(JobSpec("train", "run", code=code)))
    store.put(KEYS.job("train", "status"), encode(JobStatus("train", "run", state)))
    record = NodeRecord(node="n1", job="train", host="h", slots=1, agent="a", run="run")
    store.put(KEYS.node("n1", "train"), encode(record))
    return store


def test_a_node_that_joins_a_run_takes_its_code() -> None:
    assert choose(store_of(OLD), KEYS, "train", NEW) == OLD
    # its only node may just have been taken away
    store = store_of(OLD)
    store.delete(KEYS.node("n1", "train"))
    assert choose(store, KEYS, "train", NEW) == OLD


@pytest.mark.parametrize(
    "store",
    [MemoryStore(), store_of(OLD, JobState.STOPPED), store_of(OLD, JobState.DONE), store_of("")],
    ids=["no job", "stopped", "done", "started elsewhere"],
)
def test_a_new_run_takes_the_stacks_own(store: MemoryStore) -> None:
    assert choose(store, KEYS, "train", NEW) == NEW


@pytest.mark.parametrize(
    "code",
    [
        OLD.replace("stack", "other"),
        OLD.replace("lab", "theirs"),
        OLD.replace("code-", "checkpoints/code-"),
        OLD + "/../x",
        "x",
    ],
)
def test_code_of_another_place_is_never_taken(code: str) -> None:
    """Whoever writes into etcd could otherwise have every node run what they have in a bucket."""
    assert choose(store_of(code), KEYS, "train", NEW) == NEW


class Bucket:
    """S3 with one archive."""

    def __init__(self, archive: Path) -> None:
        self.archive, self.asked = archive, 0
        self.written: dict[str, bytes] = {}

    def put_object(self, Bucket: str, Key: str, Body: bytes) -> None:
        self.written[f"{Bucket}/{Key}"] = Body

    def download_file(self, bucket: str, key: str, target: str) -> None:
        assert (bucket, key.partition("-")[0]) == ("lab", "stack/code")
        self.asked += 1
        shutil.copy(self.archive, target)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    job = tmp_path / "job"
    job.mkdir()
    (job / "train.py").write_text("print(1)")
    bundle.pack(job, tmp_path / "code.tar.gz", STACK_OWNER, command=["train.py", "a b"])
    return tmp_path / "code.tar.gz"


def url_of(archive: Path) -> str:
    return f"s3://lab/stack/code-{hashlib.sha256(archive.read_bytes()).hexdigest()}.tar.gz"


@pytest.mark.processes
def test_an_archive_is_unpacked_once_and_is_what_was_uploaded(archive: Path, tmp_path: Path) -> None:
    folder, bucket = tmp_path / "node", Bucket(archive)
    folder.mkdir()
    found = fetch(url_of(archive), folder, bucket)
    assert (found / "train.py").read_text() == "print(1)"
    assert fetch(url_of(archive), folder, bucket) == found
    assert bucket.asked == 1
    archive.write_bytes(archive.read_bytes() + b"more")
    with pytest.raises(BlobError, match="is not what was uploaded"):
        fetch(OLD, folder, bucket)
    with pytest.raises(BlobError, match="is no archive of adaptdl cloud up"):
        fetch("s3://lab/stack/code.tar.gz", folder, bucket)


@pytest.mark.processes
def test_requirements_that_cannot_be_installed_are_tried_again(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job" / "requirements.txt").write_text("none")
    bundle.pack(tmp_path / "job", archive, STACK_OWNER, command=["train.py"])
    folder, tried = tmp_path / "node", list[Path]()
    folder.mkdir()

    def run(command: list[str], cwd: Path, **_: object) -> subprocess.CompletedProcess[str]:
        tried.append(cwd)
        return subprocess.CompletedProcess(command, int(len(tried) == 1), "no matching distribution\n", "")

    monkeypatch.setattr(stack_job.subprocess, "run", run)
    with pytest.raises(BlobError, match="cannot be installed"):
        fetch(url_of(archive), folder, Bucket(archive))
    found = fetch(url_of(archive), folder, Bucket(archive))
    assert tried == [found, found]


@pytest.mark.processes
def test_the_agent_gets_the_options_and_the_command(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    became: list[tuple[list[str], str, Path]] = []
    monkeypatch.setenv("ADAPTDL_ETCD", "https://10.0.0.1:2379")
    monkeypatch.setattr(stack_job, "connect", lambda *_, **__: MemoryStore())
    monkeypatch.setattr(stack_job.boto3, "client", lambda _: Bucket(archive))
    monkeypatch.setattr(
        stack_job.os, "execve", lambda _, agent, env: became.append((agent[3:], env[CODE], Path.cwd()))
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "node").mkdir()
    stack_job.main(["train", url_of(archive), str(tmp_path / "node"), "--once", "--nnodes=1:512"])
    ((agent, code, folder),) = became
    assert agent == ["--rdzv-id=train", "--once", "--nnodes=1:512", "train.py", "a b"]
    assert code == url_of(archive)
    assert (folder / "train.py").exists()


@pytest.mark.processes
def test_why_the_code_does_not_run_is_left_in_the_bucket(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The instance is given back soon, and its journal with it."""
    bucket = Bucket(archive)
    monkeypatch.setenv("ADAPTDL_ETCD", "https://10.0.0.1:2379")
    monkeypatch.setattr(stack_job, "connect", lambda *_, **__: MemoryStore())
    monkeypatch.setattr(stack_job.boto3, "client", lambda _: bucket)
    (tmp_path / "node").mkdir()
    said = stack_job.main(["train", OLD, str(tmp_path / "node")])
    assert "is not what was uploaded" in said
    ((key, text),) = bucket.written.items()
    assert re.fullmatch(r"lab/stack/boot-failures/[^/]+-train\.log", key)
    assert b"is not what was uploaded" in text
