"""Archives by their SHA-256: receive, fetch from other nodes, delete."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO

from adaptdl_elastic.rendezvous.schema.submissions import ServiceRecord
from adaptdl_elastic.rendezvous.services.service_client import ServiceClient, ServiceError

MOST_BLOB_BYTES = 20 << 30
"""Largest archive that is accepted."""

KEPT_SECONDS = 7 * 24 * 3600.0
"""Seconds after its last use for which an archive is kept that no job needs any more."""

_CHUNK = 1 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")
_SPARE_BYTES = 100 << 20
"""Bytes that stay free on the disk."""


class BlobError(Exception):
    """An archive cannot be stored, fetched or read; the message says why."""


class AbsentError(BlobError):
    """No node that answers has an archive."""


class Blobs:
    """The archives of one node."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def path(self, digest: str) -> Path:
        """Return where the archive is, or would be."""
        if not _DIGEST.fullmatch(digest):
            raise BlobError(f"{digest[:80]!r} is no SHA-256 digest")
        return self._directory / digest

    def has(self, digest: str) -> bool:
        """Return whether the archive is here. If so, `sweep` keeps it for `KEPT_SECONDS` from now."""
        try:
            os.utime(self.path(digest))
        except OSError:
            return False
        return True

    def sweep(self, needed: Collection[str], now: Callable[[], float] = time.time) -> None:
        """Delete archives, and beginnings of archives, that were not used for `KEPT_SECONDS`.

        Args:
            needed: Digests of archives that stay.
            now: The time of the file system's clock.
        """
        for path in list(self._directory.glob("*")):
            with suppress(OSError):  # what cannot be deleted now may be deleted at the next call
                if path.name not in needed and now() - path.stat().st_mtime > KEPT_SECONDS:
                    path.unlink()

    def receive(self, digest: str, size: int, read: Callable[[int], bytes]) -> None:
        """Store what `read` gives, if its SHA-256 is the digest.

        Raises:
            BlobError: it is something else, or the disk has no room.
        """
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_room(self._directory, size)
        with _Receiving(self, digest) as receiving:
            left = size
            while left:
                data = read(min(_CHUNK, left))
                if not data:
                    raise BlobError(f"the archive ends after {size - left} of {size} bytes")
                receiving.write(data)
                left -= len(data)
            receiving.commit()

    def fetch(self, digest: str, peers: Iterable[ServiceRecord], client: ServiceClient) -> None:
        """Get an archive from the first node that has it, unless it is here.

        Raises:
            AbsentError: no node has it.
            BlobError: it cannot be written, or a node sends something else.
        """
        if self.has(digest):
            return
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        problems, absent = [], True
        for peer in peers:
            try:
                with _Receiving(self, digest) as receiving:
                    client.download(peer, f"/v1/blobs/{digest}", receiving.write)
                    receiving.commit()
                return
            except (ServiceError, BlobError) as error:
                absent = absent and isinstance(error, ServiceError)
                problems.append(str(error))
        said = f": {'; '.join(problems)}" if problems else ""
        kind = AbsentError if absent else BlobError
        raise kind(f"no other node has the archive {digest[:12]}{said}")


class _Receiving:
    """A file that becomes an archive if its content has the digest."""

    def __init__(self, blobs: Blobs, digest: str) -> None:
        self._path, self._digest = blobs.path(digest), digest
        self._sum, self._size = hashlib.sha256(), 0
        number, name = tempfile.mkstemp(dir=self._path.parent, prefix=".")
        self._file: IO[bytes] = os.fdopen(number, "wb")
        self._temporary = Path(name)

    def __enter__(self) -> _Receiving:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def write(self, data: bytes) -> None:
        self._sum.update(data)
        self._size += len(data)
        if self._size > MOST_BLOB_BYTES:
            raise BlobError(f"an archive of more than {MOST_BLOB_BYTES} bytes is not accepted")
        try:
            self._file.write(data)
        except OSError as error:
            raise BlobError(
                f"the archive cannot be written to {self._path.parent}: {error.strerror}"
            ) from None

    def commit(self) -> None:
        if self._sum.hexdigest() != self._digest:
            raise BlobError("the archive's SHA-256 is not the one that was announced")
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._temporary.replace(self._path)
        except OSError as error:
            raise BlobError(
                f"the archive cannot be written to {self._path.parent}: {error.strerror}"
            ) from None


def check_room(directory: Path, size: int) -> None:
    """Raise BlobError if the disk of a directory has no room for so many bytes."""
    free = shutil.disk_usage(directory).free
    if size + _SPARE_BYTES > free:
        raise BlobError(
            f"the disk of {directory} is full: {free >> 20} MiB are free, {(size + _SPARE_BYTES) >> 20} MiB "
            f"are needed; make room there, or submit from a directory with less in it"
        )
