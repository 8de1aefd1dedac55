"""Locks by which the replicas of this machine never have a device together, whatever jobs they are of.

A lock is held by the process that took it and by those that it has forked, and is free when all have ended.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_LOCKS = Path("/tmp/adaptdl-devices")  # one folder for all users of the machine, whatever their TMPDIR


def _open(name: str) -> int:
    """Open the lock of a device; only its first user may create the file."""
    path = _LOCKS / name
    with suppress(FileExistsError):
        _LOCKS.mkdir()
        _LOCKS.chmod(0o1777)
    with suppress(FileExistsError):
        made = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDONLY, 0o444)
        os.fchmod(made, 0o444)  # whatever the umask
        os.close(made)
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)


def lock(name: str, say: Callable[[str], None], *, across_exec: bool = False) -> None:
    """Hold a device until this process and those that it forks have ended.

    Waits for a process that has it. The wait has no limit: an error would use up a restart of the job, and
    the restarted replica would wait as well.

    Args:
        name: Name of the device.
        say: Called with one line before a wait.
        across_exec: Whether a program that takes this process's place holds it, too.

    Raises:
        OSError: the lock cannot be made.
    """
    descriptor = _open(name)
    os.set_inheritable(descriptor, across_exec)
    if not _flock(descriptor):
        say(f"waits for {name}: a process of another replica still has it (fuser {_LOCKS / name})")
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def is_locked(name: str) -> bool:
    """Return whether a replica holds a device, or that cannot be known."""
    try:
        descriptor = _open(name)
    except OSError:
        return True
    try:
        # several agents may look at once
        return not _flock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def _flock(descriptor: int, how: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
