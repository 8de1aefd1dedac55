"""Define the storage of checkpoints, and implement it in a directory.

| module | question that it answers |
|---|---|
| (this one) | What does every storage guarantee, and how does a directory provide that? |
| `s3` | How does an S3 bucket provide these guarantees? |
| `locations` | Which storage does a path name? |

Guarantees of every storage:

* **All or nothing.** A checkpoint is listed only when all of its bytes, and then its manifest, are durable. A
  writer that dies at any moment leaves nothing that is listed.
* **Verification.** Every file is compared with the size and the checksums in the manifest before it is
  returned. The manifest has a checksum of its own.
* **One writer.** Only rank 0 of the newest generation writes. It deletes the unfinished checkpoints of older
  generations, so their commits fail and cannot add an outdated checkpoint. `checkpoint.manager` refuses the
  saves that an older generation begins after that. It ignores those that an older generation finishes while
  the newest generation has saved nothing yet.
* **Only its own names.** A storage lists, deletes, moves and overwrites only names that it has written: ids,
  and temporary names that contain one. Other files may lie beside them, and links are never its own.
* **A passing error is no damage.** `DamagedError` says that a file is missing or differs from what was
  written. Where a file cannot be read now, it is a `StorageError`, and nothing is concluded from it.

Checksums are CRC-32, one per 16 MiB. They detect truncation and bit rot, not an attacker (who could also
rewrite the manifest), and are computed at memory speed; SHA-256 without hardware support would delay every
restart.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO, cast
from urllib.parse import quote

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from adaptdl_elastic._whole_file import NotRegularError, open_regular, sync_directory

VERSION = 1
CHUNK = 16 << 20
"""Bytes per checksum."""

MANIFEST = "manifest.json"
_TEMPORARY = ".tmp-"
_CONFIG = ConfigDict(extra="ignore", allow_inf_nan=False)


class StorageError(Exception):
    """Raised if the place where checkpoints are kept cannot be read or written."""

    may_pass = False
    """Whether it is worth to try again later, without a person."""


class DamagedError(StorageError):
    """Raised if a checkpoint exists, but differs from what was written."""


_REMEDIES = {
    **dict.fromkeys((errno.EACCES, errno.EPERM), "let this user read it, or start as its owner"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "allow more open files, by ulimit -n"),
    **dict.fromkeys((errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG), "give the path of a directory"),
}


def unreadable(what: str, error: Exception) -> StorageError:
    """Return the error for a part of a checkpoint that cannot be read now, which is no damage."""
    remedy = _REMEDIES.get(getattr(error, "errno", None) or 0)
    then = remedy or "start again when it can be read"
    found = StorageError(f"{what} cannot be read now: {reason(error)} ({then}; nothing is lost)")
    found.may_pass = remedy is None
    return found


@dataclass(frozen=True, config=_CONFIG)
class Entry:
    """Describe the file of one state."""

    file: str
    size: int
    crc32: tuple[int, ...]  # one per CHUNK bytes
    expires: int | None = None  # epoch after which the state is not needed any more


@dataclass(frozen=True, config=_CONFIG)
class Manifest:
    """List the content of a checkpoint. The manifest is written last."""

    id: str
    states: dict[str, Entry]
    kind: str = ""
    job: str = ""
    generation: int = 0
    step: int = 0
    replicas: int = 1
    created: float = 0.0
    history: tuple[str, ...] = ()  # ids that this run saved or loaded before, newest last

    @property
    def size(self) -> int:
        """Bytes of all states."""
        return sum(entry.size for entry in self.states.values())


_ADAPTER: TypeAdapter[Manifest] = TypeAdapter(Manifest)


def encode_manifest(manifest: Manifest) -> bytes:
    """Return a manifest as a line of JSON and a line with its checksum."""
    body = b'{"v":%d,' % VERSION + _ADAPTER.dump_json(manifest)[1:]
    return body + b"\ncrc32 %08x\n" % zlib.crc32(body)


def decode_manifest(data: bytes) -> Manifest:
    """Return the manifest that `data` holds; DamagedError if it does not match its checksum."""
    body, _, rest = data.partition(b"\n")
    if rest != b"crc32 %08x\n" % zlib.crc32(body):
        raise DamagedError(f"{MANIFEST} does not match its checksum")
    try:
        manifest = _ADAPTER.validate_json(body)
    except ValidationError as error:
        raise DamagedError(f"{MANIFEST}: {error.errors()[0]['msg']}") from None
    for entry in manifest.states.values():
        if not _FILE.fullmatch(entry.file):
            raise DamagedError(f"{MANIFEST}: {entry.file!r} is no name of a state's file")
    return manifest


def new_id(existing: Sequence[str], generation: int) -> str:
    """Return an id that sorts after all `existing` ones and that no other writer chooses."""
    number = max((sequence_number(id) for id in existing), default=0) + 1
    return f"{number:08d}-g{generation:05d}-{secrets.token_hex(4)}"


_ID = re.compile(r"\d{8,}-g\d{5,}-\w+", re.ASCII)
# a checkpoint, one that is being written, or one that is being deleted
_OWN = re.compile(rf"(\.tmp-(old-)?)?{_ID.pattern}", re.ASCII)


def is_id(name: str) -> bool:
    """Return whether a name has the form of an id."""
    return _ID.fullmatch(name) is not None


def own_directories(root: Path) -> list[str]:
    """Return the names of the directories that a storage has written: unfinished ones, then by age.

    A link is not one of them, whatever its name.

    Raises:
        OSError: the directory cannot be read.
    """
    try:
        with os.scandir(root) as found:
            return sorted(e.name for e in found if _OWN.fullmatch(e.name) and e.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return []


def sequence_number(checkpoint_id: str) -> int:
    """Return the leading number of an id; 0 if the name is no id."""
    head = checkpoint_id.partition("-")[0]
    return int(head) if head.isdecimal() else 0


def generation_number(checkpoint_id: str) -> int:
    """Return the generation that has saved a checkpoint; 0 if the name is no id."""
    return int(checkpoint_id.split("-")[1][1:]) if is_id(checkpoint_id) else 0


# of a state
_FILE = re.compile(r"[^/\0]{1,255}")


def file_name(state: str) -> str:
    """Return a file name for a state: readable, unambiguous, without path separators, not too long."""
    name = quote(state, safe=" ").replace(".", "%2E")
    if len(name) > 150:
        name = f"{name[:120]}%{zlib.crc32(state.encode()):08x}{zlib.adler32(state.encode()):08x}"
    return f"{name}.state"


class ChecksumWriter:
    """Write to a binary file, and compute the size and the checksums of the written bytes."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._sums: list[int] = []
        self._current = 0
        self._room = CHUNK
        self.size = 0

    def write(self, data: Any) -> int:
        """Write all of `data` (any object with the buffer protocol); return its number of bytes."""
        view = memoryview(data).cast("B")
        write_all(self._file, view)
        total = len(view)
        self.size += total
        while len(view):
            part = view[: self._room]
            self._current = zlib.crc32(part, self._current)
            self._room -= len(part)
            view = view[len(part) :]
            if not self._room:
                self._sums.append(self._current)
                self._current, self._room = 0, CHUNK
        return total

    def flush(self) -> None:
        """Pass buffered bytes to the operating system."""
        self._file.flush()

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self.size

    def writable(self) -> bool:
        """Return True."""
        return True

    def readable(self) -> bool:
        """Return False."""
        return False

    def seekable(self) -> bool:
        """Return False."""
        return False

    def close(self) -> None:
        """Flush the file, but leave it open: the storage closes it."""
        self.flush()

    def checksums(self) -> tuple[int, ...]:
        """Return the checksums, one per chunk; the last chunk may be shorter."""
        return (*self._sums, self._current) if self._room < CHUNK else tuple(self._sums)


