"""A working directory becomes an archive and, on another node, a directory again."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import random
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from adaptdl_elastic.agent.service.archives import read_private, unpack
from adaptdl_elastic.agent.service.blobs import KEPT_SECONDS, BlobError, Blobs
from adaptdl_elastic.autoscaler.provisioning import bundle
from adaptdl_elastic.autoscaler.provisioning.ssh import ProvisionError
from adaptdl_elastic.rendezvous.schema.submissions import OWNER_HEADER


def needs_git(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that starts git."""
    return pytest.mark.processes(
        pytest.mark.skipif(shutil.which("git") is None, reason="there is no git here")(test)
    )


@pytest.fixture
def work(tmp_path: Path) -> Path:
    made = tmp_path / "work"
    for name in ("train.py", "src/model.py", "data/big.bin", "__pycache__/x.pyc", "note.txt"):
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text(name)
    (made / ".gitignore").write_text("data/\n*.txt\n")
    (made / "link").symlink_to("train.py")
    return made


def test_archives_that_no_job_needs_are_deleted_a_week_after_their_last_use(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path)
    for number in range(4):
        blobs.path(str(number) * 64).write_bytes(b"archive")
        os.utime(blobs.path(str(number) * 64), (0, 0))
    (tmp_path / "-not-to-be-deleted").mkdir()
    os.utime(tmp_path / "-not-to-be-deleted", (0, 0))
    (tmp_path / ".begun").touch()
    os.utime(tmp_path / ".begun", (0, 0))
    assert blobs.has("1" * 64), "submitted again: it is asked for"
    used = blobs.path("1" * 64).stat().st_mtime
    blobs.sweep({"0" * 64}, lambda: KEPT_SECONDS + 1)
    assert {path.name[0] for path in tmp_path.iterdir()} == {"0", "1", "-"}
    blobs.sweep((), lambda: used + KEPT_SECONDS - 1)
    assert blobs.has("1" * 64)
    assert not blobs.has("0" * 64)


def travelled(work: Path) -> Path:
    """Pack a directory, and return what it becomes on another node."""
    packed, there = bundle.pack(work, work.parent / "archive", "alice"), work.parent / "there"
    unpack(packed.path, there, "alice")
    return there


def git(*arguments: str) -> None:
    options = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always"]
    subprocess.run(["git", *options, *arguments], check=True, capture_output=True)


def move_into(work: Path, place: str) -> Path:
    """Let the directory be where `place` says, with respect to a repository; return its path there."""
    other = work.parent / "the other"
    if place in ("repository", "below one", "worktree", "submodule"):
        git("init", "-q", str(work))
        git("-C", str(work), "add", ".")
        git("-C", str(work), "commit", "-q", "-m", "all")
    if place == "worktree":
        git("-C", str(work), "worktree", "add", "-q", "--detach", str(other))
        return other
    if place == "submodule":
        git("init", "-q", str(other))
        git("-C", str(other), "submodule", "add", "-q", str(work), "part")
        return other / "part"
    if place == "behind a link":
        (work.parent / "shortcut").symlink_to("work")
        return work.parent / "shortcut"
    if place == "below one":
        (work / "my job").mkdir()
        for name in (".gitignore", "link", "src", "train.py", "note.txt"):
            (work / name).rename(work / "my job" / name)
        return work / "my job"
    return work


@needs_git
@pytest.mark.parametrize("typed", ["absolute", "relative", "."])
@pytest.mark.parametrize(
    "place", ["nowhere", "repository", "below one", "worktree", "submodule", "behind a link"]
)
def test_gitignore_is_respected_wherever_the_directory_is(
    work: Path, monkeypatch: pytest.MonkeyPatch, place: str, typed: str
) -> None:
    directory = move_into(work, place)
    monkeypatch.setenv("GIT_DIR", "/of/a/hook")
    if typed != "absolute":
        folder = directory if typed == "." else directory.parent
        monkeypatch.chdir(folder)
        directory = directory.relative_to(folder)
    assert bundle.list_files(directory) == [".gitignore", "link", "src/model.py", "train.py"]


@needs_git
@pytest.mark.parametrize("target", ["/mnt/datasets", "../elsewhere", "../work/src", "src/up/x", "src/up"])
def test_a_link_that_leads_out_is_refused_before_anything_is_sent(
    work: Path, tmp_path: Path, target: str
) -> None:
    if target.startswith("src/up"):
        (work / "src" / "up").symlink_to("../..")
    (work / "data.lnk").symlink_to(target)
    message = r"(data\.lnk|src/up) is a link to .*which does not travel .*\.gitignore.*path .* on the nodes"
    with pytest.raises(ProvisionError, match=message):
        bundle.pack(work, tmp_path / "a", "alice")


@needs_git
def test_files_that_git_knows_behind_a_new_link_are_left_out(work: Path) -> None:
    git("init", "-q", str(work))
    git("-C", str(work), "add", ".")
    (work / "src").rename(work / "lib")
    (work / "src").symlink_to("lib")
    assert (travelled(work) / "src" / "model.py").read_text() == "src/model.py"


