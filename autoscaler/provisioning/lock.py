"""Pack this program and the exact files that it is installed from, for machines that a cloud starts.

Machines in a cloud install as root. If an index resolved a package's name at that time, any person who
publishes under the name could run code there. So the user's machine builds the wheel, resolves what it needs
once, and writes lock files: each line has a version and the SHA-256 of the file. `pip install
--require-hashes` takes nothing else.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.metadata as metadata
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adaptdl_elastic.autoscaler.provisioning import wheel
from adaptdl_elastic.autoscaler.provisioning.ssh import ProvisionError

HEAD, NODE = "head.txt", "node.txt"
"""Lock files of a package: without torch for the head, with it for nodes."""

PYTHON = "3.12"  # of Ubuntu 24.04, the machines' image
_GLIBC = (39, 38, 35, 34, 31, 28, 27, 26, 24, 17)  # minor versions whose wheels run there
_ONLY_SOURCE = ("python-etcd",)  # an index has no wheels of these; they are pure Python
_ON_NODES_ONLY = "torch"
_PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet")


def pack(target: Path, python: str = PYTHON) -> None:
    """Write a package: this program's wheel, wheels that no index has, lock files for head and nodes.

    Args:
        target: The .tar.gz file to write.
        python: The machines' version of Python, such as 3.12; Linux on x86-64.

    Raises:
        ProvisionError: pip finds no files for such machines; the message has its reason.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        own = wheel.own_wheel(folder)
        constraints = folder / "constraints.txt"
        constraints.write_text(wheel.constraints())
        _pip("wheel", "--no-deps", "-w", folder, "-c", constraints, *_ONLY_SOURCE)
        shipped = sorted(folder.glob("*.whl"))
        for lock, wanted in ((HEAD, _needs()), (NODE, [*_needs(), _ON_NODES_ONLY])):
            report = folder / "report.json"
            _pip(*_resolution(python, folder, constraints, report), *wanted)
            (folder / lock).write_text(locked(json.loads(report.read_text()), own, shipped))
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


def _needs() -> list[str]:
    """Return what this program requires, without torch."""
    found = [line for line in metadata.requires("adaptdl-elastic") or () if "extra ==" not in line]
    return [line for line in found if not re.match(rf"{_ON_NODES_ONLY}\b", line)]


def _resolution(python: str, folder: Path, constraints: Path, report: Path) -> list[Any]:
    """Return pip's arguments to resolve for the machines without an installation."""
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in _GLIBC]
    options: list[Any] = ["install", "--dry-run", "--ignore-installed", "--target", folder / "none"]
    options += ["--report", report, "--only-binary=:all:", "--python-version", python]
    for platform in (*platforms, "manylinux2014_x86_64", "linux_x86_64"):
        options += ["--platform", platform]
    return [*options, "--find-links", folder, "-c", constraints]


def _pip(*arguments: object) -> None:
    command = [sys.executable, *_PIP, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
        said = (errors or done.stderr.strip().splitlines() or ["pip says nothing"])[0]
        raise ProvisionError(f"no lock file can be made: {said.removeprefix('ERROR: ')}")


def locked(report: dict[str, Any], own: Path, shipped: Sequence[Path]) -> str:
    """Return a lock file.

    Args:
        report: What `pip install --report` wrote.
        own: This program's wheel.
        shipped: Wheels beside the lock file; the others come from an index.

    Raises:
        ProvisionError: pip gave no SHA-256 of a file.
    """
    lines = [_line(own)]
    for item in report["install"]:
        url = str(item["download_info"]["url"])
        beside = [path for path in shipped if url.startswith("file:") and url.endswith(f"/{path.name}")]
        if beside:
            lines.append(_line(beside[0]))
            continue
        name, version = item["metadata"]["name"], item["metadata"]["version"]
        digest = item["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256")
        if digest is None:
            raise ProvisionError(f"no lock file can be made: the index has no SHA-256 of {name} {version}")
        lines.append(f"{name}=={version} --hash=sha256:{digest}")
    return "\n".join(sorted(lines)) + "\n"


def _line(path: Path) -> str:
    return f"./{path.name} --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


def _of_nobody(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Remove owner and time from a member, so that the same files make the same package."""
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member
