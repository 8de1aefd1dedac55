"""A node service's port with real TLS, and people who sign with real keys."""

from __future__ import annotations

import atexit
import functools
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adaptdl_elastic.agent.service.blobs import Blobs
from adaptdl_elastic.agent.service.http_server import Served, ServicePort
from adaptdl_elastic.autoscaler.provisioning.credentials import Credentials
from adaptdl_elastic.autoscaler.web.actions import Actions
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.submissions import Cancellation, Resumption, ServiceRecord, Submission
from adaptdl_elastic.rendezvous.services import signatures
from adaptdl_elastic.rendezvous.services.context import ClusterContext
from adaptdl_elastic.rendezvous.services.service_client import (
    ServiceClient,
    ServiceRefusedError,
    Signer,
    node_context,
    person_context,
)
from adaptdl_elastic.rendezvous.services.service_config import ServiceConfig, ServiceDirectory
from adaptdl_elastic.rendezvous.services.signatures import Person
from adaptdl_elastic.rendezvous.services.submitted import sign_record
from adaptdl_elastic.rendezvous.store.memory import MemoryStore

ID = "cluster-id"
Record = Submission | Cancellation | Resumption


@functools.cache
def _made_once() -> Path:
    """Make a cluster's certificates, the keys of its people, and the files of its node: a second of CPU."""
    folder = Path(tempfile.mkdtemp(prefix="adaptdl-world-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
        credentials = Credentials(ClusterContext("lab", ID, person="admin"))
        credentials.prepare()
        for name in ("alice", "stranger"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(command, check=True)
        public = signatures.public_key((folder / "alice.pub").read_text())
        credentials.write_people({**credentials.people(), "alice": Person("alice", public)})
        for name, data in credentials.node_files("n1", "127.0.0.1").items():
            path = folder / "node" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    return folder


class World:
    """A node service's port, and three people: an administrator, a user, and a stranger with a key."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        shutil.copytree(_made_once(), folder, dirs_exist_ok=True)
        monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
        self.context = ClusterContext("lab", ID, person="admin")
        self.credentials = Credentials(self.context)
        self.keys = {name: folder / name for name in ("alice", "stranger")}
        self.keys["admin"] = self.context.identity
        self.directory = ServiceDirectory(folder / "node")
        listening = socket.create_server(("127.0.0.1", 0))
        self.record = ServiceRecord("n1", "127.0.0.1", listening.getsockname()[1], 1)
        served = Served(
            ServiceConfig("lab", ID, "n1", "127.0.0.1", "https://127.0.0.1:1"),
            self.directory,
            Blobs(self.directory.blobs),
            {"hers": "alice", "other": "admin"}.get,
            {"hers": "hers@1", "other": "other"}.get,
            lambda: ["hers"],
            lambda: {"node": "n1", "unfinished": 2, "agents": ["hers"]},
        )
        self.port = ServicePort(listening, served)
        self.port.start()

    def people(self) -> signatures.People:
        return self.credentials.people()

    def client(self, person: str, key: str = "") -> ServiceClient:
        return ServiceClient(person_context(self.context.ca), Signer(ID, person, self.keys[key or person]))

    def ask(self, person: str, path: str = "/v1/status", **values: object) -> Any:
        return self.client(person).get_json(self.record, path, **values)

    def page(self, store: MemoryStore, person: str) -> Actions:
        return Actions(store.client, Keys("lab"), replace(self.context, person=person), self.client(person))

    def put(self, store: MemoryStore, key: str, record: Record, person: str) -> None:
        """Sign a record as a person does, and put it into the store."""
        store.put(key, sign_record(ID, record, person, functools.partial(signatures.sign, self.keys[person])))

    def with_bob(self) -> signatures.People:
        """Return the people of the cluster with the stranger, who is called bob, as one of them."""
        self.keys["bob"] = self.keys["stranger"]
        public = signatures.public_key(self.keys["bob"].with_suffix(".pub").read_text())
        return {**self.people(), "bob": Person("bob", public)}

    def node(self) -> ServiceClient:
        return ServiceClient(node_context(self.directory.ca, self.directory.cert, self.directory.key))


@contextmanager
def running_world(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    # on a busy machine either side may be slow to shake hands
    monkeypatch.setattr("adaptdl_elastic.rendezvous.services.service_client.CONNECT_SECONDS", 100.0)
    monkeypatch.setattr("adaptdl_elastic.agent.service.http_server.UNKNOWN_SECONDS", 100.0)
    made = World(folder, monkeypatch)
    yield made
    made.port.close()


def refused(action: Callable[[], object], status: int, message: str) -> None:
    with pytest.raises(ServiceRefusedError, match=message) as found:
        action()
    assert found.value.status == status
