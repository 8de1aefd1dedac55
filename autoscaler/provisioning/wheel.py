"""The wheel of the installed adaptdl-elastic, which `cluster up` ships to nodes."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata as metadata
import re
import zipfile
from pathlib import Path

from adaptdl_elastic import _program
from adaptdl_elastic.autoscaler.provisioning.ssh import ProvisionError

_PACKAGE = "adaptdl-elastic"
_TAGS = "Wheel-Version: 1.0\nGenerator: adaptdl-elastic\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def own_wheel(folder: Path) -> Path:
    """Write a wheel of this very program, of its checkout or its installed files, into a folder.

    The same files make the same wheel.

    Raises:
        ProvisionError: the program is not installed.
    """
    try:
        distribution = metadata.distribution(_PACKAGE)
    except metadata.PackageNotFoundError:
        raise ProvisionError(f"{_PACKAGE} is not installed here: pip install . in its clone") from None
    base = f"{_PACKAGE.replace('-', '_')}-{distribution.version}"
    contents = {name: path.read_bytes() for name, path in _program.files().items()}
    text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    described = {"METADATA": text, "entry_points.txt": distribution.read_text("entry_points.txt") or ""}
    for name, text in {**described, "WHEEL": _TAGS}.items():
        contents[f"{base}.dist-info/{name}"] = text.encode()
    rows = [
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}"
        for name, data in sorted(contents.items())
    ]
    record = f"{base}.dist-info/RECORD"
    contents[record] = "\n".join([*rows, f"{record},,", ""]).encode()
    path = folder / f"{base}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in sorted(contents.items()):
            wheel.writestr(zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0)), data)
    return path


def requirements() -> list[str]:
    """Return the names of the packages that this program needs."""
    lines = (line for line in metadata.requires(_PACKAGE) or () if "extra ==" not in line)
    return [found[0] for line in lines if (found := re.match(r"[\w.-]+", line))]


def constraints() -> str:
    """Return pip constraints by which nodes get the versions of this environment."""
    lines = []
    for name in requirements():
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        lines.append(f"{name}=={version.partition('+')[0]}")  # builds for CPU and GPU differ behind the +
    return "\n".join(sorted(lines)) + "\n"
