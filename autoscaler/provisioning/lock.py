"""Pack this program and the exact files that it is installed from, for machines that a cloud starts.

Machines in a cloud install as root. If an index resolved a package's name at that time, any person who
publishes under the name could run code there. So the user's machine builds the wheel, lets uv resolve once
what the machines need, and writes lock files: each line has a version and the SHA-256 of its files. `pip
install --require-hashes` takes nothing else. uv resolves for the machines' platform, whatever machine it runs
on.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.metadata as metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path

from adaptdl_elastic import _own_python
from adaptdl_elastic.autoscaler.provisioning import wheel
from adaptdl_elastic.autoscaler.provisioning.ssh import ProvisionError

HEAD, NODE = "head.txt", "node.txt"
"""Lock files of a package: without torch for the head, with it for nodes."""

PYTHON = "3.12"  # of Ubuntu 24.04, the machines' image
_PLATFORM = "x86_64-manylinux_2_39"  # of the same
_ONLY_SOURCE = "python-etcd"  # an index has no wheel of it; it is pure Python
_ON_NODES_ONLY = "torch"
_INDEXES = {"index-url": "UV_INDEX_URL", "extra-index-url": "UV_EXTRA_INDEX_URL"}  # pip's names and uv's


def pack(target: Path, python: str = PYTHON) -> None:
    """Write a package: this program's wheel, wheels that no index has, lock files for head and nodes.

    Args:
        target: The .tar.gz file to write.
        python: The machines' version of Python, such as 3.12; Linux on x86-64.

    Raises:
        ProvisionError: uv is missing, or finds no files for such machines; the message has its reason.
    """
    needs = [line for line in metadata.requires("adaptdl-elastic") or () if "extra ==" not in line]
    without = [line for line in needs if not re.match(rf"{_ON_NODES_ONLY}\b", line)]
    compiler = [*_uv(), "--python-version", python]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel.own_wheel(folder)
        (folder / "constraints.txt").write_text(wheel.constraints())
        _build(folder, f"{_ONLY_SOURCE}=={metadata.version(_ONLY_SOURCE)}")
        shipped = sorted(folder.glob("*.whl"))
        for lock, wanted in ((HEAD, without), (NODE, needs)):
            (folder / lock).write_text(locked(shipped, _resolve(compiler, wanted, folder)))
        packed = folder / "package"
        with (
            packed.open("wb") as file,
            # the same files make the same package: without a name and a time
            gzip.GzipFile("", "wb", fileobj=file, mtime=0) as compressed,
            tarfile.open(fileobj=compressed, mode="w") as package,
        ):
            for path in (*shipped, folder / HEAD, folder / NODE):
                package.add(path, path.name, filter=_of_nobody)
        shutil.move(packed, target)


def _build(folder: Path, requirement: str) -> None:
    """Build the wheel of a package that an index has as sources only; the same sources make the same wheel.

    Raises:
        ProvisionError: pip cannot build it.
    """
    command = _own_python.module("pip", "wheel", "-q", "--disable-pip-version-check", "--no-deps")
    # a wheel in pip's cache may have another time
    command += ["--no-cache-dir", "-w", str(folder), requirement]
    environment = {"SOURCE_DATE_EPOCH": "1577836800", **os.environ}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["pip says nothing"]
        errors = [line for line in lines if line.startswith("ERROR:")] or lines[-1:]
        raise ProvisionError(f"no wheel can be made of {requirement}: {errors[0].removeprefix('ERROR: ')}")


def locked(beside: Iterable[Path], others: str = "") -> str:
    """Return a lock file, which forbids pip to build anything.

    Args:
        beside: Wheels beside the lock file.
        others: Lines of files that come from an index.
    """
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in beside}
    lines = [f"./{name} --hash=sha256:{digest}\n" for name, digest in sorted(digests.items())]
    return "".join(["--only-binary=:all:\n", *lines, others])


def _uv() -> list[str]:
    """Return the command of uv that writes a lock file, but for its requirements."""
    installed = importlib.util.find_spec("uv") is not None
    program = _own_python.module("uv") if installed else [shutil.which("uv") or ""]
    if not program[0]:
        raise ProvisionError("no lock file can be made without uv: pip install uv")
    options = "--quiet --no-header --no-annotate --generate-hashes --only-binary=:all: --find-links=."
    # the wheel of python-etcd is beside the lock file, and has a line of its own
    options += f" --no-emit-package={_ONLY_SOURCE} --python-platform={_PLATFORM} -c constraints.txt"
    return [*program, "pip", "compile", *options.split(), "--python", sys.executable, "needs.txt"]


def _resolve(compiler: list[str], wanted: Iterable[str], folder: Path) -> str:
    """Return the lines of a lock file of all that these requirements need from an index.

    uv runs in the folder, which has the constraints and the wheels: a project's settings do not count there.
    """
    (folder / "needs.txt").write_text("\n".join(wanted))
    # without the second uv does not trust the certificates that pip and the system do
    environment = {**indexes(), "UV_NATIVE_TLS": "1", **os.environ}
    done = subprocess.run(compiler, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ProvisionError(f"no lock file can be made: {in_one_line(done.stderr) or 'uv says nothing'}")
    if own := re.search(r"^\S+==\S+\+\S+", done.stdout, re.MULTILINE):
        where = (
            "is on no index but one of your own, and machines ask PyPI: take that index out of uv's settings"
        )
        raise ProvisionError(f"{own[0]} {where}")
    return done.stdout


def in_one_line(said: str) -> str:
    """Return an error of uv with its causes, which uv writes in lines or as a tree, without hints."""
    error = re.sub(r":?\n\s*(cause:|[├╰]─▶)\s*", ": ", said.strip().partition("\n\n")[0])
    return " ".join(re.sub(r"^error:|[×│]", "", error).split())


def indexes() -> dict[str, str]:
    """Return uv's variables for the indexes of pip's settings, without local ones: no machine has those."""
    command = _own_python.module("pip", "config", "list")
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    # the environment is listed before the files, and has precedence
    settings = dict(reversed(re.findall(r"^(?::env:|global)\.([\w-]+)='(.*)'$", listed, re.MULTILINE)))
    return {
        variable: " ".join(re.findall(r"https?://[^\s\\]+", settings.get(name, "")))
        for name, variable in _INDEXES.items()
    }


def _of_nobody(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Remove owner and time from a member, so that the same files make the same package."""
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member
