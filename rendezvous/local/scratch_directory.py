"""Directories of a process that are removed later if the process was killed before it could remove them.

A process locks its directory (flock) while it uses it. The kernel releases the lock of a killed process, and
`sweep` removes directories that are not locked.
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
            self._lock = _lock(self.path, or_without=True)
            if self._lock is not None and self.path.is_dir():
                return
            self._unlock()  # removed by another process's `sweep` before it was locked

    def restore(self, base: Path) -> None:
        """Make the directory again, with its name and in `base`, if another process has removed it."""
        path = base / self.path.name
        path.mkdir(mode=0o700, exist_ok=True)
        self._unlock()
        self.path, self._lock = path, _lock(path, or_without=True)

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def close(self, keep: bool = False) -> None:
        """Release the directory; remove it unless `keep`."""
        if not keep:
            shutil.rmtree(self.path, ignore_errors=True)
        self._unlock()


class Shared:
    """A directory at `path`, mode 0700, that several processes may use and `sweep` removes when none does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        while True:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = _lock(path, fcntl.LOCK_SH, or_without=True)
            if self._lock is not None and path.is_dir():
                return
            self.close()  # another process is about to remove it

    def close(self, keep: bool = True) -> None:
        """Release the directory; unless `keep`, remove it if no other process uses it."""
        number, self._lock = self._lock, None
        if number is None:
            return
        if not keep:
            with suppress(OSError):  # other processes use it
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(self.path, ignore_errors=True)
        os.close(number)


def _lock(path: Path, how: int = fcntl.LOCK_EX, or_without: bool = False) -> int | None:
    """Return a descriptor that holds the directory's lock; None if another process does, or it is gone.

    Where the file system has no locks it is None too, or with `or_without` a descriptor that holds none.
    """
    try:
        number = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(number, how | fcntl.LOCK_NB)
    except OSError as error:
        if not or_without or isinstance(error, BlockingIOError):
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
    """Remove this user's directories `<base>/<prefix>…` that no process uses.

    Args:
        prefix: how the names of the directories begin.
        base: the parent directory; None: the one for temporary files.
        keep: how many of the newest to keep.
        older_than: seconds; directories changed later than that are kept.
        clock: seconds since the epoch.
    """
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
