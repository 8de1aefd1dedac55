"""The wheel of the installed adaptdl-elastic, which `cluster up` ships to nodes."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata as metadata
import os
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import adaptdl_elastic
from adaptdl_elastic import _own_python
from adaptdl_elastic.autoscaler.provisioning.ssh import ProvisionError

_PACKAGE = "adaptdl-elastic"
_FOLDERS = ("adaptdl_elastic", "agent", "rendezvous", "autoscaler")
_SOURCES = ("setup.cfg", "pyproject.toml", "README.md", "LICENSE", *_FOLDERS)


def own_wheel(folder: Path) -> Path:
    """Make a wheel of this very program in a folder: of its checkout, or of its installed files.

    Raises:
        ProvisionError: it cannot be made.
    """
    checkout = Path(adaptdl_elastic.__file__).resolve().parents[1]
    if (checkout / "setup.cfg").is_file() and (checkout / "pyproject.toml").is_file():
        return _of_checkout(checkout, folder)
    return _of_installation(folder)


def _of_checkout(checkout: Path, folder: Path) -> Path:
    build(folder, str(copy_sources(checkout, folder / "checkout")), str(checkout))
    return max(folder.glob("*.whl"))


def build(folder: Path, source: str, name: str = "") -> None:
    """Build a wheel in a folder; the same sources make the same wheel.

    Args:
        folder: Where the wheel is written.
        source: What pip makes it of: a directory or a requirement.
        name: What an error names instead of the source.

    Raises:
        ProvisionError: pip cannot build it.
    """
    command = _own_python.module("pip", "wheel", "-q", "--disable-pip-version-check", "--no-deps")
    # a wheel in pip's cache may have another time
    command += ["--no-cache-dir", "-w", str(folder), source]
    environment = {"SOURCE_DATE_EPOCH": "1577836800", **os.environ}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["pip says nothing"]
        errors = [line for line in lines if line.startswith("ERROR:")] or lines[-1:]
        raise ProvisionError(f"no wheel can be made of {name or source}: {errors[0].removeprefix('ERROR: ')}")


def copy_sources(checkout: Path, target: Path) -> Path:
    """Copy what the wheel is made of.

    The build writes into the directory that it builds: in the checkout two builds at a time would mix.
    """
    target.mkdir()
    for name in _SOURCES:
        source = checkout / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, target / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy2(source, target / name)
    return target


def _of_installation(folder: Path) -> Path:
    """Pack the installed files again; scripts and compiled files are made by the installation there."""
    distribution = metadata.distribution(_PACKAGE)
    path = folder / f"{_PACKAGE.replace('-', '_')}-{distribution.version}-py3-none-any.whl"
    rows = []
    record = ""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for file in sorted(distribution.files or ()):
            name = file.as_posix()
            if (
                name.startswith("..")
                or file.suffix == ".pyc"
                or file.name in ("INSTALLER", "direct_url.json")
            ):
                continue
            if file.name == "RECORD":
                record = name
                continue
            data = file.read_binary()
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            rows.append(f"{name},sha256={digest},{len(data)}")
            # a fixed time: the same files make the same wheel
            wheel.writestr(zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0)), data)
        if not record:
            raise ProvisionError(f"the installation of {_PACKAGE} lists no files: install it from a wheel")
        wheel.writestr(zipfile.ZipInfo(record, (2020, 1, 1, 0, 0, 0)), "\n".join([*rows, f"{record},,", ""]))
    return path


def constraints() -> str:
    """Return pip constraints by which nodes get the versions of this environment."""
    lines = []
    for requirement in metadata.requires(_PACKAGE) or ():
        name = re.match(r"[\w.-]+", requirement)
        if name is None or "extra ==" in requirement:
            continue
        try:
            version = metadata.version(name[0])
        except metadata.PackageNotFoundError:
            continue
        lines.append(f"{name[0]}=={version.partition('+')[0]}")  # builds for CPU and GPU differ behind the +
    return "\n".join(sorted(lines)) + "\n"
