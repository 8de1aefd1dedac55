"""Start, keep and stop the node service: what `adaptdl cluster` runs on a node over ssh.

Where the user has a `systemd --user`, a unit keeps the service, and starts it at boot if the user may linger.
Elsewhere a small process (`keep`) starts it again when it dies; nothing starts that one at boot.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from adaptdl_elastic import _own_python, _program
from adaptdl_elastic._whole_file import write_whole
from adaptdl_elastic.agent.cluster.etcd_server import EtcdServer
from adaptdl_elastic.agent.machine.kept_process import KeptProcess
from adaptdl_elastic.agent.service.agents import Agents
from adaptdl_elastic.agent.service.blobs import Blobs
from adaptdl_elastic.agent.service.decisions import STOP_SECONDS
from adaptdl_elastic.agent.service.supervisor import Supervisor
from adaptdl_elastic.rendezvous.local.addresses import NoPortError
from adaptdl_elastic.rendezvous.services.etcd_gateway import EtcdError
from adaptdl_elastic.rendezvous.services.service_client import ServiceClient, person_context
from adaptdl_elastic.rendezvous.services.service_config import ServiceDirectory

READY_SECONDS = 90.0
"""Seconds that a service may take to be ready."""

_LOOK_SECONDS = 0.05
_AGAIN_SECONDS = 1.0  # until a service that has died is started again
_MODULE = "adaptdl_elastic.agent.service"


class LifecycleError(Exception):
    """The service cannot be started or stopped; the message says why."""


def run(directory: ServiceDirectory) -> int:
    """Be the service until SIGTERM."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", force=True)
    directory.path.chmod(0o700)  # output, checkpoints and working directories below are for this user only
    config = directory.read_config()
    try:
        supervisor = Supervisor(config, directory)
        supervisor.prepare()
    except (NoPortError, EtcdError) as error:
        raise LifecycleError(str(error)) from None
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: supervisor.stop())
    ready = {
        "pid": os.getpid(),
        "fingerprint": fingerprint(directory),
        "port": supervisor.record.port,
        "slots": supervisor.record.slots,
    }
    # a service that the store does not list yet is not ready
    supervisor.run(lambda: write_whole(directory.state / "service.json", json.dumps(ready)))
    return 0


def keep(directory: ServiceDirectory) -> int:
    """Start the service again whenever it dies, until SIGTERM."""
    stopping = False
    child: subprocess.Popen[bytes] | None = None

    def stop(*_: object) -> None:
        nonlocal stopping
        stopping = True
        if child is not None and child.poll() is None:
            child.terminate()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    while not stopping:
        child = subprocess.Popen(service_command("run", directory))
        child.wait()
        if not stopping:
            time.sleep(_AGAIN_SECONDS)
    return 0


def service_command(action: str, directory: ServiceDirectory) -> list[str]:
    """Return the command line of an action of the service."""
    return _own_python.module(_MODULE, action, str(directory.path))


def fingerprint(directory: ServiceDirectory) -> str:
    """Return a digest of what a running service has read at its start: its files, interpreter and version."""
    parts = [_program.version(), sys.executable]
    for path in (directory.path / "service.json", directory.ca, directory.cert, directory.key):
        parts.append(hashlib.sha256(path.read_bytes()).hexdigest())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def start(directory: ServiceDirectory) -> dict[str, Any]:
    """Have the service run as its files say; return what it says of itself.

    A service that runs so already is left alone.

    Raises:
        LifecycleError: it does not become ready.
    """
    with _turn(directory):
        ready = _running(directory)
        if ready is not None and ready["fingerprint"] == fingerprint(directory):
            return {**ready, "kept_by": _kept_by(directory), "changed": False}
        _end_service(directory)
        (directory.state / "service.json").unlink(missing_ok=True)
        size = directory.service_log.stat().st_size if directory.service_log.exists() else 0
        if has_user_systemd():
            _start_unit(directory)
        else:
            KeptProcess.start(
                service_command("keep", directory),
                directory.state / "keeper.json",
                directory.service_log,
                directory.path,
                os.environ,
            )
        return {**_wait_until_ready(directory, size), "kept_by": _kept_by(directory), "changed": True}


def stop(directory: ServiceDirectory) -> None:
    """End the service, its agents, and then etcd."""
    with _turn(directory):
        _end_service(directory)
        config = directory.read_config()
        client = ServiceClient(person_context(directory.ca))
        agents = Agents(config, directory, 1, Blobs(directory.blobs), client, lambda: None)
        agents.stop_all(STOP_SECONDS)
        if config.etcd is not None:
            EtcdServer(config, config.etcd, directory).stop()
        (directory.state / "service.json").unlink(missing_ok=True)


