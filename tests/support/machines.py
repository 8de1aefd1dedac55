"""Several machines on this one that share a network, the folders that a test names, and nothing else.

Each machine of a `Room` has a root file system of its own: a copy-on-write view of this machine's, where the
folders of `EMPTY` and /dev/shm are empty. Its host name, process ids, network and System V IPC are its own.
The clone and the Python environment of the test are visible at their paths, as copies of the machine's own.
Everything that runs in a room ends with it.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import psutil
from commands import ended
from etcd_server import tied

ROOT = Path(__file__).resolve().parents[2]
CLEAN = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
    "ETCDCTL_COMMAND_TIMEOUT": "100s",
}
TOOLS = ("unshare", "nsenter", "setpriv", "ip", "useradd", "mount", "chroot", "bash", "tar")
# the network is the room's own
NETWORK = "10.0.0"
# seconds that a slow and busy machine may need for anything
PATIENCE = 200.0
# of what runs and what is written in a room
UMASK = 0o022
# folders that begin empty on every machine
EMPTY = ("/tmp", "/run", "/var/tmp", "/home", "/mnt", "/root")
# Every room mounts a file system of its own here. For all others this stays an empty folder.
BASE = Path("/run/adaptdl-machines")

# $1: BASE
_ROOM = """
set -eu
mount -t tmpfs -o mode=755 tmpfs "$1"
ip link add hub type bridge
ip link set hub up
echo ready
sleep infinity & wait  # unlike sleep, bash waits for the orphans that process 1 adopts
"""

# $1: BASE, $2: name of the machine, $3: its /etc/hosts, and four lists, with "--" between them: EMPTY,
# shared folders, needed paths that have to be mounted, all needed paths. Every user may go to the last.
_MACHINE = """
set -eu
shopt -s nullglob
umask 022
base=$1 name=$2 hosts=$3; shift 3
own=$base/machines/$name
layer() {  # a copy-on-write view of the current folder, whatever its name, at $2
    mkdir -p "$own/upper$1" "$own/work$1" "$2"
    mount -t overlay overlay -o "lowerdir=.,upperdir=$own/upper$1,workdir=$own/work$1" "$2"
}
echo "$name" > /proc/sys/kernel/hostname
(cd /; layer root "$own/root")
cd "$own/root"
while [ "$1" != -- ]; do
    mkdir -p ".$1"; mount -t tmpfs -o mode=755 tmpfs ".$1"; shift
done; shift
chmod 1777 tmp var/tmp
mount -t proc proc proc
mount -t sysfs sysfs sys
mount -t tmpfs -o mode=755 tmpfs dev
cp -a /dev/null /dev/zero /dev/full /dev/random /dev/urandom /dev/tty /dev/nvidia* dev/
ln -s /proc/self/fd dev/fd; ln -s fd/0 dev/stdin; ln -s fd/1 dev/stdout; ln -s fd/2 dev/stderr
mkdir dev/shm dev/pts
mount -t tmpfs -o mode=1777 tmpfs dev/shm
mount -t devpts -o newinstance,ptmxmode=666 devpts dev/pts
ln -s pts/ptmx dev/ptmx
while [ "$1" != -- ]; do
    mkdir -p "$base/shared$1" ".$1"; mount --bind "$base/shared$1" ".$1"; shift
done; shift
while [ "$1" != -- ]; do
    (cd "$1"; layer "$#" "$own/root$1"); shift
