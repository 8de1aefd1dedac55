"""The etcd of the tests: on loopback, and never there longer than its owner."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import etcd_server as module
import psutil
import pytest

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
def test_an_etcd_server_dies_with_its_owner():
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
