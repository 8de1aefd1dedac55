"""Run the cluster's etcd on this node: TLS, client certificates, a user for the cluster's keys only."""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import socket
import time
from pathlib import Path

from adaptdl_elastic.agent.machine.kept_process import KeptProcess, end_with_parent, last_line
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.services.etcd_gateway import EtcdError, EtcdGateway
from adaptdl_elastic.rendezvous.services.service_config import (
    ETCD_USER,
    EtcdConfig,
    ServiceConfig,
    ServiceDirectory,
)
from adaptdl_elastic.rendezvous.store.etcd_v3 import range_end
from adaptdl_elastic.rendezvous.store.store_options import read_password
from adaptdl_elastic.rendezvous.text import in_url

ROOT = "root"

_PEER = "unix://etcd-peer:1"
"""Where other members would connect: the socket `etcd-peer:1` in the service's directory.

There are no other members. etcd asks its peers for no password, and on a port of loopback every user of the
node could be one and rewrite the data.
"""

_READY_SECONDS = 60.0  # that etcd may take to serve, with its history to be read
_LOOK_SECONDS = 0.05


class EtcdServer:
    """The etcd of this node. A service that finds it running leaves it as it is.

    Args:
        config: of the node.
        etcd: which etcd runs at which port.
        directory: holds its certificate and passwords.
        place: directory of this machine for its data, log and socket; etcd then ends with the thread that
            starts it. None: `directory`, and it outlives this process.
    """

    def __init__(
        self, config: ServiceConfig, etcd: EtcdConfig, directory: ServiceDirectory, place: Path | None = None
    ) -> None:
        self._config, self._etcd, self._directory = config, etcd, directory
        self._tied, self._place = place is not None, place or directory.path
        self._log = self._place / "etcd.log"
        self._note = (self._place if place else directory.state) / "etcd.json"
        self._process = KeptProcess.find(self._note)

    def ensure(self) -> None:
        """Start etcd unless it runs, and wait until it serves, with its users.

        Raises:
            EtcdError: it does not start.
        """
        if self._process is None or not self._process.alive:
            self._start()
        self._wait()
        self._make_users()

    @property
    def alive(self) -> bool:
        """Whether etcd runs."""
        return self._process is not None and self._process.alive

    def stop(self) -> None:
        """Stop etcd in an orderly way."""
        if self._process is not None:
            self._process.signal(signal.SIGTERM)
            if not self._process.wait(10.0):
                self._process.kill_group()
            self._process.forget()

    def _start(self) -> None:
        host = self._config.host
        url = f"https://{in_url(host)}:{self._etcd.port}"
        try:
            with contextlib.closing(socket.create_server((host, self._etcd.port))):
                pass
        except OSError as error:
            raise EtcdError(
                f"etcd cannot listen on {host}:{self._etcd.port} ({os.strerror(error.errno or 0)}): "
                f"end what listens there, or choose another port with --etcd-port"
            ) from None
        directory = self._directory
        options = {
            "name": "adaptdl",
            "data-dir": str(self._place / "etcd"),
            "listen-client-urls": url,
            "advertise-client-urls": url,
            "listen-peer-urls": _PEER,
            "initial-advertise-peer-urls": _PEER,
            "initial-cluster": f"adaptdl={_PEER}",
            "cert-file": str(directory.cert),
            "key-file": str(directory.key),
            "trusted-ca-file": str(directory.ca),
            "client-cert-auth": "true",
            "auto-compaction-mode": "revision",
            "auto-compaction-retention": "10000",
            "logger": "zap",
            "log-level": "warn",
        }
        # ETCD_* variables would be taken as options
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}
        command = [self._etcd.binary, *(f"--{key}={value}" for key, value in options.items())]
        try:
            how = {"preexec_fn": end_with_parent} if self._tied else {}
            self._process = KeptProcess.start(command, self._note, self._log, self._place, environment, **how)
        except OSError as error:
            raise EtcdError(f"{self._etcd.binary} cannot be started: {error.strerror}") from None

    def _wait(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + _READY_SECONDS
        while time.monotonic() < deadline:
            if not self._process.alive:
                raise EtcdError(f"etcd ended: {last_line(self._log)}")
            try:
                socket.create_connection((self._config.host, self._etcd.port), 1.0).close()
                return
            except OSError:
                time.sleep(_LOOK_SECONDS)
        raise EtcdError(f"etcd does not serve after {_READY_SECONDS:g} s: {last_line(self._log)}")

    def _make_users(self) -> None:
        """Make root and the cluster's user, and demand passwords from now on; do nothing if that was done."""
        passwords = {
            ROOT: read_password(self._directory.path / "root-password"),
            ETCD_USER: read_password(self._directory.path / "password"),
        }
        with EtcdGateway(self._config.endpoint, self._directory.store_options()) as gateway:
            status, said = gateway.ask("authenticate", name=ROOT, password=passwords[ROOT])
            if status == 200:
                return
            if "not enabled" not in said:
                raise EtcdError(f"etcd refuses root's password ({said}): its data are of another cluster")
            for user, password in passwords.items():
                gateway.must("role/add", name=user)
                gateway.must("user/add", name=user, password=password)
                gateway.must("user/changepw", name=user, password=password)
                gateway.must("user/grant", user=user, role=user)
            prefix = Keys(self._config.cluster).root
            permission = {
                "permType": "READWRITE",
                "key": base64.b64encode(prefix.encode()).decode(),
                "range_end": base64.b64encode(range_end(prefix)).decode(),
            }
            gateway.must("role/grant", name=ETCD_USER, perm=permission)
            gateway.must("enable")
