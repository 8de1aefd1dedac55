"""Run tests in rooms that are unlike the one they were written in (`make rooms`, as root).

`user`: an ordinary user with a new home, Debian's Python, umask 077, a TMPDIR of 100 characters, `LANG=C`, no
IPv6, a machine that was booted a minute ago, a clone in a path with a space.
`root`: root, Debian's Python, umask 022, a clone in a path with a space.

Debian's Python finds the packages of the environment that runs this, so both must have the same version x.y.
Each room runs the quick tests, and those with processes that touch files, sockets, clocks and terminals.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
USER = 12345  # a number that no account has
WITH_PROCESSES = [
    "tests/agent/test_standalone.py",
    "tests/agent/test_on_a_terminal.py",
    "tests/autoscaler/test_lock.py",
    "tests/library/test_deferred.py",
    "tests/rendezvous/test_etcd_server.py",
    "tests/rendezvous/test_local_store.py",
    "tests/services/test_bundle.py",
    "tests/test_packaging.py",
]
PYTHON = f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"
AS_USER = f"setpriv --reuid {USER} --regid {USER} --clear-groups"
WITHOUT_IPV6 = "ip link set lo up; sysctl -qw net.ipv6.conf.all.disable_ipv6=1"


def clone(place: Path) -> Path:
    """Copy what git tracks, or would, into a path with a space, beside shared/; return it."""
    there = place / "a clone" / "adaptdl elastic"
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if os.path.lexists(ROOT / name):
            (there / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, there / name, follow_symlinks=False)
    shared = ROOT.parent / "shared"
    if shared.is_dir():
        (there.parent / "shared").symlink_to(shared.resolve())
    return there


def environment(clone: Path) -> Path:
    """Make an environment of Debian's Python with this one's packages and the clone; return its Python."""
    subprocess.run([PYTHON, "-m", "venv", "--without-pip", clone / ".venv"], check=True)
    python = clone / ".venv" / "bin" / "python"
    (site,) = (clone / ".venv").glob("lib/*/site-packages")
    packages = [path for path in sys.path if path.endswith("site-packages")]
    (site / "packages.pth").write_text("\n".join([*packages, ""]))
    install = ["pip", "--quiet", "--disable-pip-version-check", "--python"]
    options = ["install", "--quiet", "--no-deps", "--no-build-isolation", "-e", clone]
    subprocess.run([sys.executable, "-m", *install, python, *options], check=True)
    # programs of the other environment that tests look for beside their Python
    for program in Path(sys.executable).parent.iterdir():
        if program.name in ("etcd", "etcdctl", "uv"):
            shutil.copy2(program, python.parent / program.name)
    return python


def run(room: str, clone: Path, python: Path, home: Path) -> int:
    """Run the tests in a room; return the exit code of the first run that fails, or 0."""
    temporary = home / ("t" * (100 - len(str(home)) - 1))
    temporary.mkdir(mode=0o700)
    if room == "user":
        for path in (clone.parent, home):
            subprocess.run(["chown", "-hR", f"{USER}:{USER}", path], check=True)
    variables = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": str(home),
        "LANG": "C" if room == "user" else "C.UTF-8",
        "TMPDIR": str(temporary) if room == "user" else "/tmp",
    }
    pytest = f"'{python}' -m pytest -q -n 2 --dist worksteal -p no:cacheprovider"
    commands = [
        f"{pytest} --quick",
        f"{pytest} --once -m 'processes or etcd or slow' {' '.join(WITH_PROCESSES)}",
    ]
    for command in commands:
        enter = ["bash", "-c", f"umask 022; {command}"]
        if room == "user":
            # the time since boot begins at one minute: another clock than this machine's for its processes
            since_boot = int(time_since_boot())
            inside = f'{WITHOUT_IPV6}; exec {AS_USER} bash -c "umask 077; {command}"'
            enter = [
                "unshare",
                "--net",
                "--time",
                "--boottime",
                str(60 - since_boot),
                "--fork",
                "bash",
                "-c",
                inside,
            ]
        code = subprocess.run(enter, cwd=clone, env=variables, check=False).returncode
        if code:
            return code
    return 0


def time_since_boot() -> float:
    """Return the seconds since this machine was booted."""
    return float(Path("/proc/uptime").read_text().split()[0])


def main() -> int:
    """Run the tests in each room, or in those that are named; return 1 if one fails."""
    if os.geteuid() or not Path(PYTHON).exists():
        print(f"make rooms: needs root, and Debian's {PYTHON}")
        return 2
    failed = []
    for room in sys.argv[1:] or ["user", "root"]:
        print(f"room {room}:", flush=True)
        with tempfile.TemporaryDirectory(prefix="rooms-", dir="/var/tmp") as name:
            Path(name).chmod(0o755)
            home = Path(name) / "home"
            home.mkdir()
            there = clone(Path(name))
            if run(room, there, environment(there), home):
                failed.append(room)
    print(f"failed: {', '.join(failed)}" if failed else "passed in all rooms")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
