"""Provide a directory that only this user can enter: `adaptdl-<uid>` in the first place that can be used.

The places are, in this order, `$XDG_RUNTIME_DIR`, `/tmp`, `/dev/shm`, `/var/tmp`, `/run/user/<uid>` and
`$TMPDIR`. A place cannot be used if it does not exist, if its file system has no locks (as some of networks),
or if another user has made a directory of this name there.
"""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

PLACES = ("/tmp", "/dev/shm", "/var/tmp", f"/run/user/{os.getuid()}")
"""Directories of every machine, with paths that are short enough for sockets; the last goes at a logout."""


class RuntimeFileError(RuntimeError):
    """Raised if the runtime directory cannot be used, or another user could write into it."""


def runtime_directories(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Return where the runtime directory may be, the first choice first, without creating it."""
    places = dict.fromkeys((environ.get("XDG_RUNTIME_DIR"), *PLACES, environ.get("TMPDIR")))
    return [Path(place) / f"adaptdl-{os.getuid()}" for place in places if place and place.startswith("/")]


def private_directory(
    directory: Path | None = None,
    environ: Mapping[str, str] = os.environ,
    say: Callable[[str], None] = lambda _: None,
) -> Path:
    """Return a private directory, and make it if it does not exist.

    Args:
        directory: The directory; None: the runtime directory.
        environ: Variables that name places. Without any the path is short enough for sockets.
        say: Prints a line for the user if it is not in the first place.

    Raises:
        RuntimeFileError: the directory cannot be made, or another user could write into it.
    """
    refusals = []
    for path in [directory] if directory else runtime_directories(environ):
        try:
            # a place that is gone is not made again: it would be closed to its other users, or open to them
            path.mkdir(mode=0o700, parents=directory is not None, exist_ok=True)
            check_private(path)
            with tempfile.TemporaryFile(dir=path) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            refusals.append(
                f"{path} cannot be used ({error.strerror}): set XDG_RUNTIME_DIR to a directory of your own"
            )
        except RuntimeFileError as error:
            refusals.append(str(error))
        else:
            if refusals:
                say(f"{path} is used: {refusals[0]}")
            return path
    raise RuntimeFileError(refusals[0])


def check_private(directory: Path) -> None:
    """Raise RuntimeFileError unless `directory` is this user's and no other user can enter it."""
    # Every user can write to /tmp: another user may have made a directory of this name first.
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise RuntimeFileError(
            f"{directory} must be a directory of your own that nobody else can enter; "
            f"remove it, or set XDG_RUNTIME_DIR to one that is"
        )