@needs_git
def test_an_empty_directory_travels(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert list(travelled(tmp_path / "empty").iterdir()) == []


@needs_git
def test_the_same_files_make_the_same_archive(work: Path, tmp_path: Path) -> None:
    first = bundle.pack(work, tmp_path / "a", "alice")
    (work / "train.py").touch()
    assert bundle.pack(work, tmp_path / "b", "alice").digest == first.digest
    (work / "train.py").write_text("other")
    assert bundle.pack(work, tmp_path / "c", "alice").digest != first.digest


@needs_git
def test_a_directory_that_is_too_large_names_its_largest_files(work: Path, tmp_path: Path) -> None:
    (work / "src" / "weights.bin").write_bytes(b"x" * (3 << 20))
    message = r"has 3 MiB in 5 files, and 2 MiB may travel: .*\.gitignore.*--max-size.*weights\.bin \(3 MiB\)"
    with pytest.raises(ProvisionError, match=message):
        bundle.pack(work, tmp_path / "a", "alice", 2 << 20)


@needs_git
@pytest.mark.parametrize("start", [".config", "."])
def test_keys_do_not_travel(work: Path, tmp_path: Path, start: str) -> None:
    """Who submits from the home directory sent the cluster's keys and passwords to every node."""
    private = [tmp_path / "elsewhere", work / ".config" / "adaptdl", work / ".ssh"]
    assert bundle.pack(work, tmp_path / "a", "alice", private=private).files == 4  # there are no keys
    (work / ".config" / "adaptdl" / "default").mkdir(parents=True)
    (work / ".config" / "adaptdl" / "default" / "identity").write_text("a key")
    message = r"holds your keys, in (\.config/)?adaptdl, .*a directory of its own.*\.gitignore"
    with pytest.raises(ProvisionError, match=message):
        bundle.pack(work / start, tmp_path / "a", "alice", private=private)
    (work / start / ".gitignore").write_text("adaptdl\n")
    bundle.pack(work / start, tmp_path / "a", "alice", private=private)


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ProvisionError, match="--workdir"):
        bundle.list_files(tmp_path / "gone")


@needs_git
def test_an_archive_is_stored_by_its_digest_and_unpacked(work: Path, tmp_path: Path) -> None:
    packed = bundle.pack(work, tmp_path / "archive", "alice")
    blobs = Blobs(tmp_path / "blobs")
    with packed.path.open("rb") as file:
        blobs.receive(packed.digest, packed.size, file.read)
    assert blobs.has(packed.digest)
    for _ in range(2):  # again is the same
        unpack(blobs.path(packed.digest), tmp_path / "there", "alice")
    assert (tmp_path / "there" / "src" / "model.py").read_text() == "src/model.py"
    assert (tmp_path / "there" / "link").readlink() == Path("train.py")


@pytest.mark.parametrize("data", [b"something else", b"cut"])
def test_an_archive_that_is_not_what_was_announced_is_not_kept(tmp_path: Path, data: bytes) -> None:
    blobs = Blobs(tmp_path / "blobs")
    with pytest.raises(BlobError):
        blobs.receive("0" * 64, 14, io.BytesIO(data).read)
    assert list((tmp_path / "blobs").iterdir()) == []


def test_another_persons_archive_is_not_unpacked(tmp_path: Path) -> None:
    archive = evil(tmp_path / "archive", entry("a"))
    with pytest.raises(BlobError, match="it was not packed by mallory, who submits it"):
        unpack(archive, tmp_path / "there", "mallory")
    assert not (tmp_path / "there").exists()
    unpack(archive, tmp_path / "there", "eve")
    assert (tmp_path / "there" / "a").exists()


@needs_git
def test_a_file_with_two_names_travels_twice(work: Path) -> None:
    (work / "second.py").hardlink_to(work / "train.py")
    assert (travelled(work) / "second.py").read_bytes() == (work / "train.py").read_bytes()


def evil(path: Path, *entries: tarfile.TarInfo, headers: dict[str, str] | None = None) -> Path:
    """Write an archive of these entries, each with as many zeros as its size says."""
    with tarfile.open(path, "w:gz", pax_headers={OWNER_HEADER: "eve"} if headers is None else headers) as tar:
        for entry in entries:
            tar.addfile(entry, io.BytesIO(bytes(entry.size)))
    return path


