"""Lock files for machines of a cloud: what is in them, and that pip takes nothing else."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from adaptdl_elastic.autoscaler.provisioning import lock
from adaptdl_elastic.autoscaler.provisioning.ssh import ProvisionError


def resolved(name: str, version: str, url: str, digest: str | None) -> dict[str, Any]:
    """Return an entry of pip's report on an installation."""
    info = {} if digest is None else {"hashes": {"sha256": digest}}
    return {
        "metadata": {"name": name, "version": version},
        "download_info": {"url": url, "archive_info": info},
    }


@pytest.fixture
def wheels(tmp_path: Path) -> list[Path]:
    found = [tmp_path / "adaptdl_elastic-1-py3-none-any.whl", tmp_path / "python_etcd-2-py3-none-any.whl"]
    for path in found:
        path.write_text(path.name)
    return found


def test_every_file_has_its_version_and_hash(wheels: list[Path]) -> None:
    own, shipped = wheels
    beside = resolved("python-etcd", "2", f"file://{shipped}", "of no interest")
    report = {"install": [resolved("click", "8.1", "https://index/click-8.1.whl", "ab12"), beside]}
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in wheels]
    assert lock.locked(report, own, wheels).splitlines() == [
        f"./{own.name} --hash=sha256:{digests[0]}",
        f"./{shipped.name} --hash=sha256:{digests[1]}",
        "click==8.1 --hash=sha256:ab12",
    ]


def test_a_file_without_a_hash_is_refused(wheels: list[Path]) -> None:
    report = {"install": [resolved("click", "8.1", "https://index/click-8.1.whl", None)]}
    with pytest.raises(ProvisionError, match=r"no SHA-256 of click 8\.1"):
        lock.locked(report, wheels[0], wheels)
