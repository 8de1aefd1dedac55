"""The socket of a standalone job's store: who is let in, and what happens when either side misbehaves.

What every store promises is held in test_store_conformance.py, this one included.
"""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from adaptdl_elastic.rendezvous.local import store_server
from adaptdl_elastic.rendezvous.local.store_server import LocalServer
from adaptdl_elastic.rendezvous.store.base import (
    CompactedError,
    LeaseLostError,
    StoreAuthError,
    StoreUnavailableError,
)
from adaptdl_elastic.rendezvous.store.connect import StoreOptions, connect
from adaptdl_elastic.rendezvous.store.local_socket import LocalStore, socket_path
from adaptdl_elastic.rendezvous.store.store_options import StoreOptionError

PATIENCE = 100.0  # seconds, for what is only waited for when a test fails
PATIENT = StoreOptions(timeout=PATIENCE)
SERVER = """
import sys
from adaptdl_elastic.rendezvous.local.store_server import LocalServer
with LocalServer() as server:
    print(server.endpoint, flush=True)
    sys.stdin.read()
"""
CLIENT = """
import sys
from adaptdl_elastic.rendezvous.store.connect import connect
with connect(sys.argv[1]) as store:
    store.put("/leader", "me", store.lease(5.0))
    watch = store.watch("/")
    print("there", flush=True)
    sys.stdin.read()
"""
STRANGER = """
import os, socket, sys
os.setgroups([]), os.setgid(65534), os.setuid(65534)
connection = socket.socket(socket.AF_UNIX)
try:
    connection.connect(sys.argv[1])
except PermissionError:
    sys.exit("not even connected")
try:
    connection.sendall(b'{"do":"get","key":"/secret"}\\n')
    print(connection.makefile().readline())
except (BrokenPipeError, ConnectionResetError):
    sys.exit("hung up on")
"""


@pytest.fixture
def server() -> Iterator[LocalServer]:
    with LocalServer() as made:
        yield made


@pytest.fixture
def store(server: LocalServer) -> Iterator[LocalStore]:
    with LocalStore(socket_path(server.endpoint), PATIENCE) as made:
        yield made


@contextmanager
def run(script: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", script, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def wait_for_the_servers_threads() -> None:
    for thread in threading.enumerate():
        if thread.name in ("local-store-client", "local-store-watch"):
            thread.join(60)
            assert not thread.is_alive(), thread


def test_only_its_user_can_enter_the_directory(server: LocalServer) -> None:
    folder = socket_path(server.endpoint).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    server.close()
    assert not folder.exists()


@pytest.mark.processes
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_is_kept_out_twice(server: LocalServer) -> None:
    server.store.put("/secret", "xyzzy")
    path = socket_path(server.endpoint)

    def attempt() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", STRANGER, str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert "not even connected" in attempt().stderr
    path.parent.chmod(0o755)
    path.chmod(0o777)
    done = attempt()
    assert "xyzzy" not in done.stdout
    assert done.stdout.strip() == "" or "hung up on" in done.stderr


def test_a_server_of_another_user_is_refused(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(StoreAuthError, match=f"belongs to user {os.getuid()}, not 4711"):
        connect(server.endpoint, options=PATIENT)


@pytest.mark.processes
def test_a_client_that_is_killed_loses_its_lease_and_leaves_no_thread(
    server: LocalServer, store: LocalStore
) -> None:
    with store.watch("/leader") as watch, run(CLIENT, server.endpoint) as client:
        changes = iter(watch)
        assert next(changes).value == "me"
        assert said(client) == "there"
        client.kill()
        assert next(changes).kind == "delete"
    store.close()
    wait_for_the_servers_threads()


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"[" * 100_000 + b"\n",
        b'{"do":"get"}\n',
        b'{"do":"swap","key":"/a","value":3,"expected":0,"lease":null}\n',
        b'{"do":"watch","prefix":"/"}\n',
        b"[1]\n",
        b"\x80\xff\n",
        b'{"do":"get","key":"/a"',
    ],
)
def test_garbage_ends_its_own_connection_only(server: LocalServer, store: LocalStore, garbage: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(socket_path(server.endpoint)))
        connection.sendall(garbage)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(100) == b""
    assert store.get("/a") is None


