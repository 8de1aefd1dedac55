"""Hold a file that locks something, for as long as this process lives.

The kernel, or the server of a network file system, frees the lock when its holder or that one's machine ends.
The file names the holder. Where a file system has no locks, that text counts, unless its process is known to
be dead: its machine has been booted again, or has no such process.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from adaptdl_elastic._whole_file import NotRegularError, open_regular

_MARK = "adaptdl lock"  # the first line
_MOST_BYTES = 4096
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@contextmanager
def held(path: Path, name: str, shared: bool = False) -> Iterator[str]:
    """Yield an empty string while this process has the lock, or a text that says which process has it.

    Args:
        path: The file; its directory exists. It is removed at the end.
        name: What this process does.
        shared: Have it together with processes of the same name.

    Raises:
        OSError: the file cannot be used, or is not a lock.
    """
    boot = _BOOT.read_text().strip() if _BOOT.exists() else ""
    token = "shared" if shared else secrets.token_hex(8)
    mine = [_MARK, name, socket.gethostname(), str(os.getpid()), boot, token]
    while True:
        with open_regular(path, os.O_RDWR | os.O_CREAT) as file:
            locks = _flock(file, fcntl.LOCK_EX)
            found = _lines(file, path)
            if locks or (locks is None and (not found or _dead(found, mine))):
                os.truncate(file.fileno(), 0)
                os.pwrite(file.fileno(), "\n".join(mine).encode(), 0)
                os.fsync(file.fileno())  # for readers of other machines
            if shared and locks is not None:
                locks = _flock(file, fcntl.LOCK_SH)
            found = _lines(file, path)
            ours = found[1::4] == [name, token]
            if not found or not lies_at(path, os.fstat(file.fileno())) or (ours and locks is False):
                continue  # its holder is about to write it, or has removed it
            if locks is False or not ours:
                yield f"process {found[3]} on {found[2]}: {found[1]}"
                return
            try:
                yield ""
            finally:
                with suppress(OSError):
                    alone = _lines(file, path) == mine if locks is None else _flock(file, fcntl.LOCK_EX)
                    if alone and lies_at(path, os.fstat(file.fileno())):
                        path.unlink()
            return


def _flock(file: BinaryIO, how: int) -> bool | None:
    """Return whether the file is locked now; None if its file system has no locks."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except OSError as error:
        return False if isinstance(error, BlockingIOError) else None
    return True


def _lines(file: BinaryIO, path: Path) -> list[str]:
    lines = os.pread(file.fileno(), _MOST_BYTES, 0).decode(errors="replace").split("\n")
    if lines != [""] and (lines[0] != _MARK or len(lines) != 6):
        raise NotRegularError(errno.EINVAL, "not a lock of this program", str(path))
    return lines if lines != [""] else []


def _dead(found: list[str], mine: list[str]) -> bool:
    """Return whether the process that wrote the lines is known to have ended."""
    return found[2] == mine[2] and (found[4] != mine[4] or not Path(f"/proc/{found[3]}").exists())


def lies_at(path: Path, status: os.stat_result) -> bool:
    """Return whether the file at `path` is the one that has this status."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return os.path.samestat(path.lstat(), status)
    return False
