"""The port of a node service: who may ask it for what. Real TLS, real signatures."""

from __future__ import annotations

import hashlib
import io
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from adaptdl_elastic.agent.service.blobs import Blobs
from adaptdl_elastic.agent.service.checkpoint_copies import KEPT, copy
from adaptdl_elastic.agent.service.http_server import Served, ServicePort, read_lines
from adaptdl_elastic.agent.service.lifecycle import unit_text
from adaptdl_elastic.autoscaler.commands.cluster_setup import client_of
from adaptdl_elastic.autoscaler.provisioning.credentials import Credentials
from adaptdl_elastic.autoscaler.provisioning.ssh import ProvisionError
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import encode
from adaptdl_elastic.rendezvous.schema.submissions import Cancellation, ServiceRecord, Signed, Submission
from adaptdl_elastic.rendezvous.services import context as contexts
from adaptdl_elastic.rendezvous.services import signatures
from adaptdl_elastic.rendezvous.services.context import ClusterContext
from adaptdl_elastic.rendezvous.services.service_client import (
    ServiceClient,
    ServiceError,
    ServiceRefusedError,
    Signer,
    node_context,
    person_context,
)
from adaptdl_elastic.rendezvous.services.service_config import ServiceConfig, ServiceDirectory
from adaptdl_elastic.rendezvous.services.signatures import Person, SignatureError, UncheckedError
from adaptdl_elastic.rendezvous.services.submitted import SubmissionReader, sign_record, verify_record
from adaptdl_elastic.rendezvous.store.memory import MemoryStore

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        shutil.which("ssh-keygen") is None or shutil.which("openssl") is None,
        reason="needs ssh-keygen and openssl",
    ),
]

DATA = b"an archive"
DIGEST = hashlib.sha256(DATA).hexdigest()
ID = "cluster-id"


