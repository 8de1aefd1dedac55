"""The machines of `make team-demo`: four nodes with a real sshd each, and the desks of two people.

As root these are machines that share nothing but a network, and the two people are Unix users. Without root
a node is a home directory of this user, reached by ssh on the loopback interface, and both people are this
user.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Protocol

import psutil

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1] / "tests" / "support")
)  # sshd and etcd are the tests'

from etcd_server import find_etcd
from machines import NoRoomError, Room
from ports import free_port
from ssh_machines import open_ssh
from ssh_nodes import NoSshError, SshNodes, find_sshd

NODES = ("node1", "node2", "node3", "node4")
PEOPLE = ("alice", "bob")
_SECONDS = 30.0  # until what is killed has ended


class NoSiteError(Exception):
    """This machine cannot have the demo's machines, and why."""


class Site(Protocol):
    """The machines. A person's desk is a directory."""

    what: str
    up_options: Sequence[str]

    def __enter__(self) -> Site: ...

    def __exit__(self, *error: object) -> None: ...

    def desk(self, person: str) -> str:
        """Return the working directory of a person."""

    def start(self, person: str, command: Sequence[str]) -> subprocess.Popen[str]:
        """Start a command at a person's desk; its output is one pipe."""

    def hand_over(self, name: str, giver: str, taker: str) -> None:
        """Copy a file of one person's desk to the other's, for that person only."""

    def fetch(self, person: str, name: str, target: Path) -> None:
        """Copy a file of a person's desk out of the demo."""

    def unplug(self, node: str) -> None:
        """Cut a node off the network."""

    def plug(self, node: str) -> None:
        """Connect a node that was unplugged."""


class Machines:
    """Machines that share nothing but a network, and Unix users on them.

    Args:
        out: Folder for the logs of sshd.
    """

    what = "four machines with an sshd each, in namespaces of this one; alice and bob are Unix users"
    up_options = ("--python", "/opt/adaptdl/bin/python")

    def __init__(self, out: Path) -> None:
        self._out = out
        self._room = Room("desk", *NODES)

    def __enter__(self) -> Machines:
        try:
            sshd = find_sshd()
            self._room.__enter__()
        except (NoRoomError, NoSshError) as error:
            raise NoSiteError(str(error)) from None
        try:
            self._furnish(sshd)
        except NoRoomError as error:
            self._room.close()
            raise NoSiteError(str(error)) from None
        except BaseException:
            self._room.close()
            raise
        return self

    def _furnish(self, sshd: str) -> None:
        room = self._room
        room.install_ourselves("/opt/adaptdl")
        room.provide(find_etcd(), "/usr/bin/etcd", *NODES)
        for person in PEOPLE:  # "*": no password, but not locked, as sshd demands
            room.everywhere(f"useradd -m -s /bin/bash {person}; usermod -p '*' {person}")
            room.bash("mkdir work", "desk", person, f"/home/{person}")
        # alice reaches the nodes, bob does not
        open_ssh(room, sshd, "desk", "alice", NODES, self._out)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._keep_logs()
        self._room.close()

    def _keep_logs(self) -> None:
        """Copy what the nodes have written about the cluster and its jobs, before they are gone."""
        for node in NODES:
            folder = self._room.outside(node, "/home/alice/.local/share/adaptdl")
            for log in folder.rglob("*.log"):
                with suppress(OSError):
                    target = self._out / node / log.relative_to(folder)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(log, target)

    def desk(self, person: str) -> str:
        return f"/home/{person}/work"

    def start(self, person: str, command: Sequence[str]) -> subprocess.Popen[str]:
        path = {"PATH": "/opt/adaptdl/bin:/usr/local/bin:/usr/bin:/bin"}
        line = ["sh", "-c", 'cd ~/work; exec "$@"', "sh", *command]
        return self._room.popen(line, "desk", person, path)

    def hand_over(self, name: str, giver: str, taker: str) -> None:
        target = f"{self.desk(taker)}/{Path(name).name}"
        self._room.bash(f"install -o {taker} -m 600 {self.desk(giver)}/{name} {target}", "desk")

    def fetch(self, person: str, name: str, target: Path) -> None:
        shutil.copy(self._room.outside("desk", f"{self.desk(person)}/{name}"), target)

    def unplug(self, node: str) -> None:
        self._room.unplug(node)

    def plug(self, node: str) -> None:
        self._room.plug(node)


class OneUser:
    """Nodes that are home directories of this user, reached by ssh on the loopback interface.

    Args:
        out: Folder for the homes.
    """

    what = "not root: the nodes are directories on this machine, reached by ssh; alice and bob are you"

    def __init__(self, out: Path) -> None:
        self._out = out
        self._nodes = SshNodes(out / "nodes", *NODES)
        self._etcd_port = free_port()

    @property
    def up_options(self) -> Sequence[str]:
        """Options of `cluster up`."""
        etcd = ("--etcd", str(find_etcd()), "--etcd-port", str(self._etcd_port))
        return ("--python", sys.executable, *etcd, "--person", PEOPLE[0], "-F", str(self._nodes.config))

    def __enter__(self) -> OneUser:
        try:
            self._nodes.__enter__()
        except NoSshError as error:
            raise NoSiteError(str(error)) from None
        for person in PEOPLE:
            Path(self.desk(person)).mkdir(parents=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._nodes.__exit__(kind, error, trace)
        for node in NODES:
            self._kill(node)

    def desk(self, person: str) -> str:
        return str(self._out / person / "work")

    def start(self, person: str, command: Sequence[str]) -> subprocess.Popen[str]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        variables: Mapping[str, str] = {
            **os.environ,
            "PATH": path,
            "HOME": str(self._out / person),
            "XDG_CONFIG_HOME": str(self._out / person / ".config"),
        }
        return subprocess.Popen(
            command,
            cwd=self.desk(person),
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def hand_over(self, name: str, giver: str, taker: str) -> None:
        shutil.copy(Path(self.desk(giver)) / name, self.desk(taker))

    def fetch(self, person: str, name: str, target: Path) -> None:
        shutil.copy(Path(self.desk(person)) / name, target)

    def unplug(self, node: str) -> None:
        """Kill everything on a node: a network of its own needs root."""
        self._nodes.stop(node)
        self._kill(node)

    def plug(self, node: str) -> None:
        self._nodes.start(node, find_sshd())

    def _kill(self, node: str) -> None:
        """Kill the processes of a node, by their home directory, until none is started any more."""
        home = str(self._nodes.home(node))
        while True:
            found = []
            for process in psutil.process_iter():
                with suppress(psutil.Error):
                    if process.environ().get("HOME", "") == home:
                        found.append(process)
            if not found:
                return
            for process in found:
                with suppress(psutil.Error):
                    process.send_signal(signal.SIGKILL)
            psutil.wait_procs(found, _SECONDS)


def end(process: subprocess.Popen[str]) -> None:
    """End what was started at a desk, with all that it has started."""
    with suppress(psutil.Error):
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.Error):
                child.kill()
    process.kill()
    process.communicate(timeout=_SECONDS)


def find_site(out: Path) -> Site:
    """Return the best machines that can be had here."""
    return Machines(out) if os.geteuid() == 0 else OneUser(out)
