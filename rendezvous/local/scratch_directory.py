"""Directories of a process that are swept away when it can not do so itself any more.

A directory is locked (flock) by who works with it; a kill gives the lock back, whatever else it leaves.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


class Scratch:
    """A new directory `<base>/<prefix>…`, mode 0700, locked until `close` or the end of this process."""

    def __init__(self, prefix: str, base: Path | None = None) -> None:
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
            self._lock = _lock(self.path)
            if self._lock is not None and self.path.is_dir():
                return
            self._unlock()  # swept away before it was locked

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def close(self, keep: bool = False) -> None:
        """Remove it, unless it is to be kept, and let go of it."""
        if not keep:
            shutil.rmtree(self.path, ignore_errors=True)
        self._unlock()


class Shared:
    """A directory of this path, mode 0700, that is swept away when nobody works with it any more."""

    def __init__(self, path: Path) -> None:
        self.path = path
        while True:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = _lock(path, fcntl.LOCK_SH)
            if self._lock is not None and path.is_dir():
                return
            self.close()  # somebody is sweeping it away

    def close(self, keep: bool = True) -> None:
        """Let go of it; unless it is to be kept, the last one removes it."""
        number, self._lock = self._lock, None
        if number is None:
            return
        if not keep:
            with suppress(OSError):  # others work with it
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(self.path, ignore_errors=True)
        os.close(number)


def _lock(path: Path, how: int = fcntl.LOCK_EX) -> int | None:
    """A descriptor that holds the directory's lock; None when somebody else does, or it is gone."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(number, how | fcntl.LOCK_NB)
    except OSError:
        os.close(number)
        return None
    return number


def sweep(
    prefix: str,
    base: Path | None = None,
    keep: int = 0,
    older_than: float = 0.0,
    clock: Callable[[], float] = time.time,
) -> None:
    """Remove our `<base>/<prefix>…` that nobody works with, but for the `keep` newest and what is younger."""
    found = []
    for path in (base or Path(tempfile.gettempdir())).glob(f"{prefix}*"):
        with suppress(OSError):
            status = path.lstat()
            if status.st_uid == os.getuid():
                found.append((status.st_mtime, path))
    for changed, path in sorted(found, reverse=True)[keep:]:
        if clock() - changed < older_than:
            continue
        number = _lock(path)
        if number is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(number)
