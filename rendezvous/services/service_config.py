"""The files of a node service: written by `adaptdl cluster up` over ssh, read by the service.

They are below one directory of the node's user, `${XDG_DATA_HOME:-~/.local/share}/adaptdl/<cluster>`:

service.json                ServiceConfig
pki/{ca,node,node-key}.pem  certificate of the cluster's authority, of this node, and its key
password                    password of the etcd user `adaptdl`
secret                      what the secrets of jobs are derived from; the same on all nodes
root-password               of the etcd user `root`; only on the node that runs etcd
people.json                 who may use the cluster
blobs/                      archives by their SHA-256
work/<job>[@<digest>]/      an unpacked working directory
logs/<job>/output.log       what the agent and the replicas of a job have written on this node
logs/<job>/of/<node>/       the same of another node, as far as it was copied
checkpoints/<job>/          checkpoints of a job that has no other place for them
state/                      what the service remembers
environments/               the packages of this program, and over them each version that a job runs
current                     link to the environment of the service
"""

from __future__ import annotations

import hmac
from pathlib import Path

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from adaptdl_elastic.rendezvous.schema.records import MalformedRecordError, decode, encode
from adaptdl_elastic.rendezvous.store.store_options import StoreOptions, to_environ

_CONFIG = ConfigDict(extra="ignore", strict=False, allow_inf_nan=False)

ETCD_USER = "adaptdl"
NODE_SUBJECT = "node:"
"""Beginning of the organization in a node's certificate."""


class ServiceConfigError(Exception):
    """The directory of a node service cannot be used; the message says why."""


@dataclass(frozen=True, config=_CONFIG)
class EtcdConfig:
    """The etcd that a node service runs."""

    binary: str
    port: int


@dataclass(frozen=True, config=_CONFIG)
class ServiceConfig:
    """What a node service is told.

    Attributes:
        cluster: Name of the cluster.
        cluster_id: Identifier of the cluster.
        node: Name of this node.
        host: Address at which other nodes reach it, and at which it listens.
        endpoint: Endpoint of the cluster's etcd.
        slots: How many replicas fit; 0: one for each GPU, or one.
        port_range: Ports to listen on, LOW:HIGH; "": any free one.
        etcd: The etcd that runs here; None: it runs on another node.
    """

    cluster: str
    cluster_id: str
    node: str
    host: str
    endpoint: str
    slots: int = 0
    port_range: str = ""
    etcd: EtcdConfig | None = None


class ServiceDirectory:
    """The files of a node service, below one directory."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()

    def read_config(self) -> ServiceConfig:
        """Return the content of `service.json`; ServiceConfigError if it cannot be used."""
        path = self.path / "service.json"
        try:
            return decode(ServiceConfig, path.read_text(), str(path))
        except (OSError, UnicodeDecodeError, MalformedRecordError) as error:
            raise ServiceConfigError(
                f"{path} cannot be used ({error}): run adaptdl cluster up again"
            ) from None

    @property
    def people(self) -> Path:
        """The list of people."""
        return self.path / "people.json"

    @property
    def blobs(self) -> Path:
        """The directory of archives."""
        return self.path / "blobs"

    @property
    def state(self) -> Path:
        """The directory of what the service remembers."""
        return self.path / "state"

    @property
    def environments(self) -> Path:
        """The directory of environments: `packages-<digest>`, and `<digest>` for each version."""
        return self.path / "environments"

    @property
    def ca(self) -> Path:
        """The certificate of the cluster's authority."""
        return self.path / "pki" / "ca.pem"

    @property
    def cert(self) -> Path:
        """The certificate of this node."""
        return self.path / "pki" / "node.pem"

    @property
    def key(self) -> Path:
        """The key of this node's certificate."""
        return self.path / "pki" / "node-key.pem"

    @property
    def service_log(self) -> Path:
        """What the service itself writes."""
        return self.path / "service.log"

    def work(self, folder: str) -> Path:
        """Return the directory that a job's replicas run in, by `Submission.folder`."""
        return self.path / "work" / folder

    def log(self, job: str, of: str = "") -> Path:
        """Return the file of a job's output on this node, or of the copy of another one's."""
        return self.path.joinpath("logs", job, *(["of", of] if of else []), "output.log")

    def checkpoints(self, job: str) -> Path:
        """Return the directory of a job's checkpoints on this node."""
        return self.path / "checkpoints" / job

    def job_secret(self, job: str) -> str:
        """Return what the secrets of a job's runs are derived from: the same on every node.

        Raises:
            ServiceConfigError: the node has no secret.
        """
        path = self.path / "secret"
        try:
            secret = path.read_bytes().strip()
        except OSError as error:
            raise ServiceConfigError(
                f"{path} cannot be used ({error.strerror}): run adaptdl cluster up again"
            ) from None
        return hmac.new(secret, f"adaptdl job {job}".encode(), "sha256").hexdigest()

    def store_environment(self) -> dict[str, str]:
        """Return `ADAPTDL_ETCD_*` variables that lead to the cluster's store."""
        return to_environ(
            ca=self.ca, cert=self.cert, key=self.key, user=ETCD_USER, password_file=self.path / "password"
        )

    def store_options(self, user: str = ETCD_USER) -> StoreOptions:
        """Return how the service reaches the store."""
        name = "password" if user == ETCD_USER else "root-password"
        return StoreOptions(
            ca=self.ca, cert=self.cert, key=self.key, user=user, password_file=self.path / name
        )


def encode_config(config: ServiceConfig) -> str:
    """Return the content of `service.json`."""
    return encode(config) + "\n"
