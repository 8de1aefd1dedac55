from __future__ import annotations

import itertools
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from botocore.config import Config
from cutting_proxy import CuttingProxy
from fresh import Script
from moto_process import BUCKET, Moto
from numbers_state import Number, save, write

from adaptdl_elastic import _session, checkpoint
from adaptdl_elastic.agent.cluster.run_secret import common_secret
from adaptdl_elastic.checkpoint import CheckpointError, CheckpointSaveError
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.store.memory import MemoryStore
from adaptdl_elastic.storage import DamagedError, Manifest, StorageError
from adaptdl_elastic.storage.s3 import S3Storage

pytestmark = pytest.mark.processes


@pytest.fixture
def script(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    yield Script(monkeypatch, ADAPTDL_CHECKPOINT_PATH=f"s3://{BUCKET}/jobs/one/")
    _session.reset()


def keys(client: Any) -> list[str]:
    return [found["Key"] for found in client.list_objects_v2(Bucket=BUCKET).get("Contents", [])]


def test_states_are_saved_restored_and_pruned(script: Script, bucket: Any) -> None:
    number = Number("n")
    for value in range(5):
        number.value = value
        save()
    assert len(keys(bucket)) == 3 * 2
    assert all(key.startswith("jobs/one/") for key in keys(bucket))
    script.restart()
    assert Number("n").value == 4


def test_a_large_state_goes_in_parts(script: Script, bucket: Any) -> None:
    storage = S3Storage(f"s3://{BUCKET}")
    content = bytes(range(256)) * (40 << 12)  # 40 MiB: several parts, several checksums
    saved = write(storage, {"big": content})
    with storage.open(saved, storage.manifest(saved).states["big"]) as file:
        assert file.read() == content


def test_data_without_manifest_is_no_checkpoint_and_is_swept(script: Script, bucket: Any) -> None:
    storage = S3Storage(f"s3://{BUCKET}/x")
    writing = storage.begin("00000001-g00000-dead")
    with writing.state("a") as file:
        file.write(b"a")
    upload = bucket.create_multipart_upload(Bucket=BUCKET, Key="x/.adaptdl/data/00000001-g00000-dead/b")
    assert upload["UploadId"]
    assert storage.ids() == []
    good = write(storage, {"a": b"1"})
    storage.sweep()
    assert keys(bucket) == [f"x/.adaptdl/data/{good}/a.state", f"x/.adaptdl/manifests/{good}.json"]
    assert not bucket.list_multipart_uploads(Bucket=BUCKET).get("Uploads")
    with pytest.raises(StorageError, match="another run uses"):  # the one that was thought dead
        writing.commit(Manifest(id=writing.id, states=writing.entries))


def test_a_checkpoint_is_committed_once(script: Script) -> None:
    storage = S3Storage(f"s3://{BUCKET}")
    writing = storage.begin("00000001-g00000-same")
    writing.commit(Manifest(id=writing.id, states={}, kind="first"))
    with pytest.raises(StorageError, match="PreconditionFailed"):
        storage.begin(writing.id).commit(Manifest(id=writing.id, states={}, kind="second"))
    assert storage.manifest(writing.id).kind == "first"


@pytest.fixture
def proxy(script: Script, moto: Moto) -> Iterator[CuttingProxy]:
    with CuttingProxy(moto.endpoint) as proxy:
        script.restart(AWS_ENDPOINT_URL=f"http://{proxy.endpoint}")
        yield proxy


@contextmanager
def before_the_manifest(monkeypatch: pytest.MonkeyPatch, what: Callable[[], None]) -> Iterator[S3Storage]:
    """Call `what` before the next manifest is put, on a connection of its own."""
    storage = checkpoint.manager_of(_session.current()).storage
    assert isinstance(storage, S3Storage)
    put = storage.put_new

    def wrapped(key: str, data: bytes) -> None:
        storage.client.close()
        what()
        put(key, data)

    with monkeypatch.context() as patch:
        patch.setattr(storage, "put_new", wrapped)
        yield storage


def test_a_commit_whose_answer_is_lost_is_a_commit(
    script: Script, proxy: CuttingProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """boto3 puts the manifest again, and S3 says that it is there already."""
    number = Number("n", 1)
    save()
    number.value = 2
    said: list[int] = []
    with before_the_manifest(monkeypatch, lambda: proxy.lose(1)) as storage:
        answered = storage.client.meta.events
        answered.register(
            "response-received.s3.PutObject",
            lambda response_dict, **_: response_dict and said.append(response_dict["status_code"]),
        )
        saved = save()
    assert said[-1] == 412
    script.restart()
    assert (Number("n").value, checkpoint.loaded_id()) == (2, saved.id)


@pytest.mark.parametrize("arrives", [True, False])
def test_data_stays_while_its_commit_is_uncertain(
    script: Script, proxy: CuttingProxy, bucket: Any, monkeypatch: pytest.MonkeyPatch, arrives: bool
) -> None:
    number = Number("n", 1)
    save()
    number.value = 2
    with before_the_manifest(monkeypatch, proxy.swallow if arrives else proxy.cut) as storage:
        impatient = Config(retries={"total_max_attempts": 2})
        monkeypatch.setattr(storage, "client", S3Storage(storage.path, {"config": impatient}).client)
        with pytest.raises(CheckpointSaveError, match="cannot write to s3"):
            checkpoint.save_all_states()
    proxy.heal()
    assert len(keys(bucket)) == (4 if arrives else 3)
    number.value = 3
    save()
    assert len(keys(bucket)) == (6 if arrives else 4)  # what did not arrive is cleared away by the next
    for checkpoint_id, value in zip(storage.ids(), (1, 2, 3) if arrives else (1, 3), strict=True):
        with storage.open(checkpoint_id, storage.manifest(checkpoint_id).states["n"]) as file:
            assert file.read() == b"%d" % value


def test_a_damaged_or_missing_object_falls_back_to_the_checkpoint_before(script: Script, bucket: Any) -> None:
    number, ids = Number("n"), []
    for value in range(3):
        number.value = value
        saved = save()
        ids.append(saved.id)
    bucket.put_object(Bucket=BUCKET, Key=f"jobs/one/.adaptdl/data/{ids[2]}/n.state", Body=b"9")
    bucket.delete_object(Bucket=BUCKET, Key=f"jobs/one/.adaptdl/data/{ids[1]}/n.state")
    script.restart()
    assert Number("n").value == 0


def test_a_bucket_that_can_not_be_read_is_no_fresh_start(script: Script) -> None:
    script.restart(ADAPTDL_CHECKPOINT_PATH="s3://no-such-bucket/x")
    with pytest.raises(CheckpointError, match=r"NoSuchBucket.*not starting afresh"):
        Number("n")


def deny(client: Any, action: str) -> None:
    objects = f"arn:aws:s3:::{BUCKET}/*"
    statement = {"Effect": "Deny", "Principal": "*", "Action": [action], "Resource": objects}
    policy = {"Version": "2012-10-17", "Statement": [statement]}
    client.put_bucket_policy(Bucket=BUCKET, Policy=json.dumps(policy))


def test_a_denied_write_is_told_and_leaves_the_checkpoint_before(
    script: Script, bucket: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script.restart(ADAPTDL_EVENT_LOG=str(tmp_path / "events"))
    number = Number("n", 1)
    checkpoint.save_all_states()
    deny(bucket, "s3:PutObject")
    number.value = 2
    checkpoint.save_all_states(kind="periodic", background=True)  # training goes on
    assert checkpoint.flush(100)
    told = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    assert [event["kind"] for event in told if event["event"] == "checkpoint_failed"] == ["periodic"]
    assert re.search(r"cannot write to s3://.*403.*; the checkpoint before stays", caplog.text)
    with pytest.raises(CheckpointSaveError, match="403"):
        checkpoint.save_all_states(kind="stop")
    script.restart()
    number = Number("n")
    assert number.value == 1
    bucket.delete_bucket_policy(Bucket=BUCKET)
    number.value = 3
    save()
    script.restart()
    assert Number("n").value == 3


def test_where_nothing_may_be_deleted_saves_go_on_and_it_is_said_once(
    script: Script, bucket: Any, caplog: pytest.LogCaptureFixture
) -> None:
    bucket.put_object(Bucket=BUCKET, Key="jobs/one/.adaptdl/data/00000001-g00000-dead/a.state", Body=b"1")
    deny(bucket, "s3:DeleteObject")
    number = Number("n")
    for number.value in range(5):
        save()
    assert caplog.text.count("old checkpoints stay: cannot delete from s3://") == 1
    script.restart()
    assert Number("n").value == 4


def test_a_denied_read_is_no_fresh_start(script: Script, bucket: Any) -> None:
    Number("n", 1)
    checkpoint.save_all_states()
    deny(bucket, "s3:GetObject")
    script.restart()
    with pytest.raises(CheckpointError, match=r"403.*not going on from an older"):
        Number("n")


def test_a_manifest_that_can_not_be_decoded_is_damage(script: Script, bucket: Any) -> None:
    bucket.put_object(Bucket=BUCKET, Key=".adaptdl/manifests/00000001-g00000-x.json", Body=b"{}")
    with pytest.raises(DamagedError, match="checksum"):
        S3Storage(f"s3://{BUCKET}").manifest("00000001-g00000-x")


def write_until(point: int, path: str) -> None:
    """Write a checkpoint in a process that kills itself before or after a request that writes."""
    moments = itertools.count()

    def pass_moment() -> None:
        if next(moments) == point:
            os.kill(os.getpid(), signal.SIGKILL)

    def killing(request: Callable[..., None]) -> Callable[..., None]:
        def made(*given: Any) -> None:
            pass_moment()
            request(*given)
            pass_moment()

        return made

    for name in ("_put", "put_new"):
        setattr(S3Storage, name, killing(getattr(S3Storage, name)))
    storage = S3Storage(path)
    storage.sweep()
    write(storage, {name: str(point).encode() for name in "ab"})


@pytest.mark.exhaustive
def test_killed_at_any_point_a_whole_checkpoint_is_left(script: Script, bucket: Any) -> None:
    storage = S3Storage(f"s3://{BUCKET}/k")
    write(storage, {"a": b"first", "b": b"first"})
    codes = []
    for point in range(7):
        child = os.fork()
        if not child:
            try:
                write_until(point, storage.path)
                os._exit(0)
            finally:
                os._exit(1)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        newest = storage.ids()[-1]
        states = storage.manifest(newest).states
        content = set()
        for name in ("a", "b"):
            with storage.open(newest, states[name]) as file:
                content.add(file.read())
        assert len(content) == 1
        assert content == ({b"first"} if point < 5 else {str(point).encode()})
    assert codes == [-9] * 6 + [0]


def test_nodes_that_begin_at_once_agree_on_a_secret_that_stays_when_checkpoints_move(bucket: Any) -> None:
    path = f"s3://{BUCKET}/jobs/one"
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda n: S3Storage(path).agree("secret", b"%d" % n), range(16)))
    assert len(found) == 1
    write(S3Storage(path), {"a": b"1"})
    assert S3Storage(path).move_aside("archive-1") is not None
    assert {S3Storage(path).agree("secret", b"late")} == found
    assert keys(bucket).count("jobs/one/secret") == 1


def test_a_secret_stays_where_the_bucket_ignores_conditions_or_may_only_be_read(
    bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"s3://{BUCKET}/jobs/one"

    def put_always(self: S3Storage, key: str, data: bytes) -> None:
        bucket.put_object(Bucket=BUCKET, Key=key, Body=data)

    def refuse(self: S3Storage, key: str, data: bytes) -> None:
        raise StorageError("AccessDenied")

    monkeypatch.setattr(S3Storage, "put_new", put_always)
    assert S3Storage(path).agree("secret", b"first") == b"first"
    assert S3Storage(path).agree("secret", b"second") == b"first"
    monkeypatch.setattr(S3Storage, "put_new", refuse)
    assert S3Storage(path).agree("secret", b"third") == b"first"


@pytest.mark.parametrize("content", [b"", b"a list of secrets\n"])
def test_an_object_that_is_no_secret_is_refused_with_the_remedy(bucket: Any, content: bytes) -> None:
    def secret(path: str) -> bytes:
        return common_secret({}, MemoryStore(), Keys("test"), False, f"s3://{BUCKET}/{path}").value

    bucket.put_object(Bucket=BUCKET, Key="jobs/one/secret", Body=content)  # the user's own
    first = secret("jobs/one")
    (key,) = (key for key in keys(bucket) if ".adaptdl/" in key)
    assert secret("jobs/one/") == first
    bucket.put_object(Bucket=BUCKET, Key=key.replace("one", "two"), Body=first)  # a copy
    assert secret("jobs/two") != first
    bucket.put_object(Bucket=BUCKET, Key=key, Body=content)
    with pytest.raises(StorageError, match=r"` there is no secret: remove it, or set ADAPTDL_SECRET"):
        secret("jobs/one")


def test_a_bucket_that_keeps_no_secret_is_an_error_that_names_it(bucket: Any) -> None:
    with pytest.raises(StorageError, match="cannot write to s3://nowhere/jobs"):
        S3Storage("s3://nowhere/jobs").agree("secret", b"x")
