"""Read archives that people have sent, without trusting what is in them.

An archive of some kilobytes can hold a header or files of many gigabytes, and etcd and checkpoints use the
same memory and disk. So the bytes that are read and the entries are counted. Links are made after all files,
so that no file is written through one.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

from adaptdl_elastic.agent.service.blobs import MOST_BLOB_BYTES, BlobError, check_room
from adaptdl_elastic.rendezvous.schema.submissions import OWNER_HEADER

MOST_ENTRIES = 200_000
"""Most files, directories and links of an archive."""

_MOST_HEADER_BYTES = 64 << 10
_MOST_VARIABLES_BYTES = 1 << 20
_BLOCKS = 16 << 10  # bytes that tarfile may read beyond a file's content
# tarfile leaves through all of these if a header is malformed
_MALFORMED = (tarfile.TarError, EOFError, zlib.error, ValueError, KeyError, OverflowError, RecursionError)


class Archive:
    """An archive that `adaptdl submit` has packed.

    Args:
        file: The archive, decompressed.

    Raises:
        BlobError: it is malformed, or too much is in it. Other methods raise this, too.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = _Counted(file)
        self._tar = tarfile.TarFile(fileobj=self._file)  # type: ignore[arg-type]

    @property
    def owner(self) -> str | None:
        """The name in the archive of the person who packed it; None if it has none."""
        return self._tar.pax_headers.get(OWNER_HEADER)

    def entries(self) -> Iterator[tarfile.TarInfo]:
        """Yield one entry after the other; `copy` works on the last one."""
        number = size = 0
        while True:
            self._file.left = _MOST_HEADER_BYTES
            member = self._tar.next()
            if member is None:
                return
            # tarfile would keep all of them
            self._tar.members = []  # type: ignore[attr-defined]
            number, size = number + 1, size + member.size
            if number > MOST_ENTRIES or size > MOST_BLOB_BYTES:
                raise BlobError(f"more than {MOST_ENTRIES} files or {MOST_BLOB_BYTES} bytes are in it")
            yield member

    def copy(self, member: tarfile.TarInfo, target: IO[bytes]) -> None:
        """Write the content of a file to `target`."""
        self._file.left = member.size + _BLOCKS
        source = self._tar.extractfile(member)
        if source is not None:
            shutil.copyfileobj(source, target, _BLOCKS)


class _Counted:
    """A file of which only `left` more bytes may be read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.left = file, _MOST_HEADER_BYTES
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int) -> bytes:
        self.left -= size
        if self.left < 0:
            raise BlobError("a header in it is too long")
        return self._file.read(size)


@contextmanager
def opened(archive: Path) -> Iterator[Archive]:
    """Open an archive; BlobError if it cannot be read."""
    try:
        with gzip.open(archive) as file:
            yield Archive(file)  # type: ignore[arg-type]
    except _MALFORMED as error:
        raise BlobError(f"it is no archive of adaptdl submit: {error}") from None
    except OSError as error:
        raise BlobError(str(error)) from None


def unpack(archive: Path, directory: Path, owner: str) -> None:
    """Unpack a working directory into a new directory, unless it was unpacked there before.

    Args:
        archive: The archive.
        directory: The directory to make.
        owner: Of the job. An archive's digest stands in the store for all to read, and another person's job
            must not get the files by naming it.

    Raises:
        BlobError: the archive cannot be unpacked, holds paths outside of the directory, or was packed by
            another person.
    """
    if directory.is_dir():
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=directory.parent, prefix=".unpacking-"))
    try:
        with opened(archive) as found:
            if found.owner != owner:
                raise BlobError(f"it was not packed by {owner}, who submits it")
            _extract(found, temporary)
        temporary.replace(directory)
    except (BlobError, OSError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise BlobError(f"the working directory cannot be unpacked into {directory}: {error}") from None


def read_private(archive: Path, owner: str) -> Mapping[str, str]:
    """Return the variables of `submit --env` in an archive that `adaptdl submit` has made.

    Args:
        archive: The archive.
        owner: Of the job that gets it. An archive's digest stands in the store for all to read, and another
            person's job must not get the variables by naming it.

    Raises:
        BlobError: it holds something else, or was made by another person.
    """
    content = None
    try:
        with opened(archive) as found:
            for member in found.entries():
                if member.name != "environment.json":
                    continue
                if member.size > _MOST_VARIABLES_BYTES:
                    raise BlobError(f"they have {member.size} bytes: {_MOST_VARIABLES_BYTES} may travel")
                text = io.BytesIO()
                found.copy(member, text)
                content = json.loads(text.getvalue())
    except BlobError as error:
        raise BlobError(f"the job's variables cannot be read: {error}") from None
    content = content if isinstance(content, dict) else {}
    values = content.get("variables")
    if not isinstance(values, dict) or not all(isinstance(value, str) for value in values.values()):
        raise BlobError("the job's variables cannot be read: they are no table of texts")
    if content.get("owner") != owner:
        raise BlobError(f"the job's variables are not those of {owner}")
    return values


def _extract(archive: Archive, root: Path) -> None:
    links: list[tuple[PurePosixPath, str]] = []
    for member in archive.entries():
        name = inside(member.name)
        path = root / name
        if member.issym():
            links.append((name, member.linkname))
        elif member.isdir():
            path.mkdir(parents=True, exist_ok=True)
        elif member.isreg():
            check_room(root.parent, member.size)  # the directory's own name is a temporary one
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("xb") as file:
                archive.copy(member, file)
            path.chmod(0o755 if member.mode & 0o100 else 0o644)
        else:
            raise BlobError(f"{member.name!r} in it is neither a file nor a directory nor a link")
    for name, target in links:
        inside(str(name.parent / target))
        if any((root / parent).is_symlink() for parent in name.parents):
            raise BlobError(f"{str(name)!r} in it lies behind a link")
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(target)
    for name, _ in links:
        if not Path(os.path.realpath(root / name)).is_relative_to(os.path.realpath(root)):
            raise BlobError(f"{str(name)!r} in it leads out of the directory over other links")


def inside(name: str) -> PurePosixPath:
    """Return a path as it is; BlobError if it leads out of the directory that it is relative to."""
    path, depth = PurePosixPath(name), 0
    for part in path.parts:
        depth += -1 if part == ".." else 1
        if depth < 0 or path.is_absolute():
            raise BlobError(f"{name!r} in it leads out of the directory")
    return path