def _end_service(directory: ServiceDirectory) -> None:
    """End the service and what keeps it; its agents and etcd go on."""
    if unit_path(directory).exists() and has_user_systemd():
        _systemctl("disable", "--now", unit_path(directory).name)
        unit_path(directory).unlink()
    keeper = KeptProcess.find(directory.state / "keeper.json")
    if keeper is not None:
        keeper.signal(signal.SIGTERM)
        if not keeper.wait(15.0):
            keeper.kill_group()
        keeper.forget()


def _running(directory: ServiceDirectory) -> dict[str, Any] | None:
    """Return what the running service has said of itself; None if none runs."""
    if KeptProcess.find(directory.state / "keeper.json") is None and not _unit_is_active(directory):
        return None
    try:
        ready = json.loads((directory.state / "service.json").read_text())
        os.kill(int(ready["pid"]), 0)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return dict(ready)


def _wait_until_ready(directory: ServiceDirectory, log_start: int) -> dict[str, Any]:
    deadline = time.monotonic() + READY_SECONDS
    keeper = KeptProcess.find(directory.state / "keeper.json")
    while time.monotonic() < deadline:
        ready = _running(directory)
        if ready is not None and ready.get("fingerprint") == fingerprint(directory):
            return ready
        said = _said(directory, log_start)
        if said.startswith("adaptdl service:") or (keeper is not None and not keeper.alive):
            _end_service(directory)
            raise LifecycleError(said.removeprefix("adaptdl service:").strip())
        time.sleep(_LOOK_SECONDS)
    raise LifecycleError(
        f"the service is not ready after {READY_SECONDS:g} s: {_said(directory, log_start)}; "
        f"see {directory.service_log}"
    )


def _said(directory: ServiceDirectory, log_start: int) -> str:
    try:
        with directory.service_log.open("rb") as file:
            file.seek(log_start)
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return next(
        (line for line in reversed(lines) if line.startswith("adaptdl service:")), (lines or [""])[-1]
    )


@contextlib.contextmanager
def _turn(directory: ServiceDirectory) -> Iterator[None]:
    directory.state.mkdir(parents=True, exist_ok=True)
    with (directory.state / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LifecycleError(
                "another adaptdl cluster command changes this node now: wait until it ends"
            ) from None
        yield


# systemd


def unit_path(directory: ServiceDirectory) -> Path:
    """Return where the user's unit is, named after the cluster."""
    base = os.environ.get("XDG_CONFIG_HOME")
    config = Path(base) if base else Path.home() / ".config"
    return config / "systemd" / "user" / f"adaptdl-{directory.path.name}.service"


def unit_text(directory: ServiceDirectory) -> str:
    """Return the unit that keeps the service."""
    words = " ".join(f'"{word}"' for word in service_command("run", directory)).replace("%", "%%")
    log = str(directory.service_log).replace("%", "%%")
    return f"""[Unit]
Description=adaptdl node service of cluster {directory.path.name}

[Service]
ExecStart={words}
StandardOutput=append:{log}
StandardError=append:{log}
Restart=always
RestartSec={_AGAIN_SECONDS:g}
# agents and etcd outlive the service, and the next one finds them
KillMode=process

[Install]
WantedBy=default.target
"""


def has_user_systemd() -> bool:
    """Return whether this user has a systemd that can keep a service."""
    if shutil.which("systemctl") is None:
        return False
    asked = subprocess.run(
        ["systemctl", "--user", "show-environment"], capture_output=True, timeout=30, check=False
    )
    return asked.returncode == 0


def _start_unit(directory: ServiceDirectory) -> None:
    path = unit_path(directory)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(unit_text(directory))
    _systemctl("daemon-reload")
    _systemctl("enable", "--now", path.name)
    if shutil.which("loginctl"):  # without it the service ends with the user's last login
        subprocess.run(["loginctl", "enable-linger"], capture_output=True, timeout=30, check=False)


def _systemctl(*arguments: str) -> None:
    done = subprocess.run(
        ["systemctl", "--user", *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode:
        raise LifecycleError(f"systemctl --user {' '.join(arguments)}: {done.stderr.strip()}")


def _unit_is_active(directory: ServiceDirectory) -> bool:
    path = unit_path(directory)
    if not path.exists() or not has_user_systemd():
        return False
    command = ["systemctl", "--user", "is-active", "--quiet", path.name]
    return subprocess.run(command, capture_output=True, timeout=30, check=False).returncode == 0


def _kept_by(directory: ServiceDirectory) -> str:
    return "systemd" if unit_path(directory).exists() else "a process of its own"
