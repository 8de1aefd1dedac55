"""What `adaptdl doctor` says of a store that is not as it should be: one remedy each, and no traceback."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import certificates
import pytest
from click.testing import CliRunner
from etcd_server import EtcdServer, ServerTls, let_only_root_in

from adaptdl_elastic.autoscaler.cli import adaptdl
from adaptdl_elastic.autoscaler.diagnostics import checks
from adaptdl_elastic.autoscaler.diagnostics.checks import Level
from adaptdl_elastic.rendezvous.store.store_options import StoreOptions


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """Somebody on loopback who says this to everybody, whatever is asked."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection, suppress(OSError):
                    connection.sendall(answer)
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(4096):
                        pass

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join(200)


def http(body: bytes) -> bytes:
    lines = [b"HTTP/1.1 200 OK", b"Content-Length: %d" % len(body), b"Connection: close"]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def say(endpoint: str, *options: str, **environ: str) -> str:
    """The lines about the store."""
    result = CliRunner(env={"ADAPTDL_ETCD_TIMEOUT": "100", **environ}).invoke(
        adaptdl, ["doctor", "--etcd", endpoint, *options], standalone_mode=False
    )
    assert result.exception is None, result.exception
    lines = result.output.splitlines()
    wrong = [i for i, line in enumerate(lines) if line.startswith("FAIL")]
    assert len(wrong) == 1, result.output
    return "\n".join(lines[wrong[0] : wrong[0] + 2])


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "SSH-2.0"),
        (http(b"[]"), "not a JSON object"),
        (http(b"hello"), "not JSON"),
    ],
)
def test_an_endpoint_that_is_no_etcd_is_reported(answer: bytes, word: str) -> None:
    with answering(answer) as endpoint:
        said = say(endpoint)
    assert "answers, but not as an etcd does" in said
    assert word in said
    assert "-> is this etcd's port for clients (2379)?" in said


def test_an_unknown_and_a_malformed_host_name_are_reported() -> None:
    assert "-> correct the name in --etcd" in say("no-such-host.invalid:2379")
    assert "-> correct the name in --etcd" in say("a..b:2379")


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> certificates.Certificates:
    return certificates.make(tmp_path_factory.mktemp("pem"))


@pytest.fixture(scope="module")
def secure(pems: certificates.Certificates) -> Iterator[EtcdServer]:
    with EtcdServer(tls=ServerTls(pems.server.cert, pems.server.key, client_ca=pems.ca)) as server:
        yield server


@pytest.mark.etcd
def test_proxies_of_the_environment_do_not_matter(etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "")
    found = checks.check_server(etcd.endpoint, StoreOptions(timeout=100))
    assert [finding.check for finding in found] == ["store"]
    assert all(finding.level is not Level.ERROR for finding in found)


@pytest.mark.etcd
def test_tls_that_does_not_match(
    secure: EtcdServer, pems: certificates.Certificates, etcd: EtcdServer
) -> None:
    bare = secure.endpoint.removeprefix("https://")
    said = say(bare)
    assert "speaks TLS, and was asked without" in said
    assert f"-> write https://{bare}, and give its CA with --etcd-ca" in said
    ours = [f"--etcd-cert={pems.client.cert}", f"--etcd-key={pems.client.key}"]
    said = say(secure.endpoint, *ours)
    assert "-> the CA that has signed it is not known here: give that one with --etcd-ca" in said
    said = say(secure.endpoint, f"--etcd-ca={pems.other_ca}", *ours)
    assert f"-> the CA that has signed it is not the one of {pems.other_ca}" in said
    said = say(secure.endpoint, f"--etcd-ca={pems.ca}")
    assert "asks for a client certificate" in said
    assert "-> give one that its CA has signed with --etcd-cert and --etcd-key" in said
    said = say(f"https://{etcd.endpoint}")
    assert "does not speak TLS" in said
    assert f"-> write http://{etcd.endpoint}" in said


@pytest.mark.etcd
def test_a_wrong_password_and_none(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("wrong")
    with EtcdServer() as server:
        let_only_root_in(server, "right")
        user = {"ADAPTDL_ETCD_USER": "root", "ADAPTDL_ETCD_PASSWORD_FILE": str(tmp_path / "password")}
        for environ in (user, {}):
            said = say(server.endpoint, **environ)
            assert said.startswith("FAIL  rights: ")
            assert "-> name a user of this etcd with --etcd-user (ADAPTDL_ETCD_USER)" in said
            result = CliRunner(env=environ).invoke(adaptdl, ["ls", "--etcd", server.endpoint])
            # no certificate helps here: etcd's gateway knows users by their passwords only
            assert result.output.startswith("adaptdl: the store refuses us: ")
            assert "ADAPTDL_ETCD_USER" in result.output
