"""The runtime directory where its first place cannot be used, or goes away while a job runs."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from adaptdl_elastic import _private
from adaptdl_elastic._private import RuntimeFileError, private_directory
from adaptdl_elastic.rendezvous.local import runtime_file, scratch_directory

OWN = f"adaptdl-{os.getuid()}"


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """XDG_RUNTIME_DIR, and two places of every machine."""
    found = [tmp_path / name for name in ("xdg", "first", "second")]
    for place in found:
        place.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(found[0]))
    monkeypatch.setattr(_private, "PLACES", tuple(map(str, found[1:])))
    return found


def spoil(place: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a place that cannot be used."""
    if how == "missing":
        place.rmdir()
    elif how == "a file":
        place.rmdir()
        place.write_text("")
    elif how == "entered by others":
        (place / OWN).mkdir()
        (place / OWN).chmod(0o755)
    elif how == "a link":
        (place / "of another").mkdir(mode=0o700)
        (place / OWN).symlink_to(place / "of another")
    else:
        real, number = fcntl.flock, getattr(errno, how)

        def flock(file: Any, operation: int) -> None:
            descriptor = file if isinstance(file, int) else file.fileno()
            if place in Path(f"/proc/self/fd/{descriptor}").readlink().parents:
                raise OSError(number, os.strerror(number))
            real(file, operation)

        monkeypatch.setattr(fcntl, "flock", flock)


HOW = ["missing", "a file", "entered by others", "a link", "ENOLCK", "EOPNOTSUPP"]


@pytest.mark.parametrize("how", HOW)
def test_the_next_place_is_taken_and_said_where_one_cannot_be_used(
    how: str, places: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    assert private_directory(say=said.append) == places[0] / OWN
    assert not said
    (places[0] / OWN).rmdir()
    spoil(places[0], how, monkeypatch)
    assert private_directory(say=said.append) == places[1] / OWN
    (line,) = said
    assert line.startswith(f"{places[1] / OWN} is used: {places[0] / OWN} ")
    assert runtime_file.Announcement("job").take()


def test_the_first_refusal_is_raised_where_no_place_can_be_used(
    places: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(places[0]))
    for place in places:
        spoil(place, "missing", monkeypatch)
    with pytest.raises(RuntimeFileError, match=f"{places[0] / OWN} cannot be used .*: set XDG_RUNTIME_DIR"):
        private_directory()


def test_notes_are_found_in_every_private_place(places: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for number, place in enumerate(places):
        record = runtime_file.RuntimeFile(f"unix:/{number}", "default", f"job-{number}", os.getpid())
        runtime_file.write(record, place / OWN)
    (places[1] / OWN).chmod(0o755)
    assert {record.job for record in runtime_file.read_all()} == {"job-0", "job-2"}
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(places[0] / "of another login"))
    assert [record.job for record in runtime_file.read_all()] == ["job-2"]
    runtime_file.remove("job-2", os.getpid())
    assert runtime_file.read_all() == []


def test_a_lock_that_another_process_has_made_meanwhile_is_not_removed(places: list[Path]) -> None:
    announcement = runtime_file.Announcement("job")
    assert announcement.take()
    path = places[0] / OWN / "job.lock"
    path.unlink()
    path.write_text("")
    announcement.release()
    assert path.exists()


@pytest.mark.timeout(60)
def test_a_directory_without_locks_is_used_and_never_swept(
    places: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(places[1], "ENOLCK", monkeypatch)
    made = scratch_directory.Scratch("x-", places[1])
    shared = scratch_directory.Shared(places[1] / "x-shared")
    scratch_directory.sweep("x-", places[1])
    assert made.path.is_dir()
    assert shared.path.is_dir()
    made.close()
    shared.close(keep=False)