done; shift
for path; do
    while path=${path%/*}; [ "$path" ]; do chmod a+rx ".$path"; done
done
rm -f etc/hosts
echo "$hosts" > etc/hosts
echo "$name" > etc/hostname
exec chroot . bash -c 'echo ready; sleep infinity & wait'  # ready means: this process's root is the machine's
"""

# What a room needs of this machine, in namespaces of its own. Where it has that, a failing room is a defect.
_ABLE = """
set -e
mount -t tmpfs tmpfs /mnt
mkdir /mnt/upper /mnt/work /mnt/root
mount -t overlay overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work /mnt/root
mount -t proc proc /mnt/root/proc
mount -t sysfs sysfs /mnt/root/sys
ip link add hub type bridge
ip link add one type veth peer name other
"""


class NoRoomError(Exception):
    """This machine has not what a room needs, and what that is."""


def _needed() -> list[str]:
    """Return the paths of this machine that programs of the test need on every machine."""
    paths = [ROOT, Path(sys.prefix), Path(sys.base_prefix)]
    return list(dict.fromkeys(str(one) for path in paths for one in (path, path.resolve())))


def _hidden(path: str) -> bool:
    """Return whether a machine has to mount this path, because its view of / does not show it."""
    below = any(Path(path).is_relative_to(folder) for folder in EMPTY)
    return below or Path(path).stat().st_dev != Path("/").stat().st_dev


@cache
def _lacking(probe: str) -> str:
    """Return what this machine says where it has not what a room needs, else nothing."""
    spaces = ["--mount", "--propagation=private", "--net", "--pid", "--ipc", "--uts", "--fork"]
    done = ended(["unshare", *spaces, "bash", "-c", probe])
    # mount's hint to look at dmesg is indented
    said = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith(" ")]
    return "".join(said[-1:] or [f"exit code {done.returncode}"]) if done.returncode else ""


@contextmanager
def _usual_modes() -> Iterator[None]:
    """Have files and folders that are made readable for all, whatever the umask of the test."""
    before = os.umask(UMASK)
    try:
        yield
    finally:
        os.umask(before)


def _ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", process.communicate()[1]


def main_process(process: subprocess.Popen[str]) -> psutil.Process:
    """Return the command itself: what was started has entered the machine and waits for it."""
    (child,) = psutil.Process(process.pid).children()
    return child


class Room:
    """`with Room("etcd0", "node0", "node1", shared=["/shared"])`: machines, and folders that all of them see.

    Args:
        names: Host names of the machines. Each can reach the others by these.
        shared: Folders that are the same on every machine, and empty at first.
    """

    def __init__(self, *names: str, shared: Sequence[str] = ()) -> None:
        self.addresses = {name: f"{NETWORK}.{10 + number}" for number, name in enumerate(names)}
        self._shared = shared
        self._started: list[subprocess.Popen[str]] = []
        # the first process of each machine, as this machine numbers it
        self._first: dict[str, int] = {}

    def __enter__(self) -> Room:
        missing = [tool for tool in TOOLS if shutil.which(tool) is None]
        if os.geteuid() != 0 or missing:
            raise NoRoomError(f"needs root{''.join(f', {tool}' for tool in missing)}")
        if lacking := _lacking(_ABLE):
            raise NoRoomError(f"no namespaces or overlay file system here: {lacking}")
        BASE.mkdir(mode=0o755, exist_ok=True)
        spaces = ["--mount", "--propagation=private", "--net", "--pid", "--fork", "--kill-child"]
        unshare = str(shutil.which("unshare"))
        self._room = self._open(tied([unshare, *spaces, "bash", "-c", _ROOM, "room", str(BASE)]))
        try:
            _ready(self._room)
            self._inside = main_process(self._room).pid
            self._make_machines()
        except BaseException:
            self.close()
            raise
        return self

    def _open(self, command: Sequence[str]) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)

    def _make_machines(self) -> None:
        needed = _needed()
        hosts = ["127.0.0.1 localhost", *(f"{ip} {name}" for name, ip in self.addresses.items())]
        hidden = filter(_hidden, needed)
        given = [*EMPTY, "--", *self._shared, "--", *hidden, "--", *needed]
        spaces = ["--mount", "--propagation=private", "--net", "--pid", "--ipc", "--uts", "--fork"]
        enter = ["nsenter", "-t", str(self._inside), "-m", "-n", "-p"]
        script = ["bash", "-c", _MACHINE, "machine", str(BASE)]
        begun = {
            name: self._open(
                [*enter, "unshare", *spaces, "--kill-child", *script, name, "\n".join(hosts), *given]
            )
            for name in self.addresses
        }
        self._started += begun.values()
        for name, process in begun.items():
            _ready(process)
            (first,) = main_process(process).children()
            self._first[name] = first.pid
        for number, (name, address) in enumerate(self.addresses.items()):
            pid, end = self._first[name], f"hub{number}"
            joined = f"link add {end} type veth peer name eth0 netns {pid}\nlink set {end} master hub up"
            self._network(self._inside, joined)
            self._network(pid, f"link set lo up\naddr add {address}/24 dev eth0\nlink set eth0 up")

    @staticmethod
    def _network(pid: int, commands: str) -> None:
        """Run commands of ip in the network of a process."""
        line = ["nsenter", "-t", str(pid), "-n", "ip", "-batch", "-"]
        done = subprocess.run(line, input=commands + "\n", capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{commands}\n{done.stderr}"

    def close(self) -> None:
        """End every process of every machine; the files that they wrote are gone with them."""
        if self._room.poll() is None:
            # With the first process of the room the kernel kills all others. Its parent ends after them.
            os.kill(main_process(self._room).pid, signal.SIGKILL)
        self._room.communicate()
        for process in self._started:
            process.communicate()

    def __exit__(self, *error: object) -> None:
        self.close()

    def popen(
        self,
        command: Sequence[str],
        machine: str,
        user: str = "root",
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> subprocess.Popen[str]:
        """Start a command on a machine as a user, with nothing but this environment, and a usual umask."""
        line = ["nsenter", "-t", str(self._first[machine]), "-m", "-n", "-p", "-i", "-u", "-r", "-w"]
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
            umask=UMASK,
        )
        if log:
            output.close()  # type: ignore[union-attr]
        self._started.append(process)
        return process

    def popen_beside(
        self, command: Sequence[str], machine: str, log: Path | None = None
    ) -> subprocess.Popen[str]:
        """Start a command in a machine's network with the files and environment of the test.

        It ends with the room. Its errors go to the log, or else to a pipe.
        """
        errors = log.open("a") if log else subprocess.PIPE
        process = subprocess.Popen(
            ["nsenter", "-t", str(self._first[machine]), "-n", "-p", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        if log:
            errors.close()  # type: ignore[union-attr]
        self._started.append(process)
        return process

    def bash(
        self,
        text: str,
        machine: str,
        user: str = "root",
        folder: str = "/",
        env: Mapping[str, str] | None = None,
        code: int = 0,
    ) -> str:
        """Run a block of shell to its end, and return what it said; it has to end with this exit code."""
        whole = f"cd {shlex.quote(folder)}\n{text}"
        process = self.popen(["bash", "-euo", "pipefail", "-c", whole], machine, user, env)
        said, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == code, f"as {user} on {machine}:\n{text}\n{said}"
        return said

    def everywhere(self, text: str, user: str = "root", folder: str = "/") -> dict[str, str]:
        """Run a block of shell on every machine, and return what it said on each.

        A user that a block adds has the same number everywhere, because every machine runs the same blocks.
        """
        return {machine: self.bash(text, machine, user, folder) for machine in self.addresses}

    def outside(self, machine: str, path: str) -> Path:
        """Return the path by which this machine sees a path of one of the room."""
        return Path(f"/proc/{self._first[machine]}/root{path}")

    def write(self, path: str, text: str, *machines: str) -> None:
        """Write a file as root that all can read, on these machines (none: on all)."""
        for machine in machines or self.addresses:
            file = self.outside(machine, path)
            with _usual_modes():
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text)

    def read(self, path: str, machine: str) -> str:
        """Read a file as root."""
        return self.outside(machine, path).read_text()

    def copy(self, path: str, giver: str, *takers: str) -> None:
        """Copy a file or a folder to the same path of other machines, with rights and names of owners."""
        folder, name = shlex.quote(str(Path(path).parent)), shlex.quote(Path(path).name)
        packed = self.bash(f"tar -C {folder} -c {name} | base64", giver)
        for taker in takers:
            self.write("/run/packed", packed, taker)
            self.bash(
                f"mkdir -p {folder}; base64 -d /run/packed | tar -C {folder} -xp; rm /run/packed", taker
            )

    def install_ourselves(self, folder: str) -> None:
        """Have this test's environment at a folder of every machine, as if it had been installed there.

        NoRoomError where other users cannot use it, and root can.
        """
        self.everywhere(f"mkdir -p {folder}\nmount --bind {shlex.quote(sys.prefix)} {folder}")
        use = [f"{folder}/bin/python", "-c", "import adaptdl_elastic.agent.launch"]
        machine = next(iter(self.addresses))
        asked = self.popen(use, machine, "nobody")
        said, _ = asked.communicate(timeout=PATIENCE)
        if asked.returncode:
            self.bash(shlex.join(use), machine)
            raise NoRoomError(f"other users cannot use this environment: {said.strip()[-300:]}")

    def provide(self, source: Path, path: str, *machines: str) -> None:
        """Put a program of this machine where these machines (none: all) have none, or another one."""
        for machine in machines or self.addresses:
            target = self.outside(machine, path)
            with _usual_modes():
                target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
            target.chmod(0o755)

    def unplug(self, machine: str) -> None:
        """Cut a machine off the network."""
        self._link(machine, "down")

    def plug(self, machine: str) -> None:
        """Connect a machine that was unplugged."""
        self._link(machine, "up")

    def _link(self, machine: str, state: str) -> None:
        self._network(self._inside, f"link set hub{list(self.addresses).index(machine)} {state}")
