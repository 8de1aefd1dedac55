"""A directory that may not be entered, also where the tests run as root."""

from __future__ import annotations

import os
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
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield folder
    finally:
        os.seteuid(user)
        folder.chmod(0o700)
