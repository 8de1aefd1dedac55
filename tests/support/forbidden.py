"""Directories that may not be entered or not be written to, also where the tests run as root."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NOBODY = 65534


@contextmanager
def forbidden(folder: Path) -> Iterator[Path]:
    """`folder` as it looks to somebody who may not enter it; files of it are there all the same."""
    folder.mkdir(exist_ok=True)
    (folder / "there").write_text("")
    folder.chmod(0)
    try:
        with as_nobody():
            yield folder
    finally:
        folder.chmod(0o700)


@contextmanager
def unwritable() -> Iterator[Path]:
    """An empty folder as it looks to somebody who may enter and read it, and no more."""
    with tempfile.TemporaryDirectory() as name:  # to root's pytest directory nobody else may come
        folder = Path(name)
        folder.chmod(0o555)
        try:
            with as_nobody():
                yield folder
        finally:
            folder.chmod(0o700)


@contextmanager
def as_nobody() -> Iterator[None]:
    """As somebody without rights where this is root, whom no permission keeps out."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)