def entry(name: str, kind: bytes = tarfile.REGTYPE, size: int = 0, link: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.size, made.linkname = kind, size, link
    return made


def not_unpacked(archive: Path) -> str:
    """Return why an archive is refused; nothing of it is left."""
    folder = archive.parent / "nodes"
    folder.mkdir(exist_ok=True)
    with pytest.raises(BlobError, match=r"^the working directory cannot be unpacked into ") as error:
        unpack(archive, folder / "there", "eve")
    assert list(folder.iterdir()) == []
    return str(error.value).partition(": ")[2]


@pytest.mark.parametrize(
    "entries",
    [
        [entry("../outside")],
        [entry("/outside")],
        [entry("a/../../outside")],
        [entry("link", tarfile.SYMTYPE, link="..")],
        [entry("link", tarfile.SYMTYPE, link="/etc")],
        [entry("a/link", tarfile.SYMTYPE, link="../../etc")],
        [entry("b", tarfile.LNKTYPE, link="/etc/passwd")],
        [entry("device", tarfile.CHRTYPE)],
        [entry("pipe", tarfile.FIFOTYPE)],
        [entry("a", tarfile.SYMTYPE, link="b"), entry("a/c", tarfile.SYMTYPE, link="d")],
        [entry("a", tarfile.SYMTYPE, link="b"), entry("a/c")],
        [entry("a", tarfile.SYMTYPE, link="b/.."), entry("b", tarfile.SYMTYPE, link=".")],
        [entry("d/c", tarfile.SYMTYPE, link=".."), entry("a", tarfile.SYMTYPE, link="d/c/../outside")],
        [entry("a", tarfile.SYMTYPE, link="."), entry("b", tarfile.LNKTYPE, link="a/../outside")],
        [entry("twice"), entry("twice")],
        [entry(f"{'d/' * 5000}file")],
    ],
    ids=lambda entries: " ".join(one.name[:20] for one in entries),
)
def test_an_archive_cannot_write_outside_of_its_directory(
    entries: list[tarfile.TarInfo], tmp_path: Path
) -> None:
    assert not_unpacked(evil(tmp_path / "evil", *entries))
    assert not (tmp_path / "outside").exists()


def test_headers_of_a_malformed_archive_are_an_error_and_nothing_else(tmp_path: Path) -> None:
    choose = random.Random(0)
    with gzip.open(evil(tmp_path / "whole", entry("a", size=700), entry("b" * 300))) as file:
        whole = file.read()
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(choose.randint(1, 20)):
            data[choose.randrange(len(data))] = choose.randrange(256)
        with gzip.open(tmp_path / "cut", "wb", compresslevel=1) as file:
            file.write(data[: choose.randrange(len(data))] if choose.random() < 0.3 else data)
        with contextlib.suppress(BlobError):
            unpack(tmp_path / "cut", tmp_path / "there", "eve")
        shutil.rmtree(tmp_path / "there", ignore_errors=True)


@pytest.mark.parametrize("format", ["xz", "bz2", ""])
def test_an_archive_of_another_kind_is_refused(tmp_path: Path, format: str) -> None:
    with tarfile.open(tmp_path / "other", f"w:{format}", pax_headers={OWNER_HEADER: "eve"}) as tar:
        tar.addfile(entry("a"))
    assert "Not a gzipped file" in not_unpacked(tmp_path / "other")


def test_a_long_header_does_not_fill_the_memory(tmp_path: Path) -> None:
    archive = evil(tmp_path / "evil", headers={OWNER_HEADER: "eve", "comment": "x" * (1 << 20)})
    assert archive.stat().st_size < 10_000
    assert not_unpacked(archive) == "a header in it is too long"
    with pytest.raises(BlobError, match="a header in it is too long"):
        read_private(archive, "eve")


def test_an_archive_of_too_many_files_is_not_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adaptdl_elastic.agent.service.archives.MOST_ENTRIES", 3)
    files = [entry(str(number)) for number in range(4)]
    unpack(evil(tmp_path / "three", *files[:3]), tmp_path / "there", "eve")
    assert "more than 3 files" in not_unpacked(evil(tmp_path / "four", *files))


def test_variables_travel_in_an_archive_whose_digest_tells_nothing(tmp_path: Path) -> None:
    packed = [bundle.pack_private({"TOKEN": "s"}, "eve", tmp_path / str(number)) for number in range(2)]
    assert packed[0].digest != packed[1].digest
    assert read_private(packed[0].path, "eve") == {"TOKEN": "s"}
    assert packed[0].path.stat().st_mode & 0o077 == 0
    with pytest.raises(BlobError, match="variables cannot be read"):
        read_private(tmp_path / "gone", "eve")
    with pytest.raises(BlobError, match="variables are not those of mallory"):
        read_private(packed[0].path, "mallory")


def test_an_archive_of_a_few_kilobytes_that_holds_gigabytes_is_not_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evil(tmp_path / "bomb", entry("small", size=10), entry("large", size=4 << 20))
    assert (tmp_path / "bomb").stat().st_size < 8000
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=102 << 20))
    with pytest.raises(
        BlobError, match=rf"cannot be unpacked.* of {tmp_path} is full: 102 MiB are free, 104 MiB are needed"
    ):
        unpack(tmp_path / "bomb", tmp_path / "there", "eve")
    assert [path.name for path in tmp_path.iterdir()] == ["bomb"]


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    with pytest.raises(BlobError, match=r"is full: .* MiB are needed; make room there"):
        Blobs(tmp_path).receive("0" * 64, 1 << 60, io.BytesIO().read)
