"""Agents of a guarded etcd: what they are given reaches the coordinator, too, and no secret leaks."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import certificates
import psutil
import pytest
import requests
from elastic_run import ElasticRun, marked
from etcd_server import EtcdServer, ServerTls

from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.store.connect import StoreOptions, connect

TRAIN = str(Path(__file__).parent / "scripts" / "train.py")
PASSWORD = "correct-horse-battery"
pytestmark = [pytest.mark.etcd, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> certificates.Certificates:
    return certificates.make(tmp_path_factory.mktemp("pem"))


def test_tls_and_a_client_certificate_by_options(pems: certificates.Certificates, tmp_path: Path) -> None:
    with EtcdServer(tls=ServerTls(pems.server.cert, pems.server.key, client_ca=pems.ca)) as etcd:
        arguments = [
            *(f"--rdzv-endpoint={etcd.endpoint.removeprefix('https://')}", "--rdzv-id=job"),
            *(f"--etcd-ca={pems.ca}", f"--etcd-cert={pems.client.cert}", f"--etcd-key={pems.client.key}"),
            *("--checkpoint-path=saved", TRAIN, "2", "0.02"),
        ]
        misleading = {"REQUESTS_CA_BUNDLE": str(pems.other_ca), "HTTPS_PROXY": "http://127.0.0.1:1"}
        with ElasticRun(arguments, tmp_path, misleading) as run:
            assert run.wait() == 0
            assert [event["samples"] for event in run.of("epoch")] == [200, 200]
        with ElasticRun(["--etcd-timeout=1", *arguments[:3], *arguments[5:]], tmp_path) as run:
            assert run.wait() == 1
            (line,) = run.text().splitlines()
            assert "adaptdl doctor" in line


def call(etcd: EtcdServer, path: str, **body: object) -> None:
    with requests.Session() as session:
        session.trust_env = False
        session.post(f"http://{etcd.endpoint}/v3/{path}", json=body, timeout=10).raise_for_status()


def command_lines(run: ElasticRun) -> Iterator[list[str]]:
    for process in marked(run.mark):
        with suppress(psutil.NoSuchProcess):
            yield process.cmdline()


def text64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def guard(etcd: EtcdServer) -> None:
    """A user `adaptdl` for everything under the prefix of the default cluster; nobody else is let in."""
    root = Keys().root
    for user, password in (("root", "root-of-all"), ("adaptdl", PASSWORD)):
        call(etcd, "auth/role/add", name=user)
        call(etcd, "auth/user/add", name=user, password=password)
        call(etcd, "auth/user/grant", user=user, role=user)
    prefix = {"permType": "READWRITE", "key": text64(root), "range_end": text64(root[:-1] + "0")}
    call(etcd, "auth/role/grant", name="adaptdl", perm=prefix)
    call(etcd, "auth/enable")


@pytest.mark.exhaustive
def test_a_user_whose_password_is_nowhere_to_be_read(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text(PASSWORD)
    user = {"ADAPTDL_ETCD_USER": "adaptdl", "ADAPTDL_ETCD_PASSWORD_FILE": str(file)}
    with EtcdServer() as etcd:
        guard(etcd)
        arguments = [
            *(f"--rdzv-endpoint={etcd.endpoint}", "--rdzv-id=job", "--log-dir=logs", "--redirects=3"),
            *("--checkpoint-path=saved", TRAIN, "60", "0.1"),
        ]
        with ElasticRun(arguments, tmp_path) as run:
            assert run.wait() == 1
            assert "ADAPTDL_ETCD_USER" in run.text()
        with ElasticRun(arguments, tmp_path, user) as run:
            run.wait_for_event("epoch", epoch=0)
            commands = [" ".join(command) for command in command_lines(run)]
            assert any("coordinator" in command for command in commands)
            assert not any(PASSWORD in command for command in commands)
            with connect(etcd.endpoint, options=StoreOptions(user="adaptdl", password=PASSWORD)) as store:
                items = store.range(Keys().root).items
            assert items
            secrets = {item.key for item in items if PASSWORD in item.value}
            (tmp_path / "hurry").touch()
            assert run.wait() == 0
            written = [path for path in tmp_path.rglob("*") if path.is_file() and path != file]
            secrets |= {str(path) for path in written if PASSWORD.encode() in path.read_bytes()}
            assert not secrets
