"""An error that passes is no damage: no older checkpoint is loaded, and nothing is to be removed."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError, ReadTimeoutError
from numbers_state import write
from odd_files import ODD

from adaptdl_elastic import storage as storage_module
from adaptdl_elastic.checkpoint import CheckpointError
from adaptdl_elastic.checkpoint.manager import CheckpointManager
from adaptdl_elastic.storage import MANIFEST, DirectoryStorage, StorageError
from adaptdl_elastic.storage.s3 import S3Storage

PASSING = "EIO ESTALE EMFILE ENFILE ENOMEM EACCES EPERM ETIMEDOUT EINTR EREMOTEIO".split()  # noqa: SIM905
PLACES = ("listing", MANIFEST, "a.state", "middle of manifest.json", "middle of a.state")


@contextmanager
def failing(place: str, error: OSError) -> Iterator[None]:
    """Let a look at this place fail."""
    open_regular, fails = storage_module.open_regular, Mock(side_effect=error)

    def opened(path: Path) -> Any:
        if path.name == place:
            raise error
        # a file that can be opened and not be read
        torn = MagicMock(read=fails, readinto=fails)
        torn.__enter__.return_value = torn
        torn.__exit__.return_value = None
        return torn if place == f"middle of {path.name}" else open_regular(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage_module, "open_regular", opened)
        if place == "listing":
            patch.setattr(os, "scandir", fails)
        yield


def started(path: Path, **options: Any) -> bytes | None:
    """Return what a start restores of state `a`."""
    manager = CheckpointManager(DirectoryStorage(path), **options)
    manager.open()
    file = manager.claim("a")
    manager.close()
    if file is None:
        return None
    with file:
        return file.read()


@pytest.fixture
def newest(tmp_path: Path) -> str:
    """Write two checkpoints; return the id of the newer one."""
    return [write(DirectoryStorage(tmp_path), {"a": content}) for content in (b"old", b"new")][1]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("code", PASSING)
def test_a_start_ends_with_the_cause_and_the_next_one_goes_on(
    tmp_path: Path, newest: str, place: str, code: str
) -> None:
    error = OSError(getattr(errno, code), os.strerror(getattr(errno, code)))
    # whether one that is gone has descendants is in manifests
    pruned = [] if "state" in place else ["00000001-g00000-pruned"]
    for recorded in (None, newest, *pruned):
        with failing(place, error), pytest.raises(CheckpointError) as told:
            started(tmp_path, recorded=recorded)
        said = str(told.value)
        assert f"cannot be read now: {error.strerror}" in said
        assert [word for word in ("\n", "damaged", "remove them") if word in said] == []
    assert started(tmp_path) == b"new"


class Time:
    """A clock that only pauses move; the disk comes back after `heals` seconds."""

    def __init__(self, heals: float, disk: ExitStack) -> None:
        self.now, self.heals, self.disk = 0.0, heals, disk
        self.pauses, self.told = list[float](), list[str]()

    def pause(self, seconds: float) -> None:
        self.now += seconds
        self.pauses.append(seconds)
        if self.now >= self.heals:
            self.disk.close()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("code", "heals"), [("EIO", 100), ("ESTALE", 1), ("EIO", 1000), ("EACCES", 1)])
def test_a_start_waits_for_an_error_that_may_pass_and_says_so(
    tmp_path: Path, newest: str, caplog: pytest.LogCaptureFixture, place: str, code: str, heals: float
) -> None:
    error = OSError(getattr(errno, code), os.strerror(getattr(errno, code)))
    with ExitStack() as disk:
        disk.enter_context(failing(place, error))
        time = Time(heals, disk)
        options = {"clock": lambda: time.now, "pause": time.pause, "tell": time.told.append}
        if code == "EACCES" or heals > 300:
            with pytest.raises(CheckpointError, match="cannot be read now"):
                started(tmp_path, patience=300.0, **options)
            assert time.now == pytest.approx(300 if heals > 300 else 0, abs=30)
            return
        assert started(tmp_path, patience=300.0, **options) == b"new"
    assert time.pauses == sorted(time.pauses)
    assert max(time.pauses) <= 30
    assert [bool(one) for one in time.told] == [True, False]
    assert caplog.text.count("waiting for it, 300 s at most") == 1
    assert caplog.text.count("can be read again") == 1


def answered(status: int) -> Exception:
    """Return the error of an answer of S3."""
    known = {"Error": {"Code": "X"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(known, "any")  # type: ignore[arg-type]


@pytest.mark.parametrize("call", ["list", "get"])
@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (answered(503), True),
        (answered(500), True),
        (answered(403), False),
        (answered(400), False),
        (EndpointConnectionError(endpoint_url="here"), True),
        (ReadTimeoutError(endpoint_url="here"), True),
        (NoCredentialsError(), False),
    ],
)
def test_the_same_errors_of_s3_are_waited_for_in_a_listing_and_in_an_object(
    call: str, error: Exception, passes: bool
) -> None:
    storage = S3Storage("s3://bucket/x", {"region_name": "here"})
    storage.client = MagicMock()
    pages = storage.client.get_paginator.return_value.paginate.return_value
    pages.__iter__.side_effect = error
    storage.client.download_fileobj.side_effect = error
    with pytest.raises(StorageError) as raised:
        storage.ids() if call == "list" else storage.get("x")
    assert raised.value.may_pass == passes


@pytest.mark.parametrize("place", [MANIFEST, "a.state"])
@pytest.mark.parametrize("how", [*ODD, "missing"])
def test_a_file_that_is_missing_or_is_no_file_is_damage(
    tmp_path: Path, newest: str, place: str, how: str
) -> None:
    path = tmp_path / newest / place
    path.rename(path.with_name("moved"))
    if how != "missing":
        ODD[how](path)
    assert started(tmp_path) == b"old"


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", "a\0b", "", ".."])
def test_a_manifest_that_names_a_file_elsewhere_is_damage(tmp_path: Path, newest: str, name: str) -> None:
    manifest = storage_module.Manifest(newest, {"a": storage_module.Entry(name, 0, ())})
    (tmp_path / newest / MANIFEST).write_bytes(storage_module.encode_manifest(manifest))
    assert started(tmp_path) == b"old"


def test_more_states_than_open_files_are_an_error_with_the_remedy(tmp_path: Path) -> None:
    write(DirectoryStorage(tmp_path), {"a": b"old"})
    write(DirectoryStorage(tmp_path), {"a": b"new", **{f"s{n}": b"1" for n in range(300)}})
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    try:
        with pytest.raises(CheckpointError, match=r"Too many open files.*ulimit -n.*not going on from"):
            started(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert started(tmp_path) == b"new"


def test_a_folder_of_another_user_with_checkpoints_is_made_writable_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *what, **how: False)
    with pytest.raises(CheckpointError, match="choose another ADAPTDL_CHECKPOINT_PATH"):
        started(tmp_path)
    write(DirectoryStorage(tmp_path), {"a": b"old"})
    with pytest.raises(CheckpointError, match=r"Permission denied: .*; make it writable"):
        started(tmp_path)
