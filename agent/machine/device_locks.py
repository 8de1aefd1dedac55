"""Locks by which the replicas of this machine never have a device together, whatever jobs they are of.

A lock is held by the process that took it and by those that it has forked, and is free when all have ended.
Every user of the machine can write in the folder of the locks, and can lock its files. So nothing there is
trusted: neither that a file is a regular one, nor that it stays, nor that its holder uses the device.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

FOLDER = Path("/tmp/adaptdl-devices")  # one folder for all users of the machine, whatever their TMPDIR
FOREIGN_WAIT = 30.0  # seconds to wait for a process of another user that does not use the device
_LOOK_AGAIN = 0.2  # seconds between two looks at a device that is not free
Users = Callable[[str], Iterable[int]]  # name of a device → processes that the driver lists for it


def _open(name: str) -> int:
    """Open the lock of a device; only its first user may create the file."""
    path = FOLDER / name
    with suppress(FileExistsError):
        FOLDER.mkdir()
        FOLDER.chmod(0o1777)
    if FOLDER.is_symlink():
        raise OSError(errno.ELOOP, "it is a symbolic link")
    with suppress(FileExistsError):
        made = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDONLY, 0o444)
        os.fchmod(made, 0o444)  # whatever the umask
        os.close(made)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"{name} is not a regular file")
    return descriptor


def lock(
    name: str, say: Callable[[str], None], users: Users, *, across_exec: bool = False, clock: Any = time
) -> None:
    """Hold a device until this process and those that it forks have ended.

    Waits without limit for another process of this user, which may be a replica that has not used the device
    yet: an error would use up a restart of the job, and the restarted replica would wait as well. Waits for
    a process of another user for `FOREIGN_WAIT` seconds, and then as long as the driver lists a process of
    another user for the device. If the lock is free and the driver lists such a process nevertheless, that
    may be a replica in a container with a /tmp of its own, or a monitor: `FOREIGN_WAIT` is then the limit.

    Args:
        name: Name of the device.
        say: Called with one line before a wait, and if the wait was in vain.
        users: Returns the processes that the driver lists for a device; none if that is not known.
        across_exec: Whether a program that takes this process's place holds it, too.
        clock: Has `monotonic` and `sleep`.

    Raises:
        OSError: the lock cannot be made.
    """
    since = None
    while True:
        descriptor = _open(name)
        if not (free := _flock(descriptor)) or _is_current(descriptor, name):
            others = [pid for pid in users(name) if _user(pid) != os.geteuid()]
            if free and not others:
                break
            who = others[0] if free else _holder(descriptor)
            what = f"process {who} of user {_user(who)} has it (fuser {FOLDER / name})"
            if since is None:
                since = clock.monotonic()
                say(f"waits for {name}: {what}")
            patient = not free and (bool(others) or _user(who) == os.geteuid())
            if not patient and clock.monotonic() - since >= FOREIGN_WAIT:
                say(f"waits no longer for {name}, although {what}")
                _flock(descriptor)  # its holder may have ended just now
                break
            clock.sleep(_LOOK_AGAIN)
        os.close(descriptor)
    os.set_inheritable(descriptor, across_exec)


def is_locked(name: str) -> bool:
    """Return whether a replica holds a device.

    Raises:
        OSError: the device cannot be locked.
    """
    descriptor = _open(name)
    try:
        # programs that remove old files from /tmp leave what was read
        os.read(descriptor, 1)
        # several agents may look at once
        return not _flock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def _is_current(descriptor: int, name: str) -> bool:
    """Return whether a file is still the one in the folder, which others would lock."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), os.lstat(FOLDER / name))
    return False


def _holder(descriptor: int) -> int | str:
    """Return the process that has taken the lock of a file; "?" if that is not known."""
    with suppress(OSError):  # some sandboxes have no such file
        locks, file = Path("/proc/locks").read_text(), os.fstat(descriptor)
        system = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}"
        for each in (system, r"\S+"):  # of btrfs and overlays the kernel names another number there
            if found := re.search(rf" FLOCK +\S+ +\S+ +(\d+) {each}:{file.st_ino} ", locks):
                return int(found[1])
    return "?"


def _user(pid: int | str) -> int | str:
    with suppress(OSError):
        return Path(f"/proc/{pid}").stat().st_uid
    return "?"


def _flock(descriptor: int, how: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
