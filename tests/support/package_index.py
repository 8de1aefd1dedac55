"""A package index on this machine: a folder of wheels in the layout of PEP 503, served over HTTP.

The wheels of installed packages can be stubs: they have the real name, version and requirements, and a `.pth`
file by which their code is found where it is installed already. So an installation takes seconds.
"""

from __future__ import annotations

import importlib.metadata as metadata
import re
import shlex
import sysconfig
import threading
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from packaging.requirements import Requirement


def stub_wheel(
    index: Path,
    name: str,
    version: str,
    requires: Sequence[str] = (),
    files: Mapping[str, str] | None = None,
    entry_points: str | None = None,
) -> Path:
    """Write a wheel with metadata, these files and entry points into an index; return its path."""
    folder = index / "simple" / re.sub(r"[-_.]+", "-", name).lower()
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{re.sub(r'[-.]+', '_', name)}-{version}"
    info = f"{stem}.dist-info"
    described = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
    described += [f"Requires-Dist: {requirement}" for requirement in requires]
    content = {
        **(files or {}),
        f"{info}/METADATA": "\n".join(described) + "\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if entry_points is not None:
        content[f"{info}/entry_points.txt"] = entry_points
    rows = "".join(f"{path},,\n" for path in [*content, f"{info}/RECORD"])
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for inside, text in {**content, f"{info}/RECORD": rows}.items():
            wheel.writestr(inside, text)
    return path


def stubs_of_installed(index: Path, roots: Sequence[str], code: str) -> None:
    """Write stubs of installed packages, and of all that they need, into an index.

    Args:
        index: The index.
        roots: Names of the packages.
        code: Folder where the code of all of them is, without their metadata, where they are installed from
            the index; `link_code` puts it there.
    """
    seen: set[str] = set()
    left = list(roots)
    while left:
        name = left.pop()
        if name in seen:
            continue
        seen.add(name)
        installed = metadata.distribution(name)
        requires = [text for text in installed.requires or () if _applies(text)]
        files = {f"{re.sub(r'[-.]+', '_', name)}_elsewhere.pth": f"{code}\n"}
        stub_wheel(index, name, installed.version, requires, files, installed.read_text("entry_points.txt"))
        left += [Requirement(text).name for text in requires]


def link_code(code: str, hidden: Sequence[str]) -> str:
    """Return the shell that makes a folder with the code of all installed packages, but no metadata.

    Args:
        code: The folder.
        hidden: Patterns of names that are left out.
    """
    links = [f"mkdir -p {code}", "shopt -s extglob nullglob"]
    for place in dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))):
        without = "|".join(("*.dist-info", "*.egg-info", "*.pth", "__editable__*", "__pycache__", *hidden))
        links.append(f"ln -s {shlex.quote(place)}/!({without}) {code}/")
    return "\n".join(links)


def required_names(name: str) -> list[str]:
    """Return the names of the packages that an installed package needs."""
    return [Requirement(text).name for text in metadata.requires(name) or () if _applies(text)]


def _applies(text: str) -> bool:
    marker = Requirement(text).marker
    return marker is None or marker.evaluate({"extra": ""})


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def served(index: Path) -> Iterator[str]:
    """Serve an index on loopback, and yield the address for `--index-url`."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(index))) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/simple"
        finally:
            server.shutdown()
            thread.join()
