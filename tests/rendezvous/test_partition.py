"""A node that the network leaves without a word: packets vanish, nothing is reset.

A client in a network namespace of its own, joined to the store by a virtual cable that is pulled out.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from cutting_proxy import CuttingProxy

pytestmark = [pytest.mark.etcd, pytest.mark.slow]

# Prints what it sees and what happens to its lease, in whole lines from two threads; registers again when
# it has lost it.
CLIENT = """
import os, sys, threading
from adaptdl_elastic.rendezvous.store.connect import StoreOptions, connect

store = connect(sys.argv[1], api=sys.argv[2], options=StoreOptions(timeout=2.0))
prefix = sys.argv[3]
lease = store.lease(2)
store.put(prefix + "node", "first", lease)

def keep():
    lease.lost.wait()
    os.write(1, b"lost\\n")
    store.put(prefix + "node", "second", store.lease(2))

threading.Thread(target=keep, daemon=True).start()
for change in store.watch(prefix + "plan", 1):
    os.write(1, f"{change.value}\\n".encode())
"""


@dataclass
class Cable:
    """Between this namespace (address `here`) and another one."""

    namespace: str
    here: str

    def pull(self) -> None:
        ip("link", "set", f"{self.namespace}a", "down")

    def plug_in(self) -> None:
        ip("link", "set", f"{self.namespace}a", "up")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=200)


@pytest.fixture
def cable() -> Iterator[Cable]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    name, net = f"ad{os.getpid() % 100000}", f"10.231.{os.getpid() % 250}"
    try:
        ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr}")
    try:
        ip("link", "add", f"{name}a", "type", "veth", "peer", "name", f"{name}b", "netns", name)
        ip("addr", "add", f"{net}.1/24", "dev", f"{name}a")
        ip("link", "set", f"{name}a", "up")
        ip("-n", name, "addr", "add", f"{net}.2/24", "dev", f"{name}b")
        ip("-n", name, "link", "set", f"{name}b", "up")
        yield Cable(name, f"{net}.1")
    finally:
        ip("netns", "del", name)  # takes the cable with it


@pytest.mark.parametrize("own_world", ["v3-3.5", "v2-3.5"], indirect=True)
def test_a_node_behind_a_pulled_cable(own_world, cable, collect):
    prefix, store = own_world.prefix, own_world.client()
    seen = collect(store.watch(prefix + "node"))
    with CuttingProxy(own_world.real.endpoint, listen=cable.here) as proxy:
        client = subprocess.Popen(
            [
                *("ip", "netns", "exec", cable.namespace, sys.executable, "-c", CLIENT),
                *(proxy.endpoint, own_world.api, prefix),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            lines = iter(client.stdout)
            assert seen.wait(1)[0].value == "first"
            store.put(prefix + "plan", "0")
            assert next(lines) == "0\n"
            cable.pull()
            pulled = time.monotonic()
            assert seen.wait(2)[1].kind == "delete"
            for number in range(1, 6):
                store.put(prefix + "plan", str(number))
            # until the other side's kernel must have given the connections up: 2 + 3 x 1 s
            threshold = pulled + 8.0
            while time.monotonic() < threshold:
                time.sleep(0.05)
            cable.plug_in()
            got = {next(lines).strip() for _ in range(6)}
            assert got == {"lost", "1", "2", "3", "4", "5"}
            assert seen.wait(3)[2].value == "second"
        finally:
            client.kill()
            client.wait()
            client.stdout.close()
