"""The machines of a room share a network and the folders that a test names, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import machines
import psutil
import pytest
from machines import PATIENCE, NoRoomError, Room, main_process

pytestmark = [pytest.mark.processes, pytest.mark.slow]

OWN = ("/tmp", "/run", "/var/tmp", "/dev", "/dev/shm", "/home", "/root", "/mnt", "/etc", "/usr/bin", "/srv")
SHARED = ("/shared", "/srv/a b")
PYTHON = sys.executable
LISTEN = """
import socket
server = socket.create_server(("0.0.0.0", 4000))
print("listening", flush=True)
server.accept()[0].sendall(socket.gethostname().encode())
"""
CONNECT = f"import socket; print(socket.create_connection(('second', 4000), {PATIENCE}).recv(100).decode())"
# Starts processes on two machines, some of which leave their group, says where, and fails.
STRAY = """
import subprocess, sys
sys.path.insert(0, sys.argv[1])
from machines import Room
with Room("first", "second") as room:
    room.everywhere("setsid sleep 4321 > /dev/null 2>&1 & sleep 4322 > /dev/null 2>&1 &")
    for machine in room.addresses:
        room.popen(["sleep", "4323"], machine)
    print(*room.everywhere("readlink /proc/self/ns/pid | tr -d '\\\\n'").values(), flush=True)
    if sys.argv[2] == "is killed":
        sys.stdin.read()
    raise RuntimeError("the test fails")
"""


@pytest.fixture(scope="module")
def room() -> Iterator[Room]:
    try:
        with Room("first", "second", "pristine", shared=SHARED) as made:
            yield made
    except NoRoomError as error:
        pytest.skip(f"no machines of one's own: {error}")


def test_a_file_stays_on_its_machine(room: Room) -> None:
    names = [f"{folder}/of-first" for folder in OWN]
    room.bash(f"for name in {' '.join(names)}; do echo first > $name; done", "first")
    assert room.bash(f"cat {' '.join(names)}", "first") == "first\n" * len(OWN)
    assert room.bash(f"ls {' '.join(names)} 2> /dev/null || true", "second") == ""
    assert not [name for name in names if Path(name).exists()]


def test_a_machine_begins_without_the_files_of_this_one(room: Room) -> None:
    # the way to the clone and to the environment, where they lie there
    needed = [Path(path) for path in (sys.prefix, sys.base_prefix, __file__)]
    for folder in ("/tmp", "/run", "/var/tmp", "/dev/shm", "/home", "/mnt"):
        ways = {path.relative_to(folder).parts[0] for path in needed if path.is_relative_to(folder)}
        assert set(room.bash(f"ls -A {folder}", "pristine").splitlines()) == ways, folder


def test_a_file_in_a_shared_folder_is_seen_by_all(room: Room) -> None:
    for folder in SHARED:
        room.write(f"{folder}/of-first", "first", "first")
        assert room.read(f"{folder}/of-first", "second") == "first"
        assert room.bash(f"cat '{folder}/of-first'", "second") == "first"


def test_host_names_processes_and_ipc_are_of_a_machine(room: Room) -> None:
    assert room.everywhere("cat /proc/sys/kernel/hostname") == {name: f"{name}\n" for name in room.addresses}
    listed = "cat /proc/*/cmdline | tr '\\0' ' '"
    saying = room.popen(["sh", "-c", "echo up; : of-first; sleep 100; :"], "first")
    assert saying.stdout is not None
    assert saying.stdout.readline() == "up\n"
    assert "of-first" in room.bash(listed, "first")
    assert "of-first" not in room.bash(listed, "second")
    main_process(saying).kill()
    for kind in ("pid", "ipc", "uts", "net", "mnt"):
        spaces = {
            *room.everywhere(f"readlink /proc/self/ns/{kind}").values(),
            str(Path(f"/proc/self/ns/{kind}").readlink()),
        }
        assert len({text.strip() for text in spaces}) == 4, kind


def test_machines_reach_each_other_by_name(room: Room) -> None:
    listening = room.popen([PYTHON, "-c", LISTEN], "second")
    assert listening.stdout is not None
    assert listening.stdout.readline() == "listening\n"
    assert room.bash(f'"{PYTHON}" -c "{CONNECT}"', "first") == "second\n"
    room.unplug("second")
    connect = f"import socket; socket.create_connection(('{room.addresses['second']}', 22), %s)"
    said = room.bash(f'"{PYTHON}" -c "{connect % 0.3}" 2>&1', "first", code=1)
    assert "timed out" in said or "No route to host" in said
    room.plug("second")
    said = room.bash(f'"{PYTHON}" -c "{connect % PATIENCE}" 2>&1', "first", code=1)
    assert "Connection refused" in said


def members(spaces: list[str]) -> list[psutil.Process]:
    """Return the processes of these process id namespaces."""
    found = []
    for process in psutil.process_iter():
        with suppress(OSError):
            if str(Path(f"/proc/{process.pid}/ns/pid").readlink()) in spaces:
                found.append(process)
    return found


@pytest.mark.parametrize("how", ["fails", "is killed"])
def test_no_process_is_left_after_a_test_that(room: Room, how: str) -> None:
    support = str(Path(__file__).parents[1] / "support")
    command = [sys.executable, "-c", STRAY, support, how]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        spaces = process.stdout.readline().split()
        assert len(spaces) == 2
        if how == "is killed":
            running = members(spaces)
            assert len(running) >= 8
            process.kill()
            assert psutil.wait_procs(running, PATIENCE)[1] == []
        said = process.communicate()[1]
    assert ("the test fails" in said) == (how == "fails")
    assert members(spaces) == []


@pytest.mark.parametrize("missing", [True, False])
def test_only_what_this_machine_lacks_is_a_reason_for_having_no_room(
    monkeypatch: pytest.MonkeyPatch, missing: bool, room: Room
) -> None:
    """A defect of the room itself would otherwise skip all tests with several machines."""
    said = "mount: /x: unknown filesystem type\n       dmesg(1) may have more information"
    monkeypatch.setattr(machines, "_ABLE" if missing else "_ROOM", f"echo '{said}' >&2; exit 1")
    with pytest.raises(
        NoRoomError if missing else AssertionError, match=r"mount: /x: unknown filesystem type"
    ) as raised:
        Room("first").__enter__()
    assert not missing or str(raised.value).endswith(": mount: /x: unknown filesystem type")


def test_files_given_to_a_room_are_readable_for_all_at_any_umask(room: Room) -> None:
    before = os.umask(0o077)
    try:
        room.write("/srv/given/by/root", "read", "first")
        room.bash("echo made > /srv/given/there", "first")
    finally:
        os.umask(before)
    assert room.bash("cat /srv/given/by/root /srv/given/there", "first", "nobody") == "readmade\n"


def test_this_machine_says_in_one_line_why_it_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NoRoomError, match=r"^needs root\b[^\n]*$"):
        Room("first").__enter__()
