"""A systemctl for machines without systemd: starts and stops the units that the EC2 template writes.

It is a program of the machine: it uses nothing but the standard library. A setting of [Service] that it does
not know is an error. What a unit prints is in /var/log/UNIT.log.
"""

from __future__ import annotations

import os
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

KNOWN = (
    *("Type", "User", "WorkingDirectory", "Environment", "EnvironmentFile", "ExecStart", "Restart"),
    *("RestartSec", "StateDirectory", "StateDirectoryMode", "SuccessExitStatus"),
    # without a meaning here
    *("LimitNOFILE", "KillMode", "TimeoutStopSec", "TimeoutStartSec"),
)
CLEAN = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
UNITS = Path("/etc/systemd/system")


class UnitError(Exception):
    """A unit does not exist, has a setting that is not known here, or did not start."""


def settings(unit: str) -> dict[str, list[str]]:
    """Return the settings of a unit's [Service], each with all of its values."""
    name, at, instance = unit.partition("@")
    path = UNITS / f"{name}{at}.service"
    if not path.exists():
        raise UnitError(f"Unit {unit}.service could not be found.")
    found: dict[str, list[str]] = {}
    section = ""
    for line in path.read_text().replace("\\\n", " ").splitlines():
        section = line.strip() if line.startswith("[") else section
        if section != "[Service]" or "=" not in line or line.startswith("#"):
            continue
        key, _, value = line.partition("=")
        if key not in KNOWN:
            raise UnitError(f"the stand-in for systemctl does not know {key}=")
        found.setdefault(key, []).append(value.strip().replace("%i", instance))
    return found


def start(unit: str) -> None:
    """Start a unit, and return when it has started as its type demands."""
    state = settings(unit).get("StateDirectory")
    if state:
        folder = Path("/var/lib", state[0])
        folder.mkdir(exist_ok=True)
        folder.chmod(int(settings(unit).get("StateDirectoryMode", ["0755"])[0], 8))
        owner = settings(unit).get("User", ["root"])[0]
        subprocess.run(["chown", "-R", f"{owner}:", str(folder)], check=True)
    reading, writing = os.pipe()
    with Path(f"/var/log/{unit}.log").open("ab") as log:
        keeper = subprocess.Popen(
            [sys.executable, __file__, "--keep", unit, str(writing)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=CLEAN,
            cwd="/",
            pass_fds=[writing],
            start_new_session=True,
        )
    os.close(writing)
    Path(f"/run/{unit}.pid").write_text(str(keeper.pid))
    if os.read(reading, 1) != b"s":
        raise UnitError(f"Job for {unit}.service failed.")


def stop(unit: str) -> None:
    """Stop a unit, and return when its processes have ended."""
    file = Path(f"/run/{unit}.pid")
    try:
        process = os.pidfd_open(int(file.read_text()))
        signal.pidfd_send_signal(process, signal.SIGTERM)
    except (FileNotFoundError, ProcessLookupError):
        return
    select.select([process], [], [])


def keep(unit: str, started: int | None) -> int:
    """Run the command of a unit, and again after its end as `Restart=` demands."""
    found = settings(unit)
    restart = found.get("Restart", ["no"])[0]
    good = {0, *map(int, " ".join(found.get("SuccessExitStatus", [])).split())}
    while True:
        code = _run(found, started)
        started = None
        print(f"{unit}: its main process ended with {code}", flush=True)
        if restart == "no" or (restart == "on-failure" and code in good):
            return code
        time.sleep(float(found.get("RestartSec", ["0.1"])[0]))


def _run(found: dict[str, list[str]], started: int | None) -> int:
    environment = dict(CLEAN)
    lines = [word for value in found.get("Environment", []) for word in shlex.split(value)]
    for file in found.get("EnvironmentFile", []):
        lines += [line for line in Path(file).read_text().splitlines() if line and line[0] not in "#;"]
    for line in lines:
        name, _, value = line.partition("=")
        environment[name] = value
    notified = None
    if found.get("Type", ["simple"])[0] == "notify":
        notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        environment["NOTIFY_SOCKET"] = path = f"/run/notify-{os.getpid()}-{time.monotonic_ns()}"
        notified.bind(path)
        Path(path).chmod(0o777)
    command = shlex.split(found["ExecStart"][0])
    if user := found.get("User", [""])[0]:
        ids = f'exec setpriv --reuid={user} --regid="$(id -g {user})" --init-groups --inh-caps=-all "$@"'
        command = ["sh", "-c", ids, "sh", *command]
    folder = found.get("WorkingDirectory", ["/"])[0]
    main = subprocess.Popen(command, env=environment, cwd=folder, stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGTERM, lambda *_: _end(main))
    while notified is not None and main.poll() is None:
        ready, _, _ = select.select([notified], [], [], 0.2)
        if ready and re.search(rb"^READY=1$", notified.recv(4096), re.M):
            break
    if started is not None:
        with os.fdopen(started, "wb") as waiting:
            waiting.write(b"s" if notified is None or main.poll() is None else b"")
    return main.wait()


def _end(main: subprocess.Popen[bytes]) -> None:
    """End the main process and then the unit, without a restart."""
    os.kill(main.pid, signal.SIGTERM)
    # this interrupts `main.wait`, which holds a lock
    os.waitpid(main.pid, 0)
    os._exit(0)


def main(words: list[str]) -> int:
    """Do one command of systemctl; the words are those of the EC2 template and of its units."""
    if words[:1] == ["--keep"]:
        return keep(words[1], int(words[2]))
    action, *units = [word for word in words if word != "--now"]
    if action not in ("daemon-reload", "enable", "disable", "start", "stop"):
        raise UnitError(f"the stand-in for systemctl does not know {action}")
    for unit in units:
        unit = unit.removesuffix(".service")
        settings(unit)
        if action == "start" or (action == "enable" and "--now" in words):
            start(unit)
        elif action == "stop" or (action == "disable" and "--now" in words):
            stop(unit)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UnitError as error:
        sys.exit(str(error))
