"""Which devices a machine has, what ails them, and that two replicas never have one together."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from adaptdl_elastic.agent.machine import device_locks
from adaptdl_elastic.agent.machine.devices import DevicesSeen, DeviceWatch, Gpus
from adaptdl_elastic.agent.runtime.replica_environment import JobEnvironment, replica_environment
from adaptdl_elastic.protocol.environment import ReplicaSettings
from adaptdl_elastic.rendezvous.schema.records import (
    Cause,
    GpuUsage,
    MasterRecord,
    Placement,
    Plan,
    Transition,
)

STAND_IN = Path(__file__).parents[1] / "support" / "nvml_stand_in"
Machine = Callable[[Sequence[dict[str, Any]]], None]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Give this machine some GPUs."""
    monkeypatch.syspath_prepend(str(STAND_IN))
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.setenv("FAKE_NVML", str(tmp_path / "gpus.json"))

    def has(gpus: Sequence[dict[str, Any]]) -> None:
        (tmp_path / "gpus.json").write_text(json.dumps(gpus))

    has([])
    return has


def names(visible: str | None = None) -> list[str]:
    return [device.name for device in Gpus(visible).devices]


def test_a_divided_gpu_counts_as_its_instances_and_one_that_does_not_answer_not_at_all(
    machine: Machine,
) -> None:
    machine(
        [
            {"uuid": "GPU-a"},
            {"uuid": "GPU-b", "mig": ["MIG-1", "MIG-2"]},
            {"uuid": "GPU-c", "error": "lost"},
            {"uuid": "GPU-d", "mig": []},
        ]
    )
    assert names() == ["GPU-a", "MIG-1", "MIG-2"]


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        ("1,0", ["GPU-b1", "GPU-a1"]),
        ("GPU-c,GPU-a", ["GPU-c1", "GPU-a1"]),
        ("0,7,1", ["GPU-a1"]),
        ("", []),
        ("-1", []),
        ("0,0", ["GPU-a1"]),
        ("GPU-", []),
    ],
)
def test_an_agents_own_list_bounds_its_devices(machine: Machine, visible: str, found: list[str]) -> None:
    machine([{"uuid": f"GPU-{letter}1"} for letter in "abc"])
    assert names(visible) == found


