"""Several machines on this one, to run the pages of the documentation on as they stand.

A `Room` has a root file system of its own, which begins as a copy-on-write view of this machine's: users and
files that a test adds there are gone with it. Each machine in it is a network namespace with a host name and
an address. `Unit` runs a unit file as systemd would: its user, environment, directories and command.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import psutil
from etcd_server import tied

ROOT = Path(__file__).resolve().parents[2]
CLEAN = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
TOOLS = ("unshare", "nsenter", "setpriv", "ip", "useradd", "mount", "chroot")
NETWORK = "10.0.0"  # the network is the room's own
PATIENCE = 200.0  # seconds that a slow and busy machine may need for anything

_SETUP = """
set -eu
mount -t tmpfs -o mode=755 tmpfs /mnt
mkdir /mnt/upper /mnt/work /mnt/root
mount -t overlay overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work /mnt/root
cd /mnt/root
mount -t proc proc proc
mount --rbind /sys sys
mount --rbind /dev dev
mount -t tmpfs -o mode=1777 tmpfs dev/shm
mount -t tmpfs -o mode=755 tmpfs run
mount -t tmpfs -o mode=1777 tmpfs tmp
for path in "$@"; do  # what is needed and lies in another file system, or where other users may not go
    mkdir -p ".$path"
    mount --rbind "$path" ".$path"
