"""Derive the secret of a run, and keys from it.

A run has one secret, which only its agents and replicas know. The agents derive it from a secret that they
share. `agent.cluster.run_secret` lists where that secret may be. A file (`secret_in`) is one of these places.

A replica inherits the secret of its run as `ADAPTDL_SECRET`. Every key is an HMAC, made with the secret, over
the key's purpose (`derive`). No secret and no key is written to a place that other users can read.
"""

from __future__ import annotations

import errno
import grp
import hashlib
import hmac
import os
import pwd
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from adaptdl_elastic._private import RuntimeFileError, private_directory
from adaptdl_elastic._whole_file import open_regular, write_whole

DIRECTORY, FILE = ".secret", "secret"
"""Names of the directory that holds the secrets of a folder, and of the file with one."""

REDUCER, MEETING, TORCH = "reducer", "meeting", "torch"
"""Purposes of a replica's keys: the handshake of collectives, values in a store, the store keys of torch."""

_BEGUN = ".secret-"  # begins the names of directories in which a secret is being written
_DIGITS = 64  # of a secret
_MARK_BYTES = 8  # length of a mark before hex encoding


def derive(secret: bytes, *words: str | int) -> bytes:
    """Return a key of 32 bytes, derived from `secret` for `words`. Different words give unrelated keys."""
    parts = [str(word).encode() for word in words]
    message = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.new(secret, message, hashlib.sha256).digest()


def run_secret(common: bytes, cluster: str, job: str, run: str) -> str:
    """Return the secret of one run, which its replicas inherit as `ADAPTDL_SECRET`.

    Args:
        common: Secret that the agents share.
        cluster: Name of the cluster.
        job: Name of the job.
        run: Identifier of the run.
    """
    return derive(common, "run", cluster, job, run).hex()


def mark(secret: str) -> str:
    """Return a text by which agents compare their secrets without revealing them."""
    return derive(secret.encode(), "mark")[:_MARK_BYTES].hex()


def generation_key(secret: bytes | None, purpose: str, job: str, generation: int) -> bytes | None:
    """Return a replica's key for `purpose` in one generation; None if there is no secret."""
    return None if secret is None else derive(secret, purpose, job, generation)


def machine_secret() -> bytes:
    """Return the secret of this user on this machine, and make one if there is none.

    Raises:
        RuntimeFileError: the directory or the file cannot be used, or another user could have written it.
    """
    return secret_in(private_directory())


def secret_in(folder: Path, say: Callable[[str], None] = lambda _: None) -> bytes:
    """Return the secret that is kept in `folder`, and make one if there is none of this user and folder.

    Processes on several machines that see the same folder get the same secret, also if they ask at the same
    moment: a directory is renamed onto the final name, which fails where there is one already. Checkpoints
    need nothing else of a file system.

    Args:
        folder: An existing folder, which only its owner may write.
        say: Prints a line for the user if the folder is a copy, or was another user's.

    Raises:
        RuntimeFileError: the secret cannot be read or written, or other users could have written it.
    """
    path = folder / DIRECTORY
    try:
        _check_folder(folder)
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        found = path.lstat()
        _check_owner(found, path, stat.S_ISDIR(found.st_mode))
        path = file_in(folder)
        own = path.parent
        others = [one for one in own.parent.iterdir() if one != own and not one.name.startswith(_BEGUN)]
        # The directory may exist: a message tells the user to remove the file only.
        if not os.path.lexists(path) and _make(own) and others:
            say(
                f"the secret in {folder / DIRECTORY} is not of this user and folder (a copy, or an earlier "
                f"version's): this job has a new one"
            )
        return _read(path)
    except OSError as error:
        raise RuntimeFileError(
            f"{path} cannot be used ({error.strerror}): remove it, or set ADAPTDL_SECRET"
        ) from None


def file_in(folder: Path) -> Path:
    """Return the file of this user's secret in `folder`; a copy of it, or a folder given away, has another.

    The inode of the directory of secrets is the same on all nodes of most shared file systems.
    """
    return folder / DIRECTORY / f"{os.getuid()}-{(folder / DIRECTORY).lstat().st_ino}" / FILE


def _check_folder(folder: Path) -> None:
    """Raise RuntimeFileError if other users may write in `folder`."""
    found = folder.stat()
    others = stat.S_IWOTH if _is_private_group(found.st_gid) else stat.S_IWOTH | stat.S_IWGRP
    if found.st_mode & others:
        raise RuntimeFileError(
            f"other users can write to {folder}, where the job's secret would be kept: chmod go-w {folder}, "
            f"or set the same ADAPTDL_SECRET on all nodes (openssl rand -hex 24)"
        )


def _is_private_group(group: int) -> bool:
    """Return whether a group is the one that many systems make for each user, and has no other members."""
    try:
        found, user = grp.getgrgid(group), pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return False
    return found.gr_name == user and set(found.gr_mem) <= {user}


def _make(place: Path) -> bool:
    """Write a new secret, unless another process writes one first; return whether this one has."""
    made = Path(tempfile.mkdtemp(dir=place.parent, prefix=_BEGUN))  # mode 0700
    try:
        write_whole(made / FILE, secrets.token_hex(_DIGITS // 2))
        made.rename(place)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        return False
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return True


def _read(path: Path) -> bytes:
    """Return the content of a secret's file, which must belong to this user."""
    with open_regular(path) as file:
        found, text = os.fstat(file.fileno()), file.read()
    # what is too short or too long is refused as what another user has written is
    _check_owner(found, path, len(text) == _DIGITS)
    return text


def _check_owner(found: os.stat_result, path: Path, fits: bool) -> None:
    """Raise RuntimeFileError unless something fits, and is of this user and closed to others.

    A network file system may show what root writes as another user's: what is made there now tells as whose.
    """
    own = found.st_uid == os.getuid()
    if not own:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=_BEGUN) as made:
            own = found.st_uid == Path(made).stat().st_uid
    if not own or not fits or found.st_mode & 0o077:
        raise RuntimeFileError(
            f"{path} must be a secret of your own that nobody else can read: remove it, or set ADAPTDL_SECRET"
        )
