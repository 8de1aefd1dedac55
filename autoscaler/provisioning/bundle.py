"""Pack a working directory: the same files make the same archive, whose SHA-256 names it.

`.gitignore` is respected as git understands it, in a repository and outside of one.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import io
import json
import os
import secrets
import shlex
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from adaptdl_elastic.autoscaler.provisioning.ssh import ProvisionError
from adaptdl_elastic.rendezvous.schema.submissions import OWNER_HEADER, STACK_COMMAND
from adaptdl_elastic.rendezvous.text import pluralize

MOST_BYTES = 512 << 20
"""Default of the largest working directory, in bytes."""

_OF_A_HOOK = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_PREFIX")
_NEVER = {".git", "__pycache__", ".adaptdl"}


@dataclass(frozen=True)
class Bundle:
    """An archive in a file.

    Attributes:
        path: The file.
        digest: Its SHA-256.
        size: Its bytes.
        files: How many files are in it.
    """

    path: Path
    digest: str
    size: int
    files: int


def pack(
    directory: Path,
    target: Path,
    owner: str,
    most_bytes: int = MOST_BYTES,
    private: Sequence[Path] = (),
    command: Sequence[str] = (),
) -> Bundle:
    """Write the archive of a directory to `target`.

    Args:
        directory: The working directory.
        target: The file to write.
        owner: The person who submits; only jobs of this person get the files.
        most_bytes: How many bytes of files may travel.
        private: Directories of which no file may travel, as they hold keys.
        command: A script and its arguments, which are packed as the file STACK_COMMAND.

    Raises:
        ProvisionError: the directory cannot be read, is too large, or has files of `private` or links that
            no node would unpack.
    """
    directory = directory.absolute()
    names = list_files(directory)
    _check_links(directory, names)
    _check_private(directory, names, private)
    _check_size(directory, names, most_bytes)
    try:
        with _archive(target, {OWNER_HEADER: owner}) as tar:
            for name in names or ["."]:  # nodes would not read an archive of nothing
                _add(tar, directory / name, name)
            if command:
                _add_text(tar, STACK_COMMAND, shlex.join(command).encode())
    except OSError as error:
        raise ProvisionError(f"{directory} cannot be packed: {error}") from None
    return _described(target, len(names))


def pack_private(variables: Mapping[str, str], owner: str, target: Path) -> Bundle:
    """Write an archive of variables that only jobs of `owner` get.

    The archive also has a random file, so that its digest does not reveal the rest.

    Args:
        variables: The variables of `submit --env`.
        owner: The person who submits.
        target: The file to write.
    """
    content = {"owner": owner, "variables": dict(variables)}
    files = {"environment.json": json.dumps(content).encode(), "salt": secrets.token_bytes(32)}
    with _archive(target) as tar:
        for name, data in files.items():
            _add_text(tar, name, data)
    target.chmod(0o600)
    return _described(target, len(files))


@contextmanager
def _archive(target: Path, headers: Mapping[str, str] | None = None) -> Iterator[tarfile.TarFile]:
    """Open a new archive, in which neither times nor names of users are noted."""
    with (
        target.open("wb") as raw,
        gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0, compresslevel=5) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT, pax_headers=headers) as tar,
    ):
        yield tar


def _add(tar: tarfile.TarFile, path: Path, name: str) -> None:
    entry = tar.gettarinfo(str(path), name)
    entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = 0, 0, 0, "", ""
    entry.mode = 0o755 if entry.mode & 0o100 else 0o644
    if entry.islnk():  # a second name of a file
        entry.type, entry.size = tarfile.REGTYPE, path.stat().st_size
    if entry.isreg():
        with path.open("rb") as file:
            tar.addfile(entry, file)
    elif entry.issym() or entry.isdir():
        tar.addfile(entry)


def _add_text(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), 0o600
    tar.addfile(entry, io.BytesIO(data))


def _described(target: Path, files: int) -> Bundle:
    digest = hashlib.sha256()
    with target.open("rb") as file:
        while data := file.read(1 << 20):
            digest.update(data)
    return Bundle(target, digest.hexdigest(), target.stat().st_size, files)


def list_files(directory: Path) -> list[str]:
    """Return the files of a directory that belong to the job, sorted, relative to it.

    Raises:
        ProvisionError: the directory cannot be read.
    """
    if not directory.is_dir():
        raise ProvisionError(f"there is no directory {directory}: give the one of the job with --workdir")
    directory = directory.absolute()
    is_link = functools.cache(lambda name: (directory / name).is_symlink())
    found = _by_git(directory)
    if found is None:
        if (directory / ".gitignore").exists():
            raise ProvisionError(f"{directory} has a .gitignore, which only git can read: install git")
        found = list(_walk(directory, ""))
    behind = {name for name in found if any(map(is_link, PurePosixPath(name).parents[:-1]))}
    return sorted({name for name in found if not _NEVER & set(Path(name).parts)} - behind)


def _by_git(directory: Path) -> list[str] | None:
    """Return what git lists, or None where there is no git.

    Outside of a repository, git reads `.gitignore` by means of an empty repository elsewhere.
    """
    with tempfile.TemporaryDirectory(prefix="adaptdl-git-") as folder:
        try:
            inside = _git("-C", str(directory), "rev-parse", "--is-inside-work-tree") == b"true\n"
            options = ["-C", str(directory)]
            if not inside:
                _git("init", "-q", "--bare", folder)
                options = ["--git-dir", folder, "--work-tree", str(directory), "-C", str(directory)]
            listed = _git(*options, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
        except FileNotFoundError:
            return None
    if listed is None:
        raise ProvisionError(f"git cannot list the files of {directory}")
    names = []
    for name in (os.fsdecode(one) for one in listed.split(b"\0") if one):
        path = directory / name
        if path.is_dir() and not path.is_symlink():  # a repository within this one
            names += list(_walk(directory, name.rstrip("/")))
        elif path.is_symlink() or path.is_file():  # what git knows may be deleted
            names.append(name)
    return names


def _git(*arguments: str) -> bytes | None:
    # a hook of git's names another repository in these
    environment = {name: value for name, value in os.environ.items() if name not in _OF_A_HOOK}
    done = subprocess.run(["git", *arguments], capture_output=True, check=False, env=environment)
    return done.stdout if done.returncode == 0 else None


def _walk(directory: Path, below: str) -> Iterator[str]:
    for root, folders, files in os.walk(directory / below):
        folders[:] = sorted(set(folders) - _NEVER)
        for name in files:
            path = Path(root, name)
            if path.is_symlink() or path.is_file():
                yield path.relative_to(directory).as_posix()


def _check_private(directory: Path, names: list[str], private: Sequence[Path]) -> None:
    folder = directory.resolve()
    for kept in (path.resolve() for path in private):
        if kept.is_relative_to(folder):
            below = kept.relative_to(folder)
            if any(Path(name).is_relative_to(below) for name in names):
                raise ProvisionError(
                    f"{directory.absolute()} holds your keys, in {below}, which would travel to the nodes: "
                    f"give the job a directory of its own, or name {below} in .gitignore"
                )


def _check_links(directory: Path, names: list[str]) -> None:
    root = os.path.realpath(directory)
    for name in names:
        path = directory / name
        if not path.is_symlink():
            continue
        target = os.path.normpath(PurePosixPath(name).parent / path.readlink())
        out = target.startswith("/") or target.split("/")[0] == ".."
        if out or not Path(os.path.realpath(path)).is_relative_to(root):
            raise ProvisionError(
                f"{name} is a link to {path.readlink()}, which does not travel with {directory}: name {name} "
                f"in .gitignore, and give the script the path that those files have on the nodes"
            )


def _check_size(directory: Path, names: list[str], most_bytes: int) -> None:
    sizes: dict[str, int] = {}
    for name in names:
        sizes[name] = (directory / name).lstat().st_size
    total = sum(sizes.values())
    if total <= most_bytes:
        return
    largest = sorted(names, key=lambda name: -sizes[name])[:3]
    shown = ", ".join(f"{name} ({sizes[name] / 2**20:.0f} MiB)" for name in largest)
    raise ProvisionError(
        f"{directory.absolute()} has {total / 2**20:.0f} MiB in {pluralize(len(names), 'file')}, and "
        f"{most_bytes / 2**20:.0f} MiB may travel: put what the job does not need into .gitignore, or raise "
        f"--max-size; the largest: {shown}"
    )
