"""Whom a node service tells of a job's end, and that two nodes do not both do it."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from adaptdl_elastic.agent.service.blobs import Blobs
from adaptdl_elastic.agent.service.notices import Notices, end_of, post
from adaptdl_elastic.autoscaler.provisioning.bundle import pack_private
from adaptdl_elastic.rendezvous.schema.records import JobState as State
from adaptdl_elastic.rendezvous.schema.submissions import Submission
from adaptdl_elastic.rendezvous.services.admission import JobState, Request
from adaptdl_elastic.rendezvous.services.service_client import ServiceClient
from adaptdl_elastic.rendezvous.services.service_config import ServiceConfig, ServiceDirectory
from adaptdl_elastic.rendezvous.store.memory import MemoryStore

pytestmark = pytest.mark.processes  # commands, and a server on loopback

DONE = JobState(state=State.DONE, reason="exited with 0")


class Hook:
    """A server on loopback that remembers the JSON it is sent, and answers with `statuses` in turn."""

    def __init__(self) -> None:
        self.received: list[dict[str, str]] = []
        self.statuses: list[int] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(handler) -> None:
                body = handler.rfile.read(int(handler.headers["Content-Length"]))
                self.received.append(json.loads(body))
                handler.send_response(self.statuses.pop(0) if self.statuses else 204)
                handler.send_header("Content-Length", "0")
                handler.end_headers()

            def log_message(handler, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/token"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hook]:
    # a server that is slow is not told a second time
    monkeypatch.setattr("adaptdl_elastic.agent.service.notices.URL_SECONDS", 200.0)
    made = Hook()
    yield made
    made.server.shutdown()
    made.server.server_close()


def service(folder: Path, node: str) -> Notices:
    """Return the notices of a node whose archives lie in one folder with those of all other nodes."""
    directory = ServiceDirectory(folder / node)
    directory.path.mkdir()
    config = ServiceConfig("lab", "id", node, "127.0.0.1", "https://127.0.0.1:1")
    client = ServiceClient(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    return Notices(config, directory, Blobs(folder / "blobs"), client)


def submitted(folder: Path, *notify: str, owner: str = "alice") -> Submission:
    """Return a submission whose archive is there."""
    (folder / "blobs").mkdir()
    packed = pack_private({"TOKEN": "hers"}, notify, owner, folder / "packed")
    packed.path.rename(folder / "blobs" / packed.digest)
    return Submission("job", "alice", "script", ("t.py",), "0" * 64, packed.digest, notify=True)


def look(notices: Notices, store: MemoryStore, *requests: Request) -> int:
    """Look once, wait until everything is sent, and return the number of threads that were needed."""
    threads = notices.look(store, requests, [])
    for thread in threads:
        thread.join()
    return len(threads)


@pytest.mark.parametrize(
    ("run", "cancelled", "end"),
    [
        (DONE, None, ("done", "exited with 0")),
        (JobState(state=State.FAILED, reason="exit code 1"), None, ("failed", "exit code 1")),
        (JobState(state=State.RUNNING, agents=1), None, None),
        (JobState(state=State.STOPPED), None, None),
        (JobState(), None, None),
        (JobState(agents=1), "bob", None),
        (JobState(), "bob", ("cancelled", "by bob")),
        (JobState(state=State.STOPPED), "bob", ("cancelled", "by bob")),
    ],
)
def test_when_a_job_is_over(run: JobState, cancelled: str | None, end: tuple[str, str] | None) -> None:
    submission = Submission("job", "alice", "script", ("t.py",), "0" * 64, notify=True)
    assert end_of(Request(submission, cancelled, run)) == end


def test_each_end_of_a_job_that_goes_on_is_told(tmp_path: Path, hook: Hook) -> None:
    asked = submitted(tmp_path, hook.url)
    store, node = MemoryStore(), service(tmp_path, "n1")
    failed, again = (JobState(state=State.FAILED, run=run) for run in ("r1", "r2"))
    resumed = JobState(run="r1", resumed=True)
    for run, told in ((failed, 1), (resumed, 0), (again, 1), (again, 0), (replace(DONE, run="r3"), 1)):
        assert look(node, store, Request(asked, None, run)) == told
        assert look(node, store, Request(asked, None, run)) == 0
    newer = replace(asked, created=1.0, replaces=0.0, follows="r3")
    assert look(node, store, Request(newer, "bob", JobState(run="r3"))) == 1
    assert [said["state"] for said in hook.received] == ["failed", "failed", "done", "cancelled"]


def test_one_node_of_two_tells_and_tells_once(tmp_path: Path, hook: Hook) -> None:
    command = 'echo "$ADAPTDL_JOB $ADAPTDL_STATE $TOKEN" >> ../said'
    request = Request(submitted(tmp_path, hook.url, command), None, DONE)
    store, nodes = MemoryStore(), [service(tmp_path, node) for node in ("n1", "n2")]
    running = replace(request, run=JobState(state=State.RUNNING, agents=1))
    assert [look(node, store, running) for node in nodes] == [0, 0]
    assert [look(node, store, request) for node in (*nodes, *nodes)] == [1, 0, 0, 0]
    assert (tmp_path / "said").read_text() == "job done hers\n"
    assert hook.received == [
        {
            "text": "job job of alice on cluster lab is done: exited with 0",
            "job": "job",
            "owner": "alice",
            "cluster": "lab",
            "state": "done",
            "reason": "exited with 0",
        }
    ]
    assert look(service(tmp_path, "n3"), store, request) == 0  # nor does a service that has just started


def test_of_two_nodes_that_see_the_end_at_once_one_tells(tmp_path: Path, hook: Hook) -> None:
    request = Request(submitted(tmp_path, hook.url), None, DONE)
    store = MemoryStore()
    threads = [
        thread
        for node in ("n1", "n2")
        for thread in service(tmp_path, node).look(_Blind(store), [request], [])
    ]
    for thread in threads:
        thread.join()
    assert (len(threads), len(hook.received)) == (2, 1)


class _Blind(MemoryStore):
    """A store whose readings are as old as the node's last look, so that both nodes find no key."""

    def __init__(self, store: MemoryStore) -> None:
        self._real = store

    def get(self, key: str) -> None:
        return None

    def compare_and_swap(self, *arguments: object) -> object:
        return self._real.compare_and_swap(*arguments)


