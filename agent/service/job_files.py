"""Read the files of a job on this node: its working directory, its checkpoints and its logs.

A job may leave anything there: links, pipes, files that grow. Only regular files are read, and only if they
lie in the folder itself. A link is not followed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from adaptdl_elastic.agent.service.access import DeniedError
from adaptdl_elastic.agent.service.archives import MOST_ENTRIES, inside
from adaptdl_elastic.rendezvous.services.service_config import ServiceDirectory


def folder_of(directory: ServiceDirectory, kind: str, job: str, work: str) -> Path:
    """Return a folder of a job.

    Args:
        directory: Of the service.
        kind: "work", "checkpoints" or "logs".
        job: Name of the job.
        work: Name of its working directory.
    """
    folders = {
        "work": directory.work(work),
        "checkpoints": directory.checkpoints(job),
        "logs": directory.log(job).parent,
    }
    if kind not in folders:
        raise DeniedError(f"a job has no folder {kind!r}", 404)
    return folders[kind]


def listing(folder: Path, path: str) -> dict[str, Any]:
    """Return what is at a path in a folder.

    Returns:
        "files": path below `path` ("" for a file itself), bytes, time of the last change in nanoseconds, and
        whether it can be executed; "left_out": number of links and of others that are no files.

    Raises:
        DeniedError: nothing is there, or too much.
        BlobError: the path leads out of the folder.
    """
    top, files, left_out = folder / inside(path), list[list[Any]](), 0
    real = os.path.realpath(folder)
    if not Path(os.path.realpath(top)).is_relative_to(real) or not top.exists():
        raise DeniedError(f"{path or 'the folder'} is not on this node", 404)
    for place in [top] if not top.is_dir() else _below(top):
        try:
            found = place.lstat()
        except OSError:  # it was removed meanwhile
            continue
        if not stat.S_ISREG(found.st_mode):
            left_out += 1
            continue
        name = "" if place == top else place.relative_to(top).as_posix()
        files.append([name, found.st_size, found.st_mtime_ns, bool(found.st_mode & 0o100)])
        if len(files) > MOST_ENTRIES:
            raise DeniedError(f"more than {MOST_ENTRIES} files are there: name a folder in it", 400)
    return {"files": sorted(files), "left_out": left_out}


def _below(top: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(top):
        # os.walk does not enter these
        places = [Path(root, name) for name in folders]
        yield from (Path(root, name) for name in files)
        yield from (place for place in places if place.is_symlink())


@contextmanager
def opened(folder: Path, path: str) -> Iterator[tuple[IO[bytes], os.stat_result]]:
    """Open a file in a folder; yield it, and what is known of it.

    Raises:
        DeniedError: it is no regular file in the folder.
        BlobError: the path leads out of the folder.
    """
    try:
        # a pipe would be waited for
        number = os.open(folder / inside(path), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise DeniedError(f"{path} is not on this node", 404) from None
    except OSError as error:
        raise DeniedError(f"{path} cannot be read: {error.strerror}", 404) from None
    with os.fdopen(number, "rb") as file:
        found = os.fstat(number)
        # of what was opened: a folder on the way may have become a link
        real = Path(f"/proc/self/fd/{number}").readlink()
        if not stat.S_ISREG(found.st_mode) or not real.is_relative_to(os.path.realpath(folder)):
            raise DeniedError(f"{path} is no file in this folder", 404)
        yield file, found
