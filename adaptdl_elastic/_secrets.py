"""Derive the secret of a run, and keys from it.

A run has one secret, which only its agents and replicas know. The agents derive it from a secret that they
share:

1. `ADAPTDL_SECRET` of their environment;
2. else the one in etcd, where etcd is reached with TLS and a password;
3. else the one in a file of this user on this machine (`machine_secret`), if all nodes are on one machine.

A replica inherits the secret of its run as `ADAPTDL_SECRET`. Every key is an HMAC, made with the secret, over
the key's purpose (`derive`). No secret and no key is written to a place that other users can read.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import tempfile
from pathlib import Path

from adaptdl_elastic._private import RuntimeFileError, private_directory

FILE = "secret"
"""Name of the file in the private directory that holds this machine's secret."""

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


def machine_secret(directory: Path | None = None) -> bytes:
    """Return the secret of this user on this machine, and make one if there is none.

    Args:
        directory: Directory of the secret's file; None: the runtime directory.

    Raises:
        RuntimeFileError: the directory or the file cannot be used, or another user could have written it.
    """
    path = private_directory(directory) / FILE
    try:
        if not path.exists():
            _make(path)
        return _read(path)
    except OSError as error:
        raise RuntimeFileError(
            f"{path} cannot be used ({error.strerror}): remove it, or set ADAPTDL_SECRET"
        ) from None


def _make(path: Path) -> None:
    """Write a new secret to `path`, unless another process writes one first."""
    number, name = tempfile.mkstemp(dir=path.parent, prefix=".")  # mode 0600
    try:
        with os.fdopen(number, "w") as file:
            file.write(secrets.token_hex(32))
        os.link(name, path)
    except FileExistsError:
        pass
    finally:
        Path(name).unlink()


def _read(path: Path) -> bytes:
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        found, text = os.fstat(file.fileno()), file.read()
    if found.st_uid != os.getuid() or found.st_mode & 0o077 or len(text) != 64:
        raise RuntimeFileError(
            f"{path} must be a secret of your own that nobody else can read: remove it, or set ADAPTDL_SECRET"
        )
    return text
