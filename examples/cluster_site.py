"""The nodes of `make cluster-demo`: machines with one shared folder, or processes of one machine."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1] / "tests" / "support")
)  # machines and etcd are the tests'

from etcd_server import EtcdServer, find_etcd
from machines import NoRoomError, Room, main_process
from units import Unit

NODES = ("a", "b", "c")
_ETCD = """
[Service]
Type=notify
StateDirectory=etcd
ExecStart=/usr/bin/etcd --data-dir=/var/lib/etcd/demo --listen-client-urls=http://0.0.0.0:2379 \\
    --advertise-client-urls=http://store:2379
"""


class Site(Protocol):
    """The nodes, and a folder that all of them see."""

    what: str
    endpoint: str
    folder: str

    def __enter__(self) -> Site: ...

    def __exit__(self, *error: object) -> None: ...

    def outside(self, name: str) -> Path:
        """Return the path of a file in the folder, as the demo sees it."""

    def start(self, node: str, command: Sequence[str]) -> subprocess.Popen[str]:
        """Start a command on a node; what it says goes to a file."""

    def kill(self, process: subprocess.Popen[str]) -> None:
        """Kill the command itself with -9."""


class Machines:
    """A machine for each node, and one for etcd.

    Args:
        out: Folder for what the machines leave.
    """

    what = "three machines, and one with etcd: namespaces of this one that share a network and /shared"
    endpoint = "store:2379"
    folder = "/shared"

    def __init__(self, out: Path) -> None:
        self._out = out
        self._room = Room("store", *NODES, shared=[self.folder])

    def __enter__(self) -> Machines:
        self._room.__enter__()
        try:
            self._room.provide(find_etcd(), "/usr/bin/etcd", "store")
            Unit(_ETCD).start(self._room, "store", self._out / "etcd.log")
        except BaseException:
            self._room.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        logs = self.outside("logs")
        if logs.exists():
            shutil.copytree(logs, self._out / "logs", symlinks=True)
        self._room.close()

    def outside(self, name: str) -> Path:
        return self._room.outside("store", f"{self.folder}/{name}")

    def start(self, node: str, command: Sequence[str]) -> subprocess.Popen[str]:
        return self._room.popen(command, node, log=self._out / f"{node}.log")

    def kill(self, process: subprocess.Popen[str]) -> None:
        main_process(process).kill()


class OneMachine:
    """This machine, with an etcd.

    Args:
        out: Folder for everything.
        why: Reason for which there are no other machines.
    """

    def __init__(self, out: Path, why: str) -> None:
        self._out = out
        self.what = f"the nodes are processes of this machine ({why})"
        self.folder = str(out)
        self._etcd = EtcdServer()
        self._started: list[subprocess.Popen[str]] = []

    def __enter__(self) -> OneMachine:
        self._etcd.start()
        self.endpoint = self._etcd.endpoint
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._started:
            process.kill()
            process.wait()
        self._etcd.stop()

    def outside(self, name: str) -> Path:
        return self._out / name

    def start(self, node: str, command: Sequence[str]) -> subprocess.Popen[str]:
        with (self._out / f"{node}.log").open("a") as log:
            process = subprocess.Popen(command, cwd=self._out, stdout=log, stderr=log, text=True)
        self._started.append(process)
        return process

    def kill(self, process: subprocess.Popen[str]) -> None:
        process.kill()


@contextmanager
def best_site(out: Path) -> Iterator[Site]:
    """Have the best nodes that can be had here."""
    with ExitStack() as stack:
        site: Site
        try:
            site = stack.enter_context(Machines(out))
        except NoRoomError as error:
            site = stack.enter_context(OneMachine(out, str(error)))
        yield site
