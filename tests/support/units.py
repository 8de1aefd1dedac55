"""The unit files of the documentation, run on a machine as systemd would, and the blocks of its pages."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from machines import PATIENCE, ROOT, Room, main_process


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
            assert name in self._KNOWN, f"tests/support/units.py does not know {name}="
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

    def environment(self, room: Room, machine: str) -> dict[str, str]:
        """Return `Environment=` and the files of `EnvironmentFile=`, which systemd reads as root."""
        lines = [word for value in self.settings.get("Environment", []) for word in shlex.split(value)]
        for path in self.settings.get("EnvironmentFile", []):
            lines += [line for line in room.read(path, machine).splitlines() if line and line[0] not in "#;"]
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
                    f"chown -R {self.user}: {name}\nchmod {mode} {name}",
                    machine,
                )
        folder = self._one("WorkingDirectory", "/")
        environment = self.environment(room, machine)
        for line in self.settings.get("ExecStartPre", []):
            room.bash(line, machine, self.user, folder, environment)
        ready = _Ready(room, machine) if self._one("Type") == "notify" else None
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

    def __init__(self, room: Room, machine: str) -> None:
        self.path = f"/run/notify-{os.urandom(4).hex()}"
        outside = room.outside(machine, self.path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(outside))
        outside.chmod(0o777)

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
