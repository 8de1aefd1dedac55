"""What a user's machine keeps of the clusters that the user may use.

`<config>/<cluster>.toml` says where a cluster is. The directory `<config>/<cluster>/` holds the files by
which its store and services let the user in. `<config>` is `${XDG_CONFIG_HOME:-~/.config}/adaptdl`. The file
is the part of TOML whose lines are `name = value` with a JSON value.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from adaptdl_elastic._whole_file import write_whole
from adaptdl_elastic.protocol.environment import CLUSTER, ETCD
from adaptdl_elastic.rendezvous.schema.keys import check_name
from adaptdl_elastic.rendezvous.store.store_options import StoreOptions, to_environ, variable


class ContextError(Exception):
    """The file of a cluster cannot be used; the message says what to do."""


@dataclass(frozen=True)
class ClusterContext:
    """Where a cluster is, and who the user is there.

    Attributes:
        name: Name of the cluster.
        cluster_id: Random identifier, by which two clusters of the same name are told apart.
        endpoint: Endpoint of its etcd.
        person: Name by which the user signs.
        nodes: Names of the nodes as `ssh` knows them; the first one runs etcd.
        python: Interpreter on the nodes; "": the environment that `cluster up` made there.
        etcd_binary: Path of etcd on the first node; "": found there.
        etcd_port: Port of etcd.
        port_range: Ports that services and jobs may listen on, LOW:HIGH; "": any.
        slots: How many replicas fit on a node; 0: one for each GPU, or one.
        ssh_config: Configuration file for `ssh -F`; "": the user's own.
        store_user: Name by which etcd knows the user.
        left: Nodes outside of the cluster that may have files of it: removed ones, or of an `up` that failed.
    """

    name: str
    cluster_id: str
    endpoint: str = ""
    person: str = ""
    nodes: tuple[str, ...] = ()
    python: str = ""
    etcd_binary: str = ""
    etcd_port: int = 2379
    port_range: str = ""
    slots: int = 0
    ssh_config: str = ""
    store_user: str = "adaptdl"
    left: tuple[str, ...] = ()

    @property
    def directory(self) -> Path:
        """The directory of the cluster's files."""
        return config_directory() / self.name

    @property
    def identity(self) -> Path:
        """The key by which the user signs requests."""
        return self.directory / "identity"

    @property
    def ca(self) -> Path:
        """The certificate of the cluster's authority."""
        return self.directory / "ca.pem"

    def store_environment(self) -> dict[str, str]:
        """Return `ADAPTDL_*` variables that lead to the cluster's store."""
        pem, password = self.directory / "client.pem", self.directory / "password"
        key = self.directory / "client-key.pem"
        given = to_environ(ca=self.ca, cert=pem, key=key, user=self.store_user, password_file=password)
        return {ETCD: self.endpoint, CLUSTER: self.name, **given}

    def store_options(self) -> StoreOptions:
        """Return how the user's commands reach the cluster's store."""
        node = f"{self.nodes[0]}, the" if self.nodes else "the"
        hint = (
            f"it runs on {node} first node of cluster {self.name}. Until adaptdl cluster up starts it again, "
            f"jobs with a replica there stand still, others train on, and nothing starts or moves"
        )
        refused = (
            f"{self.person} may not use cluster {self.name} any more, or has a newer archive: ask an "
            f"administrator, who runs adaptdl cluster grant; the password is"
        )
        timeout = os.environ.get(variable("timeout")) or None
        given = self.store_environment()
        return StoreOptions.from_environment(given, timeout=timeout, hint=hint, hint_if_refused=refused)


def config_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the directory of the contexts."""
    base = environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "adaptdl"


def _path(name: str) -> Path:
    try:
        return config_directory() / f"{check_name('cluster', name)}.toml"
    except ValueError as error:
        raise ContextError(str(error)) from None


def names() -> list[str]:
    """Return the names of all clusters that this machine knows."""
    return sorted(path.stem for path in config_directory().glob("*.toml"))


def load(name: str) -> ClusterContext | None:
    """Return the context of one cluster, or None if this machine does not know it."""
    path = _path(name)
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ContextError(f"{path} cannot be read: {error}") from None
    return parse(text, str(path))


def parse(text: str, where: str) -> ClusterContext:
    """Return the context that a file holds.

    Raises:
        ContextError: it holds something else; the message names the line.
    """
    known = {one.name: one for one in fields(ClusterContext)}
    values: dict[str, Any] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, sign, value = (part.strip() for part in line.partition("="))
        try:
            decoded = json.loads(value)
        except ValueError:
            decoded = None
        if isinstance(decoded, list) and all(isinstance(one, str) for one in decoded):
            decoded = tuple(decoded)
        if name in known and isinstance(known[name].default, str | int | tuple):
            expected: type = type(known[name].default)
        else:
            expected = str
        if not sign or name not in known or type(decoded) is not expected:
            raise ContextError(f"{where}, line {number}: {line.strip()!r} is not what adaptdl writes there")
        values[name] = decoded
    try:
        return ClusterContext(**values)
    except TypeError:
        raise ContextError(f"{where}: the name and the cluster_id are missing") from None


def encode(context: ClusterContext) -> str:
    """Return the content of a context's file.

    Values that are empty are left out: an older version refuses a name that it does not know.
    """
    lines = [f"{name} = {json.dumps(value)}" for name, value in asdict(context).items() if value]
    return "# written by adaptdl cluster up\n" + "\n".join(lines) + "\n"


def save(context: ClusterContext) -> Path:
    """Write the context over an older one, and return the path of its file."""
    path = _path(context.name)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_whole(path, encode(context))
    return path


def forget(name: str) -> None:
    """Delete the context; its directory of files stays."""
    _path(name).unlink(missing_ok=True)


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Keep other commands that change this cluster's context out.

    Raises:
        ContextError: another command changes it now.
    """
    path = _path(name).with_suffix(".lock")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ContextError(
                f"another adaptdl cluster command changes cluster {name!r} here: wait until it ends"
            ) from None
        yield


def choose(name: str | None) -> ClusterContext:
    """Return the context of this name; without a name that of the only cluster.

    Raises:
        ContextError: there is no such cluster, or several.
    """
    if name is not None:
        found = load(name)
        if found is None:
            known = f"; known are: {', '.join(names())}" if names() else ""
            raise ContextError(f"this machine knows no cluster {name!r}{known}: adaptdl cluster up NODE...")
        return found
    known_names = names()
    if len(known_names) == 1:
        return choose(known_names[0])
    if not known_names:
        raise ContextError("this machine knows no cluster: adaptdl cluster up NODE...")
    raise ContextError(
        f"this machine knows the clusters {', '.join(known_names)}: say which with --cluster NAME"
    )