def test_without_a_driver_there_is_none(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NVML", "")
    gpus = Gpus()
    assert (gpus.devices, gpus.usage(), gpus.unusable()) == ((), (), ())


@pytest.mark.processes
def test_a_device_that_a_stranger_fills_or_that_has_gone_is_named_with_the_reason(machine: Machine) -> None:
    ours, theirs, gone = (f"GPU-{uuid.uuid4()}" for _ in range(3))
    machine([{"uuid": ours}, {"uuid": theirs}, {"uuid": gone}])
    gpus = Gpus()
    assert gpus.unusable() == ()
    machine(
        [
            {"uuid": ours, "used": 70 << 30, "load": 30},
            {"uuid": theirs, "used": 20 << 30},
            {"uuid": gone, "error": "GPU is lost"},
        ]
    )
    with holder(ours):
        found = gpus.unusable()
    assert found == (
        f"{theirs}: another program has 20 of its 80 GiB",
        f"{gone}: it does not answer (GPU is lost)",
    )
    assert gpus.usage() == (GpuUsage(0.3, 70 << 30, 80 << 30), GpuUsage(0.0, 20 << 30, 80 << 30))


@pytest.mark.parametrize("registered", [False, True])
def test_a_device_leaves_the_pool_only_after_a_second_look(machine: Machine, registered: bool) -> None:
    name, told = f"GPU-{uuid.uuid4()}", list[object]()
    machine([{"uuid": name, "used": 24 << 30}])  # a replica ends: its lock is free, its memory is not
    gpus = Gpus()
    first = gpus.unusable()
    watch = DeviceWatch(gpus, told.append, first if registered else ())
    if not registered:
        watch.look()
    assert told == []
    machine([{"uuid": name}])
    watch.look()
    assert told == ([DevicesSeen((), ())] if registered else [])  # the node's record names it no more
    machine([{"uuid": name, "used": 24 << 30}])
    watch.look()
    told.clear()
    machine([{"uuid": name, "used": 20 << 30}])
    watch.look()
    line = f"{name}: another program has 20 of its 80 GiB"
    assert told == [DevicesSeen((line,), (line,))]
    machine([{"uuid": name}])
    watch.look()
    assert told[1:] == [DevicesSeen((), ())]


def nobody(name: str) -> tuple[int, ...]:
    return ()


class holder:
    """A process that holds a device, and a child of it that lives on."""

    def __init__(self, name: str) -> None:
        code = (
            "import os, sys, time\n"
            "from adaptdl_elastic.agent.machine.device_locks import lock\n"
            f"lock({name!r}, print, lambda name: ())\n"
            "print('held', flush=True)\n"
            "sys.stdin.read()\n"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "held\n"

    def __enter__(self) -> subprocess.Popen[str]:
        return self.process

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.mark.processes
def test_a_device_is_free_when_the_process_that_had_it_is_dead() -> None:
    name = f"GPU-{uuid.uuid4()}"
    with holder(name) as process:
        assert device_locks.is_locked(name)
        said: list[str] = []

        def release(line: str) -> None:
            said.append(line)
            os.kill(process.pid, signal.SIGKILL)

        waiting = os.fork()
        if waiting == 0:
            device_locks.lock(name, release, nobody)
            # a lock that was free would not have been waited for
            os._exit(0 if said and name in said[0] else 1)
        process.wait()
        assert os.waitpid(waiting, 0)[1] == 0
    assert not device_locks.is_locked(name)


STRANGER = 65534
ELSEWHERE = 1 << 30  # a process of another container: there is none of this number here


class Clock:
    """A clock that only sleeping moves; `at` is called when it has come to `until`."""

    def __init__(self, until: float = float("inf"), at: Callable[[], None] = lambda: None) -> None:
        self.now, self.until, self.at = 0.0, until, at

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert self.now < 1000
        self.now += seconds
        if self.now >= self.until:
            self.until = float("inf")
            self.at()


@pytest.fixture
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the locks of this test alone."""
    monkeypatch.setattr(device_locks, "FOLDER", tmp_path / "locks")
    assert not device_locks.is_locked("GPU-a")
    return tmp_path / "locks"


def hold(lock: Path, user: int) -> int:
    """Fork a process of a user that holds a file by a shared lock; return its id."""
    descriptor = os.open(lock, os.O_RDONLY)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setuid(user)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        os.write(write, b"x")
        signal.pause()
    os.read(read, 1)
    for each in (descriptor, read, write):
        os.close(each)
    return pid


def end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.mark.processes
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_users_lock_blocks_an_idle_device_for_half_a_minute_and_a_used_one_until_its_end(
    locks: Path,
) -> None:
    said: list[str] = []
    squatter = hold(locks / "GPU-a", STRANGER)
    clock = Clock()
    device_locks.lock("GPU-a", said.append, nobody, clock=clock)
    assert clock.now == pytest.approx(device_locks.FOREIGN_WAIT, abs=1)
    what = f"process {squatter} of user {STRANGER} has it (fuser {locks / 'GPU-a'})"
    assert said == [f"waits for GPU-a: {what}", f"waits no longer for GPU-a, although {what}"]
    clock = Clock(100, lambda: end(squatter))
    device_locks.lock("GPU-a", said.append, lambda name: (squatter,), clock=clock)
    assert clock.now == pytest.approx(100, abs=1)
    assert device_locks.is_locked("GPU-a")


@pytest.mark.processes
def test_another_replica_of_the_same_user_is_waited_for_without_limit(locks: Path) -> None:
    replica = hold(locks / "GPU-a", os.geteuid())
    clock = Clock(500, lambda: end(replica))
    device_locks.lock("GPU-a", print, nobody, clock=clock)
    assert clock.now == pytest.approx(500, abs=1)
    assert device_locks.is_locked("GPU-a")


@pytest.mark.processes
def test_a_locked_file_of_the_same_number_elsewhere_is_not_taken_for_the_lock(
    locks: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    replica = hold(locks / "GPU-a", os.geteuid())
    clock = Clock(20, lambda: end(replica))
    number, known = (locks / "GPU-a").stat().st_ino, Path("/proc/locks").read_text()
    (tmp_path / "known").write_text(f"1: FLOCK  ADVISORY  WRITE {ELSEWHERE} 00:ff:{number} 0 EOF\n{known}")
    monkeypatch.setattr(
        device_locks, "Path", lambda name: tmp_path / "known" if name == "/proc/locks" else Path(name)
    )
    said: list[str] = []
    device_locks.lock("GPU-a", said.append, nobody, clock=clock)
    assert f"process {replica} of user {os.geteuid()} has it" in said[0]


@pytest.mark.processes
def test_a_lock_whose_holder_cannot_be_known_is_waited_for(
    locks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    squatter = hold(locks / "GPU-a", os.geteuid())
    monkeypatch.setattr(device_locks, "Path", lambda name: locks / "no-proc" / str(name)[1:])
    clock, said = Clock(), list[str]()
    try:
        device_locks.lock("GPU-a", said.append, nobody, clock=clock)
    finally:
        end(squatter)
    assert clock.now == pytest.approx(device_locks.FOREIGN_WAIT, abs=1)
    assert "process ? of user ? has it" in said[0]


def test_a_device_that_is_used_without_its_lock_is_waited_for_and_said(locks: Path) -> None:
    said: list[str] = []
    clock = Clock()
    device_locks.lock("GPU-a", said.append, lambda name: (os.getpid(), ELSEWHERE), clock=clock)
    assert clock.now == pytest.approx(device_locks.FOREIGN_WAIT, abs=1)
    assert f"process {ELSEWHERE} of user ?" in said[0]
    assert device_locks.is_locked("GPU-a")


def test_a_lock_that_was_removed_before_it_was_taken_is_taken_again(
    locks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, removed = fcntl.flock, list[Path]()

    def late(descriptor: int, how: int) -> None:
        if not removed:
            removed.append(locks / "GPU-a")
            removed[0].unlink()
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    device_locks.lock("GPU-a", print, nobody, clock=Clock())
    assert device_locks.is_locked("GPU-a")


@pytest.mark.parametrize("spoil", ["pipe", "link", "folder", "linked folder"])
def test_a_folder_in_which_devices_cannot_be_locked_is_said_with_the_reason(
    spoil: str, machine: Machine, locks: Path, tmp_path: Path
) -> None:
    lock = locks / "GPU-a"
    lock.unlink()
    match spoil:
        case "pipe":
            os.mkfifo(lock)
        case "link":
            lock.symlink_to(tmp_path / "another")
        case "folder":
            locks.rmdir()
            locks.touch()
        case "linked folder":
            locks.rename(tmp_path / "another")
            locks.symlink_to(tmp_path / "another")
    with pytest.raises(OSError):  # noqa: PT011
        device_locks.lock("GPU-a", print, nobody)
    machine([{"uuid": "GPU-a", "processes": [7]}, {"uuid": "GPU-a"}])
    (line,) = Gpus().unusable()
    assert line.startswith(f"{locks}: replicas lock no devices there (")
    assert Gpus().users("GPU-a") == (7,)


def test_looking_at_a_lock_keeps_it_from_the_cleaners_of_tmp(locks: Path) -> None:
    os.utime(locks / "GPU-a", (0, 0))
    device_locks.is_locked("GPU-a")
    assert (locks / "GPU-a").stat().st_atime > 0


def environment(placement: Placement, rank: int, devices: tuple[str, ...], **more: Any) -> dict[str, str]:
    job = JobEnvironment("n", ReplicaSettings({}), None, devices=devices, **more)
    plan = Plan("j", "r", 0, (placement,), Cause.START, Transition.RESTART, "")
    found = replica_environment(job, plan, MasterRecord(0, "h", 1), rank, None, "/e", {})
    return {name: found[name] for name in ("LOCAL_RANK", "CUDA_VISIBLE_DEVICES") if name in found}


EIGHT = tuple(f"GPU-{number}" for number in range(8))


def test_a_local_rank_finds_its_device_at_its_place() -> None:
    placement = Placement("n", 3, "a", devices=(5, 2, 7))
    for rank in range(3):
        found = environment(placement, rank, EIGHT)
        assert found == {"LOCAL_RANK": str(rank), "CUDA_VISIBLE_DEVICES": "GPU-5,GPU-2,GPU-7"}


def test_the_list_ends_where_a_local_rank_is_missing() -> None:
    """No process sees a device of another job."""
    placement = Placement("n", 3, "a", slots=(3, 0, 1), devices=(7, 4, 6))
    for rank in (0, 1):
        assert environment(placement, rank, EIGHT)["CUDA_VISIBLE_DEVICES"] == "GPU-4,GPU-6"


def test_a_replica_with_several_gpus_has_neighbours() -> None:
    placement = Placement("n", 2, "a", devices=(4, 5, 0, 1))
    assert environment(placement, 0, EIGHT)["CUDA_VISIBLE_DEVICES"] == "GPU-4,GPU-5"
    assert environment(placement, 1, EIGHT)["CUDA_VISIBLE_DEVICES"] == "GPU-4,GPU-0,GPU-1"
    alone = environment(placement, 1, EIGHT, virtual_local_rank=True)
    assert alone == {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "GPU-0,GPU-1"}


def test_an_instance_of_a_divided_gpu_is_alone_in_the_list() -> None:
    found = environment(Placement("n", 2, "a"), 1, ("MIG-a", "MIG-b"))
    assert found == {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "MIG-b"}


def test_without_gpus_no_list_is_set() -> None:
    assert environment(Placement("n", 2, "a", devices=(1, 3)), 1, ()) == {"LOCAL_RANK": "1"}