def test_a_request_is_bounded(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_server, "MAX_REQUEST_BYTES", 1000)
    with LocalStore(socket_path(server.endpoint), PATIENCE) as store:
        store.put("/a", "x" * 900)
        with pytest.raises(StoreUnavailableError):
            store.put("/a", "x" * 1001)
        assert len((store.get("/a") or pytest.fail("gone")).value) == 900


def test_a_watch_is_sent_what_happened_before_the_end(server: LocalServer, collect: Any) -> None:
    with connect(server.endpoint, options=PATIENT) as store:
        seen = collect(store.watch("/job/"))
        for number in range(1000):
            server.store.put("/job/status", str(number))
        server.close()
        assert "has ended, and its store with it" in str(seen.wait_end())
        assert [change.value for change in seen.changes] == [str(number) for number in range(1000)]
        with pytest.raises(StoreUnavailableError, match="has ended, and its store with it"):
            store.get("/job/status")
    with pytest.raises(StoreUnavailableError, match="has ended"):
        connect(server.endpoint, options=PATIENT)


def test_a_server_ends_at_once_while_it_waits_for_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_server, "LOOK_SECONDS", 1000.0)
    LocalServer().close()


def test_a_sleeping_reader_delays_no_writer_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_server, "MOST_CHANGES", 10)
    with LocalServer() as server, LocalStore(socket_path(server.endpoint), PATIENCE) as store:
        watch = store.watch("/")
        large = "x" * 100_000  # more than the socket takes
        for _ in range(100):
            store.put("/a", large)
        with pytest.raises(CompactedError):
            for _ in watch:
                pass
        assert store.range("/").items[0].value == large


@pytest.mark.processes
def test_an_answer_that_comes_late_is_not_taken_for_another() -> None:
    with run(SERVER) as server, LocalStore(socket_path(said(server)), PATIENCE) as store:
        store.put("/a", "1")
        store.put("/b", "2")
        server.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, server.pid, os.WSTOPPED)
        with pytest.raises(StoreUnavailableError, match="does not answer"):
            store.call(timeout=0.2, do="get", key="/a")
        server.send_signal(signal.SIGCONT)
        assert (store.get("/b") or pytest.fail("gone")).value == "2"
        assert server.stdin is not None
        server.stdin.close()
        assert server.wait(60) == 0


@pytest.mark.processes
def test_a_lease_whose_holder_is_stopped_runs_out(server: LocalServer, store: LocalStore) -> None:
    with store.watch("/leader") as watch, run(CLIENT, server.endpoint) as client:
        changes = iter(watch)
        assert next(changes).kind == "put"
        assert said(client) == "there"
        client.send_signal(signal.SIGSTOP)
        assert next(changes).kind == "delete"


def test_a_lease_that_has_run_out_on_the_server_is_lost(store: LocalStore) -> None:
    lease = store.lease(0.6)
    store.call(do="revoke", lease=lease.number)
    assert lease.lost.wait(60)
    with pytest.raises(LeaseLostError):
        store.put("/a", "1", lease)


@pytest.mark.processes
def test_the_files_of_a_killed_server_are_no_trouble() -> None:
    with run(SERVER) as server:
        path = socket_path(said(server))
        store = LocalStore(path, PATIENCE)
        store.lease(1e6)
        server.kill()
        server.wait()
    store.close()  # it does not wait for a lease that has ended with its server
    assert path.exists()
    with LocalServer():
        assert not path.parent.exists()


def test_a_socket_has_a_short_path_whatever_the_variables(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    with LocalServer() as server, connect(server.endpoint, options=PATIENT) as store:
        assert store.get("/a") is None
    assert not list(deep.iterdir())
    with pytest.raises(StoreOptionError, match="too long for a socket"):
        connect(f"unix:{deep}/socket", options=PATIENT)
    with pytest.raises(StoreOptionError, match="not of the form unix:/path"):
        connect("unix:relative", options=PATIENT)