class World:
    """A node service's port, and three people: an administrator, a user, and a stranger with a key."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
        self.context = ClusterContext("lab", ID, person="admin")
        self.credentials = Credentials(self.context)
        self.credentials.prepare()
        self.keys = {"admin": self.context.identity}
        people = self.credentials.people()
        for name in ("alice", "stranger"):
            key = folder / name
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
            self.keys[name] = key
        public = signatures.public_key((folder / "alice.pub").read_text())
        self.credentials.write_people({**people, "alice": Person("alice", public)})
        self.directory = ServiceDirectory(folder / "node")
        for name, data in self.credentials.node_files("n1", "127.0.0.1").items():
            path = self.directory.path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        listening = socket.create_server(("127.0.0.1", 0))
        self.record = ServiceRecord("n1", "127.0.0.1", listening.getsockname()[1], 1)
        served = Served(
            ServiceConfig("lab", ID, "n1", "127.0.0.1", "https://127.0.0.1:1"),
            self.directory,
            Blobs(self.directory.blobs),
            {"hers": "alice", "other": "admin"}.get,
            lambda: ["hers"],
            lambda: {"node": "n1"},
        )
        self.port = ServicePort(listening, served)
        self.port.start()

    def people(self) -> signatures.People:
        return self.credentials.people()

    def client(self, person: str, key: str = "") -> ServiceClient:
        return ServiceClient(person_context(self.context.ca), Signer(ID, person, self.keys[key or person]))

    def node(self) -> ServiceClient:
        return ServiceClient(node_context(self.directory.ca, self.directory.cert, self.directory.key))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World(tmp_path, monkeypatch)
    yield made
    made.port.close()


def refused(action: Callable[[], object], status: int, message: str) -> None:
    with pytest.raises(ServiceRefusedError, match=message) as found:
        action()
    assert found.value.status == status


def test_people_put_archives_and_only_nodes_get_them(world: World) -> None:
    alice, received = world.client("alice"), bytearray()
    assert not alice.has_blob(world.record, DIGEST)
    alice.put_blob(world.record, DIGEST, io.BytesIO(DATA), len(DATA))
    assert alice.has_blob(world.record, DIGEST)
    refused(
        lambda: alice.download(world.record, f"/v1/blobs/{DIGEST}", received.extend),
        403,
        "only nodes of the cluster",
    )
    world.node().download(world.record, f"/v1/blobs/{DIGEST}", received.extend)
    assert bytes(received) == DATA


def test_an_archive_with_another_content_than_announced_is_refused(world: World) -> None:
    refused(
        lambda: world.client("alice").put_blob(world.record, "0" * 64, io.BytesIO(DATA), len(DATA)),
        400,
        "is not the one that was announced",
    )


def test_a_checkpoint_is_copied_by_nodes_only(world: World, tmp_path: Path) -> None:
    ids = [f"0000000{number}-g00000-abcd" for number in range(1, 5)]
    theirs, mine = world.directory.checkpoints("hers"), tmp_path / "mine"
    for one in ids:
        (theirs / one).mkdir(parents=True)
        for name in ("manifest.json", "model%2E.state"):
            (theirs / one / name).write_text(f"{one} {name}")
    for one in (*ids, ids[-1]):
        if not (mine / one).exists():
            copy(world.node(), world.record, mine, "hers", one)
    assert sorted(path.name for path in mine.iterdir()) == ids[-KEPT:]
    assert (mine / ids[-1] / "model%2E.state").read_text() == f"{ids[-1]} model%2E.state"
    gone = "00000009-g00000-abcd"
    with pytest.raises(ServiceRefusedError, match="not on this node"):
        copy(world.node(), world.record, mine, "hers", gone)
    assert sorted(path.name for path in mine.iterdir()) == ids[-KEPT:]
    for path in (ids[0], f"{ids[0]}/manifest.json"):
        refused(
            lambda path=path: world.client("alice").get_json(world.record, f"/v1/checkpoints/hers/{path}"),
            403,
            "only nodes of the cluster",
        )
    for path in ("hers/..", f"hers/{ids[0]}/..%2Fx", f"..%2F/{ids[0]}"):
        with pytest.raises(ServiceRefusedError):
            world.node().get_json(world.record, f"/v1/checkpoints/{path}")


def test_output_is_for_the_owner_and_administrators(world: World) -> None:
    log = world.directory.log("hers")
    log.parent.mkdir(parents=True)
    log.write_text("[rank0]: one\n[rank0]: two\nhalf")
    for person in ("alice", "admin"):
        said = world.client(person).get_json(world.record, "/v1/logs/hers", after=0)
        assert said == {"offset": 26, "text": "[rank0]: one\n[rank0]: two\n", "running": True}
    alice = world.client("alice")
    assert alice.get_json(world.record, "/v1/logs/hers", after=26)["text"] == ""
    refused(lambda: alice.get_json(world.record, "/v1/logs/other"), 403, "belongs to admin")
    refused(lambda: alice.get_json(world.record, "/v1/logs/gone"), 404, "no valid submission")
    refused(lambda: alice.get_json(world.record, "/v1/logs/..%2Fx"), 400, "cannot be used")
    refused(lambda: alice.get_json(world.record, "/v2/logs"), 404, "does not serve that")


def test_strangers_and_impostors_are_refused(world: World) -> None:
    unsigned = ServiceClient(person_context(world.context.ca))
    refused(lambda: unsigned.get_json(world.record, "/v1/status"), 401, "is not signed")
    stranger = world.client("stranger")
    refused(lambda: stranger.get_json(world.record, "/v1/status"), 401, "may not use this cluster")
    impostor = world.client("alice", key="stranger")
    refused(lambda: impostor.get_json(world.record, "/v1/status"), 401, "not one of alice's key")
    assert world.client("alice").get_json(world.record, "/v1/status") == {"node": "n1"}
    people = {name: one for name, one in world.people().items() if name != "alice"}
    (world.directory.people).write_text(signatures.encode_people(people))  # as adaptdl cluster revoke does
    refused(
        lambda: world.client("alice").get_json(world.record, "/v1/status"), 401, "may not use this cluster"
    )


def test_a_signed_request_is_good_at_one_node_only(world: World) -> None:
    elsewhere = replace(world.record, node="n2")
    refused(lambda: world.client("alice").get_json(elsewhere, "/v1/status"), 401, "not one of alice's key")


def test_a_server_that_is_not_of_the_cluster_is_not_asked(world: World, tmp_path: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # trusts nobody
    client = ServiceClient(context, Signer(ID, "alice", world.keys["alice"]))
    with pytest.raises(ServiceError, match="certificate verify failed"):
        client.get_json(world.record, "/v1/status")
    with socket.create_server(("127.0.0.1", 0)) as unused:
        gone = replace(world.record, port=unused.getsockname()[1])
    with pytest.raises(ServiceError, match=r"the service of n1 at .* does not answer"):
        world.client("alice").get_json(gone, "/v1/status")


def test_a_submission_counts_only_with_the_signature_of_its_owner(world: World) -> None:
    people = world.people()
    hers = Submission("job", "alice", "script", ("train.py",), "0" * 64)

    def signed(record: Submission | Cancellation, person: str, cluster: str = ID) -> str:
        return sign_record(cluster, record, person, lambda text: signatures.sign(world.keys[person], text))

    good = signed(hers, "alice")
    assert verify_record(ID, people, Submission, good, "/x/job") == hers
    for value, message in {
        signed(hers, "stranger"): "may not use this cluster",
        signed(hers, "admin"): "signed by admin for alice",
        signed(hers, "alice", "other-cluster"): "not one of alice's key",
        good.replace("train.py", "evil.py"): "not one of alice's key",
        encode(Signed(encode(hers), "alice", "!")): "damaged",
    }.items():
        with pytest.raises(SignatureError, match=message):
            verify_record(ID, people, Submission, value, "/x/job")
    with pytest.raises(SignatureError, match="was signed for job 'job'"):
        verify_record(ID, people, Submission, good, "/x/other")
    with pytest.raises(SignatureError, match="not one of alice's key"):
        verify_record(ID, people, Cancellation, good, "/x/job")


def test_only_the_owner_or_an_administrator_cancels(world: World) -> None:
    keys, store = Keys("lab"), MemoryStore()
    people = {
        **world.people(),
        "bob": Person("bob", signatures.public_key(world.keys["stranger"].with_suffix(".pub").read_text())),
    }
    world.keys["bob"] = world.keys["stranger"]

    def put(key: str, record: Submission | Cancellation, person: str) -> None:
        store.put(
            key, sign_record(ID, record, person, lambda text: signatures.sign(world.keys[person], text))
        )

    put(keys.submission("job"), Submission("job", "alice", "script", ("train.py",), "0" * 64), "alice")
    reader = SubmissionReader(store, keys, ID)
    for person, counts in (("bob", False), ("alice", True), ("admin", True)):
        put(keys.cancellation("job"), Cancellation("job", person), person)
        found = reader.read(people)
        assert found.requests[0].cancelled_by == (person if counts else None)
        assert dict(found.refused) == (
            {} if counts else {"job": "bob may not cancel it: it belongs to alice"}
        )
    del people["alice"]
    assert reader.read(people).requests == ()


def test_a_signature_that_cannot_be_checked_now_is_checked_again(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, store, people = Keys("lab"), MemoryStore(), world.people()
    hers = Submission("job", "alice", "script", ("train.py",), "0" * 64)
    signed = sign_record(ID, hers, "alice", lambda text: signatures.sign(world.keys["alice"], text))
    store.put(keys.submission("job"), signed)
    reader = SubmissionReader(store, keys, ID)
    with monkeypatch.context() as patched:
        patched.setenv("PATH", str(tmp_path))  # no ssh-keygen
        with pytest.raises(UncheckedError, match="ssh-keygen is not installed"):
            reader.read(people)
    assert [one.submission for one in reader.read(people).requests] == [hers]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    directory = ServiceDirectory(tmp_path / "a 50% lab")
    directory.path.mkdir()
    unit = tmp_path / "adaptdl-lab.service"
    unit.write_text(unit_text(directory))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    assert (done.returncode, str(unit) in done.stderr) == (0, False), done.stderr


def test_another_person_gets_what_is_needed_and_no_authority(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contexts.save(replace(world.context, endpoint="https://h:1", nodes=("n1",)))
    files = Credentials(contexts.choose("lab")).person_files("alice")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "hers"))
    for name, data in files.items():
        path = contexts.config_directory() / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    hers = contexts.choose(None)
    assert (hers.person, hers.endpoint, hers.cluster_id) == ("alice", "https://h:1", ID)
    shutil.copy(world.keys["alice"], hers.identity)
    assert client_of(hers).get_json(world.record, "/v1/status") == {"node": "n1"}
    with pytest.raises(ProvisionError, match="brought up by another user, who alone adds nodes"):
        Credentials(hers).prepare()


def test_credentials_are_kept_and_renewed_for_another_address(world: World) -> None:
    before = world.credentials.node_files("n1", "127.0.0.1")
    world.credentials.prepare()
    assert world.credentials.node_files("n1", "127.0.0.1") == before
    after = world.credentials.node_files("n1", "10.0.0.9")
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"pki/node.pem", "pki/node-key.pem"}
    for path in world.context.directory.iterdir():
        assert path.stat().st_mode & 0o077 == 0 or path.suffix in (".pub", ".json", ".pem"), path


def test_output_is_read_in_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adaptdl_elastic.agent.service.http_server._MOST_OUTPUT_BYTES", 8)
    path = tmp_path / "log"
    assert read_lines(path, 0) == b""
    path.write_bytes(b"ab\ncd\nefghijklmn\n")
    assert [read_lines(path, at) for at in (0, 6, 14, 17)] == [b"ab\ncd\n", b"efghijkl", b"mn\n", b""]
    with pytest.raises(ValueError, match="negative"):
        read_lines(path, -1)