def test_a_node_that_cannot_get_the_archive_leaves_the_notice_to_another(tmp_path: Path) -> None:
    good = submitted(tmp_path, "touch ../said")
    store, first = MemoryStore(), service(tmp_path, "n1")
    lost = Request(replace(good, environment="1" * 64), None, DONE)
    assert [look(first, store, lost) for _ in range(7)] == [1, 1, 1, 1, 1, 0, 0]
    assert store.range("/adaptdl/v1/lab/notified/").items == ()
    assert look(service(tmp_path, "n2"), store, Request(good, None, DONE)) == 1
    assert (tmp_path / "said").exists()


def test_the_archive_of_another_person_is_not_carried_out(tmp_path: Path) -> None:
    theirs = submitted(tmp_path, "touch ../said", owner="bob")
    store = MemoryStore()
    look(service(tmp_path, "n1"), store, Request(theirs, None, DONE))
    assert not (tmp_path / "said").exists()


def test_a_notice_that_fails_stands_in_the_jobs_output_without_its_url(tmp_path: Path, hook: Hook) -> None:
    hook.statuses[:] = [500, 404, 404]
    notices = service(tmp_path, "n1")
    submission = submitted(tmp_path, "echo no >&2; exit 3")
    look(notices, MemoryStore(), Request(submission, None, DONE))
    said = ServiceDirectory(tmp_path / "n1").log("job").read_text()
    assert said == "adaptdl: --notify was not carried out: the command exits with code 3: no\n"
    pauses: list[float] = []
    assert post(hook.url, {"text": "x"}, pauses.append) == "the URL answers with HTTP 404"
    assert (len(hook.received), len(pauses)) == (3, 3)
    hook.statuses[:] = [500]
    assert post(hook.url, {"text": "x"}, pauses.append) == ""
    with socket.socket() as closed:  # it has a port and does not listen
        closed.bind(("127.0.0.1", 0))
        gone = f"http://127.0.0.1:{closed.getsockname()[1]}/token"
        assert post(gone, {"text": "x"}, pauses.append) == "the URL does not answer (NewConnectionError)"
    assert post("http://[", {"text": "x"}, pauses.append)