done
exec chroot . sh -c "echo ready; exec sleep infinity"  # ready means: this process's root is the room's
"""


class NoRoomError(Exception):
    """This machine cannot have a room, and why."""


def _mount_points(paths: Sequence[Path]) -> list[str]:
    """Return the mount points, other than /, of the file systems that hold these paths."""
    found = []
    for path in paths:
        point = next(one for one in (path, *path.parents) if os.path.ismount(one))
        if str(point) != "/" and str(point) not in found:
            found.append(str(point))
    return found


class Room:
    """`with Room({"etcd0": ..., "node0": ...})`: machines by name, with the number of each one's address."""

    def __init__(self, *names: str) -> None:
        self.addresses = {name: f"{NETWORK}.{10 + number}" for number, name in enumerate(names)}
        self._started: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Room:
        missing = [tool for tool in TOOLS if shutil.which(tool) is None]
        if os.geteuid() != 0 or missing:
            raise NoRoomError(f"needs root{''.join(f', {tool}' for tool in missing)}")
        needed = [ROOT, Path(sys.prefix), Path(sys.base_prefix)]
        spaces = ["--mount", "--propagation=private", "--net", "--pid", "--ipc", "--fork", "--kill-child"]
        self._init = subprocess.Popen(
            tied(
                [str(shutil.which("unshare")), *spaces, "bash", "-c", _SETUP, "room", *_mount_points(needed)]
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._init.stdout is not None
        if self._init.stdout.readline() != "ready\n":
            said = self._init.communicate()[1]
            raise NoRoomError(f"no namespaces or overlay file system here: {said.strip()}")
        (inside,) = psutil.Process(self._init.pid).children()
        self._enter = ["nsenter", "-t", str(inside.pid), "-m", "-n", "-p", "-i", "-r", "-w"]
        try:
            self._furnish(needed)
        except BaseException:
            self.close()
            raise
        return self

    def _furnish(self, needed: Sequence[Path]) -> None:
        hosts = ["127.0.0.1 localhost", *(f"{ip} {name}" for name, ip in self.addresses.items())]
        lines = ["umask 022", f"printf '%s\\n' {shlex.join(hosts)} > /etc/hosts"]
        lines += [f"chmod a+rx {one}" for path in needed for one in reversed(path.parents)]
        lines += ["ip link set lo up", "ip link add hub type bridge", "ip link set hub up"]
        for number, (name, address) in enumerate(self.addresses.items()):
            lines += [
                f"ip netns add {name}",
                f"ip link add hub{number} type veth peer name eth0 netns {name}",
                f"ip link set hub{number} master hub up",
                f"ip -n {name} link set lo up",
                f"ip -n {name} addr add {address}/24 dev eth0",
                f"ip -n {name} link set eth0 up",
            ]
        self.bash("\n".join(lines))

    def close(self) -> None:
        """End every process of the room; what it held is gone with it."""
        self._init.kill()  # and with it, by the kernel, the room's process 1 and all others in it
        self._init.communicate()
        for process in self._started:
            process.communicate()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def popen(
        self,
        command: Sequence[str],
        machine: str = "",
        user: str = "root",
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> subprocess.Popen[str]:
        """Start a command on a machine (none: in the room) as a user, with nothing but this environment."""
        line = [*self._enter]
        if machine:
            name = f'echo {machine} > /proc/sys/kernel/hostname; exec "$@"'
            line += ["ip", "netns", "exec", machine, "unshare", "--uts", "sh", "-c", name, "sh"]
        if user != "root":
            ids = f'exec setpriv --reuid={user} --regid="$(id -g {user})" --init-groups --inh-caps=-all "$@"'
            line += ["sh", "-c", ids, "sh"]
        home = "/root" if user == "root" else f"/home/{user}"
        output = log.open("a") if log else subprocess.PIPE
        process = subprocess.Popen(
            [*line, *command],
            env={**CLEAN, "HOME": home, "USER": user, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            cwd="/",
        )
        if log:
            output.close()  # type: ignore[union-attr]
        self._started.append(process)
        return process

    def bash(
        self,
        text: str,
        machine: str = "",
        user: str = "root",
        folder: str = "/",
        env: Mapping[str, str] | None = None,
        code: int = 0,
    ) -> str:
        """Run a block of shell to its end, and return what it said; it has to end with this exit code."""
        whole = f"cd {shlex.quote(folder)}\n{text}"
        process = self.popen(["bash", "-euo", "pipefail", "-c", whole], machine, user, env)
        said, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == code, f"as {user} on {machine or 'the host'}:\n{text}\n{said}"
        return said

    def write(self, path: str, text: str) -> None:
        """Write a file of the room as root."""
        folder, name = shlex.quote(str(Path(path).parent)), shlex.quote(Path(path).name)
        self.bash(f"mkdir -p {folder}\ncd {folder}\ncat > {name} <<'END'\n{text}\nEND")

    def read(self, path: str) -> str:
        """Read a file of the room as root."""
        return self.bash(f"cat {shlex.quote(path)}")

    def install_ourselves(self, folder: str) -> None:
        """Have this test's environment at a folder, as if it had been installed there.

        NoRoomError where other users cannot use it.
        """
        self.bash(f"mkdir -p {folder}\nmount --bind {shlex.quote(sys.prefix)} {folder}")
        asked = self.popen(
            [f"{folder}/bin/python", "-c", "import adaptdl_elastic.agent.launch"], user="nobody"
        )
        said, _ = asked.communicate(timeout=PATIENCE)
        if asked.returncode:
            raise NoRoomError(f"other users cannot use this environment: {said.strip()[-300:]}")

    def provide(self, source: Path, path: str) -> None:
        """Put a program of this machine where the room has none, or another one."""
        self.bash(f"install -D -m 755 {shlex.quote(str(source))} {shlex.quote(path)}")


def main_process(process: subprocess.Popen[str]) -> psutil.Process:
    """Return the command itself: what was started has entered the room and waits for it."""
    (child,) = psutil.Process(process.pid).children()
    return child


@dataclass
class Unit:
    """A service as systemd would run it; what is not known here is an error, not left out.

    Args:
        text: the unit file, and what drop-ins add to it.
        instance: what `%i` stands for.
    """

    text: str
    instance: str = ""
    settings: dict[str, list[str]] = field(init=False)

    _KNOWN = (
        *("Type", "User", "WorkingDirectory", "Environment", "EnvironmentFile", "ExecStartPre", "ExecStart"),
        *("StateDirectory", "StateDirectoryMode", "LogsDirectory", "LogsDirectoryMode"),
        # what decides when it is stopped and started again, which the test does itself
        *("KillMode", "TimeoutStopSec", "SuccessExitStatus", "Restart", "RestartSec", "LimitNOFILE"),
    )

    def __post_init__(self) -> None:
        self.settings = {}
        section = ""
        for line in self.text.replace("\\\n", " ").splitlines():
            line = line.strip()
            if line.startswith("["):
                section = line
            if section != "[Service]" or "=" not in line or line.startswith("#"):
                continue
            name, _, value = line.partition("=")
            assert name in self._KNOWN, f"tests/support/machines.py does not know {name}="
            values = self.settings.setdefault(name, [])
            if not value:
                values.clear()  # an empty assignment takes back what was said before
            else:
                values.append(value.replace("%i", self.instance).replace("%%", "%"))

    def _one(self, name: str, default: str = "") -> str:
        return self.settings.get(name, [default])[-1]

    @property
    def user(self) -> str:
        """Who it runs as."""
        return self._one("User", "root")

    def environment(self, room: Room) -> dict[str, str]:
        """Return `Environment=` and the files of `EnvironmentFile=`, which systemd reads as root."""
        lines = [word for value in self.settings.get("Environment", []) for word in shlex.split(value)]
        for path in self.settings.get("EnvironmentFile", []):
            lines += [line for line in room.read(path).splitlines() if line and line[0] not in "#;"]
        return {
            name: shlex.join(shlex.split(value)) for name, _, value in (line.partition("=") for line in lines)
        }

    def start(self, room: Room, machine: str, log: Path) -> Service:
        """Do what `systemctl start` does: make its directories, run its commands, wait until it is ready."""
        for kind, place in (("StateDirectory", "/var/lib"), ("LogsDirectory", "/var/log")):
            for name in self._one(kind).split():
                mode = self._one(f"{kind}Mode", "0755")
                room.bash(
                    f"mkdir -p {place}\ncd {place}\nmkdir -p {name}\n"
                    f"chown -R {self.user}: {name}\nchmod {mode} {name}"
                )
        folder = self._one("WorkingDirectory", "/")
        environment = self.environment(room)
        for line in self.settings.get("ExecStartPre", []):
            room.bash(line, machine, self.user, folder, environment)
        ready = _Ready(room) if self._one("Type") == "notify" else None
        if ready is not None:
            environment["NOTIFY_SOCKET"] = ready.path
        (command,) = self.settings["ExecStart"]
        script = f'cd {shlex.quote(folder)} && exec "$@"'
        words = ["sh", "-c", script, "sh", *shlex.split(command)]
        service = Service(room.popen(words, machine, self.user, environment, log), log)
        if ready is not None:
            ready.wait(service)
        return service


class _Ready:
    """The socket by which a service of `Type=notify` says that it is ready."""

    def __init__(self, room: Room) -> None:
        self.path = f"/run/notify-{os.urandom(4).hex()}"
        outside = f"/proc/{room._enter[2]}/root{self.path}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(outside)
        Path(outside).chmod(0o777)

    def wait(self, service: Service) -> None:
        self._socket.settimeout(1.0)
        said = b""
        while b"READY=1" not in said:
            assert service.process.poll() is None, service.log.read_text()
            with contextlib.suppress(TimeoutError):
                said = self._socket.recv(4096)
        self._socket.close()


@dataclass
class Service:
    """A unit that runs."""

    process: subprocess.Popen[str]
    log: Path

    @property
    def pid(self) -> int:
        """Its main process, as this machine numbers it."""
        return main_process(self.process).pid

    def stop(self) -> int:
        """Send SIGTERM to the main process, as `systemctl stop` does, and return its exit code."""
        os.kill(self.pid, signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        """Wait for its end; the exit code."""
        return self.process.wait(PATIENCE)


def blocks(page: str, language: str, how: str = "") -> list[str]:
    """Return the fenced blocks of a page of docs/ in a language, marked `test=<how>` if it is given."""
    text = (ROOT / "docs" / page).read_text()
    found = re.findall(r"^```(\w+)([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    wanted = f"test={how}" if how else ""
    return [body for lang, info, body in found if lang == language and wanted in info]
