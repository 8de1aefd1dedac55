"""Make the environment with the packages that a job names, once for a node and a content.

It lies over the environment of the program, so that torch and what else is there already is shared. pip
installs only what is missing or has another version there.

Each attempt has a directory of its own: what a service that was stopped has left half made, and an installer
that outlived it, disturb nobody. `environments.sweep` removes it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from adaptdl_elastic import _own_python
from adaptdl_elastic.agent.service.archives import inside
from adaptdl_elastic.rendezvous.services.service_config import ServiceDirectory

INSTALL_SECONDS = 3600.0
"""Most seconds that an installation may take."""

NOTHING = "none"
"""The name of a file of requirements that stands for no packages."""

_DEPENDENCIES = """
import sys
try:
    import tomllib
except ImportError:
    from pip._vendor import tomli as tomllib
with open(sys.argv[1], "rb") as file:
    print(*tomllib.load(file).get("project", {}).get("dependencies", []), sep="\\n")
"""
# Fails unless the interpreter at argv[1] has the version of the one that runs this.
_SAME_VERSION = """
import subprocess, sys
code = "import sys; print(*sys.version_info[:2])"
asked = subprocess.run([sys.argv[1], "-c", code], capture_output=True, text=True)
if (theirs := asked.stdout.split()) != (mine := [str(part) for part in sys.version_info[:2]]):
    sys.exit(f"it is Python {'.'.join(theirs)}, and adaptdl-elastic has {'.'.join(mine)} on this node")
"""
# requirements that lead to no other file
_PLAIN = re.compile(r"\s*([A-Za-z0-9][\w.-]*(\[[\w, .-]*\])?\s*[^/@]*)?(#.*)?")

_installing: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)


class PackagesError(Exception):
    """The packages of a job cannot be installed; the message has the installer's words."""


def python_with(
    directory: ServiceDirectory,
    work: Path,
    named: str,
    content: str,
    python: str,
    environ: Mapping[str, str] = os.environ,
    base: str = "",
) -> str:
    """Return an interpreter that has the packages of a job; make its environment if it is not there.

    Args:
        directory: Of the service.
        work: The working directory of the job.
        named: Its file of requirements, relative to that; "": the usual ones, if there are some; `NOTHING`.
        content: Digest of the working directory, to which requirements may lead.
        python: The interpreter below, which is returned if the job names no packages.
        environ: The variables of the job.
        base: An interpreter of the same version whose packages come before those of `python`; "": none.

    Raises:
        PackagesError: they cannot be installed.
        BlobError: the file is outside of the working directory.
    """
    run = _Installer(work, environ)
    text, file = run.requirements(named, python)
    lines = text.decode(errors="replace").splitlines()
    if not base and not any(line.strip() and not line.lstrip().startswith("#") for line in lines):
        return python
    beside = "" if all(_PLAIN.fullmatch(line) and not _is_archive(line) for line in lines) else content
    digest = hashlib.sha256(b"\0".join([python.encode(), base.encode(), beside.encode(), text])).hexdigest()
    note = f"packages {digest}"
    with _installing[digest]:
        if (found := _made(directory, note)) is None:
            directory.environments.mkdir(parents=True, exist_ok=True)
            found = Path(tempfile.mkdtemp(prefix=f"job-{digest[:12]}-", dir=directory.environments))
            try:
                run.install(found, text, file, python, base)
                (found / "made").write_text(note)
            except BaseException:
                shutil.rmtree(found, ignore_errors=True)
                raise
    return str(found / "bin" / "python")


def _made(directory: ServiceDirectory, note: str) -> Path | None:
    for made in directory.environments.glob("job-*/made"):
        with contextlib.suppress(OSError):
            if made.read_text() == note:
                os.utime(made)  # the sweep takes it for fresh
                return made.parent
    return None


def _is_archive(line: str) -> bool:
    return line.split("#")[0].strip().endswith((".whl", ".gz", ".zip"))


class _Installer:
    """Runs installers in a job's directory, with the job's variables."""

    def __init__(self, work: Path, environ: Mapping[str, str]) -> None:
        self._work, self._environ = work, environ

    def requirements(self, named: str, python: str) -> tuple[bytes, Path | None]:
        """Return what is to be installed, and the file that says so; None: another kind of file does."""
        if named == NOTHING:
            return b"", None
        path = self._work / (inside(named) if named else "requirements.txt")
        if named or path.is_file():
            try:
                return path.read_bytes(), path
            except OSError as error:
                raise PackagesError(f"--requirements {named}: {error.strerror}") from None
        uv = shutil.which("uv")
        if uv is not None and (self._work / "uv.lock").is_file():
            command = [uv, "export", "-q", "--frozen", "--no-dev", "--no-emit-project", "--no-hashes"]
            return self.run(command), None
        if (path := self._work / "pyproject.toml").is_file():
            return self.run(_own_python.code(_DEPENDENCIES, str(path), python=python)).strip(), None
        return b"", None

    def install(self, where: Path, text: bytes, file: Path | None, python: str, base: str) -> None:
        """Make an environment over those of one or two interpreters, and install requirements into it."""
        self.run(_own_python.code(_own_python.LAYER, str(where), python=base or python))
        own = str(where / "bin" / "python")
        if base:
            self.run(_own_python.code(_SAME_VERSION, own, python=python))
            self.run(_own_python.code(_own_python.BELOW, str(where), python=python))
        if file is None:
            file = where / "requirements.txt"
            file.write_bytes(text)
        try:
            self.run(_own_python.code("import pip", python=own))
        except PackagesError:
            # uv made the environment below
            self.run([shutil.which("uv") or "uv", "pip", "install", "-q", "-p", own, "pip"])
        options = "install", "-q", "--disable-pip-version-check", "--no-input", "-r", str(file)
        self.run(_own_python.module("pip", *options, python=own))
        if any(where.glob("lib/python*/site-packages/torch")):  # another one than the program's
            self.run(_own_python.code("import adaptdl_elastic.torch", python=own))

    def run(self, command: Sequence[str]) -> bytes:
        """Run a command and return its output; PackagesError with what it says if it fails."""
        with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as out:
            try:
                child = subprocess.Popen(
                    command,
                    cwd=self._work,
                    env=dict(self._environ),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=said,
                    start_new_session=True,
                )
                code = child.wait(INSTALL_SECONDS)
            except OSError as error:
                raise PackagesError(
                    f"its packages cannot be installed: {command[0]}: {error.strerror}"
                ) from None
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
                raise PackagesError(f"its packages were not installed within {INSTALL_SECONDS:g} s") from None
            said.seek(0)
            out.seek(0)
            text, lines = out.read(), said.read().decode(errors="replace").splitlines()
        if code:
            lines = [line.strip() for line in lines if line.strip()] or ["the installer says nothing"]
            errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")]
            raise PackagesError(f"its packages cannot be installed: {'; '.join((errors or lines[-1:])[:3])}")
        return text
