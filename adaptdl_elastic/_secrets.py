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
from pathlib import Path

from adaptdl_elastic._private import RuntimeFileError, private_directory

DIRECTORY, FILE = ".secret", "secret"
"""Names of the directory that holds a secret, and of the file in it."""

REDUCER, MEETING, TORCH = "reducer", "meeting", "torch"
"""Purposes of a replica's keys: the handshake of collectives, values in a store, the store keys of torch."""

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


def secret_in(folder: Path) -> bytes:
    """Return the secret that is kept in `folder`, and make one if there is none.

    Processes on several machines that see the same folder get the same secret, also if they ask at the same
    moment: a directory is renamed onto the final name, which fails where there is one already. Checkpoints
    need nothing else of a file system.

    Args:
        folder: An existing folder, which only its owner may write.

    Raises:
        RuntimeFileError: the secret cannot be read or written, or other users could have written it.
    """
    path = folder / DIRECTORY / FILE
    try:
        owner = _check_folder(folder)
        if not os.path.lexists(path):
            # The directory may exist: a message tells the user to remove the file only.
            _make(folder)
        return _read(path, owner)
    except OSError as error:
        raise RuntimeFileError(
            f"{path} cannot be used ({error.strerror}): remove it, or set ADAPTDL_SECRET"
        ) from None


def _check_folder(folder: Path) -> int:
    """Return the owner of `folder`; RuntimeFileError if other users may write there."""
    found = folder.stat()
    others = stat.S_IWOTH if _is_private_group(found.st_gid) else stat.S_IWOTH | stat.S_IWGRP
    if found.st_mode & others:
        raise RuntimeFileError(
            f"other users can write to {folder}, where the job's secret would be kept: chmod go-w {folder}, "
            f"or set the same ADAPTDL_SECRET on all nodes (openssl rand -hex 24)"
        )
    return found.st_uid


def _is_private_group(group: int) -> bool:
    """Return whether a group is the one that many systems make for each user, and has no other members."""
    try:
        found, user = grp.getgrgid(group), pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return False
    return found.gr_name == user and set(found.gr_mem) <= {user}


def _make(folder: Path) -> None:
    """Write a new secret, unless another process writes one first."""
    made = Path(tempfile.mkdtemp(dir=folder, prefix=DIRECTORY))  # mode 0700
    try:
        with os.fdopen(os.open(made / FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
            file.flush()
            os.fsync(file.fileno())
        made.rename(folder / DIRECTORY)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _read(path: Path, owner: int) -> bytes:
    """Return the content of a secret's file, which must belong to this user or to the folder's owner.

    The owner of the folder can replace its checkpoints, too. A network file system may show what root writes
    as another user's, the folder and the file alike.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        found, text = os.fstat(file.fileno()), file.read()
    if found.st_uid not in (os.getuid(), owner) or found.st_mode & 0o077 or len(text) != 64:
        raise RuntimeFileError(
            f"{path} must be a secret of your own that nobody else can read: remove it, or set ADAPTDL_SECRET"
        )
    return text