def write_all(file: IO[bytes], view: memoryview) -> None:
    """Write all bytes, in as many writes as the file takes."""
    while len(view):
        written = file.write(view)
        if written is None or written >= len(view):
            return
        view = view[written:]


def verify(file: BinaryIO, entry: Entry) -> None:
    """Compare a file with its entry, then rewind it; DamagedError if they differ."""
    size, buffer = 0, memoryview(bytearray(min(CHUNK, max(entry.size, 1))))
    for expected in entry.crc32:
        got = _fill(file, buffer)
        size += got
        if zlib.crc32(buffer[:got]) != expected:
            raise DamagedError(f"{entry.file} does not match its checksum near byte {size}")
    if size != entry.size or file.read(1):
        raise DamagedError(f"{entry.file} should have {entry.size} bytes")
    file.seek(0)


def verified(file: BinaryIO, entry: Entry) -> BinaryIO:
    """Return a file that is verified and rewound, or close it and raise."""
    try:
        verify(file, entry)
    except BaseException as error:
        file.close()
        # the disk cannot read the file
        if isinstance(error, OSError):
            raise unreadable(entry.file, error) from error
        raise
    return file


def _fill(file: BinaryIO, buffer: memoryview) -> int:
    filled = 0
    while filled < len(buffer):
        got = cast(Any, file).readinto(buffer[filled:])
        if not got:
            break
        filled += got
    return filled


class Writing(ABC):
    """Define a checkpoint that is being written and not listed yet."""

    id: str

    def __init__(self, checkpoint_id: str) -> None:
        self.id = checkpoint_id
        self.entries: dict[str, Entry] = {}

    @contextmanager
    def state(self, name: str, expires: int | None = None) -> Iterator[ChecksumWriter]:
        """Yield a file for one state; it is durable when the block ends."""
        file = file_name(name)
        with self._file(file) as raw:
            writer = ChecksumWriter(raw)
            yield writer
        self.entries[name] = Entry(file, writer.size, writer.checksums(), expires)

    @abstractmethod
    @contextmanager
    def _file(self, file: str) -> Iterator[IO[bytes]]: ...

    @abstractmethod
    def commit(self, manifest: Manifest) -> None:
        """Make this a complete checkpoint, which is listed from then on."""

    @abstractmethod
    def abandon(self) -> None:
        """Delete what was written, unless the commit may have succeeded. Raises nothing."""


