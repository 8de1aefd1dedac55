"""The secret that a job's agents share, from which the secret of each run is derived.

It is the first of these that exists:

1. `ADAPTDL_SECRET` in the agent's environment;
2. the one in etcd, where etcd is reached with TLS and a password (or the store is a socket of this user);
3. the one beside the job's checkpoints: all nodes of a job see that place by definition. It is of one user
   and one folder: a copy of the checkpoints, or a folder that was given to another user, gets a new one.

Nodes whose folder of checkpoints is not the same have different secrets. The first agent of a run therefore
prints the command for such nodes, with its secret (`invitation`), and a node that does not have the secret is
refused with a line that names that command (`refusal`).
"""

from __future__ import annotations

import hashlib
import secrets
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from adaptdl_elastic import _secrets
from adaptdl_elastic.protocol.environment import SECRET
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import JobSpec
from adaptdl_elastic.rendezvous.store.base import Store
from adaptdl_elastic.storage import StorageError
from adaptdl_elastic.storage.s3 import S3Storage

_OBJECT = ".adaptdl/secret"  # begins the name of the object beside checkpoints in S3
_NETWORK_FILE_SYSTEMS = ("nfs", "cifs", "smb", "ceph", "lustre", "gpfs", "beegfs", "fuse", "9p", "virtiofs")


@dataclass(frozen=True)
class CommonSecret:
    """A secret that the agents of a job share."""

    value: bytes = field(repr=False)
    # folder of checkpoints, or URL, that keeps it; None: it was given, or is in the store
    place: str | None = None

    def of_run(self, cluster: str, spec: JobSpec) -> str:
        """Return the secret that the replicas of this run inherit."""
        return _secrets.run_secret(self.value, cluster, spec.job, spec.run)

    def link_key(self, cluster: str) -> bytes:
        """Return the key by which agents measure the links between their nodes."""
        return _secrets.derive(self.value, "link", cluster)

    def mark(self, cluster: str, spec: JobSpec) -> str:
        """Return the value of `JobSpec.secret_mark` of a run begun by an agent with this secret."""
        return _secrets.mark(self.of_run(cluster, spec))


def common_secret(
    environ: Mapping[str, str],
    store: Store,
    keys: Keys,
    confidential: bool,
    checkpoint_path: str,
    say: Callable[[str], None] = lambda _: None,
) -> CommonSecret:
    """Return the secret of this node's agents; create one if there is none.

    Args:
        environ: this agent's environment.
        store: the cluster's store.
        keys: the keys of the cluster.
        confidential: whether only users who may write the store can read it, so that it may keep a secret:
            etcd with TLS and a password, or a socket of this user.
        checkpoint_path: existing folder of the job's checkpoints, or their URL.
        say: prints a line for the user if the secret beside the checkpoints is not of this user and folder.

    Raises:
        RuntimeFileError: the folder of checkpoints cannot keep the secret.
        StorageError: the bucket of checkpoints cannot keep the secret.
        StoreError: the store fails.
    """
    given = environ.get(SECRET)
    if given:
        return CommonSecret(given.encode())
    if not confidential:
        return _beside_checkpoints(checkpoint_path, say)
    found = store.get(keys.secret)
    if found is None:
        # has no effect if another agent has written one
        store.compare_and_swap(keys.secret, secrets.token_hex(32), 0)
        found = store.get(keys.secret)
    assert found is not None  # no program deletes this key
    return CommonSecret(found.value.encode())


def _beside_checkpoints(path: str, say: Callable[[str], None]) -> CommonSecret:
    if path.startswith("s3://"):
        proposed = secrets.token_hex(32).encode()
        # a copy of the objects elsewhere has another
        name = f"{_OBJECT}-{hashlib.sha256(path.strip('/').encode()).hexdigest()[:16]}"
        found = S3Storage(path).agree(name, proposed)
        if len(found) != len(proposed):
            raise StorageError(f"the object `{name}` there is no secret: remove it, or set ADAPTDL_SECRET")
        return CommonSecret(found, path)
    folder = path.removeprefix("file://")
    return CommonSecret(_secrets.secret_in(Path(folder), say), folder)


def invitation(
    common: CommonSecret, node: str, command: str, on_terminal: bool, own: Sequence[str] = ()
) -> str | None:
    """Return a line for the user by which nodes join that do not see the folder with the secret.

    Args:
        common: the secret, with which a run begins here.
        node: name of this node.
        command: the command line of this agent.
        on_terminal: whether the line goes to a terminal. Elsewhere it names the file instead of the secret.
        own: options in the command whose values are of this node only.

    Returns:
        The line, or None if the secret is not in a folder of this machine.
    """
    if common.place is None or "://" in common.place or _is_remote(Path(common.place)):
        return None
    token = common.value.decode()
    if not on_terminal:
        # quoted twice: for the shell here, and for the one that ssh starts there
        file = shlex.quote(shlex.quote(str(_secrets.file_in(Path(common.place)))))
        token = f'"$(ssh {node} cat {file})"'
    joins = f"joins, with its own {' and '.join(own)}, by" if own else "joins by"
    return f"a node that does not see {common.place} {joins}: ADAPTDL_SECRET={token} {command}"


def _is_remote(folder: Path) -> bool:
    """Return whether a folder is in a network file system, by the name of the file system's type."""
    real = folder.resolve()
    mounts = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    kind = next((mounts[path] for path in (real, *real.parents) if path in mounts), "")
    return kind.startswith(_NETWORK_FILE_SYSTEMS)


def refusal(common: CommonSecret, spec: JobSpec, cluster: str, node: str) -> str | None:
    """Return why this node cannot take part in a run, and the remedy; None if it has the run's secret.

    Args:
        common: the secret of this node.
        spec: the run.
        cluster: name of the cluster.
        node: name of a node that is part of the run.
    """
    if spec.secret_mark in ("", common.mark(cluster, spec)):
        return None
    if common.place is None:
        return (
            f"job {spec.job!r} runs on {node} with another ADAPTDL_SECRET than this node has, or without: "
            f"set the same on all nodes, or give the command that {node} printed when the run began"
        )
    return (
        f"job {spec.job!r} runs on {node} with a secret that is not in {common.place} here: give all nodes a "
        f"--checkpoint-path that is the same folder for all of them (or s3://…), or set the ADAPTDL_SECRET "
        f"of {node} here, as in the command that {node} printed when the run began: ADAPTDL_SECRET=… "
        f"adaptdl-run …"
    )
