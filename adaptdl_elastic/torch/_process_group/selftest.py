"""Find out in separate processes whether this build of NCCL survives what a change in place does to it.

The test reproduces the situation of a survivor: during a collective the other process is killed, the
communicator is aborted, a new group is formed with a third process, and used. With one GPU, where no process
can be killed, the same is done in a world of one. A hang or a crash thus happens in processes apart
from the job, which are killed after a time limit.

    python -m adaptdl_elastic.torch._process_group.selftest nccl

runs the test and prints the result; with `--keep`, which is for node services, it keeps the result instead.
Replicas call `verdict`. It keeps the result in the runtime directory for all jobs of this user, whose
processes call it one after the other.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed

from adaptdl_elastic import _own_python
from adaptdl_elastic._private import RuntimeFileError, private_directory
from adaptdl_elastic._whole_file import write_whole
from adaptdl_elastic.protocol import self_test
from adaptdl_elastic.protocol.environment import describes_replica
from adaptdl_elastic.torch._process_group import backends
from adaptdl_elastic.torch._process_group.backends import Nccl, base, gloo, nccl
from adaptdl_elastic.torch._process_group.store import open_store

dist: Any = torch.distributed
log = logging.getLogger(__name__)

LIMIT = 180.0
"""Seconds that a self-test may take, imports included."""

_NAME = "adaptdl_elastic.torch._process_group.selftest"  # also needed when this module is __main__
_PATIENCE = timedelta(seconds=60)  # time limit of a group's members for each other
_SEVERAL = 2  # devices of a test in which a process is killed
_TIMES = 3  # how often a world of one is made and aborted
_SIZE = 1 << 20  # elements of the tensors

Run = Callable[[str, float], "str | None"]
"""(backend, seconds) → why it does not work, or None."""

Clock = Callable[[], float]


def verdict(
    backend: str, folder: Path | None = None, run: Run | None = None, clock: Clock = time.time
) -> str | None:
    """Return why groups of `backend` cannot be formed again on this node; None if they can.

    Waits while another process of this user runs the test, at most as long as a test may take. Runs the test
    where no result can be kept.

    Args:
        backend: name of the backend.
        folder: directory for the result; None: the runtime directory.
        run: runs the test; None: `ask_processes`.
        clock: the wall clock.
    """
    ask = run or ask_processes
    try:
        path = _path(backend, folder, _visible(backend))
        lock = path.with_suffix(".lock").open("w")
    except (OSError, RuntimeFileError):
        return ask(backend, LIMIT)
    with lock:
        end = time.monotonic() + LIMIT
        while remembered(backend, folder, clock) is None and not _locked(lock) and time.monotonic() < end:
            time.sleep(0.1)
        try:
            known = remembered(backend, folder, clock)  # the process that had the lock may have left it
            if known is not None:
                return known or None
            why = ask(backend, LIMIT)
            with contextlib.suppress(OSError):
                write_whole(path, json.dumps({"why": why, "time": clock()}))
            return why
        finally:
            with contextlib.suppress(OSError):  # a worker that was forked meanwhile would keep the lock
                fcntl.flock(lock, fcntl.LOCK_UN)


def _locked(file: IO[str]) -> bool:
    """Try to lock a file; return whether nothing is left to wait for."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # this file system has no locks
        pass
    return True


def remembered(backend: str, folder: Path | None = None, clock: Clock = time.time) -> str | None:
    """Return the known result on this node: "" if it works, why not, or None if it is unknown.

    A test with two devices counts for one that is visible, but not the other way round.
    """
    for devices in (_SEVERAL, _visible(backend)):
        try:
            found = json.loads(_path(backend, folder, devices).read_text())
            why, age = found["why"], clock() - float(found["time"])
        except (OSError, RuntimeFileError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError):
            continue
        if why is None or 0 <= age < self_test.AGAIN:
            return str(why or "")
    return None


def _visible(backend: str) -> int:
    return min(len(_nccl(backend).devices()), _SEVERAL)


def _path(backend: str, folder: Path | None, devices: int) -> Path:
    words = f"{backend}\n{devices}\n{_nccl(backend).fingerprint()}\n{_source()}"
    name = self_test.FILES.replace("*", hashlib.sha256(words.encode()).hexdigest()[:16])
    return private_directory(folder) / name


def _source() -> str:
    """Return the source of what is tested: another version of this library tests again."""
    return "".join(
        Path(module.__file__ or "").read_text() for module in (base, gloo, nccl, sys.modules[__name__])
    )


def _nccl(backend: str) -> type[Nccl]:
    found = backends.kind(backend)
    assert issubclass(found, Nccl), backend
    return found


# In the process that asks


def ask_processes(backend: str, limit: float) -> str | None:
    """Run the self-test in new processes, which end with it; return why it failed, or None."""
    module = _nccl(backend).__module__
    command = _own_python.module(_NAME, backend, "--import", module, "--asked")
    environment = {name: value for name, value in os.environ.items() if not describes_replica(name)}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=out, stderr=err, env=environment, start_new_session=True
        )
        assert process.stdin is not None
        with process.stdin:  # closing the pipe, even by the end of this process, ends the test
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                return f"it did not end within {limit:.0f} s"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        out.seek(0)
        err.seek(0)
        return _answer(code, out.read(), err.read())


def _answer(code: int, out: bytes, err: bytes) -> str | None:
    try:
        why = json.loads(out.splitlines()[-1])["why"]
    except (IndexError, ValueError, KeyError, TypeError):
        lines = [line for line in err.decode(errors="replace").splitlines() if line.strip()]
        return f"{_end(code)}: {lines[-1][:200] if lines else 'it said nothing'}"
    return None if why is None else str(why)[:300]


