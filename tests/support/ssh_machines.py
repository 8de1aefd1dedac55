"""An sshd on machines of a `Room`, and a person at a desk who logs in there without a password."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from machines import PATIENCE, Room

_LOOK_SECONDS = 0.1
_HOST_KEY = "/etc/sshd_host_key"
# $home: home directory of the person, $user: the person, $public: their public key
_LET_IN = f"""
mkdir -p /run/sshd
[ -f {_HOST_KEY} ] || ssh-keygen -q -t ed25519 -N '' -f {_HOST_KEY}
install -d -o $user -g $user -m 700 $home/.ssh
echo "$public" > $home/.ssh/authorized_keys
chown $user $home/.ssh/authorized_keys
"""
_MAKE_KEY = "mkdir -m 700 .ssh; ssh-keygen -q -t ed25519 -N '' -f .ssh/id_ed25519; cat .ssh/id_ed25519.pub"


def open_ssh(room: Room, sshd: str, desk: str, user: str, machines: Sequence[str], logs: Path) -> None:
    """Have a user of a machine log in on others by `ssh NAME`, and wait until that works.

    Args:
        room: The machines. The user exists on all of them.
        sshd: Path of sshd, which `find_sshd` has returned before the room was opened.
        desk: The machine where the user types.
        user: Name of the user there and on the others.
        machines: The machines that get an sshd.
        logs: Folder for the logs of sshd.
    """
    home = f"/home/{user}"
    public = room.bash(_MAKE_KEY, desk, user, home).strip()
    known, servers = [], {}
    for name in machines:
        room.bash(_LET_IN, name, env={"home": home, "user": user, "public": public})
        host_key = room.read(f"{_HOST_KEY}.pub", name).split()[:2]
        known.append(f"{name},{room.addresses[name]} {' '.join(host_key)}\n")
        log = logs / f"sshd-{name}.log"
        servers[name] = room.popen(_server(sshd, room.addresses[name]), name, log=log), log
    room.write("/etc/ssh/ssh_known_hosts", "".join(known), desk)
    deadline = time.monotonic() + PATIENCE
    for name, (server, log) in servers.items():
        login = ["ssh", "-o", "ConnectTimeout=5", "-o", "BatchMode=yes", name, "true"]
        while (trial := room.popen(login, desk, user)).wait():
            ended = server.poll() is not None or time.monotonic() > deadline
            assert not ended, f"ssh to {name} fails: {trial.communicate()[0]}{log.read_text()[-2000:]}"
            time.sleep(_LOOK_SECONDS)


def _server(sshd: str, address: str) -> list[str]:
    """Return the command of an sshd that knows keys only."""
    options = {
        "ListenAddress": address,
        "HostKey": _HOST_KEY,
        "AuthorizedKeysFile": ".ssh/authorized_keys",
        "PasswordAuthentication": "no",
        "UsePAM": "no",
        "PidFile": "none",
    }
    given = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    return [sshd, "-f", "/dev/null", "-D", "-e", *given]
