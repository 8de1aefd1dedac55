"""A lock that one process has, or several of one name, on file systems with and without locks."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from adaptdl_elastic.rendezvous.local.file_lock import held

US = f"process {os.getpid()} on {socket.gethostname()}: "
DEAD = 2**22 - 3  # no process has this number


@pytest.fixture(params=["locks", "no locks"])
def path(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A lock's file."""
    if request.param == "no locks":

        def flock(file: object, how: int) -> None:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        monkeypatch.setattr(fcntl, "flock", flock)
    return tmp_path / "lock"


def test_one_process_has_the_lock_unless_both_share_its_name(path: Path) -> None:
    with held(path, "a") as mine, held(path, "a") as theirs, held(path, "a", shared=True) as third:
        assert (mine, theirs, third) == ("", f"{US}a", f"{US}a")
    assert not path.exists()
    with held(path, "a", shared=True) as mine, held(path, "a", shared=True) as theirs:
        with held(path, "b", shared=True) as third, held(path, "a") as alone:
            assert (mine, theirs, third, alone) == ("", "", f"{US}a", f"{US}a")
        assert path.exists()
    assert not path.exists()


@pytest.mark.parametrize(
    ("lines", "free"),
    [
        ([socket.gethostname(), str(DEAD), "BOOT"], True),
        ([socket.gethostname(), str(os.getpid()), "another boot"], True),
        ([socket.gethostname(), str(os.getpid()), "BOOT"], False),
        (["elsewhere", str(DEAD), "BOOT"], False),
    ],
)
def test_a_holder_known_to_be_dead_has_no_lock(path: Path, lines: list[str], free: bool) -> None:
    with held(path, "a"):
        boot = path.read_text().split("\n")[4]
    path.write_text("\n".join(["adaptdl lock", "b", *lines, "token"]).replace("BOOT", boot))
    with_locks = fcntl.flock.__module__ == "fcntl"  # the kernel knows that nobody has it
    with held(path, "a") as other:
        assert (other == "") == (free or with_locks)


@pytest.mark.parametrize("kind", ["text", "link", "directory", "fifo"])
def test_a_file_that_is_not_a_lock_stays_as_it_is(path: Path, kind: str, tmp_path: Path) -> None:
    (tmp_path / "users").write_text("precious")
    make = {
        "text": lambda: path.hardlink_to(tmp_path / "users"),
        "link": lambda: path.symlink_to(tmp_path / "users"),
        "directory": path.mkdir,
        "fifo": lambda: os.mkfifo(path),
    }
    make[kind]()
    with pytest.raises(OSError), held(path, "a"):  # noqa: PT011
        pass
    assert (tmp_path / "users").read_text() == "precious"
    assert os.path.lexists(path)


def test_many_share_the_lock_of_one_name_at_a_time(tmp_path: Path) -> None:
    inside: list[str] = []
    mixed: list[list[str]] = []

    def want(name: str) -> None:
        for _ in range(200):
            with held(tmp_path / "lock", name, shared=True) as other:
                if not other:
                    inside.append(name)
                    if len(set(inside)) > 1:
                        mixed.append([*inside])
                    inside.remove(name)

    with ThreadPoolExecutor() as pool:
        list(pool.map(want, "aabb"))
    assert not mixed
