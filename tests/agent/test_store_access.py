"""Agents of a guarded etcd: what they are given reaches the coordinator, too, and no secret leaks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from cluster import LONG, TRAIN
from elastic_run import ElasticRun, marked
from guarded_etcd import FIRST_PASSWORD, GuardedEtcd

from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.store.connect import connect

pytestmark = [pytest.mark.etcd, pytest.mark.slow, pytest.mark.timeout(600)]


def command_lines(run: ElasticRun) -> Iterator[str]:
    for process in marked(run.mark):
        with suppress(psutil.NoSuchProcess):
            yield " ".join(process.cmdline())


def test_a_certificate_by_options_and_a_user_whose_password_is_nowhere_to_be_read(tmp_path: Path) -> None:
    with GuardedEtcd(tmp_path / "etcd") as guarded:
        endpoint = guarded.etcd.endpoint.removeprefix("https://")
        pem = {
            name: f"--etcd-{name}={guarded.environ[f'ADAPTDL_ETCD_{name.upper()}']}"
            for name in ("ca", "cert", "key")
        }
        files = {name: value for name, value in guarded.environ.items() if "USER" in name or "PASS" in name}
        rest = [f"--rdzv-endpoint={endpoint}", "--rdzv-id=job", "--log-dir=logs", "--redirects=3"]
        rest += ["--checkpoint-path=saved", TRAIN, *LONG]
        with ElasticRun(["--etcd-timeout=1", pem["ca"], *rest], tmp_path, files) as run:
            assert run.wait() == 1
            (line,) = run.text().splitlines()
            assert "adaptdl doctor" in line
        with ElasticRun([*pem.values(), *rest], tmp_path) as run:
            assert run.wait() == 1
            assert "ADAPTDL_ETCD_USER" in run.text()
        misleading = {"REQUESTS_CA_BUNDLE": __file__, "HTTPS_PROXY": "http://127.0.0.1:1"}
        with ElasticRun([*pem.values(), *rest], tmp_path, {**files, **misleading}) as run:
            run.wait_for_event("epoch", epoch=0)
            commands = list(command_lines(run))
            assert any("coordinator" in command for command in commands)
            assert not any(FIRST_PASSWORD in command for command in commands)
            with connect(guarded.etcd.endpoint, options=guarded.options()) as store:
                items = store.range(Keys().root).items
            assert items
            secrets = {item.key for item in items if FIRST_PASSWORD in item.value}
            run.hurry()
            assert run.wait() == 0
            assert set(run.samples().values()) == {200}
        written = [path for path in tmp_path.rglob("*") if path.is_file() and path != guarded.password_file]
        secrets |= {str(path) for path in written if FIRST_PASSWORD.encode() in path.read_bytes()}
        assert not secrets
