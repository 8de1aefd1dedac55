from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from numbers_state import write

from adaptdl_elastic import storage as storage_module
from adaptdl_elastic.storage import (
    ChecksumWriter,
    DamagedError,
    DirectoryStorage,
    Entry,
    Manifest,
    locations,
)

NAMES = st.text(min_size=1, max_size=300)
ENTRIES = st.builds(
    Entry,
    file=st.text(st.characters(exclude_characters="/\0", codec="utf-8"), min_size=1, max_size=20),
    size=st.integers(0, 2**50),
    crc32=st.tuples(st.integers(0, 2**32 - 1)),
    expires=st.none() | st.integers(0, 10),
)


@given(st.dictionaries(NAMES, ENTRIES, max_size=4), st.text(max_size=10))
def test_a_manifest_is_read_as_it_was_written(states: dict[str, Entry], job: str) -> None:
    manifest = Manifest(id="00000001-x", states=states, job=job, history=("a", "b"))
    assert storage_module.decode_manifest(storage_module.encode_manifest(manifest)) == manifest


@given(st.data())
def test_no_changed_or_shortened_manifest_is_believed(data: st.DataObject) -> None:
    good = storage_module.encode_manifest(Manifest(id="00000001-x", states={"a": Entry("a", 1, (2,))}))
    where = data.draw(st.integers(0, len(good) - 1))
    changed = bytearray(good)
    changed[where] ^= data.draw(st.integers(1, 255))
    for bad in (bytes(changed), good[:where]):
        with pytest.raises(DamagedError):
            storage_module.decode_manifest(bad)


@given(NAMES)
def test_a_state_name_is_one_file_below_the_checkpoint_whatever_it_is(name: str) -> None:
    file = storage_module.file_name(name)
    assert "/" not in file
    assert "\0" not in file
    assert not file.startswith(".")
    assert len(file.encode()) <= 255
    assert file != storage_module.MANIFEST


@given(NAMES, NAMES)
def test_two_states_are_two_files(one: str, other: str) -> None:
    assert (one == other) == (storage_module.file_name(one) == storage_module.file_name(other))


@given(st.lists(st.binary(max_size=40)), st.integers(1, 64), st.data())
def test_checksums_depend_on_the_content_only_and_see_every_change(
    parts: list[bytes], chunk: int, data: st.DataObject
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage_module, "CHUNK", chunk)
        file = io.BytesIO()
        writer = ChecksumWriter(file)
        for part in parts:
            writer.write(part)
        content = b"".join(parts)
        entry = Entry("x", writer.size, writer.checksums())
        whole = ChecksumWriter(io.BytesIO())
        whole.write(content)
        assert (file.getvalue(), writer.checksums()) == (content, whole.checksums())
        storage_module.verify(io.BytesIO(content), entry)
        damaged = [content + b"\0", content[:-1]] if content else [b"\0"]
        if content:
            flipped = bytearray(content)
            flipped[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
            damaged.append(bytes(flipped))
        for bad in damaged:
            with pytest.raises(DamagedError):
                storage_module.verify(io.BytesIO(bad), entry)


def test_a_writer_whose_file_takes_less_than_it_was_given_writes_the_rest() -> None:
    class Reluctant(io.BytesIO):
        def write(self, data: object) -> int:
            return super().write(memoryview(data)[:3])  # type: ignore[arg-type]

    file = Reluctant()
    ChecksumWriter(file).write(b"0123456789")
    assert file.getvalue() == b"0123456789"


@given(st.lists(st.from_regex(r"[0-9]{8}-g[0-9]{5}-[0-9a-f]{8}", fullmatch=True)), st.integers(0, 99999))
def test_a_new_id_sorts_after_all_that_exist(existing: list[str], generation: int) -> None:
    fresh = storage_module.new_id(existing, generation)
    assert all(old < fresh for old in existing if not old.startswith("99999999"))
    assert fresh != storage_module.new_id(existing, generation)  # another writer's


def test_an_uncommitted_checkpoint_is_not_listed(tmp_path: Path) -> None:
    storage = DirectoryStorage(tmp_path / "new" / "directory")
    assert storage.ids() == []
    writing = storage.begin("00000001-g00000-x")
    with writing.state("a") as file:
        file.write(b"a")
    assert storage.ids() == []
    writing.abandon()
    assert list((tmp_path / "new" / "directory").iterdir()) == []


def test_files_and_names_are_durable_before_the_checkpoint_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, done = DirectoryStorage(tmp_path), []

    def fsync(fd: int) -> None:
        done.append(Path(f"/proc/self/fd/{fd}").readlink().name)

    rename = Path.rename
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", lambda old, new: (done.append("rename"), rename(old, new))[1])
    written = write(storage, {"a": b"1", "b": b"2"})
    temporary = f".tmp-{written}"
    assert done == ["a.state", "b.state", "manifest.json", temporary, "rename", tmp_path.name]


def test_a_younger_writer_sweeps_away_what_an_older_one_has_begun(tmp_path: Path) -> None:
    old = DirectoryStorage(tmp_path).begin("00000002-g00000-old")
    with old.state("a") as file:
        file.write(b"old")
    young = DirectoryStorage(tmp_path)
    young.sweep()
    write(young, {"a": b"young"}, generation=1)
    with pytest.raises(OSError, match="No such file"):
        old.commit(Manifest(id=old.id, states=old.entries))
    assert len(young.ids()) == 1


def test_an_open_state_stays_readable_when_its_checkpoint_is_removed(tmp_path: Path) -> None:
    storage = DirectoryStorage(tmp_path)
    saved = write(storage, {"a": b"content"})
    with storage.open(saved, storage.manifest(saved).states["a"]) as file:
        storage.remove(saved)
        assert storage.ids() == []
        assert file.read() == b"content"
    assert list(tmp_path.iterdir()) == []


def test_where_checkpoints_can_be_kept() -> None:
    assert isinstance(locations.open_storage("relative/path"), DirectoryStorage)
    assert locations.open_storage("file:///somewhere").path == "/somewhere"
    with pytest.raises(ValueError, match="not in 'gs://"):
        locations.open_storage("gs://bucket/prefix")
    with pytest.raises(ValueError, match="names no bucket"):
        locations.open_storage("s3://")
