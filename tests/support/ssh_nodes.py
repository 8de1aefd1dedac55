"""Nodes that are reached over ssh: one unprivileged sshd for each, with a home directory of its own."""

from __future__ import annotations

import fcntl
import getpass
import os
import shutil
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from etcd_server import tied
from ports import free_port

_SECONDS = 200.0
_LOCK = Path("/run/adaptdl-tests-sshd.lock")

# what a login says besides the answers: lines that might be some, and lines without an end
_BASHRC = r"""
echo "claimed=by ~/.bashrc"
printf '\r\n{"slots": 7}'
trap 'printf "bye\r\n{}"; echo bye >&2' EXIT
"""


class NoSshError(Exception):
    """This machine has no sshd."""


def find_sshd() -> str:
    """Return the path of sshd; as root install Debian's package where there is none.

    A machine that is a view of this one does not see what is installed after it began.
    """
    if os.geteuid() != 0:
        return _sshd()
    # another worker may be installing it: its files are there before its user
    with _LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with suppress(NoSshError):
            return _sshd()
        install = ("install", "-y", "-qq", "--no-install-recommends", "openssh-server")
        if shutil.which("apt-get") and not _apt_get(*install):
            _apt_get("update", "-qq")
            _apt_get(*install)
        return _sshd()


def _apt_get(*words: str) -> bool:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(["apt-get", *words], env=environment, capture_output=True, check=False)
    return done.returncode == 0


def _sshd() -> str:
    for path in (shutil.which("sshd"), "/usr/sbin/sshd"):
        if path is not None and os.access(path, os.X_OK) and shutil.which("ssh"):
            return path
    raise NoSshError("there is no sshd here: apt-get install openssh-server")


class SshNodes:
    """`with SshNodes(folder, "node1", "node2") as nodes`: `ssh -F nodes.config node1` logs in there.

    Every node is this machine, as this user, with a home directory of its own: `nodes.home("node1")`.
    """

    def __init__(self, folder: Path, *names: str) -> None:
        self.folder, self.names = folder, names
        self.config = folder / "ssh_config"
        self._servers: dict[str, subprocess.Popen[bytes]] = {}
        self._ports: dict[str, int] = {}

    def home(self, name: str) -> Path:
        """Return the home directory of a node."""
        return self.folder / name / "home"

    def __enter__(self) -> SshNodes:
        sshd = find_sshd()
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd asks for it where it is root
        self.folder.mkdir(parents=True, exist_ok=True)
        key = self.folder / "client_key"
        for path in (key, self.folder / "host_key"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)]
            subprocess.run(command, check=True, capture_output=True)
        authorized = self.folder / "authorized_keys"
        authorized.write_text(key.with_suffix(".pub").read_text())
        authorized.chmod(0o600)
        lines = ["Host *", f"  IdentityFile {key}", "  IdentitiesOnly yes", "  UserKnownHostsFile /dev/null"]
        lines += ["  StrictHostKeyChecking no", "  LogLevel ERROR", f"  User {getpass.getuser()}"]
        try:
            for name in self.names:
                self.start(name, sshd)
                lines += [f"Host {name}", "  HostName 127.0.0.1", f"  Port {self._ports[name]}"]
        except BaseException:
            self.close()
            raise
        self.config.write_text("\n".join(lines) + "\n")
        return self

    def start(self, name: str, sshd: str = "") -> None:
        """Start the sshd of a node, again on the same port."""
        self.home(name).mkdir(parents=True, exist_ok=True)
        (self.home(name) / ".bashrc").write_text(_BASHRC)
        (self.folder / "banner").write_text("Authorized users only\n")
        port = self._ports.setdefault(name, free_port())
        config = self.folder / name / "sshd_config"
        path = os.environ.get("PATH", "/usr/bin:/bin")
        config.write_text(
            f"ListenAddress 127.0.0.1\nPort {port}\nHostKey {self.folder / 'host_key'}\n"
            f"AuthorizedKeysFile {self.folder / 'authorized_keys'}\nStrictModes no\nUsePAM no\n"
            f"PasswordAuthentication no\nPidFile none\nPermitRootLogin prohibit-password\n"
            f"Banner {self.folder / 'banner'}\n"
            f'SetEnv "HOME={self.home(name)}" "XDG_DATA_HOME=" "XDG_RUNTIME_DIR=" "PATH={path}" '
            f'"CUDA_VISIBLE_DEVICES="\n'
        )
        log = (self.folder / name / "sshd.log").open("ab")
        with log:
            self._servers[name] = subprocess.Popen(
                tied([sshd or find_sshd(), "-D", "-e", "-f", str(config)]), stdout=log, stderr=log
            )
        deadline = time.monotonic() + _SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1.0).close()
                return
            except OSError:
                said = (self.folder / name / "sshd.log").read_text()
                assert self._servers[name].poll() is None, f"sshd does not start: {said.strip()[-300:]}"
                assert time.monotonic() < deadline, said
                time.sleep(0.01)

    def stop(self, name: str) -> None:
        """End the sshd of a node: nobody can log in any more."""
        server = self._servers.pop(name)
        server.kill()
        server.wait()

    def close(self) -> None:
        """End every sshd."""
        for name in list(self._servers):
            self.stop(name)

    def __exit__(self, *error: object) -> None:
        self.close()
