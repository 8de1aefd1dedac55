"""Make the environment with the packages that a job names, once for a node and a content.

It lies over the environment of the program, so that torch and what else is there already is shared. pip
installs only what is missing or has another version there.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adaptdl_elastic import _own_python
from adaptdl_elastic.agent.service.archives import inside
from adaptdl_elastic.rendezvous.services.service_config import ServiceDirectory

INSTALL_SECONDS = 3600.0
"""Most seconds that an installation may take."""

_DEPENDENCIES = """
import sys, tomllib
with open(sys.argv[1], "rb") as file:
    print(*tomllib.load(file).get("project", {}).get("dependencies", []), sep="\\n")
"""

_installing = threading.Lock()


class PackagesError(Exception):
    """The packages of a job cannot be installed; the message has the installer's words."""


def python_with(directory: ServiceDirectory, work: Path, named: str, content: str, python: str) -> str:
    """Return an interpreter that has the packages of a job; make its environment if it is not there.

    Args:
        directory: Of the service.
        work: The working directory of the job.
        named: Its file of requirements, relative to that; "": the usual ones, if there are some.
        content: Digest of the working directory, to which requirements may lead.
        python: The interpreter below, which is returned if the job names no packages.

    Raises:
        PackagesError: they cannot be installed.
        BlobError: the file is outside of the working directory.
    """
    text = _requirements(work, named, python)
    lines = [line for line in map(str.strip, text.splitlines()) if line and not line.startswith("#")]
    if not lines:
        return python
    # options and paths may lead to other files
    beside = content if any(line[0] in "-./" or "@" in line for line in lines) else ""
    digest = hashlib.sha256("\0".join([python, beside, *lines]).encode()).hexdigest()
    where = directory.environments / f"job-{digest[:16]}"
    made, own = where / "made", str(where / "bin" / "python")
    with _installing:
        if not made.exists():
            _run(_own_python.code(_own_python.LAYER, str(where), python=python), work)
            _install(own, lines, work)
            made.write_text(f"packages {digest}")
    return own


def _install(python: str, lines: Sequence[str], work: Path) -> None:
    """Install requirements into an environment; paths in them are relative to the working directory."""
    if (uv := shutil.which("uv")) is not None and not _has_pip(python):
        _run([uv, "pip", "install", "-q", "-p", python, "pip"], work)
    with tempfile.NamedTemporaryFile("w", dir=work, prefix=".requirements-", suffix=".txt") as file:
        file.write("\n".join(lines))
        file.flush()
        options = "install", "-q", "--disable-pip-version-check", "--no-input", "-r", file.name
        _run(_own_python.module("pip", *options, python=python), work)


def _has_pip(python: str) -> bool:
    command = _own_python.code("import pip", python=python)
    asked = subprocess.run(command, capture_output=True, check=False)
    return asked.returncode == 0


def _requirements(work: Path, named: str, python: str) -> str:
    """Return what is to be installed, as pip reads it; "": nothing."""
    if named:
        return (work / inside(named)).read_text()
    for name in ("requirements.txt", "uv.lock", "pyproject.toml"):
        path = work / name
        if not path.is_file():
            continue
        if name == "requirements.txt":
            return path.read_text()
        if name == "pyproject.toml":
            return _run(_own_python.code(_DEPENDENCIES, str(path), python=python), work).strip()
        if (uv := shutil.which("uv")) is None:
            raise PackagesError("uv.lock needs uv on this node")
        return _run([uv, "export", "-q", "--frozen", "--no-emit-project", "--no-hashes"], work)
    return ""


def _run(command: Sequence[str], work: Path) -> str:
    """Run a command in a job's directory and return its output; PackagesError with what it says else."""
    options: dict[str, Any] = {"cwd": work, "stdin": subprocess.DEVNULL, "timeout": INSTALL_SECONDS}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    except subprocess.TimeoutExpired:
        raise PackagesError(f"its packages were not installed within {INSTALL_SECONDS:g} s") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["the installer says nothing"]
        errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")] or lines[-1:]
        raise PackagesError(f"its packages cannot be installed: {'; '.join(errors[:3])}")
    return str(done.stdout)