class Storage(ABC):
    """Define a place for checkpoints; the module's docstring lists the guarantees."""

    path: str

    @abstractmethod
    def ids(self) -> list[str]:
        """Return the ids of complete checkpoints, oldest first; StorageError if the place cannot be read."""

    @abstractmethod
    def manifest(self, checkpoint_id: str) -> Manifest:
        """Return a checkpoint's manifest; DamagedError if it cannot be read or is incomplete."""

    @abstractmethod
    def open(self, checkpoint_id: str, entry: Entry) -> BinaryIO:
        """Return the verified content of one state; it stays readable if the checkpoint is removed."""

    @abstractmethod
    def check_writable(self) -> None:
        """Check as far as possible that checkpoints can be written; StorageError if they cannot."""

    @abstractmethod
    def begin(self, checkpoint_id: str) -> Writing:
        """Begin to write a checkpoint."""

    @abstractmethod
    def remove(self, checkpoint_id: str) -> None:
        """Delete one checkpoint, its manifest first; do nothing if it does not exist."""

    @abstractmethod
    def sweep(self, keep: str | None = None) -> None:
        """Delete the unfinished checkpoints of writers that have died, except for the id `keep`."""


class DirectoryStorage(Storage):
    """Store checkpoints as directories below one directory, which all nodes share."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        # absolute, because a script may change its working directory
        self._root = Path(path).expanduser().absolute()
        self.path = str(self._root)

    def ids(self) -> list[str]:
        """Return the names of directories that are ids; one without a manifest is damaged."""
        try:
            return [name for name in own_directories(self._root) if is_id(name)]
        except OSError as error:
            raise unreadable(f"the directory of checkpoints {self.path}", error) from error

    def manifest(self, checkpoint_id: str) -> Manifest:
        """Read and verify the manifest."""
        try:
            with self._open(checkpoint_id, MANIFEST) as file:
                return decode_manifest(file.read())
        except OSError as error:
            raise unreadable(MANIFEST, error) from error

    def open(self, checkpoint_id: str, entry: Entry) -> BinaryIO:
        """Return an open file; Unix keeps its content even if the file is deleted."""
        return verified(self._open(checkpoint_id, entry.file), entry)

    def _open(self, checkpoint_id: str, name: str) -> BinaryIO:
        try:
            return open_regular(self._root / checkpoint_id / name)
        except (FileNotFoundError, NotRegularError) as error:
            raise DamagedError(f"{name}: {reason(error)}") from error
        except OSError as error:
            raise unreadable(name, error) from error

    def check_writable(self) -> None:
        """Make the directory, and check its permissions."""
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            if not os.access(self._root, os.W_OK | os.X_OK, effective_ids=True):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), self.path)
        except OSError as error:
            raise StorageError(f"no checkpoint can be written to {self.path}: {reason(error)}") from error

    def begin(self, checkpoint_id: str) -> Writing:
        """Make a temporary directory beside the checkpoints."""
        return _DirectoryWriting(self._root, checkpoint_id)

    def remove(self, checkpoint_id: str) -> None:
        """Rename the directory, so that it is not listed, then delete it."""
        doomed = self._root / f"{_TEMPORARY}old-{checkpoint_id}"
        with suppress(OSError):
            (self._root / checkpoint_id).rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def sweep(self, keep: str | None = None) -> None:
        """Delete temporary directories."""
        for name in own_directories(self._root):
            if not is_id(name) and name != f"{_TEMPORARY}{keep}":
                shutil.rmtree(self._root / name, ignore_errors=True)


class _DirectoryWriting(Writing):
    def __init__(self, root: Path, checkpoint_id: str) -> None:
        super().__init__(checkpoint_id)
        self._root = root
        self._temporary = root / f"{_TEMPORARY}{checkpoint_id}"
        root.mkdir(parents=True, exist_ok=True)
        self._temporary.mkdir(mode=0o700)

    @contextmanager
    def _file(self, file: str) -> Iterator[IO[bytes]]:
        with (self._temporary / file).open("xb", buffering=1 << 20) as raw:
            yield raw
            raw.flush()
            os.fsync(raw.fileno())

    def commit(self, manifest: Manifest) -> None:
        with self._file(MANIFEST) as raw:
            raw.write(encode_manifest(manifest))
        sync_directory(self._temporary)
        self._temporary.rename(self._root / self.id)
        sync_directory(self._root)

    def abandon(self) -> None:
        shutil.rmtree(self._temporary, ignore_errors=True)


def reason(error: BaseException) -> str:
    """Return a description of the error, for users."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    if isinstance(error, StorageError):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
