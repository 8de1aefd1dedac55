"""A package index of real wheels: the files of installed packages, packed again.

Unlike the stubs of `package_index`, these install without anything of the test's environment. torch's headers
and test programs, and the tests of three other packages, are left out: a third of the size, and of the files
half. An index lists the SHA-256 and the metadata of each wheel, as PyPI does.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import html
import importlib.metadata as metadata
import re
import shutil
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from package_index import required_names

_LEFT_OUT = re.compile(
    r"torch/(include/|test/|share/|bin/(?!torch_shm_manager$))|(networkx|scipy|sympy)/(.*/)?tests/"
)
_NOT_OF_A_WHEEL = ("INSTALLER", "REQUESTED", "direct_url.json", "RECORD.jws", "RECORD.p7s")
# An index takes no wheel of plain Linux.
_PLAIN, _MANY = "linux_x86_64", "manylinux_2_28_x86_64"
_FIXED_TIME = (2020, 1, 1, 0, 0, 0)


@contextmanager
def index_of_installed(folder: Path, names: Iterable[str]) -> Iterator[Path]:
    """Yield a folder whose `simple/` is an index of these installed packages and all that they need.

    Processes that give the same folder share one index. The last of them removes it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    index = folder / "index"
    with _users(folder, +1) as users:
        if users == 1:
            shutil.rmtree(index, ignore_errors=True)
            for distribution in _closure(names):
                _add(index / "simple", distribution)
    try:
        yield index
    finally:
        with _users(folder, -1) as users:
            if users == 0:
                shutil.rmtree(index)


@contextmanager
def _users(folder: Path, more: int) -> Iterator[int]:
    """Count the users of a folder; yield their number while no other process counts."""
    with (folder / "users").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        users = int(file.read() or 0) + more
        file.truncate(0)
        file.write(str(users))
        yield users


def spoil(index: Path, target: Path, name: str) -> Path:
    """Return an index like another one, where the wheel of one package has been exchanged."""
    shutil.copytree(index, target, copy_function=lambda given, new: Path(new).symlink_to(given))
    project = target / "simple" / name
    (wheel,) = project.glob("*.whl")
    content = wheel.read_bytes() + b"more"
    wheel.unlink()
    wheel.write_bytes(content)
    _write_page(project)
    return target


def _closure(names: Iterable[str]) -> list[metadata.Distribution]:
    found: dict[str, metadata.Distribution] = {}
    left = list(names)
    while left:
        name = _normal(left.pop())
        if name not in found:
            found[name] = metadata.distribution(name)
            left += required_names(name)
    return list(found.values())


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _add(simple: Path, distribution: metadata.Distribution) -> None:
    """Write the wheel, its metadata and the page of an installed package."""
    name = distribution.metadata["Name"]
    project = simple / _normal(name)
    project.mkdir(parents=True)
    described = (distribution.read_text("WHEEL") or "").replace(_PLAIN, _MANY)
    tags = [line.partition(":")[2].strip().split("-") for line in described.splitlines() if "Tag:" in line]
    parts = (".".join(sorted(set(part))) for part in zip(*tags, strict=True))
    stem = f"{re.sub(r'[-_.]+', '_', name)}-{_public(distribution)}"
    path = project / f"{stem}-{'-'.join(parts)}.whl"
    _pack(path, distribution, described)
    path.with_name(path.name + ".metadata").write_text(_metadata(distribution))
    _write_page(project)


def _public(distribution: metadata.Distribution) -> str:
    """Return the version without what is behind a plus sign, which no public index has."""
    return distribution.version.partition("+")[0]


def _metadata(distribution: metadata.Distribution) -> str:
    text = distribution.read_text("METADATA") or ""
    return text.replace(f"\nVersion: {distribution.version}\n", f"\nVersion: {_public(distribution)}\n", 1)


def _pack(path: Path, distribution: metadata.Distribution, described: str) -> None:
    """Write a wheel of the installed files without compression, which would take a minute."""
    rows = []
    with zipfile.ZipFile(path, "w") as wheel:
        for file in distribution.files or ():
            name = file.as_posix()
            if name.startswith("..") or file.suffix == ".pyc" or file.name in _NOT_OF_A_WHEEL:
                continue
            if _LEFT_OUT.match(name):
                continue
            # setuptools has the metadata of others further below
            top, _, described_by = name.partition("/")
            own = described_by if top.endswith(".dist-info") else ""
            if own:
                name = f"{top.replace(distribution.version, _public(distribution))}/{own}"
            if own == "RECORD":
                record = name
                continue
            place = Path(str(distribution.locate_file(file)))
            texts = {"WHEEL": described, "METADATA": _metadata(distribution)}
            data = texts[own].encode() if own in texts else place.read_bytes()
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            rows.append(f"{name},sha256={digest},{len(data)}")
            member = zipfile.ZipInfo(name, _FIXED_TIME)
            member.external_attr = place.stat().st_mode << 16
            wheel.writestr(member, data)
        wheel.writestr(zipfile.ZipInfo(record, _FIXED_TIME), "\n".join([*rows, f"{record},,", ""]))


def _write_page(project: Path) -> None:
    """Write the page of a package, with the SHA-256 of its wheels and of their metadata."""
    links = []
    for wheel in sorted(project.glob("*.whl")):
        digest = _sha256(wheel)
        described = _sha256(wheel.with_name(wheel.name + ".metadata"))
        address = wheel.name.replace("+", "%2B")
        links.append(
            f'<a href="{address}#sha256={digest}" data-core-metadata="sha256={described}"'
            f' data-dist-info-metadata="sha256={described}">{html.escape(wheel.name)}</a><br>'
        )
    page = project / "index.html"
    page.unlink(missing_ok=True)
    page.write_text("<!DOCTYPE html><html><body>\n" + "\n".join(links) + "\n</body></html>\n")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
