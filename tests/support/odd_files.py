"""Make what may lie in the place of a file; a link leads to `moved` beside it."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

ODD: dict[str, Callable[[Path], object]] = {
    "folder": lambda path: path.mkdir(0o700),
    "FIFO": lambda path: os.mkfifo(path, 0o600),
    "socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
    "link": lambda path: path.symlink_to("moved"),
    "dangling link": lambda path: path.symlink_to("nowhere"),
}
