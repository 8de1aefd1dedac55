"""An sshd on machines of a `Room`, and a person at a desk who logs in there without a password."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from machines import PATIENCE, Room
from ssh_nodes import NoSshError, find_sshd

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


def open_ssh(room: Room, desk: str, user: str, machines: Sequence[str], logs: Path) -> None:
    """Have a user of a machine log in on others by `ssh NAME`, and wait until that works.

    Args:
        room: The machines. The user exists on all of them.
        desk: The machine where the user types.
        user: Name of the user there and on the others.
        machines: The machines that get an sshd.
        logs: Folder for the logs of sshd.

    Raises:
        NoSshError: there is no sshd here, or a login fails.
    """
    sshd = find_sshd()
    home = f"/home/{user}"
    public = room.bash(_MAKE_KEY, desk, user, home).strip()
    known = []
    for name in machines:
        room.bash(_LET_IN, name, env={"home": home, "user": user, "public": public})
        host_key = room.read(f"{_HOST_KEY}.pub", name).split()[:2]
        known.append(f"{name},{room.addresses[name]} {' '.join(host_key)}\n")
        room.popen(_server(sshd, room.addresses[name]), name, log=logs / f"sshd-{name}.log")
    room.write("/etc/ssh/ssh_known_hosts", "".join(known), desk)
    deadline = time.monotonic() + PATIENCE
    for name in machines:
        while room.popen(["ssh", "-o", "ConnectTimeout=5", name, "true"], desk, user).wait():
            if time.monotonic() > deadline:
                raise NoSshError(f"ssh to {name} fails: see {logs}/sshd-{name}.log")
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
