"""The port of a node service: who may ask it for what. Real TLS, real signatures."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from polling import until
from prometheus_client.parser import text_string_to_metric_families
from service_world import ID, World, refused, running_world
from submitted_jobs import submission_by

from adaptdl_elastic.agent.service import checkpoint_copies
from adaptdl_elastic.agent.service.checkpoint_copies import KEPT, CheckpointCopies, OutputCopies, copy
from adaptdl_elastic.agent.service.http_server import ROUTES, Who, line_before_end, read_lines
from adaptdl_elastic.agent.service.lifecycle import unit_text
from adaptdl_elastic.autoscaler.commands import job_requests
from adaptdl_elastic.autoscaler.commands.cluster_setup import client_of
from adaptdl_elastic.autoscaler.commands.job_requests import RequestError
from adaptdl_elastic.autoscaler.provisioning.credentials import Credentials
from adaptdl_elastic.autoscaler.provisioning.ssh import ProvisionError
from adaptdl_elastic.autoscaler.web.actions import Actions
from adaptdl_elastic.rendezvous.schema import records
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import encode
from adaptdl_elastic.rendezvous.schema.submissions import (
    Cancellation,
    Resumption,
    ServiceRecord,
    Signed,
    Submission,
)
from adaptdl_elastic.rendezvous.services import context as contexts
from adaptdl_elastic.rendezvous.services import service_client, signatures
from adaptdl_elastic.rendezvous.services.admission import JobState, Request
from adaptdl_elastic.rendezvous.services.service_client import (
    ServiceClient,
    ServiceError,
    ServiceRefusedError,
    Signer,
    person_context,
)
from adaptdl_elastic.rendezvous.services.service_config import ServiceDirectory
from adaptdl_elastic.rendezvous.services.signatures import People, Person, SignatureError, UncheckedError
from adaptdl_elastic.rendezvous.services.submitted import (
    SubmissionReader,
    Submitted,
    sign_record,
    verify_record,
)
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
STATUS = {"node": "n1", "unfinished": 2, "agents": ["hers"], "admin": False, "most_weight": 1.0}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with running_world(tmp_path, monkeypatch) as made:
        yield made


def test_every_route_is_for_those_of_whom_its_list_says_so(world: World) -> None:
    unsigned, alice = ServiceClient(person_context(world.context.ca)), world.client("alice")
    with_query = dict.fromkeys(Who, "belongs to admin") | {Who.NODES: "only nodes", Who.ANYBODY: None}
    for route in ROUTES:
        path = "/" + route.path.replace("*", "other")
        for client, status, why in ((unsigned, 401, "not signed"), (alice, 403, with_query.get(route.who))):
            if why is not None and route.method == "GET":
                refused(partial(client.get_json, world.record, path), status, why)
    assert len({(route.method, route.path) for route in ROUTES}) == len(ROUTES)


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
            lambda path=path: world.ask("alice", f"/v1/checkpoints/hers/{path}"),
            403,
            "only nodes of the cluster",
        )
    for path in ("hers/..", f"hers/{ids[0]}/..%2Fx", f"..%2F/{ids[0]}"):
        with pytest.raises(ServiceRefusedError):
            world.node().get_json(world.record, f"/v1/checkpoints/{path}")


def test_a_checkpoint_that_cannot_be_copied_is_a_problem_and_tried_ever_less_often(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, tries, full = [0.0], list[float](), OSError(errno.ENOSPC, "No space left on device")
    copies = CheckpointCopies(world.directory, world.node(), lambda: now[0])

    def fail(*_: object) -> None:
        tries.append(now[0])
        raise full

    def look_until(end: float) -> None:
        while now[0] < end:
            copies.look({"hers": "00000001-g00000-abcd"}, [world.record])
            if copies.thread is not None:
                copies.thread.join()
            now[0] += 0.5

    monkeypatch.setattr(checkpoint_copies, "copy", fail)
    look_until(600)
    assert copies.problems == {"hers": "its checkpoints are not copied to this node: No space left on device"}
    assert tries[:6] == [0.0, 0.5, 1.5, 3.5, 7.5, 15.5]
    assert len(tries) < 20
    monkeypatch.setattr(checkpoint_copies, "copy", lambda *_: None)
    look_until(700)
    assert copies.problems == {}


def test_the_end_of_a_nodes_output_is_kept_by_another_one_when_it_has_gone(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_copies, "MOST_OUTPUT_BYTES", 40)
    log, mine = world.directory.log("hers"), ServiceDirectory(tmp_path / "mine")
    log.parent.mkdir(parents=True)
    copies, kept, whole = OutputCopies(mine, world.node()), mine.log("hers", of="n1"), ""
    for number in range(10):
        whole += f"line {number}\n"
        log.write_text(f"{whole}half")
        copies.look(world.record)
        assert whole.endswith(kept.read_text())
        assert min(len(whole), 20) <= kept.stat().st_size <= 40
    # a service that has started again copies anew
    copies = OutputCopies(mine, world.node())
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint_copies, "write_whole", Mock(side_effect=OSError(errno.ENOSPC)))
        copies.look(world.record)
    assert whole.endswith(kept.read_text())
    for gone in range(5):
        (other := mine.log("hers", of=f"n{gone + 2}")).parent.mkdir()
        other.write_text("of another node")
        os.utime(other, (gone, gone))
    copies.look(world.record)
    assert sorted(path.name for path in kept.parent.parent.iterdir()) == ["n1", "n4", "n5", "n6"]
    world.port.close()
    copies.look(world.record)
    assert kept.read_text() == "line 8\nline 9\n"


def test_a_person_whose_clock_is_wrong_is_told_so_also_without_an_answers_body(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, signed = world.client("alice"), time.time() - 5000
    monkeypatch.setattr(service_client, "time", SimpleNamespace(time=lambda: signed))
    for ask in (
        lambda: client.has_blob(world.record, DIGEST),
        lambda: client.get_json(world.record, "/v1/status"),
    ):
        refused(ask, 401, "s ago by the clock of node n1.*set the clocks of that node and of your machine")


def test_output_is_for_the_owner_and_administrators(world: World) -> None:
    log = world.directory.log("hers")
    log.parent.mkdir(parents=True)
    log.write_text("[rank0]: one\n[rank0]: two\nhalf")
    for person in ("alice", "admin"):
        said = world.ask(person, "/v1/logs/hers", after=0)
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
    refused(lambda: stranger.get_json(world.record, "/v1/status"), 401, "is not signed by a key")
    impostor = world.client("alice", key="stranger")
    refused(lambda: impostor.get_json(world.record, "/v1/status"), 401, "is not signed by a key")
    assert world.ask("alice") == STATUS
    people = {name: one for name, one in world.people().items() if name != "alice"}
    (world.directory.people).write_text(signatures.encode_people(people))  # as adaptdl cluster revoke does
    refused(lambda: world.ask("alice"), 401, "is not signed by a key")


def test_signatures_of_unknown_callers_are_checked_one_at_a_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, most, verify, alice_waits = list[str](), 0, signatures.verify, threading.Event()

    def counted(people: People, name: str, *rest: str) -> Person:
        nonlocal most
        if name == "alice":
            return verify(people, name, *rest)
        inside.append(name)
        most = max(most, len(inside))
        assert alice_waits.wait(60)
        inside.pop()
        raise SignatureError

    world.ask("alice")
    monkeypatch.setattr(signatures, "verify", counted)
    strangers = [world.client("stranger") for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(one.get_json, world.record, "/v1/status") for one in strangers]
        until("no signature of a stranger is checked", lambda: inside != [])
        # alice was known, and waits for none of them
        assert world.ask("alice") == STATUS
        alice_waits.set()
        refusals = [type(one.exception(60)) for one in asked]
    assert (most, refusals) == (1, [ServiceRefusedError] * 8)


def test_a_signed_request_is_good_at_one_node_only(world: World) -> None:
    elsewhere = replace(world.record, node="n2")
    refused(lambda: world.client("alice").get_json(elsewhere, "/v1/status"), 401, "is not signed by a key")


def test_a_server_that_is_not_of_the_cluster_is_not_asked(world: World, tmp_path: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # trusts nobody
    client = ServiceClient(context, Signer(ID, "alice", world.keys["alice"]))
    with pytest.raises(ServiceError, match="certificate verify failed"):
        client.get_json(world.record, "/v1/status")
    with socket.socket() as unused:  # it has a port and does not listen
        unused.bind(("127.0.0.1", 0))
        gone = replace(world.record, port=unused.getsockname()[1])
        with pytest.raises(ServiceError, match=r"the service of n1 at .* does not answer"):
            world.client("alice").get_json(gone, "/v1/status")


def test_silent_connections_keep_no_person_out(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adaptdl_elastic.rendezvous.services.connections.MOST_UNKNOWN", 4)
    threads = threading.active_count()
    with contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", world.record.port)))
            for _ in range(100)
        ]
        assert world.ask("alice") == STATUS
        for one in silent[:-4]:
            with contextlib.suppress(ConnectionResetError):
                assert one.recv(1) == b""
        # the threads of those who were sent away end soon, long before they would have been silent too long
        until("their threads live on", lambda: threading.active_count() < threads + 40, 60)


def test_people_and_nodes_have_places_of_their_own(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adaptdl_elastic.rendezvous.services.connections.MOST_KNOWN", 1)
    first = world.client("alice")
    first.get_json(world.record, "/v1/status")  # and the connection stays
    refused(lambda: world.ask("admin"), 503, "serves too many connections")
    assert first.get_json(world.record, "/v1/status") == STATUS
    first.close()


def test_requests_that_would_wait_for_ever_are_refused(world: World) -> None:
    for query in ({"wait": "nan"}, {"after": 10**30}, {"after": -1}):
        message = "no number of seconds|negative or too large"
        refused(lambda query=query: world.ask("alice", "/v1/logs/hers", **query), 400, message)


def test_the_certificate_that_all_people_have_is_not_a_servers(world: World) -> None:
    directory = world.context.directory
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / "client.pem", directory / "client-key.pem")
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def shake_hands() -> None:
            accepted, _ = listening.accept()
            with contextlib.suppress(OSError), context.wrap_socket(accepted, server_side=True):
                pass

        thread = threading.Thread(target=shake_hands)
        thread.start()
        impostor = replace(world.record, host="localhost", port=listening.getsockname()[1])
        with pytest.raises(ServiceError, match=r"unsuitable certificate purpose|unsupported certificate"):
            world.client("alice").get_json(impostor, "/v1/status")
        thread.join()


@pytest.mark.parametrize(
    "name", ["..", ".", "a/b", "../x", "-x", "a\nb", "a b", "é", "", "\u001b]0;x", "a" * 129]
)
def test_a_name_that_is_no_name_stops_no_service_and_no_command(world: World, name: str) -> None:
    keys, store = Keys("lab"), MemoryStore()
    good = submission_by("alice", "good")

    def put(key: str, kind: str, text: str) -> None:
        signature = signatures.sign(world.keys["alice"], signatures.record_text(ID, kind, text))
        store.put(key, encode(Signed(text, "alice", signature)))

    put(keys.submission("good"), "Submission", encode(good))
    renamed = json.dumps({**json.loads(encode(good)), "job": name})
    put(f"{keys.submissions}{name}", "Submission", renamed)
    put(f"{keys.submissions}after", "Submission", json.dumps({**json.loads(encode(good)), "after": [name]}))
    cancelled = json.dumps({**json.loads(encode(Cancellation("good", "alice"))), "job": name})
    put(f"{keys.cancellations}{name}", "Cancellation", cancelled)
    service = json.loads(encode(world.record))
    store.put(f"{keys.services}x", json.dumps({**service, "node": name}))
    store.put(f"{keys.services}y", json.dumps(service))  # stands under another name than its own
    store.put(f"{keys.services}n1", json.dumps({**service, "slots": -8}))
    for people in (world.people(), None):
        found = SubmissionReader(store, keys, ID).read(people)
        assert [one.submission for one in found.requests] == [good]
        assert dict(found.services) == {}


def test_a_submission_counts_only_with_the_signature_of_its_owner(world: World) -> None:
    people = world.people()
    hers = submission_by("alice")

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
    keys, store, people = Keys("lab"), MemoryStore(), world.with_bob()
    world.put(store, keys.submission("job"), submission_by("alice"), "alice")
    reader = SubmissionReader(store, keys, ID)
    for person, counts in (("bob", False), ("alice", True), ("admin", True)):
        world.put(store, keys.cancellation("job"), Cancellation("job", person), person)
        found = reader.read(people)
        assert found.requests[0].cancelled_by == (person if counts else None)
        assert dict(found.refused) == (
            {} if counts else {"job": "bob may not cancel it: it belongs to alice"}
        )
    people = {name: one for name, one in people.items() if name != "alice"}
    assert reader.read(people).requests == ()


def test_a_stopped_run_is_resumed_by_its_owner_or_an_administrator_and_once(world: World) -> None:
    keys, store, people = Keys("lab"), MemoryStore(), world.with_bob()

    def run(name: str, state: records.JobState) -> None:
        spec = records.JobSpec(job="job", run=name, command=("t.py",), number=int(name[1:]))
        store.put(keys.job("job", "spec"), encode(spec))
        store.put(keys.job("job", "status"), encode(records.JobStatus(job="job", run=name, state=state)))

    def resumed() -> bool:
        found = reader.read(people).requests[0].run
        assert found.state is (None if found.resumed else records.JobState.STOPPED)
        return found.resumed

    def resume() -> str:
        return job_requests.resume(store, keys, world.context, world.client("admin"), "job")

    world.put(store, keys.submission("job"), submission_by("alice", command=("t.py",)), "alice")
    reader = SubmissionReader(store, keys, ID)
    run("r1", records.JobState.STOPPED)
    for person, counts in (("bob", False), ("alice", True), ("admin", True)):
        world.put(store, keys.resumption("job"), Resumption("job", person, "r1"), person)
        assert resumed() is counts
    run("r2", records.JobState.STOPPED)
    assert not resumed()
    assert resume().startswith("job belongs to alice")
    assert resumed()
    page = world.page(store, "admin")
    assert page.resume("job") == "job is resumed already"
    assert reader.read(people).requests[0].run.resumption_number == 2
    run("r3", records.JobState.FAILED)
    assert reader.read(people).requests[0].run.state is records.JobState.FAILED
    resume()
    assert resumed()
    run("r4", records.JobState.DONE)
    with pytest.raises(RequestError, match="job is done: only a job that was stopped or has failed is res"):
        resume()
    store.delete_prefix(keys.job("job"))
    forgotten = records.JobStatus(job="job", run="r4", state=records.JobState.STOPPED)
    store.put(keys.outcome("job", "status"), encode(forgotten))
    with pytest.raises(RequestError, match="its records are deleted: submit it again with another --name"):
        resume()


def test_prometheus_reads_with_the_certificate_of_a_node(world: World) -> None:
    """It cannot sign requests."""
    read: list[bytes] = []
    world.node().download(world.record, "/metrics", read.append)
    (family,) = text_string_to_metric_families(b"".join(read).decode())
    assert [(sample.name, sample.value) for sample in family.samples] == [("adaptdl_unfinished_jobs", 2.0)]
    unsigned = ServiceClient(person_context(world.context.ca))
    refused(lambda: unsigned.download(world.record, "/metrics", read.append), 401, "is not signed")


def test_a_signature_that_cannot_be_checked_now_is_checked_again(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, store, people = Keys("lab"), MemoryStore(), world.people()
    hers = submission_by("alice")
    world.put(store, keys.submission("job"), hers, "alice")
    reader = SubmissionReader(store, keys, ID)
    with monkeypatch.context() as patched:
        patched.setenv("PATH", str(tmp_path))  # no ssh-keygen
        with pytest.raises(UncheckedError, match="ssh-keygen is not installed"):
            reader.read(people)
    assert [one.submission for one in reader.read(people).requests] == [hers]
    # on a full disk the answer does not tell who is known
    monkeypatch.setattr("tempfile.TemporaryDirectory", Mock(side_effect=OSError("full")))
    for name in ("alice", "nobody"):
        with pytest.raises(UncheckedError, match=f"^the signature of '{name}' cannot be checked: full$"):
            signatures.verify(people, name, "", "")


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
    files = Credentials(contexts.choose("lab")).person_files("alice", "person:alice", "hers")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "hers"))
    for name, data in files.items():
        path = contexts.config_directory() / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    hers = contexts.choose(None)
    assert (hers.person, hers.endpoint, hers.cluster_id) == ("alice", "https://h:1", ID)
    environment = hers.store_environment()
    assert environment["ADAPTDL_ETCD_USER"] == "person:alice"
    assert Path(environment["ADAPTDL_ETCD_PASSWORD_FILE"]).read_text() == "hers\n"
    shutil.copy(world.keys["alice"], hers.identity)
    assert client_of(hers).get_json(world.record, "/v1/status") == STATUS
    with pytest.raises(ProvisionError, match="brought up by another user, who alone changes its nodes"):
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


def test_output_begins_with_a_whole_line_near_its_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert line_before_end(path, 5) == 0
    path.write_bytes(b"ab\ncd\nefgh\n")
    assert [line_before_end(path, size) for size in (100, 11, 8, 7, 5, 4, 1)] == [0, 0, 3, 6, 6, 11, 11]


def test_the_page_shows_what_nodes_have_of_the_output(world: World) -> None:
    log = world.directory.log("hers")
    log.parent.mkdir(parents=True)
    log.write_text("begins\n[rank0]: zero\n[rank1]: one\n")
    gone = ServiceRecord("gone", "127.0.0.1", 1, 1)
    submission = submission_by("alice", "hers")
    request = Request(submission, None, JobState())
    submitted = Submitted({"n1": world.record, "gone": gone}, (request,), {})
    actions = Actions(MemoryStore, Keys("lab"), world.context, world.client("alice"))
    shown = actions.output("hers", submitted, {}, ())
    assert shown["lines"] == ["[n1]: begins", "[rank0]: zero", "[rank1]: one"]
    assert "gone" in shown["problems"][0]
    assert shown["offsets"] == {"n1": log.stat().st_size}
    with log.open("a") as file:
        file.write("[rank0]: more\n[rank1]: more\n")
    assert actions.output("hers", submitted, shown["offsets"], (1,))["lines"] == ["[rank1]: more"]
    with pytest.raises(RequestError, match="no job 'x' was submitted"):
        actions.output("x", submitted, {}, ())


def test_a_cancellation_from_the_page_is_signed_as_by_the_command(world: World) -> None:
    store, keys = MemoryStore(), Keys("lab")
    world.put(store, keys.submission("hers"), submission_by("alice", "hers"), "alice")
    said = world.page(store, "admin").cancel("hers")
    assert said == "hers belongs to alice: it ends if admin is an administrator"
    found = store.get(keys.cancellation("hers"))
    assert found is not None
    record = verify_record(ID, world.people(), Cancellation, found.value, keys.cancellation("hers"))
    assert record.person == "admin"
    with pytest.raises(RequestError, match="no job 'x' was submitted"):
        world.page(store, "admin").cancel("x")


def test_a_person_who_may_not_cancel_a_job_is_told_so_and_leaves_no_record(world: World) -> None:
    store, keys = MemoryStore(), Keys("lab")
    for job, owner in (("other", "admin"), ("new", "admin")):
        world.put(store, keys.submission(job), submission_by(owner, job), owner)
    gone = ServiceRecord("gone", "127.0.0.1", 1, 1)
    for service in (gone, world.record):
        store.put(keys.service(service.node), encode(service))
    hers, alice = replace(world.context, person="alice"), world.client("alice")
    with pytest.raises(RequestError, match="n1 refuses: job other belongs to admin"):
        job_requests.cancel(store, keys, hers, alice, "other")
    assert store.get(keys.cancellation("other")) is None
    # no node has seen this one yet
    assert "if alice is an administrator" in job_requests.cancel(store, keys, hers, alice, "new")


def test_jobs_of_others_are_neither_stopped_nor_sized_by_mistake(world: World) -> None:
    store, keys = MemoryStore(), Keys("lab")
    for job, owner in (("other", "admin"), ("hers", "alice")):
        world.put(store, keys.submission(job), submission_by(owner, job), owner)
    store.put(keys.service(world.record.node), encode(world.record))
    alice, admin = world.page(store, "alice"), world.page(store, "admin")
    for request in (lambda: alice.stop("other"), lambda: alice.scale("other", 1)):
        with pytest.raises(RequestError, match="n1 refuses: job other belongs to admin"):
            request()
    assert store.get(keys.job("other", "request")) is None
    for request in (lambda: alice.stop("hers"), lambda: admin.stop("hers"), lambda: alice.stop("unknown")):
        with pytest.raises(RequestError, match="has begun"):  # this far it is allowed
            request()


def test_only_an_administrator_may_change_what_others_have(world: World) -> None:
    store, keys = MemoryStore(), Keys("lab")

    def check(person: str) -> None:
        job_requests.check_administrator(store, keys, world.context, world.client(person))

    store.put(keys.service("gone"), encode(ServiceRecord("gone", "127.0.0.1", 1, 1)))
    check("alice")  # nobody says that she may not
    store.put(keys.service("n1"), encode(world.record))
    check("admin")
    with pytest.raises(RequestError, match="ask an administrator of cluster lab"):
        check("alice")
