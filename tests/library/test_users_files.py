"""What else lies where checkpoints are kept stays as it is, in a directory and in a bucket (moto)."""

from __future__ import annotations

import functools
import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from moto_process import BUCKET, Moto, made_bucket
from numbers_state import write
from odd_files import ODD

from adaptdl_elastic.agent.cluster import checkpoint_archive
from adaptdl_elastic.checkpoint.manager import CheckpointManager
from adaptdl_elastic.storage import Storage, locations
from adaptdl_elastic.storage.s3 import S3Storage

pytestmark = pytest.mark.processes

# a client of S3 takes long to make
open_storage = functools.cache(locations.open_storage)
ID = "00000001-g00000-abcd"
LIKE_OURS = (
    f".tmp-notes .tmp- .tmp-old-thesis .tmp-1-g0-x .tmp-{ID}.bak .tmp-older-{ID} {ID}.bak x{ID} data .env "
    "00000001-g00000 00000001-g00000- 0000001-g00000-x finished.json.bak train.py .git manifests .adaptdl "
    "archive-2024 .secret-old secrets"
).split()
LIKE_OUR_KEYS = (
    f"data/labels.csv data/imagenet/a.tar data/{ID} data/{ID}.bak/a.state data/old/{ID}/a.state "
    f"manifests/2024-11-run.json manifests/{ID} manifests/{ID}.json.txt manifests/old/{ID}.json "
    f"x/data/{ID}/a.state x/manifests/{ID}.json finished.json/x data/00000001/a.state"
).split()
PARTS = st.text(st.characters(codec="ascii", exclude_characters="/\0"), min_size=1, max_size=9)
NAMES = PARTS.filter(lambda name: name not in (".", "..", "finished.json"))
USERS: dict[str, Callable[[Path], object]] = {
    **ODD,
    "file": lambda path: path.write_bytes(b"mine"),
    "folder": lambda path: (path.mkdir(), (path / "thesis.txt").write_bytes(b"mine")),
    "link": lambda path: path.symlink_to("../moved"),
    "link to a file": lambda path: path.symlink_to("../moved/thesis.txt"),
}
STEPS = st.lists(st.sampled_from(["save", "die", "sweep", "anew", "stop"]), min_size=3, max_size=7)


def content(root: Path) -> dict[str, object]:
    """Return all that lies below a directory: targets of links, content, kinds."""
    return {
        str(path): path.readlink()
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else path.lstat().st_mode
        for path in root.rglob("*")
    }


def take(step: str, storage: Storage, archive: checkpoint_archive.CheckpointArchive) -> None:
    """Do what a job does to the place of its checkpoints."""
    match step:
        case "save":
            manager = CheckpointManager(storage, keep=1)
            job = manager.submit("x", 0, {"n": (lambda file: file.write(b"1"), None)}, lambda saved: None)
            assert manager.flush(60)
            assert job.result.error is None  # type: ignore[union-attr]
            manager.close()
        case "die":
            with storage.begin("00000001-g00000-dead").state("a") as file:
                file.write(b"a")
            storage.sweep()
        case "sweep":
            storage.sweep()
        case "anew":
            archive.move_aside(f"archive-{secrets.token_hex(4)}")
            assert storage.ids() == []
        case "stop":
            archive.write_note(b"{}", even_if_empty=True)
            archive.withdraw_note()


def check(steps: list[str], path: str, users: Callable[[], dict[str, Any]]) -> None:
    before, storage = users(), open_storage(path)
    archive = storage if isinstance(storage, S3Storage) else checkpoint_archive.kept(path)
    for step in (*steps, "save", "save", "anew", "sweep"):
        take(step, storage, archive)
        after = users()
        assert {name: after.get(name) for name in before} == before, step


@settings(max_examples=40, phases=[Phase.generate])
@given(st.data(), STEPS)
def test_a_directory_keeps_the_files_of_its_user(data: st.DataObject, steps: list[str]) -> None:
    tree = data.draw(
        st.dictionaries(st.sampled_from(LIKE_OURS) | NAMES, st.sampled_from([*USERS]), max_size=8)
    )
    # names that are ours if they are directories
    for name in (ID, f".tmp-{ID}", f".tmp-old-{ID}"):
        tree[name] = data.draw(st.sampled_from([*(USERS.keys() - {"folder"})]))
    with tempfile.TemporaryDirectory() as folder:
        USERS["folder"](Path(folder, "moved"))
        Path(folder, "saved").mkdir()
        for name, kind in tree.items():
            USERS[kind](Path(folder, "saved", name))
        check(steps, f"{folder}/saved", lambda: content(Path(folder)))


def objects(client: Any) -> dict[str, Any]:
    """Return the version of each object, and uploads under way."""
    listed = client.list_objects_v2(Bucket=BUCKET).get("Contents", [])
    uploads = client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
    return {
        **{found["Key"]: (found["ETag"], found["LastModified"]) for found in listed},
        **{upload["UploadId"]: upload["Key"] for upload in uploads},
    }


@settings(max_examples=3, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(
    st.sets(
        st.sampled_from(LIKE_OUR_KEYS) | st.from_regex(r"[a-z][a-z0-9.-]{0,9}", fullmatch=True), min_size=3
    ),
    st.sampled_from(["", "jobs/one/"]),
    STEPS,
)
def test_a_bucket_keeps_the_objects_of_its_user(
    moto: Moto, bucket: Any, names: set[str], prefix: str, steps: list[str]
) -> None:
    made_bucket(moto, bucket)
    for number, name in enumerate(names):
        for home in (prefix, f"{prefix}.adaptdl/"):
            bucket.put_object(Bucket=BUCKET, Key=home + name, Body=b"%d" % number)
        bucket.create_multipart_upload(Bucket=BUCKET, Key=prefix + name)
    check(steps, f"s3://{BUCKET}/{prefix}", lambda: objects(bucket))


def test_checkpoints_of_an_earlier_version_are_read_and_removed_where_they_are(bucket: Any) -> None:
    path = f"s3://{BUCKET}/jobs/one"
    first, second = (write(S3Storage(path), {"a": b"%d" % number}) for number in (1, 2))
    for key in objects(bucket):
        bucket.copy({"Bucket": BUCKET, "Key": key}, BUCKET, key.replace(".adaptdl/", ""))
        bucket.delete_object(Bucket=BUCKET, Key=key)
    bucket.put_object(Bucket=BUCKET, Key="jobs/one/data/00000003-g00000-dead/a.state", Body=b"a")
    bucket.create_multipart_upload(Bucket=BUCKET, Key="jobs/one/data/00000003-g00000-dead/b.state")
    storage = S3Storage(path)
    assert storage.manifest(second).id == second
    assert storage.ids() == [first, second]
    with storage.open(second, storage.manifest(second).states["a"]) as file:
        assert file.read() == b"2"
    storage.remove(first)
    storage.sweep()
    assert sorted(objects(bucket)) == [f"jobs/one/data/{second}/a.state", f"jobs/one/manifests/{second}.json"]
    third = write(storage, {"a": b"3"})
    assert storage.ids() == [second, third]
    archive = checkpoint_archive.move_aside(path)
    assert archive is not None
    assert (storage.ids(), S3Storage(archive).ids()) == ([], [second, third])