def _end(code: int) -> str:
    return (
        f"a process of it died of signal {-code}" if code < 0 else f"a process of it ended with code {code}"
    )


# In the processes of the test


def main() -> None:
    """Run the test, or one of its two or three members."""
    parser = argparse.ArgumentParser(description="Does a group of this backend survive an abort?")
    parser.add_argument("backend")
    parser.add_argument(
        "--import", dest="module", default=backends.__name__, help="where the backend is known"
    )
    parser.add_argument("--keep", action="store_true", help="keep the result; run no test if it is known")
    parser.add_argument("--asked", action="store_true", help="end when the input ends")
    parser.add_argument("--role", choices=["survivor", "victim", "replacement"], help=argparse.SUPPRESS)
    parser.add_argument("--ports", help=argparse.SUPPRESS)
    given = parser.parse_args()
    importlib.import_module(given.module)
    if given.keep:
        verdict(given.backend)
        return
    if given.asked:
        threading.Thread(target=_end_with_the_asker, daemon=True).start()
    kind = _nccl(given.backend)
    kind.prepare()
    why: str | None = None
    try:
        if given.role is not None:
            _member(kind, given.backend, given.role, [int(port) for port in given.ports.split(",")])
        elif not kind.devices():
            why = "no device is visible"
        elif len(kind.devices()) == 1:
            _alone(kind, given.backend)
        else:
            _together(given.backend, given.module)
    except Exception as error:
        why = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    print(json.dumps({"why": why}), flush=True)
    os._exit(0 if why is None else 1)  # skip Python's clean-up: threads of an aborted group may never end


def _end_with_the_asker() -> None:
    sys.stdin.buffer.read()
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _alone(kind: type[Nccl], backend: str) -> None:
    """Test in a world of one, which is possible with one GPU."""
    for _ in range(_TIMES):
        group = _join(kind, backend, dist.HashStore(), 0, 1, kind.devices()[0])
        group.queue(lambda: dist.all_reduce(torch.ones(_SIZE, device=group.device), async_op=True))  # noqa: B023
        _abort(group)
    group = _join(kind, backend, dist.HashStore(), 0, 1, kind.devices()[0])
    group.destroy()


def _together(backend: str, module: str) -> None:
    """Test in a world of two: one process is killed in a collective, and a third takes its place."""
    stores = [open_store("127.0.0.1") for _ in range(2)]
    ports = ",".join(str(store.port) for store in stores)
    command = _own_python.module(_NAME, backend, "--import", module, "--asked")
    command += ["--ports", ports, "--role"]
    members: dict[str, subprocess.Popen[bytes]] = {}
    for role in ("survivor", "victim", "replacement"):
        members[role] = subprocess.Popen([*command, role], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert members["victim"].wait() == -signal.SIGKILL, (
        f"the one that was to be killed: {_said(members['victim'])}"
    )
    stores[0].set("dead", "1")
    for role in ("survivor", "replacement"):
        why = _said(members[role])
        if why is not None:
            raise RuntimeError(f"the {role}: {why}")


def _said(member: subprocess.Popen[bytes]) -> str | None:
    assert member.stdout is not None
    out = member.stdout.read()
    return _answer(member.wait(), out, b"")


def _member(kind: type[Nccl], backend: str, role: str, ports: list[int]) -> None:
    devices = kind.devices()
    first, second = (dist.TCPStore("127.0.0.1", port, is_master=False) for port in ports)
    if role == "replacement":
        _use(_join(kind, backend, second, 1, 2, devices[1]), 1)
        return
    rank = int(role == "victim")
    group = _join(kind, backend, first, rank, 2, devices[rank])
    if rank == 1:
        first.wait(["waiting"], _PATIENCE)
        os.kill(os.getpid(), signal.SIGKILL)
    flat = torch.ones(_SIZE, device=group.device)
    work = group.queue(lambda: dist.all_reduce(flat, async_op=True))  # the other process never begins it
    first.set("waiting", "1")
    first.wait(["dead"], _PATIENCE)
    if work.is_completed() and not group.is_aborted:
        raise RuntimeError("a collective ended that a dead process had never begun")
    _abort(group)
    _use(_join(kind, backend, second, 0, 2, devices[0]), 0)


def _join(kind: type[Nccl], backend: str, store: Any, rank: int, size: int, device: torch.device) -> Nccl:
    """Return a group that has been formed and has summed a tensor."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    group = kind(backend)
    group.forming()
    dist.init_process_group(backend, store=dist.PrefixStore("torch", store), rank=rank, world_size=size)
    group.formed(_PATIENCE)
    flat = torch.full((_SIZE,), float(rank + 1), device=group.device)
    group.wait([group.queue(lambda: dist.all_reduce(flat, async_op=True))], _PATIENCE)
    expected = size * (size + 1) / 2
    if not bool((flat == expected).all()):
        raise RuntimeError(f"a sum is {flat[0].item()}, not {expected}")
    return group


def _abort(group: Nccl) -> None:
    if not group.aborted(_PATIENCE.total_seconds()):
        raise RuntimeError("the abort does not end")
    group.destroy()
    if dist.is_initialized():
        raise RuntimeError("torch has its group still")


def _use(group: Nccl, rank: int) -> None:
    """Send and receive, as in a transfer of state."""
    flat = torch.full((_SIZE,), float(rank), device=group.device)
    for sender in (0, 1):
        if sender == rank:
            group.send(flat, 1 - rank)
        else:
            received = torch.empty_like(flat)
            group.receive(received, sender)
            if not bool((received == float(sender)).all()):
                raise RuntimeError(f"received {received[0].item()}, not {sender}")
    group.synchronize()
    group.destroy()


if __name__ == "__main__":
    main()
