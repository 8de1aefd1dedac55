"""Say which program this is: its version, and a digest of its files.

Two builds may have the same version number and different content. So what nodes compare has the digest.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from adaptdl_elastic import __version__

_PACKAGES = ("adaptdl_elastic.agent", "adaptdl_elastic.autoscaler", "adaptdl_elastic.rendezvous")
_SUFFIXES = (".py", ".typed", ".jinja", ".yaml", ".css", ".html", ".js", ".svg")


def files() -> dict[str, Path]:
    """Return the files of this program by their path in a wheel; in a checkout three packages lie apart."""
    folders = {"adaptdl_elastic": Path(__file__).parent}
    for package in _PACKAGES:
        spec = find_spec(package)
        if spec is not None and spec.origin is not None:
            folders[package.replace(".", "/")] = Path(spec.origin).parent
    return {
        f"{name}/{path.relative_to(folder).as_posix()}": path
        for name, folder in folders.items()
        for path in folder.rglob("*")
        if path.suffix in _SUFFIXES and path.is_file()
    }


@cache
def version() -> str:
    """Return the version number and, behind a plus, a digest of the files' content."""
    digest = hashlib.sha256()
    for name, path in sorted(files().items()):
        content = path.read_bytes()
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return f"{__version__}+{digest.hexdigest()[:8]}"
