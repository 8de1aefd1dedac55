"""Write files of which every reader finds the whole content, or what was there before; open files only."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO


class NotRegularError(OSError):
    """Raised if a link, a directory, a FIFO, a socket or a device lies where a file was written."""


def open_regular(path: str | os.PathLike[str], how: int = os.O_RDONLY) -> BinaryIO:
    """Open a regular file, by default for reading, without waiting for a FIFO and without following a link.

    Links to the directories above the file are followed.

    Raises:
        FileNotFoundError: there is no file.
        NotRegularError: something else has this name.
        OSError: it cannot be opened now.
    """
    try:
        fd = os.open(path, how | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        # a link, or a socket
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise NotRegularError(error.errno, "not a regular file", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise NotRegularError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(fd, "rb", buffering=1 << 20)


def write_whole(path: Path, data: str | bytes, mode: int = 0o600) -> None:
    """Replace a file durably: a full disk, a crash or a power failure never leaves a part of it.

    A link in its place is replaced, and its target stays as it is.

    Args:
        path: The file; its directory exists.
        data: The whole content.
        mode: Permissions, without those that the umask takes away.

    Raises:
        OSError: it cannot be written, and what was there stays.
    """
    temporary = path.with_name(f".adaptdl-{secrets.token_hex(8)}")
    number = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable.

    Some network file systems refuse this call, because their names are always durable.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(fd)
