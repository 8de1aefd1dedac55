"""Provide a directory that only this user can enter: `${XDG_RUNTIME_DIR:-/tmp}/adaptdl-<uid>`."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path


class RuntimeFileError(RuntimeError):
    """Raised if the runtime directory cannot be used, or another user could write into it."""


def runtime_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the path `${XDG_RUNTIME_DIR:-/tmp}/adaptdl-<uid>` without creating the directory."""
    return Path(environ.get("XDG_RUNTIME_DIR") or "/tmp") / f"adaptdl-{os.getuid()}"


def private_directory(directory: Path | None = None) -> Path:
    """Return a private directory, and make it if it does not exist.

    Args:
        directory: The directory; None: the runtime directory.

    Raises:
        RuntimeFileError: the directory cannot be made, or another user could write into it.
    """
    directory = directory or runtime_directory()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_private(directory)
    except OSError as error:
        raise RuntimeFileError(
            f"{directory} cannot be used ({error.strerror}): set XDG_RUNTIME_DIR to a directory of your own"
        ) from None
    return directory


def check_private(directory: Path) -> None:
    """Raise RuntimeFileError unless `directory` is this user's and no other user can enter it."""
    # Every user can write to /tmp: another user may have made a directory of this name first.
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise RuntimeFileError(
            f"{directory} must be a directory of your own that nobody else can enter; "
            f"remove it, or set XDG_RUNTIME_DIR to one that is"
        )
