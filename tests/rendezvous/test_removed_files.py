"""The files by which commands find a standalone job, where another process removes them while it runs."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import polling
import pytest

from adaptdl_elastic import _private
from adaptdl_elastic.rendezvous.local import file_lock, runtime_file, store_server
from adaptdl_elastic.rendezvous.local.runtime_file import Announcement, RuntimeFile
from adaptdl_elastic.rendezvous.local.store_server import LocalServer
from adaptdl_elastic.rendezvous.store.connect import connect

OWN = f"adaptdl-{os.getuid()}"


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """XDG_RUNTIME_DIR, and two places of every machine; their paths are short enough for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        found = [Path(base, name) for name in ("xdg", "first", "second")]
        for place in found:
            place.mkdir()
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(found[0]))
        monkeypatch.setattr(_private, "PLACES", tuple(map(str, found[1:])))
        monkeypatch.setattr(store_server, "LOOK_SECONDS", 0.05)
        yield found


class Job:
    """A standalone job's store, lock and note."""

    def __init__(self) -> None:
        self.announcement = Announcement("job")
        assert self.announcement.take()
        self.server = LocalServer()
        self.announcement.publish(RuntimeFile(self.server.endpoint, "default", "job", os.getpid()))
        self.server.look = self.announcement.restore
        self.server.store.put("/here", "yes")

    def is_reached(self) -> bool:
        note = runtime_file.find("job")
        if note is None or not Path(note.endpoint.removeprefix("unix:")).exists():
            return False
        with connect(note.endpoint) as store:
            return store.get("/here") is not None

    def close(self) -> None:
        self.announcement.withdraw()
        self.server.close()
        self.announcement.release()


@pytest.fixture
def job(places: list[Path]) -> Iterator[Job]:
    made = Job()
    yield made
    made.close()
    assert not [path for place in places for path in place.glob(f"{OWN}/*")]


until = partial(polling.until, "the job's files are not as they should be")


def remove(folder: Path) -> None:
    """Remove a folder at once, since the job may be writing into it."""
    shutil.rmtree(folder.rename(folder.with_name("removed")))


REMOVALS: dict[str, Callable[[list[Path]], object]] = {
    "a logout": lambda places: remove(places[0]),
    "the directory": lambda places: remove(places[0] / OWN),
    "a cleaner of /tmp": lambda places: remove(places[1] / OWN),
    "both": lambda places: [remove(place / OWN) for place in places[:2]],
    "the note": lambda places: (places[0] / OWN / "job.json").unlink(),
    "the socket": lambda places: [path.unlink() for path in (places[1] / OWN).glob("store-*/socket")],
    "a rename": lambda places: [(place / OWN).rename(place / "old") for place in places[:2]],
}


@pytest.mark.parametrize("removal", REMOVALS)
def test_commands_find_a_job_again_whose_files_were_removed(
    places: list[Path], job: Job, removal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = job.server.endpoint
    for _ in range(2):
        if places[0].exists():
            REMOVALS[removal](places)
        until(job.is_reached)
        until(lambda: [*places[0].glob(f"{OWN}/job.lock"), *places[1].glob(f"{OWN}/job.lock")])
        assert not Announcement("job").take()
        for place in places:
            shutil.rmtree(place / "old", ignore_errors=True)
    assert job.server.endpoint == endpoint, "a coordinator that is started later connects to this path"
    if removal == "a logout":
        monkeypatch.delenv("XDG_RUNTIME_DIR")
        assert job.is_reached()


@pytest.mark.parametrize("how", ["replaced", "opened to others", "a file", "a link"])
def test_a_directory_that_others_can_enter_is_not_trusted(places: list[Path], job: Job, how: str) -> None:
    for place in places[:2]:
        own = place / OWN
        if how == "opened to others":
            own.chmod(0o755)
            continue
        remove(own)
        if how == "replaced":
            own.mkdir()
            own.chmod(0o777)
        elif how == "a file":
            own.write_text("")
        else:
            (place / "of another").mkdir(mode=0o700)
            own.symlink_to(place / "of another")
    until(lambda: (places[2] / OWN / "job.json").exists())
    until(job.is_reached)
    for place in places[:2]:
        if how in ("replaced", "a link"):
            assert not [*(place / OWN).iterdir()]
        if how == "opened to others":
            remove(place / OWN)


@pytest.mark.parametrize("number", [0, 1])
def test_files_of_another_job_of_this_name_stay(
    places: list[Path], job: Job, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    other = RuntimeFile("unix:/another", "default", "job", os.getppid())
    with job.announcement._turn, ExitStack() as stack:  # the other one is faster
        shutil.rmtree(places[0] / OWN)
        path = runtime_file.write(other, places[number] / OWN)
        assert not stack.enter_context(file_lock.held(path.with_suffix(".lock"), "job"))
        held = stack.pop_all()
    with held:
        until(lambda: "commands reach another standalone job 'job', not this one" in caplog.text)
        assert runtime_file.find("job") == other
        path.unlink()
    until(job.is_reached)
    assert caplog.text.count("were removed") == 1
